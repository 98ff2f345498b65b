"""Write a tiny Llama with real random weights: `python examples/tiny_model.py FOLDER`.

You get a folder of 10 MB that vLLM and transformers load: one token per byte, a chat template.
The answers depend on every byte of the KV cache, which those of vLLM's own dummy weights do not.
"""

import argparse
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from string import ascii_lowercase

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinyLlama:
    """The sizes of one model; equal sizes and seed give equal files, byte for byte."""

    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    hidden_size: int = 256
    intermediate_size: int = 512
    vocab_size: int = 512
    max_positions: int = 8192
    seed: int = 0

    def config(self) -> dict[str, object]:
        """What config.json says."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "initializer_range": 0.08,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
            "bos_token_id": 256,
            "eos_token_id": 257,
        }

    def weights(self) -> dict[str, np.ndarray]:
        """Every tensor, float32: norms are 1, all else is normal with deviation 0.08."""
        random = np.random.default_rng(self.seed)

        def matrix(rows: int, columns: int) -> np.ndarray:
            return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.08)

        hidden, inner = self.hidden_size, self.intermediate_size
        query, key = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        tensors = {"model.embed_tokens.weight": matrix(self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            shapes = {
                "self_attn.q_proj": (query, hidden),
                "self_attn.k_proj": (key, hidden),
                "self_attn.v_proj": (key, hidden),
                "self_attn.o_proj": (hidden, query),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }
            prefix = f"model.layers.{layer}"
            for name, shape in shapes.items():
                tensors[f"{prefix}.{name}.weight"] = matrix(*shape)
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{prefix}.{name}.weight"] = np.ones(hidden, np.float32)
        tensors["model.norm.weight"] = np.ones(hidden, np.float32)
        tensors["lm_head.weight"] = matrix(self.vocab_size, hidden)
        return tensors


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Ids 0 to 255 are bytes, 256 and 257 begin and end; the rest decode to pairs of letters.

    Without merges only bytes are ever encoded, so n characters of ASCII are n tokens.
    """
    symbols = [*sorted(ByteLevel.alphabet()), BOS, EOS]
    symbols += ["".join(pair) for pair in product(ascii_lowercase, repeat=2)]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write_model(folder: Path, model: TinyLlama) -> None:
    """Write the whole model folder or nothing; a folder that is already there is kept as it is."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        write_tokenizer(unfinished, model.vocab_size)
        (unfinished / "config.json").write_text(json.dumps(model.config(), indent=1))
        save_file(model.weights(), unfinished / "model.safetensors", metadata={"format": "pt"})
        os.replace(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished)
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for field in fields(TinyLlama):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    options = vars(parser.parse_args())
    write_model(options.pop("folder"), TinyLlama(**options))


if __name__ == "__main__":
    main()
