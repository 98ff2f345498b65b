"""Messages from the scheduler to the workers: one immutable plan per step."""

from dataclasses import dataclass, field

import numpy as np

from vllm_hicache.tiers import Direction

__all__ = ["CopyList", "CopyOp", "Direction", "StepPlan", "copy_list"]

CopyList = np.ndarray
"""[n, 4] int32, C order. Row: host slot, granule in page, block id, granule in block.

A granule is min(page size, block size) tokens, of all layers and heads of a worker.
"""


@dataclass(frozen=True, slots=True)
class CopyOp:
    """One numbered device copy. Numbers of one direction start at 1 and have no gaps."""

    op_id: int
    copies: CopyList


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
