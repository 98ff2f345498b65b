"""The thread that maps a pool into a second process as it grows, by what the kernel says of it."""

import ctypes
import mmap
import os
import struct

import pytest

from vllm_hicache import memory_pages, pool_mapping
from vllm_hicache.memory_pages import is_backed, populate
from vllm_hicache.pool_mapping import STEP_BYTES, PoolMapping

SIZE = 2 * STEP_BYTES + 3 * mmap.PAGESIZE


class _Shared:
    """A memfd with two mappings, as a worker and its storage process have them."""

    def __init__(self):
        self.fd = os.memfd_create("test")
        os.ftruncate(self.fd, SIZE)
        self.worker, self.memory = mmap.mmap(self.fd, SIZE), mmap.mmap(self.fd, SIZE)

    def back(self, start, stop):
        assert populate(_address(self.worker) + start, stop - start) == 0

    def num_mapped(self):
        """Memory pages in the page table of the second mapping."""
        with open("/proc/self/pagemap", "rb") as file:
            file.seek(_address(self.memory) // mmap.PAGESIZE * 8)
            words = struct.unpack(f"{SIZE // mmap.PAGESIZE}Q", file.read(SIZE // mmap.PAGESIZE * 8))
        return sum(word >> 63 for word in words)

    def num_backed(self):
        return os.fstat(self.fd).st_blocks * 512 // mmap.PAGESIZE


def _address(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@pytest.fixture
def shared(monkeypatch):
    monkeypatch.setattr(pool_mapping, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(pool_mapping, "LONGEST_PAUSE_S", 0.01)
    made = _Shared()
    yield made
    os.close(made.fd)


def test_a_pool_that_is_there_is_mapped_whole(shared):
    shared.back(0, SIZE)
    assert shared.num_mapped() == 0
    assert PoolMapping(shared.fd, shared.memory).wait(30)
    assert shared.num_mapped() == SIZE // mmap.PAGESIZE


def test_what_the_worker_has_not_backed_stays_as_it_is_until_it_has(shared):
    last = SIZE - 2 * mmap.PAGESIZE
    shared.back(STEP_BYTES, last)  # the second part whole, the third but for its end
    mapping = PoolMapping(shared.fd, shared.memory)
    assert not mapping.wait(0.2)
    num_pages = STEP_BYTES // mmap.PAGESIZE
    assert shared.num_mapped() == num_pages
    assert shared.num_backed() == num_pages + 1
    shared.back(0, STEP_BYTES)
    shared.back(last, SIZE)
    assert mapping.wait(30)
    assert shared.num_mapped() == SIZE // mmap.PAGESIZE


def test_bytes_stay_what_they_were(shared):
    shared.back(0, SIZE)
    shared.worker[:] = pattern = bytes(range(251)) * (SIZE // 251) + bytes(SIZE % 251)
    assert PoolMapping(shared.fd, shared.memory).wait(30)
    assert shared.memory[:] == pattern


def test_an_older_kernel_maps_at_first_use(shared, monkeypatch, caplog):
    monkeypatch.setattr(memory_pages, "_POPULATE_WRITE", 999)
    shared.worker.write(bytes(SIZE))
    with caplog.at_level("INFO"):
        assert PoolMapping(shared.fd, shared.memory).wait(30)
    assert "mapped at first use (Invalid argument)" in caplog.text
    assert shared.num_mapped() == 0


def test_it_can_be_stopped_while_the_pool_does_not_grow(shared):
    assert PoolMapping(shared.fd, shared.memory).stop(30)


@pytest.mark.parametrize(
    ("backed", "asked", "expected"),
    [
        ((0, 4), (0, 4), True),
        ((0, 4), (0, 5), False),
        ((1, 4), (0, 4), False),
        ((1, 4), (2, 4), True),
    ],
)
def test_a_range_is_backed_when_all_of_its_pages_are(shared, backed, asked, expected):
    shared.back(*(page * mmap.PAGESIZE for page in backed))
    assert is_backed(shared.fd, *(page * mmap.PAGESIZE for page in asked)) is expected
