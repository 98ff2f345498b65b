"""Tiny drafters with random weights, and targets whose layers look at windows.

All derive from the tiny Llama; the one with a multi-token-prediction layer is a tiny DeepSeek-V3.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

WINDOW = 64
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
WIDE = {"q": 256, "k": 128, "v": 128}
"""Rows of the projections that EAGLE-3 applies to twice the hidden size."""

Tensors = dict[str, np.ndarray]


def write_eagle(folder: Path, llama: Path) -> Path:
    """An EAGLE head: one layer that sees the token and the target's last hidden state."""
    with _new(folder, llama) as made:
        config, tensors = _read(llama)
        layer = {k.removeprefix("model."): v for k, v in _first_layer(tensors).items()}
        layer.pop("layers.0.input_layernorm.weight")
        hidden = config["hidden_size"]
        layer["fc.weight"] = _matrix(5, hidden, 2 * hidden)
        _write(made, config | {"num_hidden_layers": 1}, layer)
    return folder


def write_eagle3(folder: Path, llama: Path) -> Path:
    """An EAGLE-3 head: one layer that sees the token and three hidden states of the target."""
    with _new(folder, llama) as made:
        config, tensors = _read(llama)
        hidden = config["hidden_size"]
        old, new = "model.layers.0.", "midlayer."
        layer = {k.replace(old, new): v for k, v in _first_layer(tensors).items()}
        for i, (name, rows) in enumerate(WIDE.items()):
            layer[f"midlayer.self_attn.{name}_proj.weight"] = _matrix(i, rows, 2 * hidden)
        layer["midlayer.hidden_norm.weight"] = layer["norm.weight"] = np.ones(hidden, np.float32)
        layer["fc.weight"] = _matrix(6, hidden, 3 * hidden)
        layer["lm_head.weight"] = tensors["lm_head.weight"]
        changes = {
            "num_hidden_layers": 1,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": config["vocab_size"],
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        }
        _write(made, config | changes, layer)
    return folder


def write_windowed(folder: Path, llama: Path) -> Path:
    """The same weights as a Mistral whose layers all look at a window."""
    with _new(folder, llama) as made:
        config, tensors = _read(llama)
        changes = {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": WINDOW,
        }
        _write(made, config | changes, tensors)
    return folder


def write_mixed(folder: Path, llama: Path) -> Path:
    """The same weights, where every other layer looks at a window."""
    with _new(folder, llama) as made:
        config, tensors = _read(llama)
        kinds = ["sliding_attention", "full_attention"] * (config["num_hidden_layers"] // 2)
        _write(made, config | {"sliding_window": WINDOW, "layer_types": kinds}, tensors)
    return folder


def write_mtp(folder: Path, llama: Path) -> Path:
    """Latent attention, and a layer behind the last that predicts one more token.

    No layer has experts: vLLM cannot start such a model behind one without, in one process.
    """
    with _new(folder, llama) as made:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        config = DeepseekV3Config(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            moe_intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=8192,
            kv_lora_rank=512,
            q_lora_rank=128,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            first_k_dense_replace=4,
            n_group=1,
            topk_group=1,
            tie_word_embeddings=False,
            initializer_range=0.08,
        )
        torch.manual_seed(0)
        DeepseekV3ForCausalLM(config).to(torch.float32).save_pretrained(made)
        settings, tensors = _read(made)
        settings |= {"topk_method": "noaux_tc", "num_nextn_predict_layers": 1}
        _write(made, settings, tensors | _next_token_layer(tensors, 3, 256))
    return folder


def _next_token_layer(tensors: Tensors, number: int, hidden: int) -> Tensors:
    last, new = f"model.layers.{number - 1}.", f"model.layers.{number}."
    layer = {k.replace(last, new): v for k, v in tensors.items() if k.startswith(last)}
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        layer[f"{new}{norm}.weight"] = np.ones(hidden, np.float32)
    layer[f"{new}eh_proj.weight"] = _matrix(7, hidden, 2 * hidden)
    layer[f"{new}shared_head.head.weight"] = tensors["lm_head.weight"]
    layer[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    return layer


WRITERS: dict[str, Callable[[Path, Path], Path]] = {
    "eagle": write_eagle,
    "eagle3": write_eagle3,
    "windowed": write_windowed,
    "mixed": write_mixed,
    "mtp": write_mtp,
}


@contextmanager
def _new(folder: Path, llama: Path) -> Iterator[Path]:
    """A folder that gets its name when it is whole; one that is there is left as it is."""
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    for name in TOKENIZER:
        shutil.copy(llama / name, unfinished)
    try:
        yield unfinished
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _read(folder: Path) -> tuple[dict[str, Any], Tensors]:
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


def _write(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _first_layer(tensors: Tensors) -> Tensors:
    return {k: v for k, v in tensors.items() if k.startswith("model.layers.0.")}


def _matrix(seed: int, rows: int, columns: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.08)
