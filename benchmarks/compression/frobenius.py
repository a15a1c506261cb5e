"""Frobenius error of LSR products on real adapters, beside truncated SVD and factor-wise routes.

    python -m benchmarks.compression.frobenius ADAPTER [ADAPTER ...] \\
        --out benchmarks/results/compression_frobenius.json

Two questions, for every adapter: what joint least squares gains at the adapter's own rank with
sixteen terms, after thirty sweeps, at its end and where `compress` stops; and how the whole family
compares with truncated SVD at equal parameters, layer by layer. `budgets` spends one budget on all
layers, against what people use.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.lab.structures.direct import direct_sums_of
from benchmarks.lab.structures.fit import lsr_candidates, solve_together
from lsrdecomp.errors import CheckpointError
from lsrdecomp.kronecker.shape import ProductShape, balanced_split
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.search.caches import SpillCache
from lsrdecomp.lora.search.candidates import Candidate, low_rank_candidates, lsr_candidate
from lsrdecomp.lora.search.layers import Layer, layer_pair
from lsrdecomp.lora.search.quantize import stored_product
from lsrdecomp.lora.search.searched import GIVEN_TERMS_SOLVER
from lsrdecomp.lora.search.shapes import shape_grid
from lsrdecomp.solvers.pair.factorwise import FactorwiseSVD
from lsrdecomp.solvers.pair.joint_als import JointALS

TERMS = 16
UNITS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.33, 3.0, 4.0)
"""Parameters in units of one rank of truncated SVD, m + n."""
STORAGES = ("float16", "bfloat16", "int8", "int4")

SHORT = JointALS(sweeps=8, trials=1)
POLISH = JointALS(sweeps=60)
"""Of all shapes, and of the best within each budget."""


def own_rank(layers: Sequence[Layer], long: int) -> list[dict[str, float]]:
    """Compare joint least squares, at each layer's rank and most even shapes, with other routes."""
    records = []
    for group in by_kind(layers, with_rank=True):
        pair = group[0].pair
        shape = ProductShape.balanced(pair.shape, balanced_split(pair.rank))
        short = solve_together(group, shape, (TERMS, TERMS), JointALS(sweeps=30, tolerance=0.0))
        end = solve_together(group, shape, (TERMS, TERMS), JointALS(sweeps=long, tolerance=1e-7))
        given_terms = solve_together(group, shape, (TERMS, TERMS), GIVEN_TERMS_SOLVER)
        for layer, solution, last, stopped in zip(group, short, end, given_terms, strict=True):
            steering = [solution.start_error, *(sweep.relative_error for sweep in solution.sweeps)]
            given, balanced = (
                FactorwiseSVD(gauge).truncations(layer.pair, shape).truncate(TERMS)
                for gauge in ("given", "balanced")
            )
            canonical = solution.product.canonical()
            record = {
                "rank": pair.rank,
                "rows": pair.shape[0],
                "columns": pair.shape[1],
                "given_gauge": layer.pair.residual_norm(given) / layer.pair.norm,
                "svd_gauge": layer.pair.residual_norm(balanced) / layer.pair.norm,
                "joint": solution.relative_error,
                "joint_end": last.relative_error,
                "joint_stopped": stopped.relative_error,
                "largest_rise": float(np.max(np.diff(steering))),
                "condition": canonical.condition,
            }
            for storage in STORAGES:
                stored = stored_product(solution.product, storage)
                error = layer.pair.residual_norm(stored.dequantized()) / layer.pair.norm
                record[f"extra_{storage}"] = error - solution.relative_error
            records.append(record)
    return records


def equal_parameters(layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """Measure each layer alone at each budget.

    By truncated SVD, the whole family, a direct sum, and one direct term (as LoKr).
    """
    records = []
    for group in by_kind(layers):
        m, n = group[0].pair.shape
        rank = max(layer.pair.rank for layer in group)
        units = [unit for unit in UNITS if unit < rank]  # at full rank truncated SVD is exact
        chains = shape_grid((m, n), rank, (2, 3), rank, max(units) * (m + n))
        configurations = [(chain.shape, terms) for chain in chains for terms in chain.terms]
        searched = lsr_candidates(group, configurations, SHORT)
        polished = polish(group, searched, units)
        for layer, found, better in zip(group, searched, polished, strict=True):
            plain = low_rank_candidates(layer)
            direct = direct_sums_of(layer, range(1, 13))
            for unit in units:
                record = {"rows": m, "columns": n, "rank": layer.pair.rank, "units": unit}
                for name, candidates in (
                    ("svd", plain),
                    ("lsr", [*found, *better]),
                    ("best", [*plain, *found, *better]),
                    ("direct", direct),
                    ("one_direct_term", direct[:1]),
                ):
                    record[name] = best_within(layer, candidates, unit * (m + n))
                records.append(record)
    return records


def polish(
    group: Sequence[Layer], searched: list[list[Candidate]], units: Sequence[float]
) -> list[list[Candidate]]:
    """More sweeps for what would be chosen at each budget."""
    unit_size = sum(group[0].pair.shape)
    wanted: dict[Any, set[int]] = {}
    for i, found in enumerate(searched):
        for unit in units:
            allowed = [c for c in found if c.parameters <= unit * unit_size]
            if allowed:
                wanted.setdefault(
                    min(allowed, key=lambda c: c.squared_error).configuration, set()
                ).add(i)
    better: list[list[Candidate]] = [[] for _ in group]
    for (shape, ranks), places in wanted.items():
        chosen = sorted(places)
        for i, solution in zip(
            chosen, solve_together([group[i] for i in chosen], shape, ranks, POLISH), strict=True
        ):
            better[i].append(lsr_candidate(solution, SpillCache()))
    return better


def best_within(layer: Layer, candidates: Sequence[Candidate], budget: float) -> float:
    """Smallest relative error of at most ``budget`` parameters; one if nothing fits."""
    allowed = [c.squared_error for c in candidates if c.parameters <= budget]
    return float(np.sqrt(min([layer.squared_norm, *allowed]) / layer.squared_norm))


def by_kind(layers: Sequence[Layer], with_rank: bool = False) -> list[list[Layer]]:
    groups: dict[Any, list[Layer]] = {}
    for layer in layers:
        groups.setdefault((layer.group_key, layer.pair.rank if with_rank else 0), []).append(layer)
    return list(groups.values())


def summary(records: Sequence[dict[str, float]]) -> dict[str, float]:
    """The figures that decide, over the layers of one adapter."""
    to_given = [r["joint"] / r["given_gauge"] for r in records]
    to_start = [r["joint"] / r["svd_gauge"] for r in records]
    return {
        "rank": records[0]["rank"],
        "median_to_given_gauge": statistics.median(to_given),
        "median_to_svd_gauge": statistics.median(to_start),
        "worst_to_svd_gauge": max(to_start),
        "worst_to_end": max(r["joint"] / r["joint_end"] for r in records) - 1.0,
        "median_stopped_to_end": statistics.median(
            r["joint_stopped"] / r["joint_end"] for r in records
        )
        - 1.0,
        "worst_stopped_to_end": max(r["joint_stopped"] / r["joint_end"] for r in records) - 1.0,
        "largest_rise": max(r["largest_rise"] for r in records),
        "condition": max(r["condition"] for r in records),
        **{f"extra_{storage}": max(r[f"extra_{storage}"] for r in records) for storage in STORAGES},
    }


def staircase(records: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Medians per budget, and the layer where the family does worst against truncated SVD."""
    table = {}
    for unit in sorted({r["units"] for r in records}):
        rows = [r for r in records if r["units"] == unit]
        medians = {
            name: statistics.median(r[name] for r in rows)
            for name in ("svd", "lsr", "best", "direct", "one_direct_term")
        }
        table[str(unit)] = {**medians, "worst_to_svd": max(r["best"] / r["svd"] for r in rows)}
    return table


def usable(path: Path, most: int, alpha: float) -> list[Layer]:
    """Layers of an adapter that are not zero, evenly strided down to ``most``."""
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError:  # relative errors do not depend on the scale
        checkpoint = open_checkpoint(path, alpha=alpha)
    layers = [Layer.of(layer.name, layer_pair(checkpoint, layer)) for layer in checkpoint.layers]
    layers = [layer for layer in layers if layer.pair.norm > 0.0]
    return layers[:: -(-len(layers) // most)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("adapters", nargs="+", type=Path, help="adapter directories or files")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--alpha", type=float, default=16.0, help="for formats that do not hold it")
    parser.add_argument("--layers", type=int, default=24, help="most layers of an adapter")
    parser.add_argument("--long", type=int, default=300, help="sweeps that count as the end")
    parser.add_argument("--parts", default="rank,parameters", help="which questions to ask")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for path in options.adapters:
        layers = usable(path, options.layers, options.alpha)
        found: dict[str, Any] = {"layers": len(layers)}
        if "rank" in options.parts:
            records = own_rank(layers, options.long)
            found["own_rank"] = {"summary": summary(records), "layers": records}
        if "parameters" in options.parts:
            curve = equal_parameters(layers)
            found["equal_parameters"] = {"summary": staircase(curve), "layers": curve}
        results[path.name] = found
        short = {
            key: value.get("summary") if isinstance(value, dict) else value
            for key, value in found.items()
        }
        print(path.name, json.dumps(short, default=float), file=sys.stderr, flush=True)
        facts = {
            "layers": options.layers,
            "long": options.long,
            "terms": TERMS,
        }
        record.save(options.out, {"facts": facts, "adapters": results}, seed=options.seed)


if __name__ == "__main__":
    main()
