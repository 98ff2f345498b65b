"""A process that is nobody's descendant, for work that must outlive whoever started it.

vLLM ends an engine by killing all descendants of its process, at once unless --shutdown-timeout
is given: a child that still writes would be killed with it.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_LOOK_S = 1.0
_SPAWN_TIMEOUT_S = 30.0
# Runs in a process of its own that ends at once, so that init adopts what it starts.
_STUB = """
import os, sys
pid = os.fork()
if pid:
    print(pid, flush=True)
else:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process that no later process with the same id is taken for."""

    pid: int
    started: int
    """Clock ticks from boot to its start; 0 for one that was gone already."""

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        return cls(pid, _start_ticks(pid))

    @property
    def is_running(self) -> bool:
        """Whether it exists and has not ended; a zombie has."""
        return self.started != 0 and _start_ticks(self.pid) == self.started


class DetachedProcess:
    """One process without a parent that could wait for it: what it says comes through a pipe."""

    def __init__(self, pid: int, status_fd: int) -> None:
        self.identity = ProcessIdentity.of(pid)
        self._status_fd = status_fd

    @classmethod
    def spawn(cls, command: Sequence[str], *, pass_fds: Sequence[int]) -> "DetachedProcess":
        """Start ``command`` with the number of its status pipe as last argument.

        It has its own session, no standard input and output, and the signal mask of the calling
        thread. Raises OSError when it cannot be started.
        """
        reader, writer = os.pipe()
        try:
            stub = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _STUB, *command, str(writer)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                pass_fds=(*pass_fds, writer),
                timeout=_SPAWN_TIMEOUT_S,
                check=True,
            )
            return cls(int(stub.stdout), reader)
        except (subprocess.SubprocessError, ValueError) as error:
            os.close(reader)
            raise OSError(f"no process could be started: {error}") from error
        finally:
            os.close(writer)

    @property
    def pid(self) -> int:
        return self.identity.pid

    def lines(self) -> Iterator[str]:
        """What it writes to its status pipe, line by line, until it has ended. Use it once."""
        rest = b""
        with open(self._status_fd, "rb", buffering=0) as pipe:
            # The end of the pipe comes after the last thread. A forked relative of the starter may
            # hold the pipe open by accident.
            while True:
                if select.select([pipe], [], [], _LOOK_S)[0]:
                    piece = pipe.read(select.PIPE_BUF)
                    if not piece:
                        return
                    *whole, rest = (rest + piece).split(b"\n")
                    yield from (line.decode(errors="replace") for line in whole)
                elif not self.identity.is_running:
                    return

    def kill(self) -> None:
        """SIGKILL, where it has not ended yet."""
        if self.identity.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _start_ticks(pid: int) -> int:
    """Clock ticks from boot to the start of a running process; 0 where there is none."""
    folder = Path(f"/proc/{pid}")
    try:
        # The name in parentheses may contain anything; the last parenthesis ends it.
        fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        # A process that has ended stays as long as one of its threads hangs in the kernel.
        has_ended = fields[0] in (b"Z", b"X") and len(os.listdir(folder / "task")) <= 1
    except OSError:
        return 0
    return 0 if has_ended else int(fields[19])
