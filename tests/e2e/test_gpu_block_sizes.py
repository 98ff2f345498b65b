"""On one GPU: engines with blocks of 16 and 64 tokens read each other's files."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_in_process import Engine, assert_same, difference, prompt_of, running

pytestmark = [pytest.mark.e2e, pytest.mark.gpu]

SMALL, LARGE = 16, 64
NUM_TOKENS, HIT = 350, 320
NUMBER_BYTES = 2  # bfloat16
PAGE_TOKEN_BYTES = 4 * 2 * 2 * 64 * NUMBER_BYTES  # layers, heads, K and V, head size
HEADER_BYTES = 4096
OBJECTS_PER_PAGE = 2
PAGES = HIT // 64
COLD_TOLERANCE = 0.1
"""bfloat16: a cold prompt is computed in other chunks."""


def _restored(engine: Engine, prompt: list[int]) -> None:
    """The prompt comes from files, and answers exactly as when it is on the device."""
    before = engine.counters()
    restored = engine.ask([prompt])
    engine.settle()
    num_bytes = HIT * PAGE_TOKEN_BYTES + PAGES * OBJECTS_PER_PAGE * HEADER_BYTES
    engine.wait_for("bytes_read", before["bytes_read"] + num_bytes)
    counted = difference(engine.counters(), before)
    assert [answer.cached for answer in restored] == [HIT]
    assert counted["served_tokens/storage"] == HIT
    assert counted["bytes_read"] == num_bytes
    assert_same(restored, engine.ask([prompt]))


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "graphs"])
def test_block_sizes_16_and_64_read_each_others_files(
    tiny_llama: Callable[..., Path], tmp_path: Path, is_eager: bool
) -> None:
    prompts = {size: prompt_of(f"written by {size}", NUM_TOKENS) for size in (SMALL, LARGE)}
    options = {"dtype": "bfloat16", "enforce_eager": is_eager}
    cold = {}
    for writer, reader in itertools.pairwise((None, SMALL, LARGE, SMALL)):
        with running(tiny_llama(), tmp_path / "store", block_size=reader, **options) as engine:
            if writer is not None:
                _restored(engine, prompts[writer])
                assert_same(engine.ask([prompts[writer]]), cold[writer], COLD_TOLERANCE)
            if reader not in cold:
                cold[reader] = engine.ask([prompts[reader]])
                assert [answer.cached for answer in cold[reader]] == [0]
            engine.assert_idle_and_clean()
