"""Memory pages of a mapping: backed and entered into the page table ahead of use."""

import ctypes
import errno
import mmap
import os

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14."""


def populate(address: int, num_bytes: int) -> int:
    """Back this range whatever it holds, and map it for writing; the GIL is free meanwhile.

    Returns 0, or the number of the error: ``EINVAL`` where the kernel is older than 5.14.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = ctypes.c_size_t(address + num_bytes - start)
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    while madvise(ctypes.c_void_p(start), length, _POPULATE_WRITE):
        number = ctypes.get_errno()
        if number not in (errno.EINTR, errno.EAGAIN):
            return number
    return 0


def is_backed(fd: int, start: int, stop: int) -> bool:
    """Whether no page between two offsets of a memfd is a hole, whoever has backed it."""
    return os.lseek(fd, start, os.SEEK_HOLE) >= stop
