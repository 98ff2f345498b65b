"""Operations of the storage process, run in this one against a backend with faults."""

import asyncio
import random
import time

import pytest

from vllm_hicache import storage_messages as messages
from vllm_hicache.config import StorageConfig
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.storage_backends.envelope import CheckedStorage
from vllm_hicache.storage_messages import (
    Cancel,
    Drain,
    Drained,
    Event,
    Exists,
    ExistsResult,
    Fetch,
    FetchProgress,
    FetchReleased,
    FetchSettled,
    Persist,
    PersistDone,
    PersistReleased,
    ProtocolError,
    pack_hashes,
    pack_slots,
)
from vllm_hicache.storage_operations import HostPages
from vllm_hicache.storage_process_config import StorageProcessConfig
from vllm_hicache.storage_table import OperationTable
from vllm_hicache.testing import Fault, FaultList, FaultyBackend, MemoryBackend

NAMESPACE = "hc1-0123456789abcdef"
NUM_SLOTS = 64
STRIDE = 4096
SHARDS = (
    Shard(LayerSpan(0, 2), 0, 0, 1000),
    Shard(LayerSpan(0, 2), 1, 1000, 1000),
    Shard(LayerSpan(2, 3), 0, 2000, 500),
)
PAGE_BYTES = 2500
FOREVER_S = 1e6


def page_hash(page: int) -> bytes:
    return page.to_bytes(32, "big")


class Desk:
    """One table over memory, with everything it has answered."""

    def __init__(self, capacity_objects: int | None = None, **options) -> None:
        tuning = {"stall_s": 0.02, "breaker_backoff_s": 0.05, **options}
        storage = {
            "url": "memory://",
            "capacity_bytes": None,
            "min_free_bytes": 0,
            "read_concurrency": 48,
            "write_concurrency": 24,
            "operation_timeout_s": 10.0,
            "connect_timeout_s": 5.0,
            "exists_timeout_s": 0.05,
            "write_backlog_bytes": 1 << 30,
            "shutdown_grace_s": 5.0,
            "integrity_key": None,
        }
        storage |= {name: tuning.pop(name) for name in list(tuning) if name in storage}
        config = StorageProcessConfig(
            worker_id=0,
            num_slots=NUM_SLOTS,
            slot_stride=STRIDE,
            shards=SHARDS,
            storage=StorageConfig(**storage),
            **tuning,
        )
        self.memory = MemoryBackend(capacity_objects)
        self.faults = FaultList()
        self.pool = bytearray(random.Random(1).randbytes(NUM_SLOTS * STRIDE))
        pages = HostPages(memoryview(self.pool), STRIDE, NUM_SLOTS, SHARDS)
        self.backend = FaultyBackend(self.memory, self.faults)
        self.table = OperationTable(CheckedStorage(self.backend), pages, config)
        self.table.is_open = True
        self.answers: list[Event] = []
        self.arrival = asyncio.Event()
        self.table.attach(self._take)

    def _take(self, event: Event) -> None:
        self.answers.append(event)
        self.arrival.set()

    def fetch(self, op: int, pages, *, first_slot: int = 32, deadline_s: float = 60) -> None:
        hashes = pack_hashes(page_hash(page) for page in pages)
        slots = pack_slots([first_slot + i for i in range(len(hashes) // 32)])
        self.table.handle(Fetch(op, NAMESPACE, hashes, slots, deadline_s))

    def persist(self, op: int, pages, *, deadline_s: float = 60) -> None:
        pages = list(pages)
        hashes = pack_hashes(page_hash(page) for page in pages)
        slots = pack_slots([page % 32 for page in pages])
        self.table.handle(Persist(op, NAMESPACE, hashes, slots, deadline_s))

    def exists(self, op: int, pages, *, deadline_s: float = 60) -> None:
        hashes = pack_hashes(page_hash(page) for page in pages)
        self.table.handle(Exists(op, NAMESPACE, hashes, deadline_s))

    async def stored(self, num_pages: int) -> None:
        self.persist(1000, range(num_pages))
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


# Fetch ------------------------------------------------------------------------------------------


async def test_what_was_persisted_is_fetched_bit_by_bit_into_other_slots(desk):
    await desk.stored(20)
    assert await desk.fetched(1, range(20)) == FetchSettled(1, 20, "complete")
    assert [desk.page(32 + i) for i in range(20)] == [desk.page(i) for i in range(20)]


async def test_progress_only_grows_and_release_comes_last(desk):
    await desk.stored(30)
    await desk.fetched(1, range(30))
    answers = desk.of(1)
    told = [answer.num_pages for answer in answers if isinstance(answer, FetchProgress)]
    assert told == sorted(set(told))
    assert answers[len(told) :] == [FetchSettled(1, 30, "complete"), FetchReleased(1)]


async def test_pages_after_a_slow_one_are_not_reported_before_it(desk):
    await desk.stored(8)
    slow = Fault(operation="read", name=page_hash(2).hex(), delay_s=0.1)
    desk.faults.faults = (slow,)
    desk.fetch(1, range(8))
    await desk.wait_for(FetchProgress(1, 2))
    await asyncio.sleep(0.03)
    assert desk.of(1)[-1] == FetchProgress(1, 2)
    await desk.wait_for(FetchSettled(1, 8, "complete"))


async def test_progress_goes_on_after_a_jump_over_pages_that_were_early(desk):
    await desk.stored(12)
    desk.faults.faults = (
        Fault(operation="read", name=page_hash(0).hex(), delay_s=0.02),
        Fault(operation="read", name=page_hash(11).hex(), hangs=True),
    )
    desk.fetch(1, range(12))
    await desk.wait_for(FetchProgress(1, 11))
    assert desk.of(1) == [FetchProgress(1, 11)]
    desk.faults.faults = ()
    await desk.wait_for(FetchSettled(1, 12, "complete"))


@pytest.mark.parametrize("hole", [0, 1, 7])
async def test_a_fetch_ends_at_the_first_page_of_which_a_shard_is_missing(desk, hole):
    await desk.stored(8)
    victim = next(name for name in desk.memory.objects if name.startswith(page_hash(hole).hex()))
    del desk.memory.objects[victim]
    assert await desk.fetched(1, range(8)) == FetchSettled(1, hole, "missing")


async def test_a_corrupt_page_ends_the_fetch_and_is_removed(desk):
    await desk.stored(8)
    name = next(name for name in desk.memory.objects if name.startswith(page_hash(3).hex()))
    desk.memory.objects[name] = desk.memory.objects[name][:-1] + b"?"
    assert await desk.fetched(1, range(8)) == FetchSettled(1, 3, "corrupt")
    assert name not in desk.memory.objects


async def test_a_page_with_a_missing_and_a_corrupt_shard_is_corrupt(desk):
    await desk.stored(2)
    first, second, _ = (name for name in desk.memory.objects if name.startswith(page_hash(1).hex()))
    del desk.memory.objects[first]
    desk.memory.objects[second] = b""
    assert await desk.fetched(1, range(2)) == FetchSettled(1, 1, "corrupt")


async def test_pages_behind_a_hole_are_not_read_while_an_earlier_one_is_awaited(make_desk):
    desk = make_desk(stall_s=60)
    await desk.stored(30)
    for name in [name for name in desk.memory.objects if name.startswith(page_hash(2).hex())]:
        del desk.memory.objects[name]
    desk.faults.faults = (Fault(operation="read", name=page_hash(0).hex(), delay_s=0.1),)
    assert await desk.fetched(1, range(30)) == FetchSettled(1, 2, "missing")
    assert desk.memory.stats()["objects_read"] < 16 * len(SHARDS)


async def test_at_its_deadline_a_fetch_settles_at_once_and_is_released_when_the_read_ends(desk):
    await desk.stored(8)
    hang = Fault(operation="read", name=page_hash(3).hex(), hangs=True)
    desk.faults.faults = (hang,)
    started = time.monotonic()
    desk.fetch(1, range(8), deadline_s=0.1)
    await desk.wait_for(FetchSettled(1, 3, "deadline"))
    assert 0.1 <= time.monotonic() - started < 0.4
    await asyncio.sleep(0.05)
    assert FetchReleased(1) not in desk.answers
    desk.faults.faults = ()
    await desk.wait_for(FetchReleased(1))


async def test_cancel_settles_at_once_and_releases_when_the_read_ends(desk):
    await desk.stored(8)
    desk.faults.faults = (Fault(operation="read", name=page_hash(3).hex(), hangs=True),)
    desk.fetch(1, range(8))
    await desk.wait_for(FetchProgress(1, 3))
    desk.table.handle(Cancel(1))
    assert desk.of(1)[-1] == FetchSettled(1, 3, "cancelled")
    desk.table.handle(Cancel(1))
    desk.faults.faults = ()
    answers = await desk.wait_for(FetchReleased(1))
    assert answers[-2:] == [FetchSettled(1, 3, "cancelled"), FetchReleased(1)]


async def test_a_fetch_cancelled_before_it_starts_is_released_at_once(desk):
    await desk.stored(1)
    desk.fetch(1, range(1))
    desk.table.handle(Cancel(1))
    assert desk.of(1) == [FetchSettled(1, 0, "cancelled"), FetchReleased(1)]


async def test_cancel_of_an_unknown_operation_is_ignored(desk):
    desk.table.handle(Cancel(77))
    assert desk.answers == []


async def test_an_error_of_the_backend_is_unavailable(desk):
    await desk.stored(4)
    desk.faults.faults = (Fault(operation="read", name=page_hash(2).hex(), fails=True),)
    assert await desk.fetched(1, range(4)) == FetchSettled(1, 2, "unavailable")


async def test_a_read_beyond_the_operation_timeout_is_unavailable(make_desk):
    desk = make_desk(operation_timeout_s=0.1)
    await desk.stored(4)
    desk.faults.faults = (Fault(operation="read", name=page_hash(1).hex(), hangs=True),)
    desk.fetch(1, range(4))
    await desk.wait_for(FetchSettled(1, 1, "unavailable"))
    assert FetchReleased(1) not in desk.answers


async def test_one_fetch_that_hangs_for_ever_delays_no_other(desk):
    await desk.stored(30)
    desk.faults.faults = (Fault(operation="read", name=page_hash(1).hex(), hangs=True),)
    desk.fetch(1, range(30), first_slot=0)
    await desk.wait_for(FetchProgress(1, 1))
    slowest = 0.0
    for op in range(2, 52):
        started = time.monotonic()
        assert (await desk.fetched(op, range(2, 10))).reason == "complete"
        slowest = max(slowest, time.monotonic() - started)
    assert slowest < 0.5
    assert FetchReleased(1) not in desk.answers


async def test_a_newcomer_finds_a_place_before_anything_counts_as_stalled(make_desk):
    desk = make_desk(stall_s=60)
    await desk.stored(30)
    desk.faults.faults = tuple(
        Fault(operation="read", name=page_hash(page).hex(), hangs=True) for page in range(20)
    )
    desk.fetch(1, range(20))
    desk.fetch(2, range(20), first_slot=0)
    await asyncio.sleep(0.02)
    assert (await desk.fetched(3, range(20, 30))).reason == "complete"


async def test_an_operation_with_a_stalled_read_starts_no_more(desk):
    await desk.stored(30)
    desk.faults.faults = (Fault(operation="read", hangs=True),)
    desk.fetch(1, range(30))
    await asyncio.sleep(0.01)
    num_first = desk.backend.num_running
    await asyncio.sleep(0.06)
    assert 0 < desk.backend.num_running == num_first < 30


async def test_more_hanging_fetches_than_places_still_leave_one_for_a_good_one(desk):
    await desk.stored(30)
    desk.faults.faults = (Fault(operation="read", name=page_hash(1).hex(), hangs=True),)
    for op in range(1, 25):
        desk.fetch(op, [1], deadline_s=FOREVER_S)
    await asyncio.sleep(0.1)
    assert (await desk.fetched(50, range(2, 10))).reason == "complete"


async def test_reads_run_concurrently_but_never_more_than_allowed(make_desk):
    desk = make_desk(read_concurrency=6 * len(SHARDS))
    await desk.stored(24)
    running, most = 0, 0
    read = desk.memory.read

    async def counted(reads):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        return await read(reads)

    desk.memory.read = counted
    for op in range(1, 4):
        desk.fetch(op, range(24), first_slot=32)
    await desk.wait_for(FetchReleased(3))
    assert 3 <= most <= 6


# Exists -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("present", [0, 1, 4, 5, 36, 37, 60])
async def test_exists_counts_the_leading_whole_pages(desk, present):
    if present:
        await desk.stored(present)
    assert await desk.exists_answer(1, range(60)) == ExistsResult(1, present, True)


async def test_a_page_without_one_of_its_shards_does_not_exist(desk):
    await desk.stored(40)
    victims = [name for name in desk.memory.objects if name.startswith(page_hash(17).hex())]
    del desk.memory.objects[victims[-1]]
    assert await desk.exists_answer(1, range(40)) == ExistsResult(1, 17, True)


async def test_a_deadline_is_never_taken_for_absence(desk):
    await desk.stored(8)
    desk.faults.faults = (Fault(operation="contains", name=page_hash(6).hex(), hangs=True),)
    started = time.monotonic()
    answer = await desk.exists_answer(1, range(8), deadline_s=0.05)
    assert answer == ExistsResult(1, 4, False, "deadline")
    assert time.monotonic() - started < 0.3


async def test_hung_questions_do_not_delay_others(desk):
    await desk.stored(8)
    desk.faults.faults = (Fault(operation="contains", name=page_hash(6).hex(), hangs=True),)
    for op in range(1, 8):
        desk.exists(op, [6], deadline_s=0.05)
    assert await desk.exists_answer(50, range(4)) == ExistsResult(50, 4, True)


async def test_a_cancelled_question_is_answered_once(desk):
    desk.exists(1, range(8))
    desk.table.handle(Cancel(1))
    await asyncio.sleep(0.02)
    assert desk.of(1) == [ExistsResult(1, 0, False, "cancelled")]


# Persist ----------------------------------------------------------------------------------------


async def test_persist_counts_stored_and_existing_pages(desk):
    await desk.stored(3)
    desk.persist(1, range(5))
    assert await desk.wait_for(PersistReleased(1)) == [
        PersistDone(1, 2, 3, 0, "complete"),
        PersistReleased(1),
    ]
    assert len(desk.memory.objects) == 5 * len(SHARDS)


async def test_a_page_of_which_one_shard_existed_counts_as_stored(desk):
    await desk.stored(1)
    del desk.memory.objects[next(iter(desk.memory.objects))]
    desk.persist(1, range(1))
    answers = await desk.wait_for(PersistReleased(1))
    assert answers[0] == PersistDone(1, 1, 0, 0, "complete")


async def test_a_full_storage_drops_the_rest(make_desk):
    desk = make_desk(capacity_objects=2 * len(SHARDS), write_concurrency=1)
    desk.persist(1, range(6))
    done = (await desk.wait_for(PersistReleased(1)))[0]
    assert (done.num_stored, done.num_existing, done.num_dropped) == (2, 0, 4)
    assert done.reason == "full"


async def test_beyond_the_backlog_pages_are_dropped(make_desk):
    desk = make_desk(write_backlog_bytes=4 * PAGE_BYTES)
    desk.faults.faults = (Fault(operation="write", hangs=True),)
    desk.persist(1, range(3))
    desk.persist(2, range(3, 6))
    desk.persist(3, range(6, 8))
    assert desk.of(3) == [PersistDone(3, 0, 0, 2, "backlog"), PersistReleased(3)]
    assert desk.table.gauges()["write_backlog_bytes"] == 4 * PAGE_BYTES
    desk.faults.faults = ()
    await desk.wait_for(PersistReleased(1))
    await desk.wait_for(PersistDone(2, 1, 0, 2, "backlog"))
    assert desk.table.gauges()["write_backlog_bytes"] == 0
    desk.persist(4, range(3, 6))
    await desk.wait_for(PersistDone(4, 2, 1, 0, "complete"))


async def test_a_backlog_below_one_page_still_lets_one_page_through(make_desk):
    desk = make_desk(write_backlog_bytes=1)
    desk.persist(1, range(3))
    await desk.wait_for(PersistDone(1, 1, 0, 2, "backlog"))


async def test_a_persist_at_its_deadline_is_done_and_released_when_its_writes_end(desk):
    desk.faults.faults = (Fault(operation="write", name=page_hash(1).hex(), hangs=True),)
    desk.persist(1, range(3), deadline_s=0.1)
    await desk.wait_for(PersistDone(1, 2, 0, 1, "deadline"))
    await asyncio.sleep(0.03)
    assert PersistReleased(1) not in desk.answers
    assert desk.table.backlog_bytes == PAGE_BYTES
    desk.faults.faults = ()
    await desk.wait_for(PersistReleased(1))


async def test_a_hung_write_delays_neither_other_writes_nor_reads(desk):
    await desk.stored(4)
    desk.faults.faults = (Fault(operation="write", name=page_hash(9).hex(), hangs=True),)
    desk.persist(1, range(9, 30))
    await asyncio.sleep(0.05)
    for op in range(2, 22):
        desk.persist(op, [op + 8])
        await desk.wait_for(PersistReleased(op))
    assert (await desk.fetched(50, range(4))).reason == "complete"


async def test_a_cancelled_persist_drops_what_has_not_started(desk):
    desk.faults.faults = (Fault(operation="write", hangs=True),)
    desk.persist(1, range(30))
    await asyncio.sleep(0.02)
    desk.table.handle(Cancel(1))
    assert desk.of(1) == [PersistDone(1, 0, 0, 30, "cancelled")]
    desk.faults.faults = ()
    await desk.wait_for(PersistReleased(1))
    assert len(desk.memory.objects) < 30 * len(SHARDS)


async def test_writes_start_in_the_order_of_pages(make_desk):
    desk = make_desk(write_concurrency=1)
    desk.persist(1, range(20))
    await desk.wait_for(PersistReleased(1))
    stored = [name[:64] for name in desk.memory.objects]
    assert stored == [page_hash(page).hex() for page in range(20) for _ in SHARDS]


# Breaker ----------------------------------------------------------------------------------------


async def _open_read_breaker(desk: Desk) -> None:
    await desk.stored(4)
    desk.faults.faults = (Fault(operation="read", fails=True),)
    for op in range(1, 6):
        assert (await desk.fetched(op, range(4))).reason == "unavailable"
    desk.faults.faults = ()
    assert desk.table.gauges()["breaker_open"] == 1.0


async def test_while_the_read_breaker_is_open_reads_are_refused_at_once(make_desk):
    desk = make_desk(breaker_backoff_s=60)
    await _open_read_breaker(desk)
    num_read = desk.memory.stats()["objects_read"]
    desk.fetch(10, range(4))
    assert desk.of(10) == [FetchSettled(10, 0, "unavailable"), FetchReleased(10)]
    desk.exists(11, range(4))
    assert desk.of(11) == [ExistsResult(11, 0, False, "unavailable")]
    assert desk.memory.stats()["objects_read"] == num_read
    desk.persist(12, range(4, 6))
    await desk.wait_for(PersistDone(12, 2, 0, 0, "complete"))


async def test_the_write_breaker_drops_persists_and_lets_reads_pass(make_desk):
    desk = make_desk(breaker_backoff_s=60)
    await desk.stored(4)
    desk.faults.faults = (Fault(operation="write", fails=True),)
    for op in range(1, 6):
        desk.persist(op, [10 + op])
        await desk.wait_for(PersistDone(op, 0, 0, 1, "unavailable"))
    desk.persist(10, range(20, 24))
    assert desk.of(10) == [PersistDone(10, 0, 0, 4, "unavailable"), PersistReleased(10)]
    assert (await desk.fetched(11, range(4))).reason == "complete"


async def test_after_the_backoff_one_probe_closes_the_breaker(make_desk):
    desk = make_desk(breaker_backoff_s=0.05)
    await _open_read_breaker(desk)
    await asyncio.sleep(0.06)
    assert (await desk.fetched(20, range(4))).reason == "complete"
    assert desk.table.gauges()["breaker_open"] == 0.0


async def test_while_a_probe_runs_newcomers_are_refused(make_desk):
    desk = make_desk(breaker_backoff_s=0.05)
    await _open_read_breaker(desk)
    await asyncio.sleep(0.06)
    desk.faults.faults = (Fault(operation="read", delay_s=0.05),)
    desk.fetch(20, range(4))
    await asyncio.sleep(0.01)
    desk.exists(21, range(4))
    assert desk.of(21) == [ExistsResult(21, 0, False, "unavailable")]
    await desk.wait_for(FetchSettled(20, 4, "complete"))
    assert (await desk.exists_answer(22, range(4))).ok


async def test_a_failed_probe_waits_twice_as_long(make_desk):
    desk = make_desk(breaker_backoff_s=0.05)
    await _open_read_breaker(desk)
    await asyncio.sleep(0.06)
    desk.faults.faults = (Fault(operation="contains", fails=True),)
    assert not (await desk.exists_answer(20, range(4))).ok
    desk.faults.faults = ()
    await asyncio.sleep(0.06)
    assert (await desk.exists_answer(21, range(4))).reason == "unavailable"
    await asyncio.sleep(0.05)
    assert (await desk.exists_answer(22, range(4))).ok


async def test_a_probe_that_is_cancelled_leaves_the_next_one_free(make_desk):
    desk = make_desk(breaker_backoff_s=0.05)
    await _open_read_breaker(desk)
    await asyncio.sleep(0.06)
    desk.faults.faults = (Fault(operation="contains", delay_s=0.05),)
    desk.exists(20, range(4), deadline_s=0.01)
    await desk.wait_for(ExistsResult(20, 0, False, "deadline"))
    await asyncio.sleep(0.01)
    desk.faults.faults = ()
    assert (await desk.exists_answer(21, range(4))).ok


async def test_fetches_that_get_nothing_before_their_deadlines_open_the_breaker(make_desk):
    desk = make_desk(breaker_backoff_s=60)
    await desk.stored(4)
    desk.faults.faults = (Fault(operation="read", hangs=True),)
    for op in range(1, 6):
        desk.fetch(op, range(4), deadline_s=0.03)
        await desk.wait_for(FetchSettled(op, 0, "deadline"))
    desk.fetch(10, range(4))
    assert desk.of(10)[0] == FetchSettled(10, 0, "unavailable")


async def test_one_hanging_object_among_good_ones_does_not_open_the_breaker(make_desk):
    desk = make_desk(breaker_backoff_s=60, operation_timeout_s=0.1)
    await desk.stored(20)
    desk.faults.faults = (Fault(operation="read", name=page_hash(0).hex(), hangs=True),)
    for op in range(1, 9):
        desk.fetch(op, [0], deadline_s=0.03)
        assert (await desk.fetched(100 + op, range(1, 5))).reason == "complete"
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.15)
    assert (await desk.fetched(200, range(1, 5))).reason == "complete"


async def test_absent_pages_do_not_open_the_breaker(desk):
    for op in range(1, 10):
        assert (await desk.fetched(op, range(4))).reason == "missing"
    assert desk.table.gauges()["breaker_open"] == 0.0


async def test_until_the_storage_is_open_everything_is_unavailable(desk):
    desk.table.is_open = False
    desk.exists(1, range(4))
    desk.fetch(2, range(4))
    desk.persist(3, range(4))
    assert desk.answers == [
        ExistsResult(1, 0, False, "unavailable"),
        FetchSettled(2, 0, "unavailable"),
        FetchReleased(2),
        PersistDone(3, 0, 0, 4, "unavailable"),
        PersistReleased(3),
    ]


# Drain, connections, and what must not be -------------------------------------------------------


async def test_drain_finishes_persists_and_refuses_new_reads_meanwhile(desk):
    await desk.stored(2)
    desk.faults.faults = (Fault(operation="write", delay_s=0.05),)
    desk.persist(1, range(2, 6))
    desk.table.handle(Drain(5.0))
    await asyncio.sleep(0)
    desk.fetch(2, range(2))
    desk.exists(3, range(2))
    assert desk.answers == [
        FetchSettled(2, 0, "cancelled"),
        FetchReleased(2),
        ExistsResult(3, 0, False, "cancelled"),
    ]
    async with asyncio.timeout(5):
        while Drained() not in desk.answers:
            await asyncio.sleep(0.002)
    assert desk.answers.index(Drained()) > desk.answers.index(PersistDone(1, 4, 0, 0, "complete"))
    assert (await desk.fetched(4, range(2))).reason == "complete"


async def test_drain_without_persists_is_answered_at_once(desk):
    desk.table.handle(Drain(5.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert desk.answers == [Drained()]


async def test_at_its_deadline_drain_drops_what_is_left(desk):
    desk.faults.faults = (Fault(operation="write", hangs=True),)
    desk.persist(1, range(30))
    desk.table.handle(Drain(0.05))
    started = time.monotonic()
    await desk.wait_for(PersistDone(1, 0, 0, 30, "deadline"))
    await asyncio.sleep(0.01)
    assert desk.answers[-1] == Drained()
    assert time.monotonic() - started < 0.5


async def test_after_a_loss_persists_go_on_and_reads_are_cancelled(desk):
    await desk.stored(2)
    desk.faults.faults = (Fault(delay_s=0.03),)
    desk.fetch(1, range(2))
    desk.persist(2, range(2, 6))
    await asyncio.sleep(0.005)
    desk.table.detach()
    async with asyncio.timeout(5):
        await desk.table.quiet()
    assert desk.answers == []
    assert len(desk.memory.objects) == 6 * len(SHARDS)


async def test_buffers_are_quiet_only_when_hung_reads_have_ended(desk):
    await desk.stored(2)
    desk.faults.faults = (Fault(operation="read", hangs=True),)
    desk.fetch(1, range(2))
    await asyncio.sleep(0.01)
    desk.table.detach()
    quiet = asyncio.create_task(desk.table.quiet())
    await asyncio.sleep(0.03)
    assert not quiet.done()
    desk.faults.faults = ()
    async with asyncio.timeout(5):
        await quiet


async def test_a_number_in_use_is_a_protocol_error(desk):
    desk.faults.faults = (Fault(hangs=True),)
    desk.fetch(1, range(2))
    with pytest.raises(ProtocolError, match="number 1 is in use"):
        desk.persist(1, range(2))


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS])
async def test_a_slot_outside_the_pool_is_a_protocol_error(desk, slot):
    with pytest.raises(ProtocolError, match="there are 64"):
        desk.fetch(1, range(1), first_slot=slot)


async def test_a_second_attach_is_a_protocol_error(desk):
    with pytest.raises(ProtocolError):
        desk.table.handle(messages.Attach("x"))


async def test_a_bug_in_the_backend_is_a_failure_and_not_the_end(desk, caplog):
    await desk.stored(2)
    desk.memory.read = None
    assert (await desk.fetched(1, range(2))).reason == "unavailable"
    assert "failed unexpectedly" in caplog.text


async def test_random_faults_and_cancels_give_every_answer_once_and_leave_nothing(make_desk):
    desk = make_desk(operation_timeout_s=0.2, breaker_backoff_s=0.01, write_backlog_bytes=60_000)
    chance = random.Random(7)
    for op in range(1, 400):
        if op % 20 == 0:
            desk.faults.faults = tuple(
                Fault(
                    operation=chance.choice(["read", "write", "contains"]),
                    name=page_hash(chance.randrange(32)).hex(),
                    delay_s=chance.choice([0, 0.001, 0.03]),
                    fails=chance.random() < 0.3,
                    hangs=chance.random() < 0.3,
                )
                for _ in range(chance.randrange(4))
            )
        start = chance.randrange(28)
        pages = range(start, start + chance.randrange(1, 5))
        command = chance.choice([desk.fetch, desk.persist, desk.exists])
        command(op, pages, deadline_s=chance.choice([0.001, 0.02, 1.0]))
        if chance.random() < 0.2:
            desk.table.handle(Cancel(chance.randrange(1, op + 1)))
        if chance.random() < 0.5:
            await asyncio.sleep(0.001)
    desk.faults.faults = ()
    async with asyncio.timeout(10):
        await desk.table.quiet()
        while sum(bool(desk.of(op)) for op in range(1, 400)) < 399:
            await asyncio.sleep(0.005)
    for op in range(1, 400):
        _assert_complete(desk.of(op))
    assert desk.table.backlog_bytes == 0


def _assert_complete(answers: list[Event]) -> None:
    finals = [answer for answer in answers if not isinstance(answer, FetchProgress)]
    kinds = [type(answer) for answer in finals]
    assert kinds in (
        [ExistsResult],
        [FetchSettled, FetchReleased],
        [PersistDone, PersistReleased],
    )
