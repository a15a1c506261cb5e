"""Does the optimality gap hold that `lsr.decompose(rank=)` states?

    python -m benchmarks.solvers.stated_gap [--draws 5]

Matrices are made from drawn singular vectors and known singular values, so the least error is
known. They have n × n ⊗ n × n entries, n from 13 to 22. For each kind of spectrum the record has
how far errors were above the least one, and the excess over what was stated, both at most. What
lies below ten roundoffs of the norm is rounding and counts as nothing. One thread, a minute or two.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lsrdecomp as lsr
from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp.kronecker.rearrange import inverse_rearrange

Doubles = NDArray[np.float64]

SIDES = (13, 15, 17, 19, 22)
RANKS = (1, 3, 8, 20)
SPECTRA: dict[str, Callable[[Doubles], Doubles]] = {
    "1/k": lambda k: 1.0 / k,
    "1/√k": lambda k: k**-0.5,
    "1/k²": lambda k: k**-2.0,
    "0.3^k": lambda k: 0.3**k,
    "0.8^k": lambda k: 0.8**k,
    "exp(−k/25)": lambda k: np.exp(-k / 25.0),
    "exp(−√k)": lambda k: np.exp(-np.sqrt(k)),
    "flat": lambda k: np.ones_like(k),
    "a cliff after 12": lambda k: np.where(k <= 12, 1.0, 1e-2),
    "a cliff after 3, then 1/√k": lambda k: np.where(k <= 3, 10.0, k**-0.5),
    "steps of 12 equal values": lambda k: 0.5 ** np.floor((k - 1) / 12),
    "two clusters": lambda k: np.where(k <= 20, 1.0 + 1e-3 / k, 0.5 + 1e-3 / k),
    "nearly linear": lambda k: 1.0 - 0.9 * k / len(k),
}
"""Singular values by their number k, from 1 on."""
Row = dict[str, Any]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=5, help="matrices of each size and spectrum")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "stated_gap.json")
    arguments = parser.parse_args()
    generator = np.random.default_rng(arguments.seed)
    rows = []
    for name, spectrum in SPECTRA.items():
        decompositions = [
            measured(generator, spectrum, side, rank)
            for side in SIDES
            for rank in RANKS
            for _ in range(arguments.draws)
        ]
        rows.append({"spectrum": name, **summary(decompositions)})
        print(rows[-1], flush=True)
    record = {"sides": SIDES, "ranks": RANKS, "rows": rows}
    records.save(arguments.out, record, seed=arguments.seed)


def measured(
    generator: np.random.Generator,
    spectrum: Callable[[Doubles], Doubles],
    side: int,
    rank: int,
) -> Row:
    """Decompose one drawn matrix; return how far its error is above the least, and what is said."""
    # 1. A matrix whose rearrangement has these singular values.
    shape = lsr.KroneckerShape(((side, side), (side, side)))
    sigma = spectrum(np.arange(1.0, side**2 + 1.0))
    u, v = (np.linalg.qr(generator.standard_normal((side**2, side**2)))[0] for _ in range(2))
    matrix = inverse_rearrange((u * sigma) @ v.T, shape)
    # 2. The error that was reached, beside the least one.
    found = lsr.decompose(matrix, shape, rank=rank)
    error = float(np.linalg.norm(matrix - found.to_matrix()))
    least = float(np.linalg.norm(sigma[rank:]))
    rounding = 10.0 * lsr.unit_roundoff("float64") * float(np.linalg.norm(sigma))
    excess = max(0.0, error - least - rounding) / max(least, rounding)
    return {"excess": excess, "gap": found.optimality_gap, "kind": str(found.gap_kind.value)}


def summary(decompositions: list[Row]) -> Row:
    """Return the largest excess, and the largest of it over the stated gap."""
    stated = [each for each in decompositions if each["gap"] is not None]
    return {
        "matrices": len(decompositions),
        "kinds": dict(Counter(each["kind"] for each in decompositions)),
        "excess": max(each["excess"] for each in decompositions),
        "over_gap": max((each["excess"] / max(each["gap"], 1e-16) for each in stated), default=0.0),
    }


if __name__ == "__main__":
    main()
