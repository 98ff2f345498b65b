"""A storage process with SeaweedFS behind it: what the scheduler sees while the server is away."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from vllm_hicache.storage_messages import ExistsResult, FetchSettled

sys.path.append(str(Path(__file__).parents[1] / "storage_backends" / "support"))
import s3_servers

pytestmark = pytest.mark.services

FAST = {"breaker_backoff_s": 0.05, "breaker_max_backoff_s": 0.2}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in s3_servers.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_servers.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as started:
        yield started


@contextlib.contextmanager
def frozen(server):
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


def test_pages_return_from_the_bucket_and_a_removed_one_is_a_miss(server, tmp_path, make_engine):
    engine = make_engine(url=server.url(tmp_path))
    assert engine.persisted(1, range(8)).num_stored == 8
    assert engine.persisted(2, range(8)).num_existing == 8
    assert engine.fetched(3, range(8)) == FetchSettled(3, 8, "complete")
    assert [engine.page(32 + i) for i in range(8)] == [engine.page(i) for i in range(8)]
    client = server.client()
    listed = client.list_objects_v2(
        Bucket=s3_servers.BUCKET, Prefix=s3_servers.prefix_of(tmp_path)
    )["Contents"]
    assert len(listed) == 16
    gone = [
        item["Key"] for item in listed if item["Key"].rsplit("/", 1)[1].startswith("0" * 63 + "5")
    ]
    for key in gone:
        client.delete_object(Bucket=s3_servers.BUCKET, Key=key)
    assert len(gone) == 2
    assert engine.fetched(4, range(8)) == FetchSettled(4, 5, "missing")
    assert engine.persisted(5, range(8)).num_stored == 1
    assert engine.fetched(6, range(8)) == FetchSettled(6, 8, "complete")


def test_a_wrong_secret_refuses_the_start(server, tmp_path, new_engine, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "swordfish")
    engine = new_engine(url=server.url(tmp_path))
    engine.process.start()
    refusal = engine.process.refusal(20)
    assert "SignatureDoesNotMatch" in refusal
    assert "swordfish" not in refusal


def test_a_frozen_server_costs_the_deadline_and_is_used_again(server, tmp_path, make_engine):
    engine = make_engine(url=server.url(tmp_path), operation_timeout_s=1.0, **FAST)
    assert engine.persisted(1, range(8)).num_stored == 8
    with frozen(server):
        started = time.monotonic()
        for op in range(10, 20):
            engine.fetch(op, range(8), deadline_s=0.2)
            engine.exists(op + 100, range(8), deadline_s=0.05)
        for _ in range(10):
            assert engine.wait_for(FetchSettled).num_pages == 0
            assert not engine.wait_for(ExistsResult).ok
        assert time.monotonic() - started < 1.0
        time.sleep(max(0.0, 1.5 - (time.monotonic() - started)))
    end = time.monotonic() + 10
    op = 1000
    while engine.fetched(op, range(8)).num_pages < 8 and time.monotonic() < end:
        time.sleep(0.02)
        op += 1
    assert [engine.page(32 + i) for i in range(8)] == [engine.page(i) for i in range(8)]


def test_a_server_that_starts_later_is_found(server, tmp_path, new_engine):
    with frozen(server):
        engine = new_engine(url=server.url(tmp_path), connect_timeout_s=0.5, **FAST)
        engine.start()
        assert engine.persisted(1, range(4)).reason == "unavailable"
    end = time.monotonic() + 20
    op = 2
    while engine.persisted(op, range(4)).num_stored < 4 and time.monotonic() < end:
        time.sleep(0.02)
        op += 1
    assert engine.fetched(1000, range(4)) == FetchSettled(1000, 4, "complete")
