"""Which storage call starts next: bounded, in order of arrival, never behind a hung one.

A call that runs longer than ``stall_s`` gives its place to others, and its operation starts no
more calls until it returns; so a hung operation holds what hangs and delays nobody.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

from vllm_hicache.errors import BackendError
from vllm_hicache.storage_breaker import Breaker, Verdict

logger = logging.getLogger(__name__)

# An operation holds at most this many times the places that it leaves free: alone it takes 12 of
# 16, and a newcomer finds one at once. Larger makes newcomers wait for a call, or for stall_s.
SHARE_OF_FREE = 3


class Operation(ABC):
    """One exists, fetch or persist: starts calls for parts of itself until it is settled."""

    def __init__(self, op: int, breaker: Breaker) -> None:
        self.op = op
        self.breaker = breaker
        self.calls: dict[_Call, int] = {}  # that run, with their numbers from 0 on
        self.num_started = 0
        self.num_stalled = 0
        self.is_settled = False
        self._has_reported_failure = False

    @abstractmethod
    def next_call(self) -> Coroutine[Any, Any, Any] | None:
        """The next call to start; None when nothing is to be started now."""

    @abstractmethod
    def take_result(self, result: Any) -> None:
        """What a call returned, in order of completion; may come after the settlement."""

    def is_answer(self, result: Any) -> bool:
        """Whether a result shows that the storage works; False where it was not asked."""
        return True

    @abstractmethod
    def stop(self, reason: Any) -> None:
        """Start nothing more and settle; calls that run may go on. Harmless when settled."""

    @abstractmethod
    def call_ended(self) -> None:
        """A call has ended in whatever way; ``calls`` no longer holds it."""

    def cancel_calls(self) -> None:
        """Ask running calls to give up. They end only when no thread uses their buffers."""
        for call in self.calls:
            call.cancel()

    def fail(self, is_probe: bool, error: object, reason: str = "unavailable") -> None:
        """A call failed or timed out: one failure for the breaker per operation, then settle."""
        if is_probe or not self._has_reported_failure:
            self._has_reported_failure = True
            self.breaker.end(is_probe, False, f"{type(self).__name__} {self.op}: {error}")
        self.stop(reason)

    def call_stalled(self) -> None:
        """A call has run for ``stall_s`` and goes on."""
        self.num_stalled += 1

    def fail_stalled_calls(self, error: object, reason: str) -> None:
        """What has run for ``stall_s`` and longer is a failure of the storage; the rest may be
        slow."""
        for call in list(self.calls):
            if call.is_stalled:
                call.fail(error, reason)
                call.cancel()


class _Call:
    """One running call with its two timers: stalled, then timed out."""

    def __init__(self, lane: "Lane", operation: Operation, work: Coroutine[Any, Any, Any]) -> None:
        loop = asyncio.get_running_loop()
        self.lane = lane
        self.operation = operation
        self.started = loop.time()
        self.is_stalled = False
        self._is_probe = operation.breaker.begin()
        self._has_failed = False
        self._timers = (
            loop.call_later(lane.stall_s, self._stall),
            loop.call_later(lane.timeout_s, self.fail, f"no answer in {lane.timeout_s:.1f} s"),
        )
        self._task = loop.create_task(work)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        self._task.cancel()

    def _stall(self) -> None:
        self.is_stalled = True
        self.lane.stalled(self)

    def fail(self, error: object, reason: str = "unavailable") -> None:
        """It failed, or takes too long; counts once."""
        if not self._has_failed:
            self._has_failed = True
            self.operation.fail(self._is_probe, error, reason)

    def _end(self, task: asyncio.Task[Any]) -> None:
        for timer in self._timers:
            timer.cancel()
        self.lane.remove(self)
        breaker = self.operation.breaker
        if task.cancelled():
            if not self._has_failed:
                breaker.end(self._is_probe, None)
        elif error := task.exception():
            if not isinstance(error, BackendError):
                logger.error("A storage call failed unexpectedly", exc_info=error)
            self.fail(error)
        else:
            is_answer = self.operation.is_answer(task.result())
            breaker.end(self._is_probe and not self._has_failed, True if is_answer else None)
            self.operation.take_result(task.result())
        self.operation.call_ended()


class Lane:
    """Runs calls of one kind, at most ``limit`` at a time that still make progress.

    ``changed`` is called when places became free; the owner then calls ``pump``.
    """

    def __init__(
        self, limit: int, *, stall_s: float, timeout_s: float, changed: Callable[[], None]
    ) -> None:
        self.limit = limit
        self.stall_s = stall_s
        self.timeout_s = timeout_s
        self._changed = changed
        self._waiting: dict[Operation, None] = {}
        self._calls: dict[_Call, None] = {}  # oldest first
        self._num_stalled = 0

    @property
    def num_free(self) -> int:
        """Places for calls. The first ``limit`` stalled calls hold none, further ones do."""
        num_active = len(self._calls) - self._num_stalled
        return self.limit - num_active - max(0, self._num_stalled - self.limit)

    def oldest_running_s(self) -> float:
        """Age of the oldest running call in seconds, 0.0 without one."""
        oldest = next(iter(self._calls), None)
        return asyncio.get_running_loop().time() - oldest.started if oldest else 0.0

    def add(self, operation: Operation) -> None:
        """Queue an operation; it leaves the lane by itself once it is settled."""
        self._waiting[operation] = None

    def pump(self) -> None:
        """Start what may start now."""
        leaving = []
        for operation in self._waiting:
            while self._starts(operation):
                pass
            if operation.is_settled:
                leaving.append(operation)
            if self.num_free <= 0:
                break
        for operation in leaving:
            del self._waiting[operation]

    def _starts(self, operation: Operation) -> bool:
        free = self.num_free
        if operation.is_settled or operation.num_stalled or free <= 0:
            return False
        num_held = len(operation.calls)
        if num_held and num_held + 1 > SHARE_OF_FREE * (free - 1):
            return False
        verdict = operation.breaker.verdict()
        if verdict is Verdict.REFUSE:
            operation.stop("unavailable")
        if verdict is not Verdict.START:
            return False
        work = operation.next_call()
        if work is None:
            return False
        call = _Call(self, operation, work)
        self._calls[call] = None
        operation.calls[call] = operation.num_started
        operation.num_started += 1
        return True

    def stalled(self, call: _Call) -> None:
        """The call has run for ``stall_s``: its place goes to others."""
        self._num_stalled += 1
        call.operation.call_stalled()
        self._changed()

    def remove(self, call: _Call) -> None:
        """The call has returned: nothing touches its buffers."""
        del self._calls[call], call.operation.calls[call]
        if call.is_stalled:
            self._num_stalled -= 1
            call.operation.num_stalled -= 1
        self._changed()
