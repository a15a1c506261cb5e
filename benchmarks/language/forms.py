"""The forms of a LoRA that the language-model suite compares, each a directory that PEFT opens.

Structures: LSR; truncated SVD in the Frobenius and in the Fisher norm; both of the latter norm in a
second pass, whose statistics were measured with the form of the first one active; SVD in the Fisher
norm with bits shared out among its vectors; the LoRA itself rounded to nearest in 8 and 4 bits, one
scale a vector. One search serves all budgets of a structure. A form's bytes are those of its weight
file, and of its directory; of a rounded LoRA, which nothing packs, they are counted: bits a number
and two bytes a scale.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from lsrdecomp.checkpoints import open_checkpoint
from lsrdecomp.checkpoints.statistics import read_statistics
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression import CompressionPlan
from lsrdecomp.compression.compress import search_adapter
from lsrdecomp.compression.settings import Search
from lsrdecomp.errors import BudgetError

FORM = "form.json"


@dataclass(frozen=True)
class Structure:
    """One way to write a LoRA in fewer numbers."""

    functional: bool = True  # errors in the Fisher norm
    low_rank: bool = False  # nothing but truncated SVD
    coded: bool = False  # numbers in few bits

    def search(self) -> Search:
        return Search(orders=()) if self.low_rank else Search()


STRUCTURES = {
    "LSR": Structure(),
    "LSR, bits": Structure(coded=True),
    "SVD": Structure(functional=False, low_rank=True),
    "SVD, K-FAC": Structure(low_rank=True),
    "SVD, bits": Structure(low_rank=True, coded=True),
    "LSR, second pass": Structure(),
    "SVD, K-FAC, second pass": Structure(low_rank=True),
}
ROUNDED = {"LoRA int8": 8, "LoRA int4": 4}


def form_directory(out: Path, structure: str, kind: str, budget: float) -> Path:
    """Of a form: ``kind`` is "ratio" or "bytes"."""
    slug = structure.lower().replace(", ", "-").replace(" ", "-")
    return out / f"{slug}-{kind}-{budget:g}"


def make_forms(
    lora: Path, statistics: Path, out: Path, structure: str, kind: str, budgets: list[float]
) -> list[str]:
    """Write the forms of one structure at budgets of one kind, and say what was not possible.

    Costs one search; forms that are there are left as they are. Runs in a process of its own.
    """
    chosen = STRUCTURES[structure]
    checkpoint = open_checkpoint(lora)
    storage = "auto" if chosen.coded else "float32"
    plans = {}
    for budget in budgets:
        if not (form_directory(out, structure, kind, budget) / FORM).exists():
            goal: dict[str, Any] = {kind: int(budget) if kind == "bytes" else budget}
            plans[budget] = CompressionPlan(**goal, storage=storage)
    if not plans:
        return []
    begin, complaints = time.process_time(), []
    norm = read_statistics(statistics) if chosen.functional else None
    searched = search_adapter(
        checkpoint, list(plans.values()), statistics=norm, search=chosen.search()
    )
    prepared = time.process_time() - begin
    for budget, plan in plans.items():
        target, begin = form_directory(out, structure, kind, budget), time.process_time()
        try:
            result = searched.compress(plan)
            if target.exists():
                shutil.rmtree(target)
            result.save(target)
        except BudgetError as error:
            complaints.append(f"{target.name}: {error}")
            continue
        totals = result.totals
        facts = {
            "parameters": totals.parameters,
            "number_bytes": totals.bytes,
            "relative_error": totals.relative_error,
            "functional_error": totals.functional_error,
            "cpu_seconds": round(time.process_time() - begin, 1),
            "search_cpu_seconds": round(prepared, 1),
        }
        write_form(target, structure, kind, budget, facts)
    return complaints


def round_lora(lora: Path, out: Path, structure: str) -> list[str]:
    """Round the LoRA to nearest in a few bits, with one scale for each vector of each factor."""
    bits, target = ROUNDED[structure], form_directory(out, structure, "bytes", 0)
    if (target / FORM).exists():
        return []
    tensors, count, scales = load_file(lora / WEIGHTS), 0, 0
    most = 2 ** (bits - 1) - 1
    rounded = {}
    for name, tensor in tensors.items():
        axis = 1 if "lora_A" in name else 0  # a row of A, a column of B
        scale = np.maximum(
            np.abs(tensor).max(axis, keepdims=True) / most, np.finfo(np.float32).tiny
        )
        scale = scale.astype(np.float16).astype(np.float32)
        scale = np.where(scale > 0, scale, np.float32(1.0))
        rounded[name] = (np.clip(np.rint(tensor / scale), -most, most) * scale).astype(np.float32)
        count, scales = count + tensor.size, scales + scale.size
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    save_file(rounded, target / WEIGHTS, metadata={"format": "pt"})
    shutil.copy(lora / "adapter_config.json", target)
    size = math.ceil(count * bits / 8) + 2 * scales
    write_form(
        target, structure, "bytes", 0, {"parameters": count, "number_bytes": size, "counted": True}
    )
    return []


def write_form(
    target: Path, structure: str, kind: str, budget: float, facts: dict[str, Any]
) -> None:
    """What a form is, beside it; its presence says that the form is whole."""
    sizes = [path.stat().st_size for path in target.rglob("*") if path.is_file()]
    facts = {"structure": structure, "kind": kind, "budget": budget, **facts}
    facts |= {"file_bytes": (target / WEIGHTS).stat().st_size, "directory_bytes": sum(sizes)}
    (target / FORM).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
