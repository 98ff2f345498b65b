"""Where the bytes of a unit lie, in the KV buffer and in pages, as numbers that a kernel can take.

Everything is data: offsets of segments, and within them a few axes with a stride on both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

import numpy as np

from vllm_hicache.device_layout import DeviceGroup, DeviceLayers, RowPart
from vllm_hicache.layout import PageLayout


class Axis(NamedTuple):
    """Steps of the same size on both sides; strides in bytes."""

    extent: int
    device: int
    page: int


@dataclass(frozen=True, slots=True, eq=False)
class PartGrid:
    """The bytes of a unit in some layers, for row parts that are cut alike.

    A byte lies, for its place ``at`` in the axes and for the unit (slot, unit in page, block, unit
    in block), relative to the KV buffer and to the first slot, at

        segments[s, 0] + block*block_stride + unit_in_block*unit_stride + at . device strides
        segments[s, 1] + slot*slot_stride + unit_in_page*page_unit_stride + at . page strides
    """

    segments: np.ndarray
    """[layers * head groups, 2] int64."""
    axes: tuple[Axis, ...]
    """From outer to inner, none that is the continuation of the next; the last one is of bytes
    that lie side by side on both sides."""
    block_stride: int
    unit_stride: int
    page_unit_stride: int

    def word(self, alignment: int) -> int:
        """Bytes of the widest word that all of it is made of, at most ``alignment``."""
        strides = [stride for axis in self.axes[:-1] for stride in axis[1:]]
        return gcd(
            alignment,
            self.axes[-1].extent,
            *strides,
            self.block_stride,
            self.unit_stride,
            self.page_unit_stride,
            int(np.gcd.reduce(self.segments, axis=None)),
        )

    def runs(self) -> np.ndarray:
        """[n, 3] int64 (offset in the KV buffer, offset in pages, bytes) of what lies side by side
        on both sides in a unit, in the order of the segments."""
        *axes, dense = self.axes
        offsets = self.segments[:, None]
        for axis in axes:
            steps = np.arange(axis.extent)[:, None] * (axis.device, axis.page)
            offsets = (offsets[:, :, None] + steps).reshape(len(offsets), -1, 2)
        offsets = offsets.reshape(-1, 2)
        return np.concatenate((offsets, np.full((len(offsets), 1), dense.extent)), axis=1)


def part_grids(group: DeviceGroup, layout: PageLayout, unit: int) -> list[PartGrid]:
    """All parts of a group, as few grids as there are ways to cut them.

    unit  tokens of a unit
    """
    found: dict[tuple[object, ...], list[PartGrid]] = {}
    for layers in group.layers:
        for part in layers.parts:
            grid = _part_grid(layers, part, layout, unit)
            found.setdefault((grid.axes, grid.block_stride, grid.unit_stride), []).append(grid)
    return [_joined(grids) for grids in found.values()]


def _part_grid(layers: DeviceLayers, part: RowPart, layout: PageLayout, unit: int) -> PartGrid:
    heads, row = layout.heads_per_group, layout.row_bytes
    head_groups = np.arange(layout.num_head_groups)
    device = np.add.outer(
        head_groups * (heads * part.head_stride), np.array(layers.indices) * layers.layer_stride
    )
    page = np.add.outer(
        head_groups * (layout.num_layers * layout.layer_bytes),
        np.array(layers.layers) * layout.layer_bytes,
    )
    device, page = device + layers.base_bytes + part.base, page + part.row_offset
    axes = (
        Axis(unit, part.token_stride, heads * row),
        Axis(heads, part.head_stride, row),
        Axis(part.num_elements, part.element_stride, part.element_bytes),
        Axis(part.element_bytes, 1, 1),
    )
    return PartGrid(
        segments=np.stack((device, page), axis=-1).reshape(-1, 2).astype(np.int64),
        axes=_merged(axes),
        block_stride=part.block_stride,
        unit_stride=unit * part.token_stride,
        page_unit_stride=unit * heads * row,
    )


def _joined(grids: Sequence[PartGrid]) -> PartGrid:
    return replace(grids[0], segments=np.concatenate([grid.segments for grid in grids]))


def _merged(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """The same bytes by fewer axes.

    >>> _merged((Axis(4, 32, 64), Axis(1, 9, 9), Axis(2, 16, 32), Axis(16, 1, 1)))
    (Axis(extent=8, device=16, page=32), Axis(extent=16, device=1, page=1))
    """
    *outer, inner = axes
    merged = [inner]
    for axis in reversed(outer):
        inner = merged[0]
        if axis.extent == 1:
            continue
        if axis[1:] == (inner.extent * inner.device, inner.extent * inner.page):
            merged[0] = Axis(axis.extent * inner.extent, inner.device, inner.page)
        else:
            merged.insert(0, axis)
    return tuple(merged)
