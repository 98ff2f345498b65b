"""What a worker tells its storage process at birth."""

import signal

import msgspec

from vllm_hicache.config import StorageConfig
from vllm_hicache.detached_process import ProcessIdentity
from vllm_hicache.layout import Shard

ENDINGS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that the process ignores: the lifeline alone ends it."""
EXIT_CONFIG = 2
"""Exit status for a configuration that no restart can mend."""
EXIT_HUNG = 3
"""Exit status after a hang: start the process anew."""
EXIT_SWITCHED = 4
"""Exit status of a process that makes room for one with another storage."""


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a storage process tells its worker through the status pipe, one JSON line each.

    Without a status: the configuration is valid, whether or not storage can be reached now.
    """

    status: int | None = None  # it ends with
    reason: str = ""
    next_storage: StorageConfig | None = None
    """What its successors serve, from now on."""


class StorageProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's pool, the shards of its pages, and the storage that keeps them.

    The tuning values below ``storage`` are no options: tests shorten them.
    """

    worker_id: int
    num_slots: int
    slot_stride: int  # bytes from one host slot to the next
    shards: tuple[Shard, ...]  # this worker's, non-overlapping, inside a slot
    own_shards: tuple[Shard, ...] | None = None  # those that it writes; None: all
    storage: StorageConfig
    exists_concurrency: int = 8
    # A call that takes longer gives its place to others. A healthy call takes milliseconds.
    stall_s: float = 0.5
    # A call that runs this long is never coming back: the process ends and is started anew.
    hang_limit_s: float = 60.0
    breaker_failures: int = 5
    breaker_backoff_s: float = 1.0
    # Longer would keep a storage that has returned away from its users: hits are back in 30 s.
    breaker_max_backoff_s: float = 10.0
    # After so many pages without one hit the records of other namespaces are looked at, once.
    near_miss_pages: int = 16


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What one incarnation inherits, read from the descriptor ``--config-fd``."""

    config: StorageProcessConfig
    incarnation: int
    attachment: int
    """Number of this storage among those that this worker served; 0: there is none."""
    parent: ProcessIdentity
    token: str  # what a scheduler has to show
    listen_fd: int
    pool_fd: int
    lifeline_fd: int  # end of file: the worker is gone or has let go
