"""The file backend passes what every backend must, and its promises about files."""

import asyncio
import errno
import os
import resource
import stat
import subprocess
import sys
import time
import tracemalloc
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from vllm_hicache.errors import BackendTimeout, BackendUnavailable, ConfigError
from vllm_hicache.storage import HEADER_BYTES, ReadOutcome, WriteOutcome
from vllm_hicache.storage_backends import file_names
from vllm_hicache.storage_backends.conformance import (
    NAMESPACE,
    StorageBackendTests,
    assert_reads_back,
    object_name,
    object_read,
    object_write,
)
from vllm_hicache.storage_backends.conformance_run import writer_program
from vllm_hicache.storage_backends.file import FileBackend

pytestmark = pytest.mark.services

MIB = 1024 * 1024


@asynccontextmanager
async def opened(root: Path, **options):
    backend = FileBackend(root, **options)
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


def path_of(root: Path, number: int) -> Path:
    name = object_name(number)
    return root / name[:3] / name


def temporary_files(root: Path) -> list[Path]:
    return list(root.rglob("*.tmp"))


class TestFile(StorageBackendTests):
    def open_for_test(self, place: Path) -> FileBackend:
        return FileBackend(place / "store")

    def writer_program(self, place: Path) -> str:
        return writer_program(f"file://{place}/store", self.large_bytes)


async def test_folders_and_files_are_private(tmp_path):
    root = tmp_path / "store"
    async with opened(root) as backend:
        await backend.write([object_write(1, 10)])
    paths = [root, *root.rglob("*")]
    assert len(paths) == 4
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in paths} == {0}


async def test_name_that_is_not_an_objects_is_refused(tmp_path):
    async with opened(tmp_path) as backend:
        with pytest.raises(ValueError, match="not the name of an object"):
            await backend.contains(["../../etc/passwd"])


async def test_leftovers_of_a_dead_writer_are_removed_at_open(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", writer_program(f"file://{tmp_path}", 64 * MIB)],
        stdout=subprocess.PIPE,
    )
    with child:
        child.stdout.readline()
        deadline = time.monotonic() + 20
        while not temporary_files(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.001)
        child.kill()
    assert temporary_files(tmp_path)
    async with opened(tmp_path) as backend:
        assert temporary_files(tmp_path) == []
        assert backend.stats()["leftovers_removed"] == 1
        await backend.delete([object_name(7)])
        assert backend.stats()["used_bytes_now"] == 0


def test_temporary_file_of_an_object_of_another_pool_is_known():
    name = file_names.temporary_name(object_name(1, pool="89abcdef"), _current())
    assert file_names.is_temporary(name)
    assert not file_names.is_leftover(name, 0, _current())
    assert not file_names.is_temporary(name.replace("_H0", ""))


async def test_temporary_file_of_a_live_writer_stays_at_open(tmp_path):
    folder = tmp_path / "000"
    folder.mkdir()
    mine = folder / file_names.temporary_name("0" * 64 + object_name(0)[64:], _current())
    mine.write_bytes(b"partial")
    async with opened(tmp_path) as backend:
        assert mine.read_bytes() == b"partial"
        assert backend.stats()["used_bytes_now"] == 4096


@pytest.mark.parametrize("change", [{"boot": "0" * 32}, {"pid_namespace": 1}])
def test_writer_that_cannot_be_asked_is_dead_after_an_hour(change):
    me = _current()
    fields = {"boot": me.boot, "pid_namespace": me.pid_namespace, "pid": me.pid, "start": me.start}
    name = file_names.temporary_name(object_name(1), file_names.Writer(**fields | change))
    assert not file_names.is_leftover(name, time.time() - 600, me)
    assert file_names.is_leftover(name, time.time() - 4000, me)


def test_process_that_reuses_a_dead_writers_number_is_not_taken_for_it():
    me = _current()
    before = file_names.Writer(me.boot, me.pid_namespace, me.pid, me.start - 1)
    assert file_names.is_leftover(file_names.temporary_name(object_name(1), before), 0, me)
    assert not file_names.is_leftover(file_names.temporary_name(object_name(1), me), 0, me)


def _current() -> file_names.Writer:
    return file_names.Writer.current()


async def test_reads_go_straight_into_the_views(tmp_path):
    async with opened(tmp_path) as backend:
        await backend.write([object_write(n, 4 * MIB) for n in range(5)])
        reads = [object_read(n, 4 * MIB) for n in range(5)]
        await backend.read(reads[:1])  # threads and caches exist now
        tracemalloc.start()
        try:
            for read in reads[1:]:
                before = tracemalloc.get_traced_memory()[0]
                tracemalloc.reset_peak()
                assert await backend.read([read]) == [ReadOutcome.OK]
                assert tracemalloc.get_traced_memory()[1] - before < 64 * 1024
        finally:
            tracemalloc.stop()


async def test_writes_go_straight_from_the_views(tmp_path):
    async with opened(tmp_path) as backend:
        writes = [object_write(n, 4 * MIB) for n in range(3)]
        await backend.write(writes[:1])
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            await backend.write(writes[1:])
            assert tracemalloc.get_traced_memory()[1] - before < 2 * 64 * 1024
        finally:
            tracemalloc.stop()


async def test_foreign_files_are_left_alone(tmp_path):
    folder = tmp_path / object_name(1)[:3]
    folder.mkdir()
    foreign = [tmp_path / "notes.txt", folder / "notes.txt", folder / ".x.tmp", tmp_path / "zzz"]
    for path in foreign:
        path.write_bytes(bytes(MIB))
    async with opened(tmp_path, capacity_bytes=64 * 1024) as backend:
        for number in range(40):
            assert await backend.write([object_write(number, 10_000)]) == [WriteOutcome.STORED]
        await backend.clear(NAMESPACE)
        assert backend.stats()["used_bytes_now"] == 0
    assert all(path.stat().st_size == MIB for path in foreign)


async def test_removed_directory_is_made_again(tmp_path):
    root = tmp_path / "store"
    async with opened(root, capacity_bytes=MIB) as backend:
        await backend.write([object_write(n, 50_000) for n in range(10)])
        subprocess.run(["rm", "-rf", root], check=True)
        assert await backend.read([object_read(1, 50_000)]) == [ReadOutcome.MISSING]
        assert await backend.contains([object_name(1)]) == [False]
        assert await backend.delete([object_name(1)]) == 0
        assert await backend.write([object_write(1, 50_000)]) == [WriteOutcome.STORED]
        await assert_reads_back(backend, object_write(1, 50_000))
        assert backend.stats()["used_bytes_now"] == 57_344


async def test_eviction_survives_objects_removed_by_others(tmp_path):
    async with opened(tmp_path, capacity_bytes=MIB) as backend:
        await backend.write([object_write(n, 96_000) for n in range(10)])
        for number in range(10):
            path_of(tmp_path, number).unlink()
        outcomes = await backend.write([object_write(n, 96_000) for n in range(20, 30)])
        assert outcomes == [WriteOutcome.STORED] * 10


async def test_folder_that_cannot_be_made_is_a_configuration_error_and_may_be_tried_again(tmp_path):
    obstacle = tmp_path / "obstacle"
    obstacle.write_text("")
    backend = FileBackend(obstacle / "store")
    with pytest.raises(ConfigError, match="obstacle/store cannot be created: Not a directory"):
        await backend.open()
    obstacle.unlink()
    await backend.open()
    assert await backend.write([object_write(1, 10)]) == [WriteOutcome.STORED]
    await backend.close()


async def test_folder_that_becomes_writable_is_written_to(tmp_path):
    async with opened(tmp_path) as other:
        await other.write([object_write(1, 100)])
    usage = tmp_path / ".hicache-usage"
    usage.unlink()
    usage.mkdir()  # in the way, for root too
    async with opened(tmp_path) as backend:
        await assert_reads_back(backend, object_write(1, 100))
        with pytest.raises(BackendUnavailable, match="Is a directory"):
            await backend.write([object_write(2, 100)])
        usage.rmdir()
        assert await backend.write([object_write(2, 100)]) == [WriteOutcome.STORED]
        assert backend.stats()["used_bytes_now"] == 2 * 8192
        assert temporary_files(tmp_path) == []


async def test_regular_file_as_root_is_a_configuration_error(tmp_path):
    path = tmp_path / "store"
    path.write_text("")
    with pytest.raises(ConfigError, match="must be a directory"):
        await FileBackend(path).open()


# Runs as an ordinary user even when the tests run as root, to whom permissions do not apply.
READ_ONLY = """
import asyncio, os, sys
from pathlib import Path
from vllm_hicache.storage import ReadOutcome, WriteOutcome
from vllm_hicache.storage_backends.conformance import object_name, object_read, object_write
from vllm_hicache.storage_backends.file import FileBackend
from vllm_hicache.storage_backends.file_names import Writer

async def main():
    backend = FileBackend(Path(sys.argv[1]))
    Writer.current()  # all modules are loaded: the other user may not reach the interpreter
    if os.getuid() == 0:
        os.setuid(65534)
    await backend.open()
    assert await backend.read([object_read(1, 100)]) == [ReadOutcome.OK]
    assert await backend.write([object_write(2, 100)]) == [WriteOutcome.FULL]
    assert await backend.contains([object_name(2)]) == [False]
    assert backend.stats()["writes_refused"] == 1
    assert backend.stats()["write_errors"] == 1
    await backend.close()
    print("survived")

asyncio.run(main())
"""


async def test_folder_without_write_permission_is_still_read(tmp_path):
    root = tmp_path / "store"
    async with opened(root) as backend:
        await backend.write([object_write(1, 100)])
    for path in [root, *root.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    _make_reachable(root)
    try:
        result = subprocess.run(
            [sys.executable, "-P", "-c", READ_ONLY, root], capture_output=True, text=True
        )
        assert result.stdout == "survived\n", result.stderr
    finally:
        for path in [root, *root.rglob("*")]:
            path.chmod(0o700)


MADE_BY_PYTEST = ("pytest-", "popen-", "test_")


def _make_reachable(path: Path) -> None:
    for parent in path.parents:
        if parent.owner() == path.owner() and parent.name.startswith(MADE_BY_PYTEST):
            parent.chmod(parent.stat().st_mode | 0o011)


OUT_OF_REACH = """
import asyncio, os, sys
from pathlib import Path
from vllm_hicache.errors import ConfigError
from vllm_hicache.storage_backends.file import FileBackend

async def main():
    backend = FileBackend(Path(sys.argv[1]))
    if os.getuid() == 0:
        os.setuid(65534)
    try:
        await backend.open()
    except ConfigError as error:
        print(error)

asyncio.run(main())
"""


def test_folder_below_one_that_may_not_be_searched_is_refused(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir()
    _make_reachable(closed)
    closed.chmod(0)
    try:
        result = subprocess.run(
            [sys.executable, "-P", "-c", OUT_OF_REACH, closed / "store"],
            capture_output=True,
            text=True,
        )
    finally:
        closed.chmod(0o700)
    expected = f"storage folder {closed}/store cannot be created: Permission denied"
    assert expected in result.stdout, result.stderr


IN_NAMESPACE = ["unshare", "-rm", "sh", "-ec"]

SMALL_DISK = """
import asyncio, sys
from pathlib import Path
from vllm_hicache.storage import WriteOutcome
from vllm_hicache.storage_backends.conformance import assert_reads_back, object_write
from vllm_hicache.storage_backends.file import FileBackend

MIB = 1024 * 1024

async def main():
    root = Path("/mnt/store")
    backend = FileBackend(root, capacity_bytes=40 * MIB)
    await backend.open()
    for number in range(200):
        assert await backend.write([object_write(number, MIB)]) == [WriteOutcome.STORED]
        used = sum(path.stat().st_size for path in root.rglob("*_H0"))
        assert used <= 40 * MIB, used
    await assert_reads_back(backend, object_write(199, MIB))
    filler = Path("/mnt/filler").open("wb", buffering=0)
    try:
        while True:
            filler.write(bytes(65536))
    except OSError:
        pass
    outcomes = [(await backend.write([object_write(n, 2 * MIB)]))[0] for n in range(200, 260)]
    assert outcomes[0] is WriteOutcome.STORED  # room is made by eviction
    big = FileBackend(root, capacity_bytes=60 * MIB)
    await big.open()
    assert await big.write([object_write(1000, 50 * MIB)]) == [WriteOutcome.FULL]
    assert big.stats()["writes_refused"] == 1
    await assert_reads_back(backend, object_write(259, 2 * MIB))
    await backend.close()
    await big.close()
    print("survived")

asyncio.run(main())
"""


def test_full_disk_refuses_writes_and_still_reads():
    command = 'mount -t tmpfs -o size=64m none /mnt; exec "$0" -P -c "$1"'
    result = subprocess.run(
        [*IN_NAMESPACE, command, sys.executable, SMALL_DISK], capture_output=True, text=True
    )
    assert result.stdout == "survived\n", result.stderr


async def test_disk_that_fills_during_a_write_is_a_refusal(tmp_path, monkeypatch):
    async with opened(tmp_path) as backend:

        def pwritev(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        await backend.write([object_write(1, 1000)])
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", pwritev)
            assert await backend.write([object_write(2, 1000)]) == [WriteOutcome.FULL]
        assert temporary_files(tmp_path) == []
        assert backend.stats()["used_bytes_now"] == 8192
        assert backend.stats()["write_errors"] == 1
        assert await backend.write([object_write(2, 1000)]) == [WriteOutcome.STORED]


async def test_running_out_of_file_descriptors_is_survived(tmp_path):
    async with opened(tmp_path) as backend:
        await backend.write([object_write(1, 1000)])
        await backend.read([object_read(1, 1000)])
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        next_fd = os.dup(0)
        os.close(next_fd)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd, limits[1]))
            with pytest.raises(BackendUnavailable, match="Too many open files"):
                await backend.read([object_read(1, 1000)])
            with pytest.raises(BackendUnavailable, match="Too many open files"):
                await backend.write([object_write(2, 1000)])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert backend.stats()["read_errors"] == backend.stats()["write_errors"] == 1
        assert await backend.write([object_write(2, 1000)]) == [WriteOutcome.STORED]
        await assert_reads_back(backend, object_write(1, 1000), object_write(2, 1000))


@asynccontextmanager
async def hung_reads(root: Path, count: int):
    """Names of objects whose files are pipes: opening one hangs until the context ends."""
    pipes = [path_of(root, 1000 + i) for i in range(count)]
    for pipe in pipes:
        pipe.parent.mkdir(exist_ok=True)
        os.mkfifo(pipe)
    try:
        yield [object_read(1000 + i, 100) for i in range(count)]
    finally:
        for pipe in pipes:
            os.close(os.open(pipe, os.O_RDWR))
            pipe.unlink()


async def test_hung_read_does_not_hold_up_others(tmp_path):
    async with opened(tmp_path, read_threads=2, operation_timeout_s=0.1) as backend:
        await backend.write([object_write(1, 1000)])
        async with hung_reads(tmp_path, 2) as reads:
            calls = [asyncio.ensure_future(backend.read([reads[0]]))]
            await asyncio.sleep(0.01)
            await assert_reads_back(backend, object_write(1, 1000))  # one thread is free
            calls.append(asyncio.ensure_future(backend.read([reads[1]])))
            await asyncio.sleep(0.12)
            await assert_reads_back(backend, object_write(1, 1000))  # the first one is replaced
            assert backend.stats()["hung_threads_now"] >= 1
            assert backend.oldest_running_s() > 0.1
            assert not any(call.done() for call in calls)
        for call in calls:
            with pytest.raises(BackendTimeout):
                await call
        assert backend.oldest_running_s() == 0.0
        await assert_reads_back(backend, object_write(1, 1000))
        assert backend.stats()["hung_threads_now"] == 0


async def test_cancelled_read_returns_only_when_its_thread_has(tmp_path):
    async with opened(tmp_path) as backend, hung_reads(tmp_path, 1) as reads:
        call = asyncio.ensure_future(backend.read(reads))
        await asyncio.sleep(0.01)
        for _ in range(3):
            call.cancel()
            await asyncio.sleep(0.01)
        assert not call.done()
    with pytest.raises(asyncio.CancelledError):
        await call


def test_header_and_payload_are_one_file(tmp_path):
    async def store():
        async with opened(tmp_path) as backend:
            await backend.write([object_write(1, 1000)])

    asyncio.run(store())
    write = object_write(1, 1000)
    assert path_of(tmp_path, 1).read_bytes() == write.header + write.payload
    assert len(write.header) == HEADER_BYTES
