"""Verified objects for callers that are not vllm-hicache: one event loop on a thread of its own.

Answers come as futures that never raise. What is in doubt, late or out of reach is a miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_hicache.errors import BackendError, ConfigError
from vllm_hicache.storage import FetchOutcome, ShardObject, WriteOutcome
from vllm_hicache.storage_backends.counters import Counters
from vllm_hicache.storage_backends.envelope import CheckedStorage
from vllm_hicache.storage_backends.registry import open_backend
from vllm_hicache.storage_breaker import Breaker
from vllm_hicache.storage_lanes import Lane, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from vllm_hicache.config import StorageConfig

    Call = Callable[[], Coroutine[Any, Any, Any]]

logger = logging.getLogger(__name__)

# As in the storage process.
STALL_S = 0.5
BREAKER_FAILURES = 5
BREAKER_BACKOFF_S = 1.0
BREAKER_MAX_BACKOFF_S = 30.0

FIND_CONCURRENCY = 8
NAMES_PER_FIND = 512
CLOSE_LIMIT_S = 2.0
"""Longest time for calls to let go, and for connections to close, after the grace of writes."""


def _as_it_is(_index: int, result: Any) -> Any:
    return result


class _Batch(Operation):
    """Some calls in order; settles with their results, None for each that has none."""

    def __init__(
        self,
        number: int,
        breaker: Breaker,
        calls: Sequence[Call],
        accept: Callable[[int, Any], Any],
    ) -> None:
        super().__init__(number, breaker)
        self._calls_to_start = calls
        self._accept = accept
        self._next = 0
        self.results: list[Any] = [None] * len(calls)
        self._num_missing = len(calls)
        self.settled: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def next_call(self) -> Coroutine[Any, Any, Any] | None:
        if self._next == len(self._calls_to_start):
            return None
        self._next += 1
        return self._run(self._next - 1)

    async def _run(self, index: int) -> tuple[int, Any]:
        return index, await self._calls_to_start[index]()

    def take_result(self, result: tuple[int, Any]) -> None:
        if self.is_settled:
            return
        index, answer = result
        self.results[index] = self._accept(index, answer)
        self._num_missing -= 1
        if not self._num_missing:
            self._settle()

    def stop(self, reason: str) -> None:
        """Settle with what has arrived; cancelled calls end as soon as they let go."""
        if not self.is_settled:
            logger.debug("Batch %d ends early: %s", self.op, reason)
            self._settle()
            self.cancel_calls()

    def call_ended(self) -> None:
        """Nothing to do: each call keeps its own buffer alive."""

    def _settle(self) -> None:
        self.is_settled = True
        if not self.settled.done():
            self.settled.set_result(self.results)


class ChunkStore:
    """One storage with deadlines, breakers, a bounded backlog and its own thread.

    The constructor waits at most ``connect_timeout_s`` for the storage; one that cannot be reached
    is opened later. All methods may be called from any thread.

    Raises:
        ConfigError: The address or a credential cannot be right.
    """

    def __init__(self, config: StorageConfig, *, load_timeout_s: float) -> None:
        key = config.integrity_key.encode() if config.integrity_key else None
        self._config = config
        self._load_timeout_s = load_timeout_s
        self._backend = open_backend(config.url, config)
        self._storage = CheckedStorage(self._backend, integrity_key=key)
        self._counters = Counters(
            ["chunks_found", "chunks_loaded", "chunks_missing", "chunks_corrupt", "chunks_stored",
             "chunks_existing", "chunks_full", "chunks_over_backlog", "chunks_unanswered"]
        )  # fmt: skip
        self._numbers = itertools.count()
        self._backlog_bytes = 0
        self._is_pump_due = False
        self._is_open = False
        self._is_closed = False
        self._closing = threading.Lock()
        self._saves: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._find_lane = self._lane(FIND_CONCURRENCY)
        self._load_lane = self._lane(config.read_concurrency)
        self._save_lane = self._lane(config.write_concurrency)
        self._reads = _breaker("reads of chunks")
        self._writes = _breaker("writes of chunks")
        self._thread = threading.Thread(target=self._run, name="hicache-chunks", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        except BaseException:
            self.close()
            raise

    # Called from anywhere --------------------------------------------------------------------

    def find(self, names: Sequence[str]) -> Future[list[bool]]:
        """Which objects are there; those without an answer in ``exists_timeout_s`` are not."""
        return self._submit(lambda: self._find(names), [False] * len(names))

    def load(self, items: Sequence[ShardObject]) -> Future[list[FetchOutcome | None]]:
        """Fill the payloads of verified objects; None where no answer came in time.

        A payload is written to only if its outcome is OK, and never after the future is done.
        """
        return self._submit(lambda: self._load(items), [None] * len(items))

    def save(self, items: Sequence[ShardObject]) -> Future[list[WriteOutcome | None]]:
        """Store objects; None where that failed. Drops what the write backlog has no room for.

        When storage hangs, the future may be done while a payload is still being read. Bytes that
        change by then are found out by the checksum, which is taken before anything is written.
        """
        return self._submit(lambda: self._save(items), [None] * len(items))

    def remove(self, names: Sequence[str]) -> Future[list[bool]]:
        """Remove objects; says which were there and are gone now."""
        return self._submit(lambda: self._remove(names), [False] * len(names))

    def stats(self) -> dict[str, float]:
        """Totals of the storage and of chunks, and ``breaker_open`` and ``write_backlog_bytes``."""
        is_closed = self._is_open and self._reads.is_closed and self._writes.is_closed
        return {
            **self._storage.stats(),
            **self._counters.snapshot(),
            "breaker_open": 0.0 if is_closed else 1.0,
            "write_backlog_bytes": float(self._backlog_bytes),
        }

    @property
    def is_healthy(self) -> bool:
        """Whether storage answers, as far as is known."""
        return self._is_open and self._reads.is_closed and self._writes.is_closed

    def close(self) -> None:
        """Write what is queued for at most ``shutdown_grace_s``, then let go of the storage."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # In the loop -----------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _submit(self, work: Callable[[], Coroutine[Any, Any, Any]], miss: Any) -> Future[Any]:
        with self._closing:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(_logged(work, miss), self._loop)
        answer: Future[Any] = Future()
        answer.set_result(miss)
        return answer

    async def _open(self) -> None:
        """Wait for the first attempt to open the storage; further ones follow by themselves."""
        attempted = asyncio.Event()
        self._opening = asyncio.create_task(self._open_until_done(attempted))
        self._opening.add_done_callback(lambda _: attempted.set())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.connect_timeout_s):
                await attempted.wait()
        if self._opening.done():
            self._opening.result()

    async def _open_until_done(self, attempted: asyncio.Event) -> None:
        backoff_s = BREAKER_BACKOFF_S
        while not self._is_open:
            try:
                await self._storage.open()
            except BackendError as error:
                attempted.set()
                logger.warning("Storage cannot be opened, next try in %.1f s: %s", backoff_s, error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, BREAKER_MAX_BACKOFF_S)
            except ConfigError as error:
                logger.warning("Storage is refused, chunks are not cached: %s", error)
                raise
            else:
                self._is_open = True

    async def _close(self) -> None:
        if self._saves:
            await asyncio.wait(self._saves, timeout=self._config.shutdown_grace_s)
        rest = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=CLOSE_LIMIT_S)
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._storage.close()
        except (TimeoutError, BackendError) as error:
            logger.warning("Storage did not close in time: %s", error)

    async def _find(self, names: Sequence[str]) -> list[bool]:
        pieces = [names[i : i + NAMES_PER_FIND] for i in range(0, len(names), NAMES_PER_FIND)]
        calls = [_bound(self._storage.exists, piece) for piece in pieces]
        answers = await self._batch(
            self._find_lane, self._reads, calls, self._config.exists_timeout_s
        )
        found = [
            is_there
            for piece, answer in zip(pieces, answers, strict=True)
            for is_there in (answer or [False] * len(piece))
        ]
        self._counters.add(chunks_found=sum(found))
        return found

    async def _load(self, items: Sequence[ShardObject]) -> list[FetchOutcome | None]:
        def accept(index: int, read: tuple[FetchOutcome, np.ndarray]) -> FetchOutcome:
            outcome, buffer = read
            if outcome is FetchOutcome.OK:
                np.copyto(np.frombuffer(items[index].payload, np.uint8), buffer)
            return outcome

        calls = [_bound(self._fetch, item) for item in items]
        outcomes = await self._batch(
            self._load_lane, self._reads, calls, self._load_timeout_s, accept
        )
        self._counters.add(
            chunks_loaded=outcomes.count(FetchOutcome.OK),
            chunks_missing=outcomes.count(FetchOutcome.MISSING),
            chunks_corrupt=outcomes.count(FetchOutcome.CORRUPT),
        )
        return outcomes

    async def _fetch(self, item: ShardObject) -> tuple[FetchOutcome, np.ndarray]:
        """Read and verify in a buffer of our own.

        The caller's memory may belong to another chunk by the time that a late read ends.
        """
        buffer = np.empty(item.payload.nbytes, np.uint8)
        own = replace(item, payload=buffer.data)
        return (await self._storage.fetch([own]))[0], buffer

    async def _save(self, items: Sequence[ShardObject]) -> list[WriteOutcome | None]:
        admitted = self._admit(items)
        held = sum(item.payload.nbytes for item in items[:admitted])
        self._backlog_bytes += held
        calls = [_bound(self._persist, item) for item in items[:admitted]]
        task = asyncio.current_task()
        assert task is not None
        self._saves.add(task)
        try:
            outcomes = await self._batch(self._save_lane, self._writes, calls, None)
        finally:
            self._saves.discard(task)
            self._backlog_bytes -= held
        self._counters.add(
            chunks_stored=outcomes.count(WriteOutcome.STORED),
            chunks_existing=outcomes.count(WriteOutcome.EXISTS),
            chunks_full=outcomes.count(WriteOutcome.FULL),
            chunks_over_backlog=len(items) - admitted,
        )
        return outcomes + [None] * (len(items) - admitted)

    def _admit(self, items: Sequence[ShardObject]) -> int:
        """How many leading items the backlog has room for; one always fits into an empty one."""
        room = self._config.write_backlog_bytes - self._backlog_bytes
        sizes = itertools.accumulate(item.payload.nbytes for item in items)
        fitting = sum(1 for size in sizes if size <= room)
        return fitting if fitting or self._backlog_bytes else min(1, len(items))

    async def _persist(self, item: ShardObject) -> WriteOutcome:
        return (await self._storage.persist([item]))[0]

    async def _remove(self, names: Sequence[str]) -> list[bool]:
        calls = [_bound(self._remove_one, name) for name in names]
        answers = await self._batch(
            self._find_lane, self._writes, calls, self._config.operation_timeout_s
        )
        return [bool(answer) for answer in answers]

    async def _remove_one(self, name: str) -> bool:
        return await self._backend.delete([name]) > 0

    async def _batch(
        self,
        lane: Lane,
        breaker: Breaker,
        calls: Sequence[Call],
        limit_s: float | None,
        accept: Callable[[int, Any], Any] = _as_it_is,
    ) -> list[Any]:
        """The results of calls, None for each that failed or had none within the limit."""
        if not calls:
            return []
        results = [None] * len(calls)
        if self._is_open and breaker.may_start:
            batch = _Batch(next(self._numbers), breaker, calls, accept)
            lane.add(batch)
            self._pump_soon()
            timer = limit_s and self._loop.call_later(limit_s, batch.stop, "deadline")
            try:
                results = await batch.settled
            finally:
                batch.stop("closed")
                if timer:
                    timer.cancel()
        self._counters.add(chunks_unanswered=results.count(None))
        return results

    def _lane(self, limit: int) -> Lane:
        timeout_s = self._config.operation_timeout_s
        stall_s = min(STALL_S, timeout_s)
        return Lane(limit, stall_s=stall_s, timeout_s=timeout_s, changed=self._pump_soon)

    def _pump_soon(self) -> None:
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        for lane in (self._find_lane, self._load_lane, self._save_lane):
            lane.pump()


def _bound(function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Call:
    return lambda: function(*arguments)


def _breaker(direction: str) -> Breaker:
    return Breaker(
        direction,
        failures=BREAKER_FAILURES,
        backoff_s=BREAKER_BACKOFF_S,
        max_backoff_s=BREAKER_MAX_BACKOFF_S,
    )


async def _logged(work: Callable[[], Coroutine[Any, Any, Any]], miss: Any) -> Any:
    """The top of every task: whatever goes wrong in it is a miss."""
    try:
        return await work()
    except asyncio.CancelledError:
        return miss
    except Exception:
        logger.exception("A storage operation failed unexpectedly")
        return miss
