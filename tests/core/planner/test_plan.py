"""Copy lists: which granule goes where, for pages smaller and larger than blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.plan import copy_list


@given(
    sizes=st.sampled_from([(4, 4), (8, 4), (4, 8), (16, 2), (2, 16), (256, 16), (16, 256)]),
    first=st.integers(0, 20),
    count=st.integers(1, 20),
)
def test_every_token_is_copied_once_between_its_page_and_its_block(sizes, first, count):
    page_size, block_size = sizes
    granule = min(sizes)
    start, stop = first * granule, (first + count) * granule
    num_pages = -(-stop // page_size) - start // page_size
    num_blocks = -(-stop // block_size) - start // block_size
    slots, block_ids = np.arange(num_pages) + 100, np.arange(num_blocks) + 500
    rows = copy_list(
        start, stop, page_size=page_size, block_size=block_size, slots=slots, block_ids=block_ids
    )
    assert rows.dtype == np.int32
    for token, (slot, in_page, block_id, in_block) in zip(
        range(start, stop, granule), rows.tolist(), strict=True
    ):
        assert slot == 100 + token // page_size - start // page_size
        assert block_id == 500 + token // block_size - start // block_size
        assert (in_page * granule, in_block * granule) == (token % page_size, token % block_size)


def test_a_hit_that_ends_inside_a_page_copies_only_its_granules():
    rows = copy_list(
        16, 48, page_size=64, block_size=16, slots=np.array([7]), block_ids=np.array([3, 4])
    )
    assert rows.tolist() == [[7, 1, 3, 0], [7, 2, 4, 0]]


def test_too_few_slots_are_not_read_beyond():
    with pytest.raises(IndexError):
        copy_list(0, 8, page_size=4, block_size=4, slots=np.array([1]), block_ids=np.array([1, 2]))
