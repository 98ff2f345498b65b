"""Stands between the copy engine and the page copier: records, slows, corrupts and fails copies."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_hicache.kernels.reference import PageCopier
from vllm_hicache.plan import Direction


@dataclass
class CopySpy:
    """What happens to copies of this process from now on. Attributes may be changed at any time."""

    records: list[tuple[Direction, np.ndarray]] = field(default_factory=list)
    """Every copy list, in order of execution."""
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
    load, save = PageCopier.load, PageCopier.save

    def spied_load(copier: PageCopier, copy_list: np.ndarray, host: torch.Tensor) -> None:
        fails = spy.before(Direction.LOAD, copy_list)
        (flipped if spy.flips_loads or fails else load)(copier, copy_list, host)
        if fails:
            raise OSError("told to fail")

    def spied_save(copier: PageCopier, copy_list: np.ndarray, host: torch.Tensor) -> None:
        if spy.before(Direction.SAVE, copy_list):
            raise OSError("told to fail")
        save(copier, copy_list, host)

    def flipped(copier: PageCopier, copy_list: np.ndarray, host: torch.Tensor) -> None:
        load(copier, *with_flipped_signs(copy_list, host))

    PageCopier.load, PageCopier.save = spied_load, spied_save
    try:
        yield spy
    finally:
        spy.open()
        PageCopier.load, PageCopier.save = load, save


def with_flipped_signs(
    copy_list: np.ndarray, host: torch.Tensor
) -> tuple[np.ndarray, torch.Tensor]:
    """The same copies out of a pool with only their slots, every float32 negated."""
    slots, places = np.unique(copy_list[:, 0], return_inverse=True)
    pool = host[torch.from_numpy(slots.astype(np.int64))].clone()
    pool.view(torch.float32).neg_()
    rows = copy_list.copy()
    rows[:, 0] = places
    return rows, pool
