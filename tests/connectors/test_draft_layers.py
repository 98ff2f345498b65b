"""Draft layers of a worker, from the groups and specs that vLLM gives it, and what is refused.

Most groups are those that engines on a CPU showed; those of recurrent drafters, context parallelism
and the V2 runner are made by hand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from vllm_hicache.connectors.draft_layers import (
    DraftPool,
    draft_pools,
    dropped_blocks,
    has_draft_state,
    is_draft_layer,
)
from vllm_hicache.errors import ConfigError
from vllm_hicache.pools import HitRule

pytestmark = pytest.mark.vllm

NUM_TARGET_LAYERS = 4
PAGE = 64
TWO_HEADS = FullAttentionSpec(
    block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, dcp_sharded=True
)
ONE_HEAD = replace(TWO_HEADS, num_kv_heads=1)
WINDOW = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=64
)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
INDEX = MLAAttentionSpec(
    block_size=16,
    num_kv_heads=1,
    head_size=132,
    dtype=torch.uint8,
    cache_role=SparseCacheRole.INDEXER,
)
STATE = MambaSpec(
    block_size=32,
    shapes=((3, 256), (4, 64, 64)),
    dtypes=(torch.bfloat16, torch.float32),
    mamba_cache_mode="align",
)
TARGET = [f"model.layers.{i}.self_attn.attn" for i in range(NUM_TARGET_LAYERS)]
EAGLE = "model.layers.4.self_attn.attn"


def draft_names(num_layers: int) -> list[str]:
    return [f"draft_model.model.layers.{i}.self_attn.attn" for i in range(num_layers)]


def config_of(
    method: str | None = "draft_model",
    *,
    tp: int = 1,
    dcp: int = 1,
    draft_heads: int = 2,
    kv_cache_dtype: str | None = None,
    is_v2: bool = False,
    shares_kv: bool = False,
    drops: bool = False,
) -> Any:
    """The few attributes that are read; building a whole VllmConfig takes seconds."""
    draft = SimpleNamespace(get_total_num_kv_heads=lambda: draft_heads)
    speculative = SimpleNamespace(
        method=method,
        kv_cache_dtype=kv_cache_dtype,
        draft_model_config=draft,
        use_gemma4_mtp=lambda: shares_kv,
        use_eagle_block_drop=lambda: drops,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=torch.float32, get_total_num_hidden_layers=lambda: NUM_TARGET_LAYERS
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, decode_context_parallel_size=dcp),
        speculative_config=speculative if method is not None else None,
        use_v2_model_runner=is_v2,
    )


def caches(*groups: Mapping[str, KVCacheSpec]) -> KVCacheConfig:
    """As a worker gets it: one spec of a group whose layers are equal, else one of each layer."""
    specs = []
    for layers in groups:
        kinds = list(layers.values())
        same = all(kind == kinds[0] for kind in kinds)
        spec = (
            kinds[0]
            if same
            else UniformTypeKVCacheSpecs(
                block_size=kinds[0].block_size, kv_cache_specs=dict(layers)
            )
        )
        specs.append(KVCacheGroupSpec(list(layers), spec))
    names = [name for layers in groups for name in layers]
    return KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[
            KVCacheTensor(size=1 << 20, layers=[name], layer_stride=0, block_stride=0)
            for name in names
        ],
        kv_cache_groups=specs,
    )


def each(names: Sequence[str], spec: KVCacheSpec) -> dict[str, KVCacheSpec]:
    return dict.fromkeys(names, spec)


def pools(config: Any, caches: KVCacheConfig, page_size: int = PAGE) -> tuple[DraftPool, ...]:
    return draft_pools(config, caches, page_size=page_size)


# Which layers are the drafter's ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "is_draft"),
    [
        ("draft_model.model.layers.0.self_attn.attn", True),
        ("mtp.layers.0.self_attn.attn", True),
        ("model.layers.4.self_attn.attn", True),
        ("model.layers.4.self_attn.indexer.k_cache", True),
        ("model.layers.4.mtp_block.self_attn.attn", True),
        ("model.layers.3.self_attn.attn", False),
        ("model.layers.3.linear_attn", False),
        ("language_model.model.layers.0.self_attn.attn", False),
    ],
)
def test_draft_layers_are_known_by_their_prefix_or_by_numbers_behind_the_targets(
    name: str, is_draft: bool
) -> None:
    assert is_draft_layer(name, NUM_TARGET_LAYERS) is is_draft


@pytest.mark.parametrize("method", [None, "ngram", "suffix", "medusa"])
def test_methods_that_keep_no_kv_have_no_draft_pool(method: str | None) -> None:
    config = config_of(method)
    assert not has_draft_state(config)
    assert pools(config, caches(each(TARGET, TWO_HEADS))) == ()


def test_a_drafter_that_reads_the_targets_kv_has_no_pool_of_its_own() -> None:
    assert pools(config_of("mtp", shares_kv=True), caches(each(TARGET, TWO_HEADS))) == ()


@pytest.mark.parametrize("method", ["dflash", "dspark", "extract_hidden_states", "custom_class"])
def test_methods_whose_state_is_not_certified_are_refused_by_name(method: str) -> None:
    with pytest.raises(ConfigError, match=rf"method '{method}' .*allowed: ngram.*draft_model"):
        has_draft_state(config_of(method))


def test_one_block_is_dropped_where_vllm_drops_one() -> None:
    assert dropped_blocks(config_of("eagle", drops=True)) == 1
    assert dropped_blocks(config_of("eagle", drops=False)) == 0
    assert dropped_blocks(config_of(None)) == 0


# How they lie ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [1, 4, 7])
def test_draft_layers_with_the_targets_shape_are_packed_also_more_than_the_target_has(
    num_layers: int,
) -> None:
    names = draft_names(num_layers)
    (pool,) = pools(config_of(), caches(each([*TARGET, *names], TWO_HEADS)))
    assert pool.is_packed
    assert pool.layers == tuple(names)
    assert (pool.group, pool.rule, pool.reach, pool.block_tokens) == (0, HitRule.EVERY, 0, 32)
    assert pool.shape.kv is not None
    assert (pool.shape.kv.num_heads, pool.shape.kv.k_bytes, pool.shape.kv.v_bytes) == (2, 256, 256)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_layer_numbered_behind_the_target_counts_from_zero_in_the_draft_pool(method: str) -> None:
    (pool,) = pools(config_of(method), caches(each([*TARGET, EAGLE], TWO_HEADS)))
    assert pool.layers == (EAGLE,)
    assert pool.is_packed


def test_layers_are_ordered_by_number_not_by_name() -> None:
    names = draft_names(12)
    (pool,) = pools(config_of(), caches(each([*sorted(names), *TARGET], TWO_HEADS)))
    assert pool.layers == tuple(names)


def test_a_latent_draft_layer_is_packed_and_whole_on_every_worker() -> None:
    (pool,) = pools(config_of("mtp", tp=4), caches(each([*TARGET, EAGLE], LATENT)))
    assert pool.is_packed
    assert (pool.total_heads, pool.num_replicas, pool.block_tokens) == (1, 4, 16)


def test_draft_layers_of_other_heads_are_a_sidecar_that_follows_the_targets_group() -> None:
    layers = {**each(TARGET, TWO_HEADS), **each(draft_names(2), ONE_HEAD)}
    (pool,) = pools(config_of(draft_heads=1), caches(layers))
    assert not pool.is_packed
    assert (pool.group, pool.rule, pool.total_heads) == (0, HitRule.EVERY, 1)
    assert pool.shape.text.startswith("1 heads of 256 + 256 bytes, float32")


def test_same_bytes_of_another_dtype_are_no_shape_of_the_target() -> None:
    half, brain = (replace(TWO_HEADS, dtype=t) for t in (torch.float16, torch.bfloat16))
    layers = {**each(TARGET, half), **each(draft_names(1), brain)}
    (pool,) = pools(config_of(), caches(layers))
    assert not pool.is_packed


def test_a_sidecar_whose_source_is_a_window_group_follows_its_rule() -> None:
    narrow = replace(WINDOW, num_kv_heads=1)
    layers = {**each(TARGET, WINDOW), **each(draft_names(2), narrow)}
    (pool,) = pools(config_of(draft_heads=1), caches(layers))
    assert not pool.is_packed
    assert (pool.group, pool.rule, pool.reach) == (0, HitRule.WINDOW, 64)


def test_a_draft_layer_in_the_window_group_of_a_mixed_model_names_that_group() -> None:
    groups = caches(each(TARGET[:2], TWO_HEADS), each([*TARGET[2:], EAGLE], WINDOW))
    (pool,) = pools(config_of("eagle"), groups)
    assert pool.is_packed
    assert (pool.group, pool.rule, pool.reach) == (1, HitRule.WINDOW, 64)


def test_a_draft_group_without_target_layers_is_its_own_source() -> None:
    chunked = ChunkedLocalAttentionSpec(
        block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, attention_chunk_size=128
    )
    (pool,) = pools(config_of("eagle"), caches(each(TARGET, TWO_HEADS), {EAGLE: chunked}))
    assert not pool.is_packed
    assert (pool.group, pool.rule, pool.reach) == (1, HitRule.CHUNK, 128)


def test_a_drafters_indexer_is_a_pool_beside_its_latents() -> None:
    index = [name.replace("attn.attn", "attn.indexer.k_cache") for name in (*TARGET, EAGLE)]
    groups = caches({**each([*TARGET, EAGLE], LATENT), **each(index, INDEX)})
    found = {pool.shape.kind: pool for pool in pools(config_of("mtp"), groups)}
    assert {kind: pool.layers for kind, pool in found.items()} == {
        "rows": (EAGLE,),
        "indexer": (index[-1],),
    }
    assert all(pool.is_packed for pool in found.values())


# States ------------------------------------------------------------------------------------------


def state_names(*numbers: int) -> list[str]:
    return [f"model.layers.{i}.linear_attn" for i in numbers]


def test_a_drafters_recurrent_state_of_the_targets_shape_follows_the_targets_states() -> None:
    groups = caches(each(state_names(0, 1, 2, 4), STATE), each([TARGET[3]], TWO_HEADS))
    (pool,) = pools(config_of("mtp"), groups)
    assert pool.is_packed
    assert (pool.group, pool.rule, pool.layers) == (0, HitRule.BOUNDARY, tuple(state_names(4)))
    assert pool.shape.kv is None
    assert pool.shape.state_bytes == 3 * 256 * 2 + 4 * 64 * 64 * 4


def test_a_drafters_recurrent_state_of_its_own_shape_is_a_sidecar_of_states() -> None:
    own = replace(STATE, shapes=((3, 128), (2, 64, 64)))
    groups = caches(each(state_names(0, 1), STATE), each(state_names(4, 5), own))
    (pool,) = pools(config_of("mtp"), groups)
    assert not pool.is_packed
    assert (pool.group, pool.rule) == (1, HitRule.BOUNDARY)
    assert pool.shape.text == f"a state of {768 + 32768} bytes (bfloat16 3x128, float32 2x64x64)"


def test_a_drafter_with_states_and_rows_has_a_pool_of_each() -> None:
    groups = caches(each(state_names(0, 4), STATE), each([TARGET[3], "mtp.layers.5.attn"], WINDOW))
    kinds = {pool.shape.kind: pool.rule for pool in pools(config_of("mtp"), groups)}
    assert kinds == {"rows": HitRule.WINDOW, "state": HitRule.BOUNDARY}


def test_a_page_without_a_state_at_its_end_is_refused() -> None:
    groups = caches(each(state_names(0, 4), replace(STATE, block_size=544)))
    with pytest.raises(ConfigError, match=r"layers\.4\.linear_attn .* every 544 tokens.*got 64"):
        pools(config_of("mtp"), groups)
    (pool,) = pools(config_of("mtp"), groups, page_size=1088)
    assert pool.block_tokens == 544


def test_states_between_boundaries_are_refused() -> None:
    groups = caches(each(state_names(0, 4), replace(STATE, mamba_cache_mode="all")))
    with pytest.raises(ConfigError, match=r"layers\.4\.linear_attn has states in cache mode 'all'"):
        pools(config_of("mtp"), groups)


# Several workers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft_heads", "tp", "expected"), [(4, 2, (4, 1)), (2, 2, (2, 2)), (2, 1, (2, 1))]
)
def test_heads_of_a_drafter_are_cut_or_whole_on_every_worker(
    draft_heads: int, tp: int, expected: tuple[int, int]
) -> None:
    groups = caches(each([*TARGET, *draft_names(1)], TWO_HEADS))
    (pool,) = pools(config_of(tp=tp, draft_heads=draft_heads), groups)
    assert (pool.total_heads, pool.num_replicas) == expected


def test_draft_heads_that_only_some_workers_repeat_are_refused() -> None:
    groups = caches(each([*TARGET, *draft_names(1)], ONE_HEAD))
    with pytest.raises(ConfigError, match=r"layers\.0.* has 1 of 2 KV heads on each of 4 workers"):
        pools(config_of(tp=4, draft_heads=2), groups)


@pytest.mark.parametrize(("is_split", "tokens"), [(True, 64), (False, 32)])
def test_context_parallelism_splits_blocks_of_a_drafter_unless_its_cache_is_replicated(
    is_split: bool, tokens: int
) -> None:
    own = replace(TWO_HEADS, dcp_sharded=is_split)
    groups = caches(each(TARGET, TWO_HEADS), each(draft_names(1), own))
    (pool,) = pools(config_of(dcp=2, is_v2=True), groups)
    assert (pool.group, pool.block_tokens, pool.is_packed) == (1, tokens, False)


# What is refused ---------------------------------------------------------------------------------


def refusal(config: Any, groups: KVCacheConfig, page_size: int = PAGE) -> str:
    with pytest.raises(ConfigError) as caught:
        pools(config, groups, page_size)
    return str(caught.value)


def test_draft_layers_of_two_shapes_are_refused_with_both() -> None:
    first, second = draft_names(2)
    layers = {**each(TARGET, TWO_HEADS), first: ONE_HEAD, second: TWO_HEADS}
    told = refusal(config_of(draft_heads=1), caches(layers))
    assert f"{first} has 1 heads of 256 + 256 bytes, float32" in told
    assert f"{second} has 2 heads of 256 + 256 bytes, float32" in told


def test_draft_layers_of_two_kinds_of_attention_are_refused_with_both() -> None:
    first, second = draft_names(2)
    groups = caches({**each(TARGET, TWO_HEADS), first: TWO_HEADS}, {second: WINDOW})
    told = refusal(config_of(is_v2=True), groups)
    assert f"{second} has 2 heads of 256 + 256 bytes, float32, packed rows, window 64" in told
    assert f"{first} has 2 heads of 256 + 256 bytes, float32, packed rows," in told


def test_draft_layers_in_two_groups_are_refused_with_both() -> None:
    first, second = draft_names(2)
    groups = caches({**each(TARGET, TWO_HEADS), first: TWO_HEADS}, {second: TWO_HEADS})
    told = refusal(config_of(is_v2=True), groups)
    assert f"{first} (2 heads" in told
    assert f"{second} (2 heads" in told
    assert "groups 0 and 1" in told


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (replace(TWO_HEADS, tokens_per_state=4), "4 tokens per state"),
        (replace(TWO_HEADS, num_head_slots=4), "has 4 head slots for 2 heads"),
        (replace(TWO_HEADS, non_causal=True), "attention to later tokens"),
        (replace(LATENT, model_version="deepseek_v4"), "latent KV of kind deepseek_v4"),
        (
            replace(TWO_HEADS, state_content_bytes=256),
            "KV rows of 256 bytes are smaller than K and V of 256 and 256 bytes",
        ),
        (
            RSWASpec(
                block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, rswa_window=64
            ),
            "a KV cache of kind RSWASpec",
        ),
    ],
)
def test_rows_that_are_not_certified_are_refused_with_the_layer(
    spec: KVCacheSpec, message: str
) -> None:
    told = refusal(config_of("eagle"), caches(each(TARGET, TWO_HEADS), {EAGLE: spec}))
    assert told.startswith(f"layer {EAGLE}")
    assert message in told


def test_an_engine_without_a_draft_layer_is_refused() -> None:
    told = refusal(config_of("eagle"), caches(each(TARGET, TWO_HEADS)))
    assert "numbers from 4 on" in told
    assert TARGET[3] in told


def test_a_block_that_neither_divides_the_page_nor_is_divided_is_refused() -> None:
    groups = caches(each(TARGET, TWO_HEADS), {EAGLE: replace(TWO_HEADS, block_size=96)})
    told = refusal(config_of("eagle"), groups)
    assert told.startswith(f"draft layer {EAGLE} (2 heads of 256 + 256 bytes")
    assert "page_size 64 and vLLM's block size 96" in told


def test_a_draft_model_whose_kv_the_v1_runner_writes_over_the_targets_is_refused() -> None:
    groups = caches(each(TARGET[:2], WINDOW), each([*TARGET[2:], *draft_names(1)], TWO_HEADS))
    told = refusal(config_of(), groups)
    assert f"{draft_names(1)[0]} lies in KV cache group 1" in told
    assert "V1" in told
    (pool,) = pools(config_of(is_v2=True), groups)
    assert (pool.group, pool.is_packed) == (1, True)


def test_a_draft_layer_without_bytes_of_its_own_is_refused() -> None:
    groups = caches(each([*TARGET, EAGLE], TWO_HEADS))
    del groups.kv_cache_tensors[-1]
    assert f"{EAGLE} lies in 1 KV cache groups and 0 tensors" in refusal(config_of("eagle"), groups)


def test_a_draft_layer_that_vllm_keeps_from_connectors_is_refused() -> None:
    groups = caches(each(TARGET, TWO_HEADS), {EAGLE: TWO_HEADS})
    groups.kv_cache_groups[1].enable_kv_transfer = False
    assert f"{EAGLE} lies in KV cache group 1, which vLLM keeps from" in refusal(
        config_of("eagle"), groups
    )


def test_a_draft_dtype_whose_packing_on_a_cpu_is_unknown_is_refused() -> None:
    groups = caches(each([*TARGET, EAGLE], TWO_HEADS))
    told = refusal(config_of("eagle", kv_cache_dtype="fp8"), groups)
    assert "draft KV of dtype fp8 beside the target's auto" in told
