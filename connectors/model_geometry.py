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

from vllm_hicache.connectors import vllm_view
from vllm_hicache.connectors.messages import WorkerHello
from vllm_hicache.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_hicache.config import HiCacheConfig
    from vllm_hicache.keys import Namespace
    from vllm_hicache.layout import PageLayout

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
    """Build vLLM's configuration of these command-line arguments and derive what follows.

    Raises:
        ConfigError: vLLM or this package refuses the combination.
    """
    vllm_config = _vllm_config(model, transfer_config, engine_arguments)
    config = vllm_view.parse_config(vllm_config)
    layouts = [
        _layout(vllm_config, config, stage, rank)
        for stage in range(vllm_config.parallel_config.pipeline_parallel_size)
        for rank in range(vllm_config.parallel_config.tensor_parallel_size)
    ]
    hello = expected_hello(vllm_config, config)
    identity = vllm_view.weights_identity(vllm_config, config)
    epoch = "" if identity else RANDOM_EPOCH
    return ModelGeometry(
        config=config,
        namespace=vllm_view.build_namespace(vllm_config, hello, identity or "", epoch),
        is_proven=identity is not None,
        objects=vllm_view.describe_objects(vllm_config, hello),
        smallest_object_bytes=min(shard.length for layout in layouts for shard in layout.shards),
        num_workers=vllm_config.parallel_config.world_size,
    )


def expected_hello(vllm_config: "VllmConfig", config: "HiCacheConfig") -> WorkerHello:
    """What the first worker would say of its pages; what only a running one knows is empty."""
    layout, kv = vllm_view.worker_page(
        vllm_config, expected_kv_cache(vllm_config, 0), config, tp_rank=0
    )
    return WorkerHello(
        worker_id=0,
        num_slots=0,
        page_size=layout.page_size,
        page_bytes=layout.page_bytes,
        written_bytes=layout.own_bytes,
        layout_digest=0,
        token_packing=kv.packing_id,
        k_row_bytes=kv.k_bytes,
        v_row_bytes=kv.v_bytes,
        total_kv_heads=layout.total_kv_heads,
        heads_per_group=layout.heads_per_group,
        layer_partition=layout.layer_partition,
        storage_address=None,
        board_path="",
        board_token=0,
    )


def expected_kv_cache(vllm_config: "VllmConfig", stage: int) -> KVCacheConfig:
    """The KV cache of a worker of one pipeline stage, as far as pages depend on it.

    Raises:
        ConfigError: The model keeps other than full or latent attention in every layer.
    """
    model = vllm_config.model_config
    if model.is_hybrid or model.is_attention_free:
        raise ConfigError(
            "state-space and hybrid models are not supported yet; supported: full attention"
        )
    cache = vllm_config.cache_config
    kind = MLAAttentionSpec if model.use_mla else FullAttentionSpec
    spec = kind(
        block_size=cache.block_size or _DEFAULT_BLOCK_SIZE,
        num_kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
        head_size=model.get_head_size(),
        dtype=kv_cache_dtype_str_to_dtype(cache.cache_dtype, model),
        kv_quant_mode=get_kv_quant_mode(cache.cache_dtype),
        sliding_window=_sliding_window(vllm_config),
        attention_chunk_size=getattr(model.hf_text_config, "attention_chunk_size", None),
    )
    starts = vllm_view.stage_starts(vllm_config)
    stops = (*starts[1:], model.get_total_num_hidden_layers())
    names = [f"model.layers.{i}.self_attn.attn" for i in range(starts[stage], stops[stage])]
    return KVCacheConfig(
        num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
    )


def _sliding_window(vllm_config: "VllmConfig") -> int | None:
    """The window of any layer; the cache configuration has it only where all layers do."""
    model = vllm_config.model_config
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    has_some = "sliding_attention" in kinds
    return model.get_sliding_window() if has_some else vllm_config.cache_config.sliding_window


def _layout(
    vllm_config: "VllmConfig", config: "HiCacheConfig", stage: int, tp_rank: int
) -> "PageLayout":
    kv_cache = expected_kv_cache(vllm_config, stage)
    return vllm_view.worker_page(vllm_config, kv_cache, config, tp_rank)[0]


def _vllm_config(model: str, transfer_config: str, engine_arguments: Sequence[str]) -> "VllmConfig":
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="hicache doctor"))
    given = ["--model", model, "--kv-transfer-config", transfer_config, *engine_arguments]
    arguments = parser.parse_args(given)
    try:
        return EngineArgs.from_cli_args(arguments).create_engine_config()
    except (ValueError, OSError, RuntimeError) as error:  # vLLM's refusals are all of these
        raise ConfigError(f"vLLM refuses this model or its arguments: {error}") from error
