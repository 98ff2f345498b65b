"""The store that LMCache's chunks go through: deadlines, breaker, backlog, and whose memory."""

import time

import numpy as np
import pytest

from vllm_hicache.errors import ConfigError
from vllm_hicache.storage import FetchOutcome, WriteOutcome
from vllm_hicache.storage_backends.chunk_store import BREAKER_FAILURES, ChunkStore
from vllm_hicache.storage_backends.lmcache_names import ChunkLayout, ChunkNames
from vllm_hicache.storage_backends.lmcache_options import BridgeOptions
from vllm_hicache.testing import Fault, FaultFile

pytestmark = pytest.mark.services

NAMES = ChunkNames("server", "")
CHUNK_BYTES = 2 * 1024 * 1024
PATIENCE_S = 30


@pytest.fixture
def faults(tmp_path):
    return FaultFile(tmp_path / "faults")


@pytest.fixture
def open_store(tmp_path, faults):
    """Opens stores over one folder, through a backend that does as the fault file says."""
    stores = []

    def open_one(load_timeout_s=PATIENCE_S, **options):
        url = (
            "plugin://vllm_hicache.testing/FaultyBackend"
            f"?inner=file://{tmp_path}/store&faults={faults.path}"
        )
        given = {"url": url, "exists_timeout_s": 5, **options}
        storage = BridgeOptions.parse(given, {}).storage
        stores.append(ChunkStore(storage, load_timeout_s=load_timeout_s))
        return stores[-1]

    yield open_one
    faults.write()
    for store in stores:
        store.close()


def chunk(number, content=None):
    content = np.full(CHUNK_BYTES, number, np.uint8) if content is None else content
    return NAMES.of("org/model", "int8", (number,)).over(memoryview(content))


def empty(number):
    return chunk(number, np.zeros(CHUNK_BYTES, np.uint8))


def result(future):
    return future.result(PATIENCE_S)


def test_a_saved_chunk_is_found_and_loaded_equal(open_store):
    store, saved, loaded = open_store(), chunk(7), empty(7)
    assert result(store.save([saved])) == [WriteOutcome.STORED]
    assert result(store.find([saved.name, chunk(8).name])) == [True, False]
    assert result(store.load([loaded, empty(8)])) == [FetchOutcome.OK, FetchOutcome.MISSING]
    assert loaded.payload == saved.payload


def test_bytes_that_fail_their_checksum_never_reach_the_memory(open_store, tmp_path):
    store, loaded = open_store(), empty(7)
    result(store.save([chunk(7)]))
    (path,) = (tmp_path / "store").glob(f"*/{loaded.name}")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert result(store.load([loaded])) == [FetchOutcome.CORRUPT]
    assert not any(loaded.payload)
    assert not path.exists()


def test_a_removed_chunk_is_gone(open_store):
    store = open_store()
    result(store.save([chunk(1)]))
    assert result(store.remove([chunk(1).name, chunk(2).name])) == [True, False]
    assert result(store.find([chunk(1).name])) == [False]


def test_a_failing_store_is_a_miss_and_is_left_alone_after_a_while(open_store, faults):
    store = open_store()
    result(store.save([chunk(1)]))
    faults.write(Fault(operation="read", fails=True))
    for _ in range(BREAKER_FAILURES):
        assert store.is_healthy
        assert result(store.load([empty(1)])) == [None]
    assert not store.is_healthy
    faults.write()
    assert result(store.load([empty(1)])) == [None]  # not even asked
    assert store.stats()["objects_read"] == 0
    deadline = time.monotonic() + PATIENCE_S
    while result(store.load([empty(1)])) != [FetchOutcome.OK]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert store.is_healthy


def test_a_hung_read_is_a_miss_at_the_deadline(open_store, faults):
    store, loaded = open_store(load_timeout_s=0.3), empty(1)
    result(store.save([chunk(1)]))
    faults.write(Fault(operation="read", hangs=True))
    started = time.monotonic()
    assert result(store.load([loaded])) == [None]
    assert time.monotonic() - started < 5
    faults.write()
    assert result(store.load([loaded])) == [FetchOutcome.OK]


def test_chunks_that_came_before_the_deadline_count(open_store, faults):
    store = open_store(load_timeout_s=2.0)
    items = [empty(number) for number in range(1, 4)]
    result(store.save([chunk(number) for number in range(1, 4)]))
    faults.write(Fault(operation="read", name=items[1].name, hangs=True))
    assert result(store.load(items)) == [FetchOutcome.OK, None, FetchOutcome.OK]


def test_what_the_backlog_has_no_room_for_is_dropped(open_store, faults):
    store = open_store(write_backlog=2 * CHUNK_BYTES, min_free=0)
    faults.write(Fault(operation="write", delay_s=0.5))
    saves = [store.save([chunk(number)]) for number in range(4)]
    stored = [WriteOutcome.STORED]
    assert [result(save) for save in saves] == [stored, stored, [None], [None]]
    assert store.stats()["chunks_over_backlog"] == 2
    assert result(store.save([chunk(3)])) == stored


def test_a_chunk_larger_than_the_backlog_goes_when_nothing_else_waits(open_store):
    store = open_store(write_backlog=CHUNK_BYTES // 2)
    assert result(store.save([chunk(1), chunk(2)])) == [WriteOutcome.STORED, None]


def test_closing_writes_what_is_queued(open_store, faults):
    store = open_store()
    faults.write(Fault(operation="write", delay_s=0.3))
    save = store.save([chunk(1)])
    store.close()
    assert result(save) == [WriteOutcome.STORED]
    assert result(store.load([empty(1)])) == [None]  # closed: a miss, no error
    faults.write()
    assert result(open_store().find([chunk(1).name])) == [True]


def test_a_store_that_is_away_at_the_start_is_opened_later(open_store, faults):
    faults.write(Fault(operation="open", fails=True))
    store = open_store()
    assert result(store.save([chunk(1)])) == [None]
    faults.write()
    deadline = time.monotonic() + PATIENCE_S
    while not store.is_healthy:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert result(store.save([chunk(1)])) == [WriteOutcome.STORED]


def test_a_store_that_hangs_at_the_start_does_not_hold_it(open_store, faults):
    faults.write(Fault(operation="open", hangs=True))
    started = time.monotonic()
    store = open_store(connect_timeout_s=0.2)
    assert time.monotonic() - started < 5
    assert result(store.find([chunk(1).name])) == [False]


def test_a_place_that_cannot_hold_a_store_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    storage = BridgeOptions.parse({"url": f"file://{tmp_path}/file"}, {}).storage
    with pytest.raises(ConfigError, match="file"):
        ChunkStore(storage, load_timeout_s=1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "storage"),
        ({"url": "file:///x", "capasity": "1GiB"}, "capasity"),
        ({"url": "file:///x", "load_timeout_s": 0}, "load_timeout_s"),
        ({"url": "file:///x", "load_timeout_s": True}, "load_timeout_s"),
        ({"url": "file:///x", "cache_id": 5}, "cache_id"),
        ({"url": "file:///x", "layout": 5}, "layout"),
    ],
)
def test_a_bad_option_is_named(given, said):
    with pytest.raises(ConfigError, match=said):
        BridgeOptions.parse(given, {})


def test_options_of_the_storage_are_those_of_the_connector():
    options = BridgeOptions.parse({"url": "file:///x", "capacity": "3GiB"}, {})
    assert options.storage.capacity_bytes == 3 << 30


def test_every_part_of_a_key_is_in_the_name():
    one = ("server", "rev", "org/model", "int8[4]", (1, 0, "salt", b"hash"))
    others = [
        ("in-process", *one[1:]),
        (one[0], "other", *one[2:]),
        (*one[:2], "org/other", *one[3:]),
        (*one[:3], "int8[5]", one[4]),
        (*one[:4], (2, 0, "salt", b"hash")),
        (*one[:4], (1, 1, "salt", b"hash")),
        (*one[:4], (1, 0, "pepper", b"hash")),
        (*one[:4], (1, 0, "salt", b"other")),
    ]
    names = {str(ChunkNames(a, b).of(c, d, e)) for a, b, c, d, e in [one, *others]}
    assert len(names) == 1 + len(others)


def test_fields_do_not_run_into_each_other():
    assert NAMES.of("ab", "c", ()) != NAMES.of("a", "bc", ())


def test_a_layout_tells_tensors_and_bytes():
    layout = ChunkLayout.of([(2, 3), (4,)], [np.dtype("float32"), np.dtype("int8")])
    assert layout == ChunkLayout("float32[2,3];int8[4]", 28)
