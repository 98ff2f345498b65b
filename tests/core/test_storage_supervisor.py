"""Death, return and end of real storage processes; nothing may be left of them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from vllm_hicache import storage_messages as messages
from vllm_hicache import storage_supervisor
from vllm_hicache.storage_address import StorageAddress
from vllm_hicache.storage_channel import ChannelDown, ChannelUp, StorageChannels
from vllm_hicache.storage_messages import (
    FetchProgress,
    FetchReleased,
    FetchSettled,
    Persist,
    pack_hashes,
    pack_slots,
)
from vllm_hicache.testing import Fault, FaultFile

pytestmark = pytest.mark.services

# Death and return -------------------------------------------------------------------------------


def test_a_killed_process_returns_with_a_new_number_and_works(engine):
    engine.persisted(1, range(8))
    os.kill(engine.process.pid, signal.SIGKILL)
    engine.wait_for(ChannelDown())
    assert not engine.channels.send(0, messages.Cancel(1))
    engine.wait_for(ChannelUp(2))
    assert engine.process.incarnation == 2
    assert engine.fetched(2, range(8)) == FetchSettled(2, 8, "complete")
    os.kill(engine.process.pid, signal.SIGKILL)
    engine.wait_for(ChannelUp(3))
    assert engine.fetched(3, range(8)).reason == "complete"


def test_a_process_killed_during_a_fetch_gives_down_and_no_late_answer(engine):
    engine.persisted(1, range(8))
    engine.faults.write(Fault(operation="read", name=engine.name_of(5), hangs=True))
    engine.fetch(2, range(8))
    engine.wait_for(FetchProgress)
    os.kill(engine.process.pid, signal.SIGKILL)
    engine.wait_for(ChannelUp(2))
    late = [event for event in engine.seen if isinstance(event, FetchSettled | FetchReleased)]
    assert late == []


def test_a_hang_beyond_the_limit_starts_the_process_anew(make_engine, capfd):
    engine = make_engine(hang_limit_s=1.0)
    engine.persisted(1, range(2))
    engine.faults.write(Fault(operation="read", hangs=True))
    engine.fetch(2, range(2), deadline_s=0.1)
    engine.wait_for(FetchSettled)
    engine.wait_for(ChannelDown())
    engine.faults.write()
    engine.wait_for(ChannelUp(2))
    assert engine.fetched(3, range(2)).reason == "complete"
    log = capfd.readouterr().err
    assert "hangs for" in log
    assert "hang" in log[log.index("Thread 0x") :]  # the stacks show where


def test_signals_that_end_others_are_ignored(engine):
    engine.persisted(1, range(2))
    for ending in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(engine.process.pid, ending)
    assert engine.fetched(2, range(2)).reason == "complete"
    assert engine.process.incarnation == 1


def test_signals_are_ignored_from_the_first_moment(new_engine):
    engine = new_engine()
    engine.address = engine.process.start()
    for _ in range(20):
        os.kill(engine.process.pid, signal.SIGTERM)
        os.kill(engine.process.pid, signal.SIGINT)
        time.sleep(0.005)
    engine.connect()
    assert engine.process.incarnation == 1
    engine.close()


def test_restarts_slow_down_while_processes_keep_dying(monkeypatch, new_engine):
    monkeypatch.setattr(storage_supervisor, "MODULE", "vllm_hicache.no_such_module")
    monkeypatch.setattr(storage_supervisor, "FIRST_BACKOFF_S", 0.2)
    engine = new_engine()
    engine.process.start()
    time.sleep(1.0)
    assert 2 <= engine.process.incarnation <= 3  # deaths at 0, 0.2 and 0.6 s and their starts
    engine.close()


# The end ----------------------------------------------------------------------------------------


def test_stop_persists_what_was_queued(make_engine):
    engine = make_engine(shutdown_grace_s=10.0)
    engine.faults.write(Fault(operation="write", delay_s=0.02))
    engine.persist(1, range(32))
    engine.channels.close()
    engine.process.stop()
    assert engine.num_objects() == 64


def test_stop_persists_what_was_sent_at_the_last_moment(make_engine):
    engine = make_engine(shutdown_grace_s=10.0)
    for op in range(1, 33):
        engine.persist(op, [op - 1])
    engine.channels.close()
    engine.process.stop()
    assert engine.num_objects() == 64


def test_hung_calls_do_not_outlive_the_grace_time(engine, is_alive):
    engine.persisted(1, range(4))
    pid = engine.process.pid
    engine.faults.write(Fault(hangs=True))
    engine.fetch(2, range(4))
    engine.persist(3, range(8))
    engine.exists(4, range(4))
    time.sleep(0.05)
    started = time.monotonic()
    engine.process.stop()
    assert time.monotonic() - started < 1.5
    assert not is_alive(pid)


def test_stop_without_waiting_lets_the_process_finish_alone(make_engine, wait_until, is_alive):
    engine = make_engine(shutdown_grace_s=10.0)
    pid = engine.process.pid
    engine.faults.write(Fault(operation="write", delay_s=0.03))
    engine.persist(1, range(16))
    time.sleep(0.02)
    started = time.monotonic()
    engine.process.stop(0)
    assert time.monotonic() - started < 0.1
    wait_until(lambda: not is_alive(pid))
    assert engine.num_objects() == 32


def test_a_process_that_does_not_leave_is_killed(engine, is_alive, wait_until):
    pid = engine.process.pid
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    engine.process.stop(0.1)
    assert time.monotonic() - started < 10.0  # it would live for 60
    wait_until(lambda: not is_alive(pid))


BLOCKER = """
import time
from vllm_hicache.testing import MemoryBackend

class Blocker(MemoryBackend):
    async def contains(self, names):
        time.sleep(60)
"""


@pytest.fixture
def make_blocker(tmp_path, monkeypatch, make_engine):
    """Makes engines whose storage blocks the event loop at the first question."""
    (tmp_path / "blocking_backend.py").write_text(BLOCKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(**options):
        engine = make_engine(url="plugin://blocking_backend/Blocker", **options)
        engine.exists(1, range(1))
        return engine

    return make


def test_a_blocked_event_loop_does_not_outlive_the_grace_time(make_blocker):
    engine = make_blocker(shutdown_grace_s=0.1)
    time.sleep(0.05)
    started = time.monotonic()
    engine.process.stop()
    assert 0.5 < time.monotonic() - started < 2.0


def test_a_blocked_event_loop_starts_the_process_anew(make_blocker):
    engine = make_blocker(hang_limit_s=1.0, shutdown_grace_s=0.1)
    engine.wait_for(ChannelDown())
    engine.wait_for(ChannelUp(2))


WORKER = """
import os, sys, time
import msgspec
from vllm_hicache.storage_process_config import StorageProcessConfig
from vllm_hicache.storage_supervisor import StorageProcess
config = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=StorageProcessConfig)
pool = os.memfd_create("pool")
os.truncate(pool, config.arena_bytes)
process = StorageProcess(config, pool)
print(process.start(), process.pid, flush=True)
if len(sys.argv) > 2 and os.fork() == 0:  # holds the lifeline's write end open
    time.sleep(float(sys.argv[2]))
    os._exit(0)
time.sleep(60)
"""


@pytest.fixture
def start_worker(faulty_config, is_alive):
    """Starts a worker process with a storage process; both are killed if the test leaves them."""
    left: list[tuple[subprocess.Popen, int]] = []

    def start(*extra: str) -> tuple[subprocess.Popen, str, int]:
        config = msgspec.msgpack.encode(faulty_config).hex()
        worker = subprocess.Popen(
            [sys.executable, "-P", "-c", WORKER, config, *extra],
            stdout=subprocess.PIPE,
        )
        address, pid = worker.stdout.readline().decode().split()
        left.append((worker, int(pid)))
        return worker, address, int(pid)

    yield start
    for worker, pid in left:
        worker.kill()
        worker.wait()
        worker.stdout.close()
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def persist_of(num_pages: int) -> Persist:
    hashes = pack_hashes(page.to_bytes(32, "big") for page in range(num_pages))
    return Persist(1, "hc1-0123456789abcdef", hashes, pack_slots(range(num_pages)), 30.0)


def test_when_the_worker_dies_queued_persists_are_finished_and_nothing_is_left(
    start_worker, tmp_path, wait_until, is_alive
):
    worker, address, pid = start_worker()
    channels = StorageChannels([address])
    wait_until(lambda: (0, ChannelUp(1)) in channels.poll())
    FaultFile(tmp_path / "faults.json").write(Fault(operation="write", delay_s=0.02))
    channels.send(0, persist_of(16))
    time.sleep(0.02)
    worker.kill()
    worker.wait()
    wait_until(lambda: not is_alive(pid), timeout_s=2.0)
    channels.close()
    assert sum("_L0-2_H" in path.name for path in (tmp_path / "store").rglob("*_H?")) == 32


def test_a_forked_relative_that_holds_the_lifeline_does_not_keep_the_process(
    start_worker, wait_until, is_alive
):
    worker, _, pid = start_worker("8")
    worker.kill()
    worker.wait()
    wait_until(lambda: not is_alive(pid), timeout_s=5.0)


def test_when_the_worker_dies_a_hung_write_does_not_keep_the_process(
    start_worker, tmp_path, wait_until, is_alive
):
    worker, address, pid = start_worker()
    channels = StorageChannels([address])
    wait_until(lambda: (0, ChannelUp(1)) in channels.poll())
    FaultFile(tmp_path / "faults.json").write(Fault(operation="write", hangs=True))
    channels.send(0, persist_of(4))
    time.sleep(0.05)
    worker.kill()
    worker.wait()
    wait_until(lambda: not is_alive(pid), timeout_s=3.0)
    channels.close()


def test_stop_leaves_no_thread_descriptor_or_socket(new_engine):
    num_open = len(os.listdir("/proc/self/fd"))
    num_threads = threading.active_count()
    for _ in range(2):
        engine = new_engine()
        engine.start()
        name = StorageAddress.parse(engine.address).name
        engine.close()
        assert name not in Path("/proc/net/unix").read_text()
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert threading.active_count() == num_threads
