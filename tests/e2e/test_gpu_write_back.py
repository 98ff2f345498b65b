"""On one GPU: blocks that are copied while vLLM reuses them never become wrong pages."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_in_process import PAGE, difference, prompt_of, running

pytestmark = [pytest.mark.e2e, pytest.mark.gpu]

NUM_PROMPTS, ROUNDS = 24, 4
NUM_TOKENS, KEPT = 5 * PAGE + 20, 5 * PAGE
KV_TOLERANCE = 0.1
"""bfloat16 of numbers around 1; another page's differ by about 1."""
OPTIONS = {
    "dtype": "bfloat16",
    "block_size": 16,
    "num_gpu_blocks_override": 110,  # five prompts
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
}


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "graphs"])
def test_write_back_keeps_right_pages_while_all_blocks_are_reused_again_and_again(
    tiny_llama: Callable[..., Path], is_eager: bool
) -> None:
    extra = {
        "write_policy": "write_back",
        "host_memory": "64MiB",
        "eviction": "lru",
        "admission": "always",
    }
    prompts = [prompt_of(f"write back {i}", NUM_TOKENS) for i in range(NUM_PROMPTS)]
    dice = random.Random(7)
    with running(tiny_llama(), extra=extra, enforce_eager=is_eager, **OPTIONS) as engine:
        engine.ask(prompts)
        before = engine.counters()
        for _ in range(ROUNDS):
            dice.shuffle(prompts)
            engine.ask(prompts)
        engine.settle()
        counted = difference(engine.counters(), before)
        assert counted["served_tokens/host"] > ROUNDS * NUM_PROMPTS * KEPT / 4
        for prompt in prompts:
            engine.ask([prompt], max_tokens=1)
            engine.assert_kv_is_right(prompt, KEPT, KV_TOLERANCE)
        engine.assert_idle_and_clean()
