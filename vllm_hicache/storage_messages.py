"""What crosses the boundary between the scheduler, a worker and its storage process.

Messages are tagged msgpack arrays behind a 4-byte little-endian length; nothing is pickled.
Times are seconds from receipt, so that no two clocks have to agree.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Generic, Literal, TypeVar

import msgspec

from vllm_hicache.config import StorageConfig

HASH_BYTES = 32
SLOT_BYTES = 4
# A million tokens in pages of 16 is 2.3 MB; anything larger is not one of our messages.
MAX_MESSAGE_BYTES = 64 << 20
RECEIVE_BYTES = 256 << 10

ExistsReason = Literal["", "deadline", "unavailable", "cancelled"]
FetchReason = Literal["complete", "missing", "corrupt", "deadline", "cancelled", "unavailable"]
PersistReason = Literal["complete", "backlog", "full", "deadline", "cancelled", "unavailable"]


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


def pack_hashes(page_hashes: Iterable[bytes]) -> bytes:
    """Concatenate page hashes of 32 bytes each."""
    return b"".join(page_hashes)


def unpack_hashes(packed: bytes) -> list[bytes]:
    """Undo ``pack_hashes``.

    >>> unpack_hashes(pack_hashes([b"a" * 32, b"b" * 32]))[1] == b"b" * 32
    True
    """
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]


def pack_slots(host_slots: Sequence[int]) -> bytes:
    """Host slots as little-endian int32."""
    return struct.pack(f"<{len(host_slots)}i", *host_slots)


def unpack_slots(packed: bytes) -> list[int]:
    """Undo ``pack_slots``.

    >>> unpack_slots(pack_slots([7, 0]))
    [7, 0]
    """
    return list(struct.unpack(f"<{len(packed) // SLOT_BYTES}i", packed))


def _check_pages(hashes: bytes, slots: bytes | None = None, parts: bytes = b"") -> None:
    if not hashes or len(hashes) % HASH_BYTES:
        raise ValueError(f"hashes must be n > 0 times {HASH_BYTES} bytes, got {len(hashes)}")
    if slots is not None and len(slots) * HASH_BYTES != len(hashes) * SLOT_BYTES:
        raise ValueError(f"{len(hashes) // HASH_BYTES} hashes with {len(slots)} bytes of slots")
    _check_parts(len(hashes) // HASH_BYTES, parts)


def _check_parts(num_pages: int, parts: bytes) -> None:
    if parts and len(parts) != num_pages:
        raise ValueError(f"{num_pages} pages with the parts of {len(parts)}")


# Scheduler -> storage process ---------------------------------------------------------------


class Attach(_Message, frozen=True, tag=True):
    """First message of a connection; the channel sends it. ``token`` comes with the address."""

    token: str


class Exists(_Message, frozen=True, tag=True):
    """How many leading pages does storage hold? Answered by one ``ExistsResult``."""

    op: int
    namespace: str
    hashes: bytes
    deadline_s: float

    def __post_init__(self) -> None:
        _check_pages(self.hashes)


class Fetch(_Message, frozen=True, tag=True):
    """Read page i into host slot i of ``slots``.

    ``parts`` has one byte for each page: the mask of what to read besides the required sections;
    b"" is nothing besides. What may be zero and is not in it is filled with zeros. Answered by any
    number of ``FetchProgress``, one ``FetchSettled`` and one ``FetchReleased``.
    """

    op: int
    namespace: str
    hashes: bytes
    slots: bytes
    deadline_s: float
    parts: bytes = b""

    def __post_init__(self) -> None:
        _check_pages(self.hashes, self.slots, self.parts)


class Persist(_Message, frozen=True, tag=True):
    """Store page i from host slot i: one ``PersistDone``, then one ``PersistReleased``.

    ``parts`` has one byte for each page: the mask of what to write besides the required sections.
    """

    op: int
    namespace: str
    hashes: bytes
    slots: bytes
    deadline_s: float
    parts: bytes = b""

    def __post_init__(self) -> None:
        _check_pages(self.hashes, self.slots, self.parts)


class Cancel(_Message, frozen=True, tag=True):
    """Stop an operation early; it still gives all its answers. Unknown numbers are ignored."""

    op: int


class Drain(_Message, frozen=True, tag=True):
    """Finish queued persists by the deadline, drop the rest, answer ``Drained``.

    New reads are refused until then ("cancelled"); afterwards the process works as before.
    """

    deadline_s: float


class Describe(_Message, frozen=True, tag=True):
    """The record of the namespace that operations will mostly name; it decides nothing."""

    record: bytes


class Ask(_Message, frozen=True, tag=True):
    """First and only message of a connection that wants to know: answered by ``Standing``."""

    token: str


class Configure(_Message, frozen=True, tag=True):
    """First and only message of a connection: serve ``storage`` from now on, or none.

    Without ``commit`` the process opens that storage and closes it again, nothing more. With it, a
    successor that serves it takes over. Answered by ``Configured``.
    """

    token: str
    storage: StorageConfig
    commit: bool


Command = Attach | Exists | Fetch | Persist | Cancel | Drain | Describe | Ask | Configure


# Storage process -> scheduler ---------------------------------------------------------------


class StorageTimes(msgspec.Struct, frozen=True, array_like=True):
    """What the options of the storage that is attached allow; seconds."""

    exists_s: float
    operation_s: float
    grace_s: float

    @classmethod
    def of(cls, storage: StorageConfig) -> "StorageTimes":
        return cls(storage.exists_timeout_s, storage.operation_timeout_s, storage.shutdown_grace_s)


class Hello(_Message, frozen=True, tag=True):
    """First message of a connection: no thread touches a host slot for an earlier operation.

    ``attachment`` numbers the storages that a worker's processes served one after the other; 0
    while there is none. A restart keeps it.
    """

    worker_id: int
    incarnation: int
    pid: int
    attachment: int
    times: StorageTimes


class ExistsResult(_Message, frozen=True, tag=True):
    """Of ``num_leading`` pages all required sections are there for certain.

    ``parts`` has one byte for each of them: the mask of what is there besides, completely or with
    nothing of it on this worker; b"" where no page ever has more than is required.
    ``ok``: the page after them is certainly absent (or there is none). Otherwise ``reason`` says
    why the question stayed open; that is never a sign of absence.
    """

    op: int
    num_leading: int
    ok: bool
    reason: ExistsReason = ""
    parts: bytes = b""

    def __post_init__(self) -> None:
        _check_parts(self.num_leading, self.parts)


class FetchProgress(_Message, frozen=True, tag=True):
    """The leading ``num_pages`` are verified in their host slots. Only ever grows."""

    op: int
    num_pages: int


class FetchSettled(_Message, frozen=True, tag=True):
    """The final number of leading verified pages. Other slots may still be written to."""

    op: int
    num_pages: int
    reason: FetchReason


class FetchReleased(_Message, frozen=True, tag=True):
    """No thread touches a slot of this fetch any more. Always after ``FetchSettled``."""

    op: int


class PersistDone(_Message, frozen=True, tag=True):
    """``num_stored + num_existing + num_dropped`` is the number of pages of the persist.

    A page counts as stored or existing only when all that this worker was to write of it is in
    storage.
    ``reason`` is that of the first drop, or "complete".
    """

    op: int
    num_stored: int
    num_existing: int
    num_dropped: int
    reason: PersistReason
    num_bytes: int = 0
    """Of all objects that were written."""


class PersistReleased(_Message, frozen=True, tag=True):
    """No thread reads a slot of this persist any more. Always after ``PersistDone``."""

    op: int


class Drained(_Message, frozen=True, tag=True):
    """Every persist received before the ``Drain`` is done or dropped."""


class Stats(_Message, frozen=True, tag=True):
    """Counters since the process started and gauges; at most every second, when changed."""

    counters: dict[str, float]


class NearMisses(_Message, frozen=True, tag=True):
    """Nothing was found so far, and these records of the store differ in few fields; once."""

    records: tuple[bytes, ...]


class Switching(_Message, frozen=True, tag=True):
    """This process ends now, because its successor serves another storage or none."""


class Standing(_Message, frozen=True, tag=True):
    """What a storage process serves. ``url`` is masked, "" while it serves none."""

    worker_id: int
    incarnation: int
    pid: int
    attachment: int
    url: str
    is_open: bool
    counters: dict[str, float]


class Configured(_Message, frozen=True, tag=True):
    """``refusal`` says why not; "" when it was done."""

    refusal: str


Event = (
    Hello
    | ExistsResult
    | FetchProgress
    | FetchSettled
    | FetchReleased
    | PersistDone
    | PersistReleased
    | Drained
    | Stats
    | NearMisses
    | Switching
)
Reply = Standing | Configured


# Framing ------------------------------------------------------------------------------------

_ENCODER = msgspec.msgpack.Encoder()
_LENGTH = struct.Struct("<I")
_T = TypeVar("_T")


def encode_frame(message: Command | Event | Reply) -> bytes:
    """One message as it goes over the wire."""
    body = _ENCODER.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader(Generic[_T]):
    """Cuts a byte stream into messages of one union; ``ProtocolError`` for anything else."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[_T]") -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[_T]:
        """Take the next bytes of the stream and return the messages that they complete."""
        buffer = self._buffer
        buffer += data
        messages: list[_T] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"a message of {length} bytes, allowed {MAX_MESSAGE_BYTES}")
            stop = start + _LENGTH.size + length
            if stop > len(buffer):
                break
            try:
                messages.append(self._decoder.decode(buffer[start + _LENGTH.size : stop]))
            except msgspec.DecodeError as error:
                raise ProtocolError(f"not a message of this channel: {error}") from error
            start = stop
        del buffer[:start]
        return messages


class ProtocolError(ConnectionError):
    """The other end of a channel sent something that is not a message; the channel is closed."""


def command_reader() -> FrameReader[Command]:
    """The storage process's end of the stream."""
    return FrameReader(msgspec.msgpack.Decoder(Command))


def event_reader() -> FrameReader[Event]:
    """The scheduler's end of the stream."""
    return FrameReader(msgspec.msgpack.Decoder(Event))


def reply_reader() -> FrameReader[Reply]:
    """The end of who asks or configures."""
    return FrameReader(msgspec.msgpack.Decoder(Reply))
