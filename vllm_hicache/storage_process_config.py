"""What a worker tells its storage process at birth."""

import signal

import msgspec

from vllm_hicache.config import StorageConfig
from vllm_hicache.detached_process import ProcessIdentity
from vllm_hicache.errors import ConfigError
from vllm_hicache.layout import Shard
from vllm_hicache.pools import MAX_BITS

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


class Section(msgspec.Struct, frozen=True):
    """What a worker has of one pool: a region of its arena, and the objects in each slot of it."""

    base: int  # byte offset of the region
    slot_stride: int  # bytes from one host slot to the next
    shards: tuple[Shard, ...]  # at least one; non-overlapping, inside a slot
    own_shards: tuple[Shard, ...]  # those that this worker writes
    bit: int | None = None
    """Its place in the parts of a page; None: required, no page is without it."""
    may_be_zero: bool = False
    """Whether a page that is fetched without it has zeros there."""

    def __post_init__(self) -> None:
        if not self.shards:
            raise ConfigError("a section needs shards, got none")
        end = max(shard.offset + shard.length for shard in self.shards)
        if end > self.slot_stride:
            raise ConfigError(f"shards end at byte {end} of a slot of {self.slot_stride} bytes")
        if self.bit is not None and not 0 <= self.bit < MAX_BITS:
            raise ConfigError(f"a bit is one of {MAX_BITS}, got {self.bit}")
        if self.may_be_zero and self.bit is None:
            raise ConfigError("only a section with a bit may be zero")

    def is_in(self, parts: int) -> bool:
        """Whether a page with these parts has it."""
        return self.bit is None or bool(parts >> self.bit & 1)


class StorageProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's arena, the sections of its pages, and the storage that keeps them.

    The tuning values below ``storage`` are no options: tests shorten them.
    """

    worker_id: int
    num_slots: int
    sections: tuple[Section, ...]  # of the pools that this worker has, at least one
    all_parts: int = 0
    """Bits of all pools of the model, also of those that this worker has nothing of."""
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

    def __post_init__(self) -> None:
        if not self.sections:
            raise ConfigError("a storage process needs at least one section, got none")
        bits = sum({1 << section.bit for section in self.sections if section.bit is not None})
        if not 0 <= self.all_parts < 1 << MAX_BITS or bits & ~self.all_parts:
            raise ConfigError(f"all parts are {self.all_parts:#x}, but the sections have {bits:#x}")
        end = 0
        for section in sorted(self.sections, key=lambda section: section.base):
            if section.base < end:
                raise ConfigError(f"a region begins at byte {section.base}, before byte {end}")
            end = section.base + self.num_slots * section.slot_stride

    @property
    def arena_bytes(self) -> int:
        """Where the last region ends."""
        return max(s.base + self.num_slots * s.slot_stride for s in self.sections)


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
