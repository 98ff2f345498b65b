"""Which models `load_mode: layerwise` takes, and what others are told at start."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engines import (
    DEEPSEEK,
    FULL,
    GEMMA3,
    GPTOSS,
    LATENT,
    LLAMA,
    MISTRAL,
    NUM_LAYERS,
    QWEN3NEXT,
    Specs,
    attention,
    draft,
    each,
    engine,
)

from vllm_hicache.connectors.kv_pools import WorkerPool
from vllm_hicache.connectors.layer_waits import check_worker_pools
from vllm_hicache.errors import ConfigError

pytestmark = pytest.mark.vllm

WIDE = replace(FULL, head_size=128, head_size_v=128)
LATENTS = each(attention, *[LATENT] * NUM_LAYERS)


def checked_pools(llama: Path, specs: Specs, **options: object) -> list[WorkerPool]:
    """Those of every worker, as each has them when it starts."""
    pp = options.pop("pp", 1)
    made = engine(llama, specs, load_mode="layerwise", pp=pp, **options)
    made.model_pools()
    found = []
    for stage in range(pp):
        pools = made.worker(stage)
        check_worker_pools(made.vllm_config, pools)
        found += pools
    return found


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("specs", [LLAMA, MISTRAL, LATENTS], ids=["full", "windows", "latents"])
def test_models_with_one_kind_of_kv_are_taken(
    tiny_llama: Callable[..., Path], specs: Specs, pp: int
) -> None:
    pools = checked_pools(tiny_llama(), specs, pp=pp)
    assert [len(one.layout.members) for one in pools] == [NUM_LAYERS // pp] * pp


@pytest.mark.parametrize("specs", [GEMMA3, GPTOSS, QWEN3NEXT], ids=["gemma3", "gptoss", "qwen"])
def test_several_groups_are_refused(tiny_llama: Callable[..., Path], specs: Specs) -> None:
    message = r'load_mode must be "async" for this model, got "layerwise": it has \d KV cache group'
    with pytest.raises(ConfigError, match=message):
        checked_pools(tiny_llama(), specs)


def test_rows_of_several_shapes_are_refused(tiny_llama: Callable[..., Path]) -> None:
    mixed = each(attention, FULL, WIDE, FULL, WIDE)
    with pytest.raises(ConfigError, match=r"2 kinds of rows \(\S+, \S+\), and layers can wait for"):
        checked_pools(tiny_llama(), mixed)


def test_an_indexer_beside_latents_is_refused(tiny_llama: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match='load_mode must be "async" for this model'):
        checked_pools(tiny_llama(), DEEPSEEK)


@pytest.mark.parametrize("spec", [FULL, WIDE], ids=["packed", "sidecar"])
def test_draft_state_is_refused(tiny_llama: Callable[..., Path], spec: object) -> None:
    llama = tiny_llama()
    specs = LLAMA | each(draft, spec, spec)
    with pytest.raises(ConfigError, match='got "layerwise": it has draft state, which its drafter'):
        checked_pools(llama, specs, speculative=llama)
