"""Weights that change in a live engine: from then on no page of the old ones is used or kept.

vLLM tells a connector of it by a reset of external caches alone; every way to change weights that
it offers on a CPU is taken here, on one engine with a store that still holds the old pages.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from copy_spy import CopySpy, spying
from engine_in_process import (
    PAGE,
    Answer,
    Engine,
    assert_same,
    difference,
    largest_difference,
    prompt_of,
    running,
)

from vllm_hicache.plan import Direction

pytestmark = pytest.mark.e2e
COLD_TOLERANCE = 1e-4
PROMPT = prompt_of("weights", 4 * PAGE + 9)
HIT = 4 * PAGE


def reload_and_reset(engine: Engine, weights: Path) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(weights)})
    engine.reset_all()


def reload_in_a_pause(engine: Engine, weights: Path) -> None:
    """As POST /pause, a change of weights, and POST /resume."""
    core = engine.llm.llm_engine.engine_core.engine_core
    core.pause_scheduler(mode="abort", clear_cache=True)
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(weights)})
    core.resume_scheduler()
    engine.poison()


def reload_asleep(engine: Engine, weights: Path) -> None:
    """As POST /sleep and POST /wake_up around it; the CPU worker keeps its memory meanwhile."""
    engine.llm.sleep(level=1)
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(weights)})
    engine.llm.wake_up()
    engine.poison()


WAYS = (reload_and_reset, reload_in_a_pause, reload_asleep)


@dataclass(frozen=True, slots=True)
class Models:
    """Two models that differ in their weights alone, and what each answers without any cache."""

    folders: tuple[Path, Path]
    answers: tuple[list[Answer], list[Answer]]
    store: Path


@pytest.fixture(scope="module")
def models(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Models:
    folders = tiny_llama(), tiny_llama(seed=1)
    store, answers = tmp_path_factory.mktemp("weights") / "store", []
    for folder in folders:
        with running(folder) as engine:
            answers.append(engine.ask([PROMPT]))
    assert largest_difference(*answers) > 1000 * COLD_TOLERANCE
    return Models(folders, (answers[0], answers[1]), store)


@pytest.mark.full
def test_fresh_engines_use_the_pages_of_their_own_weights_alone(
    models: Models, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with running(models.folders[0], store) as engine:
        engine.ask([PROMPT])
        engine.settle()
        reload_and_reset(engine, models.folders[1])
        engine.ask([PROMPT])  # stored under an epoch that ends with the engine
        engine.settle()
    for number, cached in ((0, HIT), (1, 0), (1, HIT)):
        with running(models.folders[number], store) as fresh:
            answers = fresh.ask([PROMPT])
            fresh.assert_idle_and_clean()
            assert [answer.cached for answer in answers] == [cached]
            assert fresh.counters()["served_tokens/storage"] == cached
            assert_same(answers, models.answers[number], COLD_TOLERANCE)


@pytest.fixture(scope="module")
def engine_and_spy(models: Models) -> Iterator[tuple[Engine, CopySpy]]:
    """Started with the first weights, which are stored; swapped by the tests again and again."""
    with spying() as spy, running(models.folders[0], models.store) as engine:
        assert_same(engine.ask([PROMPT]), models.answers[0], COLD_TOLERANCE)
        engine.settle()
        yield engine, spy


@pytest.fixture
def engine(engine_and_spy: tuple[Engine, CopySpy]) -> Engine:
    return engine_and_spy[0]


@pytest.mark.parametrize("swap", WAYS, ids=lambda way: way.__name__)
def test_after_new_weights_nothing_of_the_old_ones_is_hit(
    engine: Engine, models: Models, swap: Callable[[Engine, Path], None]
) -> None:
    seen = {engine.planner.namespace}
    for number in (1, 0, 1):
        swap(engine, models.folders[number])
        # Not even the weights with which the engine started have their stored pages back: it
        # cannot know that they are the same again.
        assert engine.planner.namespace not in seen
        seen.add(engine.planner.namespace)
        before = engine.counters()
        first = engine.ask([PROMPT])
        engine.settle()
        missed = difference(engine.counters(), before)
        assert [answer.cached for answer in first] == [0]
        assert missed["served_tokens/host"] == missed["served_tokens/storage"] == 0
        assert missed["bytes_read"] == 0
        assert_same(first, models.answers[number], COLD_TOLERANCE)
        # What the new weights computed is kept, and is theirs.
        engine.reset_device()
        again = engine.ask([PROMPT])
        engine.settle()
        hit = difference(engine.counters(), before)
        assert [answer.cached for answer in again] == [HIT]
        assert hit["served_tokens/host"] == HIT
        assert_same(again, models.answers[number], COLD_TOLERANCE)
    engine.assert_idle_and_clean()


def test_without_the_reset_old_pages_would_be_hit(engine: Engine, models: Models) -> None:
    """That the test above can fail: vLLM says nothing of new weights but by a reset."""
    reload_and_reset(engine, models.folders[0])
    engine.ask([PROMPT])
    engine.settle()
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(models.folders[1])})
    engine.reset_device()
    stale = engine.ask([PROMPT])
    assert [answer.cached for answer in stale] == [HIT]
    assert largest_difference(stale, models.answers[1]) > 100 * COLD_TOLERANCE
    engine.settle()
    engine.reset_all()


def test_the_worker_lets_go_of_the_kv_cache_for_a_sleep_and_takes_it_up_again(
    engine_and_spy: tuple[Engine, CopySpy], models: Models
) -> None:
    """Hooks that vLLM 0.33 calls around the time in which the KV cache is unmapped."""
    engine, spy = engine_and_spy
    reload_and_reset(engine, models.folders[0])
    spy.delay_s[Direction.SAVE] = 0.2
    prompt = prompt_of("slept over", 4 * PAGE + 9)
    cold = engine.ask([prompt], max_tokens=1)
    assert engine.planner.saves.num_running > 0  # its pages are on their way to the host
    engine.worker_side.unregister_kv_caches()
    engine.poison()  # every copy has ended: none sees this
    engine.worker_side.restore_kv_caches()
    spy.forget()
    engine.settle()
    engine.reset_device()
    restored = engine.ask([prompt], max_tokens=1)
    assert [answer.cached for answer in restored] == [HIT]
    assert_same(restored, cold, COLD_TOLERANCE)
    engine.assert_idle_and_clean()
