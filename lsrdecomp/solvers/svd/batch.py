"""Matrices of one size that are solved together: the request, and one batched SVD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import (
    Array,
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
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.iteration import SolveProgress
from lsrdecomp.solvers.solver import (
    ErrorKind,
    Event,
    Solution,
    Solver,
    Status,
    Sweep,
    validate_request,
)
from lsrdecomp.solvers.svd.singular_terms import as_sums, required_rank
from lsrdecomp.targets.target import Dense

if TYPE_CHECKING:
    from collections.abc import Callable

SVD_CHUNK_ENTRIES = 2**16
"""Entries of matrices whose SVDs are measured together: 512 KiB, which stay in a processor's
cache."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The request of one solve of a batch, after the checks of the contract."""

    batch: Array  # (L, m, n)
    shape: KroneckerShape
    rank: int | None  # as it was requested
    atol: float | None
    max_terms: int
    progress: SolveProgress

    @classmethod
    def of(
        cls,
        matrices: Any,
        shape: KroneckerShape,
        rank: int | None,
        atol: float | None,
        on_sweep: Callable[[Sweep], Any] | None,
    ) -> BatchRequest:
        """Check a request for two factors."""
        batch = as_batch(matrices)
        shape = KroneckerShape.parse(shape)
        max_terms = validate_request(tuple(batch.shape[1:]), shape, rank, atol, order=2)
        return cls(batch, shape, rank, atol, max_terms, SolveProgress(on_sweep))

    def solve_alone(
        self, position: int, solver: Solver, common_sweeps: tuple[Sweep, ...] = ()
    ) -> Solution:
        """Solve for one matrix of the batch by a solver, after common steps or without."""
        n_earlier = len(self.progress.sweeps)
        solution = self.progress.solve(
            solver,
            Dense(self.batch[position, :, :]),
            self.shape,
            rank=self.rank,
            atol=self.atol,
            event=Event.hand_over if common_sweeps else Event.start,
        )
        own_sweeps = self.progress.sweeps[n_earlier:]
        sweeps = tuple(
            replace(sweep, index=index)
            for index, sweep in enumerate((*common_sweeps, *own_sweeps), 1)
        )
        solution = replace(solution, sweeps=sweeps)
        # Terms below the rounding of the largest are none of the matrix.
        terms = solution.approximation
        weights = to_numpy(terms.weights)
        floor = max(self.shape.sizes) * unit_roundoff("float64") * weights.max(initial=0.0)
        n_above_rounding = int(np.sum(weights > floor))
        if n_above_rounding < len(weights):
            kept = terms.truncate(n_above_rounding)
            solution = replace(solution, approximation=kept, relative_error=None)
        return solution


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


def truncated_svds(request: BatchRequest) -> list[Solution]:
    """Take truncated SVDs, few enough at a time that their arrays stay small."""
    batch = request.batch
    require_finite(batch, "batch")
    height = max(1, SVD_CHUNK_ENTRIES // (batch.shape[1] * batch.shape[2]))
    solutions: list[Solution] = []
    for start in range(0, batch.shape[0], height):
        part = batch[start : min(start + height, batch.shape[0]), :, :]
        request.progress.mark(Event.start)
        solutions += _truncated_svds(part, request)
    return solutions


def _truncated_svds(batch: Array, request: BatchRequest) -> list[Solution]:
    """Take truncated SVDs in the precision of the input, without the terms that are rounding."""
    shape, max_terms, atol = request.shape, request.max_terms, request.atol
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
    request.progress.record(largest_error, objective=largest_error**2)
    record = request.progress.sweeps[-1:]
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
    """Return ‖R − U σ Vᴴ‖/‖R‖ of terms of each matrix, from entries in double precision."""
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
