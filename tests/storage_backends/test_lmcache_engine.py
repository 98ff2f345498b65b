"""LMCache 0.5.6 inside an engine, on our stores: its own cache engine with KV in host memory."""

import lmcache_process
import pytest
import redis_under_test

from vllm_hicache.testing import Fault, FaultFile

pytestmark = [pytest.mark.services, pytest.mark.full, pytest.mark.timeout(1200)]

TOKENS = 600  # two whole chunks of 256, and a part
IN_CHUNKS = 512
CHUNK_BYTES = 2 * 4 * 256 * 256 * 2


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Two processes of LMCache, a writer and a reader."""
    log = tmp_path_factory.mktemp("lmcache") / "log"
    python = lmcache_process.interpreter()
    pair = [lmcache_process.Lmcache(python, "lmcache_engine_session.py", log) for _ in range(2)]
    yield pair
    for process in pair:
        process.end()


@pytest.fixture
def opened(processes):
    """Opens the writer and the reader on a store; both have local_cpu off."""

    def open_both(url, **options):
        for process in processes:
            process.ask("open", options={"url": url, "exists_timeout_s": 5, **options})
        return processes

    yield open_both
    for process in processes:
        process.ask("close")


def file_store(folder):
    return f"file://{folder}/store"


def stored_files(folder):
    return sorted(path for path in folder.glob("store/*/*") if not path.name.startswith("."))


def _assert_carries(writer, reader):
    assert writer.ask("store", prompt=1, tokens=TOKENS) == {"stored": 2}
    answer = reader.ask("load", prompt=1, tokens=TOKENS)
    assert (answer["found"], answer["hits"], answer["equal"]) == (IN_CHUNKS, IN_CHUNKS, True)
    assert reader.ask("load", prompt=2, tokens=TOKENS)["hits"] == 0
    status = reader.ask("status")
    assert status["chunks_loaded"] == 2
    assert status["bytes_read"] == 2 * (CHUNK_BYTES + 4096)


def test_another_engine_reads_the_same_kv_from_files(opened, tmp_path):
    _assert_carries(*opened(file_store(tmp_path)))


def test_another_engine_reads_the_same_kv_from_redis(opened, tmp_path):
    with redis_under_test.running(tmp_path) as server:
        _assert_carries(*opened(server.url))


def test_another_engine_reads_the_same_kv_from_s3(opened, tmp_path, seaweedfs_server):
    _assert_carries(*opened(seaweedfs_server.url(tmp_path)))


def test_kv_ends_before_a_corrupt_chunk_which_is_removed(opened, tmp_path):
    writer, reader = opened(file_store(tmp_path))
    writer.ask("store", prompt=1, tokens=256)
    (first,) = stored_files(tmp_path)
    writer.ask("store", prompt=1, tokens=TOKENS)
    (second,) = set(stored_files(tmp_path)) - {first}
    content = bytearray(second.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)
    answer = reader.ask("load", prompt=1, tokens=TOKENS)
    assert (answer["found"], answer["hits"], answer["equal"]) == (IN_CHUNKS, 256, True)
    assert stored_files(tmp_path) == [first]


def test_a_killed_server_is_a_miss_and_comes_back(opened, tmp_path):
    with redis_under_test.running(tmp_path) as server:
        writer, reader = opened(server.url, operation_timeout_s=2, exists_timeout_s=2)
        writer.ask("store", prompt=1, tokens=TOKENS)
        server.kill()
        gone = reader.ask("load", prompt=1, tokens=TOKENS)
        assert (gone["found"], gone["hits"]) == (0, 0)
        assert gone["seconds"] < 10
        assert writer.ask("store", prompt=2, tokens=TOKENS) == {"stored": 2}  # of prompt 1
        server.start()
        writer.ask("store", prompt=3, tokens=TOKENS)
        assert reader.ask("load", prompt=3, tokens=TOKENS)["equal"]


def test_a_frozen_server_is_a_miss_within_the_deadline(opened, tmp_path):
    with redis_under_test.running(tmp_path) as server:
        writer, reader = opened(server.url, operation_timeout_s=2, exists_timeout_s=1)
        writer.ask("store", prompt=1, tokens=TOKENS)
        with server.frozen():
            frozen = reader.ask("load", prompt=1, tokens=TOKENS)
        assert frozen["hits"] == 0
        # Twice the deadline, for LMCache asks once to look up and once to retrieve; and some load.
        assert frozen["seconds"] < 2 * 1 + 5


def test_chunks_on_their_way_when_the_engine_ends_are_stored_whole_or_not_at_all(
    processes, tmp_path
):
    writer, reader = processes
    faults = FaultFile(tmp_path / "faults")
    faults.write(Fault(operation="write", delay_s=1.0))
    slow = f"plugin://vllm_hicache.testing/FaultyBackend?inner={file_store(tmp_path)}"
    options = {"url": f"{slow}&faults={faults.path}", "exists_timeout_s": 5}
    writer.ask("open", options=options)
    writer.ask("store", prompt=1, tokens=TOKENS, waits=False)
    writer.ask("close")
    assert len(stored_files(tmp_path)) == 2
    reader.ask("open", options={"url": file_store(tmp_path), "exists_timeout_s": 5})
    assert reader.ask("load", prompt=1, tokens=TOKENS)["equal"]
    reader.ask("close")


def test_what_the_backlog_has_no_room_for_is_not_stored(opened, tmp_path):
    faults = FaultFile(tmp_path / "faults")
    faults.write(Fault(operation="write", delay_s=1.0))
    slow = f"plugin://vllm_hicache.testing/FaultyBackend?inner={file_store(tmp_path)}"
    writer, _ = opened(f"{slow}&faults={faults.path}", write_backlog=CHUNK_BYTES)
    assert writer.ask("store", prompt=1, tokens=4 * 256) == {"stored": 1}
    assert writer.ask("status")["chunks_over_backlog"] == 3


def test_a_wrong_option_leaves_the_engine_without_the_store(opened, tmp_path):
    _, reader = opened(file_store(tmp_path), capasity="1GiB")
    assert reader.ask("status")["backends"] == ["LocalCPUBackend"]
