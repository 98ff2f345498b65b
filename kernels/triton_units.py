"""Triton kernel that moves units between blocks and pages; imported only where it will run.

One launch moves all layers and heads of a grid for all units of a chunk.
"""

from functools import cache
from math import gcd, prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from vllm_hicache.kernels.part_grid import Axis, PartGrid
from vllm_hicache.tiers import Direction

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_VECTOR_BYTES = 16  # two words of 8; Triton has no wider integer
_MAX_TILE = 512  # vectors
_NO_AXIS = Axis(1, 0, 0)


class Sizes(NamedTuple):
    """What a device is given to do at a time."""

    num_ctas: int
    num_warps: int
    vectors: int
    """Of one step of a CTA."""


WARPS = 16
VECTORS_PER_THREAD = 4  # 16 bytes each: enough in flight for the latency of device memory
INTERPRETED = Sizes(num_ctas=2, num_warps=1, vectors=4096)


def device_sizes(device: torch.device, num_ctas: int) -> Sizes:
    """At most ``num_ctas`` large CTAs, which the device puts onto as many SMs."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Sizes(min(num_ctas, num_sms), WARPS, WARPS * 32 * VECTORS_PER_THREAD)


def move_units(  # type: ignore[no-untyped-def]
    blocks,
    pages,
    rows,
    segments,
    num_items,
    slot_stride,
    TO_PAGES: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    PAGE_UNIT_STRIDE: tl.constexpr,
    EXTENT_0: tl.constexpr,
    DEVICE_0: tl.constexpr,
    PAGE_0: tl.constexpr,
    EXTENT_1: tl.constexpr,
    DEVICE_1: tl.constexpr,
    PAGE_1: tl.constexpr,
    EXTENT_2: tl.constexpr,
    DEVICE_2: tl.constexpr,
    PAGE_2: tl.constexpr,
    DENSE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ITEMS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Copy vectors of ``LANES`` words; all strides, extents and offsets count vectors.

    An item is a tile of what lies side by side on both sides; items that follow one another are
    neighbours in pages. Offsets are 64 bits wide, and even where a vector is two words: so the
    compiler knows that one instruction can move both.
    """
    word = tl.arange(0, TILE * LANES)[None, :]
    step = ITEMS * tl.num_programs(0)
    for first in range(ITEMS * tl.program_id(0), num_items, step):
        item = first + tl.arange(0, ITEMS)
        is_item = item < num_items
        tile = item % TILES
        at = item // TILES
        at_2 = (at % EXTENT_2).to(tl.int64)
        at = at // EXTENT_2
        at_1 = (at % EXTENT_1).to(tl.int64)
        at = at // EXTENT_1
        at_0 = (at % EXTENT_0).to(tl.int64)
        at = at // EXTENT_0
        segment = segments + at % NUM_SEGMENTS * 2
        row = rows + at // NUM_SEGMENTS * 4
        slot = tl.load(row, mask=is_item, other=0)
        page_unit = tl.load(row + 1, mask=is_item, other=0)
        block = tl.load(row + 2, mask=is_item, other=0)
        unit = tl.load(row + 3, mask=is_item, other=0)
        in_blocks = tl.load(segment, mask=is_item, other=0) + tile * TILE
        in_blocks += block * BLOCK_STRIDE + unit * UNIT_STRIDE
        in_blocks += at_0 * DEVICE_0 + at_1 * DEVICE_1 + at_2 * DEVICE_2
        in_pages = tl.load(segment + 1, mask=is_item, other=0) + tile * TILE
        in_pages += slot * slot_stride + page_unit * PAGE_UNIT_STRIDE
        in_pages += at_0 * PAGE_0 + at_1 * PAGE_1 + at_2 * PAGE_2
        block_words = blocks + ((in_blocks * LANES)[:, None] + word)
        page_words = pages + ((in_pages * LANES)[:, None] + word)
        mask = is_item[:, None] & ((tile * (TILE * LANES))[:, None] + word < DENSE * LANES)
        if TO_PAGES:
            tl.store(page_words, tl.load(block_words, mask=mask), mask=mask)
        else:
            tl.store(block_words, tl.load(page_words, mask=mask), mask=mask)


@cache
def kernel(*, is_interpreted: bool) -> Any:
    """Compiled for the current CUDA device, or run by Triton's interpreter on any device."""
    if is_interpreted:
        return InterpretedFunction(move_units)
    return triton.jit(move_units, do_not_specialize=["num_items", "slot_stride"])


class TritonUnits:
    """Moves the units of one grid; equals ``PartView`` of the same parts bit for bit.

    kv_storage  flat, contiguous bytes of the whole KV buffer
    """

    def __init__(self, kv_storage: Tensor, grid: PartGrid, sizes: Sizes) -> None:
        alignment = gcd(_VECTOR_BYTES, kv_storage.data_ptr(), kv_storage.storage_offset())
        self._vector = grid.word(alignment)
        lanes = 2 if self._vector == _VECTOR_BYTES else 1
        self.dtype = _WORDS[self._vector // lanes]
        whole = kv_storage.numel() // self._vector * self._vector
        self._blocks = kv_storage[:whole].view(self.dtype)
        self._segments = torch.from_numpy(grid.segments // self._vector).to(kv_storage.device)
        dense = grid.axes[-1].extent // self._vector
        tile = _tile_of(dense)
        tiles = -(-dense // tile)
        items = max(1, sizes.vectors // tile)
        self._items_per_unit = (
            len(grid.segments) * tiles * prod(axis.extent for axis in grid.axes[:-1])
        )
        self._items_per_cta = items
        self._sizes = sizes
        self._kernel = kernel(is_interpreted=kv_storage.device.type == "cpu")
        self.constants = {
            "NUM_SEGMENTS": len(grid.segments),
            "BLOCK_STRIDE": grid.block_stride // self._vector,
            "UNIT_STRIDE": grid.unit_stride // self._vector,
            "PAGE_UNIT_STRIDE": grid.page_unit_stride // self._vector,
            **_axis_constants(grid.axes, self._vector),
            "TILE": tile,
            "TILES": tiles,
            "ITEMS": items,
            "LANES": lanes,
        }

    def move(self, direction: Direction, rows: Tensor, pages: Tensor, scratch: Tensor) -> None:
        """Move the units of ``rows`` [n, 4] int64 between blocks and ``pages`` [num_pages,
        slot_stride] uint8; on a device enqueue it on the current stream."""
        del scratch
        self._launch(direction, rows, pages, len(rows) * self._items_per_unit)

    def prepare(self, slot_stride: int) -> None:
        """Compile for both directions; nothing is moved."""
        device = self._blocks.device
        rows = torch.empty((0, 4), dtype=torch.int64, device=device)
        pages = torch.empty((0, slot_stride), dtype=torch.uint8, device=device)
        for direction in Direction:
            self._launch(direction, rows, pages, 0)

    def _launch(self, direction: Direction, rows: Tensor, pages: Tensor, num_items: int) -> None:
        num_ctas = min(self._sizes.num_ctas, max(1, -(-num_items // self._items_per_cta)))
        self._kernel[(num_ctas,)](
            self._blocks,
            pages.view(-1).view(self.dtype),
            rows,
            self._segments,
            num_items,
            pages.stride(0) // self._vector,
            TO_PAGES=direction is Direction.SAVE,
            num_warps=self._sizes.num_warps,
            **self.constants,
        )


def _tile_of(num_vectors: int) -> int:
    """A power of two, so that few threads are idle in the last tile of what lies side by side.

    >>> _tile_of(512), _tile_of(4608), _tile_of(72), _tile_of(1), _tile_of(700)
    (512, 512, 16, 1, 256)
    """
    tile = gcd(num_vectors, _MAX_TILE)
    while tile < _MAX_TILE and tile < num_vectors and -num_vectors % (2 * tile) * 8 < num_vectors:
        tile *= 2
    return tile


def _axis_constants(axes: tuple[Axis, ...], vector: int) -> dict[str, int]:
    *outer, dense = axes
    padded = [_NO_AXIS] * (3 - len(outer)) + outer
    constants = {"DENSE": dense.extent // vector}
    for i, axis in enumerate(padded):
        constants |= {
            f"EXTENT_{i}": axis.extent,
            f"DEVICE_{i}": axis.device // vector,
            f"PAGE_{i}": axis.page // vector,
        }
    return constants
