"""Rows of pools where vLLM places and allocates them: every row is a row of vLLM's own view."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import (
    BLOCK,
    DEEPSEEK,
    FULL,
    GEMMA3,
    GPTOSS,
    LLAMA,
    MISTRAL,
    QWEN3NEXT,
    STATE_BYTES,
    Engine,
    attention,
    draft,
    each,
    engine,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from vllm_hicache.connectors import vllm_view
from vllm_hicache.connectors.kv_placement import device_groups
from vllm_hicache.device_layout import DeviceGroup
from vllm_hicache.errors import ConfigError

pytestmark = pytest.mark.vllm

SIDECARS = each(draft, *[replace(FULL, head_size=32, head_size_v=32)] * 2)
MODELS = {
    "llama": LLAMA,
    "gemma3": GEMMA3,
    "gptoss": GPTOSS,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "packed": LLAMA | each(draft, FULL, FULL),
    "sidecar": LLAMA | SIDECARS,
}


@pytest.fixture(scope="module")
def make(tiny_llama: Callable[..., Path]) -> Callable[..., Engine]:
    def make(name: str, **options) -> Engine:
        is_drafting = name in ("packed", "sidecar")
        speculative = tiny_llama(num_layers=2) if is_drafting else None
        specs = MODELS.get(name, QWEN3NEXT)
        return engine(tiny_llama(), specs, speculative=speculative, **options)

    return make


def allocated(made: Engine, layout: str, stage: int = 0) -> dict[str, torch.Tensor]:
    own = made.stages[stage]
    return allocate_kv_cache(
        own, torch.device("cpu"), KVCacheLayout[layout], [None] * len(own.kv_cache_groups)
    )


def placed(made: Engine, caches, stage: int = 0) -> dict[str, tuple[DeviceGroup, ...]]:
    pools = made.model_pools()
    return {
        one.pool.name: device_groups(one, caches, made.stages[stage], pools.groups)
        for one in made.worker(stage)
    }


def rows_of(buffer: np.ndarray, group: DeviceGroup, place: int, block: int) -> np.ndarray:
    """[heads, tokens, bytes] of one block of the layer in this place, K before V."""
    (layers,) = [one for one in group.layers if place in one.layers]
    index = layers.indices[layers.layers.index(place)]
    base = layers.base_bytes + index * layers.layer_stride
    rows = np.zeros((layers.num_heads, layers.block_size, layers.row_bytes), np.uint8)
    for part in layers.parts:
        for head, token, element in np.ndindex(
            layers.num_heads, layers.block_size, part.num_elements
        ):
            start = base + part.base + block * part.block_stride + head * part.head_stride
            start += token * part.token_stride + element * part.element_stride
            to = part.row_offset + element * part.element_bytes
            piece = buffer[start : start + part.element_bytes]
            rows[head, token, to : to + part.element_bytes] = piece
    return rows


def as_rows(view: torch.Tensor, is_packed: bool) -> np.ndarray:
    """The same out of vLLM's view [heads, tokens, content] of one block."""
    content = view.contiguous()
    if not is_packed:
        return content.view(torch.uint8).numpy()
    # On a CPU all K of a head come transposed, then all V.
    heads, tokens, numbers = content.shape
    keys, values = content.reshape(heads, 2, -1).unbind(1)
    keys = keys.reshape(heads, numbers // 2, tokens).transpose(1, 2)
    values = values.reshape(heads, tokens, numbers // 2)
    return torch.cat((keys, values), dim=2).contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("name", MODELS)
def test_every_row_of_a_pool_is_where_vllms_view_of_its_layer_has_it(make, name, layout):
    made = make(name, layout=layout)
    caches = allocated(made, layout)
    buffer = vllm_view.kv_buffer(caches, made.stages[0]).numpy()
    # Zeros at first, and groups share them: what is looked at is written just before.
    random = np.random.default_rng(3)
    groups = placed(made, caches)
    for one in made.worker():
        seen = []
        for group in groups[one.pool.name]:
            assert group.block_size == BLOCK
            for layer in one.layers[group.group]:
                place = one.layout.members.index(_number(layer))
                seen.append(place)
                block = int(random.integers(1, made.stages[0].num_blocks))
                view = caches[layer][block]
                view.view(torch.uint8).copy_(
                    torch.from_numpy(random.integers(0, 256, _bytes(view), np.uint8))
                )
                expected = as_rows(view, is_packed=one.kv.packing == "k_transposed")
                assert np.array_equal(rows_of(buffer, group, place, block), expected)
        assert sorted(seen) == list(range(one.layout.num_layers))


def _number(layer: str) -> int:
    return next(int(part) for part in layer.split(".") if part.isdigit())


def _bytes(view: torch.Tensor) -> tuple[int, ...]:
    return (*view.shape[:-1], view.shape[-1] * view.element_size())


def test_groups_share_the_buffer_from_its_first_byte_on(make):
    made = make("gemma3")
    groups = placed(made, allocated(made, "LBHNC"))
    assert [group.group for group in groups["window-64"]] == [0, 1, 2]
    assert [group.group for group in groups["full"]] == [3]
    bases = {one.base_bytes for pool in groups.values() for group in pool for one in group.layers}
    assert bases == {0}
    places = [one.layers for group in groups["window-64"] for one in group.layers]
    assert places == [(0,), (1,), (2,)]


def test_a_tensor_with_layers_of_two_pools_gives_each_its_own(make):
    made = make("packed")
    (tensor,) = made.stages[0].kv_cache_tensors
    assert len(tensor.layers) == 6
    groups = placed(made, allocated(made, "LBHNC"))
    (full,), (drafts,) = groups["full"][0].layers, groups["draft"][0].layers
    assert (full.layers, full.indices) == ((0, 1, 2, 3), (0, 1, 2, 3))
    assert (drafts.layers, drafts.indices) == ((0, 1), (4, 5))


def test_a_state_is_one_block_of_its_content_without_padding(make):
    made = make("qwen3next")
    caches = allocated(made, "LBHNC")
    groups = placed(made, caches)
    for number, group in enumerate(groups["state"]):
        (layers,) = group.layers
        assert (group.group, group.block_size, layers.layers) == (number, 1, (number,))
        assert (layers.row_bytes, layers.block_size) == (STATE_BYTES, 1)
        (part,) = layers.parts
        assert part.block_stride >= STATE_BYTES
        assert part.block_stride == made.stages[0].kv_cache_tensors[number].block_stride


def test_a_stage_places_its_own_layers(make):
    made = make("gemma3", pp=2)
    second = placed(made, allocated(made, "LBHNC", 1), 1)
    assert [group.group for group in second["window-64"]] == [2]
    assert second["window-64"][0].layers[0].layers == (0,)
    assert [group.group for group in second["full"]] == [3]


def test_views_that_are_not_where_vllm_says_are_refused(make):
    made = make("llama")
    caches = allocated(made, "LBHNC")
    name = attention(1)
    caches[name] = caches[attention(2)]
    with pytest.raises(ConfigError, match=f"layer {name} begins [0-9]+ bytes into its buffer"):
        vllm_view.kv_buffer(caches, made.stages[0])
