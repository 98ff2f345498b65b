"""Loads of which each layer waits for its own part: the same answers, and the right order."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from engine_in_process import (
    PAGE,
    Engine,
    assert_same,
    difference,
    prompt_of,
    restored_hit,
    running,
)
from span_spy import SpanSpy, spying_spans

from vllm_hicache.connectors.hicache import HiCacheConnector

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

COLD_TOLERANCE = 1e-4
NUM_LAYERS = 4
LENGTHS = (PAGE - 1, PAGE, PAGE + 1, 600, 2049)
PROMPTS = [prompt_of(f"layers {n}", n) for n in LENGTHS]
HITS = [restored_hit(n) for n in LENGTHS]
LAYERWISE = {"load_mode": "layerwise", "fixed_weights": True}


@pytest.fixture(scope="module")
def spied(
    tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, SpanSpy]]:
    """One engine for all that does not end it."""
    store = tmp_path_factory.mktemp("layerwise") / "store"
    options = {"max_num_batched_tokens": 256}
    with spying_spans() as spy, running(tiny_llama(), store, extra=LAYERWISE, **options) as engine:
        yield engine, spy


@pytest.fixture
def engine(spied: tuple[Engine, SpanSpy]) -> Engine:
    spied[1].events.clear()
    return spied[0]


@pytest.fixture
def spy(spied: tuple[Engine, SpanSpy]) -> SpanSpy:
    return spied[1]


@contextmanager
def noting_layers(events: list[str]) -> Iterator[None]:
    """``layer N`` when the attention of a layer has waited and is about to run."""
    wait = HiCacheConnector.wait_for_layer_load

    def wait_and_note(connector: HiCacheConnector, layer_name: str) -> None:
        wait(connector, layer_name)
        events.append(f"layer {layer_name.split('.')[2]}")

    with patch.object(HiCacheConnector, "wait_for_layer_load", wait_and_note):
        yield


def test_cold_host_and_file_answers_are_the_same_and_counted(engine: Engine) -> None:
    cold = engine.ask_each(PROMPTS)
    engine.settle()
    device = engine.ask_each(PROMPTS)
    engine.reset_device()
    before = engine.counters()
    host = engine.ask_each(PROMPTS)
    engine.settle()
    between = engine.counters()
    engine.reset_all()
    file = engine.ask_each(PROMPTS)
    engine.settle()
    counts = [difference(between, before), difference(engine.counters(), between)]
    assert [a.cached for a in cold] == [0] * len(LENGTHS)
    assert [a.cached for a in host] == [a.cached for a in file] == HITS
    assert [count["served_tokens/host"] for count in counts] == [sum(HITS), 0]
    assert [count["served_tokens/storage"] for count in counts] == [0, sum(HITS)]
    for count in counts:
        assert count["loaded_bytes/sync"] == sum(HITS) * engine.page_bytes // PAGE
        assert count["loaded_bytes/async"] == 0
    assert_same(host[1:], device[1:])
    assert_same(file, host)
    assert_same(host, cold, COLD_TOLERANCE)
    engine.assert_idle_and_clean()


def test_restored_blocks_hold_the_kv_of_their_tokens(engine: Engine) -> None:
    prompt = prompt_of("in its place", 600)
    engine.ask([prompt])
    engine.settle()
    engine.reset_device()
    assert engine.ask([prompt])[0].cached == 576
    engine.assert_kv_is_right(prompt, 576)
    engine.assert_idle_and_clean()


def test_layers_run_while_the_spans_behind_them_are_still_to_come(
    engine: Engine, spy: SpanSpy
) -> None:
    prompt = prompt_of("slow", 600)
    expected = engine.ask([prompt], max_tokens=1)
    engine.settle()
    engine.reset_device()
    spy.gates[NUM_LAYERS - 1] = threading.Event()
    before_last = f"layer {NUM_LAYERS - 2}"

    def open_when_layers_ran() -> None:
        deadline = time.monotonic() + 50
        while before_last not in spy.events and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.3)  # a layer that does not wait runs now
        spy.gates[NUM_LAYERS - 1].set()

    spy.events.clear()
    opener = threading.Thread(target=open_when_layers_ran, daemon=True)
    with noting_layers(spy.events):
        opener.start()
        answers = engine.ask([prompt], max_tokens=1)
    opener.join(10)
    spy.gates.clear()
    places = {event: place for place, event in enumerate(spy.events)}
    assert len(places) == len(spy.events) == 2 * NUM_LAYERS
    for number in range(NUM_LAYERS):
        assert places[f"span {number}"] < places[f"layer {number}"]
    assert places["layer 0"] < places[before_last] < places[f"span {NUM_LAYERS - 1}"]
    assert_same(answers, expected, COLD_TOLERANCE)
    engine.assert_idle_and_clean()


def test_a_step_that_waited_for_a_load_says_nothing_of_the_speed_of_computing(
    engine: Engine,
) -> None:
    known = prompt_of("timed", 4 * PAGE)
    engine.ask([known])
    engine.settle()
    engine.reset_device()
    timed: list[int] = []
    with patch.object(engine.planner.costs, "prefilled", lambda tokens, _: timed.append(tokens)):
        assert engine.ask([known + prompt_of("new", 300)])[0].cached == 4 * PAGE
    # Chunks of 256: the first one came with the load. Steps of one token decode; those of none
    # waited for what storage answers.
    assert [tokens for tokens in timed if tokens > 1] == [44]
    engine.assert_idle_and_clean()


def test_requests_of_one_step_that_share_blocks_wait_for_the_same_spans(
    engine: Engine, spy: SpanSpy
) -> None:
    shared = prompt_of("shared", 4 * PAGE)
    prompts = [shared + prompt_of(f"tail {i}", 20 + i) for i in range(3)]
    prompts += [prompt_of("other", 3 * PAGE + 5)]
    expected = engine.ask_each(prompts)
    engine.settle()
    engine.reset_device()
    before = engine.counters()
    spy.events.clear()
    spy.delay_s = 0.05
    answers = engine.ask(prompts)
    spy.delay_s = 0.0
    engine.settle()
    counts = difference(engine.counters(), before)
    # One load of what is shared, one of the other prompt, in one step: span by span of both.
    assert spy.events == [f"span {n}" for n in range(NUM_LAYERS) for _ in range(2)]
    assert counts["served_tokens/host"] == 7 * PAGE
    assert [a.cached for a in answers] == [4 * PAGE, 4 * PAGE, 4 * PAGE, 3 * PAGE]
    assert_same(answers, expected, COLD_TOLERANCE)
    engine.assert_idle_and_clean()


def test_steps_with_new_loads_follow_one_another_before_the_first_is_acknowledged(
    engine: Engine,
) -> None:
    prompts = [prompt_of(f"steps {i}", 2 * PAGE + 7) for i in range(6)]
    expected = engine.ask_each(prompts)
    engine.settle()
    engine.reset_device()
    before = engine.counters()
    answers: dict[str, Any] = {}
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt)
        answers |= {output.request_id: output for output in engine.step() if output.finished}
    while len(answers) < len(prompts):
        answers |= {output.request_id: output for output in engine.step() if output.finished}
    engine.settle()
    counts = difference(engine.counters(), before)
    assert counts["served_tokens/host"] == len(prompts) * 2 * PAGE
    assert counts["loaded_bytes/async"] == 0
    said = [tuple(answers[str(i)].outputs[0].token_ids) for i in range(len(prompts))]
    assert said == [answer.tokens for answer in expected]
    engine.assert_idle_and_clean()
