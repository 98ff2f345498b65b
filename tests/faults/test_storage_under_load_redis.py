"""Faults of Redis under a real server with eight clients: no wrong token, no wait, hits return."""

import contextlib
import re

import pytest
from live_server import wait_until
from proxies import Proxy
from redis_under_test import RedisProcess
from storage_episode import engine, suffer

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.full]

PASSWORD = "correct-horse-battery-staple"
WRONG_PASSWORD = "swordfish-in-a-barrel"
GET = re.compile(rb"\r\nGET\r\n\$\d+\r\n(.+?)\r\n")


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    """Not started."""
    process = RedisProcess(tmp_path_factory.mktemp("redis"), "--requirepass", PASSWORD)
    yield process
    process.kill()


@pytest.fixture(scope="module")
def proxy(redis):
    with Proxy(redis.port) as started:
        yield started


@pytest.fixture(scope="module")
def server(control, redis, proxy, tiny_llama, tmp_path_factory):
    """An engine that started while Redis was away."""
    storage = {"url": f"redis://127.0.0.1:{proxy.port}", "exists_timeout_s": "200ms"}
    env = {"HICACHE_STORAGE_PASSWORD": PASSWORD}
    with engine(tiny_llama(), tmp_path_factory.mktemp("engine"), storage, env=env) as started:
        yield started.wait_until_healthy()
        assert PASSWORD not in started.log()


@pytest.fixture
def healthy(server, redis):
    """The same engine, with Redis there."""
    if not redis.is_running:
        redis.start()
    return server


def test_a_server_that_is_away_at_the_start(control, server, redis):
    @contextlib.contextmanager
    def away():
        yield
        redis.start()

    episode = suffer("redis away at start", control, server, away(), is_healthy=False)
    episode.check()
    assert "Storage cannot be opened" in server.log()
    assert episode.level("breaker_open") == 1


def test_a_killed_and_restarted_server(control, healthy, redis):
    @contextlib.contextmanager
    def killed():
        redis.kill()
        yield
        redis.start()

    episode = suffer("redis killed and restarted", control, healthy, killed())
    episode.check()
    assert episode.grew("fetch_ended_total{reason=unavailable}") > 0
    assert episode.grew("persist_dropped_tokens_total{reason=unavailable}") > 0
    assert episode.grew("write_errors_total") > 0
    assert episode.level("breaker_open") == 1
    assert re.search("(reads|questions) disabled", episode.log)
    assert re.search("(reads|questions) enabled", episode.log)


def test_a_server_that_stands_still_for_20_s(control, healthy, redis):
    episode = suffer("redis SIGSTOP 20 s", control, healthy, redis.frozen(), hold_s=20.0)
    episode.check()
    assert episode.level("breaker_open") == 1
    # Few waited for their question, the others were refused at once.
    assert episode.grew("fetch_ended_total{reason=deadline}") < 60
    assert episode.grew("fetch_ended_total{reason=unavailable}") > 100


def test_a_server_with_50_ms_of_latency(control, healthy, proxy):
    @contextlib.contextmanager
    def far_away():
        proxy.delay_s = 0.05
        yield
        proxy.delay_s = 0.0

    episode = suffer("redis 50 ms of latency", control, healthy, far_away())
    episode.check()
    assert episode.level("breaker_open") == 0  # slow is not dead


def test_a_full_server_that_evicts_nothing(control, healthy, redis):
    @contextlib.contextmanager
    def full():
        with redis.client(password=PASSWORD) as client:
            client.flushall()
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "10mb")
            yield
            client.config_set("maxmemory", "0")

    episode = suffer("redis maxmemory 10mb noeviction", control, healthy, full())
    episode.check()
    assert episode.grew("writes_refused_total") > 0
    assert episode.grew("persist_dropped_tokens_total{reason=full}") > 0
    assert "refuses writes: OOM" in episode.log


def test_objects_that_are_deleted_between_query_and_read(control, healthy, redis, proxy):
    @contextlib.contextmanager
    def deleting():
        with redis.client(password=PASSWORD) as client:

            def delete(data: bytes) -> None:
                if keys := GET.findall(data):
                    client.unlink(*keys)

            proxy.on_request = delete
            yield
            proxy.on_request = None

    episode = suffer("redis objects deleted before reads", control, healthy, deleting())
    episode.check()
    assert episode.grew("fetch_ended_total{reason=missing}") > 0
    assert episode.grew("unserved_tokens_total{reason=short_fetch}") > 0
    assert episode.grew("corrupt_objects_total") == 0


def test_a_wrong_password_stops_the_start(healthy, redis, proxy, tiny_llama, tmp_path):
    storage = {"url": f"redis://127.0.0.1:{proxy.port}"}
    env = {"HICACHE_STORAGE_PASSWORD": WRONG_PASSWORD}
    with engine(tiny_llama(), tmp_path, storage, env=env) as refused:
        wait_until(lambda: refused.process.poll() is not None, timeout_s=240)
        assert refused.process.returncode != 0
        assert f"Redis 127.0.0.1:{proxy.port} refuses this user" in refused.log()
        assert WRONG_PASSWORD not in refused.log()
