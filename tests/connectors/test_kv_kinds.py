"""Which kinds of KV are certified, and what is said of those that are not."""

from dataclasses import replace

import pytest
import torch
from engines import FULL, INDEX, LATENT, STATE, WINDOW, attention, indexer, state
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from vllm_hicache.connectors.kv_kinds import Kind, kind_of, layer_spec, state_identity
from vllm_hicache.errors import ConfigError
from vllm_hicache.pools import HitRule

pytestmark = pytest.mark.vllm

LAYER = attention(7)
ROWS = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
CHUNK = ChunkedLocalAttentionSpec(attention_chunk_size=8192, **ROWS)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (FULL, Kind("full", HitRule.EVERY)),
        # vLLM without its hybrid allocator: the window's blocks stay.
        (replace(FULL, sliding_window=64), Kind("full", HitRule.EVERY)),
        (WINDOW, Kind("window", HitRule.WINDOW, 64)),
        (replace(WINDOW, extra_retained_tokens=3), Kind("window", HitRule.WINDOW, 67)),
        (CHUNK, Kind("chunk", HitRule.CHUNK, 8192)),
        (LATENT, Kind("latent", HitRule.EVERY)),
        (INDEX, Kind("indexer", HitRule.EVERY)),
        (STATE, Kind("state", HitRule.BOUNDARY)),
    ],
    ids=["full", "kept", "window", "longer", "chunk", "latent", "indexer", "state"],
)
def test_a_kind_says_what_a_boundary_needs(spec, kind):
    assert kind_of(spec, LAYER) == kind
    assert kind.is_state == (spec is STATE)


def test_a_group_of_differing_layers_has_the_kind_of_its_first_layer():
    specs = UniformTypeKVCacheSpecs(
        block_size=32, kv_cache_specs={attention(0): LATENT, indexer(0): INDEX}
    )
    assert kind_of(specs, "(unknown)").name == "latent"
    assert layer_spec(specs, indexer(0)) == INDEX
    assert layer_spec(FULL, attention(0)) is FULL


def test_a_refused_layer_of_a_group_is_named_itself():
    odd = replace(FULL, non_causal=True)
    specs = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={attention(5): odd})
    with pytest.raises(ConfigError, match=f"layer {attention(5)} has"):
        kind_of(specs, "(unknown)")


@pytest.mark.parametrize(
    "kind",
    [
        RSWASpec,
        SinkFullAttentionSpec,
        HiddenStateCacheSpec,
        CrossAttentionSpec,
        EncoderOnlyAttentionSpec,
        SlidingWindowMLASpec,
    ],
)
def test_kinds_that_are_not_certified_are_refused_by_their_name_and_layer(kind):
    more = {RSWASpec: {"rswa_window": 64}, SlidingWindowMLASpec: {"sliding_window": 64}}
    spec = kind(**ROWS, **more.get(kind, {}))
    says = rf"layer {LAYER} has a KV cache of kind {kind.__name__}, .*; supported: ChunkedLocal"
    with pytest.raises(ConfigError, match=says):
        kind_of(spec, LAYER)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (replace(FULL, num_head_slots=4), "4 head slots for 2 heads and 1 tokens per state"),
        (replace(FULL, tokens_per_state=2), "None head slots for 2 heads and 2 tokens per state"),
        (replace(WINDOW, tokens_per_state=4), "4 tokens per state"),
        (replace(CHUNK, num_head_slots=8), "8 head slots"),
        (replace(FULL, non_causal=True), "attention to later tokens"),
        (replace(LATENT, model_version="deepseek_v4"), "latent KV of kind deepseek_v4"),
    ],
)
def test_rows_that_are_not_one_for_each_token_are_refused(spec, says):
    with pytest.raises(ConfigError, match=f"layer {LAYER} has .*{says}"):
        kind_of(spec, LAYER)


@pytest.mark.parametrize("mode", ["none", "all"])
def test_states_that_are_not_kept_at_boundaries_are_refused_with_how_to_keep_them(mode):
    says = rf"layer {state(2)} has states in cache mode '{mode}'.*--mamba-cache-mode align"
    with pytest.raises(ConfigError, match=says):
        kind_of(replace(STATE, mamba_cache_mode=mode), state(2))


@pytest.mark.parametrize("field", ["num_speculative_blocks", "num_prefill_checkpoint_blocks"])
def test_states_with_further_blocks_are_refused(field):
    with pytest.raises(ConfigError, match=r"states of drafts and .* checkpoints"):
        kind_of(replace(STATE, **{field: 1}), state(2))


def test_a_slot_for_each_head_that_there_is_may_be_told():
    assert kind_of(replace(FULL, num_head_slots=2), LAYER).name == "full"


def test_everything_that_cuts_a_state_is_in_its_identity(monkeypatch):
    others: list[KVCacheSpec] = [
        STATE,
        replace(STATE, shapes=((512, 3), (4, 64, 64))),
        replace(STATE, dtypes=(torch.bfloat16, torch.float32)),
        replace(STATE, tp_replicated=True),
    ]
    found = {state_identity(spec) for spec in others}
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    found.add(state_identity(STATE))
    assert len(found) == 5
