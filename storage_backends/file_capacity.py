"""How many bytes the folder holds, kept exact over all processes that share it.

A small file holds one total and one count per fan-out folder. Whoever changes the folder holds the
file's lock while doing so; what a killed process left uncounted is put right by a sweep.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from typing import TYPE_CHECKING

from vllm_hicache.errors import BackendTimeout, BackendUnavailable
from vllm_hicache.storage_backends.file_names import NUM_FOLDERS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE_NAME = ".hicache-usage"

# offset  size  header                       offset          size  record of folder i
#      0     8  magic                        64 + 16 * i        8  bytes used, int64
#      8     4  format version, uint32       72 + 16 * i        8  changes so far, uint64
#     12     4  1 when all folders counted
#     16     8  total bytes used, int64
_MAGIC = b"HICUSAGE"
_VERSION = 1
_HEADER = struct.Struct("<8sIIq")
_RECORD = struct.Struct("<qQ")
_RECORDS_OFFSET = 64
_FILE_BYTES = _RECORDS_OFFSET + NUM_FOLDERS * _RECORD.size

_BLOCK_BYTES = 4096
_FIRST_POLL_S = 0.00005  # the lock is held for about 50 us
_LAST_POLL_S = 0.001


def charged_bytes(num_bytes: int) -> int:
    """What a file counts for: whole blocks of 4,096 bytes, as file systems allocate.

    >>> charged_bytes(1), charged_bytes(4096), charged_bytes(4097)
    (4096, 4096, 8192)
    """
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


class FolderTable:
    """(bytes used, changes so far) of every folder at one moment."""

    def __init__(self, records: bytes) -> None:
        self._records = records

    def __getitem__(self, index: int) -> tuple[int, int]:
        used, changes = _RECORD.unpack_from(self._records, index * _RECORD.size)
        return used, changes


class Ledger:
    """The counts, valid while the lock is held."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        magic, version, counted, total = _HEADER.unpack(_pread(fd, _HEADER.size, 0))
        if magic != _MAGIC or version != _VERSION:
            counted, total = 0, 0
            os.pwrite(fd, bytes(_FILE_BYTES), 0)  # no holes: a later update needs no space
            os.pwrite(fd, _HEADER.pack(_MAGIC, _VERSION, 0, 0), 0)
        self.is_counted = bool(counted)
        self.total_bytes = total

    def table(self) -> FolderTable:
        """The records of all folders as they are now."""
        return FolderTable(_pread(self._fd, NUM_FOLDERS * _RECORD.size, _RECORDS_OFFSET))

    def add(self, index: int, delta_bytes: int) -> None:
        """Count a change of a folder; a delta of 0 says that names changed.

        A crash between the two writes leaves a total that is too high, never too low.
        """
        used, changes = self._record(index)
        record = _RECORD.pack(max(0, used + delta_bytes), changes + 1)
        self.total_bytes = max(0, self.total_bytes + delta_bytes)
        if delta_bytes > 0:
            self._write_header()
        os.pwrite(self._fd, record, _RECORDS_OFFSET + index * _RECORD.size)
        if delta_bytes < 0:
            self._write_header()

    def correct(self, index: int, used_bytes: int) -> None:
        """Set what a folder was measured to use."""
        self.add(index, used_bytes - self._record(index)[0])

    def finish_counting(self) -> None:
        """State that every folder was measured; make the total their sum."""
        table = self.table()
        self.total_bytes = sum(table[index][0] for index in range(NUM_FOLDERS))
        self.is_counted = True
        self._write_header()

    def _record(self, index: int) -> tuple[int, int]:
        offset = _RECORDS_OFFSET + index * _RECORD.size
        used, changes = _RECORD.unpack(_pread(self._fd, _RECORD.size, offset))
        return used, changes

    def _write_header(self) -> None:
        header = _HEADER.pack(_MAGIC, _VERSION, int(self.is_counted), self.total_bytes)
        os.pwrite(self._fd, header, 0)


class UsageFile:
    """The shared counts of one storage folder.

    A process that dies gives the lock back. One that is stopped while it holds the lock makes
    writes of all others fail by their deadline; reads never take it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = str(root / FILE_NAME)
        self._thread_lock = threading.Lock()
        self._fd = -1
        self._is_closed = False
        self.last_total_bytes = 0

    @contextlib.contextmanager
    def locked(self, deadline: float) -> Iterator[Ledger]:
        """Hold the lock of the folder. `deadline` is on the monotonic clock.

        Raises:
            BackendTimeout: Another process or thread holds the lock until the deadline.
            OSError: The file can neither be opened nor created.
        """
        if not self._thread_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise BackendTimeout("usage lock is held by another thread", backend="file")
        try:
            self._lock_current_file(deadline)
            try:
                ledger = Ledger(self._fd)
                yield ledger
                self.last_total_bytes = ledger.total_bytes
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                if self._is_closed:
                    self._close_file()
        finally:
            self._thread_lock.release()

    def close(self) -> None:
        """Close the file, or let the thread that holds the lock do so. Never blocks."""
        self._is_closed = True
        if self._thread_lock.acquire(blocking=False):
            self._close_file()
            self._thread_lock.release()

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _lock_current_file(self, deadline: float) -> None:
        """Lock the file that bears the name now: the folder may have been removed meanwhile."""
        while True:
            if self._is_closed:
                raise BackendUnavailable("storage folder is closed", backend="file")
            if self._fd < 0:
                self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o600)
            self._lock_by(deadline)
            if self._is_current():
                return
            self._close_file()

    def _lock_by(self, deadline: float) -> None:
        poll_s = _FIRST_POLL_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BackendTimeout(
                        "usage lock is held by another process", backend="file"
                    ) from None
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, _LAST_POLL_S)
            else:
                return

    def _is_current(self) -> bool:
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self._fd))


def _pread(fd: int, num_bytes: int, offset: int) -> bytes:
    """Read exactly; what lies beyond the end reads as zeros."""
    return os.pread(fd, num_bytes, offset).ljust(num_bytes, b"\0")
