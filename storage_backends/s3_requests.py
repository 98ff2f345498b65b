"""What S3 requests share: places for so many at once, and the bytes that one of them uploads."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Sequence
    from typing import Any

T = TypeVar("T")

_PIECE_BYTES = 256 * 1024


class Places:
    """Room for `limit` requests at once. After `hung_after_s`, one gives its place to others.

    At most `limit` places are given away at once, so that hung requests stay bounded too.
    """

    def __init__(self, limit: int, *, hung_after_s: float) -> None:
        self._limit = limit
        self._hung_after_s = hung_after_s
        self._free = asyncio.Semaphore(limit)
        self._given_away: set[object] = set()
        self._running: dict[object, float] = {}  # oldest first

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Wait for a place and hold it."""
        await self._free.acquire()
        token = object()
        self._running[token] = time.monotonic()
        timer = asyncio.get_running_loop().call_later(self._hung_after_s, self._give_away, token)
        try:
            yield
        finally:
            timer.cancel()
            del self._running[token]
            if token in self._given_away:
                self._given_away.remove(token)
            else:
                self._free.release()

    def oldest_running_s(self) -> float:
        """Age of the oldest request in seconds, 0.0 without one."""
        oldest = next(iter(self._running.values()), None)
        return time.monotonic() - oldest if oldest is not None else 0.0

    def num_hung(self) -> int:
        """Requests that have given their place away."""
        return len(self._given_away)

    def _give_away(self, token: object) -> None:
        if len(self._given_away) < self._limit:
            self._given_away.add(token)
            self._free.release()


async def all_results(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at once and return their results in order, none of them left running.

    Raises:
        Exception: The first failure; the others are then cancelled.
    """
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


class UploadBody:
    """Some bytes of an object as the body of a request, read in pieces and never joined.

    What the connection still has to send are copies, so that after `release` nothing reads the
    views any more. Is a readable and seekable file to botocore, and a stream to aiohttp.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = list(views)
        self._num_bytes = sum(view.nbytes for view in self._views)
        self._position = 0

    def __len__(self) -> int:
        return self._num_bytes

    def release(self) -> None:
        """Let go of the views. A request that reads on fails."""
        self._views = []

    def tell(self) -> int:
        """Where `read` goes on."""
        return self._position

    def seek(self, position: int) -> int:
        """Let `read` go on at a position."""
        self._position = position
        return position

    def read(self, num_bytes: int = -1) -> bytes:
        """The next bytes, all that are left where `num_bytes` is negative; empty at the end."""
        stop = self._num_bytes if num_bytes < 0 else self._position + num_bytes
        piece = b"".join(part_of(self._views, self._position, stop))
        self._position += len(piece)
        return piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, self._num_bytes, _PIECE_BYTES):
            if not self._views:
                raise ConnectionAbortedError("the upload was given up")
            yield b"".join(part_of(self._views, start, start + _PIECE_BYTES))


def part_of(views: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """The views of bytes `[start, stop)` of some views laid end to end, without copying.

    >>> header, payload = memoryview(b"abcd"), memoryview(b"efgh")
    >>> [bytes(view) for view in part_of([header, payload], 2, 6)]
    [b'cd', b'ef']
    """
    found = []
    offset = 0
    for view in views:
        first, last = max(start - offset, 0), min(stop - offset, view.nbytes)
        if first < last:
            found.append(view[first:last])
        offset += view.nbytes
    return found
