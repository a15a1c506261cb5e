"""Two factors of one NumPy matrix: block Lanczos on R Rᴴ, with as little around it as can be.

The method is that of `LanczosSpaces`. At 256 × 256 a step is 40 µs of products, and what a batch
and other array libraries need besides took three times as long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import adjoint, is_complex
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.iteration import IterationStep, SolveProgress, iterate
from lsrdecomp.solvers.solver import ErrorKind, Solution, Status
from lsrdecomp.solvers.svd.dense import as_separated, svd_of_tall
from lsrdecomp.solvers.svd.gram import Rearrangement, falls_fast
from lsrdecomp.solvers.svd.lanczos import (
    MAX_OVERLAP,
    MIN_BLOCKS,
    RitzPairs,
    orthonormal_matrix,
)
from lsrdecomp.targets.residual import has_twelve_digits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lsrdecomp.kronecker.shape import KroneckerShape


class LanczosSpace:
    """A Krylov space of R Rᴴ, of one matrix R (p, q), that grows by blocks.

    Attributes are those of `LanczosSpaces` without the first axis.

    Parameters
    ----------
    rows : ndarray, shape (p, q)
        R.
    norm : float
        ‖R‖_F.
    first : ndarray, shape (p, b)
        The first block, with orthonormal columns.
    noise : ndarray, shape (p, b)
        Directions to go on with where nothing is left of R Rᴴ Q_b outside of the space.
    """

    def __init__(self, rows: np.ndarray, norm: float, first: np.ndarray, noise: np.ndarray) -> None:
        self.rows = rows
        self.squared_norm = norm**2
        self.roundoff = unit_roundoff(rows.dtype)  # μ of the products
        self.noise = noise
        self.basis = first
        self.newest_images = self._multiplied_by_adjoint(first)
        self.images = self.newest_images
        self.projected = self._gram(self.newest_images)
        self.following = first[:, :0]
        self.coupling = self.projected[:0, :]

    @property
    def size(self) -> int:
        """k, the dimension of the space."""
        return int(self.basis.shape[1])

    def multiply(self) -> None:
        """Multiply the newest images by R: the next block, and its coupling to the space."""
        product = self.rows @ self.newest_images
        remainder = product - self.basis @ (adjoint(self.basis) @ product)
        self.following = self._outside(remainder)
        coupling = (adjoint(self.following) @ product).astype(self.projected.dtype)
        self.coupling = coupling / self.squared_norm

    def grow(self) -> None:
        """Take the next block into the space."""
        self.newest_images = self._multiplied_by_adjoint(self.following)
        n_old = self.size
        block = self.following.shape[1]
        projected = np.zeros((n_old + block, n_old + block), self.projected.dtype)
        projected[:n_old, :n_old] = self.projected
        projected[n_old:, n_old:] = self._gram(self.newest_images)
        # `eigh` reads the lower triangle.
        projected[n_old:, n_old - block : n_old] = self.coupling
        self.projected = projected
        self.basis = np.concatenate((self.basis, self.following), axis=1)
        self.images = np.concatenate((self.images, self.newest_images), axis=1)

    def ritz_pairs(self) -> RitzPairs:
        """Return the Ritz pairs of the space, and what couples them to the next block."""
        values, vectors = np.linalg.eigh(self.projected)
        residuals = self.coupling @ vectors[-self.coupling.shape[1] :, :]
        squares = np.sum((residuals * residuals.conj()).real, axis=0)
        return RitzPairs.of(values, squares, vectors, self.roundoff)

    def _outside(self, remainder: np.ndarray) -> np.ndarray:
        """Return an orthonormal basis of a block that was projected out of the space.

        See `LanczosSpaces`: rounding is replaced by noise, and a large overlap is taken out again.
        """
        block, sizes = orthonormal_matrix(remainder)
        smallest = float(sizes.min()) / self.squared_norm
        if smallest <= 4.0 * self.roundoff:
            length = self.squared_norm * self.roundoff / self.noise.shape[0] ** 0.5
            block, _ = orthonormal_matrix(remainder + self.noise * remainder.dtype.type(length))
        if smallest * MAX_OVERLAP > self.roundoff:
            return block
        for _ in range(2):
            overlap = adjoint(self.basis) @ block
            if float(np.max(np.abs(overlap))) <= MAX_OVERLAP:
                break
            block, _ = orthonormal_matrix(block - self.basis @ overlap)
        return block

    def _multiplied_by_adjoint(self, block: np.ndarray) -> np.ndarray:
        product: np.ndarray = adjoint(adjoint(block) @ self.rows)
        return product

    def _gram(self, images: np.ndarray) -> np.ndarray:
        dtype = np.complex128 if is_complex(images) else np.float64
        gram: np.ndarray = (adjoint(images) @ images).astype(dtype)
        return gram / self.squared_norm


@dataclass(frozen=True, slots=True)
class LanczosSolve:
    """One solve by a `LanczosSpace`: the request, and the settings of `BatchedKrylov`."""

    shape: KroneckerShape
    rank: int
    block: int  # columns of a block
    tolerance: float
    seed: int
    max_steps: int

    def solution(self, rows: np.ndarray, norm: float, progress: SolveProgress) -> Solution | None:
        """Find terms near the optimum; None where steps do not bring them there.

        ``rows`` is R in double precision, or its adjoint if that has fewer rows; ``norm`` is its
        norm, whose square neither overflows nor vanishes in single precision.
        """
        factor = rows
        n_rows, n_columns = rows.shape
        # Single saves less of a small matrix than it costs to convert it, and takes a look more: by
        # timing of 128² to 512².
        if rows.size > 2**17:
            factor = rows.astype(np.complex64 if is_complex(rows) else np.float32)
        start = random_block(self.seed, n_columns, self.block, factor.dtype.char)
        first, sizes = orthonormal_matrix(factor @ start)
        # One 1: what sinks below single precision, or loses digits there, is for double.
        if factor is not rows:
            if sizes[-1] <= 4.0 * unit_roundoff("float32") * n_columns**0.5 * sizes[0]:
                matrix = Rearrangement.of_rows(rows, norm, self.shape)
                found = matrix.from_random_columns(self.rank, self.tolerance, self.seed)
                return None if found is None else _recorded(found, progress)
            if falls_fast(sizes, self.rank):
                factor = rows
                first, _ = orthonormal_matrix(first.astype(rows.dtype))
        noise = start[:n_rows, :].astype(factor.dtype)
        space = LanczosSpace(factor, norm, first, noise)
        # One 2: blocks, until the Ritz pairs say that the error is near its optimum.
        check, _ = iterate(self._steps(space), None, progress)
        if check is None:
            return None
        pairs, excess, kind = check
        vectors = pairs.vectors[:, : self.rank].astype(factor.dtype)
        if excess > self.tolerance:
            # An error in the rounding of squares has to be measured.
            if not pairs.hides_error(self.rank, self.tolerance) or factor is not rows:
                return None
            matrix = Rearrangement.of_rows(rows, norm, self.shape)
            basis, _ = orthonormal_matrix(space.basis @ vectors)
            found = matrix.solution(basis, self.rank, self.tolerance, certain=False)
            return None if found is None else replace(found, sweeps=progress.sweeps)
        # One 3: half a step further, the triples of R V Vᴴ in double precision.
        images = (space.images @ vectors).astype(rows.dtype)
        right_basis, _ = orthonormal_matrix(images)
        left, sigma, rotation = svd_of_tall(rows @ right_basis)
        right = rotation @ adjoint(right_basis)
        squared_error = 1.0 - float(sigma @ sigma) / norm**2
        error = math.sqrt(squared_error) if has_twelve_digits(squared_error, 2.0) else None
        if self.shape.sizes[0] > self.shape.sizes[1]:
            left, right = adjoint(right), adjoint(left)
        terms = as_separated(left, sigma, right, self.shape, self.rank)
        return Solution(terms, Status.rank_reached, progress.sweeps, excess, kind, error)

    def _steps(
        self, space: LanczosSpace
    ) -> Iterator[IterationStep[tuple[RitzPairs, float, ErrorKind] | None]]:
        """Grow the space until the error is near its optimum, or rounding."""
        n_steps = max(self.max_steps, MIN_BLOCKS)
        for n_blocks in range(1, n_steps + 1):
            space.multiply()
            pairs = space.ritz_pairs()
            excess, kind = pairs.excess(self.rank, self.tolerance, n_blocks)
            objective = max(1.0 - pairs.captured(self.rank), 0.0)
            is_done = excess <= self.tolerance or pairs.hides_error(self.rank, self.tolerance)
            is_full = space.size + self.block > space.rows.shape[0]
            yield IterationStep(
                state=(pairs, excess, kind),
                relative_error=math.sqrt(objective),
                objective=objective,
                converged=is_done or is_full or n_blocks == n_steps,
            )
            space.grow()


def _recorded(solution: Solution, progress: SolveProgress) -> Solution:
    """Tell the error of a solution that took no steps."""
    progress.record(solution.relative_error or 0.0)
    return replace(solution, sweeps=progress.sweeps)


@lru_cache(maxsize=16)
def random_block(seed: int, rows: int, columns: int, type_code: str) -> np.ndarray:
    """Return the random numbers (rows, columns) that a space starts from, drawn in float32."""
    draws = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    block: np.ndarray = draws.astype(type_code)
    block.setflags(write=False)
    return block
