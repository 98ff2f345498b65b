"""One live server over HTTP: what it counts, logs and shares, and that it rests when idle."""

import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from live_server import (
    BLOCK,
    PAGE,
    Answer,
    LiveServer,
    cpu_seconds,
    prompt_of,
    serving,
    wait_until,
)

from vllm_hicache.series import SERIES

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]

TOKEN_BYTES = 4 * 2 * 2 * 64 * 4  # layers, K and V, heads, head size, float32
OBJECTS_PER_PAGE = 2  # heads are split for tensor parallelism
HEADER_BYTES = 4096
MAX_DIFFERENCE = 1e-4  # of log-probabilities that another chunking of the prompt gives


@pytest.fixture(scope="module")
def live(tiny_llama, tmp_path_factory):
    """A server with asynchronous loads whose resets keep storage, and its first metrics."""
    extra = {"log_interval_s": 1, "sync_load_max_ms": 0, "fixed_weights": True}
    options = ["--enable-server-load-tracking"]
    with serving(tiny_llama(), tmp_path_factory.mktemp("live"), extra, options=options) as server:
        yield server, server.metrics()


@pytest.fixture
def server(live) -> LiveServer:
    return live[0]


class Changes:
    """What the counters of a server gained since this object was made."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self._before = server.metrics()

    def now(self) -> dict[str, float]:
        after = self._server.metrics()
        return {key: value - self._before.get(key, 0.0) for key, value in after.items()}

    def become(self, expected: Mapping[str, float], *, nudge: bool = False) -> None:
        """Wait until the counters have gained exactly this.

        vLLM publishes them with its steps: ``nudge`` causes one with a prompt below a page.
        """
        deadline = time.monotonic() + 20
        while True:
            gained = self.now()
            found = {key: gained[key] for key in expected}
            if found == expected:
                return
            assert time.monotonic() < deadline, f"expected {expected}, got {found}"
            if nudge:
                self._server.nudge()
            time.sleep(0.1)


def _assert_alike(answers: list[Answer], control: list[Answer]) -> None:
    for answer, expected in zip(answers, control, strict=True):
        assert answer.tokens == expected.tokens
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=MAX_DIFFERENCE)


# First of all: before any request ----------------------------------------------------------------


def test_every_series_exists_at_zero_from_the_start(live):
    _, first = live
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_count", "_sum")}
    not_zero = {"host_slots_total", "host_slots_ready", "storage_attached"}
    for series in SERIES:
        labels = [f"{{{series.label}={value}}}" for value in series.values] or [""]
        for suffix in suffixes[series.kind]:
            for label in labels:
                value = first[f"vllm:hicache_{series.name}{suffix}{label}"]
                assert value == 0 or series.name in not_zero, series.name


def test_the_connector_was_found_by_its_name_alone(server):
    assert "kv_connector_module_path" not in " ".join(server.process.args)
    assert "Creating v1 connector with name: HiCacheConnector" in server.log()


# What it counts ----------------------------------------------------------------------------------


def test_counts_of_all_tiers_agree_with_those_of_vllm_and_with_the_bytes_read(server):
    prompt = prompt_of(1, 5 * PAGE + 2)
    hit = 5 * PAGE
    sources = "vllm:prompt_tokens_by_source_total{source=%s}"
    cached = "vllm:prompt_tokens_cached_by_source_total{source=%s}"
    changes = Changes(server)
    cold = server.complete(prompt)
    assert cold.cached_tokens == 0
    changes.become(
        {
            sources % "local_compute": hit + 2,
            "vllm:hicache_lookup_tokens_total": hit + 2,
            "vllm:hicache_saved_tokens_total": hit,
            "vllm:hicache_saved_bytes_total": hit * TOKEN_BYTES,
        }
    )
    changes = Changes(server)
    from_device = server.complete(prompt)
    assert from_device.cached_tokens == hit
    changes.become({cached % "device": hit, "vllm:hicache_local_tokens_total": hit})

    assert server.reset()
    changes = Changes(server)
    from_host = server.complete(prompt)
    assert from_host.cached_tokens == hit
    changes.become(
        {
            sources % "local_cache_hit": 0,
            sources % "external_kv_transfer": hit,
            sources % "local_compute": 2,
            cached % "host": hit,
            "vllm:external_prefix_cache_hits_total": hit,
            "vllm:hicache_served_tokens_total{tier=host}": hit,
            "vllm:hicache_served_tokens_total{tier=storage}": 0,
            "vllm:hicache_loaded_bytes_total{mode=async}": hit * TOKEN_BYTES,
            "vllm:hicache_bytes_read_total": 0,
        }
    )
    server.wait_until_stored(5 * OBJECTS_PER_PAGE)
    assert server.reset("?reset_external=true")
    changes = Changes(server)
    from_storage = server.complete(prompt)
    assert from_storage.cached_tokens == hit
    num_objects = 5 * OBJECTS_PER_PAGE
    changes.become(
        {
            sources % "external_kv_transfer": hit,
            cached % "disk": hit,
            cached % "host": 0,
            "vllm:hicache_served_tokens_total{tier=storage}": hit,
            "vllm:hicache_served_tokens_total{tier=host}": 0,
            "vllm:hicache_fetched_bytes_total": hit * TOKEN_BYTES,
            "vllm:hicache_fetch_ended_total{reason=complete}": 1,
            "vllm:hicache_objects_read_total": num_objects,
            "vllm:hicache_bytes_read_total": hit * TOKEN_BYTES + num_objects * HEADER_BYTES,
        },
        nudge=True,
    )
    assert from_host.said == from_storage.said == from_device.said
    _assert_alike([from_device], [cold])


# What it shares ----------------------------------------------------------------------------------


def test_64_clients_on_one_prefix_cause_one_load_for_which_all_wait(server):
    num_clients, prefix = 64, prompt_of(2, 16 * PAGE)
    prompts = [prefix + prompt_of(1000 + i, 20) for i in range(num_clients)]
    control = [server.complete(prompt) for prompt in prompts]  # from the device's own cache
    assert control[-1].cached_tokens == len(prefix)
    assert server.reset()
    changes = Changes(server)
    server.post("/pause?mode=keep&clear_cache=false")
    with ThreadPoolExecutor(num_clients) as clients:
        running = [clients.submit(server.complete, prompt) for prompt in prompts]
        wait_until(lambda: server.get("/load")["server_load"] == num_clients)
        time.sleep(1.0)  # all of them reach the engine, which does not step
        server.post("/resume")
        answers = [answer.result() for answer in running]
    changes.become(
        {
            "vllm:hicache_lookups_total": num_clients,
            "vllm:hicache_loaded_bytes_total{mode=async}": len(prefix) * TOKEN_BYTES,
            "vllm:hicache_loaded_bytes_total{mode=sync}": 0,
            "vllm:hicache_load_seconds_count": 1,
            "vllm:hicache_served_tokens_total{tier=host}": len(prefix),
            "vllm:prompt_tokens_by_source_total{source=external_kv_transfer}": len(prefix),
            "vllm:prompt_tokens_by_source_total{source=local_cache_hit}": 63 * len(prefix),
        }
    )
    assert changes.now()["vllm:hicache_deferred_lookups_total"] >= num_clients - 1
    assert {answer.cached_tokens for answer in answers} == {len(prefix)}
    _assert_alike(answers, control)


# Resets ------------------------------------------------------------------------------------------


def test_resets_right_after_an_answer_succeed(server):
    for seed in range(20, 25):
        server.complete(prompt_of(seed, 6 * PAGE), max_tokens=1)
        assert server.reset(), seed
        server.complete(prompt_of(seed + 100, 6 * PAGE), max_tokens=1)
        assert server.reset("?reset_external=true"), seed


TIER_AFTER = {
    "/reset_prefix_cache": "host",
    "/reset_prefix_cache?reset_running_requests=true": "host",
    "/reset_prefix_cache?reset_external=true": "storage",
    "/reset_mm_cache": "device",
    "/reset_encoder_cache": "device",
    "/pause": "storage",
    "/pause?clear_cache=false": "device",
    "/pause?mode=keep&clear_cache=false": "device",
    "/pause?mode=keep": "storage",
}
"""Where a prompt comes from after this call: the table of docs/operations.md, fixed weights."""


@pytest.mark.parametrize("path", TIER_AFTER)
def test_which_tiers_a_call_empties(path, server):
    tier, seed = TIER_AFTER[path], 300 + list(TIER_AFTER).index(path)
    prompt, hit = prompt_of(seed, 2 * PAGE + 1), 2 * PAGE
    num_stored = server.count("objects_written_total")
    control = server.complete(prompt)
    server.wait_until_stored(num_stored + 2 * OBJECTS_PER_PAGE)
    changes = Changes(server)
    server.post(path)
    if path.startswith("/pause"):
        server.post("/resume")
    again = server.complete(prompt)
    assert again.cached_tokens == hit
    changes.become(
        {
            "vllm:hicache_local_tokens_total": hit * (tier == "device"),
            "vllm:hicache_served_tokens_total{tier=host}": hit * (tier == "host"),
            "vllm:hicache_served_tokens_total{tier=storage}": hit * (tier == "storage"),
            "vllm:hicache_resets_total": float(tier == "storage"),
        }
    )
    _assert_alike([again], [control])


def test_a_reset_of_running_requests_keeps_their_answers_right(server):
    prompt = prompt_of(30, 4 * PAGE + 1)
    control = server.complete(prompt, max_tokens=200)
    assert server.reset()
    with ThreadPoolExecutor(1) as clients:
        running = clients.submit(server.complete, prompt, max_tokens=200)
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 1)
        assert server.reset("?reset_running_requests=true")
        answer = running.result()
    _assert_alike([answer], [control])


# What it logs ------------------------------------------------------------------------------------

_PREFIX = r"^\(EngineCore pid=\d+\) INFO \d\d-\d\d \d\d:\d\d:\d\d \[%s:\d+\] "


def test_log_lines_have_the_format_of_vllm_and_the_configuration_comes_once(server):
    lines = server.log().splitlines()
    pattern = re.compile(_PREFIX % r"scheduler_side\.py" + r"HiCache configuration: (\{.*\})$")
    matches = [match for match in map(pattern.match, lines) if match]
    assert len(matches) == 1
    assert "'page_size': 64" in matches[0][1]
    assert sum("HiCache configuration" in line for line in lines) == 1


def test_activity_is_logged_while_there_is_some_and_only_then(server):
    # The line is due at the first step after an interval.
    server.complete(prompt_of(40, 2 * PAGE))
    time.sleep(1.1)
    server.complete(prompt_of(41, 2 * PAGE))
    pattern = re.compile(
        _PREFIX % r"activity\.py" + r"HiCache: hits host [\d,]+ storage [\d,]+ of [\d,]+ tokens, "
        r"saved .*, loaded .*, host slots \d+/512, backlog .*, breaker closed$",
        re.MULTILINE,
    )
    wait_until(lambda: pattern.search(server.log()))
    time.sleep(1.1)
    num_lines = len(pattern.findall(server.log()))
    time.sleep(2.5)
    assert len(pattern.findall(server.log())) == num_lines


# Rest --------------------------------------------------------------------------------------------


def test_an_idle_engine_does_not_step_and_holds_no_block(server):
    for seed in range(50, 54):
        server.complete(prompt_of(seed, 8 * PAGE))
    time.sleep(1.0)
    (storage,) = server.storage_pids()
    pids = [server.engine_pid(), storage]
    started = time.monotonic()
    before = sum(map(cpu_seconds, pids))
    time.sleep(3.0)
    used = (sum(map(cpu_seconds, pids)) - before) / (time.monotonic() - started)
    assert used < 0.1
    assert server.reset()  # vLLM refuses while a block is referenced
    server.nudge()
    samples = server.metrics()
    assert samples["vllm:hicache_device_blocks_held"] == 0
    assert samples["vllm:kv_cache_usage_perc"] == 0
    assert BLOCK < PAGE  # a hit counted in pages is one in blocks as well
