"""Features of vLLM with the connector, one named test each, on one engine in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from copy_spy import CopySpy, spying
from engine_in_process import (
    BLOCK,
    PAGE,
    Engine,
    assert_same,
    difference,
    largest_difference,
    prompt_of,
    restored_hit,
    running,
)
from tiny_adapter import write_adapter

from vllm_hicache.plan import Direction

pytestmark = pytest.mark.e2e
COLD_TOLERANCE = 1e-4
SERVED = "served_tokens/host"


@pytest.fixture(scope="module")
def spy() -> Iterator[CopySpy]:
    with spying() as spy:
        yield spy


@pytest.fixture(scope="module")
def shared(tiny_llama: Callable[..., Path], spy: CopySpy) -> Iterator[Engine]:
    """Host tier alone; chunks of 256 tokens; adapters and embeddings allowed."""
    with running(
        tiny_llama(),
        max_num_batched_tokens=256,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        enable_prompt_embeds=True,
    ) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine, spy: CopySpy) -> Iterator[Engine]:
    """The engine, with vLLM's own cache empty before and nothing left behind after."""
    shared.settle()
    shared.reset_device()
    spy.records.clear()
    yield shared
    shared.assert_idle_and_clean()


# What is kept ----------------------------------------------------------------------------------


def test_chunked_prefill_saves_and_restores_a_prompt_of_many_chunks(engine: Engine) -> None:
    prompt = prompt_of("chunks", 1000)
    cold = engine.ask([prompt])
    hit = engine.ask([prompt])
    engine.settle()
    engine.reset_device()
    restored = engine.ask([prompt])
    assert_same(restored, cold, COLD_TOLERANCE)
    assert [a.cached for a in restored] == [restored_hit(1000)]
    assert [a.cached for a in hit] == [992]


def test_each_restored_block_holds_bit_for_bit_what_was_saved_from_it(engine: Engine) -> None:
    prompt = prompt_of("bit for bit", 9 * PAGE + 5)
    engine.ask([prompt])
    engine.settle()
    saved = engine.device_kv(engine.cached_blocks(prompt, 9 * PAGE))
    engine.reset_device()  # which also overwrites the blocks
    assert [answer.cached for answer in engine.ask([prompt])] == [9 * PAGE]
    assert np.array_equal(engine.device_kv(engine.cached_blocks(prompt, 9 * PAGE)), saved)
    engine.assert_kv_is_right(prompt, 9 * PAGE)


def test_a_local_hit_that_ends_inside_a_page_loads_only_the_missing_blocks(
    engine: Engine, spy: CopySpy
) -> None:
    prompt = prompt_of("inside a page", 5 * PAGE + 7)
    cold = engine.ask([prompt])
    engine.settle()
    engine.reset_device()
    engine.ask([prompt[: PAGE + BLOCK + 1]])  # now the device has one page and a half
    engine.settle()
    local = PAGE + BLOCK
    held = engine.cached_blocks(prompt, local)
    before = engine.device_kv(held)
    spy.records.clear()
    restored = engine.ask([prompt])
    engine.settle()
    assert_same(restored, cold, COLD_TOLERANCE)
    assert [a.cached for a in restored] == [5 * PAGE]
    (rows,) = spy.copied(Direction.LOAD)
    assert len(rows) == (5 * PAGE - local) // BLOCK
    # The first block loaded is the second half of page 1; no block is loaded that is shared.
    assert rows[:, 1].tolist() == [1, 0, 1, 0, 1, 0, 1]
    assert set(rows[:, 2].tolist()).isdisjoint(held)
    assert np.array_equal(engine.device_kv(held), before)


def test_a_load_of_wrong_bytes_leaves_shared_blocks_alone_and_is_seen_in_the_answer(
    engine: Engine, spy: CopySpy
) -> None:
    prompt = prompt_of("flipped", 5 * PAGE + 7)
    cold = engine.ask([prompt])
    engine.settle()
    engine.reset_device()
    engine.ask([prompt[: PAGE + BLOCK + 1]])
    engine.settle()
    held = engine.cached_blocks(prompt, PAGE + BLOCK)
    before = engine.device_kv(held)
    spy.flips_loads = True
    try:
        wrong = engine.ask([prompt])
        engine.settle()
    finally:
        spy.flips_loads = False
    assert [a.cached for a in wrong] == [5 * PAGE]
    assert np.array_equal(engine.device_kv(held), before)
    assert largest_difference(wrong, cold) > 1000 * COLD_TOLERANCE
    with pytest.raises(AssertionError):
        assert_same(wrong, cold, COLD_TOLERANCE)
    # Host still has the right bytes.
    engine.reset_device()
    assert_same(engine.ask([prompt]), cold, COLD_TOLERANCE)


def test_generated_tokens_are_kept_as_well_as_prompts(engine: Engine) -> None:
    first = prompt_of("first turn", 100)
    (answer,) = engine.ask([first], max_tokens=100)
    engine.settle()
    engine.reset_device()
    second = [*first, *answer.tokens, *prompt_of("second turn", 50)]
    restored = engine.ask([second])
    # The last generated token was never fed back: 199 tokens have KV, 3 pages of them.
    assert [a.cached for a in restored] == [3 * PAGE]
    assert len(first) < 3 * PAGE
    cold = engine.ask([{"prompt_token_ids": second, "cache_salt": "never seen"}])
    assert [a.cached for a in cold] == [0]
    assert_same(restored, cold, COLD_TOLERANCE)


def test_synchronous_and_asynchronous_loads_are_both_used_and_counted(engine: Engine) -> None:
    prompts = [prompt_of(f"mode {i}", 300) for i in range(3)]
    cold = engine.ask_each(prompts)
    engine.settle()
    engine.reset_device()
    before = engine.counters()
    # An idle engine waits for the first; the others would stand in line behind it.
    restored = engine.ask(prompts)
    engine.settle()
    counted = difference(engine.counters(), before)
    page_bytes = engine.page_bytes
    assert counted["loaded_bytes/sync"] == 4 * page_bytes
    assert counted["loaded_bytes/async"] == 8 * page_bytes
    assert counted[SERVED] == 3 * 4 * PAGE
    assert_same(restored, cold, COLD_TOLERANCE)


def test_several_answers_to_one_prompt_share_its_restored_prefix(engine: Engine) -> None:
    # Three prompts fit into one step: vLLM's CPU runner fails on seeds where a chunk ends early.
    prompt = prompt_of("n", PAGE + 10)
    options = {"n": 3, "temperature": 1.0, "seed": 7}
    (cold,) = engine.generate([prompt], **options)
    engine.settle()
    engine.reset_device()
    before = engine.counters()
    (restored,) = engine.generate([prompt], **options)
    engine.settle()
    said = [output.token_ids for output in cold.outputs]
    assert [output.token_ids for output in restored.outputs] == said
    assert len({tuple(tokens) for tokens in said}) == 3
    counted = difference(engine.counters(), before)
    # One load of the bytes; whoever comes while it lands waits for it and hits on the device.
    assert counted[SERVED] == PAGE
    assert counted["loaded_bytes/sync"] + counted["loaded_bytes/async"] == engine.page_bytes


def test_prompt_logprobs_use_no_hit_and_are_right(engine: Engine) -> None:
    prompt = prompt_of("prompt logprobs", 300)
    engine.ask([prompt])
    engine.settle()
    engine.reset_device()
    before = engine.counters()
    (asked,) = engine.generate([prompt], prompt_logprobs=1)
    engine.settle()
    counted = difference(engine.counters(), before)
    assert asked.num_cached_tokens == 0
    assert counted[SERVED] == 0
    assert counted["unserved_tokens/skip_reading"] == 4 * PAGE
    salted = {"prompt_token_ids": prompt, "cache_salt": "prompt logprobs"}
    (cold,) = engine.generate([salted], prompt_logprobs=1)
    assert len(asked.prompt_logprobs) == len(prompt)
    values = [
        [place[token].logprob for place, token in zip(each[1:], prompt[1:], strict=True)]
        for each in (asked.prompt_logprobs, cold.prompt_logprobs)
    ]
    assert np.allclose(*values, atol=COLD_TOLERANCE)


def hinted(**hints: object) -> dict[str, object]:
    return {"extra_args": {"kv_transfer_params": {"hicache": hints}}}


def test_a_request_that_asks_not_to_be_stored_leaves_nothing(engine: Engine) -> None:
    prompt = prompt_of("not stored", 4 * PAGE + 1)
    before = engine.counters()
    cold = engine.ask([prompt], **hinted(store=False))
    engine.settle()
    engine.reset_device()
    again = engine.ask([prompt])
    engine.settle()
    counted = difference(engine.counters(), before)
    assert [a.cached for a in (*cold, *again)] == [0, 0]
    assert counted["save_skipped_tokens/not_wanted"] == 4 * PAGE
    assert counted["saved_tokens"] == 4 * PAGE  # of the second one
    assert_same(again, cold)


def test_a_request_that_asks_not_to_load_computes_its_prompt(engine: Engine) -> None:
    prompt = prompt_of("not loaded", 4 * PAGE + 1)
    cold = engine.ask([prompt])
    engine.settle()
    engine.reset_device()
    before = engine.counters()
    asked = engine.ask([prompt], **hinted(load=False))
    engine.settle()
    engine.reset_device()
    loaded = engine.ask([prompt], **hinted(laod=False))  # not understood: not followed
    engine.settle()
    counted = difference(engine.counters(), before)
    assert [a.cached for a in (*asked, *loaded)] == [0, 4 * PAGE]
    assert counted["unserved_tokens/not_wanted"] == 4 * PAGE
    assert counted["bad_hints"] == 1
    assert_same(asked, cold)
    assert_same(loaded, cold, COLD_TOLERANCE)


# What is kept apart ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writer", "reader", "shares"),
    [
        ("x", "x", True),
        ("x", "y", False),
        ("x", None, False),
        (None, "x", False),
        ("", None, True),  # vLLM, too, takes an empty salt for none
        ("x", "x ", False),
        ("\u00e9", "e\u0301", False),  # look alike, are not
        ("\0", "\0\0", False),
        ("x" * 5000, "x" * 5001, False),
        ("\u2603\n;'\"", "\u2603\n;'\"", True),
    ],
)
def test_a_cache_salt_shares_with_its_equal_alone(
    engine: Engine, writer: str | None, reader: str | None, shares: bool
) -> None:
    prompt = prompt_of(f"salt {writer!r:.20} {reader!r:.20}", 3 * PAGE + 1)

    def salted(salt: str | None) -> dict[str, object]:
        return {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})

    written = engine.ask([salted(writer)])
    engine.settle()
    engine.reset_device()
    read = engine.ask([salted(reader)])
    assert [a.cached for a in written] == [0]
    assert [a.cached for a in read] == [3 * PAGE if shares else 0]
    assert_same(read, written, COLD_TOLERANCE)


def adapter_request(name: str, number: int, folder: Path, **options: bool) -> object:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(folder), **options)


def test_adapters_answer_from_their_own_pages_alone(engine: Engine, tmp_path: Path) -> None:
    a = adapter_request("a", 1, write_adapter(tmp_path / "a", seed=1))
    b = adapter_request("b", 2, write_adapter(tmp_path / "b", seed=2))
    prompt = prompt_of("adapters", 4 * PAGE + 9)
    cold = {}
    for name, lora in (("a", a), ("b", b), ("none", None)):
        cold[name] = engine.ask([prompt], lora=lora)
        engine.settle()
        engine.reset_device()
        assert [answer.cached for answer in cold[name]] == [0]
    # The adapters do change the answers, so that a hit across them would be seen.
    for one, other in (("a", "b"), ("a", "none"), ("b", "none")):
        assert largest_difference(cold[one], cold[other]) > 1000 * COLD_TOLERANCE
    for name, lora in (("b", b), ("none", None), ("a", a)):
        engine.settle()
        engine.reset_device()
        restored = engine.ask([prompt], lora=lora)
        assert [answer.cached for answer in restored] == [4 * PAGE]
        assert_same(restored, cold[name], COLD_TOLERANCE)


def test_an_adapter_name_with_other_weights_misses(engine: Engine, tmp_path: Path) -> None:
    prompt = prompt_of("renamed adapter", 4 * PAGE + 9)
    old = adapter_request("same", 3, write_adapter(tmp_path / "old", seed=3))
    new = adapter_request("same", 3, write_adapter(tmp_path / "new", seed=4), load_inplace=True)
    first = engine.ask([prompt], lora=old)
    engine.settle()
    engine.reset_device()
    second = engine.ask([prompt], lora=new)
    assert [answer.cached for answer in second] == [0]
    assert largest_difference(first, second) > 1000 * COLD_TOLERANCE


def test_adapter_files_overwritten_and_reloaded_miss(engine: Engine, tmp_path: Path) -> None:
    prompt = prompt_of("overwritten adapter", 4 * PAGE + 9)
    folder = write_adapter(tmp_path / "adapter", seed=5)
    first = engine.ask([prompt], lora=adapter_request("over", 4, folder))
    engine.settle()
    write_adapter(folder, seed=6)
    # Between the change of the files and the reload vLLM still computes with the old weights.
    engine.reset_device()
    stale = engine.ask([prompt], lora=adapter_request("over", 4, folder))
    engine.settle()
    engine.reset_device()
    reloaded = engine.ask([prompt], lora=adapter_request("over", 4, folder, load_inplace=True))
    assert [answer.cached for answer in (*stale, *reloaded)] == [0, 0]
    assert_same(stale, first, COLD_TOLERANCE)
    assert largest_difference(first, reloaded) > 1000 * COLD_TOLERANCE


def test_prompt_embeddings_hit_by_their_content(engine: Engine) -> None:
    source = torch.Generator().manual_seed(1)
    embeds = torch.randn(3 * PAGE + 9, 256, generator=source) * 0.08
    other = embeds.clone()
    other[2 * PAGE + 5, 7] += 1.0  # in the third page
    cold = engine.ask([{"prompt_embeds": embeds}])
    engine.settle()
    engine.reset_device()
    restored = engine.ask([{"prompt_embeds": embeds}])
    engine.settle()
    engine.reset_device()
    near = engine.ask([{"prompt_embeds": other}])
    assert [answer.cached for answer in (*cold, *restored, *near)] == [0, 3 * PAGE, 2 * PAGE]
    assert_same(restored, cold, COLD_TOLERANCE)
    assert largest_difference(near, cold) > 10 * COLD_TOLERANCE
