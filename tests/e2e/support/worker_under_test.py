"""Worker class of engines under test: that of the examples, which corrupts loads on demand.

Found by name in worker processes through PYTHONPATH; ``HICACHE_`` names belong to the product.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_queues  # noqa: F401 (waiting workers nap)
from copy_spy import Copies, Regions, with_flipped_signs
from cpu_pipeline_worker import Worker

from vllm_hicache.kernels.reference import PoolsCopier

ORIGINAL_LOAD, ORIGINAL_SAVE = PoolsCopier.load, PoolsCopier.save
FLIP_LOADS = "UNDER_TEST_FLIP_LOADS"
DIVERGE = "UNDER_TEST_DIVERGE"
"""Path of a file that tells one worker to do something else; see `diverging_worker`."""
SLOW_COPIES = "UNDER_TEST_SLOW_COPIES"
"""``RANK:SECONDS``: what each copy of that worker takes longer; ``RANK:PATH``: a file says it."""


class WorkerUnderTest(Worker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if os.environ.get(FLIP_LOADS):
            flip_all_loads()
        rank, _, delay = os.environ.get(SLOW_COPIES, "").partition(":")
        if rank == str(self.rank):
            slow_all_copies(delay)
        if os.environ.get(DIVERGE):
            from diverging_worker import diverge_on_demand

            diverge_on_demand(Path(os.environ[DIVERGE]), self.rank)


def flip_all_loads() -> None:
    """From now on every load of this process brings its numbers with the wrong sign."""
    if PoolsCopier.load is ORIGINAL_LOAD:  # twice would be right again
        PoolsCopier.load = load_flipped


def load_flipped(copier: PoolsCopier, copies: Copies, host: Regions) -> None:
    ORIGINAL_LOAD(copier, *with_flipped_signs(copies, host))


def slow_all_copies(delay: str) -> None:
    """From now on every copy of this process starts so much later."""
    path = Path(delay) if delay.startswith("/") else None

    def late(copy: Callable[..., None]) -> Callable[..., None]:
        def copy_late(*args: Any, **kwargs: Any) -> None:
            time.sleep(float(path.read_text() if path is not None else delay))
            copy(*args, **kwargs)

        return copy_late

    PoolsCopier.load, PoolsCopier.save = late(ORIGINAL_LOAD), late(ORIGINAL_SAVE)
