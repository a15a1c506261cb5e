"""Levenberg–Marquardt for all factors of a small core at once, to finish alternating sweeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
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
    residual, objective = _objective(core, columns, ridge)
    damping = options.initial_damping
    growth = options.damping_growth
    n_small_gains = 0
    while True:
        # LM 1: Gauss–Newton matrix JᴴJ and gradient at the present columns.
        grams = [column.conj().T @ column for column in columns]
        normal = _NormalEquations.of(columns, grams, ridge, options.min_split_unknowns)
        gradient = _gradient(residual, columns, grams, ridge)
        # LM 2: damp JᴴJ until the step, bent along the valley by its second-order part [2]_, lowers
        # the objective.
        for _attempt in range(options.max_refusals):
            damped = normal.damped(damping)
            if damped is not None:
                step = damped.solve(gradient)
                second_order = _acceleration(damped, columns, core - residual, step, options)
                tried = _shifted(_shifted(columns, step), second_order)
                new_residual, new_objective = _objective(core, tried, ridge)
                if new_objective < objective:
                    break
            damping *= growth
            growth *= 2.0
        else:
            return
        # LM 3: Nielsen's rule, the damping falls smoothly with the ratio of actual to predicted
        # gain.
        predicted = _predicted_gain(step, gradient, damping * normal.diagonals)
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
) -> Columns:
    """Return −½ of the gradient of the objective."""
    squares = [np.real(np.diag(gram)) for gram in grams]
    parts = []
    for mode, product in enumerate(products(residual, columns)):
        others = _product(square for m, square in enumerate(squares) if m != mode)
        parts.append(product - ridge * columns[mode] * others)
    return tuple(parts)


def _predicted_gain(step: Columns, gradient: Columns, damping: np.ndarray) -> float:
    """Return the fall of the objective in the damped quadratic model."""
    gain = 0.0
    for move, slope, diagonal in zip(step, gradient, damping, strict=True):
        gain += float(np.real(np.vdot(move, diagonal * move + slope)))
    return gain


@dataclass(frozen=True, slots=True)
class _NormalEquations:
    """JᴴJ of all columns, as the part inside the span of each mode's columns and the part outside.

    The blocks between two modes see the columns alone, so that what a step has outside their span,
    A = Q R, stands by itself: there each row has the s × s block of its mode. Inside, the unknowns
    are Qᴴ·step, s × s a mode, and JᴴJ is that of R in place of A.
    """

    bases: tuple[np.ndarray | None, ...]  # Q (p_i, s); None where the columns span the whole mode
    blocks: tuple[np.ndarray, ...]  # (s, s), of each row within a mode
    n_rows: tuple[int, ...]  # of each mode inside
    inside: np.ndarray  # upper triangle, unknowns ordered (mode, row, term)
    diagonals: np.ndarray  # (d, s), of JᴴJ, alike in all rows of a mode; none is zero

    @classmethod
    def of(
        cls, columns: Columns, grams: list[np.ndarray], ridge: float, min_split_unknowns: int = 0
    ) -> _NormalEquations:
        """Form them at columns with these Gram matrices, for the penalty α = ``ridge``.

        Fewer unknowns than ``min_split_unknowns`` are all taken as inside.
        """
        s = columns[0].shape[1]
        coupling = np.ones((s, s)) + ridge * np.eye(s)
        # Normal 1: the same s × s block for each row of a mode.
        blocks = []
        for mode in range(len(columns)):
            others = _product(gram for m, gram in enumerate(grams) if m != mode)
            blocks.append(coupling * others)
        diagonals = np.array([np.real(np.diag(block)) for block in blocks])
        # Normal 2: R of the modes that are longer than there are terms, the others as they are.
        is_split = sum(column.size for column in columns) >= min_split_unknowns
        bases: list[np.ndarray | None] = []
        inner = []
        for column in columns:
            if is_split and column.shape[0] > s:
                basis, triangle = np.linalg.qr(column)
                bases.append(basis)
                inner.append(triangle)
            else:
                bases.append(None)
                inner.append(column)
        return cls(
            bases=tuple(bases),
            blocks=tuple(blocks),
            n_rows=tuple(int(column.shape[0]) for column in inner),
            inside=_normal_matrix(inner, grams, blocks, coupling),
            diagonals=np.maximum(diagonals, 1e-12 * diagonals.max()),
        )

    def damped(self, damping: float) -> _DampedEquations | None:
        """Factor JᴴJ + damping·diagonal; None where that is not positive definite."""
        added = damping * self.diagonals
        # Damped 1: one s × s factor for all rows outside the span of a mode.
        outside = []
        for basis, block, diagonal in zip(self.bases, self.blocks, added, strict=True):
            factor = None
            if basis is not None:
                factor = _cholesky(block + np.diag(diagonal))
                if factor is None:
                    return None
            outside.append(factor)
        # Damped 2: one factor of all unknowns inside.
        of_rows = []
        for n_rows, diagonal in zip(self.n_rows, added, strict=True):
            of_rows.append(np.tile(diagonal, n_rows))
        inside = self.inside.copy()
        inside[np.diag_indices_from(inside)] += np.concatenate(of_rows)
        factor = _cholesky(inside)
        return None if factor is None else _DampedEquations(self.bases, tuple(outside), factor)


@dataclass(frozen=True, slots=True)
class _DampedEquations:
    """Cholesky factors of `_NormalEquations` with a damping."""

    bases: tuple[np.ndarray | None, ...]
    outside: tuple[np.ndarray | None, ...]  # (s, s); None where nothing is outside
    inside: np.ndarray

    def solve(self, right: Columns) -> Columns:
        """Return the columns whose products with the damped JᴴJ are those on the right."""
        # Solve 1: inside the spans, all modes together.
        coordinates = []
        for part, basis in zip(right, self.bases, strict=True):
            coordinates.append(part if basis is None else basis.conj().T @ part)
        flat = np.concatenate([part.ravel() for part in coordinates])
        solved = _split(_solve(self.inside, flat), coordinates)
        # Solve 2: outside them, mode by mode.
        columns = []
        modes = zip(right, self.bases, self.outside, coordinates, solved, strict=True)
        for part, basis, factor, coordinate, inner in modes:
            if basis is None or factor is None:
                columns.append(inner)
                continue
            remainder = part - basis @ coordinate
            columns.append(basis @ inner + _solve(factor, remainder.T).T)
        return tuple(columns)


def _normal_matrix(
    columns: list[np.ndarray],
    grams: list[np.ndarray],
    blocks: list[np.ndarray],
    coupling: np.ndarray,
) -> np.ndarray:
    """Form the upper triangle of JᴴJ with unknowns ordered (mode, row, term)."""
    d = len(columns)
    s = columns[0].shape[1]
    offsets = np.cumsum([0] + [column.size for column in columns])
    normal = np.zeros((offsets[-1], offsets[-1]), dtype=columns[0].dtype)
    for i in range(d):
        p = columns[i].shape[0]
        of_mode = slice(offsets[i], offsets[i + 1])
        # Within a mode: the same s × s block for each row.
        rows = normal[of_mode, of_mode].reshape(p, s, p, s)
        rows[np.arange(p), :, np.arange(p), :] = blocks[i]
        # Between two modes.
        for j in range(i + 1, d):
            shared = coupling * _product(gram for m, gram in enumerate(grams) if m not in (i, j))
            left = columns[i][:, None, :] * shared  # (a, k, l)
            block = left[:, :, None, :] * columns[j].conj().T[:, :, None]  # (a, k, b, l)
            normal[of_mode, offsets[j] : offsets[j + 1]] = block.reshape(p * s, -1)
    return normal


def _cholesky(matrix: np.ndarray) -> np.ndarray | None:
    """Return the upper Cholesky factor of a matrix given by its upper triangle, None without one.

    By LAPACK itself: on cores of a few dozen unknowns the checks of cho_factor and cho_solve take
    longer than the work.
    """
    potrf = lapack.zpotrf if np.iscomplexobj(matrix) else lapack.dpotrf
    factor, failed = potrf(matrix, lower=False, clean=False)
    return None if failed else factor


def _solve(factor: np.ndarray, right: np.ndarray) -> np.ndarray:
    potrs = lapack.zpotrs if np.iscomplexobj(factor) else lapack.dpotrs
    return np.asarray(potrs(factor, right, lower=False)[0])


def _split(flat: np.ndarray, like: list[np.ndarray]) -> list[np.ndarray]:
    """Cut a vector of all modes in a row into arrays of these shapes."""
    parts = []
    start = 0
    for array in like:
        parts.append(flat[start : start + array.size].reshape(array.shape))
        start += array.size
    return parts


def _shifted(columns: Columns, step: Columns, length: float = 1.0) -> Columns:
    """Add a step, times a length, to the columns."""
    return tuple(column + length * move for column, move in zip(columns, step, strict=True))


def _acceleration(
    damped: _DampedEquations,
    columns: Columns,
    here: np.ndarray,
    step: Columns,
    options: LevenbergMarquardtOptions,
) -> Columns:
    """Return the second-order part of the step, −½(JᴴJ + damping)⁻¹Jᴴr″ [2]_.

    Cancelling terms lie in a curved valley, along which it bends the step. ``here`` is the sum.
    """
    h = options.difference_length
    ones = np.ones(columns[0].shape[1])
    ahead = assemble(_shifted(columns, step, h), ones)
    behind = assemble(_shifted(columns, step, -h), ones)
    curvature = (ahead + behind - 2.0 * here) / h**2
    second_order = damped.solve(products(curvature, columns))
    limit = options.max_acceleration * _length(step)
    length = max(0.5 * _length(second_order), 1e-300)
    scale = -0.5 * min(1.0, limit / length)
    return tuple(scale * part for part in second_order)


def _length(columns: Columns) -> float:
    """Return the norm of all columns together."""
    return math.hypot(*(float(np.linalg.norm(column)) for column in columns))
