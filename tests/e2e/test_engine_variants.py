"""Engines that differ from the usual: no prefix caching, other block sizes, small pages."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_in_process import (
    HEADER_BYTES,
    PAGE,
    Answer,
    Engine,
    assert_same,
    difference,
    prompt_of,
    restored_hit,
    running,
)

pytestmark = pytest.mark.e2e
COLD_TOLERANCE = 1e-4
SERVED, FROM_STORAGE = "served_tokens/host", "served_tokens/storage"


def test_without_prefix_caching_every_request_is_served_from_host(
    tiny_llama: Callable[..., Path],
) -> None:
    prompts = [prompt_of(f"no prefix caching {n}", n) for n in (PAGE, PAGE + 1, 300)]
    with running(tiny_llama(), enable_prefix_caching=False) as engine:
        cold = engine.ask_each(prompts)
        engine.settle()
        restored = engine.ask_each(prompts)
        before = engine.counters()
        thrice = engine.ask([prompts[-1]] * 3)
        engine.assert_idle_and_clean()
        counted = difference(engine.counters(), before)
    assert [a.cached for a in cold] == [0, 0, 0]
    assert [a.cached for a in restored] == [restored_hit(n) for n in (PAGE, PAGE + 1, 300)]
    assert_same(restored, cold, COLD_TOLERANCE)
    # Nothing is shared on the device, so that each has a load of its own.
    assert [a.cached for a in thrice] == [256] * 3
    assert counted[SERVED] == 3 * 256
    assert counted["loaded_bytes/sync"] + counted["loaded_bytes/async"] == 12 * engine_page_bytes()
    assert_same(thrice, [cold[-1]] * 3, COLD_TOLERANCE)


def engine_page_bytes() -> int:
    """K and V of 4 layers and 2 heads of 64 numbers."""
    return PAGE * 4 * 2 * 2 * 64 * 4


def test_block_sizes_32_and_64_read_each_others_files(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """350 tokens: a device hit is as long as a restored one, whatever the block size."""
    prompts = {size: prompt_of(f"written by {size}", 350) for size in (32, 64)}
    cold: dict[int, list[Answer]] = {}
    for writer, reader in ((None, 32), (32, 64), (64, 32)):
        with running(tiny_llama(), tmp_path / "store", block_size=reader) as engine:
            if writer is not None:
                _assert_restored_from_files(engine, prompts[writer], cold[writer])
            if reader not in cold:
                cold[reader] = engine.ask([prompts[reader]])
                assert [answer.cached for answer in cold[reader]] == [0]
            engine.assert_idle_and_clean()


def _assert_restored_from_files(engine: Engine, prompt: list[int], cold: list[Answer]) -> None:
    before, seen = engine.counters(), engine.published()
    restored = engine.ask([prompt])
    engine.assert_kv_is_right(prompt, 320)
    engine.settle()
    num_bytes = 5 * (engine_page_bytes() + 2 * HEADER_BYTES)
    engine.wait_for("bytes_read", before["bytes_read"] + num_bytes)
    counted = difference(engine.counters(), before)
    shown = difference(engine.published(), seen)
    assert [answer.cached for answer in restored] == [320]
    assert counted[FROM_STORAGE] == 320
    assert shown["vllm:prompt_tokens_cached_by_source{source=disk}"] == 320
    assert (counted["objects_read"], counted["bytes_read"]) == (10, num_bytes)
    assert_same(restored, engine.ask([prompt]))  # now a device hit
    assert_same(restored, cold, COLD_TOLERANCE)


def test_pages_smaller_than_blocks_restore_whole_blocks(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    page, block = 32, 64
    lengths = (block - 1, block, block + 1, block + page + 1, 300)
    prompts = [prompt_of(f"small page {n}", n) for n in lengths]
    expected = [restored_hit(n, page, block) for n in lengths]
    assert expected == [0, 0, 64, 64, 256]
    extra = {"page_size": page, "fixed_weights": True}
    with running(tiny_llama(), tmp_path / "store", block_size=block, extra=extra) as engine:
        cold = engine.ask_each(prompts)
        hit = engine.ask_each(prompts)
        engine.settle()
        engine.reset_device()
        host = engine.ask_each(prompts)
        engine.assert_kv_is_right(prompts[-1], 256)
        engine.settle()
        before = engine.counters()
        engine.reset_all()
        file = engine.ask_each(prompts)
        engine.settle()
        counted = difference(engine.counters(), before)
        engine.assert_kv_is_right(prompts[-1], 256)
        engine.assert_idle_and_clean()
    assert [a.cached for a in hit] == expected
    assert [a.cached for a in host] == expected
    assert [a.cached for a in file] == expected
    assert counted[FROM_STORAGE] == sum(expected)
    assert counted[SERVED] == 0
    assert_same(hit, cold, COLD_TOLERANCE)
    assert_same(host, hit)
    assert_same(file, hit)
