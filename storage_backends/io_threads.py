"""Daemon threads for blocking calls, and the rule by which a coroutine may leave them.

A coroutine that waits for jobs which use its buffers returns only when none of them runs any more,
whatever its deadline or a cancellation say. Jobs that have not started are dropped at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from vllm_hicache.errors import BackendTimeout, BackendUnavailable, HiCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Worker:
    """What is known of one thread: since when it runs a job, and whether it has a replacement."""

    def __init__(self) -> None:
        self.busy_since: float | None = None
        self.is_replaced = False

    @property
    def is_hung(self) -> bool:
        """Whether it was replaced and has not come back."""
        return self.is_replaced and self.busy_since is not None


class Batch(Generic[T]):
    """The jobs of one call. Jobs look at `abandoned` between pieces of work and stop early."""

    def __init__(self, jobs: Sequence[Callable[[Batch[T]], T]]) -> None:
        self.abandoned = False
        self.error: Exception | None = None
        self.results: dict[int, T] = {}
        self.released = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._jobs = list(jobs)
        self._lock = threading.Lock()
        self._next = 0
        self._unfinished = len(self._jobs)

    def run_next(self, worker: Worker) -> None:
        """Run the next job that has not started, if there is one, in the thread of `worker`."""
        with self._lock:
            if self._next >= len(self._jobs):
                return
            index = self._next
            self._next += 1
            job = self._jobs[index]
        worker.busy_since = time.monotonic()
        try:
            self.results[index] = job(self)
        except HiCacheError as error:
            self.error = self.error or error
        except Exception as error:
            logger.exception("storage job failed")
            self.error = self.error or error
        worker.busy_since = None
        self._finish(1)

    def abandon(self) -> None:
        """Drop the jobs that have not started and ask the running ones to stop early."""
        with self._lock:
            self.abandoned = True
            num_dropped = len(self._jobs) - self._next
            del self._jobs[self._next :]  # their views are released now, not when a thread is free
        self._finish(num_dropped)

    def _finish(self, num_jobs: int) -> None:
        with self._lock:
            self._unfinished -= num_jobs
            if self._unfinished:
                return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._set_released)

    def _set_released(self) -> None:
        if not self.released.done():
            self.released.set_result(None)


class IoThreads:
    """Up to `num_threads` daemon threads that run jobs in order of arrival.

    A thread that hangs longer than `hung_after_s` is replaced, at most `num_threads` times at once,
    so that hung system calls take no concurrency from other calls.
    """

    def __init__(self, name: str, num_threads: int, *, hung_after_s: float = 10.0) -> None:
        self._name = name
        self._num_threads = num_threads
        self._hung_after_s = hung_after_s
        self._queue: SimpleQueue[Batch[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._is_closed = False

    async def run(
        self,
        jobs: Sequence[Callable[[Batch[T]], T]],
        *,
        timeout_s: float | None,
        uses_buffers: bool = True,
    ) -> list[T]:
        """Run the jobs concurrently and return their results in order.

        With `uses_buffers` false, the call leaves hung jobs behind when its deadline passes.

        Raises:
            BackendTimeout: The deadline passed first.
            BackendUnavailable: The threads are closed.
            BackendError: The first one that a job raised, after all jobs ended.
        """
        if self._is_closed:
            raise BackendUnavailable(f"{self._name} is closed", operation=self._name)
        if not jobs:
            return []
        batch = Batch(jobs)
        self._enqueue(batch, len(jobs))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            await self._wait(batch, deadline)
        except asyncio.CancelledError:
            await self._leave(batch, uses_buffers=uses_buffers)
            raise
        if not batch.released.done():
            if await self._leave(batch, uses_buffers=uses_buffers):
                raise asyncio.CancelledError
            raise BackendTimeout(
                f"{self._name} did not finish in {timeout_s} s", operation=self._name
            )
        if batch.error is not None:
            raise batch.error
        return [batch.results[index] for index in range(len(jobs))]

    async def _wait(self, batch: Batch[T], deadline: float | None) -> None:
        """Wait in rounds: the jobs of this call may stand behind hung ones of another."""
        while not batch.released.done():
            left_s = self._hung_after_s
            if deadline is not None:
                left_s = min(left_s, deadline - time.monotonic())
            if left_s <= 0:
                return
            await asyncio.wait({batch.released}, timeout=left_s)
            self._replace_hung()

    def oldest_running_s(self) -> float:
        """Seconds for which the longest running job has run; 0.0 when idle."""
        with self._lock:
            starts = [start for w in self._workers if (start := w.busy_since) is not None]
        return max(0.0, time.monotonic() - min(starts)) if starts else 0.0

    def num_hung(self) -> int:
        """Threads that were replaced because they hang and have not come back."""
        with self._lock:
            return sum(worker.is_hung for worker in self._workers)

    async def close(self, timeout_s: float = 1.0) -> None:
        """Let queued jobs finish within `timeout_s`; threads that hang longer are left behind."""
        self._is_closed = True
        with self._lock:
            num_workers = len(self._workers)
        for _ in range(num_workers):
            self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        while self._workers and time.monotonic() < deadline:
            await asyncio.sleep(0.002)

    def _enqueue(self, batch: Batch[T], num_jobs: int) -> None:
        for _ in range(num_jobs):
            self._queue.put(batch)
        with self._lock:
            num_live = sum(not worker.is_replaced for worker in self._workers)
            for _ in range(min(num_jobs, self._num_threads - num_live)):
                self._start_worker()

    async def _leave(self, batch: Batch[T], *, uses_buffers: bool) -> bool:
        """Return when the batch no longer uses its buffers; say whether cancelled until then."""
        is_cancelled = False
        batch.abandon()
        self._replace_hung()
        while uses_buffers and not batch.released.done():
            try:
                await asyncio.wait({batch.released}, timeout=self._hung_after_s)
            except asyncio.CancelledError:
                is_cancelled = True
            self._replace_hung()
        return is_cancelled

    def _replace_hung(self) -> None:
        limit = time.monotonic() - self._hung_after_s
        with self._lock:
            num_hung = sum(worker.is_hung for worker in self._workers)
            for worker in list(self._workers):
                if num_hung >= self._num_threads:
                    return
                since = worker.busy_since
                if since is not None and since <= limit and not worker.is_replaced:
                    worker.is_replaced = True
                    num_hung += 1
                    self._start_worker()

    def _start_worker(self) -> None:
        worker = Worker()
        self._workers.append(worker)
        name = f"hicache-{self._name}-{len(self._workers)}"
        threading.Thread(target=self._work, args=(worker,), name=name, daemon=True).start()

    def _work(self, worker: Worker) -> None:
        while not worker.is_replaced and (batch := self._queue.get()) is not None:
            batch.run_next(worker)
            del batch  # an idle thread keeps no views alive
        with self._lock:
            self._workers.remove(worker)
