"""What a verb says at its end can be typed as it stands, for every format that is read."""

import json
import re
import shlex

import numpy as np
import pytest
from checkpoint_files import PREFIX
from console import lsr
from safetensors.numpy import load_file, save_file

from lsrdecomp.checkpoints import open_checkpoint

BLOCK = "transformer_blocks.0.attn.to_q"
COMFY = "diffusion_model.blocks.0.self_attn.q"
HADA = {f"hada_w{i}_{side}": shape for i in (1, 2) for side, shape in (("a", (64, 4)), ("b", (4, 64)))}


def halves(name, down, up):
    """Keys of a pair of rank 8 with their shapes."""
    return {f"{name}{down}": (8, 64), f"{name}{up}": (64, 8)}


ALPHA = (".lora_down.weight", ".lora_up.weight")
NEW = (".lora_A.weight", ".lora_B.weight")
KEYS = {
    "kohya": halves("lora_unet_down_blocks_0_attentions_0_attn1_to_q", *ALPHA),
    "kohya flux": halves("lora_unet_double_blocks_0_img_attn_qkv", *ALPHA),
    "musubi wan": halves("lora_unet_blocks_0_self_attn_q", *ALPHA),
    "qwen lightning": halves(BLOCK, *ALPHA),
    "comfy wan": halves(COMFY, *NEW),
    "comfy wan, kohya's halves": halves(COMFY, *ALPHA),
    "diffusers": halves("unet.down_blocks.0.attn1.to_q", ".lora.down.weight", ".lora.up.weight"),
    "diffusers flux": halves(f"transformer.{BLOCK}", *NEW),
    "cloneofsimo": halves("unet:0", ":down", ":up"),
    "loralib": halves("roberta.encoder.layer.0.attention.self.query", ".lora_A", ".lora_B"),
    "torchtune": halves("layers.0.attn.q_proj", ".lora_a.weight", ".lora_b.weight"),
    "mlx": {f"model.layers.0.self_attn.q_proj.lora_{half}": shape for half, shape in (("a", (64, 8)), ("b", (8, 64)))},
    "peft-lora": halves(f"{PREFIX}model.layers.0.self_attn.q_proj", *NEW),
    "lycoris": {f"lora_unet_mid_block_attn1_to_q.{part}": shape for part, shape in HADA.items()},
}
CONFIGS = {
    "mlx": {"fine_tune_type": "lora", "lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0.0}},
    "peft-lora": {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]},
}
WEIGHTS = {"mlx": "adapters", "peft-lora": "adapter_model"}
OUTSIDE = ("loralib", "torchtune")


def write(folder, form):
    """A file in float16 as the format's own tools name it; returns what is given to the verbs."""
    rng = np.random.default_rng(0)
    tensors = {key: rng.standard_normal(shape).astype(np.float16) for key, shape in KEYS[form].items()}
    for key in [key for key in tensors if key.endswith(".lora_down.weight")]:
        tensors[f"{key.removesuffix('.lora_down.weight')}.alpha"] = np.array(4.0, np.float16)
    if form not in CONFIGS:
        save_file(tensors, folder / "style.safetensors", metadata={"kept": "yes", "sshs_legacy_hash": "0"})
        return "style.safetensors"
    (folder / "style").mkdir()
    (folder / "style" / "adapter_config.json").write_text(json.dumps(CONFIGS[form]))
    save_file(tensors, folder / "style" / f"{WEIGHTS[form]}.safetensors")
    return "style"


def update(checkpoint):
    """ΔW of the one layer."""
    (layer,) = checkpoint.layers
    left, right = layer.load()
    return layer.scale * (np.asarray(left, np.float64) @ right)


@pytest.mark.parametrize("form", KEYS)
def test_a_lora_comes_back_as_it_was_by_the_command_shown(form, tmp_path):
    given = write(tmp_path, form)
    alpha = ["--alpha", "4"] if form in OUTSIDE else []
    done = lsr("compress", given, *alpha, "--ratio", "1.5", "--out", "small", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"lsrdecomp (export .*)", done.stdout)
    if form == "peft-lora":
        assert not shown
        assert "Open it with PEFT" in done.stdout
        return
    (command,) = shown
    ran = lsr(*shlex.split(command), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    scale = 4 if alpha else None
    source, small = open_checkpoint(tmp_path / given, alpha=scale), open_checkpoint(tmp_path / "small")
    made = shlex.split(command)[-1]
    back = open_checkpoint(tmp_path / made, alpha=scale)
    checked = lsr("verify", given, made, *alpha, cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    if form == "lycoris":
        assert back.format == "kohya"
        return
    assert (back.format, back.layers[0].dtype) == (source.format, "float16")
    before, after = load_file(source.weights), load_file(back.weights)
    assert after.keys() == before.keys()
    assert {key: array.dtype for key, array in after.items()} == {key: array.dtype for key, array in before.items()}
    assert all(after[key] == before[key] for key in before if key.endswith(".alpha"))
    if form not in CONFIGS:
        assert back.metadata["kept"] == "yes"
        assert "sshs_legacy_hash" not in back.metadata
    left, right = small.layers[0].load()
    expanded = [sum(_kron(side, k) for k in range(len(side[0]))) for side in (left, right)]
    expected = small.layers[0].scale * (expanded[0] @ expanded[1])
    np.testing.assert_allclose(update(back), expected, atol=2e-3 * np.abs(expected).max())


def _kron(side, k):
    product = np.ones((1, 1))
    for factor in side:
        product = np.kron(product, np.asarray(factor[k], np.float64))
    return product


def test_an_image_lora_is_not_sent_to_calibrate_and_a_text_lora_is_by_a_whole_command(tmp_path):
    for form, sent in (("kohya", False), ("peft-lora", True)):
        folder = tmp_path / form
        folder.mkdir()
        done = lsr("compress", write(folder, form), "--ratio", "30", "--out", "small", cwd=folder)
        assert "WARNING: little of this adapter is left" in done.stderr
        assert ("lsrdecomp calibrate" in done.stderr) == sent
    (again,) = re.findall(r"lsrdecomp (compress .*)", done.stderr)
    refused = lsr(*shlex.split(again), cwd=tmp_path / "peft-lora")
    assert "statistics" in refused.stderr
    assert "Usage" not in refused.stderr
