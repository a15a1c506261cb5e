"""Layers called by position get the names of the base's modules, or the file is refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lsrdecomp.checkpoints import BaseModules, open_checkpoint, read_modules
from lsrdecomp.checkpoints.positional import resolve_positions
from lsrdecomp.compression.export import export_lora
from lsrdecomp.errors import CheckpointError, UnsupportedError

WIDTHS, CROSS, TEXT = (8, 16), 12, 10
OLD, NEW = ("attn1", "ff", "attn2"), ("attn1", "attn2", "ff")


def block(where, width, parts):
    """List the linear layers of a transformer block that the trainer finds, in its order."""
    own = {
        "to_q": (width, width),
        "to_k": (width, width),
        "to_v": (width, width),
        "to_out.0": (width, width),
    }
    other = own | {"to_k": (width, CROSS), "to_v": (width, CROSS)}
    sizes = {"attn1": own, "attn2": other, "ff": {"net.0.proj": (8 * width, width)}}
    return {
        f"{where}.transformer_blocks.0.{p}.{word}": size
        for p in parts
        for word, size in sizes[p].items()
    }


def modules(parts=NEW, sides=("down", "up", "mid"), encoders=("text_encoder",)):
    """Name to size, in an order of numbering."""
    found = {}
    for side in sides:
        if side == "mid":
            found |= block("unet.mid_block.attentions.0", WIDTHS[-1], parts)
            continue
        for number, width in enumerate(WIDTHS if side == "down" else WIDTHS[::-1]):
            found |= block(f"unet.{side}_blocks.{number}.attentions.0", width, parts)
    for encoder in encoders:
        for layer in range(11):  # two digits: names are not in the order of their numbers
            words = [
                f"{encoder}.text_model.encoder.layers.{layer}.self_attn.{key}_proj"
                for key in ("k", "v", "q", "out")
            ]
            found |= dict.fromkeys(words, (TEXT, TEXT))
    return found


def positional(path, named, part=None):
    """A file of the trainer, numbered as the modules are given."""
    rng, tensors, counts = np.random.default_rng(0), {}, {}
    for name, (m, n) in named.items():
        where = part or name.partition(".")[0]
        number = counts[where] = counts.get(where, -1) + 1
        tensors[f"{where}:{number}:up"] = rng.standard_normal((m, 2)).astype(np.float32)
        tensors[f"{where}:{number}:down"] = rng.standard_normal((2, n)).astype(np.float32)
    save_file(tensors, path)
    return open_checkpoint(path)


def names_in_order(resolved, part):
    return [
        resolved[f"{part}:{number}"]
        for number in range(sum(key.startswith(f"{part}:") for key in resolved))
    ]


@pytest.mark.parametrize("parts", [OLD, NEW], ids=["old", "new"])
@pytest.mark.parametrize(
    "sides", [("down", "up", "mid"), ("down", "mid", "up")], ids=["mid last", "mid between"]
)
def test_the_sizes_tell_the_order_that_a_file_was_numbered_in(tmp_path, parts, sides):
    named = modules(parts, sides)
    resolved = resolve_positions(
        positional(tmp_path / "p.safetensors", named), BaseModules(tmp_path, modules())
    )
    found = [*names_in_order(resolved, "unet"), *names_in_order(resolved, "text_encoder")]
    assert found == list(named)


def test_an_order_is_never_guessed(tmp_path):
    named = modules()
    checkpoint = positional(tmp_path / "p.safetensors", named)
    wider = {name: (m, 2 * n) for name, (m, n) in named.items()}
    for other in (wider, {}, dict(list(named.items())[1:])):
        with pytest.raises(CheckpointError, match=r"its 4[45] layers .* the base has no orders"):
            resolve_positions(checkpoint, BaseModules(tmp_path, other))
    same = {name: (8, 8) for name in named if ".attn" in name or "ff" in name}
    with pytest.raises(CheckpointError, match="the base has 4 orders"):
        resolve_positions(positional(tmp_path / "s.safetensors", same), BaseModules(tmp_path, same))


def test_a_list_without_names_is_of_the_part_that_it_fits(tmp_path):
    both = modules(encoders=("text_encoder",))
    text = {name: size for name, size in both.items() if name.startswith("text")}
    checkpoint = positional(tmp_path / "p.safetensors", text, part="layer")
    assert names_in_order(
        resolve_positions(checkpoint, BaseModules(tmp_path, both)), "layer"
    ) == list(text)
    two = modules(encoders=("text_encoder", "text_encoder_2"))
    with pytest.raises(CheckpointError, match="the base has 2 orders"):
        resolve_positions(checkpoint, BaseModules(tmp_path, two))


def test_export_needs_the_base_and_writes_the_same_numbers_under_its_names(tmp_path):
    named = modules(OLD)
    checkpoint = positional(tmp_path / "p.safetensors", named)
    with pytest.raises(UnsupportedError, match="called by its position .* name the base by --base"):
        export_lora(checkpoint, tmp_path / "k.safetensors", to="kohya")
    base = tmp_path / "pipeline"
    for part, file in (
        ("unet", "diffusion_pytorch_model.safetensors"),
        ("text_encoder", "model.safetensors"),
    ):
        (base / part).mkdir(parents=True)
        own = {
            name.partition(".")[2]: size for name, size in named.items() if name.startswith(part)
        }
        save_file(
            {f"{name}.weight": np.zeros(size, np.float32) for name, size in own.items()},
            base / part / file,
        )
    (base / "model_index.json").write_text(json.dumps({}))
    assert read_modules(base).shapes == named
    given = load_file(tmp_path / "p.safetensors")
    kohya = load_file(export_lora(checkpoint, tmp_path / "k.safetensors", to="kohya", base=base))
    new = load_file(export_lora(checkpoint, tmp_path / "d.safetensors", to="diffusers", base=base))
    last = {"unet": "mid_block.attentions.0.transformer_blocks.0.attn2.to_out.0"}
    last["text_encoder"] = "text_model.encoder.layers.10.self_attn.out_proj"
    for part, prefix, count in (("unet", "lora_unet", 45), ("text_encoder", "lora_te", 44)):
        up = given[f"{part}:{count - 1}:up"]
        assert np.array_equal(kohya[f"{prefix}_{last[part].replace('.', '_')}.lora_up.weight"], up)
        assert np.array_equal(new[f"{part}.{last[part]}.lora_B.weight"], up)


def test_the_trainers_own_loop_numbers_the_modules_of_a_real_pipeline_so(tmp_path):
    """Walk as `_find_modules_v2` of cloneofsimo/lora 0735440d1865 does, over diffusers' modules."""
    diffusers = pytest.importorskip("diffusers")
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=24,
            attention_head_dim=4,
        )
        text = CLIPTextModel(CLIPTextConfig(vocab_size=64, max_position_embeddings=16, **sizes))
    classes = {"unet": ("CrossAttention", "Attention", "GEGLU"), "text_encoder": ("CLIPAttention",)}
    named, shapes = {}, {}
    for part, model in (("unet", unet), ("text_encoder", text)):
        weights = {
            path: module.weight
            for path, module in model.named_modules()
            if hasattr(module, "weight")
        }
        shapes |= {
            f"{part}.{path}": tuple(weight.shape)
            for path, weight in weights.items()
            if weight.ndim > 1
        }
        for path, module in model.named_modules():
            if type(module).__name__ in classes[part]:
                for inner, layer in module.named_modules():
                    if isinstance(layer, torch.nn.Linear):
                        named[f"{part}.{path}.{inner}"] = tuple(layer.weight.shape)
    resolved = resolve_positions(
        positional(tmp_path / "p.safetensors", named), BaseModules(tmp_path, shapes)
    )
    assert [*names_in_order(resolved, "unet"), *names_in_order(resolved, "text_encoder")] == list(
        named
    )


def test_published_files_are_named_on_stable_diffusions_sizes(shared, tmp_path):
    """Return the config of Stable Diffusion 1.5.

    Four levels of 320 to 1280, two layers a level, text of 768.
    """
    diffusers = pytest.importorskip("diffusers")
    import torch

    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(cross_attention_dim=768)
    shapes = {
        f"unet.{key[:-7]}": tuple(w.shape)
        for key, w in unet.state_dict().items()
        if key.endswith(".weight")
    }
    words = [
        f"text_model.encoder.layers.{layer}.self_attn.{key}_proj"
        for layer in range(12)
        for key in "qkv"
    ]
    words += [f"text_model.encoder.layers.{layer}.self_attn.out_proj" for layer in range(12)]
    shapes |= {f"text_encoder.{word}": (768, 768) for word in words}
    base = BaseModules(tmp_path, {name: shape for name, shape in shapes.items() if len(shape) > 1})
    for file in ("analog_svd_rank4", "lora_disney"):
        checkpoint = open_checkpoint(shared / "adapters" / "sd-cloneofsimo" / f"{file}.safetensors")
        resolved = resolve_positions(checkpoint, base)
        assert len(resolved) == len(set(resolved.values())) == 192
        assert all(
            (x.out_features, x.in_features) == base.shapes[resolved[x.name]]
            for x in checkpoint.layers
        )
