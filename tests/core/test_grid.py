"""The grid of stored objects against brute force and vLLM's own way to cut layers."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.errors import ConfigError
from vllm_hicache.grid import (
    TRIED_SIZES,
    Fleet,
    Grid,
    coarsest_grid,
    even_stage_starts,
    own_grid,
    readers,
)
from vllm_hicache.layout import LayerSpan, PageLayout


def _stages(total_layers, pp_size):
    return list(pairwise([*even_stage_starts(total_layers, pp_size), total_layers]))


@pytest.mark.vllm
def test_stages_start_where_vllm_starts_them():
    from vllm.distributed.utils import get_pp_indices

    for total_layers in range(1, 64):
        for pp_size in range(1, min(total_layers, 8) + 1):
            expected = [get_pp_indices(total_layers, rank, pp_size) for rank in range(pp_size)]
            assert _stages(total_layers, pp_size) == expected


def test_fleet_of_the_worked_example_gives_eight_objects_a_page():
    grid = coarsest_grid(Fleet((2, 4), (1, 2)), total_layers=60, total_kv_heads=8)
    assert grid == Grid(layer_partition=30, heads_per_group=2)


@given(
    total_kv_heads=st.integers(1, 32),
    total_layers=st.integers(1, 80),
    tp=st.sets(st.integers(1, 16), min_size=1, max_size=3),
    pp=st.sets(st.integers(1, 8), min_size=1, max_size=3),
)
def test_every_engine_of_a_fleet_fits_its_grid(total_kv_heads, total_layers, tp, pp):
    fleet = Fleet(tuple(sorted(tp)), tuple(sorted(pp)))
    if any(total_kv_heads % size for size in tp) or max(pp) > total_layers:
        with pytest.raises(ConfigError):
            coarsest_grid(fleet, total_layers=total_layers, total_kv_heads=total_kv_heads)
        return
    grid = coarsest_grid(fleet, total_layers=total_layers, total_kv_heads=total_kv_heads)
    for tp_size in tp:
        for pp_size in pp:
            heads = total_kv_heads // tp_size
            for start, stop in _stages(total_layers, pp_size):
                PageLayout(  # raises where a share does not fit
                    page_size=16,
                    layers=LayerSpan(start, stop),
                    total_layers=total_layers,
                    head_start=0,
                    head_stop=heads,
                    total_kv_heads=total_kv_heads,
                    heads_per_group=grid.heads_per_group,
                    row_bytes=4,
                    layer_partition=grid.layer_partition,
                )


def test_a_coarser_grid_than_the_fleets_does_not_fit():
    grid = coarsest_grid(Fleet((2, 4), (1, 2)), total_layers=60, total_kv_heads=8)
    for layers, heads in ((60, 2), (30, 4)):
        with pytest.raises(ConfigError):
            PageLayout(
                page_size=16,
                layers=LayerSpan(30, 60) if layers == 60 else LayerSpan(0, 30),
                total_layers=90 if layers == 60 else 60,
                head_start=2,
                head_stop=4,
                total_kv_heads=8,
                heads_per_group=heads,
                row_bytes=4,
                layer_partition=layers,
            )
    assert grid.layer_partition < 60


def test_stages_cut_by_hand_count():
    grid = coarsest_grid(Fleet((1,), (1, 2)), total_layers=4, total_kv_heads=2, own_starts=(0, 3))
    assert grid.layer_partition == 1


def test_without_a_fleet_the_given_partitions_or_this_engines_stage_decide():
    common = {"total_kv_heads": 8, "local_heads": 4}
    assert own_grid(layer_partition=0, head_partition=0, **common) == Grid(0, 1)
    assert own_grid(layer_partition=8, head_partition=2, **common) == Grid(8, 2)


def test_a_latent_is_one_object_for_every_tensor_parallel_size():
    fleet = Fleet((1, 3, 16), (1, 2))
    grid = coarsest_grid(fleet, total_layers=60, total_kv_heads=1, is_latent=True)
    assert grid == Grid(30, 1)
    sizes = readers(grid, total_layers=60, total_kv_heads=1, own_starts=(0,), is_latent=True)
    assert sizes["tp"] == list(TRIED_SIZES)


def test_readers_name_the_sizes_that_fit():
    grid = Grid(layer_partition=15, heads_per_group=2)
    sizes = readers(grid, total_layers=60, total_kv_heads=8, own_starts=(0, 30))
    assert sizes == {"tp": [1, 2, 4], "pp": [1, 2, 4]}
    own = readers(Grid(0, 1), total_layers=60, total_kv_heads=8, own_starts=(0, 30))
    assert own == {"tp": [1, 2, 4, 8], "pp": [2]}
