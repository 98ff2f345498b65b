"""Names and sizes of what engines with one pool store, as they were before there were pools.

Another number here means that stored pages of a released format are not found any more.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.connectors import kv_pools
from vllm_hicache.connectors.model_geometry import expected_kv_cache, expected_rows
from vllm_hicache.connectors.vllm_view import build_namespace
from vllm_hicache.keys import shard_name

pytestmark = pytest.mark.vllm

LATENT_MODEL = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
SPLIT = {"fleet": {"tp": [1, 2], "pp": [1, 2]}}


@pytest.fixture(scope="module")
def models(tiny_llama: Callable[..., Path], tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("latent")
    (folder / "config.json").write_text(json.dumps(LATENT_MODEL))
    return {"llama": tiny_llama(), "latent": folder}


def vllm_config_of(model: Path, tp: int, pp: int, block: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model),
        dtype="float32",
        block_size=block,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        skip_tokenizer_init=True,
        max_model_len=4096,
    ).create_engine_config()


@pytest.mark.parametrize(
    ("model", "tp", "pp", "block", "options", "digest", "workers"),
    [
        (*("llama", 1, 1, 16), {}, "def10e2322535d80", [["L0-4_H0", "L0-4_H1"]]),
        (*("llama", 2, 1, 16), {"page_size": 64}, "cb05d723abbc85f6", [["L0-4_H0"], ["L0-4_H1"]]),
        (
            *("llama", 1, 2, 16),
            {"page_size": 64, "storage_layer_partition": 2},
            "8b8d658d9a367a4e",
            [["L0-2_H0", "L0-2_H1"], ["L2-4_H0", "L2-4_H1"]],
        ),
        (
            *("llama", 1, 1, 64),
            {"page_size": 128} | SPLIT,
            "ab19dac1ac26b7bd",
            [["L0-2_H0", "L0-2_H1", "L2-4_H0", "L2-4_H1"]],
        ),
        (*("latent", 1, 1, 16), {"page_size": 64}, "35468adc3d100cce", [["L0-3_H0"]]),
        (
            *("latent", 2, 1, 16),
            {"page_size": 64, "storage_layer_partition": 1},
            "99cb366e25d60e6a",
            [["L0-1_H0", "L1-2_H0", "L2-3_H0"]] * 2,
        ),
        (
            *("latent", 1, 3, 16),
            {"page_size": 256, "fleet": {"tp": [1, 4], "pp": [3]}},
            "7b20a172a9bc3004",
            [["L0-1_H0"], ["L1-2_H0"], ["L2-3_H0"]],
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, str | int) else "",
)
def test_namespaces_and_names_of_objects_stay_as_they_are(
    models, model, tp, pp, block, options, digest, workers
):
    vllm_config = vllm_config_of(models[model], tp, pp, block)
    given = {"storage": "file:///nowhere", "min_object_bytes": 1, **options}
    config = HiCacheConfig.parse(given)
    namespace = build_namespace(vllm_config, expected_rows(vllm_config, config), "given:pinned", "")
    # What transformers makes of the rotary embedding is its own matter.
    namespace = msgspec.structs.replace(namespace, rope="")
    assert namespace.digest == f"hc1-{digest}"
    found = []
    for rank in range(tp * pp):
        kv_cache = expected_kv_cache(vllm_config, rank // tp)
        pools = kv_pools.model_pools(vllm_config, kv_cache, config)
        place = kv_pools.Place(rank // tp, rank % tp)
        (one,) = kv_pools.worker_pools(vllm_config, kv_cache, config, pools, place)
        found.append([shard_name(bytes(32), namespace.digest, s) for s in one.layout.shards])
    start = f"{bytes(32).hex()}_hc1-{digest}_"
    assert found == [[start + name for name in names] for names in workers]


def test_rows_of_a_page_lie_head_by_head_and_layer_by_layer(models):
    vllm_config = vllm_config_of(models["llama"], 1, 1, 64)
    options = {"storage": "file:///nowhere", "page_size": 128} | SPLIT
    config = HiCacheConfig.parse(options)
    kv_cache = expected_kv_cache(vllm_config, 0)
    pools = kv_pools.model_pools(vllm_config, kv_cache, config)
    place = kv_pools.Place(0, 0)
    (one,) = kv_pools.worker_pools(vllm_config, kv_cache, config, pools, place)
    assert [(shard.offset, shard.length) for shard in one.layout.shards] == [
        (0, 131072),
        (262144, 131072),
        (131072, 131072),
        (393216, 131072),
    ]
    assert one.layout.slot_stride == 524288
