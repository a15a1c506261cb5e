"""A model of sounds that is trained here, a LoRA for what it cannot hear, and its share.

    python -m benchmarks.speech.tones --out RUNS [--seed 0]

A Whisper of two and two blocks learns to write down dialled digits, as `benchmarks.speech.dialled`
makes them. A LoRA (r = 8 on q, k, v and out) teaches it those of a tape that runs too fast. Then
one call of `lsrdecomp.compress` per share, on a folder of such sounds as WAV files, and what is
kept is judged on sounds that nothing has seen. Model, LoRA and sounds are kept in RUNS. Writes
`results/tones.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from scipy.io import wavfile
from torch import Tensor
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from benchmarks import record as records
from benchmarks.record import RESULTS
from benchmarks.speech.dialled import DIGITS, RATE, SECONDS, dialled
from lsrdecomp import compress
from lsrdecomp.lora.base.base_model import Base
from lsrdecomp.lora.base.open_bases import open_base
from lsrdecomp.lora.base.tokens import LOSS_MASK
from lsrdecomp.lora.measure.output_meter import Meter, evaluation_batches
from lsrdecomp.lora.search.measured_settings import EvaluatorSettings

MELS, HOP = 40, 320
"""Mel frequencies of a frame, and samples from one to the next: half of Whisper's, and twice."""
FAST = 1.25
"""How much too fast the tape runs: so much higher are the tones that the LoRA learns."""
END, START, LANGUAGE, TASK, NO_TIMES = range(10, 15)
"""Marks of the vocabulary, after the ten digits."""
PROMPT = (START, LANGUAGE, TASK, NO_TIMES)
"""What Whisper is given to go on from."""
ADAPTED = ["q_proj", "k_proj", "v_proj", "out_proj"]
SOUNDS, UNSEEN = 320, 256
"""Sounds in the folder that `compress` is given, and others that it is judged on."""
LOUDEST = 5.0
"""What a file's largest number stands for; hardly any sound has such a value."""

Heard = tuple[Tensor, Tensor]
"""Features of sounds, (sounds, mels, frames), and tokens, (sounds, prompt and digits and end)."""


def new_model() -> WhisperForConditionalGeneration:
    """Return a small Whisper for sounds of `SECONDS`, which has learnt nothing."""
    sizes = {"d_model": 96, "vocab_size": 15, "num_mel_bins": MELS, "max_target_positions": 24}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 192}
    marks = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END}
    marks |= {"decoder_start_token_id": START}
    config = WhisperConfig(
        **sizes,
        **marks,
        max_source_positions=round(SECONDS * RATE / HOP / 2),
        begin_suppress_tokens=None,
        init_std=sizes["d_model"] ** -0.5,
    )
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        **marks,
        is_multilingual=True,
        language="en",
        task="transcribe",
        lang_to_id={"<|en|>": LANGUAGE},
        task_to_id={"transcribe": TASK},
        no_timestamps_token_id=NO_TIMES,
    )
    return model


def new_extractor() -> WhisperFeatureExtractor:
    """Return what hears for `new_model`."""
    return WhisperFeatureExtractor(MELS, RATE, HOP, chunk_length=round(SECONDS))


def recorded(count: int, speed: float, seed: int) -> Iterator[tuple[str, NDArray[np.int16]]]:
    """Yield digits, and the sound of them in 16 bits."""
    draws = np.random.default_rng(seed)
    for _ in range(count):
        digits, sound = dialled(draws, speed)
        yield digits, (32767 * np.clip(sound / LOUDEST, -1.0, 1.0)).astype(np.int16)


def heard(hear: WhisperFeatureExtractor, count: int, speed: float, seed: int) -> Heard:
    """Return what Whisper hears of sounds, and tokens of them with prompt and end."""
    features, tokens = [], []
    for digits, sound in recorded(count, speed, seed):
        values = sound.astype(np.float32) / 32767
        features.append(hear(values, sampling_rate=RATE, return_tensors="pt").input_features)
        tokens.append([*PROMPT, *map(int, digits), END])
    return torch.cat(features), torch.tensor(tokens)


def write_sounds(folder: Path, count: int, speed: float, seed: int) -> dict[Path, str]:
    """Write sounds as WAV files; return their digits by file."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for number, (digits, sound) in enumerate(recorded(count, speed, seed)):
        file = folder / f"{number:03}.wav"
        wavfile.write(file, RATE, sound)
        written[file] = digits
    return written


def train(model: Any, data: Heard, steps: int, rate: float, seed: int) -> None:
    """Train the parameters of a model that require gradients to write down the digits."""
    features, tokens = data
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(steps):
        chosen = torch.randint(0, len(features), (16,), generator=generator)
        inputs = {"input_features": features[chosen], "decoder_input_ids": tokens[chosen, :-1]}
        logits = model(**inputs).logits[:, -DIGITS - 1 :]
        wanted = tokens[chosen, -DIGITS - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"step {step + 1} of {steps}: {loss.item():.3f} nats a token", flush=True)
    model.eval()


def right(opened: Base, sounds: Mapping[Path, str]) -> float:
    """Return the share of sounds of which a model writes down all digits, and nothing else."""
    found = []
    for batch in evaluation_batches(opened, list(sounds), EvaluatorSettings(), 32):
        counts = batch[LOSS_MASK].sum(1)
        for tokens, count in zip(batch["decoder_input_ids"], counts, strict=True):
            written = tokens[len(PROMPT) : len(PROMPT) + int(count) - 1]
            found.append("".join(map(str, written.tolist())))
    return float(np.mean([one == other for one, other in zip(found, sounds.values(), strict=True)]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.9, 0.99])
    arguments = parser.parse_args()
    out, seed = arguments.out, arguments.seed
    # 1. The model and its LoRA, unless an earlier run has trained them.
    hear = new_extractor()
    if not (out / "whisper").exists():
        torch.manual_seed(seed)
        model = new_model()
        train(model, heard(hear, 3072, 1.0, 4 * seed), 600, 1.5e-3, seed)
        hear.save_pretrained(out / "whisper")
        model.save_pretrained(out / "whisper")
    if not (out / "lora").exists():
        model = WhisperForConditionalGeneration.from_pretrained(out / "whisper")
        torch.manual_seed(seed)
        adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=ADAPTED))
        train(adapted, heard(hear, 2048, FAST, 4 * seed + 1), 300, 5e-3, seed)
        adapted.save_pretrained(out / "lora")
    # 2. A folder of sounds for `compress`, and sounds that nothing sees until then.
    write_sounds(out / "sounds", SOUNDS, FAST, 4 * seed + 2)
    unseen = write_sounds(out / "unseen", UNSEEN, FAST, 4 * seed + 3)
    known = write_sounds(out / "known", UNSEEN, 1.0, 4 * seed + 3)
    base = open_base(out / "whisper", out / "lora")
    source = base.with_adapter(out / "lora")
    result: dict[str, Any] = {
        "right_at_its_own_speed": right(base, known),
        "right": right(base, unseen),
        "right_with_lora": right(source, unseen),
    }
    print(result, flush=True)
    # 3. One call for each share.
    judge = Meter(source, list(unseen), EvaluatorSettings()).reference
    result |= {"effect": judge.effect, "layers": len(source.modules)}
    rows = []
    for share in arguments.keep:
        small = compress(out / "lora", base=out / "whisper", data=out / "sounds", keep=share)
        written = base.with_adapter(small.save(out / f"small-{share}", force=True))
        found = judge.compare(written)
        rows.append(
            records.said_and_found(share, small, found)
            | {
                "agreement": found.agreement,
                "right": right(written, unseen),
            }
        )
        print(rows[-1], flush=True)
    packages = ("torch", "transformers", "peft")
    records.save(RESULTS / "tones.json", {**result, "rows": rows}, *packages, seed=seed)


if __name__ == "__main__":
    main()
