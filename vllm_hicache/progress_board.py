"""A worker's progress in shared memory, so that the scheduler on the same host sees a finished
copy without waiting for a step.

One page, written by the worker's copy threads, read by the scheduler. Layout, little-endian
unsigned 64-bit words:

    0      magic
    8      token drawn by the worker, so that a reader knows that it mapped the right page
    64     saves: done, failures, busy nanoseconds
    96     loads: done, failures, busy nanoseconds
    1024   the last 128 failed saves, a ring
    2048   the last 128 failed loads, a ring

A failure is written before the counter that covers it, and read after, so a reader that sees
an operation done also sees that it failed.
"""

import mmap
import os
import struct

from vllm_hicache.plan import Direction
from vllm_hicache.progress import WorkerProgress

BOARD_BYTES = 4096
MAGIC = 0x3144524F42434948  # "HICBORD1"
RING = 128
_WORD = struct.Struct("<Q")
_COUNTERS = {Direction.SAVE: 64, Direction.LOAD: 96}
_RINGS = {Direction.SAVE: 1024, Direction.LOAD: 2048}


class ProgressBoard:
    """The worker's end. Owns the memory file; ``close`` frees it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("hicache-progress", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, BOARD_BYTES)
        self.token = int.from_bytes(os.urandom(8), "little")
        self._map = mmap.mmap(self.fd, BOARD_BYTES)
        self._put(0, MAGIC)
        self._put(8, self.token)

    @property
    def path(self) -> str:
        """Where another process of this user on this host finds the page."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def publish(self, direction: Direction, op_id: int, is_ok: bool, busy_s: float) -> None:
        """Record that all operations up to ``op_id`` are done. One thread per direction."""
        base = _COUNTERS[direction]
        if not is_ok:
            failures = self._get(base + 8)
            self._put(_RINGS[direction] + 8 * (failures % RING), op_id)
            self._put(base + 8, failures + 1)
        self._put(base + 16, self._get(base + 16) + int(busy_s * 1e9))
        self._put(base, op_id)

    def read(self) -> WorkerProgress:
        return _read(self._map)

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)

    def _put(self, offset: int, value: int) -> None:
        _WORD.pack_into(self._map, offset, value)

    def _get(self, offset: int) -> int:
        value: int = _WORD.unpack_from(self._map, offset)[0]
        return value


class BoardReader:
    """The scheduler's end: a read-only mapping of one worker's board."""

    def __init__(self, board: mmap.mmap) -> None:
        self._map = board

    @classmethod
    def open(cls, path: str, token: int) -> "BoardReader | None":
        """Map a worker's board; None where it is on another host or cannot be opened."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            board = mmap.mmap(fd, BOARD_BYTES, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)
        if _WORD.unpack_from(board, 0)[0] != MAGIC or _WORD.unpack_from(board, 8)[0] != token:
            board.close()
            return None
        return cls(board)

    def read(self) -> WorkerProgress:
        return _read(self._map)

    def close(self) -> None:
        self._map.close()


def _read(board: mmap.mmap) -> WorkerProgress:
    def word(offset: int) -> int:
        value: int = _WORD.unpack_from(board, offset)[0]
        return value

    def failed(direction: Direction) -> tuple[int, ...]:
        failures = word(_COUNTERS[direction] + 8)
        if not failures:
            return ()
        ring = _RINGS[direction]
        numbers = [word(ring + 8 * i) for i in range(min(failures, RING))]
        if failures <= RING:
            return tuple(numbers)
        # Older failures were overwritten. The join drops numbers that it has consumed; of the
        # others, every operation older than the oldest failure kept is in doubt.
        return tuple(range(max(1, min(numbers) - RING), min(numbers))) + tuple(numbers)

    saves_done = word(_COUNTERS[Direction.SAVE])
    loads_done = word(_COUNTERS[Direction.LOAD])
    return WorkerProgress(
        saves_done=saves_done,
        loads_done=loads_done,
        failed_saves=failed(Direction.SAVE),
        failed_loads=failed(Direction.LOAD),
        save_busy_s=word(_COUNTERS[Direction.SAVE] + 16) / 1e9,
        load_busy_s=word(_COUNTERS[Direction.LOAD] + 16) / 1e9,
    )
