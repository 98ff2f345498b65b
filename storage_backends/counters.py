"""Totals that several threads add to."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from vllm_hicache.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Iterable


class Counters:
    """Named totals, all present at 0 from the start.

    >>> counters = Counters(["objects_read", "read_seconds"])
    >>> counters.add(objects_read=1, read_seconds=0.5)
    >>> counters.snapshot()
    {'objects_read': 1.0, 'read_seconds': 0.5}
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._totals = dict.fromkeys(names, 0.0)
        self._lock = threading.Lock()

    def add(self, **amounts: float) -> None:
        """Add to some totals at once.

        Raises:
            InvariantBroken: A name was not given to the constructor.
        """
        with self._lock:
            for name, amount in amounts.items():
                if name not in self._totals:
                    raise InvariantBroken(f"no counter is named {name!r}")
                self._totals[name] += amount

    def snapshot(self) -> dict[str, float]:
        """A copy of all totals."""
        with self._lock:
            return dict(self._totals)
