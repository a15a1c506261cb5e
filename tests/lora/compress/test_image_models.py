"""Image models of other makes on the public road: SDXL, Stable Diffusion 3, Flux and DiT."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
diffusers = pytest.importorskip("diffusers", reason="comes with the extra diffusers")
transformers = pytest.importorskip("transformers")

from peft.utils import get_peft_model_state_dict  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from benchmarks.images.shapes import tokenizer  # noqa: E402
from lsrdecomp.errors import CheckpointError  # noqa: E402
from lsrdecomp.lora.base.open_bases import open_base  # noqa: E402
from lsrdecomp.lora.base.texts import Example  # noqa: E402
from lsrdecomp.lora.base.tokens import model_inputs  # noqa: E402
from lsrdecomp.lora.compress import truncate  # noqa: E402
from lsrdecomp.lora.files import open_checkpoint  # noqa: E402
from lsrdecomp.lora.search.measured_settings import MeasuredSettings  # noqa: E402

FEW = MeasuredSettings(held_out=8, batch=64)
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def clip(*, projects=False):
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer()),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        projection_dim=16,
        hidden_act="gelu",
        **SPECIAL,
    )
    kind = transformers.CLIPTextModelWithProjection if projects else transformers.CLIPTextModel
    return kind(config)


def t5(width):
    sizes = {"d_model": width, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5EncoderModel(transformers.T5Config(vocab_size=len(tokenizer()), **sizes))


def vae(**shifts):
    return diffusers.AutoencoderKL(
        block_out_channels=(4,), norm_num_groups=4, latent_channels=4, **shifts
    )


def flow():
    return diffusers.FlowMatchEulerDiscreteScheduler()


def sdxl():
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8,),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        cross_attention_dim=32,
        attention_head_dim=2,
        norm_num_groups=4,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=16 + 6 * 8,
        use_linear_projection=True,
    )
    words = tokenizer()
    parts = (vae(), clip(), clip(projects=True), words, words, unet)
    scheduler = diffusers.EulerDiscreteScheduler()
    return diffusers.StableDiffusionXLPipeline(*parts, scheduler), unet


def stable_diffusion_3():
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
    )
    words = tokenizer()
    encoders = (clip(projects=True), words, clip(projects=True), words, t5(32), words)
    shifted = vae(shift_factor=0.06, scaling_factor=1.5)
    return (
        diffusers.StableDiffusion3Pipeline(transformer, flow(), shifted, *encoders),
        transformer,
    )


def flux():
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=[4, 4, 8],
    )
    words = tokenizer()
    shifted = vae(shift_factor=0.06, scaling_factor=1.5)
    encoders = (clip(), words, t5(16), words)
    return diffusers.FluxPipeline(flow(), shifted, *encoders, transformer), transformer


def dit():
    transformer = diffusers.DiTTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=4,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
    )
    return diffusers.DiTPipeline(transformer, vae(), diffusers.DDIMScheduler()), transformer


@pytest.fixture(params=[sdxl, stable_diffusion_3, flux, dit], ids=lambda make: make.__name__)
def place(request, tmp_path, monkeypatch):
    """Write a pipeline, what denoises alone, and a LoRA of that; return what denoises, too."""
    if request.param is flux:  # its images have no size of their own but this
        kind = diffusers.FluxPipeline
        monkeypatch.setattr(
            kind,
            "default_sample_size",
            property(lambda _: 8, lambda *_: None),
            raising=False,
        )
    torch.manual_seed(0)
    pipeline, denoiser = request.param()
    pipeline.save_pretrained(tmp_path / "pipeline")
    denoiser.save_pretrained(tmp_path / "alone")
    config = peft.LoraConfig(
        r=4, lora_alpha=4, target_modules=["to_q", "to_v"], init_lora_weights=False
    )
    peft.inject_adapter_in_model(config, denoiser)
    state = get_peft_model_state_dict(denoiser, adapter_name="default")
    part = "unet" if request.param is sdxl else "transformer"
    tensors = {f"{part}.{name}": tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, tmp_path / "style.safetensors")
    return tmp_path, denoiser


def test_an_image_lora_acts_and_is_cut_by_its_effect(place):
    folder, denoiser = place
    file = folder / "style.safetensors"
    base = open_base(folder / "pipeline", file)
    source = base.with_adapter(file)
    (batch, *_) = source.batches(source, [Example(0, "a small red circle")], 32)
    with torch.no_grad():
        theirs = denoiser.eval()(**model_inputs(batch)).sample
        torch.testing.assert_close(
            source.outputs(source.model, batch), theirs, rtol=1e-4, atol=1e-5
        )
        assert not torch.allclose(base.outputs(base.model, batch), theirs, rtol=1e-3)
    prompts = None if "DiT" in type(denoiser).__name__ else ["a small red circle", "a blue cross"]
    checkpoint = open_checkpoint(file, carry=True)
    cut = truncate(checkpoint, base=folder / "pipeline", data=prompts, keep=0.7, settings=FEW)
    assert cut.fidelity.kept >= 0.6
    assert cut.parameters < cut.parameters_before


def test_what_denoises_alone_runs_or_is_refused_in_one_line(place):
    folder, denoiser = place
    file = folder / "style.safetensors"
    if "DiT" in type(denoiser).__name__:
        base = open_base(folder / "alone", file)
        assert list(base.batches(base, [Example(0)], 32))
        return
    with pytest.raises(CheckpointError, match="alone .* give the directory of its pipeline"):
        open_base(folder / "alone", file)
