"""A backend out of a few blocking calls, each about one object: the short way to one's own.

A subclass says how one object is read, stored and removed. Threads, cancellation, totals and the
two buffers of each object are dealt with here, at the price of one copy each way.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar
from urllib.parse import parse_qsl, urlsplit

from vllm_hicache.errors import BackendUnavailable
from vllm_hicache.storage import ReadOutcome, WriteOutcome
from vllm_hicache.storage_backends.counters import Counters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vllm_hicache.config import StorageConfig
    from vllm_hicache.storage import ObjectRead, ObjectWrite

_T = TypeVar("_T")
_TOTALS = (
    "objects_read",
    "objects_written",
    "objects_deleted",
    "bytes_read",
    "bytes_written",
    "read_seconds",
    "write_seconds",
)


class BlockingBackend(ABC):
    """Override `connect`, `length`, `get`, `put`, `remove` and `names`; all run in one thread."""

    name = "blocking"
    errors: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    """What these calls raise when the store cannot be reached or does not answer."""

    def __init__(self, url: str) -> None:
        self.query = dict(parse_qsl(urlsplit(url).query))
        """What stands behind the question mark of the storage URL."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self.name)
        self._counters = Counters(_TOTALS)
        self._lock = threading.Lock()
        self._running_since: float | None = None
        self._is_connected = False

    @classmethod
    def from_url(cls, url: str, config: StorageConfig) -> Self:
        """The backend of a URL; ``config`` says nothing that it could use."""
        del config
        return cls(url)

    # What a subclass says -------------------------------------------------------------------------

    @abstractmethod
    def connect(self) -> None:
        """Make the store ready for the calls below, here or in any other process."""

    def disconnect(self) -> None:  # noqa: B027 (a store may have nothing to let go of)
        """Let go of what `connect` took."""

    @abstractmethod
    def length(self, name: str) -> int | None:
        """Bytes of the object of this name; None without one."""

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """The whole object; None without one."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> bool:
        """Store or replace an object so that all of it is seen or nothing; False without room."""

    @abstractmethod
    def remove(self, name: str) -> bool:
        """Remove an object; False without one."""

    @abstractmethod
    def names(self, part: str) -> Iterable[str]:
        """Names of all objects that have this part in their name."""

    # What every backend promises ------------------------------------------------------------------

    async def open(self) -> None:
        """As `StorageBackend.open`."""
        await self._run(self.connect)
        self._is_connected = True

    async def close(self) -> None:
        """As `StorageBackend.close`."""
        if self._is_connected:
            self._is_connected = False
            await self._run(self.disconnect)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def contains(self, names: Sequence[str]) -> list[bool]:
        """As `StorageBackend.contains`."""
        return await self._run(lambda: [self.length(name) is not None for name in names])

    async def read(self, reads: Sequence[ObjectRead]) -> list[ReadOutcome]:
        """As `StorageBackend.read`. Buffers are filled between two awaits, never by the thread."""
        started = time.perf_counter()
        outcomes = []
        for read in reads:
            data = await self._run(self.get, read.name)
            outcomes.append(_fill(read, data))
            if outcomes[-1] is ReadOutcome.OK and data is not None:
                self._counters.add(objects_read=1, bytes_read=len(data))
        self._counters.add(read_seconds=time.perf_counter() - started)
        return outcomes

    async def write(self, writes: Sequence[ObjectWrite]) -> list[WriteOutcome]:
        """As `StorageBackend.write`. The thread is given copies of the buffers."""
        started = time.perf_counter()
        outcomes = []
        for write in writes:
            data = b"".join((write.header, write.payload))
            outcomes.append(await self._run(self._put_once, write.name, data))
            if outcomes[-1] is WriteOutcome.STORED:
                self._counters.add(objects_written=1, bytes_written=len(data))
        self._counters.add(write_seconds=time.perf_counter() - started)
        return outcomes

    async def delete(self, names: Sequence[str]) -> int:
        """As `StorageBackend.delete`."""
        num_removed = await self._run(lambda: sum(self.remove(name) for name in names))
        self._counters.add(objects_deleted=num_removed)
        return num_removed

    async def clear(self, namespace: str) -> int:
        """As `StorageBackend.clear`."""
        return await self.delete(list(await self._run(self.names, f"_{namespace}_")))

    def stats(self) -> Mapping[str, float]:
        """As `StorageBackend.stats`."""
        return self._counters.snapshot()

    def oldest_running_s(self) -> float:
        """As `StorageBackend.oldest_running_s`."""
        with self._lock:
            since = self._running_since
        return 0.0 if since is None else time.monotonic() - since

    def _put_once(self, name: str, data: bytes) -> WriteOutcome:
        if self.length(name) == len(data):
            return WriteOutcome.EXISTS
        return WriteOutcome.STORED if self.put(name, data) else WriteOutcome.FULL

    async def _run(self, call: Callable[..., _T], *arguments: object) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self._timed, call, *arguments
            )
        except self.errors as error:
            raise BackendUnavailable(str(error), backend=self.name) from error

    def _timed(self, call: Callable[..., _T], *arguments: object) -> _T:
        self._set_running_since(time.monotonic())
        try:
            return call(*arguments)
        finally:
            self._set_running_since(None)

    def _set_running_since(self, since: float | None) -> None:
        with self._lock:
            self._running_since = since


def _fill(read: ObjectRead, data: bytes | None) -> ReadOutcome:
    if data is None:
        return ReadOutcome.MISSING
    num_header = read.header.nbytes
    if len(data) != num_header + read.payload.nbytes:
        return ReadOutcome.BAD_LENGTH
    read.header[:] = data[:num_header]
    read.payload[:] = memoryview(data)[num_header:]
    return ReadOutcome.OK
