"""Every token that a lookup found is served or has one reason, and the reason is the true one."""

import pytest
from planner_rig import Rig

from vllm_hicache.planner import ASK_AGAIN
from vllm_hicache.simulate.faults import run_seed
from vllm_hicache.simulate.story import Story
from vllm_hicache.storage_messages import FetchProgress, FetchSettled

PAGE = 4
TOKENS = list(range(100, 200))


def booked(rig: Rig) -> dict[str, int]:
    """What the ledger has, without zeros."""
    names = ("found_tokens", "served_tokens", "unserved_tokens", "unserved_tier_tokens")
    totals = rig.metrics.totals()
    return {k: int(v) for k, v in totals.items() if v and k.partition("/")[0] in names}


def storage_rig(**options: object) -> Rig:
    return Rig(has_storage=True, **options)


def test_each_of_two_requests_that_wait_for_one_fetch_has_its_own_tokens_booked():
    rig = storage_rig()
    first, second = (rig.request(name, TOKENS[:17]) for name in "ab")
    fetch = rig.answer_query(4)
    rig.say(FetchProgress(fetch.op, 1))
    for state in (first, second):
        assert rig.match(state) == ASK_AGAIN
    rig.now = 2.0
    for state in (first, second):
        assert rig.match(state).num_tokens == PAGE
        rig.planner.admit(state)
    assert rig.total("unserved_tokens/deadline") == 2 * 3 * PAGE
    assert rig.total("found_tokens/storage") == 2 * 3 * PAGE


def test_a_follower_with_another_end_is_not_charged_for_pages_that_are_not_its_own():
    rig = storage_rig()
    rig.request("leader", TOKENS[:25])
    follower = rig.request("follower", TOKENS[:8] + TOKENS[50:59])
    fetch = rig.answer_query(6)
    rig.say(FetchSettled(fetch.op, 0, "corrupt"), None)
    rig.match(follower)
    rig.planner.admit(follower)
    assert booked(rig) == {
        "found_tokens/storage": 2 * PAGE,
        "unserved_tokens/short_fetch": 2 * PAGE,
        "unserved_tier_tokens/storage": 2 * PAGE,
    }


def test_a_follower_with_a_shorter_prompt_is_charged_for_its_own_pages():
    rig = storage_rig()
    rig.request("leader", TOKENS[:25])
    follower = rig.request("follower", TOKENS[:13])
    fetch = rig.answer_query(6)
    rig.say(FetchSettled(fetch.op, 1, "missing"))
    rig.begin_load(follower)
    assert rig.total("unserved_tokens/short_fetch") == 2 * PAGE


def test_what_the_device_has_by_then_is_not_found_in_storage():
    rig = storage_rig()
    state = rig.request("a", TOKENS[:17])
    fetch = rig.answer_query(4)
    rig.say(FetchSettled(fetch.op, 0, "unavailable"))
    rig.match(state, num_local=12)
    rig.planner.admit(state)
    assert booked(rig) == {
        "found_tokens/storage": PAGE,
        "unserved_tokens/short_fetch": PAGE,
        "unserved_tier_tokens/storage": PAGE,
    }


def test_less_than_the_minimum_is_below_minimum():
    rig = storage_rig(fetch={"min_tokens": 12})
    state = rig.request("a", TOKENS[:17])
    assert rig.answer_query(2) is None
    rig.match(state)
    rig.planner.admit(state)
    assert rig.total("unserved_tokens/below_minimum") == 2 * PAGE


@pytest.mark.parametrize(("num_slots", "num_served"), [(1, 0), (4, 2)])
def test_what_host_has_no_room_for_is_host_full(num_slots, num_served):
    rig = storage_rig(num_slots=num_slots)
    state = rig.request("a", TOKENS[:17])
    fetch = rig.answer_query(4)
    if num_served:
        rig.end_fetch(fetch.op, num_served)
    rig.match(state)
    rig.planner.admit(state)
    assert rig.total("unserved_tokens/host_full") == (4 - num_served) * PAGE


def test_pages_that_came_and_had_to_leave_are_evicted():
    """A failed load of another request takes the page before them out of host."""
    rig = storage_rig()
    rig.fill_host(TOKENS[:4])
    rig.begin_load(rig.request("other", TOKENS[:5]))
    rig.plan()
    state = rig.request("a", TOKENS[:17])
    fetch = rig.answer_query(3)
    rig.end_fetch(fetch.op, 3)
    assert rig.in_host(state) == 4
    rig.finish_loads(failed=[1])
    assert rig.match(state) == ASK_AGAIN  # storage is asked for them again, and says nothing
    rig.now = 0.1
    assert rig.match(state).num_tokens == 0
    rig.planner.admit(state)
    assert rig.total("unserved_tokens/evicted") == 3 * PAGE


def test_a_failed_load_is_booked_in_the_tier_that_its_pages_came_from():
    rig = storage_rig()
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS[:17])
    fetch = rig.answer_query(2)
    rig.end_fetch(fetch.op, 2)
    load = rig.begin_load(state)
    assert (load.num_tokens, load.num_storage_tokens) == (16, 8)
    rig.plan()
    rig.finish_loads(failed=[1])
    assert booked(rig) == {
        "found_tokens/host": 8,
        "found_tokens/storage": 8,
        "unserved_tokens/load_failed": 16,
        "unserved_tier_tokens/host": 8,
        "unserved_tier_tokens/storage": 8,
    }


# Offers that vLLM did not take -------------------------------------------------------------------


def evict(rig: Rig, num_pages: int) -> None:
    """Others need slots: so many pages leave host, the end of the chain first."""
    rig.planner.host.free(rig.planner.host.allocate(rig.planner.host.slots.num_free + num_pages))


def test_what_left_host_while_vllm_had_no_blocks_for_it_is_no_blocks():
    rig = Rig()
    rig.fill_host(TOKENS[:16])
    state = rig.request("a", TOKENS[:17])
    assert rig.match(state).num_tokens == 16  # vLLM allocates nothing and asks again
    evict(rig, 3)
    assert rig.match(state).num_tokens == PAGE
    evict(rig, 1)
    assert rig.match(state).num_tokens == 0
    rig.planner.admit(state)
    assert booked(rig) == {
        "found_tokens/host": 16,
        "unserved_tokens/no_blocks": 16,
        "unserved_tier_tokens/host": 16,
    }


def test_an_offer_that_is_taken_at_the_second_lookup_is_served_and_nothing_else():
    rig = Rig()
    rig.fill_host(TOKENS[:16])
    state = rig.request("a", TOKENS[:17])
    rig.match(state)
    rig.begin_load(state)
    rig.plan()
    rig.finish_loads()
    assert booked(rig) == {"found_tokens/host": 16, "served_tokens/host": 16}


def test_an_offer_of_which_a_part_was_lost_is_served_and_missed_in_parts():
    rig = Rig()
    rig.fill_host(TOKENS[:16])
    state = rig.request("a", TOKENS[:17])
    rig.match(state)
    evict(rig, 1)
    rig.begin_load(state)
    rig.plan()
    rig.finish_loads()
    assert rig.total("served_tokens/host") == 12
    assert rig.total("unserved_tokens/no_blocks") == PAGE
    assert rig.total("found_tokens/host") == 16


def test_what_the_device_has_itself_at_admission_is_its_own_hit_and_no_found_token():
    """So there is no reason "the device had it by then"."""
    rig = Rig()
    rig.fill_host(TOKENS[:16])
    state = rig.request("a", TOKENS[:17])
    assert rig.match(state).num_tokens == 16
    assert rig.match(state, num_local=16).num_tokens == 0
    rig.planner.admit(state)
    assert booked(rig) == {}
    assert rig.total("local_tokens") == 16


def test_an_offer_that_a_reset_made_void_is_reset():
    rig = Rig()
    rig.fill_host(TOKENS[:16])
    waiting, asked_twice = rig.request("a", TOKENS[:17]), rig.request("b", TOKENS[:9])
    for state in (waiting, asked_twice, asked_twice):
        rig.match(state)
    rig.planner.reset("hc1-other", [waiting, asked_twice])
    for state in (waiting, asked_twice):
        assert rig.match(state).num_tokens == 0
        rig.planner.admit(state)
    assert rig.total("unserved_tokens/reset") == rig.total("found_tokens/host") == 24


def test_a_preempted_request_is_not_told_of_an_offer_of_its_former_life():
    rig = Rig()
    rig.fill_host(TOKENS[:16])
    state = rig.request("a", TOKENS[:17])
    rig.match(state)
    rig.begin_load(state)
    rig.plan()
    rig.finish_loads()
    rig.planner.preempt(state)
    evict(rig, 4)
    assert rig.match(state).num_tokens == 0
    rig.planner.admit(state)
    assert rig.total("unserved_tier_tokens/host") == 0


def test_tokens_from_storage_that_were_offered_and_lost_are_booked_once():
    """A failed load of another request takes the page before them out of host."""
    rig = storage_rig(shares_device_pages=False)
    rig.fill_host(TOKENS[:4])
    rig.begin_load(rig.request("other", TOKENS[:5]))
    rig.plan()
    state = rig.request("a", TOKENS[:17])
    fetch = rig.answer_query(3)
    rig.end_fetch(fetch.op, 3)
    assert rig.match(state).num_tokens == 16
    rig.finish_loads(failed=[1])
    assert rig.match(state).num_tokens is None  # storage is asked again, and does not answer
    rig.now = 0.1
    assert rig.match(state).num_tokens == 0
    rig.planner.admit(state)
    assert rig.total("unserved_tokens/evicted") == rig.total("found_tokens/storage") == 12
    assert rig.total("unserved_tokens/no_blocks") == PAGE
    assert rig.total("found_tokens/host") == PAGE + PAGE  # its first page, and the other's load


# Requests that end early -------------------------------------------------------------------------


def test_what_a_request_had_found_when_it_was_aborted_in_the_queue_is_aborted():
    rig = storage_rig()
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS[:17])
    rig.answer_query(2)
    assert rig.match(state) == ASK_AGAIN
    rig.planner.finish(state, rig.now)
    assert booked(rig) == {
        "found_tokens/host": 8,
        "found_tokens/storage": 8,
        "unserved_tokens/aborted": 16,
        "unserved_tier_tokens/host": 8,
        "unserved_tier_tokens/storage": 8,
    }


def test_a_request_that_ends_after_its_admission_is_not_booked_again():
    rig = storage_rig()
    state = rig.request("a", TOKENS[:17])
    fetch = rig.answer_query(4)
    rig.say(FetchSettled(fetch.op, 2, "corrupt"))
    rig.begin_load(state)
    rig.plan()
    rig.finish_loads()
    before = booked(rig)
    rig.planner.finish(state, rig.now)
    assert booked(rig) == before


def test_a_load_that_lands_after_its_request_was_aborted_is_aborted_in_the_tier_it_came_from():
    rig = storage_rig()
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS[:17])
    fetch = rig.answer_query(2)
    rig.end_fetch(fetch.op, 2)
    assert rig.begin_load(state).is_async
    rig.plan()
    rig.planner.finish(state, rig.now)
    rig.finish_loads()
    assert booked(rig) == {
        "found_tokens/host": 8,
        "found_tokens/storage": 8,
        "unserved_tokens/aborted": 16,
        "unserved_tier_tokens/host": 8,
        "unserved_tier_tokens/storage": 8,
    }
    rig.end_persists()
    rig.audit(is_idle=True)


# Sums --------------------------------------------------------------------------------------------


def test_the_sums_hold_in_each_tier_over_random_faults():
    """Asserted by the simulator after every seed; here it is seen to look at real tokens."""
    tiers = ("host", "storage")
    seen: dict[str, float] = {}
    for seed in range(24):
        story = Story(seed)
        story.run(100)
        totals = story.planner.metrics.totals()
        for tier in tiers:
            found, served = totals[f"found_tokens/{tier}"], totals[f"served_tokens/{tier}"]
            assert found == served + totals[f"unserved_tier_tokens/{tier}"]
            seen[tier] = seen.get(tier, 0) + found
    assert min(seen.values()) > 100


def test_a_ledger_that_forgets_a_reason_is_found_by_the_simulator(monkeypatch):
    monkeypatch.setattr(
        "vllm_hicache.metrics.Ledger.unserved", lambda self, request_id, tier, reason, tokens: None
    )
    assert any(run_seed(seed, 100).failures for seed in range(20))
