"""Faults of files under a real server with eight clients: no wrong token, no wait, hits return."""

import contextlib
import os
import signal
import threading

import pytest
from live_server import faulty_url, stored_files
from storage_episode import engine, suffer

from vllm_hicache.testing import Fault

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.vllm, pytest.mark.full]


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
