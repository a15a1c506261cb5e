"""Levenberg–Marquardt for all factors of a small core at once, to finish alternating sweeps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from scipy.linalg import lapack

from lsrdecomp.solvers.cp.mttkrp import assemble, products
from lsrdecomp.solvers.cp.terms import CPTerms
from lsrdecomp.solvers.iteration import IterationStep, SolveProgress, iterate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MIN_SPLIT_UNKNOWNS = 200
"""Unknowns from which the part of a step outside the span of a mode's columns is solved by itself:
with fewer, the small factors cost more than they save. Measured at 96 to 600."""


def n_unknowns(terms: CPTerms) -> int:
    """Return the number of entries of all columns."""
    return sum(int(column.shape[0]) for column in terms.columns) * terms.rank


def refine(
    core: np.ndarray,
    terms: CPTerms,
    ridge: float,
    *,
    iterations: int,
    rtol: float,
    goal: float = 0.0,
    is_for_goal: bool = False,
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
        Maximum accepted steps.
    rtol : float
        Stop when a step lowers the objective by less than this fraction.
    goal : float
        Stop when the misfit norm is at most this.
    is_for_goal : bool
        Stop also where the steps that are left would not reach the goal at the present pace.
    progress : SolveProgress, optional
        Told the misfit norm and γ after each accepted step; ends the loop when it is exhausted.

    Returns
    -------
    CPTerms
        Never worse than the start; the start itself where there are more than 2,600 unknowns: the
        normal matrix is dense, 54 MB at that size, and costs n³/3 operations a step.

    References
    ----------
    .. [1] A.-H. Phan, P. Tichavský and A. Cichocki, Low complexity damped Gauss–Newton algorithms
       for CANDECOMP/PARAFAC, SIAM J. Matrix Anal. Appl. 34 (2013). doi:10.1137/100808034
    .. [2] M. K. Transtrum, B. B. Machta and J. P. Sethna, Geometry of nonlinear least squares with
       applications to sloppy models and optimization, Phys. Rev. E 83 (2011), sec. VIII.
       doi:10.1103/PhysRevE.83.036701
    """
    if terms.rank == 0 or n_unknowns(terms) > 2600:
        return terms
    layout = _Layout.of([int(p) for p in core.shape])
    start = np.concatenate(terms.balanced())
    steps = _accepted_steps(core, start, layout, ridge, rtol, goal)
    if is_for_goal:
        steps = _while_in_reach(steps, goal, iterations)
    stack, _ = iterate(steps, start, progress, max_steps=iterations)
    return CPTerms.of(layout.modes(stack))


@dataclass(frozen=True, slots=True)
class _Layout:
    """The places of the modes in a stack (Σ p_i, s): the columns of all modes, one below another.

    In a stack the weights of the terms are shared among the modes.
    """

    sizes: tuple[int, ...]  # rows of each mode
    slices: tuple[slice, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int]) -> _Layout:
        """Return that of modes with so many rows."""
        ends = np.cumsum(sizes).tolist()
        starts = [0, *ends[:-1]]
        return cls(tuple(sizes), tuple(map(slice, starts, ends)), tuple(starts))

    def modes(self, stack: np.ndarray) -> list[np.ndarray]:
        """Return the columns of each mode, shapes (p_i, s)."""
        return [stack[place] for place in self.slices]

    def squared_lengths(self, stack: np.ndarray) -> np.ndarray:
        """Return the squared lengths of the columns of each mode, shape (d, s)."""
        return np.add.reduceat(_squares(stack), self.starts, axis=0)

    def to_rows(self, values: np.ndarray) -> np.ndarray:
        """Repeat one row of values a mode, shape (d, …), for each row of a stack."""
        return np.repeat(values, self.sizes, axis=0)


@dataclass(frozen=True, slots=True)
class _Iterate:
    """The columns that a search has come to, and the parts of ‖T − Σ‖² + α Σλ²."""

    stack: np.ndarray
    lengths: np.ndarray  # squared, (d, s)
    residual: np.ndarray
    objective: float

    @classmethod
    def at(cls, core: np.ndarray, stack: np.ndarray, layout: _Layout, ridge: float) -> _Iterate:
        """Return that of a stack."""
        lengths = layout.squared_lengths(stack)
        residual = core - assemble(layout.modes(stack), np.ones(stack.shape[1]))
        squared_weights = np.prod(lengths, axis=0)
        objective = _norm(residual) ** 2 + ridge * float(squared_weights.sum())
        return cls(stack, lengths, residual, objective)

    @property
    def weights(self) -> np.ndarray:
        """λ of the terms."""
        weights: np.ndarray = np.sqrt(np.prod(self.lengths, axis=0))
        return weights

    def gradient(self, columns: Sequence[np.ndarray], layout: _Layout, ridge: float) -> np.ndarray:
        """Return minus half the gradient, as a stack."""
        gradient = np.concatenate(products(self.residual, columns))
        if ridge > 0.0:
            gradient -= ridge * self.stack * layout.to_rows(_of_others(self.lengths))
        return gradient

    def balanced(self, layout: _Layout) -> _Iterate:
        """Share λ_k equally among the modes, where all modes are alike to a step."""
        shared = np.broadcast_to(self.weights ** (2.0 / self.residual.ndim), self.lengths.shape)
        scales = np.sqrt(shared / np.where(self.lengths > 0.0, self.lengths, 1.0))
        stack = self.stack * layout.to_rows(scales)
        return _Iterate(stack, shared, self.residual, self.objective)


@dataclass(slots=True)
class Damping:
    """The damping of JᴴJ, in units of its diagonal, by Nielsen's rule; start and limits by hand."""

    value: float = 1e-4
    growth: float = 2.0

    def refuse(self) -> None:
        """Raise it after a step that was refused, by a factor that doubles with each refusal."""
        self.value *= self.growth
        self.growth *= 2.0

    def accept(self, gain_ratio: float) -> None:
        """Lower it smoothly with the ratio of actual to predicted gain."""
        # Nielsen's own smallest factor is 1/3.
        self.value *= max(1.0 / 5.0, 1.0 - (2.0 * gain_ratio - 1.0) ** 3)
        self.growth = 2.0


def _accepted_steps(
    core: np.ndarray,
    stack: np.ndarray,
    layout: _Layout,
    ridge: float,
    rtol: float,
    goal: float,
) -> Iterator[IterationStep[np.ndarray]]:
    # Small gains in a row before the search ends: one short step may be the damping's doing.
    patience = 3
    current = _Iterate.at(core, stack, layout, ridge)
    damping = Damping()
    n_small_gains = 0
    while True:
        # LM 1: Gauss–Newton matrix JᴴJ and gradient at the present columns.
        columns = layout.modes(current.stack)
        normal = _NormalEquations.of(columns, ridge, MIN_SPLIT_UNKNOWNS)
        gradient = current.gradient(columns, layout, ridge)
        # LM 2: damp JᴴJ until the step lowers the objective.
        for step, bend in _damped_steps(normal, columns, gradient, damping):
            moved = _Iterate.at(core, current.stack + step + bend, layout, ridge)
            if moved.objective < current.objective:
                break
        else:
            return
        # LM 3: the damping falls with the ratio of actual to predicted gain.
        diagonal = layout.to_rows(normal.diagonals)
        resistance = damping.value * float(np.vdot(diagonal, _squares(step)))
        slope = float(np.vdot(step, gradient).real)
        gain = current.objective - moved.objective
        damping.accept(gain / max(slope + resistance, 1e-300))
        # LM 4: one small gain of a full step, of which the damping holds back next to nothing, ends
        # the search, or enough small gains in a row.
        if gain > rtol * current.objective:
            n_small_gains = 0
        elif resistance <= 0.1 * slope:
            n_small_gains = patience
        else:
            n_small_gains += 1
        current = moved.balanced(layout)
        misfit = _norm(current.residual)
        condition = _norm(moved.weights) / math.sqrt(max(1.0 - misfit**2, 1e-300))
        converged = n_small_gains >= patience or misfit <= goal
        yield IterationStep(current.stack, misfit, condition, current.objective, converged)


def _while_in_reach(
    steps: Iterator[IterationStep[np.ndarray]], goal: float, iterations: int
) -> Iterator[IterationStep[np.ndarray]]:
    """Yield steps until those that are left, each with the largest of the last gains, are too few.

    Three gains are looked at: one short step may be the damping's doing.
    """
    misfits: list[float] = []
    for number, step in enumerate(steps, 1):
        assert step.relative_error is not None
        misfits = [*misfits[-3:], step.relative_error]
        gains = [before - after for before, after in pairwise(misfits)]
        left = iterations - number
        is_out_of_reach = len(gains) == 3 and misfits[-1] - left * max(gains) > goal
        yield replace(step, converged=True) if is_out_of_reach else step


def _damped_steps(
    normal: _NormalEquations,
    columns: Sequence[np.ndarray],
    gradient: np.ndarray,
    damping: Damping,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield steps, each damped more than the one before, and how they bend along the valley [2]_.

    To ask for the next one is to refuse the last; it ends after twelve refusals.
    """
    for _ in range(12):
        damped = normal.damped(damping.value)
        if damped is not None:
            step = damped.solve(gradient)
            yield step, _second_order(damped, columns, normal.grams, step)
        damping.refuse()


def _norm(array: np.ndarray) -> float:
    """Return the Frobenius norm of numbers that are no larger than about one."""
    return math.sqrt(float(np.vdot(array, array).real))


def _squares(array: np.ndarray) -> np.ndarray:
    """Return |x|² of each entry."""
    squares: np.ndarray = array.real**2
    if np.iscomplexobj(array):
        squares += array.imag**2
    return squares


def _product(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return reduce(np.multiply, arrays, np.ones(()))


def _of_others(values: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """Return for each mode the entrywise product of the values of all other modes."""
    n_modes = len(values)
    return np.array(
        [_product(values[m] for m in range(n_modes) if m != mode) for mode in range(n_modes)]
    )


@dataclass(frozen=True, slots=True)
class _NormalEquations:
    """JᴴJ of all columns, as the part inside the span of each mode's columns and the part outside.

    The blocks between two modes see the columns alone, so that what a step has outside their span,
    A = Q R, stands by itself: there each row has the s × s block of its mode. Inside, the unknowns
    are Qᴴ·step, s × s a mode, and JᴴJ is that of R in place of A.
    """

    layout: _Layout  # of a step
    grams: tuple[np.ndarray, ...]  # AᴴA of each mode
    bases: tuple[np.ndarray | None, ...]  # Q (p_i, s); None where the columns span the whole mode
    blocks: np.ndarray  # (d, s, s), of each row within a mode
    inside_layout: _Layout  # of the rows inside
    inside: np.ndarray  # lower triangle, unknowns ordered (mode, row, term), columns contiguous
    diagonals: np.ndarray  # (d, s), of JᴴJ, alike in all rows of a mode; none is zero

    @classmethod
    def of(
        cls, columns: Sequence[np.ndarray], ridge: float, min_split_unknowns: int
    ) -> _NormalEquations:
        """Form them at columns (p_i, s) for the penalty α = ``ridge``.

        Fewer unknowns than ``min_split_unknowns`` are all taken as inside.
        """
        s = columns[0].shape[1]
        grams = tuple(column.conj().T @ column for column in columns)
        coupling = np.ones((s, s)) + ridge * np.eye(s)
        # Normal 1: the same s × s block for each row of a mode.
        blocks = coupling * _of_others(grams)
        diagonals = np.real(np.diagonal(blocks, axis1=1, axis2=2))
        # Normal 2: R of the modes that are longer than there are terms, the others as they are.
        is_split = sum(column.size for column in columns) >= min_split_unknowns
        bases: list[np.ndarray | None] = []
        inner = []
        for column in columns:
            basis = None
            if is_split and column.shape[0] > s:
                basis, column = np.linalg.qr(column)
            bases.append(basis)
            inner.append(column)
        inside_layout = _Layout.of([column.shape[0] for column in inner])
        return cls(
            layout=_Layout.of([column.shape[0] for column in columns]),
            grams=grams,
            bases=tuple(bases),
            blocks=blocks,
            inside_layout=inside_layout,
            inside=_normal_matrix(inner, inside_layout, grams, blocks, coupling),
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
                factor = _cholesky(np.tril(block + np.diag(diagonal)))
                if factor is None:
                    return None
            outside.append(factor)
        # Damped 2: one factor of all unknowns inside.
        inside = self.inside.copy(order="K")
        inside[np.diag_indices_from(inside)] += self.inside_layout.to_rows(added).ravel()
        factor = _cholesky(inside)
        if factor is None:
            return None
        return _DampedEquations(self.layout, self.bases, tuple(outside), factor)


@dataclass(frozen=True, slots=True)
class _DampedEquations:
    """Cholesky factors of `_NormalEquations` with a damping."""

    layout: _Layout
    bases: tuple[np.ndarray | None, ...]
    outside: tuple[np.ndarray | None, ...]  # (s, s); None where nothing is outside
    inside: np.ndarray

    def solve(self, right: np.ndarray) -> np.ndarray:
        """Return the stack whose product with the damped JᴴJ is the stack on the right."""
        if all(basis is None for basis in self.bases):
            return _solve(self.inside, right.ravel()).reshape(right.shape)
        # Solve 1: inside the spans, all modes together.
        parts = self.layout.modes(right)
        coordinates = []
        for part, basis in zip(parts, self.bases, strict=True):
            coordinates.append(part if basis is None else basis.conj().T @ part)
        joined = np.concatenate(coordinates)
        solved = _solve(self.inside, joined.ravel()).reshape(joined.shape)
        inside = _Layout.of([len(coordinate) for coordinate in coordinates]).modes(solved)
        # Solve 2: outside them, mode by mode.
        columns = []
        modes = zip(parts, self.bases, self.outside, coordinates, inside, strict=True)
        for part, basis, factor, coordinate, inner in modes:
            if basis is None or factor is None:
                columns.append(inner)
                continue
            remainder = part - basis @ coordinate
            columns.append(basis @ inner + _solve(factor, remainder.T).T)
        return np.concatenate(columns)


def _normal_matrix(
    columns: list[np.ndarray],
    layout: _Layout,
    grams: Sequence[np.ndarray],
    blocks: np.ndarray,
    coupling: np.ndarray,
) -> np.ndarray:
    """Form the lower triangle of JᴴJ with unknowns ordered (mode, row, term), as LAPACK reads it.

    That is the upper triangle of its conjugate, row by row.
    """
    d = len(columns)
    s = columns[0].shape[1]
    n_rows = sum(layout.sizes)
    normal = np.zeros((n_rows, s, n_rows, s), dtype=columns[0].dtype)
    # Matrix 1: within a mode, the same s × s block for each row.
    rows = np.arange(n_rows)
    normal[rows, :, rows, :] = layout.to_rows(blocks.conj())
    # Matrix 2: between two modes.
    for i in range(d):
        for j in range(i + 1, d):
            shared = coupling * _product(grams[m] for m in range(d) if m not in (i, j))
            left = (columns[i][:, None, :] * shared).conj()  # (a, k, l)
            right = columns[j].T  # (k, b)
            between = normal[layout.slices[i], :, layout.slices[j], :]
            np.multiply(left[:, :, None, :], right[:, :, None], out=between)
    return normal.reshape(n_rows * s, n_rows * s).T


def _cholesky(matrix: np.ndarray) -> np.ndarray | None:
    """Return the lower Cholesky factor of a matrix given by its lower triangle, None without one.

    In place where its columns are contiguous. By LAPACK itself: on cores of a few dozen unknowns
    the checks of cho_factor and cho_solve take longer than the work.
    """
    potrf = lapack.zpotrf if np.iscomplexobj(matrix) else lapack.dpotrf
    factor, failed = potrf(matrix, lower=True, clean=False, overwrite_a=True)
    return None if failed else factor


def _solve(factor: np.ndarray, right: np.ndarray) -> np.ndarray:
    potrs = lapack.zpotrs if np.iscomplexobj(factor) else lapack.dpotrs
    return np.asarray(potrs(factor, right, lower=True)[0])


def _second_order(
    damped: _DampedEquations,
    columns: Sequence[np.ndarray],
    grams: Sequence[np.ndarray],
    step: np.ndarray,
) -> np.ndarray:
    """Return the second-order part of a step, −½(JᴴJ + damping)⁻¹Jᴴr″ [2]_.

    Cancelling terms lie in a curved valley, along which it bends the step.
    """
    moves = damped.layout.modes(step)
    bend = -0.5 * damped.solve(np.concatenate(_curvature_products(columns, grams, moves)))
    length = _norm(bend)
    # The largest ratio of that part to the step, as the GNU Scientific Library takes it.
    limit = 0.75 * _norm(step)
    return bend if length <= limit else bend * (limit / length)


def _curvature_products(
    columns: Sequence[np.ndarray], grams: Sequence[np.ndarray], moves: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return Jᴴr″, r″ the second derivative of the sum along the moves, shapes (p_i, s).

    The sum at A + τV is a polynomial in τ. Its products with the columns of all modes but one are
    (A_m + τV_m) Π (B_n + τC_n) over the other modes n, entry by entry, of the s × s matrices
    B = AᵀĀ and C = VᵀĀ; τ² has half of the second derivative.
    """
    crossed = [move.T @ column.conj() for column, move in zip(columns, moves, strict=True)]
    twice = []
    for mode, (column, move) in enumerate(zip(columns, moves, strict=True)):
        constant: np.ndarray = np.ones(())
        linear: np.ndarray = np.zeros(())
        square: np.ndarray = np.zeros(())
        for n, (gram, cross) in enumerate(zip(grams, crossed, strict=True)):
            if n == mode:
                continue
            square = square * gram.T + linear * cross
            linear = linear * gram.T + constant * cross
            constant = constant * gram.T
        twice.append(2.0 * (move @ linear + column @ square))
    return twice
