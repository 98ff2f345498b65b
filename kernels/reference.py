"""Copies pages between vLLM's paged KV and host slots with torch alone: the twin of every kernel.

On a CPU straight; on a CUDA device through staging buffers that hold whole pages.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vllm_hicache.device_layout import DeviceLayers
from vllm_hicache.errors import ConfigError
from vllm_hicache.kernels.copy_units import CopyUnits
from vllm_hicache.kernels.part_view import PartView, move
from vllm_hicache.kernels.staging import Staging
from vllm_hicache.layout import PageLayout, granule_tokens
from vllm_hicache.tiers import Direction

CPU_CHUNK_BYTES = 4 << 20  # stays in a shared L3; smaller costs calls, larger memory traffic
CUDA_CHUNK_BYTES = 32 << 20  # 0.6 ms on PCIe 5; smaller costs launches, larger device memory
_SLOT = 0  # column of the host slot in a copy list


class PageCopier:
    """Copies granules between one worker's KV buffer and host slots.

    kv_storage     flat, contiguous bytes of the whole KV buffer
    device_layers  together hold every layer of the page exactly once
    host           [num_slots, slot_stride] uint8, contiguous; page-locked for a CUDA device
    copy list      [n, 4] int32 rows (host slot, granule in page, block id, granule in block),
                   no granule twice

    A save and a load may run at once in two threads, two saves may not. On a CUDA device they
    return before the copy ends; everything is ordered on the current stream.
    """

    def __init__(
        self,
        kv_storage: Tensor,
        device_layers: Sequence[DeviceLayers],
        layout: PageLayout,
        block_size: int,
        *,
        chunk_bytes: int | None = None,
    ) -> None:
        _check_layers(device_layers, layout, block_size)
        first, device = device_layers[0], kv_storage.device
        self._units = units = CopyUnits(
            layout.page_size, block_size, first.block_size, first.num_blocks
        )
        self._parts = [
            PartView(kv_storage, layers, part, layout, units.num_tokens)
            for layers in device_layers
            for part in layers.parts
        ]
        unit_bytes = layout.page_bytes // units.per_page
        self._staging: dict[Direction, Staging] = {}
        if device.type == "cpu":
            self._chunk_rows = max(1, (chunk_bytes or CPU_CHUNK_BYTES) // unit_bytes)
        else:
            num_pages = max(1, (chunk_bytes or CUDA_CHUNK_BYTES) // layout.slot_stride)
            self._chunk_rows = num_pages * units.per_page
            for direction in Direction:
                self._staging[direction] = Staging(num_pages, layout.slot_stride, device)
        scratch_bytes = self._chunk_rows * unit_bytes
        self._scratch = {
            direction: torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
            for direction in Direction
        }

    def save(self, copy_list: np.ndarray, host: Tensor) -> None:
        """Copy the listed granules from device blocks to host slots."""
        self._copy(Direction.SAVE, copy_list, host)

    def load(self, copy_list: np.ndarray, host: Tensor) -> None:
        """Copy the listed granules from host slots to device blocks."""
        self._copy(Direction.LOAD, copy_list, host)

    def _copy(self, direction: Direction, copy_list: np.ndarray, host: Tensor) -> None:
        rows = self._units.of(copy_list, len(host))
        if not len(rows):
            return
        if self._staging:
            self._copy_staged(direction, rows, host)
            return
        for first in range(0, len(rows), self._chunk_rows):
            chunk = torch.from_numpy(rows[first : first + self._chunk_rows])
            self._relayout(direction, chunk, host)

    def _copy_staged(self, direction: Direction, rows: np.ndarray, host: Tensor) -> None:
        """Whole pages pass between host and staging, units between staging and blocks."""
        staging = self._staging[direction]
        slots, pages, counts = np.unique(rows[:, _SLOT], return_inverse=True, return_counts=True)
        rows = rows[np.argsort(pages, kind="stable")]
        rows[:, _SLOT] = np.repeat(np.arange(len(slots)) % staging.num_pages, counts)
        is_partial = counts < self._units.per_page
        ends = np.concatenate(([0], np.cumsum(counts)))
        with staging.ordered():
            device_rows = staging.upload(rows)
            for first in range(0, len(slots), staging.num_pages):
                last = min(first + staging.num_pages, len(slots))
                chunk = device_rows[ends[first] : ends[last]]
                # A page that is saved in part keeps its other granules: read it first.
                reads = direction is Direction.LOAD or bool(is_partial[first:last].any())
                staging.run(
                    partial(self._relayout, direction, chunk),
                    host,
                    slots[first:last],
                    reads=reads,
                    writes=direction is Direction.SAVE,
                )

    def _relayout(self, direction: Direction, rows: Tensor, pages: Tensor) -> None:
        """Move the units of ``rows`` between blocks and ``pages``: one gather per part."""
        for part in self._parts:
            source, target = part.in_blocks(rows), part.in_pages(rows, pages)
            if direction is Direction.LOAD:
                source, target = target, source
            move(source, target, self._scratch[direction])


def _check_layers(
    device_layers: Sequence[DeviceLayers], layout: PageLayout, block_size: int
) -> None:
    places = sorted(place for layers in device_layers for place in layers.layers)
    if places != list(range(layout.layers.num_layers)):
        raise ConfigError(
            f"the KV buffer must hold each of the page's {layout.layers.num_layers} layers once, "
            f"got the places {places}"
        )
    first = device_layers[0]
    want = (layout.num_heads, layout.row_bytes, first.block_size, first.num_blocks)
    for layers in device_layers:
        have = (layers.num_heads, layers.row_bytes, layers.block_size, layers.num_blocks)
        if have != want or block_size % layers.block_size:
            raise ConfigError(
                f"layers of one page share heads, row bytes, kernel block size (a divisor of "
                f"{block_size}) and number of blocks {want}, got {have}"
            )
        if layers.whole_blocks:
            granule_tokens(layout.page_size, layers.block_size, whole_blocks=True)
