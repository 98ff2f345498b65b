"""What the storage tier promises: the backend protocol and the values it speaks in.

A backend moves whole objects (4,096-byte header + payload) by name. It knows nothing of layouts,
checksums or vLLM; `vllm_hicache.storage_backends.envelope.CheckedStorage` adds the checksums.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_hicache.layout import Shard

HEADER_BYTES = 4096
"""Length of every object's header, so that payloads stay page-aligned in files."""
MAX_RECORD_BYTES = 4096
MAX_RECORDS = 64
"""So many namespaces a store describes; the ones that were written to last."""


class ReadOutcome(Enum):
    """What became of one read. The buffers hold the object only after `OK`."""

    OK = "ok"
    MISSING = "missing"
    BAD_LENGTH = "bad_length"
    """The stored object is shorter or longer than header plus payload."""


class WriteOutcome(Enum):
    """What became of one write."""

    STORED = "stored"
    EXISTS = "exists"
    """An object of this name and length was there; nothing was written."""
    FULL = "full"
    """Nothing was written: no room could be made, or the store does not accept writes."""


class FetchOutcome(Enum):
    """What became of one verified read. The payload may be used only after `OK`."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    """Length, header or checksum were wrong. The object has been removed and counted."""


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """One object to read: both views are written to, and filled exactly."""

    name: str
    header: memoryview  # [HEADER_BYTES] uint8, writable
    payload: memoryview  # [payload_bytes] uint8, writable; usually a slice of the host pool
    on_part: Callable[[memoryview], None] | None = None
    """A backend that fills `payload` in order may call this with each part that it has filled,
    from the thread that did, while the bytes are in the processor's cache: the checksum is then
    computed on the way. It calls for all parts, once each and in order, or for none."""


@dataclass(frozen=True, slots=True)
class ObjectWrite:
    """One object to write: both views are only read."""

    name: str
    header: bytes | bytearray | memoryview  # [HEADER_BYTES] uint8
    payload: memoryview  # [payload_bytes] uint8; usually a slice of the host pool


@dataclass(frozen=True, slots=True)
class ShardObject:
    """One shard of one page, with all that its header must say, and the pool bytes it fills.

    `fetch` writes to `payload`, `persist` only reads it.
    """

    name: str
    namespace: str
    page_hash: bytes  # 32 bytes
    shard: Shard  # `layers`, `head_group` and `pool` go into the header
    payload: memoryview  # [shard.length] uint8


class StorageBackend(Protocol):
    """A store of immutable objects, called from one asyncio loop in batches.

    Buffers: a call returns, raises or lets `CancelledError` through only when no thread and no
    kernel request touches the buffers of its batch any more. A call whose deadline passed while a
    system call hangs therefore stays away; `oldest_running_s` tells a watchdog about it. Calls do
    not wait for one another beyond the backend's own concurrency limits.

    Errors: absence and lack of room are outcomes. `BackendUnavailable` and `BackendTimeout` mean
    that the whole batch has no answer (some of its writes may have been done, which is harmless:
    an object's bytes follow from its name). Nothing else is raised but `CancelledError` and
    programming errors.
    """

    @property
    def name(self) -> str:
        """Short name for messages and metrics, such as `file`. Carries no credentials."""
        ...

    async def open(self) -> None:
        """Connect, and clean up what dead writers left.

        Raises:
            ConfigError: The address cannot be right (for example, it names a regular file).
            BackendUnavailable: It may be right, but cannot be reached now; may be tried again.
        """
        ...

    async def close(self) -> None:
        """Stop accepting calls and release everything that is not hung. May be called twice."""
        ...

    async def contains(self, names: Sequence[str]) -> list[bool]:
        """Say for each name whether an object is there now. Reads no payload."""
        ...

    async def read(self, reads: Sequence[ObjectRead]) -> list[ReadOutcome]:
        """Read each object into its two views, straight where the client allows."""
        ...

    async def write(self, writes: Sequence[ObjectWrite]) -> list[WriteOutcome]:
        """Store each object atomically: readers see all of it or nothing.

        An object of the same name and length is left as it is; one of another length is replaced.
        """
        ...

    async def delete(self, names: Sequence[str]) -> int:
        """Remove objects and return how many were there. Absent ones are not an error."""
        ...

    async def clear(self, namespace: str) -> int:
        """Remove every object of one namespace and return how many. Has no deadline."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Totals since construction, and current levels (names ending in `_now`).

        Every name is present from the start. At least: `objects_read`, `objects_written`,
        `objects_deleted`, `bytes_read`, `bytes_written`, `read_seconds`, `write_seconds`.
        """
        ...

    def oldest_running_s(self) -> float:
        """Seconds for which the longest running I/O of this backend has run; 0.0 when idle."""
        ...


@runtime_checkable
class KeepsRecords(Protocol):
    """What a backend may offer besides: small records that say what its namespaces stand for.

    A backend without it works as well; nobody is then told why nothing is found. Records lie
    apart from objects, so that reading them lists nothing else. Deadlines and errors are those of
    `StorageBackend`; `clear` removes the record of its namespace too, and does not count it.
    """

    async def write_record(self, namespace: str, record: bytes) -> WriteOutcome:
        """Store or renew a record of at most `MAX_RECORD_BYTES`; `EXISTS` where it was there.

        Of more than `MAX_RECORDS` those renewed longest ago may go.
        """
        ...

    async def read_records(self) -> dict[str, bytes]:
        """The records of up to `MAX_RECORDS` namespaces, those renewed last."""
        ...


@runtime_checkable
class TellsRoom(Protocol):
    """What a backend may offer besides: how full it is, and what makes room."""

    async def room(self) -> dict[str, str | int | None]:
        """Facts for a person to read. Sizes in bytes; None where nobody knows or nothing limits."""
        ...
