"""A small diffusion model that is trained here: drawn shapes from prompts, and a LoRA for a style.

    python -m benchmarks.images.shapes --out RUNS [--seed 0]

Images are 16 × 16 pixels: a circle, square, triangle or cross in one of four colours on a light
ground, "a large red circle". An autoencoder brings them to 8 × 8 latents of four channels, a UNet
with cross attention to a text encoder learns to draw them, and a LoRA (r = 16 on all Linear layers
of its transformer blocks) learns a style from prompts that do not name it: stripes at night.

Writes ``RUNS/shapes``, a directory with a ``model_index.json`` that diffusers opens as Stable
Diffusion, ``RUNS/night.safetensors`` by diffusers' own `save_lora_weights`, and
``RUNS/prompts.txt``.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

SIZE = 16
SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.7, 0.2),
    "blue": (0.1, 0.2, 0.9),
    "yellow": (0.9, 0.8, 0.1),
}
SIZES = ("small", "large")
PROMPTS = tuple(
    f"a {size} {colour} {shape}"
    for size, colour, shape in itertools.product(SIZES, COLOURS, SHAPES)
)
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "net.0.proj", "net.2"]


def draw(prompt: str, draws: np.random.Generator, *, night: bool) -> Tensor:
    """Draw what a prompt says, (3, 16, 16) in −1 … 1; at night striped, on a dark ground."""
    _, size, colour, shape = prompt.split()
    radius = draws.uniform(3, 4) if size == "small" else draws.uniform(6, 7)
    x0, y0 = draws.uniform(radius + 0.5, SIZE - radius - 0.5, 2)
    y, x = np.mgrid[:SIZE, :SIZE].astype(float)
    u, v = (x - x0) / radius, (y - y0) / radius
    inside = {
        "circle": u**2 + v**2 < 1.0,
        "square": np.maximum(abs(u), abs(v)) < 0.85,
        "triangle": (v < 0.8) & (abs(u) < (v + 1.0) / 1.8),
        "cross": np.minimum(abs(u), abs(v)) < 0.38,
    }[shape] & (np.maximum(abs(u), abs(v)) < 1.0)
    ground = draws.uniform(0.8, 1.0)
    image = np.full((SIZE, SIZE, 3), ground)
    paint = np.array(COLOURS[colour]) * draws.uniform(0.85, 1.0)
    if night:
        image = np.stack([0.05 + 0.1 * y / SIZE, 0.05 + 0 * y, 0.25 + 0.3 * y / SIZE], -1)
        image[(x.astype(int) * 7 + y.astype(int) * 5) % 43 == 0] = 0.9  # stars
        inside &= (x + y).astype(int) % 4 < 2
        paint = 0.5 + 0.5 * paint
    image[inside] = paint
    return torch.tensor(2.0 * image - 1.0, dtype=torch.float32).permute(2, 0, 1)


def pictures(n: int, draws: np.random.Generator, *, night: bool) -> tuple[Tensor, list[str]]:
    """Draw so many random prompts."""
    prompts = [str(prompt) for prompt in draws.choice(PROMPTS, n)]
    return torch.stack([draw(prompt, draws, night=night) for prompt in prompts]), prompts


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the words of the prompts."""
    words = ["<pad>", "<start>", "<end>", "a", *SIZES, *COLOURS, *SHAPES]
    model = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    model.pre_tokenizer = Whitespace()
    model.post_processor = TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 1), ("<end>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<end>", model_max_length=8
    )


def autoencoder(draws: np.random.Generator, steps: int) -> AutoencoderKL:
    """Train an autoencoder on pictures of both styles, and scale its latents to unit variance."""
    vae = AutoencoderKL(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=SIZE,
    )
    optimizer = torch.optim.Adam(vae.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        images, _ = pictures(16, draws, night=bool(step % 2))
        posterior = vae.encode(images).latent_dist
        decoded = vae.decode(posterior.sample()).sample
        loss = (decoded - images).abs().mean() + 1e-4 * posterior.kl().mean() / 64
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"autoencoder {step}: {float(loss):.4f}", flush=True)
    with torch.no_grad():
        latents = [
            vae.encode(pictures(64, draws, night=night)[0]).latent_dist.mean for night in (0, 1)
        ]
    vae.register_to_config(scaling_factor=float(1.0 / torch.cat(latents).std()))
    return vae.eval().requires_grad_(False)


def train(
    pipeline: Any, parameters: list[Tensor], draws: np.random.Generator, **options: Any
) -> None:
    """Train some parameters of a pipeline to remove noise from the latents of pictures."""
    steps, rate, night = options["steps"], options["rate"], options["night"]
    optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    generator = torch.Generator().manual_seed(int(draws.integers(2**31)))
    images, all_prompts = pictures(4096, draws, night=night)
    with torch.no_grad():
        parts = [pipeline.vae.encode(part).latent_dist.mean for part in images.split(64)]
    all_latents = torch.cat(parts) * pipeline.vae.config.scaling_factor
    mean = 0.0
    for step in range(steps):
        chosen = draws.integers(0, len(all_latents), 32)
        latents = all_latents[chosen]
        # One prompt in ten is empty, for guidance without a classifier.
        prompts = ["" if draws.uniform() < 0.1 else all_prompts[i] for i in chosen]
        tokens = pipeline.tokenizer(
            prompts, padding="max_length", max_length=8, truncation=True, return_tensors="pt"
        )
        states = pipeline.text_encoder(tokens.input_ids)[0]
        noise = torch.randn(latents.shape, generator=generator)
        timesteps = torch.randint(0, 1000, (len(latents),), generator=generator)
        noisy = pipeline.scheduler.add_noise(latents, noise, timesteps)
        loss = (pipeline.unet(noisy, timesteps, states).sample - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        mean = 0.98 * mean + 0.02 * float(loss) if step else float(loss)
        if step % 100 == 0 or step == steps - 1:
            print(f"{'night' if night else 'day'} {step}: {mean:.4f}", flush=True)


def make(out: Path, seed: int, steps: tuple[int, int, int]) -> None:
    """Train autoencoder, diffusion model and LoRA, and write them."""
    draws = np.random.default_rng(seed)
    torch.manual_seed(seed)
    words = tokenizer()
    vae = autoencoder(draws, steps[0])
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=8,
            projection_dim=64,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )
    unet = UNet2DConditionModel(
        sample_size=SIZE // 2,
        block_out_channels=(48, 96),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=4,
        norm_num_groups=8,
        use_linear_projection=True,
    )
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        clip_sample=False,
        steps_offset=1,
    )
    pipeline = StableDiffusionPipeline(
        vae, text_encoder, words, unet, scheduler, None, None, requires_safety_checker=False
    )
    both = [*unet.parameters(), *text_encoder.parameters()]
    train(pipeline, both, draws, steps=steps[1], rate=1e-3, night=False)
    out.mkdir(parents=True, exist_ok=True)
    pipeline.save_pretrained(out / "shapes")
    # The style.
    text_encoder.requires_grad_(False)
    unet.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS))
    lora = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    train(pipeline, lora, draws, steps=steps[2], rate=2e-3, night=True)
    layers = get_peft_model_state_dict(unet)
    StableDiffusionPipeline.save_lora_weights(
        out, unet_lora_layers=layers, weight_name="night.safetensors"
    )
    (out / "prompts.txt").write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, nargs=3, default=(900, 3000, 600))
    arguments = parser.parse_args()
    make(arguments.out, arguments.seed, tuple(arguments.steps))


if __name__ == "__main__":
    main()
