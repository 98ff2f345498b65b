"""``hicache doctor`` against real services: a round trip, what bounds them, wrong credentials."""

import json

import pytest
import s3_servers
from redis_under_test import running

from vllm_hicache.cli import main

pytestmark = pytest.mark.services

PASSWORD = "swordfish-4711"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("doctor") / "s", "--requirepass", PASSWORD) as server:
        yield server


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in s3_servers.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def doctor(capsys, storage):
    extra = {"host_memory": "16MiB", "storage": storage}
    transfer = json.dumps({"kv_connector_extra_config": extra})
    status = main(["doctor", "--json", "--kv-transfer-config", transfer])
    text = capsys.readouterr().out
    assert PASSWORD not in text
    return status, json.loads(text)


def check_of(found, name):
    (check,) = [check for check in found["checks"] if check["name"] == name]
    return check


def test_redis_passes_and_is_left_empty(server, capsys):
    url = f"redis://:{PASSWORD}@127.0.0.1:{server.port}/0"
    status, found = doctor(capsys, {"url": url, "ttl_s": "1h"})
    assert (status, check_of(found, "storage probe")["status"]) == (0, "ok")
    assert check_of(found, "storage room")["status"] == "ok"
    assert found["storage"]["room"]["ttl_s"] == 3600
    with server.client(password=PASSWORD) as client:
        assert client.keys() == []


def test_redis_that_nothing_bounds_is_noted(server, capsys):
    status, found = doctor(capsys, f"redis://:{PASSWORD}@127.0.0.1:{server.port}/0")
    assert status == 0
    check = check_of(found, "storage room")
    assert check["status"] == "note"
    assert "nothing bounds this store" in check["found"]
    assert "lifecycle" in check["advice"]


def test_a_wrong_password_is_a_configuration_error(server, capsys):
    status, found = doctor(capsys, f"redis://:wrong-{PASSWORD}@127.0.0.1:{server.port}/0")
    assert status == 2
    assert check_of(found, "storage")["status"] == "refused"


def test_s3_passes_and_is_left_empty(moto_server, capsys, tmp_path):
    status, found = doctor(capsys, moto_server.url(tmp_path))
    assert (status, check_of(found, "storage probe")["status"]) == (0, "ok")
    assert found["storage"]["room"] == {"expires_after_days": "never"}
    assert check_of(found, "storage room")["status"] == "note"
    prefix = s3_servers.prefix_of(tmp_path)
    listed = moto_server.client().list_objects_v2(Bucket=s3_servers.BUCKET, Prefix=prefix)
    assert listed["KeyCount"] == 0


def test_a_bucket_that_does_not_exist_is_a_configuration_error(moto_server, capsys):
    url = f"s3://no-such-bucket/x?endpoint_url={moto_server.endpoint_url}"
    status, found = doctor(capsys, url)
    assert status == 2
    assert "no-such-bucket" in check_of(found, "storage")["found"]
