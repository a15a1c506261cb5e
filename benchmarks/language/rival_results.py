"""What the record of rivals says: shares kept at the best rates, and by how much LSR leads."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from lsrdecomp.plots.pictures import METHOD_NAMES

NAMES = {
    **dict(
        zip(
            ("LSR", "SVD", "Uni-LoRA", "Fisher core", "LoRAQuant", "XS", "Rank one"),
            METHOD_NAMES,
            strict=True,
        )
    ),
    "FourierFT": "FourierFT",
    "VB-LoRA": "VB-LoRA",
    "VeRA": "VeRA",
    "TinyLoRA": "TinyLoRA",
}
"""Methods as pages name them, in the order of their tables."""
ANSWERS_TASK = "E2E, answers"
"""The task whose rows count whole answers: another LoRA of E2E, that of `answer_curve`."""
GEMMA = "gemma-3-270m-q4_k_m.gguf"
BASES = {GEMMA: "Gemma-3-270M"}
"""Other bases than SmolLM2, as pages name them."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Estimate:
    """A figure and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        """Return both with three decimals, as ``0.951 ± 0.005``; more of small errors."""
        sign = "−" if self.value < 0.0 else ""
        digits = 3 + (self.error < 0.0005) + (self.error < 0.00005)
        return f"{sign}{abs(self.value):.{digits}f} ± {self.error:.{digits}f}"


class RivalResults:
    """One task of a record of rivals.

    Parameters
    ----------
    record : dict
        What `benchmarks.language.rivals` wrote.
    task : str
    base : str
        The base of its LoRA.
    """

    def __init__(self, record: dict[str, Any], task: str, base: str = "smollm2") -> None:
        key = {"task": task, "base": base}
        (self.about,) = (each for each in record["tasks"] if key.items() <= each.items())
        self.rows: list[Row] = [row for row in record["rows"] if key.items() <= row.items()]
        self.missing = [
            (each["method"], each["budget"])
            for each in record.get("does_not_fit", [])
            if key.items() <= each.items()
        ]

    @property
    def name(self) -> str:
        """The task, with the base where it is not SmolLM2."""
        task: str = self.about["task"]
        base = BASES.get(self.about["base"])
        return task if base is None else f"{task}, {base}"

    @property
    def methods(self) -> list[str]:
        """The methods that have rows, in the order of `NAMES`."""
        found = {row["method"] for row in self.rows}
        return [method for method in NAMES if method in found]

    @property
    def budgets(self) -> list[int]:
        """The sizes that have rows, in bytes."""
        return sorted({row["budget"] for row in self.rows})

    def untrained(self, method: str, budget: int) -> list[Row]:
        """Return the row of an adapter as it was compressed, if the method has one."""
        return self._find(method, budget, is_trained=False)

    def rates(self, method: str, budget: int) -> dict[float, float]:
        """Return the share kept at each rate, with the seed that saw all of them."""
        rows = self._find(method, budget)
        first = [row for row in rows if row["seed"] == rows[0]["seed"]]
        return {row["rate"]: row["kept"] for row in sorted(first, key=lambda row: row["rate"])}

    def trained(self, method: str, budget: int) -> list[Row]:
        """Return a row for each seed, at the rate that was best with the first one."""
        rates = self.rates(method, budget) if self._find(method, budget) else {}
        if not rates:
            return []
        best = max(rates, key=lambda rate: rates[rate])
        return [row for row in self._find(method, budget) if row["rate"] == best]

    def share(self, method: str, budget: int) -> Estimate:
        """Return the share that is kept, the mean over seeds."""
        rows = self.trained(method, budget)
        return Estimate(fmean(row["kept"] for row in rows), fmean(row["error"] for row in rows))

    def lead(self, method: str, budget: int) -> Estimate:
        """Return by how much more LSR keeps of the same held-out texts, over the seeds of both.

        The standard error is the jackknife's over texts, of the losses averaged over seeds.
        """
        theirs = self.trained(method, budget)
        seeds = {row["seed"] for row in theirs}
        ours = [row for row in self.trained("LSR", budget) if row["seed"] in seeds]
        seeds = {row["seed"] for row in ours}
        theirs = [row for row in theirs if row["seed"] in seeds]
        our_loss = np.mean([row["lost"] for row in ours], axis=0)
        their_loss = np.mean([row["lost"] for row in theirs], axis=0)
        gain = their_loss - our_loss
        effects = np.asarray(self.about["effects"])
        without_one = (gain.sum() - gain) / (effects.sum() - effects)
        error = np.sqrt((len(gain) - 1) * np.var(without_one))
        return Estimate(float(gain.sum() / effects.sum()), float(error))

    def _find(self, method: str, budget: int, *, is_trained: bool = True) -> list[Row]:
        return [
            row
            for row in self.rows
            if (row["method"], row["budget"]) == (method, budget)
            and (row["steps"] > 0) == is_trained
        ]
