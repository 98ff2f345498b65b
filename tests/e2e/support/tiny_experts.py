"""A tiny Mixtral with random weights: the tiny Llama whose MLPs became experts and a router."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

NUM_EXPERTS, EXPERTS_PER_TOKEN = 4, 2
EXPERT_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def write_experts(folder: Path, llama: Path, seed: int = 0) -> Path:
    """Write the whole model folder, or keep one that is there."""
    if folder.exists():
        return folder
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama / name, unfinished)
    config = json.loads((llama / "config.json").read_text()) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "sliding_window": None,
    }
    (unfinished / "config.json").write_text(json.dumps(config, indent=1))
    tensors = _with_experts(load_file(llama / "model.safetensors"), config, seed)
    save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
    os.replace(unfinished, folder)
    return folder


def _with_experts(
    tensors: dict[str, np.ndarray], config: dict[str, int], seed: int
) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)

    def like(shape: tuple[int, ...]) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32) * np.float32(0.08)

    kept = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        block = f"{prefix}.block_sparse_moe"
        # A router with large weights: which experts a token takes does not hang on rounding.
        kept[f"{block}.gate.weight"] = 10 * like((NUM_EXPERTS, config["hidden_size"]))
        for expert in range(NUM_EXPERTS):
            for part, dense in EXPERT_PARTS.items():
                shape = tensors[f"{prefix}.mlp.{dense}.weight"].shape
                kept[f"{block}.experts.{expert}.{part}.weight"] = like(shape)
    return kept
