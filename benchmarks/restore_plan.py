"""What `restore.py` runs: model, sizes, engine and connector options, and the hits it expects."""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from vllm_hicache.quantities import parse_bytes

ROOT = Path(__file__).resolve().parent.parent
ARMS = ("hicache", "native", "none")
TIERS = ("cold", "device hit", "host restore", "file restore")
SOURCE = {"device hit": "device", "host restore": "host", "file restore": "disk"}
"""Tier -> the source under which vLLM counts cached tokens."""
SYNC_LOAD_MAX_MS = {"sync": 600_000.0, "async": 0.0}
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
SHAPES = {"llama-8b": LLAMA_8B}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
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

        vLLM's own connector keeps chunks of its own size: up to a page less is accepted there,
        and it adds the last block, which a full device hit leaves to be computed.
        """
        if tier == "cold":
            return not any(cached.values())
        found, expected = cached.get(SOURCE[tier], 0), self.expected(length, tier)
        is_alone = found == sum(cached.values())
        if self.arm == "native" and tier == "device hit":
            return found == expected
        if self.arm == "native" and tier != "device hit":
            return is_alone and found > max(0, expected - self.page_size)
        return is_alone and found == expected


def plan_restore(options: argparse.Namespace, arm: str, folder: Path) -> RestorePlan:
    """Work out sizes from the model; ``folder`` takes the model and the pages where none is
    given."""
    model, config = _model(options, folder)
    per_token = kv_bytes_per_token(config, options.dtype)
    longest = max(options.lengths)
    longest_bytes = per_token * (-(-longest // options.page_size) * options.page_size)
    storage = _storage(options, arm, folder)
    engine: dict[str, Any] = {
        "model": model,
        "dtype": options.dtype,
        "load_format": "dummy" if options.shape else "auto",
        "skip_tokenizer_init": True,
        "enforce_eager": options.enforce_eager or not Path("/dev/nvidiactl").exists(),
        "max_model_len": longest + SPARE_TOKENS,
        "block_size": options.block_size,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "kv_cache_memory_bytes": options.device_kv_bytes
        or 2 * longest_bytes + SPARE_TOKENS * options.block_size * per_token,
    }
    if options.max_batched_tokens:
        engine["max_num_batched_tokens"] = options.max_batched_tokens
    host_memory = options.host_memory or 3 * longest_bytes
    return RestorePlan(
        arm=arm,
        lengths=tuple(options.lengths),
        repeat=options.repeat,
        block_size=options.block_size,
        page_size=options.page_size,
        vocab_size=int(config["vocab_size"]),
        engine=engine,
        connector={"hicache": "HiCacheConnector", "native": "OffloadingConnector"}.get(arm, ""),
        connector_options={
            "hicache": lambda: _hicache(options, host_memory, storage, longest_bytes),
            "native": lambda: {
                "cpu_bytes_to_use": parse_bytes(host_memory),
                **options.native_options,
            },
            "none": dict,
        }[arm](),
        storage=storage,
        drops_page_cache=options.drop_page_cache,
    )


def kv_bytes_per_token(config: dict[str, Any], dtype: str) -> int:
    """Bytes of K and V of one token in all layers, of a model with full attention."""
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
    return 2 * int(config["num_hidden_layers"]) * kv_heads * head_size * ITEM_BYTES[dtype]


def _hicache(
    options: argparse.Namespace, host_memory: str | int, storage: Path | None, longest_bytes: int
) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "host_memory": host_memory,
        "page_size": options.page_size,
        "skip_slow_loads": False,  # a restore is measured, not whether it pays
    }
    if options.load_mode != "auto":
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
            "capacity": 3 * longest_bytes + (64 << 20),
            "min_free": 0,
            "write_backlog": 2 * longest_bytes + (64 << 20),
            "operation_timeout_s": 120,
        },
    }


def _storage(options: argparse.Namespace, arm: str, folder: Path) -> Path | None:
    if arm != "hicache" or options.storage == "none":
        return None
    return Path(options.storage) if options.storage else folder / "pages"


def _model(options: argparse.Namespace, folder: Path) -> tuple[str, dict[str, Any]]:
    """(name for vLLM, contents of its config.json)."""
    if options.model and not Path(options.model).exists():
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(options.model, "config.json"))
        return options.model, json.loads(path.read_text())
    if options.model:
        model = Path(options.model)
    elif options.shape:
        model = folder / options.shape
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(SHAPES[options.shape], indent=1))
    else:
        model = folder / "tiny-llama"
        positions = str(max(options.lengths) + SPARE_TOKENS)
        script = ROOT / "examples" / "tiny_model.py"
        command = [sys.executable, script, model, "--max-positions", positions]
        subprocess.run(command, check=True)
    return str(model), json.loads((model / "config.json").read_text())
