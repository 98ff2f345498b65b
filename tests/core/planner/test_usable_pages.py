"""Which boundary of a prefix is used: window, state, and draft state that zeros may replace."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vllm_hicache.cost_model import CostModel
from vllm_hicache.fetch import Fetch
from vllm_hicache.pools import HitRule, HitRules, Pool
from vllm_hicache.prefix_index import PrefixIndex
from vllm_hicache.simulate.requests import Tokens
from vllm_hicache.storage_link import WorldAnswer
from vllm_hicache.usable_pages import DRAFT_WORTH_S, UsablePages

PAGE = 4
WINDOW = Pool("window", HitRule.WINDOW, (1,), reach=PAGE + 2, bit=0)
"""Needs the last two pages: five tokens before the first one that is computed."""
STATE = Pool("state", HitRule.BOUNDARY, (1,), bit=0)
DRAFT = Pool("draft", HitRule.EVERY, (0,), bit=1, is_draft=True)
TOKENS = Tokens("a", list(range(1, 200)), PAGE)
HASHES = TOKENS.page_hashes(20)


def costs(tokens_per_s: float | None) -> CostModel:
    """As measured by steps that prefilled so fast; None: no step has been measured."""
    model = CostModel()
    if tokens_per_s is not None:
        for _ in range(50):
            model.prefilled(1000, 1000 / tokens_per_s)
    return model


def usable(
    *pools: Pool, host: tuple[int, ...] = (), speed: float | None = None, draft_miss: str = "auto"
) -> UsablePages:
    """Host has the first pages, with these parts."""
    index = PrefixIndex()
    parent = None
    for number, parts in enumerate(host):
        index.add(HASHES[number], parent, number, parts)
        parent = HASHES[number]
    rules = HitRules(pools, page_size=PAGE, unit=PAGE)
    return UsablePages(rules, index, costs(speed), page_size=PAGE, draft_miss=draft_miss)


def fetch(first_page: int, num_pages: int, max_tokens: int) -> Fetch:
    hashes = list(HASHES[first_page : first_page + num_pages])
    return Fetch(
        hashes=hashes,
        first_page=first_page,
        parent_hash=None,
        anchor=None,
        namespace="n",
        tokens=TOKENS,
        query=WorldAnswer(1),
        query_op=1,
        asked_at=0.0,
        max_tokens=max_tokens,
    )


# Host -------------------------------------------------------------------------------------------


def test_where_every_page_has_everything_no_boundary_is_rounded():
    one = usable(host=(0, 0, 0))
    assert one.in_host(HASHES, 3, 11) == 11
    assert one.in_host(HASHES, 3, 99) == 12
    assert one.in_host(HASHES, 0, 99) == 0


@pytest.mark.parametrize(
    ("parts", "max_tokens", "tokens"),
    [
        ((1, 1, 1, 1), 16, 16),
        ((0, 0, 1, 1), 16, 16),
        ((0, 0, 1, 1), 15, 0),  # a shorter prefix has another window
        ((1, 1, 0, 1), 16, 8),
        ((1, 0, 0, 0), 16, 4),
        ((0, 0, 0, 0), 16, 0),
    ],
)
def test_a_hit_ends_where_its_window_is_whole(parts, max_tokens, tokens):
    assert usable(WINDOW, host=parts).in_host(HASHES, len(parts), max_tokens) == tokens


@pytest.mark.parametrize(
    ("parts", "max_tokens", "tokens"),
    [((0, 1, 0, 1), 16, 16), ((0, 1, 0, 1), 15, 8), ((1, 0, 0, 0), 16, 4), ((0, 0), 8, 0)],
)
def test_a_hit_ends_where_there_is_a_state(parts, max_tokens, tokens):
    assert usable(STATE, host=parts).in_host(HASHES, len(parts), max_tokens) == tokens


# Drafts -----------------------------------------------------------------------------------------

WITH_DRAFT = (2, 2, 0, 2)


@pytest.mark.parametrize(("draft_miss", "tokens"), [("cut", 8), ("target_only", 16), ("auto", 8)])
def test_pages_without_draft_state_are_used_as_the_option_says(draft_miss, tokens):
    one = usable(DRAFT, host=WITH_DRAFT, draft_miss=draft_miss)
    assert one.in_host(HASHES, 4, 16) == tokens


@pytest.mark.parametrize("draft_miss", ["cut", "target_only", "auto"])
def test_pages_that_all_have_draft_state_are_used_whatever_the_option_says(draft_miss):
    one = usable(DRAFT, host=(2, 2, 2), draft_miss=draft_miss, speed=1e-6)
    assert one.in_host(HASHES, 3, 12) == 12


@pytest.mark.parametrize(
    ("speed", "tokens"),
    [(8 / DRAFT_WORTH_S * 1.1, 8), (8 / DRAFT_WORTH_S * 0.9, 16), (1e6, 8), (None, 8)],
    ids=["just cheaper", "just dearer", "cheap", "unknown"],
)
def test_auto_uses_zeros_where_computing_would_take_longer_than_speculation_saves(speed, tokens):
    """Two of four pages, 8 tokens, would be computed anew."""
    assert usable(DRAFT, host=WITH_DRAFT, speed=speed).in_host(HASHES, 4, 16) == tokens


def test_a_cut_for_draft_state_ends_at_a_boundary_of_the_window_too():
    parts = (3, 2, 3, 3, 1)
    one = usable(WINDOW, DRAFT, host=parts, draft_miss="cut")
    assert one.in_host(HASHES, 5, 20) == 16
    parts = (3, 3, 2, 2, 1)
    one = usable(WINDOW, DRAFT, host=parts, draft_miss="cut")
    assert one.in_host(HASHES, 5, 20) == 8


# Storage ----------------------------------------------------------------------------------------


def test_without_pools_all_that_was_found_is_read():
    assert usable().of_fetch(fetch(2, 6, 99), [0] * 6) == 6


def test_a_fetch_ends_at_the_longest_usable_boundary():
    one = usable(WINDOW, host=(1, 1))
    assert one.of_fetch(fetch(2, 4, 24), [1, 1, 1, 1]) == 4
    assert one.of_fetch(fetch(2, 4, 24), [0, 0, 1, 1]) == 4
    assert one.of_fetch(fetch(2, 4, 24), [1, 0, 0, 1]) == 1
    assert one.of_fetch(fetch(2, 4, 24), [0, 0, 0, 0]) == 0


def test_the_window_of_the_first_fetched_page_lies_in_host():
    assert usable(WINDOW, host=(0, 1)).of_fetch(fetch(2, 1, 12), [1]) == 1
    assert usable(WINDOW, host=(1, 0)).of_fetch(fetch(2, 1, 12), [1]) == 0


def test_a_fetch_is_no_longer_than_the_request_can_use():
    one = usable(WINDOW, host=(1, 1))
    assert one.of_fetch(fetch(2, 4, 13), [1, 1, 1, 1]) == 1
    assert one.of_fetch(fetch(2, 4, 8), [1, 1, 1, 1]) == 0


def test_pages_of_a_fetch_without_draft_state_are_read_as_the_option_says():
    for draft_miss, num_pages in (("cut", 1), ("target_only", 3), ("auto", 1)):
        one = usable(DRAFT, host=(2, 2), draft_miss=draft_miss)
        assert one.of_fetch(fetch(2, 3, 20), [2, 0, 2]) == num_pages


@given(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.data())
def test_what_host_and_storage_have_together_is_used_as_if_host_had_all(parts, data):
    """A fetch of the rest of a chain ends where a lookup would, had it come."""
    num_host = data.draw(st.integers(0, len(parts)))
    max_tokens = data.draw(st.integers(0, len(parts) * PAGE))
    for pool in (WINDOW, STATE):
        whole = usable(pool, host=tuple(parts)).in_host(HASHES, len(parts), max_tokens)
        rest = fetch(num_host, len(parts) - num_host, max_tokens)
        read = usable(pool, host=tuple(parts[:num_host])).of_fetch(rest, parts[num_host:])
        assert read == max(0, -(-whole // PAGE) - num_host)
