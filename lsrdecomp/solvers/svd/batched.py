"""Two factors, many matrices of one size at once: block Krylov spaces of a whole batch grown together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lsrdecomp.arrays import (
    Array,
    adjoint,
    device,
    is_complex,
    is_differentiated,
    like,
    namespace,
    norm,
    require_finite,
    to_numpy,
)
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.base import (
    ErrorKind,
    Event,
    Solution,
    Solver,
    Status,
    Sweep,
    validate_request,
)
from lsrdecomp.solvers.matrix import MatrixProblem, MatrixSolver
from lsrdecomp.solvers.progress import IterationStep, SolveProgress, iterate
from lsrdecomp.solvers.svd.batch import (
    as_batch,
    as_sums,
    extrapolated_excess,
    rayleigh_ritz,
    truncated_svds,
)
from lsrdecomp.solvers.svd.dense import as_matrix
from lsrdecomp.solvers.svd.golub_kahan import BlockGolubKahan
from lsrdecomp.solvers.svd.gram import Gram, Rearrangement
from lsrdecomp.targets.base import Dense

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lsrdecomp.kronecker.shape import KroneckerShape

CHUNK_ENTRIES = 2**20
"""Entries of the matrices that take their steps together."""

CACHED = 2**16
"""Entries of the matrices whose residuals are formed together: 512 KiB, which stay in a processor's
cache."""

SMALL = 160
"""Terms that a matrix can have up to which its SVD is the faster way."""

MODERATE = 512
"""Terms that a matrix can have up to which its Gram matrix is the faster way where a common space
was not enough."""


@dataclass(frozen=True, slots=True)
class BatchedKrylov(MatrixSolver):
    """Leading singular triples of each R(M) of a batch, by block Lanczos on R Rᴴ, fully reorthogonalised.

    All matrices take the same steps, as batched products in single precision; a Rayleigh–Ritz step
    in the precision of the input ends it, so what single precision costs is the square of its
    rounding. Matrices whose size falls fast from one random column of the first block to the next
    are solved by `Gram`, each alone, and so are moderate ones whose error is not within
    ``tolerance`` of the optimum by extrapolation of what the last steps gained, or is too small to
    be told from ‖R‖² − Σσ²; larger ones by `BlockGolubKahan`. Small matrices, and those of which
    many terms are asked for, go through one batched SVD.

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

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import KroneckerShape
    >>> i = np.arange(64.0)
    >>> matrices = [1.0 / (start + i[:, None] + i[None, :]) for start in (1, 2, 3)]
    >>> solutions = BatchedKrylov().solve_batch(matrices, KroneckerShape(((8, 8), (8, 8))), rank=2)
    >>> [np.round(solution.approximation.weights, 3).tolist() for solution in solutions]
    [[2.149, 0.65], [1.81, 0.377], [1.652, 0.262]]
    """

    order: ClassVar[int] = 2
    tolerance: float = 1e-4
    columns: int = 16
    seed: int = 0
    max_steps: int = 10

    def _solve(self, problem: MatrixProblem) -> Solution:
        """One matrix as a batch of one, formed; the method is that of `solve_batch`."""
        batch = as_batch(as_matrix(problem.target)[None, :, :])
        return self._solved(
            batch, problem.shape, problem.rank, problem.atol, problem.max_terms, problem.progress
        )[0]

    def solve_batch(
        self,
        matrices: Any,
        shape: KroneckerShape,
        *,
        rank: int | None = None,
        atol: float | None = None,
        on_sweep: Callable[[Sweep], Any] | None = None,
    ) -> tuple[Solution, ...]:
        """Leading singular triples of the rearrangement of each matrix.

        Unlike a batched ``numpy.linalg.svd`` it stops when each error is near its optimum.

        Parameters
        ----------
        matrices : array_like, shape (L, m, n), or a sequence of matrices of one size
        shape : KroneckerShape
            Two factors.
        rank : int, optional
            Terms; a matrix that has fewer gets fewer.
        atol : float, optional
            Allowed ‖M − M̂‖_F of each matrix. Large matrices are then solved one by one.
        on_sweep : callable, optional
            Told the largest error of the matrices that take their steps together, then the steps of
            single ones.

        Returns
        -------
        tuple of Solution, one a matrix
            In the element type of the matrices; in double precision where solved alone. ``sweeps``
            are the common steps and those of this matrix alone; ``optimality_gap`` is an estimate,
            or what `Gram` says, zero and bounded where the SVD was taken.

        Raises
        ------
        ShapeError, PrecisionError, BudgetError
            For sizes that differ or do not tile, entries that are not finite, and a missing goal.
        """
        batch = as_batch(matrices)
        most = validate_request(tuple(batch.shape[1:]), shape, rank, atol, order=self.order)
        return tuple(self._solved(batch, shape, rank, atol, most, SolveProgress(on_sweep)))

    def _solved(
        self,
        batch: Array,
        shape: KroneckerShape,
        rank: int | None,
        atol: float | None,
        most: int,
        progress: SolveProgress,
    ) -> list[Solution]:
        block = -(-most // self.columns) * self.columns
        # Batch 1: an SVD where a space would soon hold the whole matrix, or where torch
        # differentiates it.
        whole = shape.max_separation_rank <= max(SMALL, 3 * block) or is_differentiated(batch)
        # Batch 2: so many at a time that their arrays stay small; each part has its own common
        # steps.
        height = max(1, (CACHED if whole else CHUNK_ENTRIES) // (batch.shape[1] * batch.shape[2]))
        solutions: list[Solution] = []
        for start in range(0, batch.shape[0], height):
            part = batch[start : min(start + height, batch.shape[0]), :, :]
            progress.mark(Event.start)
            if whole:
                solutions += truncated_svds(part, shape, most, atol, progress)
            elif atol is not None:
                solutions += [
                    self._alone(part[i, :, :], shape, rank, atol, progress)
                    for i in range(part.shape[0])
                ]
            else:
                solutions += self._together(part, shape, most, block, progress)
        return solutions

    def _alone(
        self,
        matrix: Array,
        shape: KroneckerShape,
        rank: int | None,
        atol: float | None,
        progress: SolveProgress,
        before: tuple[Sweep, ...] = (),
    ) -> Solution:
        """One matrix by `Gram` or `BlockGolubKahan`, its records behind the common ones ``before``."""
        gram = atol is None and (not before or shape.max_separation_rank <= MODERATE)
        solver: Solver = (
            Gram(self.tolerance, self.seed)
            if gram
            else BlockGolubKahan(None, self.seed, self.tolerance)
        )
        earlier, event = len(progress.sweeps), Event.hand_over if before else Event.start
        solution = progress.solve(solver, Dense(matrix), shape, rank=rank, atol=atol, event=event)
        own = enumerate((*before, *progress.sweeps[earlier:]), 1)
        return replace(solution, sweeps=tuple(replace(sweep, index=index) for index, sweep in own))

    def _together(
        self, batch: Array, shape: KroneckerShape, rank: int, block: int, progress: SolveProgress
    ) -> list[Solution]:
        """Those whose size does not fall fast by common steps; the others, and what these leave open, each alone."""
        xp = namespace(batch)
        # Together 1: norms, by which entries are refused that are not finite.
        norms = np.asarray([norm(batch[i, :, :]) for i in range(int(batch.shape[0]))])
        if not np.all(np.isfinite(norms)):
            require_finite(batch, "batch")
        usable = (norms > 1e-15) & (norms < 1e15)  # single precision holds them and their squares
        operators, solutions = rearrange(batch, shape), dict[int, Solution]()
        # Together 2: one product with random columns is enough where a spectrum falls fast.
        for i in np.flatnonzero(usable).tolist():
            matrix = Rearrangement.of(operators[i, :, :], float(norms[i]), shape)
            solution = matrix.from_random_columns(rank, self.tolerance, self.seed)
            if solution is not None:
                progress.record(solution.relative_error or 0.0)
                solutions[i] = replace(solution, sweeps=progress.sweeps[-1:])
        # Together 3: the others take common steps.
        slow = [i for i in np.flatnonzero(usable).tolist() if i not in solutions]
        before = len(progress.sweeps)
        if slow:
            if len(slow) < len(norms):
                operators = xp.take(
                    operators, xp.asarray(slow, dtype=xp.int64, device=device(batch)), axis=0
                )
            near = self._near(operators, norms[slow], rank, block, shape, progress)
            solutions |= {slow[index]: solution for index, solution in near.items()}
        # Together 4: what these leave open, and what single precision cannot hold, alone.
        common = progress.sweeps[before:]
        for i in range(len(norms)):
            if i not in solutions:
                earlier = common if i in slow else ()
                solutions[i] = self._alone(batch[i, :, :], shape, rank, None, progress, earlier)
        return [solutions[i] for i in range(len(norms))]

    def _near(
        self,
        operators: Array,
        norms: np.ndarray,
        rank: int,
        block: int,
        shape: KroneckerShape,
        progress: SolveProgress,
    ) -> dict[int, Solution]:
        """Those whose error common steps bring near the optimum."""
        xp, before = namespace(operators), len(progress.sweeps)
        begun = operators[:, :, :0], np.full(norms.shape, math.inf)
        (basis, excess), _ = iterate(self._steps(operators, norms, rank, block), begun, progress)
        # Rayleigh–Ritz in the precision of the input: the error of single precision is squared.
        u, sigma, vh = rayleigh_ritz(operators, xp.linalg.qr(xp.astype(basis, operators.dtype))[0])
        captured = np.sum(to_numpy(sigma).astype(np.float64) ** 2, axis=1) / norms**2
        # Below this the error is lost in the rounding of ‖R‖² − Σσ².
        double = unit_roundoff(operators.dtype) == unit_roundoff("float64")
        floor = 1e6 * unit_roundoff("float32") ** 2 if double else 1e3 * unit_roundoff("float32")
        good, common = (
            (excess <= self.tolerance) & (1.0 - captured > floor),
            progress.sweeps[before:],
        )
        return {
            i: Solution(
                separated, Status.rank_reached, common, float(excess[i]), ErrorKind.estimated
            )
            for i, separated in enumerate(as_sums(u, sigma, vh, shape))
            if good[i]
        }

    def _steps(
        self, operators: Array, norms: np.ndarray, rank: int, block: int
    ) -> Iterator[IterationStep[tuple[Array, np.ndarray]]]:
        """Leading ``rank`` Ritz vectors (L, p, rank) of each R Rᴴ, and the excess of the errors."""
        xp = namespace(operators)
        single = xp.astype(operators, xp.complex64 if is_complex(operators) else xp.float32)
        columns = single.shape[2]
        start: Any = np.random.default_rng(self.seed).standard_normal((columns, block))
        # Noise of the size of rounding fills the directions that a matrix of low rank lacks.
        noise = np.random.default_rng(self.seed + 1).standard_normal((single.shape[1], block))
        noise = like(noise * unit_roundoff("float32") / single.shape[1] ** 0.5, single)[None, :, :]
        size_of = like(norms, single)[:, None, None]
        basis = xp.linalg.qr(single @ like(start, single)[None, :, :] + noise * size_of)[0]
        images = adjoint(single) @ basis
        captured: list[np.ndarray] = []
        for step in range(max(3, self.max_steps)):
            # Krylov 1: R Rᴴ times the newest block, orthogonal to all before.
            if step:
                rest = single @ images[:, :, -block:]
                rest = rest - basis @ (adjoint(basis) @ rest) + noise * size_of**2
                fresh = xp.linalg.qr(rest - basis @ (adjoint(basis) @ rest))[0]
                basis = xp.concat((basis, fresh), axis=2)
                images = xp.concat((images, adjoint(single) @ fresh), axis=2)
            # Krylov 2: what the space captures of each matrix, and what further steps may add.
            gram = adjoint(images) @ images
            if step < 2:  # never the last, so without vectors
                values, leading = xp.linalg.eigvalsh(gram), basis[:, :, :rank]
            else:
                values, vectors = xp.linalg.eigh(gram)
                leading = basis @ vectors[:, :, -rank:]
            spectrum = to_numpy(values).astype(np.float64)[:, -rank:]
            captured.append(np.minimum(np.sum(spectrum, axis=1) / norms**2, 1.0))
            excess, left = extrapolated_excess(captured), float(np.max(1.0 - captured[-1]))
            full = basis.shape[2] + block > min(single.shape[1:])
            # Krylov 3: enough where every error is near its optimum, or the last step gained no
            # more than rounding.
            near = excess <= self.tolerance
            if step > 1:
                near |= captured[-1] - captured[-2] <= 4.0 * unit_roundoff("float32")
            settled = full or bool(np.all(near))
            yield IterationStep(
                (leading, excess), math.sqrt(left), objective=left, converged=settled
            )
