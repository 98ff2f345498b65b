"""Use never exceeds the capacity, over all processes, and the oldest objects go first."""

import os
import random
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_hicache.errors import BackendTimeout
from vllm_hicache.storage import HEADER_BYTES, ReadOutcome, WriteOutcome
from vllm_hicache.storage_backends import file_names
from vllm_hicache.storage_backends.conformance import (
    assert_reads_back,
    object_name,
    object_read,
    object_write,
)
from vllm_hicache.storage_backends.file import FileBackend
from vllm_hicache.storage_backends.file_capacity import (
    FILE_NAME,
    UsageFile,
    charged_bytes,
)

pytestmark = pytest.mark.services

KIB = 1024
OBJECT = 12 * KIB  # with its header


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


def small_object(number: int):
    return object_write(number, OBJECT - HEADER_BYTES)


def bytes_used(root: Path) -> int:
    """What all objects and temporary files hold, found by a walk."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            if name == FILE_NAME:
                continue
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


async def test_oldest_objects_are_evicted_first(tmp_path):
    async with opened(tmp_path, capacity_bytes=10 * OBJECT) as backend:
        await backend.write([small_object(n) for n in range(10)])
        order = random.Random(1).sample(range(10), 10)
        for age, number in enumerate(reversed(order)):
            os.utime(path_of(tmp_path, number), ns=(0, 10**18 + age))
    async with opened(tmp_path, capacity_bytes=10 * OBJECT) as backend:
        for step in range(10):
            await backend.write([small_object(100 + step)])
            present = await backend.contains([object_name(n) for n in reversed(order)])
            assert present == [False] * (step + 1) + [True] * (9 - step)


async def test_objects_of_all_pools_count_and_are_evicted_alike(tmp_path):
    pools = ("", "00000001", "89abcdef")
    writes = [
        replace(small_object(n), name=object_name(n, pool=pool)) for n in range(4) for pool in pools
    ]
    async with opened(tmp_path, capacity_bytes=12 * OBJECT) as backend:
        for age, write in enumerate(writes):
            await backend.write([write])
            os.utime(tmp_path / write.name[:3] / write.name, ns=(0, 10**18 + age))
        assert backend.stats()["used_bytes_now"] == 12 * OBJECT
    (tmp_path / FILE_NAME).unlink()
    async with opened(tmp_path, capacity_bytes=12 * OBJECT) as backend:
        assert backend.stats()["used_bytes_now"] == 12 * OBJECT
        await backend.write([small_object(100 + n) for n in range(5)])
        present = await backend.contains([write.name for write in writes])
        assert present == [False] * 5 + [True] * 7
        assert bytes_used(tmp_path) == 12 * OBJECT


async def test_reading_an_object_makes_it_young(tmp_path):
    async with opened(tmp_path, capacity_bytes=4 * OBJECT) as backend:
        await backend.write([small_object(n) for n in range(4)])
        for number in range(4):
            os.utime(path_of(tmp_path, number), (1000 + number, 1000 + number))
    async with opened(tmp_path, capacity_bytes=4 * OBJECT) as backend:
        await backend.read([object_read(0, OBJECT - HEADER_BYTES)])
        await backend.write([small_object(9)])
        names = [object_name(n) for n in (0, 1, 2, 3, 9)]
        assert await backend.contains(names) == [True, False, True, True, True]


async def test_reading_a_young_object_does_not_write_its_time(tmp_path):
    async with opened(tmp_path) as backend:
        await backend.write([small_object(1)])
        path = path_of(tmp_path, 1)
        recent, old = time.time() - 30, time.time() - 90
        os.utime(path, (recent, recent))
        await assert_reads_back(backend, small_object(1))
        assert path.stat().st_mtime == pytest.approx(recent)
        os.utime(path, (old, old))
        await assert_reads_back(backend, small_object(1))
        assert path.stat().st_mtime == pytest.approx(time.time(), abs=5)


async def test_object_larger_than_the_capacity_is_refused_and_evicts_nothing(tmp_path):
    async with opened(tmp_path, capacity_bytes=3 * OBJECT) as backend:
        await backend.write([small_object(1)])
        assert await backend.write([object_write(2, 4 * OBJECT)]) == [WriteOutcome.FULL]
        await assert_reads_back(backend, small_object(1))


async def test_files_of_an_earlier_run_are_counted_and_cut_down_at_start(tmp_path):
    async with opened(tmp_path) as backend:
        await backend.write([small_object(n) for n in range(60)])
    async with opened(tmp_path, capacity_bytes=40 * OBJECT) as backend:
        assert backend.stats()["used_bytes_now"] == 40 * OBJECT == bytes_used(tmp_path)
        assert backend.stats()["objects_evicted"] == 20
        assert await backend.write([small_object(100)]) == [WriteOutcome.STORED]
        assert bytes_used(tmp_path) == 40 * OBJECT


@pytest.mark.parametrize("damage", ["remove", "empty", "garbage", "too low", "too high"])
async def test_wrong_usage_file_is_put_right_at_start(tmp_path, damage):
    async with opened(tmp_path) as backend:
        await backend.write([small_object(n) for n in range(20)])
    usage = tmp_path / FILE_NAME
    whole = bytearray(usage.read_bytes())
    if damage == "remove":
        usage.unlink()
    elif damage in ("too low", "too high"):
        whole[16:24] = (5 if damage == "too low" else 2**40).to_bytes(8, "little")
        whole[64:72] = (7 if damage == "too low" else 2**40).to_bytes(8, "little")
        usage.write_bytes(whole)
    else:
        usage.write_bytes(b"" if damage == "empty" else os.urandom(500))
    async with opened(tmp_path, capacity_bytes=20 * OBJECT) as backend:
        assert backend.stats()["used_bytes_now"] == 20 * OBJECT
        await backend.write([small_object(n) for n in range(100, 120)])
        assert bytes_used(tmp_path) == 20 * OBJECT


async def test_objects_that_appear_from_outside_are_found_by_the_next_sweep(tmp_path):
    root = tmp_path / "store"
    async with opened(tmp_path / "other") as other:
        await other.write([small_object(n) for n in range(100, 110)])
    async with opened(root, capacity_bytes=10 * OBJECT) as backend:
        await backend.write([small_object(n) for n in range(10)])
        for source in (tmp_path / "other").glob("???/*"):
            target = root / source.parent.name
            target.mkdir(exist_ok=True)
            source.rename(target / source.name)
        for number in range(200, 240):
            await backend.write([small_object(number)])
        assert bytes_used(root) <= 10 * OBJECT


async def test_evicting_one_object_does_not_walk_the_folder(tmp_path):
    async with opened(tmp_path, capacity_bytes=1000 * 8192) as backend:
        for first in range(0, 2000, 500):
            await backend.write([object_write(n, 100) for n in range(first, first + 500)])
        stats = backend.stats()
        assert stats["objects_evicted"] == 1000
        assert stats["sweeps"] < 20
        assert stats["used_bytes_now"] == 1000 * 8192


async def test_free_space_of_the_disk_is_kept(tmp_path):
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    async with opened(tmp_path, min_free_bytes=2 * free) as backend:
        assert await backend.write([small_object(1)]) == [WriteOutcome.FULL]
        assert await backend.read([object_read(1, 100)]) == [ReadOutcome.MISSING]


PROCESS = """
import asyncio, random, sys
from pathlib import Path
from vllm_hicache.storage import ReadOutcome, WriteOutcome
from vllm_hicache.storage_backends.conformance import object_read, object_write
from vllm_hicache.storage_backends.file import FileBackend

async def main(root, capacity, seed, count):
    backend = FileBackend(
        Path(root), capacity_bytes=capacity, write_threads=4, operation_timeout_s=60
    )
    await backend.open()
    dice = random.Random(seed)
    for _ in range(count):
        numbers = [dice.randrange(200) for _ in range(8)]
        outcomes = await backend.write([object_write(n, 1000 + 700 * n) for n in numbers])
        assert WriteOutcome.FULL not in outcomes, outcomes
        number = dice.choice(numbers)
        read = object_read(number, 1000 + 700 * number)
        if await backend.read([read]) == [ReadOutcome.OK]:
            assert read.payload == object_write(number, 1000 + 700 * number).payload
        if dice.random() < 0.1:
            await backend.delete([read.name])
    await backend.close()

root, capacity, seed, count = sys.argv[1:]
asyncio.run(main(root, int(capacity), int(seed), int(count)))
"""


def _processes(root: Path, capacity: int, count: int) -> list[subprocess.Popen]:
    return [
        subprocess.Popen(
            [sys.executable, "-P", "-c", PROCESS, root, str(capacity), str(seed), str(count)]
        )
        for seed in range(4)
    ]


async def test_four_processes_and_a_restart_stay_within_one_capacity(tmp_path):
    capacity = 2_000 * KIB
    largest = charged_bytes(HEADER_BYTES + 1000 + 700 * 199)
    observer = UsageFile(tmp_path)
    for num_rounds in (1, 2):
        running = _processes(tmp_path, capacity, 12)
        peak, are_running = 0, True
        while are_running:
            are_running = any(process.poll() is None for process in running)
            # A walk sees one moment only while nobody can change the folder.
            with observer.locked(time.monotonic() + 60):
                peak = max(peak, bytes_used(tmp_path))
            time.sleep(0.01)
        assert [process.returncode for process in running] == [0] * 4
        assert capacity // 2 < peak <= capacity + largest, num_rounds
    observer.close()
    before = bytes_used(tmp_path)
    async with opened(tmp_path, capacity_bytes=capacity) as backend:
        assert before <= backend.stats()["used_bytes_now"] <= capacity
        assert bytes_used(tmp_path) == before  # opening found nothing to correct


async def test_counts_stay_exact_while_processes_are_killed(tmp_path):
    capacity = 2_000 * KIB
    for delay_s in (0.3, 0.35, 0.4):
        running = _processes(tmp_path, capacity, 10_000)
        time.sleep(1.0 + delay_s)
        for process in running:
            process.kill()
        for process in running:
            process.wait()
        assert bytes_used(tmp_path) <= capacity
    async with opened(tmp_path, capacity_bytes=capacity) as backend:
        sizes = [path.stat().st_size for path in tmp_path.glob("???/*")]
        assert backend.stats()["used_bytes_now"] == sum(map(charged_bytes, sizes))
        assert not list(tmp_path.rglob("*.tmp"))


HOLD_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


async def test_process_that_stops_with_the_lock_holds_up_writes_alone(tmp_path):
    async with opened(tmp_path, operation_timeout_s=0.2) as backend:
        await backend.write([small_object(1)])
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD_LOCK, tmp_path / FILE_NAME],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with holder:
            holder.stdout.readline()
            with pytest.raises(BackendTimeout):
                await backend.write([small_object(2)])
            await assert_reads_back(backend, small_object(1))
        assert await backend.write([small_object(2)]) == [WriteOutcome.STORED]


def test_lock_excludes_threads_of_one_process(tmp_path):
    usage = UsageFile(tmp_path)
    before = usage_total(usage)

    def add_many():
        for _ in range(200):
            with usage.locked(time.monotonic() + 10) as ledger:
                ledger.add(3, 4096)

    threads = [threading.Thread(target=add_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert usage_total(usage) - before == 800 * 4096
    usage.close()


def usage_total(usage: UsageFile) -> int:
    with usage.locked(time.monotonic() + 1) as ledger:
        return ledger.total_bytes


@pytest.mark.full
async def test_200_000_files_are_counted_within_five_seconds(tmp_path):
    for index in range(file_names.NUM_FOLDERS):
        (tmp_path / file_names.folder_name(index)).mkdir()
    for number in range(200_000):
        fd = os.open(path_of(tmp_path, number), os.O_WRONLY | os.O_CREAT, 0o600)
        os.ftruncate(fd, OBJECT)
        os.close(fd)
    started = time.monotonic()
    async with opened(tmp_path) as backend:
        assert time.monotonic() - started < 5
        assert await backend.contains([object_name(199_999)]) == [True]
        deadline = time.monotonic() + 30
        while not backend.stats()["sweeps"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert backend.stats()["used_bytes_now"] == 200_000 * OBJECT
