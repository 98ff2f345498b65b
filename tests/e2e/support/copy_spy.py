"""Stands between the copy engine and the page copier: records, slows, corrupts and fails copies."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_hicache.kernels.reference import PoolsCopier
from vllm_hicache.plan import Direction

Copies = Sequence[np.ndarray]
"""One copy list for each KV cache group."""
Regions = Sequence[torch.Tensor]
"""One region of host slots for each pool."""


@dataclass
class CopySpy:
    """What happens to copies of this process from now on. Attributes may be changed at any time."""

    records: list[tuple[Direction, np.ndarray]] = field(default_factory=list)
    """Every copy list of the first KV cache group, in order of execution."""
    delay_s: dict[Direction, float] = field(default_factory=dict)
    flips_loads: bool = False
    """Loads bring the numbers with the wrong sign."""
    num_to_fail: dict[Direction, int] = field(default_factory=dict)
    """So many of the next copies raise, after they have written garbage."""
    gates: dict[Direction, threading.Event] = field(
        default_factory=lambda: {direction: threading.Event() for direction in Direction}
    )
    """Copies of a direction wait while its gate is clear."""

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        for gate in self.gates.values():
            gate.set()

    def close(self, direction: Direction) -> None:
        self.gates[direction].clear()

    def forget(self) -> None:
        """As if nothing had been told or seen."""
        self.open()
        self.records.clear()
        self.delay_s.clear()
        self.num_to_fail.clear()
        self.flips_loads = False

    def copied(self, direction: Direction) -> list[np.ndarray]:
        return [rows for way, rows in self.records if way is direction]

    def before(self, direction: Direction, rows: np.ndarray) -> bool:
        """Wait as told; whether this copy shall fail."""
        self.records.append((direction, rows.copy()))
        self.gates[direction].wait()
        time.sleep(self.delay_s.get(direction, 0.0))
        left = self.num_to_fail.get(direction, 0)
        self.num_to_fail[direction] = max(0, left - 1)
        return left > 0


@contextmanager
def spying() -> Iterator[CopySpy]:
    """Engines that start inside are spied upon."""
    spy = CopySpy()
    load, save = PoolsCopier.load, PoolsCopier.save

    def spied_load(copier: PoolsCopier, copies: Copies, host: Regions) -> None:
        fails = spy.before(Direction.LOAD, copies[0])
        (flipped if spy.flips_loads or fails else load)(copier, copies, host)
        if fails:
            raise OSError("told to fail")

    def spied_save(copier: PoolsCopier, copies: Copies, host: Regions) -> None:
        if spy.before(Direction.SAVE, copies[0]):
            raise OSError("told to fail")
        save(copier, copies, host)

    def flipped(copier: PoolsCopier, copies: Copies, host: Regions) -> None:
        load(copier, *with_flipped_signs(copies, host))

    PoolsCopier.load, PoolsCopier.save = spied_load, spied_save
    try:
        yield spy
    finally:
        spy.open()
        PoolsCopier.load, PoolsCopier.save = load, save


def with_flipped_signs(
    copies: Copies, host: Regions
) -> tuple[tuple[np.ndarray, ...], tuple[torch.Tensor, ...]]:
    """The same copies out of pools with only their slots, every float32 negated."""
    slots = np.unique(np.concatenate([rows[:, 0] for rows in copies]))
    taken = torch.from_numpy(slots.astype(np.int64))
    pools = tuple(region[taken].clone() for region in host)
    for pool in pools:
        pool.view(torch.float32).neg_()
    moved = tuple(rows.copy() for rows in copies)
    for rows in moved:
        rows[:, 0] = np.searchsorted(slots, rows[:, 0])
    return moved, pools
