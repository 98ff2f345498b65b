"""Pools of a model, derived from vLLM's KV cache groups: once for the whole engine, and for each
worker with the layers that it has.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_hicache.connectors import vllm_view
from vllm_hicache.connectors.draft_identity import draft_digest
from vllm_hicache.connectors.draft_layers import (
    DraftPool,
    draft_pools,
    dropped_blocks,
    has_draft_state,
    is_draft_layer,
)
from vllm_hicache.connectors.kv_kinds import Kind, kind_of, layer_spec, state_identity
from vllm_hicache.connectors.messages import PageRows
from vllm_hicache.connectors.page_sizes import page_tokens
from vllm_hicache.connectors.vllm_view import KVFormat
from vllm_hicache.errors import ConfigError
from vllm_hicache.layout import LayerSpan, PageLayout
from vllm_hicache.pools import HitRule, KVGroup, ModelPools, Pool, pool_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_hicache.config import HiCacheConfig

DRAFT = "draft"
_GROUP_KINDS = {"full": "full_attention"}
"""Names of kinds in namespaces, where they differ from those of pools."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands in its engine."""

    stage: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """What one worker has of a pool."""

    pool: Pool
    layout: PageLayout
    kv: KVFormat
    layers: Mapping[int, tuple[str, ...]]
    """vLLM's names of its layers, by KV cache group; in the pool's pages they are in the order of
    their numbers."""


# The whole engine ------------------------------------------------------------------------------


def model_pools(
    vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig, config: "HiCacheConfig"
) -> ModelPools:
    """Pools that pages may lack, KV cache groups and page size: the same on the scheduler and on
    every worker, whatever layers their stage has."""
    groups = kv_cache_config.kv_cache_groups
    for number, group in enumerate(groups):
        _check_group(number, group)
    kinds = [kind_of(group.kv_cache_spec, _name_of(group.layer_names)) for group in groups]
    if all(kind.is_state for kind in kinds):
        raise ConfigError(
            "this model keeps states alone, which are known at few boundaries; supported: states "
            "beside attention"
        )
    bits: dict[tuple[str, int], int] = {}
    for kind in kinds:
        if kind.rule is not HitRule.EVERY:
            bits.setdefault((kind.name, kind.reach), len(bits))
    members = {key: [g for g, kind in enumerate(kinds) if (kind.name, kind.reach) == key]
               for key in bits}  # fmt: skip
    rules = {(kind.name, kind.reach): kind.rule for kind in kinds}
    pools = [
        Pool(_pool_name(*key), rules[key], tuple(members[key]), reach=key[1], bit=bit)
        for key, bit in bits.items()
    ]
    kv_groups = [
        KVGroup(
            group.kv_cache_spec.block_size,
            bit=bits.get((kind.name, kind.reach)),
            is_state=kind.is_state,
        )
        for group, kind in zip(groups, kinds, strict=True)
    ]
    source = _draft_group(vllm_config, kv_cache_config)
    if source is not None:
        rule, reach = kinds[source].rule, kinds[source].reach
        bit = len(pools)
        pools.append(Pool(DRAFT, rule, (source,), reach=reach, bit=bit, is_draft=True))
        kv_groups[source] = replace(kv_groups[source], marks=1 << bit)
    unit = lcm(*(kv_group.block_size for kv_group in kv_groups))
    made = ModelPools(
        pools=tuple(pools),
        groups=tuple(kv_groups),
        page_size=page_tokens(vllm_config, config, kinds, kv_groups, groups),
        unit=unit,
        num_unsure_tokens=dropped_blocks(vllm_config) * unit,
    )
    vllm_view.check_options(config, made)
    return made


def _check_group(number: int, group: KVCacheGroupSpec) -> None:
    """Refuse groups whose blocks a connector may not copy, or would not find again."""
    for is_odd, what in (
        (group.host_resident, "lies in vLLM's own host pool"),
        (not group.enable_kv_transfer, "is kept from connectors"),
        (group.role is not KVCacheGroupRole.DEFAULT, f"has the role {group.role.name}"),
        (not group.kv_cache_spec.prefix_cacheable, "is kept from the prefix cache"),
    ):
        if is_odd:
            raise ConfigError(
                f"KV cache group {number} (layer {_name_of(group.layer_names)}, "
                f"{type(group.kv_cache_spec).__name__}) {what}; expected blocks that can be saved "
                "and restored whole"
            )


def _name_of(layers: list[str]) -> str:
    return layers[0] if layers else "(of another pipeline stage)"


def _pool_name(kind: str, reach: int) -> str:
    return f"{kind}-{reach}" if reach else kind


def _is_draft(vllm_config: "VllmConfig", layer: str) -> bool:
    num_target = vllm_config.model_config.get_total_num_hidden_layers()
    return has_draft_state(vllm_config) and is_draft_layer(layer, num_target)


def _draft_group(vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig) -> int | None:
    """The KV cache group of the draft layers; None without any.

    With pipeline stages the scheduler sees the first stage, drafters are on the last one.
    """
    if not has_draft_state(vllm_config):
        return None
    groups = kv_cache_config.kv_cache_groups
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1 and len(groups) > 1:
        raise ConfigError(
            f"speculation with draft state, {stages} pipeline stages and {len(groups)} KV cache "
            "groups is not supported together; supported: any two of them"
        )
    found = {
        number
        for number, group in enumerate(groups)
        if any(_is_draft(vllm_config, layer) for layer in group.layer_names)
    }
    if len(found) > 1:
        raise ConfigError(f"draft layers in KV cache groups {sorted(found)}; supported: one group")
    return found.pop() if found else 0 if stages > 1 else None


# One worker ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Layers:
    """Layers of one shape on this worker."""

    kind: Kind
    is_draft: bool
    spec: KVCacheSpec
    kv: KVFormat
    names: dict[int, list[str]]

    @property
    def shape(self) -> tuple[object, ...]:
        kv = self.kv
        rows = (kv.num_heads, kv.k_bytes, kv.v_bytes, kv.itemsize, kv.packing, kv.packing_id)
        return (self.kind, self.is_draft, *rows)


def worker_pools(
    vllm_config: "VllmConfig",
    kv_cache_config: KVCacheConfig,
    config: "HiCacheConfig",
    pools: ModelPools,
    place: Place,
) -> list[WorkerPool]:
    """This worker's part of every page, pool by pool; at least one."""
    found = _layers_by_shape(vllm_config, kv_cache_config)
    if not found:
        raise ConfigError("this worker has no layer whose KV could be cached")
    is_last = place.stage == vllm_config.parallel_config.pipeline_parallel_size - 1
    found_drafts = (
        draft_pools(vllm_config, kv_cache_config, page_size=pools.page_size) if is_last else ()
    )
    drafts = {layer: draft for draft in found_drafts for layer in draft.layers}
    is_only = _has_one_target_pool(vllm_config, kv_cache_config, found)
    made = []
    for layers in found:
        pool = _pool_of(layers, pools)
        draft = drafts.get(next(iter(layers.names.values()))[0])
        heads = _heads(vllm_config, layers, place.tp_rank, draft)
        if is_only and heads.is_whole and config.storage_head_partition > 1:
            raise ConfigError(
                f"storage_head_partition must be 0 or 1 for a model with one row a token, got "
                f"{config.storage_head_partition}"
            )
        layout = _layout(vllm_config, config, pools.page_size, layers, heads, place)
        digest = ""
        if draft is not None:
            digest = draft_digest(
                vllm_config, config, draft, heads_per_group=layout.heads_per_group
            )
        elif not is_only:
            digest = _digest(layers, layout)
        pool, layout = replace(pool, digest=digest), replace(layout, pool=digest)
        names = {group: tuple(names) for group, names in layers.names.items()}
        made.append(WorkerPool(pool, layout, layers.kv, names))
    digests = [worker_pool.pool.digest for worker_pool in made]
    if len(set(digests)) != len(digests):
        raise ConfigError(f"two pools of one model have the same digest: {digests}")
    return made


def _layers_by_shape(vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig) -> list[_Layers]:
    found: dict[tuple[object, ...], _Layers] = {}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            spec = layer_spec(group.kv_cache_spec, name)
            kind = kind_of(spec, name)
            is_draft = _is_draft(vllm_config, name)
            layers = _Layers(kind, is_draft, spec, layer_format(vllm_config, spec), {})
            known = found.setdefault(layers.shape, layers)
            known.names.setdefault(number, []).append(name)
    return list(found.values())


def _has_one_target_pool(
    vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig, found: Iterable[_Layers]
) -> bool:
    """Whether the model itself has one pool on all stages. Its objects are then named like those
    of an engine without a drafter.

    Layers that differ are known by their group also where a stage has those of one shape alone;
    with a drafter they may differ from its layers only, and then what a stage has is compared.
    """
    is_drafting = has_draft_state(vllm_config)
    groups = [
        group
        for group in kv_cache_config.kv_cache_groups
        if not group.layer_names
        or not all(_is_draft(vllm_config, layer) for layer in group.layer_names)
    ]
    is_mixed = isinstance(groups[0].kv_cache_spec, UniformTypeKVCacheSpecs) and not is_drafting
    num_shapes = sum(not layers.is_draft for layers in found)
    return len(groups) == 1 and num_shapes == 1 and not is_mixed


def layer_format(vllm_config: "VllmConfig", spec: KVCacheSpec) -> KVFormat:
    """How rows of these layers look; a state is one row."""
    if isinstance(spec, MambaSpec):
        return KVFormat(
            block_size=1,
            num_heads=1,
            k_bytes=spec.state_content_size_bytes,
            v_bytes=0,
            itemsize=1,
            packing="rows",
            packing_id=state_identity(spec),
        )
    return vllm_view.kv_format(vllm_config, spec)


def _pool_of(layers: _Layers, pools: ModelPools) -> Pool:
    kind, groups = layers.kind, tuple(layers.names)
    name = DRAFT if layers.is_draft else _pool_name(kind.name, kind.reach)
    for pool in pools.pools:
        if pool.name == name:
            return replace(pool, name=_shown_name(layers), groups=groups)
    return Pool(name, HitRule.EVERY, groups)


def _shown_name(layers: _Layers) -> str:
    """All kinds of draft state share one bit: a page has all of them or none."""
    kind = layers.kind
    if not layers.is_draft:
        return _pool_name(kind.name, kind.reach)
    return f"{DRAFT}-{kind.name}" if kind.name in ("indexer", "state") else DRAFT


def _layout(
    vllm_config: "VllmConfig",
    config: "HiCacheConfig",
    page_size: int,
    layers: _Layers,
    heads: "_Heads",
    place: Place,
) -> PageLayout:
    numbers = sorted(extract_layer_index(n) for names in layers.names.values() for n in names)
    if len(set(numbers)) != len(numbers):
        raise ConfigError(
            f"two layers of one kind have the same number: {sorted(layers.names.values())}; "
            "expected one of each kind in a layer"
        )
    if _is_cut_state(layers.spec) and config.fleet is not None and max(config.fleet.tp) > 1:
        raise ConfigError(
            f"fleet: states are cut by tensor parallelism, and engines of tp {config.fleet.tp} "
            "cannot share them; allowed for a model that keeps states: tp [1]"
        )
    grid = vllm_view.storage_grid(
        vllm_config,
        config,
        heads=heads.total,
        local_heads=heads.local,
        is_whole=heads.is_whole,
        is_first=layers.kind.name in ("full", "latent") and not layers.is_draft,
    )
    span, total = vllm_view.stage_span(vllm_config, place.stage)
    partition = grid.layer_partition
    if layers.is_draft:  # numbered from the first of the drafter's own layers
        numbers = [number - numbers[0] for number in numbers]
        total = numbers[-1] + 1
        span, partition = LayerSpan(0, total), 0
    if numbers[0] < span.start or numbers[-1] >= span.stop:
        raise ConfigError(
            f"layers {numbers} do not lie in this worker's stage [{span.start}, {span.stop}); "
            "pipeline stages that are cut by hand need VLLM_PP_LAYER_PARTITION on all hosts"
        )
    return PageLayout(
        page_size=1 if layers.kind.is_state else page_size,
        layers=span,
        total_layers=total,
        head_start=heads.start,
        head_stop=heads.start + heads.local,
        total_kv_heads=heads.total,
        heads_per_group=grid.heads_per_group,
        row_bytes=layers.kv.k_bytes + layers.kv.v_bytes,
        layer_partition=partition,
        num_replicas=heads.replicas,
        replica=place.tp_rank if heads.replicas > 1 else 0,
        members=tuple(numbers),
    )


@dataclass(frozen=True, slots=True)
class _Heads:
    """This worker's heads among those of the model."""

    local: int
    total: int
    start: int
    replicas: int = 1
    is_whole: bool = False
    """Whether a layer of a worker is one row that is never cut: latents, states, replicas."""


def _heads(
    vllm_config: "VllmConfig", layers: _Layers, tp_rank: int, draft: DraftPool | None
) -> _Heads:
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    local, spec = layers.kv.num_heads, layers.spec
    if _is_cut_state(spec):
        return _Heads(1, tp_size, tp_rank, is_whole=True)
    if isinstance(spec, MLAAttentionSpec | MambaSpec):  # every worker keeps all of it
        return _Heads(local, local, 0, tp_size, is_whole=True)
    if draft is not None:
        if draft.num_replicas > 1:
            return _Heads(local, local, 0, draft.num_replicas, is_whole=True)
        return _Heads(local, draft.total_heads, tp_rank * local)
    total = local if tp_size == 1 else vllm_view.total_kv_heads(vllm_config)
    if local * tp_size != total:
        name = next(iter(layers.names.values()))[0]
        raise ConfigError(
            f"layer {name}: {total} KV heads over tensor parallelism {tp_size} gives {local} heads "
            "per worker, some of them replicas or more than other layers have; supported: a "
            f"divisor of {total}"
        )
    return _Heads(local, total, tp_rank * local)


def _is_cut_state(spec: KVCacheSpec) -> bool:
    """Whether each tensor-parallel worker has a state of its own."""
    return isinstance(spec, MambaSpec) and not _is_replicated(spec)


def _is_replicated(spec: MambaSpec) -> bool:
    return spec.tp_replicated


def _digest(layers: _Layers, layout: PageLayout) -> str:
    """8 hex digits over what the bytes of this pool are, beyond the engine's namespace."""
    kind, kv = layers.kind, layers.kv
    facts = (
        kind.name,
        kind.reach,
        layout.total_kv_heads,
        layout.heads_per_group,
        kv.k_bytes,
        kv.v_bytes,
        kv.itemsize,
        kv.packing_id,
        layout.layer_partition,
    )
    return pool_digest(repr(facts))


def bytes_per_token(made: list[WorkerPool], pools: ModelPools) -> tuple[int, ...]:
    """Bytes that a token of each KV cache group has on this worker; of a state, its own."""
    sizes = [0] * len(pools.groups)
    for one in made:
        rows = one.layout.num_heads * one.layout.row_bytes
        for group, names in one.layers.items():
            sizes[group] += rows * len(names)
    return tuple(sizes)


def page_rows(made: list[WorkerPool], pools: ModelPools) -> PageRows:
    """What the engine's namespace says of rows; the same on all workers."""
    only = next((one for one in made if not one.pool.digest), None)
    if only is None:
        partitions = {
            one.layout.layer_partition for one in made if not one.pool.name.startswith(DRAFT)
        }
        return PageRows("pools", 0, pools.page_size, "pools", 0, 0, 0, 0, max(partitions))
    layout, kv = only.layout, only.kv
    return PageRows(
        kind=_GROUP_KINDS.get(only.pool.name, only.pool.name.partition("-")[0]),
        reach=only.pool.reach,
        page_size=pools.page_size,
        token_packing=kv.packing_id,
        k_row_bytes=kv.k_bytes,
        v_row_bytes=kv.v_bytes,
        total_kv_heads=layout.total_kv_heads,
        heads_per_group=layout.heads_per_group,
        layer_partition=layout.layer_partition,
    )
