"""Engines that never run: vLLM's real configuration of a tiny Llama, and its own KV cache groups
and tensors for layers that a test makes up.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.connectors import kv_pools, vllm_view
from vllm_hicache.connectors.draft_layers import is_draft_layer
from vllm_hicache.connectors.kv_pools import Place, WorkerPool
from vllm_hicache.pools import ModelPools

BLOCK = 32
NUM_LAYERS = 4
CACHE_BYTES = 2 << 30
ROWS: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64}
FULL = FullAttentionSpec(dtype=torch.float32, **ROWS)
WINDOW = SlidingWindowSpec(dtype=torch.float32, sliding_window=64, **ROWS)
ONE_ROW = {"block_size": BLOCK, "num_kv_heads": 1}
LATENT = MLAAttentionSpec(dtype=torch.float32, head_size=576, max_tp_shards=1, **ONE_ROW)
INDEX = MLAAttentionSpec(
    dtype=torch.uint8,
    head_size=132,
    max_tp_shards=1,
    cache_role=SparseCacheRole.INDEXER,
    **ONE_ROW,
)
STATE = MambaSpec(
    block_size=BLOCK,
    shapes=((3, 512), (4, 64, 64)),
    dtypes=(torch.float32, torch.float32),
    mamba_cache_mode="align",
)
STATE_BYTES = (3 * 512 + 4 * 64 * 64) * 4

Specs = Mapping[str, KVCacheSpec]


def attention(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


def indexer(number: int) -> str:
    return f"model.layers.{number}.self_attn.indexer.k_cache"


def state(number: int) -> str:
    return f"model.layers.{number}.linear_attn"


def draft(number: int) -> str:
    return f"draft_model.model.layers.{number}.self_attn.attn"


def each(name: Callable[[int], str], *specs: KVCacheSpec) -> dict[str, KVCacheSpec]:
    """One layer for each spec, numbered from 0."""
    return {name(number): spec for number, spec in enumerate(specs)}


GEMMA3 = each(attention, WINDOW, WINDOW, WINDOW, FULL)
GPTOSS = each(attention, WINDOW, FULL, WINDOW, FULL)
MISTRAL = each(attention, *[WINDOW] * NUM_LAYERS)
LLAMA = each(attention, *[FULL] * NUM_LAYERS)
QWEN3NEXT = each(state, STATE, STATE, STATE) | {attention(3): FULL}
DEEPSEEK = each(attention, *[LATENT] * 4) | each(indexer, *[INDEX] * 4)


@dataclass(frozen=True)
class Engine:
    """What scheduler and workers of one engine are given by vLLM."""

    vllm_config: VllmConfig
    config: HiCacheConfig
    scheduler: KVCacheConfig
    stages: tuple[KVCacheConfig, ...]

    def model_pools(self) -> ModelPools:
        """As the scheduler sees them."""
        return kv_pools.model_pools(self.vllm_config, self.scheduler, self.config)

    def worker(self, stage: int = 0, tp_rank: int = 0) -> list[WorkerPool]:
        own, place = self.stages[stage], Place(stage, tp_rank)
        pools = kv_pools.model_pools(self.vllm_config, own, self.config)
        return kv_pools.worker_pools(self.vllm_config, own, self.config, pools, place)


def engine(
    model: Path,
    specs: Specs,
    *,
    tp: int = 1,
    pp: int = 1,
    speculative: Path | None = None,
    layout: str = "LBHNC",
    **options: object,
) -> Engine:
    """``specs`` are those of a worker, with its share of heads."""
    vllm_config = _vllm_config(model, tp, pp, speculative)
    vllm_config.cache_config.kv_cache_layout = layout
    starts = vllm_view.stage_starts(vllm_config)
    placed: list[dict[str, KVCacheSpec]] = [{} for _ in range(pp)]
    for name, spec in specs.items():
        number = extract_layer_index(name)
        is_draft = speculative is not None and is_draft_layer(name, NUM_LAYERS)
        stage = pp - 1 if is_draft else sum(start <= number for start in starts) - 1
        placed[stage][name] = spec
    stages = get_kv_cache_configs(vllm_config, placed, [CACHE_BYTES] * pp)
    for stage_config in stages:
        stage_config.kv_cache_layout = layout
    return Engine(
        vllm_config,
        HiCacheConfig.parse(options),
        generate_scheduler_kv_cache_config(stages),
        tuple(stages),
    )


@cache
def _vllm_config(model: Path, tp: int, pp: int, speculative: Path | None) -> VllmConfig:
    drafting = {"model": str(speculative), "method": "draft_model", "num_speculative_tokens": 2}
    return EngineArgs(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        skip_tokenizer_init=True,
        max_model_len=4096,
        speculative_config=drafting if speculative is not None else None,
        kv_transfer_config=KVTransferConfig(
            kv_connector="HiCacheConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
        ),
    ).create_engine_config()
