"""What must agree before two engines may share draft state, beyond the target's namespace."""

import json
from typing import TYPE_CHECKING

from vllm_hicache.connectors.draft_layers import DraftPool
from vllm_hicache.connectors.model_identity import draft_fingerprint, rope_identity
from vllm_hicache.errors import ConfigError
from vllm_hicache.pools import pool_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_hicache.config import HiCacheConfig


def draft_digest(
    vllm_config: "VllmConfig", config: "HiCacheConfig", pool: DraftPool, *, heads_per_group: int
) -> str:
    """8 hex digits for the names of stored draft pages of one pool, the same on all its workers.

    Over the method, the drafter's weights and rotary embedding, and the shape and number of its
    layers. Tensor parallelism matters to states alone, which it cuts: rows are named by heads.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        raise ConfigError("speculative decoding is not configured")
    draft, target = speculative.draft_model_config, vllm_config.model_config
    is_cut = pool.shape.kv is None and not pool.shape.is_replicated
    fields = {
        "method": speculative.method,
        "weights": _weights(vllm_config, config),
        "model_id": "+".join(draft.architectures),
        "rope": rope_identity(draft.hf_text_config, max_model_len=draft.max_model_len),
        # A drafter that ends earlier than its target writes no rows behind its end.
        "end": draft.max_model_len if draft.max_model_len < target.max_model_len else 0,
        "kind": pool.shape.kind,
        "shape": pool.shape.text,
        "layers": len(pool.layers),
        "heads": pool.total_heads,
        "heads_per_group": heads_per_group,
        "workers": vllm_config.parallel_config.tensor_parallel_size if is_cut else 0,
    }
    return pool_digest(json.dumps(fields, sort_keys=True))


def _weights(vllm_config: "VllmConfig", config: "HiCacheConfig") -> str:
    """Content of the drafter's weights; where nothing proves it, this engine's alone."""
    proven = draft_fingerprint(vllm_config)
    if proven is not None:
        return proven
    if config.weights_id is not None:
        return f"given:{config.weights_id}"
    transfer = vllm_config.kv_transfer_config
    return f"engine:{transfer.engine_id if transfer is not None else None}"
