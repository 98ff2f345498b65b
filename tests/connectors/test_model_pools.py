"""Pools that pages may lack, KV cache groups and page size: the same wherever one asks for them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import (
    DEEPSEEK,
    FULL,
    GEMMA3,
    GPTOSS,
    LLAMA,
    MISTRAL,
    QWEN3NEXT,
    STATE,
    WINDOW,
    Specs,
    attention,
    draft,
    each,
    engine,
    indexer,
    state,
)
from vllm.config import KVEventsConfig
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from vllm_hicache.connectors import kv_pools, vllm_view
from vllm_hicache.errors import ConfigError
from vllm_hicache.pools import HitRule, KVGroup, ModelPools, Pool

pytestmark = pytest.mark.vllm

CHUNK = ChunkedLocalAttentionSpec(
    block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, attention_chunk_size=96
)
CHUNKED = each(attention, CHUNK, CHUNK, FULL, FULL)


@pytest.fixture(scope="module")
def pools_of(tiny_llama: Callable[..., Path]) -> Callable[..., ModelPools]:
    def make(specs: Specs, **options: object) -> ModelPools:
        return engine(tiny_llama(), specs, **options).model_pools()

    return make


def test_full_attention_has_no_pool_that_a_page_may_lack(pools_of):
    assert pools_of(LLAMA) == ModelPools((), (KVGroup(32),), page_size=256, unit=32)


def test_window_groups_of_one_reach_are_one_pool_and_full_attention_is_required(pools_of):
    found = pools_of(GEMMA3)
    assert found.pools == (Pool("window-64", HitRule.WINDOW, (0, 1, 2), reach=64, bit=0),)
    assert found.groups == (*[KVGroup(32, bit=0)] * 3, KVGroup(32))
    assert (found.page_size, found.unit, found.all_parts) == (64, 32, 1)


def test_two_layers_of_a_window_group_are_one_pool(pools_of):
    found = pools_of(GPTOSS)
    assert found.pools == (Pool("window-64", HitRule.WINDOW, (0,), reach=64, bit=0),)
    assert found.groups == (KVGroup(32, bit=0), KVGroup(32))


def test_windows_of_two_sizes_are_two_pools_and_the_smaller_one_bounds_the_page(pools_of):
    wide = replace(WINDOW, sliding_window=512)
    found = pools_of(each(attention, WINDOW, wide, FULL, WINDOW))
    reaches = {pool.reach: pool.bit for pool in found.pools}
    assert set(reaches) == {64, 512}
    assert set(reaches.values()) == {0, 1}
    for pool in found.pools:
        assert [found.groups[group].bit for group in pool.groups] == [pool.bit] * len(pool.groups)
    assert (found.page_size, found.all_parts) == (64, 3)


def test_a_model_of_windows_alone_may_lack_every_page(pools_of):
    found = pools_of(MISTRAL)
    assert found.pools == (Pool("window-64", HitRule.WINDOW, (0,), reach=64, bit=0),)
    assert found.groups == (KVGroup(32, bit=0),)


def test_states_are_at_boundaries_of_pages_as_large_as_vllms_blocks(pools_of):
    found = pools_of(QWEN3NEXT)
    assert found.pools == (Pool("state", HitRule.BOUNDARY, (0, 1, 2), bit=0),)
    assert found.groups[3].bit is None
    blocks = {group.block_size for group in found.groups}
    assert blocks == {found.page_size} == {found.unit}
    assert [group.is_state for group in found.groups] == [True, True, True, False]


def test_latents_and_their_indexer_are_required(pools_of):
    found = pools_of(DEEPSEEK)
    assert found == ModelPools((), (KVGroup(32),), page_size=64, unit=32)
    only_indexed = {indexer(0): DEEPSEEK[indexer(0)]} | dict(DEEPSEEK)
    assert pools_of(only_indexed) == found  # whichever layer vLLM names first


@pytest.mark.parametrize("specs", [GEMMA3, QWEN3NEXT, DEEPSEEK, CHUNKED], ids=["g", "q", "d", "c"])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_scheduler_and_workers_of_all_stages_agree(tiny_llama, specs, pp):
    made = engine(tiny_llama(), specs, pp=pp)
    expected = made.model_pools()
    for own in made.stages:
        assert kv_pools.model_pools(made.vllm_config, own, made.config) == expected
    alone = engine(tiny_llama(), specs).model_pools()
    assert (expected.pools, expected.page_size) == (alone.pools, alone.page_size)


# Drafts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("heads", [1, 2], ids=["sidecar", "packed"])
def test_draft_layers_mark_the_group_of_the_target(tiny_llama, pp, heads):
    specs = LLAMA | each(draft, *[replace(FULL, num_kv_heads=heads)] * 2)
    made = engine(tiny_llama(), specs, pp=pp, speculative=tiny_llama(num_layers=2))
    found = made.model_pools()
    assert found.pools == (Pool("draft", HitRule.EVERY, (0,), bit=0, is_draft=True),)
    assert found.pools[0].may_be_zero
    assert found.groups == (KVGroup(32, marks=1),)
    assert (found.page_size, found.all_parts) == (256, 1)
    for own in made.stages:
        assert kv_pools.model_pools(made.vllm_config, own, made.config) == found


def test_draft_layers_beside_windows_have_the_next_bit(tiny_llama):
    specs = GEMMA3 | each(draft, FULL, FULL)
    found = engine(tiny_llama(), specs, speculative=tiny_llama(num_layers=2)).model_pools()
    assert [(pool.name, pool.bit) for pool in found.pools] == [("window-64", 0), ("draft", 1)]
    (source,) = found.pools[1].groups
    assert found.groups[source].bit is None
    assert [group.marks for group in found.groups].count(2) == 1
    assert found.groups[source].marks == 2


def test_drafts_on_the_last_of_two_stages_beside_several_groups_are_refused(tiny_llama):
    specs = GEMMA3 | each(draft, FULL, FULL)
    made = engine(tiny_llama(), specs, pp=2, speculative=tiny_llama(num_layers=2))
    with pytest.raises(ConfigError, match=r"2 pipeline stages and .* KV cache groups"):
        made.model_pools()


# Page size --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "page"), [(16, 256), (32, 256), (96, 192), (128, 256), (256, 256), (512, 256)]
)
def test_a_page_is_the_largest_that_fits_the_blocks_up_to_256_tokens(pools_of, block, page):
    specs = each(attention, *[replace(FULL, block_size=block)] * 4)
    assert pools_of(specs).page_size == page


@pytest.mark.parametrize(
    ("heads", "options", "page"),
    [
        (2, {}, 256),  # 4 KiB a token
        (16, {}, 128),  # 32 KiB
        (64, {}, 32),  # 128 KiB
        (128, {}, 32),
        (64, {"storage": "file:///pages"}, 256),
        (
            64,
            {
                "control_address": "tcp:127.0.0.1:8199",
                "control_token": "a-secret-of-enough-characters",
            },
            256,
        ),
        (64, {"write_policy": "write_back"}, 256),
    ],
)
def test_pages_that_stay_in_host_are_as_small_as_copies_of_some_mib_allow(
    pools_of, heads, options, page
):
    specs = each(attention, *[replace(FULL, block_size=16, num_kv_heads=heads)] * 4)
    assert pools_of(specs, **options).page_size == page


def test_small_pages_are_the_same_on_all_stages_of_a_pipeline(tiny_llama):
    specs = each(attention, *[replace(FULL, block_size=16, num_kv_heads=64)] * 4)
    made = engine(tiny_llama(), specs, pp=2)
    own = [kv_pools.model_pools(made.vllm_config, stage, made.config) for stage in made.stages]
    assert {made.model_pools().page_size, *(pools.page_size for pools in own)} == {64}


def test_pages_of_windows_are_not_made_smaller(pools_of):
    wide = replace(WINDOW, block_size=16, sliding_window=4096, num_kv_heads=64)
    full = replace(FULL, block_size=16, num_kv_heads=64)
    assert pools_of(each(attention, wide, wide, wide, full)).page_size == 256


@pytest.mark.parametrize(("window", "page"), [(64, 64), (100, 96), (31, 16), (4096, 256)])
def test_a_page_is_no_longer_than_the_window(pools_of, window, page):
    specs = each(attention, *[replace(WINDOW, sliding_window=window)] * 4)
    assert pools_of(specs).page_size == page


@pytest.mark.parametrize(("chunk", "page"), [(96, 96), (512, 256), (320, 160)])
def test_a_page_does_not_straddle_the_end_of_a_chunk(pools_of, chunk, page):
    one = replace(CHUNK, attention_chunk_size=chunk)
    found = pools_of(each(attention, one, one, FULL, FULL))
    assert found.page_size == page
    assert found.pools[0].rule is HitRule.CHUNK
    assert found.pools[0].reach == chunk


@pytest.mark.parametrize(
    ("specs", "page"), [(LLAMA, 96), (LLAMA, 16), (GEMMA3, 32), (DEEPSEEK, 256), (CHUNKED, 32)]
)
def test_a_page_size_that_is_given_is_taken(pools_of, specs, page):
    assert pools_of(specs, page_size=page).page_size == page


def test_the_page_size_of_states_may_be_given_as_it_must_be(pools_of):
    unit = pools_of(QWEN3NEXT).unit
    assert pools_of(QWEN3NEXT, page_size=unit).page_size == unit


@pytest.mark.parametrize(
    ("specs", "page", "says"),
    [
        (LLAMA, 80, "page_size 80 and vLLM's block size 32 must divide one another"),
        (GEMMA3, 128, "at most the smallest window or chunk of 64 tokens, got 128"),
        (MISTRAL, 256, "at most the smallest window or chunk of 64 tokens, got 256"),
        (QWEN3NEXT, 256, "must be vLLM's block size of [0-9]+ tokens .* got 256; leave page_size"),
        (CHUNKED, 64, "page_size must divide the 96 tokens of an attention chunk, got 64"),
        (CHUNKED, 192, "at most the smallest window or chunk of 96 tokens, got 192"),
    ],
)
def test_a_page_size_that_would_lose_kv_is_refused(pools_of, specs, page, says):
    with pytest.raises(ConfigError, match=says):
        pools_of(specs, page_size=page)


def test_states_beside_a_window_that_is_shorter_than_their_block_are_refused(pools_of):
    short = replace(WINDOW, block_size=96, sliding_window=64)
    long_state = replace(STATE, block_size=96)
    specs = each(state, long_state, long_state) | {attention(2): short, attention(3): short}
    with pytest.raises(ConfigError, match="smallest window or chunk of 64 tokens, got 96"):
        pools_of(specs)


# Refusals ---------------------------------------------------------------------------------------


def test_a_group_that_vllm_keeps_from_connectors_is_refused(tiny_llama):
    made = engine(tiny_llama(), GEMMA3)
    made.scheduler.kv_cache_groups[1].enable_kv_transfer = False
    with pytest.raises(ConfigError, match=rf"layer {attention(1)}, .* is kept from connectors"):
        made.model_pools()


# Options that know one kind of blocks -----------------------------------------------------------

NAMES = ("gptoss", "gemma3", "mistral", "qwen3next")


@pytest.mark.parametrize("specs", [GPTOSS, GEMMA3, MISTRAL, QWEN3NEXT], ids=NAMES)
def test_saving_later_than_computing_is_refused_where_pages_may_lack_something(pools_of, specs):
    allowed = r'must be "write_through" or "write_through_selective" for this model.*KV cache group'
    with pytest.raises(ConfigError, match=allowed):
        pools_of(specs, write_policy="write_back")
    for policy in ("write_through", "write_through_selective"):
        assert pools_of(specs, write_policy=policy).pools


def test_saving_later_is_refused_with_draft_state_and_allowed_without(tiny_llama):
    llama = tiny_llama()
    assert engine(llama, LLAMA, write_policy="write_back").model_pools().pools == ()
    drafting = engine(
        llama, LLAMA | each(draft, FULL), speculative=llama, write_policy="write_back"
    )
    with pytest.raises(ConfigError, match=r"1 KV cache group\(s\) and pages .* lack draft,"):
        drafting.model_pools()


@pytest.mark.parametrize("specs", [GEMMA3, MISTRAL, QWEN3NEXT], ids=NAMES[1:])
def test_events_are_refused_for_several_kinds_of_blocks_and_left_out_where_nobody_asked(
    pools_of, tiny_llama, specs, caplog
):
    with pytest.raises(ConfigError, match="kv_events must be false or unset for this model"):
        pools_of(specs, kv_events=True)
    llama = tiny_llama()
    for made, is_told in ((engine(llama, specs), False), (engine(llama, LLAMA), True)):
        vllm_config = SimpleNamespace(kv_events_config=KVEventsConfig(enable_kv_cache_events=True))
        pools = made.model_pools()
        caplog.clear()
        assert vllm_view.publishes_events(vllm_config, made.config, pools) is is_told
        assert ("are not published" in caplog.text) is not is_told


def test_draft_state_does_not_keep_events_of_the_targets_blocks_away(tiny_llama):
    llama = tiny_llama()
    specs = LLAMA | each(draft, FULL)
    assert engine(llama, specs, speculative=llama, kv_events=True).model_pools().pools
