"""The hint ``pin_s``: pages that stay in host until a deadline, and no more than allowed."""

import pytest
from planner_rig import Rig

TOKENS = list(range(100, 124))  # six pages of four tokens
SCAN = list(range(1000, 1400))


def _rig(**options) -> Rig:
    return Rig(num_slots=16, **{"max_pinned_share": 0.5, "admission": "always"} | options)


def _flush(rig: Rig) -> None:
    """Other requests want the whole host."""
    rig.fill_host(SCAN, name=f"scan at {rig.now}")


def _pinned(rig: Rig, seconds: float = 10.0, token_ids=TOKENS, name: str = "a"):
    state = rig.request(name, token_ids, pin_s=seconds)
    rig.compute(state, len(token_ids))
    rig.plan()
    rig.finish_saves()
    rig.planner.finish(state, rig.now)
    return state


def test_pinned_pages_stay_until_the_deadline_and_leave_after_it():
    rig = _rig()
    state = _pinned(rig)
    rig.now = 9.9
    _flush(rig)
    assert rig.in_host(state) == 6
    assert rig.planner.host.num_pinned == 6
    rig.now = 10.0
    rig.finish_saves()
    assert rig.planner.host.num_pinned == 0
    _flush(rig)
    assert rig.in_host(state) == 0


def test_without_the_hint_nothing_is_pinned():
    rig = _rig()
    _pinned(rig, 0.0)
    assert rig.planner.host.num_pinned == 0


def test_pages_that_were_in_host_already_are_kept_too():
    rig = _rig()
    rig.fill_host(TOKENS)
    state = _pinned(rig)
    _flush(rig)
    assert rig.in_host(state) == 6


def test_the_time_runs_from_the_end_of_the_request():
    rig = _rig()
    state = rig.request("a", TOKENS, pin_s=10.0)
    rig.compute(state, 24)
    rig.plan()
    rig.finish_saves()
    rig.now = 8.0
    rig.planner.finish(state, rig.now)
    rig.now = 17.9
    rig.finish_saves()
    assert rig.planner.host.num_pinned == 6
    rig.now = 18.0
    rig.finish_saves()
    assert rig.planner.host.num_pinned == 0


def test_a_page_that_arrives_after_the_end_is_kept_and_one_that_arrives_too_late_is_not():
    rig = _rig()
    state = rig.request("a", TOKENS, pin_s=10.0)
    rig.compute(state, 12)
    rig.plan()
    rig.compute(state, 24)
    rig.plan()
    rig.planner.finish(state, rig.now)
    rig.finish_saves(1)
    assert len(rig.planner.pins) == 3
    rig.now = 11.0
    rig.finish_saves()
    assert rig.in_host(state) == 6
    assert len(rig.planner.pins) == 0


def test_the_longest_deadline_of_several_requests_holds():
    rig = _rig()
    _pinned(rig, 5.0)
    state = _pinned(rig, 20.0, name="b")
    _pinned(rig, 1.0, name="c")
    rig.now = 19.0
    rig.finish_saves()
    assert len(rig.planner.pins) == 6
    assert rig.planner.host.num_pinned == 6
    rig.now = 20.0
    rig.finish_saves()
    assert len(rig.planner.pins) == 0
    assert rig.in_host(state) == 6


def test_no_more_than_a_share_of_the_host_can_be_pinned_and_first_pages_come_first():
    rig = _rig(max_pinned_share=0.25)
    state = _pinned(rig)
    assert len(rig.planner.pins) == 4
    assert rig.total("pin_refused_tokens") > 0
    _flush(rig)
    assert rig.in_host(state) == 4


def test_a_share_of_nothing_turns_the_hint_off():
    rig = _rig(max_pinned_share=0.0)
    _pinned(rig)
    assert rig.planner.host.num_pinned == 0


def test_what_one_request_let_go_another_one_may_pin():
    rig = _rig(max_pinned_share=0.25)
    _pinned(rig, 10.0)
    rig.now = 10.0
    rig.finish_saves()
    state = _pinned(rig, 10.0, list(range(300, 316)), "b")
    _flush(rig)
    assert rig.in_host(state) == 4


def test_a_reset_lets_all_go():
    rig = _rig()
    _pinned(rig)
    rig.planner.reset("hc1-fedcba9876543210")
    assert rig.planner.host.num_pinned == 0
    assert rig.planner.host.slots.num_used == 0
    rig.now = 100.0
    rig.finish_saves()  # its deadline finds nothing


def test_pages_of_a_failed_load_are_not_kept():
    rig = _rig()
    _pinned(rig, 1000.0)
    again = rig.request("b", [*TOKENS, 1])
    rig.begin_load(again)
    rig.plan()
    rig.finish_loads(failed=[1])
    assert len(rig.planner.pins) == 0
    assert rig.planner.host.slots.num_used == 0


def test_nothing_is_looked_at_while_no_deadline_has_passed():
    rig = _rig()
    _pinned(rig, 10.0)
    heap = list(rig.planner.pins._heap)
    rig.now = 5.0
    rig.finish_saves()
    assert rig.planner.pins._heap == heap


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective"])
def test_the_host_is_clean_after_the_last_deadline(policy):
    rig = _rig(write_policy=policy)
    for i in range(5):
        _pinned(rig, 1.0 + i, name=f"r{i}")
    rig.now = 100.0
    rig.finish_saves()
    rig.audit(is_idle=True)
    assert rig.planner.host.num_pinned == 0
