"""Every metric there is, declared once, so that each exists at 0 before its first event.

In Prometheus a name gets the prefix ``vllm:hicache_`` and a counter the suffix ``_total``.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

SeriesKind: TypeAlias = Literal["counter", "gauge", "histogram"]

# Seconds. Host copies of one page take about 0.1 ms, a fetch from a far store some seconds; below
# and above these bounds nothing is decided by the number.
SECONDS_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip

HOST = "host"
STORAGE = "storage"

UNSERVED_REASONS = (
    "deferred_budget",
    "deadline",
    "no_blocks",
    "reset",
    "aborted",
    "evicted",
    "short_fetch",
    "host_full",
    "cap",
    "load_failed",
    "skip_reading",
    "not_wanted",
    "below_minimum",
    "recompute_faster",
    "tenant_limit",
    "missing_pool",
)
SAVE_SKIPPED_REASONS = (
    "host_full",
    "not_admitted",
    "too_few_uses",
    "chain_broken",
    "copy_failed",
    "reused",
    "not_wanted",
    "reset",
)
PERSIST_DROPPED_REASONS = ("backlog", "full", "unavailable", "deadline", "cancelled", "reset")
FETCH_ENDINGS = (
    "complete",
    "missing",
    "corrupt",
    "deadline",
    "cancelled",
    "unavailable",
    "host_full",
    "recompute_faster",
    "tenant_limit",
    "missing_pool",
    "reset",
)
RETRY_OUTCOMES = ("found", "nothing", "left", "reissued")
RANK_DIVERGENCES = ("order", "arguments", "result", "stall")
OPERATION_KINDS = ("save", "load", "exists", "fetch", "persist")


@dataclass(frozen=True, slots=True)
class Series:
    """One metric; with a ``label``, one time series for each of its ``values``.

    >>> Series("loaded_bytes", "counter", "Bytes.", "mode", ("sync", "async")).keys
    ('loaded_bytes/sync', 'loaded_bytes/async')
    >>> Series("resets", "counter", "Resets.").keys
    ('resets',)
    """

    name: str
    kind: SeriesKind
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Flat keys of the time series, as ``Metrics`` spells them."""
        if self.label is None:
            return (self.name,)
        return tuple(f"{self.name}/{value}" for value in self.values)


def _counter(
    name: str, text: str, label: str | None = None, values: tuple[str, ...] = ()
) -> Series:
    return Series(name, "counter", text, label, values)


def _gauge(name: str, text: str, label: str | None = None, values: tuple[str, ...] = ()) -> Series:
    return Series(name, "gauge", text, label, values)


def _seconds(name: str, text: str) -> Series:
    return Series(name, "histogram", text)


_TIERS = (HOST, STORAGE)

_TOKENS = (
    _counter("lookups", "Requests whose prefix was looked up, once each."),
    _counter("lookup_tokens", "Prompt tokens of requests at their first lookup."),
    _counter("local_tokens", "Tokens that the device's own prefix cache held at lookup."),
    _counter("found_tokens", "Tokens found beyond the device's own hit.", "tier", _TIERS),
    _counter("served_tokens", "Found tokens whose KV was loaded and used.", "tier", _TIERS),
    _counter(
        "unserved_tokens",
        "Found tokens that were computed after all, by reason.",
        "reason",
        UNSERVED_REASONS,
    ),
    _counter(
        "unserved_tier_tokens",
        "Found tokens that were computed after all, by the tier that held them.",
        "tier",
        _TIERS,
    ),
    _counter("saved_tokens", "Tokens copied from the device to host memory."),
    _counter(
        "save_skipped_tokens",
        "Computed tokens that were not saved to host memory, by reason.",
        "reason",
        SAVE_SKIPPED_REASONS,
    ),
    _counter(
        "persist_dropped_tokens",
        "Saved tokens that were not written to storage, by reason.",
        "reason",
        PERSIST_DROPPED_REASONS,
    ),
    _counter("evicted_tokens", "Tokens that left host memory to make room."),
    _counter("pin_refused_tokens", "Tokens that a request asked to keep and the limit did not."),
)
_BYTES = (
    _counter("saved_bytes", "Bytes copied from the device to host memory, all workers."),
    _counter(
        "loaded_bytes",
        "Bytes copied from host memory to the device, all workers.",
        "mode",
        ("sync", "async"),
    ),
    _counter("persisted_bytes", "Bytes of pages written to storage, all workers."),
    _counter("fetched_bytes", "Bytes of pages read from storage and verified, all workers."),
)
_EVENTS = (
    _counter("fetch_ended", "Fetches from storage, by how they ended.", "reason", FETCH_ENDINGS),
    _counter(
        "fetch_retries",
        "Times that storage was asked again for a waiting request, by what came of it.",
        "outcome",
        RETRY_OUTCOMES,
    ),
    _counter("corrupt_objects", "Stored objects with a wrong header, length or checksum."),
    _counter("copy_failures", "Copies between device and host that failed."),
    _counter("deferred_lookups", "Lookups answered with 'not yet' while a page was on its way."),
    _counter("ignored_reports", "Reports for unknown or finished operations."),
    _counter("storage_restarts", "Storage processes that died and were started again."),
    _counter("resets", "Cache resets."),
    _counter("bad_hints", "Requests whose hints were not understood, and not followed."),
    _counter(
        "near_misses",
        "Warnings that storage hit nothing and holds pages under an almost equal namespace.",
    ),
    _counter(
        "rank_divergences",
        "Differences between workers that the rank-consensus checker found, by class.",
        "class",
        RANK_DIVERGENCES,
    ),
)
STORAGE_OBJECT_SERIES = (
    _counter("objects_read", "Objects read from storage."),
    _counter("objects_written", "Objects written to storage."),
    _counter("objects_deleted", "Objects deleted from storage."),
    _counter("objects_evicted", "Objects that left storage to stay within its capacity."),
    _counter("bytes_read", "Bytes read from storage, headers included."),
    _counter("bytes_written", "Bytes written to storage, headers included."),
    _counter("bytes_evicted", "Bytes that left storage to stay within its capacity."),
    _counter("read_seconds", "Seconds spent in storage reads, summed over concurrent reads."),
    _counter("write_seconds", "Seconds spent in storage writes, summed over concurrent writes."),
    _counter("other_version_objects", "Objects of another format version, left alone."),
    _counter("zeroed_pages", "Pages that got zeros for what they lacked, counted by each worker."),
    _counter("checksum_seconds", "Seconds spent on checksums of objects, summed over threads."),
    _counter("read_errors", "Storage reads that failed."),
    _counter("write_errors", "Storage writes that failed."),
    _counter("writes_refused", "Objects that storage had no room or no permission for."),
    _counter("requests_retried", "Requests to S3 that were tried again."),
    _counter("requests_throttled", "Requests that S3 answered with 429 or 503 (SlowDown)."),
)
_GAUGES = (
    _gauge("host_slots_total", "Host slots of a worker; each holds one page."),
    _gauge("host_slots_ready", "Host slots whose memory is there on every worker."),
    _gauge("host_pools_short", "Workers that did not get the memory for all host slots."),
    _gauge("host_slots_used", "Host slots that hold a page or are being filled."),
    _gauge("host_slots_pinned", "Host slots that cannot be evicted now."),
    _gauge(
        "host_slots_protected", "Host slots whose page `admission` protects; 0 with `next_use`."
    ),
    _gauge("host_slots_kept", "Host slots whose page a request asked to keep."),
    _gauge("device_blocks_held", "Device blocks held until their copy is done."),
    _gauge("operations_running", "Operations that have not ended.", "kind", OPERATION_KINDS),
    _gauge(
        "crossover_tokens",
        "Tokens from which loading beats computing them; -1 where it never does.",
        "tier",
        _TIERS,
    ),
    _gauge("breaker_open", "Workers whose storage tier is switched off after failures."),
    _gauge("storage_attached", "Workers that have a storage, whether it can be reached or not."),
    _gauge("storage_used_bytes", "Bytes in storage, of every engine that shares it."),
    _gauge("storage_hung_threads", "Threads of storage processes that do not come back."),
    _gauge("write_backlog_bytes", "Bytes that wait to be written to storage, all workers."),
)
_HISTOGRAMS = (
    _seconds("fetch_seconds", "Seconds from the start of a fetch to its end."),
    _seconds("load_seconds", "Seconds from the start of a load to its last acknowledgement."),
    _seconds("save_seconds", "Seconds from the start of a save to its last acknowledgement."),
)

SERIES: tuple[Series, ...] = (
    _TOKENS + _BYTES + _EVENTS + STORAGE_OBJECT_SERIES + _GAUGES + _HISTOGRAMS
)
