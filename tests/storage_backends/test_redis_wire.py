"""The bytes between client and server: cut at any place, nonsense, and without copies."""

import asyncio
import contextlib
import tracemalloc

import pytest
from redis_under_test import backend_of, opened, running

from vllm_hicache.errors import BackendUnavailable
from vllm_hicache.storage import HEADER_BYTES, ObjectRead, ReadOutcome, WriteOutcome
from vllm_hicache.storage_backends.conformance import object_name, object_read, object_write
from vllm_hicache.storage_backends.redis_wire import ConnectionLost, Refusal, Values

MIB = 1 << 20


def tiny_read(header_bytes: int = 4, payload_bytes: int = 3) -> ObjectRead:
    return ObjectRead(
        "name", memoryview(bytearray(header_bytes)), memoryview(bytearray(payload_bytes))
    )


def receive(values: Values, data: bytes, piece_bytes: int) -> None:
    """Feed as the transport does: straight into a target where there is one."""
    while data:
        if values.target:
            num_bytes = min(piece_bytes, len(values.target), len(data))
            values.target[:num_bytes] = data[:num_bytes]
            values.filled(num_bytes)
        else:
            num_bytes = min(piece_bytes, len(data))
            values.feed(memoryview(data[:num_bytes]))
        assert values.is_complete == (num_bytes == len(data))
        data = data[num_bytes:]


@pytest.mark.parametrize("piece_bytes", range(1, 90))
@pytest.mark.parametrize("num_ignored", [0, 1])
def test_answers_may_be_cut_anywhere(piece_bytes, num_ignored):
    reads = [tiny_read() for _ in range(6)] + [tiny_read(4, 0)]
    answers = [
        b"$7\r\nHEADabc\r\n",
        b"$-1\r\n",
        b"$5\r\n\r\n$7\r\r\n",
        b"-WRONGTYPE not a string\r\n",
        b"$0\r\n\r\n",
        b"$7\r\nTAIL\r\nx\r\n",
        b"$4\r\nLAST\r\n",
    ]
    extra = b":1\r\n" * num_ignored
    values = Values(reads, num_ignored)
    receive(values, b"".join(answer + extra for answer in answers), piece_bytes)
    outcomes = values.result()
    assert [o for o in outcomes if not isinstance(o, Refusal)] == [
        ReadOutcome.OK,
        ReadOutcome.MISSING,
        ReadOutcome.BAD_LENGTH,
        ReadOutcome.BAD_LENGTH,
        ReadOutcome.OK,
        ReadOutcome.OK,
    ]
    assert outcomes[3].code == "WRONGTYPE"
    assert bytes(reads[0].header) + bytes(reads[0].payload) == b"HEADabc"
    assert bytes(reads[5].header) + bytes(reads[5].payload) == b"TAIL\r\nx"
    assert bytes(reads[6].header) == b"LAST"
    assert not any(reads[2].header)


@pytest.mark.parametrize(
    "nonsense", [b"HTTP/1.1 400\r\n", b"$x\r\n", b"*1\r\n", b":5\r\n", b"x" * 70_000, b"\r\n"]
)
def test_answer_that_is_no_value_is_refused(nonsense):
    with pytest.raises(ConnectionLost):
        Values([tiny_read()]).feed(memoryview(nonsense))


def test_answer_without_a_question_is_refused():
    with pytest.raises(ConnectionLost, match="more answers"):
        Values([tiny_read()]).feed(memoryview(b"$-1\r\n$-1\r\n"))


@contextlib.asynccontextmanager
async def impostor(answer_to_get: bytes):
    """Something that answers like Redis until it is asked for a value."""
    writers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while line := await reader.readline():
            if line[:1] != b"*":
                continue
            words = []
            for _ in range(int(line[1:])):
                size = int((await reader.readline())[1:])
                words.append((await reader.readexactly(size + 2))[:-2])
            writer.write(_answer(words, answer_to_get))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)


def _answer(words: list[bytes], answer_to_get: bytes) -> bytes:
    if words[0] == b"GET":
        return b"$-1\r\n" if b"probe" in words[1] else answer_to_get
    if words[0] == b"SCAN":
        return b"*2\r\n$1\r\n0\r\n*0\r\n"
    return b"+OK\r\n" if words[0] in (b"CLIENT", b"SET") else b":0\r\n"


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$-1\r\n:1\r\n", b"$14\r\n", b"-ERR no\r\n"]
)
async def test_server_that_answers_nonsense_is_unavailable(answer):
    async with impostor(answer) as url, opened(url, operation_timeout_s=0.2) as backend:
        for _ in range(2):
            with pytest.raises(BackendUnavailable):
                await backend.read([object_read(1, 10)])
        assert await backend.contains([object_name(1)]) == [False]


async def test_web_server_is_no_redis():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(BackendUnavailable):
        await backend_of(f"redis://127.0.0.1:{port}").open()
    server.close()
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("scheme", ["redis", "redis+unix"])
async def test_values_are_neither_joined_nor_copied(tmp_path, scheme):
    with running(tmp_path / "server") as server:
        url = server.url if scheme == "redis" else f"redis+unix://{server.socket}"
        async with opened(url) as backend:
            writes = [object_write(n, 4 * MIB) for n in range(4)]
            reads = [object_read(n, 4 * MIB) for n in range(4)]
            await backend.write([object_write(9, MIB)])  # connects
            tracemalloc.start()
            try:
                outcomes = await backend.write(writes)
                _, peak_of_writes = tracemalloc.get_traced_memory()
                tracemalloc.reset_peak()
                assert await backend.read(reads) == [ReadOutcome.OK] * 4
                _, peak_of_reads = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert outcomes == [WriteOutcome.STORED] * 4
            assert all(r.payload == w.payload for r, w in zip(reads, writes, strict=True))
            # Two connections for 16 MiB: scratch buffers, and what sockets do not take at once.
            assert peak_of_writes < 2 * MIB
            assert peak_of_reads < MIB // 2


async def test_header_of_any_kind_of_bytes_is_sent(tmp_path):
    with running(tmp_path / "server") as server:
        async with opened(server.url) as backend:
            for number, kind in enumerate((bytes, bytearray, memoryview)):
                write = object_write(number, 10)
                other = type(write)(write.name, kind(write.header), write.payload)
                assert await backend.write([other]) == [WriteOutcome.STORED]
                read = object_read(number, 10)
                assert await backend.read([read]) == [ReadOutcome.OK]
                assert len(read.header) == HEADER_BYTES
                assert read.header == write.header
