"""A classifier of images that is trained here, a LoRA for what it cannot read, and its share.

    python -m benchmarks.images.digits --out RUNS [--seed 0]

A ViT of four blocks learns the handwritten digits of scikit-learn, enlarged to 16 × 16 pixels. A
LoRA (r = 8 on q, k, v and out) teaches it to read them in negative and upside down. Then one call
of `lsrdecomp.compress` per share, on a folder of such images, and what is kept is judged on images
that nothing has seen. Writes ``RUNS/vit``, ``RUNS/lora``, ``RUNS/images`` and
`results/digits.json`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp import compress
from lsrdecomp.lora.base.divergence import Reference
from lsrdecomp.lora.base.open_bases import open_base

TRAINED = 1000
"""Digits that are trained on; the next are calibrated and held out on, the last judged on."""
CALIBRATED = 400


def train(model: Any, pixels: Tensor, labels: Tensor, steps: int, rate: float, seed: int) -> float:
    """Train the parameters of a model that require gradients; return the last losses' mean."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(0, len(pixels), (64,), generator=generator)
        loss = model(pixel_values=pixels[chosen], labels=labels[chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss))
    return float(np.mean(losses[-20:]))


def accuracy(model: Any, pixels: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((model(pixel_values=pixels).logits.argmax(-1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.9, 0.97])
    arguments = parser.parse_args()
    out = arguments.out
    torch.manual_seed(arguments.seed)
    # 1. The digits as images, upright and as the LoRA learns them.
    digits = load_digits()
    labels = torch.tensor(digits.target)
    upright = np.kron(digits.images * (255.0 / 16.0), np.ones((2, 2))).astype(np.uint8)
    strange = 255 - upright[:, ::-1, ::-1]
    processor = ViTImageProcessor(size={"height": 16, "width": 16})

    def pixels_of(images: Any) -> Tensor:
        pictures = [Image.fromarray(image).convert("RGB") for image in images]
        pixels: Tensor = processor(images=pictures, return_tensors="pt")["pixel_values"]
        return pixels

    # 2. The model and its LoRA.
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=16,
        patch_size=4,
        num_labels=10,
        hidden_dropout_prob=0.0,
    )
    model = ViTForImageClassification(config)
    known, new = pixels_of(upright), pixels_of(strange)
    train(model, known[:TRAINED], labels[:TRAINED], 600, 2e-3, arguments.seed)
    model.save_pretrained(out / "vit")
    processor.save_pretrained(out / "vit")
    rest = slice(TRAINED, None)
    result: dict[str, Any] = {
        "accuracy": accuracy(model, known[rest], labels[rest]),
        "accuracy_on_new": accuracy(model, new[rest], labels[rest]),
    }
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    adapted = get_peft_model(model, lora)
    train(adapted, new[:TRAINED], labels[:TRAINED], 400, 5e-3, arguments.seed)
    adapted.save_pretrained(out / "lora")
    result["accuracy_with_lora"] = accuracy(adapted, new[rest], labels[rest])
    print(result, flush=True)
    # 3. A folder of images, one command, and images that nothing has seen.
    folder = out / "images"
    folder.mkdir(exist_ok=True)
    for number in range(TRAINED, TRAINED + CALIBRATED):
        Image.fromarray(strange[number]).save(folder / f"{number}.png")
    base = open_base(out / "vit", out / "lora")
    judged = new[TRAINED + CALIBRATED :]
    judge = Reference(base.with_adapter(out / "lora"), [{"pixel_values": judged}])
    rows = []
    for share in arguments.keep:
        small = compress(out / "lora", base=out / "vit", data=folder, keep=share)
        written = base.with_adapter(small.save(out / f"small-{share}", force=True))
        found = judge.compare(written)
        rows.append(
            records.said_and_found(share, small, found)
            | {
                "agreement": found.agreement,
                "accuracy": accuracy(written.model, judged, labels[TRAINED + CALIBRATED :]),
            }
        )
        print(rows[-1], flush=True)
    packages = ("torch", "transformers", "peft", "scikit-learn")
    records.save(RESULTS / "digits.json", {**result, "rows": rows}, *packages, seed=arguments.seed)


if __name__ == "__main__":
    main()
