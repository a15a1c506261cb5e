"""What the record of `benchmarks.language.answer_curve` says: its methods, and one number a curve.

The number is the size at equal answers, as a share of another method's [1]_.

.. [1] G. Bjøntegaard, Calculation of average PSNR differences between RD-curves, VCEG-M33, 2001.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.interpolate import PchipInterpolator

E2E = "E2E"
"""The task of the picture, and the first in the record."""
LSR = "LSR"
SVD = "truncated SVD"
STORED = {"the LoRA in int8": "int8", "the LoRA in int4": "int4"}
"""Storages of the whole LoRA."""

Row = dict[str, Any]


def rows_of_task(record: dict[str, Any], task: str = E2E, seed: int = 0) -> list[Row]:
    """Return the rows of one task and one draw of its texts."""
    return [row for row in record["rows"] if (row["task"], row["seed"]) == (task, seed)]


def mean_size_ratio(rows: Sequence[Row], method: str, reference: str = SVD) -> float:
    """Return the size of a method's versions as a share of a reference's that keep as many answers.

    It is the geometric mean over the answers that both curves reach: the logarithm of the size is
    interpolated in the answers, by a monotone cubic, and integrated.
    """
    curves = [_log_size_by_answers(rows, each) for each in (method, reference)]
    first = max(float(curve.x[0]) for curve in curves)
    last = min(float(curve.x[-1]) for curve in curves)
    if first >= last:
        raise ValueError(f"no count of answers is kept by both {method} and {reference}")
    areas = [float(curve.integrate(first, last)) for curve in curves]
    return float(np.exp((areas[0] - areas[1]) / (last - first)))


def _log_size_by_answers(rows: Sequence[Row], method: str) -> PchipInterpolator:
    """Interpolate the logarithm of the smallest size that keeps so many answers."""
    points = sorted((row["bytes"], row["n_matching"]) for row in rows if row["method"] == method)
    rising = points[:1]
    for size, n_matching in points[1:]:
        if n_matching > rising[-1][1]:
            rising.append((size, n_matching))
    if len(rising) < 2:
        raise ValueError(f"of {method} one point is no curve")
    sizes, answers = np.array(rising, dtype=float).T
    return PchipInterpolator(answers, np.log(sizes))
