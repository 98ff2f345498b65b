"""What an engine would store for a model, computed from its configuration alone: no worker, no
device, no weights in memory. Used by ``hicache doctor``.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    get_kv_quant_mode,
)

from vllm_hicache.connectors import kv_pools, vllm_view
from vllm_hicache.connectors.draft_layers import has_draft_state
from vllm_hicache.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_hicache.config import HiCacheConfig
    from vllm_hicache.connectors.kv_pools import WorkerPool
    from vllm_hicache.connectors.messages import PageRows
    from vllm_hicache.keys import Namespace

logger = logging.getLogger(__name__)

RANDOM_EPOCH = "random at each start"
_DEFAULT_BLOCK_SIZE = 16  # of vLLM; decides nothing that is stored as canonical rows


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """One engine's stored objects."""

    config: "HiCacheConfig"
    namespace: "Namespace"
    is_proven: bool
    """Whether the weights can be identified; if not, ``namespace.epoch`` is another each time."""
    objects: str
    smallest_object_bytes: int
    num_workers: int


def model_geometry(
    model: str, transfer_config: str, engine_arguments: Sequence[str]
) -> ModelGeometry:
    """Build vLLM's configuration of these command-line arguments and derive what follows for the
    model itself: draft state has objects of its own, which change no name of the model's.

    Raises:
        ConfigError: vLLM or this package refuses the combination.
    """
    vllm_config = _vllm_config(model, transfer_config, engine_arguments)
    config = vllm_view.parse_config(vllm_config)
    has_draft_state(vllm_config)  # refuses methods that are not certified
    vllm_config.speculative_config = None  # how drafters place their layers is theirs to say
    pools = [
        worker_pool
        for rank in range(vllm_config.parallel_config.world_size)
        for worker_pool in _worker_pools(vllm_config, config, rank)
    ]
    rows = expected_rows(vllm_config, config)
    identity = vllm_view.weights_identity(vllm_config, config)
    epoch = "" if identity else RANDOM_EPOCH
    return ModelGeometry(
        config=config,
        namespace=vllm_view.build_namespace(vllm_config, rows, identity or "", epoch),
        is_proven=identity is not None,
        objects=vllm_view.describe_objects(vllm_config, rows),
        smallest_object_bytes=min(
            shard.length for worker_pool in pools for shard in worker_pool.layout.shards
        ),
        num_workers=vllm_config.parallel_config.world_size,
    )


def expected_rows(vllm_config: "VllmConfig", config: "HiCacheConfig") -> "PageRows":
    """What the workers would say of their rows."""
    kv_cache = expected_kv_cache(vllm_config, 0)
    pools = kv_pools.model_pools(vllm_config, kv_cache, config)
    return kv_pools.page_rows(_worker_pools(vllm_config, config, 0), pools)


def _worker_pools(
    vllm_config: "VllmConfig", config: "HiCacheConfig", rank: int
) -> "list[WorkerPool]":
    """The pools of the worker of this rank."""
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    kv_cache = expected_kv_cache(vllm_config, rank // tp_size)
    pools = kv_pools.model_pools(vllm_config, kv_cache, config)
    place = kv_pools.Place(rank // tp_size, rank % tp_size)
    return kv_pools.worker_pools(vllm_config, kv_cache, config, pools, place)


def expected_kv_cache(vllm_config: "VllmConfig", stage: int) -> KVCacheConfig:
    """The KV cache of a worker of one pipeline stage, as far as pages depend on it.

    Raises:
        ConfigError: The model keeps other than full or latent attention in every layer. How
            vLLM groups such layers is known when it runs.
    """
    model = vllm_config.model_config
    if model.is_hybrid or model.is_attention_free or _has_windows(vllm_config):
        raise ConfigError(
            "what is stored of models with sliding-window or chunked attention or with states is "
            "known to their engine alone; supported here: full attention in every layer"
        )
    cache = vllm_config.cache_config
    kind = MLAAttentionSpec if model.use_mla else FullAttentionSpec
    spec = kind(
        block_size=cache.block_size or _DEFAULT_BLOCK_SIZE,
        num_kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
        head_size=model.get_head_size(),
        dtype=kv_cache_dtype_str_to_dtype(cache.cache_dtype, model),
        kv_quant_mode=get_kv_quant_mode(cache.cache_dtype),
    )
    starts = vllm_view.stage_starts(vllm_config)
    stops = (*starts[1:], model.get_total_num_hidden_layers())
    names = [f"model.layers.{i}.self_attn.attn" for i in range(starts[stage], stops[stage])]
    return KVCacheConfig(
        num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
    )


def _has_windows(vllm_config: "VllmConfig") -> bool:
    """Whether any layer has a window or chunks; the cache configuration has a window only where
    all layers do."""
    model = vllm_config.model_config
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    window = (
        model.get_sliding_window()
        if "sliding_attention" in kinds
        else vllm_config.cache_config.sliding_window
    )
    return bool(window or getattr(model.hf_text_config, "attention_chunk_size", None))


def _vllm_config(model: str, transfer_config: str, engine_arguments: Sequence[str]) -> "VllmConfig":
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="hicache doctor"))
    given = ["--model", model, "--kv-transfer-config", transfer_config, *engine_arguments]
    arguments = parser.parse_args(given)
    try:
        return EngineArgs.from_cli_args(arguments).create_engine_config()
    except (ValueError, OSError, RuntimeError) as error:  # vLLM's refusals are all of these
        raise ConfigError(f"vLLM refuses this model or its arguments: {error}") from error
