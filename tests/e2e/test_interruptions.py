"""Aborts, failed copies, late and repeated reports: nothing leaks and no answer is wrong."""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from copy_spy import CopySpy, spying
from engine_in_process import (
    PAGE,
    Engine,
    assert_same,
    difference,
    prompt_of,
    running,
    step_until,
)

from vllm_hicache.plan import Direction
from vllm_hicache.progress import WorkerProgress

pytestmark = pytest.mark.e2e
COLD_TOLERANCE = 1e-4
CROWD = 50
CROWD_LENGTH = 2 * PAGE + 5


@pytest.fixture(scope="module")
def shared(
    tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, CopySpy]]:
    """Asynchronous loads only, few running requests, storage."""
    store = tmp_path_factory.mktemp("interruptions") / "store"
    with (
        spying() as spy,
        running(
            tiny_llama(),
            store,
            extra={"sync_load_max_ms": 0},
            max_num_batched_tokens=256,
            max_num_seqs=8,
        ) as engine,
    ):
        yield engine, spy


@pytest.fixture
def engine(shared: tuple[Engine, CopySpy]) -> Iterator[Engine]:
    engine, spy = shared
    engine.settle()
    engine.reset_device()
    spy.forget()
    yield engine
    spy.forget()
    engine.assert_idle_and_clean()


@pytest.fixture
def spy(shared: tuple[Engine, CopySpy]) -> CopySpy:
    return shared[1]


def crowd(name: str) -> list[list[int]]:
    return [prompt_of(f"{name} {i}", CROWD_LENGTH) for i in range(CROWD)]


def assert_alive(engine: Engine, prompt: list[int], cached: int) -> None:
    """The next answer is right, and comes from where it should."""
    engine.assert_idle_and_clean()
    engine.reset_device()
    (answer,) = engine.ask([prompt])
    (cold,) = engine.ask([{"prompt_token_ids": prompt, "cache_salt": "never seen before"}])
    assert answer.cached == cached
    assert_same([answer], [cold], COLD_TOLERANCE)


# Aborts ----------------------------------------------------------------------------------------


def test_fifty_requests_aborted_while_queued_leave_nothing(engine: Engine) -> None:
    prompts = crowd("queued")
    request_ids = [engine.add(f"queued {i}", prompt) for i, prompt in enumerate(prompts)]
    engine.step()
    assert len(engine.scheduler.waiting) >= CROWD - 8
    engine.abort(request_ids)
    # The first was computed in the one step that ran; it was saved all the same.
    assert_alive(engine, prompts[-1], cached=0)


def test_fifty_requests_aborted_before_their_first_step_leave_nothing(engine: Engine) -> None:
    prompts = crowd("at once")
    engine.abort([engine.add(f"at once {i}", prompt) for i, prompt in enumerate(prompts)])
    assert_alive(engine, prompts[0], cached=0)


def test_fifty_requests_aborted_while_loading_leave_nothing(engine: Engine, spy: CopySpy) -> None:
    prompts = crowd("loading")
    engine.ask(prompts, max_tokens=1)
    engine.settle()
    engine.reset_device()
    spy.close(Direction.LOAD)
    request_ids = [engine.add(f"loading {i}", prompt) for i, prompt in enumerate(prompts)]
    step_until(engine, lambda: engine.planner.loads.num_running >= CROWD)
    engine.abort(request_ids)
    for _ in range(5):
        engine.step()
    # Blocks stay with a load until it has ended, or another request would get its bytes.
    assert engine.planner.loads.num_running == CROWD
    assert engine.free_blocks < engine.first_free_blocks - 3 * CROWD
    spy.open()
    assert_alive(engine, prompts[7], cached=2 * PAGE)


def test_fifty_requests_aborted_while_saving_leave_nothing(engine: Engine, spy: CopySpy) -> None:
    prompts = crowd("saving")
    spy.close(Direction.SAVE)
    request_ids = [
        engine.add(f"saving {i}", prompt, max_tokens=500) for i, prompt in enumerate(prompts)
    ]
    step_until(engine, lambda: engine.planner.saves.num_running >= 8)
    held = engine.side._blocks.num_held
    engine.abort(request_ids)
    for _ in range(5):
        engine.step()
    assert engine.side._blocks.num_held >= held > 0
    spy.open()
    # What was computed before the abort is kept.
    assert_alive(engine, prompts[0], cached=2 * PAGE)


def test_fifty_finished_requests_whose_saves_are_slow_leave_nothing(
    engine: Engine, spy: CopySpy
) -> None:
    prompts = crowd("slow saves")
    spy.delay_s[Direction.SAVE] = 0.02
    engine.ask(prompts, max_tokens=1)
    assert engine.planner.saves.num_running > 0
    assert_alive(engine, prompts[-1], cached=2 * PAGE)


def test_a_request_aborted_while_its_fetch_runs_leaves_nothing(engine: Engine) -> None:
    prompt = prompt_of("fetching", CROWD_LENGTH)
    request_ids = [engine.add(f"fetching {i}", prompt) for i in range(5)]
    assert engine.planner.prefetcher.num_querying == 1
    engine.abort(request_ids)
    assert_alive(engine, prompt, cached=0)


def test_a_follower_survives_the_abort_of_the_request_whose_load_it_awaits(
    engine: Engine, spy: CopySpy
) -> None:
    prompt = prompt_of("followed", CROWD_LENGTH)
    cold = engine.ask([prompt])
    engine.settle()
    engine.reset_device()
    spy.close(Direction.LOAD)
    leader = engine.add("leader", prompt)
    step_until(engine, lambda: engine.planner.loads.num_running == 1)
    engine.add("follower", prompt)
    for _ in range(5):
        engine.step()
    assert engine.planner.loads.num_running == 1
    engine.abort([leader])
    spy.open()
    outputs = []
    while engine.scheduler.has_requests():
        outputs += [out for out in engine.step() if out.finished and out.request_id == "follower"]
    (output,) = outputs
    assert tuple(output.outputs[0].token_ids) == cold[0].tokens


# Failed copies ---------------------------------------------------------------------------------


def test_an_asynchronous_load_that_fails_costs_a_recompute_and_the_answer_is_right(
    engine: Engine, spy: CopySpy
) -> None:
    prompt = prompt_of("failed load", 4 * PAGE + 9)
    cold = engine.ask([prompt])
    engine.settle()
    engine.reset_device()
    before = engine.counters()
    spy.num_to_fail[Direction.LOAD] = 1
    again = engine.ask([prompt])
    engine.settle()
    counted = difference(engine.counters(), before)
    assert counted["copy_failures"] == 1
    assert counted["served_tokens/host"] == 0
    assert counted["unserved_tokens/load_failed"] == 4 * PAGE
    assert_same(again, cold, COLD_TOLERANCE)
    # The pages of the failed load have left; what was recomputed is saved anew.
    assert_alive(engine, prompt, cached=4 * PAGE)


def test_a_save_that_fails_is_a_miss_later(engine: Engine, spy: CopySpy) -> None:
    prompt = prompt_of("failed save", 2 * PAGE + 9)
    before = engine.counters()
    spy.num_to_fail[Direction.SAVE] = 1
    engine.ask([prompt], max_tokens=1)
    engine.settle()
    counted = difference(engine.counters(), before)
    assert counted["copy_failures"] == 1
    assert counted["save_skipped_tokens/copy_failed"] == 2 * PAGE
    assert_alive(engine, prompt, cached=0)


# Late and duplicate completions ----------------------------------------------------------------


def test_late_and_duplicate_reports_of_workers_change_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = crowd("late reports")[:10]
    connector, join = engine.scheduler.connector, engine.planner.join
    told, history = connector.update_connector_output, deque(maxlen=6)

    def tell_twice_and_again_later(output: object) -> None:
        report = output.kv_connector_worker_meta
        for old in history:
            join.update(0, old)
        told(output)
        told(output)
        join.update(17, WorkerProgress(saves_done=10**6))  # a worker that does not exist
        if report is not None:
            history.append(report.progress[0])

    monkeypatch.setattr(connector, "update_connector_output", tell_twice_and_again_later)
    ignored = join.num_ignored
    cold = engine.ask(prompts)
    engine.settle()
    engine.reset_device()
    restored = engine.ask(prompts)
    engine.settle()
    assert join.num_ignored > ignored + 10
    assert [answer.cached for answer in restored] == [2 * PAGE] * 10
    assert_same(restored, cold, COLD_TOLERANCE)
    monkeypatch.undo()
    assert_alive(engine, prompts[0], cached=2 * PAGE)


def test_hooks_for_requests_that_have_ended_change_nothing(engine: Engine) -> None:
    prompt = prompt_of("ended", CROWD_LENGTH)
    request_id = engine.add("ended", prompt, max_tokens=2)
    request = engine.scheduler.requests[request_id]
    connector = engine.scheduler.connector
    engine.settle()
    before = engine.counters()
    assert connector.request_finished(request, [1, 2, 3]) == (False, None)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.update_state_after_alloc(
        request, engine.scheduler.kv_cache_manager.empty_kv_cache_blocks, 0
    )
    assert difference(engine.counters(), before)["saved_tokens"] == 0
    assert_alive(engine, prompt, cached=2 * PAGE)
