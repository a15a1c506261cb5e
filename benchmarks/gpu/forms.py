"""The forms of a LoRA that the GPU script compares, each a directory that PEFT opens.

Structures: LSR, and truncated SVD in the Frobenius and in the Fisher norm. One search serves all
sizes of a structure. A form's bytes are those of its weight file, and of its directory.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lsrdecomp.errors import BudgetError
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.statistics import read_statistics
from lsrdecomp.lora.files.writing import WEIGHTS
from lsrdecomp.lora.search import CompressionPlan
from lsrdecomp.lora.search.plan import Search
from lsrdecomp.lora.search.searched import search_adapter

FORM = "form.json"


@dataclass(frozen=True)
class Structure:
    """One way to write a LoRA in fewer numbers."""

    search: Search
    in_fisher_norm: bool = True


STRUCTURES = {
    "LSR": Structure(Search()),
    "SVD": Structure(Search(orders=()), in_fisher_norm=False),
    "SVD, K-FAC": Structure(Search(orders=())),
}


def form_directory(out: Path, structure: str, ratio: float) -> Path:
    """Return where a form is: a structure, so many times smaller than the LoRA."""
    slug = structure.lower().replace(", ", "-").replace(" ", "-")
    return out / f"{slug}-ratio-{ratio:g}"


def make_forms(
    lora: Path, statistics: Path, out: Path, structure: str, ratios: Sequence[float]
) -> list[str]:
    """Write the forms of one structure, and return what was not possible.

    Costs one search; forms that are there are left as they are. Runs in a process of its own.
    """
    chosen = STRUCTURES[structure]
    plans: dict[float, CompressionPlan] = {}
    for ratio in ratios:
        if not (form_directory(out, structure, ratio) / FORM).exists():
            plans[ratio] = CompressionPlan(ratio=ratio, storage="float32")
    if not plans:
        return []
    # 1. Search once for all sizes.
    begin = time.process_time()
    searched = search_adapter(
        open_checkpoint(lora),
        list(plans.values()),
        statistics=read_statistics(statistics) if chosen.in_fisher_norm else None,
        search=chosen.search,
    )
    search_seconds = round(time.process_time() - begin, 1)
    # 2. Write each size.
    complaints: list[str] = []
    for ratio, plan in plans.items():
        target = form_directory(out, structure, ratio)
        begin = time.process_time()
        try:
            result = searched.compress(plan)
        except BudgetError as error:
            complaints.append(f"{target.name}: {error}")
            continue
        shutil.rmtree(target, ignore_errors=True)
        result.save(target)
        facts = {
            "structure": structure,
            "kind": "ratio",
            "budget": ratio,
            "parameters": result.totals.parameters,
            "number_bytes": result.totals.bytes,
            "relative_error": result.totals.relative_error,
            "functional_error": result.totals.functional_error,
            "cpu_seconds": round(time.process_time() - begin, 1),
            "search_cpu_seconds": search_seconds,
        }
        _write_facts(target, facts)
    return complaints


def _write_facts(target: Path, facts: dict[str, Any]) -> None:
    """Write what a form is beside it; its presence says that the form is whole."""
    sizes = [path.stat().st_size for path in target.rglob("*") if path.is_file()]
    facts |= {"file_bytes": (target / WEIGHTS).stat().st_size, "directory_bytes": sum(sizes)}
    (target / FORM).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
