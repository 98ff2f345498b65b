"""A Redis cluster: slots that move, servers that go, and URLs that say the wrong thing."""

import asyncio

import pytest
from redis.crc import key_slot
from redis_under_test import backend_of, opened, running, running_cluster

from vllm_hicache.errors import BackendUnavailable, ConfigError
from vllm_hicache.storage import ReadOutcome, WriteOutcome
from vllm_hicache.storage_backends.conformance import (
    NAMESPACE,
    assert_reads_back,
    object_name,
    object_read,
    object_write,
)

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.fixture
def servers(cluster):
    yield cluster
    for server in cluster:
        server.run("FLUSHALL")


def slot_of(number: int) -> int:
    return key_slot(object_name(number).partition("_")[0].encode())


def url_of(server) -> str:
    return f"redis+cluster://127.0.0.1:{server.port}"


def move(servers, slot: int, target) -> None:
    """Give an empty slot to another server and tell all of them."""
    node = target.run("CLUSTER", "MYID").decode()
    for server in servers:
        server.run("CLUSTER", "SETSLOT", slot, "NODE", node)


async def test_batch_is_spread_over_all_servers(servers):
    async with opened(url_of(servers[0])) as backend:
        writes = [object_write(n, 1000) for n in range(100)]
        assert await backend.write(writes) == [WriteOutcome.STORED] * 100
        assert all(server.run("DBSIZE") > 10 for server in servers)
        await assert_reads_back(backend, *writes)
        assert await backend.clear(NAMESPACE) == 100


async def test_shards_of_a_page_are_on_one_server(servers):
    async with opened(url_of(servers[0])) as backend:
        write = object_write(1, 10)
        shards = [type(write)(f"{write.name}{i}", write.header, write.payload) for i in range(16)]
        await backend.write(shards)
        assert sorted(server.run("DBSIZE") for server in servers) == [0, 0, 16]


async def test_slot_that_moved_is_followed(servers):
    async with opened(url_of(servers[0])) as backend:
        await backend.contains([object_name(1)])
        home = next(s for s in servers if _has_slot(s, slot_of(1)))
        for target in (servers[(servers.index(home) + 1) % 3], home):
            move(servers, slot_of(1), target)
            writes = [object_write(n, 1000) for n in range(10)]
            assert await backend.write(writes) == [WriteOutcome.STORED] * 10
            await assert_reads_back(backend, *writes)
            assert target.run("CLUSTER", "COUNTKEYSINSLOT", slot_of(1)) == 1
            assert await backend.delete([write.name for write in writes]) == 10


def _has_slot(server, slot: int) -> bool:
    own = server.run("CLUSTER", "MYID")
    ranges = server.run("CLUSTER", "SLOTS")
    entries = ranges.items() if isinstance(ranges, dict) else None
    if entries is None:
        return any(r[0] <= slot <= r[1] and r[2][2] == own for r in ranges)
    return any(
        first <= slot <= last and info["primary"][1] == server.port
        for (first, last), info in entries
    )


async def test_objects_of_a_slot_on_its_way_are_missing_until_it_is_there(servers):
    async with opened(url_of(servers[0])) as backend:
        home = next(s for s in servers if _has_slot(s, slot_of(1)))
        target = servers[(servers.index(home) + 1) % 3]
        slot = slot_of(1)
        target.run("CLUSTER", "SETSLOT", slot, "IMPORTING", home.run("CLUSTER", "MYID").decode())
        home.run("CLUSTER", "SETSLOT", slot, "MIGRATING", target.run("CLUSTER", "MYID").decode())
        try:
            assert await backend.contains([object_name(1)]) == [False]
            assert await backend.read([object_read(1, 10)]) == [ReadOutcome.MISSING]
            assert await backend.write([object_write(1, 10)]) == [WriteOutcome.FULL]
            assert await backend.delete([object_name(1)]) == 0
        finally:
            for server in (home, target):
                server.run("CLUSTER", "SETSLOT", slot, "STABLE")
        assert await backend.write([object_write(1, 10)]) == [WriteOutcome.STORED]


async def test_server_that_is_killed_takes_its_keys_until_it_is_back(servers):
    numbers = {server: _number_at(server) for server in servers}
    async with opened(url_of(servers[0]), operation_timeout_s=3) as backend:
        await backend.write([object_write(n, 10) for n in numbers.values()])
        lost = servers[2]
        lost.kill()
        try:
            with pytest.raises(BackendUnavailable):
                await backend.read([object_read(numbers[lost], 10)])
            await assert_reads_back(backend, object_write(numbers[servers[0]], 10))
        finally:
            lost.start()
        for _ in range(100):
            try:
                stored = await backend.write([object_write(numbers[lost], 10)])
                break
            except BackendUnavailable:  # it waits for the others before it serves
                await asyncio.sleep(0.05)
        assert stored == [WriteOutcome.STORED]


def _number_at(server) -> int:
    return next(n for n in range(1000) if _has_slot(server, slot_of(n)))


async def test_cluster_is_found_through_any_server_that_lives(servers):
    async with opened(url_of(servers[1]), connect_timeout_s=1) as backend:
        write = object_write(_number_at(servers[0]), 10)
        await backend.write([write])
        await assert_reads_back(backend, write)


async def test_url_of_one_server_that_is_part_of_a_cluster_is_refused(servers):
    for server in servers:
        if not _has_slot(server, key_slot(b"probe")):
            with pytest.raises(ConfigError, match=r"use redis\+cluster://"):
                await backend_of(server.url).open()


async def test_cluster_url_of_a_plain_server_is_refused(tmp_path):
    refusal = pytest.raises(ConfigError, match="is no cluster: use redis:// or rediss://")
    with running(tmp_path / "server") as server, refusal:
        await backend_of(url_of(server)).open()
