"""Objects as files: one folder, shared by any number of processes, engines and restarts.

No data is synced to the disk: what a power failure leaves behind fails its checksum.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
import time
from typing import TYPE_CHECKING

from vllm_hicache.errors import BackendTimeout, BackendUnavailable, ConfigError
from vllm_hicache.storage import ObjectRead, ObjectWrite, ReadOutcome, WriteOutcome
from vllm_hicache.storage_backends import file_names
from vllm_hicache.storage_backends.counters import Counters
from vllm_hicache.storage_backends.file_records import RecordFolder
from vllm_hicache.storage_backends.file_space import FolderSpace, TemporaryFile
from vllm_hicache.storage_backends.io_threads import IoThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from vllm_hicache.storage_backends.io_threads import Batch

logger = logging.getLogger(__name__)

COUNTERS = (
    "objects_read",
    "objects_written",
    "objects_deleted",
    "objects_evicted",
    "bytes_read",
    "bytes_written",
    "bytes_evicted",
    "read_seconds",
    "write_seconds",
    "read_errors",
    "write_errors",
    "writes_refused",  # no room, no permission or a read-only file system
    "leftovers_removed",  # temporary files of dead writers
    "sweeps",
    "sweep_seconds",
)

_PIECE_BYTES = 8 * 1024 * 1024  # 2 to 4 ms; between pieces a job notices that nobody waits
_CHECKED_PIECE_BYTES = 1024 * 1024
"""Of a read whose checksum is computed on the way: what a core's cache holds. Smaller pieces cost
more calls, each of which takes the GIL. (Sixteen cores of an H200's host, page cache, 2026-12-01,
`benchmarks/fetch_rate.py`, one run each: 12.3, 18.5 and 11.9 GB/s with pieces of 2, 1 and 4 MiB
on one host, 19.9 and 18.2 with 1 and 0.5 MiB after another start.)"""
_NAMES_PER_JOB = 64
_QUESTION_THREADS = 4  # exists and delete do not queue behind reads and writes
_TOUCH_AFTER_S = 60.0
_FIRST_SWEEP_S = 4.0
_HUNG_AFTER_S = (
    0.5  # a thread in a system call for longer is replaced; sound disks take milliseconds
)
_CLOSE_S = 1.0
_LOG_EVERY_S = 60.0

_ABSENT = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EACCES, errno.EPERM, errno.ELOOP}
)
_NEVER_MADE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
)
_REFUSED = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS}
)


class FileBackend:
    """Stores objects below `root`, in folders named by the first three digits of their names.

    The objects of all processes that share the folder use at most `capacity_bytes`, counted in
    blocks of 4,096 bytes and temporary files included; the oldest go first, where a read makes an
    object young again, at most once a minute. `min_free_bytes` stay free on the file system. Files
    are readable by their owner alone. Errors that refuse a write (disk full, no permission,
    read-only) are counted and answered `FULL`, so that reads go on; objects that may not be read
    are missing; all other errors raise `BackendUnavailable`.
    """

    name = "file"

    def __init__(
        self,
        root: Path,
        *,
        capacity_bytes: int | None = None,
        min_free_bytes: int = 0,
        read_threads: int = 16,
        write_threads: int = 8,
        operation_timeout_s: float = 10.0,
    ) -> None:
        self._root = root
        self._timeout_s = operation_timeout_s
        self._counters = Counters(COUNTERS)
        self._space = FolderSpace(
            root, self._counters, capacity_bytes=capacity_bytes, min_free_bytes=min_free_bytes
        )
        self._records = RecordFolder(str(root), self._space)
        hung_after_s = min(_HUNG_AFTER_S, operation_timeout_s)
        self._readers = IoThreads("read", read_threads, hung_after_s=hung_after_s)
        self._writers = IoThreads("write", write_threads, hung_after_s=hung_after_s)
        self._askers = IoThreads("ask", _QUESTION_THREADS, hung_after_s=hung_after_s)
        self._last_logged: dict[tuple[str, int | None], float] = {}

    async def open(self) -> None:
        """Create the folder where missing, remove leftovers of dead writers, count what is there.

        Counting goes on in the background after 4 seconds; until it ends the first time a folder
        is used, writes wait. See `StorageBackend.open` for errors.
        """
        prepared = await self._askers.run(
            [self._prepare], timeout_s=self._timeout_s, uses_buffers=False
        )
        if not prepared[0]:
            return
        self._space.sweeper.start()
        deadline = time.monotonic() + _FIRST_SWEEP_S
        while self._space.sweeper.num_sweeps == 0 and time.monotonic() < deadline:
            await asyncio.sleep(0.002)

    async def close(self) -> None:
        """As `StorageBackend.close`; threads that hang are left behind."""
        sweeper = self._space.sweeper
        sweeper.stop()
        await asyncio.gather(self._readers.close(), self._writers.close(), self._askers.close())
        deadline = time.monotonic() + _CLOSE_S
        while sweeper.is_running and time.monotonic() < deadline:
            await asyncio.sleep(0.002)
        self._space.usage.close()

    async def contains(self, names: Sequence[str]) -> list[bool]:
        """As `StorageBackend.contains`."""
        jobs = [self._contains_job(part) for part in _parts(names)]
        answers = await self._askers.run(jobs, timeout_s=self._timeout_s, uses_buffers=False)
        return [answer for part in answers for answer in part]

    async def read(self, reads: Sequence[ObjectRead]) -> list[ReadOutcome]:
        """As `StorageBackend.read`; each object by `preadv` straight into its views."""
        jobs = [self._read_job(read) for read in reads]
        return await self._readers.run(jobs, timeout_s=self._timeout_s)

    async def write(self, writes: Sequence[ObjectWrite]) -> list[WriteOutcome]:
        """As `StorageBackend.write`; each object as a temporary file that is then renamed."""
        deadline = time.monotonic() + self._timeout_s
        jobs = [self._write_job(write, deadline) for write in writes]
        return await self._writers.run(jobs, timeout_s=self._timeout_s)

    async def delete(self, names: Sequence[str]) -> int:
        """As `StorageBackend.delete`."""
        jobs = [self._delete_job(part) for part in _parts(names)]
        removed = await self._askers.run(jobs, timeout_s=self._timeout_s, uses_buffers=False)
        return sum(removed)

    async def clear(self, namespace: str) -> int:
        """As `StorageBackend.clear`."""
        removed = await self._askers.run(
            [self._clear_job(namespace)], timeout_s=None, uses_buffers=False
        )
        return removed[0]

    async def write_record(self, namespace: str, record: bytes) -> WriteOutcome:
        """As `KeepsRecords.write_record`."""
        outcomes = await self._askers.run(
            [self._record_job(namespace, record)], timeout_s=self._timeout_s, uses_buffers=False
        )
        return outcomes[0]

    async def read_records(self) -> dict[str, bytes]:
        """As `KeepsRecords.read_records`."""

        def job(_batch: Batch[dict[str, bytes]]) -> dict[str, bytes]:
            return self._records.read_all()

        found = await self._askers.run([job], timeout_s=self._timeout_s, uses_buffers=False)
        return found[0]

    async def room(self) -> dict[str, str | int | None]:
        """As `TellsRoom.room`."""

        def job(_batch: Batch[dict[str, str | int | None]]) -> dict[str, str | int | None]:
            return self._space.room()

        return (await self._askers.run([job], timeout_s=self._timeout_s, uses_buffers=False))[0]

    def stats(self) -> dict[str, float]:
        """As `StorageBackend.stats`, with the names in `COUNTERS` and three levels."""
        return {
            **self._counters.snapshot(),
            "used_bytes_now": float(self._space.usage.last_total_bytes),
            "hung_threads_now": float(
                self._readers.num_hung() + self._writers.num_hung() + self._askers.num_hung()
            ),
        }

    def oldest_running_s(self) -> float:
        """As `StorageBackend.oldest_running_s`."""
        return max(self._readers.oldest_running_s(), self._writers.oldest_running_s())

    def _prepare(self, _batch: Batch[bool]) -> bool:
        """Create the folder and its usage file; False when the store is read-only."""
        try:
            if os.path.exists(self._root) and not self._root.is_dir():
                raise ConfigError(f"storage path {self._root} must be a directory, and is not")
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._space.usage.locked(time.monotonic() + self._timeout_s / 2):
                pass
        except BackendTimeout as error:
            logger.warning("storage folder %s: %s; reads go on", self._root, error)
        except OSError as error:
            if not os.access(self._root, os.R_OK | os.X_OK):
                # Not Path.exists: below a folder that may not be searched, that one raises.
                if error.errno in _NEVER_MADE and not os.path.exists(self._root):
                    raise ConfigError(
                        f"storage folder {self._root} cannot be created: {error.strerror}"
                    ) from error
                raise self._unavailable("open", str(self._root), error) from error
            logger.warning("storage folder %s is read-only here: %s", self._root, error)
            return False
        return True

    def _contains_job(self, names: Sequence[str]) -> Callable[[Batch[list[bool]]], list[bool]]:
        def job(batch: Batch[list[bool]]) -> list[bool]:
            return [not batch.abandoned and self._is_there(name) for name in names]

        return job

    def _is_there(self, name: str) -> bool:
        try:
            return stat.S_ISREG(os.stat(self._space.path(name)).st_mode)
        except OSError as error:
            if error.errno in _ABSENT:
                return False
            raise self._unavailable("contains", name, error) from error

    def _read_job(self, read: ObjectRead) -> Callable[[Batch[ReadOutcome]], ReadOutcome]:
        def job(batch: Batch[ReadOutcome]) -> ReadOutcome:
            started = time.monotonic()
            try:
                outcome = self._read_object(read, batch)
            except OSError as error:
                if error.errno not in _ABSENT:
                    self._counters.add(read_errors=1)
                    raise self._unavailable("read", read.name, error) from error
                if error.errno != errno.ENOENT:
                    self._counters.add(read_errors=1)
                    self._log("read", error)
                return ReadOutcome.MISSING
            if outcome is ReadOutcome.OK:
                self._counters.add(
                    objects_read=1,
                    bytes_read=read.header.nbytes + read.payload.nbytes,
                    read_seconds=time.monotonic() - started,
                )
            return outcome

        return job

    def _read_object(self, read: ObjectRead, batch: Batch[ReadOutcome]) -> ReadOutcome:
        num_bytes = read.header.nbytes + read.payload.nbytes
        fd = os.open(self._space.path(read.name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if found.st_size != num_bytes or not stat.S_ISREG(found.st_mode):
                return ReadOutcome.BAD_LENGTH
            size = _PIECE_BYTES if read.on_part is None else _CHECKED_PIECE_BYTES
            done = 0
            while done < num_bytes and not batch.abandoned:
                num_read = os.preadv(fd, _pieces(read.header, read.payload, done, size), done)
                if num_read == 0:
                    return ReadOutcome.BAD_LENGTH
                if read.on_part is not None and not batch.abandoned:
                    first = max(0, done - read.header.nbytes)
                    read.on_part(read.payload[first : done + num_read - read.header.nbytes])
                done += num_read
            _make_young(fd, found)
        finally:
            os.close(fd)
        return ReadOutcome.OK

    def _write_job(
        self, write: ObjectWrite, deadline: float
    ) -> Callable[[Batch[WriteOutcome]], WriteOutcome]:
        def job(batch: Batch[WriteOutcome]) -> WriteOutcome:
            started = time.monotonic()
            try:
                outcome = self._write_object(write, batch, deadline)
            except OSError as error:
                if isinstance(error, BackendTimeout):
                    raise
                self._counters.add(write_errors=1)
                self._log("write", error)
                if error.errno not in _REFUSED:
                    raise self._unavailable("write", write.name, error) from error
                outcome = WriteOutcome.FULL
            if outcome is WriteOutcome.FULL:
                self._counters.add(writes_refused=1)
            elif outcome is WriteOutcome.STORED:
                self._counters.add(
                    objects_written=1,
                    bytes_written=len(write.header) + write.payload.nbytes,
                    write_seconds=time.monotonic() - started,
                )
            return outcome

        return job

    def _write_object(
        self, write: ObjectWrite, batch: Batch[WriteOutcome], deadline: float
    ) -> WriteOutcome:
        try:
            return self._write_once(write, batch, deadline)
        except FileNotFoundError:  # the folder was removed meanwhile
            return self._write_once(write, batch, deadline)

    def _write_once(
        self, write: ObjectWrite, batch: Batch[WriteOutcome], deadline: float
    ) -> WriteOutcome:
        num_bytes = len(write.header) + write.payload.nbytes
        path = self._space.path(write.name)
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            pass
        else:
            if found.st_size == num_bytes:
                _make_young(path, found)
                return WriteOutcome.EXISTS
        temporary = self._space.reserve(write.name, num_bytes, deadline)
        if temporary is None:
            return WriteOutcome.FULL
        is_settled = False
        try:
            if not _fill(temporary, write, batch):
                return WriteOutcome.FULL  # nobody reads this answer
            is_stored = self._space.commit(temporary, deadline)
            is_settled = True
        finally:
            if not is_settled:
                self._space.release(temporary)
        return WriteOutcome.STORED if is_stored else WriteOutcome.EXISTS

    def _delete_job(self, names: Sequence[str]) -> Callable[[Batch[int]], int]:
        def job(_batch: Batch[int]) -> int:
            try:
                num_removed = self._space.remove(names, time.monotonic() + self._timeout_s)
            except OSError as error:
                if isinstance(error, BackendTimeout):
                    raise
                raise self._unavailable("delete", names[0], error) from error
            self._counters.add(objects_deleted=num_removed)
            return num_removed

        return job

    def _record_job(
        self, namespace: str, record: bytes
    ) -> Callable[[Batch[WriteOutcome]], WriteOutcome]:
        def job(_batch: Batch[WriteOutcome]) -> WriteOutcome:
            try:
                deadline = time.monotonic() + self._timeout_s
                return self._records.write(namespace, record, deadline)
            except OSError as error:
                if isinstance(error, BackendTimeout):
                    raise
                if error.errno not in _REFUSED:
                    raise self._unavailable("write of a record", namespace, error) from error
                return WriteOutcome.FULL

        return job

    def _remove_record(self, namespace: str) -> None:
        try:
            self._records.remove(namespace, time.monotonic() + self._timeout_s)
        except OSError as error:
            if isinstance(error, BackendTimeout):
                raise
            raise self._unavailable("clear", namespace, error) from error

    def _clear_job(self, namespace: str) -> Callable[[Batch[int]], int]:
        def job(batch: Batch[int]) -> int:
            num_removed = 0
            self._remove_record(namespace)
            for index in range(file_names.NUM_FOLDERS):
                if batch.abandoned:
                    break
                try:
                    listed = os.listdir(self._root / file_names.folder_name(index))
                except (FileNotFoundError, NotADirectoryError):
                    continue
                names = [name for name in listed if file_names.namespace_of(name) == namespace]
                num_removed += self._delete_job(names)(batch)
            return num_removed

        return job

    def _unavailable(self, operation: str, key: str, error: OSError) -> BackendUnavailable:
        message = f"{operation} in storage folder {self._root} failed: {error.strerror}"
        return BackendUnavailable(message, backend=self.name, operation=operation, key=key)

    def _log(self, operation: str, error: OSError) -> None:
        """Log an error, one of a kind a minute."""
        now = time.monotonic()
        kind = (operation, error.errno)
        if now - self._last_logged.get(kind, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._last_logged[kind] = now
            logger.warning("storage %s in %s failed: %s", operation, self._root, error)


def _parts(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[first : first + _NAMES_PER_JOB] for first in range(0, len(names), _NAMES_PER_JOB)]


def _pieces(
    header: bytes | bytearray | memoryview,
    payload: memoryview,
    done: int,
    num_bytes: int = _PIECE_BYTES,
) -> list[memoryview]:
    """The views that one system call moves next, about so many bytes, given how many were moved
    before."""
    if done < len(header):
        return [memoryview(header)[done:], payload[:num_bytes]]
    first = done - len(header)
    return [payload[first : first + num_bytes]]


def _fill(temporary: TemporaryFile, write: ObjectWrite, batch: Batch[WriteOutcome]) -> bool:
    """Write the bytes and close the file; False when nobody waits any more."""
    done = 0
    try:
        while done < temporary.num_bytes and not batch.abandoned:
            done += os.pwritev(temporary.fd, _pieces(write.header, write.payload, done), done)
    finally:
        os.close(temporary.fd)  # network file systems report a full disk only here
    return done == temporary.num_bytes


def _make_young(path_or_fd: str | int, found: os.stat_result) -> None:
    """Refresh the time by which eviction ranks an object, at most once a minute."""
    if time.time() - found.st_mtime < _TOUCH_AFTER_S:
        return
    try:
        os.utime(path_or_fd)
    except OSError as error:
        logger.debug("could not refresh the time of %s: %s", path_or_fd, error)
