"""write_through and write_through_selective: after how many requests a page is saved."""

import pytest
from planner_rig import Rig

TOKENS = list(range(100, 124))  # six pages of four tokens
PREFIX = TOKENS[:12]


def _selective(min_uses: int = 2, **options) -> Rig:
    return Rig(write_policy="write_through_selective", min_uses=min_uses, **options)


def _finish(rig: Rig, state) -> None:
    rig.plan()
    rig.finish_saves()
    rig.planner.finish(state, rig.now)


def _serve(rig: Rig, name: str, token_ids, num_local: int = 0, **fields):
    """A request from arrival to end; the device has its first ``num_local`` tokens."""
    state = rig.request(name, token_ids, may_load=False, why_not="not_wanted", **fields)
    state.num_local_tokens = num_local
    rig.compute(state, len(token_ids))
    _finish(rig, state)
    return state


@pytest.mark.parametrize(("threshold", "in_host"), [(1, [6, 6, 6]), (2, [0, 6, 6]), (3, [0, 0, 6])])
def test_a_page_is_saved_by_the_request_that_brings_its_uses_to_the_threshold(threshold, in_host):
    rig = _selective(threshold)
    seen = [rig.in_host(_serve(rig, f"r{i}", TOKENS)) for i in range(3)]
    assert seen == in_host


def test_write_through_saves_with_the_first_request():
    rig = Rig(write_policy="write_through")
    assert rig.in_host(_serve(rig, "a", TOKENS)) == 6


def test_the_threshold_is_two_unless_said_otherwise():
    rig = Rig(write_policy="write_through_selective")
    assert rig.in_host(_serve(rig, "a", TOKENS)) == 0
    assert rig.in_host(_serve(rig, "b", TOKENS)) == 6


def test_a_use_is_a_request_whether_it_computes_the_page_or_finds_it_on_the_device():
    rig = _selective()
    _serve(rig, "a", TOKENS)
    assert rig.in_host(_serve(rig, "b", TOKENS, num_local=20)) == 6


def test_the_requests_own_earlier_steps_and_preemptions_are_not_counted():
    rig = _selective()
    state = rig.request("a", TOKENS)
    for num_tokens in (8, 16, 24):
        rig.compute(state, num_tokens)
        rig.plan()
    for _ in range(3):
        rig.planner.preempt(state)
        rig.compute(state, 24)
        rig.plan()
    rig.finish_saves()
    assert rig.in_host(state) == 0


def test_only_the_part_that_others_used_is_saved():
    rig = _selective()
    _serve(rig, "a", PREFIX + [1] * 8)
    second = _serve(rig, "b", PREFIX + [2] * 8)
    assert rig.in_host(second) == 3
    assert rig.total("save_skipped_tokens/too_few_uses") == 20 + 8
    assert rig.total("saved_tokens") == 12


def test_pages_that_host_lacks_of_the_prefix_are_saved_first():
    rig = _selective()
    _serve(rig, "a", TOKENS)
    _serve(rig, "b", TOKENS)
    rig.planner.host.discard(rig.page_of(rig.request("look", TOKENS), 1))
    third = _serve(rig, "c", TOKENS, num_local=20)
    assert rig.in_host(third) == 6


def test_an_ancestor_is_saved_with_a_page_even_if_its_own_uses_were_forgotten():
    rig = _selective()
    _serve(rig, "a", TOKENS)
    forgotten = rig.request("look", TOKENS).tokens.page_hashes(6)
    rig.planner.saves._uses._counts.pop(forgotten[0])
    state = _serve(rig, "b", TOKENS)
    assert rig.in_host(state) == 6


def test_saving_stops_at_the_first_page_without_room():
    rig = _selective(num_slots=4)
    _serve(rig, "a", TOKENS)
    state = _serve(rig, "b", TOKENS)
    assert rig.in_host(state) == 4
    assert (
        rig.total("save_skipped_tokens/host_full") + rig.total("save_skipped_tokens/not_admitted")
        == 8
    )
    rig.audit()


def test_a_page_that_left_the_device_is_still_known_when_it_is_computed_again():
    rig = _selective()
    _serve(rig, "a", TOKENS)
    _serve(rig, "scan", list(range(1000, 1040)))
    assert rig.in_host(_serve(rig, "b", TOKENS)) == 6


def test_a_page_is_forgotten_after_four_host_pools_of_others():
    rig = _selective(num_slots=4)
    _serve(rig, "a", TOKENS[:8])
    for i in range(4):
        _serve(rig, f"scan{i}", [1000 + i] * 16)
    assert rig.in_host(_serve(rig, "b", TOKENS[:8])) == 0


def test_a_request_that_stores_nothing_is_no_use():
    rig = _selective()
    _serve(rig, "a", TOKENS, may_save=False)
    assert rig.in_host(_serve(rig, "b", TOKENS)) == 0


def test_a_page_that_host_has_already_is_not_saved_twice():
    rig = _selective()
    for name in "abcd":
        _serve(rig, name, TOKENS)
    assert rig.total("saved_tokens") == 24


def test_nothing_is_counted_where_nothing_depends_on_it():
    assert Rig(admission="always").planner.options.page_uses() is None
    assert Rig(admission="always", write_policy="write_back", shares_device_pages=False)
    assert _selective(admission="always").planner.options.page_uses() is not None
