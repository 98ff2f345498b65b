"""Saves: what is copied to host, when it becomes visible, and who owns it in between."""

import pytest
from planner_rig import Rig

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.loads import DOUBT_STEPS
from vllm_hicache.plan import Direction
from vllm_hicache.progress import WorkerProgress
from vllm_hicache.saves import MAX_PAGES_PER_SAVE
from vllm_hicache.storage_messages import Persist
from vllm_hicache.tiers import SlotOwner

TOKENS = list(range(100, 140))


def test_a_saved_page_passes_from_the_save_to_the_index_when_all_workers_have_acknowledged():
    rig = Rig(num_workers=2)
    state = rig.request("a", TOKENS[:9])
    rig.compute(state, 9)
    (save,) = rig.plan().saves
    slots = save.copies[:, 0].tolist()
    assert [rig.planner.host.slots.owner(slot) for slot in slots] == [SlotOwner.OPERATION] * 2
    rig.finish_saves(workers=[1])
    assert rig.in_host(state) == 0
    rig.finish_saves(workers=[0])
    assert rig.in_host(state) == 2
    assert [rig.planner.host.slots.owner(slot) for slot in slots] == [SlotOwner.INDEX] * 2


def test_a_save_that_failed_on_one_worker_gives_its_slots_back_unpublished():
    rig = Rig(num_workers=2)
    state = rig.request("a", TOKENS[:8])
    rig.compute(state, 8)
    rig.plan()
    rig.finish_saves(workers=[0], failed=[1])
    rig.finish_saves(workers=[1])
    assert rig.in_host(state) == 0
    assert rig.planner.host.slots.num_used == 0
    assert rig.total("save_skipped_tokens/copy_failed") == 8
    assert rig.total("copy_failures") == 1


def test_an_unfinished_page_is_not_saved():
    rig = Rig()
    state = rig.request("a", TOKENS)
    rig.compute(state, 3)
    assert rig.plan().saves == ()
    rig.compute(state, 4)
    (save,) = rig.plan().saves
    assert len(save.copies) == 1


def test_only_new_pages_are_saved_as_tokens_come():
    rig = Rig()
    state = rig.request("a", TOKENS)
    rig.compute(state, 10)
    (first,) = rig.plan().saves
    rig.compute(state, 16)
    (second,) = rig.plan().saves
    assert (len(first.copies), len(second.copies)) == (2, 2)
    assert second.copies[:, 2].tolist() == state.block_ids[2:4]
    rig.finish_saves()
    assert rig.in_host(state) == 4


def test_a_page_that_is_on_its_way_for_another_request_is_not_saved_again():
    rig = Rig()
    first, second = rig.request("a", TOKENS[:8]), rig.request("b", TOKENS[:12])
    rig.compute(first, 8)
    rig.plan()
    rig.compute(second, 12)
    (save,) = rig.plan().saves
    assert len(save.copies) == 1
    rig.finish_saves()
    assert rig.in_host(second) == 3


def test_a_page_is_lost_with_the_parent_that_another_request_failed_to_save():
    rig = Rig()
    first, second = rig.request("a", TOKENS[:8]), rig.request("b", TOKENS[:12])
    rig.compute(first, 8)
    rig.compute(second, 12)
    rig.plan()
    rig.finish_saves(failed=[1])
    assert rig.in_host(second) == 0
    assert rig.total("save_skipped_tokens/chain_broken") == 4
    assert rig.planner.host.slots.num_used == 0


def test_blocks_are_held_from_the_plan_to_the_last_acknowledgement():
    rig = Rig(num_workers=2)
    state = rig.request("a", TOKENS[:8])
    rig.compute(state, 8)
    assert set(rig.blocks.refs.elements()) == set(state.block_ids)
    rig.plan()
    rig.planner.finish(state, rig.now)
    rig.finish_saves(workers=[0])
    assert rig.blocks.num_held == 2
    assert rig.planner.holds_device_blocks
    rig.finish_saves(workers=[1])
    assert rig.blocks.num_held == 0
    rig.audit(is_idle=True)


def test_a_block_of_several_small_pages_is_held_by_each_save_that_reads_it():
    rig = Rig(page=4, block=16)
    state = rig.request("a", TOKENS[:16])
    rig.compute(state, 8)
    rig.compute(state, 16)
    plan = rig.plan()
    assert [save.copies[:, 2:].tolist() for save in plan.saves] == [
        [[state.block_ids[0], 0], [state.block_ids[0], 1]],
        [[state.block_ids[0], 2], [state.block_ids[0], 3]],
    ]
    assert rig.blocks.num_held == 2
    rig.finish_saves(up_to=1)
    assert rig.blocks.num_held == 1


def test_a_page_of_several_blocks_is_saved_with_its_last_block():
    rig = Rig(page=16, block=4)
    state = rig.request("a", TOKENS)
    rig.compute(state, 15)
    assert rig.plan().saves == ()
    rig.compute(state, 16)
    (save,) = rig.plan().saves
    assert save.copies.tolist() == [[0, i, state.block_ids[i], 0] for i in range(4)]


def test_a_full_host_saves_the_leading_pages_and_counts_the_rest():
    rig = Rig(num_slots=3)
    state = rig.request("a", TOKENS[:20])
    rig.compute(state, 20)
    rig.plan()
    rig.finish_saves()
    assert rig.in_host(state) == 3
    assert rig.total("save_skipped_tokens/host_full") == 8


def test_room_for_a_page_is_not_made_by_evicting_its_parent():
    rig = Rig(num_slots=2)
    state = rig.request("a", TOKENS[:12])
    rig.compute(state, 8)
    rig.plan()
    rig.finish_saves()
    rig.compute(state, 12)
    rig.plan()
    rig.finish_saves()
    assert rig.in_host(state) == 2
    assert rig.total("save_skipped_tokens/host_full") == 4


def test_a_chain_that_lost_its_end_is_healed_with_the_next_page():
    rig = Rig(num_slots=4)
    state = rig.request("a", TOKENS)
    rig.compute(state, 12)
    rig.plan()
    rig.finish_saves()
    other = rig.planner.host.allocate(3)  # evicts two pages of the chain
    rig.planner.host.free(other)
    assert rig.in_host(state) == 1
    rig.compute(state, 16)
    rig.plan()
    rig.finish_saves()
    assert rig.in_host(state) == 4


def test_a_long_prefill_is_saved_in_pieces():
    num_pages = MAX_PAGES_PER_SAVE + 3
    rig = Rig(num_slots=num_pages)
    state = rig.request("a", list(range(4 * num_pages)))
    rig.compute(state, 4 * num_pages)
    sizes = [len(save.copies) for save in rig.plan().saves]
    assert sizes == [MAX_PAGES_PER_SAVE, 3]
    rig.finish_saves(up_to=1)
    assert rig.in_host(state) == MAX_PAGES_PER_SAVE
    rig.finish_saves()
    assert rig.in_host(state) == num_pages


def test_saves_that_no_worker_knows_of_can_be_cancelled():
    rig = Rig()
    state = rig.request("a", TOKENS[:8])
    rig.compute(state, 8)
    rig.planner.saves.cancel_planned()
    rig.audit()
    assert (rig.blocks.num_held, rig.planner.host.slots.num_used) == (0, 0)
    assert rig.plan().saves == ()


def test_a_reset_makes_running_saves_worthless_but_they_keep_what_they_own():
    rig = Rig()
    state = rig.request("a", TOKENS[:8])
    rig.compute(state, 8)
    rig.plan()
    rig.planner.reset("hc1-other", [state])
    rig.audit()
    assert (rig.blocks.num_held, rig.planner.host.slots.num_used) == (2, 2)
    rig.finish_saves()
    assert rig.in_host(state) == 0
    assert (rig.blocks.num_held, rig.planner.host.slots.num_used) == (0, 0)
    assert rig.total("save_skipped_tokens/reset") == 8


def test_the_same_pages_can_be_saved_anew_while_a_save_from_before_a_reset_still_runs():
    rig = Rig()
    old, new = rig.request("old", TOKENS[:8]), rig.request("new", TOKENS[:8])
    rig.compute(old, 8)
    rig.plan()
    rig.planner.reset("hc1-other", [old, new])
    rig.compute(new, 8)
    (save,) = rig.plan().saves
    assert len(save.copies) == 2
    rig.finish_saves(up_to=1)
    assert rig.in_host(new) == 0
    rig.finish_saves()
    assert rig.in_host(new) == 2
    assert rig.page_of(new, 0).slot == save.copies[0, 0]


def test_blocks_that_a_request_had_before_a_reset_are_not_saved():
    rig = Rig()
    state = rig.request("a", TOKENS)
    rig.compute(state, 8)
    rig.plan()
    rig.finish_saves()
    rig.planner.reset("hc1-other", [state])
    rig.compute(state, 16)
    assert rig.plan().saves == ()
    rig.planner.preempt(state)
    rig.match(state)
    rig.compute(state, 16)
    (save,) = rig.plan().saves
    assert len(save.copies) == 4


def test_a_report_of_a_save_that_does_not_run_stops_the_engine():
    rig = Rig()
    rig.planner.join.update(0, WorkerProgress(saves_done=1))
    with pytest.raises(InvariantBroken, match="save 1 is reported, but it is not running"):
        rig.planner.settle_copies(0.0)


def test_a_late_report_changes_nothing():
    rig = Rig()
    state = rig.request("a", TOKENS[:8])
    rig.compute(state, 8)
    rig.plan()
    rig.finish_saves()
    rig.planner.join.update(0, WorkerProgress(saves_done=0))
    assert rig.planner.settle_copies(0.0).published == ()
    assert rig.planner.join.consumed(Direction.SAVE) == 1
    assert rig.in_host(state) == 2


def test_a_request_counts_as_one_use_of_the_chain_that_it_continues():
    rig = Rig(num_slots=16)
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS)
    before = rig.page_of(state, 1).num_uses
    for num_tokens in (12, 16, 20, 24):
        rig.compute(state, num_tokens)
        rig.plan()
        rig.finish_saves()
    assert rig.page_of(state, 1).num_uses == before + 1
    assert [rig.page_of(state, i).num_uses for i in range(2, 6)] == [1, 1, 1, 1]


# On top of a synchronous load ------------------------------------------------------------------


def _sync_load_and_save(rig: Rig):
    """A request that loads two pages and computes one more in the same step."""
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", [*TOKENS[:8], *range(9)])
    load = rig.begin_load(state)
    assert not load.is_async
    state.block_ids = sorted(load.block_ids)
    rig.compute(state, 12)
    assert len(rig.plan().saves) == 1
    return state


def test_a_save_on_top_of_a_synchronous_load_waits_for_its_outcome():
    rig = Rig(sync_load_max_s=1.0)
    state = _sync_load_and_save(rig)
    rig.finish_saves()
    assert rig.in_host(state) == 2
    assert rig.blocks.num_held == 1
    rig.finish_loads()
    assert rig.in_host(state) == 3
    assert rig.blocks.num_held == 0


def test_a_save_on_top_of_a_failed_load_is_worth_nothing():
    rig = Rig(sync_load_max_s=1.0)
    state = _sync_load_and_save(rig)
    rig.finish_loads(failed=[1])
    rig.finish_saves()
    assert rig.in_host(state) == 0
    assert rig.planner.host.slots.num_used == 0


def test_another_request_in_the_blocks_of_a_failed_load_is_not_saved_either():
    """It shares the first block, and its own page has the failed one neither as part nor parent."""
    rig = Rig(page=8, block=4, sync_load_max_s=1.0)
    rig.fill_host(TOKENS[:8])
    leader = rig.request("leader", TOKENS[:13])
    load = rig.begin_load(leader)
    leader.block_ids = sorted(load.block_ids)
    follower = rig.request("follower", [*TOKENS[:4], *range(50, 60)])
    follower.block_ids = [leader.block_ids[0], *rig.new_blocks(8)]
    rig.compute(follower, 8)
    (save,) = rig.plan().saves
    assert save.copies[0, 2] in load.block_ids
    rig.finish_loads(failed=[1])
    rig.finish_saves()
    assert rig.in_host(follower) == 0
    rig.compute(follower, 8)
    rig.compute(follower, 12)
    assert rig.plan().saves == ()


def test_a_failed_load_is_forgotten_when_no_step_from_its_time_can_run_any_more():
    rig = Rig(sync_load_max_s=1.0)
    state = _sync_load_and_save(rig)
    rig.finish_loads(failed=[1])
    rig.finish_saves()
    for _ in range(DOUBT_STEPS):
        rig.compute(state, 16)
        assert rig.plan().saves == ()
    assert rig.blocks.num_forgotten == 1 + DOUBT_STEPS
    rig.compute(state, 16)
    (save,) = rig.plan().saves
    assert len(save.copies) == 4
    assert rig.blocks.num_forgotten == 1 + DOUBT_STEPS


def test_a_synchronous_load_is_doubted_as_soon_as_one_worker_has_failed():
    rig = Rig(sync_load_max_s=1.0, num_workers=2)
    state = _sync_load_and_save(rig)
    rig.finish_loads(workers=[0], failed=[1])
    assert rig.blocks.num_forgotten == 1  # before vLLM looks anybody up again
    rig.compute(state, 16)
    assert rig.plan().saves == ()
    rig.finish_loads(workers=[1])
    rig.finish_saves()
    assert rig.in_host(state) == 0


# Hints ------------------------------------------------------------------------------------------


def test_a_request_that_asks_not_to_be_stored_leaves_nothing_in_host():
    rig = Rig(has_storage=True)
    state = rig.request("a", TOKENS[:12], may_save=False)
    rig.compute(state, 12)
    assert rig.plan().saves == ()
    assert len(rig.planner.host.index) == 0
    assert rig.total("save_skipped_tokens/not_wanted") == 12
    assert rig.channels.count(Persist) == 0


def test_it_takes_what_others_stored_and_counts_only_what_is_not_there():
    rig = Rig()
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS[:13], may_save=False)
    assert rig.match(state).num_tokens == 8
    rig.compute(state, 13)
    assert rig.total("save_skipped_tokens/not_wanted") == 4
    assert len(rig.planner.host.index) == 2


def test_pages_have_the_priority_of_their_request_and_lower_ones_leave_first():
    rig = Rig(num_slots=4, eviction="priority")
    rig.fill_host(TOKENS[:8], priority=5)
    rig.fill_host([200 + i for i in range(8)])
    rig.fill_host([300 + i for i in range(8)])
    kept = rig.request("again", TOKENS[:9])
    assert rig.match(kept).num_tokens == 8


def test_a_request_of_higher_priority_raises_that_of_pages_it_uses():
    rig = Rig(num_slots=4, eviction="priority")
    rig.fill_host(TOKENS[:8])
    rig.compute(rig.request("important", TOKENS[:9], priority=5), 9)
    rig.fill_host([200 + i for i in range(8)], priority=1)
    rig.fill_host([300 + i for i in range(8)], priority=1)
    assert rig.match(rig.request("again", TOKENS[:9])).num_tokens == 8


def test_a_page_whose_child_leaves_inherits_its_priority():
    rig = Rig(num_slots=4, eviction="priority")
    rig.fill_host(TOKENS[:8])
    rig.compute(rig.request("important", TOKENS[:9], priority=5), 9)  # raises the last page
    rig.fill_host([200 + i for i in range(8)], priority=9)
    rig.fill_host([300 + i for i in range(4)], priority=3)  # the last page leaves
    rig.fill_host([400 + i for i in range(4)], priority=9)  # the one of priority 3 leaves
    assert rig.match(rig.request("again", TOKENS[:9])).num_tokens == 4
