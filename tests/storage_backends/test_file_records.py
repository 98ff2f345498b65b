"""Records of namespaces in the folder: counted, never beyond the capacity, never trusted."""

import os
from contextlib import asynccontextmanager

import pytest

from vllm_hicache.errors import BackendUnavailable
from vllm_hicache.storage import HEADER_BYTES, MAX_RECORD_BYTES, MAX_RECORDS, WriteOutcome
from vllm_hicache.storage_backends.conformance import (
    NAMESPACE,
    OTHER_NAMESPACE,
    assert_reads_back,
    object_write,
)
from vllm_hicache.storage_backends.file import FileBackend

OBJECT = 16384
BLOCK = 4096
RECORD = b'{"page_size":64}'


@asynccontextmanager
async def opened(root, **options):
    backend = FileBackend(root, **options)
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


def small_object(number):
    return object_write(number, OBJECT - HEADER_BYTES)


def used(backend):
    return backend.stats()["used_bytes_now"]


async def test_a_record_counts_one_block_and_gives_it_back(tmp_path):
    async with opened(tmp_path, capacity_bytes=4 * OBJECT) as backend:
        await backend.write([small_object(1)])
        for _ in range(2):
            await backend.write_record(NAMESPACE, RECORD)
            assert used(backend) == OBJECT + BLOCK
        await backend.write_record(NAMESPACE, RECORD + b" ")
        assert used(backend) == OBJECT + BLOCK
        await backend.clear(NAMESPACE)
        assert used(backend) == 0


async def test_a_sweep_counts_records_as_their_writer_did(tmp_path):
    async with opened(tmp_path) as backend:
        await backend.write([small_object(1)])
        await backend.write_record(NAMESPACE, RECORD)
    (tmp_path / ".hicache-usage").unlink()
    async with opened(tmp_path) as backend:
        assert used(backend) == OBJECT + BLOCK


async def test_records_are_counted_where_no_object_lies(tmp_path):
    async with opened(tmp_path) as backend:
        await backend.write_record(NAMESPACE, RECORD)
    (tmp_path / ".hicache-usage").unlink()
    async with opened(tmp_path) as backend:
        assert used(backend) == BLOCK
        assert await backend.read_records() == {NAMESPACE: RECORD}


async def test_a_full_folder_makes_room_for_a_record_by_its_oldest_object(tmp_path):
    async with opened(tmp_path, capacity_bytes=4 * OBJECT) as backend:
        await backend.write([small_object(n) for n in range(4)])
    async with opened(tmp_path, capacity_bytes=4 * OBJECT) as backend:
        assert await backend.write_record(NAMESPACE, RECORD) is WriteOutcome.STORED
        assert used(backend) == 3 * OBJECT + BLOCK
        await backend.write([small_object(9)])
        assert used(backend) <= 4 * OBJECT
        assert await backend.read_records() == {NAMESPACE: RECORD}
        await assert_reads_back(backend, small_object(9))


async def test_a_folder_without_any_room_takes_no_record(tmp_path):
    async with opened(tmp_path, min_free_bytes=1 << 60) as backend:
        assert await backend.write_record(NAMESPACE, RECORD) is WriteOutcome.FULL
        assert await backend.read_records() == {}


async def test_a_folder_that_takes_no_record_still_gives_those_it_has(tmp_path):
    async with opened(tmp_path) as backend:
        await backend.write_record(NAMESPACE, RECORD)
        (tmp_path / "namespaces" / ".new").mkdir()
        with pytest.raises(BackendUnavailable, match="write of a record"):
            await backend.write_record(OTHER_NAMESPACE, RECORD)
        assert await backend.read_records() == {NAMESPACE: RECORD}


async def test_what_is_no_record_is_not_read(tmp_path):
    async with opened(tmp_path) as backend:
        await backend.write_record(NAMESPACE, RECORD)
        folder = tmp_path / "namespaces"
        (folder / "README").write_text("not ours")
        (folder / "hc1-00.json").write_bytes(b"x" * (MAX_RECORD_BYTES + 1))
        (folder / "hc1-01.json").mkdir()
        (folder / "hc1-02.json").symlink_to(folder / f"{NAMESPACE}.json")
        os.mkfifo(folder / "hc1-03.json")
        (folder / "hc1-04.json.tmp").write_bytes(RECORD)
        assert await backend.read_records() == {NAMESPACE: RECORD}


@pytest.mark.parametrize("name", ["../escape-00", "hc1-", "x/hc1-00", ""])
async def test_a_name_that_is_no_namespace_s_leads_nowhere(tmp_path, name):
    async with opened(tmp_path / "s") as backend:
        with pytest.raises(ValueError, match="not a namespace"):
            await backend.write_record(name, RECORD)
        assert await backend.clear(name) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


async def test_the_records_renewed_longest_ago_go(tmp_path):
    names = [f"hc1-{number:016x}" for number in range(MAX_RECORDS)]
    async with opened(tmp_path) as backend:
        for age, name in enumerate(names):
            await backend.write_record(name, RECORD)
            os.utime(tmp_path / "namespaces" / f"{name}.json", (1000 - age, 1000 - age))
        await backend.write_record(names[-1], RECORD)  # the oldest is young again
        await backend.write_record(NAMESPACE, RECORD)
        assert used(backend) == MAX_RECORDS * BLOCK
    kept = {path.stem for path in (tmp_path / "namespaces").iterdir()}
    assert kept == {NAMESPACE, *names} - {names[-2]}


async def test_records_are_readable_by_their_owner_alone(tmp_path):
    async with opened(tmp_path / "s") as backend:
        await backend.write_record(NAMESPACE, RECORD)
    folder = tmp_path / "s" / "namespaces"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / f"{NAMESPACE}.json").stat().st_mode & 0o777 == 0o600


async def test_what_a_killed_writer_left_is_counted_and_written_over(tmp_path):
    folder = tmp_path / "namespaces"
    folder.mkdir()
    (folder / ".new").write_bytes(RECORD[:4])
    async with opened(tmp_path) as backend:
        assert used(backend) == BLOCK
        assert await backend.read_records() == {}
        await backend.write_record(NAMESPACE, RECORD)
        assert await backend.read_records() == {NAMESPACE: RECORD}
    async with opened(tmp_path) as backend:
        assert used(backend) == BLOCK
