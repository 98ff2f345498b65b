"""Loads that vLLM does not take are offered for long, and no more where that is hopeless."""

import pytest
from planner_rig import Rig

from vllm_hicache.planner import NO_MATCH, Match
from vllm_hicache.refusals import PATIENCE, Refusals

TOKENS = list(range(100, 117))  # four pages of four tokens, and one token
HOPELESS_S = PATIENCE * 0.016  # of an engine that computes 1,000 tokens a second


def _in_host(**options: object):
    """A request whose prefix is in host, in an engine that computes 1,000 tokens a second."""
    rig = Rig(**options)
    for _ in range(40):
        rig.planner.costs.prefilled(1000, 1.0)
    rig.fill_host(TOKENS[:16])
    return rig, rig.request("a", TOKENS)


def _refuse_until(rig: Rig, state, now: float) -> Match:
    """vLLM looks the request up every millisecond and has no room for the load."""
    match = rig.match(state)
    while rig.now < now:
        rig.now += 0.001
        match = rig.match(state)
    return match


def test_a_load_that_is_kept_out_for_long_with_room_there_is_offered_no_more():
    rig, state = _in_host()
    assert _refuse_until(rig, state, HOPELESS_S - 0.001).num_tokens == 16
    rig.now = HOPELESS_S + 0.002
    assert rig.match(state) == NO_MATCH
    rig.planner.admit(state)
    assert rig.total("unserved_tokens/no_blocks") == rig.total("found_tokens/host") == 16
    rig.planner.finish(state, rig.now)
    rig.audit(is_idle=True)


def test_waiting_while_the_device_is_full_never_counts():
    """Computing would need the same blocks: under load that is every request's way."""
    rig, state = _in_host()
    rig.blocks.num_free = 4  # it needs five
    assert _refuse_until(rig, state, 100 * HOPELESS_S).num_tokens == 16
    rig.blocks.num_free = 5
    assert _refuse_until(rig, state, rig.now + HOPELESS_S - 0.001).num_tokens == 16
    rig.blocks.num_free = 4
    assert rig.match(state).num_tokens == 16
    rig.blocks.num_free = 5
    start = rig.now
    assert _refuse_until(rig, state, start + HOPELESS_S - 0.001).num_tokens == 16
    rig.now = start + HOPELESS_S + 0.002
    assert rig.match(state) == NO_MATCH


def test_blocks_that_the_device_has_of_it_are_not_needed_again():
    rig, state = _in_host()
    rig.blocks.num_free = 3
    for rig.now in (0.0, 0.001, 0.002, 0.5):
        match = rig.match(state, num_local=8)
    assert match == NO_MATCH


def test_a_load_that_finds_room_in_time_is_served():
    rig, state = _in_host()
    _refuse_until(rig, state, 0.01)
    rig.begin_load(state)
    rig.plan()
    rig.finish_loads()
    assert rig.total("served_tokens/host") == 16
    assert rig.total("unserved_tier_tokens/host") == 0


def test_while_nobody_knows_how_long_computing_takes_it_is_offered_on():
    rig = Rig()
    rig.fill_host(TOKENS[:16])
    assert _refuse_until(rig, rig.request("a", TOKENS), 1.0).num_tokens == 16


def test_a_copy_before_the_forward_needs_no_room_of_its_own_and_is_offered_on():
    rig, state = _in_host(sync_load_max_s=1.0)
    assert _refuse_until(rig, state, 1.0) == Match(16, is_async=False)


@pytest.mark.parametrize("event", ["preempt", "reset"])
def test_after_a_preemption_or_a_reset_the_time_starts_anew(event):
    rig, state = _in_host()
    _refuse_until(rig, state, 0.01)
    if event == "preempt":
        rig.planner.preempt(state)
    else:
        rig.planner.reset("hc1-other", [state])
        rig.fill_host(TOKENS[:16], name="again")
    assert state.refused.count == 0
    start = rig.now
    assert _refuse_until(rig, state, start + HOPELESS_S - 0.001).num_tokens == 16
    rig.now = start + HOPELESS_S + 0.002
    assert rig.match(state) == NO_MATCH


def test_refusals_in_a_row_are_counted_and_the_first_one_with_room_gives_the_time():
    refusals = Refusals()
    asked = {"recompute_s": 1.0, "has_room": True}
    assert not refusals.is_shut_out(**asked, now=0.0)
    assert refusals.since is None
    for now in (1.0, 2.0, 3.0):
        refusals.note(16, is_async=True)
        assert not refusals.is_shut_out(**asked, now=now)
    assert (refusals.count, refusals.since, refusals.end) == (3, 1.0, 16)
    assert refusals.is_shut_out(**asked, now=1.0 + PATIENCE)
    assert not refusals.is_shut_out(recompute_s=None, has_room=True, now=1e9)
    refusals.note(8, is_async=False)
    assert not refusals.is_shut_out(**asked, now=1.0 + PATIENCE)
    assert (refusals.count, refusals.since, refusals.end) == (0, None, 16)


def test_a_lookup_that_waits_for_something_else_is_no_refusal():
    rig, state = _in_host(has_storage=True)
    longer = rig.request("b", [*TOKENS[:16], *range(9)])
    rig.answer_query(2)
    for rig.now in (0.0, 0.001, 0.002):
        rig.match(longer)
    assert longer.refused.count == 0
    rig.match(state)
    rig.match(state)
    assert state.refused.count == 1
