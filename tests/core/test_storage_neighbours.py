"""What the first storage process learns by listening: when to write its record, when to look."""

import asyncio

import msgspec
import pytest
from sample_namespace import SAMPLE

from vllm_hicache.errors import BackendUnavailable
from vllm_hicache.namespace_records import encode_record
from vllm_hicache.storage import WriteOutcome
from vllm_hicache.storage_messages import (
    Describe,
    Exists,
    ExistsResult,
    NearMisses,
    Persist,
    PersistDone,
    pack_slots,
)
from vllm_hicache.storage_neighbours import RENEW_S, RETRY_S, Neighbours
from vllm_hicache.testing import MemoryBackend

OWN = SAMPLE
OTHER = msgspec.structs.replace(OWN, page_size=128)
MIN_PAGES = 16


class Process:
    """A storage process reduced to what passes through its channel."""

    def __init__(self, records=None):
        self.store = MemoryBackend() if records is None else records
        self.now = 1000.0
        self.events = []
        self.neighbours = Neighbours(
            lambda: self.store, min_pages=MIN_PAGES, clock=lambda: self.now
        )
        self.send = self.neighbours.listen(self.events.append)
        self._op = 0

    def describe(self, namespace=OWN):
        assert self.neighbours.take(Describe(encode_record(namespace)))

    async def ask(self, num_pages, num_found=0, *, ok=True, namespace=OWN):
        self._op += 1
        assert not self.neighbours.take(
            Exists(self._op, namespace.digest, bytes(32) * num_pages, 1.0)
        )
        reason = "" if ok else "deadline"
        self.send(ExistsResult(self._op, num_found, ok, reason))
        await asyncio.sleep(0.01)

    async def persist(self, num_stored=1, *, namespace=OWN):
        self._op += 1
        command = Persist(self._op, namespace.digest, bytes(32), pack_slots([0]), 1.0)
        assert not self.neighbours.take(command)
        self.send(PersistDone(self._op, num_stored, 1 - num_stored, 0, "complete"))
        await asyncio.sleep(0.01)

    @property
    def findings(self):
        return [event for event in self.events if isinstance(event, NearMisses)]


@pytest.fixture
def process():
    process = Process()
    process.describe()
    return process


async def fill(process, *namespaces):
    for namespace in namespaces:
        await process.store.write_record(namespace.digest, encode_record(namespace))


async def test_enough_pages_without_a_hit_tell_of_a_near_record_once(process):
    await fill(process, OTHER)
    await process.ask(MIN_PAGES - 1)
    assert process.findings == []
    for _ in range(5):
        await process.ask(MIN_PAGES)
    assert process.findings == [NearMisses((encode_record(OTHER),))]


async def test_one_hit_means_that_nothing_is_wrong(process):
    await fill(process, OTHER)
    await process.ask(4, 1)
    await process.ask(10 * MIN_PAGES)
    assert process.findings == []


async def test_a_question_that_stayed_open_is_no_miss(process):
    await fill(process, OTHER)
    await process.ask(10 * MIN_PAGES, ok=False)
    assert process.findings == []


async def test_questions_of_an_epoch_do_not_count(process):
    await fill(process, OTHER)
    await process.ask(10 * MIN_PAGES, namespace=msgspec.structs.replace(OWN, epoch="5f"))
    assert process.findings == []


async def test_without_a_description_nothing_is_looked_at():
    process = Process()
    await fill(process, OTHER)
    await process.ask(10 * MIN_PAGES)
    await process.persist()
    assert process.findings == []
    assert list(process.store.records) == [OTHER.digest]


async def test_new_prompts_of_a_fleet_that_shares_this_namespace_are_no_near_miss(process):
    await fill(process, OTHER, OWN)
    await process.ask(MIN_PAGES)
    assert process.findings == []


async def test_the_first_engine_of_its_namespace_is_told_even_after_it_stored_pages(process):
    await fill(process, OTHER)
    await process.persist()
    await process.ask(MIN_PAGES)
    assert len(process.findings) == 1


async def test_the_record_is_written_with_the_first_stored_page_and_renewed_later(process):
    written = []
    write = process.store.write_record

    async def counted(namespace, record):
        written.append(process.now)
        return await write(namespace, record)

    process.store.write_record = counted
    await process.persist(num_stored=0)
    assert written == []
    for later in (0, 1, RENEW_S - 2, 2):
        process.now += later
        await process.persist()
    assert written == [1000.0, 1000.0 + RENEW_S + 1]
    assert process.store.records == {OWN.digest: encode_record(OWN)}


async def test_pages_of_an_epoch_write_no_record(process):
    await process.persist(namespace=msgspec.structs.replace(OWN, epoch="5f"))
    assert process.store.records == {}


class FullStore(MemoryBackend):
    """Counts attempts; has room or breaks on demand."""

    num_tried = 0
    outcome: object = WriteOutcome.FULL

    async def write_record(self, namespace, record):
        self.num_tried += 1
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.mark.parametrize("outcome", [WriteOutcome.FULL, BackendUnavailable("gone")])
async def test_a_record_that_found_no_room_is_tried_again_after_a_while(outcome):
    process = Process(FullStore())
    process.store.outcome = outcome
    process.describe()
    for _ in range(3):
        await process.persist()
    assert process.store.num_tried == 1
    process.now += RETRY_S
    await process.persist()
    assert process.store.num_tried == 2


async def test_a_backend_without_records_is_left_in_peace():
    process = Process()
    process.store = None
    process.describe()
    await process.persist()
    await process.ask(10 * MIN_PAGES)
    assert process.findings == []


async def test_events_pass_unchanged_and_in_order(process):
    await process.ask(1)
    await process.persist()
    assert [type(event) for event in process.events] == [ExistsResult, PersistDone]
