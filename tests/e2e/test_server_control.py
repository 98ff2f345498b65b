"""Storage of a live server is attached, detached and replaced while 200 requests are in flight."""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live_server import PAGE, Answer, LiveServer, prompt_of, serving, wait_until

from vllm_hicache import cli

sys.path.append(str(Path(__file__).parents[1] / "storage_backends" / "support"))
from redis_under_test import RedisProcess

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.full]

NUM_REQUESTS, NUM_PROMPTS = 200, 20
NUM_TOKENS, NUM_OUTPUT = 4 * PAGE + 5, 96
OBJECT_BYTES = 4096 + 4 * 64 * 64 * 2 * 4  # header; layers x tokens x head size x (K, V) x float32
OBJECTS_PER_PAGE = 2  # heads are split for tensor parallelism
MAX_DIFFERENCE = 1e-4
TOKEN = "only for this test"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("control")


@pytest.fixture(scope="module")
def server(tiny_llama, folder) -> Iterator[LiveServer]:
    """A server that starts without storage. Its weights are fixed: a reset keeps storage."""
    extra = {
        "storage": None,
        "control_address": f"unix:{folder}/control.sock",
        "fixed_weights": True,
    }
    options = ["--enable-server-load-tracking", "--max-num-seqs", "8"]
    secret = {"HICACHE_CONTROL_TOKEN": TOKEN}  # vLLM writes the connector's options to its log
    with serving(tiny_llama(), folder, extra, options=options, env=secret) as live:
        yield live


@pytest.fixture(scope="module")
def redis(tmp_path_factory) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path_factory.mktemp("redis")).start()
    yield process
    process.kill()


@pytest.fixture
def hicache(folder, monkeypatch, capsys):
    """Runs `hicache storage ...` and returns what it says of the only worker."""
    monkeypatch.setenv("HICACHE_CONTROL_ADDRESS", f"unix:{folder}/control.sock")
    monkeypatch.setenv("HICACHE_CONTROL_TOKEN", TOKEN)

    def run(*arguments: str) -> dict:
        capsys.readouterr()
        status = cli.main(["storage", *arguments, "--json"])
        out, err = capsys.readouterr()
        assert status == 0, err
        (worker,) = json.loads(out)["workers"]
        return worker

    return run


def _assert_alike(answer: Answer, control: Answer) -> None:
    assert answer.tokens == control.tokens
    assert answer.logprobs == pytest.approx(control.logprobs, abs=MAX_DIFFERENCE)


def test_storage_changes_with_200_requests_in_flight_and_none_of_them_fails(
    server, folder, redis, hicache
):
    assert hicache("status")["url"] == ""
    prompts = [prompt_of(i, NUM_TOKENS) for i in range(NUM_PROMPTS)]
    controls = [server.complete(prompt, max_tokens=NUM_OUTPUT) for prompt in prompts]
    assert server.reset("?reset_external=true")
    server.post("/pause?mode=keep&clear_cache=false")
    with ThreadPoolExecutor(NUM_REQUESTS) as clients:
        running = [
            clients.submit(server.complete, prompts[i % NUM_PROMPTS], max_tokens=NUM_OUTPUT)
            for i in range(NUM_REQUESTS)
        ]
        wait_until(lambda: server.get("/load")["server_load"] >= NUM_REQUESTS)
        server.post("/resume")
        assert hicache("attach", "--url", f"file://{folder}/store")["is_open"]
        assert hicache("detach")["url"] == ""
        assert hicache("attach", "--url", redis.url)["is_open"]
        assert server.get("/load")["server_load"] > 0
        answers = [answer.result() for answer in running]
    assert len(answers) == NUM_REQUESTS
    for i, answer in enumerate(answers):
        _assert_alike(answer, controls[i % NUM_PROMPTS])
    assert server.count("storage_restarts_total") == 0


def test_hits_come_from_the_storage_that_is_attached(server, folder, redis, hicache):
    pages = NUM_TOKENS // PAGE
    prompt = prompt_of(7001, NUM_TOKENS)
    hicache("attach", "--url", f"file://{folder}/store")
    control = server.complete(prompt)
    written = 0

    def is_stored() -> bool:
        nonlocal written
        server.nudge()
        written = hicache("status")["counters"]["objects_written"]
        return written >= pages * OBJECTS_PER_PAGE

    wait_until(is_stored)
    hicache("attach", "--url", redis.url)
    assert server.reset("?reset_external=true")
    missed = server.complete(prompt)
    assert missed.cached_tokens == 0
    _assert_alike(missed, control)
    hicache("attach", "--url", f"file://{folder}/store")
    assert server.reset("?reset_external=true")
    before = server.metrics()["vllm:hicache_served_tokens_total{tier=storage}"]
    hit = server.complete(prompt)
    assert hit.cached_tokens == pages * PAGE
    _assert_alike(hit, control)
    assert server.count("served_tokens_total{tier=storage}") - before == pages * PAGE
    counters = hicache("status")["counters"]
    assert counters["bytes_read"] == pages * OBJECTS_PER_PAGE * OBJECT_BYTES


def test_metrics_and_log_tell_of_every_change(server, folder, hicache):
    hicache("attach", "--url", f"file://{folder}/store")
    wait_until(lambda: (server.nudge(), server.count("storage_attached"))[1] == 1)
    hicache("detach")
    wait_until(lambda: (server.nudge(), server.count("storage_attached"))[1] == 0)
    log = server.log()
    assert "storage detached, namespace" in log
    assert f"HiCache: attach file://{folder}/store: done on all workers" in log
    assert "HiCache: detach storage: done on all workers" in log
    assert TOKEN not in log
