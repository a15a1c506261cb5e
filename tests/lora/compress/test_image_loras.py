"""LoRAs of image models on their base: names as diffusers reads them, cut and measured."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
diffusers = pytest.importorskip("diffusers", reason="comes with the extra diffusers")

from peft import LoraConfig  # noqa: E402
from peft.utils import get_peft_model_state_dict  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import CLIPTextConfig, CLIPTextModel  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import lsrdecomp as lsr  # noqa: E402
from benchmarks.images.shapes import tokenizer  # noqa: E402
from lsrdecomp.cli.app import app  # noqa: E402
from lsrdecomp.errors import CheckpointError  # noqa: E402
from lsrdecomp.lora.base.dataset import DataError  # noqa: E402
from lsrdecomp.lora.base.open_bases import open_base  # noqa: E402
from lsrdecomp.lora.base.texts import Example, prompts_to_draw  # noqa: E402
from lsrdecomp.lora.base.tokens import model_inputs  # noqa: E402
from lsrdecomp.lora.compress import truncate  # noqa: E402
from lsrdecomp.lora.compress.cut_report import cut_report  # noqa: E402
from lsrdecomp.lora.files import open_checkpoint  # noqa: E402
from lsrdecomp.lora.search.measured_settings import MeasuredSettings  # noqa: E402

FEW = MeasuredSettings(held_out=8, batch=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a pipeline of a few thousand numbers, its UNet alone, and a LoRA of both parts."""
    folder = tmp_path_factory.mktemp("pipeline")
    torch.manual_seed(0)
    words = tokenizer()
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8,),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        cross_attention_dim=16,
        attention_head_dim=2,
        norm_num_groups=4,
    )
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=8,
            eos_token_id=2,
            bos_token_id=1,
            pad_token_id=0,
        )
    )
    vae = diffusers.AutoencoderKL(block_out_channels=(4,), norm_num_groups=4, latent_channels=4)
    scheduler = diffusers.DDIMScheduler(clip_sample=False, steps_offset=1)
    pipeline = diffusers.StableDiffusionPipeline(
        vae, text_encoder, words, unet, scheduler, None, None, requires_safety_checker=False
    )
    pipeline.save_pretrained(folder / "pipeline")
    unet.save_pretrained(folder / "unet")
    options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}
    unet.add_adapter(LoraConfig(target_modules=["to_q", "to_v", "conv1", "proj_in"], **options))
    text_encoder.add_adapter(
        LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "out_proj"], **options)
    )
    diffusers.StableDiffusionPipeline.save_lora_weights(
        folder,
        unet_lora_layers=get_peft_model_state_dict(unet),
        text_encoder_lora_layers=get_peft_model_state_dict(text_encoder),
        weight_name="style.safetensors",
    )
    return folder


def as_kohya(file, out):
    """Write a LoRA file under the names of sd-scripts."""
    state = {}
    for key, value in load_file(file).items():
        module, _, half = key.partition(".lora.")
        if not half:
            module, _, half = key.partition(".lora_")
            half = {"A.weight": "down.weight", "B.weight": "up.weight"}[half]
        part, _, rest = module.partition(".")
        prefix = "lora_unet_" if part == "unet" else "lora_te_"
        name = prefix + rest.replace(".", "_")
        state[f"{name}.lora_{half}"] = value.clone()
        state[f"{name}.alpha"] = torch.tensor(8.0)
    save_file(state, out)
    return out


def outputs_of_diffusers(folder, file, batch):
    """Return what the UNet says with a file loaded by diffusers' own loader."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder / "pipeline")
    pipeline.load_lora_weights(str(file))
    with torch.no_grad():
        return pipeline.unet(**model_inputs(batch)).sample


@pytest.mark.parametrize("names", ["diffusers", "kohya"])
def test_a_lora_file_acts_as_diffusers_loads_it(folder, tmp_path, names):
    file = folder / "style.safetensors"
    if names == "kohya":
        file = as_kohya(file, tmp_path / "kohya.safetensors")
    base = open_base(folder / "pipeline", file)
    source = base.with_adapter(file)
    (batch,) = source.batches(source, [Example(0, "a small red circle"), Example(1, "")], 32)
    # Two images at eight noise levels, with and without their prompts.
    assert batch["row_counts"].tolist() == [16, 16]
    with torch.no_grad():
        ours = source.outputs(source.model, batch)
        plain = base.outputs(base.model, batch)
    theirs = outputs_of_diffusers(folder, file, batch)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert float((plain - theirs).norm()) > 0.01 * float(theirs.norm())
    # Layers of the text encoder do not run at every noise level.
    assert all(name.startswith("unet.") for name in source.modules)
    assert any("conv1" in name for name in source.modules)


@pytest.mark.parametrize("names", ["diffusers", "kohya"])
def test_an_image_lora_is_cut_by_its_effect(folder, tmp_path, names):
    file = folder / "style.safetensors"
    if names == "kohya":
        file = as_kohya(file, tmp_path / "kohya.safetensors")
    source = open_checkpoint(file, carry=True)
    prompts = ["a small red circle", "a large blue cross"]
    cut = truncate(source, base=folder / "pipeline", data=prompts, keep=0.8, settings=FEW)
    assert cut.fidelity.kept >= 0.8
    assert cut.parameters < cut.parameters_before
    small = cut.save(tmp_path / "small.safetensors")
    # A LoRA file of the same keys, which diffusers loads; the text encoder's layers are copied.
    before, after = load_file(file), load_file(small)
    assert after.keys() <= before.keys()
    copied = [key for key in before if "text_encoder" in key or "lora_te" in key]
    assert copied
    assert all(torch.equal(before[key], after[key]) for key in copied)
    base = open_base(folder / "pipeline", file)
    adapted = base.with_adapter(small)
    (batch,) = adapted.batches(adapted, [Example(9, "a small red circle")], 16)
    theirs = outputs_of_diffusers(folder, small, batch)
    with torch.no_grad():
        torch.testing.assert_close(
            adapted.outputs(adapted.model, batch), theirs, rtol=1e-4, atol=1e-5
        )


def test_an_image_lora_becomes_lsr_where_its_names_are_those_of_modules(folder, tmp_path):
    state = load_file(folder / "style.safetensors")
    of_unet = {key: value for key, value in state.items() if key.startswith("unet.")}
    file = tmp_path / "unet.safetensors"
    save_file(of_unet, file)
    result = lsr.compress(file, base=folder / "pipeline", ratio=3, settings=FEW)
    assert 0.0 < result.fidelity.kept <= 1.0
    assert result.fidelity.agreement is None
    with pytest.raises(CheckpointError, match="does not run on the data"):
        lsr.compress(folder / "style.safetensors", base=folder / "pipeline", ratio=3, settings=FEW)
    kohya = as_kohya(file, tmp_path / "kohya.safetensors")
    with pytest.raises(CheckpointError, match="is unet.down_blocks.*in the base"):
        lsr.compress(kohya, base=folder / "pipeline", ratio=3, settings=FEW)


def test_a_report_shows_base_lora_and_small_side_by_side(folder, tmp_path):
    source = open_checkpoint(folder / "style.safetensors", carry=True)
    prompts = ["a small red circle", "a large blue cross"]
    settings = MeasuredSettings(held_out=8, batch=64, examples=2)
    cut = truncate(source, base=folder / "pipeline", data=prompts, ratio=3, settings=settings)
    assert {each.prompt for each in cut.pictures} == set(prompts)
    assert all(each.base.startswith(b"\x89PNG") for each in cut.pictures)
    assert all(each.lora != each.base for each in cut.pictures)
    page = cut_report(cut, tmp_path / "small.safetensors")
    assert page.count("data:image/png;base64,") == 6
    assert "small.safetensors" in page
    assert "http" not in page.split("</style>")[1]


def test_one_command_writes_a_file_and_a_page(folder, tmp_path):
    (tmp_path / "prompts.txt").write_text("a small red circle\na large blue cross\n")
    words = ["compress", folder / "style.safetensors", "--base", folder / "pipeline"]
    words += ["--data", tmp_path / "prompts.txt", "--keep", 0.7, "--held-out", 8, "--batch", 64]
    words += ["--out", tmp_path / "small.safetensors", "--report", tmp_path / "small.html"]
    done = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "of the LoRA's effect (70 % asked) on 8 held-out examples of prompts.txt" in said
    assert "Cut by the weights alone to as many numbers it keeps" in said
    assert "4 layers are copied as they are" in said
    assert "Used truncated SVD with one global threshold" not in said
    assert open_checkpoint(tmp_path / "small.safetensors", carry=True).layers
    page = (tmp_path / "small.html").read_text()
    assert page.count("data:image/png;base64,") == 12


def test_a_unet_alone_runs_on_random_latents(folder, tmp_path):
    state = load_file(folder / "style.safetensors")
    alone = {
        key.removeprefix("unet."): value for key, value in state.items() if key.startswith("unet.")
    }
    save_file(alone, tmp_path / "alone.safetensors")
    source = open_checkpoint(tmp_path / "alone.safetensors", carry=True)
    cut = truncate(source, base=folder / "unet", ratio=3, settings=FEW)
    assert 0.0 < cut.fidelity.kept < 1.0
    assert cut.fidelity.data == "images drawn without a prompt"
    with pytest.raises(DataError, match="directory of the whole pipeline"):
        truncate(source, base=folder / "unet", data=["a cross"], ratio=3, settings=FEW)


def test_a_pipeline_that_refuses_to_draw_is_an_error_of_one_line(folder, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("Invalid sample size")

    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "check_inputs", refuse)
    source = open_checkpoint(folder / "style.safetensors", carry=True)
    with pytest.raises(CheckpointError, match="Pipeline draws no image: Invalid sample size"):
        truncate(source, base=folder / "pipeline", data=["a cross"], ratio=3, settings=FEW)


def test_prompts_are_repeated_with_other_seeds_until_there_are_enough():
    items = prompts_to_draw(["a", "b"])
    assert len({item.number for item in items}) == len(items) == 240
    assert {item.inputs for item in items} == {"a", "b"}
    assert {item.inputs for item in prompts_to_draw(None)} == {None}


def test_a_layer_that_the_base_lacks_is_named(folder, tmp_path):
    state = {
        "unet.nowhere.to_q.lora_A.weight": torch.ones(2, 8),
        "unet.nowhere.to_q.lora_B.weight": torch.ones(8, 2),
    }
    save_file(state, tmp_path / "other.safetensors")
    source = open_checkpoint(tmp_path / "other.safetensors", carry=True)
    with pytest.raises(CheckpointError, match="is no layer of this base"):
        truncate(source, base=folder / "pipeline", ratio=2, settings=FEW)
