"""Load or recompute: what is refused, what the ledger says, and how a refusal ends."""

import pytest
from planner_rig import Rig

from vllm_hicache.cost_model import MIN_PREFILL_SAMPLES, CostModel, Line
from vllm_hicache.planner import ASK_AGAIN, NO_MATCH, Match
from vllm_hicache.storage_messages import Exists, FetchProgress
from vllm_hicache.worth import NEVER, PROBE_EVERY, Verdict, Worth

TOKENS = list(range(100, 125))  # six whole pages of four tokens, and one token
PAGE_BYTES = 1 << 20


def _prefill(rig: Rig, tokens_per_s: float) -> None:
    for _ in range(40):
        rig.planner.costs.prefilled(1000, 1000 / tokens_per_s)


def _slow_host(rig: Rig, seconds: float) -> None:
    """Loads of any size have taken so long."""
    for pages in (1, 4, 2, 8):
        rig.planner.costs.loaded(pages * PAGE_BYTES, seconds)


def _slow_storage(rig: Rig, seconds: float, per_token: float = 0.0) -> None:
    for tokens in (400, 800, 1200, 1600):
        rig.planner.costs.fetched(tokens, seconds + per_token * tokens)


def _in_host(name: str = "a", **options) -> tuple[Rig, object]:
    rig = Rig(**options)
    rig.fill_host(TOKENS)
    return rig, rig.request(name, TOKENS)


# From host ---------------------------------------------------------------------------------------


def test_a_load_that_takes_longer_than_computing_is_not_offered_and_has_its_reason():
    rig, state = _in_host()
    _prefill(rig, 1000.0)  # 24 tokens: 24 ms
    _slow_host(rig, 0.1)
    assert rig.match(state) == NO_MATCH
    rig.planner.admit(state)
    assert rig.total("unserved_tokens/recompute_faster") == 24
    assert rig.total("found_tokens/host") == 24
    rig.planner.ledger.balance()


def test_a_load_that_is_faster_than_computing_is_offered():
    rig, state = _in_host()
    _prefill(rig, 1000.0)
    _slow_host(rig, 0.01)
    assert rig.match(state) == Match(24, is_async=True)


@pytest.mark.parametrize("known", ["prefill", "loads"])
def test_everything_is_loaded_while_one_of_both_speeds_is_unknown(known):
    rig, state = _in_host()
    if known == "prefill":
        _prefill(rig, 1000.0)
    else:
        _slow_host(rig, 0.1)
    assert rig.match(state).num_tokens == 24


def test_the_check_can_be_turned_off():
    rig, state = _in_host(skip_slow_loads=False)
    _prefill(rig, 1e6)
    _slow_host(rig, 10.0)
    assert rig.match(state).num_tokens == 24


def test_a_copy_before_the_step_is_judged_by_its_copy_alone():
    rig, state = _in_host(sync_load_max_s=1.0)
    _prefill(rig, 1000.0)
    _slow_host(rig, 10.0)
    rig.planner.costs.copied(PAGE_BYTES, 0.001)
    assert rig.match(state) == Match(24, is_async=False)
    for _ in range(40):
        rig.planner.costs.copied(PAGE_BYTES, 0.1)
    state.verdict = None
    assert rig.match(state) == NO_MATCH


def test_a_lookup_that_is_repeated_gets_the_same_verdict():
    rig, state = _in_host()
    _prefill(rig, 1000.0)
    _slow_host(rig, 0.1)
    assert {rig.match(state) for _ in range(3 * PROBE_EVERY)} == {NO_MATCH}


def test_one_in_many_refused_loads_is_made_and_a_host_that_recovered_is_used_again():
    rig, _ = _in_host()
    _prefill(rig, 1000.0)
    _slow_host(rig, 0.03)
    loaded = []
    for i in range(8 * PROBE_EVERY):
        state = rig.request(f"r{i}", TOKENS)
        match = rig.match(state)
        loaded.append(match.num_tokens > 0)
        if match.num_tokens:
            rig.planner.begin_load(state, 24, rig.new_blocks(24), rig.now)
            rig.plan(is_busy=False)
            rig.now += 0.001
            rig.finish_loads()
        rig.planner.admit(state)
        rig.planner.finish(state, rig.now)
    assert loaded.index(True) == PROBE_EVERY - 1
    assert all(loaded[-PROBE_EVERY:])


def test_a_measured_load_takes_from_the_offer_to_the_last_acknowledgement():
    rig, state = _in_host()
    rig.begin_load(state)
    rig.plan(is_busy=False)
    rig.now = 0.5
    rig.finish_loads()
    assert rig.planner.costs.async_load_s(6 * PAGE_BYTES) == pytest.approx(0.5)


@pytest.mark.parametrize("busy_steps", [(True, False), (False, True)])
def test_the_steps_of_others_tell_nothing_of_a_load(busy_steps):
    """A request that computes its tokens would wait for them as well."""
    rig, _ = _in_host()
    _prefill(rig, 1000.0)  # 24 tokens: 24 ms
    for i in range(3 * PROBE_EVERY):
        state = rig.request(f"r{i}", TOKENS)
        assert rig.match(state) == Match(24, is_async=True)
        rig.planner.begin_load(state, 24, rig.new_blocks(24), rig.now)
        for is_busy in busy_steps:
            rig.plan(is_busy=is_busy)
            rig.now += 0.5
        rig.finish_loads()
        rig.planner.finish(state, rig.now)


# From storage ------------------------------------------------------------------------------------


def _with_storage(**options) -> Rig:
    return Rig(has_storage=True, **options)


def test_a_fetch_that_takes_longer_than_computing_is_not_even_asked_for():
    rig = _with_storage()
    _prefill(rig, 1000.0)
    _slow_storage(rig, 1.0)
    state = rig.request("a", TOKENS)
    assert rig.channels.count(Exists) == 0
    assert rig.total("fetch_ended/recompute_faster") == 1
    assert rig.match(state) == NO_MATCH


def test_what_storage_has_and_is_too_little_to_fetch_has_its_reason():
    rig = _with_storage()
    _prefill(rig, 1000.0)
    _slow_storage(rig, 0.01)
    state = rig.request("a", TOKENS)
    assert rig.answer_query(2) is None  # eight tokens take eight milliseconds
    assert rig.total("fetch_ended/recompute_faster") == 1
    assert rig.match(state) == NO_MATCH
    rig.planner.admit(state)
    assert rig.total("found_tokens/storage") == 8
    assert rig.total("unserved_tokens/recompute_faster") == 8
    rig.planner.ledger.balance()


def test_the_same_tokens_are_not_found_in_host_and_in_storage():
    rig = _with_storage()
    _prefill(rig, 1000.0)
    _slow_storage(rig, 0.01)
    state = rig.request("a", TOKENS)
    rig.answer_query(2)
    rig.fill_host(TOKENS[:4], name="meanwhile")
    rig.match(state)
    rig.planner.admit(state)
    found = rig.total("found_tokens/host") + rig.total("found_tokens/storage")
    assert found == 8


def test_a_fetch_that_is_faster_than_computing_is_made():
    rig = _with_storage()
    _prefill(rig, 1000.0)
    _slow_storage(rig, 0.01)
    rig.request("a", TOKENS)
    assert rig.answer_query(6) is not None


def test_one_in_many_refused_fetches_is_made_and_measured():
    rig = _with_storage()
    _prefill(rig, 1000.0)
    _slow_storage(rig, 0.05)
    for i in range(PROBE_EVERY):
        rig.request(f"r{i}", [i, *TOKENS[1:]])
    assert rig.channels.count(Exists) == 1
    fetch = rig.answer_query(6)
    assert fetch is not None
    rig.now += 0.001
    before = rig.planner.costs.fetch_s(24)
    rig.end_fetch(fetch.op, 6)
    assert rig.planner.costs.fetch_s(24) < before


def test_a_storage_that_recovers_is_used_again():
    rig = _with_storage()
    _prefill(rig, 1000.0)
    _slow_storage(rig, 0.2)
    made = 0
    for i in range(20 * PROBE_EVERY):
        state = rig.request(f"r{i}", [i, *TOKENS[1:]])
        if state.fetch is not None:
            fetch = rig.answer_query(6)
            rig.now += 0.001
            if fetch is not None:
                made += 1
                rig.end_fetch(fetch.op, 6)
        rig.planner.admit(state)
        rig.planner.finish(state, rig.now)
    assert rig.planner.costs.fetch_s(24) < 0.024
    assert made > 2 * PROBE_EVERY


def test_a_fetch_that_was_given_up_is_measured_as_far_as_it_came():
    rig = _with_storage()
    state = rig.request("a", TOKENS)
    fetch = rig.answer_query(6)
    rig.now = 2.0
    rig.say(FetchProgress(fetch.op, 2))
    rig.planner.finish(state, rig.now)
    rig.end_fetch(fetch.op, 2, reason="cancelled")
    assert rig.planner.costs.fetch_s(8) == pytest.approx(2.0)


def test_a_storage_that_never_answers_is_not_taken_for_a_fast_one():
    rig = _with_storage()
    state = rig.request("a", TOKENS)
    fetch = rig.answer_query(6)
    rig.now = 3.0
    rig.planner.finish(state, rig.now)
    rig.end_fetch(fetch.op, 0, reason="cancelled")
    assert rig.planner.costs.fetch_s(24) >= 3.0


def test_a_fetch_that_was_given_up_at_once_says_nothing():
    rig = _with_storage()
    _slow_storage(rig, 1.0)
    before = rig.planner.costs.fetch_s(4)
    state = rig.request("a", TOKENS)
    fetch = rig.answer_query(6)
    rig.now = 0.001
    rig.planner.finish(state, rig.now)
    rig.end_fetch(fetch.op, 0, reason="cancelled")
    assert rig.planner.costs.fetch_s(4) == before


# Waiting -----------------------------------------------------------------------------------------


def test_a_request_stops_waiting_when_the_fetch_is_predicted_to_land_after_computing():
    rig = _with_storage(fetch={"base_s": 100.0})
    _prefill(rig, 24.0)  # the prompt takes a second
    state = rig.request("a", TOKENS)
    fetch = rig.answer_query(6)
    assert rig.match(state) == ASK_AGAIN
    rig.now = 0.3
    rig.say(FetchProgress(fetch.op, 1))  # the other five would take 1.5 s
    assert rig.match(state).num_tokens == 4


def test_a_request_waits_on_while_the_fetch_is_predicted_to_land_before_computing():
    rig = _with_storage(fetch={"base_s": 100.0})
    _prefill(rig, 24.0)
    state = rig.request("a", TOKENS)
    fetch = rig.answer_query(6)
    assert rig.match(state) == ASK_AGAIN
    rig.now = 0.3
    rig.say(FetchProgress(fetch.op, 3))
    assert rig.match(state) == ASK_AGAIN
    rig.now = 0.99
    rig.say(FetchProgress(fetch.op, 5))
    assert rig.match(state).num_tokens == 20


def test_a_probe_that_stays_slow_costs_a_tenth_of_the_computing_time():
    rig = _with_storage(fetch={"base_s": 100.0})
    _prefill(rig, 24.0)
    _slow_storage(rig, 5.0)
    for i in range(PROBE_EVERY):
        state = rig.request(f"r{i}", [i, *TOKENS[1:]])
    assert rig.answer_query(6) is not None
    assert rig.match(state) == ASK_AGAIN
    rig.now = 0.09
    assert rig.match(state) == ASK_AGAIN
    rig.now = 0.11
    assert rig.match(state) == NO_MATCH


def test_a_probe_waits_for_the_answer_no_longer_either():
    rig = _with_storage(fetch={"base_s": 100.0, "exists_timeout_s": 5.0})
    _prefill(rig, 24.0)
    _slow_storage(rig, 5.0)
    for i in range(PROBE_EVERY):
        state = rig.request(f"r{i}", [i, *TOKENS[1:]])
    rig.now = 0.09
    assert rig.match(state) == ASK_AGAIN
    rig.now = 0.11
    assert rig.match(state) == NO_MATCH


# The crossover -----------------------------------------------------------------------------------


def _worth(prefill: float, load=None, fetch=None) -> Worth:
    costs = CostModel()
    for _ in range(MIN_PREFILL_SAMPLES):
        costs.prefilled(1000, 1000 / prefill)
    costs.copied(1 << 30, 1e-6)
    for tokens in (100, 400, 200, 800):
        if load is not None:
            costs.loaded(tokens, load[0] + load[1] * tokens)
        if fetch is not None:
            costs.fetched(tokens, fetch[0] + fetch[1] * tokens)
    return Worth(costs, 1.0, is_on=True)


def test_the_crossover_is_where_loading_takes_as_long_as_computing():
    worth = _worth(1000.0, load=(0.1, 0.0005), fetch=(0.1, 0.0001))
    host, storage = worth.crossovers()
    assert host == pytest.approx(200, abs=1)  # 0.1 / (0.001 - 0.0005)
    assert storage == pytest.approx(500, abs=2)  # 0.2 / (0.001 - 0.0006)
    assert worth.load(host - 2, is_async=True) is Verdict.NO
    assert worth.load(host + 2, is_async=True) is Verdict.YES
    assert worth.fetch(storage - 4) is Verdict.NO
    assert worth.fetch(storage + 4) is Verdict.YES


def test_a_tier_that_is_slower_per_token_never_pays():
    worth = _worth(1000.0, load=(0.0001, 0.002), fetch=(0.1, 0.0001))
    assert worth.crossovers() == (NEVER, NEVER)


def test_the_crossover_is_zero_while_nothing_was_measured():
    assert Worth(CostModel(), 1.0, is_on=True).crossovers() == (0, 0)
    assert _worth(1000.0).crossovers()[1] == 0


def test_the_crossover_is_exported():
    rig = Rig()
    _prefill(rig, 1000.0)
    for pages in (1, 4, 2, 8):  # a page of four tokens: 1 ms more
        rig.planner.costs.loaded(pages * PAGE_BYTES, 0.1 + 0.001 * pages)
    rig.planner.gauges.update()
    assert rig.total("crossover_tokens/host") == pytest.approx(134, abs=1)
    assert rig.total("crossover_tokens/storage") == 0


def test_one_size_alone_counts_as_proportional():
    line = Line()
    for _ in range(5):
        line.add(100, 1.0)
    assert line.fit() == pytest.approx((0.0, 0.01))


def test_a_line_follows_a_change():
    line = Line()
    for amount in (100, 200, 400) * 10:
        line.add(amount, 5.0 + 0.01 * amount)
    for amount in (100, 200, 400) * 20:
        line.add(amount, 0.1 + 0.001 * amount)
    assert line.fit() == pytest.approx((0.1, 0.001), rel=0.05)


def test_noise_never_gives_a_negative_latency_or_rate():
    line = Line()
    for amount, seconds in ((100, 9.0), (200, 1.0), (400, 0.5), (50, 20.0)):
        line.add(amount, seconds)
        latency, per_unit = line.fit()
        assert latency >= 0
        assert per_unit >= 0
    line.add(0, 1.0)
    line.add(1.0, -1.0)
    assert line.seconds(100) > 0
