"""The shape of one layer's KV: what must be equal for two layers to lie side by side."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from vllm_hicache.connectors.vllm_view import KVFormat, kv_format
from vllm_hicache.errors import ConfigError
from vllm_hicache.pools import HitRule

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ROWS, INDEXER, STATE = "rows", "indexer", "state"
_ATTENTION = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer of a worker: where its blocks are named, and what a block of it holds."""

    name: str
    group: int
    kind: str
    """``rows`` (keys and values, latents), ``indexer`` (of sparse attention) or ``state``."""
    text: str
    """The whole shape, for people and digests; equal for equal shapes, whatever the block size."""
    rule: HitRule
    reach: int
    block_size: int
    kv: KVFormat | None
    """Rows; None for a state."""
    state_bytes: int
    """Bytes of a state; 0 for rows."""
    is_latent: bool
    """One row a token that every tensor-parallel worker keeps whole."""
    is_split: bool
    """Whether decode context parallelism splits its tokens."""
    is_replicated: bool
    """A state that every tensor-parallel worker keeps whole."""


def layer_shape(vllm_config: "VllmConfig", name: str, spec: KVCacheSpec, group: int) -> LayerShape:
    """The shape of a layer from vLLM's own spec of it; ConfigError for kinds not certified."""
    if type(spec) is MambaSpec:
        return _state_shape(name, spec, group)
    if type(spec) not in _ATTENTION or not isinstance(spec, AttentionSpec):
        known = ", ".join(kind.__name__ for kind in (*_ATTENTION, MambaSpec))
        raise ConfigError(
            f"layer {name} has KV of kind {type(spec).__name__}, which is not known to be saved "
            f"and restored whole; expected one of {known}"
        )
    return _row_shape(vllm_config, name, spec, group)


def _row_shape(vllm_config: "VllmConfig", name: str, spec: AttentionSpec, group: int) -> LayerShape:
    _check_rows(name, spec)
    try:
        kv = kv_format(vllm_config, spec)
    except ConfigError as error:
        raise ConfigError(f"layer {name}: {error}") from None
    is_latent = isinstance(spec, MLAAttentionSpec)
    kind = _latent_kind(spec) if is_latent else ROWS
    rule, reach = _rule(spec)
    dtype = str(spec.dtype).removeprefix("torch.")
    quantized = f", {spec.kv_quant_mode.name}" if spec.kv_quant_mode.value else ""
    what = "index row" if kind == INDEXER else "latent" if is_latent else "heads"
    return LayerShape(
        name=name,
        group=group,
        kind=kind,
        text=(
            f"{kv.num_heads} {what} of {kv.k_bytes} + {kv.v_bytes} bytes, {dtype}{quantized}, "
            f"packed {kv.packing_id}" + (f", {rule.name.lower()} {reach}" if reach else "")
        ),
        rule=rule,
        reach=reach,
        block_size=spec.block_size,
        kv=kv,
        state_bytes=0,
        is_latent=is_latent,
        is_split=spec.dcp_sharded,
        is_replicated=False,
    )


def _latent_kind(spec: MLAAttentionSpec) -> str:
    return INDEXER if spec.cache_role is SparseCacheRole.INDEXER else ROWS


def _state_shape(name: str, spec: MambaSpec, group: int) -> LayerShape:
    if spec.mamba_cache_mode != "align":
        raise ConfigError(
            f"layer {name} keeps states in mode {spec.mamba_cache_mode!r}; expected 'align', in "
            "which vLLM keeps the state at block boundaries"
        )
    parts = ", ".join(
        f"{str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}"
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    return LayerShape(
        name=name,
        group=group,
        kind=STATE,
        text=f"a state of {spec.state_content_size_bytes} bytes ({parts})",
        rule=HitRule.BOUNDARY,
        reach=0,
        block_size=spec.block_size,
        kv=None,
        state_bytes=spec.state_content_size_bytes,
        is_latent=False,
        is_split=False,
        is_replicated=spec.tp_replicated,
    )


def _check_rows(name: str, spec: AttentionSpec) -> None:
    """Refuse blocks that are not one row for each token and head."""
    if spec.tokens_per_state != 1:
        raise ConfigError(
            f"layer {name} has {spec.tokens_per_state} tokens to a row; expected one row per token"
        )
    if spec.num_head_slots not in (None, spec.num_kv_heads):
        raise ConfigError(
            f"layer {name} has {spec.num_head_slots} head slots for {spec.num_kv_heads} heads; "
            "expected one row per head"
        )
    if isinstance(spec, MLAAttentionSpec):
        _check_latent(name, spec)
    if isinstance(spec, FullAttentionSpec) and _sees_later_tokens(spec):
        raise ConfigError(
            f"layer {name} attends to later tokens, too: its rows depend on more than the prefix"
        )


def _check_latent(name: str, spec: MLAAttentionSpec) -> None:
    if spec.model_version is not None:
        raise ConfigError(
            f"layer {name} has latents of kind {spec.model_version}; expected one latent row per "
            "token"
        )


def _sees_later_tokens(spec: FullAttentionSpec) -> bool:
    return bool(spec.non_causal)


def _rule(spec: AttentionSpec) -> tuple[HitRule, int]:
    if isinstance(spec, SlidingWindowSpec):
        return HitRule.WINDOW, _window(spec)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return HitRule.CHUNK, _chunk(spec)
    return HitRule.EVERY, 0


def _window(spec: SlidingWindowSpec) -> int:
    return int(spec.sliding_window)


def _chunk(spec: ChunkedLocalAttentionSpec) -> int:
    return int(spec.attention_chunk_size)
