"""Worked traces of agreement between the stages of a pipeline, each in random interleavings.

Per stage, answers come in order; between stages, in any.
"""

from random import Random

import pytest
from interleavings import interleave, interleavings, tell
from planner_rig import Rig

from vllm_hicache.planner import ASK_AGAIN, NO_MATCH
from vllm_hicache.progress import WorkerProgress
from vllm_hicache.simulate.script import draw_script
from vllm_hicache.simulate.story import Story
from vllm_hicache.storage_messages import (
    Cancel,
    ExistsResult,
    Fetch,
    FetchProgress,
    FetchReleased,
    FetchSettled,
    Persist,
    unpack_hashes,
)

PAGE = 4
TOKENS = list(range(100, 200))
STAGES = 3


def reading(rig: Rig, num_pages: int = 6):
    """A request whose fetch of so many pages has begun on every stage."""
    state = rig.request("a", TOKENS[: num_pages * PAGE + 1])
    return state, rig.answer_query(*[num_pages] * rig.num_workers)


@interleavings
def test_trace_a_surplus_acknowledgements_wait_for_the_slowest_stage(count):
    for seed in range(count):
        rig = Rig(num_workers=STAGES)
        for name, start in (("a", 0), ("b", 50)):
            state = rig.request(name, TOKENS[start : start + PAGE])
            rig.compute(state, PAGE)
            rig.plan()
        done = [0] * STAGES
        for stage, op in interleave(Random(seed), [[1, 2]] * STAGES):
            done[stage] = op
            rig.planner.join.update(stage, WorkerProgress(saves_done=op))
            rig.planner.settle_copies(rig.now)
            assert len(rig.planner.host.index) == min(done)
        rig.audit()


@interleavings
def test_trace_a_loads_land_with_the_slowest_stage_as_well(count):
    for seed in range(count):
        rig = Rig(num_workers=STAGES)
        states = []
        for name, start in (("a", 0), ("b", 50)):
            rig.fill_host(TOKENS[start : start + PAGE], name=f"writer-{name}")
            states.append(rig.request(name, TOKENS[start : start + PAGE + 1]))
            rig.begin_load(states[-1])
            rig.plan()
        done, landed = [0] * STAGES, []
        for stage, op in interleave(Random(seed), [[1, 2]] * STAGES):
            done[stage] = op
            rig.planner.join.update(stage, WorkerProgress(saves_done=2, loads_done=op))
            landed += rig.planner.settle_copies(rig.now).loaded
            assert [load.state for load in landed] == states[: min(done)]
            assert rig.planner.host.num_pinned == 2 - min(done)
        rig.audit()


@interleavings
def test_trace_b_a_stop_uses_what_is_agreed_then_and_later_pages_change_nothing(count):
    answers = [2, 4, 6]
    for seed in range(count):
        rng = Random(seed)
        rig = Rig(num_workers=STAGES, has_storage=True)
        state, fetch = reading(rig)
        progress = [FetchProgress(fetch.op, n) for n in answers]
        queue = [*progress, FetchSettled(fetch.op, 6, "complete"), FetchReleased(fetch.op)]
        assert rig.match(state) == ASK_AGAIN  # the first lookup starts the clock
        stop_after, load = rng.randrange(3 * len(queue)), None
        told = [0] * STAGES
        for number, (stage, event) in enumerate(interleave(rng, [queue] * STAGES)):
            tell(rig, stage, event)
            told[stage] = getattr(event, "num_pages", told[stage])
            if number == stop_after:
                agreed, rig.now = min(told), 100.0
                match = rig.match(state)
                assert match.num_tokens == agreed * PAGE
                if agreed:
                    load = rig.planner.begin_load(
                        state, agreed * PAGE, rig.new_blocks(agreed * PAGE), rig.now
                    )
                else:
                    rig.planner.admit(state)
        assert load is None or load.last_token == agreed * PAGE
        rig.plan()
        rig.finish_loads()
        rig.planner.finish(state, rig.now)
        rig.audit(is_idle=True)
        assert rig.planner.host.slots.num_used == len(rig.planner.host.index)


@interleavings
def test_trace_c_uneven_reads_insert_the_shorter_and_release_the_rest(count):
    for seed in range(count):
        rig = Rig(num_workers=2, has_storage=True)
        state, fetch = reading(rig)
        queues = [
            [FetchProgress(fetch.op, 3), FetchSettled(fetch.op, 6, "complete")],
            [FetchProgress(fetch.op, 2), FetchSettled(fetch.op, 4, "corrupt")],
        ]
        queues = [[*queue, FetchReleased(fetch.op)] for queue in queues]
        for stage, event in interleave(Random(seed), queues):
            assert rig.planner.host.slots.num_used == 6  # nothing is reused before both let go
            tell(rig, stage, event)
        assert rig.in_host(state) == 4
        assert rig.planner.host.slots.num_used == 4


@interleavings
def test_trace_d_of_sparse_pages_only_a_prefix_that_all_stages_have_is_fetched(count):
    for seed in range(count):
        rng = Random(seed)
        rig = Rig(num_workers=STAGES, has_storage=True)
        stored = [{page for page in range(6) if rng.random() < 0.8} for _ in range(STAGES)]
        legal = [n for n in range(7) if all(set(range(n)) <= pages for pages in stored)]
        rig.request("a", TOKENS[: 6 * PAGE + 1])
        leading = [next(n for n in range(7) if n not in pages) for pages in stored]
        fetch = rig.answer_query(*leading)
        num_asked = len(unpack_hashes(fetch.hashes)) if fetch is not None else 0
        assert num_asked == max(legal)


@interleavings
def test_trace_e_a_stage_with_an_empty_share_still_counts(count):
    """The last stage owns no bytes: it has nothing to read and answers at once, or late."""
    for seed in range(count):
        rig = Rig(num_workers=STAGES, has_storage=True)
        state, fetch = reading(rig)
        settled = FetchSettled(fetch.op, 6, "complete")
        work = [FetchProgress(fetch.op, 3), settled, FetchReleased(fetch.op)]
        told = [0] * STAGES
        queues = [work, work, [settled, FetchReleased(fetch.op)]]
        for stage, event in interleave(Random(seed), queues):
            tell(rig, stage, event)
            told[stage] = getattr(event, "num_pages", told[stage])
            assert rig.in_host(state) == min(told)
        assert rig.planner.prefetcher.num_reading == 0


@interleavings
def test_trace_e_a_stage_that_copies_nothing_still_acknowledges_each_copy(count):
    """Its counter is all that it says; until then what others have copied is not visible."""
    for seed in range(count):
        rig = Rig(num_workers=2)
        state = rig.request("a", TOKENS[: 3 * PAGE])
        for num_pages in (1, 2, 3):
            rig.compute(state, num_pages * PAGE)
            rig.plan()
        done = [0, 0]
        for stage, op in interleave(Random(seed), [[1, 2, 3], [3]]):
            done[stage] = op
            rig.planner.join.update(stage, WorkerProgress(saves_done=op))
            rig.planner.settle_copies(rig.now)
            assert rig.in_host(state) == min(done)
        assert rig.blocks.num_held == 0


@interleavings
def test_trace_f_a_cancelled_question_drains_on_every_stage_and_fetches_nothing(count):
    for seed in range(count):
        rng = Random(seed)
        rig = Rig(num_workers=STAGES, has_storage=True)
        state = rig.request("a", TOKENS[:25])
        op = rig.channels.sent[0][-1].op
        num_before = rng.randrange(STAGES)  # so many stages have asked before they hear of it
        before = [ExistsResult(op, 6, ok=True) for _ in range(num_before)]
        rig.say(*before)
        rig.planner.finish(state, rig.now)
        assert all(sent[-1] == Cancel(op) for sent in rig.channels.sent)
        late = [[ExistsResult(op, 0, ok=False, reason="cancelled")] for _ in range(STAGES)]
        late[:num_before] = [[]] * num_before
        for stage, event in interleave(rng, late):
            tell(rig, stage, event)
        assert rig.total("ignored_reports") == STAGES - num_before
        assert not rig.channels.count(Fetch)
        rig.audit(is_idle=True)


@interleavings
def test_trace_g_a_chain_that_forks_under_a_running_save_is_published_and_persisted_whole(count):
    """Pages have no split nodes: the second request hangs its tail on a page that is on its way."""
    for seed in range(count):
        rig = Rig(num_workers=STAGES, has_storage=True)
        trunk = rig.request("trunk", TOKENS[:16])
        rig.compute(trunk, 16)
        rig.plan()
        fork = rig.request("fork", TOKENS[:8] + TOKENS[50:58])
        rig.compute(fork, 16)
        rig.plan()
        done = [0] * STAGES
        for stage, op in interleave(Random(seed), [[1, 2]] * STAGES):
            done[stage] = op
            rig.planner.join.update(stage, WorkerProgress(saves_done=op))
            rig.planner.settle_copies(rig.now)
            assert len(rig.planner.host.index) == (0, 4, 6)[min(done)]
        persists = [m for m in rig.channels.sent[0] if isinstance(m, Persist)]
        persisted = [page for persist in persists for page in unpack_hashes(persist.hashes)]
        chains = [*trunk.tokens.page_hashes(4), *fork.tokens.page_hashes(4)[2:]]
        assert persisted == chains
        rig.audit()


# The rest of the checklist -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_ranks_with_delays_and_failures_of_their_own_agree_and_leave_nothing(seed):
    """TP2 x PP2; a tenth of what storage is asked for goes wrong, on each rank by itself."""
    rng = Random(seed)
    script = draw_script(rng)
    while script.world != (2, 2, 1) or script.trouble is None or not script.trouble.refusal:
        script = draw_script(rng)
    counts = Story(seed, script=script).run(100)
    assert counts["finished"] > 0
    assert counts["surplus of a fast worker"] > 0


def test_steps_without_work_use_no_numbers_and_consume_nothing():
    rig = Rig(num_workers=STAGES)
    for number in range(1, 6):
        plan = rig.plan(is_busy=False)
        assert plan.number == number
        assert (plan.saves, plan.loads, plan.sync_loads) == ((), (), ())
        assert rig.finish_saves().published == ()
    state = rig.request("a", TOKENS[:PAGE])
    rig.compute(state, PAGE)
    plan = rig.plan()
    assert [op.op_id for op in plan.saves] == [1]
    assert len(rig.finish_saves().published) == 1


def test_every_stage_is_sent_as_many_messages_as_the_others_with_idle_steps_in_between():
    rig = Rig(num_workers=STAGES, has_storage=True)
    for number in range(6):
        for _ in range(number % 3):
            rig.plan(is_busy=False)
            rig.settle_storage()
        state = rig.request(f"r{number}", [number, *TOKENS[1:25]])
        fetch = rig.answer_query(*([6] * STAGES if number % 2 else [6, 0, 6]))
        if fetch is not None:
            rig.end_fetch(fetch.op, 6, number, 5)
        rig.planner.finish(state, rig.now)
        rig.plan(is_busy=False)
        assert rig.channels.sent[0] == rig.channels.sent[1] == rig.channels.sent[2]
    numbers = [message.op for message in rig.channels.sent[0] if not isinstance(message, Cancel)]
    assert numbers == list(range(1, len(numbers) + 1))
    rig.audit(is_idle=True)


def test_the_clock_of_a_worker_decides_nothing():
    """One stage's clock runs ahead: its deadline is a shorter answer, not a stop for the others;
    the scheduler's own deadline ends the waiting, whatever clocks the workers have."""
    rig = Rig(num_workers=2, has_storage=True)
    state, fetch = reading(rig)
    rig.say(FetchSettled(fetch.op, 4, "deadline"), FetchProgress(fetch.op, 1))
    rig.now = 0.9
    assert rig.match(state) == ASK_AGAIN
    rig.say(None, FetchProgress(fetch.op, 3))
    assert rig.match(state) == ASK_AGAIN
    rig.now = 2.0  # the stage whose clock stands still never says that time is up
    assert rig.match(state).num_tokens == 3 * PAGE
    rig.planner.admit(state)
    late = rig.request("b", TOKENS[50:75])
    rig.now = 60.0
    assert rig.match(late) == NO_MATCH


def test_deadlines_are_told_to_workers_as_seconds_from_now_and_not_as_times_of_a_clock():
    told = []
    for now in (0.0, 1e9):
        rig = Rig(num_workers=2, has_storage=True, num_slots=32)
        rig.now = now
        rig.fill_host(TOKENS[50:54])
        reading(rig)
        told.append([m for m in rig.channels.sent[1] if not isinstance(m, Cancel)])
    assert told[0] == told[1]
    assert {message.deadline_s for message in told[0]} == {0.05, 10.0, 30.0}


@pytest.mark.parametrize("skew", [-1e6, 0.0, 1e6])
def test_seconds_that_a_worker_says_it_was_busy_decide_no_length(skew):
    rig = Rig(num_workers=2)
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS[:9])
    rig.begin_load(state)
    rig.plan()
    rig.planner.join.update(0, WorkerProgress(saves_done=1, loads_done=1, load_busy_s=0.001))
    rig.planner.join.update(1, WorkerProgress(saves_done=1, loads_done=1, load_busy_s=skew))
    (load,) = rig.planner.settle_copies(rig.now).loaded
    assert load.num_tokens == 8
    assert rig.match(rig.request("b", TOKENS[:9])).num_tokens == 8
