"""Levenberg–Marquardt for all factors of a small core at once: the finisher that alternating sweeps lack."""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
from scipy.linalg import lapack

from lsrdecomp.solvers.cp.mttkrp import assemble, products
from lsrdecomp.solvers.cp.terms import CPTerms
from lsrdecomp.solvers.progress import IterationStep, SolveProgress, iterate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LARGEST = 2600
"""Most unknowns: the normal matrix is dense, 54 MB at this size, and costs n³/3 operations a
step."""


def unknowns(terms: CPTerms) -> int:
    """Numbers in all columns."""
    return sum(int(c.shape[0]) for c in terms.columns) * terms.rank


def refine(
    core: np.ndarray,
    terms: CPTerms,
    ridge: float,
    *,
    iterations: int,
    rtol: float = 1e-9,
    goal: float = 0.0,
    progress: SolveProgress | None = None,
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
        Most accepted steps.
    rtol : float
        Stop when a step lowers the objective by less than this fraction.
    goal : float
        Stop when the misfit norm is at most this.
    progress : SolveProgress, optional
        Told the misfit norm and γ after each accepted step; ends the loop when it is exhausted.

    Returns
    -------
    CPTerms
        Never worse than the start; the start itself where there are more than `LARGEST` unknowns.

    References
    ----------
    .. [1] A.-H. Phan, P. Tichavský and A. Cichocki, Low complexity damped Gauss–Newton algorithms
       for CANDECOMP/PARAFAC, SIAM J. Matrix Anal. Appl. 34 (2013). doi:10.1137/100808034
    .. [2] M. K. Transtrum, B. B. Machta and J. P. Sethna, Geometry of nonlinear least squares with
       applications to sloppy models and optimization, Phys. Rev. E 83 (2011), sec. VIII.
       doi:10.1103/PhysRevE.83.036701
    """
    if terms.rank == 0 or unknowns(terms) > LARGEST:
        return terms
    steps = _accepted_steps(core, terms.balanced(), ridge, rtol, goal)
    columns, _ = iterate(steps, terms.balanced(), progress, max_steps=iterations)
    return CPTerms.of(columns)


def _accepted_steps(
    core: np.ndarray, columns: tuple[np.ndarray, ...], ridge: float, rtol: float, goal: float
) -> Iterator[IterationStep[tuple[np.ndarray, ...]]]:
    terms = int(columns[0].shape[1])
    offsets = np.cumsum([0] + [c.size for c in columns])
    coupling = np.ones((terms, terms)) + ridge * np.eye(terms)
    residual, objective = _objective(core, columns, ridge)
    damping, growth, small = 1e-4, 2.0, 0
    while True:
        # LM 1: Gauss–Newton matrix JᴴJ and gradient at the present columns.
        grams = [c.conj().T @ c for c in columns]
        normal = _normal_matrix(columns, grams, coupling, offsets)
        gradient = _gradient(residual, columns, grams, ridge)
        diagonal = np.real(np.diag(normal)).copy()
        diagonal = np.maximum(diagonal, 1e-12 * diagonal.max())
        # LM 2: damp JᴴJ until the step, bent along the valley by its second-order part [2]_, lowers
        # the objective.
        for _attempt in range(12):
            factor = _factor(normal, damping * diagonal)
            if factor is not None:
                step = _solve(factor, gradient)
                tried = _moved(columns, step + _acceleration(factor, residual, columns, step))
                new_residual, new_objective = _objective(core, tried, ridge)
                if new_objective < objective:
                    break
            damping, growth = damping * growth, growth * 2.0
        else:
            return
        # LM 3: Nielsen's rule, the damping falls smoothly with the ratio of actual to predicted
        # gain.
        predicted = float(np.real(np.vdot(step, damping * diagonal * step + gradient)))
        gain = (objective - new_objective) / max(predicted, 1e-300)
        damping, growth = damping * max(1.0 / 5.0, 1.0 - (2.0 * gain - 1.0) ** 3), 2.0
        # LM 4: one short step may be the damping's doing; three in a row are not.
        small = small + 1 if objective - new_objective <= rtol * objective else 0
        # LM 5: share λ_k equally among the modes again, where all modes are alike to a step.
        renewed = CPTerms.of(tried)
        columns, residual, objective = renewed.balanced(), new_residual, new_objective
        misfit = float(np.linalg.norm(residual))
        condition = renewed.condition(math.sqrt(max(1.0 - misfit**2, 1e-300)))
        yield IterationStep(
            columns, misfit, condition, objective, converged=small == 3 or misfit <= goal
        )


def _objective(
    core: np.ndarray, columns: tuple[np.ndarray, ...], ridge: float
) -> tuple[np.ndarray, float]:
    residual = core - assemble(columns, np.ones(columns[0].shape[1]))
    return residual, float(np.linalg.norm(residual)) ** 2 + ridge * float(np.sum(_squares(columns)))


def _squares(columns: tuple[np.ndarray, ...]) -> np.ndarray:
    """λ_k², from columns of any length."""
    return _product(np.sum(np.abs(c) ** 2, axis=0) for c in columns)


def _product(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return reduce(np.multiply, arrays, np.ones(()))


def _gradient(
    residual: np.ndarray, columns: tuple[np.ndarray, ...], grams: list[np.ndarray], ridge: float
) -> np.ndarray:
    """−½ of the gradient of the objective, all modes in a row."""
    lengths = [np.real(np.diag(g)) for g in grams]
    parts = []
    for mode, product in enumerate(products(residual, columns)):
        others = _product(q for m, q in enumerate(lengths) if m != mode)
        parts.append((product - ridge * columns[mode] * others).ravel())
    return np.concatenate(parts)


def _normal_matrix(
    columns: tuple[np.ndarray, ...],
    grams: list[np.ndarray],
    coupling: np.ndarray,
    offsets: np.ndarray,
) -> np.ndarray:
    """Upper triangle of JᴴJ with unknowns ordered (mode, row, term)."""
    d, s = len(columns), columns[0].shape[1]
    normal = np.zeros((offsets[-1], offsets[-1]), dtype=columns[0].dtype)
    for i in range(d):
        p = columns[i].shape[0]
        block = coupling * _product(g for m, g in enumerate(grams) if m != i)
        rows = normal[offsets[i] : offsets[i + 1], offsets[i] : offsets[i + 1]].reshape(p, s, p, s)
        rows[np.arange(p), :, np.arange(p), :] = block
        for j in range(i + 1, d):
            shared = coupling * _product(g for m, g in enumerate(grams) if m not in (i, j))
            left = columns[i][:, None, :] * shared  # (a, k, l)
            block = left[:, :, None, :] * columns[j].conj().T[:, :, None]  # (a, k, b, l)
            normal[offsets[i] : offsets[i + 1], offsets[j] : offsets[j + 1]] = block.reshape(
                p * s, -1
            )
    return normal


def _factor(normal: np.ndarray, damping: np.ndarray) -> np.ndarray | None:
    """Upper Cholesky factor of JᴴJ + damping, or None where that matrix is not positive definite."""
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


def _moved(columns: tuple[np.ndarray, ...], step: np.ndarray) -> tuple[np.ndarray, ...]:
    moved, start = [], 0
    for column in columns:
        moved.append(column + step[start : start + column.size].reshape(column.shape))
        start += column.size
    return tuple(moved)


def _acceleration(
    factor: np.ndarray, residual: np.ndarray, columns: tuple[np.ndarray, ...], step: np.ndarray
) -> np.ndarray:
    """Second-order part of the step, −½(JᴴJ + damping)⁻¹Jᴴr″ [2]_: cancelling terms lie in a curved valley."""
    h = 0.1
    weights = np.ones(columns[0].shape[1])
    base = assemble(columns, weights)
    ahead, behind = (
        assemble(_moved(columns, h * step), weights),
        assemble(_moved(columns, -h * step), weights),
    )
    curvature = (ahead + behind - 2.0 * base) / h**2
    gradient = np.concatenate([product.ravel() for product in products(curvature, columns)])
    second = -0.5 * _solve(factor, gradient)
    limit = 0.75 * float(np.linalg.norm(step))
    return np.asarray(second * min(1.0, limit / max(float(np.linalg.norm(second)), 1e-300)))
