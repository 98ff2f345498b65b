"""Counters, gauges and durations of one engine, and the ledger of what each hit came to.

Everything here belongs to the scheduler's thread: no lock, no clock, no I/O.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.series import HOST, SERIES, STORAGE, STORAGE_OBJECT_SERIES, Series

__all__ = ["SERIES", "Ledger", "Metrics", "Series", "StorageCounters"]

logger = logging.getLogger(__name__)

# Durations kept between two takes. Nobody takes while statistics are off; a sum and a count
# live on, the single values beyond this bound do not.
MAX_PENDING_DURATIONS = 1024

Delta: TypeAlias = dict[str, float | list[float]]

_COUNTERS = frozenset(k for s in SERIES if s.kind == "counter" for k in s.keys)
_GAUGES = frozenset(k for s in SERIES if s.kind == "gauge" for k in s.keys)
_STORAGE_COUNTERS = frozenset({*(s.name for s in STORAGE_OBJECT_SERIES), "corrupt_objects"})
# name in a report -> our gauge, and what several workers' values come to
_STORAGE_GAUGES: dict[str, tuple[str, Callable[[Iterable[float]], float]]] = {
    "breaker_open": ("breaker_open", sum),
    "storage_attached": ("storage_attached", sum),
    "write_backlog_bytes": ("write_backlog_bytes", sum),
    "hung_threads_now": ("storage_hung_threads", sum),
    # Each worker sees the same store.
    "used_bytes_now": ("storage_used_bytes", max),
}
_HISTOGRAMS = frozenset(s.name for s in SERIES if s.kind == "histogram")


class Metrics:
    """All series of one engine, cumulative since its start.

    A key is the series' name, or ``name/value`` where it has a label. A name or label that
    ``SERIES`` does not declare is InvariantBroken: a misspelt counter would read as "never".

    >>> metrics = Metrics()
    >>> metrics.count("served_tokens", 256, "host")
    >>> metrics.take_delta(), metrics.take_delta()
    ({'served_tokens/host': 256.0}, {})
    >>> metrics.totals()["served_tokens/host"]
    256.0
    """

    def __init__(self) -> None:
        self._totals = dict.fromkeys(sorted(_COUNTERS | _GAUGES), 0.0)
        for name in sorted(_HISTOGRAMS):
            self._totals[f"{name}_count"] = 0.0
            self._totals[f"{name}_sum"] = 0.0
        self._delta: dict[str, float] = {}
        self._durations: dict[str, list[float]] = {}

    def count(self, name: str, value: float = 1, label: str = "") -> None:
        """Add ``value`` >= 0 to a counter."""
        key = f"{name}/{label}" if label else name
        if key not in _COUNTERS:
            raise InvariantBroken(f"no counter {name!r} with label {label!r} is declared")
        if not value >= 0:
            raise InvariantBroken(f"counter {key} can only grow, got {value}")
        if value:
            self._totals[key] += value
            self._delta[key] = self._delta.get(key, 0.0) + value

    def gauge(self, name: str, value: float, label: str = "") -> None:
        """Set a gauge to its present value; an unchanged value costs nothing downstream."""
        key = f"{name}/{label}" if label else name
        if key not in _GAUGES:
            raise InvariantBroken(f"no gauge {name!r} with label {label!r} is declared")
        if self._totals[key] != value:
            self._totals[key] = float(value)
            self._delta[key] = float(value)

    def observe(self, name: str, value: float) -> None:
        """Record one duration in seconds."""
        if name not in _HISTOGRAMS:
            raise InvariantBroken(f"no histogram {name!r} is declared")
        self._totals[f"{name}_count"] += 1
        self._totals[f"{name}_sum"] += value
        pending = self._durations.setdefault(name, [])
        if len(pending) < MAX_PENDING_DURATIONS:
            pending.append(float(value))

    def take_delta(self) -> Delta:
        """What changed since the last take; the caller owns it, the next delta starts empty.

        Counters: the increase. Gauges: the present value, only if it changed. Histograms: the
        single values under the series' name. Only floats and lists of floats.
        """
        delta: Delta = {**self._delta, **self._durations}
        self._delta = {}
        self._durations = {}
        return delta

    def totals(self) -> dict[str, float]:
        """A copy of all values since the start; a histogram is ``name_count``, ``name_sum``."""
        return dict(self._totals)


@dataclass(slots=True)
class _Account:
    """Tokens of one request by tier; what is found and neither served nor unserved is open."""

    found: dict[str, int] = field(default_factory=lambda: {HOST: 0, STORAGE: 0})
    settled: dict[str, int] = field(default_factory=lambda: {HOST: 0, STORAGE: 0})
    """Served, or not served for a reason."""

    def open_in(self, tier: str) -> int:
        return self.found.get(tier, 0) - self.settled.get(tier, 0)

    @property
    def open(self) -> int:
        return sum(self.found.values()) - sum(self.settled.values())


class Ledger:
    """For every request: tokens found = tokens served + tokens not served, each with a reason.

    The three entries add up (call them once for each token, not at each repeated lookup).
    ``served`` is for a load that has landed. More served or unserved than was found is
    InvariantBroken at once. A request may be opened again after ``close``, as after preemption.

    >>> metrics = Metrics()
    >>> ledger = Ledger(metrics)
    >>> ledger.found("a", "host", 768)
    >>> ledger.served("a", "host", 512)
    >>> ledger.close("a", "no_blocks")
    256
    >>> ledger.balance()
    >>> metrics.totals()["unserved_tokens/no_blocks"]
    256.0
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._accounts: dict[str, _Account] = {}
        self._found = 0
        self._settled = 0

    @property
    def num_open(self) -> int:
        """Requests that have an entry and are not closed; 0 when the engine is idle."""
        return len(self._accounts)

    def open_tokens(self, request_id: str) -> int:
        """Tokens found for this request and not yet served or given a reason."""
        account = self._accounts.get(request_id)
        return account.open if account else 0

    def found(self, request_id: str, tier: str, tokens: int) -> None:
        """``tokens`` more were found in ``tier`` ("host" or "storage") for this request."""
        self._metrics.count("found_tokens", tokens, tier)
        if tokens:
            self._accounts.setdefault(request_id, _Account()).found[tier] += tokens
            self._found += tokens

    def served(self, request_id: str, tier: str, tokens: int) -> None:
        """``tokens`` more of those found in ``tier`` are on the device and used."""
        if not tokens:
            return
        account = self._account(request_id, tier, tokens, "served")
        self._metrics.count("served_tokens", tokens, tier)
        account.settled[tier] += tokens
        self._settled += tokens

    def unserved(self, request_id: str, tier: str, reason: str, tokens: int) -> None:
        """``tokens`` more of those found in ``tier`` are computed instead; ``reason`` says why."""
        if not tokens:
            return
        account = self._account(request_id, tier, tokens, f"not served ({reason})")
        self._metrics.count("unserved_tokens", tokens, reason)
        self._metrics.count("unserved_tier_tokens", tokens, tier)
        account.settled[tier] += tokens
        self._settled += tokens

    def _account(self, request_id: str, tier: str, tokens: int, how: str) -> _Account:
        """The account of a request that has so many open tokens in this tier."""
        account = self._accounts.get(request_id, _Account())
        if tokens > account.open_in(tier):
            raise InvariantBroken(
                f"request {request_id}: {tokens} tokens of {tier} {how}, but only "
                f"{account.open_in(tier)} found there are open"
            )
        return account

    def close(self, request_id: str, reason: str) -> int:
        """End the request; what is still open was not served because of ``reason``.

        Returns that number of tokens. An unknown request is 0: it never had a hit.
        """
        account = self._accounts.get(request_id)
        if account is None:
            return 0
        remaining = account.open
        for tier in account.found:
            self.unserved(request_id, tier, reason, account.open_in(tier))
        del self._accounts[request_id]
        return remaining

    def balance(self) -> None:
        """InvariantBroken unless hits = served + reasons + open, in sum over all requests."""
        total_open = sum(account.open for account in self._accounts.values())
        if self._found != self._settled + total_open:
            raise InvariantBroken(
                f"ledger: found {self._found} tokens, but settled {self._settled} and "
                f"open {total_open}"
            )


class StorageCounters:
    """Folds the cumulative counters that storage processes report into ``Metrics``.

    Counters add up over workers and over restarts. Only what the processes alone know is taken
    (objects, bytes, seconds and errors of storage calls, corrupt objects, breaker, backlog, use);
    any other name is left out, so that a backend may report more.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last: dict[int, tuple[int | str, dict[str, float]]] = {}
        self._unknown: set[str] = set()

    def absorb(self, worker_id: int, incarnation: int | str, counters: Mapping[str, float]) -> None:
        """Take a report that is cumulative since the start of process ``incarnation``."""
        known, last = self._last.get(worker_id, (incarnation, {}))
        if known != incarnation:
            last = {}
        for name, value in counters.items():
            if name in _STORAGE_COUNTERS:
                grown = value - last.get(name, 0.0)
                if grown > 0:
                    self._metrics.count(name, grown)
                    last[name] = value
            elif name in _STORAGE_GAUGES:
                last[name] = value
            elif name not in self._unknown:
                self._unknown.add(name)
                logger.debug("storage process reports %r, which is not a declared series", name)
        self._last[worker_id] = (incarnation, last)
        self._fold_gauges()

    def forget(self, worker_id: int) -> None:
        """The worker's process is gone: its gauges no longer count."""
        if worker_id in self._last:
            incarnation, last = self._last[worker_id]
            kept = {name: value for name, value in last.items() if name in _STORAGE_COUNTERS}
            self._last[worker_id] = (incarnation, kept)
            self._fold_gauges()

    def _fold_gauges(self) -> None:
        for name, (gauge, fold) in _STORAGE_GAUGES.items():
            self._metrics.gauge(gauge, fold(last.get(name, 0.0) for _, last in self._last.values()))
