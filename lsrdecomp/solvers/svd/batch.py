"""Singular triples of a batch of matrices: the steps that `BatchedKrylov` is put together from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import (
    Array,
    adjoint,
    as_double,
    as_floating,
    like,
    namespace,
    real_part,
    require_finite,
    tail_norms,
    to_numpy,
)
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.solver import ErrorKind, Solution, Status
from lsrdecomp.solvers.svd.dense import required_rank, signed

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.solvers.iteration import SolveProgress


def as_batch(matrices: Any) -> Array:
    """Return matrices of one size as an array (L, m, n); raise `ShapeError` where sizes differ."""
    if isinstance(matrices, Sequence):
        arrays = [as_floating(matrix, f"matrix {i}") for i, matrix in enumerate(matrices)]
        sizes = {tuple(array.shape) for array in arrays}
        if len(sizes) != 1:
            raise ShapeError(f"a batch has matrices of one size, got {sorted(sizes) or 'none'}")
        matrices = namespace(*arrays).stack(arrays)
    batch = as_floating(matrices, "batch")
    if batch.ndim != 3 or 0 in batch.shape:
        raise ShapeError(f"batch: expected shape (L, m, n) with entries, got {tuple(batch.shape)}")
    return batch


def truncated_svds(
    batch: Array,
    shape: KroneckerShape,
    max_terms: int,
    atol: float | None,
    progress: SolveProgress,
) -> list[Solution]:
    """Take truncated SVDs in the precision of the input, without the terms that are rounding."""
    require_finite(batch, "batch")
    operators = rearrange(batch, shape)
    u, sigma, vh = namespace(batch).linalg.svd(operators, full_matrices=False)
    u = u[:, :, :max_terms]
    vh = vh[:, :max_terms, :]
    spectra = to_numpy(sigma).astype(np.float64)
    # SVDs 1: the number of terms of each matrix, by the request.
    ends = [(max_terms, Status.rank_reached)] * len(spectra)
    if atol is not None:
        ends = [required_rank(tail_norms(spectrum), max_terms, atol) for spectrum in spectra]
    # SVDs 2: singular values below the rounding of the largest belong to no term of the matrix.
    floors = max(operators.shape[1:]) * unit_roundoff(batch.dtype) * spectra[:, :1]
    n_above_rounding = np.sum(spectra[:, :max_terms] > floors, axis=1)
    n_terms = np.minimum(n_above_rounding, [rank for rank, _ in ends])
    # SVDs 3: errors, measured.
    errors = relative_errors(operators, u, spectra, vh, n_terms)
    largest_error = float(np.max(errors))
    progress.record(largest_error, objective=largest_error**2)
    record = progress.sweeps[-1:]
    solutions = []
    sums = as_sums(u, sigma[:, :max_terms], vh, shape)
    for terms, rank, (_, status), error in zip(sums, n_terms, ends, errors, strict=True):
        kept = terms if rank == max_terms else terms.truncate(int(rank))
        solution = Solution(kept, status, record, 0.0, ErrorKind.bounded, float(error))
        solutions.append(solution)
    return solutions


def relative_errors(
    operators: Array, u: Array, sigma: np.ndarray, vh: Array, n_terms: np.ndarray
) -> np.ndarray:
    """Return ‖R − U σ Vᴴ‖/‖R‖ of so many terms of each matrix, from entries in double precision."""
    # Divided by σ_1 first: squares of entries then neither overflow nor vanish.
    largest = np.where(sigma[:, :1] > 0.0, sigma[:, :1], 1.0)
    sigma = sigma / largest
    max_terms = vh.shape[1]
    is_kept = np.arange(max_terms) < n_terms[:, None]
    weights = np.where(is_kept, sigma[:, :max_terms], 0.0)
    residual = as_double(operators)
    u = as_double(u)
    vh = as_double(vh)
    xp = namespace(residual)
    real_prototype = real_part(residual[:1, :1, :1])
    residual = residual / like(largest, real_prototype)[:, :, None]
    residual -= (u * like(weights, real_prototype)[:, None, :]) @ vh
    residual_norms = to_numpy(xp.linalg.vector_norm(residual, axis=(1, 2)))
    errors: np.ndarray = residual_norms / np.linalg.norm(sigma, axis=1).clip(1.0)
    return errors


def as_sums(u: Array, sigma: Array, vh: Array, shape: KroneckerShape) -> list[SeparatedMatrix]:
    """Return singular triples (L, p, s), (L, s), (L, s, q) as Kronecker terms, one sum a matrix."""
    xp = namespace(u)
    rank = int(sigma.shape[1])
    (m, n), (p, q) = shape.factors
    left, right = signed(xp.matrix_transpose(u), vh)
    left = xp.reshape(left, (-1, rank, m, n))
    right = xp.reshape(right, (-1, rank, p, q))
    batch = range(int(sigma.shape[0]))
    return [SeparatedMatrix(sigma[i, :], (left[i, :, :, :], right[i, :, :, :])) for i in batch]


def rayleigh_ritz(operators: Array, q: Array) -> tuple[Array, Array, Array]:
    """Return the singular triples of Q Qᴴ R of each matrix, Q (L, p, k) with orthonormal columns.

    Cost O((p + q)·k²) beside Qᴴ R.
    """
    xp = namespace(operators)
    right, sigma, left = xp.linalg.svd(adjoint(operators) @ q, full_matrices=False)
    return q @ adjoint(left), sigma, adjoint(right)
