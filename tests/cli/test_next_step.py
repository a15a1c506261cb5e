"""What a long verb says at its end can be typed as it stands."""

import re
import shlex

import numpy as np
import pytest
from console import lsr
from safetensors.numpy import save_file

from lsrdecomp.checkpoints import open_checkpoint

BLOCK = {"kohya": "lora_unet_down_blocks_0_attentions_0_attn1_to_q", "diffusers": "unet.down_blocks.0.attn1.to_q"}
SIDES = {"kohya": ("lora_down.weight", "lora_up.weight"), "diffusers": ("lora.down.weight", "lora.up.weight")}


@pytest.mark.parametrize("form", ["kohya", "diffusers"])
def test_an_image_lora_comes_back_as_it_was_by_the_command_shown(form, tmp_path):
    rng = np.random.default_rng(0)
    down, up = (f"{BLOCK[form]}.{side}" for side in SIDES[form])
    tensors = {down: rng.standard_normal((4, 64)), up: rng.standard_normal((64, 4))}
    save_file({name: value.astype(np.float32) for name, value in tensors.items()}, tmp_path / "style.safetensors")
    done = lsr("compress", "style.safetensors", "--ratio", "3", "--out", "small", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = re.search(r"again: lsrdecomp (export .*)", done.stdout)
    assert shown, done.stdout
    assert lsr(*shlex.split(shown[1]), cwd=tmp_path).returncode == 0
    assert open_checkpoint(tmp_path / "small.safetensors").format == form
