"""``hicache bench storage``: a storage backend beside its raw client, on one store.

    hicache bench storage file --url /fast/disk --drop-page-cache --out results/
    hicache bench storage redis [--url URL] [--object-kib 1024 4096]
    hicache bench storage s3 --batch 1

Without a URL, a server of the test extra is started for the run, and files go to a temporary
folder. Ways take turns in every round. The table has each way's best round in MiB/s, the client's
and the server's CPU time for each MiB, and the rate against the raw client: the median over
rounds, as neighbours in time share the load of the machine. Values lie in a pool that stands for
the host pool.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_hicache.benchmarks import storage_s3
from vllm_hicache.benchmarks.bench_report import not_measured_lines, write_plot
from vllm_hicache.benchmarks.command import parser_of, run_benchmark
from vllm_hicache.benchmarks.run_record import describe, run_record, table, write_json
from vllm_hicache.benchmarks.storage_file import file_service
from vllm_hicache.benchmarks.storage_redis import redis_service
from vllm_hicache.benchmarks.storage_service import RawClient, Service, cpu_s
from vllm_hicache.errors import ConfigError
from vllm_hicache.keys import shard_name
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.storage import (
    HEADER_BYTES,
    FetchOutcome,
    ObjectRead,
    ObjectWrite,
    ReadOutcome,
    ShardObject,
    StorageBackend,
    WriteOutcome,
)
from vllm_hicache.storage_backends.envelope import CheckedStorage

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    Work = Callable[[Sequence[ShardObject]], Awaitable[Sequence[object]]]

NAME = "storage"
NAMESPACE = "hc1-0123456789abcdef"
MIB = 1 << 20
_SETTLE_S = 0.1  # a server may free what was deleted in the background


class Cost(NamedTuple):
    """What one pass over all objects took; as a mark, the time at which it starts."""

    wall_s: float
    client_s: float
    server_s: float

    @classmethod
    def mark(cls, service: Service) -> Cost:
        return cls(time.perf_counter(), time.process_time(), service.server_cpu_s())

    def since(self, mark: Cost) -> Cost:
        return Cost(*(now - then for now, then in zip(self, mark, strict=True)))


@asynccontextmanager
async def s3_service(options: argparse.Namespace) -> AsyncIterator[Service]:
    """SeaweedFS, raw by aiobotocore, and by obstore where it is installed."""
    async with storage_s3.connected(options.url, options.calls * options.batch) as parts:
        backends, raw, pid = parts
        backend = backends.pop("aiobotocore")
        yield Service(backend, raw, lambda: cpu_s(pid) if pid else 0.0, more=backends)


SERVICES: dict[str, Callable[[argparse.Namespace], AbstractAsyncContextManager[Service]]] = {
    "file": lambda options: file_service(
        options.url, options.calls * options.batch, drops_page_cache=options.drop_page_cache
    ),
    "redis": lambda options: redis_service(options.url, options.calls),
    "s3": s3_service,
}


class Workload:
    """Objects of one size in a pool, and the ways to write and read them."""

    def __init__(self, service: Service, options: argparse.Namespace, num_bytes: int) -> None:
        self._service = service
        self._options = options
        num_objects = max(1, options.total_mib * MIB // num_bytes)
        self.total_bytes = num_objects * num_bytes
        self._pool = memoryview(bytearray(os.urandom(MIB) * -(-self.total_bytes // MIB)))
        self._items = [
            _item(number, self._pool[number * num_bytes : (number + 1) * num_bytes])
            for number in range(num_objects)
        ]
        self._header = memoryview(bytearray(HEADER_BYTES))

    async def round(self) -> dict[tuple[str, str], Cost]:
        """Cost by (way, "write" or "read"); every way starts with an empty store."""
        costs = {}
        for name, raw in self._service.raw.items():
            await self._empty()
            values = [bytes(self._header) + bytes(item.payload) for item in self._items]
            puts = [lambda i=i, raw=raw, v=values: self._put(raw, i, v[i]) for i in self._numbers]
            costs[name, "write"] = await self._timed(puts)
            values.clear()
            self._before_reads()
            gets = [lambda i=i, raw=raw: self._get(raw, i) for i in self._numbers]
            costs[name, "read"] = await self._timed(gets)
        batches = [
            self._items[i : i + self._options.batch]
            for i in range(0, len(self._items), self._options.batch)
        ]
        for name, write, read in self._backend_ways():
            await self._empty()
            for what, work, good in (
                ("write", write, WriteOutcome.STORED),
                ("read", read, FetchOutcome.OK),
            ):
                if what == "read":
                    self._before_reads()
                calls = [lambda b=b, w=work, g=good: _expect(w, b, g) for b in batches]
                costs[name, what] = await self._timed(calls)
        await self._empty()
        return costs

    def _backend_ways(self) -> list[tuple[str, Work, Work]]:
        ways: list[tuple[str, Work, Work]] = []
        for client, backend in {"": self._service.backend, **self._service.more}.items():
            name = f"backend with {client}" if client else "backend"
            checked = CheckedStorage(backend)
            ways += [
                (name, partial(self._write, backend), partial(self._read, backend)),
                (f"{name}, checked", checked.persist, checked.fetch),
            ]
        return ways

    async def _empty(self) -> None:
        await self._service.backend.delete([item.name for item in self._items])
        if self._service.empty:
            await self._service.empty()
        await asyncio.sleep(_SETTLE_S)

    def _before_reads(self) -> None:
        if self._service.before_reads:
            self._service.before_reads()

    @property
    def _numbers(self) -> range:
        return range(len(self._items))

    async def _timed(self, calls: Sequence[Callable[[], Awaitable[None]]]) -> Cost:
        limit = asyncio.Semaphore(self._options.calls)

        async def bounded(call: Callable[[], Awaitable[None]]) -> None:
            async with limit:
                await call()

        started = Cost.mark(self._service)
        await asyncio.gather(*(bounded(call) for call in calls))
        return Cost.mark(self._service).since(started)

    async def _put(self, raw: RawClient, number: int, value: bytes) -> None:
        await raw.put(f"raw-{number}", value)

    async def _get(self, raw: RawClient, number: int) -> None:
        await raw.get(f"raw-{number}", self._items[number].payload)

    async def _write(
        self, backend: StorageBackend, items: Sequence[ShardObject]
    ) -> list[WriteOutcome]:
        writes = [ObjectWrite(item.name, self._header, item.payload) for item in items]
        return await backend.write(writes)

    async def _read(
        self, backend: StorageBackend, items: Sequence[ShardObject]
    ) -> list[FetchOutcome]:
        header = memoryview(bytearray(HEADER_BYTES))
        reads = [ObjectRead(item.name, header, item.payload) for item in items]
        outcomes = await backend.read(reads)
        return [FetchOutcome.OK if o is ReadOutcome.OK else FetchOutcome.MISSING for o in outcomes]


async def _expect(work: Work, items: Sequence[ShardObject], good: object) -> None:
    outcomes = await work(items)
    if set(outcomes) != {good}:
        raise SystemExit(f"{work} gave {outcomes}")


def _item(number: int, payload: memoryview) -> ShardObject:
    page_hash = number.to_bytes(32, "big")
    shard = Shard(LayerSpan(0, 8), 0, 0, payload.nbytes)
    name = shard_name(page_hash, NAMESPACE, shard)
    return ShardObject(name, NAMESPACE, page_hash, shard, payload)


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One line for each size, direction and way."""
    lines: list[dict[str, Any]] = []
    async with SERVICES[options.service](options) as service:
        for object_kib in options.object_kib:
            load = Workload(service, options, object_kib * 1024)
            rounds = [await load.round() for _ in range(options.rounds + 1)][1:]  # one to warm up
            lines += _lines(rounds, load.total_bytes / MIB, object_kib, next(iter(service.raw)))
    return lines


def _lines(
    rounds: list[dict[tuple[str, str], Cost]], size_mib: float, object_kib: int, baseline: str
) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for direction in ("write", "read"):
        for way in [way for way, what in rounds[0] if what == direction]:
            costs = [found[way, direction] for found in rounds]
            ratios = [
                found[baseline, direction].wall_s / found[way, direction].wall_s for found in rounds
            ]
            lines.append(
                {
                    "object_kib": object_kib,
                    "direction": direction,
                    "way": way,
                    "mib_per_s": size_mib / min(cost.wall_s for cost in costs),
                    "client_ms_per_mib": 1e3 * min(cost.client_s for cost in costs) / size_mib,
                    "server_ms_per_mib": 1e3 * min(cost.server_s for cost in costs) / size_mib,
                    "of_raw": statistics.median(ratios),
                }
            )
    return lines


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which service, and the sizes of objects and calls."""
    add = parser.add_argument
    add("service", choices=SERVICES)
    add("--url", help="of a server that runs already; its objects are removed; for files, a folder")
    add("--object-kib", type=int, nargs="+", default=[1024, 4096])
    add("--total-mib", type=int, default=128, help="bytes of all objects")
    add("--batch", type=int, default=2, help="objects in one call of the backend")
    add("--calls", type=int, default=4, help="calls at once")
    add("--rounds", type=int, default=5)
    add("--drop-page-cache", action="store_true", help="read files from the disk itself")
    add("--json", type=Path, help="file for the record")
    add("--out", type=Path, help="folder for storage-SERVICE.json and storage-SERVICE.png")
    add("--dry-run", action="store_true", help="print what would run")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """What a command line says."""
    return parser_of(NAME).parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    if options.drop_page_cache and options.service != "file":
        raise ConfigError(f"--drop-page-cache is for files, not for {options.service}")
    name = f"storage-{options.service}"
    if options.dry_run:
        print(json.dumps(vars(options), indent=1, default=str))
        return 0
    lines = asyncio.run(measure(options))
    others = sorted(SERVICES.keys() - {options.service})
    not_measured = dict.fromkeys(others, "each is a run of its own")
    record = run_record() | {"benchmark": name, "lines": lines, "not_measured": not_measured}
    print(describe(record))
    print(report(lines))
    print(not_measured_lines(not_measured))
    if options.json:
        write_json(options.json, record)
    if options.out:
        write_json(options.out / f"{name}.json", record)
        write_plot(options.out / f"{name}.png", record, plot)
    return 0


def report(lines: list[dict[str, Any]]) -> str:
    """One row for each size, direction and way."""
    header = ("way", "KiB", "MiB/s", "client ms/MiB", "server ms/MiB", "of raw")
    rows = [
        (
            f"{line['direction']} {line['way']}",
            f"{line['object_kib']}",
            f"{line['mib_per_s']:.0f}",
            f"{line['client_ms_per_mib']:.2f}",
            f"{line['server_ms_per_mib']:.2f}",
            f"{line['of_raw']:.0%}",
        )
        for line in lines
    ]
    return table(header, rows)


def plot(path: Path, record: dict[str, Any]) -> None:
    """Draw a record."""
    from vllm_hicache.benchmarks.storage_plot import plot_storage

    plot_storage(path, record)


if __name__ == "__main__":
    sys.exit(run_benchmark(NAME, sys.argv[1:]))
