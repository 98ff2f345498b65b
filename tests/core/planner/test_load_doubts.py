"""Synchronous loads whose outcome is open or bad: who may not trust their blocks, and how long."""

import pytest
from planner_rig import Rig

from vllm_hicache.loads import DOUBT_STEPS, Loads, RunningLoad
from vllm_hicache.progress import Outcome
from vllm_hicache.tiers import Direction

TOKENS = list(range(100, 140))


def _two_loads(**options) -> tuple[Rig, RunningLoad, RunningLoad]:
    """A synchronous load of two blocks, and an asynchronous one that was planned after it."""
    rig = Rig(sync_load_max_s=1.0, shares_device_pages=False, **options)
    rig.fill_host(TOKENS[:8])
    sync, other = (rig.begin_load(rig.request(name, TOKENS[:9])) for name in ("sync", "async"))
    assert (sync.is_async, other.is_async) == (False, True)
    rig.plan()
    return rig, sync, other


def _loads(rig: Rig) -> Loads:
    return rig.planner.loads


def _steps(rig: Rig, count: int) -> None:
    for _ in range(count):
        rig.plan()


def test_nothing_is_loaded_behind_device_blocks_whose_load_is_not_acknowledged():
    """vLLM gives blocks of a synchronous load to others in the next step. If it fails, vLLM has one
    of them compute the shared blocks, and with it one that waits for a load of its own."""
    rig = Rig(sync_load_max_s=1.0)
    rig.fill_host(TOKENS[:16])
    state = rig.request("first", TOKENS[:16])
    rig.planner.begin_load(state, rig.match(state).num_tokens, rig.new_blocks(12), rig.now)
    rig.plan()
    behind = rig.request("behind", TOKENS[:17])
    other = rig.request("other", [1, *TOKENS[:16]])
    assert rig.match(behind, num_local=12).num_tokens is None
    assert rig.match(other, num_local=12).num_tokens == 0
    rig.finish_loads()
    assert rig.match(behind, num_local=12).num_tokens == 4


# Whose blocks are in doubt -----------------------------------------------------------------------


def test_a_synchronous_load_is_in_doubt_from_its_plan_on_for_whoever_has_one_of_its_blocks():
    rig, sync, _ = _two_loads()
    first, last = sorted(sync.block_ids)
    assert _loads(rig).doubts([first]) == (sync,)
    assert _loads(rig).doubts([77, last, 78]) == (sync,)
    assert _loads(rig).doubts([77, 78]) == ()
    assert _loads(rig).doubts([]) == ()


def test_an_asynchronous_load_is_in_nobodys_doubt():
    rig, _, other = _two_loads()
    assert _loads(rig).doubts(sorted(other.block_ids)) == ()


def test_blocks_of_two_open_loads_are_in_doubt_for_both():
    rig = Rig(sync_load_max_s=1.0)
    rig.fill_host(TOKENS[:8])
    first = rig.begin_load(rig.request("a", TOKENS[:9]))
    rig.plan()
    state = rig.request("b", TOKENS[:9])
    state.num_offered_tokens, state.is_offer_async = 8, False
    second = rig.planner.begin_load(state, 8, rig.new_blocks(8), rig.now)
    one, another = min(first.block_ids), min(second.block_ids)
    assert _loads(rig).doubts([one, another]) == (first, second)
    assert _loads(rig).doubts([another]) == (second,)


def test_a_load_that_came_out_well_is_in_doubt_no_longer_than_the_next_step():
    rig, sync, _ = _two_loads()
    rig.finish_loads(up_to=1)
    assert sync.is_ok is True
    rig.plan()
    assert _loads(rig).doubts(sorted(sync.block_ids)) == ()
    assert not _loads(rig).has_failed_lately


def test_a_load_that_failed_stays_in_doubt_for_as_many_steps_as_vllm_may_have_in_flight():
    rig, sync, _ = _two_loads()
    blocks = sorted(sync.block_ids)
    rig.finish_loads(up_to=1, failed=[1])
    _steps(rig, DOUBT_STEPS - 1)
    assert _loads(rig).doubts(blocks) == (sync,)
    assert _loads(rig).has_failed_lately
    _steps(rig, 1)
    assert _loads(rig).doubts(blocks) == ()
    assert not _loads(rig).has_failed_lately


def test_an_open_load_is_in_doubt_however_many_steps_it_takes():
    rig, sync, _ = _two_loads()
    _steps(rig, 3 * DOUBT_STEPS)
    assert _loads(rig).doubts(sorted(sync.block_ids)) == (sync,)
    assert not _loads(rig).has_failed_lately


# When some worker has failed and others are not done ---------------------------------------------


def test_a_load_is_distrusted_before_the_last_worker_has_done_it():
    rig, sync, _ = _two_loads()
    assert not _loads(rig).has_failed_lately
    _loads(rig).distrust([1])
    assert sync.is_ok is False
    assert _loads(rig).has_failed_lately
    assert _loads(rig).num_failed_visibly == 1
    assert _loads(rig).num_running == 2  # its pages and slots stay pinned for the others


def test_a_distrusted_load_stays_in_doubt_from_the_first_failure_on():
    rig, sync, _ = _two_loads()
    _loads(rig).distrust([1])
    _steps(rig, DOUBT_STEPS - 1)
    assert _loads(rig).doubts(sorted(sync.block_ids)) == (sync,)
    _steps(rig, 1)
    assert _loads(rig).doubts(sorted(sync.block_ids)) == ()


def test_a_load_that_is_distrusted_again_and_again_counts_once():
    rig, _, _ = _two_loads()
    for _ in range(3):
        _loads(rig).distrust([1])
    _loads(rig).settle(Outcome(Direction.LOAD, 1, is_ok=False), rig.now)
    assert _loads(rig).num_failed_visibly == 1


def test_an_asynchronous_load_is_told_by_its_outcome_alone():
    """Nobody sees its blocks before it has landed."""
    rig, _, other = _two_loads()
    _loads(rig).distrust([2])
    assert other.is_ok is None
    assert not _loads(rig).has_failed_lately
    assert _loads(rig).num_failed_visibly == 0


def test_numbers_of_loads_that_have_ended_or_never_were_are_ignored():
    rig, sync, _ = _two_loads()
    rig.finish_loads(up_to=1)
    _loads(rig).distrust([1, 99])
    assert sync.is_ok is True
    assert _loads(rig).num_failed_visibly == 0


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_first_failure_empties_vllms_prefix_cache_before_the_next_lookup(failing):
    rig, sync, _ = _two_loads(num_workers=3)
    rig.finish_loads(up_to=1, workers=[failing], failed=[1])
    assert sync.is_ok is False
    assert rig.blocks.num_forgotten == 1
    rig.finish_loads(up_to=1)
    assert rig.blocks.num_forgotten == 1
    rig.plan()
    assert rig.blocks.num_forgotten == 2  # again in every step that may have offered the blocks


def test_a_save_on_top_that_all_have_done_is_given_up_with_the_first_failure():
    rig = Rig(sync_load_max_s=1.0, num_workers=2)
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", [*TOKENS[:8], *range(9)])
    load = rig.begin_load(state)
    state.block_ids = sorted(load.block_ids)
    rig.compute(state, 12)
    rig.plan()
    rig.finish_saves()
    assert rig.blocks.num_held == 1
    rig.finish_loads(workers=[1], failed=[1])
    assert rig.blocks.num_held == 0
    assert rig.total("save_skipped_tokens/copy_failed") == 4
    assert rig.in_host(state) == 2  # the load's own pages leave when the last worker has done it
    rig.finish_loads()
    assert rig.in_host(state) == 0
