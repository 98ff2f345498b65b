"""Write policies, admission and pins on a real engine, and the answers they must not change."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_in_process import PAGE, Engine, assert_same, difference, prompt_of, running

pytestmark = pytest.mark.e2e
COLD_TOLERANCE = 1e-4
TOKEN_BYTES = 4096
"""Of the tiny model."""
HOST_PAGES = 40
NUM_BLOCKS = 41
"""Of 32 tokens; one of them is vLLM's null block."""
LENGTH = 4 * PAGE + 44


@contextmanager
def _engine(model: Path, **extra: object) -> Iterator[Engine]:
    given = {"host_memory": HOST_PAGES * PAGE * TOKEN_BYTES, **extra}
    small = {"num_gpu_blocks_override": NUM_BLOCKS, "max_model_len": 1024}
    with running(model, extra=given, **small) as engine:
        yield engine
        engine.assert_idle_and_clean()


def _saved(engine: Engine) -> int:
    engine.settle()
    return int(engine.counters()["saved_tokens"])


def test_write_back_saves_what_vllm_is_about_to_reuse_and_restores_it_right(
    tiny_llama: Callable[..., Path],
) -> None:
    with _engine(tiny_llama(), write_policy="write_back") as engine:
        prompts = [prompt_of(f"write back {i}", LENGTH) for i in range(8)]
        cold = engine.ask_each(prompts[:2])
        assert _saved(engine) == 0
        hit = engine.ask_each(prompts[:2])  # from the device, as ever
        assert _saved(engine) == 0
        assert [answer.cached for answer in hit] == [288, 288]
        engine.ask_each(prompts[2:])  # takes all blocks of the device, twice
        assert _saved(engine) > 2 * 4 * PAGE
        before = engine.counters()
        restored = engine.ask_each(prompts[:2])
        engine.settle()
        counted = difference(engine.counters(), before)
        assert [answer.cached for answer in restored] == [4 * PAGE, 4 * PAGE]
        assert counted["served_tokens/host"] == 2 * 4 * PAGE
        assert_same(restored, cold, COLD_TOLERANCE)
        for prompt in prompts[:2]:
            engine.assert_kv_is_right(prompt, 4 * PAGE)


def test_write_back_holds_no_device_block_and_forgets_all_at_a_reset(
    tiny_llama: Callable[..., Path],
) -> None:
    with _engine(tiny_llama(), write_policy="write_back") as engine:
        prompt = prompt_of("reset", LENGTH)
        engine.ask([prompt])
        assert len(engine.planner.write_back) == 4
        engine.reset_device()
        assert len(engine.planner.write_back) == 0
        assert [answer.cached for answer in engine.ask([prompt])] == [0]
        assert engine.counters()["save_skipped_tokens/reused"] == 4 * PAGE


def test_write_through_selective_saves_with_the_second_request(
    tiny_llama: Callable[..., Path],
) -> None:
    with _engine(tiny_llama(), write_policy="write_through_selective") as engine:
        prompt, other = prompt_of("selective", LENGTH), prompt_of("only once", LENGTH)
        cold = engine.ask([prompt])
        engine.ask([other])
        assert _saved(engine) == 0
        engine.ask([prompt])
        assert _saved(engine) == 4 * PAGE
        engine.reset_device()
        restored = engine.ask([prompt])
        assert [answer.cached for answer in restored] == [4 * PAGE]
        assert_same(restored, cold, COLD_TOLERANCE)
        assert engine.counters()["save_skipped_tokens/too_few_uses"] == 2 * 4 * PAGE


def test_a_scan_of_four_pools_leaves_the_hot_set_in_host_with_the_default_settings(
    tiny_llama: Callable[..., Path],
) -> None:
    with _engine(tiny_llama()) as engine:
        hot = [prompt_of(f"hot {i}", LENGTH) for i in range(7)]  # 28 of 40 pages
        cold = engine.ask_each(hot)
        engine.ask_each(hot)
        engine.ask_each([prompt_of(f"scan {i}", 8 * PAGE) for i in range(4 * HOST_PAGES // 8)])
        engine.settle()
        engine.reset_device()
        before = engine.counters()
        restored = engine.ask_each(hot)
        engine.settle()
        served = difference(engine.counters(), before)["served_tokens/host"]
        assert served >= 0.95 * len(hot) * 4 * PAGE
        assert_same(restored, cold, COLD_TOLERANCE)


def test_pinned_pages_stay_for_their_time_and_no_longer(tiny_llama: Callable[..., Path]) -> None:
    with _engine(tiny_llama(), eviction="lru", admission="always") as engine:
        pinned, plain = prompt_of("pinned", LENGTH), prompt_of("plain", LENGTH)
        hint = {"extra_args": {"kv_transfer_params": {"hicache": {"pin_s": 30}}}}
        engine.ask([pinned], **hint)
        engine.ask([plain])
        scan = [prompt_of(f"pin scan {i}", 8 * PAGE) for i in range(HOST_PAGES // 8 + 1)]
        engine.ask_each(scan)
        engine.settle()
        engine.reset_device()
        cached = [answer.cached for answer in engine.ask_each([plain, pinned])]
        assert cached == [0, 4 * PAGE]
        engine.planner.pins.expire(time.monotonic() + 31)
        engine.ask_each(
            [prompt_of(f"later scan {i}", 8 * PAGE) for i in range(HOST_PAGES // 8 + 1)]
        )
        engine.settle()
        engine.reset_device()
        assert [answer.cached for answer in engine.ask([pinned])] == [0]
