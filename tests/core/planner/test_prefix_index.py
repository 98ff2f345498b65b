"""The prefix index against a model: a set of chains that is closed under parents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.prefix_index import PrefixIndex

CHAIN = [bytes([i]) for i in range(8)]


def _index_with(num_pages: int) -> PrefixIndex:
    index = PrefixIndex()
    for i in range(num_pages):
        index.add(CHAIN[i], CHAIN[i - 1] if i else None, slot=i)
    return index


@given(present=st.integers(0, 8), asked=st.integers(0, 8), limit=st.none() | st.integers(0, 9))
def test_match_counts_leading_pages_up_to_the_limit(present, asked, limit):
    expected = min(present, asked, asked if limit is None else limit)
    assert _index_with(present).match(CHAIN[:asked], limit) == expected


def test_a_page_without_its_parent_is_not_added():
    index = _index_with(1)
    assert index.add(CHAIN[2], CHAIN[1], slot=5) is None
    assert len(index) == 1


def test_a_present_page_is_not_added_again():
    index = _index_with(1)
    assert index.add(CHAIN[0], None, slot=5) is None
    assert index.get(CHAIN[0]).slot == 0


def test_a_page_with_children_is_not_removed():
    index = _index_with(2)
    with pytest.raises(InvariantBroken, match="removed with 1 children"):
        index.remove(index.get(CHAIN[0]))


def test_a_removed_page_gives_its_parent_back_its_leaf_state():
    index = _index_with(2)
    parent, leaf = index.get(CHAIN[0]), index.get(CHAIN[1])
    assert not parent.is_evictable
    index.remove(leaf)
    assert parent.is_evictable
    assert not leaf.is_present
    with pytest.raises(InvariantBroken, match="present=False"):
        index.remove(leaf)


def test_pages_of_a_chain_must_all_be_present():
    index = _index_with(2)
    assert [page.slot for page in index.pages_of(CHAIN[:2])] == [0, 1]
    with pytest.raises(InvariantBroken, match="left host under a load"):
        index.pages_of(CHAIN[:3])


def test_clear_hands_every_page_to_the_caller():
    index = _index_with(3)
    pages = index.clear()
    assert sorted(page.slot for page in pages) == [0, 1, 2]
    assert len(index) == 0
    assert not any(page.is_present for page in pages)
