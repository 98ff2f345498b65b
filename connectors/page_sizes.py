"""Tokens of a page: as given, or chosen by what pages are for and by the kinds of KV."""

from math import lcm
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheGroupSpec

from vllm_hicache.connectors.kv_kinds import Kind
from vllm_hicache.errors import ConfigError
from vllm_hicache.layout import granule_tokens
from vllm_hicache.pools import HitRule, KVGroup, ModelPools

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_hicache.config import HiCacheConfig

PAGE_TOKENS = 256
"""Where pages become stored objects: fewer and larger ones."""
LATENT_PAGE_TOKENS = 64
"""Latent rows are small, and all layers of a page lie in one object."""
MIN_PAGE_TOKENS = 32
"""Each page costs the scheduler about 5 us when it is saved and 1 us when a prompt arrives
(`benchmarks/scheduler_cost.py --storage none --page-size 32`, one worker)."""
COPY_BYTES = 4 << 20
"""A page is one copy between staging and host memory. Assumed to be near its full rate from here
on: pages of 32 MiB were measured, smaller ones not yet."""
DECODE_SAVE_TOKENS = 256
"""A request that decodes is saved so many tokens at a time: each save costs the worker some kernel
launches beside the steps. What is left is saved when it ends."""


def page_tokens(
    vllm_config: "VllmConfig",
    config: "HiCacheConfig",
    kinds: list[Kind],
    groups: list[KVGroup],
    specs: list[KVCacheGroupSpec],
) -> int:
    """The tokens of a page, equal on the scheduler and on every worker.

    kinds, groups, specs   of vLLM's KV cache groups, in their order

    Raises ConfigError where the size that is given would lose KV.
    """
    has_states = any(kind.is_state for kind in kinds)
    reach = min((kind.reach for kind in kinds if kind.reach), default=0)
    chunks = [kind.reach for kind in kinds if kind.rule is HitRule.CHUNK]
    unit = lcm(*(group.block_size for group in groups))
    page = config.page_size
    if page is None and has_states:
        page = unit
    elif page is None:
        wanted = _wanted(vllm_config, config, kinds, specs)
        page = _fitting(min(wanted, reach or wanted), groups, chunks)
    _check(page, unit if has_states else 0, reach, chunks)
    for group in groups:
        granule_tokens(page, group.block_size)
    return page


def pages_per_decode_save(pools: ModelPools) -> int:
    """New pages that a decoding request must have before they are saved. What leaves a window must
    be saved at once."""
    return 1 if pools.pools else max(1, DECODE_SAVE_TOKENS // pools.page_size)


def _check(page: int, state_tokens: int, reach: int, chunks: list[int]) -> None:
    if state_tokens and page != state_tokens:
        raise ConfigError(
            f"page_size must be vLLM's block size of {state_tokens} tokens for a model that keeps "
            f"states, got {page}; leave page_size out"
        )
    if reach and page > reach:
        raise ConfigError(
            f"page_size must be at most the smallest window or chunk of {reach} tokens, got "
            f"{page}: what leaves a window before its page is complete cannot be saved"
        )
    for chunk in chunks:
        if chunk % page:
            raise ConfigError(
                f"page_size must divide the {chunk} tokens of an attention chunk, got {page}: what "
                "leaves a chunk before its page is complete cannot be saved"
            )


def _wanted(
    vllm_config: "VllmConfig",
    config: "HiCacheConfig",
    kinds: list[Kind],
    specs: list[KVCacheGroupSpec],
) -> int:
    if any(kind.name in ("latent", "indexer") for kind in kinds):
        return LATENT_PAGE_TOKENS
    has_bits = any(kind.rule is not HitRule.EVERY for kind in kinds)
    saves_ahead = config.write_policy == "write_back"  # which keeps an account of each page
    if config.initial_storage is not None or has_bits or saves_ahead:
        return PAGE_TOKENS
    return _host_page_tokens(_bytes_per_token(vllm_config, specs))


def _host_page_tokens(bytes_per_token: int) -> int:
    """Of pages that never leave host memory: as few as copies allow, because what a conversation
    has in its last, incomplete page is computed again in its next turn.

    >>> _host_page_tokens(128 << 10), _host_page_tokens(32 << 10), _host_page_tokens(4 << 10)
    (32, 128, 256)
    """
    page = MIN_PAGE_TOKENS
    while page < PAGE_TOKENS and page * bytes_per_token < COPY_BYTES:
        page *= 2
    return page


def _bytes_per_token(vllm_config: "VllmConfig", specs: list[KVCacheGroupSpec]) -> int:
    """Of a worker with its share of the layers; 0 where rows differ from layer to layer. Made of
    what all workers are told alike: stages may have other numbers of layers."""
    specs_of_rows = [group.kv_cache_spec for group in specs]
    if not all(isinstance(spec, AttentionSpec) for spec in specs_of_rows):
        return 0
    row = min(spec.page_size_bytes // spec.block_size for spec in specs_of_rows)
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    return row * max(1, layers // vllm_config.parallel_config.pipeline_parallel_size)


def _fitting(wanted: int, groups: list[KVGroup], chunks: list[int]) -> int:
    """The largest page of at most ``wanted`` tokens that fits every group's blocks and chunks."""
    blocks = [group.block_size for group in groups]
    return next(
        page
        for page in range(wanted, 0, -1)
        if all(page % block == 0 or block % page == 0 for block in blocks)
        and not any(chunk % page for chunk in chunks)
    )
