"""The planner's answers to vLLM: how much is offered, when to ask again, and what is counted."""

from collections.abc import Callable

import pytest
from planner_rig import Rig

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.planner import ASK_AGAIN, NO_MATCH, Match
from vllm_hicache.request_state import RequestState
from vllm_hicache.storage_messages import (
    Exists,
    ExistsResult,
    Fetch,
    FetchProgress,
    FetchReleased,
    FetchSettled,
)

TOKENS = list(range(100, 140))


# How much is offered -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_local", "offered"),
    [(17, 0, 16), (16, 0, 12), (15, 0, 12), (17, 8, 8), (17, 16, 0), (5, 0, 4), (4, 0, 0)],
)
def test_the_offer_reaches_from_the_local_hit_to_one_block_below_the_prompt(
    num_tokens, num_local, offered
):
    rig = Rig()
    rig.fill_host(TOKENS)
    state = rig.request("a", TOKENS[:num_tokens])
    assert rig.match(state, num_local).num_tokens == offered


@pytest.mark.parametrize(("page", "block", "offered"), [(8, 4, 8), (4, 8, 8), (4, 16, 0)])
def test_the_offer_is_a_multiple_of_the_block(page, block, offered):
    rig = Rig(page=page, block=block)
    rig.fill_host(TOKENS[:12])
    assert rig.match(rig.request("a", TOKENS[:30])).num_tokens == offered


def test_asking_again_changes_no_answer():
    rig = Rig()
    rig.fill_host(TOKENS[:12])
    state = rig.request("a", TOKENS[:20])
    assert len({rig.match(state) for _ in range(5)}) == 1
    rig.audit()
    assert rig.total("found_tokens/host") == 0


def test_a_page_that_left_between_two_lookups_is_not_offered_again():
    rig = Rig(num_slots=3)
    rig.fill_host(TOKENS[:12])
    state = rig.request("a", TOKENS[:20])
    assert rig.match(state).num_tokens == 12
    rig.planner.host.free(rig.planner.host.allocate(2))
    assert rig.match(state).num_tokens == 4


def test_vllm_does_not_get_more_than_was_offered():
    rig = Rig()
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS[:20])
    rig.match(state)
    with pytest.raises(InvariantBroken, match="vLLM expects 12 tokens, the last lookup offered 8"):
        rig.planner.begin_load(state, 12, rig.new_blocks(12), 0.0)


def test_a_longer_local_hit_at_the_second_lookup_shortens_the_load():
    rig = Rig()
    rig.fill_host(TOKENS[:16])
    state = rig.request("a", TOKENS[:20])
    assert rig.match(state, num_local=4).num_tokens == 12
    load = rig.begin_load(state, num_local=12)
    assert (load.first_token, load.last_token) == (12, 16)


def test_generated_tokens_of_a_preempted_request_are_found_as_well():
    rig = Rig()
    state = rig.request("a", TOKENS[:6])
    state.tokens.ids += TOKENS[6:15]
    rig.compute(state, 14)
    rig.plan()
    rig.finish_saves()
    rig.planner.preempt(state)
    assert rig.match(state).num_tokens == 12
    load = rig.begin_load(state)
    rig.plan()
    rig.finish_loads()
    assert load.num_tokens == rig.total("served_tokens/host")


# Now or later ------------------------------------------------------------------------------------


def test_an_idle_engine_copies_before_the_forward():
    rig = Rig(sync_load_max_s=0.003)
    rig.fill_host(TOKENS[:8])
    rig.plan(is_busy=False)
    assert rig.match(rig.request("a", TOKENS[:9])) == Match(8, is_async=False)


def test_a_busy_engine_waits_only_for_copies_that_take_milliseconds():
    rig = Rig(sync_load_max_s=0.003)
    rig.fill_host(TOKENS[:16])
    rig.plan(is_busy=True)
    rig.planner.costs.copied(1 << 20, 0.001)
    assert rig.match(rig.request("a", TOKENS[:9])) == Match(8, is_async=False)
    assert rig.match(rig.request("b", TOKENS[:17])) == Match(16, is_async=True)


def test_a_copy_behind_another_one_is_not_waited_for():
    rig = Rig(sync_load_max_s=1.0, shares_device_pages=False)
    rig.fill_host(TOKENS[:8])
    first, second = rig.request("a", TOKENS[:9]), rig.request("b", TOKENS[:9])
    assert not rig.begin_load(first).is_async
    assert rig.begin_load(second).is_async


def test_synchronous_loads_can_be_switched_off():
    rig = Rig(sync_load_max_s=0.0)
    rig.fill_host(TOKENS[:8])
    rig.plan(is_busy=False)
    assert rig.match(rig.request("a", TOKENS[:9])).is_async


def test_copies_that_end_together_are_timed_together():
    rig = Rig(shares_device_pages=False)
    rig.fill_host(TOKENS[:8])
    for name in "ab":
        rig.begin_load(rig.request(name, TOKENS[:9]))
    rig.plan()
    rig.planner.join.busy_seconds = lambda direction: 0.5
    rig.finish_loads()
    assert rig.planner.costs.load_s(8 << 20) == pytest.approx(1.0)


# Asking again has a budget -----------------------------------------------------------------------


def _followers(rig: Rig, count: int) -> list[RequestState]:
    """Requests that find their next page landing for another one."""
    rig.fill_host(TOKENS[:16])
    rig.begin_load(rig.request("leader", TOKENS[:17]), num_local=8)
    return [rig.request(f"follower-{i}", TOKENS[:17]) for i in range(count)]


def test_requests_are_told_to_ask_again_until_the_budget_of_cached_blocks_is_used_up():
    rig = Rig(defer_max_blocks=7)
    followers = _followers(rig, 4)
    answers = [rig.match(state, num_local=8) for state in followers]
    assert answers[:2] == [ASK_AGAIN, ASK_AGAIN]  # two blocks and one each
    assert [answer.num_tokens for answer in answers[2:]] == [8, 8]


def test_the_budget_is_new_in_every_step():
    rig = Rig(defer_max_blocks=2)
    first, second = _followers(rig, 2)
    assert rig.match(first, num_local=8) == ASK_AGAIN
    assert rig.match(second, num_local=8).num_tokens == 8
    rig.plan()
    assert rig.match(second, num_local=8) == ASK_AGAIN


def test_beyond_the_budget_a_request_takes_what_is_there_and_the_ledger_says_why():
    rig = Rig(has_storage=True, defer_max_blocks=0)
    rig.fill_host(TOKENS[:6])
    state = rig.request("a", TOKENS[:17])
    fetch = rig.answer_query(3)
    rig.say(FetchProgress(fetch.op, 1))
    assert rig.match(state, num_local=4).num_tokens == 4
    rig.planner.admit(state)
    assert rig.total("unserved_tokens/deferred_budget") == 8  # two pages that storage has
    assert rig.total("unserved_tokens/cap") == 4  # vLLM did not take what it was offered


# The ledger --------------------------------------------------------------------------------------


def test_every_token_that_was_found_is_served_or_has_a_reason():
    rig = Rig()
    rig.fill_host(TOKENS[:16])
    state = rig.request("a", TOKENS[:16])
    rig.begin_load(state)
    rig.plan()
    rig.finish_loads()
    rig.planner.finish(state, rig.now)
    assert rig.total("found_tokens/host") == 16
    assert rig.total("served_tokens/host") == 12
    assert rig.total("unserved_tokens/cap") == 4
    rig.audit(is_idle=True)


def test_a_request_that_skips_the_cache_is_offered_nothing_and_says_so():
    rig = Rig()
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS[:12], may_load=False, why_not="skip_reading")
    assert rig.match(state) == NO_MATCH
    rig.planner.admit(state)
    assert rig.total("unserved_tokens/skip_reading") == 8


def test_an_offer_that_vllm_does_not_take_has_a_reason():
    rig = Rig()
    rig.fill_host(TOKENS[:8])
    state = rig.request("a", TOKENS[:12])
    rig.match(state)
    rig.planner.admit(state)
    assert rig.total("unserved_tokens/cap") == 8
    rig.planner.finish(state, rig.now)
    rig.audit(is_idle=True)


def test_a_hit_from_storage_is_told_once():
    rig = Rig(has_storage=True)
    first = rig.request("a", TOKENS[:9])
    fetch = rig.answer_query(2)
    rig.end_fetch(fetch.op, 2)
    rig.begin_load(first)
    rig.plan()
    rig.finish_loads()
    second = rig.request("b", TOKENS[:9])
    rig.begin_load(second)
    rig.plan()
    rig.finish_loads()
    assert rig.total("served_tokens/storage") == 8
    assert rig.total("served_tokens/host") == 8


def test_pages_of_a_fetch_that_fell_short_have_a_reason():
    rig = Rig(has_storage=True)
    state = rig.request("a", TOKENS[:17])
    fetch = rig.answer_query(4)
    rig.say(FetchSettled(fetch.op, 1, "corrupt"))
    rig.begin_load(state)
    assert rig.total("unserved_tokens/short_fetch") == 12
    rig.say(FetchReleased(fetch.op))
    rig.plan()
    rig.finish_loads()
    rig.planner.finish(state, rig.now)
    rig.audit(is_idle=True)


# Plans -------------------------------------------------------------------------------------------


def test_plans_are_numbered_without_gaps_and_carry_each_operation_once():
    rig = Rig()
    rig.fill_host(TOKENS[:8])
    numbers = [rig.plan().number for _ in range(3)]
    assert numbers == [numbers[0] + i for i in range(3)]
    rig.begin_load(rig.request("a", TOKENS[:9]))
    assert len(rig.plan().loads) == 1
    assert rig.plan().loads == ()


def test_the_engine_is_kept_stepping_while_a_failed_load_was_not_told_to_vllm():
    rig = Rig()
    rig.fill_host(TOKENS[:8])
    rig.begin_load(rig.request("a", TOKENS[:9]))
    rig.plan()
    rig.finish_loads(failed=[1])
    assert rig.planner.holds_device_blocks
    assert rig.plan().failed_requests == ("a",)
    assert not rig.planner.holds_device_blocks


def test_gauges_say_what_runs():
    rig = Rig(has_storage=True)
    rig.fill_host(TOKENS[:8])
    rig.request("b", TOKENS[:17])
    rig.compute(rig.request("c", [1, 2, 3, 4]), 4)
    rig.planner.gauges.update()
    expected = {
        "host_slots_total": 16,
        "host_slots_used": 3,
        "host_slots_pinned": 2,
        "device_blocks_held": 1,
        "operations_running/save": 1,
        "operations_running/load": 0,
        "operations_running/exists": 1,
        "operations_running/persist": 1,
    }
    assert {key: rig.total(key) for key in expected} == expected


# A whole life ------------------------------------------------------------------------------------


def test_a_prefix_comes_back_through_all_three_tiers():
    rig = Rig(has_storage=True, num_workers=2, num_slots=8)
    rig.fill_host(TOKENS[:12])
    rig.end_persists()
    rig.fill_host(list(range(32)), name="other")  # pushes the first prefix out of host
    rig.end_persists()
    state = rig.request("again", TOKENS[:13])
    assert rig.in_host(state) == 0
    fetch = rig.answer_query(3, 3)
    assert rig.match(state) == ASK_AGAIN
    rig.end_fetch(fetch.op, 3, 3)
    load = rig.begin_load(state)
    assert (load.num_tokens, load.num_storage_tokens) == (12, 12)
    rig.plan()
    assert rig.finish_loads().loaded == (load,)
    rig.planner.finish(state, rig.now)
    rig.audit(is_idle=True)


# Reset in every state ----------------------------------------------------------------------------


def _asking(rig: Rig) -> RequestState:
    return rig.request("a", TOKENS[:17])


def _half_queried(rig: Rig) -> RequestState:
    state = _asking(rig)
    rig.say(ExistsResult(rig.channels.last(Exists).op, 4, ok=True))
    return state


def _allocated(rig: Rig) -> RequestState:
    state = _asking(rig)
    rig.answer_query(4, 4)
    return state


def _settled(rig: Rig) -> RequestState:
    state = _asking(rig)
    fetch = rig.answer_query(4, 4)
    rig.say(FetchSettled(fetch.op, 4, "complete"), FetchSettled(fetch.op, 3, "corrupt"))
    return state


def _fetching(rig: Rig) -> RequestState:
    state = _asking(rig)
    fetch = rig.answer_query(4, 4)
    rig.say(FetchProgress(fetch.op, 2), FetchProgress(fetch.op, 1))
    return state


def _fetched(rig: Rig) -> RequestState:
    state = _asking(rig)
    fetch = rig.answer_query(4, 4)
    rig.end_fetch(fetch.op, 4, 4)
    return state


def _load_planned(rig: Rig) -> RequestState:
    rig.fill_host(TOKENS[:16])
    state = rig.request("a", TOKENS[:17])
    rig.begin_load(state)
    return state


def _loading(rig: Rig) -> RequestState:
    state = _load_planned(rig)
    rig.plan()
    return state


def _load_half_acknowledged(rig: Rig) -> RequestState:
    state = _loading(rig)
    rig.finish_loads(workers=[1])
    return state


def _loaded(rig: Rig) -> RequestState:
    state = _loading(rig)
    rig.finish_loads()
    return state


def _load_failed(rig: Rig) -> RequestState:
    state = _loading(rig)
    rig.finish_loads(failed=[1])
    return state


def _save_planned(rig: Rig) -> RequestState:
    state = rig.request("a", TOKENS[:17], may_load=False, why_not="skip_reading")
    rig.compute(state, 16)
    return state


def _saving(rig: Rig) -> RequestState:
    state = _save_planned(rig)
    rig.plan()
    return state


def _persisting(rig: Rig) -> RequestState:
    state = _saving(rig)
    rig.finish_saves()
    return state


STATES = (
    _asking,
    _half_queried,
    _allocated,
    _fetching,
    _settled,
    _fetched,
    _load_planned,
    _loading,
    _load_half_acknowledged,
    _loaded,
    _load_failed,
    _save_planned,
    _saving,
    _persisting,
)


def _finish_everything(rig: Rig) -> None:
    rig.plan()
    rig.finish_saves()
    rig.finish_loads()
    rig.plan()
    rig.end_persists()
    for message in rig.channels.sent[0]:
        if isinstance(message, Fetch):
            rig.end_fetch(message.op, 4, 4)


@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__.strip("_"))
@pytest.mark.parametrize("name", ["hc1-other", "hc1-0123456789abcdef"])
def test_after_a_reset_in_any_state_nothing_of_before_is_visible_or_left(
    reach: Callable[[Rig], RequestState], name: str
):
    rig = Rig(has_storage=True, num_workers=2)
    state = reach(rig)
    rig.planner.reset(name, [state])
    rig.audit()
    assert len(rig.planner.host.index) == 0
    assert rig.match(state) == NO_MATCH
    _finish_everything(rig)
    assert len(rig.planner.host.index) == 0
    rig.planner.finish(state, rig.now)
    rig.audit(is_idle=True)
    assert rig.planner.host.slots.num_used == 0


@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__.strip("_"))
def test_a_request_aborted_in_any_state_leaves_nothing_behind(reach: Callable[[Rig], RequestState]):
    rig = Rig(has_storage=True, num_workers=2)
    state = reach(rig)
    rig.planner.finish(state, rig.now)
    rig.audit()
    _finish_everything(rig)
    rig.audit(is_idle=True)
    assert rig.planner.host.num_pinned == 0
    assert rig.planner.host.slots.num_used == len(rig.planner.host.index)


def test_what_a_request_has_loaded_before_a_reset_is_not_saved_after_it():
    """The load has landed, but vLLM has not scheduled the request yet."""
    rig = Rig()
    state = _loaded(rig)
    rig.planner.reset("hc1-other", [state])
    rig.compute(state, 17)
    assert rig.plan().saves == ()


def test_a_request_that_had_no_blocks_at_a_reset_is_saved_after_it():
    rig = Rig()
    state = rig.request("a", TOKENS[:17])
    rig.planner.reset("hc1-other", [state])
    rig.match(state)
    rig.compute(state, 17)
    assert len(rig.plan().saves) == 1


def test_a_request_that_is_looked_up_again_before_its_preemption_is_told_is_saved():
    """A forced reset preempts and resumes a request within one call of vLLM's scheduler."""
    rig = Rig()
    state = _saving(rig)
    rig.planner.reset("hc1-other", [state])
    rig.match(state)
    rig.planner.admit(state)
    rig.planner.preempt(state)
    rig.compute(state, 16)
    assert len(rig.plan().saves) == 1


def test_an_answer_to_a_question_from_before_a_reset_is_ignored():
    rig = Rig(has_storage=True, num_workers=2)
    state = _asking(rig)
    op = rig.channels.sent[0][-1].op
    rig.planner.reset("hc1-other", [state])
    rig.say(ExistsResult(op, 4, ok=True), ExistsResult(op, 4, ok=True))
    assert rig.channels.count(Fetch) == 0
    assert rig.total("ignored_reports") == 2
