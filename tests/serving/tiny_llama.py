"""A tiny Llama by its headers alone, and adapters of its attention."""

import json

import numpy as np
from checkpoint_files import lora_pair, write_lora_directory
from safetensors.numpy import save_file

LAYERS, WIDTH, KEYS = 2, 32, 16
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "vocab_size": 96,
    "tie_word_embeddings": True,
}
SIZES = {
    "q_proj": (WIDTH, WIDTH),
    "k_proj": (KEYS, WIDTH),
    "v_proj": (KEYS, WIDTH),
    "o_proj": (WIDTH, WIDTH),
}


def write_base(folder):
    """Write config and weights; return the folder."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights = {"model.embed_tokens.weight": (96, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        weights |= {
            f"model.layers.{layer}.self_attn.{key}.weight": size for key, size in SIZES.items()
        }
        mlp = {"gate_proj": (48, WIDTH), "up_proj": (48, WIDTH), "down_proj": (WIDTH, 48)}
        weights |= {f"model.layers.{layer}.mlp.{key}.weight": size for key, size in mlp.items()}
        weights |= {
            f"model.layers.{layer}.{key}_layernorm.weight": (WIDTH,)
            for key in ("input", "post_attention")
        }
    rng = np.random.default_rng(0)
    filled = {
        key: (0.1 * rng.standard_normal(size)).astype(np.float32) for key, size in weights.items()
    }
    save_file(filled, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def adapter(path, names=None, *, rank=2, tensors=None, **config):
    names = names or [f"model.layers.{i}.self_attn.{key}" for i in range(LAYERS) for key in SIZES]
    held = {
        k: v
        for name in names
        for k, v in lora_pair(name, *SIZES[name.rpartition(".")[2]], rank).items()
    }
    settings = {"r": rank, "target_modules": list(SIZES), "task_type": "CAUSAL_LM", **config}
    return write_lora_directory(path, {**held, **(tensors or {})}, **settings)
