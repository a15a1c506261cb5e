"""The part of `script --llm`: a LoRA of a causal model, compressed, beside PEFT's table of LoRA conversion.

    python -m benchmarks.gpu.script --llm meta-llama/Llama-3.2-3B --data metamath.jsonl --test gsm8k.jsonl --work runs

PEFT's documentation ("LoRA conversion") shortens a LoRA of rank 64 on q and v of Llama-3.2-3B, trained on MetaMathQA
with rank-stabilized scaling, by truncated SVD to several sizes, and tells the accuracy on GSM8K (52.92 % at first).
Here are the same steps in bfloat16 on one device:

1. such a LoRA is trained, or ``--adapter`` names one;
2. Fisher statistics are measured on ``--samples`` training examples;
3. it is compressed to each of the table's sizes, and to 24, 48 and 96 times fewer numbers, as LSR and by truncated SVD
   in both norms;
4. each form answers the held-out prompts by greedy decoding: right if its last number is the last number of the file's
   completion. Beside that, the divergence from the LoRA's answers.

``--data`` and ``--test`` hold JSON lines with ``prompt`` and ``completion``; PEFT's prompts read "Question: … Think
step by step.\nAnswer:". What is finished in ``--work`` is not done again.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.language.forms import FORM, make_forms, place
from benchmarks.language.judge import Judge, opened, said
from lsrdecomp.calibration.base_model import Base
from lsrdecomp.calibration.calibrate import calibrate
from lsrdecomp.calibration.dataset import completion_text, read_jsonl, token_batches, tokenize
from lsrdecomp.checkpoints import open_checkpoint
from lsrdecomp.checkpoints.statistics import METADATA
from lsrdecomp.training.finetune import finetune
from lsrdecomp.training.record import ADAPTER, RECORD
from lsrdecomp.training.settings import FinetuneSettings

PEFT_PARAMETERS = 18_350_080
PEFT_ACCURACY = 52.92
PEFT_TABLE = {
    2_293_760: ("rank 8", -9.55),
    4_587_520: ("rank 16", -4.02),
    9_175_040: ("rank 32", -1.44),
    13_762_560: ("rank 48", -0.91),
    2_150_400: ("0.5", -8.80),
    3_082_240: ("0.6", -5.38),
    4_448_256: ("0.7", -2.43),
    6_510_592: ("0.8", -2.81),
    10_022_912: ("0.9", -1.37),
    12_976_128: ("0.95", -0.30),
}
"""Parameters after conversion: the argument ``rank`` of PEFT's `convert_to_lora` and the points of accuracy lost."""
THEIRS = {round(PEFT_PARAMETERS / count, 3): found for count, found in PEFT_TABLE.items()}
RATIOS = (*sorted(THEIRS), 24.0, 48.0, 96.0)
STRUCTURES = ("LSR", "SVD, K-FAC", "SVD")
JUDGED = "judged.json"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """All figures of the table."""
    work.mkdir(parents=True, exist_ok=True)
    device = "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
    lora = options.adapter or trained(options, work, device)
    seconds = {"calibration": calibrated(options, lora, work, device)}
    begin = time.perf_counter()
    complaints = [
        complaint
        for structure in options.structures
        for complaint in make_forms(lora, work / "statistics", work / "forms", structure, "ratio", list(options.ratios))
    ]
    seconds["compression"] = round(time.perf_counter() - begin, 1)
    whole, rows = judged_forms(options, lora, work, device)
    parameters = sum(layer.parameters for layer in open_checkpoint(lora).layers)
    return {
        "model": options.llm,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "precision": "bfloat16",
        "examples": len(read_jsonl(options.test)[: options.test_examples]),
        "new_tokens": options.new_tokens,
        "lora": {"parameters": parameters, **whole},
        "forms": rows,
        "impossible": complaints,
        "seconds": seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "peft": {"accuracy": PEFT_ACCURACY, "parameters": PEFT_PARAMETERS, "model": "meta-llama/Llama-3.2-3B"},
    }


def trained(options: argparse.Namespace, work: Path, device: str) -> Path:
    """The LoRA of PEFT's table: r = 64 on q and v, with rank-stabilized scaling."""
    out = work / "lora"
    if not (out / RECORD).exists():
        settings = FinetuneSettings.from_mapping(
            {
                "model": options.llm,
                "data": str(options.data),
                "dev_data": str(options.test),
                "dev_examples": options.test_examples,
                "options": {"r": options.rank, "lora_alpha": options.rank, "use_rslora": True},
                "target_modules": ["q_proj", "v_proj"],
                "learning_rate": options.rate,
                "batch": options.batch,
                "steps": options.steps,
                "seed": options.seed,
                "precision": "bfloat16",
                "device": device,
                "samples": 0,
                "log_every": 0,
            }
        )
        finetune(settings, out)
    return out / ADAPTER


def calibrated(options: argparse.Namespace, lora: Path, work: Path, device: str) -> float:
    """Statistics of training examples; seconds, 0 if they were there."""
    if (work / "statistics" / METADATA).exists():
        return 0.0
    begin = time.perf_counter()
    base = opened(options.llm, lora, device, "bfloat16")
    rows = tokenize(read_jsonl(options.data), base.tokenizer, max_length=options.max_length)
    calibrate(
        base.model,
        token_batches(rows, size=options.batch, seed=options.seed, pad=base.tokenizer.pad_token_id),
        modules=base.modules,
        out=work / "statistics",
        seed=options.seed,
        samples=min(options.samples, len(rows)),
        head=base.head,
        base=options.llm,
        adapter_base=base.adapter_base,
    )
    return round(time.perf_counter() - begin, 1)


def judged_forms(
    options: argparse.Namespace, lora: Path, work: Path, device: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The LoRA's own figures, and those of each form that could be made, largest first."""
    source = opened(options.llm, lora, device, "bfloat16")
    judge = Judge(source, options.test, examples=options.test_examples, max_length=options.max_length)
    whole = answered(source, judge, None, options, work / "lora.json")
    rows = []
    for structure in options.structures:
        for ratio in sorted(options.ratios):
            target = place(work / "forms", structure, "ratio", ratio)
            if not (target / FORM).exists():
                continue
            facts = json.loads((target / FORM).read_text())
            known = target / JUDGED
            form = None if known.exists() else opened(options.llm, target, device, "bfloat16")
            found = answered(form, judge, form, options, known)
            rank, points = THEIRS.get(ratio, (None, None))
            rows.append(
                {
                    "structure": structure,
                    "ratio": ratio,
                    "parameters": facts["parameters"],
                    "file_bytes": facts["file_bytes"],
                    **found,
                    "points": round(found["accuracy"] - whole["accuracy"], 2),
                    "peft_rank": rank,
                    "peft_points": points,
                }
            )
    return whole, rows


def answered(
    base: Base | None, judge: Judge, form: Base | None, options: argparse.Namespace, known: Path
) -> dict[str, Any]:
    """Accuracy in percent, and what is kept of the LoRA's answers; read again if it is known."""
    if not known.exists():
        assert base is not None
        texts = said(base, judge.examples, new_tokens=options.new_tokens)
        figures = judge.judge(form)
        wanted = [last_number(completion_text(example)) for example in judge.examples]
        right = [last_number(text) == number for text, number in zip(texts, wanted, strict=True)]
        kept = {} if form is None else {"kl": figures["kl"], "kept": 1.0 - figures["kl"] / figures["effect"]}
        facts = {"accuracy": 100.0 * sum(right) / len(right), "loss": figures["loss"], **kept}
        known.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    found: dict[str, Any] = json.loads(known.read_text())
    return found


def last_number(text: str) -> float | None:
    """The last number of a text, thousands' commas left out; None if there is none."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def table(figures: dict[str, Any]) -> list[str]:
    """The table in Markdown: for each size what each structure loses, and what PEFT's conversion lost."""
    structures = list(dict.fromkeys(row["structure"] for row in figures["forms"]))
    by = {(row["structure"], row["ratio"]): row for row in figures["forms"]}
    lora = figures["lora"]
    lines = [
        f"{figures['model']}: a LoRA of {lora['parameters']:,} parameters, {lora['accuracy']:.2f} % of "
        f"{figures['examples']:,} answers right. Points gained or lost; in brackets the share of its effect kept.",
        "",
        "| fewer parameters | " + " | ".join(structures) + " | PEFT, on its own LoRA |",
        "|---" * (len(structures) + 2) + "|",
    ]
    for ratio in sorted({row["ratio"] for row in figures["forms"]}):
        cells = [_cell(by.get((structure, ratio))) for structure in structures]
        rank, points = THEIRS.get(ratio, (None, None))
        lines.append(f"| {ratio:.3g} × | {' | '.join(cells)} | {'' if points is None else f'{points:+.2f} ({rank})'} |")
    return lines


def _cell(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['points']:+.2f} ({row['kept']:.3f})"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `--llm` asks for beside the options of the script."""
    group = parser.add_argument_group("with --llm")
    group.add_argument("--llm", metavar="MODEL", help="a causal model by name, directory or GGUF file, or smollm2")
    group.add_argument("--test", type=Path, help="held-out JSON lines")
    group.add_argument("--adapter", type=Path, help="a LoRA that is there already")
    group.add_argument("--rank", type=int, default=64)
    group.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    group.add_argument("--structures", nargs="+", default=STRUCTURES)
    group.add_argument("--test-examples", type=int, default=1319)
    group.add_argument("--new-tokens", type=int, default=300)
    group.add_argument("--max-length", type=int, default=768)


def check(options: argparse.Namespace) -> str | None:
    """What is missing, in a sentence."""
    needed: Sequence[tuple[str, Any]] = [("--data", options.data), ("--test", options.test)]
    for name, path in needed:
        if path is None or not Path(path).is_file():
            return f"--llm reads JSON lines: {name} {path or 'FILE.jsonl'} is no file"
    return None
