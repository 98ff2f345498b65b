"""The shape of one layer's KV: what must be equal for two layers to lie side by side."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec

from vllm_hicache.connectors.kv_kinds import Kind, kind_of
from vllm_hicache.connectors.vllm_view import KVFormat, kv_format
from vllm_hicache.errors import ConfigError
from vllm_hicache.pools import HitRule

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ROWS, INDEXER, STATE = "rows", "indexer", "state"


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
    kind = kind_of(spec, name)
    if isinstance(spec, AttentionSpec):
        return _row_shape(vllm_config, name, spec, group, kind)
    return _state_shape(name, spec, group, kind)


def _row_shape(
    vllm_config: "VllmConfig", name: str, spec: AttentionSpec, group: int, kind: Kind
) -> LayerShape:
    try:
        kv = kv_format(vllm_config, spec)
    except ConfigError as error:
        raise ConfigError(f"layer {name}: {error}") from None
    is_latent = isinstance(spec, MLAAttentionSpec)
    is_indexer = kind.name == INDEXER
    dtype = str(spec.dtype).removeprefix("torch.")
    quantized = f", {spec.kv_quant_mode.name}" if spec.kv_quant_mode.value else ""
    what = "index row" if is_indexer else "latent" if is_latent else "heads"
    return LayerShape(
        name=name,
        group=group,
        kind=INDEXER if is_indexer else ROWS,
        text=(
            f"{kv.num_heads} {what} of {kv.k_bytes} + {kv.v_bytes} bytes, {dtype}{quantized}, "
            f"packed {kv.packing_id}"
            + (f", {kind.rule.name.lower()} {kind.reach}" if kind.reach else "")
        ),
        rule=kind.rule,
        reach=kind.reach,
        block_size=spec.block_size,
        kv=kv,
        state_bytes=0,
        is_latent=is_latent,
        is_split=spec.dcp_sharded,
        is_replicated=False,
    )


def _state_shape(name: str, spec: MambaSpec, group: int, kind: Kind) -> LayerShape:
    parts = ", ".join(
        f"{str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}"
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    return LayerShape(
        name=name,
        group=group,
        kind=STATE,
        text=f"a state of {spec.state_content_size_bytes} bytes ({parts})",
        rule=kind.rule,
        reach=kind.reach,
        block_size=spec.block_size,
        kv=None,
        state_bytes=spec.state_content_size_bytes,
        is_latent=False,
        is_split=False,
        is_replicated=spec.tp_replicated,
    )
