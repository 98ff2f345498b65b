"""Fetches: question, reading, end; who waits, for how long, and who owns the slots."""

import pytest
from planner_rig import Rig

from vllm_hicache.planner import ASK_AGAIN, NO_MATCH
from vllm_hicache.storage_channel import ChannelDown, ChannelUp
from vllm_hicache.storage_messages import (
    Cancel,
    Exists,
    ExistsResult,
    Fetch,
    FetchProgress,
    FetchReleased,
    FetchSettled,
    unpack_hashes,
    unpack_slots,
)
from vllm_hicache.tiers import SlotOwner, Tier

TOKENS = list(range(100, 140))
PROMPT = TOKENS[:25]  # six whole pages of four tokens, and one token


def _rig(num_workers: int = 1, **options) -> Rig:
    return Rig(has_storage=True, num_workers=num_workers, **options)


def _reading(rig: Rig, num_pages: int = 6):
    """A request whose fetch of so many pages is being read."""
    state = rig.request("a", PROMPT)
    fetch = rig.answer_query(*([num_pages] * rig.num_workers))
    assert fetch is not None
    return state, fetch


def _owners(rig: Rig, fetch: Fetch) -> list[SlotOwner]:
    return [rig.planner.host.slots.owner(slot) for slot in unpack_slots(fetch.slots)]


def _cost(rig: Rig, seconds_per_1k: float) -> None:
    for _ in range(8):
        rig.planner.costs.prefilled(1000, seconds_per_1k)


# The question ------------------------------------------------------------------------------------


def test_storage_is_asked_for_what_host_lacks():
    rig = _rig()
    rig.fill_host(PROMPT[:8])
    state = rig.request("a", PROMPT)
    asked = unpack_hashes(rig.channels.last(Exists).hashes)
    assert asked == state.tokens.page_hashes(6)[2:6]


def test_the_page_that_ends_with_the_prompt_is_asked_for_although_its_last_block_is_computed():
    rig = _rig(page=8, block=4)
    rig.request("a", TOKENS[:16])
    assert len(unpack_hashes(rig.channels.last(Exists).hashes)) == 2
    rig = _rig(page=4, block=4)
    rig.request("a", TOKENS[:16])
    assert len(unpack_hashes(rig.channels.last(Exists).hashes)) == 3


def test_nothing_is_asked_for_less_than_the_minimum():
    rig = _rig(fetch={"min_tokens": 28})
    rig.request("a", PROMPT)
    assert rig.channels.count(Exists) == 0


def test_nothing_is_asked_for_a_request_that_may_not_load():
    rig = _rig()
    rig.request("a", PROMPT, may_load=False, why_not="skip_reading")
    assert rig.channels.count(Exists) == 0


def test_only_pages_that_all_workers_have_are_fetched():
    rig = _rig(num_workers=3)
    rig.request("a", PROMPT)
    fetch = rig.answer_query(6, 2, 4)
    assert len(unpack_hashes(fetch.hashes)) == 2


def test_a_miss_on_one_worker_is_a_miss():
    rig = _rig(num_workers=2)
    state = rig.request("a", PROMPT)
    assert rig.answer_query(6, 0) is None
    assert rig.total("fetch_ended/missing") == 1
    assert rig.match(state) == NO_MATCH


def test_more_pages_than_were_asked_for_are_not_believed():
    rig = _rig()
    rig.request("a", PROMPT)
    assert len(unpack_hashes(rig.answer_query(99).hashes)) == 6


def test_a_question_that_takes_too_long_is_no_reason_to_wait():
    rig = _rig()
    state = rig.request("a", PROMPT)
    rig.now = 0.049
    assert rig.match(state) == ASK_AGAIN
    rig.now = 0.051
    assert rig.match(state) == NO_MATCH
    rig.planner.admit(state)
    assert rig.channels.last(Cancel).op == rig.channels.last(Exists).op
    rig.say(ExistsResult(rig.channels.last(Exists).op, 6, ok=True))
    assert rig.channels.count(Fetch) == 0
    assert rig.total("ignored_reports") == 1


def test_an_open_question_is_not_a_sign_of_absence():
    rig = _rig()
    rig.request("a", PROMPT)
    rig.say(ExistsResult(rig.channels.last(Exists).op, 0, ok=False, reason="unavailable"))
    assert rig.total("fetch_ended/unavailable") == 1


def test_a_duplicate_answer_is_ignored_and_counted():
    rig = _rig(num_workers=2)
    rig.request("a", PROMPT)
    answer = ExistsResult(rig.channels.last(Exists).op, 6, ok=True)
    rig.say(answer)
    rig.say(ExistsResult(answer.op, 0, ok=True))
    assert rig.total("ignored_reports") == 1
    rig.say(None, answer)
    assert rig.channels.count(Fetch) == 1


# Reading -----------------------------------------------------------------------------------------


def test_pages_become_visible_as_the_slowest_worker_has_them():
    rig = _rig(num_workers=2)
    state, fetch = _reading(rig)
    rig.say(FetchProgress(fetch.op, 5), FetchProgress(fetch.op, 2))
    assert rig.in_host(state) == 2
    assert _owners(rig, fetch) == [SlotOwner.INDEX] * 2 + [SlotOwner.OPERATION] * 4
    assert rig.page_of(state, 0).origin is Tier.STORAGE
    assert rig.page_of(state, 0).is_persisted
    assert len(rig.planner.take_fetched()) == 2


def test_slots_of_pages_that_did_not_come_are_free_only_after_the_last_release():
    """Trace C: worker 0 reads six pages, worker 1 four and then fails."""
    rig = _rig(num_workers=2)
    state, fetch = _reading(rig)
    rig.say(FetchSettled(fetch.op, 6, "complete"), FetchSettled(fetch.op, 4, "corrupt"))
    assert rig.in_host(state) == 4
    assert _owners(rig, fetch)[4:] == [SlotOwner.OPERATION] * 2
    rig.say(FetchReleased(fetch.op))
    assert _owners(rig, fetch)[4:] == [SlotOwner.OPERATION] * 2
    rig.say(None, FetchReleased(fetch.op))
    assert _owners(rig, fetch)[4:] == [SlotOwner.FREE] * 2
    assert rig.total("fetch_ended/corrupt") == 1
    assert rig.match(state).num_tokens == 16


def test_a_stop_uses_the_last_progress_that_was_consumed():
    """Trace B: four pages are agreed when the request is admitted, the fifth comes later."""
    rig = _rig(num_workers=2)
    state, fetch = _reading(rig)
    rig.say(FetchProgress(fetch.op, 4), FetchProgress(fetch.op, 5))
    rig.channels.inbox = [(0, FetchProgress(fetch.op, 6))]  # arrived, but not looked at yet
    rig.now = 1.5
    state.waiting_since = 0.0
    assert rig.match(state).num_tokens == 16
    load = rig.planner.begin_load(state, 16, rig.new_blocks(16), rig.now)
    assert load.last_token == 16
    assert rig.channels.last(Cancel).op == fetch.op
    rig.say(FetchSettled(fetch.op, 6, "cancelled"), FetchSettled(fetch.op, 5, "cancelled"))
    assert load.last_token == 16
    rig.say(FetchReleased(fetch.op), FetchReleased(fetch.op))
    rig.plan()
    rig.finish_loads()
    rig.planner.finish(state, rig.now)
    rig.audit(is_idle=True)
    assert rig.total("unserved_tokens/deadline") == 8


def test_pages_that_arrive_after_the_stop_still_serve_the_next_request():
    rig = _rig()
    state, fetch = _reading(rig)
    rig.planner.admit(state)
    rig.end_fetch(fetch.op, 6, reason="complete")
    other = rig.request("b", PROMPT)
    assert rig.match(other).num_tokens == 24


def test_late_duplicate_and_unknown_answers_are_ignored_and_counted():
    rig = _rig(num_workers=2)
    state, fetch = _reading(rig)
    rig.say(FetchSettled(fetch.op, 3, "missing"))
    rig.say(FetchSettled(fetch.op, 6, "complete"))
    rig.say(FetchProgress(fetch.op, 6), FetchProgress(fetch.op, 6))
    assert rig.in_host(state) == 3
    rig.say(FetchReleased(fetch.op), FetchReleased(fetch.op))
    rig.say(FetchProgress(fetch.op, 6))
    rig.say(FetchReleased(999))
    assert rig.total("ignored_reports") == 4


def test_a_release_without_a_final_number_ends_the_fetch():
    rig = _rig()
    state, fetch = _reading(rig)
    rig.say(FetchProgress(fetch.op, 2))
    rig.say(FetchReleased(fetch.op))
    assert rig.in_host(state) == 2
    assert rig.planner.prefetcher.num_reading == 0
    assert rig.total("fetch_ended/cancelled") == 1


def test_fetched_pages_are_pinned_while_a_request_waits_for_them():
    rig = _rig(num_slots=12)
    state, fetch = _reading(rig)
    rig.end_fetch(fetch.op, 6)
    assert len(rig.planner.host.allocate(12)) == 6
    rig.planner.finish(state, rig.now)
    assert rig.planner.host.num_pinned == 0
    assert len(rig.planner.host.allocate(12)) == 6


def test_a_page_that_was_saved_meanwhile_is_used_and_its_second_slot_freed():
    rig = _rig()
    state, fetch = _reading(rig, num_pages=2)
    rig.fill_host(PROMPT[:8])
    saved = rig.page_of(state, 1).slot
    rig.end_persists()
    rig.say(FetchProgress(fetch.op, 2))
    assert rig.page_of(state, 1).slot == saved
    assert rig.planner.host.slots.num_used == 2
    assert rig.planner.host.num_pinned == 2
    rig.end_fetch(fetch.op, 2)
    rig.planner.finish(state, rig.now)
    rig.audit(is_idle=True)


def test_a_fetch_fills_at_most_half_of_the_host():
    rig = _rig(num_slots=8)
    _, fetch = _reading(rig)
    assert len(unpack_slots(fetch.slots)) == 4
    rig.request("b", [0, *PROMPT])
    assert rig.answer_query(6) is None
    assert rig.total("fetch_ended/host_full") == 1


def test_the_page_before_a_fetch_is_not_evicted_to_make_room_for_it():
    rig = _rig(num_slots=4)
    rig.fill_host(PROMPT[:8])
    rig.end_persists()
    rig.fill_host([7, 7, 7, 7, 8, 8, 8, 8], name="other")
    rig.end_persists()
    state = rig.request("a", PROMPT)
    fetch = rig.answer_query(4)
    assert len(unpack_slots(fetch.slots)) == 2
    rig.end_fetch(fetch.op, 2)
    assert rig.in_host(state) == 4


def test_pages_are_dropped_when_the_page_before_them_has_left():
    rig = _rig()
    rig.fill_host(PROMPT[:8])
    rig.end_persists()
    state = rig.request("a", PROMPT)
    fetch = rig.answer_query(4)
    rig.planner.host.discard(rig.page_of(state, 0))
    rig.end_fetch(fetch.op, 4)
    assert rig.in_host(state) == 0
    rig.planner.finish(state, rig.now)
    assert rig.planner.host.slots.num_used == 0
    rig.audit(is_idle=True)


# Sharing -----------------------------------------------------------------------------------------


def test_a_follower_waits_for_the_fetch_of_another_request():
    rig = _rig()
    first, fetch = _reading(rig)
    second = rig.request("b", [*PROMPT[:12], 1, 2, 3, 4, 5])
    assert rig.channels.count(Exists) == 1
    assert rig.match(second) == ASK_AGAIN
    rig.planner.admit(first)
    assert rig.channels.count(Cancel) == 0
    rig.end_fetch(fetch.op, 6)
    assert rig.match(second).num_tokens == 12
    rig.planner.admit(second)
    assert rig.planner.host.num_pinned == 0


def test_the_last_one_to_leave_stops_the_fetch():
    rig = _rig()
    first, fetch = _reading(rig)
    second = rig.request("b", PROMPT)
    rig.planner.finish(first, rig.now)
    assert rig.channels.count(Cancel) == 0
    rig.planner.finish(second, rig.now)
    assert rig.channels.last(Cancel).op == fetch.op
    rig.end_fetch(fetch.op, 0, reason="cancelled")
    rig.audit(is_idle=True)


def test_nobody_joins_a_fetch_that_was_stopped():
    rig = _rig()
    first, fetch = _reading(rig)
    rig.planner.finish(first, rig.now)
    second = rig.request("b", PROMPT)
    assert rig.channels.count(Exists) == 2
    rig.end_fetch(fetch.op, 0, reason="cancelled")
    assert rig.match(second) == ASK_AGAIN


# Deadlines ---------------------------------------------------------------------------------------


def test_timeout_counts_from_the_first_lookup_that_had_to_wait():
    rig = _rig(fetch={"base_s": 1.0, "per_1k_tokens_s": 0.0})
    state, _ = _reading(rig)
    rig.now = 50.0
    assert rig.match(state) == ASK_AGAIN
    rig.now = 50.99
    assert rig.match(state) == ASK_AGAIN
    rig.now = 51.0
    assert rig.match(state) == NO_MATCH


def test_timeout_grows_with_the_tokens():
    rig = _rig(fetch={"base_s": 0.0, "per_1k_tokens_s": 1024 / 24})
    state, _ = _reading(rig)
    assert rig.match(state) == ASK_AGAIN
    rig.now = 0.99
    assert rig.match(state) == ASK_AGAIN
    rig.now = 1.01
    assert rig.match(state) == NO_MATCH


def test_timeout_is_never_longer_than_computing_the_tokens_would_take():
    rig = _rig(fetch={"base_s": 100.0})
    _cost(rig, seconds_per_1k=10.0)
    state, _ = _reading(rig)
    assert rig.match(state) == ASK_AGAIN
    rig.now = 0.23
    assert rig.match(state) == ASK_AGAIN
    rig.now = 0.25
    assert rig.match(state) == NO_MATCH


def test_best_effort_takes_what_is_there():
    rig = _rig(fetch={"kind": "best_effort"})
    state, fetch = _reading(rig)
    rig.say(FetchProgress(fetch.op, 2))
    assert rig.match(state).num_tokens == 8


def test_wait_complete_waits_until_reading_itself_times_out():
    rig = _rig(fetch={"kind": "wait_complete", "base_s": 0.0, "read_timeout_s": 10.0})
    _cost(rig, seconds_per_1k=0.001)
    state, _ = _reading(rig)
    rig.now = 9.9
    assert rig.match(state) == ASK_AGAIN
    rig.now = 10.1
    assert rig.match(state) == NO_MATCH


def test_nobody_waits_for_pages_that_the_device_has():
    rig = _rig()
    state, _ = _reading(rig)
    assert rig.match(state, num_local=24) == NO_MATCH
    assert rig.match(state, num_local=20) == ASK_AGAIN


# Losing a storage process ------------------------------------------------------------------------


def test_a_process_lost_during_the_question_ends_the_fetch():
    rig = _rig(num_workers=2)
    state = rig.request("a", PROMPT)
    rig.say(None, ChannelDown())
    assert rig.match(state) == NO_MATCH
    assert rig.total("fetch_ended/unavailable") == 1


def test_a_process_lost_mid_fetch_keeps_its_slots_until_its_successor_says_hello():
    rig = _rig(num_workers=2)
    state, fetch = _reading(rig)
    rig.say(FetchProgress(fetch.op, 4), FetchProgress(fetch.op, 2))
    rig.say(FetchSettled(fetch.op, 6, "complete"), ChannelDown())
    rig.say(FetchReleased(fetch.op))
    assert rig.match(state).num_tokens == 8
    assert _owners(rig, fetch)[2:] == [SlotOwner.OPERATION] * 4
    rig.say(None, ChannelUp(2))
    assert _owners(rig, fetch)[2:] == [SlotOwner.FREE] * 4


def test_a_fetch_is_not_sent_to_the_successor_of_a_process_whose_end_is_not_yet_known():
    rig = _rig()
    rig.request("a", PROMPT)
    answer = ExistsResult(rig.channels.last(Exists).op, 6, ok=True)
    rig.channels.inbox = [(0, answer), (0, ChannelDown()), (0, ChannelUp(2))]
    rig.settle_storage()
    assert rig.channels.count(Fetch) == 0
    assert rig.planner.host.slots.num_used == 0
    assert rig.total("fetch_ended/unavailable") == 1


def test_while_one_process_is_away_nothing_is_asked():
    rig = _rig(num_workers=2)
    rig.say(ChannelDown())
    state = rig.request("a", PROMPT)
    assert rig.match(state) == NO_MATCH
    assert rig.channels.count(Exists, worker_id=1) == 0


@pytest.mark.parametrize("refusing", [{0}, {1}, {0, 1}])
def test_a_fetch_that_a_worker_was_not_told_of_brings_nothing_and_leaves_nothing(refusing):
    rig = _rig(num_workers=2)
    state = rig.request("a", PROMPT)
    rig.channels.refusing = refusing
    op = rig.channels.last(Exists).op
    rig.say(ExistsResult(op, 6, ok=True), ExistsResult(op, 6, ok=True))
    for worker_id in {0, 1} - refusing:
        fetch = rig.channels.last(Fetch, worker_id)
        events = [None, None]
        events[worker_id] = FetchSettled(fetch.op, 6, "complete")
        rig.say(*events)
        events[worker_id] = FetchReleased(fetch.op)
        rig.say(*events)
    assert rig.in_host(state) == 0
    assert rig.planner.host.slots.num_used == 0


# Reset -------------------------------------------------------------------------------------------


def test_a_reset_ends_a_question():
    rig = _rig()
    state = rig.request("a", PROMPT)
    rig.planner.reset("hc1-other", [state])
    rig.audit()
    rig.say(ExistsResult(rig.channels.last(Exists).op, 6, ok=True))
    assert rig.channels.count(Fetch) == 0
    assert rig.match(state) == NO_MATCH
    assert rig.total("fetch_ended/reset") == 1


def test_a_reset_mid_fetch_publishes_nothing_more_and_frees_at_the_release():
    rig = _rig()
    state, fetch = _reading(rig)
    rig.say(FetchProgress(fetch.op, 2))
    rig.planner.reset("hc1-other", [state])
    rig.audit()
    assert _owners(rig, fetch) == [SlotOwner.FREE] * 2 + [SlotOwner.OPERATION] * 4
    rig.say(FetchSettled(fetch.op, 6, "complete"))
    assert rig.in_host(state) == 0
    rig.say(FetchReleased(fetch.op))
    assert rig.planner.host.slots.num_used == 0
    rig.planner.finish(state, rig.now)
    rig.audit(is_idle=True)


def test_the_first_page_of_a_fetch_from_before_a_reset_is_not_published_either():
    rig = _rig()
    state, fetch = _reading(rig)
    rig.planner.reset("hc1-other", [state])
    rig.end_fetch(fetch.op, 6)
    assert rig.in_host(state) == 0
    assert rig.planner.take_fetched() == []
    assert rig.planner.host.slots.num_used == 0


def test_after_a_reset_storage_is_asked_under_the_new_namespace():
    rig = _rig()
    rig.planner.reset("hc1-other")
    rig.request("a", PROMPT)
    assert rig.channels.last(Exists).namespace == "hc1-other"
