"""Singular triples of a batch of matrices: the steps that `BatchedKrylov` is put together from."""

from __future__ import annotations

import math
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
from lsrdecomp.solvers.base import ErrorKind, Solution, Status
from lsrdecomp.solvers.svd.dense import chosen_rank, signed

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.solvers.progress import SolveProgress


def as_batch(matrices: Any) -> Array:
    """Matrices of one size as an array (L, m, n); raises `ShapeError` where sizes differ."""
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
    batch: Array, shape: KroneckerShape, most: int, atol: float | None, progress: SolveProgress
) -> list[Solution]:
    """Truncated SVDs in the precision of the input, without the terms that are rounding."""
    require_finite(batch, "batch")
    operators = rearrange(batch, shape)
    u, sigma, vh = namespace(batch).linalg.svd(operators, full_matrices=False)
    u, vh, values = u[:, :, :most], vh[:, :most, :], to_numpy(sigma).astype(np.float64)
    ends = [(most, Status.rank_reached)] * len(values)
    if atol is not None:
        ends = [chosen_rank(tail_norms(spectrum), most, atol) for spectrum in values]
    # Singular values below the rounding of the largest belong to no term of the matrix.
    floors = max(operators.shape[1:]) * unit_roundoff(batch.dtype) * values[:, :1]
    terms = np.minimum(np.sum(values[:, :most] > floors, axis=1), [enough for enough, _ in ends])
    errors = relative_errors(operators, u, values, vh, terms)
    progress.record(float(np.max(errors)), objective=float(np.max(errors)) ** 2)
    sums, record = as_sums(u, sigma[:, :most], vh, shape), progress.sweeps[-1:]
    return [
        Solution(
            x if k == most else x.truncate(int(k)),
            status,
            record,
            0.0,
            ErrorKind.bounded,
            float(error),
        )
        for x, k, (_, status), error in zip(sums, terms, ends, errors, strict=True)
    ]


def relative_errors(
    operators: Array, u: Array, sigma: np.ndarray, vh: Array, terms: np.ndarray
) -> np.ndarray:
    """‖R − U σ Vᴴ‖/‖R‖ of so many terms of each matrix, from entries in double precision, all for σ_1 = 1."""
    # Divided by σ_1 first: squares of entries then neither overflow nor vanish.
    largest = np.where(sigma[:, :1] > 0.0, sigma[:, :1], 1.0)
    sigma = sigma / largest
    weights = np.where(np.arange(vh.shape[1]) < terms[:, None], sigma[:, : vh.shape[1]], 0.0)
    rest, u, vh = as_double(operators), as_double(u), as_double(vh)
    xp = namespace(rest)
    real = real_part(rest[:1, :1, :1])
    rest = rest / like(largest, real)[:, :, None]
    rest -= (u * like(weights, real)[:, None, :]) @ vh
    errors: np.ndarray = to_numpy(xp.linalg.vector_norm(rest, axis=(1, 2))) / np.linalg.norm(
        sigma, axis=1
    ).clip(1.0)
    return errors


def as_sums(u: Array, sigma: Array, vh: Array, shape: KroneckerShape) -> list[SeparatedMatrix]:
    """Singular triples (L, p, s), (L, s), (L, s, q) as Kronecker terms, one sum a matrix."""
    xp, rank, ((m, n), (p, q)) = namespace(u), int(sigma.shape[1]), shape.factors
    left, right = signed(xp.matrix_transpose(u), vh)
    left, right = xp.reshape(left, (-1, rank, m, n)), xp.reshape(right, (-1, rank, p, q))
    every = range(int(sigma.shape[0]))
    return [SeparatedMatrix(sigma[i, :], (left[i, :, :, :], right[i, :, :, :])) for i in every]


def rayleigh_ritz(operators: Array, q: Array) -> tuple[Array, Array, Array]:
    """Singular triples of Q Qᴴ R of each matrix, Q (L, p, k) with orthonormal columns; O((p + q)·k²) beside Qᴴ R."""
    xp = namespace(operators)
    images, triangle = xp.linalg.qr(adjoint(adjoint(q) @ operators))
    left, sigma, right = xp.linalg.svd(adjoint(triangle), full_matrices=False)
    return q @ left, sigma, right @ adjoint(images)


def extrapolated_excess(captured: list[np.ndarray]) -> np.ndarray:
    """error/optimum − 1 if the gains go on as a geometric series, twice over; infinite before there are two."""
    if len(captured) < 3:
        return np.full_like(captured[-1], math.inf)
    # A gain below rounding is taken for rounding: it may have been as large.
    rounding = 4.0 * unit_roundoff("float32")
    before, last = (np.maximum(captured[-i] - captured[-i - 1], rounding) for i in (2, 1))
    # Gains a, a q, a q², … with q = last / before leave last² / (before − last) to come; where they
    # do not fall yet, a guess from the last one stands in for the series.
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.where(last < before, 2.0 * last**2 / (before - last), 4.0 * last)
        return np.where(gain < 1.0 - captured[-1], 0.5 * gain / (1.0 - captured[-1]), math.inf)
