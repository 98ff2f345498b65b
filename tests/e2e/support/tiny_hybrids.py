"""Tiny models with random weights whose layers keep KV of several kinds: windows beside full
attention, windows alone, and the states of linear attention beside full attention.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

WINDOW = 64
NUM_LAYERS = 4
BASE = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
}
EXPERTS = {"num_experts_per_tok": 2}


def _gemma3() -> tuple[Any, Any]:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    config = Gemma3TextConfig(
        **BASE, sliding_window=WINDOW, layer_types=kinds, query_pre_attn_scalar=64
    )
    return Gemma3ForCausalLM, config


def _gptoss() -> tuple[Any, Any]:
    from transformers import GptOssConfig, GptOssForCausalLM

    kinds = ["sliding_attention", "full_attention"] * 2
    config = GptOssConfig(
        **BASE, **EXPERTS, sliding_window=WINDOW, layer_types=kinds, num_local_experts=4
    )
    return GptOssForCausalLM, config


def _mistralswa() -> tuple[Any, Any]:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM, MistralConfig(**BASE, sliding_window=WINDOW)


def _qwen3next() -> tuple[Any, Any]:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **BASE,
        **EXPERTS,
        num_experts=4,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    return Qwen3NextForCausalLM, config


MODELS = {
    "mistralswa": _mistralswa,
    "gemma3": _gemma3,
    "gptoss": _gptoss,
    "qwen3next": _qwen3next,
}


def write_hybrid(name: str, folder: Path, llama: Path, seed: int = 0) -> Path:
    """Write the whole model folder, with the tokenizer of ``llama``, or keep one that is there."""
    if folder.exists():
        return folder
    model_class, config = MODELS[name]()
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    torch.manual_seed(seed)
    model_class(config).to(torch.float32).save_pretrained(unfinished)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama / file, unfinished)
    os.replace(unfinished, folder)
    return folder
