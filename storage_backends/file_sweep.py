"""Walks the folder in the background: corrects the counts, removes leftovers, finds the oldest.

One walk notes the oldest sixteenth of the objects, so evicting one object costs on average the look
at 16 (about 50 us), however many there are, and eviction follows the exact order of age.
"""

from __future__ import annotations

import heapq
import logging
import os
import stat
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from vllm_hicache.storage_backends import file_names, file_records
from vllm_hicache.storage_backends.file_capacity import charged_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_hicache.storage_backends.counters import Counters
    from vllm_hicache.storage_backends.file_capacity import Ledger, UsageFile

logger = logging.getLogger(__name__)

_GROUP_FOLDERS = 256  # folders measured between two takings of the lock
_MIN_CANDIDATES = 1024
_MAX_CANDIDATES = 65536  # 15 MB of names
_CANDIDATE_SHARE = 16
_EVICTIONS_PER_LOCK = 16  # about 1 ms of unlinks while others wait for the lock
_LOCK_TIMEOUT_S = 10.0


class _Oldest:
    """The `limit` oldest of all objects offered."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._heap: list[tuple[int, str]] = []  # (-modified_ns, name): the newest on top
        self.num_offered = 0

    def offer(self, modified_ns: int, name: str) -> None:
        self.num_offered += 1
        if len(self._heap) < self._limit:
            heapq.heappush(self._heap, (-modified_ns, name))
        elif -modified_ns > self._heap[0][0]:
            heapq.heapreplace(self._heap, (-modified_ns, name))

    def in_order(self) -> list[tuple[int, str]]:
        """(modified_ns, name), oldest first."""
        return [(-negative_ns, name) for negative_ns, name in sorted(self._heap, reverse=True)]


class Sweeper:
    """The background thread of one process for one folder, and its list of what to evict next."""

    def __init__(
        self, root: Path, usage: UsageFile, counters: Counters, capacity_bytes: int | None
    ) -> None:
        self._root = root
        self._usage = usage
        self._counters = counters
        self._capacity_bytes = capacity_bytes
        self._candidates: deque[tuple[int, str]] = deque()
        self._num_candidates = 0
        self._limit = 16 * _MIN_CANDIDATES
        self._wanted = threading.Event()
        self._swept = threading.Condition()
        self._is_started = False
        self._is_stopped = False
        self._thread = threading.Thread(target=self._work, name="hicache-sweep", daemon=True)
        self.num_sweeps = 0

    def start(self) -> None:
        """Start the thread unless it was started; its first sweep begins at once."""
        self._wanted.set()
        with self._swept:
            if not self._is_started:
                self._is_started = True
                self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread has been started and has not ended."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ask the thread to end at the next group of folders."""
        self._is_stopped = True
        self._wanted.set()

    def wait_for_next(self, num_seen: int, deadline: float) -> bool:
        """Ask for a sweep and wait until more than `num_seen` are done; False at the deadline."""
        self.start()
        with self._swept:
            return self._swept.wait_for(
                lambda: self.num_sweeps > num_seen, timeout=max(0.0, deadline - time.monotonic())
            )

    def evict(self, ledger: Ledger, need_bytes: int) -> int:
        """Remove the oldest objects until `need_bytes` are freed, a few at most; return the bytes.

        The caller holds the lock. An object that was read since the sweep is passed over: the next
        sweep ranks it by its new time.
        """
        freed = num_evicted = 0
        while self._candidates and freed < need_bytes and num_evicted < _EVICTIONS_PER_LOCK:
            modified_ns, name = self._candidates.popleft()
            folder = file_names.folder_index(name)
            path = self._root / file_names.folder_name(folder) / name
            try:
                found = path.lstat()
                if found.st_mtime_ns != modified_ns:
                    continue
                path.unlink()
            except FileNotFoundError:
                continue
            ledger.add(folder, -charged_bytes(found.st_size))
            freed += charged_bytes(found.st_size)
            num_evicted += 1
            self._counters.add(objects_evicted=1, bytes_evicted=found.st_size)
        if len(self._candidates) * 4 < self._num_candidates:
            self._wanted.set()
        return freed

    def _work(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._is_stopped:
                return
            try:
                self._sweep()
                self._trim()
            except Exception:
                logger.exception("sweep of storage folder %s failed", self._root)
            with self._swept:
                self.num_sweeps += 1
                self._swept.notify_all()

    def _sweep(self) -> None:
        started = time.monotonic()
        oldest = _Oldest(self._limit)
        folders = self._folders()
        for first in range(0, len(folders), _GROUP_FOLDERS):
            if self._is_stopped:
                return
            self._sweep_group(folders[first : first + _GROUP_FOLDERS], oldest)
        with self._usage.locked(time.monotonic() + _LOCK_TIMEOUT_S) as ledger:
            ledger.finish_counting()
            self._candidates = deque(oldest.in_order())
            self._num_candidates = len(self._candidates)
        share = oldest.num_offered // _CANDIDATE_SHARE
        self._limit = min(max(share, _MIN_CANDIDATES), _MAX_CANDIDATES)
        self._counters.add(sweeps=1, sweep_seconds=time.monotonic() - started)

    def _folders(self) -> list[int]:
        """Folders that exist or are counted. One that appears later is counted by its writer."""
        with self._usage.locked(time.monotonic() + _LOCK_TIMEOUT_S) as ledger:
            table = ledger.table()
        try:
            listed = set(os.listdir(self._root))
        except FileNotFoundError:
            listed = set()
        used = {i for i in range(file_names.NUM_FOLDERS) if table[i][0]}
        used |= {i for i in range(file_names.NUM_FOLDERS) if file_names.folder_name(i) in listed}
        if file_records.FOLDER in listed:
            used.add(file_records.COUNTED_IN)
        return sorted(used)

    def _sweep_group(self, group: list[int], oldest: _Oldest) -> None:
        """Measure some folders without the lock, then correct their counts under it.

        A folder that changed meanwhile is measured again under the lock.
        """
        with self._usage.locked(time.monotonic() + _LOCK_TIMEOUT_S) as ledger:
            before = ledger.table()
        measured = [(index, *self._measure(index, oldest)) for index in group]
        with self._usage.locked(time.monotonic() + _LOCK_TIMEOUT_S) as ledger:
            now = ledger.table()
            for index, used, leftovers in measured:
                exact = used
                if leftovers or now[index] != before[index]:
                    self._remove_leftovers(leftovers)
                    exact, _ = self._measure(index, oldest)
                if exact != now[index][0]:
                    ledger.correct(index, exact)

    def _measure(self, index: int, oldest: _Oldest) -> tuple[int, list[str]]:
        """(bytes used, paths of dead writers' files) of one folder; offers its objects."""
        used = 0
        if index == file_records.COUNTED_IN:
            used = file_records.used_bytes(str(self._root))
        leftovers: list[str] = []
        observer = file_names.Writer.current()
        try:
            entries = os.scandir(self._root / file_names.folder_name(index))
        except (FileNotFoundError, NotADirectoryError):
            return used, leftovers
        with entries:
            for entry in entries:
                is_object = file_names.is_object(entry.name)
                if not is_object and not file_names.is_temporary(entry.name):
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if not stat.S_ISREG(found.st_mode):
                    continue
                used += charged_bytes(found.st_size)
                if is_object:
                    oldest.offer(found.st_mtime_ns, entry.name)
                elif file_names.is_leftover(entry.name, found.st_mtime, observer):
                    leftovers.append(entry.path)
        return used, leftovers

    def _remove_leftovers(self, paths: list[str]) -> None:
        for path in paths:
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue
            self._counters.add(leftovers_removed=1)

    def _trim(self) -> None:
        """Bring the folder below the capacity: it may have been larger at start."""
        while self._capacity_bytes is not None and not self._is_stopped:
            with self._usage.locked(time.monotonic() + _LOCK_TIMEOUT_S) as ledger:
                excess = ledger.total_bytes - self._capacity_bytes
                if excess <= 0 or not self.evict(ledger, excess):
                    return
