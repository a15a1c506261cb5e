"""Least squares over single entries: weighted and missing ones, and factors that are not negative.

The sweeps and the Newton steps of `solvers.WeightedALS`, on a tensor of any number of modes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from lsrdecomp.kronecker.rearrange import khatri_rao
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.cp.levenberg_marquardt import Damping
from lsrdecomp.solvers.cp.mttkrp import assemble

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Numbers = NDArray[Any]
"""float64 or complex128."""

INNER_STEPS = 5
"""Passes over the terms of one factor that is not to be negative. By hand: a pass costs far less
than the products that it works on, and later ones change little."""

MAX_UNKNOWNS = 2000
"""Unknowns up to which Newton steps are taken: their matrix is dense, 32 MB at that size."""

MAX_TRIALS = 30
"""Dampings that are tried for one Newton step; from 1e-4 on each is at least twice the last."""

FLOOR = 2.0 * unit_roundoff("float64")
"""A relative error below this is rounding."""


@dataclass(frozen=True, eq=False)
class EntryFit:
    """The minimisation of Σ w |t − Σ_k t_k|² over the entries of a tensor.

    Columns are lists of arrays (p_i, s), one a mode; a term is the outer product of one column of
    each. Weights of terms are in the columns.
    """

    tensor: Numbers
    """Shape (p_1, …, p_d), Σ w |t|² = 1; zero where the weight is."""
    weights: NDArray[np.float64] | None
    """w ≥ 0 of every entry, zero where it is missing; None: all are one."""
    non_negative: tuple[bool, ...]
    """Modes whose columns have no negative entry."""

    def residual(self, columns: Sequence[Numbers]) -> Numbers:
        """Return T − Σ_k t_k, in every entry."""
        total: Numbers = assemble(columns, np.ones(columns[0].shape[1]))
        return self.tensor - total

    def objective(self, columns: Sequence[Numbers]) -> float:
        """Return Σ w |t − Σ_k t_k|²."""
        squares = np.abs(self.residual(columns)) ** 2
        return float(np.sum(squares if self.weights is None else self.weights * squares))

    def projected(self, columns: Sequence[Numbers]) -> list[Numbers]:
        """Return columns with zeros for negative entries of the modes that may have none."""
        return [
            np.maximum(column, 0.0) if bounded else column
            for column, bounded in zip(columns, self.non_negative, strict=True)
        ]

    # -- sweeps -----------------------------------------------------------------------------------

    def swept(self, columns: Sequence[Numbers], ridge: float = 0.0) -> list[Numbers]:
        """Lower the objective + ridge · Σλ² over one mode after the other, the others being fixed.

        A free mode goes to its minimum; one that is not to be negative is improved term by term
        (hierarchical alternating least squares [1]_).

        References
        ----------
        .. [1] A. Cichocki and A.-H. Phan, Fast local algorithms for large scale nonnegative matrix
           and tensor factorizations, IEICE Trans. Fundamentals E92-A (2009).
           doi:10.1587/transfun.E92.A.708
        """
        columns = list(columns)
        for mode, bounded in enumerate(self.non_negative):
            # Sweep 1: H_i and g_i of every row of the mode, with the penalty on λ.
            others = reduce(khatri_rao, [c for i, c in enumerate(columns) if i != mode])
            curvature = self._curvature(mode, columns, others)
            if self.weights is None:
                # Without a residual: three times as fast, and exact to 1e-8, from where on Newton
                # steps are taken.
                product = _unfolded(self.tensor, mode) @ others.conj()
                gradient = product - columns[mode] @ curvature[0]
            else:
                gradient = _unfolded(self._weighted_residual(columns), mode) @ others.conj()
            penalty = ridge * _squared_lengths(columns, mode)
            gradient -= penalty * columns[mode]
            curvature = curvature + np.diag(penalty)
            # Sweep 2: they are solved for the change, so that what is left at a fit is rounding of
            # the change, and not of the columns.
            if bounded:
                columns[mode] = _coordinate_descent(columns[mode], gradient, curvature)
            else:
                columns[mode] = columns[mode] + _solved(curvature, gradient)
        return balanced(columns)

    def sweeps(self, columns: Sequence[Numbers]) -> Iterator[tuple[list[Numbers], float]]:
        """Yield columns and their objective after each sweep."""
        while True:
            columns = self.swept(columns)
            yield columns, self.objective(columns)

    def _weighted_residual(self, columns: Sequence[Numbers]) -> Numbers:
        residual = self.residual(columns)
        return residual if self.weights is None else self.weights * residual

    def _curvature(self, mode: int, columns: Sequence[Numbers], others: Numbers) -> Numbers:
        """Return H, shape (p_mode, s, s), or (1, s, s) where all entries count alike."""
        if self.weights is None:
            grams = [c.T @ c.conj() for i, c in enumerate(columns) if i != mode]
            return reduce(np.multiply, grams)[None]
        s = others.shape[1]
        pairs = others[:, :, None] * others[:, None, :].conj()
        rows = _unfolded(self.weights, mode) @ pairs.reshape(-1, s * s)
        curvature: Numbers = rows.reshape(-1, s, s)
        return curvature

    # -- Newton steps -----------------------------------------------------------------------------

    def newton_steps(self, columns: Sequence[Numbers]) -> Iterator[tuple[list[Numbers], float]]:
        """Yield columns and their objective after each accepted Levenberg–Marquardt step.

        All factors move together. Entries that stand at zero and would become negative are held;
        what a step makes negative is projected to zero (the projected method of [1]_).

        References
        ----------
        .. [1] C. Kanzow, N. Yamashita and M. Fukushima, Levenberg–Marquardt methods with strong
           local convergence properties for solving nonlinear equations with convex constraints,
           J. Comput. Appl. Math. 172 (2004). doi:10.1016/j.cam.2004.02.013
        """
        columns = balanced(columns)
        objective = self.objective(columns)
        damping = Damping()
        bounded = _stacked(
            [np.full(c.shape, b) for c, b in zip(columns, self.non_negative, strict=True)]
        )
        while True:
            # Newton 1: JᴴJ and minus half the gradient, of the entries that are not held.
            gradient = self.gradient(columns)
            is_held = bounded & (_stacked(columns).real <= 0.0) & (gradient.real <= 0.0)
            free = np.flatnonzero(~is_held)
            normal = self.normal_matrix(columns)[np.ix_(free, free)]
            gradient = gradient[free]
            diagonal = np.real(np.diagonal(normal))
            floor = max(1e-12 * float(np.max(diagonal, initial=0.0)), 1e-300)
            diagonal = np.maximum(diagonal, floor)
            # Newton 2: JᴴJ is damped until a step lowers the objective.
            for _ in range(MAX_TRIALS):
                step = _damped_step(normal, damping.value * diagonal, gradient)
                moved = self.projected(_moved(columns, free, step))
                lower = self.objective(moved)
                if lower < objective:
                    break
                damping.refuse()
            else:
                return
            # Newton 3: the damping falls with the ratio of actual to predicted gain.
            slope = float(np.vdot(step, gradient).real)
            resistance = damping.value * float(np.sum(diagonal * np.abs(step) ** 2))
            damping.accept((objective - lower) / max(slope + resistance, 1e-300))
            columns = balanced(moved)
            objective = lower
            yield columns, objective

    def gradient(self, columns: Sequence[Numbers]) -> Numbers:
        """Return minus half the gradient over the entries of all columns, mode by mode."""
        weighted = self._weighted_residual(columns)
        parts = []
        for mode in range(len(columns)):
            others = reduce(khatri_rao, [c for i, c in enumerate(columns) if i != mode])
            parts.append((_unfolded(weighted, mode) @ others.conj()).ravel())
        return np.concatenate(parts)

    def normal_matrix(self, columns: Sequence[Numbers]) -> Numbers:
        """Return JᴴJ over the entries of all columns, mode by mode, row by row."""
        ends = np.cumsum([column.size for column in columns]).tolist()
        places = [slice(*pair) for pair in itertools.pairwise([0, *ends])]
        normal = np.zeros((ends[-1], ends[-1]), dtype=self.tensor.dtype)
        for n, own in enumerate(columns):
            # Blocks of a mode with itself: rows are apart.
            rows, s = own.shape
            others = reduce(khatri_rao, [c for i, c in enumerate(columns) if i != n])
            block = np.zeros((rows, s, rows, s), dtype=normal.dtype)
            each = np.arange(rows)
            block[each, :, each, :] = self._curvature(n, columns, others).swapaxes(1, 2)
            normal[places[n], places[n]] = block.reshape(rows * s, rows * s)
            # Blocks of two modes, in the order i, j, k, l of ∂/∂x̄_(i,k) and ∂/∂x_(j,l).
            for m in range(n + 1, len(columns)):
                pairs = self._pair_curvature(n, m, columns)
                cross = pairs * columns[m].conj()[None, :, :, None] * own[:, None, None, :]
                cross = cross.transpose(0, 2, 1, 3).reshape(rows * s, -1)
                normal[places[n], places[m]] = cross
                normal[places[m], places[n]] = cross.conj().T
        return normal

    def _pair_curvature(self, n: int, m: int, columns: Sequence[Numbers]) -> Numbers:
        """Return Σ w c̄_k c_l over the modes other than two, shape (p_n, p_m, s, s).

        Where all entries count alike, and for two modes, sizes that make no difference are one.
        """
        s = columns[0].shape[1]
        rest = [c for i, c in enumerate(columns) if i not in (n, m)]
        if self.weights is None:
            grams = [c.conj().T @ c for c in rest]
            return reduce(np.multiply, grams, np.ones((s, s)))[None, None]
        if not rest:
            return np.broadcast_to(self.weights[:, :, None, None], (*self.weights.shape, s, s))
        joined = reduce(khatri_rao, rest)
        pairs = joined[:, :, None].conj() * joined[:, None, :]
        front = np.moveaxis(self.weights, (n, m), (0, 1))
        flat = front.reshape(front.shape[0] * front.shape[1], -1) @ pairs.reshape(-1, s * s)
        curvature: Numbers = flat.reshape(front.shape[0], front.shape[1], s, s)
        return curvature


def _squared_lengths(columns: Sequence[Numbers], mode: int) -> NDArray[np.float64]:
    """Return the squared length of each term without one of its modes."""
    others = [c for i, c in enumerate(columns) if i != mode]
    squares: NDArray[np.float64] = np.prod([np.sum(np.abs(c) ** 2, axis=0) for c in others], axis=0)
    return squares


def _unfolded(tensor: Numbers, mode: int) -> Numbers:
    """Return a tensor as a matrix (p_mode, the others)."""
    return np.moveaxis(tensor, mode, 0).reshape(tensor.shape[mode], -1)


def _solved(curvature: Numbers, gradient: Numbers) -> Numbers:
    """Return the shortest x of x_i H_i = g_i for every row; directions at rounding are left out."""
    values, vectors = np.linalg.eigh(curvature)
    floor = values.shape[1] * unit_roundoff("float64") * values[:, -1:]
    is_above = values > floor
    inverse = np.where(is_above, 1.0 / np.where(is_above, values, 1.0), 0.0)
    turned = (gradient[:, None, :] @ vectors) * inverse[:, None, :]
    solved: Numbers = (turned @ vectors.conj().swapaxes(1, 2))[:, 0, :]
    return solved


def _coordinate_descent(columns: Numbers, gradient: Numbers, curvature: Numbers) -> Numbers:
    """Lower ½ xᵀHx − gᵀx of every row over x ≥ 0, one term after the other."""
    columns = columns.copy()
    gradient = gradient.copy()
    for _ in range(INNER_STEPS):
        for k in range(columns.shape[1]):
            own = curvature[:, k, k]
            # Where H is zero so is the gradient: nothing is known of that entry.
            change = gradient[:, k] / np.where(own > 0.0, own, 1.0)
            change = np.maximum(change, -columns[:, k])
            columns[:, k] += change
            gradient -= change[:, None] * curvature[:, k, :]
    return columns


def _damped_step(normal: Numbers, damping: NDArray[np.float64], gradient: Numbers) -> Numbers:
    """Return (JᴴJ + D)⁻¹ g; no step where the damping does not make it definite."""
    try:
        factor = cho_factor(normal + np.diag(damping), lower=True)
    except LinAlgError:
        return np.zeros_like(gradient)
    step: Numbers = cho_solve(factor, gradient)
    return step


def _moved(columns: Sequence[Numbers], free: NDArray[np.intp], step: Numbers) -> list[Numbers]:
    """Return columns whose free entries have taken a step."""
    values = _stacked(columns)
    values[free] += step
    parts = np.split(values, np.cumsum([column.size for column in columns])[:-1])
    return [part.reshape(column.shape) for part, column in zip(parts, columns, strict=True)]


def balanced(columns: Sequence[Numbers]) -> list[Numbers]:
    """Share the size of each term equally among its modes; a term with a zero column stays."""
    lengths = np.array([np.linalg.norm(column, axis=0) for column in columns])
    sizes = np.prod(lengths, axis=0)
    share = sizes ** (1.0 / len(columns))
    scales = np.where(sizes > 0.0, share / np.where(lengths > 0.0, lengths, 1.0), 1.0)
    return [column * scale for column, scale in zip(columns, scales, strict=True)]


def _stacked(columns: Sequence[Numbers]) -> Numbers:
    return np.concatenate([column.ravel() for column in columns])
