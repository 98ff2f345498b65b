"""The grid that cuts pages into stored objects, and which topologies share it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

from vllm_hicache.errors import ConfigError
from vllm_hicache.layout import default_heads_per_group

TRIED_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Parallel sizes that the start line looks at."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Tensor and pipeline parallel sizes of all engines that share a store."""

    tp: tuple[int, ...]
    pp: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """``layer_partition`` layers (0: a writer's whole stage) and ``heads_per_group`` KV heads an
    object."""

    layer_partition: int
    heads_per_group: int


def even_stage_starts(total_layers: int, pp_size: int) -> tuple[int, ...]:
    """First layers of the stages as vLLM cuts them without VLLM_PP_LAYER_PARTITION: what is left
    over goes to the stages before the last one, from the back.

    >>> even_stage_starts(62, 4)
    (0, 15, 31, 47)
    """
    sizes = [total_layers // pp_size] * pp_size
    for i in range(total_layers % pp_size):
        sizes[pp_size - 2 - i] += 1
    return tuple(accumulate(sizes[:-1], initial=0))


def coarsest_grid(
    fleet: Fleet,
    *,
    total_layers: int,
    total_kv_heads: int,
    own_starts: Iterable[int] = (),
    is_latent: bool = False,
) -> Grid:
    """The largest objects that every engine of the fleet can read; ``own_starts`` are the first
    layers of this engine's stages, which may be cut by hand. ``is_latent``: every worker of a
    stage keeps the one head there is.

    >>> coarsest_grid(Fleet((2, 4), (1, 2)), total_layers=60, total_kv_heads=8)
    Grid(layer_partition=30, heads_per_group=2)
    """
    for tp_size in () if is_latent else fleet.tp:
        if total_kv_heads % tp_size:
            raise ConfigError(
                f"fleet: {total_kv_heads} KV heads cannot be split over tensor parallel size "
                f"{tp_size}; allowed are divisors of {total_kv_heads}"
            )
    for pp_size in fleet.pp:
        if pp_size > total_layers:
            raise ConfigError(
                f"fleet: {total_layers} layers cannot be split over pipeline parallel size "
                f"{pp_size}"
            )
    starts = [start for size in fleet.pp for start in even_stage_starts(total_layers, size)]
    layers = gcd(*starts, *own_starts)
    heads = 1 if is_latent else gcd(*(total_kv_heads // size for size in fleet.tp))
    return Grid(layers or total_layers, heads)


def own_grid(
    *, layer_partition: int, head_partition: int, total_kv_heads: int, local_heads: int
) -> Grid:
    """The grid of an engine without a fleet: what is given, or its own stage split for TP8."""
    heads = head_partition or default_heads_per_group(total_kv_heads, local_heads)
    return Grid(layer_partition, heads)


def readers(
    grid: Grid,
    *,
    total_layers: int,
    total_kv_heads: int,
    own_starts: tuple[int, ...],
    is_latent: bool = False,
) -> Mapping[str, list[int]]:
    """Tensor and pipeline parallel sizes, of those usually met, that can read the objects."""
    heads = grid.heads_per_group
    tp = [
        size
        for size in TRIED_SIZES
        if is_latent or (total_kv_heads % size == 0 and total_kv_heads // size % heads == 0)
    ]
    if not grid.layer_partition:
        return {"tp": tp, "pp": [len(own_starts)]}
    step = grid.layer_partition
    pp = [
        size
        for size in TRIED_SIZES
        if size <= total_layers
        and all(start % step == 0 for start in even_stage_starts(total_layers, size))
    ]
    return {"tp": tp, "pp": pp}
