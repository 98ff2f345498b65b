"""What vLLM's resets drop, and that they succeed right after an answer."""

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer

import pytest
from copy_spy import CopySpy, spying
from engine_in_process import PAGE, Engine, assert_same, difference, prompt_of, running

from vllm_hicache.connectors.scheduler_side import SchedulerSide
from vllm_hicache.plan import Direction

pytestmark = pytest.mark.e2e
COLD_TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[False, True], ids=["weights may change", "fixed weights"])
def engine_and_spy(
    request: pytest.FixtureRequest,
    tiny_llama: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Engine, CopySpy, bool]]:
    store = tmp_path_factory.mktemp("resets") / "store"
    extra = {"fixed_weights": request.param}
    with spying() as spy, running(tiny_llama(), store, extra=extra) as engine:
        yield engine, spy, request.param


def test_a_reset_right_after_an_answer_succeeds_twenty_times_in_a_row(
    engine_and_spy: tuple[Engine, CopySpy, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, spy, _ = engine_and_spy
    # The limit is for copies that hang (below); a machine that stands still shall not reach it.
    monkeypatch.setattr(SchedulerSide._drain_copies, "__defaults__", (10.0,))
    for i in range(20):
        spy.close(Direction.SAVE)
        engine.ask([prompt_of(f"reset {i}", 3 * PAGE)], max_tokens=2)
        assert engine.planner.saves.num_running > 0
        opening = Timer(0.01, spy.open)
        opening.start()
        assert engine.llm.reset_prefix_cache()
        opening.join()
        assert engine.planner.saves.num_running == 0
    engine.assert_idle_and_clean()


def test_a_reset_of_the_device_keeps_host_and_storage(
    engine_and_spy: tuple[Engine, CopySpy, bool],
) -> None:
    engine, _, _ = engine_and_spy
    prompt = prompt_of("device only", 3 * PAGE + 1)
    cold = engine.ask([prompt])
    engine.settle()
    before = engine.counters()
    engine.reset_device()
    restored = engine.ask([prompt])
    engine.assert_idle_and_clean()
    counted = difference(engine.counters(), before)
    assert counted["served_tokens/host"] == 3 * PAGE
    assert counted["resets"] == 0
    assert_same(restored, cold, COLD_TOLERANCE)


def test_a_reset_of_the_connector_drops_host_and_storage_unless_weights_are_fixed(
    engine_and_spy: tuple[Engine, CopySpy, bool],
) -> None:
    engine, _, fixed = engine_and_spy
    prompt = prompt_of("everything", 3 * PAGE + 1)
    cold = engine.ask([prompt])
    engine.settle()
    before, namespace = engine.counters(), engine.planner.namespace
    engine.reset_all()
    assert len(engine.planner.host.index) == 0
    assert (engine.planner.namespace == namespace) is fixed
    again = engine.ask([prompt])
    engine.settle()
    counted = difference(engine.counters(), before)
    assert counted["served_tokens/host"] == 0
    assert counted["served_tokens/storage"] == (3 * PAGE if fixed else 0)
    assert [answer.cached for answer in again] == [3 * PAGE if fixed else 0]
    assert counted["resets"] == 1
    assert_same(again, cold, COLD_TOLERANCE)
    # What was computed after the reset is kept as ever.
    engine.reset_device()
    assert [answer.cached for answer in engine.ask([prompt])] == [3 * PAGE]
    engine.assert_idle_and_clean()


def test_pages_whose_copy_was_under_way_at_a_reset_of_the_connector_are_not_seen_again(
    engine_and_spy: tuple[Engine, CopySpy, bool],
) -> None:
    engine, spy, _ = engine_and_spy
    prompt = prompt_of("under way", 3 * PAGE + 1)
    spy.close(Direction.SAVE)
    cold = engine.ask([prompt], max_tokens=1)
    assert engine.planner.saves.num_running > 0
    # vLLM refuses to reset the device while copies read its blocks, and resets the connector.
    assert engine.llm.reset_prefix_cache(reset_connector=True) is False
    spy.open()
    engine.settle()
    assert len(engine.planner.host.index) == 0
    engine.reset_device()
    again = engine.ask([prompt], max_tokens=1)
    assert [answer.cached for answer in again] == [0]
    assert_same(again, cold, COLD_TOLERANCE)
    engine.assert_idle_and_clean()
