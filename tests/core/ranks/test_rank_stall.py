"""Signs of workers over time: who stopped, and who only waits."""

import pytest

from vllm_hicache.rank_places import places
from vllm_hicache.rank_stall import StallWatch, WorkerSigns

DEADLINE_S = 10.0
TP2_PP2 = places(2, 2)  # workers 0 and 1 are the first stage


class Bench:
    """A watch and the signs of four workers, all at step 5."""

    def __init__(self):
        self.watch = StallWatch(TP2_PP2, DEADLINE_S)
        self.now = 100.0
        self.signs = {i: WorkerSigns(0, 5, 5, 7, 3) for i in range(4)}
        self.frozen: set[int] = set()

    def set(self, worker_id, **signs):
        self.signs[worker_id] = self.signs[worker_id]._replace(**signs)

    def begin(self, step, *workers):
        for worker_id in workers:
            self.set(worker_id, steps_begun=step)

    def end(self, step, *workers):
        for worker_id in workers:
            self.set(worker_id, steps_ended=step)

    def run(self, seconds):
        """Everybody's pulse beats, but for the frozen ones; the stalls that were told."""
        told = []
        for _ in range(int(seconds)):
            self.now += 1
            for i in self.signs.keys() - self.frozen:
                self.set(i, pulse=self.signs[i].pulse + 1)
            stall = self.watch.look(dict(self.signs), self.now)
            if stall is not None:
                told.append((stall.workers, stall.step, stall.why))
        return told


@pytest.fixture
def bench():
    return Bench()


def test_an_idle_engine_is_no_stall(bench):
    assert bench.run(100) == []


def test_steps_that_go_on_are_no_stall(bench):
    for step in range(6, 30):
        bench.begin(step, 0, 1, 2, 3)
        assert bench.run(3) == []
        bench.end(step, 0, 1, 2, 3)


def test_a_step_after_a_long_rest_is_no_stall(bench):
    assert bench.run(100) == []
    bench.begin(6, 0, 1)
    assert bench.run(DEADLINE_S - 1) == []
    bench.begin(6, 2, 3)
    bench.end(6, 0, 1, 2, 3)
    assert bench.run(100) == []


@pytest.mark.parametrize("worker_id", range(4))
def test_a_process_without_a_sign_of_life_is_named_once(bench, worker_id):
    bench.run(3)
    bench.frozen = {worker_id}
    bench.begin(6, *({0, 1, 2, 3} - {worker_id}))
    assert bench.run(DEADLINE_S - 1) == []
    told = bench.run(100)
    assert told == [((worker_id,), 6, "no sign of life of the process for 10 s")]


def test_a_stopped_process_is_named_on_an_idle_engine_too(bench):
    bench.run(3)
    bench.frozen = {2}
    assert [workers for workers, _, _ in bench.run(20)] == [(2,)]


def test_who_went_on_and_stops_again_is_named_again(bench):
    bench.run(3)
    bench.frozen = {2}
    assert len(bench.run(20)) == 1
    bench.frozen = set()
    assert bench.run(20) == []
    bench.frozen = {2}
    assert len(bench.run(20)) == 1


def test_who_has_not_begun_a_step_that_others_began_is_named(bench):
    bench.begin(6, 0, 2, 3)
    ((workers, step, why),) = bench.run(30)
    assert (workers, step) == ((1,), 6)
    assert why == "step 6 was not begun for 10 s; others began it"


def test_later_stages_that_wait_are_not_blamed_for_the_first_one(bench):
    bench.begin(6, 0)  # worker 1 has stopped, and the second stage gets nothing
    assert [workers for workers, _, _ in bench.run(30)] == [(1,)]


def test_a_first_stage_that_went_on_is_not_blamed_for_the_second_one(bench):
    bench.begin(7, 0, 1)
    bench.end(6, 0, 1)
    bench.begin(6, 3)
    assert [workers for workers, _, _ in bench.run(30)] == [(2,)]


def test_a_stage_that_hangs_in_the_middle_of_a_step_is_named_as_a_whole(bench):
    bench.begin(6, 0, 1)
    ((workers, step, why),) = bench.run(30)
    assert (workers, step) == ((0, 1), 6)
    assert "was begun and not ended" in why
    assert "one of these" in why


@pytest.mark.parametrize("kind", ["save", "load"])
def test_a_copy_that_does_not_end_is_named(bench, kind):
    bench.run(3)
    for i in range(4):
        bench.set(i, **{f"{kind}s_done": 9 if i != 3 else 8})
    ((workers, _, why),) = bench.run(30)
    assert workers == (3,)
    assert why == f"{kind} 9 has not ended for 10 s; others ended {kind} 9"


def test_a_slow_copy_that_goes_on_is_no_stall(bench):
    for i in range(3):
        bench.set(i, saves_done=40)
    for done in range(8, 40):
        bench.set(3, saves_done=done)
        assert bench.run(DEADLINE_S - 2) == []


def test_a_worker_that_was_ahead_for_long_is_not_late_at_once(bench):
    bench.run(100)
    for i in range(3):
        bench.set(i, saves_done=8)
    assert bench.run(DEADLINE_S - 1) == []


def test_a_scheduler_process_that_slept_blames_nobody(bench):
    bench.run(3)
    bench.begin(6, 0, 1, 2)
    bench.now += 1000  # the whole machine was suspended
    bench.frozen = {0, 1, 2, 3}
    assert bench.run(1) == []
    bench.frozen = set()
    bench.begin(6, 3)
    bench.end(6, 0, 1, 2, 3)
    assert bench.run(30) == []


def test_without_boards_nobody_is_judged():
    watch = StallWatch(TP2_PP2, DEADLINE_S)
    assert [watch.look({}, float(second)) for second in range(100)] == [None] * 100


def test_places_follow_vllms_order_of_ranks():
    everyone = [(p.tp_rank, p.cp_rank, p.pp_rank) for p in places(2, 2, 2)]
    assert everyone == [(t, c, p) for p in range(2) for c in range(2) for t in range(2)]
