"""Which KV of a worker is its drafter's, how it lies beside the target's, what of it is refused.

Vocabulary: draft layers are *packed* where a block of theirs has the shape of the target's blocks
of the same KV cache group, else they are a *sidecar*, which follows the block ids of its source.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_hicache.connectors.draft_shapes import LayerShape, layer_shape
from vllm_hicache.connectors.kv_kinds import layer_spec
from vllm_hicache.errors import ConfigError
from vllm_hicache.layout import granule_tokens
from vllm_hicache.pools import HitRule

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

STATELESS_METHODS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""They propose from token ids or the last hidden state and keep no KV."""
DRAFT_METHODS = ("draft_model", "eagle", "eagle3", "mtp")
_DRAFT_PREFIXES = ("draft_model", "mtp")
"""First parts of layer names that vLLM gives to drafters alone."""


@dataclass(frozen=True, slots=True)
class DraftPool:
    """Draft layers of one kind and one shape, saved and restored as one with their source."""

    layers: tuple[str, ...]
    """Names in order: ``layers[i]`` is layer i of the drafter's own numbering."""
    group: int
    """The source: KV cache group whose block ids, tokens and hit rule these layers follow."""
    is_packed: bool
    """Whether the target has layers of this shape in the source."""
    shape: LayerShape
    rule: HitRule
    reach: int
    """Tokens of the window or chunk, 0 for other rules."""
    block_tokens: int
    """Tokens that a block id of the source stands for."""
    total_heads: int
    """Of the drafter, over all its workers; 1 for a latent or a state."""
    num_replicas: int
    """Workers of a stage that hold the same rows."""


def has_draft_state(vllm_config: "VllmConfig") -> bool:
    """Whether drafters of this engine keep state; ConfigError for a method that is not certified.

    Known everywhere; the layers themselves are known to workers of the last stage alone.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in STATELESS_METHODS:
        return False
    if speculative.method not in DRAFT_METHODS:
        allowed = ", ".join((*STATELESS_METHODS, *DRAFT_METHODS))
        raise ConfigError(
            f"speculative method {speculative.method!r} keeps draft state that is not known to be "
            f"saved and restored whole; allowed: {allowed}"
        )
    return not speculative.use_gemma4_mtp()  # its layers read the target's KV


def dropped_blocks(vllm_config: "VllmConfig") -> int:
    """Blocks at the end of a match that vLLM computes again, and so must an external hit: the
    drafter's row of the last token depends on a token behind it."""
    speculative = vllm_config.speculative_config
    return int(speculative is not None and speculative.use_eagle_block_drop())


def draft_pools(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", *, page_size: int
) -> tuple[DraftPool, ...]:
    """The drafter's KV on this worker of the last stage, by kind; empty without draft state.

    ConfigError names the layer and both shapes where something cannot be certified.
    """
    if not has_draft_state(vllm_config):
        return ()
    first_draft = vllm_config.model_config.get_total_num_hidden_layers()
    layers = list(_layer_specs(kv_cache_config))
    drafts = [
        layer_shape(vllm_config, name, spec, group)
        for group, name, spec in layers
        if is_draft_layer(name, first_draft)
    ]
    if not drafts:
        raise ConfigError(
            f"speculative method {_speculative(vllm_config).method!r} has draft layers; expected "
            f"names {'... or '.join(_DRAFT_PREFIXES)}... or numbers from {first_draft} on, got "
            f"{', '.join(name for _, name, _ in layers)}"
        )
    _check_places(kv_cache_config, drafts)
    _check_runner(vllm_config, drafts)
    sources = {draft.group for draft in drafts}
    targets = [
        layer_shape(vllm_config, name, spec, group)
        for group, name, spec in layers
        if group in sources and not is_draft_layer(name, first_draft)
    ]
    kinds = sorted({layer.kind for layer in drafts})
    return tuple(
        _pool(vllm_config, [d for d in drafts if d.kind == kind], targets, page_size)
        for kind in kinds
    )


def is_draft_layer(name: str, num_target_layers: int) -> bool:
    """Whether vLLM gave this name to a drafter's layer.

    >>> is_draft_layer("draft_model.model.layers.0.self_attn.attn", 32)
    True
    >>> is_draft_layer("model.layers.32.self_attn.attn", 32)
    True
    >>> is_draft_layer("model.layers.31.self_attn.attn", 32)
    False
    """
    if name.partition(".")[0] in _DRAFT_PREFIXES:
        return True
    return int(extract_layer_index(name)) >= num_target_layers


def _layer_specs(kv_cache_config: "KVCacheConfig") -> Iterator[tuple[int, str, KVCacheSpec]]:
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            yield number, name, layer_spec(group.kv_cache_spec, name)


def _speculative(vllm_config: "VllmConfig") -> "SpeculativeConfig":
    speculative = vllm_config.speculative_config
    if speculative is None:
        raise ConfigError("speculative decoding is not configured")
    return speculative


def _check_places(kv_cache_config: "KVCacheConfig", drafts: Sequence[LayerShape]) -> None:
    """Every draft layer has bytes of its own that a connector may copy, in one place."""
    groups = kv_cache_config.kv_cache_groups
    for layer in drafts:
        num_groups = sum(layer.name in group.layer_names for group in groups)
        num_tensors = sum(layer.name in t.layers for t in kv_cache_config.kv_cache_tensors)
        if (num_groups, num_tensors) != (1, 1):
            raise ConfigError(
                f"draft layer {layer.name} lies in {num_groups} KV cache groups and {num_tensors} "
                "tensors; expected one of each"
            )
        if layer.group not in kv_cache_config.prefix_cacheable_group_ids:
            raise ConfigError(
                f"draft layer {layer.name} lies in KV cache group {layer.group}, which vLLM keeps "
                "from connectors or its prefix cache"
            )


def _check_runner(vllm_config: "VllmConfig", drafts: Iterable[LayerShape]) -> None:
    """Refuse engines that write over their own KV: see DESIGN section 8."""
    speculative = _speculative(vllm_config)
    if speculative.method == "draft_model" and not vllm_config.use_v2_model_runner:
        for layer in drafts:
            if layer.group != 0:
                raise ConfigError(
                    f"draft layer {layer.name} lies in KV cache group {layer.group}, but vLLM's V1 "
                    "model runner writes a draft model's KV to blocks of group 0, over the "
                    "target's; use the V2 runner or another speculative method"
                )
    cache_dtype, own = vllm_config.cache_config.cache_dtype, speculative.kv_cache_dtype
    if current_platform.is_cpu() and own not in (None, cache_dtype):
        raise ConfigError(
            f"draft KV of dtype {own} beside the target's {cache_dtype} is not supported on a "
            "CPU: how its attention packs it is not known"
        )


def _pool(
    vllm_config: "VllmConfig",
    drafts: Sequence[LayerShape],
    targets: Sequence[LayerShape],
    page_size: int,
) -> DraftPool:
    ordered = sorted(drafts, key=lambda layer: int(extract_layer_index(layer.name)))
    first = ordered[0]
    for other in ordered[1:]:
        if other.text != first.text or other.rule is not first.rule:
            raise ConfigError(
                f"draft layers differ: {first.name} has {first.text}, {other.name} has "
                f"{other.text}; expected one shape for all"
            )
        if other.group != first.group:
            raise ConfigError(
                f"draft layers {first.name} ({first.text}) and {other.name} ({other.text}) lie in "
                f"KV cache groups {first.group} and {other.group}; expected one group for all"
            )
    block_tokens = first.block_size * _tokens_split(vllm_config, first)
    _check_blocks(first, block_tokens, page_size)
    is_packed = any(t.group == first.group and t.text == first.text for t in targets)
    total_heads, num_replicas = _heads(vllm_config, first)
    return DraftPool(
        layers=tuple(layer.name for layer in ordered),
        group=first.group,
        is_packed=is_packed,
        shape=first,
        rule=first.rule,
        reach=first.reach,
        block_tokens=block_tokens,
        total_heads=total_heads,
        num_replicas=num_replicas,
    )


def _tokens_split(vllm_config: "VllmConfig", layer: LayerShape) -> int:
    """Over how many workers context parallelism splits the tokens of a block of this layer."""
    size = int(vllm_config.parallel_config.decode_context_parallel_size)
    return size if layer.is_split else 1


def _check_blocks(layer: LayerShape, block_tokens: int, page_size: int) -> None:
    if layer.kv is None:
        if page_size % block_tokens:
            raise ConfigError(
                f"draft layer {layer.name} has a state every {block_tokens} tokens; page_size must "
                f"be a multiple of that, got {page_size}"
            )
        return
    try:
        granule_tokens(page_size, block_tokens, whole_blocks=layer.kv.packing == "opaque")
    except ConfigError as error:
        raise ConfigError(f"draft layer {layer.name} ({layer.text}): {error}") from None


def _heads(vllm_config: "VllmConfig", layer: LayerShape) -> tuple[int, int]:
    """Heads of the whole drafter, and workers that hold the same of them."""
    tp = int(vllm_config.parallel_config.tensor_parallel_size)
    if layer.kv is None:
        return 1, tp if layer.is_replicated else 1
    if layer.is_latent:
        return 1, tp
    total = int(_speculative(vllm_config).draft_model_config.get_total_num_kv_heads())
    if layer.kv.num_heads == total:
        return total, tp
    if layer.kv.num_heads * tp != total:
        raise ConfigError(
            f"draft layer {layer.name} has {layer.kv.num_heads} of {total} KV heads on each of "
            f"{tp} workers, some of them replicas; expected {total} or {total}/{tp}"
        )
    return total, 1
