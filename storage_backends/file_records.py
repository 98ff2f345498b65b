"""Records of namespaces beside the objects of a folder: `namespaces/{namespace}.json`.

They count as used bytes of the first folder of objects, and make room as objects do.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING

from vllm_hicache.storage import MAX_RECORD_BYTES, MAX_RECORDS, WriteOutcome
from vllm_hicache.storage_backends.file_capacity import charged_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_hicache.storage_backends.file_capacity import Ledger
    from vllm_hicache.storage_backends.file_space import FolderSpace

FOLDER = "namespaces"
COUNTED_IN = 0
"""The folder of objects whose count includes the records."""

_SUFFIX = ".json"
_IS_NAMESPACE = re.compile(r"[A-Za-z0-9]+-[0-9a-f]+").fullmatch
_NEW = ".new"  # one at a time: whoever writes holds the lock


def used_bytes(root: str) -> int:
    """What all records count for."""
    return sum(charged_bytes(found.st_size) for _, found in _entries(f"{root}/{FOLDER}"))


def _entries(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Name and status of every file that a record is or was to become."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        is_record = name.endswith(_SUFFIX) and _IS_NAMESPACE(name.removesuffix(_SUFFIX))
        if is_record or name == _NEW:
            try:
                found = os.lstat(f"{folder}/{name}")
            except FileNotFoundError:
                continue
            if stat.S_ISREG(found.st_mode):
                yield name, found


class RecordFolder:
    """The records of one folder. Every call may block, and runs in a thread."""

    def __init__(self, root: str, space: FolderSpace) -> None:
        self._root = root
        self._folder = f"{root}/{FOLDER}"
        self._space = space

    def write(self, namespace: str, record: bytes, deadline: float) -> WriteOutcome:
        """Write or renew a record. `FULL` too while the folder was never counted.

        Raises:
            ValueError: It is too long, or the name is no namespace's.
            BackendTimeout: The lock was not to be had by the deadline.
            OSError: The file system refuses.
        """
        if len(record) > MAX_RECORD_BYTES:
            raise ValueError(f"a record has {len(record)} bytes, at most {MAX_RECORD_BYTES}")
        path = self._path(namespace)
        with self._space.usage.locked(deadline) as ledger:
            if _content(path) == record:
                os.utime(path)
                return WriteOutcome.EXISTS
            was_there = self._remove(ledger, path)
            if not self._space.make_room_at_once(ledger, charged_bytes(len(record))):
                return WriteOutcome.FULL
            self._store(path, record)
            ledger.add(COUNTED_IN, charged_bytes(len(record)))
            self._forget_oldest(ledger)
        return WriteOutcome.EXISTS if was_there else WriteOutcome.STORED

    def read_all(self) -> dict[str, bytes]:
        """The records renewed last, by namespace."""
        found = [(s.st_mtime_ns, name) for name, s in _entries(self._folder) if name != _NEW]
        newest = [name for _, name in sorted(found, reverse=True)[:MAX_RECORDS]]
        contents = {
            name.removesuffix(_SUFFIX): _content(f"{self._folder}/{name}") for name in newest
        }
        return {name: record for name, record in contents.items() if record is not None}

    def remove(self, namespace: str, deadline: float) -> None:
        """Remove the record of a namespace, if there is one. Errors of the file system as for
        `write`.
        """
        if _IS_NAMESPACE(namespace) and os.path.lexists(self._path(namespace)):
            with self._space.usage.locked(deadline) as ledger:
                self._remove(ledger, self._path(namespace))

    def _path(self, namespace: str) -> str:
        if not _IS_NAMESPACE(namespace):
            raise ValueError(f"not a namespace: {namespace!r}")
        return f"{self._folder}/{namespace}{_SUFFIX}"

    def _store(self, path: str, record: bytes) -> None:
        new = f"{self._folder}/{_NEW}"
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(record)
        os.rename(new, path)

    def _remove(self, ledger: Ledger, path: str) -> bool:
        try:
            length = os.lstat(path).st_size
            os.unlink(path)
        except FileNotFoundError:
            return False
        ledger.add(COUNTED_IN, -charged_bytes(length))
        return True

    def _forget_oldest(self, ledger: Ledger) -> None:
        found = [(s.st_mtime_ns, name) for name, s in _entries(self._folder) if name != _NEW]
        for _, name in sorted(found, reverse=True)[MAX_RECORDS:]:
            self._remove(ledger, f"{self._folder}/{name}")


def _content(path: str) -> bytes | None:
    """A record as it is there; None without one, and for a file that is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        record = os.read(fd, MAX_RECORD_BYTES + 1)
    finally:
        os.close(fd)
    return record if len(record) <= MAX_RECORD_BYTES else None
