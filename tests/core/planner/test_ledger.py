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
