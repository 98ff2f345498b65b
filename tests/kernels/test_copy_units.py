"""Copy lists cut into units."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.kernels.copy_units import CopyUnits


def _list(*rows):
    return np.array(rows, dtype=np.int32)


def test_granule_is_one_unit_where_blocks_are_not_split():
    copies = _list((3, 1, 7, 0), (0, 0, 2, 0))
    units = CopyUnits(page_size=32, block_size=16, kernel_block_size=16, num_kernel_blocks=8)
    np.testing.assert_array_equal(units.of(copies, 4), copies)


def test_granule_of_a_split_block_becomes_a_unit_per_kernel_block():
    units = CopyUnits(page_size=64, block_size=32, kernel_block_size=16, num_kernel_blocks=20)
    expected = [(3, 2, 14, 0), (3, 3, 15, 0)]
    np.testing.assert_array_equal(units.of(_list((3, 1, 7, 0)), 4), expected)


@given(
    page_size=st.sampled_from([4, 8, 12, 24, 48]),
    block_size=st.sampled_from([4, 8, 12, 24, 48]),
    kernel_block_size=st.sampled_from([2, 4, 6, 12, 24]),
    data=st.data(),
)
def test_units_name_the_same_tokens_as_their_granules(
    page_size, block_size, kernel_block_size, data
):
    granule = min(page_size, block_size)
    if max(page_size, block_size) % granule or block_size % kernel_block_size:
        return
    ratio = block_size // kernel_block_size
    row = [
        data.draw(st.integers(0, limit - 1))
        for limit in (3, page_size // granule, 5, block_size // granule)
    ]
    units = CopyUnits(page_size, block_size, kernel_block_size, num_kernel_blocks=5 * ratio)
    slot, in_page, block, in_block = units.of(_list(row), 3).T
    size, token = units.num_tokens, np.arange(units.num_tokens)
    assert set(slot) == {row[0]}
    page_tokens = (in_page[:, None] * size + token).ravel()
    assert page_tokens.tolist() == list(range(row[1] * granule, (row[1] + 1) * granule))
    device_tokens = (block * kernel_block_size + in_block * size)[:, None] + token
    first = row[2] * block_size + row[3] * granule
    assert device_tokens.ravel().tolist() == list(range(first, first + granule))


def test_list_of_another_shape_is_refused():
    units = CopyUnits(page_size=32, block_size=16, kernel_block_size=16, num_kernel_blocks=8)
    with pytest.raises(InvariantBroken, match=r"\[n, 4\], got \(2, 3\)"):
        units.of(np.zeros((2, 3), dtype=np.int32), 4)
