"""A thread that ends the storage process when its worker is gone or its event loop hangs."""

import asyncio
import contextlib
import faulthandler
import logging
import os
import select
import sys
import threading
import time
from typing import NoReturn

import msgspec

from vllm_hicache.detached_process import ProcessIdentity
from vllm_hicache.storage_process_config import EXIT_HUNG, Report

logger = logging.getLogger(__name__)

POLL_S = 1.0
# What the loop gets beyond the grace time to leave by itself.
MARGIN_S = 1.0


_status_fds: list[int] = []


def report_to(fd: int) -> None:
    """Where reports go: nobody can wait for a detached process."""
    os.set_inheritable(fd, False)
    _status_fds.append(fd)


def report(what: Report) -> None:
    """Tell the worker, if it still listens."""
    for fd in _status_fds:
        with contextlib.suppress(OSError):
            os.write(fd, msgspec.json.encode(what) + b"\n")


def leave(status: int, reason: str = "") -> NoReturn:
    """End the process now, whatever its threads do."""
    sys.stderr.flush()
    report(Report(status, reason))
    os._exit(status)


class Lifeline:
    """Watches the descriptor whose end of file says that the worker is gone or has let go.

    A forked relative of the worker may hold the other end by accident, so the parent's death counts
    as well. The thread needs no event loop: a loop that is blocked does not keep the process.
    """

    def __init__(
        self, fd: int, *, parent: ProcessIdentity, grace_s: float, hang_limit_s: float
    ) -> None:
        self._fd = fd
        self._parent = parent
        self._grace_s = grace_s
        self._hang_limit_s = hang_limit_s
        self._beat = time.monotonic()

    def watch(self) -> asyncio.Event:
        """Start watching; the event is set in the running loop when the lifeline ends."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        threading.Thread(
            target=self._run, args=(loop, ended), name="hicache-lifeline", daemon=True
        ).start()
        return ended

    def beat(self) -> None:
        """The event loop is alive."""
        self._beat = time.monotonic()

    def _run(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)  # an end of file counts as readable
        while not poll.poll(POLL_S * 1000) and self._parent.is_running:
            silent_s = time.monotonic() - self._beat
            if silent_s > self._hang_limit_s:
                logger.error("The event loop hangs for %.0f s; starting anew", silent_s)
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                leave(EXIT_HUNG)
        loop.call_soon_threadsafe(ended.set)
        time.sleep(self._grace_s + MARGIN_S)
        leave(0)
