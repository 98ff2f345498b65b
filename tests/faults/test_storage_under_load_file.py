"""Faults of files under a real server with eight clients: no wrong token, no wait, hits return."""

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest
from live_server import faulty_url, stored_files
from storage_episode import engine, suffer

from vllm_hicache.testing import Fault

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.full]

TMPFS = 'mount -t tmpfs -o size=64m none "$0" && exec "$@"'


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A folder, the URL of its storage, and what is wrong with it: at first it cannot be opened."""
    folder = tmp_path_factory.mktemp("store")
    url, faults = faulty_url(folder)
    faults.write(Fault(operation="open", fails=True))
    return folder, url, faults


@pytest.fixture(scope="module")
def server(control, store, tiny_llama):
    folder, url, _ = store
    storage = {"url": url, "exists_timeout_s": "200ms"}  # of two cores with other work
    with engine(tiny_llama(), folder, storage) as started:
        yield started.wait_until_healthy()


@pytest.fixture
def healthy(server, store):
    store[2].write()
    return server


@contextlib.contextmanager
def failing(faults, *present):
    faults.write(*present)
    yield
    faults.write()


def test_a_folder_that_is_away_at_the_start(control, server, store):
    away = failing(store[2], Fault(operation="open", fails=True))
    episode = suffer("file away at start", control, server, away, is_healthy=False)
    episode.check()
    assert "Storage cannot be opened" in server.log()
    assert episode.level("breaker_open") == 1


def test_a_mount_that_hangs_for_20_s(control, healthy, store):
    hang = failing(store[2], Fault(hangs=True))
    episode = suffer("file hangs 20 s", control, healthy, hang, hold_s=20.0)
    episode.check()
    assert episode.level("breaker_open") == 1
    assert episode.grew("fetch_ended_total{reason=deadline}") < 60
    assert episode.grew("fetch_ended_total{reason=unavailable}") > 100


def test_a_mount_with_50_ms_of_latency(control, healthy, store):
    slow = failing(store[2], Fault(delay_s=0.05))
    episode = suffer("file 50 ms of latency", control, healthy, slow)
    episode.check()


def test_a_killed_storage_process(control, healthy):
    @contextlib.contextmanager
    def killed():
        for pid in healthy.storage_pids():
            os.kill(pid, signal.SIGKILL)
        yield

    episode = suffer("storage process killed", control, healthy, killed())
    episode.check()
    assert episode.grew("storage_restarts_total") == 1


def test_files_that_are_deleted_between_query_and_read(control, healthy, store):
    folder, _, faults = store

    @contextlib.contextmanager
    def deleting():
        ended = threading.Event()

        def delete() -> None:
            while not ended.wait(0.02):
                for path in stored_files(folder):
                    path.unlink(missing_ok=True)

        thread = threading.Thread(target=delete)
        faults.write(Fault(operation="read", delay_s=0.03))  # later than the question by so much
        thread.start()
        yield
        ended.set()
        thread.join()
        faults.write()

    episode = suffer("file deleted before reads", control, healthy, deleting())
    episode.check()
    assert episode.grew("fetch_ended_total{reason=missing}") > 0
    assert episode.grew("corrupt_objects_total") == 0


def test_a_full_disk(control, tiny_llama, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    storage = {"url": f"file://{disk}/store", "min_free": "4MiB"}
    prefix = ["unshare", "-rm", "sh", "-ec", TMPFS, str(disk)]
    with engine(tiny_llama(), tmp_path, storage, prefix=prefix) as server:
        server.wait_until_healthy()
        seen = Path(f"/proc/{server.process.pid}/root{disk}")
        episode = suffer("full disk", control, server, filled(seen))
    episode.check()
    assert episode.grew("writes_refused_total") > 0
    assert episode.grew("persist_dropped_tokens_total{reason=full}") > 0


@contextlib.contextmanager
def filled(disk):
    """Somebody else removes all objects and takes every byte that gets free."""
    path = disk / "others"
    ended = threading.Event()

    def fill() -> None:
        for stored in stored_files(disk):
            stored.unlink(missing_ok=True)
        with path.open("wb", buffering=0) as filler:
            while not ended.wait(0.01):
                with contextlib.suppress(OSError):
                    while True:
                        filler.write(bytes(1 << 16))

    thread = threading.Thread(target=fill)
    thread.start()
    yield
    ended.set()
    thread.join()
    path.unlink()
