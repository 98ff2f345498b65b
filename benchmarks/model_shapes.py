"""Which model a benchmark runs: a folder, a name, or a shape with weights without meaning."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_hicache.errors import ConfigError

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA_8B: dict[str, Any] = {
    **_LLAMA,
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
TINY: dict[str, Any] = {
    **_LLAMA,
    "dtype": "float32",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 256,
    "eos_token_id": 257,
}
SHAPES = {"tiny": TINY, "llama-8b": LLAMA_8B}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Model:
    """A model as vLLM is told of it."""

    name: str
    """Folder, or name on the hub."""
    config: dict[str, Any]
    """Contents of its config.json."""
    load_format: str

    @property
    def vocab_size(self) -> int:
        """Random prompts draw from so many ids."""
        return int(self.config["vocab_size"])

    @property
    def max_positions(self) -> int:
        """Longest context of the model, in tokens."""
        return int(self.config.get("max_position_embeddings") or 1 << 20)


def model_of(options: argparse.Namespace, folder: Path) -> Model:
    """What ``--model`` or ``--shape`` says; a shape's config is written below ``folder``."""
    if options.model and options.shape:
        raise ConfigError("--model and --shape exclude one another")
    if options.model and not Path(options.model).exists():
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(options.model, "config.json"))
        return Model(options.model, json.loads(path.read_text()), "auto")
    if options.model:
        config = json.loads((Path(options.model) / "config.json").read_text())
        return Model(options.model, config, "auto")
    shape = options.shape or "tiny"
    written = folder / shape
    written.mkdir(parents=True, exist_ok=True)
    (written / "config.json").write_text(json.dumps(SHAPES[shape], indent=1))
    return Model(str(written), SHAPES[shape], "dummy")


def vocab_size_of(options: argparse.Namespace, folder: Path) -> int:
    """Ids that prompts may have."""
    return model_of(options, folder).vocab_size


def kv_bytes_per_token(config: dict[str, Any], dtype: str) -> int:
    """Bytes of K and V of one token in all layers, of a model with full attention.

    >>> kv_bytes_per_token(LLAMA_8B, "auto")
    131072
    >>> kv_bytes_per_token(TINY, "auto"), kv_bytes_per_token(TINY, "float32")
    (2048, 4096)
    """
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        dtype = "bfloat16" if dtype == "float32" else dtype  # vLLM's "auto" halves it
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
    return 2 * int(config["num_hidden_layers"]) * kv_heads * head_size * ITEM_BYTES[dtype]
