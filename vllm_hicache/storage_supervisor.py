"""The worker's end of its storage process: starts it, replaces it when it dies, lets it go."""

import logging
import os
import signal
import socket
import sys
import threading
import time

import msgspec

from vllm_hicache.detached_process import DetachedProcess, ProcessIdentity
from vllm_hicache.errors import InvariantBroken
from vllm_hicache.storage_address import StorageAddress, listen
from vllm_hicache.storage_process_config import (
    ENDINGS,
    EXIT_CONFIG,
    EXIT_SWITCHED,
    Launch,
    Report,
    StorageProcessConfig,
)

logger = logging.getLogger(__name__)

MODULE = "vllm_hicache.storage_process"
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
# A process that lived this long was healthy: its successor starts at once.
HEALTHY_LIFE_S = 30.0
# Beyond the grace time: the process itself leaves one second after it.
STOP_MARGIN_S = 2.0


class StorageProcess:
    """One worker's storage process and its successors, all behind the same address.

    The descriptor ``pool_fd`` of the host pool is duplicated; it stays the caller's. Letting go of
    this object, or dying, ends the process: it finishes its persists and leaves within the grace
    time. It is no descendant of the worker: vLLM kills those, and would kill its persists with it.
    With ``host``, it listens on TCP there instead of on this machine only.
    """

    def __init__(self, config: StorageProcessConfig, pool_fd: int, *, host: str = "") -> None:
        self._config = config
        self._host = host
        self._pool_fd = os.dup(pool_fd)
        self._lock = threading.Lock()  # a spawn and a stop exclude one another
        self._stopping = threading.Event()
        self._process: DetachedProcess | None = None
        self._incarnation = 0
        self._num_attached = 1  # storages so far, the one of the start included
        self._listener: socket.socket | None = None
        self._address: StorageAddress | None = None
        self._lifeline: list[int] = []  # read end, write end
        self._watcher: threading.Thread | None = None
        self._judged = threading.Event()
        self._refusal = ""

    def start(self) -> str:
        """Start the process and return its address at once; it may be connected to already."""
        if self._address is not None:
            raise InvariantBroken("a storage process is started once")
        self._listener, self._address = listen(self._host)
        self._lifeline = list(os.pipe())
        self._spawn(self._listener, self._address)
        self._watcher = threading.Thread(
            target=self._watch,
            args=(self._listener, self._address),
            name="hicache-storage-watch",
            daemon=True,
        )
        self._watcher.start()
        return str(self._address)

    def refusal(self, timeout_s: float) -> str:
        """Why the process refuses its configuration; empty when it accepts it.

        Waits for either at most ``timeout_s``, and takes silence for acceptance. A process that
        refused is not replaced: storage stays off.
        """
        self._judged.wait(timeout_s)
        return self._refusal

    @property
    def pid(self) -> int:
        """Process id of the present incarnation, 0 before the start."""
        return self._process.pid if self._process else 0

    @property
    def incarnation(self) -> int:
        """1 for the first process, then one more for each successor."""
        return self._incarnation

    def stop(self, timeout_s: float | None = None) -> None:
        """Let the process finish its persists and leave; kill it when it takes longer.

        By default it gets its grace time. 0 does not wait and does not kill: the process leaves by
        itself within its grace time. May be called twice.
        """
        with self._lock:
            if not self._stopping.is_set():
                self._stopping.set()
                self._close_lifeline()
        if self._watcher is None:
            self._close_descriptors()
            return
        if timeout_s == 0:
            return
        if timeout_s is None:
            timeout_s = self._config.storage.shutdown_grace_s + STOP_MARGIN_S
        self._watcher.join(timeout_s)
        if self._watcher.is_alive() and self._process is not None:
            logger.warning("Storage process %d stays beyond %.1f s: killed", self.pid, timeout_s)
            self._process.kill()
            self._watcher.join(STOP_MARGIN_S)

    # The watcher's thread -------------------------------------------------------------------

    def _watch(self, listener: socket.socket, address: StorageAddress) -> None:
        backoff_s = 0.0
        try:
            while self._process is not None:
                born = time.monotonic()
                report = self._listen(self._process)
                if self._stopping.is_set() or self._refusal:
                    return
                if report is not None and report.status == EXIT_SWITCHED:
                    backoff_s = 0.0
                    self._spawn(listener, address)
                    continue
                is_healthy = time.monotonic() - born >= HEALTHY_LIFE_S
                backoff_s = FIRST_BACKOFF_S if is_healthy else _next_backoff(backoff_s)
                logger.warning(
                    "Storage process %d %s: next one in %.1f s",
                    self.pid,
                    _ending(report),
                    backoff_s,
                )
                if self._stopping.wait(backoff_s):
                    return
                self._spawn(listener, address)
        except Exception:
            logger.exception("The storage process cannot be started: storage is off")
        finally:
            self._judged.set()
            self._close_descriptors()

    def _listen(self, process: DetachedProcess) -> Report | None:
        """Return when the process has ended, with how it did; None where it did not say."""
        report = None
        for line in process.lines():
            report = msgspec.json.decode(line, type=Report)
            if report.next_storage is not None:
                self._num_attached += 1
                self._config = msgspec.structs.replace(self._config, storage=report.next_storage)
            if report.status == EXIT_CONFIG and not self._judged.is_set():
                self._refusal = report.reason
            # After a first acceptance a refusal may pass, such as a permission: tried again.
            self._judged.set()
        return report if report is not None and report.status is not None else None

    def _spawn(self, listener: socket.socket, address: StorageAddress) -> None:
        with self._lock:
            if self._stopping.is_set():
                return
            self._incarnation += 1
            launch = Launch(
                config=self._config,
                incarnation=self._incarnation,
                attachment=self._num_attached if self._config.storage.is_attached else 0,
                parent=ProcessIdentity.of(os.getpid()),
                token=address.token,
                listen_fd=listener.fileno(),
                pool_fd=self._pool_fd,
                lifeline_fd=self._lifeline[0],
            )
            self._process = _start(launch)

    def _close_lifeline(self) -> None:
        if len(self._lifeline) == 2:
            os.close(self._lifeline.pop())

    def _close_descriptors(self) -> None:
        """Close what successors would have inherited."""
        inherited = [*self._lifeline, self._pool_fd]
        self._lifeline, self._pool_fd = [], -1
        for fd in inherited:
            if fd >= 0:
                os.close(fd)
        if self._listener is not None:
            self._listener.close()


def _ending(report: Report | None) -> str:
    if report is None:
        return "was killed"
    reason = f" ({report.reason})" if report.reason else ""
    return f"ended with status {report.status}{reason}"


def _next_backoff(backoff_s: float) -> float:
    return min(MAX_BACKOFF_S, backoff_s * 2 or FIRST_BACKOFF_S)


def _start(launch: Launch) -> DetachedProcess:
    """Start a process; endings are blocked until it ignores them."""
    config_fd = os.memfd_create("hicache-launch")
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    try:
        with open(config_fd, "wb", closefd=False) as file:
            file.write(msgspec.msgpack.encode(launch))
        return DetachedProcess.spawn(
            [sys.executable, "-P", "-m", MODULE, "--config-fd", str(config_fd), "--status-fd"],
            pass_fds=(config_fd, launch.listen_fd, launch.pool_fd, launch.lifeline_fd),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(config_fd)
