"""Two factors, many matrices of one size at once: block Krylov spaces of a whole batch grown together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lsrdecomp.arrays import Array, adjoint, as_floating, device, is_complex, like, namespace, require_finite, to_numpy
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.base import ErrorKind, Solution, Status, Sweep
from lsrdecomp.solvers.batched_terms import rearranged
from lsrdecomp.solvers.svd.golub_kahan import BlockGolubKahan
from lsrdecomp.targets.base import Dense

CHUNK_ENTRIES = 2**20
"""Entries of the matrices that take their steps together: few enough to stay in a processor's cache."""

SMALL = 64
"""Terms that a matrix can have up to which its SVD is the faster way."""


@dataclass(frozen=True, slots=True)
class BatchedKrylov:
    """Leading singular triples of each R(M) of a batch, by block Lanczos on R Rᴴ, fully reorthogonalised.

    All matrices take the same steps, as batched products in single precision; a Rayleigh–Ritz step in the precision of
    the input ends it, so what single precision costs is the square of its rounding. A matrix whose error is not within
    ``tolerance`` of the optimum by extrapolation of what the last steps gained, or is too small to be told from
    ‖R‖² − Σσ², is solved again by `BlockGolubKahan` alone. Small matrices, and those of which many terms are asked for,
    go through one batched SVD instead.

    Parameters
    ----------
    tolerance : float
        Allowed excess of each error over the optimum, relative.
    columns : int
        Those of a block are the least multiple of this that holds the terms asked for.
    seed : int
        Of the random start, which all matrices share.
    max_steps : int
        Most blocks in a space, three at least: the excess is told from what they gain.
    """

    tolerance: float = 1e-4
    columns: int = 16
    seed: int = 0
    max_steps: int = 10

    def solve(self, matrices: Any, shape: KroneckerShape, *, rank: int) -> tuple[Solution, ...]:
        """Solve for ``rank`` terms each.

        Parameters
        ----------
        matrices : array_like, shape (L, m, n), or a sequence of matrices of one size
        shape : KroneckerShape
            Two factors.
        rank : int
            Terms; a matrix that has fewer gets fewer.

        Returns
        -------
        tuple of Solution, one a matrix

        Raises
        ------
        ShapeError, PrecisionError
            For sizes that differ or do not tile, and for entries that are not finite.
        """
        if shape.order != 2:
            raise ShapeError(f"a batch of rearranged matrices has two factors; {shape} has {shape.order}")
        batch = as_batch(matrices)
        shape.check(tuple(batch.shape[1:]))
        rank = min(rank, shape.max_separation_rank)
        block = -(-rank // self.columns) * self.columns
        alone = BlockGolubKahan(seed=self.seed, tolerance=self.tolerance)
        whole = shape.max_separation_rank < max(SMALL, 3 * block)
        height = max(1, CHUNK_ENTRIES // (batch.shape[1] * batch.shape[2]))
        solutions: list[Solution] = []
        for start in range(0, batch.shape[0], height):
            part = batch[start : min(start + height, batch.shape[0]), :, :]
            solutions += _whole(part, shape, rank) if whole else self._together(part, shape, rank, block, alone)
        return tuple(solutions)

    def _together(
        self, batch: Array, shape: KroneckerShape, rank: int, block: int, alone: BlockGolubKahan
    ) -> list[Solution]:
        originals = batch
        xp = namespace(batch)
        with np.errstate(over="ignore", invalid="ignore"):
            norms = to_numpy(xp.linalg.vector_norm(batch, axis=(1, 2))).astype(np.float64)
        if not np.all(norms < math.inf):
            require_finite(batch, "batch")
        usable = (norms > 1e-15) & (norms < 1e15)  # single precision holds them and their squares
        if not np.all(usable):
            mask = like(usable.astype(np.float64), batch)[:, None, None]
            batch = xp.where(mask == 1, batch, xp.zeros_like(batch))
        operators = rearranged(batch, shape)
        basis, excess, sweeps = self._space(operators, np.where(usable, norms, 1.0), rank, block)
        u, sigma, vh = _signed(*_rayleigh_ritz(operators, basis))
        captured = np.sum(to_numpy(sigma).astype(np.float64) ** 2, axis=1) / np.where(usable, norms, 1.0) ** 2
        # Below this the error is lost in the rounding of ‖R‖² − Σσ².
        double = unit_roundoff(batch.dtype) == unit_roundoff("float64")
        floor = 1e6 * unit_roundoff("float32") ** 2 if double else 1e3 * unit_roundoff("float32")
        good = usable & (excess <= self.tolerance) & (1.0 - captured > floor)
        found = _separated(u, sigma, vh, shape)
        return [
            Solution(found[i], Status.rank_reached, sweeps, float(excess[i]), ErrorKind.estimated)
            if good[i]
            else alone.solve(Dense(originals[i, :, :]), shape, rank=rank)
            for i in range(batch.shape[0])
        ]

    def _space(
        self, operators: Array, norms: np.ndarray, rank: int, block: int
    ) -> tuple[Array, np.ndarray, tuple[Sweep, ...]]:
        """Leading ``rank`` Ritz vectors (L, p, rank) of each R Rᴴ, the excess of their errors, and the steps taken."""
        xp = namespace(operators)
        single = xp.astype(operators, xp.complex64 if is_complex(operators) else xp.float32)
        size, _, columns = single.shape
        start: Any = np.random.default_rng(self.seed).standard_normal((columns, block))
        # Noise of the size of rounding fills the directions that a matrix of low rank lacks.
        noise = np.random.default_rng(self.seed + 1).standard_normal((single.shape[1], block))
        noise = like(noise * unit_roundoff("float32") / single.shape[1] ** 0.5, single)[None, :, :]
        size_of = like(norms, single)[:, None, None]
        basis = xp.linalg.qr(single @ like(start, single)[None, :, :] + noise * size_of)[0]
        images = adjoint(single) @ basis
        captured: list[np.ndarray] = []
        sweeps: list[Sweep] = []
        excess = np.full(size, math.inf)
        for step in range(max(3, self.max_steps)):
            if step:
                rest = single @ images[:, :, -block:]
                rest = rest - basis @ (adjoint(basis) @ rest) + noise * size_of**2
                fresh = xp.linalg.qr(rest - basis @ (adjoint(basis) @ rest))[0]
                basis = xp.concat((basis, fresh), axis=2)
                images = xp.concat((images, adjoint(single) @ fresh), axis=2)
            gram = adjoint(images) @ images
            if step < 2:  # never the last, so without vectors
                values = xp.linalg.eigvalsh(gram)
            else:
                values, vectors = xp.linalg.eigh(gram)
            spectrum = to_numpy(values).astype(np.float64)[:, -rank:]
            captured.append(np.minimum(np.sum(spectrum, axis=1) / norms**2, 1.0))
            sweeps.append(Sweep(step, float(np.sqrt(np.max(1.0 - captured[-1])))))
            excess = _extrapolated_excess(captured)
            if np.all(excess <= self.tolerance) or basis.shape[2] + block > min(single.shape[1:]):
                break
        return basis @ vectors[:, :, -rank:], excess, tuple(sweeps)


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


def _whole(batch: Array, shape: KroneckerShape, rank: int) -> list[Solution]:
    """Truncated SVDs in the precision of the input, without the terms that are rounding."""
    require_finite(batch, "batch")
    operators = rearranged(batch, shape)
    u, sigma, vh = namespace(batch).linalg.svd(operators, full_matrices=False)
    found = _separated(*_signed(u[:, :, :rank], sigma[:, :rank], vh[:, :rank, :]), shape)
    values = to_numpy(sigma)
    floors = max(operators.shape[1:]) * unit_roundoff(batch.dtype) * values[:, 0]
    kept = np.sum(values[:, :rank] > floors[:, None], axis=1)
    pairs = zip(found, kept, strict=True)
    return [Solution(x.truncate(int(k)), Status.rank_reached, (), 0.0, ErrorKind.bounded) for x, k in pairs]


def _separated(u: Array, sigma: Array, vh: Array, shape: KroneckerShape) -> list[SeparatedMatrix]:
    """Singular triples (L, p, s), (L, s), (L, s, q) as Kronecker terms, one sum a matrix."""
    xp, rank, ((m, n), (p, q)) = namespace(u), int(sigma.shape[1]), shape.factors
    left, right = xp.reshape(u, (-1, rank, m, n)), xp.reshape(vh, (-1, rank, p, q))
    every = range(int(sigma.shape[0]))
    return [SeparatedMatrix(sigma[i, :], (left[i, :, :, :], right[i, :, :, :])) for i in every]


def _rayleigh_ritz(operators: Array, vectors: Array) -> tuple[Array, Array, Array]:
    """Singular triples of Q Qᴴ R, Q an orthonormal basis of ``vectors``, in the precision of R."""
    xp = namespace(operators)
    q = xp.linalg.qr(xp.astype(vectors, operators.dtype))[0]
    images, triangle = xp.linalg.qr(adjoint(adjoint(q) @ operators))
    left, sigma, right = xp.linalg.svd(adjoint(triangle), full_matrices=False)
    return q @ left, sigma, right @ adjoint(images)


def _extrapolated_excess(captured: list[np.ndarray]) -> np.ndarray:
    """error/optimum − 1 if the gains go on as a geometric series, twice over; infinite before there are two."""
    if len(captured) < 3:
        return np.full_like(captured[-1], math.inf)
    rounding = 4.0 * unit_roundoff("float32")
    before, last = (np.maximum(captured[-i] - captured[-i - 1], rounding) for i in (2, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.where(last < before, 2.0 * last**2 / (before - last), 4.0 * last)
        return np.where(gain < 1.0 - captured[-1], 0.5 * gain / (1.0 - captured[-1]), math.inf)


def _signed(u: Array, sigma: Array, vh: Array) -> tuple[Array, Array, Array]:
    """Rows uᵀ and vᴴ of each triple, the largest entry of u made positive: SVD libraries disagree on signs."""
    xp = namespace(u)
    rows = xp.matrix_transpose(u)
    peak = xp.argmax(xp.abs(rows), axis=2)
    places = xp.arange(rows.shape[2], dtype=peak.dtype, device=device(rows))
    entry = xp.sum(xp.where(places[None, None, :] == peak[:, :, None], rows, xp.zeros_like(rows)), axis=2)
    phase = entry / xp.abs(entry)
    return rows / phase[:, :, None], sigma, vh * phase[:, :, None]
