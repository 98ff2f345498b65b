"""Retries of fetches: pins, room, ledger, re-issue when pages left host, reset and abort."""

import pytest
from planner_rig import NAMESPACE, Rig
from retry_rig import (
    PROMPT,
    all_in_host,
    asked_at,
    empty_host,
    ends_clean,
    missed,
    retry_finds,
    retry_rig,
    short,
)

from vllm_hicache.planner import ASK_AGAIN, NO_MATCH
from vllm_hicache.storage_messages import (
    Cancel,
    Exists,
    ExistsResult,
    Fetch,
    FetchProgress,
    unpack_hashes,
)

# What the first fetch brought --------------------------------------------------------------------


def test_pages_of_the_first_fetch_stay_pinned_until_the_request_leaves():
    rig = retry_rig()
    state = short(rig)
    asked_at(rig, 1.0)
    empty_host(rig)
    assert rig.in_host(state) == 2  # while the retry asks
    rig.answer_query(0)
    empty_host(rig)
    assert rig.in_host(state) == 2  # it has found nothing
    fetch = retry_finds(rig, 4, now=2.0)
    assert rig.match(state) == ASK_AGAIN
    empty_host(rig)
    assert rig.in_host(state) == 2  # it reads
    rig.end_fetch(fetch.op, 0, reason="corrupt")
    empty_host(rig)
    assert rig.match(state).num_tokens == 8  # it has brought nothing
    rig.planner.finish(state, rig.now)
    empty_host(rig)
    assert rig.in_host(state) == 0
    ends_clean(rig)


def test_pages_that_a_retry_brought_between_two_lookups_stay_pinned():
    rig = retry_rig()
    state = short(rig)
    rig.end_fetch(retry_finds(rig, 4).op, 4)
    for _ in range(2):
        assert rig.match(state).num_tokens == 24
        empty_host(rig)
    assert rig.in_host(state) == 6
    ends_clean(rig, state)


def test_host_pages_of_both_fetches_count_until_the_request_leaves():
    rig = retry_rig()
    state = short(rig, 2, tenant="red")
    fetch = retry_finds(rig, 4)
    assert rig.match(state) == ASK_AGAIN
    assert rig.planner.prefetcher.num_occupied == 6
    rig.end_fetch(fetch.op, 4)
    assert rig.planner.prefetcher.num_occupied == 6
    assert rig.match(state).num_tokens == 24
    ends_clean(rig, state)


def test_a_retry_cannot_lift_its_own_request_over_the_limit_of_its_tenant():
    rig = retry_rig(max_tenant_share=0.1)  # four pages
    state = rig.request("a", PROMPT, tenant="red")
    rig.end_fetch(rig.answer_query(6).op, 4)
    assert asked_at(rig, 1.0) == 2
    assert rig.answer_query(2) is None
    assert rig.match(state).num_tokens == 16
    assert rig.planner.prefetcher.num_occupied == 4
    ends_clean(rig, state)


# Others who ask for the same ---------------------------------------------------------------------


def test_a_retry_joins_the_fetch_of_another_request():
    rig = retry_rig()
    state = missed(rig)
    rig.now = 0.9
    other = rig.request("b", PROMPT)
    fetch = rig.answer_query(6)
    assert asked_at(rig, 1.0) == 2
    assert rig.total("fetch_retries/found") == 1
    assert rig.match(state) == ASK_AGAIN
    rig.planner.finish(other, rig.now)
    assert rig.channels.count(Cancel) == 0
    rig.planner.finish(state, rig.now)
    assert rig.channels.last(Cancel).op == fetch.op
    rig.end_fetch(fetch.op, 0, reason="cancelled")
    ends_clean(rig)


def test_a_retry_that_joined_a_fetch_of_nothing_new_is_dropped():
    rig = retry_rig()
    state = missed(rig)
    rig.now = 0.9
    other = rig.request("b", PROMPT)
    rig.fill_host(PROMPT[:8])
    rig.end_persists()
    assert asked_at(rig, 1.0) == 2
    fetch = rig.answer_query(2)
    assert rig.match(state).num_tokens == 8
    assert rig.total("fetch_retries/nothing") == 1
    rig.end_fetch(fetch.op, 2)
    ends_clean(rig, state, other)


def test_a_newcomer_waits_for_the_question_of_a_retry_as_for_its_own():
    rig = retry_rig()
    state = missed(rig)
    asked_at(rig, 1.0)
    other = rig.request("b", PROMPT)
    assert rig.channels.count(Exists) == 2
    assert rig.match(state) == NO_MATCH
    assert rig.match(other) == ASK_AGAIN
    rig.planner.admit(state)
    assert rig.channels.count(Cancel) == 0
    rig.end_fetch(rig.answer_query(6).op, 6)
    assert rig.match(other).num_tokens == 24
    ends_clean(rig, state, other)


def test_the_rest_of_a_request_that_joined_a_shorter_one_is_asked_for():
    rig = retry_rig()
    rig.request("short", PROMPT[:13])
    state = rig.request("a", PROMPT)
    rig.end_fetch(rig.answer_query(3).op, 3)
    fetch = retry_finds(rig, 3)
    rig.end_fetch(fetch.op, 3)
    assert rig.match(state).num_tokens == 24


# The ledger --------------------------------------------------------------------------------------


def _storage_books(rig: Rig) -> dict[str, int]:
    rig.planner.ledger.balance()
    totals = rig.metrics.totals()
    return {
        k: int(v) for k, v in totals.items() if v and k.startswith(("unserved_tokens/", "found_"))
    }


def test_what_a_retry_found_and_could_not_bring_in_time_is_booked_once():
    rig = retry_rig(base_s=0.1)
    state = missed(rig)
    fetch = retry_finds(rig, 6)
    rig.say(FetchProgress(fetch.op, 1))
    assert rig.match(state) == ASK_AGAIN
    rig.now = 2.0
    rig.begin_load(state)
    assert _storage_books(rig) == {"found_tokens/storage": 24, "unserved_tokens/deadline": 20}


def test_what_the_first_fetch_found_stays_booked_where_a_retry_finds_nothing():
    rig = retry_rig()
    state = rig.request("a", PROMPT)
    rig.end_fetch(rig.answer_query(6).op, 0, reason="corrupt")
    asked_at(rig, 1.0)
    rig.answer_query(0)
    assert rig.match(state) == NO_MATCH
    rig.planner.admit(state)
    assert _storage_books(rig) == {"found_tokens/storage": 24, "unserved_tokens/short_fetch": 24}


def test_a_retry_that_found_pages_without_room_for_them_has_its_reason():
    rig = retry_rig(max_tenant_share=0.01)
    state = rig.request("a", PROMPT, tenant="red")
    rig.answer_query(0)
    asked_at(rig, 1.0)
    assert rig.answer_query(6) is None
    assert rig.match(state) == NO_MATCH
    rig.planner.admit(state)
    assert _storage_books(rig) == {"found_tokens/storage": 24, "unserved_tokens/tenant_limit": 24}


def test_tokens_that_a_retry_brought_are_served_from_storage():
    rig = retry_rig()
    state = short(rig)
    rig.end_fetch(retry_finds(rig, 4).op, 4)
    rig.begin_load(state)
    rig.plan()
    rig.finish_loads()
    assert rig.total("served_tokens/storage") == 24
    ends_clean(rig, state)


# Re-issue on shrink ------------------------------------------------------------------------------


def test_pages_that_left_host_while_the_request_waited_are_asked_for_at_once():
    rig = retry_rig()
    state = all_in_host(rig)
    assert rig.channels.count(Exists) == 0
    empty_host(rig)
    assert rig.match(state) == ASK_AGAIN
    assert unpack_hashes(rig.channels.last(Exists).hashes) == state.tokens.page_hashes(6)[:6]
    rig.end_fetch(rig.answer_query(6).op, 6)
    assert rig.match(state).num_tokens == 24
    assert rig.total("fetch_retries/reissued") == 1
    ends_clean(rig, state)


def test_only_what_is_exposed_now_is_asked_for():
    rig = retry_rig()
    state = all_in_host(rig)
    kept = [rig.page_of(state, number) for number in range(2)]
    rig.planner.host.pin(kept)
    host = rig.planner.host
    host.free(host.allocate(host.slots.num_slots))
    rig.planner.host.unpin(kept)
    assert rig.match(state) == ASK_AGAIN
    assert unpack_hashes(rig.channels.last(Exists).hashes) == state.tokens.page_hashes(6)[2:6]


def test_pages_that_left_host_after_a_preemption_are_asked_for_at_once():
    rig = retry_rig()
    state = missed(rig)
    assert rig.match(state) == NO_MATCH
    rig.compute(state, 24)
    rig.plan()
    rig.finish_saves()
    rig.end_persists()
    rig.planner.preempt(state)
    assert rig.match(state).num_tokens == 24
    empty_host(rig)
    assert rig.match(state) == ASK_AGAIN
    assert rig.channels.count(Exists) == 2


def test_nothing_is_asked_for_where_the_device_has_what_left_host():
    rig = retry_rig()
    state = all_in_host(rig)
    empty_host(rig)
    assert rig.match(state, num_local=24) == NO_MATCH
    assert rig.channels.count(Exists) == 0
    assert rig.match(state, num_local=8) == ASK_AGAIN  # now the device has lost them, too


def test_a_retrys_question_gives_way_to_what_left_host():
    rig = retry_rig()
    state = all_in_host(rig, 8)
    rig.answer_query(0)
    asked_at(rig, 1.0)
    question = rig.channels.last(Exists).op
    rig.planner.host.discard(rig.page_of(state, 0))  # the load of another request has failed
    assert rig.match(state) == ASK_AGAIN
    assert rig.channels.last(Cancel).op == question
    assert len(unpack_hashes(rig.channels.last(Exists).hashes)) == 6
    ends_clean(rig, state)


def test_asking_again_for_pages_that_left_counts_against_the_cap():
    rig = retry_rig(max_retries=2)
    state = all_in_host(rig)
    for _ in range(4):
        empty_host(rig)
        rig.match(state)
        if rig.channels.count(Exists) > rig.total("fetch_ended/missing"):
            rig.answer_query(0)
        rig.fill_host(PROMPT[:24], name="again")
        rig.end_persists()
        assert rig.match(state).num_tokens == 24
    assert rig.channels.count(Exists) == 2
    assert [asked_at(rig, now) for now in (1.0, 2.0)] == [2, 2]


def test_all_fetches_of_one_request_together_are_waited_for_no_longer_than_one():
    rig = retry_rig(base_s=0.1, exists_timeout_s=0.05)
    state = rig.request("a", PROMPT)
    assert rig.match(state) == ASK_AGAIN
    rig.answer_query(0)
    rig.now = 0.149
    for expected in (ASK_AGAIN, NO_MATCH):
        rig.fill_host(PROMPT[:24], name="writer")
        rig.end_persists()
        assert rig.match(state).num_tokens == 24
        empty_host(rig)
        assert rig.match(state) == expected
        rig.answer_query(0)
        rig.now = 0.151


# Reset and abort ---------------------------------------------------------------------------------


def test_a_reset_ends_the_question_of_a_retry_and_nothing_is_asked_again():
    rig = retry_rig()
    state = missed(rig)
    asked_at(rig, 1.0)
    rig.planner.reset("hc1-other", [state])
    rig.audit()
    assert rig.match(state) == NO_MATCH
    assert [asked_at(rig, now) for now in (2.0, 3.0)] == [2, 2]
    ends_clean(rig, state)


def test_a_reset_while_a_retry_reads_publishes_nothing_more():
    rig = retry_rig()
    state = short(rig)
    fetch = retry_finds(rig, 4)
    assert rig.match(state) == ASK_AGAIN
    rig.planner.reset("hc1-other", [state])
    rig.end_fetch(fetch.op, 4)
    assert rig.in_host(state) == 0
    assert rig.match(state) == NO_MATCH
    assert asked_at(rig, 2.0) == 2
    ends_clean(rig, state)
    assert rig.planner.host.slots.num_used == 0


def test_what_a_reset_took_out_of_host_is_not_asked_for_again():
    rig = retry_rig()
    state = all_in_host(rig)
    rig.planner.reset(NAMESPACE, [state])
    assert rig.match(state) == NO_MATCH
    assert [asked_at(rig, now) for now in (1.0, 2.0)] == [0, 0]


def test_an_abort_stops_the_question_of_a_retry():
    rig = retry_rig()
    state = short(rig)
    asked_at(rig, 1.0)
    ends_clean(rig, state)
    assert rig.channels.last(Cancel).op == rig.channels.last(Exists).op
    rig.say(ExistsResult(rig.channels.last(Exists).op, 4, ok=True))
    assert rig.channels.count(Fetch) == 1
    assert rig.total("ignored_reports") == 1


@pytest.mark.parametrize("is_looked_up", [False, True])
def test_an_abort_while_a_retry_reads_frees_its_slots_at_the_release(is_looked_up):
    rig = retry_rig()
    state = short(rig)
    fetch = retry_finds(rig, 4)
    if is_looked_up:
        assert rig.match(state) == ASK_AGAIN
    rig.planner.finish(state, rig.now)
    assert rig.channels.last(Cancel).op == fetch.op
    assert rig.planner.host.slots.num_used == 6
    rig.end_fetch(fetch.op, 0, reason="cancelled")
    assert rig.planner.host.slots.num_used == 2
    ends_clean(rig)
