"""A tiny LoRA adapter for the attention of the tiny Llama, strong enough to change every answer."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RANK = 8
SIZES = {"q_proj": (256, 256), "k_proj": (256, 128), "v_proj": (256, 128)}
NUM_LAYERS = 4


def write_adapter(folder: Path, seed: int) -> Path:
    """Write adapter files over what is there; another seed gives other deltas."""
    folder.mkdir(parents=True, exist_ok=True)
    source = np.random.default_rng(seed)
    tensors = {}
    for layer in range(NUM_LAYERS):
        for name, (inputs, outputs) in SIZES.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
                values = source.standard_normal(shape, dtype=np.float32) * np.float32(0.1)
                tensors[f"{prefix}.{part}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(SIZES),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
