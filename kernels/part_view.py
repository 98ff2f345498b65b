"""Strided views of one row part, in a worker's KV buffer and in host pages, unit by unit."""

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_hicache.device_layout import DeviceLayers, RowPart
from vllm_hicache.layout import PageLayout
from vllm_hicache.tiers import Direction

# Bytes are only moved, so any type of the right size serves; the widest that fits is fastest.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Selection(NamedTuple):
    """Units of some layers: ``view[units]`` is [units, layers, *row].

    In that order the bytes on the device are the bytes in the pages; only words may differ.
    """

    view: Tensor
    units: tuple[Tensor, Tensor, Tensor]


class PartView:
    """One row part of some layers, cut into units on both sides.

    blocks  [layers of the tensor, blocks, units of a block, *row]
    pages   [pages, layers of the page, units of a page, *row]
    row     [head groups, tokens of a unit, heads of a group, elements, words of an element];
            in pages the elements of a row lie side by side and count as one
    """

    def __init__(
        self,
        kv_storage: Tensor,
        layers: DeviceLayers,
        part: RowPart,
        layout: PageLayout,
        unit: int,
    ) -> None:
        group, row = layout.heads_per_group, layout.row_bytes
        grid = (layout.num_head_groups, unit, group)
        self._blocks = strided_bytes(
            kv_storage,
            (
                layers.indices[-1] + 1,
                layers.num_blocks,
                layers.block_size // unit,
                *grid,
                part.num_elements,
                part.element_bytes,
            ),
            (
                layers.layer_stride,
                part.block_stride,
                unit * part.token_stride,
                group * part.head_stride,
                part.token_stride,
                part.head_stride,
                part.element_stride,
            ),
            layers.base_bytes + part.base,
        )
        self._page_shape = (layout.num_layers, layout.page_size // unit, *grid)
        self._page_strides = (
            layout.layer_bytes,
            unit * group * row,
            layout.num_layers * layout.layer_bytes,
            group * row,
            row,
        )
        self._part = part
        device = kv_storage.device
        self._layers = torch.tensor([layers.indices], device=device)
        self._page_layers = torch.tensor([layers.layers], device=device)

    def move(self, direction: Direction, rows: Tensor, pages: Tensor, scratch: Tensor) -> None:
        """Move the units of ``rows`` [n, 4] int64 between blocks and ``pages`` by way of
        ``scratch``, which has room for them."""
        source, target = self.in_blocks(rows), self.in_pages(rows, pages)
        if direction is Direction.LOAD:
            source, target = target, source
        move(source, target, scratch)

    def in_blocks(self, rows: Tensor) -> Selection:
        """The device side of the rows of units [n, 4] int64."""
        _, _, block, unit = rows.t().unsqueeze(2)
        return Selection(self._blocks, (self._layers, block, unit))

    def in_pages(self, rows: Tensor, pages: Tensor) -> Selection:
        """The host side of the same rows, in ``pages`` [num_pages, slot_stride] uint8."""
        part_bytes = self._part.num_elements * self._part.element_bytes
        view = strided_bytes(
            pages.view(-1),
            (len(pages), *self._page_shape, 1, part_bytes),
            (pages.stride(0), *self._page_strides, part_bytes),
            self._part.row_offset,
        )
        slot, unit, _, _ = rows.t().unsqueeze(2)
        return Selection(view, (slot, self._page_layers, unit))


def strided_bytes(
    memory: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Tensor:
    """View flat bytes with ``strides`` in bytes, in the widest words that fit.

    The last axis is dense: its extent is in bytes and it has no stride of its own.
    """
    start = memory.storage_offset() + offset
    word = gcd(16, start, shape[-1], *strides)
    words = memory[: len(memory) // word * word].view(_WORDS[word])
    return words.as_strided(
        (*shape[:-1], shape[-1] // word),
        (*(stride // word for stride in strides), 1),
        start // word,
    )


def move(source: Selection, target: Selection, scratch: Tensor) -> None:
    """Copy ``source`` over ``target`` by way of ``scratch`` (flat bytes, at least as many)."""
    shape = torch.broadcast_shapes(*(index.shape for index in source.units))
    gathered = _dense(scratch, shape, source.view)
    torch.ops.aten.index.Tensor_out(source.view, source.units, out=gathered)
    target.view.index_put_(target.units, _dense(scratch, shape, target.view))


def _dense(scratch: Tensor, shape: torch.Size, view: Tensor) -> Tensor:
    """The first bytes of ``scratch`` as [*shape, *row] in the words of ``view``."""
    full = torch.Size((*shape, *view.shape[3:]))
    return scratch[: full.numel() * view.element_size()].view(view.dtype).view(full)
