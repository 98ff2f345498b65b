"""What lies side by side in blocks and in pages, as batches of plain copies: no staging."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vllm_hicache.kernels.part_grid import PartGrid

_BATCH = 1 << 15  # copies of one call; bounds the memory of a batch, not its speed


class Runs(NamedTuple):
    """Copies between a KV buffer and pages: offsets and bytes, each [n] int64."""

    in_blocks: np.ndarray
    in_pages: np.ndarray
    sizes: np.ndarray


class UnitRuns:
    """The runs of all layers of a group, unit by unit; as few and as long as both sides allow."""

    def __init__(self, grids: Sequence[PartGrid]) -> None:
        tables = [grid.runs() for grid in grids]
        runs = np.concatenate(tables)
        strides = np.concatenate(
            [
                np.full((len(table), 2), (grid.block_stride, grid.unit_stride))
                for grid, table in zip(grids, tables, strict=True)
            ]
        )
        order = np.argsort(runs[:, 1], kind="stable")
        runs, strides = runs[order], strides[order]
        is_first = ~_continues(*runs.T)
        is_first[1:] |= (strides[1:] != strides[:-1]).any(axis=1)
        self._runs = _joined(Runs(*runs.T), is_first)
        self._strides = strides[is_first].T[:, :, None]  # block, unit in block
        self._page_unit_stride = grids[0].page_unit_stride
        self.run_bytes = int(self._runs.sizes.mean())
        """Of a run of one unit, on average."""

    def batches(self, rows: np.ndarray, slot_stride: int) -> Iterator[Runs]:
        """Copies of the units of ``rows`` [n, 4] int64, none across two slots."""
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        step = max(1, _BATCH // len(self._runs.sizes))
        for first in range(0, len(rows), step):
            yield self._batch(rows[first : first + step], slot_stride)

    def _batch(self, rows: np.ndarray, slot_stride: int) -> Runs:
        slot, page_unit, block, unit = rows.T
        block_stride, unit_stride = self._strides
        in_blocks, in_pages, sizes = (each[:, None] for each in self._runs)
        runs = Runs(
            (in_blocks + block * block_stride + unit * unit_stride).ravel(),
            (in_pages + slot * slot_stride + page_unit * self._page_unit_stride).ravel(),
            np.broadcast_to(sizes, (len(sizes), len(rows))).ravel(),
        )
        is_first = ~_continues(*runs)
        slots = np.tile(slot, len(sizes))
        is_first[1:] |= slots[1:] != slots[:-1]
        return _joined(runs, is_first)


def _continues(in_blocks: np.ndarray, in_pages: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Whether a run begins where the one before it ends, on both sides."""
    follows = np.zeros(len(sizes), dtype=bool)
    follows[1:] = (np.diff(in_blocks) == sizes[:-1]) & (np.diff(in_pages) == sizes[:-1])
    return follows


def _joined(runs: Runs, is_first: np.ndarray) -> Runs:
    """Every run with those behind it that continue it."""
    firsts = np.flatnonzero(is_first)
    return Runs(runs.in_blocks[firsts], runs.in_pages[firsts], np.add.reduceat(runs.sizes, firsts))
