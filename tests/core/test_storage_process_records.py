"""Records and near misses through real storage processes, and to whom a link describes itself."""

import os
import signal
import time

import msgspec
import pytest
from sample_namespace import SAMPLE

from vllm_hicache.namespace_records import encode_record
from vllm_hicache.storage_channel import ChannelDown, ChannelUp
from vllm_hicache.storage_link import StorageLink
from vllm_hicache.storage_messages import (
    Describe,
    Exists,
    ExistsResult,
    NearMisses,
    Persist,
    PersistDone,
    pack_hashes,
    pack_slots,
)

pytestmark = pytest.mark.services

OWN = SAMPLE
OTHER = msgspec.structs.replace(OWN, page_size=128)
MIN_PAGES = 4
PATIENCE_S = 60.0
PATIENT = {
    "near_miss_pages": MIN_PAGES,
    "stall_s": 10.0,
    "operation_timeout_s": PATIENCE_S,
    "exists_timeout_s": PATIENCE_S,
}
"""No time is promised here: a busy machine is no dead storage."""
HASHES = pack_hashes(bytes([page]) * 32 for page in range(MIN_PAGES))
SLOTS = pack_slots(range(MIN_PAGES))


@pytest.fixture
def start(tmp_path, new_engine):
    """Starts engines on one folder, each with the namespace that it describes itself by."""

    def start_one(namespace):
        url = f"file://{tmp_path}/store"
        engine = new_engine(url=url, **PATIENT)
        engine.start()
        engine.send(Describe(encode_record(namespace)))
        return engine

    return start_one


def persist(engine, namespace, op=1):
    engine.send(Persist(op, namespace.digest, HASHES, SLOTS, PATIENCE_S))
    assert engine.wait_for(PersistDone, PATIENCE_S).num_dropped == 0


def ask(engine, namespace, op):
    engine.send(Exists(op, namespace.digest, HASHES, PATIENCE_S))
    return engine.wait_for(ExistsResult, PATIENCE_S).num_leading


def record_file(tmp_path, namespace):
    return tmp_path / "store" / "namespaces" / f"{namespace.digest}.json"


def test_the_first_stored_page_writes_the_record_and_an_engine_beside_it_is_told(
    tmp_path, start, wait_until
):
    writer = start(OTHER)
    persist(writer, OTHER)
    wait_until(record_file(tmp_path, OTHER).exists, timeout_s=PATIENCE_S)
    writer.close()
    reader = start(OWN)
    assert ask(reader, OWN, 1) == 0
    assert reader.wait_for(NearMisses, PATIENCE_S) == NearMisses((encode_record(OTHER),))
    assert not record_file(tmp_path, OWN).exists()


def test_an_engine_of_the_same_namespace_hits_and_is_told_nothing(tmp_path, start, wait_until):
    writer = start(OTHER)
    persist(writer, OTHER)
    wait_until(record_file(tmp_path, OTHER).exists, timeout_s=PATIENCE_S)
    writer.close()
    reader = start(OTHER)
    for op in range(1, 4):
        assert ask(reader, OTHER, op) == MIN_PAGES
    time.sleep(0.2)
    reader.seen += [event for _, event in reader.channels.poll()]
    assert not [event for event in reader.seen if isinstance(event, NearMisses)]


def test_a_process_that_was_not_described_keeps_no_record(tmp_path, new_engine):
    engine = new_engine(url=f"file://{tmp_path}/store", **PATIENT)
    engine.start()
    persist(engine, OWN)
    time.sleep(0.2)
    assert not record_file(tmp_path, OWN).exists()


def test_a_successor_is_told_who_it_is_as_its_predecessor_was(tmp_path, new_engine, wait_until):
    engine = new_engine(url=f"file://{tmp_path}/store", **PATIENT)
    engine.start()
    link = StorageLink(engine.channels, 1, Describe(encode_record(OWN)))
    os.kill(engine.process.pid, signal.SIGKILL)
    seen = []

    def is_back():
        seen.extend(event for _, event in link.poll())
        return ChannelDown() in seen and any(isinstance(event, ChannelUp) for event in seen)

    wait_until(is_back, timeout_s=PATIENCE_S)
    persist(engine, OWN)
    wait_until(record_file(tmp_path, OWN).exists, timeout_s=PATIENCE_S)


class Channels:
    """Takes messages and brings what the test has put in."""

    def __init__(self):
        self.sent = []
        self.inbox = []

    def send(self, worker_id, message):
        self.sent.append((worker_id, message))
        return True

    def poll(self):
        events, self.inbox = self.inbox, []
        return events


def test_only_the_first_worker_s_processes_are_described_to():
    channels, describe = Channels(), Describe(encode_record(OWN))
    link = StorageLink(channels, 2, describe)
    channels.inbox = [(1, ChannelUp(1)), (0, ChannelUp(1))]
    list(link.poll())
    channels.inbox = [(0, ChannelDown()), (0, ChannelUp(2)), (1, ChannelDown()), (1, ChannelUp(2))]
    list(link.poll())
    assert channels.sent == [(0, describe), (0, describe)]
