"""The part of `script` with ``--llm``: compressed LoRAs beside PEFT's table of LoRA conversion.

PEFT's documentation ("LoRA conversion") shortens a LoRA of rank 64 on q and v of Llama-3.2-3B,
trained on MetaMathQA with rank-stabilized scaling, by truncated SVD to several sizes, and tells the
accuracy on GSM8K (52.92 % at first). Here are the same steps in bfloat16 on one device:

1. such a LoRA is trained, or ``--adapter`` names one;
2. Fisher statistics are measured on ``--samples`` training examples, and it is compressed to each
   size by LSR and by truncated SVD in both norms;
3. each form answers the held-out prompts by greedy decoding: right if its last number is that of
   the file's completion, as in PEFT after "The answer is" or "####" where the completion has such a
   mark. Beside that, the divergence from the LoRA's answers.

``--data`` and ``--test`` hold JSON lines with ``prompt`` and ``completion``, as
`benchmarks.gpu.arena` makes them of MetaMathQA and GSM8K; it also prints PEFT's rows beside what
was measured. By default the LoRA sees fewer examples at a larger rate than PEFT's; ``--llm-steps
5000 --batch 4 --rate 1e-4 --test-examples 1319`` are PEFT's. A form's answers are written when it
has given them, and not asked for again.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.arena import CONVERTED, PUBLISHED, SOURCE
from benchmarks.gpu.forms import FORM, form_directory, make_forms
from benchmarks.gpu.needs import Needs
from benchmarks.language.judge import Judge, opened, said
from lsrdecomp.lora.base.base_model import Base
from lsrdecomp.lora.base.calibrate import calibrate
from lsrdecomp.lora.base.dataset import read_examples
from lsrdecomp.lora.base.tokens import completion_text, token_batches, tokenize
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.statistics import METADATA
from lsrdecomp.lora.train.finetune_record import ADAPTER, RECORD
from lsrdecomp.lora.train.finetune_run import finetune
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings

THEIRS = {
    round(SOURCE["parameters"] / count, 3): (
        row["method"],
        round(row["accuracy"] - SOURCE["accuracy"], 2),
    )
    for count, row in CONVERTED.items()
}
"""Ratios of PEFT's conversions: the argument ``rank`` of its `convert_to_lora` and the points of
accuracy lost."""
RATIOS = (8.0, 140.0, 2.0, 24.0)
"""Of the smallest conversion, of the smallest adapter that PEFT trains to more than 40 %, and two
between."""
STRUCTURES = ("LSR", "SVD")
GIGABYTES = 20.0
"""Free on the disk for the LoRA, its statistics and its forms; the model itself apart."""
JUDGED = "judged.json"
PROTOCOL = PUBLISHED["protocol"]
MARK = re.compile(r"(?:answer is:? |#### )(.*)")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


Group = list[tuple[str, float] | None]
"""Forms by structure and ratio, and None for the LoRA itself."""


def groups(options: argparse.Namespace, most: float) -> list[Group]:
    """Group the LoRA and its forms so that no stage is too long, the first ratios first."""
    wanted: Group = [
        None,
        *((structure, ratio) for ratio in options.ratios for structure in options.structures),
    ]
    size = max(1, int(most))
    return [wanted[start : start + size] for start in range(0, len(wanted), size)]


def lora(options: argparse.Namespace) -> dict[str, Any]:
    """The LoRA of PEFT's table: r = 64 on q and v, with rank-stabilized scaling."""
    out = options.work / "large" / "lora"
    if options.adapter is None and not (out / RECORD).exists():
        settings = FinetuneSettings.from_mapping(
            {
                "base": options.llm,
                "data": str(options.data),
                "dev_data": str(options.test),
                "dev_examples": min(64, options.test_examples),
                "options": {"r": options.rank, "lora_alpha": options.rank, "use_rslora": True},
                "target_modules": ["q_proj", "v_proj"],
                "answers": "all",
                "learning_rate": options.rate,
                "scheduler": "cosine",
                "warmup": PROTOCOL["warmup"],
                "weight_decay": SOURCE["weight_decay"],
                "batch": options.batch,
                "steps": options.llm_steps,
                "seed": options.seed,
                "precision": "bfloat16",
                "gradient_checkpointing": True,
                "max_length": options.max_length,
                "truncate": True,
                "save_every": 50,
                "device": options.device,
                "samples": 0,
                "log_every": 0,
            }
        )
        finetune(settings, out)
    return {"parameters": sum(layer.parameters for layer in open_checkpoint(_lora(options)).layers)}


def _lora(options: argparse.Namespace) -> Path:
    return Path(options.adapter or options.work / "large" / "lora" / ADAPTER)


def forms(options: argparse.Namespace) -> dict[str, Any]:
    """Calibrate on training examples and make every form that can be made; return their sizes."""
    work, adapter = options.work / "large", _lora(options)
    if not (work / "statistics" / METADATA).exists():
        base = opened(options.llm, adapter, options.device, "bfloat16")
        rows = tokenize(read_examples(options.data), base.tokenizer, max_length=options.max_length)
        calibrate(
            replace(base, name=options.llm),
            token_batches(
                rows,
                size=options.batch,
                seed=options.seed,
                pad_token_id=base.tokenizer.pad_token_id,
            ),
            out=work / "statistics",
            seed=options.seed,
            samples=min(options.samples, len(rows)),
        )
    impossible = [
        complaint
        for structure in options.structures
        for complaint in make_forms(
            adapter, work / "statistics", work / "forms", structure, options.ratios
        )
    ]
    return {"impossible": impossible}


def answers(options: argparse.Namespace, group: Group) -> dict[str, Any]:
    """Return rows of the table: what the forms of a group lose, and PEFT's at their size."""
    work, judge = options.work / "large", None
    rows = []
    for form in group:
        target = work if form is None else form_directory(work / "forms", *form)
        if form is not None and not (target / FORM).exists():
            continue  # it could not be made
        if not (target / JUDGED).exists():
            if judge is None:
                source = opened(options.llm, _lora(options), options.device, "bfloat16")
                judge = Judge(
                    source,
                    options.test,
                    examples=options.test_examples,
                    max_length=options.max_length,
                )
            adapted = (
                source if form is None else opened(options.llm, target, options.device, "bfloat16")
            )
            figures = answered(adapted, judge, options, is_lora=form is None)
            (target / JUDGED).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        rows.append(json.loads((target / JUDGED).read_text("utf-8")) | _facts(form, target))
        print(rows[-1], flush=True)
    peft = {name: SOURCE[name] for name in ("accuracy", "parameters")}
    return {"model": options.llm, "examples": options.test_examples, "rows": rows, "peft": peft}


def _facts(form: tuple[str, float] | None, target: Path) -> dict[str, Any]:
    if form is None:
        return {"structure": "LoRA", "ratio": 1.0}
    made, (rank, points) = (
        json.loads((target / FORM).read_text("utf-8")),
        THEIRS.get(form[1], (None, None)),
    )
    sizes = {"parameters": made["parameters"], "file_bytes": made["file_bytes"]}
    return {
        "structure": form[0],
        "ratio": form[1],
        **sizes,
        "peft_rank": rank,
        "peft_points": points,
    }


def answered(
    adapted: Base, judge: Judge, options: argparse.Namespace, *, is_lora: bool
) -> dict[str, Any]:
    """Accuracy in percent, and what is kept of the LoRA's answers."""
    texts = said(adapted, judge.examples, new_tokens=options.new_tokens, batch=options.answer_batch)
    figures = judge.judge(None if is_lora else adapted)
    completions = [completion_text(example) for example in judge.examples]
    right = [
        final_number(text, marked=marked) == final_number(completion, marked=marked)
        for text, completion in zip(texts, completions, strict=True)
        for marked in [bool(MARK.search(completion))]
    ]
    kept = {} if is_lora else {"kl": figures["kl"], "kept": 1.0 - figures["kl"] / figures["effect"]}
    return {"accuracy": 100.0 * sum(right) / len(right), "loss": figures["loss"], **kept}


def final_number(text: str, *, marked: bool) -> float | None:
    """Return the last number of a text; if ``marked``, of the line behind "answer is" or "####"."""
    if marked:
        text = (MARK.findall(text) or [""])[-1]
    return last_number(text)


def last_number(text: str) -> float | None:
    """The last number of a text, thousands' commas left out; None if there is none."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the stages of a large model are told."""
    group = parser.add_argument_group("a large model")
    group.add_argument("--llm", metavar="MODEL", help="a causal model by name or directory")
    group.add_argument("--data", type=Path, help="JSON lines to train on")
    group.add_argument("--test", type=Path, help="held-out JSON lines")
    group.add_argument("--adapter", type=Path, help="a LoRA that is there already")
    group.add_argument("--rank", type=int, default=64)
    group.add_argument("--rate", type=float, default=1e-3)
    group.add_argument("--llm-steps", type=int, default=250)
    group.add_argument("--samples", type=int, default=512, help="examples for the statistics")
    group.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    group.add_argument("--structures", nargs="+", default=STRUCTURES)
    group.add_argument("--test-examples", type=int, default=512)
    group.add_argument("--answer-batch", type=int, default=256)
    group.add_argument("--new-tokens", type=int, default=300)
    group.add_argument("--max-length", type=int, default=768)
    group.add_argument(
        "--metric", help="of SmolLM2's answers: bleu, chrf, exact or loss; by the task if absent"
    )


def needs(options: argparse.Namespace) -> Needs:
    """Return what the stages of a large model need."""
    return Needs(
        packages=("transformers", "peft"),
        model=options.llm,
        ungiven=() if options.llm else ("--llm MODEL",),
        files=(("--data", options.data), ("--test", options.test)),
        gigabytes=GIGABYTES,
    )
