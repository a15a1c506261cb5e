"""Alternating least squares with a penalty on λ, the sweep for three and more factors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lsrdecomp.arrays import Array, adjoint, as_double, conjugate, namespace, norm
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.cp.mttkrp import sweep
from lsrdecomp.solvers.cp.terms import CPTerms, unit_columns
from lsrdecomp.solvers.iteration import IterationStep, SolveProgress, iterate

if TYPE_CHECKING:
    from collections.abc import Iterator

MEASURED_ROUNDING = 0.42
"""Root-mean-square relative error of rounding the entries of a factor, in units of μ: 0.39 to 0.46
measured."""


def storage_ridge(storage: str, order: int) -> float:
    """Return α = (0.42·√d·μ)²: the weight of Σλ² that stands for the rounding of d stored factors.

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
    rtol: float,
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
        Maximum sweeps.
    rtol : float
        Stop when a sweep lowers the objective by less than this fraction.
    progress : SolveProgress, optional
        Told the error and γ after each sweep, the error from the expanded form; ends the loop when
        it is exhausted.

    Returns
    -------
    CPTerms
    """
    steps = _sweeps(tensor, terms, ridge, rtol)
    swept, _ = iterate(steps, terms, progress, max_steps=sweeps)
    return swept


def _sweeps(
    tensor: Array, terms: CPTerms, ridge: float, rtol: float
) -> Iterator[IterationStep[CPTerms]]:
    previous_objective = math.inf
    squared_norm = norm(tensor) ** 2
    while True:
        terms, captured = _one_sweep(tensor, terms, ridge)
        squared_error = max(squared_norm - captured, 0.0)
        squared_weights = float(namespace(tensor).sum(terms.weights**2))
        objective = squared_error + ridge * squared_weights
        yield IterationStep(
            state=terms,
            relative_error=math.sqrt(squared_error),
            condition=math.sqrt(squared_weights / max(captured, 1e-300)),
            objective=objective,
            converged=objective >= (1.0 - rtol) * previous_objective,
        )
        previous_objective = objective


def _one_sweep(tensor: Array, terms: CPTerms, ridge: float) -> tuple[CPTerms, float]:
    """Return new terms, and ‖T‖² − ‖T − Σ‖² for them."""
    xp = namespace(tensor)
    columns = [as_double(column) for column in terms.columns]
    grams = [adjoint(column) @ column for column in columns]
    weights = terms.weights
    captured = 0.0

    def update(mode: int, product: Array) -> Array:
        nonlocal weights, captured
        # Sweep 1: G, the entrywise product of the Gram matrices of all other modes.
        others: Array = math.prod(gram for m, gram in enumerate(grams) if m != mode)
        # Sweep 2: the block's minimum, A (G + αI) = T_(i) (⊙ F), a small solve in double precision.
        product_in_double = as_double(product)
        solved = _solve(others, product_in_double, ridge)
        # Sweep 3: unit columns, so that the weights carry the size; a term that vanished keeps its
        # direction.
        unit, weights = unit_columns(solved)
        unit = xp.where(weights > 0, unit, columns[mode])
        columns[mode] = unit
        grams[mode] = adjoint(unit) @ unit
        # Sweep 4: after the last mode, ‖T‖² − ‖T − Σ‖² from products that are at hand anyway.
        if mode == tensor.ndim - 1:
            scales = xp.astype(weights, unit.dtype)
            squared_sum = scales @ (others * grams[mode]) @ scales
            overlap = xp.sum(conjugate(product_in_double) * solved)
            captured = 2.0 * complex(overlap).real - complex(squared_sum).real
        return xp.astype(unit, product.dtype)

    sweep(tensor, terms.columns, update)
    new_columns = tuple(xp.astype(column, tensor.dtype) for column in columns)
    return CPTerms(weights, new_columns), captured


def _solve(gram: Array, product: Array, ridge: float) -> Array:
    """Return product · (conj(G) + αI)⁻¹ for a Gram matrix G with unit diagonal.

    Directions below roundoff are left out.
    """
    xp = namespace(gram)
    values, vectors = xp.linalg.eigh(conjugate(gram))
    floor = 4.0 * gram.shape[0] * unit_roundoff("float64")
    is_above = values > floor
    divisor = xp.where(is_above, values, xp.ones_like(values)) + ridge
    inverse = xp.where(is_above, 1.0 / divisor, xp.zeros_like(values))
    return ((product @ vectors) * xp.astype(inverse, product.dtype)) @ adjoint(vectors)
