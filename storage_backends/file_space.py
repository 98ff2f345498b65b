"""Every change of the storage folder: room for an object, its appearance and its removal.

Each change happens under the shared lock together with its count, so that the sum of all processes'
objects and temporary files never exceeds the capacity.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_hicache.errors import BackendTimeout
from vllm_hicache.storage_backends import file_names
from vllm_hicache.storage_backends.file_capacity import Ledger, UsageFile, charged_bytes
from vllm_hicache.storage_backends.file_sweep import Sweeper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_hicache.storage_backends.counters import Counters

_ROOM_WAIT_S = 2.0  # beyond it, a dropped write costs less than a blocked writer
_FIRST_PAUSE_S = 0.001
_REMOVALS_PER_LOCK = 64
_RELEASE_LOCK_S = 1.0


@dataclass(frozen=True, slots=True)
class TemporaryFile:
    """A file of final length that nobody reads yet. Its room is reserved."""

    name: str  # of the object it becomes
    path: str
    fd: int
    num_bytes: int


class FolderSpace:
    """The folder and the room in it, bounded over all processes that share it."""

    def __init__(
        self,
        root: Path,
        counters: Counters,
        *,
        capacity_bytes: int | None,
        min_free_bytes: int,
    ) -> None:
        self._root = str(root)  # joined by hand: pathlib costs 10 us for each object
        self._capacity_bytes = capacity_bytes
        self._min_free_bytes = min_free_bytes
        self.usage = UsageFile(root)
        self.sweeper = Sweeper(root, self.usage, counters, capacity_bytes)

    def path(self, name: str) -> str:
        """Where an object lies.

        Raises:
            ValueError: The name is not an object's; it could lead out of the folder.
        """
        if not file_names.is_object(name):
            raise ValueError(f"not the name of an object: {name!r}")
        folder = file_names.folder_name(file_names.folder_index(name))
        return f"{self._root}/{folder}/{name}"

    def reserve(self, name: str, num_bytes: int, deadline: float) -> TemporaryFile | None:
        """Create a temporary file and make room for it, evicting older objects.

        None when no room can be made by the deadline, which is on the monotonic clock.

        Raises:
            BackendTimeout: The lock was not to be had by the deadline.
            OSError: The file system refuses.
        """
        if self._capacity_bytes is not None and charged_bytes(num_bytes) > self._capacity_bytes:
            return None
        temporary = self._create(name, num_bytes)
        is_reserved = False
        try:
            is_reserved = self._make_room(temporary, deadline)
        finally:
            if not is_reserved:
                os.close(temporary.fd)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary.path)
        return temporary if is_reserved else None

    def commit(self, temporary: TemporaryFile, deadline: float) -> bool:
        """Give the object its name; False when one of the same length has it already.

        Raises:
            BackendTimeout: The lock was not to be had. The caller releases the file.
            OSError: The file system refuses. The caller releases the file.
        """
        final = self.path(temporary.name)
        folder = file_names.folder_index(temporary.name)
        with self.usage.locked(deadline) as ledger:
            length = length_of(final)
            if length == temporary.num_bytes:
                os.unlink(temporary.path)
                ledger.add(folder, -charged_bytes(temporary.num_bytes))
                return False
            os.rename(temporary.path, final)
            ledger.add(folder, -charged_bytes(length or 0))
            return True

    def release(self, temporary: TemporaryFile) -> None:
        """Remove a temporary file that does not become an object. Safe to call twice.

        Without the lock the file goes all the same; its room is found by the next sweep.
        """
        folder = file_names.folder_index(temporary.name)
        try:
            with self.usage.locked(time.monotonic() + _RELEASE_LOCK_S) as ledger:
                os.unlink(temporary.path)
                ledger.add(folder, -charged_bytes(temporary.num_bytes))
        except FileNotFoundError:
            return
        except BackendTimeout:
            os.unlink(temporary.path)

    def remove(self, names: Sequence[str], deadline: float) -> int:
        """Remove objects; return how many were there.

        Raises:
            BackendTimeout: The lock was not to be had by the deadline.
            OSError: The file system refuses.
        """
        num_removed = 0
        for first in range(0, len(names), _REMOVALS_PER_LOCK):
            with self.usage.locked(deadline) as ledger:
                for name in names[first : first + _REMOVALS_PER_LOCK]:
                    length = length_of(self.path(name))
                    if length is None:
                        continue
                    os.unlink(self.path(name))
                    ledger.add(file_names.folder_index(name), -charged_bytes(length))
                    num_removed += 1
        return num_removed

    def _create(self, name: str, num_bytes: int) -> TemporaryFile:
        """An empty temporary file. Creating takes long on some file systems, so without the lock;
        it counts for nothing until it has its length.
        """
        directory = f"{self._root}/{file_names.folder_name(file_names.folder_index(name))}"
        path = f"{directory}/{file_names.temporary_name(name, file_names.Writer.current())}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o600)
        except FileNotFoundError:
            Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, flags, 0o600)
        return TemporaryFile(name, path, fd, num_bytes)

    def _make_room(self, temporary: TemporaryFile, deadline: float) -> bool:
        """Give a temporary file its length once that fits; False when it does not in time."""
        charge = charged_bytes(temporary.num_bytes)
        give_up = min(deadline, time.monotonic() + _ROOM_WAIT_S)
        pause_s = _FIRST_PAUSE_S
        while True:
            num_sweeps = self.sweeper.num_sweeps
            with self.usage.locked(deadline) as ledger:
                freed = 0
                if ledger.is_counted:
                    shortage = self._shortage(ledger, charge)
                    if shortage > ledger.total_bytes:
                        return False  # not even an empty folder would do
                    if shortage > 0:
                        freed = self.sweeper.evict(ledger, shortage)
                    if freed >= shortage:
                        # A sweep sees from now on what the file will use.
                        os.ftruncate(temporary.fd, temporary.num_bytes)
                        ledger.add(file_names.folder_index(temporary.name), charge)
                        return True
            if freed:
                continue
            # Nothing known to evict: others were faster, or all is being written now.
            if not self.sweeper.wait_for_next(num_sweeps, give_up - pause_s):
                return False
            time.sleep(pause_s)
            pause_s *= 2

    def make_room_at_once(self, ledger: Ledger, charge: int) -> bool:
        """Whether `charge` more bytes may be used now, after evicting what is known to be old."""
        if not ledger.is_counted:
            return False
        shortage = self._shortage(ledger, charge)
        if shortage > ledger.total_bytes:
            return False
        return shortage <= 0 or self.sweeper.evict(ledger, shortage) >= shortage

    def room(self) -> dict[str, str | int | None]:
        """How full the folder and its file system are."""
        status = os.statvfs(self._root)
        return {
            "used_bytes": self.usage.last_total_bytes,
            "capacity_bytes": self._capacity_bytes,
            "free_bytes": status.f_bavail * status.f_frsize,
            "kept_free_bytes": self._min_free_bytes,
        }

    def _shortage(self, ledger: Ledger, charge: int) -> int:
        """Bytes that must be freed before `charge` more may be used; 0 or less: none."""
        status = os.statvfs(self._root)
        shortage = self._min_free_bytes + charge - status.f_bavail * status.f_frsize
        if self._capacity_bytes is not None:
            shortage = max(shortage, ledger.total_bytes + charge - self._capacity_bytes)
        return shortage


def length_of(path: str) -> int | None:
    """Length of a file in bytes, None when there is none."""
    try:
        return os.lstat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
