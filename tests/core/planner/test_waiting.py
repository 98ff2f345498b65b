"""How long a request waits for its fetch, from when, and that nobody else waits with it."""

import pytest
from planner_rig import Rig

from vllm_hicache.options import TOP_OPTIONS
from vllm_hicache.planner import ASK_AGAIN, NO_MATCH
from vllm_hicache.storage_channel import ChannelDown
from vllm_hicache.storage_messages import (
    Exists,
    ExistsResult,
    Fetch,
    FetchProgress,
    FetchReleased,
    FetchSettled,
)

PAGE = 16
DEFAULTS = {option.field: option.default for option in TOP_OPTIONS}
BASE_S = DEFAULTS["prefetch_timeout_base_s"]
PER_1K_S = DEFAULTS["prefetch_timeout_per_1k_tokens_s"]


def _rig(**fetch: object) -> Rig:
    return Rig(
        has_storage=True,
        page=PAGE,
        block=PAGE,
        num_slots=1024,
        fetch={"base_s": BASE_S, "per_1k_tokens_s": PER_1K_S, "max_share": 1.0} | fetch,
    )


def _prompt(num_pages: int, name: int = 0) -> list[int]:
    return [name, *range(10, 10 + num_pages * PAGE)]


def _waits_until(rig: Rig, state, start: float, budget: float) -> None:
    """The request waits for exactly this time from ``start`` on."""
    rig.now = start + budget - 1e-6
    assert rig.match(state) == ASK_AGAIN
    rig.now = start + budget + 1e-6
    assert rig.match(state) == NO_MATCH


# The budget --------------------------------------------------------------------------------------


def test_the_default_budget_is_one_second_and_a_quarter_for_each_1024_tokens():
    assert (BASE_S, PER_1K_S) == (1.0, 0.25)
    assert DEFAULTS["prefetch_policy"] == "timeout"


@pytest.mark.parametrize("num_pages", [1, 8, 64, 512])
@pytest.mark.parametrize(("base_s", "per_1k_s"), [(BASE_S, PER_1K_S), (0.0, 2.0), (0.5, 0.0)])
def test_the_budget_is_the_base_and_a_part_for_the_tokens_of_the_fetch(num_pages, base_s, per_1k_s):
    rig = _rig(base_s=base_s, per_1k_tokens_s=per_1k_s)
    state = rig.request("a", _prompt(num_pages))
    rig.answer_query(num_pages)
    assert rig.match(state) == ASK_AGAIN
    _waits_until(rig, state, 0.0, base_s + num_pages * PAGE / 1024 * per_1k_s)


@pytest.mark.parametrize("arrives_at", [0.0, 7.0])
@pytest.mark.parametrize("first_lookup_after", [0.0, 0.01, 40.0])
def test_the_budget_runs_from_the_first_lookup_that_had_to_wait(arrives_at, first_lookup_after):
    """Neither from the arrival nor from the answer: a request may lie in the queue for long."""
    rig = _rig(exists_timeout_s=60.0)
    rig.now = arrives_at
    state = rig.request("a", _prompt(64))
    rig.answer_query(64)
    rig.now += first_lookup_after
    start = rig.now
    assert rig.match(state) == ASK_AGAIN
    _waits_until(rig, state, start, 1.25)


def test_a_lookup_that_waits_for_the_answer_starts_the_budget_of_the_fetch_as_well():
    rig = _rig(exists_timeout_s=60.0)
    state = rig.request("a", _prompt(64))
    rig.now = 3.0
    assert rig.match(state) == ASK_AGAIN
    rig.now = 3.5
    rig.answer_query(64)
    _waits_until(rig, state, 3.0, 1.25)


def test_a_lookup_that_the_device_could_serve_starts_no_budget():
    rig = _rig()
    state = rig.request("a", _prompt(64))
    rig.answer_query(64)
    assert rig.match(state, num_local=64 * PAGE) == NO_MATCH
    rig.now = 30.0
    assert rig.match(state) == ASK_AGAIN
    _waits_until(rig, state, 30.0, 1.25)


def test_a_second_fetch_of_a_request_has_what_the_first_one_left_of_the_budget():
    rig = _rig()
    state = rig.request("a", _prompt(64))
    fetch = rig.answer_query(64)
    assert rig.match(state) == ASK_AGAIN
    rig.now = 0.75
    rig.end_fetch(fetch.op, 0, reason="unavailable")
    prefetcher = rig.planner.prefetcher
    prefetcher.leave(state)
    prefetcher.start(state, 64, rig.planner.namespace, rig.now)
    rig.answer_query(64)
    _waits_until(rig, state, 0.0, 1.25)


def test_each_of_two_requests_for_one_fetch_has_a_budget_of_its_own():
    rig = _rig()
    first = rig.request("a", _prompt(64))
    rig.answer_query(64)
    assert rig.match(first) == ASK_AGAIN
    rig.now = 1.0
    second = rig.request("b", _prompt(64))
    assert rig.channels.count(Exists) == 1
    assert rig.match(second) == ASK_AGAIN
    _waits_until(rig, first, 0.0, 1.25)
    _waits_until(rig, second, 1.0, 1.25)


# The three policies ------------------------------------------------------------------------------


def _landed(kind: str, num_landed: int):
    rig = _rig(kind=kind)
    state = rig.request("a", _prompt(8))
    fetch = rig.answer_query(8)
    if num_landed:
        rig.say(FetchProgress(fetch.op, num_landed))
    return rig, state, fetch


@pytest.mark.parametrize("num_landed", [0, 1, 5])
def test_best_effort_takes_what_has_landed_at_the_first_lookup_and_stops_the_rest(num_landed):
    rig, state, fetch = _landed("best_effort", num_landed)
    assert (rig.match(state).num_tokens or 0) == num_landed * PAGE
    rig.planner.admit(state)
    rig.say(FetchSettled(fetch.op, 8, "complete"), None)
    rig.say(FetchReleased(fetch.op), None)
    assert rig.total("unserved_tokens/deadline") == (8 - num_landed) * PAGE
    rig.planner.finish(state, rig.now)
    rig.audit(is_idle=True)


@pytest.mark.parametrize("num_landed", [0, 1, 5, 7])
def test_wait_complete_takes_nothing_before_the_last_page_and_then_all(num_landed):
    rig, state, fetch = _landed("wait_complete", num_landed)
    for rig.now in (0.5, 2.0, 9.9):
        assert rig.match(state) == ASK_AGAIN
    rig.end_fetch(fetch.op, 8)
    assert rig.match(state).num_tokens == 8 * PAGE


@pytest.mark.parametrize("num_landed", [0, 1, 5])
def test_timeout_takes_what_has_landed_when_the_budget_is_used_up(num_landed):
    rig, state, _ = _landed("timeout", num_landed)
    assert rig.match(state) == ASK_AGAIN
    rig.now = 1.1
    assert (rig.match(state).num_tokens or 0) == num_landed * PAGE


@pytest.mark.parametrize("kind", ["timeout", "best_effort", "wait_complete"])
def test_a_fetch_that_failed_is_waited_for_by_no_policy(kind):
    rig, state, fetch = _landed(kind, 2)
    rig.say(FetchSettled(fetch.op, 2, "corrupt"))
    assert rig.match(state).num_tokens == 2 * PAGE


# Others ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["timeout", "best_effort", "wait_complete"])
@pytest.mark.parametrize("hangs_in", ["question", "read"])
def test_fifty_requests_pass_one_whose_fetch_hangs_for_ever(kind, hangs_in):
    rig = _rig(kind=kind, exists_timeout_s=0.05)
    hung = rig.request("hung", _prompt(8, name=1))
    if hangs_in == "read":
        rig.answer_query(8)
    limit = {"timeout": 1.2, "best_effort": 0.06, "wait_complete": 10.1}[kind]
    is_waiting = True
    for number in range(50):
        state = rig.request(f"r{number}", _prompt(4, name=100 + number))
        fetch = rig.answer_query(4)
        rig.end_fetch(fetch.op, 4)
        rig.now += 0.01
        if is_waiting:
            is_waiting = rig.match(hung) == ASK_AGAIN
            assert not (is_waiting and rig.now > limit)
        assert rig.begin_load(state).num_tokens == 4 * PAGE
        rig.plan()
        rig.finish_loads()
        rig.planner.finish(state, rig.now)
    assert rig.total("served_tokens/storage") == 50 * 4 * PAGE
    rig.now = limit
    assert rig.match(hung) == NO_MATCH
    assert rig.planner.prefetcher.num_reading == (hangs_in == "read")


# Room of fetches comes back whatever ends them ---------------------------------------------------


def _finish(rig: Rig, state, fetch: Fetch) -> None:
    rig.end_fetch(fetch.op, 8)
    rig.begin_load(state)
    rig.plan()
    rig.finish_loads()


def _abort(rig: Rig, state, fetch: Fetch) -> None:
    rig.planner.finish(state, rig.now)
    rig.end_fetch(fetch.op, 0, reason="cancelled")


def _drop(rig: Rig, state, fetch: Fetch) -> None:
    rig.end_fetch(fetch.op, 0, reason="unavailable")
    rig.match(state)
    rig.planner.admit(state)


def _give_up(rig: Rig, state, fetch: Fetch) -> None:
    rig.match(state)
    rig.now = 100.0
    rig.match(state)
    rig.planner.admit(state)
    rig.end_fetch(fetch.op, 3, reason="cancelled")


def _reset(rig: Rig, state, fetch: Fetch) -> None:
    rig.planner.reset("hc1-other", [state])
    rig.end_fetch(fetch.op, 8)
    rig.planner.admit(state)


@pytest.mark.parametrize("end", [_finish, _abort, _drop, _give_up, _reset])
def test_half_of_the_host_is_the_limit_and_every_ending_gives_its_part_back(end):
    rig = Rig(has_storage=True, page=PAGE, block=PAGE, num_slots=16)
    first = rig.request("a", _prompt(8, name=1))
    fetch = rig.answer_query(8)
    assert rig.planner.prefetcher.num_occupied == 8
    rig.request("b", _prompt(8, name=2))
    assert rig.answer_query(8) is None
    assert rig.total("fetch_ended/host_full") == 1
    end(rig, first, fetch)
    assert rig.planner.prefetcher.num_occupied == 0
    rig.request("c", _prompt(8, name=3))
    assert rig.answer_query(8) is not None


def test_a_question_fills_nothing_and_is_not_limited():
    """What storage has is known first: only pages that all workers have count."""
    rig = Rig(has_storage=True, page=PAGE, block=PAGE, num_slots=4)
    for name in range(6):
        rig.request(str(name), _prompt(8, name=name))
    assert rig.planner.prefetcher.num_querying == 6
    assert rig.planner.prefetcher.num_occupied == 0
    rig.say(ChannelDown())
    assert rig.planner.prefetcher.num_querying == 0


def test_a_deadline_says_nothing_about_what_storage_has():
    """The next request for the prefix is fetched for again, and no page counts as absent."""
    rig = _rig()
    state = rig.request("a", _prompt(8))
    fetch = rig.answer_query(8)
    rig.match(state)
    rig.now = 5.0
    assert rig.match(state) == NO_MATCH
    rig.planner.admit(state)
    rig.end_fetch(fetch.op, 0, reason="cancelled")
    rig.request("b", _prompt(8))
    op = rig.channels.last(Exists).op
    rig.say(ExistsResult(op, 0, ok=False, reason="deadline"))
    assert rig.total("fetch_ended/deadline") == 1
    assert rig.total("fetch_ended/missing") == 0
    rig.request("c", _prompt(8))
    assert rig.answer_query(8) is not None
