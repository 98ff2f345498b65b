"""Device blocks of pages, KV cache group by KV cache group."""

import pytest

from vllm_hicache.block_tables import PageBlocks
from vllm_hicache.pools import KVGroup

PAGE = 64
SMALL, LARGE = KVGroup(16), KVGroup(128)
WINDOW = KVGroup(32, bit=0)
STATE = KVGroup(64, bit=1, is_state=True)
SLOW_STATE = KVGroup(128, bit=1, is_state=True)


@pytest.mark.parametrize(
    ("group", "first", "stop", "expected"),
    [
        (SMALL, 0, 1, (0, 4)),
        (SMALL, 2, 5, (8, 20)),
        (LARGE, 0, 1, (0, 1)),
        (LARGE, 1, 2, (0, 1)),
        (LARGE, 1, 3, (0, 2)),
        (LARGE, 2, 2, (1, 1)),
        (STATE, 1, 3, (1, 3)),
        (SLOW_STATE, 0, 1, (0, 0)),
        (SLOW_STATE, 0, 3, (0, 1)),
        (SLOW_STATE, 1, 4, (0, 2)),
    ],
)
def test_pages_lie_in_the_blocks_that_hold_their_tokens(group, first, stop, expected):
    span = PageBlocks((group,), PAGE).span(group, first, stop)
    assert (span.start, span.stop) == expected


def test_tokens_are_counted_by_a_group_that_keeps_all_of_them():
    blocks = PageBlocks((WINDOW, STATE, SMALL), PAGE)
    assert blocks.num_tokens(([1] * 8, [], [1] * 9)) == 9 * 16
    assert PageBlocks((WINDOW, STATE), PAGE).num_tokens(([0] * 7, [])) == 7 * 32


def test_each_page_gets_its_blocks_of_every_group():
    blocks = PageBlocks((WINDOW, SMALL, STATE), PAGE)
    tables = (list(range(10, 18)), list(range(20, 36)), [0, 0, 7, 0])
    assert blocks.of_pages(tables, 1, 3) == (
        (12, 13, 14, 15),
        (24, 25, 26, 27, 28, 29, 30, 31),
        (0, 7),
    )
    assert blocks.of_pages(tables, 4, 4) == ((), (), ())


def test_leading_pages_of_a_cut_are_those_that_a_cut_of_them_has():
    blocks = PageBlocks((WINDOW, LARGE, STATE), PAGE)
    tables = (list(range(10, 20)), list(range(30, 35)), list(range(1, 6)))
    for first in range(5):
        whole = blocks.of_pages(tables, first, 5)
        for num_pages in range(5 - first):
            expected = blocks.of_pages(tables, first, first + num_pages)
            assert blocks.leading(whole, first, num_pages) == expected


def parts_of(groups, tables, first, stop):
    blocks = PageBlocks(groups, PAGE)
    return blocks.parts(blocks.of_pages(tables, first, stop), first, stop)


def test_a_page_has_a_window_only_with_all_its_blocks():
    tables = ([0, 0, 0, 3, 4, 5, 6, 0], [9] * 16)
    assert parts_of((WINDOW, SMALL), tables, 0, 4) == [0, 0, 1, 0]
    assert parts_of((WINDOW, SMALL), tables, 2, 4) == [1, 0]


def test_one_group_that_lacks_a_block_costs_its_pool_the_page():
    other = KVGroup(32, bit=0)
    tables = ([1, 2, 3, 4], [5, 6, 0, 8])
    assert parts_of((WINDOW, other), tables, 0, 2) == [1, 0]
    assert parts_of((other, WINDOW), tables[::-1], 0, 2) == [1, 0]


def test_a_page_has_a_state_where_the_block_that_ends_with_it_has_one():
    assert parts_of((SMALL, STATE), ([9] * 12, [0, 7, 0]), 0, 3) == [0, 2, 0]
    # One block ends with every second page; the others end inside of it.
    assert parts_of((SMALL, SLOW_STATE), ([9] * 16, [7, 8]), 0, 4) == [0, 2, 0, 2]
    assert parts_of((SMALL, SLOW_STATE), ([9] * 16, [0, 8]), 1, 4) == [0, 0, 2]


def test_a_block_zero_of_full_attention_is_a_block():
    """vLLM never gives it to a request; tests and simulators count from it."""
    blocks = PageBlocks((KVGroup(64, marks=4), WINDOW), PAGE)
    tables = ((0, 1), (0, 0, 5, 6))
    assert blocks.parts(tables, 0, 2) == [4, 5]
    assert blocks.blocks(tables) == (0, 1, 5, 6)


def test_draft_state_is_where_the_blocks_of_its_group_are():
    marked = KVGroup(32, bit=0, marks=4)
    assert parts_of((marked, SMALL), ([0, 2, 3, 4], [9] * 8), 0, 2) == [0, 5]
    assert parts_of((KVGroup(16, marks=1),), ([9] * 8,), 0, 2) == [1, 1]


def test_pages_behind_the_end_of_a_table_lack_what_it_would_tell():
    assert parts_of((SMALL, STATE), ([9] * 8, []), 0, 2) == [0, 0]


def test_without_parts_nothing_is_looked_at():
    blocks = PageBlocks((SMALL, LARGE), PAGE)
    assert not blocks.has_parts
    assert blocks.parts(((), ()), 3, 6) == [0, 0, 0]
    assert PageBlocks((SMALL,), PAGE).blocks(((4, 5, 0),)) == (4, 5, 0)
