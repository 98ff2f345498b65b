"""write_back with a host that is short of room: order, refusals, and pages that are in both tiers.

Nothing is copied when a block is reused, for that is too late: pages are saved ahead of it. A page
that the device holds as well leaves host in the order of all others, and is saved again in time.
"""

from free_queue import FreeQueue
from planner_rig import Rig

from vllm_hicache.request_state import RequestState

PAGE = 4


def _rig(num_blocks: int, ahead: int, num_slots: int, **options: object) -> tuple[Rig, FreeQueue]:
    queue = FreeQueue(num_blocks)
    policy = {"write_policy": "write_back", "num_ahead_blocks": ahead, "admission": "always"}
    return Rig(queue=queue, num_slots=num_slots, **policy | options), queue


def _serve(rig: Rig, queue: FreeQueue, name: str, start: int, **fields: object) -> RequestState:
    """A request of three pages that computes them in one step and ends."""
    state = rig.request(name, list(range(start, start + 3 * PAGE)), **fields)
    state.block_ids = queue.take(3)
    rig.planner.write_back.count_taken(3)
    rig.planner.admit(state)
    rig.planner.collect_saves(state, 3 * PAGE, rig.now)
    rig.planner.finish(state, rig.now)
    queue.give_back(state.block_ids)
    return state


def _saved_blocks(rig: Rig) -> list[int]:
    return [block for op in rig.plan().saves for block in op.copies[:, 2].tolist()]


def test_chains_are_saved_in_the_order_in_which_vllm_reuses_them_and_each_from_its_beginning():
    rig, queue = _rig(num_blocks=9, ahead=9, num_slots=16)
    states = [_serve(rig, queue, name, 100 * i) for i, name in enumerate("abc", start=1)]
    assert _saved_blocks(rig) == [block for state in states for block in state.block_ids]


def test_only_chains_that_reach_into_the_next_blocks_are_saved():
    rig, queue = _rig(num_blocks=9, ahead=4, num_slots=16)
    first, second, third = (_serve(rig, queue, n, 100 * i) for i, n in enumerate("abc", start=1))
    assert _saved_blocks(rig) == first.block_ids + second.block_ids
    rig.finish_saves()
    assert [rig.in_host(state) for state in (first, second, third)] == [3, 3, 0]


def test_a_host_of_pinned_pages_refuses_and_the_device_keeps_its_pages_until_they_are_reused():
    rig, queue = _rig(num_blocks=6, ahead=6, num_slots=3, max_pinned_share=1.0)
    kept = _serve(rig, queue, "kept", 100, pin_s=60.0)
    assert _saved_blocks(rig) == kept.block_ids
    rig.finish_saves()
    waiting = _serve(rig, queue, "waiting", 200)
    assert _saved_blocks(rig) == []
    assert rig.in_host(kept) == 3  # locked: nothing leaves for the newcomer
    assert not rig.planner.holds_device_blocks
    assert queue.free == kept.block_ids[::-1] + waiting.block_ids[::-1]
    assert rig.total("save_skipped_tokens/reused") == 0
    queue.take(6)
    assert rig.total("save_skipped_tokens/reused") == 3 * PAGE  # of the one that host never had
    rig.audit(is_idle=True)


def test_a_host_with_room_for_a_part_keeps_the_beginning_of_a_chain():
    rig, queue = _rig(num_blocks=6, ahead=6, num_slots=4, max_pinned_share=1.0)
    _serve(rig, queue, "kept", 100, pin_s=60.0)
    rig.plan()
    rig.finish_saves()
    state = _serve(rig, queue, "a", 200)
    assert _saved_blocks(rig) == state.block_ids[:1]
    rig.finish_saves()
    assert rig.in_host(state) == 1
    queue.take(6)
    assert rig.total("save_skipped_tokens/reused") == 2 * PAGE


def test_a_page_of_both_tiers_leaves_host_in_its_turn_and_is_saved_again_after_its_next_use():
    rig, queue = _rig(num_blocks=9, ahead=9, num_slots=6)
    first = _serve(rig, queue, "a", 100)
    rig.plan()
    rig.finish_saves()
    assert rig.in_host(first) == 3  # and on the device
    for name, start in (("b", 200), ("c", 300)):
        _serve(rig, queue, name, start)
        rig.planner.write_back.count_taken(9)
        rig.plan()
        rig.finish_saves()
    assert rig.in_host(first) == 0  # the oldest of three chains, in a host for two
    again = rig.request("again", list(range(100, 112)))
    queue.use(first.block_ids)
    again.block_ids = first.block_ids
    rig.planner.collect_saves(again, 12, rig.now)
    rig.planner.finish(again, rig.now)
    queue.give_back(again.block_ids)
    rig.planner.write_back.count_taken(9)
    assert _saved_blocks(rig) == first.block_ids
    rig.finish_saves()
    assert rig.in_host(again) == 3
    rig.audit(is_idle=True)


def test_after_a_load_the_page_is_in_both_tiers_and_is_not_saved_a_second_time():
    rig, queue = _rig(num_blocks=12, ahead=12, num_slots=6)
    first = _serve(rig, queue, "a", 100)
    rig.plan()
    rig.finish_saves()
    queue.take(12)
    queue.give_back(list(range(12)))
    state = rig.request("b", list(range(100, 113)))
    match = rig.match(state)
    assert match.num_tokens == 12
    state.block_ids = queue.take(4)
    rig.planner.begin_load(state, 12, state.block_ids, rig.now)
    rig.plan()
    rig.finish_loads()
    rig.planner.collect_saves(state, 13, rig.now)
    rig.planner.finish(state, rig.now)
    queue.give_back(state.block_ids)
    rig.planner.write_back.count_taken(12)
    assert _saved_blocks(rig) == []
    assert rig.in_host(first) == 3
    rig.audit(is_idle=True)
