"""Messages survive the wire, and nothing else passes for one."""

import struct

import msgspec
import pytest

from vllm_hicache import storage_messages as messages
from vllm_hicache.config import StorageConfig
from vllm_hicache.storage_messages import ProtocolError

HASHES = messages.pack_hashes(bytes([i]) * 32 for i in range(3))
SLOTS = messages.pack_slots([5, 0, 2**31 - 1])
COMMANDS = [
    messages.Attach("token"),
    messages.Exists(1, "hc1-0123", HASHES, 0.05),
    messages.Fetch(2, "hc1-0123", HASHES, SLOTS, 1.5),
    messages.Fetch(2, "hc1-0123", HASHES, SLOTS, 1.5, b"\x00\x03\xff"),
    messages.Persist(3, "hc1-0123", HASHES, SLOTS, 30.0),
    messages.Persist(3, "hc1-0123", HASHES, SLOTS, 30.0, b"\x01\x00\x80"),
    messages.Cancel(2),
    messages.Drain(5.0),
    messages.Ask("token"),
    messages.Configure("token", StorageConfig.parse({"url": "redis://:pw@host:1/0"}), True),
    messages.Configure("token", StorageConfig.detached(), False),
]
EVENTS = [
    messages.Hello(3, 1, 4711, 1, messages.StorageTimes(0.05, 10.0, 5.0)),
    messages.ExistsResult(1, 2, True),
    messages.ExistsResult(1, 0, False, "deadline"),
    messages.ExistsResult(1, 2, True, parts=b"\x00\xff"),
    messages.FetchProgress(2, 1),
    messages.FetchSettled(2, 3, "complete"),
    messages.FetchReleased(2),
    messages.PersistDone(3, 1, 1, 1, "full"),
    messages.PersistReleased(3),
    messages.Drained(),
    messages.Stats({"objects_read": 3.0}),
    messages.Switching(),
]
REPLIES = [
    messages.Standing(0, 2, 4711, 1, "s3://bucket/x", True, {"bytes_read": 1.0}),
    messages.Configured("no such bucket"),
]


@pytest.mark.parametrize(
    ("reader", "sent"),
    [
        (messages.command_reader, COMMANDS),
        (messages.event_reader, EVENTS),
        (messages.reply_reader, REPLIES),
    ],
)
@pytest.mark.parametrize("num_bytes", [1, 7, 1 << 20])
def test_every_message_survives_a_stream_cut_anywhere(reader, sent, num_bytes):
    stream = b"".join(messages.encode_frame(message) for message in sent)
    read = reader()
    pieces = [stream[i : i + num_bytes] for i in range(0, len(stream), num_bytes)]
    assert [message for piece in pieces for message in read.feed(piece)] == sent


def test_slots_are_little_endian_int32():
    assert messages.pack_slots([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert messages.unpack_slots(SLOTS) == [5, 0, 2**31 - 1]
    assert messages.unpack_hashes(HASHES) == [bytes([i]) * 32 for i in range(3)]


@pytest.mark.parametrize("hashes", [b"", b"x" * 31, b"x" * 65])
def test_hashes_that_are_no_whole_pages_are_refused(hashes):
    with pytest.raises(ValueError, match="times 32 bytes"):
        messages.Exists(1, "n", hashes, 1.0)


def test_a_slot_is_needed_for_every_page():
    with pytest.raises(ValueError, match="3 hashes with 8 bytes"):
        messages.Fetch(1, "n", HASHES, SLOTS[:8], 1.0)


@pytest.mark.parametrize("message", [messages.Fetch, messages.Persist])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_parts_are_needed_for_every_page_or_for_none(message, num_parts):
    with pytest.raises(ValueError, match=f"3 pages with the parts of {num_parts}"):
        message(1, "n", HASHES, SLOTS, 1.0, bytes(num_parts))


@pytest.mark.parametrize("num_parts", [1, 3])
def test_parts_of_more_or_fewer_pages_than_are_there_are_refused(num_parts):
    with pytest.raises(ValueError, match=f"2 pages with the parts of {num_parts}"):
        messages.ExistsResult(1, 2, True, parts=bytes(num_parts))
    frame = _frame(msgspec.msgpack.encode(["ExistsResult", 1, 2, True, "", bytes(num_parts)]))
    with pytest.raises(ProtocolError, match="2 pages with the parts"):
        messages.event_reader().feed(frame)


def test_messages_without_parts_are_those_of_a_release_without_them():
    body = msgspec.msgpack.encode(["ExistsResult", 1, 2, True, ""])
    assert messages.event_reader().feed(_frame(body)) == [messages.ExistsResult(1, 2, True)]
    body = msgspec.msgpack.encode(["Fetch", 2, "n", HASHES, SLOTS, 1.5])
    assert messages.command_reader().feed(_frame(body))[0].parts == b""


def _frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<I", messages.MAX_MESSAGE_BYTES + 1),
        _frame(b""),
        _frame(b"\xc1"),
        _frame(msgspec.msgpack.encode(["Explode", 1])),
        _frame(msgspec.msgpack.encode(["Cancel", "one"])),
        _frame(msgspec.msgpack.encode(["Cancel"])),
        _frame(msgspec.msgpack.encode(["Exists", 1, "n", b"short", 0.1])),
        _frame(msgspec.msgpack.encode(["Fetch", 1, "n", HASHES, SLOTS, 0.1, b"12"])),
        _frame(msgspec.msgpack.encode(["Persist", 1, "n", HASHES, SLOTS, 0.1, b"1234"])),
        messages.encode_frame(messages.Drained()),
    ],
    ids=[
        "huge",
        "empty",
        "no msgpack",
        "unknown",
        "type",
        "too few",
        "bad pages",
        "few parts",
        "many parts",
        "direction",
    ],
)
def test_what_is_no_command_is_a_protocol_error(frame):
    with pytest.raises(ProtocolError):
        messages.command_reader().feed(frame)


def test_a_million_tokens_fit_into_one_message():
    pages = 1_000_000 // 16
    fetch = messages.Fetch(1, "n", bytes(32 * pages), bytes(4 * pages), 1.0)
    assert messages.command_reader().feed(messages.encode_frame(fetch)) == [fetch]


def test_newer_senders_may_append_fields():
    body = msgspec.msgpack.encode(["Cancel", 5, "a field of the future"])
    assert messages.command_reader().feed(_frame(body)) == [messages.Cancel(5)]
