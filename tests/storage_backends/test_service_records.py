"""Records of namespaces in Redis and S3: apart from objects, optional, and who bounds the store."""

import asyncio

import pytest
import s3_servers
from redis_under_test import ACL_RULES, opened, running

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.storage import MAX_RECORDS, WriteOutcome
from vllm_hicache.storage_backends.conformance import (
    NAMESPACE,
    OTHER_NAMESPACE,
    assert_reads_back,
    object_write,
)
from vllm_hicache.storage_backends.registry import open_backend

pytestmark = pytest.mark.services

PASSWORD = "swordfish"
RECORD = b'{"page_size":64}'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("records") / "server") as server:
        yield server


@pytest.fixture(autouse=True)
def empty(server, monkeypatch):
    server.run("FLUSHALL")
    for name, value in s3_servers.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


async def test_records_of_redis_are_one_hash_beside_the_objects(server):
    async with opened(server.url) as backend:
        await backend.write_record(NAMESPACE, RECORD)
        assert server.run("KEYS", "*") == [b"hicache:namespaces"]
        await backend.clear(NAMESPACE)
        assert server.run("KEYS", "*") == []


async def test_no_more_than_so_many_records_stay_in_redis(server):
    async with opened(server.url) as backend:
        for number in range(MAX_RECORDS + 3):
            await backend.write_record(f"hc1-{number:016x}", RECORD)
    assert server.run("HLEN", "hicache:namespaces") == MAX_RECORDS


async def test_a_user_without_these_commands_works_without_records(server):
    rules = [rule for rule in ACL_RULES if not rule.startswith("+h")]
    server.run("ACL", "SETUSER", "plain", "on", f">{PASSWORD}", "~*", *rules)
    async with opened(f"redis://plain:{PASSWORD}@127.0.0.1:{server.port}") as backend:
        await backend.write([object_write(1, 100)])
        assert await backend.write_record(NAMESPACE, RECORD) is WriteOutcome.FULL
        assert await backend.read_records() == {}
        assert await backend.clear(NAMESPACE) == 1


async def test_a_record_that_nobody_renews_goes_with_its_time_to_live(server):
    async with opened(server.url, ttl_s=4) as backend:
        await backend.write_record(NAMESPACE, RECORD)
        found = {NAMESPACE: RECORD}
        for _ in range(100):
            await asyncio.sleep(0.2)
            await backend.write_record(OTHER_NAMESPACE, RECORD)
            found = await backend.read_records()
            if NAMESPACE not in found:
                break
        assert found == {OTHER_NAMESPACE: RECORD}


async def test_a_key_of_another_kind_is_left_alone(server):
    server.run("SET", "hicache:namespaces", "somebody's")
    async with opened(server.url) as backend:
        assert await backend.write_record(NAMESPACE, RECORD) is WriteOutcome.FULL
        assert await backend.read_records() == {}
        await backend.write([object_write(1, 100)])
        assert await backend.clear(NAMESPACE) == 1
    assert server.run("GET", "hicache:namespaces") == b"somebody's"


async def test_redis_tells_how_full_it_is(server):
    async with opened(server.url, ttl_s=60) as backend:
        room = await backend.room()
    assert room["used_bytes"] > 0
    assert room["maxmemory_bytes"] is None
    assert room["ttl_s"] == 60
    server.run("CONFIG", "SET", "maxmemory", "64mb")
    async with opened(server.url) as backend:
        assert (await backend.room())["maxmemory_bytes"] == 64 << 20
    server.run("CONFIG", "SET", "maxmemory", "0")


def s3_backend(url):
    config = HiCacheConfig.parse({"storage": {"url": url, "operation_timeout_s": 60}}, {}).storage
    return open_backend(config.url, config)


async def test_records_of_s3_are_listed_without_the_objects(moto_server, tmp_path):
    backend = s3_backend(moto_server.url(tmp_path))
    await backend.open()
    try:
        write = object_write(1, 100)
        await backend.write([write])
        await backend.write_record(NAMESPACE, RECORD)
        prefix = s3_servers.prefix_of(tmp_path)
        client = moto_server.client()
        strangers = (f"{prefix}/namespaces/README", f"{prefix}/namespaces/x/hc1-00.json")
        for key in strangers:
            client.put_object(Bucket=s3_servers.BUCKET, Key=key, Body=b"{}")
        assert await backend.read_records() == {NAMESPACE: RECORD}
        assert await backend.clear(OTHER_NAMESPACE) == 0
        await assert_reads_back(backend, write)
        assert await backend.clear(NAMESPACE) == 1
        listed = client.list_objects_v2(Bucket=s3_servers.BUCKET, Prefix=prefix)["Contents"]
        assert {item["Key"] for item in listed} == set(strangers)
    finally:
        await backend.close()


async def test_s3_tells_after_how_many_days_a_rule_removes_objects(moto_server, tmp_path):
    client, prefix = moto_server.client(), s3_servers.prefix_of(tmp_path)
    backend = s3_backend(moto_server.url(tmp_path))
    await backend.open()
    try:
        assert await backend.room() == {"expires_after_days": "never"}
        rules = [
            {"ID": "other", "Filter": {"Prefix": "other/"}, "Expiration": {"Days": 1}},
            {"ID": "ours", "Filter": {"Prefix": f"{prefix}/"}, "Expiration": {"Days": 30}},
            {"ID": "off", "Filter": {"Prefix": ""}, "Expiration": {"Days": 2}},
        ]
        states = ("Enabled", "Enabled", "Disabled")
        client.put_bucket_lifecycle_configuration(
            Bucket=s3_servers.BUCKET,
            LifecycleConfiguration={
                "Rules": [
                    {**rule, "Status": state} for rule, state in zip(rules, states, strict=True)
                ]
            },
        )
        assert await backend.room() == {"expires_after_days": 30}
    finally:
        client.delete_bucket_lifecycle(Bucket=s3_servers.BUCKET)
        await backend.close()
