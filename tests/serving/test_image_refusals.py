"""What loaders of diffusion models refuse and pass over, on a pipeline of headers alone."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from lsrdecomp.serving import check_served

SIZES = {
    "unet.mid_block.attentions.0.proj": (6, 4),
    "text_encoder.text_model.encoder.layers.0.self_attn.q_proj": (4, 4),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    (folder / "model_index.json").write_text("{}")
    for name, size in SIZES.items():
        component, _, module = name.partition(".")
        (folder / component).mkdir()
        save_file(
            {f"{module}.weight": np.zeros(size, np.float32)},
            folder / component / "model.safetensors",
        )
    return folder


def lora(path, sizes=SIZES, **others):
    held = {name: np.zeros(2, np.float32) for name in others.values()}
    for name, (m, n) in sizes.items():
        held[f"{name}.lora_A.weight"], held[f"{name}.lora_B.weight"] = (
            np.ones((2, n), "f4"),
            np.ones((m, 2), "f4"),
        )
    save_file(held, path)
    return path


def test_a_file_of_layers_alone_is_loaded_whole(base, tmp_path):
    check = check_served(lora(tmp_path / "lora.safetensors"), "diffusers", base)
    assert [module.name for module in check.applied] == sorted(SIZES)
    assert not check.refusals


def test_diffusers_stops_at_a_tensor_beside_the_layers(base, tmp_path):
    check = check_served(
        lora(tmp_path / "lora.safetensors", other="unet.conv_in.bias"), "diffusers", base
    )
    assert check.refusals == [
        "1 tensors are no LoRA weights (base_model.model.unet.conv_in.bias), at which it stops"
    ]


@pytest.mark.parametrize(
    ("name", "size", "refusals"),
    [
        ("unet.mid_block.attentions.1.proj", (6, 4), []),
        ("unet.mid_block.attentions.0.proj", (6, 5), ["diffusers raises where a size differs"]),
    ],
    ids=["a module of another name", "a module of another size"],
)
def test_diffusers_passes_over_a_name_and_raises_at_a_size(base, tmp_path, name, size, refusals):
    check = check_served(lora(tmp_path / "lora.safetensors", {name: size}), "diffusers", base)
    assert [module.name for module in check.ignored] == [name]
    assert check.refusals == refusals


def test_kohya_is_sent_its_own_keys(base, tmp_path):
    (refusal,) = check_served(lora(tmp_path / "lora.safetensors"), "kohya", base).refusals
    assert refusal.startswith(
        "kohya-ss loads files of its own keys, and this is diffusers: `lsrdecomp export"
    )
    assert "--to kohya" in refusal
