"""What the machine itself can do: pinned copies to the device, plain reads of the stored files."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np

from vllm_hicache.benchmarks.page_cache import drop_page_cache

COPY_BYTES = 1 << 30
READ_BYTES = 8 << 30
"""Files are read up to about so much."""
_POOL_BYTES = 1 << 30
_THREADS = 16
"""As many as read the connector's files."""
_ROUNDS = 5


def pinned_copy_gb_per_s() -> float | None:
    """The best of several copies of 1 GiB from pinned memory; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return COPY_BYTES / min(seconds) / 1e9


def file_read_gb_per_s(folder: Path, *, drops_page_cache: bool) -> float | None:
    """All threads read whole files into memory that is mapped already; None without files.

    Files that are in the page cache come from there, unless it is dropped before.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    chosen = list(islice(paths, _count_within(paths, READ_BYTES)))
    if not chosen:
        return None
    if drops_page_cache:
        drop_page_cache(folder)
    largest = max(path.stat().st_size for path in chosen)
    shares = [chosen[i::_THREADS] for i in range(min(_THREADS, len(chosen)))]
    size = max(largest, _POOL_BYTES // _THREADS)
    pools = [np.full(size, 1, np.uint8).data for _ in shares]
    with ThreadPoolExecutor(_THREADS) as threads:
        started = time.perf_counter()
        num_bytes = sum(threads.map(_read_files, shares, pools))
        seconds = time.perf_counter() - started
    return num_bytes / seconds / 1e9


def _count_within(paths: list[Path], limit: int) -> int:
    total = 0
    for number, path in enumerate(paths):
        total += path.stat().st_size
        if total > limit:
            return max(1, number)
    return len(paths)


def _read_files(paths: list[Path], pool: memoryview) -> int:
    """Read one after another to successive places of the pool."""
    total = place = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            place = place if place + size <= len(pool) else 0
            num_bytes = os.preadv(fd, [pool[place : place + size]], 0)
        finally:
            os.close(fd)
        total += num_bytes
        place += num_bytes
    return total
