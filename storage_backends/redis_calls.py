"""How one call reaches the servers that hold its keys: deadline, slots, connections, second tries.

Whatever raises, no connection touches the buffers of the call any more when it ends.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_hicache.errors import BackendError, BackendTimeout, BackendUnavailable, ConfigError
from vllm_hicache.storage_backends.redis_servers import RedisServer, RedisServers, Rejected
from vllm_hicache.storage_backends.redis_wire import ConnectionLost, Refusal, Wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

T = TypeVar("T")

MOVED = "MOVED"

# What is pipelined on one connection. More keeps larger answers in the server's memory.
_PART_BYTES = 8 * 1024 * 1024
_PART_KEYS = 4096  # 4 ms of server time
_MAX_MOVES = 4


class RedisCalls:
    """Runs calls against servers. Exchanges on connections are the business of the backend."""

    def __init__(self, servers: RedisServers, timeout_s: float) -> None:
        self._servers = servers
        self._timeout_s = timeout_s
        self._running: dict[object, float] = {}
        self._is_closed = False

    async def close(self) -> None:
        """Refuse further calls and close all connections."""
        self._is_closed = True
        await self._servers.close()

    def oldest_running_s(self) -> float:
        """Age of the oldest running call, 0.0 without one."""
        oldest = min(self._running.values(), default=None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    @asynccontextmanager
    async def call(self, operation: str) -> AsyncIterator[None]:
        """One call with its deadline; BackendTimeout when it passes."""
        if self._is_closed:
            raise self._unavailable(operation, "it is closed")
        mark = object()
        self._running[mark] = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError as error:
            if isinstance(error, BackendError):
                raise
            raise BackendTimeout(
                f"{operation} at Redis {self._servers.label} took more than {self._timeout_s:g} s",
                backend="redis",
                operation=operation,
            ) from error
        finally:
            del self._running[mark]

    async def on_holders(
        self,
        operation: str,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        run: Callable[[RedisServer, Sequence[int]], Coroutine[Any, Any, list[Any]]],
    ) -> list[Any]:
        """One result for each key, from the server that holds it.

        `run` gets a server and the indexes of some keys of about `_PART_BYTES` by `sizes`, and
        returns a result for each. A `Refusal` among them is tried again where the slot has moved,
        else it raises BackendUnavailable.
        """
        results: list[Any] = [None] * len(keys)
        due = list(range(len(keys)))
        for _ in range(_MAX_MOVES):
            if not due:
                return results
            if self._servers.is_stale:
                await self._refresh(operation)
            parts = self._parts([(i, self._servers.holder(keys[i]), sizes[i]) for i in due])
            answers = await _all([run(server, part) for server, part in parts])
            for (server, part), answer in zip(parts, answers, strict=True):
                for i, value in zip(part, answer, strict=True):
                    if isinstance(value, Refusal) and value.code != MOVED:
                        raise server.unavailable(operation, value)
                    results[i] = value
            due = [i for i in due if isinstance(results[i], Refusal)]
            for i in due:
                self._servers.follow(results[i])
        raise self._unavailable(operation, "slots keep moving")

    async def exchange(
        self, server: RedisServer, operation: str, run: Callable[[Wire], Awaitable[T]]
    ) -> T:
        """Run on a connection of the server; once more when one from before proves dead."""
        try:
            wire, is_new = await server.take()
            try:
                return await run(wire)
            except ConnectionLost:
                if is_new:
                    raise
            finally:
                server.give(wire)
            wire = await server.connect()
            try:
                return await run(wire)
            finally:
                server.give(wire)
        except (ConnectionLost, Rejected) as error:
            self._servers.is_stale = self._servers.is_cluster
            raise server.unavailable(operation, error) from error
        except BackendUnavailable:
            self._servers.is_stale = self._servers.is_cluster
            raise

    async def _refresh(self, operation: str) -> None:
        try:
            await self._servers.refresh()
        except (Rejected, ConfigError) as error:
            raise self._unavailable(operation, error) from error

    def _unavailable(self, operation: str, reason: object) -> BackendUnavailable:
        return BackendUnavailable(
            f"{operation} at Redis {self._servers.label} failed: {reason}",
            backend="redis",
            operation=operation,
        )

    def _parts(
        self, due: Sequence[tuple[int, RedisServer, int]]
    ) -> list[tuple[RedisServer, list[int]]]:
        """What goes over one connection in one go: items of one server, bounded in bytes."""
        parts: list[tuple[RedisServer, list[int]]] = []
        last: dict[RedisServer, tuple[list[int], int]] = {}
        for i, server, num_bytes in due:
            part, total = last.get(server, ([], _PART_BYTES))
            if not part or total + num_bytes > _PART_BYTES or len(part) == _PART_KEYS:
                part, total = [], 0
                parts.append((server, part))
            part.append(i)
            last[server] = (part, total + num_bytes)
        return parts


async def _all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. It ends only when all of them have ended, whatever happens."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
