"""Two factors, dense: the truncated SVD of the rearrangement, the best approximation there is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lsrdecomp.arrays import (
    Array,
    adjoint,
    as_double,
    device,
    is_differentiated,
    namespace,
    norm,
    tail_norms,
    to_numpy,
)
from lsrdecomp.errors import LsrError
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.matrix import MatrixProblem, MatrixSolver
from lsrdecomp.solvers.solver import ErrorKind, Solution, Status
from lsrdecomp.targets.residual import cached_row_blocks
from lsrdecomp.targets.target import Dense, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDING = 64.0 * unit_roundoff("float64")
"""An error, for ‖R‖ = 1, that is within the rounding of the products."""


@dataclass(frozen=True, slots=True)
class SVD(MatrixSolver):
    """Singular value decomposition of the rearranged matrix, in double precision [1]_.

    By Eckart and Young the first s terms are the best approximation of separation rank s; they are
    orthogonal, so γ = 1. Cost O(p·q·min(p, q)) for a rearrangement of shape (p, q).

    References
    ----------
    .. [1] C. F. Van Loan and N. Pitsianis, Approximation with Kronecker products, 1993, section 2.
       doi:10.1007/978-94-015-8196-7_17

    Examples
    --------
    >>> import numpy as np
    >>> import lsrdecomp as lsr
    >>> matrix = np.kron(np.eye(4), np.ones((3, 3)))
    >>> result = lsr.decompose(matrix, "4x4, 3x3", rank=1, solver=lsr.SVD())
    >>> bool(result.relative_error < 1e-12)
    True
    """

    order: ClassVar[int] = 2

    def _solve(self, problem: MatrixProblem) -> Solution:
        """Find the first singular triples of R(M), formed; the contract is `Solver.solve`.

        Unlike ``scipy.sparse.linalg.svds`` it computes all of them, in double precision whatever
        the target's, and so knows the error of every number of terms: with ``atol`` the least is
        taken.

        Returns
        -------
        Solution
            In double precision. ``optimality_gap`` is zero, `ErrorKind.bounded`; ``sweeps`` is one
            record with the error from the spectrum; ``relative_error`` is measured where the target
            is held as an array.
        """
        target, shape, progress = problem.target, problem.shape, problem.progress
        # SVD 1: all singular triples of R(M) in double precision, and with them the error of every
        # number of terms.
        matrix = as_double(target.rearranged(shape).formed())
        u, sigma, vh = namespace(matrix).linalg.svd(matrix, full_matrices=False)
        tails = tail_norms(sigma)
        rank, status = required_rank(tails, problem.max_terms, problem.atol)
        if is_differentiated(matrix):
            u, sigma, vh = _without_rounding(matrix, sigma, vh, rank)
        # SVD 2: those requested, as Kronecker terms.
        if tails[0] > 0.0:
            progress.record(tails[rank] / tails[0])
        terms = as_separated(u, sigma, vh, shape, rank)
        # SVD 3: the error from entries, rounding included; R(M) is at hand, so that it costs one
        # product.
        error = None
        if isinstance(target, Dense):
            blocks = residual_blocks(matrix, u[:, :rank], sigma[:rank], vh[:rank, :])
            error = math.hypot(*map(norm, blocks)) / (target.norm or 1.0)
        return Solution(terms, status, progress.sweeps, 0.0, ErrorKind.bounded, error)


def _without_rounding(
    matrix: Any, sigma: Array, vh: Array, rank: int
) -> tuple[Array, Array, Array]:
    """Return the singular triples above rounding of a torch tensor, whose derivatives are finite.

    torch divides by the differences of all singular values, those of rounding too. A change of a
    matrix of t terms moves its range as it moves the image of its t right vectors, and what is left
    to decompose has t rows. At ``rank`` t a change dR of R = U Σ Vᴴ then moves the answer by
    U Uᴴ dR + (I − U Uᴴ) dR V Vᴴ, the part of dR that keeps t terms.

    Raises
    ------
    LsrError
        If ``rank`` asks for more than t terms: those that are rounding have no derivative.
    """
    values = to_numpy(sigma)
    floor = 64.0 * len(values) * unit_roundoff("float64") * values.max(initial=0.0)
    terms = int((values > floor).sum())
    if terms < len(values) and rank > terms:
        fewer = f", or ask for rank={terms} or less" if terms else ""
        raise LsrError(
            f"a matrix of {terms} terms in this shape cannot be differentiated at rank={rank}; "
            f"pass matrix.detach(){fewer}"
        )
    # The range of the matrix from its own right vectors, held constant: a change of the matrix
    # still moves the range.
    xp = namespace(matrix)
    basis, _ = xp.linalg.qr(matrix @ adjoint(vh[:terms, :]).detach())
    u, sigma, vh = xp.linalg.svd(adjoint(basis) @ matrix, full_matrices=False)
    return basis @ u, sigma, vh


def as_matrix(target: Target) -> Array:
    """Form any target: the rearrangement of (m×1) ⊗ (1×n) is the matrix itself."""
    m, n = target.shape
    return target.rearranged(KroneckerShape(((m, 1), (1, n)))).formed()


def least_error(last: float, error: float, coupled: float) -> float:
    """Return `least_errors` of one matrix."""
    gap = last**2 - error**2
    if gap <= 0.0:
        return 0.0
    max_gain = (coupled**2 + ROUNDING**2) * last**2 / gap
    return math.sqrt(max(error**2 - max_gain, 0.0))


def least_errors(last: np.ndarray, error: np.ndarray, coupled: np.ndarray) -> np.ndarray:
    """Return a bound below the error of any s terms, for ‖R‖ = 1, from that of s terms at hand.

    Zero where there is none.

    Let U Θ Vᴴ be these, with Rᴴ U = V Θ, θ the last of Θ, and C = (I − UUᴴ) R V. By Ky Fan other
    terms capture at most ‖C‖²θ²/(θ² − τ²) more, where τ < θ is the norm of what is left, at most
    the error; see `Certificate`.

    Parameters
    ----------
    last, error, coupled : ndarrays of one shape
        θ, ‖R − U Θ Vᴴ‖ and ‖C‖, of many matrices at once.
    """
    squared_last = np.square(last)
    squared_error = np.square(error)
    is_apart = squared_last > squared_error
    gap = np.where(is_apart, squared_last - squared_error, np.inf)
    max_gain = (np.square(coupled) + ROUNDING**2) * squared_last / gap
    squared_bounds = np.where(is_apart, squared_error - max_gain, 0.0)
    bounds: np.ndarray = np.sqrt(np.maximum(squared_bounds, 0.0))
    return bounds


def required_rank(tails: list[float], rank: int | None, atol: float | None) -> tuple[int, Status]:
    """Return the terms to keep, given the error after 0, 1, 2, … of them, and the status."""
    max_terms = len(tails) - 1
    if rank is not None:
        max_terms = min(max_terms, rank)
    if atol is None:
        return max_terms, Status.rank_reached
    for terms in range(max_terms):
        if tails[terms] <= atol:
            return terms, Status.converged
    is_met = tails[max_terms] <= atol
    return max_terms, Status.converged if is_met else Status.rank_exhausted


def svd_of_tall(matrix: Array) -> tuple[Array, Array, Array]:
    """Return the thin SVD of a tall matrix; of a single column of NumPy's without LAPACK."""
    if type(matrix) is np.ndarray and matrix.shape[1] == 1:
        length = norm(matrix)
        if length > 0.0:
            unit = matrix / length
            return unit, np.full(1, length, unit.real.dtype), np.ones((1, 1), matrix.dtype)
    u, sigma, vh = namespace(matrix).linalg.svd(matrix, full_matrices=False)
    return u, sigma, vh


def as_separated(
    u: Array, sigma: Array, vh: Array, shape: KroneckerShape, rank: int
) -> SeparatedMatrix:
    """Return the first ``rank`` singular triples of a rearrangement as Kronecker terms.

    Those that are zero are left out.
    """
    if to_numpy(sigma[rank - 1 : rank]).all():  # in descending order
        return _terms(u, sigma, vh, shape, rank)
    rank = min(rank, int(np.count_nonzero(to_numpy(sigma[:rank]))))
    return _terms(u, sigma, vh, shape, rank)


def traced_terms(matrix: Array, shape: KroneckerShape, rank: int) -> SeparatedMatrix:
    """Return so many terms of a matrix without looking at its numbers: `jax.jit` knows none.

    In the precision of the matrix; a matrix of fewer terms has weights of zero, or of rounding.
    """
    rearranged = rearrange(matrix, shape)
    u, sigma, vh = namespace(matrix).linalg.svd(rearranged, full_matrices=False)
    return _terms(u, sigma, vh, shape, rank)


def _terms(u: Array, sigma: Array, vh: Array, shape: KroneckerShape, rank: int) -> SeparatedMatrix:
    """Return the first ``rank`` singular triples, with the signs of `signed`, as terms."""
    (m, n), (p, q) = shape.factors
    if type(u) is np.ndarray:  # without the calls around each of NumPy's functions
        left, right = signed(u[:, :rank].T, vh[:rank, :])
        factors = left.reshape(rank, m, n), right.reshape(rank, p, q)
        return SeparatedMatrix(sigma[:rank], factors)
    xp = namespace(u)
    left, right = signed(xp.matrix_transpose(u[:, :rank]), vh[:rank, :])
    factors = xp.reshape(left, (rank, m, n)), xp.reshape(right, (rank, p, q))
    return SeparatedMatrix(sigma[:rank], factors)


def signed(left: Array, right: Array) -> tuple[Array, Array]:
    """Make the largest entry of each left singular vector positive; turn the right ones with it.

    Shapes (…, s, p) and (…, s, q). SVD libraries disagree on signs.
    """
    if 0 in left.shape:
        return left, right
    if type(left) is np.ndarray and left.ndim == 2:
        places = np.abs(left).argmax(axis=1)
        entries = left[np.arange(len(left)), places]
        phases = (entries / np.abs(entries))[:, None]
        return left / phases, right * phases
    xp = namespace(left)
    rows = left if left.ndim == 2 else xp.reshape(left, (-1, left.shape[-1]))
    peaks = xp.argmax(xp.abs(rows), axis=-1)
    entries = rows[xp.arange(rows.shape[0], device=device(left)), peaks]
    phases = (entries / xp.abs(entries))[:, None]
    if left.ndim > 2:
        phases = xp.reshape(phases, (*left.shape[:-1], 1))
    return left / phases, right * phases


def residual_blocks(rows: Array, left: Array, sigma: Array, vh: Array) -> Iterator[Array]:
    """Yield R − U Σ Vᴴ, a block of rows at a time that stays in the cache."""
    if sigma.dtype != left.dtype:
        sigma = namespace(left).astype(sigma, left.dtype)
    weighted = left * sigma
    for part in cached_row_blocks(*rows.shape):
        yield rows[part, :] - weighted[part, :] @ vh
