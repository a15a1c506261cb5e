"""Which way of applying an adapter is fastest for given sizes, from crossovers of benchmarks/adapters/speed.py."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal


@dataclass(frozen=True, slots=True)
class Crossovers:
    """Measured limits on one kind of device; a limit of None means that the mode never won there.

    ``blas_from_tokens``: least number of tokens from which one node beats composed operations, by up to a quarter.
    ``masked_to_rank``: largest summed inner rank at which many adapters run best as one masked wide pair.
    """

    blas_from_tokens: int | None
    masked_to_rank: int
    source: str


@cache
def crossovers(device: str) -> Crossovers:
    """The stored crossovers of a kind of device; those of the CPU for one never measured."""
    stored = json.loads(files(__package__).joinpath("crossovers.json").read_text("utf-8"))
    return Crossovers(**stored.get(device, stored["cpu"]))


def choose(tokens: int, device: str = "cpu", limits: Crossovers | None = None) -> Literal["plain", "blas"]:
    """The faster mode of `linear.adapted_linear` for so many rows, by the stored or the given crossovers."""
    least = (limits or crossovers(device)).blas_from_tokens
    return "plain" if least is None or tokens < least else "blas"


def kronecker_pays(terms: int, rows: Sequence[int], columns: Sequence[int]) -> bool:
    """Whether a sum of Kronecker products costs fewer operations applied than its formed matrix does.

    Parameters
    ----------
    terms : int
        Number of terms.
    rows, columns : sequence of int
        (m_1, …, m_d) and (n_1, …, n_d). As `stacked.apply` does: two factors in the cheaper order, more from the first.
    """
    if len(rows) == 2:
        (a, c), (b, d) = rows, columns
        applied = min(b * c * d + a * b * c, a * b * d + a * c * d)
    else:
        sizes, applied = list(columns), 0
        for index, height in enumerate(rows):
            applied += math.prod(sizes) * height
            sizes[index] = height
    return terms * applied < math.prod(rows) * math.prod(columns)
