"""Makes a host pool's memory ready in the background, piece by piece, and says how far it is."""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from vllm_hicache import numa
from vllm_hicache.errors import ConfigError
from vllm_hicache.host_memory import MemoryLimit, tightest_memory_limit
from vllm_hicache.layout import PoolPiece
from vllm_hicache.quantities import GIB, rounded_size

logger = logging.getLogger(__name__)

MAX_THREADS = 8
"""On an H200 host (16 cores) 8 threads backed and pinned 4 GiB a second, one 2.3; 16 gained no
more. Half of the cores are left to the engine."""
LINE_INTERVAL_S = 10.0
"""Longest time between two lines of progress while pieces get ready."""
LINE_SHARE, LINE_MIN_S = 0.1, 1.0
"""A line comes earlier with this part of the pool more, but not sooner than this."""
ADVICE = "lower host_memory, free memory, or raise the limit of memory or of locked memory"


class GrowingPool(Protocol):
    """Memory of host slots, in the order of whose ``pieces`` slots become whole."""

    num_slots: int
    num_bytes: int
    pieces: tuple[PoolPiece, ...]

    @property
    def numa_node(self) -> int | None:
        """Where the memory should come from; None: anywhere."""

    def piece_bytes(self, piece: PoolPiece) -> int: ...

    def enter_thread(self) -> None:
        """Called once in each thread that makes pieces ready, before it does."""

    def make_ready(self, piece: PoolPiece) -> str:
        """Why it is not possible, or ""."""


class PoolGrowth:
    """The threads that make one pool ready. They hold the GIL for microseconds only.

    ``begin`` makes the first slots ready, ``go_on`` starts the rest. A refusal ends it: the pool
    stays as it is then. ``tell(num_ready, num_refused)`` hears of slots, from one thread at a time:
    those below the first number are ready, so many of the last ones will never be.
    """

    def __init__(
        self,
        pool: GrowingPool,
        tell: Callable[[int, int], None],
        *,
        name: str,
        max_threads: int = MAX_THREADS,
        available: Callable[[], MemoryLimit] = tightest_memory_limit,
    ) -> None:
        self._pool = pool
        self._tell = tell
        self._name = name
        self._max_threads = max_threads
        self._available = available
        self._node = pool.numa_node
        self._changed = threading.Lock()  # guards what follows
        self._is_background = False
        self._limit = 0
        """Pieces that may be taken now."""
        self._next = 0
        self._done: set[int] = set()
        self._num_whole = 0
        """Leading pieces that are ready."""
        self._refused = len(pool.pieces)
        """The first piece that was refused."""
        self._refusal = ""
        self._ready_bytes = 0
        self._threads: list[threading.Thread] = []
        self._num_running = 0
        self._started = time.monotonic()
        self._line_at, self._line_bytes = self._started, 0

    @property
    def num_ready(self) -> int:
        """Host slots below this number are ready."""
        with self._changed:
            return self._slots_before(self._num_whole)

    @property
    def refusal(self) -> str:
        """Why the pool stays smaller than asked, or ""."""
        with self._changed:
            return self._refusal

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def begin(self) -> None:
        """Make the first slots ready before it returns; a refusal is a ConfigError."""
        self._limit = sum(piece.first == 0 for piece in self._pool.pieces)
        self._start_threads(1)
        self._threads.pop().join()
        if self.refusal:
            size = rounded_size(self._pool.num_bytes)
            raise ConfigError(
                f"host_memory: a pool of {size} cannot be had: {self.refusal}; {ADVICE}"
            )

    def go_on(self) -> None:
        """Start the threads that make the rest ready."""
        num_left = len(self._pool.pieces) - self._next
        if not num_left:
            return
        num_threads = min(self._max_threads, len(os.sched_getaffinity(0)) // 2, num_left) or 1
        logger.info(
            "%s: %.2f of %.2f GiB of host memory are ready; the rest follows in the background "
            "(%d threads)",
            self._name,
            self._ready_bytes / GIB,
            self._pool.num_bytes / GIB,
            num_threads,
        )
        self._limit, self._is_background = len(self._pool.pieces), True
        self._start_threads(num_threads)

    def stop(self) -> None:
        """Begin no further piece."""
        with self._changed:
            self._limit = 0

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end; False: a piece is still under way."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # Threads -------------------------------------------------------------------------------------

    def _start_threads(self, number: int) -> None:
        self._num_running += number
        for i in range(number):
            name = f"hicache-pool-{i}"
            self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        number = None
        try:
            self._enter()
            while (number := self._take()) is not None:
                self._finish(number, self._make(self._pool.pieces[number]))
        except Exception as error:
            logger.exception("%s: a thread that prepares host memory failed", self._name)
            self._refuse(self._next if number is None else number, f"an error, {error!r}")
        self._leave()

    def _enter(self) -> None:
        self._pool.enter_thread()
        if self._node is None:
            return
        is_near = numa.prefer_node(self._node)
        if not self._is_background:
            how = "is taken from" if is_near else "cannot be taken from"
            logger.info("%s: host memory %s NUMA node %d, the GPU's", self._name, how, self._node)

    def _take(self) -> int | None:
        with self._changed:
            if self._next >= min(self._limit, self._refused):
                return None
            self._next += 1
            return self._next - 1

    def _make(self, piece: PoolPiece) -> str:
        """Memory that is not there is not touched: that would end this process or another."""
        num_bytes, limit = self._pool.piece_bytes(piece), self._available()
        if limit.available_bytes < num_bytes:
            left = rounded_size(limit.available_bytes)
            return f"{left} of memory are left ({limit.source}), {rounded_size(num_bytes)} needed"
        return self._pool.make_ready(piece)

    def _finish(self, number: int, refusal: str) -> None:
        if refusal:
            self._refuse(number, refusal)
            return
        with self._changed:
            self._done.add(number)
            self._ready_bytes += self._pool.piece_bytes(self._pool.pieces[number])
            while self._num_whole in self._done:
                self._done.remove(self._num_whole)
                self._num_whole += 1
            self._tell_all()
            self._log_progress(time.monotonic())

    def _refuse(self, number: int, refusal: str) -> None:
        with self._changed:
            if number < self._refused:
                self._refused, self._refusal = number, refusal
            self._tell_all()

    def _leave(self) -> None:
        with self._changed:
            self._num_running -= 1
            if self._is_background and not self._num_running and self._limit:
                self._log_end()

    # Under the lock ------------------------------------------------------------------------------

    def _tell_all(self) -> None:
        reachable = self._slots_before(self._refused)
        self._tell(self._slots_before(self._num_whole), self._pool.num_slots - reachable)

    def _slots_before(self, number: int) -> int:
        """Slots that are whole where all pieces before this one are ready."""
        pieces = self._pool.pieces
        return pieces[number].first if number < len(pieces) else self._pool.num_slots

    def _log_progress(self, now: float) -> None:
        grown, waited = self._ready_bytes - self._line_bytes, now - self._line_at
        is_due = grown >= LINE_SHARE * self._pool.num_bytes and waited >= LINE_MIN_S
        if not (is_due or waited >= LINE_INTERVAL_S):
            return
        self._line_at, self._line_bytes = now, self._ready_bytes
        logger.info(
            "%s: %.2f of %.2f GiB of host memory are ready (%d %%), %.2f GiB/s",
            self._name,
            self._ready_bytes / GIB,
            self._pool.num_bytes / GIB,
            100 * self._ready_bytes // self._pool.num_bytes,
            grown / waited / GIB,
        )

    def _log_end(self) -> None:
        pool = self._pool
        if not self._refusal:
            logger.info(
                "%s: all %.2f GiB of host memory are ready after %.1f s",
                self._name,
                pool.num_bytes / GIB,
                self.seconds,
            )
            return
        logger.error(
            "%s: host memory stays at %.2f of %.2f GiB, %d of %d slots: %s. The engine goes on "
            "with what every worker has; %s",
            self._name,
            self._ready_bytes / GIB,
            pool.num_bytes / GIB,
            self._slots_before(self._num_whole),
            pool.num_slots,
            self._refusal,
            ADVICE,
        )
