"""What every storage backend must do, as a class of tests that a backend's own test inherits.

    class TestMine(StorageBackendTests):
        def open_for_test(self, place):
            return MyBackend(place)

        def writer_program(self, place):
            return None  # where processes share the store: a program that writes to it

Needs pytest with pytest-asyncio in its automatic mode. Third-party backends may use it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from vllm_hicache.keys import shard_name
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.storage import (
    HEADER_BYTES,
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    FetchOutcome,
    KeepsRecords,
    ObjectRead,
    ObjectWrite,
    ReadOutcome,
    ShardObject,
    StorageBackend,
    WriteOutcome,
)
from vllm_hicache.storage_backends.envelope import CheckedStorage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NAMESPACE = "hc1-0123456789abcdef"
OTHER_NAMESPACE = "hc1-fedcba9876543210"
POOLS = ("", "00000001", "89abcdef")
"""The first pool of a model, and others."""

_MIB = 1024 * 1024


def object_name(number: int, namespace: str = NAMESPACE, pool: str = "") -> str:
    """Name of the object that stands for a number, in the first pool or in another one."""
    return shard_name(_page_hash(number), namespace, Shard(LayerSpan(0, 8), 0, 0, 0, pool))


def _page_hash(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def shard_object(number: int, num_bytes: int, pool: str = "") -> ShardObject:
    """The same with all that its header must say; its payload is zeros and may be written to."""
    shard = Shard(LayerSpan(0, 8), 0, 0, num_bytes, pool)
    page_hash, payload = _page_hash(number), memoryview(bytearray(num_bytes))
    return ShardObject(object_name(number, NAMESPACE, pool), NAMESPACE, page_hash, shard, payload)


def object_write(number: int, num_bytes: int, namespace: str = NAMESPACE) -> ObjectWrite:
    """An object whose header and payload repeat a pattern that depends on the number alone."""
    pattern = hashlib.sha256(f"bytes of {number}".encode()).digest()
    whole = (pattern * -(-(HEADER_BYTES + num_bytes) // 32))[: HEADER_BYTES + num_bytes]
    return ObjectWrite(
        object_name(number, namespace), whole[:HEADER_BYTES], memoryview(whole)[HEADER_BYTES:]
    )


def object_read(number: int, num_bytes: int, namespace: str = NAMESPACE) -> ObjectRead:
    """A request for that object with fresh buffers."""
    return ObjectRead(
        object_name(number, namespace),
        memoryview(bytearray(HEADER_BYTES)),
        memoryview(bytearray(num_bytes)),
    )


async def assert_reads_back(backend: StorageBackend, *writes: ObjectWrite) -> None:
    """Every object is there, byte for byte."""
    reads = [
        ObjectRead(
            write.name,
            memoryview(bytearray(HEADER_BYTES)),
            memoryview(bytearray(write.payload.nbytes)),
        )
        for write in writes
    ]
    assert await backend.read(reads) == [ReadOutcome.OK] * len(writes)
    for read, write in zip(reads, writes, strict=True):
        assert read.header == write.header
        assert read.payload == write.payload


class StorageBackendTests(ABC):
    """Inherit, and say where backends come from; without that a suite does not even start."""

    large_bytes = 64 * _MIB

    @abstractmethod
    def open_for_test(self, place: Path) -> StorageBackend:
        """A new backend object for a place that is empty at the start of each test."""

    @abstractmethod
    def writer_program(self, place: Path) -> str | None:
        """Source of a program that stores `object_write(7, large_bytes)` over and over.

        It prints one line before its first write. None where a backend cannot be shared by
        processes.
        """

    @asynccontextmanager
    async def opened(self, place: Path) -> AsyncIterator[StorageBackend]:
        """An open backend that is closed at the end."""
        backend = self.open_for_test(place)
        await backend.open()
        try:
            yield backend
        finally:
            await backend.close()

    async def test_written_object_reads_back(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            write = object_write(1, 100_000)
            assert await backend.write([write]) == [WriteOutcome.STORED]
            await assert_reads_back(backend, write)

    async def test_reopened_store_still_has_the_object(self, tmp_path: Path) -> None:
        write = object_write(1, 5000)
        async with self.opened(tmp_path) as backend:
            await backend.write([write])
        async with self.opened(tmp_path) as backend:
            assert await backend.write([write]) == [WriteOutcome.EXISTS]
            await assert_reads_back(backend, write)

    async def test_contains_answers_in_order(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            await backend.write([object_write(n, 10) for n in (0, 1, 2, 4)])
            names = [object_name(n) for n in range(6)]
            assert await backend.contains(names) == [True, True, True, False, True, False]

    async def test_missing_object_is_an_outcome(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            await backend.write([object_write(1, 10)])
            reads = [object_read(0, 10), object_read(1, 10), object_read(2, 10)]
            outcomes = await backend.read(reads)
            assert outcomes == [ReadOutcome.MISSING, ReadOutcome.OK, ReadOutcome.MISSING]
            assert await backend.delete([object_name(0)]) == 0

    async def test_calls_without_objects_answer_nothing(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            assert await backend.contains([]) == []
            assert await backend.read([]) == []
            assert await backend.write([]) == []
            assert await backend.delete([]) == 0

    async def test_object_of_another_length_is_told_apart(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            await backend.write([object_write(1, 5000)])
            for num_bytes in (0, 4999, 5001):
                assert await backend.read([object_read(1, num_bytes)]) == [ReadOutcome.BAD_LENGTH]

    async def test_object_of_another_length_is_replaced(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            await backend.write([object_write(1, 5000)])
            longer = object_write(1, 6000)
            assert await backend.write([longer]) == [WriteOutcome.STORED]
            await assert_reads_back(backend, longer)

    async def test_object_of_the_same_length_is_left_alone(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            first = object_write(1, 5000)
            other = object_write(2, 5000)
            await backend.write([first])
            again = ObjectWrite(first.name, other.header, other.payload)
            assert await backend.write([again]) == [WriteOutcome.EXISTS]
            await assert_reads_back(backend, first)

    async def test_payload_may_be_empty_or_one_byte_or_large(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            for num_bytes in (0, 1, self.large_bytes):
                write = object_write(num_bytes, num_bytes)
                assert await backend.write([write]) == [WriteOutcome.STORED]
                await assert_reads_back(backend, write)

    async def test_many_objects_in_one_batch(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            writes = [object_write(n, 100 + n) for n in range(500)]
            assert await backend.write(writes) == [WriteOutcome.STORED] * 500
            assert await backend.contains([write.name for write in writes]) == [True] * 500
            await assert_reads_back(backend, *writes)

    async def test_concurrent_writes_of_one_object_agree(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as one, self.opened(tmp_path) as two:
            write = object_write(1, _MIB)
            calls = [backend.write([write]) for backend in (one, two) * 8]
            outcomes = [outcome for answer in await asyncio.gather(*calls) for outcome in answer]
            assert outcomes.count(WriteOutcome.STORED) >= 1
            assert set(outcomes) <= {WriteOutcome.STORED, WriteOutcome.EXISTS}
            await assert_reads_back(two, write)

    async def test_reader_sees_all_of_an_object_or_nothing(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as writer, self.opened(tmp_path) as reader:
            write = object_write(1, 8 * _MIB)
            seen = set()
            for _ in range(5):
                writing = asyncio.ensure_future(writer.write([write]))
                while not writing.done():
                    read = object_read(1, 8 * _MIB)
                    (outcome,) = await reader.read([read])
                    seen.add(outcome)
                    await asyncio.sleep(0)  # a backend may answer without waiting
                    if outcome is ReadOutcome.OK:
                        assert read.header == write.header
                        assert read.payload == write.payload
                assert await writing == [WriteOutcome.STORED]
                assert await writer.delete([write.name]) == 1
            assert ReadOutcome.BAD_LENGTH not in seen

    async def test_deleted_objects_are_gone_and_counted(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            await backend.write([object_write(n, 10) for n in range(3)])
            names = [object_name(n) for n in (0, 2, 9)]
            assert await backend.delete(names) == 2
            assert await backend.contains([object_name(n) for n in range(3)]) == [
                False,
                True,
                False,
            ]

    async def test_clear_stays_inside_one_namespace(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            kept = object_write(1, 10, OTHER_NAMESPACE)
            await backend.write([*(object_write(n, 10) for n in range(100)), kept])
            assert await backend.clear(NAMESPACE) == 100
            assert await backend.clear(NAMESPACE) == 0
            assert not any(await backend.contains([object_name(n) for n in range(100)]))
            await assert_reads_back(backend, kept)

    async def test_objects_of_all_pools_of_a_page_are_kept_apart_and_cleared_together(
        self, tmp_path: Path
    ) -> None:
        async with self.opened(tmp_path) as backend:
            names = [object_name(n, NAMESPACE, pool) for n in range(3) for pool in POOLS]
            writes = [
                ObjectWrite(name, whole.header, whole.payload)
                for number, name in enumerate(names)
                for whole in [object_write(number, 1000 + number)]
            ]
            kept = object_write(1, 10, OTHER_NAMESPACE)
            assert await backend.write([*writes, kept]) == [WriteOutcome.STORED] * 10
        async with self.opened(tmp_path) as backend:
            assert await backend.contains(names) == [True] * 9
            await assert_reads_back(backend, *writes)
            assert await backend.delete([names[4]]) == 1
            assert await backend.contains(names) == [number != 4 for number in range(9)]
            assert await backend.clear(NAMESPACE) == 8
            assert await backend.contains(names) == [False] * 9
            await assert_reads_back(backend, kept)

    async def test_object_under_the_name_of_another_pool_is_corrupt_and_removed(
        self, tmp_path: Path
    ) -> None:
        backend = self.open_for_test(tmp_path)
        storage = CheckedStorage(backend)
        await storage.open()
        try:
            items = [shard_object(1, 1000, pool) for pool in POOLS]
            assert await storage.persist(items[:1]) == [WriteOutcome.STORED]
            whole = object_read(1, 1000)
            assert await backend.read([whole]) == [ReadOutcome.OK]
            renamed = [ObjectWrite(i.name, whole.header, whole.payload) for i in items[1:]]
            assert await backend.write(renamed) == [WriteOutcome.STORED] * 2
            outcomes = await storage.fetch(items)
            assert outcomes == [FetchOutcome.OK, FetchOutcome.CORRUPT, FetchOutcome.CORRUPT]
            assert await storage.exists([i.name for i in items]) == [True, False, False]
        finally:
            await storage.close()

    async def test_records_are_kept_renewed_and_cleared_with_their_namespace(
        self, tmp_path: Path
    ) -> None:
        """Passes at once for a backend that keeps no records."""
        one, other = b'{"page_size":64}', b'{"page_size":128}'
        async with self.opened(tmp_path) as backend:
            if not isinstance(backend, KeepsRecords):
                return
            assert await backend.read_records() == {}
            assert await backend.write_record(NAMESPACE, b"{}") is WriteOutcome.STORED
            assert await backend.write_record(NAMESPACE, one) is WriteOutcome.EXISTS
            assert await backend.write_record(NAMESPACE, one) is WriteOutcome.EXISTS
            assert await backend.write_record(OTHER_NAMESPACE, other) is WriteOutcome.STORED
            await backend.write([object_write(1, 10)])
            before = dict(backend.stats())
        async with self.opened(tmp_path) as backend:
            assert isinstance(backend, KeepsRecords)
            assert await backend.read_records() == {NAMESPACE: one, OTHER_NAMESPACE: other}
            assert await backend.clear(NAMESPACE) == 1
            assert await backend.read_records() == {OTHER_NAMESPACE: other}
        assert before["objects_written"] == 1

    async def test_records_are_bounded_in_number_and_length(self, tmp_path: Path) -> None:
        """Passes at once for a backend that keeps no records."""
        async with self.opened(tmp_path) as backend:
            if not isinstance(backend, KeepsRecords):
                return
            names = [f"hc1-{number:016x}" for number in range(MAX_RECORDS + 2)]
            for name in names:
                assert await backend.write_record(name, name.encode()) is WriteOutcome.STORED
            records = await backend.read_records()
            assert len(records) == MAX_RECORDS
            assert set(records) <= set(names)
            assert all(record == name.encode() for name, record in records.items())
            longest = b"x" * MAX_RECORD_BYTES
            await backend.write_record(NAMESPACE, longest)
            assert (await backend.read_records())[NAMESPACE] == longest
            refused = asyncio.ensure_future(backend.write_record(NAMESPACE, longest + b"x"))
            await asyncio.wait([refused])
            assert isinstance(refused.exception(), ValueError)

    async def test_cancelled_calls_leave_the_store_usable(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            writes = [object_write(n, _MIB) for n in range(16)]
            calls = [asyncio.ensure_future(backend.write([write])) for write in writes]
            await asyncio.sleep(0)
            for call in calls[::2]:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            outcomes = await backend.write(writes)
            assert set(outcomes) <= {WriteOutcome.STORED, WriteOutcome.EXISTS}
            await assert_reads_back(backend, *writes)

    async def test_buffers_are_released_when_a_cancelled_read_returns(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            await backend.write([object_write(1, 32 * _MIB)])
            for _ in range(5):
                read = object_read(1, 32 * _MIB)
                call = asyncio.ensure_future(backend.read([read]))
                await asyncio.sleep(0.002)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                read.payload[:] = bytes(32 * _MIB)
                await asyncio.sleep(0.01)
                assert read.payload == bytes(32 * _MIB)

    async def test_totals_are_there_from_the_start_and_grow(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            before = dict(backend.stats())
            await backend.write([object_write(1, 1000)])
            await backend.read([object_read(1, 1000)])
            await backend.delete([object_name(1)])
            after = backend.stats()
            assert set(after) == set(before)
            grown = {name: after[name] - before[name] for name in before}
            assert grown["objects_written"] == grown["objects_read"] == 1
            assert grown["objects_deleted"] == 1
            assert grown["bytes_written"] == grown["bytes_read"] == HEADER_BYTES + 1000
            assert grown["read_seconds"] > 0
            assert grown["write_seconds"] > 0
            assert backend.oldest_running_s() == 0.0

    async def test_closing_twice_is_allowed(self, tmp_path: Path) -> None:
        backend = self.open_for_test(tmp_path)
        await backend.open()
        await backend.close()
        await backend.close()

    async def test_writer_killed_while_writing_leaves_all_or_nothing(self, tmp_path: Path) -> None:
        program = self.writer_program(tmp_path)
        if program is None:
            return
        write = object_write(7, self.large_bytes)
        for delay_s in (0.0, 0.01, 0.02, 0.04):
            _kill_while_it_runs(program, delay_s)
            async with self.opened(tmp_path) as backend:
                read = object_read(7, self.large_bytes)
                (outcome,) = await backend.read([read])
                assert outcome in (ReadOutcome.OK, ReadOutcome.MISSING)
                if outcome is ReadOutcome.OK:
                    assert read.header == write.header
                    assert read.payload == write.payload
                assert await backend.delete([write.name]) == (outcome is ReadOutcome.OK)


def _kill_while_it_runs(program: str, delay_s: float) -> None:
    """Start the program, wait for its first line and `delay_s` more, and kill it."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, env=dict(os.environ)
    ) as child:
        line = child.stdout.readline() if child.stdout else b""
        threading.Event().wait(delay_s)
        child.send_signal(signal.SIGKILL)
    assert line, "the program ended before its first write"
