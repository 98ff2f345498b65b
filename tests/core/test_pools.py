"""Hit rules against a search that tries every boundary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.errors import ConfigError
from vllm_hicache.pools import MAX_BITS, HitRule, HitRules, Pool, first_name, pool_digest

PAGE = 8
UNIT = 4
LOCAL_RULES = (HitRule.WINDOW, HitRule.CHUNK, HitRule.BOUNDARY)


def pool(rule: HitRule, bit: int | None = 0, reach: int = 0, **more: object) -> Pool:
    return Pool(rule.name.lower(), rule, (0,), reach=reach, bit=bit, **more)


def holds(pools: list[Pool], parts: list[int], tokens: int) -> bool:
    """Whether a prefix of so many tokens has what each pool needs, told token by token."""
    for one in pools:
        if one.rule is HitRule.BOUNDARY:
            needed = {tokens - 1} if tokens % PAGE == 0 else None
        elif one.rule is HitRule.WINDOW:
            start = max(0, tokens - one.reach + 1) // UNIT * UNIT
            needed = set(range(start, tokens))
        else:
            start = tokens // one.reach * one.reach // UNIT * UNIT
            needed = set(range(start, tokens))
        if needed is None or any(not parts[t // PAGE] >> one.bit & 1 for t in needed):
            return False
    return True


@given(
    st.lists(st.tuples(st.sampled_from(LOCAL_RULES), st.integers(1, 40)), min_size=1, max_size=3),
    st.lists(st.integers(0, 7), max_size=12),
    st.integers(0, 100),
)
def test_the_longest_boundary_is_the_one_that_a_search_of_all_finds(
    kinds: list[tuple[HitRule, int]], parts: list[int], max_tokens: int
) -> None:
    pools = [pool(rule, bit, reach) for bit, (rule, reach) in enumerate(kinds)]
    rules = HitRules(pools, page_size=PAGE, unit=UNIT)
    last = min(len(parts) * PAGE, max_tokens)
    tried = (t for t in range(last // UNIT * UNIT, 0, -UNIT) if holds(pools, parts, t))
    assert rules.longest(parts, max_tokens) == next(tried, 0)


def test_a_window_of_one_page_needs_the_page_before_the_boundary_alone() -> None:
    rules = HitRules([pool(HitRule.WINDOW, reach=PAGE)], page_size=PAGE, unit=PAGE)
    assert rules.longest([0, 0, 1, 0], 32) == 24
    assert rules.longest([1, 0, 0, 0], 32) == 8
    assert rules.longest([0, 0, 0, 0], 32) == 0


@pytest.mark.parametrize(("rule", "reach"), [(HitRule.WINDOW, 1), (HitRule.CHUNK, UNIT)])
def test_a_boundary_within_a_page_that_sees_nothing_needs_nothing(
    rule: HitRule, reach: int
) -> None:
    rules = HitRules([pool(rule, reach=reach)], page_size=PAGE, unit=UNIT)
    assert rules.longest([0], UNIT) == UNIT


def test_a_chunk_that_begins_at_the_boundary_needs_nothing() -> None:
    rules = HitRules([pool(HitRule.CHUNK, reach=16)], page_size=PAGE, unit=PAGE)
    assert rules.longest([0, 0], 16) == 16
    assert rules.longest([0, 0, 0], 24) == 16
    assert rules.longest([0, 0, 1], 24) == 24


def test_a_shorter_boundary_at_which_a_chunk_begins_is_not_passed_over() -> None:
    rules = HitRules([pool(HitRule.CHUNK, reach=20)], page_size=PAGE, unit=UNIT)
    assert rules.longest([0, 0, 0], 24) == 20


def test_a_state_is_used_at_the_end_of_its_page_only() -> None:
    rules = HitRules([pool(HitRule.BOUNDARY)], page_size=PAGE, unit=UNIT)
    assert rules.longest([0, 1, 0, 1], 31) == 16
    assert rules.longest([0, 1, 0, 1], 32) == 32


def test_pools_that_every_page_has_make_no_rule() -> None:
    rules = HitRules([pool(HitRule.EVERY, None)], page_size=PAGE, unit=UNIT)
    assert rules.is_trivial
    assert rules.draft_bits == 0


def test_only_draft_state_may_be_zero() -> None:
    draft = pool(HitRule.EVERY, 3, is_draft=True)
    window = pool(HitRule.WINDOW, 0, 8)
    rules = HitRules([window, draft], page_size=PAGE, unit=UNIT)
    assert (draft.may_be_zero, window.may_be_zero) == (True, False)
    assert not pool(HitRule.EVERY, None).may_be_zero
    assert (rules.draft_bits, rules.is_trivial) == (8, False)
    assert rules.whole([9, 8, 1, 9], rules.draft_bits) == 2


def test_more_kinds_than_a_message_can_tell_are_refused() -> None:
    pools = [pool(HitRule.WINDOW, bit, 8) for bit in range(MAX_BITS + 1)]
    with pytest.raises(ConfigError, match="9 pools that pages may lack"):
        HitRules(pools, page_size=PAGE, unit=UNIT)


@pytest.mark.parametrize(
    ("digits", "name"),
    [
        ("0123456789abcdef", "01234567"),
        ("00000000fedcba98", "fedcba98"),
        ("0" * 24 + "00000001", "00000001"),
        ("0000000100000000", "00000001"),
    ],
)
def test_no_pool_has_the_name_that_stands_for_none(digits, name):
    assert first_name(digits) == name


def test_other_facts_have_another_name_and_equal_facts_the_same():
    names = [pool_digest(facts) for facts in ("window 64", "window 65", "window 64")]
    assert names[0] == names[2] != names[1]
    assert all(len(name) == 8 and int(name, 16) for name in names)
