"""Sound files of other programs: read, or refused by what they are."""

import io
import json
import zipfile
from contextlib import suppress

import numpy as np
import pytest
from checkpoint_files import PREFIX, lora_pair, write_lora_directory
from safetensors.numpy import load_file, save_file

import lsrdecomp as lsr
from lsrdecomp.errors import CheckpointError, UnsupportedError
from lsrdecomp.lora.compress import export_lora, truncate
from lsrdecomp.lora.files import open_checkpoint, write_pairs
from lsrdecomp.lora.files.tensors import DTYPES

RNG = np.random.default_rng(5)
Q = "model.layers.0.self_attn.q_proj"
MLX_LM = {"fine_tune_type": "lora", "lora_parameters": {"rank": 2, "scale": 20.0}}


def halves(down, up, dtype="float32"):
    """A of 2 × 6 and B of 4 × 2 under these keys."""
    return {
        f"{Q}{down}": RNG.standard_normal((2, 6)).astype(dtype),
        f"{Q}{up}": RNG.standard_normal((4, 2)).astype(dtype),
    }


def transposed(down, up, dtype="float32"):
    return {key: np.ascontiguousarray(array.T) for key, array in halves(down, up, dtype).items()}


def update(checkpoint):
    (layer,) = checkpoint.layers
    up, down = layer.load()
    return layer.scale * (up.astype(np.float64) @ down)


# -- mlx-lm and mlx-vlm ----------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_archives_of_old_mlx_are_read_with_the_alpha_that_is_given(tmp_path, dtype, compressed):
    tensors = transposed(".lora_a", ".lora_b", dtype)
    save = np.savez_compressed if compressed else np.savez
    save(tmp_path / "adapters.npz", **tensors)
    with pytest.raises(CheckpointError, match=r"rank 2: its alpha is not in it; pass alpha="):
        open_checkpoint(tmp_path / "adapters.npz")
    checkpoint = open_checkpoint(tmp_path / "adapters.npz", alpha=40)
    assert checkpoint.format == "mlx"
    a, b = (tensors[f"{Q}.lora_{half}"].astype(np.float64) for half in "ab")
    np.testing.assert_allclose(update(checkpoint), 20 * (a @ b).T, rtol=1e-12)
    # Beside a config its scale is taken.
    (tmp_path / "adapter_config.json").write_text(json.dumps(MLX_LM))
    np.testing.assert_array_equal(update(open_checkpoint(tmp_path)), update(checkpoint))
    again = export_lora(
        open_checkpoint(tmp_path), tmp_path.with_name(f"{tmp_path.name}-again"), to="same"
    )
    back = open_checkpoint(again)
    assert back.weights.name == "adapters.safetensors"
    np.testing.assert_allclose(update(back), update(checkpoint), rtol=1e-6)


def test_an_archive_in_bfloat16_as_mlx_writes_it(tmp_path):
    tensors = transposed(".lora_a", ".lora_b")
    with zipfile.ZipFile(tmp_path / "adapters.npz", "w") as archive:
        for name, array in tensors.items():
            bits = array.astype(DTYPES["bfloat16"]).view("V2")
            buffer = io.BytesIO()
            np.save(buffer, bits)
            archive.writestr(f"{name}.npy", buffer.getvalue())
    checkpoint = open_checkpoint(tmp_path, alpha=2)
    assert checkpoint.layers[0].dtype == "bfloat16"
    a, b = (
        tensors[f"{Q}.lora_{half}"].astype(DTYPES["bfloat16"]).astype(np.float64) for half in "ab"
    )
    np.testing.assert_allclose(update(checkpoint), (a @ b).T, rtol=1e-12)


def archive_bytes(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def with_header(text):
    """An array of 8 bytes under a header that says something else."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        header = text.encode().ljust(117) + b"\n"
        npy = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)
        archive.writestr("q.lora_a.npy", npy)
    return buffer.getvalue()


SOUND = archive_bytes(**{"q.lora_a": np.ones((6, 2)), "q.lora_b": np.ones((2, 4))})
DAMAGED = {
    "cut": (SOUND[: len(SOUND) // 2], "truncated or damaged"),
    "no zip": (b"hello" * 100, "truncated or damaged"),
    "pickled objects": (archive_bytes(a=np.array([{}, []], dtype=object)), "dtype"),
    "too large a shape": (
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 9)}"),
        "are declared",
    ),
    "negative": (
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -1)}"),
        "negative",
    ),
    "code in the header": (
        with_header("{'descr': __import__('os'), 'fortran_order': False, 'shape': (2,)}"),
        "truncated or damaged",
    ),
    "a way out": (archive_bytes(**{"../../q.lora_a": np.ones(2)}), "reads like a path"),
    "big endian": (archive_bytes(a=np.ones(2, ">f4")), "dtype '>f4'"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_archive_is_one_line(tmp_path, fault):
    content, words = DAMAGED[fault]
    (tmp_path / "adapters.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as refused:
        open_checkpoint(tmp_path / "adapters.npz", alpha=1)
    assert "adapters.npz" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_flipped_bits_of_an_archive_are_told_or_read(tmp_path):
    """The zip file's own checksums find what is in the numbers."""
    path = tmp_path / "adapters.npz"
    for position in range(0, len(SOUND), 7):
        content = bytearray(SOUND)
        content[position] ^= 4
        path.write_bytes(content)
        with suppress(CheckpointError):
            for layer in open_checkpoint(path, alpha=1).layers:
                layer.load()


def test_mlx_vlm_multiplies_by_its_alpha(tmp_path):
    tensors = transposed(".A", ".B")
    save_file(tensors, tmp_path / "adapters.safetensors")
    config = {"rank": 2, "alpha": 0.25, "dropout": 0.1}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format == "mlx-vlm"
    a, b = (tensors[f"{Q}.{half}"].astype(np.float64) for half in "AB")
    np.testing.assert_allclose(update(checkpoint), 0.25 * (a @ b).T, rtol=1e-12)
    out = tmp_path.with_name(f"{tmp_path.name}-cut")
    back = open_checkpoint(truncate(checkpoint, ratio=2).save(out))
    assert back.format == "mlx-vlm"
    assert json.loads((out / "adapter_config.json").read_text()) == config | {"rank": 1}
    assert lsr.lora.measure.verify(checkpoint, back).passed


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fine_tune_type": "full", "num_layers": 4}, "holds whole weights and no update"),
        ({"fine_tune_type": "dora", "lora_parameters": {"scale": 1.0}}, "rescales every row"),
        (MLX_LM, "no tensor is called .lora_a or .A as theirs are"),
        ({"hidden_size": 8}, "has neither peft_type .PEFT., lora_parameters .mlx-lm., nor rank"),
    ],
)
def test_other_directories_without_a_peft_type_are_refused_by_what_they_are(
    tmp_path, config, words
):
    save_file({f"{Q}.weight": np.ones((4, 4), np.float32)}, tmp_path / "adapters.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words) as refused:
        open_checkpoint(tmp_path)
    assert "peft_type is None" not in str(refused.value)


# -- torch files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["weights", "state_dict", "lora"])
def test_tensors_one_level_deeper_in_a_torch_file_are_read(tmp_path, wrapper):
    torch = pytest.importorskip("torch")
    tensors = halves(".lora_down.weight", ".lora_up.weight")
    content = {
        wrapper: {key: torch.from_numpy(array) for key, array in tensors.items()},
        "epoch": 3,
        "optimizer_states": [{"lr": 0.1}],
        "global_step": 12,
    }
    torch.save(content, tmp_path / "style.pt")
    checkpoint = open_checkpoint(tmp_path / "style.pt")
    expected = tensors[f"{Q}.lora_up.weight"] @ tensors[f"{Q}.lora_down.weight"]
    np.testing.assert_allclose(update(checkpoint), expected, rtol=1e-5, atol=1e-6)


def test_what_may_act_on_tensors_one_level_deeper_is_refused_by_name(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = halves(".lora_down.weight", ".lora_up.weight")
    inner = {key: torch.from_numpy(array) for key, array in tensors.items()}
    torch.save({"weights": inner, "alpha": 16, "epoch": 2}, tmp_path / "style.pt")
    with pytest.raises(UnsupportedError, match="lie in 'weights' beside alpha, which may act"):
        open_checkpoint(tmp_path / "style.pt")


# -- experts, and parts that are not known ---------------------------------------------------------


def test_experts_of_tinker_are_refused_with_the_call_that_converts_them(tmp_path):
    name = f"{PREFIX}model.layers.0.mlp.experts.w1"
    tensors = {
        f"{name}.lora_A.weight": np.ones((1, 2, 6), np.float32),
        f"{name}.lora_B.weight": np.ones((3, 4, 2), np.float32),
        **lora_pair(Q),
    }
    write_lora_directory(tmp_path, tensors, target_modules="all-linear")
    with pytest.raises(UnsupportedError, match=r"as Tinker saves them.*build_lora_adapter\(base_m"):
        open_checkpoint(tmp_path)


LAYOUTS = {
    "kohya": (".lora_down.weight", ".lora_up.weight", False),
    "diffusers": (".lora_A.weight", ".lora_B.weight", False),
    "loralib": (".lora_A", ".lora_B", False),
    "torchtune": (".lora_a.weight", ".lora_b.weight", False),
    "mlx": (".lora_a", ".lora_b", True),
}


@pytest.mark.parametrize("part", ["scale", "scalar", "reshape_weight", "gate"])
@pytest.mark.parametrize("form", [*LAYOUTS, "peft-lora", "lycoris"])
def test_an_unknown_part_of_a_layer_is_refused_and_not_carried_along(tmp_path, form, part):
    module = Q
    if form == "peft-lora":
        module, tensors = f"{PREFIX}{Q}", lora_pair(Q)
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    elif form == "lycoris":
        tensors = {
            f"{Q}.hada_w{i}_{side}": np.ones((3, 3), np.float32) for i in (1, 2) for side in "ab"
        }
    else:
        down, up, is_transposed = LAYOUTS[form]
        tensors = (transposed if is_transposed else halves)(down, up)
    tensors[f"{module}.{part}"] = np.full((1,), 2.0, np.float32)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    alpha = 2 if form in ("loralib", "torchtune", "mlx") else None
    with pytest.raises(UnsupportedError, match=f"{part}: is inside the layer {Q}, of which"):
        open_checkpoint(tmp_path, alpha=alpha)


def test_a_bias_of_a_layer_and_a_head_beside_it_come_along(tmp_path):
    tensors = halves(".lora_A", ".lora_B") | {
        f"{Q}.bias": np.ones(4, np.float32),
        "head.scale": np.ones(1, np.float32),
    }
    save_file(tensors, tmp_path / "style.safetensors")
    found = open_checkpoint(tmp_path / "style.safetensors", alpha=2).extras
    assert sorted(found) == [f"{PREFIX}head.scale", f"{PREFIX}{Q}.bias"]


# -- kohya's alpha of 0 ----------------------------------------------------------------------------


def test_an_alpha_of_zero_is_none_as_sd_scripts_reads_it(tmp_path):
    tensors = halves(".lora_down.weight", ".lora_up.weight")
    tensors[f"{Q}.alpha"] = np.array(0.0, np.float32)
    save_file(tensors, tmp_path / "style.safetensors")
    checkpoint = open_checkpoint(tmp_path / "style.safetensors")
    (layer,) = checkpoint.layers
    assert layer.scale == 1.0
    # Written as it came it keeps that alpha, and is read as the same again.
    up, down = layer.load()
    out = write_pairs(
        tmp_path / "back.safetensors", source=checkpoint, layers=[(layer.name, up, down)]
    )
    assert load_file(out)[f"{Q}.alpha"] == 0.0
    np.testing.assert_array_equal(update(open_checkpoint(out)), update(checkpoint))
