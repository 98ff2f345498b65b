"""The digest in the names of stored draft pages: equal where bytes may be shared, else not."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import LlamaConfig

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.connectors.draft_identity import draft_digest
from vllm_hicache.connectors.draft_layers import DraftPool
from vllm_hicache.connectors.draft_shapes import LayerShape
from vllm_hicache.connectors.vllm_view import KVFormat
from vllm_hicache.pools import HitRule

pytestmark = pytest.mark.vllm

KV = KVFormat(32, 2, 256, 256, 4, "rows", "rows")
SHAPE = LayerShape(
    name="draft_model.model.layers.0.self_attn.attn",
    group=0,
    kind="rows",
    text="2 heads of 256 + 256 bytes, float32, packed rows",
    rule=HitRule.EVERY,
    reach=0,
    block_size=32,
    kv=KV,
    state_bytes=0,
    is_latent=False,
    is_split=True,
    is_replicated=False,
)
STATE = replace(SHAPE, kind="state", text="a state of 64 bytes", kv=None, state_bytes=64)
POOL = DraftPool(
    layers=(SHAPE.name,),
    group=0,
    is_packed=True,
    shape=SHAPE,
    rule=HitRule.EVERY,
    reach=0,
    block_tokens=32,
    total_heads=2,
    num_replicas=1,
)
OTHER_ROPE = {"rope_type": "default", "rope_theta": 5e5}
OPTIONS = HiCacheConfig.parse({}, env={})


@pytest.fixture
def weights(tmp_path: Path) -> Callable[[int], Path]:
    def write(seed: int) -> Path:
        folder = tmp_path / f"weights{seed}"
        folder.mkdir()
        numbers = np.random.default_rng(seed).standard_normal((8, 8), dtype=np.float32)
        save_file({"weight": numbers}, folder / "model.safetensors")
        return folder

    return write


def config_of(draft: Path, *, method: str = "draft_model", tp: int = 1, **changes: Any) -> Any:
    """The few attributes that are read; building a whole VllmConfig takes seconds."""
    fields = {
        "model": str(draft),
        "model_weights": "",
        "revision": None,
        "dtype": "torch.float32",
        "quantization": None,
        "hf_overrides": {},
        "architectures": ["LlamaForCausalLM"],
        "hf_text_config": LlamaConfig(),
        "max_model_len": 4096,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=4096),
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        kv_transfer_config=SimpleNamespace(engine_id="engine 1"),
        speculative_config=SimpleNamespace(
            method=method, draft_model_config=SimpleNamespace(**(fields | changes))
        ),
    )


def digest(config: Any, pool: DraftPool = POOL, options: HiCacheConfig = OPTIONS) -> str:
    return draft_digest(config, options, pool, heads_per_group=1)


def test_the_digest_is_eight_hex_digits_and_the_same_for_the_same(
    weights: Callable[[int], Path],
) -> None:
    folder = weights(1)
    first = digest(config_of(folder))
    assert re.fullmatch("[0-9a-f]{8}", first)
    assert digest(config_of(folder)) == first


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "eagle"},
        {"dtype": "torch.bfloat16"},
        {"quantization": "fp8"},
        {"architectures": ["EagleLlamaForCausalLM"]},
        {
            "hf_text_config": LlamaConfig(
                rope_parameters={"rope_type": "default", "rope_theta": 5e5}
            )
        },
        {"max_model_len": 2048},
    ],
)
def test_another_drafter_has_another_digest(
    weights: Callable[[int], Path], changes: dict[str, Any]
) -> None:
    folder = weights(1)
    assert digest(config_of(folder, **changes)) != digest(config_of(folder))


def test_other_weights_have_another_digest(weights: Callable[[int], Path]) -> None:
    assert digest(config_of(weights(1))) != digest(config_of(weights(2)))


@pytest.mark.parametrize(
    "pool",
    [
        replace(POOL, shape=replace(SHAPE, text="1 heads of 256 + 256 bytes, float32")),
        replace(POOL, shape=replace(SHAPE, kind="indexer")),
        replace(POOL, layers=("a", "b")),
        replace(POOL, total_heads=4),
    ],
)
def test_another_shape_has_another_digest(weights: Callable[[int], Path], pool: DraftPool) -> None:
    config = config_of(weights(1))
    assert digest(config, pool) != digest(config)


def test_another_cut_into_objects_has_another_digest(weights: Callable[[int], Path]) -> None:
    config = config_of(weights(1))
    assert draft_digest(config, OPTIONS, POOL, heads_per_group=2) != digest(config)


def test_what_does_not_change_the_bytes_does_not_change_the_digest(
    weights: Callable[[int], Path],
) -> None:
    folder = weights(1)
    sidecar = replace(POOL, is_packed=False, group=3, block_tokens=64, num_replicas=2)
    assert digest(config_of(folder, tp=2), sidecar) == digest(config_of(folder))
    assert digest(config_of(folder, max_model_len=8192)) == digest(config_of(folder))


def test_states_are_of_one_tensor_parallel_size_unless_every_worker_has_them_whole(
    weights: Callable[[int], Path],
) -> None:
    one, two = (config_of(folder, tp=tp) for folder in [weights(1)] for tp in (1, 2))
    cut = replace(POOL, shape=STATE)
    whole = replace(POOL, shape=replace(STATE, is_replicated=True))
    assert digest(one, cut) != digest(two, cut)
    assert digest(one, whole) == digest(two, whole)


def test_weights_that_nothing_proves_are_this_engines_alone_unless_they_have_a_name(
    weights: Callable[[int], Path],
) -> None:
    config, other = config_of(weights(1)), config_of(weights(2))
    for each, engine in ((config, "engine 1"), (other, "engine 2")):
        each.load_config.load_format = "dummy"
        each.kv_transfer_config.engine_id = engine
    assert digest(config) != digest(other)
    named = HiCacheConfig.parse({"weights_id": "v1", "storage": {"url": "file:///nowhere"}}, env={})
    assert digest(config, options=named) == digest(other, options=named)
    assert digest(config, options=named) != digest(config)
