"""Layers wait for their own loads on every worker, on pipeline stages, and with the V2 runner."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from child_process import run_child, workers
from engine_in_process import PAGE, Answer, assert_same, prompt_of, restored_hit, running
from tiny_hybrids import write_hybrid
from v2_runner import RUNNER, run_v2_child
from watched_restore import NUM_REPEATED, TURN_TOKENS

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

COLD_TOLERANCE = 1e-4
LENGTHS = (PAGE - 1, PAGE + 1, 600)
PAIR = (700, 900)
LAYERWISE = {"load_mode": "layerwise"}
CHUNKS = {"max_num_batched_tokens": 256}
TOPOLOGIES = {"tp2": (2, 1, ""), "pp2": (1, 2, ""), "pp2-uneven": (1, 2, "3,1")}


def answers_of(phase: Mapping[str, Any], *keys: str) -> list[Answer]:
    return [Answer(tuple(t), tuple(p), cached) for key in keys for t, p, cached in phase[key]]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_worker_restores_layer_by_layer(
    name: str, tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    options, environment = workers(*TOPOLOGIES[name])
    specification = {
        "model": str(tiny_llama()),
        "storage": str(tmp_path / "store"),
        "options": {**options, **CHUNKS},
        "lengths": LENGTHS,
        "pair": PAIR,
        "lives": [
            {"extra": LAYERWISE, "phases": ["cold", "device", "reset:host"]},
            {"extra": LAYERWISE, "phases": ["file", "reset:host again"]},
        ],
    }
    lives = run_child("restore_child", specification, tmp_path, environment)
    phases = {phase["name"]: phase for life in lives for phase in life["phases"]}
    cold = answers_of(phases["cold"], "answers", "pair")
    device = answers_of(phases["device"], "answers")
    hits = [restored_hit(length) for length in (*LENGTHS, *PAIR)]
    for restored in ("host", "file", "host again"):
        answers = answers_of(phases[restored], "answers", "pair")
        counters = phases[restored]["counters"]
        assert [answer.cached for answer in answers] == hits
        assert_same(answers, cold, COLD_TOLERANCE)
        assert_same(answers[1 : len(LENGTHS)], device[1:])
        tier = "storage" if restored == "file" else "host"
        assert counters[f"served_tokens/{tier}"] == sum(hits)
        assert counters["loaded_bytes/async"] == 0
        assert counters["loaded_bytes/sync"] == sum(hits) * sum(lives[0]["page_bytes"]) // PAGE
    assert [life["problems"] for life in lives] == [[], []]


def test_windows_alone_are_restored_layer_by_layer(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    llama, name = tiny_llama(), "mistralswa"
    model = write_hybrid(name, llama.parent / name, llama)
    prompts = [prompt_of(f"window {n}", n) for n in LENGTHS]
    hits = [restored_hit(n) for n in LENGTHS]
    extra = {**LAYERWISE, "fixed_weights": True}
    with running(model, tmp_path / "store", extra=extra, **CHUNKS) as engine:
        cold = engine.ask_each(prompts)
        engine.settle()
        engine.reset_device()
        host = engine.ask_each(prompts)
        engine.settle()
        engine.reset_all()
        file = engine.ask_each(prompts)
        engine.settle()
        counters = engine.counters()
        engine.assert_idle_and_clean()
    assert [a.cached for a in host] == [a.cached for a in file] == hits
    assert counters["served_tokens/host"] == counters["served_tokens/storage"] == sum(hits)
    assert counters["loaded_bytes/async"] == 0
    assert_same(host, cold, COLD_TOLERANCE)
    assert_same(file, host)


@pytest.mark.parametrize("is_async", [False, True], ids=["", "asynchronous-scheduling"])
def test_the_v2_runner_restores_layer_by_layer(
    is_async: bool, tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    specification = {
        "model": str(tiny_llama()),
        "storage": {"url": f"file://{tmp_path}/store"},
        "options": {**CHUNKS, "block_size": 32},
        "lengths": LENGTHS,
        "is_async": is_async,
        "lives": [
            {"extra": LAYERWISE, "phases": ["cold", "reset:host"]},
            {"extra": LAYERWISE, "phases": ["file"]},
        ],
    }
    lives = run_v2_child(specification, tmp_path)
    assert [life["runner"] for life in lives] == [RUNNER] * 2
    assert [life["most_batches"] for life in lives] == [1 + is_async] * 2
    phases = {phase["name"]: phase for life in lives for phase in life["phases"]}
    hits = [restored_hit(length) for length in (*LENGTHS, TURN_TOKENS + NUM_REPEATED)]
    cold = phases["cold"]
    for name, tier in (("host", "host"), ("file", "storage")):
        restored = phases[name]
        answers = answers_of(restored, "answers")
        assert [answer.cached for answer in answers] == hits
        # The last prompt is the next turn of what was asked cold.
        assert_same(answers[:-1], answers_of(cold, "answers")[:-1], COLD_TOLERANCE)
        for hit, computed, held in zip(hits, cold["blocks"], restored["blocks"], strict=True):
            blocks = [str(place) for place in range(hit // 32)]
            assert [held[0][place] for place in blocks] == [computed[0][place] for place in blocks]
        assert restored["counters"][f"served_tokens/{tier}"] == sum(hits)
        assert restored["counters"]["loaded_bytes/async"] == 0
    assert [life["problems"] for life in lives] == [[], []]
