"""What `restore.py` runs: model, sizes, engine and connector options, and the hits it expects."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from vllm_hicache.benchmarks.arms import CONNECTORS, ConnectorSizes, connector_options, has_gpu
from vllm_hicache.benchmarks.model_shapes import kv_bytes_per_token, model_of
from vllm_hicache.quantities import parse_bytes

ARMS = ("hicache", "native", "simple", "none")
TIERS = ("cold", "device hit", "host restore", "file restore")
SOURCE = {"device hit": "device", "host restore": "host", "file restore": "disk"}
"""Tier -> the source under which vLLM counts cached tokens."""
SYNC_LOAD_MAX_MS = {"sync": 600_000.0, "async": 0.0}
SPARE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """One engine and what is measured in it."""

    arm: str
    lengths: tuple[int, ...]
    repeat: int
    block_size: int
    page_size: int
    vocab_size: int
    engine: dict[str, Any]
    """Keyword arguments of vLLM's ``LLM``, without the connector."""
    connector: str
    connector_options: dict[str, Any]
    storage: Path | None
    drops_page_cache: bool
    evicts_by_prompts: bool = False
    """Other prompts push the KV out of the device, in place of a reset."""
    seed: int = 0

    @property
    def tiers(self) -> tuple[str, ...]:
        """What this arm can serve from."""
        if self.arm == "none":
            return TIERS[:2]
        return TIERS if self.arm == "hicache" and self.storage is not None else TIERS[:3]

    def expected(self, length: int, tier: str) -> int:
        """Cached tokens of a prompt that has just been seen. One token is always computed."""
        on_device = (length - 1) // self.block_size * self.block_size
        if tier == "cold":
            return 0
        if tier == "device hit":
            return on_device
        return min(length // self.page_size * self.page_size, on_device)

    def is_expected(self, cached: dict[str, int], length: int, tier: str) -> bool:
        """Whether vLLM counted the hit under the right source, and in full.

        vLLM's own connectors keep chunks of their own size: up to a page less is accepted there,
        and one adds the last block, which a full device hit leaves to be computed.
        """
        if tier == "cold":
            return not any(cached.values())
        found, expected = cached.get(SOURCE[tier], 0), self.expected(length, tier)
        others = sum(cached.values()) - found
        if self.arm in ("native", "simple"):
            if tier == "device hit":
                return found == expected and others <= self.block_size
            return not others and found > max(0, expected - self.page_size)
        return not others and found == expected


def plan_restore(options: argparse.Namespace, arm: str, folder: Path) -> RestorePlan:
    """Work out sizes from the model; ``folder`` takes the model and the pages where none is
    given."""
    model = model_of(options, folder)
    per_token = kv_bytes_per_token(model.config, options.dtype)
    longest = max(options.lengths)
    longest_bytes = per_token * (-(-longest // options.page_size) * options.page_size)
    storage = _storage(options, arm, folder)
    engine: dict[str, Any] = {
        "model": model.name,
        "dtype": options.dtype,
        "load_format": model.load_format,
        "skip_tokenizer_init": True,
        "enforce_eager": options.enforce_eager or not has_gpu(),
        "max_model_len": longest + SPARE_TOKENS,
        "block_size": options.block_size,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "kv_cache_memory_bytes": options.device_kv_bytes
        or 2 * longest_bytes + SPARE_TOKENS * options.block_size * per_token,
    }
    if options.max_batched_tokens:
        engine["max_num_batched_tokens"] = options.max_batched_tokens
    if options.load_mode == "sync":  # no step waits for a load with several batches in flight
        engine["async_scheduling"] = False
    host_memory = options.host_memory or _room(options) * longest_bytes
    return RestorePlan(
        arm=arm,
        lengths=tuple(options.lengths),
        repeat=options.repeat,
        block_size=options.block_size,
        page_size=options.page_size,
        vocab_size=model.vocab_size,
        engine=engine,
        connector=CONNECTORS[arm],
        connector_options=_hicache(options, host_memory, storage, longest_bytes)
        if arm == "hicache"
        else _peer(options, arm, parse_bytes(host_memory)),
        storage=storage,
        drops_page_cache=options.drop_page_cache,
        evicts_by_prompts=options.evict_by == "prompts",
        seed=options.seed,
    )


def _room(options: argparse.Namespace) -> int:
    """Longest prompts that host memory and files hold; two fill the device to evict one."""
    return 5 if options.evict_by == "prompts" else 3


def _peer(options: argparse.Namespace, arm: str, host_bytes: int) -> dict[str, Any]:
    more = {"native": options.native_options}
    sizes = ConnectorSizes(host_bytes, options.page_size, storage=None, more_options=more)
    return connector_options(arm, sizes)


def _hicache(
    options: argparse.Namespace, host_memory: str | int, storage: Path | None, longest_bytes: int
) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "host_memory": host_memory,
        "page_size": options.page_size,
        "skip_slow_loads": False,  # a restore is measured, not whether it pays
        **options.hicache_options,
    }
    if options.load_mode == "layerwise":
        extra["load_mode"] = "layerwise"
    elif options.load_mode != "auto":
        extra["sync_load_max_ms"] = SYNC_LOAD_MAX_MS[options.load_mode]
    if storage is None:
        return extra
    return {
        **extra,
        "prefetch_policy": options.prefetch_policy,
        "weights_id": f"benchmark-{token_hex(8)}",  # no pages of an earlier run
        "fixed_weights": True,  # host memory can then be dropped without losing the files
        "min_object_bytes": 1,
        "storage": {
            "url": f"file://{storage.resolve()}",
            "capacity": _room(options) * longest_bytes + (64 << 20),
            "min_free": 0,
            "write_backlog": 2 * longest_bytes + (64 << 20),
            "operation_timeout_s": 120,
        },
    }


def _storage(options: argparse.Namespace, arm: str, folder: Path) -> Path | None:
    if arm != "hicache" or options.storage == "none":
        return None
    return Path(options.storage) if options.storage else folder / "pages"
