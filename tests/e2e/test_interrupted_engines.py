"""Preemption, failed synchronous loads, repeated answers of storage; an engine for each."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
from copy_spy import spying
from engine_in_process import PAGE, assert_same, difference, prompt_of, running

from vllm_hicache.plan import Direction
from vllm_hicache.storage_channel import ChannelDown, ChannelUp

pytestmark = pytest.mark.e2e
COLD_TOLERANCE = 1e-4


@pytest.mark.parametrize(
    ("sync_ms", "copies_are_slow", "prefix_caching"),
    [
        pytest.param(0, False, True, id="asynchronous"),
        pytest.param(10_000, True, False, id="synchronous and slow, without prefix caching"),
        pytest.param(
            *(0, True, False),
            id="asynchronous and slow, without prefix caching",
            marks=pytest.mark.full,
        ),
        pytest.param(10_000, False, True, id="synchronous", marks=pytest.mark.full),
        pytest.param(0, True, True, id="asynchronous and slow", marks=pytest.mark.full),
    ],
)
def test_preempted_requests_return_from_host_with_right_answers(
    tiny_llama: Callable[..., Path], sync_ms: int, copies_are_slow: bool, prefix_caching: bool
) -> None:
    prompts = [prompt_of(f"preempted {i}", PAGE + 24 + 9 * i) for i in range(6)]
    with (
        spying() as spy,
        running(
            tiny_llama(),
            extra={"sync_load_max_ms": sync_ms},
            max_model_len=320,
            num_gpu_blocks_override=13,
            enable_prefix_caching=prefix_caching,
            max_num_batched_tokens=256,
        ) as engine,
    ):
        salted = [{"prompt_token_ids": p, "cache_salt": "alone"} for p in prompts]
        alone = engine.ask_each(salted, max_tokens=100)
        engine.settle()
        if copies_are_slow:
            spy.delay_s.update(dict.fromkeys(Direction, 0.05))
        before, seen = engine.counters(), engine.published()["vllm:num_preemptions"]
        crowded = engine.ask(prompts, max_tokens=100)
        engine.settle()
        assert engine.published()["vllm:num_preemptions"] > seen
        counted = difference(engine.counters(), before)
        assert counted["served_tokens/host"] > 0
        assert_same(crowded, alone, 10 * COLD_TOLERANCE)
        engine.assert_idle_and_clean()
        engine.reset_device()
        restored = engine.ask_each(prompts, max_tokens=100)
        assert_same(restored, alone, 10 * COLD_TOLERANCE)
        engine.assert_idle_and_clean()


def test_a_late_save_keeps_what_a_finished_request_computed(
    tiny_llama: Callable[..., Path],
) -> None:
    prompts = [prompt_of(f"late save {i}", 2 * PAGE + 5) for i in range(5)]
    with (
        spying() as spy,
        running(tiny_llama(), max_model_len=320, num_gpu_blocks_override=24) as engine,
    ):
        spy.close(Direction.SAVE)
        # Each leaves four blocks to be saved; the fifth request needs more than the three that
        # were never used, and must not get those of the first.
        cold = engine.ask_each(prompts)
        assert engine.free_blocks == engine.first_free_blocks - 5 * 4
        spy.open()
        engine.assert_idle_and_clean()
        engine.reset_device()
        restored = engine.ask_each(prompts)
        assert [answer.cached for answer in restored] == [2 * PAGE] * 5
        assert_same(restored, cold, COLD_TOLERANCE)
        engine.assert_idle_and_clean()


def test_a_synchronous_load_that_fails_is_computed_again_and_no_garbage_is_kept(
    tiny_llama: Callable[..., Path],
) -> None:
    prompts = [prompt_of(f"failed sync load {i}", 4 * PAGE + 50) for i in range(3)]
    with (
        spying() as spy,
        running(
            tiny_llama(), extra={"sync_load_max_ms": 10_000}, max_num_batched_tokens=256
        ) as engine,
    ):
        cold = engine.ask_each(prompts, max_tokens=40)
        engine.settle()
        engine.reset_device()
        before = engine.counters()
        for prompt, right in zip(prompts, cold, strict=True):
            spy.num_to_fail[Direction.LOAD] = 1
            # A second request with the same prompt may take what the first is about to load.
            again = engine.ask([prompt, prompt], max_tokens=40)
            assert_same(again, [right] * 2, COLD_TOLERANCE)
        engine.settle()
        counted = difference(engine.counters(), before)
        assert counted["copy_failures"] == 3
        assert counted["loaded_bytes/sync"] >= 3 * 4 * engine.page_bytes
        # What vLLM keeps on the device and what we keep in host are both right.
        assert_same(engine.ask_each(prompts, max_tokens=40), cold, COLD_TOLERANCE)
        engine.settle()
        engine.reset_device()
        restored = engine.ask_each(prompts, max_tokens=40)
        assert_same(restored, cold, COLD_TOLERANCE)
        assert [answer.cached for answer in restored] == [4 * PAGE] * 3
        engine.assert_idle_and_clean()


def test_late_and_duplicate_answers_of_storage_change_nothing(
    tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt_of(f"late answers {i}", 2 * PAGE + 5) for i in range(10)]
    with running(tiny_llama(), tmp_path / "store", extra={"fixed_weights": True}) as engine:
        channels = engine.side._channels
        poll, history = channels.poll, deque([[]] * 20)

        def poll_twice_and_again_later() -> list:
            events = poll()
            history.append([e for e in events if not isinstance(e[1], ChannelUp | ChannelDown)])
            return [*events, *history[-1], *history.popleft()]

        monkeypatch.setattr(channels, "poll", poll_twice_and_again_later)
        cold = engine.ask(prompts)
        engine.settle()
        for _ in range(3):
            engine.reset_all()
            restored = engine.ask(prompts)
            engine.settle()
            assert [answer.cached for answer in restored] == [2 * PAGE] * 10
            assert_same(restored, cold, COLD_TOLERANCE)
        counters = engine.counters()
        assert counters["served_tokens/storage"] == 3 * 10 * 2 * PAGE
        assert counters["ignored_reports"] > 0
        engine.assert_idle_and_clean()
