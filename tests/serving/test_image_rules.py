"""Names of diffusion models' layers as diffusers, kohya-ss, LyCORIS and ComfyUI look them up.

The last three are not installed; their rules are written down here from their sources, each named
with its commit.
"""

import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers")
sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))

import test_diffusers as real

from lsrdecomp.checkpoints import open_checkpoint, write_pairs
from lsrdecomp.checkpoints.base_modules import read_modules
from lsrdecomp.serving import check_served

files = real.files


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The pipeline on disk: configs and headers of its parts."""
    folder, pipe = tmp_path_factory.mktemp("pipeline"), real.pipeline()
    pipe.unet.save_pretrained(folder / "unet")
    pipe.text_encoder.save_pretrained(folder / "text_encoder")
    (folder / "model_index.json").write_text("{}")
    return folder


@pytest.mark.parametrize("form", ["source", "diffusers", "kohya"])
def test_as_many_layers_would_apply_as_diffusers_loads(files, base, form):
    path = files[f"{form}-0"]
    pipe = real.pipeline()
    pipe.load_lora_weights(path.parent, weight_name=path.name, adapter_name="a")
    parts = [part for model in (pipe.unet, pipe.text_encoder) for part in model.modules()]
    loaded = [
        part
        for part in parts
        if "a" in getattr(part, "lora_B", {}) and part.lora_B["a"].weight.any()
    ]
    found = check_served(path, "diffusers", base)
    assert len(found.applied) == len(found.modules) == len(loaded) > 0


def test_a_config_alone_names_the_same_modules(base, tmp_path):
    for part in ("unet", "text_encoder"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_bytes((base / part / "config.json").read_bytes())
    (tmp_path / "model_index.json").write_text("{}")

    def flat(shapes):
        return {name.replace("text_model.", ""): shape for name, shape in shapes.items()}

    assert flat(read_modules(tmp_path).shapes) == flat(read_modules(base).shapes)
    assert {name.partition(".")[0] for name in read_modules(base / "unet").shapes} == {"unet"}


def test_other_forms_and_other_bases_are_refused(files, base, tmp_path):
    (refusal,) = check_served(files["diffusers-0"], "kohya", base).refusals
    assert "`lsrdecomp export" in refusal
    found = check_served(files["kohya-0"], "kohya", base)
    assert len(found.applied) == len(found.modules)
    found = check_served(files["kohya-0"], "kohya", base / "text_encoder")
    assert 0 < len(found.applied) < len(found.modules)
    given = open_checkpoint(files["source-0"])
    layers = [(f"{layer.name}_wrong", *real.scaled(layer)) for layer in given.layers]
    wrong = write_pairs(tmp_path / "wrong.safetensors", names="diffusers", layers=layers)
    found = check_served(wrong, "diffusers", base)
    assert (len(found.applied), len(found.ignored), found.refusals) == (0, len(layers), [])


# What each reader looks for. Sources: kohya-ss/sd-scripts 48d368fa5577, networks/lora.py,
# LoRANetwork.create_modules; KohakuBlueleaf/LyCORIS f49d30d67059, lycoris/kohya.py,
# create_network_from_weights; ComfyUI 17358c8f73b5, comfy/lora.py, model_lora_keys_clip and
# model_lora_keys_unet, and comfy/utils.py for the names of the UNet.


def by_kohya(prefix, model, classes):
    """Yield Linear and Conv2d layers inside the classes it visits, named by underscores.

    A name is prefix, class's path and layer's path.
    """
    return {
        f"{prefix}.{path}.{inner}".replace(".", "_")
        for path, part in model.named_modules()
        if type(part).__name__ in classes
        for inner, layer in part.named_modules()
        if type(layer).__name__ in ("Linear", "Conv2d")
    }


def by_lycoris(prefix, model):
    """Every module's path, whatever it is."""
    return {f"{prefix}_{path}".replace(".", "_") for path, _ in model.named_modules()}


def by_comfyui(unet):
    """Text encoders by six words a layer; the UNet by every weight's diffusers path."""
    words = (
        "mlp_fc1",
        "mlp_fc2",
        "self_attn_k_proj",
        "self_attn_q_proj",
        "self_attn_v_proj",
        "self_attn_out_proj",
    )
    text = {
        f"lora_te_text_model_encoder_layers_{layer}_{word}" for layer in range(32) for word in words
    }
    weights = {key.removesuffix(".weight") for key in unet.state_dict() if key.endswith(".weight")}
    return text | {f"lora_unet_{key.replace('.', '_')}" for key in weights}


def with_level(model):
    """Return the text encoder with its level text_model, which transformers 5 took away."""
    import torch

    if hasattr(model, "text_model"):
        return model
    return torch.nn.ModuleDict({"text_model": model})


def test_kohya_lycoris_and_comfyui_find_every_name_that_is_written(files, tmp_path):
    pipe = real.pipeline()
    text = with_level(pipe.text_encoder)
    given = open_checkpoint(files["source-0"])
    layers = [(layer.name, *real.scaled(layer)) for layer in given.layers]
    out = write_pairs(tmp_path / "k.safetensors", names="kohya", layers=layers, source=given)
    written = {layer.name for layer in open_checkpoint(out).layers}
    assert {name.split("_")[1] for name in written} == {"te", "unet"}
    unet_classes = ("Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Upsample2D")
    text_classes = ("CLIPAttention", "CLIPSdpaAttention", "CLIPMLP")
    assert written <= by_kohya("lora_unet", pipe.unet, unet_classes) | by_kohya(
        "lora_te", text, text_classes
    )
    assert written <= by_lycoris("lora_unet", pipe.unet) | by_lycoris("lora_te", text)
    assert written <= by_comfyui(pipe.unet)


def test_what_kohya_visits_is_what_its_rule_says(base):
    from lsrdecomp.serving.images import _flattened, _visited

    pipe = real.pipeline()
    modules = read_modules(base)
    unet_classes = ("Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Upsample2D")
    text = by_kohya(
        "lora_te", with_level(pipe.text_encoder), ("CLIPAttention", "CLIPSdpaAttention", "CLIPMLP")
    )
    assert (
        set(_flattened(modules, _visited)) == by_kohya("lora_unet", pipe.unet, unet_classes) | text
    )
