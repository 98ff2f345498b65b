"""The line that an operator reads in the engine's log: what the cache did since the last one."""

import logging
from collections.abc import Callable, Mapping

from vllm_hicache.metrics import Metrics

logger = logging.getLogger(__name__)

# "Stored much, loaded nothing" is said after this much: before, a cold cache looks the same.
FRUITLESS_SAVED_BYTES = 1_000_000_000
FRUITLESS_LOOKUPS = 100

# A line is due when one of these moved; gauges alone are not activity.
_ACTIVITY = (
    "lookup_tokens",
    "served_tokens/host",
    "served_tokens/storage",
    "saved_bytes",
    "loaded_bytes/sync",
    "loaded_bytes/async",
    "fetched_bytes",
    "persisted_bytes",
    "evicted_tokens",
    "resets",
)


def format_bytes(num_bytes: float) -> str:
    """Bytes in decimal units, as disks and links are sold.

    >>> format_bytes(0), format_bytes(1234), format_bytes(1_250_000_000)
    ('0 B', '1.2 kB', '1.2 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


class ActivityLine:
    """Logs one line every ``interval_s`` seconds in which something happened; else nothing.

    ``poll`` may be called at every step: it costs one comparison until the interval has passed.
    ``clock`` is a monotonic clock in seconds.
    """

    def __init__(self, metrics: Metrics, *, interval_s: float, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._interval_s = interval_s
        self._clock = clock
        self._next = clock() + interval_s
        self._before = metrics.totals()
        self._fruitless_said = False

    def poll(self) -> None:
        """Log the line, and once the warning, where they are due."""
        if self._clock() < self._next:
            return
        line = self.line()
        if line is not None:
            logger.info("%s", line)
        warning = self.fruitless_warning()
        if warning is not None:
            logger.warning("%s", warning)

    def line(self) -> str | None:
        """The line since the last call, or None where nothing happened; starts a new interval."""
        self._next = self._clock() + self._interval_s
        totals = self._metrics.totals()
        changed = {key: value - self._before[key] for key, value in totals.items()}
        self._before = totals
        if not any(changed[key] for key in _ACTIVITY):
            return None
        return "HiCache: " + ", ".join(_parts(changed, totals))

    def fruitless_warning(self) -> str | None:
        """Once: that much was saved and never loaded, over enough lookups."""
        totals = self._metrics.totals()
        loaded = totals["loaded_bytes/sync"] + totals["loaded_bytes/async"]
        if self._fruitless_said or loaded or totals["saved_bytes"] < FRUITLESS_SAVED_BYTES:
            return None
        if totals["lookups"] < FRUITLESS_LOOKUPS:
            return None
        self._fruitless_said = True
        return (
            f"HiCache: stored {format_bytes(totals['saved_bytes'])}, loaded 0 in "
            f"{totals['lookups']:,.0f} lookups: the prompts share no prefix that the device "
            f"does not hold itself, or the host tier is too small to keep it"
        )


def _parts(changed: Mapping[str, float], totals: Mapping[str, float]) -> list[str]:
    host, storage = changed["served_tokens/host"], changed["served_tokens/storage"]
    parts = [
        f"hits host {host:,.0f} storage {storage:,.0f} of {changed['lookup_tokens']:,.0f} tokens"
    ]
    parts.append(_moved("saved", changed["saved_bytes"], changed["save_seconds_sum"]))
    loaded = changed["loaded_bytes/sync"] + changed["loaded_bytes/async"]
    parts.append(_moved("loaded", loaded, changed["load_seconds_sum"]))
    if changed["fetched_bytes"] or changed["persisted_bytes"]:
        parts.append(f"fetched {format_bytes(changed['fetched_bytes'])}")
        parts.append(f"persisted {format_bytes(changed['persisted_bytes'])}")
    dropped = sum(v for key, v in changed.items() if key.startswith("persist_dropped_tokens/"))
    if dropped:
        parts.append(f"not persisted {dropped:,.0f} tokens")
    used, total = totals["host_slots_used"], totals["host_slots_total"]
    ready = totals["host_slots_ready"]
    growing = f" ({ready:,.0f} ready)" if ready < total else ""
    parts.append(f"host slots {used:,.0f}/{total:,.0f}{growing}")
    parts.append(f"backlog {format_bytes(totals['write_backlog_bytes'])}")
    parts.append(f"breaker {'open' if totals['breaker_open'] else 'closed'}")
    return parts


def _moved(verb: str, num_bytes: float, seconds: float) -> str:
    """Bytes and, where a duration was recorded, the rate while copies ran."""
    moved = f"{verb} {format_bytes(num_bytes)}"
    return f"{moved} at {format_bytes(num_bytes / seconds)}/s" if num_bytes and seconds else moved
