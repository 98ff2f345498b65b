"""A storage process with Redis behind it: what the scheduler sees while the server is away."""

import sys
import time
from pathlib import Path

import pytest

from vllm_hicache.storage_messages import ExistsResult, FetchSettled

sys.path.append(str(Path(__file__).parents[1] / "storage_backends" / "support"))
from redis_under_test import RedisProcess, running

pytestmark = pytest.mark.services

FAST = {"breaker_backoff_s": 0.05, "breaker_max_backoff_s": 0.2}


def test_a_server_that_starts_later_is_found(tmp_path, new_engine):
    server = RedisProcess(tmp_path / "server")
    engine = new_engine(url=server.url, connect_timeout_s=0.5, **FAST)
    engine.start()
    assert engine.persisted(1, range(4)).reason == "unavailable"
    try:
        server.start()
        end = time.monotonic() + 10
        op = 2
        while engine.persisted(op, range(4)).num_stored < 4 and time.monotonic() < end:
            time.sleep(0.02)
            op += 1
        assert engine.fetched(1000, range(4)) == FetchSettled(1000, 4, "complete")
        assert [engine.page(32 + i) for i in range(4)] == [engine.page(i) for i in range(4)]
    finally:
        server.kill()


def test_a_wrong_password_refuses_the_start(tmp_path, new_engine):
    with running(tmp_path / "server", "--requirepass", "swordfish") as server:
        engine = new_engine(url=f"redis://:secret@127.0.0.1:{server.port}")
        engine.process.start()
        refusal = engine.process.refusal(60)
        assert f"Redis 127.0.0.1:{server.port} refuses this user" in refusal
        assert "secret" not in refusal


def test_a_frozen_server_costs_the_deadline_and_is_used_again(tmp_path, make_engine):
    with running(tmp_path / "server") as server:
        engine = make_engine(url=server.url, operation_timeout_s=1.0, **FAST)
        engine.persisted(1, range(8))
        with server.frozen():
            started = time.monotonic()
            for op in range(10, 20):
                engine.fetch(op, range(8), deadline_s=0.2)
                engine.exists(op + 100, range(8), deadline_s=0.05)
            for _ in range(10):
                assert engine.wait_for(FetchSettled).num_pages == 0
                assert not engine.wait_for(ExistsResult).ok
            assert time.monotonic() - started < 1.0
            time.sleep(max(0.0, 2.0 - (time.monotonic() - started)))
        end = time.monotonic() + 10
        op = 1000
        while engine.fetched(op, range(8)).num_pages < 8 and time.monotonic() < end:
            time.sleep(0.02)
            op += 1
        assert [engine.page(32 + i) for i in range(8)] == [engine.page(i) for i in range(8)]
