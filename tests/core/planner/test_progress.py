"""The join of all workers' counters: the minimum, once, in order."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.plan import Direction
from vllm_hicache.progress import ProgressJoin, WorkerProgress

SAVE, LOAD = Direction.SAVE, Direction.LOAD


def _consume(join: ProgressJoin, direction: Direction = SAVE) -> list[tuple[int, bool]]:
    return [(outcome.op_id, outcome.is_ok) for outcome in join.consume(direction)]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_surplus_of_a_fast_worker_stays_queued(order):
    """Trace A: worker 0 has done A, worker 1 A and B, worker 2 nothing yet."""
    join = ProgressJoin(3)
    done = [1, 2, 0]
    for worker_id in order:
        join.update(worker_id, WorkerProgress(saves_done=done[worker_id]))
    assert _consume(join) == []
    join.update(2, WorkerProgress(saves_done=1))
    assert _consume(join) == [(1, True)]
    assert _consume(join) == []
    join.update(0, WorkerProgress(saves_done=2))
    join.update(2, WorkerProgress(saves_done=2))
    assert _consume(join) == [(2, True)]


def test_a_worker_that_has_said_nothing_has_done_nothing():
    """Trace E: a worker with an empty share still has to acknowledge."""
    join = ProgressJoin(2)
    join.update(0, WorkerProgress(saves_done=3))
    assert _consume(join) == []
    join.update(1, WorkerProgress(saves_done=3))
    assert _consume(join) == [(1, True), (2, True), (3, True)]


def test_an_error_keeps_its_place():
    """Trace C: a failed operation is acknowledged like the others, and fails for all."""
    join = ProgressJoin(2)
    join.update(0, WorkerProgress(saves_done=3))
    join.update(1, WorkerProgress(saves_done=3, failed_saves=(2,)))
    assert _consume(join) == [(1, True), (2, False), (3, True)]


def test_a_failure_beyond_the_slowest_worker_is_remembered():
    join = ProgressJoin(2)
    join.update(0, WorkerProgress(saves_done=2, failed_saves=(2,)))
    join.update(1, WorkerProgress(saves_done=1))
    assert _consume(join) == [(1, True)]
    join.update(0, WorkerProgress(saves_done=2))
    join.update(1, WorkerProgress(saves_done=2))
    assert _consume(join) == [(2, False)]


def test_directions_do_not_touch_each_other():
    join = ProgressJoin(1)
    join.update(0, WorkerProgress(saves_done=1, loads_done=2, failed_loads=(1,)))
    assert _consume(join, LOAD) == [(1, False), (2, True)]
    assert _consume(join, SAVE) == [(1, True)]
    assert (join.consumed(SAVE), join.consumed(LOAD)) == (1, 2)


def test_a_late_report_is_ignored_and_counted():
    join = ProgressJoin(1)
    join.update(0, WorkerProgress(saves_done=2, loads_done=2))
    assert _consume(join) == [(1, True), (2, True)]
    join.update(0, WorkerProgress(saves_done=1, loads_done=1, failed_saves=(2,)))
    assert join.num_ignored == 2
    assert _consume(join) == []
    assert _consume(join, LOAD) == [(1, True), (2, True)]


def test_a_report_told_twice_changes_nothing():
    join = ProgressJoin(1)
    for _ in range(2):
        join.update(0, WorkerProgress(saves_done=2, failed_saves=(1,)))
    assert _consume(join) == [(1, False), (2, True)]
    join.update(0, WorkerProgress(saves_done=2, failed_saves=(1,)))
    assert _consume(join) == []


@pytest.mark.parametrize("worker_id", [-1, 2])
def test_a_report_of_an_unknown_worker_is_ignored_and_counted(worker_id):
    join = ProgressJoin(2)
    join.update(worker_id, WorkerProgress(saves_done=9))
    assert join.num_ignored == 1
    assert _consume(join) == []


def test_failures_that_may_be_forgotten_count_as_failures():
    join = ProgressJoin(1)
    join.update(0, WorkerProgress(saves_done=4, failed_saves=(3,), saves_in_doubt=2))
    assert _consume(join) == [(1, False), (2, False), (3, False), (4, True)]


def test_the_slowest_worker_and_its_copy_time_are_known():
    join = ProgressJoin(2)
    join.update(0, WorkerProgress(saves_done=3, save_busy_s=1.0, load_busy_s=4.0))
    join.update(1, WorkerProgress(saves_done=1, save_busy_s=2.0, load_busy_s=3.0))
    assert join.slowest_worker(SAVE) == 1
    assert (join.busy_seconds(SAVE), join.busy_seconds(LOAD)) == (2.0, 4.0)


def test_a_late_report_does_not_turn_back_copy_time():
    join = ProgressJoin(1)
    join.update(0, WorkerProgress(loads_done=2, load_busy_s=2.0))
    join.update(0, WorkerProgress(loads_done=1, load_busy_s=1.0))
    assert join.busy_seconds(LOAD) == 2.0


@given(data=st.data())
def test_any_order_of_reports_gives_every_operation_once_with_one_outcome(data):
    """Random interleavings against the definition: done on all, failed on any."""
    num_workers, num_operations = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 8))
    failed = [
        data.draw(st.sets(st.integers(1, max(1, num_operations)))) for _ in range(num_workers)
    ]
    join, outcomes, done = ProgressJoin(num_workers), [], [0] * num_workers
    while min(done) < num_operations:
        worker_id = data.draw(
            st.sampled_from([w for w, n in enumerate(done) if n < num_operations])
        )
        done[worker_id] += data.draw(st.integers(1, num_operations - done[worker_id]))
        told = data.draw(st.sampled_from([done[worker_id], max(0, done[worker_id] - 1)]))
        for upto in (told, done[worker_id]):
            failures = tuple(op for op in failed[worker_id] if op <= upto)
            join.update(worker_id, WorkerProgress(saves_done=upto, failed_saves=failures))
        if data.draw(st.booleans()):
            outcomes += _consume(join)
            assert len(outcomes) == min(done)
    outcomes += _consume(join)
    everywhere = set().union(*failed)
    assert outcomes == [(op, op not in everywhere) for op in range(1, num_operations + 1)]


def test_host_slots_are_ready_where_all_workers_have_them_and_never_fewer():
    join = ProgressJoin(3, num_ready_slots=2)
    assert (join.has_new_slots, join.take_slots()) == (False, (2, 0))
    join.update(0, WorkerProgress(slots_ready=9))
    join.update(1, WorkerProgress(slots_ready=5))
    assert join.take_slots() == (2, 0)
    join.update(2, WorkerProgress(slots_ready=7))
    assert join.take_slots() == (5, 0)
    join.update(1, WorkerProgress(slots_ready=3))  # a late report
    assert (join.has_new_slots, join.take_slots()) == (False, (5, 0))


def test_slots_that_one_worker_never_gets_are_lost_for_all():
    join = ProgressJoin(3, num_ready_slots=2)
    join.update(0, WorkerProgress(slots_ready=9, slots_refused=1))
    join.update(2, WorkerProgress(slots_ready=6, slots_refused=4))
    join.update(0, WorkerProgress(slots_ready=9))
    assert join.take_slots() == (2, 4)
    assert join.num_short_workers == 2
