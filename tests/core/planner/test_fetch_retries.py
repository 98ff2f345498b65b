"""Retries of fetches: interval, cap, for whom, and never in the way."""

import pytest
from planner_rig import Rig
from retry_rig import (
    PROMPT,
    asked_at,
    empty_host,
    ends_clean,
    missed,
    retry_finds,
    retry_rig,
    short,
)

from vllm_hicache.fetch_retries import MAX_PER_STEP
from vllm_hicache.planner import ASK_AGAIN, NO_MATCH
from vllm_hicache.storage_channel import ChannelDown, ChannelUp
from vllm_hicache.storage_messages import Cancel, Exists, ExistsResult, unpack_hashes

# The interval and the cap ------------------------------------------------------------------------


def test_storage_is_asked_again_when_the_interval_is_over_and_not_before():
    rig = retry_rig()
    state = missed(rig)
    assert [asked_at(rig, now) for now in (0.0, 0.99, 1.0, 1.5)] == [1, 1, 2, 2]
    asked = unpack_hashes(rig.channels.last(Exists).hashes)
    assert asked == state.tokens.page_hashes(6)[:6]


def test_the_interval_counts_from_the_last_question():
    rig = retry_rig(retry_s=0.25)
    missed(rig)
    assert asked_at(rig, 0.4) == 2
    rig.answer_query(0)
    assert [asked_at(rig, now) for now in (0.6, 0.65)] == [2, 3]


def test_an_interval_of_0_asks_never_again_and_keeps_no_line():
    rig = retry_rig(retry_s=0.0)
    missed(rig)
    assert rig.planner.retries.num_in_line == 0
    assert asked_at(rig, 3600.0) == 1


def test_a_cap_of_0_leaves_nothing_of_retries():
    rig = retry_rig(max_retries=0)
    rig.fill_host(PROMPT[:8])
    rig.end_persists()
    state = missed(rig)
    assert rig.planner.retries is None
    empty_host(rig)
    assert rig.match(state) == NO_MATCH
    assert asked_at(rig, 3600.0) == 1


def test_storage_is_asked_again_as_often_as_the_cap_says():
    rig = retry_rig(max_retries=3)
    state = missed(rig)
    for number in range(1, 8):
        asked_at(rig, float(number))
        rig.answer_query(0)
    assert rig.channels.count(Exists) == 1 + 3
    assert rig.planner.retries.num_in_line == 0
    rig.planner.finish(state, rig.now)
    assert rig.total("fetch_retries/nothing") == 3


def test_tries_while_a_storage_process_is_away_count_too():
    rig = retry_rig(max_retries=2)
    missed(rig)
    rig.say(ChannelDown())
    assert [asked_at(rig, now) for now in (1.0, 2.0, 3.0)] == [1, 1, 1]
    assert rig.total("fetch_retries/nothing") == 2
    rig.say(ChannelUp(2))
    assert asked_at(rig, 4.0) == 1


def test_a_request_that_came_while_storage_was_away_is_fetched_for_when_it_is_back():
    rig = retry_rig()
    rig.say(ChannelDown())
    state = rig.request("a", PROMPT)
    rig.say(ChannelUp(2))
    fetch = retry_finds(rig, 6)
    rig.end_fetch(fetch.op, 6)
    assert rig.match(state).num_tokens == 24


def test_requests_that_are_due_together_are_asked_for_in_several_steps():
    rig = retry_rig()
    for number in range(MAX_PER_STEP + 3):
        rig.request(str(number), [number, *PROMPT])
        rig.answer_query(0)
    first = rig.channels.count(Exists)
    assert asked_at(rig, 1.0) == first + MAX_PER_STEP
    assert asked_at(rig, 1.0) == first + MAX_PER_STEP + 3


def test_a_step_in_which_nothing_is_due_looks_at_one_entry():
    rig = retry_rig()
    states = [missed(rig, str(number)) for number in range(50)]
    before = [state.tokens.hashes.num_reads for state in states]
    asked_at(rig, 0.5)
    assert [state.tokens.hashes.num_reads for state in states] == before
    assert rig.planner.retries.num_in_line == 50


def test_requests_that_have_begun_leave_the_line_before_their_time():
    rig = retry_rig(retry_s=3600.0)
    for number in range(5):
        rig.planner.admit(missed(rig, str(number)))
    rig.plan()
    assert rig.planner.retries.num_in_line == 0


# For whom ----------------------------------------------------------------------------------------


def _read_ends(reason: str, **fetch) -> Rig:
    rig = retry_rig(**fetch)
    rig.request("a", PROMPT)
    rig.end_fetch(rig.answer_query(6).op, 3, reason=reason)
    return rig


def _question_ends(reason: str) -> Rig:
    rig = retry_rig()
    rig.request("a", PROMPT)
    rig.say(ExistsResult(rig.channels.last(Exists).op, 0, ok=False, reason=reason))
    return rig


@pytest.mark.parametrize("reason", ["missing", "corrupt", "unavailable"])
def test_the_rest_of_a_read_that_fell_short_is_asked_for_again(reason):
    rig = _read_ends(reason)
    assert asked_at(rig, 1.0) == 2
    assert len(unpack_hashes(rig.channels.last(Exists).hashes)) == 3


def test_a_question_that_failed_is_asked_again():
    assert asked_at(_question_ends("unavailable"), 1.0) == 2


def test_what_storage_had_only_the_beginning_of_is_asked_for_again():
    rig = retry_rig()
    short(rig, 4)
    assert asked_at(rig, 1.0) == 2
    assert len(unpack_hashes(rig.channels.last(Exists).hashes)) == 2


def test_nothing_is_asked_again_when_everything_came():
    rig = retry_rig()
    short(rig, 6)
    assert asked_at(rig, 1.0) == 1
    assert rig.planner.retries.num_in_line == 0


@pytest.mark.parametrize("ends", [_read_ends, _question_ends])
def test_a_deadline_suppresses_retries(ends):
    assert asked_at(ends("deadline"), 1.0) == 1


def test_a_deadline_is_not_learned_as_absence():
    """Pages that leave host are fetched again although storage was too slow before."""
    rig = retry_rig()
    rig.fill_host(PROMPT[:8])
    rig.end_persists()
    state = rig.request("a", PROMPT)
    rig.say(ExistsResult(rig.channels.last(Exists).op, 0, ok=False, reason="deadline"))
    empty_host(rig)
    assert rig.match(state) == ASK_AGAIN
    assert rig.channels.count(Exists) == 2


def test_a_fetch_that_computing_would_beat_is_not_tried_again():
    rig = retry_rig()
    for _ in range(8):
        rig.planner.costs.prefilled(1000, 0.001)
        rig.planner.costs.fetched(24, 5.0)
    rig.request("a", PROMPT)
    assert rig.total("fetch_ended/recompute_faster") == 1
    assert asked_at(rig, 1.0) == 0
    assert rig.total("fetch_ended/recompute_faster") == 1


def test_a_fetch_that_runs_is_left_alone():
    rig = retry_rig()
    rig.request("a", PROMPT)
    assert asked_at(rig, 1.0) == 1
    fetch = rig.answer_query(6)
    assert asked_at(rig, 2.0) == 1
    rig.end_fetch(fetch.op, 3, reason="corrupt")
    assert asked_at(rig, 3.0) == 2


def came_while_storage_was_away(rig: Rig, *names: str):
    rig.say(ChannelDown())
    states = [rig.request(name, [*PROMPT[:24], ord(name)]) for name in names]
    rig.say(ChannelUp(2))
    return states


@pytest.mark.parametrize("ends", ["admit", "finish"])
def test_nothing_is_asked_for_a_request_that_was_admitted_or_has_ended(ends):
    rig = retry_rig()
    (state,) = came_while_storage_was_away(rig, "a")
    if ends == "admit":
        rig.planner.admit(state)
    else:
        rig.planner.finish(state, rig.now)
    assert asked_at(rig, 1.0) == 0
    assert state.num_retries == 0


def test_nothing_is_asked_for_a_request_whose_load_has_failed():
    rig = retry_rig()
    rig.fill_host(PROMPT[:8])
    rig.end_persists()
    first, state = came_while_storage_was_away(rig, "a", "b")
    rig.begin_load(state)
    rig.plan()
    rig.finish_loads(failed=[1])
    assert not state.is_admitted
    assert state.is_in_line
    assert asked_at(rig, 1.0) == 1
    assert (first.num_retries, state.num_retries) == (1, 0)


def test_a_tenant_at_its_limit_is_fetched_for_when_the_others_have_gone():
    rig = retry_rig()  # a quarter of 40 pages for one tenant
    others = [rig.request(n, [ord(n), *PROMPT], tenant="red") for n in "x"]
    held = rig.answer_query(6)
    more = rig.request("y", [1, *PROMPT[:17]], tenant="red")
    rest = rig.answer_query(4)
    state = rig.request("a", PROMPT, tenant="red")
    assert rig.answer_query(6) is None
    assert rig.total("fetch_ended/tenant_limit") == 1
    for fetch, pages in ((held, 6), (rest, 4)):
        rig.end_fetch(fetch.op, pages)
    for other in (*others, more):
        rig.planner.finish(other, rig.now)
    fetch = retry_finds(rig, 6)
    rig.end_fetch(fetch.op, 6)
    assert rig.match(state).num_tokens == 24
    ends_clean(rig, state)


def test_a_full_host_is_tried_again():
    rig = retry_rig(num_slots=12)  # half of it for all fetches
    other = rig.request("x", [1, *PROMPT])
    held = rig.answer_query(6)
    state = rig.request("a", PROMPT)
    assert rig.answer_query(6) is None
    rig.end_fetch(held.op, 6)
    rig.planner.finish(other, rig.now)
    rig.end_fetch(retry_finds(rig, 6).op, 6)
    assert rig.match(state).num_tokens == 24


# Never in the way --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["timeout", "best_effort", "wait_complete"])
def test_a_lookup_during_the_question_of_a_retry_is_answered_at_once(kind):
    rig = retry_rig(kind=kind)
    state = short(rig)
    assert asked_at(rig, 1.0) == 2
    assert rig.match(state).num_tokens == 8
    assert state.waiting_since is None
    assert rig.total("deferred_lookups") == 0


def test_a_request_that_is_admitted_during_the_question_stops_it():
    rig = retry_rig()
    state = missed(rig)
    asked_at(rig, 1.0)
    assert rig.match(state) == NO_MATCH
    rig.planner.admit(state)
    assert rig.channels.last(Cancel).op == rig.channels.last(Exists).op
    assert rig.total("fetch_retries/left") == 1
    ends_clean(rig, state)


def test_a_retry_that_reads_is_waited_for_like_any_fetch():
    rig = retry_rig(base_s=0.5)
    state = missed(rig)
    fetch = retry_finds(rig, 6)
    assert rig.match(state) == ASK_AGAIN
    rig.now = 1.6
    assert rig.match(state) == NO_MATCH
    rig.end_fetch(fetch.op, 6)
    assert rig.match(state).num_tokens == 24
    assert rig.total("fetch_retries/found") == 1


def test_a_retry_that_reads_is_not_waited_for_where_no_fetch_is():
    rig = retry_rig(kind="best_effort")
    state = missed(rig)
    retry_finds(rig, 6)
    assert rig.match(state) == NO_MATCH


def test_the_budget_began_at_the_first_lookup_that_had_to_wait():
    rig = retry_rig(base_s=1.2)
    state = rig.request("a", PROMPT)
    fetch = rig.answer_query(6)
    assert rig.match(state) == ASK_AGAIN
    rig.end_fetch(fetch.op, 2, reason="corrupt")
    retry_finds(rig, 4)
    assert rig.match(state) == ASK_AGAIN
    assert state.waiting_since == 0.0
    rig.now = 1.25
    assert rig.match(state).num_tokens == 8


def test_a_preempted_request_has_a_budget_of_its_own_for_its_next_stay_in_the_queue():
    rig = retry_rig()
    state = rig.request("a", PROMPT)
    assert rig.match(state) == ASK_AGAIN
    rig.planner.admit(state)
    rig.planner.preempt(state)
    assert state.waiting_since is None
