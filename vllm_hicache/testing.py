"""Storage backends to test with: one in memory, and one that fails, delays and hangs on demand.

Faults come from a file, so that a test steers a backend that lives in another process.
"""

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

import msgspec

from vllm_hicache.config import StorageConfig
from vllm_hicache.errors import BackendUnavailable, ConfigError
from vllm_hicache.storage import (
    MAX_RECORDS,
    ObjectRead,
    ObjectWrite,
    ReadOutcome,
    StorageBackend,
    WriteOutcome,
)

_T = TypeVar("_T")
# How often a hanging call looks whether its fault has been lifted.
_POLL_S = 0.01


class MemoryBackend:
    """Objects in this process's memory; full beyond ``capacity_objects``."""

    name = "memory"

    def __init__(self, capacity_objects: int | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self.records: dict[str, bytes] = {}
        self._capacity_objects = capacity_objects
        self._totals = dict.fromkeys(
            (
                "objects_read",
                "objects_written",
                "objects_deleted",
                "bytes_read",
                "bytes_written",
                "read_seconds",
                "write_seconds",
            ),
            0.0,
        )

    @classmethod
    def from_url(cls, url: str, config: StorageConfig) -> Self:
        """The backend of any URL; ``config`` says nothing about it."""
        del url, config
        return cls()

    async def open(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do; the objects stay."""

    async def contains(self, names: Sequence[str]) -> list[bool]:
        """As ``StorageBackend.contains``."""
        return [name in self.objects for name in names]

    async def read(self, reads: Sequence[ObjectRead]) -> list[ReadOutcome]:
        """As ``StorageBackend.read``."""
        return [self._read_one(read) for read in reads]

    def _read_one(self, read: ObjectRead) -> ReadOutcome:
        stored = self.objects.get(read.name)
        if stored is None:
            return ReadOutcome.MISSING
        num_header = read.header.nbytes
        if len(stored) != num_header + read.payload.nbytes:
            return ReadOutcome.BAD_LENGTH
        read.header[:] = stored[:num_header]
        read.payload[:] = stored[num_header:]
        self._totals["objects_read"] += 1
        self._totals["bytes_read"] += len(stored)
        return ReadOutcome.OK

    async def write(self, writes: Sequence[ObjectWrite]) -> list[WriteOutcome]:
        """As ``StorageBackend.write``."""
        return [self._write_one(write) for write in writes]

    def _write_one(self, write: ObjectWrite) -> WriteOutcome:
        data = bytes(write.header) + bytes(write.payload)
        if len(self.objects.get(write.name, b"")) == len(data):
            return WriteOutcome.EXISTS
        if self._capacity_objects is not None and len(self.objects) >= self._capacity_objects:
            return WriteOutcome.FULL
        self.objects[write.name] = data
        self._totals["objects_written"] += 1
        self._totals["bytes_written"] += len(data)
        return WriteOutcome.STORED

    async def delete(self, names: Sequence[str]) -> int:
        """As ``StorageBackend.delete``."""
        found = [name for name in names if self.objects.pop(name, None) is not None]
        self._totals["objects_deleted"] += len(found)
        return len(found)

    async def clear(self, namespace: str) -> int:
        """As ``StorageBackend.clear``."""
        self.records.pop(namespace, None)
        return await self.delete([name for name in self.objects if f"_{namespace}_" in name])

    async def write_record(self, namespace: str, record: bytes) -> WriteOutcome:
        """As ``KeepsRecords.write_record``."""
        was_there = self.records.pop(namespace, None) is not None
        self.records[namespace] = record
        while len(self.records) > MAX_RECORDS:
            del self.records[next(iter(self.records))]
        return WriteOutcome.EXISTS if was_there else WriteOutcome.STORED

    async def read_records(self) -> dict[str, bytes]:
        """As ``KeepsRecords.read_records``."""
        return dict(self.records)

    def stats(self) -> Mapping[str, float]:
        """As ``StorageBackend.stats``."""
        return dict(self._totals)

    def oldest_running_s(self) -> float:
        """Always 0.0: no call takes time."""
        return 0.0


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happens to calls of one kind that name an object with ``name`` in its name."""

    operation: str = ""  # open, contains, read, write, delete or clear; empty for every one
    name: str = ""
    chance: float = 1.0
    """Part of the calls that meet it; each backend draws for itself."""
    delay_s: float = 0.0
    jitter_s: float = 0.0
    """A random part of this comes on top of ``delay_s``."""
    fails: bool = False
    hangs: bool = False
    """A thread hangs until this fault is lifted; cancelling the call does not help."""

    def strikes(self, operation: str, names: Sequence[str]) -> bool:
        """Whether a call meets this fault."""
        return self.operation in ("", operation) and (
            not self.name or any(self.name in name for name in names)
        )


class Faults(Protocol):
    """Where a ``FaultyBackend`` looks what is wrong now."""

    def present(self) -> Sequence[Fault]:
        """All faults in force. Called from several threads."""


class FaultList:
    """Faults of a backend in this process: assign ``faults`` to change them."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults

    def present(self) -> Sequence[Fault]:
        """The faults last assigned."""
        return self.faults


class FaultFile:
    """Faults in a file that another process changes with ``write``. No file, no faults."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, *faults: Fault) -> None:
        """Replace all faults at once."""
        fresh = self.path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(faults))
        fresh.rename(self.path)

    def present(self) -> Sequence[Fault]:
        """The faults last written."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=tuple[Fault, ...])
        except FileNotFoundError:
            return ()


class FaultyBackend:
    """Another backend with faults. Hanging calls hold a real thread that nothing can end."""

    name = "faulty"

    def __init__(self, inner: StorageBackend, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._running: dict[int, float] = {}
        self._num_calls = 0
        self._random = random.Random()

    @classmethod
    def from_url(cls, url: str, config: StorageConfig) -> Self:
        """``...?inner=URL&faults=/PATH``: the backend at ``inner`` with the faults of a file."""
        from vllm_hicache.storage_backends.registry import open_backend

        query = parse_qs(urlsplit(url).query)
        if query.keys() != {"inner", "faults"}:
            raise ConfigError("a faulty backend needs ?inner=URL&faults=/PATH")
        return cls(open_backend(query["inner"][0], config), FaultFile(Path(query["faults"][0])))

    async def open(self) -> None:
        """As ``StorageBackend.open``."""
        await self._run("open", (), self._inner.open)

    async def close(self) -> None:
        """As ``StorageBackend.close``."""
        await self._inner.close()

    async def contains(self, names: Sequence[str]) -> list[bool]:
        """As ``StorageBackend.contains``."""
        return await self._run("contains", names, lambda: self._inner.contains(names))

    async def read(self, reads: Sequence[ObjectRead]) -> list[ReadOutcome]:
        """As ``StorageBackend.read``."""
        names = [read.name for read in reads]
        return await self._run("read", names, lambda: self._inner.read(reads))

    async def write(self, writes: Sequence[ObjectWrite]) -> list[WriteOutcome]:
        """As ``StorageBackend.write``."""
        names = [write.name for write in writes]
        return await self._run("write", names, lambda: self._inner.write(writes))

    async def delete(self, names: Sequence[str]) -> int:
        """As ``StorageBackend.delete``."""
        return await self._run("delete", names, lambda: self._inner.delete(names))

    async def clear(self, namespace: str) -> int:
        """As ``StorageBackend.clear``."""
        return await self._run("clear", [namespace], lambda: self._inner.clear(namespace))

    def stats(self) -> Mapping[str, float]:
        """As ``StorageBackend.stats``."""
        return self._inner.stats()

    def oldest_running_s(self) -> float:
        """As ``StorageBackend.oldest_running_s``."""
        oldest = min(self._running.values(), default=time.monotonic())
        return max(time.monotonic() - oldest, self._inner.oldest_running_s())

    @property
    def num_running(self) -> int:
        """Calls that have not returned, hanging ones included."""
        return len(self._running)

    async def _run(
        self, operation: str, names: Sequence[str], call: Callable[[], Awaitable[_T]]
    ) -> _T:
        self._num_calls += 1
        number = self._num_calls
        self._running[number] = time.monotonic()
        try:
            for fault in self._faults.present():
                if fault.strikes(operation, names) and self._random.random() < fault.chance:
                    await self._suffer(fault, operation, names)
            return await call()
        finally:
            del self._running[number]

    async def _suffer(self, fault: Fault, operation: str, names: Sequence[str]) -> None:
        await asyncio.sleep(fault.delay_s + self._random.random() * fault.jitter_s)
        if fault.hangs:
            await self._hang(fault)
        if fault.fails:
            raise BackendUnavailable(
                "told to fail",
                backend=self.name,
                operation=operation,
                key=names[0] if names else "",
            )

    async def _hang(self, fault: Fault) -> None:
        """Return, or pass a cancellation on, only when the thread has ended."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def hang() -> None:
            while fault in self._faults.present():
                time.sleep(_POLL_S)
            loop.call_soon_threadsafe(ended.set_result, None)

        # Not a daemon: the worst case for whoever wants to end the process.
        threading.Thread(target=hang, name="hicache-hang").start()
        is_cancelled = False
        while not ended.done():
            try:
                await asyncio.wait({ended})
            except asyncio.CancelledError:
                is_cancelled = True
        if is_cancelled:
            raise asyncio.CancelledError
