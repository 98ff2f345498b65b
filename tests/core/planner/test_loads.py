"""Loads: what is copied to the device, what is pinned meanwhile, and what a failure means."""

import pytest
from planner_rig import Rig

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.planner import ASK_AGAIN, NO_MATCH
from vllm_hicache.progress import WorkerProgress

TOKENS = list(range(100, 140))


def test_a_load_names_the_slots_of_its_pages_and_the_blocks_behind_the_local_hit():
    rig = Rig()
    rig.fill_host(TOKENS[:12])
    state = rig.request("a", TOKENS[:13])
    load = rig.begin_load(state, num_local=4)
    assert (load.first_token, load.last_token) == (4, 12)
    (op,) = rig.plan().loads
    expected = [[rig.page_of(state, i).slot, 0, block, 0] for i, block in ((1, 1), (2, 2))]
    first_block = min(load.block_ids) - 1
    assert op.copies.tolist() == [[s, g, first_block + b, h] for s, g, b, h in expected]


def test_pages_stay_pinned_until_every_worker_has_loaded_them():
    rig = Rig(num_slots=2, num_workers=2)
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS[:9])
    rig.begin_load(state)
    rig.plan()
    assert rig.planner.host.allocate(1) == []
    rig.finish_loads(workers=[0])
    assert rig.planner.host.num_pinned == 2
    rig.finish_loads(workers=[1])
    assert rig.planner.host.num_pinned == 0
    assert len(rig.planner.host.allocate(1)) == 1


def test_a_load_has_landed_when_the_slowest_worker_says_so():
    rig = Rig(num_workers=3)
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS[:9])
    load = rig.begin_load(state)
    rig.plan()
    for worker_id in (2, 0):
        assert rig.finish_loads(workers=[worker_id]).loaded == ()
    assert rig.finish_loads(workers=[1]).loaded == (load,)
    assert state.load is None
    assert rig.total("served_tokens/host") == 8


def test_synchronous_loads_are_numbered_before_asynchronous_ones_of_the_same_step():
    rig = Rig(sync_load_max_s=1.0)
    rig.fill_host(TOKENS[:8])
    later, now = rig.request("later", TOKENS[:9]), rig.request("now", TOKENS[:9])
    for state, is_async in ((later, True), (now, False)):
        state.num_offered_tokens, state.is_offer_async = 8, is_async
        rig.planner.begin_load(state, 8, rig.new_blocks(8), 0.0)
    plan = rig.plan()
    assert ([op.op_id for op in plan.sync_loads], [op.op_id for op in plan.loads]) == ([1], [2])
    assert plan.sync_loads[0].copies[0, 2] == 4  # the blocks of the second request


@pytest.mark.parametrize(("page", "block"), [(16, 4), (4, 16), (8, 8)])
def test_a_hit_is_cut_one_block_below_the_prompt_even_inside_a_page(page, block):
    rig = Rig(page=page, block=block)
    tokens = list(range(32))
    rig.fill_host(tokens)
    state = rig.request("a", tokens)
    assert rig.match(state).num_tokens == 32 - block
    load = rig.begin_load(state)
    assert load.last_token == 32 - block
    (op,) = rig.plan().loads
    assert len(op.copies) == (32 - block) // min(page, block)
    rig.finish_loads()


def test_a_load_may_start_inside_a_page():
    rig = Rig(page=16, block=4)
    rig.fill_host(TOKENS[:16])
    state = rig.request("a", TOKENS[:20])
    load = rig.begin_load(state, num_local=8)
    (op,) = rig.plan().loads
    assert op.copies[:, 1].tolist() == [2, 3]
    assert load.num_tokens == 8
    rig.finish_loads()
    assert rig.total("served_tokens/host") == 8


def test_a_follower_waits_for_a_page_that_is_landing():
    rig = Rig()
    rig.fill_host(TOKENS[:8])
    leader, follower = rig.request("leader", TOKENS[:9]), rig.request("follower", TOKENS[:11])
    rig.begin_load(leader)
    assert rig.match(follower) == ASK_AGAIN
    rig.plan()
    assert rig.match(follower) == ASK_AGAIN
    rig.finish_loads()
    assert rig.match(follower, num_local=8) == NO_MATCH
    assert rig.total("deferred_lookups") == 2


def test_a_follower_does_not_wait_where_it_already_has_the_page():
    rig = Rig()
    rig.fill_host(TOKENS[:12])
    leader, follower = rig.request("leader", TOKENS[:9]), rig.request("follower", TOKENS[:13])
    rig.begin_load(leader)
    assert rig.match(follower, num_local=8).num_tokens == 4


def test_without_a_device_prefix_cache_nobody_waits_for_the_load_of_another():
    rig = Rig(shares_device_pages=False)
    rig.fill_host(TOKENS[:8])
    leader, follower = rig.request("leader", TOKENS[:9]), rig.request("follower", TOKENS[:9])
    rig.begin_load(leader)
    assert rig.match(follower).num_tokens == 8


def test_a_failed_load_takes_its_pages_out_of_host_and_the_request_computes():
    rig = Rig(num_workers=2)
    rig.fill_host(TOKENS[:16])
    state = rig.request("a", TOKENS[:13])
    load = rig.begin_load(state, num_local=4)
    rig.plan()
    rig.finish_loads(workers=[0], failed=[1])
    settled = rig.finish_loads(workers=[1])
    assert settled.failed == (load,)
    assert rig.in_host(state) == 1  # the page of the local hit was not loaded and stays
    assert rig.plan().failed_requests == ("a",)
    assert rig.plan().failed_requests == ()
    assert rig.match(state) == NO_MATCH
    assert rig.total("unserved_tokens/load_failed") == 8
    rig.planner.admit(state)
    rig.planner.finish(state, rig.now)
    rig.audit(is_idle=True)


def test_what_a_failed_load_left_on_the_device_is_not_saved_when_the_request_is_aborted():
    rig = Rig()
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS[:9])
    load = rig.begin_load(state)
    rig.plan()
    rig.finish_loads(failed=[1])
    state.block_ids = sorted(load.block_ids)  # vLLM names them: it takes the tokens for loaded
    rig.planner.collect_saves(state, 8, 0.0)
    rig.planner.finish(state, rig.now)
    assert rig.plan().saves == ()


def test_a_request_whose_load_failed_is_saved_again_once_it_has_computed_anew():
    rig = Rig()
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS[:9])
    rig.begin_load(state)
    rig.plan()
    rig.finish_loads(failed=[1])
    rig.plan()
    assert rig.match(state) == NO_MATCH
    rig.compute(state, 9)
    rig.plan()
    rig.finish_saves()
    assert rig.in_host(state) == 2


def test_a_page_pinned_by_two_loads_outlives_the_failure_of_one():
    rig = Rig(shares_device_pages=False)
    rig.fill_host(TOKENS[:8])
    first, second = rig.request("a", TOKENS[:9]), rig.request("b", TOKENS[:9])
    rig.begin_load(first)
    rig.begin_load(second)
    rig.plan()
    rig.finish_loads(up_to=1, failed=[1])
    assert rig.in_host(second) == 0
    assert rig.planner.host.slots.num_used == 2
    rig.finish_loads()
    assert rig.planner.host.slots.num_used == 0


def test_an_aborted_request_keeps_its_load_until_the_last_worker_is_done():
    rig = Rig(num_workers=2)
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS[:9])
    load = rig.begin_load(state)
    rig.plan()
    rig.planner.finish(state, rig.now)
    rig.finish_loads(workers=[0])
    assert rig.planner.holds_device_blocks
    assert rig.finish_loads(workers=[1]).loaded == (load,)
    rig.audit(is_idle=True)


def test_a_failed_load_of_an_aborted_request_is_told_to_vllm_as_landed():
    rig = Rig()
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS[:9])
    load = rig.begin_load(state)
    rig.plan()
    rig.planner.finish(state, rig.now)
    settled = rig.finish_loads(failed=[1])
    assert (settled.loaded, settled.failed) == ((load,), ())
    assert rig.plan().failed_requests == ()
    rig.audit(is_idle=True)


def test_a_synchronous_load_keeps_the_engine_stepping_until_it_is_acknowledged():
    rig = Rig(sync_load_max_s=1.0)
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS[:9])
    rig.begin_load(state)
    rig.plan()
    rig.planner.finish(state, rig.now)
    assert rig.planner.holds_device_blocks
    rig.finish_loads()
    assert not rig.planner.holds_device_blocks
    rig.audit(is_idle=True)


def test_a_preempted_request_may_end_while_two_of_its_loads_run():
    rig = Rig(sync_load_max_s=1.0)
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS[:9])
    rig.begin_load(state)
    rig.plan()
    rig.planner.preempt(state)
    assert rig.begin_load(state).is_async
    rig.plan()
    rig.planner.finish(state, rig.now)
    rig.finish_loads()
    assert rig.total("served_tokens/host") == 8  # a forward has read the first load
    assert rig.total("unserved_tokens/aborted") == 8
    rig.audit(is_idle=True)


def test_a_load_that_a_reset_overtook_is_computed_anew_and_its_pages_are_gone_with_it():
    rig = Rig()
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS[:9])
    load = rig.begin_load(state)
    rig.plan()
    rig.planner.reset("hc1-other", [state])
    rig.audit()
    assert rig.planner.host.slots.num_used == 2
    assert rig.finish_loads().failed == (load,)
    assert rig.planner.host.slots.num_used == 0
    assert rig.plan().failed_requests == ("a",)
    assert rig.total("unserved_tokens/reset") == 8


def test_nobody_waits_for_a_load_from_before_a_reset():
    rig = Rig()
    rig.fill_host(TOKENS[:8])
    leader, follower = rig.request("leader", TOKENS[:9]), rig.request("follower", TOKENS[:9])
    rig.begin_load(leader)
    rig.plan()
    rig.planner.reset("hc1-other", [leader, follower])
    rig.fill_host(TOKENS[:8], name="again")
    assert rig.match(follower).num_tokens == 8


def test_a_report_of_a_load_that_does_not_run_stops_the_engine():
    rig = Rig()
    rig.planner.join.update(0, WorkerProgress(loads_done=1))
    with pytest.raises(InvariantBroken, match="load 1 is reported, but it is not running"):
        rig.planner.settle_copies(0.0)
