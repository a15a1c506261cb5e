"""Tables of the language-model suite."""

from __future__ import annotations

from statistics import fmean
from typing import Any

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]

LABELS = {
    "SVD": "truncated SVD, Frobenius norm",
    "SVD, K-FAC": "truncated SVD, K-FAC norm",
    "LSR": "LSR, K-FAC norm",
    "SVD, bits": "truncated SVD, K-FAC norm, bits shared out",
    "LSR, bits": "LSR, K-FAC norm, bits shared out",
    "SVD, K-FAC, distilled": "truncated SVD, K-FAC norm, distilled",
    "LSR, distilled": "LSR, K-FAC norm, distilled",
}


def by_parameters(results: dict[str, Any]) -> Table:
    """Share of the LoRA's gain in loss, by structure and ratio."""
    return _shares(results, "ratio", ("SVD", "SVD, K-FAC", "LSR"), lambda budget: f"1/{budget:g}", largest_first=True)


def by_bytes(results: dict[str, Any]) -> Table:
    """The same by bytes of the weight file."""
    return _shares(results, "bytes", ("SVD, bits", "LSR, bits"), lambda budget: f"{budget / 1000:g} kB")


def divergences(results: dict[str, Any]) -> Table:
    """Divergence from the LoRA's answers on the task, and on text of another one, by structure and ratio."""
    rows = []
    for structure in ("SVD", "SVD, K-FAC", "LSR"):
        for row in _means(results, "ratio", structure):
            cells = (f"{row['kl']:.3f}", f"{row['agreement']:.3f}", f"{row['other_kl']:.3f}")
            rows.append((LABELS[structure], f"1/{row['budget']:g}", *cells))
    return ("structure", "parameters", "on the task", "same likeliest token", "on other text"), rows


def distilled(results: dict[str, Any]) -> Table:
    """Share of the gain before and after distillation."""
    rows = []
    for structure in ("SVD, K-FAC", "LSR"):
        for row in _means(results, "ratio", f"{structure}, distilled"):
            seeds = ", ".join(map(str, row["seeds"]))
            start = fmean(_of_seed(results, structure, row["budget"], seed) for seed in row["seeds"])
            rows.append((LABELS[structure], f"1/{row['budget']:g}", f"{start:.3f}", _cell(row), seeds))
    return ("structure", "parameters", "compressed", "distilled", "seeds"), rows


def _shares(results: dict[str, Any], kind: str, structures: Any, name: Any, *, largest_first: bool = False) -> Table:
    found = {structure: {row["budget"]: row for row in _means(results, kind, structure)} for structure in structures}
    budgets = sorted({budget for rows in found.values() for budget in rows}, reverse=largest_first)
    body = [
        (LABELS[structure], *(_cell(rows[budget]) if budget in rows else "–" for budget in budgets))
        for structure, rows in found.items()
    ]
    return ("structure", *map(name, budgets)), body


def _means(results: dict[str, Any], kind: str, structure: str) -> list[dict[str, Any]]:
    rows = [row for row in results["means"] if (row["kind"], row["structure"]) == (kind, structure)]
    return sorted(rows, key=lambda row: -float(row["budget"]))


def _of_seed(results: dict[str, Any], structure: str, budget: float, seed: int) -> float:
    key = (structure, "ratio", budget, seed)
    return next(
        float(form["loss_share"])
        for form in results["forms"]
        if (form["structure"], form["kind"], form["budget"], form["seed"]) == key
    )


def _cell(row: dict[str, Any]) -> str:
    half = row["loss_share_half_width"]
    return f"{row['loss_share']:.3f}" + ("" if half is None else f" ± {half:.3f}")
