"""Our files in a real diffusers pipeline, tiny and random: what a user does with a LoRA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

diffusers = pytest.importorskip("diffusers")

from transformers import CLIPTextConfig, CLIPTextModel  # noqa: E402

from lsrdecomp import compress  # noqa: E402
from lsrdecomp.lora.files import open_checkpoint, write_pairs  # noqa: E402
from lsrdecomp.lora.search.plan import CompressionPlan  # noqa: E402

UNET = ["to_q", "to_k", "to_v", "to_out.0"]
TEXT = ["q_proj", "k_proj", "v_proj", "out_proj"]


def pipeline() -> diffusers.StableDiffusionPipeline:
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=4,
    )
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = CLIPTextModel(CLIPTextConfig(vocab_size=64, max_position_embeddings=16, **sizes))
    parts = {"vae": None, "tokenizer": None, "feature_extractor": None, "safety_checker": None}
    scheduler = diffusers.DDIMScheduler(steps_offset=1, clip_sample=False)
    made = diffusers.StableDiffusionPipeline(
        unet=unet.eval(),
        text_encoder=text.eval(),
        scheduler=scheduler,
        requires_safety_checker=False,
        **parts,
    )
    made.set_progress_bar_config(disable=True)
    return made


@torch.no_grad()
def outputs(pipe: diffusers.StableDiffusionPipeline) -> torch.Tensor:
    """What the text encoder and, after it, the UNet say: every adapted layer takes part."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(1, 60, (2, 9), generator=generator)
    noise = torch.randn(2, 4, 8, 8, generator=generator)
    text = pipe.text_encoder(words).last_hidden_state
    picture = pipe.unet(noise, torch.tensor([3, 500]), encoder_hidden_states=text).sample
    return torch.cat([text.flatten(), picture.flatten()])


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return float((ours - theirs).norm() / theirs.norm()) < 1e-5


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Save two LoRAs as diffusers does, write each again by us, and compress one without loss."""
    folder = tmp_path_factory.mktemp("diffusers")
    found = {}
    for number, rank in enumerate((4, 2)):
        pipe = pipeline()
        torch.manual_seed(10 + number)
        pipe.unet.add_adapter(
            LoraConfig(r=rank, lora_alpha=rank, init_lora_weights=False, target_modules=UNET)
        )
        pipe.text_encoder.add_adapter(
            LoraConfig(r=rank, lora_alpha=rank, init_lora_weights=False, target_modules=TEXT)
        )
        diffusers.StableDiffusionPipeline.save_lora_weights(
            folder / f"source-{number}",
            unet_lora_layers=get_peft_model_state_dict(pipe.unet),
            text_encoder_lora_layers=get_peft_model_state_dict(pipe.text_encoder),
        )
        path = folder / f"source-{number}" / "pytorch_lora_weights.safetensors"
        checkpoint = open_checkpoint(path)
        assert {layer.name.partition(".")[0] for layer in checkpoint.layers} == {
            "unet",
            "text_encoder",
        }
        layers = [(layer.name, *scaled(layer)) for layer in checkpoint.layers]
        found[f"source-{number}"] = path
        for form in ("diffusers", "kohya"):
            path = folder / f"{form}-{number}.safetensors"
            found[f"{form}-{number}"] = write_pairs(
                path, names=form, layers=layers, source=checkpoint
            )
    exact = compress(
        open_checkpoint(found["source-0"]), CompressionPlan(rtol=1e-7, storage="float32")
    )
    exact.save(folder / "lsr")
    again = open_checkpoint(folder / "lsr")
    found["lsr-0"] = write_pairs(
        folder / "lsr.safetensors",
        names="diffusers",
        layers=map(expanded, again.layers),
        source=again,
    )
    return found


def scaled(layer):
    up, down = layer.load()
    return layer.scale * up, down


def expanded(layer):
    if not hasattr(layer, "left"):
        return layer.name, *scaled(layer)
    from lsrdecomp.lora.peft.kernels import expand

    left, right = ([torch.from_numpy(factor).double() for factor in side] for side in layer.load())
    return layer.name, (layer.scale * expand(left)).float().numpy(), expand(right).float().numpy()


@pytest.fixture(scope="module")
def bare() -> torch.Tensor:
    return outputs(pipeline())


@pytest.mark.parametrize("form", ["diffusers", "kohya", "lsr"])
def test_one_adapter_through_its_life(files, bare, form):
    """Load, weight, fuse, unfuse, unload: after each step our file and the source are the same."""
    states = []
    for name in ("source-0", f"{form}-0"):
        pipe, seen = pipeline(), []
        pipe.load_lora_weights(files[name].parent, weight_name=files[name].name, adapter_name="a")
        seen.append(outputs(pipe))
        pipe.set_adapters("a", 0.5)
        seen.append(outputs(pipe))
        pipe.fuse_lora(components=["unet", "text_encoder"], lora_scale=1.5)
        seen.append(outputs(pipe))
        pipe.unfuse_lora(components=["unet", "text_encoder"])
        pipe.set_adapters("a", -1.0)
        seen.append(outputs(pipe))
        pipe.unload_lora_weights()
        seen.append(outputs(pipe))
        states.append(seen)
    source, ours = states
    for step, (mine, theirs) in enumerate(zip(ours, source, strict=True)):
        assert close(mine, theirs), step
    assert all((state - bare).norm() / bare.norm() > 1e-2 for state in source[:4]), (
        "every state is one of its own"
    )
    assert close(ours[4], bare)


@pytest.mark.parametrize("form", ["diffusers", "kohya"])
def test_two_adapters_with_weights(files, form):
    states = []
    for kind in ("source", form):
        pipe = pipeline()
        for number, name in enumerate("ab"):
            path = files[f"{kind}-{number}"]
            pipe.load_lora_weights(path.parent, weight_name=path.name, adapter_name=name)
        pipe.set_adapters(["a", "b"], [0.75, -0.5])
        both = outputs(pipe)
        pipe.delete_adapters("a")
        states.append((both, outputs(pipe)))
    for ours, theirs in zip(*reversed(states), strict=True):
        assert close(ours, theirs)
    assert not close(states[0][0], states[0][1])


def test_our_own_layers_take_the_weights_that_a_pipeline_sets():
    """An LSR adapter injected into a UNet: `set_adapters` scales it as it scales a LoRA."""
    from diffusers.utils.peft_utils import set_weights_and_activate_adapters
    from peft import inject_adapter_in_model

    from lsrdecomp.lora.peft import LsrConfig

    pipe = pipeline()
    plain = outputs(pipe)
    torch.manual_seed(2)
    inject_adapter_in_model(
        LsrConfig(r=4, separation_rank=2, init_weights=False, target_modules=UNET), pipe.unet, "a"
    )
    states = {}
    for weight in (1.0, 0.0, 0.5):
        set_weights_and_activate_adapters(pipe.unet, ["a"], [weight])
        states[weight] = outputs(pipe)
    assert close(states[0.0], plain)
    assert not close(states[0.5], states[1.0])
    assert not close(states[0.5], plain)


@torch.no_grad()
def test_layerwise_casting_leaves_our_numbers_and_their_effect():
    """The base in float8 between calls; what ΔW adds is added to it as before."""
    from peft import inject_adapter_in_model
    from peft.helpers import disable_input_dtype_casting

    from lsrdecomp.lora.peft import LsrConfig

    pipe = pipeline()
    plain = outputs(pipe)
    torch.manual_seed(2)
    config = LsrConfig(r=4, separation_rank=2, init_weights=False, target_modules=UNET)
    inject_adapter_in_model(config, pipe.unet, "a")
    adapted = outputs(pipe)
    pipe.unet.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    with disable_input_dtype_casting(pipe.unet):
        cast = outputs(pipe)
    assert close(cast, outputs(pipe))
    assert (cast - adapted).norm() < (plain - adapted).norm()
    dtypes = {p.dtype for name, p in pipe.unet.named_parameters() if "lsr_" in name}
    assert dtypes == {torch.float32}


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
    if hasattr(model, "text_model"):
        return model
    return torch.nn.ModuleDict({"text_model": model})


def test_kohya_lycoris_and_comfyui_find_every_name_that_is_written(files, tmp_path):
    pipe = pipeline()
    text = with_level(pipe.text_encoder)
    given = open_checkpoint(files["source-0"])
    layers = [(layer.name, *scaled(layer)) for layer in given.layers]
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
