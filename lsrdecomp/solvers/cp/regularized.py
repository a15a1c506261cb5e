"""Alternating least squares with a penalty on λ: the sweep that every solver for three and more factors is made of."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lsrdecomp.arrays import Array, adjoint, as_double, conjugate, namespace, norm
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.cp.mttkrp import sweep
from lsrdecomp.solvers.cp.terms import CPTerms, unit_columns
from lsrdecomp.solvers.progress import IterationStep, SolveProgress, iterate

if TYPE_CHECKING:
    from collections.abc import Iterator

MEASURED_ROUNDING = 0.42
"""Root-mean-square relative error of rounding the entries of a factor, in units of μ: 0.39 to 0.46
measured."""


def storage_ridge(storage: str, order: int) -> float:
    """α = (0.42·√d·μ)²: the weight of Σλ² that stands for the rounding of d stored factors.

    Rounding moves each unit factor by about 0.42·μ, so the sum of terms by 0.42·√d·μ·‖λ‖. With this
    α the regularized objective ‖M − M̂‖² + α Σλ² *is* the expected square error after rounding, for
    M of norm one.
    """
    return (MEASURED_ROUNDING * math.sqrt(order) * unit_roundoff(storage)) ** 2


def alternate(
    tensor: Array,
    terms: CPTerms,
    ridge: float,
    *,
    sweeps: int,
    rtol: float = 1e-8,
    progress: SolveProgress | None = None,
) -> CPTerms:
    """Minimise ‖T − Σ‖² + α Σλ², one mode at a time, for T of norm about one.

    Parameters
    ----------
    tensor : Array, shape (p_1, …, p_d), norm about one
    terms : CPTerms
        Start.
    ridge : float
        α.
    sweeps : int
        Most sweeps.
    rtol : float
        Stop when a sweep lowers the objective by less than this fraction.
    progress : SolveProgress, optional
        Told the error and γ after each sweep, the error from the expanded form; ends the loop when
        it is exhausted.

    Returns
    -------
    CPTerms
    """
    return iterate(_sweeps(tensor, terms, ridge, rtol), terms, progress, max_steps=sweeps)[0]


def _sweeps(
    tensor: Array, terms: CPTerms, ridge: float, rtol: float
) -> Iterator[IterationStep[CPTerms]]:
    before, total = math.inf, norm(tensor) ** 2
    while True:
        terms, gained = _one_sweep(tensor, terms, ridge)
        square = max(total - gained, 0.0)
        size = float(namespace(tensor).sum(terms.weights**2))
        objective = square + ridge * size
        condition = math.sqrt(size / max(gained, 1e-300))
        yield IterationStep(
            terms,
            math.sqrt(square),
            condition,
            objective,
            converged=objective >= (1.0 - rtol) * before,
        )
        before = objective


def _one_sweep(tensor: Array, terms: CPTerms, ridge: float) -> tuple[CPTerms, float]:
    """New terms, and ‖T‖² − ‖T − Σ‖² for them."""
    xp, d = namespace(tensor), tensor.ndim
    columns = [as_double(c) for c in terms.columns]
    grams = [adjoint(c) @ c for c in columns]
    weights, gained = terms.weights, 0.0

    def update(mode: int, product: Array) -> Array:
        nonlocal weights, gained
        # ALS 1: G, the entrywise product of the Gram matrices of all other modes.
        others: Array = math.prod(gram for m, gram in enumerate(grams) if m != mode)
        # ALS 2: the block's minimum, A (G + αI) = T_(i) (⊙ F), a small solve in double precision.
        wide = as_double(product)
        solved = _solve(others, wide, ridge)
        # ALS 3: unit columns, so that the weights carry the size; a term that vanished keeps its
        # direction.
        unit, weights = unit_columns(solved)
        unit = xp.where(weights > 0, unit, columns[mode])
        columns[mode] = unit
        grams[mode] = adjoint(unit) @ unit
        # ALS 4: after the last mode, ‖T‖² − ‖T − Σ‖² from products that are at hand anyway.
        if mode == d - 1:
            scaled = xp.astype(weights, unit.dtype)
            total = scaled @ (others * grams[mode]) @ scaled
            cross = xp.sum(conjugate(wide) * solved)
            gained = 2.0 * complex(cross).real - complex(total).real
        return xp.astype(unit, product.dtype)

    sweep(tensor, terms.columns, update)
    return CPTerms(weights, tuple(xp.astype(c, tensor.dtype) for c in columns)), gained


def _solve(gram: Array, product: Array, ridge: float) -> Array:
    """product · (conj(G) + αI)⁻¹ for a Gram matrix with unit diagonal, directions below roundoff left out."""
    xp = namespace(gram)
    values, vectors = xp.linalg.eigh(conjugate(gram))
    floor = 4.0 * gram.shape[0] * unit_roundoff("float64")
    safe = xp.where(values > floor, values, xp.ones_like(values))
    inverse = xp.where(values > floor, 1.0 / (safe + ridge), xp.zeros_like(values))
    return ((product @ vectors) * xp.astype(inverse, product.dtype)) @ adjoint(vectors)
