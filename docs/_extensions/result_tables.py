"""Tables of benchmarks/results for pages: the site shows the figures that are in the repository, whatever they are."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def gauge(results: dict[str, Any]) -> Table:
    """Median error over the layers of each adapter by three routes, at its own rank with the same parameters."""
    head = ("adapter", "layers", "rank", "side by side, as found", "side by side, singular gauge", "jointly")
    rows = []
    for name, adapter in results["adapters"].items():
        if "own_rank" not in adapter:
            continue
        layers = adapter["own_rank"]["layers"]
        errors = (f"{median(layer[route] for layer in layers):.3f}" for route in ("given_gauge", "svd_gauge", "joint"))
        rows.append((name, str(len(layers)), str(layers[0]["rank"]), *errors))
    return head, rows


def rounding(results: dict[str, Any]) -> Table:
    """Largest relative error that storing adds to the joint solution, over all layers of all adapters."""
    kinds = ("float16", "bfloat16", "int8", "int4")
    layers = [x for a in results["adapters"].values() if "own_rank" in a for x in a["own_rank"]["layers"]]
    worst = (f"{max(layer[f'extra_{kind}'] for layer in layers):.1g}" for kind in kinds)
    return ("", *kinds), [("added to the error, at most", *worst)]


def function(results: dict[str, Any]) -> Table:
    """Share of the demo adapter's held-out gain that is kept, by structure and size."""
    names = {
        "svd-frobenius": "truncated SVD, Frobenius norm",
        "svd-kfac": "truncated SVD, K-FAC norm",
        "lsr-kfac": "LSR, K-FAC norm",
    }
    ratios = sorted({row["ratio"] for row in results["rows"] if "ratio" in row}, reverse=True)
    kept = {(row["method"], row.get("ratio")): (row["share"], row["accuracy"]) for row in results["rows"]}
    head = ("share kept (accuracy)", *(f"1/{ratio:.0f}" for ratio in ratios))
    cells = {m: [f"{kept[m, r][0]:.2f} ({100 * kept[m, r][1]:.1f} %)" for r in ratios] for m in names}
    return head, [(name, *cells[method]) for method, name in names.items()]


def three_seeds(results: dict[str, Any]) -> Table:
    """The same for three adapters of the functional benchmark, mean over the seeds."""
    rows = [row for row in results["records"] if "budget" in row]
    budgets = sorted({row["budget"] for row in rows})
    head = ("parameters per matrix (LoRA 6,144)", *(str(budget) for budget in budgets))
    table = []
    for method in dict.fromkeys(row["method"] for row in rows):
        shares = ([row["share"] for row in rows if (row["method"], row["budget"]) == (method, b)] for b in budgets)
        table.append((method, *(f"{sum(each) / len(each):.2f}" for each in shares)))
    return head, table


TABLES = {
    "gauge": ("compression_frobenius.json", gauge),
    "rounding": ("compression_frobenius.json", rounding),
    "function": ("demo_function.json", function),
    "three-seeds": ("functional.json", three_seeds),
}
"""Name on a page: file of results, and what makes a table of it."""


def table(name: str) -> Table:
    file, make = TABLES[name]
    return make(json.loads((RESULTS / file).read_text(encoding="utf-8")))
