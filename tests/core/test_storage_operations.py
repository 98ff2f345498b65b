"""Exists, fetch and persist against a backend in memory with faults."""

import asyncio
import time

import pytest

from vllm_hicache.storage_messages import (
    Cancel,
    ExistsResult,
    FetchProgress,
    FetchReleased,
    FetchSettled,
    PersistDone,
    PersistReleased,
)
from vllm_hicache.testing import Fault

NUM_SHARDS = 2
PAGE_BYTES = 8096
FOREVER_S = 1e6


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
    slow = Fault(operation="read", name=desk.name_of(2), delay_s=0.1)
    desk.faults.faults = (slow,)
    desk.fetch(1, range(8))
    await desk.wait_for(FetchProgress(1, 2))
    await asyncio.sleep(0.03)
    assert desk.of(1)[-1] == FetchProgress(1, 2)
    await desk.wait_for(FetchSettled(1, 8, "complete"))


async def test_progress_goes_on_after_a_jump_over_pages_that_were_early(desk):
    await desk.stored(12)
    desk.faults.faults = (
        Fault(operation="read", name=desk.name_of(0), delay_s=0.02),
        Fault(operation="read", name=desk.name_of(11), hangs=True),
    )
    desk.fetch(1, range(12))
    await desk.wait_for(FetchProgress(1, 11))
    assert desk.of(1) == [FetchProgress(1, 11)]
    desk.faults.faults = ()
    await desk.wait_for(FetchSettled(1, 12, "complete"))


@pytest.mark.parametrize("hole", [0, 1, 7])
async def test_a_fetch_ends_at_the_first_page_of_which_a_shard_is_missing(desk, hole):
    await desk.stored(8)
    victim = next(name for name in desk.memory.objects if name.startswith(desk.name_of(hole)))
    del desk.memory.objects[victim]
    assert await desk.fetched(1, range(8)) == FetchSettled(1, hole, "missing")


async def test_a_corrupt_page_ends_the_fetch_and_is_removed(desk):
    await desk.stored(8)
    name = next(name for name in desk.memory.objects if name.startswith(desk.name_of(3)))
    desk.memory.objects[name] = desk.memory.objects[name][:-1] + b"?"
    assert await desk.fetched(1, range(8)) == FetchSettled(1, 3, "corrupt")
    assert name not in desk.memory.objects


async def test_a_page_with_a_missing_and_a_corrupt_shard_is_corrupt(desk):
    await desk.stored(2)
    first, second = (name for name in desk.memory.objects if name.startswith(desk.name_of(1)))
    del desk.memory.objects[first]
    desk.memory.objects[second] = b""
    assert await desk.fetched(1, range(2)) == FetchSettled(1, 1, "corrupt")


async def test_pages_behind_a_hole_are_not_read_while_an_earlier_one_is_awaited(make_desk):
    desk = make_desk(stall_s=60)
    await desk.stored(30)
    for name in [name for name in desk.memory.objects if name.startswith(desk.name_of(2))]:
        del desk.memory.objects[name]
    desk.faults.faults = (Fault(operation="read", name=desk.name_of(0), delay_s=0.1),)
    assert await desk.fetched(1, range(30)) == FetchSettled(1, 2, "missing")
    assert desk.memory.stats()["objects_read"] < 16 * NUM_SHARDS


async def test_at_its_deadline_a_fetch_settles_at_once_and_is_released_when_the_read_ends(desk):
    await desk.stored(8)
    hang = Fault(operation="read", name=desk.name_of(3), hangs=True)
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
    desk.faults.faults = (Fault(operation="read", name=desk.name_of(3), hangs=True),)
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
    desk.faults.faults = (Fault(operation="read", name=desk.name_of(2), fails=True),)
    assert await desk.fetched(1, range(4)) == FetchSettled(1, 2, "unavailable")


async def test_an_error_costs_the_pages_before_it_nothing(desk):
    await desk.stored(4)
    slow, failing = desk.name_of(0), desk.name_of(2)
    desk.faults.faults = (
        Fault(operation="read", name=slow, delay_s=0.1),
        Fault(operation="read", name=failing, fails=True),
    )
    assert await desk.fetched(1, range(4)) == FetchSettled(1, 2, "unavailable")


async def test_a_read_beyond_the_operation_timeout_is_unavailable(make_desk):
    desk = make_desk(operation_timeout_s=0.1)
    await desk.stored(4)
    desk.faults.faults = (Fault(operation="read", name=desk.name_of(1), hangs=True),)
    desk.fetch(1, range(4))
    await desk.wait_for(FetchSettled(1, 1, "unavailable"))
    assert FetchReleased(1) not in desk.answers


async def test_one_fetch_that_hangs_for_ever_delays_no_other(desk):
    await desk.stored(30)
    desk.faults.faults = (Fault(operation="read", name=desk.name_of(1), hangs=True),)
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
        Fault(operation="read", name=desk.name_of(page), hangs=True) for page in range(20)
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
    desk.faults.faults = (Fault(operation="read", name=desk.name_of(1), hangs=True),)
    for op in range(1, 25):
        desk.fetch(op, [1], deadline_s=FOREVER_S)
    await asyncio.sleep(0.1)
    assert (await desk.fetched(50, range(2, 10))).reason == "complete"


async def test_reads_run_concurrently_but_never_more_than_allowed(make_desk):
    desk = make_desk(read_concurrency=6 * NUM_SHARDS)
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
    victims = [name for name in desk.memory.objects if name.startswith(desk.name_of(17))]
    del desk.memory.objects[victims[-1]]
    assert await desk.exists_answer(1, range(40)) == ExistsResult(1, 17, True)


async def test_a_deadline_is_never_taken_for_absence(desk):
    await desk.stored(8)
    desk.faults.faults = (Fault(operation="contains", name=desk.name_of(6), hangs=True),)
    started = time.monotonic()
    answer = await desk.exists_answer(1, range(8), deadline_s=0.05)
    assert answer == ExistsResult(1, 4, False, "deadline")
    assert time.monotonic() - started < 0.3


async def test_hung_questions_do_not_delay_others(desk):
    await desk.stored(8)
    desk.faults.faults = (Fault(operation="contains", name=desk.name_of(6), hangs=True),)
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
        PersistDone(1, 2, 3, 0, "complete", 2 * PAGE_BYTES),
        PersistReleased(1),
    ]
    assert len(desk.memory.objects) == 5 * NUM_SHARDS


async def test_a_page_of_which_one_shard_existed_counts_as_stored(desk):
    await desk.stored(1)
    del desk.memory.objects[next(iter(desk.memory.objects))]
    desk.persist(1, range(1))
    answers = await desk.wait_for(PersistReleased(1))
    assert answers[0] == PersistDone(1, 1, 0, 0, "complete", 4096)


async def test_a_full_storage_drops_the_rest(make_desk):
    desk = make_desk(capacity_objects=2 * NUM_SHARDS, write_concurrency=1)
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
    await desk.wait_for(PersistDone(2, 1, 0, 2, "backlog", PAGE_BYTES))
    assert desk.table.gauges()["write_backlog_bytes"] == 0
    desk.persist(4, range(3, 6))
    await desk.wait_for(PersistDone(4, 2, 1, 0, "complete", 2 * PAGE_BYTES))


async def test_a_backlog_below_one_page_still_lets_one_page_through(make_desk):
    desk = make_desk(write_backlog_bytes=1)
    desk.persist(1, range(3))
    await desk.wait_for(PersistDone(1, 1, 0, 2, "backlog", PAGE_BYTES))


async def test_a_persist_at_its_deadline_is_done_and_released_when_its_writes_end(desk):
    desk.faults.faults = (Fault(operation="write", name=desk.name_of(1), hangs=True),)
    desk.persist(1, range(3), deadline_s=0.1)
    await desk.wait_for(PersistDone(1, 2, 0, 1, "deadline", 2 * PAGE_BYTES))
    await asyncio.sleep(0.03)
    assert PersistReleased(1) not in desk.answers
    assert desk.table.backlog_bytes == PAGE_BYTES
    desk.faults.faults = ()
    await desk.wait_for(PersistReleased(1))


async def test_a_hung_write_delays_neither_other_writes_nor_reads(desk):
    await desk.stored(4)
    desk.faults.faults = (Fault(operation="write", name=desk.name_of(9), hangs=True),)
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
    assert len(desk.memory.objects) < 30 * NUM_SHARDS


async def test_writes_start_in_the_order_of_pages(make_desk):
    desk = make_desk(write_concurrency=1)
    desk.persist(1, range(20))
    await desk.wait_for(PersistReleased(1))
    stored = [name[:64] for name in desk.memory.objects]
    assert stored == [desk.name_of(page) for page in range(20) for _ in range(NUM_SHARDS)]
