"""Copies pages between vLLM's paged KV and host slots, pool by pool.

On a CPU straight; on a CUDA device through staging buffers that hold whole pages of one pool, or
straight by the copy engines where blocks and pages have the same order.
"""

from collections.abc import Sequence
from functools import partial
from operator import mul

import numpy as np
import torch
from torch import Tensor

from vllm_hicache.device_layout import DeviceGroup
from vllm_hicache.errors import ConfigError, InvariantBroken
from vllm_hicache.kernels.device_memory import UPLOAD_ROWS, pages_at_once, staging_bytes
from vllm_hicache.kernels.dispatch import Path, path_of
from vllm_hicache.kernels.group_view import GroupView
from vllm_hicache.kernels.staged_rows import sections, stage
from vllm_hicache.kernels.staging import Staging
from vllm_hicache.kernels.workspace import Workspace, WorkspaceSize
from vllm_hicache.layout import PageLayout
from vllm_hicache.tiers import Direction

CPU_CHUNK_BYTES = 4 << 20  # stays in a shared L3; smaller costs calls, larger memory traffic


class PageCopier:
    """Copies granules of one pool between a worker's KV buffer and host slots.

    kv_storage  flat, contiguous bytes of the whole KV buffer, which groups may share
    groups      together hold every layer of the pool's pages exactly once
    path        forces how bytes are moved, for tests and measurements; None: the fastest way
    """

    def __init__(
        self,
        kv_storage: Tensor,
        groups: Sequence[DeviceGroup],
        layout: PageLayout,
        *,
        chunk_bytes: int | None = None,
        path: Path | None = None,
    ) -> None:
        _check_places(groups, layout)
        self.device = kv_storage.device
        relayout_path = None if path is Path.COPY_ENGINE else path
        self.groups = tuple(GroupView(kv_storage, group, layout, relayout_path) for group in groups)
        self.path = path or path_of(
            self.device, lambda: min(group.runs.run_bytes for group in self.groups)
        )
        """How whole copies are carried out."""
        self._kv_storage = kv_storage
        self._slot_stride = layout.slot_stride
        self._num_staged = pages_at_once(layout, chunk_bytes)
        chunk = chunk_bytes or CPU_CHUNK_BYTES
        self._chunk_rows = [max(1, chunk // group.unit_bytes) for group in self.groups]
        self.workspace_size = self._size(staging_bytes(layout, chunk_bytes))

    def _size(self, num_bytes: int) -> WorkspaceSize:
        if self.path is Path.COPY_ENGINE:
            return WorkspaceSize(0, 0, 0)
        scratch = 0
        if any(group.needs_scratch for group in self.groups):
            chunks = map(mul, self._chunk_rows, (group.unit_bytes for group in self.groups))
            scratch = max(chunks) if self.device.type == "cpu" else num_bytes
        units_per_page = sum(group.units_per_page for group in self.groups)
        return WorkspaceSize(scratch, num_bytes, max(UPLOAD_ROWS, units_per_page))

    def copy(
        self,
        direction: Direction,
        copies: Sequence[np.ndarray],
        host: Tensor,
        workspace: Workspace,
    ) -> None:
        """Copy what the lists of the pool's groups name; see ``PoolsCopier``."""
        if host.shape[1] != self._slot_stride:
            raise InvariantBroken(
                f"host slots of {host.shape[1]} bytes, not of the pool's {self._slot_stride}"
            )
        rows = [group.units_of(_list_of(group, copies), len(host)) for group in self.groups]
        if not any(map(len, rows)):
            return
        if self.path is Path.COPY_ENGINE:
            self._copy_runs(direction, rows, host, workspace)
            return
        if workspace.staging is not None:
            num_units = [group.units_per_page for group in self.groups]
            for section in sections(rows, num_units, self.workspace_size.num_rows):
                self._copy_staged(direction, section, host, workspace.staging, workspace.scratch)
            return
        for group, units, step in zip(self.groups, rows, self._chunk_rows, strict=True):
            for first in range(0, len(units), step):
                chunk = torch.from_numpy(units[first : first + step])
                group.relayout(direction, chunk, host, workspace.scratch)

    def _copy_runs(
        self, direction: Direction, rows: list[np.ndarray], host: Tensor, workspace: Workspace
    ) -> None:
        """Bytes that have the same order on both sides pass straight, run by run."""
        blocks, pages = self._kv_storage.data_ptr(), host.data_ptr()
        for group, units in zip(self.groups, rows, strict=True):
            for runs in group.runs.batches(units, self._slot_stride):
                in_blocks, in_pages = blocks + runs.in_blocks, pages + runs.in_pages
                if direction is Direction.SAVE:
                    workspace.copy_batch(in_pages, in_blocks, runs.sizes)
                else:
                    workspace.copy_batch(in_blocks, in_pages, runs.sizes)

    def _copy_staged(
        self,
        direction: Direction,
        rows: list[np.ndarray],
        host: Tensor,
        staging: Staging,
        scratch: Tensor,
    ) -> None:
        """Whole pages pass between host and staging, units between staging and blocks."""
        staged = stage(rows, [group.units_per_page for group in self.groups], self._num_staged)
        device_rows = staging.upload(staged.rows)
        for first in range(0, len(staged.slots), self._num_staged):
            last = min(first + self._num_staged, len(staged.slots))
            chunks = [device_rows[ends[first] : ends[last]] for ends in staged.ends]
            # A page that is saved in part keeps its other granules: read it first.
            is_read = direction is Direction.LOAD or bool(staged.is_partial[first:last].any())
            staging.run(
                partial(self._relayout, direction, chunks, scratch=scratch),
                host,
                staged.slots[first:last],
                reads=is_read,
                writes=direction is Direction.SAVE,
            )

    def _relayout(
        self, direction: Direction, chunks: list[Tensor], pages: Tensor, *, scratch: Tensor
    ) -> None:
        for group, rows in zip(self.groups, chunks, strict=True):
            if len(rows):
                group.relayout(direction, rows, pages, scratch)


class PoolsCopier:
    """Copies granules of all pools of a worker, pool by pool.

    copies  one list per KV cache group of vLLM: [n, 4] int32 rows (host slot, granule in page,
            block id, granule in block), no granule twice; a granule is the smaller of the pool's
            page and the group's block, a state is the granule 0 of both. Lists of groups without
            a layer here are ignored; a group with layers of several pools is copied in each.
    host    one region per pool, in the order of ``pools``: [num_slots, slot_stride] uint8,
            contiguous; page-locked for a CUDA device

    A save and a load may run at once in two threads, two saves may not. On a CUDA device they
    return before the copy ends; everything is ordered on the current stream.
    """

    def __init__(self, pools: Sequence[PageCopier]) -> None:
        _check_granules(pools)
        self.pools = tuple(pools)
        size = WorkspaceSize.largest([pool.workspace_size for pool in pools])
        self._workspaces = {direction: Workspace(size, pools[0].device) for direction in Direction}

    def save(self, copies: Sequence[np.ndarray], host: Sequence[Tensor]) -> None:
        """Copy the listed granules from device blocks to host slots."""
        self._copy(Direction.SAVE, copies, host)

    def load(self, copies: Sequence[np.ndarray], host: Sequence[Tensor]) -> None:
        """Copy the listed granules from host slots to device blocks."""
        self._copy(Direction.LOAD, copies, host)

    def _copy(
        self, direction: Direction, copies: Sequence[np.ndarray], host: Sequence[Tensor]
    ) -> None:
        workspace = self._workspaces[direction]
        with workspace.ordered():
            for pool, region in zip(self.pools, host, strict=True):
                pool.copy(direction, copies, region, workspace)


def _list_of(group: GroupView, copies: Sequence[np.ndarray]) -> np.ndarray:
    if group.number >= len(copies):
        raise InvariantBroken(
            f"copies of {len(copies)} KV cache groups came, group {group.number} has layers"
        )
    return copies[group.number]


def _check_places(groups: Sequence[DeviceGroup], layout: PageLayout) -> None:
    places = sorted(place for group in groups for layers in group.layers for place in layers.layers)
    if places != list(range(layout.num_layers)):
        raise ConfigError(
            f"the KV buffer must hold each of the page's {layout.num_layers} layers once, "
            f"got the places {places}"
        )


def _check_granules(pools: Sequence[PageCopier]) -> None:
    """The pools of a group must read its list alike."""
    known: dict[int, tuple[int, int]] = {}
    for group in (group for pool in pools for group in pool.groups):
        if known.setdefault(group.number, group.granules) != group.granules:
            raise ConfigError(
                f"pools of KV cache group {group.number} cut its pages and blocks into "
                f"{known[group.number]} and {group.granules} granules; these must be the same"
            )
