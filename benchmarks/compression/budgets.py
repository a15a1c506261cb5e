"""Frobenius error of compressed adapters at equal parameters and bytes: ours and what people use.

    python -m benchmarks.compression.budgets ADAPTER [ADAPTER ...] [--out FILE]

Budgets are "so many times fewer bytes than the LoRA in float16"; an arm in float16 then has as many
times fewer parameters. All layers share one budget. Errors are in float64, on the numbers as
stored; bytes are those of the factors, without a file's header. Arms that store the LoRA in
integers have one size, which is made a budget for the others. Adapters that the file of results
holds already are measured again only with ``--again``. Needs peft, lycoris-lora and bitsandbytes
for some arms, and says which it left out.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import record as records
from benchmarks.compression.arms import Outcome, arms
from benchmarks.compression.frobenius import usable
from benchmarks.lab.structures.fit import Fit
from benchmarks.record import RESULTS
from lsrdecomp.errors import BudgetError
from lsrdecomp.lora.search.candidates import Candidate, DropCandidate, LsrCandidate
from lsrdecomp.lora.search.layers import Layer
from lsrdecomp.lora.search.plan import Budget, Search
from lsrdecomp.lora.search.search import fit_budget, search_layers

TIMES = (2, 4, 8, 16, 32, 48)
STORAGES = ("float16", "int8", "int4")
PACKAGES = ("lsrdecomp", "numpy", "torch", "peft", "lycoris-lora", "bitsandbytes")
Row = dict[str, Any]


def ours(layers: Sequence[Layer], budgets: dict[str, float], search: Search) -> list[Row]:
    """Return what `compress` chooses at each budget, also from a part of its candidates."""
    kronecker = (LsrCandidate, DropCandidate)
    arms: dict[str, tuple[str | None, tuple[type[Candidate], ...]]] = {
        "ours, float16": ("float16", (Candidate,)),
        "ours, bits chosen": (None, (Candidate,)),
        "ours, Kronecker only, float16": ("float16", kronecker),
        "ours, Kronecker only, bits chosen": (None, kronecker),
    }
    searched = search_layers(
        layers, [Budget(bytes=max(budgets.values()))], search=search, storages=STORAGES
    )
    rows = []
    for arm, (storage, structures) in arms.items():

        def allowed(
            candidate: Candidate, storage: Any = storage, structures: Any = structures
        ) -> bool:
            return storage in (None, candidate.storage) and isinstance(candidate, structures)

        for budget, most in budgets.items():
            try:
                fit = Fit.of(layers, fit_budget(searched, Budget(bytes=most, allowed=allowed)))
            except BudgetError:
                continue
            rows.append(row_of_fit(arm, budget, fit))
            if fit.low_rank_error is not None and "Kronecker" not in arm:
                rows.append(
                    {
                        "arm": arm.replace("ours", "low rank"),
                        "budget": budget,
                        "error": fit.low_rank_error,
                    }
                )
    return rows


def row_of_fit(arm: str, budget: str, fit: Fit) -> Row:
    structures = Counter(fitted.candidate.structure for fitted in fit.layers)
    stored = Counter(
        fitted.candidate.storage for fitted in fit.layers if fitted.materialized.stored is not None
    )
    return {
        "arm": arm,
        "budget": budget,
        "parameters": fit.parameters,
        "bytes": fit.bytes,
        "error": fit.relative_error,
        "median": statistics.median(fitted.relative_error for fitted in fit.layers),
        "structures": dict(structures),
        "storages": dict(stored),
    }


def row_of_outcome(arm: str, budget: str, layers: Sequence[Layer], outcome: Outcome) -> Row:
    lost = [layer.squared_error(form) for layer, form in zip(layers, outcome.forms, strict=True)]
    return {
        "arm": arm,
        "budget": budget,
        "parameters": outcome.parameters,
        "bytes": outcome.bytes,
        "error": math.sqrt(math.fsum(lost) / math.fsum(layer.squared_norm for layer in layers)),
        "median": statistics.median(
            math.sqrt(one / layer.squared_norm) for one, layer in zip(lost, layers, strict=True)
        ),
        "note": outcome.note,
    }


def measured(layers: Sequence[Layer], search: Search) -> Row:
    """All arms at all budgets for one adapter."""
    parameters = sum(layer.parameters for layer in layers)
    budgets: dict[str, float] = {f"1/{times}": 2 * parameters / times for times in TIMES}
    peers, missing = arms(layers)
    integers = {name: arm for name, arm in peers.items() if name.startswith("LoRA ")}
    rows = []
    for name, arm in integers.items():
        if (outcome := arm(layers, math.inf)) is not None:
            rows.append(row_of_outcome(name, name, layers, outcome))
            budgets[name] = outcome.bytes
    for name, arm in peers.items():
        for budget, most in budgets.items():
            if name not in integers and (outcome := arm(layers, most)) is not None:
                rows.append(row_of_outcome(name, budget, layers, outcome))
    rows += ours(layers, budgets, search)
    ranks = sorted({layer.rank for layer in layers})
    return {
        "layers": len(layers),
        "ranks": ranks,
        "parameters": parameters,
        "missing": missing,
        "rows": rows,
    }


def facts(options: argparse.Namespace, search: Search) -> Row:
    settings = {"orders": search.orders, "inner_rank": search.inner_rank, "rounds": search.rounds}
    return {"layers": options.layers, "search": settings}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("adapters", nargs="+", type=Path, help="adapter directories or files")
    parser.add_argument("--out", type=Path, default=RESULTS / "compression.json")
    parser.add_argument("--alpha", type=float, default=16.0, help="for formats that do not hold it")
    parser.add_argument("--layers", type=int, default=24, help="most layers of an adapter")
    parser.add_argument("--again", action="store_true", help="measure also what FILE holds")
    options = parser.parse_args(arguments)
    search = Search()
    held = {} if options.again else records.load(options.out)
    record: Row = {"adapters": {}} | held | {"facts": facts(options, search)}
    packages = [name for name in PACKAGES if find_spec(name)]
    for path in options.adapters:
        if path.name in record["adapters"]:
            continue
        begun = time.process_time()
        found = measured(usable(path, options.layers, options.alpha), search)
        said = [path.name, f"{time.process_time() - begun:.0f} s", *found["missing"]]
        print("; ".join(said), file=sys.stderr, flush=True)
        record["adapters"][path.name] = found
        records.save(options.out, record, *packages, seed=None)


if __name__ == "__main__":
    main()
