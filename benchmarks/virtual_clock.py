"""A clock that stands still until it is told to go on, in place of ``time.monotonic``."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class VirtualClock:
    """Seconds of a machine that is only computed."""

    now_s: float = 1000.0
    """Not 0, which a caller may take for never."""

    def __call__(self) -> float:
        return self.now_s

    def wait_until(self, moment_s: float) -> None:
        """Go on to a moment; one that is past changes nothing."""
        self.now_s = max(self.now_s, moment_s)

    @contextmanager
    def replacing_monotonic(self) -> Iterator[None]:
        """``time.monotonic`` is this clock for the whole process meanwhile, all threads included.

        >>> with VirtualClock(now_s=7.0).replacing_monotonic():
        ...     time.monotonic()
        7.0
        """
        real = time.monotonic
        time.monotonic = self
        try:
            yield
        finally:
            time.monotonic = real
