"""Blocks of 16 and of 64 tokens read each other's files on one GPU, with bfloat16 weights.

On a GPU, other block sizes may compute with other kernels: device hits are compared exactly within
an engine, cold answers across engines within what bfloat16 allows.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from engine_in_process import (
    HEADER_BYTES,
    PAGE,
    Answer,
    Engine,
    assert_same,
    device_hit,
    difference,
    prompt_of,
    restored_hit,
    running,
)

pytestmark = [pytest.mark.e2e, pytest.mark.gpu, pytest.mark.timeout(900)]

LENGTHS = (PAGE + 1, 330, 1025)
"""Each has a device hit as long as a restored one, with blocks of 16 and of 64 tokens."""
COLD_TOLERANCE = 0.05
"""bfloat16 has 8 bits: another order of sums moves a log-probability by about 0.01."""
PAGE_BYTES = PAGE * 4 * 2 * 2 * 64 * 2  # 4 layers, 2 heads, K and V of 64 numbers of 2 bytes
SHARDS_PER_PAGE = 2


def prompts_of(writer: int) -> list[list[int]]:
    return [prompt_of(f"written by {writer}, {n}", n) for n in LENGTHS]


def _assert_restored_from_files(engine: Engine, writer: int, cold: Sequence[Answer]) -> None:
    before, seen = engine.counters(), engine.published()
    restored = engine.ask_each(prompts_of(writer))
    engine.settle()
    pages = sum(n // PAGE for n in LENGTHS)
    num_bytes = pages * (PAGE_BYTES + SHARDS_PER_PAGE * HEADER_BYTES)
    engine.wait_for("bytes_read", before["bytes_read"] + num_bytes)
    counted = difference(engine.counters(), before)
    shown = difference(engine.published(), seen)
    expected = [restored_hit(n) for n in LENGTHS]
    assert [answer.cached for answer in restored] == expected
    assert counted["served_tokens/storage"] == sum(expected)
    assert shown["vllm:prompt_tokens_cached_by_source{source=disk}"] == sum(expected)
    assert (counted["objects_read"], counted["bytes_read"]) == (pages * SHARDS_PER_PAGE, num_bytes)
    assert_same(restored, engine.ask_each(prompts_of(writer)))  # now device hits
    assert_same(restored, cold, COLD_TOLERANCE)


def test_blocks_of_16_and_64_tokens_read_each_others_files(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    for block in (16, 64):
        assert [device_hit(n, block) for n in LENGTHS] == [restored_hit(n) for n in LENGTHS]
    cold: dict[int, list[Answer]] = {}
    for writer, reader in ((None, 16), (16, 64), (64, 16)):
        with running(
            tiny_llama(), tmp_path / "store", block_size=reader, dtype="bfloat16"
        ) as engine:
            if writer is not None:
                _assert_restored_from_files(engine, writer, cold[writer])
            if reader not in cold:
                cold[reader] = engine.ask_each(prompts_of(reader))
                assert [answer.cached for answer in cold[reader]] == [0] * len(LENGTHS)
            engine.assert_idle_and_clean()
