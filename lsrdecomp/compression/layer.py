"""One layer: the structure that meets the plan with the fewest parameters, its error measured as stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lsrdecomp.compression.plan import CompressionPlan
from lsrdecomp.errors import ShapeError
from lsrdecomp.product import SeparatedProduct, low_rank_product
from lsrdecomp.shape import ProductShape, balanced_split
from lsrdecomp.solvers.factorwise import FactorwiseSVD
from lsrdecomp.solvers.svd import tail_norms
from lsrdecomp.targets import LowRank

BISECTIONS = 12
"""Halvings of sixteen decades; the counts of terms are integers, so no more are needed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to store one layer."""

    structure: str  # "LSR" or "low rank"
    product: SeparatedProduct  # as stored
    error: float  # ‖ΔW − ΔŴ‖_F, measured as stored

    @property
    def parameters(self) -> int:
        return self.product.parameters


def compress_layer(pair: LowRank, plan: CompressionPlan) -> tuple[Candidate, bool]:
    """The best candidate for a layer, and whether it meets the plan.

    Parameters
    ----------
    pair : LowRank, (m, n)
        ΔW with its scale folded in.
    plan : CompressionPlan

    Returns
    -------
    Candidate, bool
        With a tolerance: the one with the fewest parameters that meets it, or, if none does, the one with the smallest
        error and ``False``. With a separation rank: an LSR product of that many terms, fewer where the shape cannot
        need so many, and ``True``.
    """
    if plan.rtol is None:
        shape = ProductShape.balanced(pair.shape, plan.inner_shape or balanced_split(effective_rank(pair)))
        return _stored("LSR", FactorwiseSVD(pair, shape).truncate(plan.separation_rank or 1), pair, plan.storage), True
    allowed = plan.rtol * pair.norm
    candidates = [_lsr_within(pair, shape, allowed, plan.storage) for shape in _shapes(pair, plan)]
    if plan.low_rank:
        candidates.append(_low_rank_within(pair, allowed, plan.storage))
    good = [candidate for candidate in candidates if candidate.error <= allowed]
    if good:
        return min(good, key=lambda candidate: candidate.parameters), True
    return min(candidates, key=lambda candidate: candidate.error), False


def effective_rank(pair: LowRank) -> int:
    """The inner rank that the layer can use: r, or the smaller side of the matrix where r exceeds it."""
    return min(pair.rank, *pair.shape)


def _shapes(pair: LowRank, plan: CompressionPlan) -> list[ProductShape]:
    if plan.inner_shape is not None:
        return [ProductShape.balanced(pair.shape, plan.inner_shape)]
    tails = tail_norms(pair.svd[1])
    least = next(k for k, tail in enumerate(tails) if tail <= (plan.rtol or 0.0) * pair.norm)
    ranks = range(max(least, 1), effective_rank(pair) + 1)
    return [ProductShape.balanced(pair.shape, balanced_split(rank)) for rank in ranks]


def _lsr_within(pair: LowRank, shape: ProductShape, allowed: float, storage: str) -> Candidate:
    """Cut both sides at the same share of their spectra, as deep as the measured error allows."""
    sides = FactorwiseSVD(pair, shape)
    best = _stored("LSR", sides.truncate(*sides.max_ranks), pair, storage)
    if best.error > allowed:
        return best
    low, high = -16.0, 0.0  # decimal logarithm of the share of each side's norm that is cut
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        trial = _stored("LSR", sides.truncate(*sides.ranks_for(10.0**middle)), pair, storage)
        if trial.error <= allowed:
            low, best = middle, min(best, trial, key=lambda candidate: candidate.parameters)
        else:
            high = middle
    return best


def _low_rank_within(pair: LowRank, allowed: float, storage: str) -> Candidate:
    """Truncated SVD at the smallest rank whose stored error is allowed; at full rank if none is."""
    tails = tail_norms(pair.svd[1])
    full = len(tails) - 1
    first = next((k for k, tail in enumerate(tails) if tail <= allowed), full)
    best: Candidate | None = None
    for rank in range(max(first, 1), full + 1):
        sides = pair.balanced(rank)
        best = _stored("low rank", low_rank_product(sides.left, sides.right), pair, storage)
        if best.error <= allowed:
            break
    if best is None:
        raise ShapeError(f"a {pair.shape[0]}×{pair.shape[1]} layer has no rank to keep")
    return best


def _stored(structure: str, product: SeparatedProduct, pair: LowRank, storage: str) -> Candidate:
    stored = product.round_to(storage)
    return Candidate(structure, stored, pair.residual_norm(stored))


def stored_factors(product: SeparatedProduct) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Factors with the weights folded in, at least one term a side: a zero matrix is written as one zero term."""
    sides = []
    for side, folded in zip((product.left, product.right), product.folded(), strict=True):
        if side.separation_rank == 0:
            folded = tuple(_zero_term(factor) for factor in folded)
        sides.append(folded)
    return sides[0], sides[1]


def _zero_term(factor: Any) -> Any:
    return np.zeros((1, *factor.shape[1:]))
