"""Read and write rates of the file backend beside a plain parallel preadv/pwrite loop.

    python -P benchmarks/file_storage.py FOLDER [--object-kib 1024] [--objects 512]

Prints one line per way: GB/s through the page cache and CPU seconds per GB, each the best of
several rounds that take turns. On a busy machine only the CPU time means something.
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
from typing import TYPE_CHECKING, NamedTuple

from vllm_hicache.keys import shard_name
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.storage import (
    HEADER_BYTES,
    FetchOutcome,
    ObjectRead,
    ObjectWrite,
    ReadOutcome,
    ShardObject,
    WriteOutcome,
)
from vllm_hicache.storage_backends.envelope import CheckedStorage
from vllm_hicache.storage_backends.file import FileBackend

if TYPE_CHECKING:
    from collections.abc import Callable

NAMESPACE = "hc1-0123456789abcdef"
READ_THREADS, WRITE_THREADS = 16, 8


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="is made for this run and removed")
    parser.add_argument("--object-kib", type=int, default=1024)
    parser.add_argument("--objects", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4, help="objects in one call")
    parser.add_argument("--calls", type=int, default=16, help="calls at once")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    num_bytes = options.object_kib * 1024
    pool = memoryview(bytearray(os.urandom(1 << 20) * (options.objects * num_bytes >> 20)))
    payloads = [pool[i * num_bytes : (i + 1) * num_bytes] for i in range(options.objects)]
    best: dict[str, Cost] = {}
    for number in range(options.rounds):
        folder = options.folder / f"round-{number}"
        for name, cost in _round(options, folder, payloads).items():
            best[name] = cost.at_best(best.get(name, cost))
    # Not before: ext4 searches long for an inode where many were freed in the last minute.
    shutil.rmtree(options.folder)
    print(f"{os.cpu_count()} cores, {options.objects} objects of {options.object_kib} KiB")
    size_gb = len(pool) / 1e9
    for name, cost in best.items():
        rate, cpu = size_gb / cost.wall_s, cost.cpu_s / size_gb
        print(f"{name:24s}{rate:8.2f} GB/s {cpu:8.2f} CPU s/GB")


class Cost(NamedTuple):
    """What one pass over all objects took; as a mark, the time at which it starts."""

    wall_s: float
    cpu_s: float

    @classmethod
    def mark(cls) -> Cost:
        return cls(time.perf_counter(), time.process_time())

    def since(self, mark: Cost) -> Cost:
        return Cost(self.wall_s - mark.wall_s, self.cpu_s - mark.cpu_s)

    def at_best(self, other: Cost) -> Cost:
        return Cost(min(self.wall_s, other.wall_s), min(self.cpu_s, other.cpu_s))


def _round(
    options: argparse.Namespace, folder: Path, payloads: list[memoryview]
) -> dict[str, Cost]:
    costs = {}
    plain = folder / "plain"
    plain.mkdir(parents=True)
    costs["plain write"] = _plain(lambda i: _write(plain, i, payloads[i]), payloads, WRITE_THREADS)
    costs["plain read"] = _plain(lambda i: _read(plain, i, payloads[i]), payloads, READ_THREADS)
    for label, is_checked in (("backend", False), ("backend, checked", True)):
        store = folder / label
        written, read = asyncio.run(_backend(options, store, payloads, is_checked=is_checked))
        costs |= {f"{label} write": written, f"{label} read": read}
    return costs


def _plain(work: Callable[[int], None], payloads: list[memoryview], num_threads: int) -> Cost:
    with ThreadPoolExecutor(num_threads) as threads:
        started = Cost.mark()
        list(threads.map(work, range(len(payloads))))
        return Cost.mark().since(started)


def _write(folder: Path, number: int, payload: memoryview) -> None:
    fd = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT, 0o600)
    os.pwritev(fd, [bytes(HEADER_BYTES), payload], 0)
    os.close(fd)


def _read(folder: Path, number: int, payload: memoryview) -> None:
    fd = os.open(folder / str(number), os.O_RDONLY)
    os.preadv(fd, [bytearray(HEADER_BYTES), payload], 0)
    os.close(fd)


async def _backend(
    options: argparse.Namespace, folder: Path, payloads: list[memoryview], *, is_checked: bool
) -> tuple[Cost, Cost]:
    backend = FileBackend(
        folder, capacity_bytes=1 << 50, read_threads=READ_THREADS, write_threads=WRITE_THREADS
    )
    storage = CheckedStorage(backend)
    await storage.open()
    items = [_item(number, payload) for number, payload in enumerate(payloads)]
    batches = [items[i : i + options.batch] for i in range(0, len(items), options.batch)]
    limit = asyncio.Semaphore(options.calls)
    header = memoryview(bytearray(HEADER_BYTES))

    async def persist(batch: list[ShardObject]) -> None:
        async with limit:
            if is_checked:
                outcomes = await storage.persist(batch)
            else:
                outcomes = await backend.write(
                    [ObjectWrite(item.name, header, item.payload) for item in batch]
                )
        if set(outcomes) != {WriteOutcome.STORED}:
            raise SystemExit(f"writes gave {outcomes}")

    async def fetch(batch: list[ShardObject]) -> None:
        async with limit:
            if is_checked:
                good = set(await storage.fetch(batch)) == {FetchOutcome.OK}
            else:
                reads = [ObjectRead(item.name, header, item.payload) for item in batch]
                good = set(await backend.read(reads)) == {ReadOutcome.OK}
        if not good:
            raise SystemExit("a read failed")

    started = Cost.mark()
    await asyncio.gather(*(persist(batch) for batch in batches))
    written = Cost.mark()
    await asyncio.gather(*(fetch(batch) for batch in batches))
    read = Cost.mark()
    await storage.close()
    return written.since(started), read.since(written)


def _item(number: int, payload: memoryview) -> ShardObject:
    page_hash = sha256(str(number).encode()).digest()
    shard = Shard(LayerSpan(0, 8), 0, 0, payload.nbytes)
    name = shard_name(page_hash, NAMESPACE, shard)
    return ShardObject(name, NAMESPACE, page_hash, shard, payload)


if __name__ == "__main__":
    main()
