"""A worker's progress in shared memory, so that the scheduler on the same host sees a finished
copy without waiting for a step.

One page, written by the worker's threads, read by the scheduler. Layout, little-endian
unsigned 64-bit words:

    0      magic
    8      token drawn by the worker, so that a reader knows that it mapped the right page
    32     host slots: ready, refused
    64     saves: done, failures, busy nanoseconds
    96     loads: done, failures, busy nanoseconds
    128    for the rank-consensus checker: signs of life, last step begun, last step ended
    1024   the last 128 failed saves, a ring
    2048   the last 128 failed loads, a ring

A failure is written before the counter that covers it, and read after, so a reader that sees
an operation done also sees that it failed.
"""

import mmap
import os
import struct

from vllm_hicache.plan import Direction
from vllm_hicache.progress import ProgressJoin, WorkerProgress

BOARD_BYTES = 4096
MAGIC = 0x3144524F42434948  # "HICBORD1"
RING = 128
_WORD = struct.Struct("<Q")
_WORDS = struct.Struct("<15Q")
"""Everything up to the rings, read in the order of its addresses: counters before failures."""
_SLOTS, _SAVES, _LOADS = slice(4, 6), slice(8, 11), slice(12, 15)
_READY, _REFUSED = 32, 40
_SIGNS = struct.Struct("<3Q")
_PULSE, _BEGUN, _ENDED = 128, 136, 144
GOODBYE = (1 << 64) - 1
"""In the place of the signs of life: this worker ends as it should."""
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

    def publish_slots(self, num_ready: int, num_refused: int) -> None:
        """Record how many host slots have their memory, and how many never will. One thread."""
        self._put(_REFUSED, num_refused)
        self._put(_READY, num_ready)

    def beat(self) -> None:
        """Show that this process lives."""
        self._put(_PULSE, self._get(_PULSE) + 1)

    def say_goodbye(self) -> None:
        """This worker ends as it should; nobody shall wait for a sign of life."""
        self._put(_PULSE, GOODBYE)

    def begin_step(self, number: int) -> None:
        self._put(_BEGUN, number)

    def end_step(self, number: int) -> None:
        self._put(_ENDED, number)

    def read(self) -> WorkerProgress:
        return _read(self._map, _WORDS.unpack_from(self._map, 0))

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
        self._words: tuple[int, ...] = ()
        self._progress = WorkerProgress()

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
        """The worker's progress; the same object as long as nothing is new."""
        words = _WORDS.unpack_from(self._map, 0)
        if words != self._words:
            self._words, self._progress = words, _read(self._map, words)
        return self._progress

    def signs(self) -> tuple[int, int, int, int, int]:
        """Signs of life, step begun, step ended, saves done, loads done. Any thread may ask."""
        done = (
            _WORD.unpack_from(self._map, _COUNTERS[d])[0] for d in (Direction.SAVE, Direction.LOAD)
        )
        pulse, begun, ended = _SIGNS.unpack_from(self._map, _PULSE)
        return pulse, begun, ended, *done

    def close(self) -> None:
        self._map.close()


class WorkerBoards:
    """The boards of those workers that are on the scheduler's host."""

    def __init__(self) -> None:
        self.readers: dict[int, BoardReader] = {}

    def open(self, worker_id: int, path: str, token: int) -> None:
        """Map a worker's board if it is on this host."""
        reader = BoardReader.open(path, token)
        if reader is not None:
            self.readers[worker_id] = reader

    def tell(self, join: ProgressJoin) -> None:
        """Have the join know what the boards say."""
        for worker_id, reader in self.readers.items():
            join.update(worker_id, reader.read())

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()
        self.readers.clear()


def _read(board: mmap.mmap, words: tuple[int, ...]) -> WorkerProgress:
    """``words`` are the counters, read before; the failures that they cover are on the board."""

    def failed(direction: Direction, failures: int) -> tuple[tuple[int, ...], int]:
        if not failures:
            return (), 0
        numbers = struct.unpack_from(f"<{min(failures, RING)}Q", board, _RINGS[direction])
        # Once the ring has gone round, failures older than the oldest kept may be forgotten.
        (failures,) = _WORD.unpack_from(board, _COUNTERS[direction] + 8)
        return numbers, min(numbers) - 1 if failures >= RING else 0

    saves_done, num_failed_saves, save_busy_ns = words[_SAVES]
    loads_done, num_failed_loads, load_busy_ns = words[_LOADS]
    slots_ready, slots_refused = words[_SLOTS]
    failed_saves, saves_in_doubt = failed(Direction.SAVE, num_failed_saves)
    failed_loads, loads_in_doubt = failed(Direction.LOAD, num_failed_loads)
    return WorkerProgress(
        saves_done=saves_done,
        loads_done=loads_done,
        failed_saves=failed_saves,
        failed_loads=failed_loads,
        saves_in_doubt=saves_in_doubt,
        loads_in_doubt=loads_in_doubt,
        save_busy_s=save_busy_ns / 1e9,
        load_busy_s=load_busy_ns / 1e9,
        slots_ready=slots_ready,
        slots_refused=slots_refused,
    )
