"""Two factors, many matrices of one size: block Krylov spaces of a whole batch grown together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
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
from lsrdecomp.solvers.svd.batched_gram import gram_solutions, is_double_array
from lsrdecomp.solvers.svd.dense import as_matrix
from lsrdecomp.solvers.svd.golub_kahan import BlockGolubKahan
from lsrdecomp.solvers.svd.gram import Gram, Rearrangement
from lsrdecomp.solvers.svd.options import SketchOptions
from lsrdecomp.targets.base import Dense

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lsrdecomp.kronecker.shape import KroneckerShape


@dataclass(frozen=True, slots=True)
class BatchedKrylov(MatrixSolver):
    """Leading singular triples of each R(M) of a batch, by block Lanczos on R Rᴴ.

    All matrices take the same steps, as batched products in single precision; a Rayleigh–Ritz step
    in the precision of the input ends it, half a step further, so single precision costs no more
    than the square of its rounding. Matrices whose size falls fast from one random column of the
    first block to the next are solved by `Gram`, each alone, and so are moderate ones whose error
    is not within ``tolerance`` of the optimum by extrapolation of what the last steps gained, or is
    too small to be told from ‖R‖² − Σσ²; larger ones by `BlockGolubKahan`. Small matrices, and
    those of which many terms are asked for, go through one batched SVD.

    Parameters
    ----------
    tolerance : float
        Allowed excess of each error over the optimum, relative.
    columns : int
        Those of a block are the least multiple of this that holds the terms asked for.
    seed : int
        Of the random start, which all matrices share.
    max_steps : int
        Maximum blocks in a space, three at least: the excess is told from what they gain.
    svd_limit : int
        Terms that a matrix can have up to which its SVD is taken, as the faster way: by timing of
        64 matrices of 64 × 64.
    min_gram_side, gram_sides_per_term : int
        Such matrices, where NumPy holds them in double precision, give a few terms by their Gram
        matrices sooner: from so many rows or columns of R(M) on, the fewer, and so many for each
        term. By timing of 64 matrices of 36 × 36 to 144 × 144.
    gram_limit : int
        Terms that a matrix can have up to which `Gram` takes over where common steps were not
        enough. By hand.
    chunk_entries, svd_chunk_entries : int
        Entries of the matrices that take their steps together, and of those whose SVDs are measured
        together: 512 KiB, which stay in a processor's cache.
    sketch : SketchOptions
        When random columns are drawn, and how many.

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
    svd_limit: int = 160
    min_gram_side: int = 33
    gram_sides_per_term: int = 8
    gram_limit: int = 512
    chunk_entries: int = 2**20
    svd_chunk_entries: int = 2**16
    sketch: SketchOptions = field(default_factory=SketchOptions)

    def _solve(self, problem: MatrixProblem) -> Solution:
        """Solve for one matrix, formed, as a batch of one; the method is that of `solve_batch`."""
        batch = as_batch(as_matrix(problem.target)[None, :, :])
        request = _Request(
            problem.shape, problem.rank, problem.atol, problem.max_terms, problem.progress
        )
        return self._solved(batch, request)[0]

    def solve_batch(
        self,
        matrices: Any,
        shape: KroneckerShape,
        *,
        rank: int | None = None,
        atol: float | None = None,
        on_sweep: Callable[[Sweep], Any] | None = None,
    ) -> tuple[Solution, ...]:
        """Find the leading singular triples of the rearrangement of each matrix.

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
        size = tuple(batch.shape[1:])
        max_terms = validate_request(size, shape, rank, atol, order=self.order)
        request = _Request(shape, rank, atol, max_terms, SolveProgress(on_sweep))
        return tuple(self._solved(batch, request))

    def _solved(self, batch: Array, request: _Request) -> list[Solution]:
        block = self._block_size(request.max_terms)
        # Batch 1: an SVD where a space would soon hold the whole matrix, or where torch
        # differentiates it.
        svd_limit = max(self.svd_limit, 3 * block)
        by_svd = request.shape.max_separation_rank <= svd_limit or is_differentiated(batch)
        # Batch 2: so many at a time that their arrays stay small; each part has its own common
        # steps.
        entries = self.svd_chunk_entries if by_svd else self.chunk_entries
        height = max(1, entries // (batch.shape[1] * batch.shape[2]))
        progress = request.progress
        solutions: list[Solution] = []
        for start in range(0, batch.shape[0], height):
            part = batch[start : min(start + height, batch.shape[0]), :, :]
            progress.mark(Event.start)
            if by_svd:
                solutions += self._small(part, request)
            elif request.atol is not None:
                solutions += [self._alone(part[i, :, :], request) for i in range(part.shape[0])]
            else:
                solutions += self._together(part, request)
        return solutions

    def _small(self, batch: Array, request: _Request) -> list[Solution]:
        """Solve for a part of the batch by Gram matrices where these are faster, else by SVDs."""
        shape = request.shape
        max_terms = request.max_terms
        side = min(shape.sizes)
        has_few_terms = request.atol is None and self.gram_sides_per_term * max_terms <= side
        solutions: dict[int, Solution] = {}
        if has_few_terms and side >= self.min_gram_side and is_double_array(batch):
            solutions = gram_solutions(batch, shape, max_terms, self.tolerance, request.progress)
        remaining = [i for i in range(batch.shape[0]) if i not in solutions]
        if remaining:
            part = batch[remaining] if solutions else batch
            by_svd = truncated_svds(part, shape, max_terms, request.atol, request.progress)
            solutions.update(zip(remaining, by_svd, strict=True))
        return [solutions[i] for i in range(batch.shape[0])]

    def _block_size(self, rank: int) -> int:
        """Return the least multiple of ``columns`` that holds so many terms."""
        return -(-rank // self.columns) * self.columns

    def _alone(
        self, matrix: Array, request: _Request, common_sweeps: tuple[Sweep, ...] = ()
    ) -> Solution:
        """Solve for one matrix by `Gram` or `BlockGolubKahan`, after common steps or without."""
        is_moderate = request.shape.max_separation_rank <= self.gram_limit
        solver: Solver
        if request.atol is None and (not common_sweeps or is_moderate):
            solver = Gram(self.tolerance, self.seed, self.sketch)
        else:
            solver = BlockGolubKahan(seed=self.seed, tolerance=self.tolerance, sketch=self.sketch)
        progress = request.progress
        n_earlier = len(progress.sweeps)
        solution = progress.solve(
            solver,
            Dense(matrix),
            request.shape,
            rank=request.rank,
            atol=request.atol,
            event=Event.hand_over if common_sweeps else Event.start,
        )
        sweeps = []
        for index, sweep in enumerate((*common_sweeps, *progress.sweeps[n_earlier:]), 1):
            sweeps.append(replace(sweep, index=index))
        return replace(solution, sweeps=tuple(sweeps))

    def _together(self, batch: Array, request: _Request) -> list[Solution]:
        """Solve for a part of the batch by common steps, and for what they leave open alone."""
        progress = request.progress
        # Together 1: norms, by which entries are refused that are not finite.
        n_matrices = int(batch.shape[0])
        norms = np.asarray([norm(batch[i, :, :]) for i in range(n_matrices)])
        if not np.all(np.isfinite(norms)):
            require_finite(batch, "batch")
        operators = rearrange(batch, request.shape)
        # Together 2: one product with random columns is enough where a spectrum falls fast.
        fits_single = (norms > 1e-15) & (norms < 1e15)  # it holds them and their squares
        usable = np.flatnonzero(fits_single).tolist()
        solutions: dict[int, Solution] = {}
        for i in usable:
            solution = self._from_random_columns(operators[i, :, :], float(norms[i]), request)
            if solution is not None:
                solutions[i] = solution
        # Together 3: the others take common steps.
        slow = [i for i in usable if i not in solutions]
        n_earlier = len(progress.sweeps)
        if slow:
            if len(slow) < n_matrices:
                xp = namespace(batch)
                positions = xp.asarray(slow, dtype=xp.int64, device=device(batch))
                operators = xp.take(operators, positions, axis=0)
            for position, solution in self._near(operators, norms[slow], request).items():
                solutions[slow[position]] = solution
        # Together 4: what these leave open, and what single precision cannot hold, alone.
        common_sweeps = progress.sweeps[n_earlier:]
        for i in range(n_matrices):
            if i not in solutions:
                earlier = common_sweeps if i in slow else ()
                request_alone = replace(request, rank=request.max_terms, atol=None)
                solutions[i] = self._alone(batch[i, :, :], request_alone, earlier)
        return [solutions[i] for i in range(n_matrices)]

    def _from_random_columns(
        self, operator: Array, size: float, request: _Request
    ) -> Solution | None:
        """Find the terms of one matrix by random columns, if its spectrum falls fast."""
        matrix = Rearrangement.of(operator, size, request.shape)
        solution = matrix.from_random_columns(
            request.max_terms, self.tolerance, self.seed, self.sketch
        )
        if solution is None:
            return None
        request.progress.record(solution.relative_error or 0.0)
        return replace(solution, sweeps=request.progress.sweeps[-1:])

    def _near(self, operators: Array, norms: np.ndarray, request: _Request) -> dict[int, Solution]:
        """Return solutions, by position, where common steps bring the error near the optimum."""
        xp = namespace(operators)
        progress = request.progress
        n_earlier = len(progress.sweeps)
        initial = operators[:, :, :0], np.full(norms.shape, math.inf)
        steps = self._steps(operators, norms, request.max_terms)
        (images, excess), _ = iterate(steps, initial, progress)
        # Rayleigh–Ritz with the right vectors, in the precision of the input: the error of single
        # precision is squared, and the product with R is half a step further than the last one.
        right_basis = xp.linalg.qr(xp.astype(images, operators.dtype))[0]
        v, sigma, uh = rayleigh_ritz(adjoint(operators), right_basis)
        u = adjoint(uh)
        vh = adjoint(v)
        captured = np.sum(to_numpy(sigma).astype(np.float64) ** 2, axis=1) / norms**2
        # Below this the error is lost in the rounding of ‖R‖² − Σσ².
        if unit_roundoff(operators.dtype) == unit_roundoff("float64"):
            floor = 1e6 * unit_roundoff("float32") ** 2
        else:
            floor = 1e3 * unit_roundoff("float32")
        is_near = (excess <= self.tolerance) & (1.0 - captured > floor)
        common_sweeps = progress.sweeps[n_earlier:]
        solutions = {}
        for i, terms in enumerate(as_sums(u, sigma, vh, request.shape)):
            if is_near[i]:
                solutions[i] = Solution(
                    terms,
                    Status.rank_reached,
                    common_sweeps,
                    float(excess[i]),
                    ErrorKind.estimated,
                )
        return solutions

    def _steps(
        self, operators: Array, norms: np.ndarray, rank: int
    ) -> Iterator[IterationStep[tuple[Array, np.ndarray]]]:
        """Yield the images Rᴴ u (L, q, rank) of leading Ritz vectors, and the excess of errors."""
        xp = namespace(operators)
        block = self._block_size(rank)
        single = xp.astype(operators, xp.complex64 if is_complex(operators) else xp.float32)
        _, rows, columns = single.shape
        norms_like = like(norms, single)[:, None, None]
        # Noise of the size of rounding fills the directions that a matrix of low rank lacks.
        noise = np.random.default_rng(self.seed + 1).standard_normal((rows, block))
        noise = noise * unit_roundoff("float32") / rows**0.5
        noise = like(noise, single)[None, :, :]
        start = np.random.default_rng(self.seed).standard_normal((columns, block))
        start = like(start, single)[None, :, :]
        basis = xp.linalg.qr(single @ start + noise * norms_like)[0]
        images = adjoint(single) @ basis
        captured: list[np.ndarray] = []
        for step in range(max(3, self.max_steps)):
            # Krylov 1: R Rᴴ times the newest block, orthogonal to all before.
            if step:
                new = single @ images[:, :, -block:]
                new = new - basis @ (adjoint(basis) @ new) + noise * norms_like**2
                new = _orthogonal_block(new, basis)
                basis = xp.concat((basis, new), axis=2)
                images = xp.concat((images, adjoint(single) @ new), axis=2)
            # Krylov 2: the energy of each matrix in the space, and what further steps may add.
            gram = adjoint(images) @ images
            if step < 2:  # never the last, so without vectors
                values = xp.linalg.eigvalsh(gram)
                leading = images[:, :, :rank]
            else:
                values, vectors = xp.linalg.eigh(gram)
                leading = images @ vectors[:, :, -rank:]
            energies = np.sum(to_numpy(values).astype(np.float64)[:, -rank:], axis=1)
            captured.append(np.minimum(energies / norms**2, 1.0))
            excess = extrapolated_excess(captured)
            # Krylov 3: the end, when every error is near its optimum, or the last step gained no
            # more than rounding.
            is_done = excess <= self.tolerance
            if step > 1:
                is_done |= captured[-1] - captured[-2] <= 4.0 * unit_roundoff("float32")
            is_full = basis.shape[2] + block > min(rows, columns)
            squared_error = float(np.max(1.0 - captured[-1]))
            yield IterationStep(
                state=(leading, excess),
                relative_error=math.sqrt(squared_error),
                objective=squared_error,
                converged=is_full or bool(np.all(is_done)),
            )


def _orthogonal_block(block: Array, basis: Array, max_overlap: float = 1e-4) -> Array:
    """Return an orthonormal basis of each block's part outside of a space.

    A column of the block that nearly depends on others is mostly rounding after they are taken out,
    in the space and outside. Where the result overlaps the space by more than ``max_overlap``,
    whose square is then an error of the energies, it is projected again.
    """
    xp = namespace(block)
    block = xp.linalg.qr(block - basis @ (adjoint(basis) @ block))[0]
    overlap = adjoint(basis) @ block
    if float(xp.max(xp.abs(overlap))) > max_overlap:
        block = xp.linalg.qr(block - basis @ overlap)[0]
    return block


@dataclass(frozen=True, slots=True)
class _Request:
    """The request of one solve of a batch, after the checks of the contract."""

    shape: KroneckerShape
    rank: int | None  # as it was requested
    atol: float | None
    max_terms: int
    progress: SolveProgress
