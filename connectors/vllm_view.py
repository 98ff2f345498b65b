"""What vLLM's configuration means to us, and what of it we refuse. Most attribute names of
vLLM that this package depends on are spelt here.
"""

import os
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.connectors.messages import WorkerHello
from vllm_hicache.connectors.model_identity import rope_identity, weights_fingerprint
from vllm_hicache.connectors.supported_vllm import check_vllm_version
from vllm_hicache.device_layout import DeviceLayers, RowFormat, TensorPlacement, device_layers
from vllm_hicache.errors import ConfigError
from vllm_hicache.grid import Grid, coarsest_grid, even_stage_starts, own_grid, readers
from vllm_hicache.hashing import HASH_VERSION
from vllm_hicache.host_memory import HostMemory
from vllm_hicache.keys import FORMAT_VERSION, Namespace
from vllm_hicache.layout import LayerSpan, PageLayout

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig

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
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "suffix"):
        raise ConfigError(
            f"speculative method {speculative.method!r} keeps draft state that is not saved yet: "
            "a restored prefix would lose it; allowed: ngram, suffix, or none"
        )


def full_attention_spec(kv_cache_config: KVCacheConfig) -> FullAttentionSpec:
    """The one KV cache group of the model; anything else is refused by name."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise ConfigError(
            f"this model has {len(groups)} KV cache groups ({', '.join(kinds)}); supported: one "
            "group of full attention"
        )
    spec = groups[0].kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        raise ConfigError(
            "the layers of this model differ in their KV shape; supported: one shape for all"
        )
    if not isinstance(spec, FullAttentionSpec):
        raise ConfigError(
            f"KV cache of kind {type(spec).__name__} is not supported yet; supported: "
            "FullAttentionSpec (multi-head and grouped-query attention) and MLAAttentionSpec"
        )
    if isinstance(spec, MLAAttentionSpec):
        _check_latent(spec)
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        raise ConfigError(
            "sliding-window and chunked attention are not supported yet, also where vLLM keeps "
            "them as full attention"
        )
    if spec.num_head_slots not in (None, spec.num_kv_heads) or spec.tokens_per_state != 1:
        raise ConfigError(
            f"KV cache with {spec.num_head_slots} head slots for {spec.num_kv_heads} heads and "
            f"{spec.tokens_per_state} tokens per state is not supported; expected one row per "
            "token and head"
        )
    return spec


def _check_latent(spec: MLAAttentionSpec) -> None:
    if spec.model_version is not None:
        raise ConfigError(
            f"latent KV of kind {spec.model_version} is not supported yet; supported: one latent "
            "row per token and layer"
        )


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


def worker_page(
    vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig, config: HiCacheConfig, tp_rank: int
) -> tuple[PageLayout, KVFormat]:
    """The part of every page that this worker keeps."""
    spec = full_attention_spec(kv_cache_config)
    kv = kv_format(vllm_config, spec)
    total_heads = total_kv_heads(vllm_config)
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    is_latent = isinstance(spec, MLAAttentionSpec)  # every worker keeps the whole latent
    if not is_latent and kv.num_heads * tp_size != total_heads:
        raise ConfigError(
            f"{total_heads} KV heads over tensor parallelism {tp_size} gives {kv.num_heads} heads "
            f"per worker, some of them replicas; supported: a divisor of {total_heads}"
        )
    head_start = 0 if is_latent else tp_rank * kv.num_heads
    grid = storage_grid(vllm_config, config, kv.num_heads)
    layout = PageLayout(
        page_size=config.page_size,
        layers=layer_span(kv_cache_config),
        total_layers=vllm_config.model_config.get_total_num_hidden_layers(),
        head_start=head_start,
        head_stop=head_start + kv.num_heads,
        total_kv_heads=total_heads,
        heads_per_group=grid.heads_per_group,
        row_bytes=kv.k_bytes + kv.v_bytes,
        layer_partition=grid.layer_partition,
        num_replicas=tp_size if is_latent else 1,
        replica=tp_rank if is_latent else 0,
    )
    return layout, kv


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


def storage_grid(vllm_config: "VllmConfig", config: HiCacheConfig, local_heads: int) -> Grid:
    """How pages are cut into stored objects."""
    heads = total_kv_heads(vllm_config)
    if config.fleet is not None:
        return coarsest_grid(
            config.fleet,
            total_layers=vllm_config.model_config.get_total_num_hidden_layers(),
            total_kv_heads=heads,
            own_starts=stage_starts(vllm_config),
            is_latent=vllm_config.model_config.use_mla,
        )
    return own_grid(
        layer_partition=config.storage_layer_partition,
        head_partition=config.storage_head_partition,
        total_kv_heads=heads,
        local_heads=local_heads,
    )


def describe_objects(vllm_config: "VllmConfig", hello: WorkerHello) -> str:
    """Size and number of stored objects and who can read them, for the start line."""
    total_layers = vllm_config.model_config.get_total_num_hidden_layers()
    starts = stage_starts(vllm_config)
    layers = hello.layer_partition or total_layers // len(starts)
    row_bytes = hello.k_row_bytes + hello.v_row_bytes
    num_bytes = hello.page_size * layers * hello.heads_per_group * row_bytes
    groups = hello.total_kv_heads // hello.heads_per_group
    per_page = groups * -(-total_layers // layers)
    sizes = readers(
        Grid(hello.layer_partition, hello.heads_per_group),
        total_layers=total_layers,
        total_kv_heads=hello.total_kv_heads,
        own_starts=starts,
        is_latent=vllm_config.model_config.use_mla,
    )
    return (
        f"objects of {num_bytes / 1024:.0f} KiB, {per_page * 1000 / hello.page_size:.1f} for 1,000 "
        f"tokens, readable by engines of TP {', '.join(map(str, sizes['tp']))} and PP "
        f"{', '.join(map(str, sizes['pp']))}"
    )


def layer_span(kv_cache_config: KVCacheConfig) -> LayerSpan:
    """Absolute layers of this worker."""
    names = kv_cache_config.kv_cache_groups[0].layer_names
    numbers = sorted(extract_layer_index(name) for name in names)
    if not numbers or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise ConfigError(
            f"expected one attention layer after the other on a worker, got layers {numbers} "
            f"({', '.join(names[:4])} ...)"
        )
    return LayerSpan(numbers[0], numbers[-1] + 1)


def worker_device_layers(
    kv_caches: dict[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    layout: PageLayout,
    kv: KVFormat,
) -> list[DeviceLayers]:
    """Where this worker's rows lie in its KV buffer, from vLLM's placement and layout name.

    Axis 2 of vLLM's views tells into blocks of how many tokens its kernels split a block.
    """
    layout_name = kv_cache_config.kv_cache_layout
    rows = RowFormat(
        num_heads=kv.num_heads,
        k_bytes=kv.k_bytes,
        v_bytes=kv.v_bytes,
        itemsize=kv.itemsize,
        packing=kv.packing,  # type: ignore[arg-type]
    )
    return [
        device_layers(
            TensorPlacement(
                layers=tuple(extract_layer_index(n) - layout.layers.start for n in tensor.layers),
                num_blocks=kv_cache_config.num_blocks,
                layer_stride=tensor.layer_stride,
                block_stride=tensor.block_stride,
                offset=tensor.offset,
            ),
            rows,
            layout_name=str(layout_name),
            block_size=kv.block_size,
            kernel_block_size=kv_caches[tensor.layers[0]].shape[2],
        )
        for tensor in kv_cache_config.kv_cache_tensors
    ]


def kv_buffer(kv_caches: dict[str, torch.Tensor], kv_cache_config: KVCacheConfig) -> torch.Tensor:
    """The bytes behind all layers, flat; checked against where vLLM's own views begin."""
    first = kv_caches[kv_cache_config.kv_cache_groups[0].layer_names[0]]
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
    vllm_config: "VllmConfig", hello: WorkerHello, identity: str, epoch: str
) -> Namespace:
    """Everything that must agree before pages may be shared; ``hello`` is any worker's."""
    model = vllm_config.model_config
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return Namespace(
        format_version=FORMAT_VERSION,
        model_id="+".join(model.architectures) or "model",
        weights=identity,
        dtype=str(model.dtype).removeprefix("torch.") if cache_dtype == "auto" else cache_dtype,
        kv_scales="checkpoint" if cache_dtype.startswith("fp8") else "none",
        page_size=hello.page_size,
        rope=rope_identity(model.hf_text_config, max_model_len=model.max_model_len),
        group_kind="latent" if model.use_mla else "full_attention",
        window=0,
        total_kv_heads=hello.total_kv_heads,
        heads_per_group=hello.heads_per_group,
        layer_partition=hello.layer_partition,
        k_row_bytes=hello.k_row_bytes,
        v_row_bytes=hello.v_row_bytes,
        token_packing=hello.token_packing,
        hash_version=HASH_VERSION,
        epoch=epoch,
    )


def weights_identity(vllm_config: "VllmConfig", config: HiCacheConfig) -> str | None:
    """Content of the weights, where it can be proven; None means: share nothing over restarts."""
    if config.weights_id is not None:
        return f"given:{config.weights_id}"
    return weights_fingerprint(vllm_config)
