"""Circuit breaker: after consecutive failures, storage is left alone for a growing while.

One call in that state is the probe: its success closes the breaker, its failure doubles the wait.
"""

import logging
import time
from collections.abc import Callable
from enum import Enum

logger = logging.getLogger(__name__)

TELL_EVERY_S = 60.0
"""A failure that changes nothing is told at most so often."""


class Verdict(Enum):
    """Whether a storage call may start now."""

    START = "start"
    WAIT = "wait"
    """A probe is running; its end decides."""
    REFUSE = "refuse"


class Breaker:
    """Closed, open or half-open for one direction (reads or writes) of one worker's storage.

    >>> now = [0.0]
    >>> breaker = Breaker("read", failures=2, backoff_s=1, max_backoff_s=8, clock=lambda: now[0])
    >>> for _ in range(2): breaker.end(breaker.begin(), False)
    >>> breaker.verdict()
    <Verdict.REFUSE: 'refuse'>
    >>> now[0] = 1.0
    >>> is_probe = breaker.begin()
    >>> is_probe, breaker.verdict()
    (True, <Verdict.WAIT: 'wait'>)
    >>> breaker.end(is_probe, True)
    >>> breaker.is_closed
    True
    """

    def __init__(
        self,
        direction: str,
        *,
        failures: int,
        backoff_s: float,
        max_backoff_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._direction = direction
        self._failures = failures
        self._first_backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._clock = clock
        self._consecutive = 0
        self._backoff_s = backoff_s
        self._retry_at: float | None = None  # None while closed
        self._has_probe = False
        self._told_at: float | None = None
        self._opening_told_at: float | None = None
        self._is_opening_told = False

    @property
    def is_closed(self) -> bool:
        """Whether calls start freely."""
        return self._retry_at is None

    @property
    def may_start(self) -> bool:
        """Whether a new operation has a chance now."""
        return self.verdict() is Verdict.START

    def verdict(self) -> Verdict:
        """Whether ``begin`` may be called now."""
        if self._retry_at is None:
            return Verdict.START
        if self._has_probe:
            return Verdict.WAIT
        return Verdict.START if self._clock() >= self._retry_at else Verdict.REFUSE

    def begin(self) -> bool:
        """Note a call that starts; True when it is the probe. Hand the answer to ``end``."""
        is_probe = self._retry_at is not None
        self._has_probe = self._has_probe or is_probe
        return is_probe

    def end(self, is_probe: bool, succeeded: bool | None, error: str = "") -> None:
        """Note the end of a call; ``None`` when nobody waits for its answer any more."""
        if is_probe:
            self._has_probe = False
        if succeeded:
            self._close()
        elif succeeded is False:
            self._fail(is_probe, error)

    def _close(self) -> None:
        if self._retry_at is not None and self._is_opening_told:
            logger.info("Storage answers again: %s enabled", self._direction)
        self._retry_at = None
        self._consecutive = 0
        self._backoff_s = self._first_backoff_s

    def _fail(self, is_probe: bool, error: str) -> None:
        self._consecutive += 1
        if self._retry_at is None and self._consecutive >= self._failures:
            self._retry_at = self._clock() + self._backoff_s
            self._tell_opening(error)
            return
        if is_probe:
            self._backoff_s = min(self._max_backoff_s, self._backoff_s * 2)
            self._retry_at = self._clock() + self._backoff_s
        self._tell(error)

    def _tell_opening(self, error: str) -> None:
        """Once a minute: a storage at its limit may come and go every second."""
        now = self._clock()
        self._is_opening_told = self._is_due(self._opening_told_at)
        if self._is_opening_told:
            self._told_at = self._opening_told_at = now
            logger.warning(
                "Storage failed %d times in a row: %s disabled, next try in %.1f s; last: %s",
                self._consecutive,
                self._direction,
                self._backoff_s,
                error,
            )

    def _tell(self, error: str) -> None:
        if self._is_due(self._told_at):
            self._told_at = self._clock()
            is_open = self._retry_at is not None
            self._is_opening_told |= is_open
            state = "still fails" if is_open else "fails"
            logger.warning("Storage %s (%s): %s", state, self._direction, error)

    def _is_due(self, told_at: float | None) -> bool:
        return told_at is None or self._clock() - told_at >= TELL_EVERY_S
