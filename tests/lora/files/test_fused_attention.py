"""Z-Image between ComfyUI's names, with q, k and v in one, and diffusers', with them apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from console import run_command
from safetensors.numpy import load_file, save_file

from lsrdecomp import compress
from lsrdecomp.errors import CheckpointError, LsrError, UnsupportedError
from lsrdecomp.lora.compress import export_lora
from lsrdecomp.lora.files import Checkpoint, open_checkpoint, write_pairs
from lsrdecomp.lora.files.layer_names import diffusers_name, kohya_name, z_image_module
from lsrdecomp.lora.measure import verify

SIZE, HIDDEN = 12, 20
BLOCKS = ("layers.0", "layers.11", "noise_refiner.1", "context_refiner.0")
DIFFUSERS = {
    "attention.to_q": (SIZE, SIZE, 2),
    "attention.to_k": (SIZE, SIZE, 3),
    "attention.to_v": (SIZE, SIZE, 2),
    "attention.to_out.0": (SIZE, SIZE, 2),
    "feed_forward.w1": (HIDDEN, SIZE, 2),
    "feed_forward.w2": (SIZE, HIDDEN, 2),
    "feed_forward.w3": (HIDDEN, SIZE, 2),
    "adaLN_modulation.0": (4 * SIZE, SIZE, 2),
}
CHECKPOINT = {
    "attention.qkv": (3 * SIZE, SIZE, 4),
    "attention.out": (SIZE, SIZE, 2),
    "feed_forward.w1": (HIDDEN, SIZE, 2),
    "feed_forward.w2": (SIZE, HIDDEN, 2),
    "feed_forward.w3": (HIDDEN, SIZE, 2),
}
SPELLINGS = {
    "diffusers": lambda name: f"transformer.{name}.lora_%s.weight",
    "ai-toolkit": lambda name: f"diffusion_model.{name}.lora_%s.weight",
    "flattened": lambda name: f"lora_unet_{name.replace('.', '_')}.lora_%s.weight",
}
HALVES = {"diffusers": "AB", "ai-toolkit": "AB", "flattened": ("down", "up")}


def write(path: Path, spelling: str, modules: dict[str, tuple[int, int, int]]) -> Checkpoint:
    rng = np.random.default_rng(5)
    tensors = {}
    for block in BLOCKS:
        for module, (rows, columns, rank) in modules.items():
            key = SPELLINGS[spelling](f"{block}.{module}")
            down, up = HALVES[spelling]
            tensors[key % down] = rng.standard_normal((rank, columns)).astype(np.float32)
            tensors[key % up] = rng.standard_normal((rows, rank)).astype(np.float32)
            if spelling == "flattened":
                tensors[f"{key.partition('.')[0]}.alpha"] = np.array(rank / 2, np.float32)
    save_file(tensors, path)
    return open_checkpoint(path)


def updates(adapter: Checkpoint) -> dict[str, np.ndarray]:
    """ΔW by diffusers' name of the module, q, k and v apart."""
    found = {}
    for layer in adapter.layers:
        up, down = layer.load(double=True)
        update = layer.scale * up @ down
        module = z_image_module(layer.name)
        if module.endswith(".qkv"):
            block = module.removesuffix(".qkv")
            for part, rows in zip("qkv", np.split(update, 3), strict=True):
                found[f"{block}.to_{part}"] = rows
        else:
            found[diffusers_name(layer.name).removeprefix("transformer.")] = update
    return found


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_q_k_and_v_become_one_under_the_names_of_the_checkpoint(tmp_path, spelling):
    source = write(tmp_path / "in.safetensors", spelling, DIFFUSERS)
    out = export_lora(source, tmp_path / "out.safetensors", to="kohya")
    names = {f"lora_unet_{block}_{module}" for block in BLOCKS for module in CHECKPOINT}
    names |= {f"lora_unet_{block}_adaLN_modulation.0" for block in BLOCKS}
    written = open_checkpoint(out)
    assert {layer.name for layer in written.layers} == {name.replace(".", "_") for name in names}
    fused = written.layer("lora_unet_layers_11_attention_qkv")
    assert (fused.shape, fused.rank, fused.scale) == ((3 * SIZE, SIZE), 7, 1.0)
    up, down = fused.load()
    assert [np.count_nonzero(rows) for rows in np.split(up, 3)] == [2 * SIZE, 3 * SIZE, 2 * SIZE]
    assert down.shape == (7, SIZE)
    expected = updates(source)
    found = updates(written)
    assert found.keys() == expected.keys()
    for name, update in expected.items():
        np.testing.assert_allclose(found[name], update, rtol=1e-5, atol=1e-6)
    check = verify(source, written)
    assert check.passed
    assert check.relative_error < 1e-6
    assert len(check.layers) == len(source.layers)
    assert run_command("verify", source.path, out).returncode == 0


@pytest.mark.parametrize("spelling", ["ai-toolkit", "flattened"])
def test_one_becomes_q_k_and_v_under_diffusers_names_and_one_again(tmp_path, spelling):
    source = write(tmp_path / "in.safetensors", spelling, CHECKPOINT)
    out = export_lora(source, tmp_path / "out.safetensors", to="diffusers")
    written = open_checkpoint(out)
    modules = [module for module in DIFFUSERS if not module.startswith("adaLN")]
    assert {layer.name for layer in written.layers} == {
        f"transformer.{block}.{module}" for block in BLOCKS for module in modules
    }
    for name, update in updates(source).items():
        np.testing.assert_allclose(updates(written)[name], update, rtol=1e-5, atol=1e-6)
    check = verify(source, written)
    assert check.passed
    assert check.relative_error < 1e-6
    # The three have one A, so that the way back adds no rank.
    again = open_checkpoint(export_lora(written, tmp_path / "again.safetensors", to="kohya"))
    assert again.layer("lora_unet_layers_0_attention_qkv").rank == 4
    assert verify(written, again).passed
    for name, update in updates(source).items():
        np.testing.assert_allclose(updates(again)[name], update, rtol=1e-5, atol=1e-6)


def test_a_small_version_goes_both_ways_too(tmp_path):
    source = write(tmp_path / "in.safetensors", "diffusers", DIFFUSERS)
    small = open_checkpoint(compress(source, ratio=1.5).save(tmp_path / "small"))
    for to in ("kohya", "diffusers"):
        written = open_checkpoint(export_lora(small, tmp_path / f"{to}.safetensors", to=to))
        check = verify(source, written)
        assert check.passed
        assert 0.0 < check.relative_error < 1.0
        assert check.recorded_error == pytest.approx(check.relative_error, rel=1e-6)


def test_a_part_that_is_missing_is_zero(tmp_path):
    rng = np.random.default_rng(0)
    layers = [
        (f"transformer.layers.0.attention.to_{part}", *pair)
        for part, pair in {
            "v": (rng.standard_normal((SIZE, 2)), rng.standard_normal((2, SIZE))),
            "q": (rng.standard_normal((SIZE, 3)), rng.standard_normal((3, SIZE))),
        }.items()
    ]
    out = write_pairs(tmp_path / "out.safetensors", layers=layers, names="kohya", storage="float32")
    (layer,) = open_checkpoint(out).layers
    up, down = layer.load(double=True)
    q, k, v = np.split(up @ down, 3)
    np.testing.assert_allclose(v, layers[0][1] @ layers[0][2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(q, layers[1][1] @ layers[1][2], rtol=1e-5, atol=1e-6)
    assert layer.rank == 5
    assert not k.any()
    source = write_pairs(tmp_path / "source.safetensors", layers=layers, names="diffusers")
    check = verify(open_checkpoint(source), open_checkpoint(out))
    assert [layer.name for layer in check.layers] == sorted(name for name, _, _ in layers)
    assert check.passed


def test_other_sizes_are_of_another_model_and_refused(tmp_path):
    layers = [
        ("transformer.layers.0.attention.to_q", np.ones((SIZE, 1)), np.ones((1, SIZE))),
        ("transformer.layers.0.attention.to_k", np.ones((4, 1)), np.ones((1, SIZE))),
    ]
    with pytest.raises(UnsupportedError, match="q, k and v of sizes 4 x 12, 12 x 12 are not Z-Im"):
        write_pairs(tmp_path / "out.safetensors", layers=layers, names="kohya")
    layers = [("lora_unet_layers_0_attention_qkv", np.ones((SIZE + 1, 1)), np.ones((1, SIZE)))]
    with pytest.raises(UnsupportedError, match="13 rows of q, k and v are not three times as many"):
        write_pairs(tmp_path / "out.safetensors", layers=layers, names="diffusers")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("to", ["mlx", "gguf"])
def test_an_image_model_is_no_language_model(tmp_path, to):
    source = write(tmp_path / "in.safetensors", "diffusers", DIFFUSERS)
    with pytest.raises(LsrError):
        export_lora(source, tmp_path / "out", to=to)


@pytest.mark.parametrize(
    "name",
    [
        "transformer.transformer_blocks.0.attn.to_q",  # Flux
        "transformer.layers.0.attn.to_q",  # Lumina 2
        "transformer.h.0.attn.c_attn",
        "layers.0.attention.to_q",
        "lora_unet_double_blocks_0_img_attn_qkv",
        "transformer.layers.0.attention.to_q.base",
        "text_encoder.layers.0.attention.to_q",
    ],
)
def test_layers_of_other_models_are_none_of_z_image(name):
    assert z_image_module(name) is None


def test_names_of_flux_are_refused_as_ever():
    with pytest.raises(UnsupportedError, match="q, k, v in one"):
        kohya_name("transformer.transformer_blocks.0.attn.to_q")
    with pytest.raises(UnsupportedError, match="a flattened name cannot be undone"):
        diffusers_name("lora_unet_double_blocks_0_img_attn_qkv")


def test_verify_still_names_a_layer_that_the_source_lacks(tmp_path):
    source = write(tmp_path / "in.safetensors", "diffusers", DIFFUSERS)
    out = export_lora(source, tmp_path / "out.safetensors", to="kohya")
    tensors = {
        key.replace("layers_0_", "layers_7_"): array for key, array in load_file(out).items()
    }
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(
        CheckpointError, match=r"layer 'transformer.layers.7\S* is not in the source"
    ):
        verify(source, open_checkpoint(tmp_path / "other.safetensors"))


def test_diffusers_loads_what_was_taken_apart(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    import torch

    torch.manual_seed(0)
    size = 16
    model = diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=size, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
        cap_feat_dim=8, axes_dims=[4, 2, 2], axes_lens=[32, 32, 32],
    )  # fmt: skip
    rng = np.random.default_rng(1)
    shapes = {"qkv": (3 * size, size), "out": (size, size)}
    layers = [
        (
            f"diffusion_model.layers.0.attention.{module}",
            rng.standard_normal((rows, 2)),
            rng.standard_normal((2, columns)),
        )
        for module, (rows, columns) in shapes.items()
    ]
    out = write_pairs(tmp_path / "out.safetensors", layers=layers, names="diffusers")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_lora_adapter(load_file_torch(out), prefix="transformer")
    model.fuse_lora()
    after = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items()}
    update = layers[0][1] @ layers[0][2]
    for part, rows in zip("qkv", np.split(update, 3), strict=True):
        name = f"layers.0.attention.to_{part}.weight"
        np.testing.assert_allclose((after[name] - before[name]).numpy(), rows, rtol=1e-3, atol=1e-4)
    name = "layers.0.attention.to_out.0.weight"
    moved = (after[name] - before[name]).numpy()
    np.testing.assert_allclose(moved, layers[1][1] @ layers[1][2], rtol=1e-3, atol=1e-4)


def load_file_torch(path: Path) -> dict[str, object]:
    from safetensors.torch import load_file

    return load_file(path)
