"""Speech: what is kept of a LoRA that taught Whisper to write down dialled digits.

    python -m benchmarks.speech.dialled --model model.bin --tokenizer tokenizer.json \\
        [--seeds 0 1] --work RUNS

``--model`` are the parts, in order, of Whisper base as CTranslate2 writes it (MIT licence),
``--tokenizer`` is the file beside it. The task is made here, so that anybody can repeat it: four
digits as pairs of tones (DTMF), of lengths, pauses and loudness that vary, in noise. Whisper hears
nothing in them; a LoRA (r = 8 on q, k, v and out of encoder, decoder and between) learns them in
some hundred steps. Then as with a language model: statistics of 64 sounds, LSR and truncated SVD at
equal bytes in the Fisher norm, both also trained on the LoRA's own answers to 240 sounds, and what
is kept of its answers to sounds that nothing saw. LoRAs, statistics and trained forms are kept in
RUNS. Writes `results/speech.json`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from transformers import WhisperFeatureExtractor

from benchmarks import record as records
from benchmarks.record import RESULTS
from benchmarks.speech.whisper import open_whisper
from lsrdecomp import compress
from lsrdecomp.lora.base.base_model import Base
from lsrdecomp.lora.base.calibrate import calibrate
from lsrdecomp.lora.base.divergence import Reference
from lsrdecomp.lora.base.heads import Batch, Head
from lsrdecomp.lora.base.tokens import LOSS_MASK, model_inputs
from lsrdecomp.lora.compress.rewrite import rewrite
from lsrdecomp.lora.compress.variants import products_of
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.file_checks import bytes_to_open
from lsrdecomp.lora.files.statistics import METADATA, read_statistics
from lsrdecomp.lora.files.writing import WEIGHTS
from lsrdecomp.lora.measure.teacher import DistillationData
from lsrdecomp.lora.search import CompressionPlan
from lsrdecomp.lora.search.plan import Search
from lsrdecomp.lora.train.distillation import distill_factors

RATE = 16_000
SECONDS = 2.0
DIGITS = 4
TONES = {
    digit: (low, high)
    for low, row in zip((697, 770, 852, 941), ("123", "456", "789", " 0 "), strict=True)
    for high, digit in zip((1209, 1336, 1477), row, strict=True)
    if digit != " "
}
"""Hertz of the two tones of each digit."""
PROMPT = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
END = "<|endoftext|>"
METHODS = {"LSR": Search(), "SVD": Search(orders=())}


def dialled(draws: np.random.Generator, speed: float = 1.0) -> tuple[str, NDArray[np.float32]]:
    """Four digits and the sound of them, `SECONDS` long; tones are ``speed`` times as high."""
    digits = "".join(draws.choice(list(TONES), DIGITS))
    sound, start = np.zeros(int(RATE * SECONDS)), int(RATE * draws.uniform(0.05, 0.3))
    for digit in digits:
        length = int(RATE * draws.uniform(0.12, 0.25))
        seconds = np.arange(length) / RATE
        tones = [
            np.sin(2 * np.pi * speed * each * seconds + draws.uniform(0, 2 * np.pi))
            for each in TONES[digit]
        ]
        sound[start : start + length] += draws.uniform(0.3, 1.0) * sum(tones)
        start += length + int(RATE * draws.uniform(0.05, 0.12))
    return digits, (sound + draws.uniform(0.05, 0.5) * draws.standard_normal(len(sound))).astype(
        np.float32
    )


def batches(tokenizer: Tokenizer, seed: int, count: int, size: int) -> list[Batch]:
    """Return sounds as Whisper reads them.

    A position answers for the token after it, from the last of the prompt on.
    """
    draws, hear = np.random.default_rng(seed), WhisperFeatureExtractor(chunk_length=round(SECONDS))
    prompt = [tokenizer.token_to_id(mark) for mark in PROMPT]
    made = []
    for _ in range(count // size):
        digits, sounds = zip(*(dialled(draws) for _ in range(size)), strict=True)
        rows = [
            tokenizer.encode(" " + " ".join(each), add_special_tokens=False).ids for each in digits
        ]
        ids = torch.tensor([[*prompt, *row] for row in rows])
        answers = torch.zeros_like(ids)
        answers[:, len(prompt) - 1 :] = 1
        features = hear(list(sounds), sampling_rate=RATE, return_tensors="pt").input_features
        made.append({"input_features": features, "decoder_input_ids": ids, LOSS_MASK: answers})
    return made


def answered(opened: Base, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits (sounds, 5, vocabulary) of digits and end, and their tokens (sounds, 5)."""
    tokens = torch.nn.functional.pad(
        batch["decoder_input_ids"], (0, 1), value=opened.tokenizer.token_to_id(END)
    )
    logits = opened.model(**model_inputs(batch)).logits
    return logits[:, -DIGITS - 1 :], tokens[:, -DIGITS - 1 :]


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean nats of a token."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def train(base: Base, out: Path, seed: int, steps: int, rate: float) -> None:
    """A LoRA as PEFT begins it, Adam with a warm start and a rate that falls to zero."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "out_proj"]
    )
    model = get_peft_model(base.model, config).train()
    student = replace(base, model=model)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0
    )
    for step, batch in enumerate(batches(base.tokenizer, 1000 + seed, 8 * steps, 8)):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 10) * (1.0 - step / steps)
        loss = loss_of(*answered(student, batch))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1} of {steps}: {loss.item():.3f} nats", flush=True)
    model.eval().save_pretrained(str(out))


def judged(opened: Base, held: Sequence[Batch]) -> dict[str, float]:
    """Loss a token, and the share of sounds whose four digits and end are all the likeliest."""
    losses, right = [], []
    with torch.no_grad():
        for batch in held:
            logits, tokens = answered(opened, batch)
            losses.append(float(loss_of(logits, tokens)))
            right += (logits.argmax(-1) == tokens).all(1).tolist()
    return {"loss": float(np.mean(losses)), "exact": float(np.mean(right))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, nargs="+", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--bytes", type=int, nargs="+", default=[3000, 6000, 12_000, 24_000])
    parser.add_argument("--distill", type=int, default=60, help="steps of eight sounds")
    parser.add_argument("--work", type=Path, default=Path("speech-work"))
    parser.add_argument("--out", type=Path, default=RESULTS / "speech.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"loras": [], "rows": []}
    for seed in arguments.seeds:
        model = open_whisper(arguments.model, seconds=SECONDS)
        model.name_or_path = "openai/whisper-base"
        base = Base(
            "whisper-base", model, Tokenizer.from_file(str(arguments.tokenizer)), Head.seq2seq
        )
        held = batches(base.tokenizer, 1, 64, 8)
        bare = judged(base, held)
        # 1. A LoRA, and the statistics of its layers on sounds of its own.
        lora, statistics = (arguments.work / f"{name}-{seed}" for name in ("lora", "statistics"))
        if not (lora / WEIGHTS).exists():
            train(base, lora, seed, arguments.steps, arguments.rate)
            model = open_whisper(arguments.model, seconds=SECONDS)
            base = Base(base.name, model, base.tokenizer, base.head)
        source = base.with_adapter(lora)
        if not (statistics / METADATA).exists():
            calibrate(source, batches(base.tokenizer, 2, 64, 8), out=statistics, seed=0, samples=64)
        # 2. What it does, on sounds that neither saw.
        reference = Reference(source, held)
        size = bytes_to_open(lora / WEIGHTS)
        about = {
            "seed": seed,
            "bytes": size,
            "steps": arguments.steps,
            "rate": arguments.rate,
            "base": bare,
        }
        record["loras"].append(
            about
            | judged(source, held)
            | {"effect": reference.effect, "layers": len(source.modules)}
        )
        print(record["loras"][-1], flush=True)
        # 3. Its forms, the same bytes for both, as they are and trained on its answers.
        check = Reference(source, batches(base.tokenizer, 3, 32, 8))
        data = DistillationData(
            source, [[batch] for batch in batches(base.tokenizer, 2, 240, 8)], check
        )
        for budget, (method, search) in itertools.product(arguments.bytes, METHODS.items()):
            form, trained = (
                arguments.work / f"{method}-{budget}-{seed}{suffix}"
                for suffix in ("", "-distilled")
            )
            weights = read_statistics(statistics)
            if not form.exists():
                plan = CompressionPlan(bytes=budget, storage="auto")
                compress(open_checkpoint(lora), plan, statistics=weights, search=search).save(form)
            if not trained.exists():
                student = base.with_adapter(form)
                distill_factors(student, data, steps=arguments.distill, seed=seed)
                rewrite(
                    trained, form, open_checkpoint(lora), products_of(student), statistics=weights
                )
            for steps, directory in ((0, form), (arguments.distill, trained)):
                opened = base.with_adapter(directory)
                answers, size = reference.compare(opened), bytes_to_open(directory / WEIGHTS)
                row = {
                    "method": method,
                    "budget": budget,
                    "seed": seed,
                    "steps": steps,
                    "bytes": size,
                }
                row |= {
                    "kept": answers.kept,
                    "error": answers.standard_error,
                    "agreement": answers.agreement,
                }
                record["rows"].append(row | judged(opened, held))
                print(record["rows"][-1], flush=True)
            packages = ("torch", "transformers", "peft")
            records.save(arguments.out, record, *packages, seed=arguments.seeds)


if __name__ == "__main__":
    main()
