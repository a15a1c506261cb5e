"""A small LoRA in the key layout of every format that is read, as its own tools name it."""

import json

import numpy as np
from checkpoint_files import PREFIX
from safetensors.numpy import save_file

BLOCK = "transformer_blocks.0.attn.to_q"
COMFY = "diffusion_model.blocks.0.self_attn.q"
HADA = {
    f"hada_w{i}_{side}": shape for i in (1, 2) for side, shape in (("a", (64, 4)), ("b", (4, 64)))
}


def pair_shapes(name, down, up):
    """Keys of a pair of rank 8 with their shapes."""
    return {f"{name}{down}": (8, 64), f"{name}{up}": (64, 8)}


ALPHA = (".lora_down.weight", ".lora_up.weight")
NEW = (".lora_A.weight", ".lora_B.weight")
KEYS = {
    "kohya": pair_shapes("lora_unet_down_blocks_0_attentions_0_attn1_to_q", *ALPHA),
    "kohya flux": pair_shapes("lora_unet_double_blocks_0_img_attn_qkv", *ALPHA),
    "musubi wan": pair_shapes("lora_unet_blocks_0_self_attn_q", *ALPHA),
    "qwen lightning": pair_shapes(BLOCK, *ALPHA),
    "comfy wan": pair_shapes(COMFY, *NEW),
    "comfy wan, kohya's halves": pair_shapes(COMFY, *ALPHA),
    "diffusers": pair_shapes(
        "unet.down_blocks.0.attn1.to_q", ".lora.down.weight", ".lora.up.weight"
    ),
    "diffusers flux": pair_shapes(f"transformer.{BLOCK}", *NEW),
    "diffsynth wan": pair_shapes(
        "blocks.0.self_attn.q", ".lora_A.default.weight", ".lora_B.default.weight"
    ),
    "diffusers z-image": pair_shapes("transformer.layers.0.attention.to_q", *NEW),
    "loralib": pair_shapes("roberta.encoder.layer.0.attention.self.query", ".lora_A", ".lora_B"),
    "torchtune": pair_shapes("layers.0.attn.q_proj", ".lora_a.weight", ".lora_b.weight"),
    "mlx": {
        f"model.layers.0.self_attn.q_proj.lora_{half}": shape
        for half, shape in (("a", (64, 8)), ("b", (8, 64)))
    },
    "mlx, npz": {
        f"model.layers.0.self_attn.q_proj.lora_{half}": shape
        for half, shape in (("a", (64, 8)), ("b", (8, 64)))
    },
    "mlx-vlm": {
        f"language_model.model.layers.0.self_attn.q_proj.{half}": shape
        for half, shape in (("A", (64, 8)), ("B", (8, 64)))
    },
    "peft-lora": pair_shapes(f"{PREFIX}model.layers.0.self_attn.q_proj", *NEW),
    "peft-lora, experts by name": pair_shapes(
        f"{PREFIX}model.layers.0.mlp.experts.1.gate_proj", *NEW
    ),
    "peft-lora, stacked experts": pair_shapes(f"{PREFIX}model.layers.0.mlp.experts", *NEW),
    "peft-adalora": {
        f"{PREFIX}model.layers.0.self_attn.q_proj.lora_{part}": shape
        for part, shape in (("A", (8, 64)), ("B", (64, 8)), ("E", (8, 1)))
    },
    "lycoris": {f"lora_unet_mid_block_attn1_to_q.{part}": shape for part, shape in HADA.items()},
}
CONFIGS = {
    "mlx": {
        "fine_tune_type": "lora",
        "lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0.0},
    },
    "peft-lora": {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    },
}
CONFIGS["mlx, npz"] = CONFIGS["mlx"]
CONFIGS["mlx-vlm"] = {"rank": 8, "alpha": 0.1, "dropout": 0.1}
CONFIGS["peft-lora, experts by name"] = CONFIGS["peft-lora"] | {"target_modules": ["gate_proj"]}
EXPERTS = {"r": 4, "target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}
CONFIGS["peft-lora, stacked experts"] = CONFIGS["peft-lora"] | EXPERTS
CONFIGS["peft-adalora"] = {
    **CONFIGS["peft-lora"],
    "peft_type": "ADALORA",
    "init_r": 8,
    "total_step": 9,
}
OUTSIDE = ("loralib", "torchtune")


def write_format(folder, form):
    """A file in float16 as the format's own tools name it; returns what is given to the verbs."""
    rng = np.random.default_rng(0)
    tensors = {
        key: rng.standard_normal(shape).astype(np.float16) for key, shape in KEYS[form].items()
    }
    for key in [key for key in tensors if key.endswith(".lora_down.weight")]:
        tensors[f"{key.removesuffix('.lora_down.weight')}.alpha"] = np.array(4.0, np.float16)
    if form not in CONFIGS:
        save_file(
            tensors, folder / "style.safetensors", metadata={"kept": "yes", "sshs_legacy_hash": "0"}
        )
        return "style.safetensors"
    (folder / "style").mkdir()
    (folder / "style" / "adapter_config.json").write_text(json.dumps(CONFIGS[form]))
    if form.endswith("npz"):
        np.savez(folder / "style" / "adapters.npz", **tensors)
        return "style"
    stem = "adapters" if form.startswith("mlx") else "adapter_model"
    save_file(tensors, folder / "style" / f"{stem}.safetensors")
    return "style"
