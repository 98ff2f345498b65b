"""A host pool gets ready piece by piece, in the background."""

import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from vllm_hicache.errors import ConfigError
from vllm_hicache.host_memory import MemoryLimit
from vllm_hicache.host_pool import HostPool
from vllm_hicache.pool_growth import PoolGrowth

MIB = 1 << 20
NUM_SLOTS = 16
"""Of 1 MiB, 4 in a piece."""
PLENTY = MemoryLimit("a test", 1 << 40)


class GatedPool(HostPool):
    """A real pool whose pieces, but for the first, wait until they are let through."""

    def __init__(self, *, refused: tuple[int, ...] = (), fails: bool = False) -> None:
        super().__init__(NUM_SLOTS, [MIB])
        self.refused, self.fails = refused, fails
        self.begun: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.permits = {piece.first: threading.Semaphore(0) for piece in self.pieces}
        self.permits[0].release()
        self.made: list[int] = []

    def make_ready(self, piece):
        self.begun.put(piece.first)
        assert self.permits[piece.first].acquire(timeout=20)
        if self.fails and piece.first:
            raise RuntimeError("told to fail")
        if piece.first in self.refused:
            return "told to refuse"
        said = super().make_ready(piece)
        self.made.append(piece.first)
        return said


class Rig:
    """A pool's growth, and what it has told."""

    def __init__(
        self,
        pool: HostPool,
        max_threads: int = 1,
        available: Callable[[], MemoryLimit] = lambda: PLENTY,
    ) -> None:
        self.pool = pool
        self.told: list[tuple[int, int]] = []
        self.growth = PoolGrowth(
            pool,
            lambda *slots: self.told.append(slots),
            name="worker 7",
            max_threads=max_threads,
            available=available,
        )

    def grow(self) -> None:
        self.growth.begin()
        self.growth.go_on()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr("vllm_hicache.layout.REGISTRATION_BYTES", 4 * MIB)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))


@pytest.fixture
def make_rig():
    rigs = []

    def make(pool=None, **options):
        rigs.append(Rig(pool or HostPool(NUM_SLOTS, [MIB]), **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.growth.stop()
        for permit in getattr(rig.pool, "permits", {}).values():
            permit.release(9)
        assert rig.growth.join(20)
        rig.pool.close()


def _messages(caplog, level):
    return [r.getMessage() for r in caplog.records if r.levelno == level]


def test_the_first_slots_are_ready_when_begin_returns_and_the_rest_follows(make_rig, caplog):
    caplog.set_level(logging.INFO)
    rig = make_rig(GatedPool())
    rig.growth.begin()
    assert (rig.growth.num_ready, rig.told) == (4, [(4, 0)])
    rig.growth.go_on()
    for permit in rig.pool.permits.values():
        permit.release()
    assert rig.growth.join(20)
    assert rig.told == [(4, 0), (8, 0), (12, 0), (16, 0)]
    first, *_, last = _messages(caplog, logging.INFO)
    assert first.startswith("worker 7: 0.00 of 0.02 GiB of host memory are ready; the rest follows")
    assert last.startswith("worker 7: all 0.02 GiB of host memory are ready after")


def test_a_pool_of_one_piece_is_ready_at_once_and_needs_no_thread(make_rig, caplog):
    caplog.set_level(logging.INFO)
    rig = make_rig(HostPool(3, [MIB]))
    before = threading.active_count()
    rig.grow()
    assert (rig.told, rig.growth.num_ready) == ([(3, 0)], 3)
    assert threading.active_count() == before
    assert caplog.records == []


def test_slots_are_ready_when_all_regions_have_them(make_rig):
    rig = make_rig(HostPool(10, [MIB, 2 * MIB]))
    rig.grow()
    assert rig.growth.join(20)
    assert [ready for ready, _ in rig.told] == [0, 2, 4, 4, 6, 8, 8, 10]


def test_a_piece_that_is_ready_early_counts_when_those_before_it_are(make_rig):
    rig = make_rig(GatedPool(), max_threads=3)
    rig.grow()
    assert {rig.pool.begun.get(timeout=20) for _ in range(4)} == {0, 4, 8, 12}
    for first in (12, 8):
        rig.pool.permits[first].release()
    _wait_for(lambda: len(rig.told) == 3)
    assert rig.told == [(4, 0)] * 3
    rig.pool.permits[4].release()
    assert rig.growth.join(20)
    assert rig.told[-1] == (16, 0)


def test_an_engine_that_ends_waits_only_for_the_piece_under_way(make_rig, caplog):
    caplog.set_level(logging.INFO)
    rig = make_rig(GatedPool())
    rig.grow()
    assert [rig.pool.begun.get(timeout=20) for _ in range(2)] == [0, 4]
    rig.growth.stop()
    assert not rig.growth.join(0.01)
    rig.pool.permits[4].release()
    assert rig.growth.join(20)
    assert rig.pool.made == [0, 4]
    assert rig.told == [(4, 0), (8, 0)]
    assert not any("all 0.02 GiB" in message for message in _messages(caplog, logging.INFO))


def test_a_refusal_of_the_first_piece_is_a_refusal_to_start(make_rig):
    rig = make_rig(GatedPool(refused=(0,)))
    with pytest.raises(ConfigError, match=r"16\.00 MiB cannot be had: told to refuse"):
        rig.growth.begin()


def test_a_later_refusal_ends_the_growth_and_is_said_once(make_rig, caplog):
    rig = make_rig(GatedPool(refused=(8,)))
    rig.grow()
    for permit in rig.pool.permits.values():
        permit.release()
    assert rig.growth.join(20)
    assert rig.told == [(4, 0), (8, 0), (8, 8)]
    assert rig.pool.made == [0, 4]
    assert rig.growth.refusal == "told to refuse"
    (error,) = _messages(caplog, logging.ERROR)
    assert error.startswith(
        "worker 7: host memory stays at 0.01 of 0.02 GiB, 8 of 16 slots: told to refuse. The engine"
    )
    assert "lower host_memory" in error


def test_pieces_under_way_before_one_that_is_refused_still_count(make_rig, caplog):
    rig = make_rig(GatedPool(refused=(8, 12)), max_threads=3)
    rig.grow()
    assert {rig.pool.begun.get(timeout=20) for _ in range(4)} == {0, 4, 8, 12}
    for first in (12, 8):
        rig.pool.permits[first].release()
        _wait_for(lambda first=first: rig.told[-1] == (4, NUM_SLOTS - first))
    assert _messages(caplog, logging.ERROR) == []
    rig.pool.permits[4].release()
    assert rig.growth.join(20)
    assert rig.told[-1] == (8, 8)
    assert len(_messages(caplog, logging.ERROR)) == 1


def test_memory_that_is_not_there_is_not_touched(make_rig, caplog):
    """A control group would end the process that touches it."""
    left = iter([16, 12, 3, 3, 3])
    rig = make_rig(available=lambda: MemoryLimit("memory.max", next(left) * MIB))
    rig.grow()
    assert rig.growth.join(20)
    assert rig.told[-1] == (8, 8)
    (error,) = _messages(caplog, logging.ERROR)
    assert "3.00 MiB of memory are left (memory.max), 4.00 MiB needed" in error


def test_a_thread_that_fails_ends_the_growth_and_nothing_else(make_rig, caplog):
    rig = make_rig(GatedPool(fails=True))
    rig.grow()
    rig.pool.permits[4].release()
    assert rig.growth.join(20)
    assert rig.told[-1] == (4, 12)
    failure, stays = _messages(caplog, logging.ERROR)
    assert "a thread that prepares host memory failed" in failure
    assert "RuntimeError('told to fail')" in stays


def test_progress_is_logged_with_every_tenth_of_the_pool_but_not_more_than_once_a_second(
    make_rig, caplog, monkeypatch
):
    caplog.set_level(logging.INFO)
    seconds = iter(range(10**6))
    monkeypatch.setattr("time.monotonic", lambda: next(seconds) * 0.6)
    rig = make_rig()
    rig.grow()
    rig.growth._threads[0].join()
    lines = [m for m in _messages(caplog, logging.INFO) if "GiB/s" in m]
    assert [line.partition("(")[2].partition(")")[0] for line in lines] == ["50 %", "100 %"]


def _wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(2000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("nothing happened")


RESIDENT = """
import resource
from vllm_hicache.host_pool import HostPool
from vllm_hicache.pool_growth import PoolGrowth

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) << 10

before = resident()
pool = HostPool(600, [1 << 20])
growth = PoolGrowth(pool, lambda *slots: None, name="worker 0")
growth.begin()
growth.go_on()
assert growth.join(300) and growth.num_ready == 600
print(resident() - before)
growth.stop()
pool.close()
"""


def test_a_process_takes_no_more_memory_than_was_asked_for():
    command = [sys.executable, "-P", "-c", RESIDENT]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=400)
    assert 0.99 <= int(run.stdout) / (600 * MIB) <= 1.05
