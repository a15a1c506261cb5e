"""What a verb says at its end can be typed as it stands, for every format that is read."""

import re
import shlex

import numpy as np
import pytest
from console import lsr
from format_files import CONFIGS, KEYS, OUTSIDE, write
from safetensors.numpy import load_file

from lsrdecomp.checkpoints import open_checkpoint


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
