"""Two factors, moderate matrices of one size: block Krylov spaces of a batch grown together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lsrdecomp.arrays import (
    Array,
    adjoint,
    as_double,
    device,
    is_complex,
    is_differentiated,
    is_double,
    like,
    namespace,
    norm,
    require_finite,
    to_numpy,
)
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.iteration import IterationStep, SolveProgress, iterate
from lsrdecomp.solvers.matrix import MatrixProblem, MatrixSolver
from lsrdecomp.solvers.solver import (
    ErrorKind,
    Event,
    Solution,
    Solver,
    Status,
    Sweep,
    validate_request,
)
from lsrdecomp.solvers.svd.batch import as_batch, as_sums, rayleigh_ritz, truncated_svds
from lsrdecomp.solvers.svd.batched_gram import gram_solutions, is_double_array
from lsrdecomp.solvers.svd.dense import as_matrix
from lsrdecomp.solvers.svd.golub_kahan import BlockGolubKahan
from lsrdecomp.solvers.svd.gram import Gram, Rearrangement, falls_fast
from lsrdecomp.solvers.svd.lanczos import (
    MIN_BLOCKS,
    LanczosSpaces,
    RitzPairs,
    orthonormal_columns,
)
from lsrdecomp.solvers.svd.numpy_lanczos import LanczosSolve
from lsrdecomp.solvers.svd.subspace import MAX_SIDE, Workspace
from lsrdecomp.targets.residual import has_twelve_digits
from lsrdecomp.targets.target import Dense

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CHUNK_ENTRIES = 2**20
"""Entries of the matrices of a batch that take their steps together."""

SVD_CHUNK_ENTRIES = 2**16
"""Entries of those whose SVDs are measured together: 512 KiB, which stay in a processor's cache."""


@dataclass(frozen=True, slots=True)
class BatchedKrylov(MatrixSolver):
    """Leading singular triples of each R(M) of a batch, by block Lanczos on R Rᴴ [1]_.

    All matrices take the same steps, as batched products in single precision; a Rayleigh–Ritz step
    in the precision of the input ends it, half a step further, so single precision costs no more
    than the square of its rounding. The steps end when each error is within ``tolerance`` of its
    optimum, by what couples the Ritz vectors to the rest of R (see `RitzPairs`): a bound where the
    error is smaller than the last term, else an estimate. Matrices whose size falls fast from one
    random column of the first block to the next take their steps in double precision; where it
    falls below the rounding of single, random columns alone are enough. What this leaves open, or
    loses in the rounding of ‖R‖² − Σσ², is solved alone: by `Gram` if moderate, else by
    `BlockGolubKahan`. Small matrices, and those of which many terms are asked for, go through one
    batched SVD. One NumPy array in double precision takes the same steps with less around them.

    Parameters
    ----------
    tolerance : float
        Allowed excess of each error over the optimum, relative.
    columns : int
        Those of a block are the least multiple of this that holds the terms asked for and
        four more: with eight, a product with a block takes hardly more time
        than with four.
    seed : int
        Of the random start, which all matrices share.
    max_steps : int
        Maximum blocks in a space, two at least.
    svd_limit : int
        Terms that a matrix can have up to which its SVD is taken, as the faster way: by timing of
        64 matrices of 64 × 64.

    References
    ----------
    .. [1] G. H. Golub and R. Underwood, The block Lanczos method for computing eigenvalues, in
       Mathematical Software III, 1977. doi:10.1016/B978-0-12-587260-7.50018-2

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
    columns: int = 8
    seed: int = 0
    max_steps: int = 10
    svd_limit: int = 160

    def _solve(self, problem: MatrixProblem) -> Solution:
        """Solve for one matrix, formed, as a batch of one; the method is that of `solve_batch`."""
        target = problem.target
        matrix = target.matrix if isinstance(target, Dense) else as_matrix(target)
        request = _Request(
            problem.shape, problem.rank, problem.atol, problem.max_terms, problem.progress
        )
        if self._suits_one(matrix, target.norm, request):
            return self._solved_one(matrix, target.norm, request)
        return self._solved(matrix[None, :, :], request, [target.norm])[0]

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
            In the element type of the matrices; in double precision where the spectrum falls fast
            or a matrix was solved alone. ``sweeps`` are the common steps and those of this matrix
            alone; ``optimality_gap`` is what `RitzPairs` or `Gram` says, zero and bounded where the
            SVD was taken.

        Raises
        ------
        ShapeError, PrecisionError, BudgetError
            For sizes that differ or do not tile, entries that are not finite, and a missing goal.
        """
        batch = as_batch(matrices)
        shape = KroneckerShape.parse(shape)
        size = tuple(batch.shape[1:])
        max_terms = validate_request(size, shape, rank, atol, order=self.order)
        request = _Request(shape, rank, atol, max_terms, SolveProgress(on_sweep))
        return tuple(self._solved(batch, request))

    def _solved(
        self, batch: Array, request: _Request, norms: list[float] | None = None
    ) -> list[Solution]:
        """Solve for the matrices of a batch, whose ``norms`` may be known."""
        block = self._block_size(request.max_terms)
        # Batch 1: an SVD where a space would soon hold the whole matrix. Where torch differentiates
        # it each is solved alone, since only there values that are rounding are left out.
        if is_differentiated(batch):
            return [self._alone(batch[i, :, :], request) for i in range(batch.shape[0])]
        svd_limit = max(self.svd_limit, 3 * block)
        by_svd = request.shape.max_separation_rank <= svd_limit
        # Batch 2: so many at a time that their arrays stay small; each part has its own common
        # steps.
        entries = SVD_CHUNK_ENTRIES if by_svd else CHUNK_ENTRIES
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
                part_norms = norms or [norm(part[i, :, :]) for i in range(part.shape[0])]
                solutions += self._together(part, part_norms, request)
        return solutions

    def _small(self, batch: Array, request: _Request) -> list[Solution]:
        """Solve for a part of the batch by Gram matrices where these are faster, else by SVDs."""
        shape = request.shape
        max_terms = request.max_terms
        side = min(shape.sizes)
        # By timing of 64 matrices of 36 × 36 to 144 × 144; powers are fast for more terms.
        sides_per_term = 4 if side <= MAX_SIDE else 8
        has_few_terms = request.atol is None and sides_per_term * max_terms <= side
        solutions: dict[int, Solution] = {}
        if has_few_terms and side > 32 and is_double_array(batch):
            solutions = gram_solutions(
                batch,
                shape,
                max_terms,
                request.progress,
                tolerance=self.tolerance,
                seed=self.seed,
                workspace=request.workspace,
            )
        remaining = [i for i in range(batch.shape[0]) if i not in solutions]
        if remaining:
            part = batch[remaining] if solutions else batch
            by_svd = truncated_svds(part, shape, max_terms, request.atol, request.progress)
            solutions.update(zip(remaining, by_svd, strict=True))
        return [solutions[i] for i in range(batch.shape[0])]

    def _suits_one(self, matrix: Array, norm: float, request: _Request) -> bool:
        """Return whether a space of one NumPy matrix in double precision can hold the terms."""
        # From 96 on by timing.
        side = min(request.shape.sizes)
        has_room = side >= 96 and side > 3 * self._block_size(request.max_terms)
        is_rank = request.atol is None and has_room
        return is_rank and is_double_array(matrix) and 1e-15 < norm < 1e15

    def _solved_one(self, matrix: np.ndarray, norm: float, request: _Request) -> Solution:
        """Solve for one matrix by its own steps, and for what these leave open alone."""
        rows = rearrange(matrix, request.shape)
        if rows.shape[0] > rows.shape[1]:
            rows = adjoint(rows)
        solve = LanczosSolve(
            request.shape,
            request.max_terms,
            self._block_size(request.max_terms),
            self.tolerance,
            self.seed,
            self.max_steps,
        )
        solution = solve.solution(rows, norm, request.progress)
        if solution is not None:
            return solution
        request_alone = replace(request, rank=request.max_terms, atol=None)
        return self._alone(matrix, request_alone, request.progress.sweeps)

    def _block_size(self, rank: int) -> int:
        """Return the least multiple of ``columns`` that holds so many terms, and four more."""
        return -(-(rank + 4) // self.columns) * self.columns

    def _alone(
        self, matrix: Array, request: _Request, common_sweeps: tuple[Sweep, ...] = ()
    ) -> Solution:
        """Solve for one matrix by `Gram` or `BlockGolubKahan`, after common steps or without."""
        is_moderate = request.shape.max_separation_rank <= 512  # by hand
        solver: Solver
        if request.atol is None and (not common_sweeps or is_moderate):
            solver = Gram(self.tolerance, self.seed)
        else:
            solver = BlockGolubKahan(seed=self.seed, tolerance=self.tolerance)
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

    def _together(self, batch: Array, norms: Sequence[float], request: _Request) -> list[Solution]:
        """Solve for a part of the batch by common steps, and for what they leave open alone."""
        # Together 1: entries are refused that are not finite; single precision holds norms in this
        # range, and their squares.
        if not all(map(math.isfinite, norms)):
            require_finite(batch, "batch")
        usable = [i for i, each in enumerate(norms) if 1e-15 < each < 1e15]
        # Together 2: R, or its adjoint if that has fewer rows, times random columns.
        operators = rearrange(batch, request.shape)
        if operators.shape[1] > operators.shape[2]:
            operators = adjoint(operators)
        solutions: dict[int, Solution] = {}
        common_sweeps: dict[int, tuple[Sweep, ...]] = {}
        if usable:
            usable_norms = np.asarray([norms[i] for i in usable])
            found, sweeps = self._in_common(_taken(operators, usable), usable_norms, request)
            solutions = {usable[i]: solution for i, solution in found.items()}
            common_sweeps = {usable[i]: each for i, each in sweeps.items()}
        # Together 3: what this leaves open, and what single precision cannot hold, alone.
        for i in range(len(norms)):
            if i not in solutions:
                request_alone = replace(request, rank=request.max_terms, atol=None)
                solutions[i] = self._alone(batch[i, :, :], request_alone, common_sweeps.get(i, ()))
        return [solutions[i] for i in range(len(norms))]

    def _in_common(
        self, operators: Array, norms: np.ndarray, request: _Request
    ) -> tuple[dict[int, Solution], dict[int, tuple[Sweep, ...]]]:
        """Solve by common steps that begin with one product with random columns.

        Returns
        -------
        solutions : dict of Solution
            By position, of the matrices whose error is near its optimum.
        sweeps : dict of tuples of Sweep
            By position, of the matrices that took steps, their records.
        """
        xp = namespace(operators)
        progress = request.progress
        n_matrices, rows, columns = (int(size) for size in operators.shape)
        block = self._block_size(request.max_terms)
        random = np.random.default_rng(self.seed).standard_normal((columns, block), np.float32)
        single = xp.astype(operators, xp.complex64 if is_complex(operators) else xp.float32)
        start = like(random, single)
        basis, sizes = orthonormal_columns(single @ start[None, :, :])
        # Common 1: what sinks below single precision needs a few more columns in double.
        solutions: dict[int, Solution] = {}
        fast: list[int] = []
        slow: list[int] = []
        invisible = 4.0 * unit_roundoff("float32") * columns**0.5
        for i in range(n_matrices):
            if sizes[i][-1] > invisible * sizes[i][0]:
                is_fast = falls_fast(sizes[i], request.max_terms)
                (fast if is_fast else slow).append(i)
                continue
            matrix = Rearrangement.of_rows(operators[i, :, :], float(norms[i]), request.shape)
            solution = matrix.from_random_columns(request.max_terms, self.tolerance, self.seed)
            if solution is not None:
                progress.record(solution.relative_error or 0.0)
                solutions[i] = replace(solution, sweeps=progress.sweeps[-1:])
        # Common 2: the others take steps; in double precision where a spectrum falls fast, for
        # which single has too few digits.
        sweeps: dict[int, tuple[Sweep, ...]] = {}
        for positions in (fast, slow):
            if not positions:
                continue
            exact = _taken(operators, positions)
            first = _taken(basis, positions)
            factor = _taken(single, positions)
            if positions is fast:
                exact = factor = as_double(exact)
                first, _ = orthonormal_columns(as_double(first))
            noise = xp.astype(start[:rows, :], first.dtype)
            spaces = LanczosSpaces(factor, norms[positions], first, noise)
            n_earlier = len(progress.sweeps)
            progress.mark(Event.start)
            steps = self._steps(spaces, request.max_terms)
            check, _ = iterate(steps, _Check(spaces, [], []), progress)
            records = progress.sweeps[n_earlier:]
            sweeps.update(dict.fromkeys(positions, records))
            for i, solution in self._near(exact, norms[positions], check, request).items():
                solutions[positions[i]] = replace(solution, sweeps=records)
        return solutions, sweeps

    def _steps(self, spaces: LanczosSpaces, rank: int) -> Iterator[IterationStep[_Check]]:
        """Grow the spaces until the error of each matrix is near its optimum, or rounding."""
        side = min(spaces.operators.shape[1:])
        n_steps = max(self.max_steps, MIN_BLOCKS)
        for n_blocks in range(1, n_steps + 1):
            spaces.multiply()
            pairs = spaces.ritz_pairs()
            gaps = [each.excess(rank, self.tolerance, n_blocks) for each in pairs]
            squared_errors = [max(1.0 - each.captured(rank), 0.0) for each in pairs]
            # An error that sinks in the rounding of squares is for a solver in double precision.
            is_done = all(
                excess <= self.tolerance or each.hides_error(rank, self.tolerance)
                for (excess, _), each in zip(gaps, pairs, strict=True)
            )
            is_full = spaces.size + spaces.block > side
            objective = max(squared_errors)
            yield IterationStep(
                state=_Check(spaces, pairs, gaps),
                relative_error=math.sqrt(objective),
                objective=objective,
                converged=is_done or is_full or n_blocks == n_steps,
            )
            spaces.grow()

    def _near(
        self, operators: Array, norms: np.ndarray, check: _Check, request: _Request
    ) -> dict[int, Solution]:
        """Return solutions, by position, where common steps bring the error near the optimum."""
        near = [i for i, (excess, _) in enumerate(check.gaps) if excess <= self.tolerance]
        if not near:
            return {}
        # Rayleigh–Ritz with the right vectors, in the precision of the input: the error of single
        # precision is squared.
        operators = _taken(operators, near)
        images = _taken(check.spaces.leading_images(check.pairs, request.max_terms), near)
        xp = namespace(operators)
        right_basis, _ = orthonormal_columns(xp.astype(images, operators.dtype))
        v, sigma, uh = rayleigh_ritz(adjoint(operators), right_basis)
        left, right = adjoint(uh), adjoint(v)
        if request.shape.sizes[0] > request.shape.sizes[1]:
            left, right = v, uh
        captured = np.sum(to_numpy(sigma).astype(np.float64) ** 2, axis=1) / norms[near] ** 2
        # What is left of ‖R‖² is the error of the terms themselves if nothing was rounded.
        measures = is_double(operators)
        solutions = {}
        for i, terms in enumerate(as_sums(left, sigma, right, request.shape)):
            excess, kind = check.gaps[near[i]]
            squared_error = 1.0 - float(captured[i])
            error = None
            if measures and has_twelve_digits(squared_error, 2.0):
                error = math.sqrt(squared_error)
            solutions[near[i]] = Solution(
                terms,
                Status.rank_reached,
                optimality_gap=excess,
                gap_kind=kind,
                relative_error=error,
            )
        return solutions


def _taken(arrays: Array, positions: Sequence[int]) -> Array:
    """Return the arrays at some positions of the first axis, without a copy if that is all."""
    if len(positions) == arrays.shape[0]:
        return arrays
    xp = namespace(arrays)
    return xp.take(arrays, xp.asarray(positions, dtype=xp.int64, device=device(arrays)), axis=0)


@dataclass(frozen=True, slots=True)
class _Check:
    """The state of common steps: what their spaces hold, and how near each optimum that is."""

    spaces: LanczosSpaces
    pairs: list[RitzPairs]
    gaps: list[tuple[float, ErrorKind]]  # excess over the optimum


@dataclass(frozen=True, slots=True)
class _Request:
    """The request of one solve of a batch, after the checks of the contract."""

    shape: KroneckerShape
    rank: int | None  # as it was requested
    atol: float | None
    max_terms: int
    progress: SolveProgress
    workspace: Workspace = field(default_factory=Workspace)
