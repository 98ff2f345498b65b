"""A real engine serves while its host pool gets ready, ends meanwhile, and stays with less."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_in_process import PAGE, Engine, assert_same, difference, prompt_of, running

from vllm_hicache.host_pool import HostPool
from vllm_hicache.layout import PoolPiece

pytestmark = pytest.mark.e2e
FIRST_SLOTS = 16
NUM_PAGES = 10
LENGTH = NUM_PAGES * PAGE + 1


class Gate:
    """Pieces behind the first wait until it is opened; those from slot ``refused_from`` on are
    refused."""

    def __init__(self, refused_from: int) -> None:
        self._refused_from = refused_from
        self._is_open = threading.Event()
        self.num_begun = 0
        self._make_ready = HostPool.make_ready

    def open(self) -> None:
        self._is_open.set()

    def make_ready(self, pool: HostPool, piece: PoolPiece) -> str:
        self.num_begun += 1
        if piece.first:
            assert self._is_open.wait(60)
        if piece.first >= self._refused_from:
            return "a test refuses"
        return self._make_ready(pool, piece)


@pytest.fixture
def make_gate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gate]:
    def make(refused_from: int = 1 << 30) -> Gate:
        gate = Gate(refused_from)
        monkeypatch.setattr(HostPool, "make_ready", lambda *given: gate.make_ready(*given))
        return gate

    # A page of the tiny model is 256 KiB.
    monkeypatch.setattr("vllm_hicache.layout.REGISTRATION_BYTES", FIRST_SLOTS * 256 << 10)
    return make


def _grow(engine: Engine) -> None:
    deadline = time.monotonic() + 60
    while not engine.side.settle_slots():
        assert time.monotonic() < deadline, "the pool does not get ready"
        time.sleep(0.01)


def test_an_engine_serves_while_its_pool_grows(tiny_llama: Callable[..., Path], make_gate) -> None:
    gate = make_gate()
    with running(tiny_llama()) as engine:
        try:
            host, before = engine.planner.host, engine.counters()
            num_slots = engine.planner.options.num_host_slots
            assert (host.slots.num_ready, host.is_growing) == (FIRST_SLOTS, True)
            prompts = [prompt_of(name, LENGTH) for name in ("early", "late")]
            cold = engine.ask_each(prompts)
            engine.assert_idle_and_clean()
            # The second prompt found six slots, and nothing left for it.
            assert len(host.index) == FIRST_SLOTS
            counted = difference(engine.counters(), before)
            assert counted["save_skipped_tokens/host_full"] == (20 - FIRST_SLOTS) * PAGE
            assert counted["evicted_tokens"] == 0
        finally:
            gate.open()
        _grow(engine)
        assert (host.slots.num_ready, host.is_growing) == (num_slots, False)
        hits = engine.ask_each(prompts)  # on the device: what host lacks is saved now
        engine.assert_idle_and_clean()
        assert len(host.index) == 20
        assert engine.published()["vllm:hicache_host_slots_ready"] == num_slots
        engine.reset_device()
        restored = engine.ask_each(prompts)
        engine.assert_idle_and_clean()
        assert [answer.cached for answer in restored] == [NUM_PAGES * PAGE] * 2
        assert_same(restored, hits)
        assert_same(restored, cold, within=1e-4)


def test_an_engine_that_ends_while_its_pool_grows_ends_at_once(
    tiny_llama: Callable[..., Path], make_gate
) -> None:
    gate = make_gate()
    with running(tiny_llama()) as engine:
        growth, num_pieces = engine.worker_side._growth, len(engine.worker_side.pool.pieces)
        threading.Timer(0.2, gate.open).start()
        started = time.monotonic()
    assert time.monotonic() - started < 20
    assert growth.join(0)
    assert gate.num_begun < num_pieces


def test_an_engine_goes_on_with_the_memory_that_it_gets(
    tiny_llama: Callable[..., Path], make_gate
) -> None:
    make_gate(refused_from=2 * FIRST_SLOTS).open()
    with running(tiny_llama()) as engine:
        _grow(engine)
        assert engine.planner.host.slots.num_ready == 2 * FIRST_SLOTS
        prompts = [prompt_of(f"short {i}", LENGTH) for i in range(5)]
        engine.ask_each(prompts)
        engine.assert_idle_and_clean()
        assert len(engine.planner.host.index) == 2 * FIRST_SLOTS
        engine.reset_device()
        assert engine.ask([prompts[-1]])[0].cached == NUM_PAGES * PAGE
        assert engine.published()["vllm:hicache_host_pools_short"] == 1
        assert engine.worker_side._growth.refusal == "a test refuses"
