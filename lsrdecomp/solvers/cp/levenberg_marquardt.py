"""Levenberg–Marquardt for all factors of a small core at once, to finish alternating sweeps."""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
from scipy.linalg import lapack

from lsrdecomp.solvers.cp.mttkrp import assemble, products
from lsrdecomp.solvers.cp.options import LevenbergMarquardtOptions
from lsrdecomp.solvers.cp.terms import CPTerms
from lsrdecomp.solvers.progress import IterationStep, SolveProgress, iterate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Columns = tuple[np.ndarray, ...]
"""One array (p_i, s) for each mode, the terms' weights shared among them."""


def n_unknowns(terms: CPTerms) -> int:
    """Return the number of entries of all columns."""
    return sum(int(column.shape[0]) for column in terms.columns) * terms.rank


def refine(
    core: np.ndarray,
    terms: CPTerms,
    ridge: float,
    *,
    iterations: int,
    rtol: float = 1e-9,
    goal: float = 0.0,
    progress: SolveProgress | None = None,
    options: LevenbergMarquardtOptions | None = None,
) -> CPTerms:
    """Minimise ‖T − Σ_k t_k‖² + α Σ_k ‖t_k‖² over all factors together [1]_.

    The penalty is itself a sum of squares of the terms t_k. So its Gauss–Newton matrix is that of
    the misfit with only the k = l blocks kept, and both together are the misfit's with 1 + α in
    place of 1 on the diagonal k = l.

    Parameters
    ----------
    core : ndarray, shape (p_1, …, p_d), float64 or complex128, norm one
    terms : CPTerms
        Start, from alternating sweeps; a random start often ends in a poor local minimum.
    ridge : float
        α.
    iterations : int
        Maximum accepted steps.
    rtol : float
        Stop when a step lowers the objective by less than this fraction.
    goal : float
        Stop when the misfit norm is at most this.
    progress : SolveProgress, optional
        Told the misfit norm and γ after each accepted step; ends the loop when it is exhausted.
    options : LevenbergMarquardtOptions, optional

    Returns
    -------
    CPTerms
        Never worse than the start; the start itself where there are more than
        ``options.max_unknowns`` unknowns.

    References
    ----------
    .. [1] A.-H. Phan, P. Tichavský and A. Cichocki, Low complexity damped Gauss–Newton algorithms
       for CANDECOMP/PARAFAC, SIAM J. Matrix Anal. Appl. 34 (2013). doi:10.1137/100808034
    .. [2] M. K. Transtrum, B. B. Machta and J. P. Sethna, Geometry of nonlinear least squares with
       applications to sloppy models and optimization, Phys. Rev. E 83 (2011), sec. VIII.
       doi:10.1103/PhysRevE.83.036701
    """
    options = options or LevenbergMarquardtOptions()
    if terms.rank == 0 or n_unknowns(terms) > options.max_unknowns:
        return terms
    start = terms.balanced()
    steps = _accepted_steps(core, start, ridge, rtol, goal, options)
    columns, _ = iterate(steps, start, progress, max_steps=iterations)
    return CPTerms.of(columns)


def _accepted_steps(
    core: np.ndarray,
    columns: Columns,
    ridge: float,
    rtol: float,
    goal: float,
    options: LevenbergMarquardtOptions,
) -> Iterator[IterationStep[Columns]]:
    terms = int(columns[0].shape[1])
    offsets = np.cumsum([0] + [column.size for column in columns])
    coupling = np.ones((terms, terms)) + ridge * np.eye(terms)
    residual, objective = _objective(core, columns, ridge)
    damping = options.initial_damping
    growth = options.damping_growth
    n_small_gains = 0
    while True:
        # LM 1: Gauss–Newton matrix JᴴJ and gradient at the present columns.
        grams = [column.conj().T @ column for column in columns]
        normal = _normal_matrix(columns, grams, coupling, offsets)
        gradient = _gradient(residual, columns, grams, ridge)
        diagonal = np.real(np.diag(normal)).copy()
        diagonal = np.maximum(diagonal, 1e-12 * diagonal.max())
        # LM 2: damp JᴴJ until the step, bent along the valley by its second-order part [2]_, lowers
        # the objective.
        for _attempt in range(options.max_refusals):
            factor = _factor(normal, damping * diagonal)
            if factor is not None:
                step = _solve(factor, gradient)
                second_order = _acceleration(factor, columns, step, options)
                tried = _shifted(columns, step + second_order)
                new_residual, new_objective = _objective(core, tried, ridge)
                if new_objective < objective:
                    break
            damping *= growth
            growth *= 2.0
        else:
            return
        # LM 3: Nielsen's rule, the damping falls smoothly with the ratio of actual to predicted
        # gain.
        predicted = float(np.real(np.vdot(step, damping * diagonal * step + gradient)))
        gain_ratio = (objective - new_objective) / max(predicted, 1e-300)
        damping *= max(options.min_damping_factor, 1.0 - (2.0 * gain_ratio - 1.0) ** 3)
        growth = options.damping_growth
        # LM 4: enough small gains in a row end the search.
        if objective - new_objective <= rtol * objective:
            n_small_gains += 1
        else:
            n_small_gains = 0
        # LM 5: share λ_k equally among the modes again, where all modes are alike to a step.
        renewed = CPTerms.of(tried)
        columns = renewed.balanced()
        residual = new_residual
        objective = new_objective
        misfit = float(np.linalg.norm(residual))
        condition = renewed.condition(math.sqrt(max(1.0 - misfit**2, 1e-300)))
        converged = n_small_gains == options.patience or misfit <= goal
        yield IterationStep(columns, misfit, condition, objective, converged)


def _objective(core: np.ndarray, columns: Columns, ridge: float) -> tuple[np.ndarray, float]:
    """Return the residual, and ‖T − Σ‖² + α Σλ²."""
    residual = core - assemble(columns, np.ones(columns[0].shape[1]))
    penalty = ridge * float(np.sum(_squared_weights(columns)))
    return residual, float(np.linalg.norm(residual)) ** 2 + penalty


def _squared_weights(columns: Columns) -> np.ndarray:
    """Return λ_k², from columns of any length."""
    return _product(np.sum(np.abs(column) ** 2, axis=0) for column in columns)


def _product(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return reduce(np.multiply, arrays, np.ones(()))


def _gradient(
    residual: np.ndarray, columns: Columns, grams: list[np.ndarray], ridge: float
) -> np.ndarray:
    """Return −½ of the gradient of the objective, all modes in a row."""
    squares = [np.real(np.diag(gram)) for gram in grams]
    parts = []
    for mode, product in enumerate(products(residual, columns)):
        others = _product(square for m, square in enumerate(squares) if m != mode)
        parts.append((product - ridge * columns[mode] * others).ravel())
    return np.concatenate(parts)


def _normal_matrix(
    columns: Columns,
    grams: list[np.ndarray],
    coupling: np.ndarray,
    offsets: np.ndarray,
) -> np.ndarray:
    """Form the upper triangle of JᴴJ with unknowns ordered (mode, row, term)."""
    d = len(columns)
    s = columns[0].shape[1]
    normal = np.zeros((offsets[-1], offsets[-1]), dtype=columns[0].dtype)
    for i in range(d):
        p = columns[i].shape[0]
        of_mode = slice(offsets[i], offsets[i + 1])
        # Within a mode: the same s × s block for each row.
        block = coupling * _product(gram for m, gram in enumerate(grams) if m != i)
        rows = normal[of_mode, of_mode].reshape(p, s, p, s)
        rows[np.arange(p), :, np.arange(p), :] = block
        # Between two modes.
        for j in range(i + 1, d):
            shared = coupling * _product(gram for m, gram in enumerate(grams) if m not in (i, j))
            left = columns[i][:, None, :] * shared  # (a, k, l)
            block = left[:, :, None, :] * columns[j].conj().T[:, :, None]  # (a, k, b, l)
            normal[of_mode, offsets[j] : offsets[j + 1]] = block.reshape(p * s, -1)
    return normal


def _factor(normal: np.ndarray, damping: np.ndarray) -> np.ndarray | None:
    """Return the upper Cholesky factor of JᴴJ + damping, None where there is none."""
    damped = normal.copy()
    damped[np.diag_indices_from(damped)] += damping
    # LAPACK itself: on cores of a few dozen unknowns the checks of cho_factor and cho_solve take
    # longer than the work.
    potrf = lapack.zpotrf if np.iscomplexobj(damped) else lapack.dpotrf
    factor, failed = potrf(damped, lower=False, clean=False)
    return None if failed else factor


def _solve(factor: np.ndarray, right: np.ndarray) -> np.ndarray:
    potrs = lapack.zpotrs if np.iscomplexobj(factor) else lapack.dpotrs
    return np.asarray(potrs(factor, right, lower=False)[0])


def _shifted(columns: Columns, step: np.ndarray) -> Columns:
    """Add a step, all modes in a row, to the columns."""
    shifted = []
    start = 0
    for column in columns:
        shifted.append(column + step[start : start + column.size].reshape(column.shape))
        start += column.size
    return tuple(shifted)


def _acceleration(
    factor: np.ndarray, columns: Columns, step: np.ndarray, options: LevenbergMarquardtOptions
) -> np.ndarray:
    """Return the second-order part of the step, −½(JᴴJ + damping)⁻¹Jᴴr″ [2]_.

    Cancelling terms lie in a curved valley, along which it bends the step.
    """
    h = options.difference_length
    ones = np.ones(columns[0].shape[1])
    here = assemble(columns, ones)
    ahead = assemble(_shifted(columns, h * step), ones)
    behind = assemble(_shifted(columns, -h * step), ones)
    curvature = (ahead + behind - 2.0 * here) / h**2
    gradient = np.concatenate([product.ravel() for product in products(curvature, columns)])
    second_order = -0.5 * _solve(factor, gradient)
    limit = options.max_acceleration * float(np.linalg.norm(step))
    length = max(float(np.linalg.norm(second_order)), 1e-300)
    return np.asarray(second_order * min(1.0, limit / length))
