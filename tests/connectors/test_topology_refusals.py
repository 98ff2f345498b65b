"""Topologies that share no objects with the fleet are refused from vLLM's own configuration, with
the numbers, before any worker has memory or storage.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.connectors import kv_pools, vllm_view
from vllm_hicache.errors import ConfigError

pytestmark = [pytest.mark.services, pytest.mark.vllm]

STORAGE = {"storage": "file:///nowhere", "min_object_bytes": 1, "page_size": 64}


def _pages(
    model: Path, tp: int, pp: int, extra: dict[str, object], partition: str = ""
) -> list[Any]:
    """The page layout of every worker of an engine, as each of them computes it."""
    import torch
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    options = {**STORAGE, **extra}
    vllm_config = EngineArgs(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        skip_tokenizer_init=True,
        max_model_len=4096,
        kv_transfer_config=KVTransferConfig(
            kv_connector="HiCacheConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=options,
        ),
    ).create_engine_config()
    config = HiCacheConfig.parse(options)
    heads = vllm_config.model_config.get_num_kv_heads(vllm_config.parallel_config)
    spec = FullAttentionSpec(block_size=32, num_kv_heads=heads, head_size=64, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        if partition:
            patch.setitem(os.environ, "VLLM_PP_LAYER_PARTITION", partition)
        starts = [*vllm_view.stage_starts(vllm_config), 4]
        layouts = []
        for stage in range(pp):
            names = [
                f"model.layers.{layer}.self_attn.attn"
                for layer in range(starts[stage], starts[stage + 1])
            ]
            cache = KVCacheConfig(
                num_blocks=8,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(names, spec)],
            )
            pools = kv_pools.model_pools(vllm_config, cache, config)
            for rank in range(tp):
                place = kv_pools.Place(stage, rank)
                (found,) = kv_pools.worker_pools(vllm_config, cache, config, pools, place)
                layouts.append(found.layout)
        return layouts


def test_a_fleet_gives_each_of_its_topologies_the_same_objects(
    tiny_llama: Callable[..., Path],
) -> None:
    """The four topologies of the end-to-end matrix, and the one with uneven stages."""
    extra = {"fleet": {"tp": [1, 2], "pp": [1, 2]}}
    found = []
    for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2)):
        shards = [s for layout in _pages(tiny_llama(), tp, pp, extra) for s in layout.shards]
        found.append(sorted((s.layers, s.head_group, s.length) for s in shards))
    assert len(found[0]) == 4
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize(
    ("tp", "pp", "extra", "partition", "says"),
    [
        pytest.param(
            *(1, 2, {"storage_layer_partition": 4}, ""),
            r"pipeline stage \[0, 2\) does not fit storage_layer_partition 4: .* of 4 layers",
            id="stage of half an object",
        ),
        pytest.param(
            *(1, 2, {"storage_layer_partition": 2}, "3,1"),
            r"pipeline stage \[0, 3\) does not fit storage_layer_partition 2",
            id="stages cut by hand",
        ),
        pytest.param(
            *(2, 1, {"storage_head_partition": 2}, ""),
            "heads per group must divide the model's 2 KV heads and this worker's 1, got 2",
            id="worker with half an object's heads",
        ),
        pytest.param(
            *(4, 1, {}, ""),
            "2 KV heads over tensor parallelism 4 gives 1 heads per worker, some of them replicas",
            id="replicated heads",
        ),
        pytest.param(
            *(1, 1, {"fleet": {"tp": [1, 4]}}, ""),
            "fleet: 2 KV heads cannot be split over tensor parallel size 4; .* divisors of 2",
            id="fleet with replicated heads",
        ),
        pytest.param(
            *(1, 1, {"fleet": {"tp": [1], "pp": [1, 8]}}, ""),
            "fleet: 4 layers cannot be split over pipeline parallel size 8",
            id="fleet with more stages than layers",
        ),
    ],
)
def test_a_topology_that_does_not_align_is_refused_with_the_numbers(
    tiny_llama: Callable[..., Path],
    tp: int,
    pp: int,
    extra: dict[str, object],
    partition: str,
    says: str,
) -> None:
    with pytest.raises(ConfigError, match=says):
        _pages(tiny_llama(), tp, pp, extra, partition)
