"""A tiny DeepSeek-V3 with random weights: latent attention (MLA), then experts."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from tiny_latent import LATENT, ROPE

NUM_LAYERS = 3


def write_latent_experts(folder: Path, llama: Path, seed: int = 0) -> Path:
    """Write the whole model folder, with the tokenizer of ``llama``, or keep one that is there."""
    if folder.exists():
        return folder
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        kv_lora_rank=LATENT,
        q_lora_rank=128,
        qk_rope_head_dim=ROPE,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        tie_word_embeddings=False,
        initializer_range=0.08,
    )
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    torch.manual_seed(seed)
    DeepseekV3ForCausalLM(config).to(torch.float32).save_pretrained(unfinished)
    written = unfinished / "config.json"
    # transformers leaves it out; without it vLLM loads no correction bias of the router.
    written.write_text(json.dumps(json.loads(written.read_text()) | {"topk_method": "noaux_tc"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama / name, unfinished)
    os.replace(unfinished, folder)
    return folder
