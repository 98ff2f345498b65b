"""A server whose storage process is killed, and that is told to end: what it keeps and leaves."""

import os
import signal
import time
from itertools import count
from pathlib import Path

import pytest
from client_load import load_on
from live_server import (
    PAGE,
    LiveServer,
    faulty_url,
    prompt_of,
    serving,
    stored_files,
    temporary_files,
    wait_until,
)

from vllm_hicache.testing import Fault

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]

EXIT_LIMIT_S = 10.0
OBJECTS_PER_PAGE = 2
EXTRA = {"log_interval_s": 1, "fixed_weights": True}


def _assert_nothing_is_left(server: LiveServer, folder: Path) -> None:
    wait_until(lambda: not server.left_shared_memory())
    assert temporary_files(folder) == []


def _assert_killed_storage_returns(server: LiveServer, prompt, control) -> None:
    """SIGKILL to the storage process under load: served on, replaced, counted, hit again."""
    (first,) = server.storage_pids()
    with load_on(server) as outcomes:
        os.kill(first, signal.SIGKILL)
        num_before = len(outcomes)
        wait_until(lambda: server.storage_pids() not in ([], [first]))
        wait_until(lambda: len(outcomes) >= num_before + 6)
    assert [outcome.error for outcome in outcomes if outcome.error] == []
    num_written, seeds = server.count("objects_written_total"), count(100)

    def is_written_again() -> bool:
        server.complete(prompt_of(next(seeds), PAGE + 1))
        return server.count("objects_written_total") > num_written

    wait_until(is_written_again)
    assert server.count("storage_restarts_total") == 1
    assert server.reset("?reset_external=true")
    again = server.complete(prompt)
    assert again.cached_tokens == 4 * PAGE
    assert again.tokens == control.tokens
    assert server.count("served_tokens_total{tier=storage}") == 4 * PAGE
    assert "was killed: next one in" in server.log()


def test_killed_storage_returns_and_an_ended_engine_is_persisted_and_found_again(
    tiny_llama, tmp_path
):
    """Two lives of one server over one store: the second begins with what the first has saved."""
    url, faults = faulty_url(tmp_path)
    model = tiny_llama()
    old, new = prompt_of(1, 4 * PAGE + 1), prompt_of(2, 8 * PAGE + 1)
    with serving(model, tmp_path, {**EXTRA, "storage": url}) as server:
        control = server.complete(old)
        server.wait_until_stored(4 * OBJECTS_PER_PAGE)
        _assert_killed_storage_returns(server, old, control)
        # Each write takes long from here on: storage has work when the engine is gone.
        faults.write(Fault(operation="write", delay_s=0.3))
        num_before = len(stored_files(tmp_path))
        control = server.complete(new, max_tokens=32)
        assert server.terminate() < EXIT_LIMIT_S
    assert len(stored_files(tmp_path)) == num_before + 8 * OBJECTS_PER_PAGE
    _assert_nothing_is_left(server, tmp_path)

    faults.write()
    with serving(model, tmp_path, {**EXTRA, "storage": url}, log="second.log") as server:
        again = server.complete(new, max_tokens=32)
        assert again.cached_tokens == 8 * PAGE
        assert again.tokens == control.tokens
        assert server.count("served_tokens_total{tier=storage}") == 8 * PAGE
        faults.write(Fault(operation="write", hangs=True))
        with load_on(server, patience_s=4.0) as outcomes:
            started = time.monotonic()
            assert server.terminate() < EXIT_LIMIT_S
        assert time.monotonic() - started < EXIT_LIMIT_S
        assert any(outcome.error for outcome in outcomes)  # there was load until the end
    _assert_nothing_is_left(server, tmp_path)


@pytest.mark.full
def test_with_a_shutdown_timeout_even_the_last_step_is_persisted(tiny_llama, tmp_path):
    model, prompt = tiny_llama(), prompt_of(3, 16 * PAGE + 1)
    options = ["--shutdown-timeout", "6"]
    with serving(model, tmp_path, EXTRA, options=options) as server:
        control = server.complete(prompt, max_tokens=1)
        assert server.terminate() < EXIT_LIMIT_S
    assert len(stored_files(tmp_path)) == 16 * OBJECTS_PER_PAGE
    with serving(model, tmp_path, EXTRA, log="second.log") as server:
        again = server.complete(prompt, max_tokens=1)
    assert again.cached_tokens == 16 * PAGE
    assert again.tokens == control.tokens


@pytest.mark.full
def test_with_a_shutdown_timeout_and_hung_storage_a_server_ends_in_its_time(tiny_llama, tmp_path):
    url, faults = faulty_url(tmp_path)
    options = ["--shutdown-timeout", "6"]
    with serving(tiny_llama(), tmp_path, {**EXTRA, "storage": url}, options=options) as server:
        faults.write(Fault(operation="write", hangs=True))
        server.complete(prompt_of(4, 8 * PAGE + 1))
        assert server.terminate() < EXIT_LIMIT_S
    _assert_nothing_is_left(server, tmp_path)
