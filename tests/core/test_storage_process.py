"""Real storage processes behind real channels, over a real memfd and a folder with faults."""

import contextlib
import mmap
import os
import random
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
from vllm_hicache.config import StorageConfig
from vllm_hicache.errors import InvariantBroken
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.storage_address import StorageAddress
from vllm_hicache.storage_channel import ChannelDown, ChannelUp, StorageChannels
from vllm_hicache.storage_messages import (
    Exists,
    ExistsResult,
    Fetch,
    FetchProgress,
    FetchReleased,
    FetchSettled,
    Persist,
    PersistDone,
    PersistReleased,
    Stats,
    pack_hashes,
    pack_slots,
)
from vllm_hicache.storage_process_config import StorageProcessConfig
from vllm_hicache.storage_supervisor import StorageProcess
from vllm_hicache.testing import Fault, FaultFile

NAMESPACE = "hc1-0123456789abcdef"
NUM_SLOTS = 64
STRIDE = 8192
SHARDS = (Shard(LayerSpan(0, 2), 0, 0, 4096), Shard(LayerSpan(0, 2), 1, 4096, 4000))
PAGE_BYTES = 8096


def page_hash(page: int) -> bytes:
    return page.to_bytes(32, "big")


def pages_of(pages) -> bytes:
    return pack_hashes(page_hash(page) for page in pages)


class Engine:
    """One worker with a pool and its storage process, and the scheduler that talks to it."""

    def __init__(self, folder: Path, *, host: str = "", **options) -> None:
        self.folder = folder
        self.faults = FaultFile(folder / "faults.json")
        self.pool_fd = os.memfd_create("test-pool")
        os.truncate(self.pool_fd, NUM_SLOTS * STRIDE)
        self.pool = mmap.mmap(self.pool_fd, NUM_SLOTS * STRIDE)
        self.pool[:] = random.Random(1).randbytes(NUM_SLOTS * STRIDE)
        self.process = StorageProcess(make_config(folder, **options), self.pool_fd, host=host)
        self.address = ""
        self.channels: StorageChannels | None = None
        self.seen: list = []
        self.pids: list[int] = []

    def start(self) -> None:
        self.address = self.process.start()
        self.pids.append(self.process.pid)
        self.connect()

    def connect(self) -> None:
        self.channels = StorageChannels([self.address], first_backoff_s=0.01)
        self.wait_for(ChannelUp(self.process.incarnation))

    def send(self, message: messages.Command) -> None:
        assert self.channels.send(0, message)

    def wait_for(self, wanted, timeout_s: float = 10.0):
        """The first event that equals ``wanted``, or is of that type; earlier ones are kept."""
        end = time.monotonic() + timeout_s
        while True:
            for index, event in enumerate(self.seen):
                if event == wanted or (isinstance(wanted, type) and isinstance(event, wanted)):
                    return self.seen.pop(index)
            assert time.monotonic() < end, f"waited for {wanted}, got {self.seen}"
            self.seen += [event for _, event in self.channels.poll()]
            time.sleep(0.0005)

    def persist(self, op: int, pages, deadline_s: float = 30) -> None:
        slots = pack_slots([page % 32 for page in pages])
        self.send(Persist(op, NAMESPACE, pages_of(pages), slots, deadline_s))

    def persisted(self, op: int, pages) -> PersistDone:
        self.persist(op, pages)
        self.wait_for(PersistReleased(op))
        return self.wait_for(PersistDone)

    def fetch(self, op: int, pages, deadline_s: float = 30) -> None:
        slots = pack_slots([32 + i for i in range(len(pages))])
        self.send(Fetch(op, NAMESPACE, pages_of(pages), slots, deadline_s))

    def fetched(self, op: int, pages) -> FetchSettled:
        self.fetch(op, pages)
        self.wait_for(FetchReleased(op))
        return self.wait_for(FetchSettled)

    def page(self, slot: int) -> bytes:
        return self.pool[slot * STRIDE : slot * STRIDE + PAGE_BYTES]

    def num_objects(self) -> int:
        store = self.folder / "store"
        return sum(f"_{NAMESPACE}_" in path.name for path in store.rglob("*_H?"))

    def close(self) -> None:
        self.faults.write()
        if self.channels is not None:
            self.channels.close()
        self.process.stop()
        self.pool.close()
        os.close(self.pool_fd)


def make_config(folder: Path, **options) -> StorageProcessConfig:
    url = (
        "plugin://vllm_hicache.testing/FaultyBackend"
        f"?inner=file://{folder}/store&faults={folder}/faults.json"
    )
    storage = {
        "url": url,
        "capacity_bytes": None,
        "min_free_bytes": 0,
        "read_concurrency": 16,
        "write_concurrency": 8,
        "operation_timeout_s": 10.0,
        "connect_timeout_s": 5.0,
        "exists_timeout_s": 0.05,
        "write_backlog_bytes": 1 << 30,
        "shutdown_grace_s": 0.5,
        "integrity_key": None,
    }
    storage |= {name: options.pop(name) for name in list(options) if name in storage}
    tuning = {"stall_s": 0.05, "worker_id": 0, "shards": SHARDS, **options}
    return StorageProcessConfig(
        num_slots=NUM_SLOTS, slot_stride=STRIDE, storage=StorageConfig(**storage), **tuning
    )


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.002)


@pytest.fixture
def make_engine(tmp_path):
    """Makes engines; whatever a test did, their processes are gone afterwards."""
    engines: list[Engine] = []

    def make(**options) -> Engine:
        engine = Engine(tmp_path, **options)
        engines.append(engine)
        engine.start()
        return engine

    yield make
    for engine in engines:
        last = engine.process.pid
        engine.close()
        assert not Path(f"/proc/{last}").exists(), "a process or a zombie is left"


@pytest.fixture
def engine(make_engine):
    return make_engine()


# Birth ------------------------------------------------------------------------------------------


def test_a_process_answers_half_a_second_after_its_birth(tmp_path):
    engine = Engine(tmp_path)
    started = time.monotonic()
    engine.start()
    elapsed = time.monotonic() - started
    engine.close()
    assert elapsed < 0.5 * slowness()


def slowness() -> float:
    """How much slower than an idle machine starting Python is now (others may share it)."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-I", "-c", "import asyncio"], check=True)
    return max(1.0, (time.monotonic() - started) / 0.08)


def test_neither_torch_nor_vllm_nor_numpy_is_loaded(engine):
    engine.persisted(1, range(2))
    engine.fetched(2, range(2))
    mapped = Path(f"/proc/{engine.process.pid}/maps").read_text()
    for library in ("libtorch", "/vllm/", "/numpy/"):
        assert library not in mapped


def test_its_modules_import_neither_torch_nor_vllm():
    names = "vllm_hicache.storage_process", "vllm_hicache.storage_backends.registry"
    code = f"import sys, {', '.join(names)}; print({{'torch', 'vllm', 'numpy'}} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True)
    assert out.stdout.strip() == b"set()"


def test_it_has_its_own_session_and_no_standard_input(engine):
    pid = engine.process.pid
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/fd/0") == os.readlink(f"/proc/{pid}/fd/1") == "/dev/null"


def test_a_configuration_that_no_restart_can_mend_ends_the_restarts(tmp_path, caplog, capfd):
    (tmp_path / "store").write_text("not a folder")
    engine = Engine(tmp_path)
    engine.process.start()
    wait_until(lambda: "storage is off" in caplog.text)
    assert engine.process.incarnation == 1
    engine.close()
    log = capfd.readouterr().err
    assert log.startswith("hicache-storage[worker 0] ")
    assert "must be a directory" in log


def test_a_pool_that_is_too_small_is_refused(tmp_path, caplog, capfd):
    engine = Engine(tmp_path)
    os.truncate(engine.pool_fd, STRIDE)
    engine.process.start()
    wait_until(lambda: "storage is off" in caplog.text)
    engine.close()
    assert "must have 524288 bytes or more, got 8192" in capfd.readouterr().err


def test_starting_twice_is_refused(engine):
    with pytest.raises(InvariantBroken):
        engine.process.start()


def test_stopping_before_the_start_closes_what_it_holds(tmp_path):
    engine = Engine(tmp_path)
    num_open = len(os.listdir("/proc/self/fd"))
    engine.process.stop()
    engine.process.stop()
    assert len(os.listdir("/proc/self/fd")) == num_open - 1
    engine.pool.close()
    os.close(engine.pool_fd)


# Work -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_pages_go_to_storage_and_come_back_into_other_slots(make_engine, host):
    engine = make_engine(host=host)
    assert engine.persisted(1, range(20)) == PersistDone(1, 20, 0, 0, "complete")
    engine.send(Exists(2, NAMESPACE, pages_of(range(25)), 5.0))
    assert engine.wait_for(ExistsResult) == ExistsResult(2, 20, True)
    assert engine.fetched(3, range(25)) == FetchSettled(3, 20, "missing")
    assert [engine.page(32 + i) for i in range(20)] == [engine.page(i) for i in range(20)]


def test_statistics_come_by_themselves_and_add_up(engine):
    engine.persisted(1, range(4))
    engine.fetched(2, range(4))
    wait_until(lambda: engine.wait_for(Stats).counters["objects_read"] == 8)
    assert engine.persisted(3, range(5)).num_stored == 1
    counters = {}
    while counters.get("objects_written") != 10:
        counters = engine.wait_for(Stats).counters
    assert counters["breaker_open"] == counters["write_backlog_bytes"] == 0
    assert counters["corrupt_objects"] == 0


def test_fifty_fetches_pass_one_that_hangs_for_ever(engine):
    engine.persisted(1, range(20))
    engine.faults.write(Fault(operation="read", name=page_hash(2).hex(), hangs=True))
    engine.fetch(2, range(20), deadline_s=0.3)
    engine.wait_for(FetchSettled(2, 2, "deadline"))
    started = time.monotonic()
    for op in range(3, 53):
        assert engine.fetched(op, range(3, 11)) == FetchSettled(op, 8, "complete")
    assert time.monotonic() - started < 5.0
    assert not any(isinstance(event, FetchReleased) for event in engine.seen)
    engine.faults.write()
    engine.wait_for(FetchReleased(2))


def test_an_unavailable_storage_is_opened_later(tmp_path):
    engine = Engine(tmp_path, connect_timeout_s=0.05, breaker_backoff_s=0.02)
    engine.faults.write(Fault(operation="open", fails=True))
    engine.start()
    engine.fetch(1, range(1))
    assert engine.wait_for(FetchSettled) == FetchSettled(1, 0, "unavailable")
    engine.faults.write()
    op = 2
    while engine.persisted(op, range(1)).num_dropped:
        op += 1
    assert engine.fetched(op + 1, range(1)).reason == "complete"
    engine.close()


def test_drain_is_answered_after_the_persists(engine):
    engine.faults.write(Fault(operation="write", delay_s=0.1))
    engine.persist(1, range(8))
    engine.send(messages.Drain(5.0))
    engine.wait_for(messages.Drained())
    assert any(event == PersistDone(1, 8, 0, 0, "complete") for event in engine.seen)


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
    engine.faults.write(Fault(operation="read", name=page_hash(5).hex(), hangs=True))
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


def test_signals_are_ignored_from_the_first_moment(tmp_path):
    engine = Engine(tmp_path)
    engine.address = engine.process.start()
    for _ in range(20):
        os.kill(engine.process.pid, signal.SIGTERM)
        os.kill(engine.process.pid, signal.SIGINT)
        time.sleep(0.005)
    engine.connect()
    assert engine.process.incarnation == 1
    engine.close()


def test_restarts_slow_down_while_processes_keep_dying(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_supervisor, "MODULE", "vllm_hicache.no_such_module")
    monkeypatch.setattr(storage_supervisor, "FIRST_BACKOFF_S", 0.2)
    engine = Engine(tmp_path)
    engine.process.start()
    time.sleep(1.0)
    assert 2 <= engine.process.incarnation <= 3  # deaths at 0, 0.2 and 0.6 s and their starts
    engine.close()


# Connections ------------------------------------------------------------------------------------


def test_a_scheduler_that_returns_finds_the_same_process_with_quiet_buffers(engine):
    engine.persisted(1, range(8))
    engine.faults.write(Fault(operation="read", name=page_hash(5).hex(), hangs=True))
    engine.fetch(2, range(8))
    engine.wait_for(FetchProgress)
    engine.channels.close()
    engine.channels = StorageChannels([engine.address])
    time.sleep(0.2)
    assert engine.channels.poll() == []
    engine.faults.write()
    engine.wait_for(ChannelUp(1))
    assert engine.fetched(2, range(8)).reason == "complete"


def test_persists_go_on_while_no_scheduler_is_connected(engine):
    engine.faults.write(Fault(operation="write", delay_s=0.05))
    engine.persist(1, range(20))
    engine.channels.close()
    wait_until(lambda: engine.num_objects() == 40)
    engine.connect()


def test_a_newcomer_with_the_token_replaces_a_silent_scheduler(engine):
    second = StorageChannels([engine.address])
    wait_until(lambda: (0, ChannelUp(1)) in second.poll())
    engine.wait_for(ChannelDown())
    second.close()


def _talk(address: StorageAddress, data: bytes) -> bytes:
    with contextlib.closing(address.open_socket()) as stranger:
        stranger.settimeout(5)
        stranger.connect(address.sockaddr)
        stranger.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            return stranger.recv(100)
    return b""


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_who_does_not_know_the_token_is_turned_away_and_disturbs_nobody(make_engine, host):
    engine = make_engine(host=host)
    for data in (
        messages.encode_frame(messages.Attach("wrong")),
        messages.encode_frame(messages.Cancel(1)),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ):
        assert _talk(StorageAddress.parse(engine.address), data) == b""
    assert engine.persisted(1, range(2)).num_stored == 2
    assert ChannelDown() not in engine.seen


def test_a_protocol_error_closes_the_channel_and_the_next_one_works(engine):
    engine.send(Fetch(1, NAMESPACE, page_hash(0), pack_slots([NUM_SLOTS]), 1.0))
    engine.wait_for(ChannelDown())
    engine.wait_for(ChannelUp(1))
    assert engine.persisted(2, range(2)).num_stored == 2


# The end ----------------------------------------------------------------------------------------


def test_stop_persists_what_was_queued(engine):
    engine.faults.write(Fault(operation="write", delay_s=0.02))
    engine.persist(1, range(32))
    engine.channels.close()
    engine.process.stop()
    assert engine.num_objects() == 64


def test_stop_persists_what_was_sent_at_the_last_moment(engine):
    for op in range(1, 33):
        engine.persist(op, [op - 1])
    engine.channels.close()
    engine.process.stop()
    assert engine.num_objects() == 64


def test_hung_calls_do_not_outlive_the_grace_time(engine):
    engine.persisted(1, range(4))
    pid = engine.process.pid
    engine.faults.write(Fault(hangs=True))
    engine.fetch(2, range(4))
    engine.persist(3, range(8))
    engine.send(Exists(4, NAMESPACE, pages_of(range(4)), 5.0))
    time.sleep(0.05)
    started = time.monotonic()
    engine.process.stop()
    assert time.monotonic() - started < 1.5
    assert not is_alive(pid)


def test_stop_without_waiting_lets_the_process_finish_alone(engine):
    pid = engine.process.pid
    engine.faults.write(Fault(operation="write", delay_s=0.03))
    engine.persist(1, range(16))
    time.sleep(0.02)
    started = time.monotonic()
    engine.process.stop(0)
    assert time.monotonic() - started < 0.1
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert engine.num_objects() == 32


def test_a_process_that_does_not_leave_is_killed(engine):
    pid = engine.process.pid
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    engine.process.stop(0.1)
    assert time.monotonic() - started < 1.0
    assert not is_alive(pid)


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

    def make(**options) -> Engine:
        engine = make_engine(url="plugin://blocking_backend/Blocker", **options)
        engine.send(Exists(1, NAMESPACE, pages_of(range(1)), 5.0))
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
os.truncate(pool, config.num_slots * config.slot_stride)
process = StorageProcess(config, pool)
print(process.start(), process.pid, flush=True)
if len(sys.argv) > 2 and os.fork() == 0:  # holds the lifeline's write end open
    time.sleep(float(sys.argv[2]))
    os._exit(0)
time.sleep(60)
"""


@pytest.fixture
def start_worker(tmp_path):
    """Starts a worker process with a storage process; both are killed if the test leaves them."""
    left: list[tuple[subprocess.Popen, int]] = []

    def start(*extra: str) -> tuple[subprocess.Popen, str, int]:
        config = msgspec.msgpack.encode(make_config(tmp_path)).hex()
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


def test_when_the_worker_dies_queued_persists_are_finished_and_nothing_is_left(
    start_worker, tmp_path
):
    worker, address, pid = start_worker()
    channels = StorageChannels([address])
    wait_until(lambda: (0, ChannelUp(1)) in channels.poll())
    FaultFile(tmp_path / "faults.json").write(Fault(operation="write", delay_s=0.05))
    slots = pack_slots(range(16))
    channels.send(0, Persist(1, NAMESPACE, pages_of(range(16)), slots, 30.0))
    time.sleep(0.02)
    worker.kill()
    worker.wait()
    wait_until(lambda: not is_alive(pid), timeout_s=2.0)
    channels.close()
    assert sum("_L0-2_H" in path.name for path in (tmp_path / "store").rglob("*_H?")) == 32


def test_a_forked_relative_that_holds_the_lifeline_does_not_keep_the_process(start_worker):
    worker, _, pid = start_worker("8")
    worker.kill()
    worker.wait()
    wait_until(lambda: not is_alive(pid), timeout_s=5.0)


def test_when_the_worker_dies_a_hung_write_does_not_keep_the_process(start_worker, tmp_path):
    worker, address, pid = start_worker()
    channels = StorageChannels([address])
    wait_until(lambda: (0, ChannelUp(1)) in channels.poll())
    FaultFile(tmp_path / "faults.json").write(Fault(operation="write", hangs=True))
    channels.send(0, Persist(1, NAMESPACE, pages_of(range(4)), pack_slots(range(4)), 30.0))
    time.sleep(0.05)
    worker.kill()
    worker.wait()
    wait_until(lambda: not is_alive(pid), timeout_s=3.0)
    channels.close()


def test_stop_leaves_no_thread_descriptor_or_socket(tmp_path):
    num_open = len(os.listdir("/proc/self/fd"))
    num_threads = threading.active_count()
    for _ in range(2):
        engine = Engine(tmp_path)
        engine.start()
        name = StorageAddress.parse(engine.address).name
        engine.close()
        assert name not in Path("/proc/net/unix").read_text()
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert threading.active_count() == num_threads
