"""vLLM's real scheduler with a connector, for a device that is only computed."""

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.structured_output import StructuredOutputManager

from vllm_hicache.benchmarks.arms import CONNECTORS
from vllm_hicache.benchmarks.device_model import HostLink
from vllm_hicache.benchmarks.model_shapes import LLAMA_8B, kv_bytes_per_token
from vllm_hicache.benchmarks.virtual_workers import (
    CopySizes,
    HiCacheWorker,
    NativeWorker,
    NoConnector,
    SimpleWorker,
    VirtualWorker,
)
from vllm_hicache.config import HiCacheConfig
from vllm_hicache.connectors.kv_pools import model_pools


@dataclass(frozen=True, slots=True)
class VirtualPlan:
    """One engine; its model has the Llama-8B shape."""

    arm: str
    """What its result is called."""
    connector: str
    """vLLM's name of it; empty for none."""
    connector_options: dict[str, Any] = field(default_factory=dict)
    device_bytes: int = 16 << 30
    """Of KV."""
    host_bytes: int = 64 << 30
    link_bytes_per_s: float = 53e9
    block_size: int = 16
    batched_tokens: int = 8192
    longest_tokens: int = 32768
    """Prompt and answer."""
    num_requests: int = 32
    """At once."""


def make_scheduler(
    plan: VirtualPlan, folder: Path, link: HostLink
) -> tuple[AsyncScheduler, VirtualWorker]:
    """The scheduler and the worker of its connector, which know each other; ``folder`` takes the
    model's config."""
    config = _vllm_config(plan, folder)
    num_blocks = plan.device_bytes // (plan.block_size * token_bytes())
    config.cache_config.num_gpu_blocks = num_blocks
    # The platform of a CPU turns it off, and a GPU has it by default.
    config.scheduler_config.async_scheduling = True
    cache_config = _kv_cache_config(plan, num_blocks)
    scheduler = AsyncScheduler(
        config, cache_config, StructuredOutputManager(config), plan.block_size, log_stats=True
    )
    sizes = CopySizes(
        block_size=plan.block_size,
        page_size=plan.block_size,
        token_bytes=token_bytes(),
        num_layers=LLAMA_8B["num_hidden_layers"],
        host_bytes=plan.host_bytes,
    )
    if not plan.connector:
        return scheduler, NoConnector()
    if plan.connector == CONNECTORS["native"]:
        return scheduler, NativeWorker(link, sizes)
    if plan.connector == CONNECTORS["simple"]:
        return scheduler, SimpleWorker(link, sizes)
    options = HiCacheConfig.parse(plan.connector_options)
    worker = HiCacheWorker(
        link,
        replace(sizes, page_size=model_pools(config, cache_config, options).page_size),
        is_layerwise=options.load_mode == "layerwise",
    )
    scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.hello()})
    return scheduler, worker


def token_bytes() -> int:
    """Bytes of KV of a token in all layers."""
    return kv_bytes_per_token(LLAMA_8B, "auto")


def _kv_cache_config(plan: VirtualPlan, num_blocks: int) -> KVCacheConfig:
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(LLAMA_8B["num_hidden_layers"])]
    spec = FullAttentionSpec(
        block_size=plan.block_size,
        num_kv_heads=LLAMA_8B["num_key_value_heads"],
        head_size=LLAMA_8B["head_dim"],
        dtype=torch.bfloat16,
    )
    layer_bytes = num_blocks * spec.page_size_bytes
    tensor = KVCacheTensor(
        size=len(layers) * layer_bytes,
        layers=layers,
        layer_stride=layer_bytes,
        block_stride=spec.page_size_bytes,
    )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
    )


def _vllm_config(plan: VirtualPlan, folder: Path) -> VllmConfig:
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    transfer = None
    if plan.connector:
        transfer = KVTransferConfig(
            kv_connector=plan.connector,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=plan.connector_options,
        )
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=plan.longest_tokens,
        max_num_seqs=plan.num_requests,
        max_num_batched_tokens=plan.batched_tokens,
        block_size=plan.block_size,
        enable_prefix_caching=True,
        async_scheduling=True,
        kv_transfer_config=transfer,
    ).create_engine_config()
