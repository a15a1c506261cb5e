"""Singular triples of a batch of matrices: the steps that `BatchedKrylov` is put together from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lsrdecomp.arrays import (
    Array,
    adjoint,
    as_double,
    as_floating,
    is_complex,
    like,
    namespace,
    require_finite,
    tail_norms,
    to_numpy,
)
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.base import ErrorKind, Solution
from lsrdecomp.solvers.progress import SolveProgress
from lsrdecomp.solvers.svd.dense import chosen_rank, signed


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
    sums = as_sums(u[:, :, :most], sigma[:, :most], vh[:, :most, :], shape)
    values = to_numpy(sigma).astype(np.float64)
    floors = max(operators.shape[1:]) * unit_roundoff(batch.dtype) * values[:, 0]
    terms, ends, norms, expected = np.sum(values[:, :most] > floors[:, None], axis=1), [], [], []
    for i, spectrum in enumerate(values):
        tails = tail_norms(spectrum)
        enough, status = chosen_rank(tails, most, atol)
        terms[i] = min(int(terms[i]), enough)
        ends.append(status)
        norms.append(tails[0] or 1.0)
        expected.append(tails[enough] / norms[i])
    progress.note(max(expected), objective=max(expected) ** 2)
    weights = np.where(np.arange(most) < terms[:, None], values[:, :most], 0.0) / np.asarray(norms)[:, None]
    errors = residual_norms(operators, np.asarray(norms), u[:, :, :most], weights, vh[:, :most, :])
    record = progress.sweeps[-1:]
    return [
        Solution(x if k == most else x.truncate(int(k)), status, record, 0.0, ErrorKind.bounded, float(error))
        for x, k, status, error in zip(sums, terms, ends, errors, strict=True)
    ]


def residual_norms(operators: Array, norms: np.ndarray, u: Array, sigma: np.ndarray, vh: Array) -> np.ndarray:
    """‖R/‖R‖ − U σ Vᴴ‖ of each matrix, measured from entries in double precision."""
    rows, u, vh = as_double(operators), as_double(u), as_double(vh)
    xp = namespace(rows)
    real = xp.real(rows) if is_complex(rows) else rows
    rest = rows / like(norms, real)[:, None, None] - (u * like(sigma, real)[:, None, :]) @ vh
    return to_numpy(xp.linalg.vector_norm(rest, axis=(1, 2)))


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
    rounding = 4.0 * unit_roundoff("float32")
    before, last = (np.maximum(captured[-i] - captured[-i - 1], rounding) for i in (2, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.where(last < before, 2.0 * last**2 / (before - last), 4.0 * last)
        return np.where(gain < 1.0 - captured[-1], 0.5 * gain / (1.0 - captured[-1]), math.inf)
