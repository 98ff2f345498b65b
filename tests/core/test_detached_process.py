"""Processes without a parent: born, followed, ended."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from vllm_hicache.detached_process import DetachedProcess, ProcessIdentity

pytestmark = pytest.mark.services

SPEAKS = "import os, sys; os.write(int(sys.argv[1]), b'one\\ntwo\\nthr')"
SLEEPS = "import time; time.sleep(60)"


def spawn(code: str) -> DetachedProcess:
    return DetachedProcess.spawn([sys.executable, "-I", "-S", "-c", code], pass_fds=())


def ended(process: DetachedProcess) -> bool:
    """Wait for its end; whether it has ended without a word."""
    words = list(process.lines())
    # Its descriptors are closed some microseconds before the process counts as ended.
    deadline = time.monotonic() + 5
    while process.identity.is_running and time.monotonic() < deadline:
        time.sleep(0.001)
    return not words and not process.identity.is_running


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def test_it_is_no_descendant_of_its_maker_and_leads_its_own_session():
    process = spawn(SLEEPS)
    try:
        assert os.getpid() not in ancestors(process.pid)
        assert os.getsid(process.pid) == process.pid
    finally:
        process.kill()
        ended(process)


def test_what_it_writes_arrives_line_by_line():
    assert list(spawn(SPEAKS).lines()) == ["one", "two"]


def test_a_killed_process_says_nothing():
    process = spawn(SLEEPS)
    os.kill(process.pid, signal.SIGKILL)
    assert ended(process)


def test_kill_ends_it_and_may_come_late():
    process = spawn(SLEEPS)
    process.kill()
    ended(process)
    process.kill()
    assert not process.identity.is_running


def test_a_command_that_does_not_exist_ends_at_once(capfd):
    process = DetachedProcess.spawn(["/no/such/program"], pass_fds=())
    assert ended(process)
    assert "FileNotFoundError" in capfd.readouterr().err


def test_a_starter_that_cannot_run_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no process could be started"):
        spawn(SLEEPS)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_relative_that_holds_the_pipe_does_not_hide_the_end():
    pipe_holder = "import os, time; os.fork() or time.sleep(8)"
    process = spawn(pipe_holder)
    started = time.monotonic()
    assert ended(process)
    assert time.monotonic() - started < 6


def test_the_signal_mask_of_the_thread_is_inherited():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        process = spawn(SLEEPS)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.05)
    assert process.identity.is_running
    process.kill()
    ended(process)


def test_an_id_that_is_used_again_is_another_process():
    own = ProcessIdentity.of(os.getpid())
    assert own.is_running
    assert not ProcessIdentity(own.pid, own.started + 1).is_running
    assert not ProcessIdentity.of(2**22 + 1).is_running
