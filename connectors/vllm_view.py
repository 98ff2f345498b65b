"""What vLLM's configuration means to us, and what of it we refuse. Most attribute names of
vLLM that this package depends on are spelt here.
"""

import logging
import os
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
)

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.connectors.messages import PageRows
from vllm_hicache.connectors.model_identity import rope_identity, weights_fingerprint
from vllm_hicache.connectors.supported_vllm import check_vllm_version
from vllm_hicache.errors import ConfigError
from vllm_hicache.grid import Grid, coarsest_grid, even_stage_starts, own_grid, readers
from vllm_hicache.hashing import HASH_VERSION
from vllm_hicache.host_memory import HostMemory
from vllm_hicache.keys import FORMAT_VERSION, Namespace
from vllm_hicache.layout import LayerSpan
from vllm_hicache.pools import ModelPools

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig

logger = logging.getLogger(__name__)

CONNECTOR_NAME = "HiCacheConnector"


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How one worker's KV cache holds rows."""

    block_size: int
    num_heads: int
    k_bytes: int
    v_bytes: int
    itemsize: int
    packing: str
    """`rows`, `k_transposed` or `opaque`, as device_layout defines them."""
    packing_id: str
    """What objects with these bytes may be shared with; `rows` for canonical rows."""


def check_transfer_config(transfer: "KVTransferConfig") -> None:
    """Refuse roles and policies under which a cache would break requests."""
    if transfer.kv_role not in ("kv_both", "kv_consumer"):
        raise ConfigError(
            f"kv_role must be kv_both or kv_consumer, got {transfer.kv_role!r}: with another "
            "role vLLM reuses device blocks while a step that writes to them may be running"
        )
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "kv_load_failure_policy must be recompute, got "
            f"{transfer.kv_load_failure_policy!r}: a failed load shall cost a recompute, not the "
            'request; add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )


def parse_config(vllm_config: "VllmConfig") -> HiCacheConfig:
    """Our options, after refusing what cannot work with any of them."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        raise ConfigError(f"{CONNECTOR_NAME} needs --kv-transfer-config")
    check_vllm_version()
    check_transfer_config(transfer)
    check_parallelism(vllm_config)
    return HiCacheConfig.parse(transfer.kv_connector_extra_config)


def workers_on_host(parallel: "ParallelConfig", host_memory: HostMemory) -> int:
    """Workers of all engines of this deployment on this host, as far as vLLM tells.

    A replica of a dense model is configured as an engine of its own, so that it cannot take a
    share of the host: ConfigError asks for a size then. Only those behind the first one know that
    they are replicas; one that refuses ends the start of all.
    """
    is_dense_replica = parallel.data_parallel_size == 1 and parallel.data_parallel_index > 0
    if is_dense_replica and host_memory.kind in ("auto", "fraction"):
        raise ConfigError(
            f'host_memory must be a size ("8GiB") or a ratio ("2x") with data parallelism of a '
            f"dense model, got {host_memory}: vLLM does not tell a replica how many share the host"
        )
    return parallel.local_world_size * parallel.data_parallel_size_local


def check_parallelism(vllm_config: "VllmConfig") -> None:
    """Refuse what this release does not save and restore whole."""
    parallel = vllm_config.parallel_config
    for name, size in (
        ("decode context parallelism", parallel.decode_context_parallel_size),
        ("prefill context parallelism", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            raise ConfigError(f"{name} of size {size} is not supported yet; allowed: 1")


def check_options(config: HiCacheConfig, pools: ModelPools) -> None:
    """Refuse options that know one KV cache group whose blocks stay until they are reused."""
    groups = f"{len(pools.groups)} KV cache group(s)"
    if config.write_policy == "write_back" and (pools.pools or len(pools.groups) > 1):
        kinds = ", ".join(pool.name for pool in pools.pools) or "nothing"
        raise ConfigError(
            f'write_policy must be "write_through" or "write_through_selective" for this model, '
            f'got "write_back": it has {groups} and pages that may lack {kinds}, which can be '
            "saved only with the step that computes them"
        )
    drafts = [pool.name for pool in pools.pools if pool.is_draft]
    if config.load_mode == "layerwise" and (len(pools.groups) > 1 or drafts):
        found = "draft state, which its drafter reads beside the model" if drafts else groups
        raise ConfigError(
            f'load_mode must be "async" for this model, got "layerwise": it has {found}, and '
            "layers can wait for loads of one group of the model itself"
        )
    if config.kv_events and not has_one_kind(pools):
        raise ConfigError(
            f"kv_events must be false or unset for this model, got true: it has {groups}, and "
            "events of host and storage tell of one kind of blocks, those of full attention"
        )


def sync_load_max_s(vllm_config: "VllmConfig", config: HiCacheConfig) -> float:
    """Longest load that a step waits for before its forward; 0.0 where none may.

    With more than one batch in flight vLLM has scheduled a request's next tokens before it hears
    that the load failed, and keeps what they answer: only preemptions mark such output as stale,
    and to report the blocks again with later batches does not reach them (DESIGN.md).
    """
    batches = vllm_config.max_concurrent_batches
    if batches == 1 or not config.sync_load_max_ms:
        return config.sync_load_max_ms / 1000
    if config.load_mode == "async":
        logger.info("HiCache: loads run beside the steps, vLLM has %d batches in flight", batches)
    return 0.0


def has_one_kind(pools: ModelPools) -> bool:
    """Whether all blocks of the model itself are those of one group, which every page has."""
    return len(pools.groups) == 1 and pools.groups[0].bit is None


def publishes_events(vllm_config: "VllmConfig", config: HiCacheConfig, pools: ModelPools) -> bool:
    """Whether routers are told what host and storage hold."""
    published = vllm_config.kv_events_config
    if config.kv_events is False or published is None or not published.enable_kv_cache_events:
        return False
    if not has_one_kind(pools):
        logger.warning(
            "HiCache: KV events of host and storage are not published: this model keeps several "
            "kinds of KV, and they tell of one; those of vLLM's own cache are not affected"
        )
        return False
    return True


def kv_format(vllm_config: "VllmConfig", spec: FullAttentionSpec) -> KVFormat:
    """Row sizes and packing of this worker's KV cache."""
    itemsize = torch.empty(0, dtype=spec.dtype).element_size()
    k_bytes, v_bytes = spec.head_size * itemsize, spec.head_size_v * itemsize
    extra = spec.state_content_size_bytes - k_bytes - v_bytes
    if extra < 0:
        raise ConfigError(
            f"KV rows of {spec.state_content_size_bytes} bytes are smaller than K and V of "
            f"{k_bytes} and {v_bytes} bytes; sub-byte KV caches are not supported yet"
        )
    packing, packing_id = "rows", "rows"
    if current_platform.is_cpu() and not isinstance(spec, MLAAttentionSpec):
        packing, packing_id = _cpu_packing(vllm_config, spec)
    return KVFormat(
        block_size=spec.block_size,
        num_heads=spec.num_kv_heads,
        k_bytes=k_bytes,
        v_bytes=v_bytes + extra,
        itemsize=itemsize,
        packing=packing,
        packing_id=packing_id,
    )


def _cpu_packing(vllm_config: "VllmConfig", spec: FullAttentionSpec) -> tuple[str, str]:
    """vLLM's CPU attention packs the tokens of a block in one of several ways."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa, is_quantized_kv_cache

    isa = _get_attn_isa(
        vllm_config.model_config.dtype,
        spec.block_size,
        spec.head_size,
        vllm_config.cache_config.cache_dtype,
    )
    cache_dtype = vllm_config.cache_config.cache_dtype
    if isa in ("vec", "vec16") and not is_quantized_kv_cache(cache_dtype):
        return "k_transposed", "rows"
    return "opaque", f"cpu-{isa}-{cache_dtype}-block{spec.block_size}"


def total_kv_heads(vllm_config: "VllmConfig") -> int:
    """KV heads of the whole model; a latent is one head, whatever vLLM expands it to."""
    model = vllm_config.model_config
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


def stage_starts(vllm_config: "VllmConfig") -> tuple[int, ...]:
    """First layers of this engine's pipeline stages, as vLLM cuts them."""
    by_hand = os.environ.get("VLLM_PP_LAYER_PARTITION")
    if by_hand:
        sizes = [int(size) for size in by_hand.split(",")]
        return tuple(accumulate(sizes[:-1], initial=0))
    stages = vllm_config.parallel_config.pipeline_parallel_size
    return even_stage_starts(vllm_config.model_config.get_total_num_hidden_layers(), stages)


def stage_span(vllm_config: "VllmConfig", stage: int) -> tuple[LayerSpan, int]:
    """The layers of a pipeline stage, and how many the model has."""
    total = vllm_config.model_config.get_total_num_hidden_layers()
    starts = (*stage_starts(vllm_config), total)
    return LayerSpan(starts[stage], starts[stage + 1]), total


def storage_grid(
    vllm_config: "VllmConfig",
    config: HiCacheConfig,
    *,
    heads: int,
    local_heads: int,
    is_whole: bool,
    is_first: bool,
) -> Grid:
    """How pages of a pool with so many heads, ``local_heads`` of them on a worker, are cut into
    stored objects. ``is_whole``: rows that no engine cuts by heads. A number of heads that is
    given must fit the first kind of KV, and holds for others where it fits."""
    if config.fleet is not None:
        return coarsest_grid(
            config.fleet,
            total_layers=vllm_config.model_config.get_total_num_hidden_layers(),
            total_kv_heads=1 if is_whole else heads,
            own_starts=stage_starts(vllm_config),
            is_latent=is_whole,
        )
    given = 1 if is_whole else config.storage_head_partition
    if given and not is_first and (heads % given or local_heads % given):
        given = 0
    return own_grid(
        layer_partition=config.storage_layer_partition,
        head_partition=given,
        total_kv_heads=heads,
        local_heads=local_heads,
    )


def describe_objects(vllm_config: "VllmConfig", rows: PageRows) -> str:
    """Size and number of stored objects and who can read them, for the start line."""
    if rows.kind == "pools":
        return "objects of several pools, readable by engines of the same grid"
    total_layers = vllm_config.model_config.get_total_num_hidden_layers()
    starts = stage_starts(vllm_config)
    layers = rows.layer_partition or total_layers // len(starts)
    row_bytes = rows.k_row_bytes + rows.v_row_bytes
    num_bytes = rows.page_size * layers * rows.heads_per_group * row_bytes
    groups = rows.total_kv_heads // rows.heads_per_group
    per_page = groups * -(-total_layers // layers)
    sizes = readers(
        Grid(rows.layer_partition, rows.heads_per_group),
        total_layers=total_layers,
        total_kv_heads=rows.total_kv_heads,
        own_starts=starts,
        is_latent=vllm_config.model_config.use_mla,
    )
    return (
        f"objects of {num_bytes / 1024:.0f} KiB, {per_page * 1000 / rows.page_size:.1f} for 1,000 "
        f"tokens, readable by engines of TP {', '.join(map(str, sizes['tp']))} and PP "
        f"{', '.join(map(str, sizes['pp']))}"
    )


def kv_buffer(kv_caches: dict[str, torch.Tensor], kv_cache_config: KVCacheConfig) -> torch.Tensor:
    """The bytes behind all layers, flat; checked against where vLLM's own views begin."""
    first = kv_caches[kv_cache_config.kv_cache_tensors[0].layers[0]]
    storage = first.untyped_storage()
    for tensor in kv_cache_config.kv_cache_tensors:
        for i, name in enumerate(tensor.layers):
            expected = storage.data_ptr() + tensor.offset + i * tensor.layer_stride
            if kv_caches[name].data_ptr() != expected:
                raise ConfigError(
                    f"layer {name} begins {kv_caches[name].data_ptr() - storage.data_ptr()} bytes "
                    f"into its buffer, vLLM's placement says {expected - storage.data_ptr()}"
                )
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(
        storage, 0, (storage.nbytes(),)
    )


def build_namespace(
    vllm_config: "VllmConfig", rows: PageRows, identity: str, epoch: str
) -> Namespace:
    """Everything that must agree before pages may be shared; ``rows`` are any worker's."""
    model = vllm_config.model_config
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return Namespace(
        format_version=FORMAT_VERSION,
        model_id="+".join(model.architectures) or "model",
        weights=identity,
        dtype=str(model.dtype).removeprefix("torch.") if cache_dtype == "auto" else cache_dtype,
        kv_scales="checkpoint" if cache_dtype.startswith("fp8") else "none",
        page_size=rows.page_size,
        rope=rope_identity(model.hf_text_config, max_model_len=model.max_model_len),
        group_kind=rows.kind,
        window=rows.reach,
        total_kv_heads=rows.total_kv_heads,
        heads_per_group=rows.heads_per_group,
        layer_partition=rows.layer_partition,
        k_row_bytes=rows.k_row_bytes,
        v_row_bytes=rows.v_row_bytes,
        token_packing=rows.token_packing,
        hash_version=HASH_VERSION,
        epoch=epoch,
    )


def weights_identity(vllm_config: "VllmConfig", config: HiCacheConfig) -> str | None:
    """Content of the weights, where it can be proven; None means: share nothing over restarts."""
    if config.weights_id is not None:
        return f"given:{config.weights_id}"
    return weights_fingerprint(vllm_config)
