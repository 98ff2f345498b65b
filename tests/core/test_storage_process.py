"""Real storage processes behind real channels, over a real memfd and a folder with faults."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_hicache import storage_messages as messages
from vllm_hicache.errors import InvariantBroken
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.storage_address import StorageAddress
from vllm_hicache.storage_channel import ChannelDown, ChannelUp, StorageChannels
from vllm_hicache.storage_messages import (
    ExistsResult,
    FetchProgress,
    FetchReleased,
    FetchSettled,
    PersistDone,
    Stats,
)
from vllm_hicache.storage_process_config import Section
from vllm_hicache.testing import Fault

pytestmark = pytest.mark.services

PAGE_BYTES = 8096

# Birth ------------------------------------------------------------------------------------------


def test_a_process_answers_half_a_second_after_its_birth(new_engine):
    engine = new_engine()
    started = time.monotonic()
    engine.start()
    elapsed = time.monotonic() - started
    engine.close()
    assert elapsed < 0.5 * slowness()


def slowness() -> float:
    """How much slower than an idle machine starting Python is now (others may share it)."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-I", "-c", "import asyncio"], check=True)
    return max(1.0, (time.monotonic() - started) / 0.08)


def test_neither_torch_nor_vllm_nor_numpy_is_loaded(engine):
    engine.persisted(1, range(2))
    engine.fetched(2, range(2))
    mapped = Path(f"/proc/{engine.process.pid}/maps").read_text()
    for library in ("libtorch", "/vllm/", "/numpy/"):
        assert library not in mapped


def test_its_modules_import_neither_torch_nor_vllm():
    names = "vllm_hicache.storage_process", "vllm_hicache.storage_backends.registry"
    code = f"import sys, {', '.join(names)}; print({{'torch', 'vllm', 'numpy'}} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True)
    assert out.stdout.strip() == b"set()"


def test_it_has_its_own_session_and_no_standard_input(engine):
    pid = engine.process.pid
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/fd/0") == os.readlink(f"/proc/{pid}/fd/1") == "/dev/null"


def test_it_maps_the_pool_before_it_is_asked_for_anything(engine, wait_until):
    """Else the first fetch into a slot takes a fault for each memory page: twice as long."""
    wait_until(lambda: _shared_bytes(engine.process.pid) >= len(engine.pool))


def _shared_bytes(pid: int) -> int:
    """Of memfds, as far as they are mapped."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssShmem"))
    return int(line.split()[1]) * 1024


def test_a_configuration_that_no_restart_can_mend_is_refused_with_its_reason(tmp_path, new_engine):
    (tmp_path / "store").write_text("not a folder")
    engine = new_engine()
    engine.process.start()
    assert "must be a directory" in engine.process.refusal(60.0)
    assert engine.process.incarnation == 1


def test_a_valid_configuration_is_not_refused_and_costs_no_waiting(engine):
    started = time.monotonic()
    assert engine.process.refusal(60.0) == ""
    assert time.monotonic() - started < 5.0


def test_storage_that_is_away_is_no_reason_to_refuse(new_engine):
    engine = new_engine()
    engine.faults.write(Fault(operation="open", fails=True))
    engine.process.start()
    started = time.monotonic()
    assert engine.process.refusal(60.0) == ""
    assert time.monotonic() - started < 5.0


def test_a_refusal_after_a_first_acceptance_is_tried_again(tmp_path, engine, wait_until, caplog):
    store = tmp_path / "store"
    store.rename(tmp_path / "elsewhere")
    store.write_text("not a folder")
    os.kill(engine.process.pid, signal.SIGKILL)
    wait_until(lambda: "must be a directory" in caplog.text)
    store.unlink()
    (tmp_path / "elsewhere").rename(store)
    engine.wait_for(ChannelDown())
    engine.wait_for(ChannelUp)
    assert engine.process.refusal(60.0) == ""


def test_a_pool_that_is_too_small_is_refused(new_engine):
    engine = new_engine()
    os.truncate(engine.pool_fd, 8192)
    engine.process.start()
    assert "must have 524288 bytes or more, got 8192" in engine.process.refusal(60.0)


def test_starting_twice_is_refused(engine):
    with pytest.raises(InvariantBroken):
        engine.process.start()


def test_stopping_before_the_start_closes_what_it_holds(new_engine):
    engine = new_engine()
    num_open = len(os.listdir("/proc/self/fd"))
    engine.process.stop()
    engine.process.stop()
    assert len(os.listdir("/proc/self/fd")) == num_open - 1


# Work -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_pages_go_to_storage_and_come_back_into_other_slots(make_engine, host):
    engine = make_engine(host=host)
    done = PersistDone(1, 20, 0, 0, "complete", 20 * PAGE_BYTES)
    assert engine.persisted(1, range(20)) == done
    engine.exists(2, range(25))
    assert engine.wait_for(ExistsResult) == ExistsResult(2, 20, True)
    assert engine.fetched(3, range(25)) == FetchSettled(3, 20, "missing")
    assert [engine.page(32 + i) for i in range(20)] == [engine.page(i) for i in range(20)]


REGION = 64 * 4096
FULL, WINDOW, DRAFT = (
    Section(number * REGION, 4096, (shard,), (shard,), **options)
    for number, (pool, options) in enumerate(
        {"": {}, "0000000a": {"bit": 0}, "0000000b": {"bit": 1, "may_be_zero": True}}.items()
    )
    for shard in [Shard(LayerSpan(0, 2), 0, 0, 3000 + number, pool)]
)


def test_parts_of_pages_go_to_storage_and_come_back_into_their_regions(make_engine, wait_until):
    engine = make_engine(sections=(FULL, WINDOW, DRAFT), all_parts=7)
    stored = [3, 1, 2, 0, 7]
    done = engine.persisted(1, range(5), parts=stored)
    assert done == PersistDone(1, 5, 0, 0, "complete", 5 * 3000 + 3 * 3001 + 3 * 3002)
    names = sorted(path.name[64:] for path in (engine.folder / "store").rglob("0*_hc1-*"))
    ending = "_hc1-0123456789abcdef_L0-2_H0"
    pools = [""] * 5 + ["_P0000000a"] * 3 + ["_P0000000b"] * 3
    assert names == [ending + pool for pool in pools]
    engine.exists(2, range(9))
    found = bytes([7, 5, 6, 4, 7])  # nothing of the third is on this worker
    assert engine.wait_for(ExistsResult) == ExistsResult(2, 5, True, "", found)
    assert engine.fetched(3, range(5), parts=[3] * 5) == FetchSettled(3, 1, "missing")
    before = bytes(engine.pool)
    asked = [2, 1, 2, 4, 1]
    assert engine.fetched(4, range(5), parts=asked) == FetchSettled(4, 5, "complete")
    for page, parts in enumerate(asked):
        for one in (FULL, WINDOW, DRAFT):
            here, there = (one.base + slot * 4096 for slot in (32 + page, page))
            length = one.shards[0].length
            left = bytes(length) if one.may_be_zero else before[here : here + length]
            expected = before[there : there + length] if one.is_in(parts) else left
            assert engine.pool[here : here + length] == expected
    wait_until(lambda: engine.wait_for(Stats).counters["zeroed_pages"] == 3)


def test_parts_that_no_pool_has_close_the_channel_and_touch_nothing(engine):
    engine.persisted(1, range(2))
    before = bytes(engine.pool)
    engine.fetch(2, range(2), parts=[0, 1])
    engine.wait_for(ChannelDown())
    engine.wait_for(ChannelUp(1))
    assert engine.pool[:] == before
    assert engine.fetched(3, range(2)) == FetchSettled(3, 2, "complete")


def test_statistics_come_by_themselves_and_add_up(engine, wait_until):
    engine.persisted(1, range(4))
    engine.fetched(2, range(4))
    wait_until(lambda: engine.wait_for(Stats).counters["objects_read"] == 8)
    assert engine.persisted(3, range(5)).num_stored == 1
    counters = {}
    while counters.get("objects_written") != 10:
        counters = engine.wait_for(Stats).counters
    assert counters["breaker_open"] == counters["write_backlog_bytes"] == 0
    assert counters["corrupt_objects"] == 0


def test_fifty_fetches_pass_one_that_hangs_for_ever(engine):
    engine.persisted(1, range(20))
    engine.faults.write(Fault(operation="read", name=engine.name_of(2), hangs=True))
    engine.fetch(2, range(20), deadline_s=0.3)
    engine.wait_for(FetchSettled(2, 2, "deadline"))
    started = time.monotonic()
    for op in range(3, 53):
        assert engine.fetched(op, range(3, 11)) == FetchSettled(op, 8, "complete")
    assert time.monotonic() - started < 5.0
    assert not any(isinstance(event, FetchReleased) for event in engine.seen)
    engine.faults.write()
    engine.wait_for(FetchReleased(2))


def test_an_unavailable_storage_is_opened_later(new_engine):
    engine = new_engine(connect_timeout_s=0.05, breaker_backoff_s=0.02)
    engine.faults.write(Fault(operation="open", fails=True))
    engine.start()
    engine.fetch(1, range(1))
    assert engine.wait_for(FetchSettled) == FetchSettled(1, 0, "unavailable")
    engine.faults.write()
    op = 2
    while engine.persisted(op, range(1)).num_dropped:
        op += 1
    assert engine.fetched(op + 1, range(1)).reason == "complete"
    engine.close()


def test_a_storage_that_stays_away_is_told_once_a_minute(new_engine, capfd):
    engine = new_engine(breaker_backoff_s=0.02, breaker_max_backoff_s=0.04, connect_timeout_s=0.05)
    engine.faults.write(Fault(operation="open", fails=True))
    engine.start()
    time.sleep(0.5)  # a dozen of tries
    engine.close()
    assert 1 <= capfd.readouterr().err.count("Storage cannot be opened") <= 2


def test_drain_is_answered_after_the_persists(engine):
    engine.faults.write(Fault(operation="write", delay_s=0.1))
    engine.persist(1, range(8))
    engine.send(messages.Drain(5.0))
    engine.wait_for(messages.Drained())
    assert PersistDone(1, 8, 0, 0, "complete", 8 * PAGE_BYTES) in engine.seen


# Connections ------------------------------------------------------------------------------------


def test_a_scheduler_that_returns_finds_the_same_process_with_quiet_buffers(engine):
    engine.persisted(1, range(8))
    engine.faults.write(Fault(operation="read", name=engine.name_of(5), hangs=True))
    engine.fetch(2, range(8))
    engine.wait_for(FetchProgress)
    engine.channels.close()
    engine.channels = StorageChannels([engine.address])
    time.sleep(0.2)
    assert engine.channels.poll() == []
    engine.faults.write()
    engine.wait_for(ChannelUp(1))
    assert engine.fetched(2, range(8)).reason == "complete"


def test_persists_go_on_while_no_scheduler_is_connected(engine, wait_until):
    engine.faults.write(Fault(operation="write", delay_s=0.05))
    engine.persist(1, range(20))
    engine.channels.close()
    wait_until(lambda: engine.num_objects() == 40)
    engine.connect()


def test_a_newcomer_with_the_token_replaces_a_silent_scheduler(engine, wait_until):
    second = StorageChannels([engine.address])
    wait_until(lambda: (0, ChannelUp(1)) in second.poll())
    engine.wait_for(ChannelDown())
    second.close()


def _talk(address: StorageAddress, data: bytes) -> bytes:
    with contextlib.closing(address.open_socket()) as stranger:
        stranger.settimeout(5)
        stranger.connect(address.sockaddr)
        stranger.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            return stranger.recv(100)
    return b""


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_who_does_not_know_the_token_is_turned_away_and_disturbs_nobody(make_engine, host):
    engine = make_engine(host=host)
    for data in (
        messages.encode_frame(messages.Attach("wrong")),
        messages.encode_frame(messages.Cancel(1)),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ):
        assert _talk(StorageAddress.parse(engine.address), data) == b""
    assert engine.persisted(1, range(2)).num_stored == 2
    assert ChannelDown() not in engine.seen


def test_a_protocol_error_closes_the_channel_and_the_next_one_works(engine):
    engine.fetch(1, range(33))  # the last slot would be 64 of 64
    engine.wait_for(ChannelDown())
    engine.wait_for(ChannelUp(1))
    assert engine.persisted(2, range(2)).num_stored == 2
