"""Read and write rates of the file backend beside a plain parallel preadv/pwrite loop.

    python -P benchmarks/file_storage.py FOLDER [--object-kib 1024] [--objects 512]

Prints one line per way: GB/s through the page cache, best of several rounds that take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_hicache.keys import shard_name
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.storage import HEADER_BYTES, FetchOutcome, ShardObject, WriteOutcome
from vllm_hicache.storage_backends.envelope import CheckedStorage
from vllm_hicache.storage_backends.file import FileBackend

if TYPE_CHECKING:
    from collections.abc import Callable

NAMESPACE = "hc1-0123456789abcdef"
READ_THREADS, WRITE_THREADS = 16, 8


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--object-kib", type=int, default=1024)
    parser.add_argument("--objects", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4, help="objects in one call")
    parser.add_argument("--calls", type=int, default=16, help="calls at once")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    num_bytes = options.object_kib * 1024
    pool = memoryview(bytearray(os.urandom(1 << 20) * (options.objects * num_bytes >> 20)))
    payloads = [pool[i * num_bytes : (i + 1) * num_bytes] for i in range(options.objects)]
    best: dict[str, float] = {}
    for _ in range(options.rounds):
        for name, seconds in _round(options, payloads).items():
            best[name] = min(best.get(name, seconds), seconds)
    print(f"{os.cpu_count()} cores, {options.objects} objects of {options.object_kib} KiB")
    for name, seconds in best.items():
        print(f"{name:24s}{len(pool) / seconds / 1e9:8.2f} GB/s")


def _round(options: argparse.Namespace, payloads: list[memoryview]) -> dict[str, float]:
    seconds = {}
    plain, store = options.folder / "plain", options.folder / "store"
    for folder in (plain, store):
        shutil.rmtree(folder, ignore_errors=True)
    plain.mkdir(parents=True)
    seconds["plain write"] = _plain(
        lambda i: _write(plain, i, payloads[i]), payloads, WRITE_THREADS
    )
    seconds["plain read"] = _plain(lambda i: _read(plain, i, payloads[i]), payloads, READ_THREADS)
    seconds["backend write+checksum"], seconds["backend read+checksum"] = asyncio.run(
        _backend(options, store, payloads)
    )
    return seconds


def _plain(work: Callable[[int], None], payloads: list[memoryview], num_threads: int) -> float:
    with ThreadPoolExecutor(num_threads) as threads:
        started = time.perf_counter()
        list(threads.map(work, range(len(payloads))))
        return time.perf_counter() - started


def _write(folder: Path, number: int, payload: memoryview) -> None:
    fd = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT, 0o600)
    os.pwritev(fd, [bytes(HEADER_BYTES), payload], 0)
    os.close(fd)


def _read(folder: Path, number: int, payload: memoryview) -> None:
    fd = os.open(folder / str(number), os.O_RDONLY)
    os.preadv(fd, [bytearray(HEADER_BYTES), payload], 0)
    os.close(fd)


async def _backend(
    options: argparse.Namespace, folder: Path, payloads: list[memoryview]
) -> tuple[float, float]:
    storage = CheckedStorage(
        FileBackend(
            folder,
            capacity_bytes=1 << 50,
            read_threads=READ_THREADS,
            write_threads=WRITE_THREADS,
        )
    )
    await storage.open()
    items = [_item(number, payload) for number, payload in enumerate(payloads)]
    batches = [items[i : i + options.batch] for i in range(0, len(items), options.batch)]
    limit = asyncio.Semaphore(options.calls)

    async def persist(batch: list[ShardObject]) -> None:
        async with limit:
            outcomes = await storage.persist(batch)
        if set(outcomes) != {WriteOutcome.STORED}:
            raise SystemExit(f"writes gave {outcomes}")

    async def fetch(batch: list[ShardObject]) -> None:
        async with limit:
            outcomes = await storage.fetch(batch)
        if set(outcomes) != {FetchOutcome.OK}:
            raise SystemExit(f"reads gave {outcomes}")

    started = time.perf_counter()
    await asyncio.gather(*(persist(batch) for batch in batches))
    written = time.perf_counter()
    await asyncio.gather(*(fetch(batch) for batch in batches))
    read = time.perf_counter()
    await storage.close()
    return written - started, read - written


def _item(number: int, payload: memoryview) -> ShardObject:
    page_hash = sha256(str(number).encode()).digest()
    shard = Shard(LayerSpan(0, 8), 0, 0, payload.nbytes)
    name = shard_name(page_hash, NAMESPACE, shard)
    return ShardObject(name, NAMESPACE, page_hash, shard, payload)


if __name__ == "__main__":
    main()
