"""Train the LoRAs of the functional benchmark: SST-2, MRPC and CoLA on MiniLM, several seeds each.

    python -m benchmarks.behaviour.norms_adapters --data GLUE --work DIR [--tasks SST-2 …] \\
        [--seeds 0 1 2]

Each adapter is a PEFT directory ``DIR/<task>/seed-<n>``; one that is there is not trained again. A
few minutes each on one core. Held-out examples are never trained on; their loss before and after is
printed and kept in ``run.json``.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import get_linear_schedule_with_warmup

from benchmarks.behaviour.norms_model import (
    FIRST_LAYER,
    HELD_OUT,
    TARGETS,
    Inputs,
    Subject,
    held_out_logits,
    prepare,
)


@dataclass(frozen=True, slots=True)
class Training:
    """Choices of a run; the rate is the peak of a linear schedule."""

    steps: int
    rate: float
    batch: int = 32
    rank: int = 8
    alpha: int = 16


CHOICES = {"SST-2": Training(300, 2e-3), "MRPC": Training(150, 2e-3), "CoLA": Training(200, 2e-3)}


def train(subject: Subject, choices: Training, seed: int) -> PeftModel:
    """A LoRA adapter on q, k, v and o of the upper layers; the head stays as it is."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=choices.rank,
        lora_alpha=choices.alpha,
        target_modules=list(TARGETS),
        layers_to_transform=[FIRST_LAYER, FIRST_LAYER + 1, FIRST_LAYER + 2],
        layers_pattern="layer",
    )
    # No dropout: the start and the end are one function apart.
    model = get_peft_model(subject.model, config).eval()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=choices.rate, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, choices.steps // 20, choices.steps)
    for rows in subject.train.shuffled(choices.batch, choices.steps, seed):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**subject.train.batch(rows)).logits
        loss = torch.nn.functional.cross_entropy(logits.float(), subject.train.labels[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    return model


def score(model: torch.nn.Module, inputs: Inputs) -> dict[str, float]:
    logits = held_out_logits(model, inputs)
    loss = torch.nn.functional.cross_entropy(logits, inputs.labels).item()
    return {"loss": loss, "accuracy": (logits.argmax(-1) == inputs.labels).float().mean().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="GLUE directory")
    parser.add_argument(
        "--work", type=Path, required=True, help="where adapters and encoder outputs are kept"
    )
    parser.add_argument("--tasks", nargs="+", choices=HELD_OUT, default=list(HELD_OUT))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    for task in arguments.tasks:
        for seed in arguments.seeds:
            out = arguments.work / task / f"seed-{seed}"
            if (out / "run.json").exists():
                continue
            # Prepared afresh: training wraps the model.
            subject = prepare(arguments.data, arguments.work, task)
            before, started = score(subject.model, subject.held_out), time.process_time()
            model = train(subject, CHOICES[task], seed)
            after = score(model, subject.held_out)
            model.save_pretrained(out)
            run = {
                "task": task,
                "seed": seed,
                "before": before,
                "after": after,
                **asdict(CHOICES[task]),
            }
            run |= {"cpu_seconds": round(time.process_time() - started), "torch": torch.__version__}
            (out / "run.json").write_text(
                json.dumps(run | {"peft": peft.__version__}, indent=2) + "\n"
            )
            print(f"{task} seed {seed}: loss {before['loss']:.4f} → {after['loss']:.4f}, ", end="")
            print(f"accuracy {before['accuracy']:.1%} → {after['accuracy']:.1%}", flush=True)


if __name__ == "__main__":
    main()
