"""The header of every stored object, and the wrapper that makes a bad object a miss.

docs/object-format.md holds the byte table. Checksums of large payloads run in threads: XXH3 and
BLAKE2b release the GIL there.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import xxhash

from vllm_hicache.errors import BackendError, ConfigError, CorruptShard
from vllm_hicache.keys import FORMAT_VERSION
from vllm_hicache.storage import (
    HEADER_BYTES,
    FetchOutcome,
    KeepsRecords,
    ObjectRead,
    ObjectWrite,
    ReadOutcome,
    ShardObject,
    StorageBackend,
    WriteOutcome,
)
from vllm_hicache.storage_backends.counters import Counters
from vllm_hicache.storage_backends.io_threads import IoThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_hicache.storage_backends.io_threads import Batch

logger = logging.getLogger(__name__)

R = TypeVar("R")

MAGIC = b"HICACHE\0"
CHECKSUM_XXH3_128 = 1
CHECKSUM_BLAKE2B_256_KEYED = 2

_FIELDS = struct.Struct("<8sIIII32s32sIIIIQ")
_CHECKSUM_OFFSET = 4064
_CHECKSUM_BYTES = HEADER_BYTES - _CHECKSUM_OFFSET
_PADDING = bytes(_CHECKSUM_OFFSET - _FIELDS.size)

# Below this a checksum takes less time (about 5 us) than handing it to a thread (about 50 us), and
# xxhash keeps the GIL anyway.
_INLINE_BYTES = 64 * 1024
# With four, fetches of files in the page cache ran at 18.9 GB/s where plain reads of the same files
# ran at 39.3 (host of an H200, 16 cores, 2026-11-30, `hicache bench restore`); faults of slots that
# were not mapped had a part in it.
_HASH_THREADS = min(12, max(4, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """What the fields of a header say. Nothing is verified but magic and lengths."""

    format_version: int
    checksum_kind: int
    namespace: str
    page_hash: bytes
    layer_start: int
    layer_stop: int
    head_group: int
    pool: str  # 8 hex digits; "" for the first one
    payload_bytes: int
    checksum: bytes  # 32 bytes; XXH3-128 fills 16 (big-endian, canonical) and leaves zeros


def decode_header(header: bytes | memoryview) -> ObjectHeader:
    """Read the fields of the first `HEADER_BYTES` of an object.

    Raises:
        CorruptShard: It is shorter, or does not begin like an object.
    """
    raw = bytes(header[:HEADER_BYTES])
    if len(raw) < HEADER_BYTES or raw[:8] != MAGIC:
        raise CorruptShard(f"not an object: {len(raw)} bytes that begin with {raw[:8]!r}")
    _, version, _, kind, _, namespace, page_hash, start, stop, group, pool, length = (
        _FIELDS.unpack_from(raw)
    )
    return ObjectHeader(
        format_version=version,
        checksum_kind=kind,
        namespace=namespace.rstrip(b"\0").decode("ascii", "replace"),
        page_hash=page_hash,
        layer_start=start,
        layer_stop=stop,
        head_group=group,
        pool=f"{pool:08x}" if pool else "",
        payload_bytes=length,
        checksum=raw[_CHECKSUM_OFFSET:],
    )


class HeaderCodec:
    """Builds and checks headers with one kind of checksum: XXH3-128, or BLAKE2b with a key."""

    def __init__(self, integrity_key: bytes | None = None) -> None:
        if integrity_key == b"":
            raise ConfigError("integrity_key must not be empty")
        self._key = integrity_key and hashlib.blake2b(integrity_key, digest_size=32).digest()
        self._kind = CHECKSUM_BLAKE2B_256_KEYED if self._key else CHECKSUM_XXH3_128

    def encode(self, item: ShardObject) -> bytes:
        """The header of this object, `HEADER_BYTES` long. Reads the whole payload."""
        fields = self._fields(item)
        return fields + self._checksum(fields, item.payload)

    def is_valid(
        self, item: ShardObject, header: memoryview, on_the_way: RunningChecksum | None = None
    ) -> bool:
        """Whether header and payload are exactly what a writer of this object stored.

        What was computed ``on_the_way`` is believed where it says yes and covers all bytes; else
        the payload is read once more.
        """
        fields = self._fields(item)
        if header[:_CHECKSUM_OFFSET] != fields:
            return False
        found = header[_CHECKSUM_OFFSET:]
        if on_the_way is not None and on_the_way.covers(item):
            is_sound = hmac.compare_digest(found, on_the_way.digest())
            if is_sound:
                return True
        return hmac.compare_digest(found, self._checksum(fields, item.payload))

    def begin(self, item: ShardObject) -> RunningChecksum:
        """The checksum of this object, its payload still to come."""
        return RunningChecksum(self._new_hash(self._fields(item)))

    def _fields(self, item: ShardObject) -> bytes:
        """Everything before the checksum: the bytes that a sound object must begin with."""
        namespace = item.namespace.encode("ascii")
        if len(namespace) > 32 or len(item.page_hash) != 32:
            raise ConfigError(
                "an object needs a namespace of at most 32 bytes and a page hash of 32, "
                f"got {len(namespace)} and {len(item.page_hash)}"
            )
        return (
            _FIELDS.pack(
                MAGIC,
                FORMAT_VERSION,
                HEADER_BYTES,
                self._kind,
                0,
                namespace,
                item.page_hash,
                item.shard.layers.start,
                item.shard.layers.stop,
                item.shard.head_group,
                int(item.shard.pool or "0", 16),
                item.payload.nbytes,
            )
            + _PADDING
        )

    def _checksum(self, fields: bytes, payload: memoryview) -> bytes:
        checksum = RunningChecksum(self._new_hash(fields))
        checksum.add(payload)
        return checksum.digest()

    def _new_hash(self, fields: bytes) -> _Hash:
        if not self._key:
            return xxhash.xxh3_128(fields)
        return hashlib.blake2b(fields, digest_size=_CHECKSUM_BYTES, key=self._key)


class _Hash(Protocol):
    def update(self, data: memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


class RunningChecksum:
    """A checksum while the payload arrives; one thread at a time adds to it."""

    def __init__(self, started: _Hash) -> None:
        self._hash = started
        self.num_bytes = 0
        """Of the payload, so far."""
        self.seconds = 0.0

    def add(self, part: memoryview) -> None:
        """The next bytes of the payload."""
        started = time.perf_counter()
        self._hash.update(part)
        self.seconds += time.perf_counter() - started
        self.num_bytes += part.nbytes

    def covers(self, item: ShardObject) -> bool:
        """Whether as many bytes came as the payload has."""
        return self.num_bytes == item.payload.nbytes

    def digest(self) -> bytes:
        """As a header has it."""
        return self._hash.digest().ljust(_CHECKSUM_BYTES, b"\0")


def _as_job(piece: Callable[[], R]) -> Callable[[Batch[R]], R]:
    return lambda _batch: piece()


class CheckedStorage:
    """A backend whose objects are verified before anyone sees them.

    The buffer rule and the errors of `StorageBackend` hold for `fetch` and `persist` too.
    """

    def __init__(self, backend: StorageBackend, *, integrity_key: bytes | None = None) -> None:
        self._backend = backend
        self._codec = HeaderCodec(integrity_key)
        self._threads = IoThreads("checksum", _HASH_THREADS)
        self._counters = Counters(["corrupt_objects", "other_version_objects", "checksum_seconds"])

    @property
    def name(self) -> str:
        """Name of the backend."""
        return self._backend.name

    @property
    def records(self) -> KeepsRecords | None:
        """The backend's records of namespaces, where it keeps any. They prove themselves."""
        return self._backend if isinstance(self._backend, KeepsRecords) else None

    async def open(self) -> None:
        """As `StorageBackend.open`."""
        await self._backend.open()

    async def close(self) -> None:
        """As `StorageBackend.close`."""
        await self._backend.close()
        await self._threads.close()

    async def exists(self, names: Sequence[str]) -> list[bool]:
        """Say for each name whether an object is there. It may still prove corrupt."""
        return await self._backend.contains(names)

    async def fetch(self, items: Sequence[ShardObject]) -> list[FetchOutcome]:
        """Read and verify each object into its payload view.

        A payload may be overwritten whatever the outcome. A corrupt object is removed; when that
        fails it stays a miss at every further fetch. An object of another format version counts
        as missing and stays: to those who wrote it, it is sound.
        """
        running = [self._codec.begin(item) for item in items]
        reads = [
            ObjectRead(item.name, memoryview(bytearray(HEADER_BYTES)), item.payload, checksum.add)
            for item, checksum in zip(items, running, strict=True)
        ]
        outcomes = await self._backend.read(reads)
        present = [i for i, outcome in enumerate(outcomes) if outcome is ReadOutcome.OK]
        verdicts = await self._in_threads(
            [self._verification(items[i], reads[i].header, running[i]) for i in present]
        )
        self._counters.add(checksum_seconds=sum(checksum.seconds for checksum in running))
        valid = dict(zip(present, verdicts, strict=True))
        results = [
            FetchOutcome.OK if valid.get(i, False) else self._verdict(outcome, reads[i])
            for i, outcome in enumerate(outcomes)
        ]
        for i, result in enumerate(results):
            if result is FetchOutcome.CORRUPT:
                await self._remove(items[i], _what_is_wrong(items[i], outcomes[i], reads[i].header))
        return results

    def _verdict(self, outcome: ReadOutcome, read: ObjectRead) -> FetchOutcome:
        """What an object is that is not valid."""
        if outcome is ReadOutcome.MISSING:
            return FetchOutcome.MISSING
        version = _other_version(read.header)
        if version is None:
            return FetchOutcome.CORRUPT
        self._counters.add(other_version_objects=1)
        logger.warning(
            "object %s has format version %d, this release reads %d: it is left alone",
            read.name,
            version,
            FORMAT_VERSION,
        )
        return FetchOutcome.MISSING

    async def persist(self, items: Sequence[ShardObject]) -> list[WriteOutcome]:
        """Store each object with its header. Existing objects are not written again."""
        headers = await self._in_threads(
            [(self._encoder(item), item.payload.nbytes) for item in items]
        )
        return await self._backend.write(
            [
                ObjectWrite(item.name, header, item.payload)
                for item, header in zip(items, headers, strict=True)
            ]
        )

    async def clear(self, namespace: str) -> int:
        """As `StorageBackend.clear`."""
        return await self._backend.clear(namespace)

    def stats(self) -> dict[str, float]:
        """The backend's totals with the counters of this class."""
        return {**self._backend.stats(), **self._counters.snapshot()}

    def oldest_running_s(self) -> float:
        """As `StorageBackend.oldest_running_s`, checksums included."""
        return max(self._backend.oldest_running_s(), self._threads.oldest_running_s())

    def _verification(
        self, item: ShardObject, header: memoryview, running: RunningChecksum
    ) -> tuple[Callable[[], bool], int]:
        """What says whether an object is sound, and the bytes that it will read for it."""
        num_bytes = 0 if running.covers(item) else item.payload.nbytes
        return lambda: self._codec.is_valid(item, header, running), num_bytes

    def _encoder(self, item: ShardObject) -> Callable[[], bytes]:
        return lambda: self._codec.encode(item)

    async def _in_threads(self, work: Sequence[tuple[Callable[[], R], int]]) -> list[R]:
        """Do pieces of work, given with their bytes: small ones here, large ones in threads."""
        started = time.perf_counter()
        large = [i for i, (_, num_bytes) in enumerate(work) if num_bytes > _INLINE_BYTES]
        jobs = [_as_job(work[i][0]) for i in large]
        results = dict(zip(large, await self._threads.run(jobs, timeout_s=None), strict=True))
        done = [results[i] if i in results else piece() for i, (piece, _) in enumerate(work)]
        self._counters.add(checksum_seconds=time.perf_counter() - started)
        return done

    async def _remove(self, item: ShardObject, problem: str) -> None:
        self._counters.add(corrupt_objects=1)
        logger.warning("removing corrupt object %s: %s", item.name, problem)
        try:
            await self._backend.delete([item.name])
        except BackendError as error:
            logger.warning("could not remove corrupt object %s: %s", item.name, error)


def _other_version(header: memoryview) -> int | None:
    """The format version of what begins like an object of another one."""
    try:
        version = decode_header(header).format_version
    except CorruptShard:
        return None
    return version if version != FORMAT_VERSION else None


def _what_is_wrong(item: ShardObject, outcome: ReadOutcome, header: memoryview) -> str:
    """A guess at the reason, for the log."""
    if outcome is ReadOutcome.BAD_LENGTH:
        return "wrong length"
    try:
        found = decode_header(header)
    except CorruptShard as error:
        return str(error)
    shard = item.shard
    expected = {
        "namespace": item.namespace,
        "page_hash": item.page_hash,
        "layer_start": shard.layers.start,
        "layer_stop": shard.layers.stop,
        "head_group": shard.head_group,
        "pool": shard.pool,
        "payload_bytes": item.payload.nbytes,
    }
    wrong = [name for name, value in expected.items() if getattr(found, name) != value]
    return f"wrong {', '.join(wrong)}" if wrong else "wrong checksum"
