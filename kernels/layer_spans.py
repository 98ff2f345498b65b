"""Loads pages span of layers by span of layers: the first layers are there long before the last.

A span of a page is one run of bytes per head group. On a CPU it goes straight to the blocks; on a
CUDA device through staging buffers that hold this span of some pages, and nothing else of them.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_hicache.device_layout import DeviceGroup
from vllm_hicache.kernels.group_view import GroupView
from vllm_hicache.kernels.staged_rows import stage
from vllm_hicache.kernels.staging import slot_runs
from vllm_hicache.kernels.strided_copy import copy_runs_to_device
from vllm_hicache.layout import SLOT_ALIGNMENT, LayerSpan, PageLayout, registration_slots
from vllm_hicache.tiers import Direction

RUN_BYTES = 256 << 10  # a copy engine reaches its full rate with runs from 64 KiB on
MIN_SPANS = 8  # the last span's layers are computed when nothing is left to be copied
MAX_SPANS = 16  # each costs launches, which small loads would wait for
CPU_CHUNK_BYTES = 4 << 20  # as of whole pages, see `reference`
CUDA_CHUNK_BYTES = 32 << 20


def span_starts(layout: PageLayout) -> tuple[int, ...]:
    """First layers of the spans: runs of ``RUN_BYTES`` within both bounds on their number.

    >>> span_starts(PageLayout(256, LayerSpan(0, 32), 32, 0, 8, 8, 1, 512, 0))[:4]
    (0, 2, 4, 6)
    >>> span_starts(PageLayout(64, LayerSpan(0, 4), 4, 0, 2, 2, 1, 64, 0))
    (0, 1, 2, 3)
    """
    wanted = -(-RUN_BYTES // layout.layer_bytes)
    least, most = (-(-layout.num_layers // spans) for spans in (MAX_SPANS, MIN_SPANS))
    return tuple(range(0, layout.num_layers, min(max(wanted, least), most)))


def span_memory(layout: PageLayout) -> int:
    """Device memory that loads of spans take on a CUDA device: two buffers, and what torch gathers
    into."""
    starts = (*span_starts(layout), layout.num_layers)
    layers = max(last - first for first, last in pairwise(starts))
    largest = layers * layout.layer_bytes * layout.num_head_groups
    return 3 * max(CUDA_CHUNK_BYTES, -(-largest // SLOT_ALIGNMENT) * SLOT_ALIGNMENT)


class LayerSpans:
    """Loads granules of a worker with one pool and one KV cache group.

    kv_storage  flat, contiguous bytes of the whole KV buffer
    group       holds every layer of the pool's pages once
    """

    def __init__(
        self,
        kv_storage: Tensor,
        group: DeviceGroup,
        layout: PageLayout,
        *,
        chunk_bytes: int | None = None,
    ) -> None:
        self.starts = span_starts(layout)
        is_staged = kv_storage.device.type != "cpu"
        self._spans = [
            _Span.cut(kv_storage, group, layout, first, last, is_staged=is_staged)
            for first, last in pairwise([*self.starts, layout.num_layers])
        ]
        largest = max(span.page_bytes for span in self._spans)
        self._units = self._spans[0].view  # cut alike in every span
        if is_staged:
            num_staged = max(1, (chunk_bytes or CUDA_CHUNK_BYTES) // largest)
            self._staging: _SpanStaging | None = _SpanStaging(
                num_staged, largest, layout, kv_storage.device
            )
            return
        self._staging = None
        unit_bytes = largest // self._units.units_per_page
        self._chunk_rows = max(1, (chunk_bytes or CPU_CHUNK_BYTES) // unit_bytes)
        self._scratch = torch.empty(self._chunk_rows * unit_bytes, dtype=torch.uint8)

    def span_of(self, place: int) -> int:
        """The span of the layer in this place of the pages."""
        return bisect_right(self.starts, place) - 1

    def load(
        self, copies: Sequence[np.ndarray], host: Tensor
    ) -> Iterator["torch.cuda.Event | None"]:
        """Copy one span after the other of everything listed from host slots to device blocks.

        copies  one list per load, as of ``PoolsCopier``; none names a granule of another

        Yields when a span of all loads is on its way: on a CUDA device, where all of it is
        ordered on the current stream, its end; on a CPU None, because it has ended.
        """
        rows = [self._units.units_of(one, len(host)) for one in copies]
        if self._staging is None:
            for span in self._spans:
                for units in rows:
                    self.load_straight(span, units, host)
                yield None
            return
        yield from self._staging.load(self._spans, rows, host, self._units.units_per_page)

    def load_straight(self, span: "_Span", units: np.ndarray, host: Tensor) -> None:
        """One span of one load, on a CPU."""
        for first in range(0, len(units), self._chunk_rows):
            chunk = torch.from_numpy(units[first : first + self._chunk_rows])
            span.view.relayout(Direction.LOAD, chunk, host, self._scratch)


class _Span(NamedTuple):
    """Layers that lie side by side in each head group of a page.

    view        their blocks, and their places in a page, or in what is staged of it
    offset      of their first byte in a head group of the page
    run_bytes   of them in a head group
    page_bytes  of them in a page
    """

    first: int
    view: GroupView
    offset: int
    run_bytes: int
    page_bytes: int

    @classmethod
    def cut(
        cls,
        kv_storage: Tensor,
        group: DeviceGroup,
        layout: PageLayout,
        first: int,
        last: int,
        *,
        is_staged: bool,
    ) -> "_Span":
        """Places ``[first, last)`` of pages that lie whole in host, or of what is staged of them:
        pages that have these layers alone."""
        shift = first if is_staged else 0
        parts = []
        for layers in group.layers:
            kept = [
                (index, place - shift)
                for index, place in zip(layers.indices, layers.layers, strict=True)
                if first <= place < last
            ]
            if kept:
                indices, places = zip(*kept, strict=True)
                parts.append(replace(layers, indices=indices, layers=places))
        members = layout.members[first:last]
        alone = replace(
            layout,
            layers=LayerSpan(members[0], members[-1] + 1),
            members=members,
            layer_partition=0,
            num_replicas=1,
            replica=0,
        )
        view = GroupView(
            kv_storage, replace(group, layers=tuple(parts)), alone if is_staged else layout
        )
        run_bytes = (last - first) * layout.layer_bytes
        return cls(
            first, view, first * layout.layer_bytes, run_bytes, layout.num_head_groups * run_bytes
        )


class _SpanStaging:
    """Two device buffers. Copies over the bus run on the current stream, relayouts on another, so
    that those of one buffer overlap those of the other. Not thread-safe."""

    def __init__(
        self, num_pages: int, page_bytes: int, layout: PageLayout, device: torch.device
    ) -> None:
        self._num_pages = num_pages
        self._layout = layout
        size = -(-num_pages * page_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self._buffers = torch.zeros((2, size), dtype=torch.uint8, device=device)
        self._scratch = torch.empty(size, dtype=torch.uint8, device=device)
        # Before the kernels of the forward that waits for it.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._transferred = (torch.cuda.Event(), torch.cuda.Event())
        self._relaid = (torch.cuda.Event(), torch.cuda.Event())
        self._turn = 0

    def load(
        self, spans: Sequence[_Span], rows: Sequence[np.ndarray], host: Tensor, units_per_page: int
    ) -> Iterator[torch.cuda.Event]:
        current = torch.cuda.current_stream(self._buffers.device)
        loads = []
        for units in rows:
            staged = stage([units], [units_per_page], self._num_pages)
            with torch.cuda.stream(self._stream):
                on_device = torch.from_numpy(staged.rows).to(
                    self._buffers.device, non_blocking=True
                )
            loads.append((staged.slots, staged.ends[0], on_device))
        # Not before: an upload from pageable memory may wait for what its stream waits for.
        self._stream.wait_stream(current)
        try:
            for span in spans:
                for slots, ends, on_device in loads:
                    self._load_span(span, slots, ends, on_device, host)
                arrived = torch.cuda.Event()
                arrived.record(self._stream)
                yield arrived
        finally:
            current.wait_stream(self._stream)

    def _load_span(
        self, span: _Span, slots: np.ndarray, ends: np.ndarray, rows: Tensor, host: Tensor
    ) -> None:
        current = torch.cuda.current_stream(self._buffers.device)
        for first in range(0, len(slots), self._num_pages):
            last = min(first + self._num_pages, len(slots))
            num_bytes = (last - first) * span.page_bytes
            buffer = self._buffers[self._turn, :num_bytes].view(last - first, span.page_bytes)
            transferred, relaid = self._transferred[self._turn], self._relaid[self._turn]
            self._turn = 1 - self._turn
            current.wait_event(relaid)
            self._transfer(span, slots[first:last], host, buffer, current.cuda_stream)
            transferred.record(current)
            self._stream.wait_event(transferred)
            with torch.cuda.stream(self._stream):
                chunk = rows[ends[first] : ends[last]]
                span.view.relayout(Direction.LOAD, chunk, buffer, self._scratch)
                relaid.record(self._stream)

    def _transfer(
        self, span: _Span, slots: np.ndarray, host: Tensor, buffer: Tensor, stream: int
    ) -> None:
        """Pages without padding between them are rows of one copy, as their head groups are."""
        layout, slot_stride = self._layout, host.shape[1]
        groups, stride = layout.num_head_groups, layout.num_layers * layout.layer_bytes
        is_dense = slot_stride == layout.page_bytes
        for first, last in slot_runs(slots, registration_slots(slot_stride)):
            step = last - first if is_dense else 1
            for page in range(first, last, step):
                slot = int(slots[page])
                copy_runs_to_device(
                    host.data_ptr() + slot * slot_stride + span.offset,
                    buffer.data_ptr() + page * span.page_bytes,
                    run_bytes=span.run_bytes,
                    stride=stride,
                    num_runs=step * groups,
                    stream=stream,
                )
