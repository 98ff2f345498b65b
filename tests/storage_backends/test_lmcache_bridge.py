"""LMCache 0.5.6's own storage, in its own environment, on our stores: nothing here is imitated."""

import json
import os
import subprocess
from pathlib import Path

import lmcache_process
import pytest
import redis_under_test

pytestmark = [pytest.mark.services, pytest.mark.full, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
CHUNK_BYTES = 2 * 4 * 256 * 256 * 2


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Two processes of LMCache, a writer and a reader."""
    log = tmp_path_factory.mktemp("lmcache") / "log"
    python = lmcache_process.interpreter()
    pair = [lmcache_process.Lmcache(python, "lmcache_server_session.py", log) for _ in range(2)]
    yield pair
    for process in pair:
        process.end()


@pytest.fixture
def opened(processes):
    """Opens the writer and the reader on a store, each with its options."""

    def open_both(url, writer=None, reader=None, **parameters):
        for process, own in zip(processes, (writer or {}, reader or {}), strict=True):
            answer = process.ask("open", adapter=adapter(url, **parameters), **own)
            assert answer == {}
        return processes

    yield open_both
    for process in processes:
        process.ask("close")


def adapter(url, more=None, **parameters):
    return json.dumps(
        {
            **(more or {}),
            "type": "plugin",
            "module_path": "vllm_hicache.connectors.lmcache_l2",
            "class_name": "HiCacheL2Adapter",
            "adapter_params": {"url": url, "exists_timeout_s": 5, **parameters},
        }
    )


def file_store(folder):
    return f"file://{folder}/store"


def stored_files(folder):
    return sorted(path for path in folder.glob("store/*/*") if not path.name.startswith("."))


def _assert_carries(writer, reader, chunks=(1, 2, 3)):
    assert writer.ask("store", *chunks) == {"stored": len(chunks), "existing": 0, "failed": 0}
    answer = reader.ask("load", *chunks, 99)
    assert answer["hits"] == list(chunks)
    assert answer["from_store"] == len(chunks)
    assert answer["equal"]
    status = reader.ask("status")
    assert status["chunks_loaded"] == len(chunks)
    assert status["bytes_read"] == len(chunks) * (CHUNK_BYTES + 4096)


def test_another_process_of_lmcache_reads_the_same_bytes_from_files(opened, tmp_path):
    writer, reader = opened(file_store(tmp_path))
    _assert_carries(writer, reader)
    assert len(stored_files(tmp_path)) == 3
    assert all("_lmc1-" in path.name for path in stored_files(tmp_path))


def test_another_process_of_lmcache_reads_the_same_bytes_from_redis(opened, tmp_path):
    with redis_under_test.running(tmp_path) as server:
        writer, reader = opened(server.url)
        _assert_carries(writer, reader)
        assert server.run("DBSIZE") == 3


def test_another_process_of_lmcache_reads_the_same_bytes_from_s3(
    opened, tmp_path, seaweedfs_server
):
    writer, reader = opened(seaweedfs_server.url(tmp_path))
    _assert_carries(writer, reader)


def test_what_is_stored_is_not_stored_again(opened, tmp_path):
    writer, reader = opened(file_store(tmp_path))
    assert writer.ask("store", 1, 2)["stored"] == 2
    assert reader.ask("store", 1, 2, 3) == {"stored": 1, "existing": 2, "failed": 0}


def test_a_corrupt_chunk_is_a_miss_and_is_removed(opened, tmp_path):
    writer, reader = opened(file_store(tmp_path))
    writer.ask("store", 1)
    (path,) = stored_files(tmp_path)
    content = bytearray(path.read_bytes())
    content[100_000] ^= 1
    path.write_bytes(content)
    assert reader.ask("load", 1)["hits"] == []
    assert stored_files(tmp_path) == []
    assert reader.ask("status")["chunks_corrupt"] == 1
    assert reader.ask("store", 1)["stored"] == 1
    reader.ask("clear")
    assert reader.ask("load", 1)["equal"]


def test_a_chunk_in_the_place_of_another_is_a_miss(opened, tmp_path):
    writer, reader = opened(file_store(tmp_path))
    writer.ask("store", 1)
    (one,) = stored_files(tmp_path)
    writer.ask("store", 2)
    (two,) = set(stored_files(tmp_path)) - {one}
    two.write_bytes(one.read_bytes())
    assert reader.ask("load", 2)["hits"] == []


def test_chunks_of_another_type_shape_model_or_cache_are_not_taken(opened, tmp_path):
    different = ({"dtype": "float16"}, {"tokens": 128}, {"model": "org/other"})
    for reader_options in different:
        writer, reader = opened(file_store(tmp_path), reader=reader_options)
        writer.ask("store", 1)
        assert reader.ask("load", 1)["hits"] == []
        assert reader.ask("status")["chunks_corrupt"] == 0
        for process in (writer, reader):
            process.ask("close")
    writer, reader = opened(file_store(tmp_path), cache_id="other weights")
    assert reader.ask("load", 1)["hits"] == []


def test_a_killed_server_is_a_miss_and_comes_back(opened, tmp_path):
    with redis_under_test.running(tmp_path) as server:
        writer, reader = opened(server.url, operation_timeout_s=2, exists_timeout_s=2)
        writer.ask("store", 1)
        server.kill()
        gone = reader.ask("load", 1)
        assert gone["hits"] == []
        assert gone["seconds"] < 10
        assert writer.ask("store", 2) == {"stored": 0, "existing": 0, "failed": 1}
        server.start()
        assert writer.ask("store", 3)["stored"] == 1
        assert reader.ask("load", 3)["equal"]


def test_a_frozen_server_is_a_miss_within_the_deadline(opened, tmp_path):
    with redis_under_test.running(tmp_path) as server:
        writer, reader = opened(server.url, operation_timeout_s=2, exists_timeout_s=1)
        writer.ask("store", 1)
        with server.frozen():
            frozen = reader.ask("load", 1)
        assert frozen["hits"] == []
        assert frozen["seconds"] < 1 + 5  # the deadline, and a machine under load


def test_a_server_that_is_away_at_the_start_is_used_once_it_is_there(opened, tmp_path):
    server = redis_under_test.RedisProcess(tmp_path)
    writer, reader = opened(server.url, connect_timeout_s=1)
    try:
        assert reader.ask("load", 1)["hits"] == []
        assert not reader.ask("status")["is_healthy"]
        server.start()
        for process in (writer, reader):
            process.ask("wait_until_healthy")
        _assert_carries(writer, reader)
    finally:
        server.kill()


def test_chunks_that_lmcache_compresses_are_found_when_their_layout_is_named(opened, tmp_path):
    compressed = {"more": {"serde": {"type": "fp8"}}}
    writer, reader = opened(file_store(tmp_path), layout="bf16 as fp8", **compressed)
    writer.ask("store", 1)
    (path,) = stored_files(tmp_path)
    assert path.stat().st_size < CHUNK_BYTES
    assert reader.ask("load", 1)["from_store"] == 1


def test_a_deleted_chunk_is_gone(opened, tmp_path):
    writer, reader = opened(file_store(tmp_path))
    writer.ask("store", 1, 2)
    reader.ask("load", 1)
    reader.ask("delete", 1)
    assert len(stored_files(tmp_path)) == 1


def test_a_wrong_option_stops_the_start_and_says_what_is_allowed(processes, tmp_path):
    answer = processes[0].ask("open", adapter=adapter(file_store(tmp_path), capasity="1GiB"))
    assert "capasity" in answer["refused"]


def test_the_example_does_what_it_says(tmp_path):
    done = subprocess.run(
        [lmcache_process.interpreter(), "-P", ROOT / "examples" / "lmcache_bridge.py"],
        env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    said = [line for line in done.stdout.splitlines() if "LMCache" not in line]
    text = (ROOT / "docs" / "examples.md").read_text()
    shown = text.partition("## `examples/lmcache_bridge.py`")[2].partition("```text\n")[2]
    assert said == shown.partition("```")[0].splitlines()
