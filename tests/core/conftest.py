"""What the tests of the storage process share: its operations here, and real processes."""

import asyncio
import mmap
import os
import random
import sys
import time
from pathlib import Path

import pytest

from vllm_hicache import storage_messages as messages
from vllm_hicache.config import StorageConfig
from vllm_hicache.host_pages import HostPages
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.options import STORAGE_OPTIONS
from vllm_hicache.storage_backends.envelope import CheckedStorage
from vllm_hicache.storage_channel import ChannelUp, StorageChannels
from vllm_hicache.storage_messages import (
    Event,
    Exists,
    ExistsResult,
    Fetch,
    FetchReleased,
    FetchSettled,
    Persist,
    PersistDone,
    PersistReleased,
    pack_hashes,
    pack_slots,
)
from vllm_hicache.storage_process_config import Section, StorageProcessConfig
from vllm_hicache.storage_supervisor import StorageProcess
from vllm_hicache.storage_table import OperationTable
from vllm_hicache.testing import FaultFile, FaultList, FaultyBackend, MemoryBackend

SUPPORT = str(Path(__file__).resolve().parent / "support")
if SUPPORT not in sys.path:
    sys.path.insert(0, SUPPORT)

NAMESPACE = "hc1-0123456789abcdef"
FAULTY = "plugin://vllm_hicache.testing/FaultyBackend"
NUM_SLOTS = 64
STRIDE = 8192
SHARDS = (Shard(LayerSpan(0, 2), 0, 0, 4096), Shard(LayerSpan(0, 2), 1, 4096, 4000))
PAGE_BYTES = 8096
SECTIONS = (Section(0, STRIDE, SHARDS, SHARDS),)


def page_hash(page: int) -> bytes:
    return page.to_bytes(32, "big")


def pages_of(pages) -> bytes:
    return pack_hashes(page_hash(page) for page in pages)


def storage_process_config(url: str, **options) -> StorageProcessConfig:
    """A configuration with fields of ``StorageConfig`` or of the process replaced."""
    storage = {option.field: option.default for option in STORAGE_OPTIONS} | {
        "url": url,
        "min_free_bytes": 0,
        "shutdown_grace_s": 0.5,
    }
    storage |= {name: options.pop(name) for name in storage if name in options}
    process = {"worker_id": 0, "num_slots": NUM_SLOTS, "sections": SECTIONS}
    return StorageProcessConfig(
        **process | {"stall_s": 0.05, **options}, storage=StorageConfig(**storage)
    )


class Desk:
    """One table over memory or ``inner``, with everything it has answered."""

    def __init__(self, capacity_objects: int | None = None, inner=None, **options) -> None:
        options = {"read_concurrency": 32, "write_concurrency": 16, "stall_s": 0.02, **options}
        config = storage_process_config("memory://", **{"breaker_backoff_s": 0.05, **options})
        self.memory = MemoryBackend(capacity_objects)
        self.faults = FaultList()
        self.pool = bytearray(random.Random(1).randbytes(config.arena_bytes))
        self.pages = HostPages(memoryview(self.pool), NUM_SLOTS, config.sections, config.all_parts)
        self.backend = FaultyBackend(inner or self.memory, self.faults)
        self.table = OperationTable(CheckedStorage(self.backend), self.pages, config)
        self.table.is_open = True
        self.answers: list[Event] = []
        self.arrival = asyncio.Event()
        self.table.attach(self._take)

    def name_of(self, page: int) -> str:
        return page_hash(page).hex()

    def _take(self, event: Event) -> None:
        self.answers.append(event)
        self.arrival.set()

    def fetch(
        self, op: int, pages, *, first_slot: int = 32, deadline_s: float = 60, parts=b""
    ) -> None:
        hashes = pack_hashes(page_hash(page) for page in pages)
        slots = pack_slots([first_slot + i for i in range(len(hashes) // 32)])
        self.table.handle(Fetch(op, NAMESPACE, hashes, slots, deadline_s, bytes(parts)))

    def persist(self, op: int, pages, *, deadline_s: float = 60, parts=b"") -> None:
        pages = list(pages)
        hashes = pack_hashes(page_hash(page) for page in pages)
        slots = pack_slots([page % 32 for page in pages])
        self.table.handle(Persist(op, NAMESPACE, hashes, slots, deadline_s, bytes(parts)))

    def exists(self, op: int, pages, *, deadline_s: float = 60) -> None:
        hashes = pack_hashes(page_hash(page) for page in pages)
        self.table.handle(Exists(op, NAMESPACE, hashes, deadline_s))

    async def stored(self, num_pages: int, parts=b"") -> None:
        self.persist(1000, range(num_pages), parts=parts)
        await self.wait_for(PersistReleased(1000))
        self.answers.clear()

    async def wait_for(self, event: Event, timeout_s: float = 5.0) -> list[Event]:
        """All answers to this operation number until this one has come."""
        async with asyncio.timeout(timeout_s):
            while event not in self.answers:
                self.arrival.clear()
                await self.arrival.wait()
        return self.of(event.op)

    def of(self, op: int) -> list[Event]:
        return [answer for answer in self.answers if getattr(answer, "op", None) == op]

    async def fetched(self, op: int, pages, **options) -> FetchSettled:
        self.fetch(op, pages, **options)
        answers = await self.wait_for(FetchReleased(op))
        return next(answer for answer in answers if isinstance(answer, FetchSettled))

    async def exists_answer(self, op: int, pages, **options) -> ExistsResult:
        self.exists(op, pages, **options)
        async with asyncio.timeout(5):
            while not self.of(op):
                self.arrival.clear()
                await self.arrival.wait()
        return self.of(op)[0]

    def page(self, slot: int) -> bytes:
        return bytes(self.pool[slot * STRIDE : slot * STRIDE + PAGE_BYTES])


@pytest.fixture
async def make_desk():
    """Makes desks, and lifts their faults at the end so that hanging threads end."""
    desks = []

    def make(**options) -> Desk:
        desks.append(Desk(**options))
        return desks[-1]

    yield make
    for desk in desks:
        desk.faults.faults = ()
        desk.table.detach()
        async with asyncio.timeout(5):
            await desk.table.quiet()
            while desk.table.oldest_running_s():
                await asyncio.sleep(0.002)


@pytest.fixture
def desk(make_desk):
    return make_desk()


class Engine:
    """One worker with a pool and its storage process, and the scheduler that talks to it."""

    def __init__(self, folder: Path, *, host: str = "", **options) -> None:
        self.folder = folder
        self.faults = FaultFile(folder / "faults.json")
        config = self.config(folder, **options)
        self.pool_fd = os.memfd_create("test-pool")
        os.truncate(self.pool_fd, config.arena_bytes)
        self.pool = mmap.mmap(self.pool_fd, config.arena_bytes)
        self.pool[:] = random.Random(1).randbytes(config.arena_bytes)
        self.process = StorageProcess(config, self.pool_fd, host=host)
        self.address = ""
        self.channels: StorageChannels | None = None
        self.seen: list = []

    @staticmethod
    def config(folder: Path, **options) -> StorageProcessConfig:
        """Files in ``folder``, with faults."""
        url = f"{FAULTY}?inner=file://{folder}/store&faults={folder}/faults.json"
        return storage_process_config(**{"url": url, **options})

    def start(self) -> None:
        self.address = self.process.start()
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

    def persist(self, op: int, pages, deadline_s: float = 30, parts=b"") -> None:
        slots = pack_slots([page % 32 for page in pages])
        self.send(Persist(op, NAMESPACE, pages_of(pages), slots, deadline_s, bytes(parts)))

    def persisted(self, op: int, pages, **options) -> PersistDone:
        self.persist(op, pages, **options)
        self.wait_for(PersistReleased(op))
        return self.wait_for(PersistDone)

    def fetch(self, op: int, pages, deadline_s: float = 30, parts=b"") -> None:
        slots = pack_slots([32 + i for i in range(len(pages))])
        self.send(Fetch(op, NAMESPACE, pages_of(pages), slots, deadline_s, bytes(parts)))

    def fetched(self, op: int, pages, **options) -> FetchSettled:
        self.fetch(op, pages, **options)
        self.wait_for(FetchReleased(op))
        return self.wait_for(FetchSettled)

    def page(self, slot: int) -> bytes:
        return self.pool[slot * STRIDE : slot * STRIDE + PAGE_BYTES]

    def exists(self, op: int, pages, deadline_s: float = 5.0) -> None:
        self.send(Exists(op, NAMESPACE, pages_of(pages), deadline_s))

    def name_of(self, page: int) -> str:
        return page_hash(page).hex()

    def num_objects(self) -> int:
        store = self.folder / "store"
        return sum(f"_{NAMESPACE}_" in path.name for path in store.rglob("*_H?"))

    def close(self) -> None:
        self.faults.write()
        if self.channels is not None:
            self.channels.close()
        self.process.stop()
        if self.pool_fd >= 0:
            self.pool.close()
            os.close(self.pool_fd)
            self.pool_fd = -1


def _wait_until(condition, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.002)


def _is_alive(pid: int) -> bool:
    """Whether the process runs; one that ended may wait for init to notice."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def is_alive():
    """Whether a process id belongs to a running process."""
    return _is_alive


@pytest.fixture
def wait_until():
    """Returns when a condition is true; fails when it does not come true in time."""
    return _wait_until


@pytest.fixture
def new_engine(tmp_path):
    """Makes engines that are not started; whatever a test did, nothing of them is left."""
    engines: list[Engine] = []

    def make(**options) -> Engine:
        engines.append(Engine(tmp_path, **options))
        return engines[-1]

    yield make
    for engine in engines:
        last = engine.process.pid
        engine.close()
        _wait_until(lambda pid=last: not pid or not _is_alive(pid), timeout_s=10.0)


@pytest.fixture
def faulty_config(tmp_path):
    """What the engines of this test are configured with."""
    return Engine.config(tmp_path)


@pytest.fixture
def make_engine(new_engine):
    """Makes engines with their storage process and channel up."""

    def make(**options) -> Engine:
        engine = new_engine(**options)
        engine.start()
        return engine

    return make


@pytest.fixture
def engine(make_engine):
    return make_engine()
