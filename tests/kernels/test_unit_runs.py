"""What lies side by side in blocks and pages, joined into as few copies as there can be."""

import numpy as np
import pytest
from dense_worker import Case, dense_buffer
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.device_layout import DeviceGroup, RowFormat, device_layers
from vllm_hicache.kernels.part_grid import part_grids
from vllm_hicache.kernels.unit_runs import UnitRuns


def _runs(case):
    layers = device_layers(
        dense_buffer(case).placement,
        RowFormat(case.num_heads, case.k_bytes, case.v_bytes, 2),
        layout_name=case.layout_name,
        block_size=case.block_size,
    )
    unit = min(case.page_size, case.block_size)
    return UnitRuns(part_grids(DeviceGroup(0, case.block_size, (layers,)), case.layout, unit))


ROW, TOKENS, LAYERS, HEADS = 32, 8, 3, 2
HEAD_OF_A_LAYER = ROW * TOKENS


@pytest.mark.parametrize(
    ("layout_name", "num_heads", "run_bytes"),
    [
        ("LBNHC", HEADS, ROW),
        ("LBHNC", HEADS, HEAD_OF_A_LAYER),
        ("LHBNC", HEADS, HEAD_OF_A_LAYER),
        ("BLNHC", HEADS, ROW),
        ("BLHNC", HEADS, HEAD_OF_A_LAYER),
        ("BHLNC", HEADS, HEADS * LAYERS * HEAD_OF_A_LAYER),
        ("LBNHC", 1, HEAD_OF_A_LAYER),
        ("BLNHC", 1, LAYERS * HEAD_OF_A_LAYER),
    ],
)
def test_a_run_is_as_long_as_the_layout_allows(layout_name, num_heads, run_bytes):
    case = Case(layout_name, LAYERS, num_heads=num_heads, block_size=TOKENS, page_size=TOKENS)
    assert _runs(case).run_bytes == run_bytes


def test_all_heads_of_a_group_are_one_run_where_tokens_are_outside():
    case = Case("BLNHC", LAYERS, heads_per_group=2, block_size=TOKENS, page_size=TOKENS)
    assert _runs(case).run_bytes == LAYERS * HEADS * HEAD_OF_A_LAYER


def test_blocks_that_follow_one_another_are_one_copy_within_a_page():
    case = Case("LBNHC", LAYERS, num_heads=1, block_size=4, page_size=8)
    rows = np.array([[5, 1, 3, 0], [5, 0, 2, 0], [6, 0, 4, 0], [6, 1, 7, 0]])
    (runs,) = _runs(case).batches(rows, case.layout.slot_stride)
    block = 4 * ROW
    assert runs.sizes.tolist() == [2 * block, block, block] * LAYERS
    assert runs.in_blocks[:3].tolist() == [2 * block, 4 * block, 7 * block]
    assert runs.in_pages[:3].tolist() == [5 * 4096, 6 * 4096, 6 * 4096 + block]


def test_pages_without_padding_are_copied_one_by_one():
    """Two slots may lie in memory that was pinned by two calls."""
    case = Case("BLNHC", 1, num_heads=1, k_bytes=512, v_bytes=512, block_size=4, page_size=4)
    assert case.layout.slot_stride == case.layout.page_bytes
    rows = np.array([[2, 0, 5, 0], [3, 0, 6, 0]])
    (runs,) = _runs(case).batches(rows, case.layout.slot_stride)
    assert runs.sizes.tolist() == [4096, 4096]


@given(
    layout_name=st.sampled_from(["LBNHC", "BHLNC", "LHBNC"]),
    chosen=st.sets(st.integers(0, 15), min_size=1),
)
def test_copies_cover_their_units_once_in_any_layout(layout_name, chosen):
    case = Case(layout_name, block_size=8, page_size=4, num_blocks=9)
    tokens = np.array(sorted(chosen)) * 4
    rows = np.stack((tokens // 4, tokens * 0, 1 + tokens // 8, tokens % 8 // 4), axis=1)
    unit_bytes = case.num_layers * case.num_heads * 4 * case.row_bytes
    for side in ("in_blocks", "in_pages"):
        seen = np.zeros(1 << 20, dtype=int)
        for runs in _runs(case).batches(rows, case.layout.slot_stride):
            for first, size in zip(getattr(runs, side), runs.sizes, strict=True):
                seen[first : first + size] += 1
        assert seen.max() == 1
        assert seen.sum() == len(rows) * unit_bytes
