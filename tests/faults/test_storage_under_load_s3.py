"""Faults of S3 under a real server with eight clients: no wrong token, no wait, hits return."""

import contextlib

import pytest
import s3_servers
from live_server import wait_until
from s3_behind_proxy import S3BehindProxy
from s3_faults import Fault
from storage_episode import engine, suffer

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.full]

WRONG_SECRET = "swordfish-in-a-barrel"
DEADLINE_S = 2.0
"""``operation_timeout_s``. Reading from S3 takes longer than computing with a tiny model: only a
policy that waits for it in any case has hits."""
POLICY = {"prefetch_policy": "wait_complete"}


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """Not started."""
    with S3BehindProxy(tmp_path_factory.mktemp("s3")) as proxied:
        yield proxied


@pytest.fixture(scope="module")
def server(control, s3, tiny_llama, tmp_path_factory):
    """An engine that started while S3 was away."""
    folder, env = tmp_path_factory.mktemp("engine"), s3_servers.ENVIRONMENT
    storage = {"url": s3.url, "operation_timeout_s": DEADLINE_S}
    with engine(tiny_llama(), folder, storage, policy=POLICY, env=env) as started:
        yield started.wait_until_healthy()
        assert s3_servers.SECRET_KEY not in started.log()


@pytest.fixture
def healthy(server, s3):
    """The same engine, with S3 there."""
    s3.start()
    return server


def test_a_server_that_is_away_at_the_start(control, server, s3):
    @contextlib.contextmanager
    def away():
        yield
        s3.start()

    episode = suffer("s3 away at start", control, server, away(), is_healthy=False)
    episode.check(DEADLINE_S)
    assert "Storage cannot be opened" in server.log()
    assert episode.level("breaker_open") == 1


def test_a_killed_and_restarted_server(control, healthy, s3):
    episode = suffer("s3 killed and restarted", control, healthy, s3.killed())
    episode.check(DEADLINE_S)
    assert episode.grew("fetch_ended_total{reason=unavailable}") > 0
    assert episode.grew("persist_dropped_tokens_total{reason=unavailable}") > 0
    assert episode.level("breaker_open") == 1


def test_a_server_that_stands_still_for_20_s(control, healthy, s3):
    episode = suffer("s3 SIGSTOP 20 s", control, healthy, s3.frozen(), hold_s=20.0)
    episode.check(DEADLINE_S)
    assert episode.level("breaker_open") == 1
    assert episode.grew("fetch_ended_total{reason=deadline}") < 60
    assert episode.grew("fetch_ended_total{reason=unavailable}") > 100


def test_requests_that_stall_for_30_s(control, healthy, s3):
    stall = s3.failing(Fault(stall_s=30.0))
    episode = suffer("s3 stalls for 30 s", control, healthy, stall, hold_s=30.0)
    episode.check(DEADLINE_S)
    assert episode.level("breaker_open") == 1
    assert episode.grew("fetch_ended_total{reason=deadline}") < 60
    assert episode.grew("fetch_ended_total{reason=unavailable}") > 100


def test_a_server_with_50_ms_of_latency(control, healthy, s3):
    far_away = s3.failing(Fault(stall_s=0.05))
    episode = suffer("s3 50 ms of latency", control, healthy, far_away)
    episode.check(DEADLINE_S)
    assert episode.grew("served_tokens_total{tier=storage}") > 0


@pytest.mark.parametrize(
    ("status", "code"), [(403, "AccessDenied"), (500, "InternalError"), (503, "SlowDown")]
)
def test_a_server_that_answers_with_an_error(control, healthy, s3, status, code):
    fault = s3.failing(Fault(status=status, code=code))
    episode = suffer(f"s3 {status} {code}", control, healthy, fault)
    episode.check(DEADLINE_S)
    assert episode.grew("fetch_ended_total{reason=unavailable}") > 100
    assert episode.level("breaker_open") == 1
    if status == 403:
        assert episode.grew("writes_refused_total") > 0
        assert "AccessDenied" in episode.log
    else:
        assert episode.grew("persist_dropped_tokens_total{reason=unavailable}") > 0
        assert episode.grew("requests_retried_total") > 0
    assert (episode.grew("requests_throttled_total") > 0) == (status == 503)


def test_a_server_that_lost_its_objects(control, healthy, s3):
    lost = s3.failing(Fault(status=404, code="NoSuchKey"), "GET", "HEAD")
    episode = suffer("s3 404 NoSuchKey", control, healthy, lost)
    episode.check(DEADLINE_S)
    assert episode.grew("fetch_ended_total{reason=missing}") > 0
    assert episode.level("breaker_open") == 0


def test_objects_that_are_deleted_between_query_and_read(control, healthy, s3):
    episode = suffer("s3 objects deleted before reads", control, healthy, s3.deleting())
    episode.check(DEADLINE_S)
    assert episode.grew("fetch_ended_total{reason=missing}") > 0
    assert episode.grew("unserved_tokens_total{reason=short_fetch}") > 0
    assert episode.grew("corrupt_objects_total") == 0
    assert episode.level("breaker_open") == 0


def test_a_wrong_secret_stops_the_start(healthy, s3, tiny_llama, tmp_path):
    env = {**s3_servers.ENVIRONMENT, "AWS_SECRET_ACCESS_KEY": WRONG_SECRET}
    with engine(tiny_llama(), tmp_path, {"url": s3.url}, env=env) as refused:
        wait_until(lambda: refused.process.poll() is not None, timeout_s=240)
        assert refused.process.returncode != 0
        assert "SignatureDoesNotMatch" in refused.log()
        assert WRONG_SECRET not in refused.log()
