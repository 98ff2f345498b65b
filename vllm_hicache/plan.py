"""Messages from the scheduler to the workers: one immutable plan per step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_hicache.pools import KVGroup
from vllm_hicache.tiers import Direction

__all__ = ["CopyList", "CopyOp", "Direction", "StepPlan", "copy_list", "group_copies"]

CopyList = np.ndarray
"""[n, 4] int32, C order. Row: host slot, granule in page, block id, granule in block.

A granule is min(page size, block size) tokens, of all layers and heads of a worker in one KV
cache group. A state is copied whole: its granules are 0.
"""
NULL_BLOCK = 0
"""vLLM's block that stands for nothing: outside of a window, no state here."""


@dataclass(frozen=True, slots=True)
class CopyOp:
    """One numbered device copy. Numbers of one direction start at 1 and have no gaps."""

    op_id: int
    copies: CopyList
    """Of the first KV cache group."""
    other_copies: tuple[CopyList, ...] = ()
    """Of the other groups, in vLLM's order; most models have one group."""

    @property
    def all_copies(self) -> tuple[CopyList, ...]:
        """One list for each KV cache group."""
        return (self.copies, *self.other_copies)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What every worker does in one step, in this order: loads, forward, saves.

    ``number`` starts at 1 and grows by one per step. All workers get the same plan.
    """

    number: int
    sync_loads: tuple[CopyOp, ...] = ()
    """Copied before this step's forward, which reads the blocks."""
    loads: tuple[CopyOp, ...] = ()
    """Copied whenever the link is free; the requests are not scheduled until reported."""
    saves: tuple[CopyOp, ...] = ()
    """Copied after this step's forward."""
    failed_requests: tuple[str, ...] = field(default=())
    """Requests whose load failed on some worker: every worker reports them to vLLM once."""


def copy_list(
    first_token: int,
    last_token: int,
    *,
    page_size: int,
    block_size: int,
    slots: np.ndarray,
    block_ids: np.ndarray,
) -> CopyList:
    """Copies for tokens ``[first_token, last_token)`` of one request.

    ``slots[i]`` is the host slot of page ``first_token // page_size + i`` and ``block_ids[i]``
    the device block of ``first_token // block_size + i``. Both bounds are granule multiples.

    >>> copy_list(32, 96, page_size=64, block_size=32,
    ...           slots=np.array([7, 9]), block_ids=np.array([4, 5])).tolist()
    [[7, 1, 4, 0], [9, 0, 5, 0]]
    """
    granule = min(page_size, block_size)
    tokens = np.arange(first_token, last_token, granule, dtype=np.int64)
    pages = tokens // page_size
    blocks = tokens // block_size
    rows = np.empty((len(tokens), 4), dtype=np.int32)
    rows[:, 0] = slots[pages - first_token // page_size]
    rows[:, 1] = (tokens % page_size) // granule
    rows[:, 2] = block_ids[blocks - first_token // block_size]
    rows[:, 3] = (tokens % block_size) // granule
    return rows


def group_copies(
    first_token: int,
    last_token: int,
    *,
    page_size: int,
    groups: Sequence[KVGroup],
    slots: np.ndarray,
    tables: Sequence[Sequence[int]],
    parts: Sequence[int],
) -> list[CopyList]:
    """``copy_list`` for every KV cache group of a model.

    ``tables[g]`` are the blocks of group g for these tokens, ``parts[i]`` the parts of page
    ``first_token // page_size + i``. Null blocks, and groups whose part a page lacks, are left out.

    >>> state = KVGroup(block_size=64, bit=0, is_state=True)
    >>> group_copies(0, 128, page_size=64, groups=(KVGroup(64), state), slots=np.array([7, 9]),
    ...              tables=((4, 5), (0, 6)), parts=(0, 1))[1].tolist()
    [[9, 0, 6, 0]]
    """
    lists = []
    for group, table in zip(groups, tables, strict=True):
        block_ids = np.asarray(table, dtype=np.int64)
        if group.is_state:
            rows = _state_copies(first_token, last_token, page_size, group, slots, block_ids)
        else:
            rows = copy_list(
                first_token,
                last_token,
                page_size=page_size,
                block_size=group.block_size,
                slots=slots,
                block_ids=block_ids,
            )
        if group.bit is not None:
            has_part = np.asarray(parts, dtype=np.int64) >> group.bit & 1
            wanted = dict(zip(slots.tolist(), has_part.tolist(), strict=True))
            keep = np.array([wanted[slot] for slot in rows[:, 0].tolist()], dtype=bool)
            rows = rows[keep & (rows[:, 2] != NULL_BLOCK)]
        lists.append(rows)
    return lists


def _state_copies(
    first_token: int,
    last_token: int,
    page_size: int,
    group: KVGroup,
    slots: np.ndarray,
    block_ids: np.ndarray,
) -> CopyList:
    """The state at the end of each whole page lies in the block that ends there."""
    ends = np.arange(first_token // page_size + 1, last_token // page_size + 1) * page_size
    rows = np.zeros((len(ends), 4), dtype=np.int32)
    rows[:, 0] = slots[: len(ends)]
    rows[:, 2] = block_ids[ends // group.block_size - 1 - first_token // group.block_size]
    return rows
