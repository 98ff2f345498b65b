"""What must have happened in a full run, and how often: stories without it prove little."""

from collections import Counter

MIN_TIMES = 1_000
FULL_STEPS = 1_000_000
FULL_SEEDS = 10_000

FAULTS = (
    "aborted while loading",
    "aborted while running",
    "aborted while waiting",
    "cached blocks lost",
    "call hung",
    "calls reordered",
    "deadline passed",
    "failures forgotten",
    "host memory refused",
    "load failed",
    "message lost",
    "message repeated",
    "message unsent",
    "object corrupt",
    "object missing",
    "objects lost",
    "offer ignored",
    "pages left host",
    "preempted",
    "question hung",
    "question refused",
    "report dropped",
    "report late",
    "reset under copies",
    "resets",
    "save failed",
    "storage attached",
    "storage detached",
    "storage full",
    "storage killed",
    "storage silent",
    "surplus of a fast worker",
    "worker held up",
    "write refused",
)
"""What the simulator does to the planner."""

TRANSITIONS = (
    "asynchronous loads",
    "deferred",
    "fetch_ended/cancelled",
    "fetch_ended/complete",
    "fetch_ended/corrupt",
    "fetch_ended/deadline",
    "fetch_ended/host_full",
    "fetch_ended/missing",
    "fetch_ended/reset",
    "fetch_ended/unavailable",
    "fetch_retries/found",
    "fetch_retries/left",
    "fetch_retries/nothing",
    "fetch_retries/reissued",
    "finished",
    "found_tokens/host",
    "found_tokens/storage",
    "host slots ready",
    "idle steps",
    "ignored_reports",
    "load outlived its request",
    "loads failed or outdated",
    "pages published",
    "persist_dropped_tokens/backlog",
    "persist_dropped_tokens/deadline",
    "persist_dropped_tokens/full",
    "persist_dropped_tokens/reset",
    "persist_dropped_tokens/unavailable",
    "persisted_bytes",
    "save_skipped_tokens/chain_broken",
    "save_skipped_tokens/copy_failed",
    "save_skipped_tokens/host_full",
    "save_skipped_tokens/not_wanted",
    "save_skipped_tokens/reset",
    "served_tokens/host",
    "served_tokens/storage",
    "storage_restarts",
    "synchronous loads",
    "truncated",
    "unserved_tokens/aborted",
    "unserved_tokens/below_minimum",
    "unserved_tokens/cap",
    "unserved_tokens/deadline",
    "unserved_tokens/deferred_budget",
    "unserved_tokens/host_full",
    "unserved_tokens/load_failed",
    "unserved_tokens/no_blocks",
    "unserved_tokens/not_wanted",
    "unserved_tokens/reset",
    "unserved_tokens/short_fetch",
    "unserved_tokens/skip_reading",
)
"""What the planner and the virtual vLLM do; names with a slash are counters of metrics."""


def too_rare(counts: Counter[str], min_times: int = MIN_TIMES) -> list[str]:
    """Faults and transitions that happened fewer times than that.

    >>> len(too_rare(Counter())) == len(FAULTS) + len(TRANSITIONS)
    True
    """
    return [name for name in (*FAULTS, *TRANSITIONS) if counts[name] < min_times]
