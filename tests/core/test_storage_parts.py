"""Pages of several sections: what an engine asked for counts, what it did not does not matter."""

import asyncio

import pytest

from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.storage import HEADER_BYTES, ObjectRead, ObjectWrite, ReadOutcome, WriteOutcome
from vllm_hicache.storage_backends.file import FileBackend
from vllm_hicache.storage_messages import (
    Cancel,
    ExistsResult,
    FetchProgress,
    FetchReleased,
    FetchSettled,
    PersistDone,
    PersistReleased,
    ProtocolError,
)
from vllm_hicache.storage_process_config import Section
from vllm_hicache.testing import Fault, MemoryBackend

NAMESPACE = "hc1-0123456789abcdef"
NUM_SLOTS = 64
REGION = NUM_SLOTS * 4096


def section(base: int, pool: str, *lengths: int, **options) -> Section:
    shards = tuple(
        Shard(LayerSpan(0, 2), group, sum(lengths[:group]), length, pool)
        for group, length in enumerate(lengths)
    )
    return Section(base, 4096, shards, shards, **options)


FULL = section(0, "", 2000, 1000)
WINDOW = section(REGION, "0000000a", 500, 700, bit=0)
DRAFT = section(2 * REGION, "0000000b", 900, bit=2, may_be_zero=True)
SECTIONS = (FULL, WINDOW, DRAFT)
IN_WINDOW, ELSEWHERE, IN_DRAFT = 1, 2, 4
"""Parts of a page; this worker has nothing of the second one."""
ALL = 7


def region_of(desk, one: Section, slot: int) -> bytes:
    """What the objects of a section hold in a slot."""
    start = one.base + slot * one.slot_stride
    return bytes(desk.pool[start : start + sum(shard.length for shard in one.shards)])


def objects_of(desk, page: int, one: Section) -> list[str]:
    hashes = [page.to_bytes(32, "big")]
    wanted = {shard.pool for shard in one.shards}
    return [
        name for name in desk.pages.names(NAMESPACE, hashes) if name.partition("_P")[2] in wanted
    ]


async def damage(desk, name: str) -> None:
    """One bit of the object's payload is another."""
    length = next(shard.length for one in SECTIONS for shard in one.shards if _is_of(name, shard))
    read = ObjectRead(name, memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(length)))
    assert await desk.backend.read([read]) == [ReadOutcome.OK]
    read.payload[-1] ^= 1
    assert await desk.backend.delete([name]) == 1
    write = ObjectWrite(name, read.header, read.payload)
    assert await desk.backend.write([write]) == [WriteOutcome.STORED]


def _is_of(name: str, shard: Shard) -> bool:
    return name.endswith(f"_H{shard.head_group}" + (f"_P{shard.pool}" if shard.pool else ""))


@pytest.fixture(params=["memory", "file"])
async def inner(request, tmp_path):
    """Storage in memory, and real files."""
    backend = MemoryBackend() if request.param == "memory" else FileBackend(tmp_path)
    await backend.open()
    yield backend
    await backend.close()


@pytest.fixture
def make_parts_desk(inner, make_desk):
    def make(sections=SECTIONS, **options):
        return make_desk(inner=inner, sections=sections, **{"all_parts": ALL, **options})

    return make


@pytest.fixture
def desk(make_parts_desk):
    return make_parts_desk()


# Exists -----------------------------------------------------------------------------------------


async def test_a_question_tells_of_each_leading_page_what_it_has(desk):
    await desk.stored(5, parts=[ALL, IN_WINDOW, IN_DRAFT, 0, ELSEWHERE])
    found = bytes([ALL, IN_WINDOW | ELSEWHERE, IN_DRAFT | ELSEWHERE, ELSEWHERE, ELSEWHERE])
    assert await desk.exists_answer(1, range(9)) == ExistsResult(1, 5, True, "", found)


@pytest.mark.parametrize("one", [WINDOW, DRAFT], ids=["window", "draft"])
async def test_a_part_without_one_of_its_objects_is_not_there_and_costs_no_page(desk, one):
    for lost in range(len(one.shards)):
        await desk.stored(9, parts=[ALL] * 9)
        await desk.backend.delete([objects_of(desk, 6, one)[lost]])
        found = bytes([ALL] * 6 + [ALL & ~(1 << one.bit)] + [ALL] * 2)
        assert await desk.exists_answer(1, range(9)) == ExistsResult(1, 9, True, "", found)
        desk.answers.clear()


@pytest.mark.parametrize("lost", [0, 1])
async def test_required_objects_alone_decide_how_many_pages_there_are(desk, lost):
    await desk.stored(50, parts=[ALL] * 50)
    await desk.backend.delete([objects_of(desk, 40, FULL)[lost]])
    assert await desk.exists_answer(1, range(50)) == ExistsResult(
        1, 40, True, "", bytes([ALL] * 40)
    )


async def test_parts_of_many_pages_come_in_order(desk):
    parts = [page * 5 % 8 for page in range(60)]
    for start in (0, 30):
        batch = range(start, start + 30)
        desk.persist(start + 100, batch, parts=[parts[page] for page in batch])
        await desk.wait_for(PersistReleased(start + 100))
    found = bytes(mask | ELSEWHERE for mask in parts)
    assert await desk.exists_answer(1, range(61)) == ExistsResult(1, 60, True, "", found)


async def test_all_objects_of_a_page_are_asked_for_in_one_call(desk):
    calls = []
    contains = desk.backend.contains

    async def noting(names):
        calls.append(list(names))
        return await contains(names)

    desk.backend.contains = noting
    await desk.stored(20, parts=[ALL] * 20)
    await desk.exists_answer(1, range(20))
    assert [len(names) for names in calls] == [4 * 5, 16 * 5]
    assert {name[64:] for name in calls[0]} == {
        name[64:] for one in SECTIONS for name in objects_of(desk, 0, one)
    }


async def test_a_question_that_stays_open_tells_the_parts_of_what_was_found(desk):
    await desk.stored(8, parts=[IN_WINDOW] * 8)
    desk.faults.faults = (Fault(operation="contains", name=desk.name_of(6), hangs=True),)
    answer = await desk.exists_answer(1, range(8), deadline_s=0.3)
    found = bytes([IN_WINDOW | ELSEWHERE] * 4)
    assert answer == ExistsResult(1, 4, False, "deadline", found)


async def test_a_question_that_was_not_asked_tells_no_parts(desk):
    desk.exists(1, range(8))
    desk.table.handle(Cancel(1))
    assert desk.of(1) == [ExistsResult(1, 0, False, "cancelled")]


# Fetch ------------------------------------------------------------------------------------------


async def test_each_page_gets_what_was_asked_for_and_zeros_where_it_may(desk):
    asked = list(range(8))
    await desk.stored(8, parts=[ALL] * 8)
    before = bytes(desk.pool)
    assert await desk.fetched(1, range(8), parts=asked) == FetchSettled(1, 8, "complete")
    expected = bytearray(before)
    for page, parts in enumerate(asked):
        for one in SECTIONS:
            start, source = one.base + (32 + page) * 4096, one.base + page * 4096
            length = sum(shard.length for shard in one.shards)
            if one.is_in(parts):
                expected[start : start + length] = before[source : source + length]
            elif one.may_be_zero:
                expected[start : start + 4096] = bytes(4096)
    assert desk.pool == expected
    assert desk.table.counters() == {"zeroed_pages": 4.0}


async def test_a_fetch_without_parts_reads_what_is_required(desk):
    await desk.stored(3, parts=[ALL] * 3)
    window = [region_of(desk, WINDOW, 32 + page) for page in range(3)]
    num_read = desk.backend.stats()["objects_read"]
    assert await desk.fetched(1, range(3)) == FetchSettled(1, 3, "complete")
    assert desk.backend.stats()["objects_read"] - num_read == 3 * len(FULL.shards)
    for page in range(3):
        assert region_of(desk, FULL, 32 + page) == region_of(desk, FULL, page)
        assert region_of(desk, WINDOW, 32 + page) == window[page]
        assert region_of(desk, DRAFT, 32 + page) == bytes(900)


@pytest.mark.parametrize("one", [WINDOW, DRAFT], ids=["window", "draft"])
@pytest.mark.parametrize("kind", ["missing", "corrupt"])
async def test_a_bad_object_ends_a_fetch_that_asked_for_it_and_no_other(desk, one, kind):
    bit = 1 << one.bit
    for number, victim in enumerate(objects_of(desk, 3, one)):
        await desk.stored(8, parts=[ALL] * 8)
        await (desk.backend.delete([victim]) if kind == "missing" else damage(desk, victim))
        others = [ALL] * 3 + [ALL & ~bit] + [ALL] * 4
        settled = await desk.fetched(10 + number, range(8), parts=others)
        assert settled == FetchSettled(10 + number, 8, "complete")
        assert await desk.backend.contains([victim]) == [kind == "corrupt"]
        settled = await desk.fetched(20 + number, range(8), parts=[0, 0, 0, bit, 0, 0, 0, 0])
        assert settled == FetchSettled(20 + number, 3, kind)
        assert await desk.backend.contains([victim]) == [False]


async def test_a_part_that_was_never_stored_is_missing_only_where_it_was_asked_for(desk):
    await desk.stored(6, parts=[ALL, ALL, ALL, 0, ALL, ALL])
    assert await desk.fetched(1, range(6), parts=[ALL] * 6) == FetchSettled(1, 3, "missing")
    asked = [ALL, 0, IN_WINDOW, 0, IN_DRAFT, ALL]
    assert await desk.fetched(2, range(6), parts=asked) == FetchSettled(2, 6, "complete")


@pytest.mark.parametrize("one", [WINDOW, DRAFT], ids=["window", "draft"])
async def test_failing_reads_of_a_part_fail_a_fetch_that_asked_for_it_and_no_other(desk, one):
    await desk.stored(6, parts=[ALL] * 6)
    victim = objects_of(desk, 4, one)[-1]
    desk.faults.faults = (Fault(operation="read", name=victim, fails=True),)
    settled = await desk.fetched(1, range(6), parts=[ALL] * 6)
    assert settled == FetchSettled(1, 4, "unavailable")
    rest = [ALL & ~(1 << one.bit)] * 6
    assert await desk.fetched(2, range(6), parts=rest) == FetchSettled(2, 6, "complete")


@pytest.mark.parametrize("one", [WINDOW, DRAFT], ids=["window", "draft"])
async def test_late_reads_of_a_part_delay_a_fetch_that_asked_for_it_and_no_other(desk, one):
    await desk.stored(6, parts=[ALL] * 6)
    victim = objects_of(desk, 4, one)[0]
    desk.faults.faults = (Fault(operation="read", name=victim, hangs=True),)
    desk.fetch(1, range(6), parts=[ALL] * 6, deadline_s=0.5)
    rest = [ALL & ~(1 << one.bit)] * 6
    settled = await desk.fetched(2, range(6), parts=rest, first_slot=40)
    assert settled == FetchSettled(2, 6, "complete")
    await desk.wait_for(FetchSettled(1, 4, "deadline"))
    await asyncio.sleep(0.03)
    assert FetchReleased(1) not in desk.answers
    desk.faults.faults = ()
    await desk.wait_for(FetchReleased(1))
    after = bytes(desk.pool)
    await asyncio.sleep(0.03)
    assert desk.pool == after


async def test_a_page_is_not_verified_before_its_last_part_is(desk):
    await desk.stored(4, parts=[ALL] * 4)
    slow = Fault(operation="read", name=objects_of(desk, 2, WINDOW)[1], hangs=True)
    desk.faults.faults = (slow,)
    desk.fetch(1, range(4), parts=[ALL] * 4)
    await desk.wait_for(FetchProgress(1, 2))
    await asyncio.sleep(0.03)
    assert desk.of(1)[-1] == FetchProgress(1, 2)
    desk.faults.faults = ()
    await desk.wait_for(FetchSettled(1, 4, "complete"))


async def test_zeros_are_there_when_a_page_is_told_to_be_verified(desk):
    await desk.stored(20)
    desk.faults.faults = tuple(
        Fault(operation="read", name=desk.name_of(page), delay_s=0.003 * page) for page in range(20)
    )
    told = []

    def look(event):
        if isinstance(event, FetchProgress | FetchSettled):
            zeros = [region_of(desk, DRAFT, 32 + i) == bytes(900) for i in range(event.num_pages)]
            told.append((event.num_pages, all(zeros)))
        desk._take(event)

    desk.table.attach(look)
    await desk.fetched(1, range(20))
    assert len(told) > 1
    assert told[-1] == (20, True)
    assert all(are_zeros for _, are_zeros in told)


async def test_a_page_that_is_not_verified_gets_no_zeros_and_is_not_counted(make_parts_desk):
    desk = make_parts_desk(read_concurrency=1)
    await desk.stored(6)
    await desk.backend.delete([objects_of(desk, 5, FULL)[0]])
    before = region_of(desk, DRAFT, 32 + 5)
    assert await desk.fetched(1, range(6)) == FetchSettled(1, 5, "missing")
    assert region_of(desk, DRAFT, 32 + 5) == before
    assert desk.table.counters() == {"zeroed_pages": 5.0}


async def test_a_worker_that_has_nothing_of_what_was_asked_for_reads_nothing(make_parts_desk):
    desk = make_parts_desk(sections=(WINDOW, DRAFT))
    desk.faults.faults = (Fault(operation="read", fails=True),)
    settled = await desk.fetched(1, range(20), parts=[ELSEWHERE] * 20)
    assert settled == FetchSettled(1, 20, "complete")
    assert all(region_of(desk, DRAFT, 32 + page) == bytes(900) for page in range(20))


async def test_a_worker_without_required_sections_has_every_page_and_tells_its_parts(
    make_parts_desk,
):
    desk = make_parts_desk(sections=(WINDOW,))
    await desk.stored(2, parts=[0, IN_WINDOW])
    found = bytes([6, 7, 6, 6, 6])
    assert await desk.exists_answer(1, range(5)) == ExistsResult(1, 5, True, "", found)


# Persist ----------------------------------------------------------------------------------------


async def test_required_sections_and_the_parts_of_each_page_are_written(desk):
    await desk.stored(8, parts=range(8))
    for page in range(8):
        for one in SECTIONS:
            names = objects_of(desk, page, one)
            assert await desk.backend.contains(names) == [one.is_in(page)] * len(names)


async def test_a_worker_writes_only_its_own_shards_of_a_part(make_parts_desk):
    shared = Section(WINDOW.base, 4096, WINDOW.shards, WINDOW.shards[1:], bit=0)
    desk = make_parts_desk(sections=(FULL, shared))
    await desk.stored(1, parts=[ALL])
    assert await desk.backend.contains(objects_of(desk, 0, WINDOW)) == [False, True]


async def test_a_page_that_lacked_a_part_is_stored_again_with_it_and_exists_then(desk):
    await desk.stored(3)
    desk.persist(1, range(3), parts=[IN_WINDOW, 0, IN_WINDOW | ELSEWHERE])
    await desk.wait_for(PersistDone(1, 2, 1, 0, "complete", 2 * 1200))
    desk.persist(2, range(3), parts=[IN_WINDOW, 0, IN_WINDOW])
    await desk.wait_for(PersistDone(2, 0, 3, 0, "complete"))


async def test_failing_writes_of_a_part_drop_its_page(desk):
    desk.faults.faults = (
        Fault(operation="write", name=objects_of(desk, 1, WINDOW)[0], fails=True),
    )
    desk.persist(1, range(2), parts=[ALL, IN_DRAFT])
    await desk.wait_for(PersistDone(1, 2, 0, 0, "complete", 2 * 3000 + 1200 + 2 * 900))
    desk.persist(2, [1], parts=[ALL])
    await desk.wait_for(PersistDone(2, 0, 0, 1, "unavailable"))


async def test_the_backlog_holds_the_bytes_of_the_parts_in_question(make_parts_desk):
    desk = make_parts_desk(write_backlog_bytes=3 * 3000 + 1200 + 900)
    desk.faults.faults = (Fault(operation="write", hangs=True),)
    desk.persist(1, range(2), parts=[IN_WINDOW, IN_DRAFT])
    assert desk.table.backlog_bytes == 2 * 3000 + 1200 + 900
    desk.persist(2, range(2, 4), parts=[IN_DRAFT, 0])
    assert desk.of(2) == [PersistDone(2, 0, 0, 2, "backlog"), PersistReleased(2)]
    desk.persist(3, range(4, 6), parts=[ELSEWHERE, 0])
    assert desk.table.backlog_bytes == 3 * 3000 + 1200 + 900
    assert desk.table.gauges()["write_backlog_bytes"] == 3 * 3000 + 1200 + 900
    desk.faults.faults = ()
    await desk.wait_for(PersistReleased(1))
    await desk.wait_for(PersistDone(3, 1, 0, 1, "backlog", 3000))
    assert desk.table.backlog_bytes == 0


async def test_the_backlog_forgets_the_pages_that_were_written(make_parts_desk):
    desk = make_parts_desk(write_concurrency=16)
    desk.faults.faults = (Fault(operation="write", name=desk.name_of(1), hangs=True),)
    desk.persist(1, range(3), parts=[IN_WINDOW, IN_DRAFT, ALL])
    assert desk.table.backlog_bytes == 3 * 3000 + 2 * 1200 + 2 * 900
    async with asyncio.timeout(5):
        while desk.table.backlog_bytes > 3000 + 900:
            await asyncio.sleep(0.002)
    assert desk.table.backlog_bytes == 3000 + 900
    desk.faults.faults = ()
    num_bytes = 3 * 3000 + 2 * 1200 + 2 * 900
    await desk.wait_for(PersistDone(1, 3, 0, 0, "complete", num_bytes))


# Breakers and refusals --------------------------------------------------------------------------


async def test_pages_of_which_there_is_nothing_to_read_do_not_hide_failures(make_parts_desk):
    desk = make_parts_desk(sections=(WINDOW, DRAFT), breaker_backoff_s=60)
    desk.faults.faults = (Fault(operation="read", fails=True),)
    for op in range(1, 6):
        assert desk.table.gauges()["breaker_open"] == 0.0
        settled = await desk.fetched(op, range(4), parts=[0, 0, 0, IN_WINDOW])
        assert settled == FetchSettled(op, 3, "unavailable")
    assert desk.table.gauges()["breaker_open"] == 1.0


async def test_a_page_of_which_there_is_nothing_to_read_is_no_probe(make_parts_desk):
    desk = make_parts_desk(sections=(WINDOW,), breaker_backoff_s=0.03)
    await desk.stored(1, parts=[IN_WINDOW])
    desk.faults.faults = (Fault(operation="read", fails=True),)
    for op in range(1, 6):
        await desk.fetched(op, [0], parts=[IN_WINDOW])
    await asyncio.sleep(0.04)
    assert (await desk.fetched(10, range(3))).reason == "complete"
    assert desk.table.gauges()["breaker_open"] == 1.0
    desk.faults.faults = ()
    assert (await desk.fetched(11, [0], parts=[IN_WINDOW])).reason == "complete"
    assert desk.table.gauges()["breaker_open"] == 0.0


async def test_pages_of_which_there_is_nothing_to_write_do_not_hide_failures(make_parts_desk):
    desk = make_parts_desk(sections=(WINDOW,), breaker_backoff_s=60)
    desk.faults.faults = (Fault(operation="write", fails=True),)
    for op in range(1, 6):
        desk.persist(op, range(4), parts=[0, 0, 0, IN_WINDOW])
        await desk.wait_for(PersistDone(op, 0, 3, 1, "unavailable"))
    assert desk.table.gauges()["breaker_open"] == 1.0


@pytest.mark.parametrize("command", ["fetch", "persist"])
async def test_parts_that_no_pool_has_are_a_protocol_error(desk, command):
    with pytest.raises(ProtocolError, match="parts up to 0x8, but there are 0x7"):
        getattr(desk, command)(1, range(2), parts=[ALL, 8])
    assert desk.answers == []
