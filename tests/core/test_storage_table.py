"""Breakers, drains, lost connections and refusals around the operations."""

import asyncio
import random
import time

import pytest

from vllm_hicache import storage_messages as messages
from vllm_hicache.storage_messages import (
    Cancel,
    Drain,
    Drained,
    Event,
    ExistsResult,
    FetchProgress,
    FetchReleased,
    FetchSettled,
    PersistDone,
    PersistReleased,
    ProtocolError,
)
from vllm_hicache.testing import Fault

NUM_SHARDS = 2
NUM_SLOTS = 64
PAGE_BYTES = 8096


# Breaker ----------------------------------------------------------------------------------------


async def _open_read_breaker(desk) -> None:
    await desk.stored(4)
    desk.faults.faults = (Fault(operation="read", fails=True),)
    for op in range(1, 6):
        assert (await desk.fetched(op, range(4))).reason == "unavailable"
    desk.faults.faults = ()
    assert desk.table.gauges()["breaker_open"] == 1.0


async def _open_exists_breaker(desk) -> None:
    await desk.stored(4)
    desk.faults.faults = (Fault(operation="contains", fails=True),)
    for op in range(1, 6):
        assert (await desk.exists_answer(op, range(4))).reason == "unavailable"
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
    await desk.wait_for(PersistDone(12, 2, 0, 0, "complete", 2 * PAGE_BYTES))


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
    desk.faults.faults = (Fault(operation="read", fails=True),)
    assert (await desk.fetched(20, range(4))).reason == "unavailable"
    desk.faults.faults = ()
    await asyncio.sleep(0.06)
    assert (await desk.fetched(21, range(4))).reason == "unavailable"
    await asyncio.sleep(0.05)
    assert (await desk.fetched(22, range(4))).reason == "complete"


async def test_a_probe_that_is_cancelled_leaves_the_next_one_free(make_desk):
    desk = make_desk(breaker_backoff_s=0.05)
    await _open_read_breaker(desk)
    await asyncio.sleep(0.06)
    desk.faults.faults = (Fault(operation="contains", delay_s=0.05),)
    desk.exists(20, range(4))
    await asyncio.sleep(0.01)
    desk.table.handle(Cancel(20))
    await desk.wait_for(ExistsResult(20, 0, False, "cancelled"))
    await asyncio.sleep(0.01)
    desk.faults.faults = ()
    assert (await desk.exists_answer(21, range(4))).ok


@pytest.mark.parametrize("fault", [Fault(hangs=True), Fault(delay_s=0.2)])
async def test_questions_that_nobody_answers_open_the_breaker(make_desk, fault):
    desk = make_desk(breaker_backoff_s=60, stall_s=0.05)
    await desk.stored(4)
    desk.faults.faults = (fault,)
    for op in range(1, 6):
        answer = await desk.exists_answer(op, range(4), deadline_s=0.01)
        assert answer == ExistsResult(op, 0, False, "deadline")
    assert desk.table.gauges()["breaker_open"] == 0.0
    await asyncio.sleep(0.1)
    assert await desk.exists_answer(10, range(4)) == ExistsResult(10, 0, False, "unavailable")
    assert desk.table.gauges()["breaker_open"] == 1.0


async def test_questions_whose_deadlines_are_longer_open_the_breaker_at_them(make_desk):
    desk = make_desk(breaker_backoff_s=60, stall_s=0.01)
    await desk.stored(4)
    desk.faults.faults = (Fault(hangs=True),)
    for op in range(1, 6):
        answer = await desk.exists_answer(op, range(4), deadline_s=0.05)
        assert answer == ExistsResult(op, 0, False, "deadline")
    assert (await desk.exists_answer(10, range(4))).reason == "unavailable"


async def test_questions_that_are_answered_late_do_not_open_the_breaker(make_desk):
    desk = make_desk(breaker_backoff_s=60, stall_s=5)
    await desk.stored(4)
    desk.faults.faults = (Fault(operation="contains", delay_s=0.05),)
    for op in range(1, 11):
        answer = await desk.exists_answer(op, range(4), deadline_s=0.01)
        assert answer == ExistsResult(op, 0, False, "deadline")
    await asyncio.sleep(0.1)
    assert (await desk.exists_answer(20, range(4))).ok


async def test_a_probe_without_an_answer_waits_twice_as_long(make_desk):
    desk = make_desk(breaker_backoff_s=0.1, stall_s=0.02)
    await _open_exists_breaker(desk)
    await asyncio.sleep(0.11)
    desk.faults.faults = (Fault(operation="contains", hangs=True),)
    assert (await desk.exists_answer(20, range(4), deadline_s=0.01)).reason == "deadline"
    assert (await desk.exists_answer(21, range(4))).reason == "unavailable"  # while it runs
    await asyncio.sleep(0.03)
    desk.faults.faults = ()
    await asyncio.sleep(0.11)
    assert (await desk.exists_answer(22, range(4))).reason == "unavailable"
    await asyncio.sleep(0.1)
    assert (await desk.exists_answer(23, range(4))).ok


async def test_questions_that_wait_for_a_place_do_not_open_the_breaker(make_desk):
    desk = make_desk(breaker_backoff_s=60, exists_concurrency=1)
    await desk.stored(4)
    desk.faults.faults = (Fault(operation="contains", delay_s=0.1),)
    desk.exists(1, range(4))
    for op in range(2, 8):
        desk.exists(op, range(4), deadline_s=0.02)
    await desk.wait_for(ExistsResult(7, 0, False, "deadline"))
    await desk.wait_for(ExistsResult(1, 4, True))
    desk.faults.faults = ()
    assert (await desk.exists_answer(10, range(4))).ok


async def test_fetches_that_get_nothing_before_their_deadlines_open_the_breaker(make_desk):
    desk = make_desk(breaker_backoff_s=60)
    await desk.stored(4)
    desk.faults.faults = (Fault(operation="read", hangs=True),)
    for op in range(1, 6):
        desk.fetch(op, range(4), deadline_s=0.03)
        await desk.wait_for(FetchSettled(op, 0, "deadline"))
    desk.fetch(10, range(4))
    assert desk.of(10)[0] == FetchSettled(10, 0, "unavailable")


async def test_given_up_fetches_open_the_breaker_though_questions_are_answered(make_desk):
    desk = make_desk(breaker_backoff_s=60)
    await desk.stored(4)
    desk.faults.faults = (Fault(operation="read", hangs=True),)
    for op in range(1, 6):
        assert (await desk.exists_answer(100 + op, range(4))).ok
        desk.fetch(op, range(4))
        await asyncio.sleep(0.04)  # twice as long as a call that stalls
        desk.table.handle(Cancel(op))
        await desk.wait_for(FetchSettled(op, 0, "cancelled"))
    assert desk.table.gauges()["breaker_open"] == 1.0
    desk.fetch(10, range(4))
    assert desk.of(10)[0] == FetchSettled(10, 0, "unavailable")
    assert (await desk.exists_answer(110, range(4))).reason == "unavailable"


async def test_fetches_that_are_given_up_soon_do_not_open_the_breaker(make_desk):
    desk = make_desk(breaker_backoff_s=60, stall_s=5)
    await desk.stored(4)
    desk.faults.faults = (Fault(operation="read", delay_s=0.1),)
    for op in range(1, 8):
        desk.fetch(op, range(4))
        await asyncio.sleep(0.005)
        desk.table.handle(Cancel(op))
        await desk.wait_for(FetchSettled(op, 0, "cancelled"))
    desk.faults.faults = ()
    assert (await desk.fetched(20, range(4))).reason == "complete"


async def test_one_hanging_object_among_good_ones_does_not_open_the_breaker(make_desk):
    desk = make_desk(breaker_backoff_s=60, operation_timeout_s=0.1)
    await desk.stored(20)
    desk.faults.faults = (Fault(operation="read", name=desk.name_of(0), hangs=True),)
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
    done = PersistDone(1, 4, 0, 0, "complete", 4 * PAGE_BYTES)
    assert desk.answers.index(Drained()) > desk.answers.index(done)
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
    assert len(desk.memory.objects) == 6 * NUM_SHARDS


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
                    name=desk.name_of(chance.randrange(32)),
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
