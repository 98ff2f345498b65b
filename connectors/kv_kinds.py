"""The kinds of KV that vLLM keeps, as far as they can be saved and restored whole.

To add a kind, add an entry to ``_KINDS`` and, where its rows are not rows of attention, its format.
Whatever is not certified here is refused at start, by the name of its layer.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from vllm_hicache.errors import ConfigError
from vllm_hicache.pools import HitRule


@dataclass(frozen=True, slots=True)
class Kind:
    """What a boundary needs of one kind of KV."""

    name: str
    rule: HitRule
    reach: int = 0
    """Tokens of its window or chunk."""

    @property
    def is_state(self) -> bool:
        return self.rule is HitRule.BOUNDARY


def kind_of(spec: KVCacheSpec, layer: str) -> Kind:
    """The kind of one layer's KV; ConfigError where it is not certified."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return kind_of(*_first_of(spec))
    make = _KINDS.get(type(spec))
    if make is None:
        allowed = ", ".join(sorted(known.__name__ for known in _KINDS))
        raise _refusal(layer, f"a KV cache of kind {type(spec).__name__}", allowed)
    return make(spec, layer)


def layer_spec(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    """A layer's own spec; vLLM keeps one for all layers of a group where they are equal."""
    return _own_spec(spec, layer) if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _own_spec(specs: UniformTypeKVCacheSpecs, layer: str) -> KVCacheSpec:
    return specs.kv_cache_specs[layer]


def _first_of(specs: UniformTypeKVCacheSpecs) -> tuple[KVCacheSpec, str]:
    """A pipeline stage without any of the layers of a group is told those of all stages."""
    name, spec = next(iter(specs.kv_cache_specs.items()))
    return spec, name


def _refusal(layer: str, found: str, expected: str) -> ConfigError:
    return ConfigError(f"layer {layer} has {found}, which is not supported; supported: {expected}")


def _check_rows(spec: AttentionSpec, layer: str) -> None:
    if spec.num_head_slots not in (None, spec.num_kv_heads) or spec.tokens_per_state != 1:
        raise _refusal(
            layer,
            f"{spec.num_head_slots} head slots for {spec.num_kv_heads} heads and "
            f"{spec.tokens_per_state} tokens per state",
            "one row per token and head",
        )


def _full(spec: FullAttentionSpec, layer: str) -> Kind:
    """Also windows that vLLM keeps like full attention: their blocks stay."""
    _check_rows(spec, layer)
    if spec.non_causal:
        raise _refusal(layer, "attention to later tokens", "rows that depend on their prefix alone")
    return Kind("full", HitRule.EVERY)


def _latent(spec: MLAAttentionSpec, layer: str) -> Kind:
    _check_rows(spec, layer)
    if spec.model_version is not None:
        raise _refusal(
            layer, f"latent KV of kind {spec.model_version}", "one latent row per token and layer"
        )
    is_indexer = spec.cache_role is SparseCacheRole.INDEXER
    return Kind("indexer" if is_indexer else "latent", HitRule.EVERY)


def _window(spec: SlidingWindowSpec, layer: str) -> Kind:
    _check_rows(spec, layer)
    return Kind("window", HitRule.WINDOW, spec.sliding_window + spec.extra_retained_tokens)


def _chunk(spec: ChunkedLocalAttentionSpec, layer: str) -> Kind:
    _check_rows(spec, layer)
    return Kind("chunk", HitRule.CHUNK, spec.attention_chunk_size)


def _state(spec: MambaSpec, layer: str) -> Kind:
    if spec.mamba_cache_mode != "align":
        raise _refusal(
            layer,
            f"states in cache mode {spec.mamba_cache_mode!r}",
            "--mamba-cache-mode align with --enable-prefix-caching, which keep them at boundaries",
        )
    if spec.num_speculative_blocks or spec.num_prefill_checkpoint_blocks:
        raise _refusal(
            layer,
            f"{spec.num_speculative_blocks} states of drafts and "
            f"{spec.num_prefill_checkpoint_blocks} checkpoints",
            "states without speculation and without prefill checkpoints",
        )
    return Kind("state", HitRule.BOUNDARY)


_KINDS: dict[type, Callable[[Any, str], Kind]] = {
    FullAttentionSpec: _full,
    MLAAttentionSpec: _latent,
    SlidingWindowSpec: _window,
    ChunkedLocalAttentionSpec: _chunk,
    MambaSpec: _state,
}


def state_identity(spec: MambaSpec) -> str:
    """What must agree before a state may be shared: it is cut by the workers that keep it."""
    conv_layout = os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT", "")
    shapes = [list(shape) for shape in spec.shapes]
    dtypes = [str(dtype) for dtype in spec.dtypes]
    return f"{spec.mamba_type.name} {shapes} {dtypes} {conv_layout} {spec.tp_replicated}"
