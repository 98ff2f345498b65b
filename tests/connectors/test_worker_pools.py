"""What each worker has of the pools of a page, and how its stored objects are named."""

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from engines import (
    DEEPSEEK,
    FULL,
    GEMMA3,
    GPTOSS,
    INDEX,
    LATENT,
    LLAMA,
    MISTRAL,
    QWEN3NEXT,
    STATE,
    STATE_BYTES,
    WINDOW,
    Engine,
    attention,
    draft,
    each,
    engine,
    indexer,
    state,
)
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_hicache.connectors import kv_pools, vllm_view
from vllm_hicache.connectors.kv_pools import WorkerPool
from vllm_hicache.errors import ConfigError
from vllm_hicache.layout import LayerSpan
from vllm_hicache.pools import HitRule

pytestmark = pytest.mark.vllm

ROW = 2 * 64 * 4  # bytes of K and V of a token and head
HALF_HEADS = replace(FULL, num_kv_heads=1)
DRAFTS = each(draft, FULL, FULL)
SIDECARS = each(draft, *[replace(FULL, head_size=32, head_size_v=32)] * 2)


@pytest.fixture(scope="module")
def make(tiny_llama: Callable[..., Path]) -> Callable[..., Engine]:
    def make(specs, *, drafts: bool = False, **options: object) -> Engine:
        speculative = tiny_llama(num_layers=2) if drafts else None
        return engine(tiny_llama(), specs, speculative=speculative, **options)

    return make


def named(pools: list[WorkerPool]) -> dict[str, WorkerPool]:
    return {one.pool.name: one for one in pools}


def rows_of(made: Engine, stage: int = 0, tp_rank: int = 0):
    pools = kv_pools.model_pools(made.vllm_config, made.stages[stage], made.config)
    return kv_pools.page_rows(made.worker(stage, tp_rank), pools)


# One pool ---------------------------------------------------------------------------------------


def test_a_model_with_one_kind_has_one_pool_without_a_digest(make):
    (found,) = make(LLAMA).worker()
    assert (found.pool.name, found.pool.bit, found.pool.digest) == ("full", None, "")
    layout = found.layout
    assert (layout.page_size, layout.members, layout.pool) == (256, (0, 1, 2, 3), "")
    assert layout.page_bytes == 256 * 4 * 2 * ROW
    assert found.layers == {0: tuple(attention(number) for number in range(4))}


def test_a_model_of_windows_names_them_in_its_namespace(make):
    made = make(MISTRAL)
    (found,) = made.worker()
    assert (found.pool.name, found.pool.bit, found.pool.digest) == ("window-64", 0, "")
    assert found.layout.page_bytes == 64 * 4 * 2 * ROW
    namespace = vllm_view.build_namespace(made.vllm_config, rows_of(made), "w", "")
    assert (namespace.group_kind, namespace.window, namespace.page_size) == ("window", 64, 64)
    full = vllm_view.build_namespace(made.vllm_config, rows_of(make(LLAMA, page_size=64)), "w", "")
    assert (full.group_kind, full.window) == ("full_attention", 0)
    assert full.digest != namespace.digest


def test_windows_of_another_reach_have_another_namespace(make):
    wide = each(attention, *[replace(WINDOW, sliding_window=128)] * 4)
    digests = {
        vllm_view.build_namespace(made.vllm_config, rows_of(made), "w", "").digest
        for made in (make(MISTRAL), make(wide, page_size=64))
    }
    assert len(digests) == 2


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_stage_has_its_own_layers_of_the_one_pool(make, pp):
    made = make(LLAMA, pp=pp)
    spans = [made.worker(stage)[0].layout.layers for stage in range(pp)]
    assert spans == [LayerSpan(i * 4 // pp, (i + 1) * 4 // pp) for i in range(pp)]
    assert {made.worker(stage)[0].pool.digest for stage in range(pp)} == {""}


# Several pools ----------------------------------------------------------------------------------


def test_windows_and_full_attention_are_two_pools_with_digests(make):
    found = named(make(GEMMA3).worker())
    assert set(found) == {"window-64", "full"}
    window, full = found["window-64"], found["full"]
    assert (window.layout.members, full.layout.members) == ((0, 1, 2), (3,))
    assert (window.pool.bit, full.pool.bit) == (0, None)
    assert window.layers == {number: (attention(number),) for number in range(3)}
    assert full.layers == {3: (attention(3),)}
    assert window.layout.page_bytes == 3 * full.layout.page_bytes == 3 * 64 * 2 * ROW
    assert window.pool.digest != full.pool.digest
    assert {len(one.pool.digest) for one in found.values()} == {8}
    assert all(
        shard.pool == one.pool.digest for one in found.values() for shard in one.layout.shards
    )


def test_layers_of_one_group_are_in_the_order_of_their_numbers(make):
    found = named(make(GPTOSS).worker())
    assert found["window-64"].layers == {0: (attention(0), attention(2))}
    assert found["window-64"].layout.members == (0, 2)
    assert found["full"].layout.members == (1, 3)


@pytest.mark.parametrize("specs", [GEMMA3, GPTOSS, QWEN3NEXT, DEEPSEEK], ids=["g", "o", "q", "d"])
@pytest.mark.parametrize("pp", [2, 4])
def test_every_stage_names_its_objects_like_an_engine_of_one_stage(make, specs, pp):
    options = {"storage": "file:///nowhere", "storage_layer_partition": 1}
    alone = {
        (one.pool.name, one.pool.digest, shard)
        for one in make(specs, **options).worker()
        for shard in _places(one)
    }
    made = make(specs, pp=pp, **options)
    stages = [made.worker(stage) for stage in range(pp)]
    found = {
        (one.pool.name, one.pool.digest, shard)
        for worker in stages
        for one in worker
        for shard in _places(one)
    }
    assert found == alone
    assert sum(len(_places(one)) for worker in stages for one in worker) == len(alone)
    assert len({rows_of(made, stage) for stage in range(pp)}) == 1
    assert rows_of(made) == rows_of(make(specs, **options))


def _places(one: WorkerPool) -> list[tuple[LayerSpan, int, int]]:
    return [(shard.layers, shard.head_group, shard.length) for shard in one.layout.shards]


def test_a_stage_without_full_attention_has_windows_alone(make):
    first, second = (named(make(GEMMA3, pp=2).worker(stage)) for stage in range(2))
    assert set(first) == {"window-64"}
    assert first["window-64"].layers == {0: (attention(0),), 1: (attention(1),)}
    assert set(second) == {"window-64", "full"}
    assert second["window-64"].layers == {2: (attention(2),)}
    assert first["window-64"].pool.digest == second["window-64"].pool.digest != ""


def test_layers_of_one_group_that_differ_are_two_pools(make):
    wide = replace(FULL, head_size=128, head_size_v=128)
    made = make(each(attention, FULL, wide, FULL, wide))
    assert len(made.stages[0].kv_cache_groups) == 1
    small, large = sorted(made.worker(), key=lambda one: one.layout.row_bytes)
    assert (small.layout.members, large.layout.members) == ((0, 2), (1, 3))
    assert (small.layout.row_bytes, large.layout.row_bytes) == (ROW, 2 * ROW)
    assert small.pool.bit is large.pool.bit is None
    assert small.pool.digest != large.pool.digest
    assert rows_of(made).kind == "pools"


def test_a_stage_with_one_shape_of_two_still_has_digests(make):
    wide = replace(FULL, head_size=128, head_size_v=128)
    specs = each(attention, FULL, FULL, wide, wide)
    whole = {one.layout.row_bytes: one.pool.digest for one in make(specs).worker()}
    made = make(specs, pp=2)
    for stage, row in enumerate((ROW, 2 * ROW)):
        (one,) = made.worker(stage)
        assert (one.layout.row_bytes, one.pool.digest) == (row, whole[row])
    assert rows_of(made, 0) == rows_of(made, 1)


def test_rows_of_another_type_and_equal_size_are_another_pool(make):
    other = replace(FULL, head_size=256, head_size_v=256, dtype=torch.uint8)
    found = make(each(attention, FULL, other, FULL, other)).worker()
    assert [one.layout.row_bytes for one in found] == [ROW, ROW]
    assert found[0].pool.digest != found[1].pool.digest


def test_an_indexer_lies_beside_the_latents_of_the_same_layers(make):
    found = named(make(DEEPSEEK).worker())
    assert set(found) == {"latent", "indexer"}
    assert found["latent"].layers == {0: tuple(attention(number) for number in range(4))}
    assert found["indexer"].layers == {0: tuple(indexer(number) for number in range(4))}
    assert found["latent"].layout.page_bytes == 64 * 4 * 576 * 4
    assert found["indexer"].layout.page_bytes == 64 * 4 * 132
    assert found["indexer"].pool.bit is None


def test_bytes_of_a_token_are_told_group_by_group(make):
    for specs, expected in (
        (GEMMA3, (2 * ROW,) * 4),
        (GPTOSS, (4 * ROW,) * 2),
        (DEEPSEEK, (4 * (576 * 4 + 132),)),
        (QWEN3NEXT, (STATE_BYTES,) * 3 + (2 * ROW,)),
    ):
        made = make(specs)
        assert kv_pools.bytes_per_token(made.worker(), made.model_pools()) == expected
    made = make(GEMMA3, pp=2)
    sizes = [kv_pools.bytes_per_token(made.worker(i), made.model_pools()) for i in range(2)]
    assert sizes == [(2 * ROW, 2 * ROW, 0, 0), (0, 0, 2 * ROW, 2 * ROW)]


# States -----------------------------------------------------------------------------------------


def test_a_state_is_one_row_of_a_page_of_one_token(make):
    one = named(make(QWEN3NEXT).worker())["state"]
    assert (one.pool.rule, one.pool.bit) == (HitRule.BOUNDARY, 0)
    layout = one.layout
    assert (layout.page_size, layout.row_bytes, layout.members) == (1, STATE_BYTES, (0, 1, 2))
    assert layout.page_bytes == 3 * STATE_BYTES
    assert (one.kv.k_bytes, one.kv.v_bytes, one.kv.itemsize) == (STATE_BYTES, 0, 1)


def test_each_tensor_parallel_worker_has_states_of_its_own(make):
    half = replace(STATE, shapes=((3, 256), (2, 64, 64)))
    specs = each(state, half, half, half) | {attention(3): HALF_HEADS}
    made = make(specs, tp=2)
    for rank in range(2):
        found = named(made.worker(tp_rank=rank))
        assert [shard.head_group for shard in found["state"].layout.shards] == [rank]
        assert found["state"].layout.own_shards == found["state"].layout.shards
        assert [shard.head_group for shard in found["full"].layout.shards] == [rank]
    digests = {named(one.worker())["state"].pool.digest for one in (made, make(QWEN3NEXT))}
    assert len(digests) == 2, "states that are cut otherwise have other names"


def test_states_that_every_worker_keeps_whole_are_written_once(make):
    whole = replace(STATE, tp_replicated=True)
    specs = each(state, whole, whole, whole) | {attention(3): HALF_HEADS}
    options = {"storage": "file:///nowhere", "storage_layer_partition": 1}
    made = make(specs, tp=2, **options)
    layouts = [named(made.worker(tp_rank=rank))["state"].layout for rank in range(2)]
    assert layouts[0].shards == layouts[1].shards
    assert set(layouts[0].own_shards) | set(layouts[1].own_shards) == set(layouts[0].shards)
    assert not set(layouts[0].own_shards) & set(layouts[1].own_shards)


@pytest.mark.parametrize(
    "other",
    [
        replace(STATE, shapes=((512, 3), (4, 64, 64))),
        replace(STATE, dtypes=(torch.float32, torch.int32)),
    ],
    ids=["shapes", "dtypes"],
)
def test_states_of_equal_size_and_other_content_have_other_names(make, other):
    assert other.state_content_size_bytes == STATE_BYTES
    specs = each(state, other, other, other) | {attention(3): FULL}
    digests = {named(make(one).worker())["state"].pool.digest for one in (QWEN3NEXT, specs)}
    assert len(digests) == 2


def test_a_fleet_of_several_tensor_parallel_sizes_cannot_share_states(make):
    options = {"storage": "file:///nowhere"}
    with pytest.raises(ConfigError, match="fleet: states are cut by tensor parallelism"):
        make(QWEN3NEXT, fleet={"tp": [1, 2]}, **options).worker()
    found = named(make(QWEN3NEXT, fleet={"tp": [1], "pp": [1, 2]}, **options).worker())
    assert found["state"].layout.layer_partition == found["full"].layout.layer_partition == 2


# Heads ------------------------------------------------------------------------------------------


def test_tensor_parallel_workers_have_their_heads_of_every_pool(make):
    half = replace(WINDOW, num_kv_heads=1)
    made = make(each(attention, half, half, half, HALF_HEADS), tp=2)
    for rank in range(2):
        for one in made.worker(tp_rank=rank):
            assert (one.layout.head_start, one.layout.head_stop) == (rank, rank + 1)
            assert (one.layout.total_kv_heads, one.layout.num_replicas) == (2, 1)
    alone = named(make(GEMMA3).worker())
    assert {n: one.pool.digest for n, one in named(made.worker()).items()} == {
        n: one.pool.digest for n, one in alone.items()
    }


def test_replicas_of_heads_are_refused_with_the_layer_and_the_numbers(make):
    half = replace(WINDOW, num_kv_heads=1)
    made = make(each(attention, half, half, half, HALF_HEADS), tp=4)
    says = rf"layer {attention(0)}: 2 KV heads over tensor parallelism 4 gives 1 heads per worker"
    with pytest.raises(ConfigError, match=says):
        made.worker()


def test_latents_and_indexers_are_kept_whole_by_every_worker_and_written_once(make):
    options = {"storage": "file:///nowhere", "storage_layer_partition": 1}
    made = make(DEEPSEEK, tp=2, **options)
    first, second = (named(made.worker(tp_rank=rank)) for rank in range(2))
    for name in ("latent", "indexer"):
        one, other = first[name].layout, second[name].layout
        assert one.shards == other.shards
        assert (one.num_replicas, one.replica, other.replica) == (2, 0, 1)
        assert len(one.own_shards) == len(other.own_shards) == 2
        assert set(one.own_shards) | set(other.own_shards) == set(one.shards)


def test_an_indexer_beside_heads_is_no_part_of_the_grid_of_heads(make):
    specs = each(attention, *[FULL] * 4) | each(indexer, *[INDEX] * 4)
    options = {"storage": "file:///nowhere"}
    for extra in ({"storage_head_partition": 2}, {"fleet": {"tp": [1, 2]}}):
        found = named(make(specs, **extra, **options).worker())
        assert found["indexer"].layout.heads_per_group == 1
        assert found["full"].layout.heads_per_group == (2 if "fleet" not in extra else 1)


def test_a_head_partition_that_latents_cannot_have_is_refused_on_every_number_of_workers(make):
    specs = each(attention, *[LATENT] * 4)
    for tp in (1, 2):
        made = make(specs, tp=tp, storage="file:///nowhere", storage_head_partition=2)
        with pytest.raises(ConfigError, match=r"storage_head_partition must be 0 or 1 .* got 2"):
            made.worker()


# Drafts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [DRAFTS, SIDECARS], ids=["packed", "sidecar"])
@pytest.mark.parametrize("pp", [1, 2])
def test_drafts_are_a_pool_of_the_last_stage_and_change_no_name_of_the_target(make, specs, pp):
    made = make(LLAMA | specs, drafts=True, pp=pp)
    last = named(made.worker(pp - 1))
    assert set(last) == {"full", "draft"}
    one = last["draft"]
    assert (one.pool.bit, one.pool.rule, one.pool.may_be_zero) == (0, HitRule.EVERY, True)
    assert one.layers == {0: (draft(0), draft(1))}
    assert (one.layout.members, one.layout.layers, one.layout.total_layers) == (
        (0, 1),
        LayerSpan(0, 2),
        2,
    )
    assert len(one.pool.digest) == 8
    assert one.pool.digest != "00000000"
    plain = make(LLAMA, pp=pp)
    for stage in range(pp):
        found = named(made.worker(stage))
        (target,) = plain.worker(stage)
        assert found["full"].layout == target.layout
        assert found["full"].pool.digest == ""
        assert rows_of(made, stage) == rows_of(plain, stage)
        assert ("draft" in found) == (stage == pp - 1)


def test_drafts_of_another_shape_have_another_name(make):
    digests = {
        named(make(LLAMA | specs, drafts=True).worker())["draft"].pool.digest
        for specs in (DRAFTS, SIDECARS, each(draft, FULL))
    }
    assert len(digests) == 3


def test_drafts_beside_windows_are_a_third_pool(make, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # V1 writes them to blocks of others
    found = named(make(GEMMA3 | DRAFTS, drafts=True).worker())
    assert {name: one.pool.bit for name, one in found.items()} == {
        "window-64": 0,
        "full": None,
        "draft": 1,
    }
    plain = named(make(GEMMA3).worker())
    for name in plain:
        assert found[name].pool.digest == plain[name].pool.digest


def test_bytes_of_packed_drafts_count_for_the_group_that_names_their_blocks(make):
    made = make(LLAMA | DRAFTS, drafts=True)
    assert kv_pools.bytes_per_token(made.worker(), made.model_pools()) == (6 * 2 * ROW,)


def test_no_pool_is_called_like_one_without_a_name(make, monkeypatch):
    class Zeros:
        def __init__(self, data: bytes) -> None:
            self._rest = sha256(data).hexdigest()

        def hexdigest(self) -> str:
            return "0" * 8 + self._rest

    monkeypatch.setattr("vllm_hicache.pools.sha256", Zeros)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    found = make(GEMMA3 | DRAFTS, drafts=True).worker()
    digests = {one.pool.digest for one in found}
    assert len(digests) == 3
    assert "00000000" not in digests


# Refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp", [1, 2])
def test_a_drafter_whose_layers_are_not_known_by_their_names_is_refused(make, pp):
    made = make(LLAMA, drafts=True, pp=pp)
    says = r"'draft_model' has draft layers; expected names draft_model\.\.\. or mtp\.\.\."
    with pytest.raises(ConfigError, match=says):
        made.worker(pp - 1)
    if pp > 1:  # a stage before the last one has none
        assert set(named(made.worker(0))) == {"full"}


def test_two_layers_of_one_kind_and_number_are_refused(make):
    specs = LLAMA | {"model.layers.0.cross_attn.attn": FULL}
    with pytest.raises(ConfigError, match="two layers of one kind have the same number"):
        make(specs).worker()


def test_states_in_another_mode_are_refused_with_the_layer(make):
    made = make(QWEN3NEXT)
    spec = made.stages[0].kv_cache_groups[1].kv_cache_spec
    assert isinstance(spec, MambaSpec)
    made.stages[0].kv_cache_groups[1].kv_cache_spec = replace(spec, mamba_cache_mode="none")
    with pytest.raises(ConfigError, match=rf"layer {state(1)} has states in cache mode 'none'"):
        made.worker()


def test_a_worker_without_layers_is_refused(make):
    made = make(LLAMA)
    for group in made.stages[0].kv_cache_groups:
        group.layer_names.clear()
    with pytest.raises(ConfigError, match="no layer whose KV could be cached"):
        made.worker()
