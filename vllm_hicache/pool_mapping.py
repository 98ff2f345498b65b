"""Maps the host pool into a storage process as the worker backs it, ahead of the first fetches.

The first write to a memory page that another process has backed is a fault, and these take longer
than the bytes: on two cores, cached files were read into untouched slots at 4 GB/s, into touched
ones at 14.
"""

import ctypes
import logging
import mmap
import os
import threading
from contextlib import suppress

from vllm_hicache.memory_pages import is_backed, populate

logger = logging.getLogger(__name__)

STEP_BYTES = 32 << 20
"""Mapped by one call: 5 ms. No other thread of the process can change its mappings meanwhile."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Between two looks at what the worker has not backed yet."""
_NICENESS = 10


class PoolMapping:
    """A thread that maps each part of ``memory`` once it is backed. It backs nothing itself: how
    fast the pool grows, and on which NUMA node, is the worker's affair.

    ``memory`` maps the first bytes of ``fd`` and stays mapped as long as the thread runs.
    """

    def __init__(self, fd: int, memory: mmap.mmap) -> None:
        self._fd = fd
        self._size = len(memory)
        self._first_byte = ctypes.c_char.from_buffer(memory)  # keeps it mapped
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hicache-mapping", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether the thread has ended in time: all is mapped, or cannot be."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """End the thread, which leaves the rest as it is; whether it has ended in time."""
        self._is_stopped.set()
        return self.wait(timeout_s)

    def _run(self) -> None:
        with suppress(OSError):  # calls of requests come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        rest = list(range(0, self._size, STEP_BYTES))
        pause_s = FIRST_PAUSE_S
        while rest and not self._is_stopped.is_set():
            waiting = [start for start in rest if not self._map_if_backed(start)]
            is_growing = len(waiting) < len(rest)
            rest, pause_s = (
                waiting,
                FIRST_PAUSE_S if is_growing else min(2 * pause_s, LONGEST_PAUSE_S),
            )
            if rest:
                self._is_stopped.wait(pause_s)

    def _map_if_backed(self, start: int) -> bool:
        """Whether nothing is left to do for this part; False where it is to be tried again."""
        stop = min(start + STEP_BYTES, self._size)
        if self._is_stopped.is_set() or not is_backed(self._fd, start, stop):
            return False
        number = populate(ctypes.addressof(self._first_byte) + start, stop - start)
        if number:
            logger.info("The host pool is mapped at first use (%s)", os.strerror(number))
            self._is_stopped.set()
        return True
