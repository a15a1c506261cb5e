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


TABLES = {"gauge": ("compression_frobenius.json", gauge), "rounding": ("compression_frobenius.json", rounding)}
"""Name on a page: file of results, and what makes a table of it."""


def table(name: str) -> Table:
    file, make = TABLES[name]
    return make(json.loads((RESULTS / file).read_text(encoding="utf-8")))
