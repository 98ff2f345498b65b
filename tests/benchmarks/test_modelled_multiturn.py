"""Conversations in modelled time: the model against what it was made from, and our connector beside
vLLM's own where many conversations want more blocks than the device has."""

import json
import time

import pytest

from vllm_hicache.benchmarks.device_model import HostLink, step_s
from vllm_hicache.benchmarks.virtual_clock import VirtualClock
from vllm_hicache.tiers import Direction

pytestmark = pytest.mark.vllm

TOKEN_BYTES = 131072
STEP_TOKENS = 8192


@pytest.mark.parametrize(
    ("prompt_tokens", "measured_s"), [(8192, 0.210), (32768, 1.206), (65536, 3.314)]
)
def test_a_cold_prompt_takes_as_long_as_it_did_on_an_h200(prompt_tokens, measured_s):
    chunks = [(STEP_TOKENS, start) for start in range(0, prompt_tokens, STEP_TOKENS)]
    modelled_s = sum(step_s([chunk], TOKEN_BYTES) for chunk in chunks)
    assert modelled_s == pytest.approx(measured_s, rel=0.05)


@pytest.mark.parametrize(("requests", "measured_s"), [(1, 4.84e-3), (16, 5.31e-3), (64, 6.76e-3)])
def test_a_decode_step_takes_as_long_as_it_did_on_an_h200(requests, measured_s):
    assert step_s([(1, 640)] * requests, TOKEN_BYTES) == pytest.approx(measured_s, rel=0.05)


def test_copies_of_one_direction_come_in_turn_and_do_not_hold_up_the_other():
    link = HostLink(1e9)
    first_s = link.copy(Direction.LOAD, 10**9, ready_s=5.0)
    assert first_s == pytest.approx(6.0, abs=0.01)
    assert link.copy(Direction.LOAD, 10**9, ready_s=5.5) == pytest.approx(first_s + 1, abs=0.01)
    assert link.copy(Direction.SAVE, 10**9, ready_s=5.5) == pytest.approx(6.5, abs=0.01)


def test_the_clock_is_put_back_after_an_error():
    real = time.monotonic
    clock = VirtualClock(now_s=3.0)

    def fail():
        with clock.replacing_monotonic():
            clock.wait_until(2.0)
            raise RuntimeError(str(time.monotonic()))

    with pytest.raises(RuntimeError, match=r"^3\.0$"):
        fail()
    assert time.monotonic is real


@pytest.fixture(scope="module")
def h200_arms():
    """Results and failures at the size of an H200: 4 groups of 8 conversations, 6 turns of 2,432
    and 128 tokens behind 8,192, 16 GiB on the device and 64 GiB of host memory."""
    from vllm_hicache.benchmarks import modelled_multiturn

    wrong = ["--arm-options", 'simple={"cpu_bytes_to_use": "plenty"}']
    options = modelled_multiturn.parse_options(["--arms", "simple,none,native,hicache", *wrong])
    ours = options.plans[-1]
    crowded = {**ours["connector_options"], "host_memory": 24 << 30}
    few = {"host_bytes": 24 << 30, "connector_options": crowded}
    options.plans.append({**ours, "arm": "24 GiB", **few})
    return modelled_multiturn.run_arms(options)


def test_an_arm_that_fails_is_told_and_ends_no_other(h200_arms):
    results, failures = h200_arms
    assert results.keys() == {"none", "native", "hicache", "24 GiB"}
    assert failures.keys() == {"simple"}
    assert "plenty" in failures["simple"]


def test_a_crowd_gets_as_much_from_host_as_of_vllms_connector_and_no_later(h200_arms):
    """Rules that fail under load only: waits of a copy that count as its time, loads that are
    given up because a full device has no blocks."""
    results, _ = h200_arms
    ours, native = results["hicache"], results["native"]
    assert native["host_tokens"] > 0.3 * native["prompt_tokens"]
    assert ours["host_tokens"] >= native["host_tokens"]
    assert ours["ttft_mean_s"] <= native["ttft_mean_s"]
    assert ours["wall_s"] <= native["wall_s"]


def test_where_not_all_fits_what_comes_next_is_kept(h200_arms):
    """With the least recently used page leaving first, 4 % came from host."""
    results, _ = h200_arms
    crowded = results["24 GiB"]
    assert 0.11 < crowded["host_tokens"] / crowded["prompt_tokens"] < 0.3


def test_host_memory_makes_a_crowd_of_conversations_half_as_fast_again(h200_arms):
    results, _ = h200_arms
    for arm in ("native", "hicache"):
        assert 1.5 * results[arm]["wall_s"] <= results["none"]["wall_s"]


def test_the_benchmark_prints_its_arms_and_writes_them(monkeypatch, tmp_path, capsys):
    from vllm_hicache.benchmarks import modelled_multiturn

    names = "wall_s ttft_mean_s ttft_p50_s ttft_p90_s inter_token_mean_s output_tokens again_tokens"
    more = "device_tokens host_tokens computed_tokens prompt_tokens preemptions"
    found = dict.fromkeys([*names.split(), *more.split(), "loaded_bytes", "saved_bytes"], 8)
    outcome = {"native": found}, {"hicache": "ConfigError: no"}
    monkeypatch.setattr(modelled_multiturn, "run_arms", lambda options: outcome)
    assert modelled_multiturn.main(["--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "native" in printed.out
    assert "hicache gave no result: ConfigError: no" in printed.err
    record = json.loads((tmp_path / "modelled_multiturn.json").read_text())
    assert record["failures"] == {"hicache": "ConfigError: no"}
    assert record["results"]["native"] == found
    assert record["workload"]["turns"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "none,lmcache"], "the arms here are none,native,simple,hicache; not lmcache"),
        (["--arms", "none,none"], "each once"),
        (["--arm-options", "native={"], "not valid JSON"),
        (["--turns", "0"], "must be 1 or more, got 0"),
        (["--think-s", "-1"], "must be a number of at least 0, got -1"),
        (["--link-gb-per-s", "fast"], "must be a number of at least 0.001, got fast"),
        (["--host-memory", "64"], "argument --host-memory: 64"),
        (["--device-kv-bytes", "1GiB"], "too small for the longest request"),
        (["--turns", "100"], "more than the model has"),
    ],
)
def test_wrong_options_are_refused_with_a_message(arguments, message, capsys):
    from vllm_hicache.benchmarks import modelled_multiturn

    with pytest.raises(SystemExit) as caught:
        modelled_multiturn.parse_options(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
