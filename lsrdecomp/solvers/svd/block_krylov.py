"""Two factors by products: block Krylov spaces of one matrix, a batch, or an implicit matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

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
    real_part,
    require_finite,
    to_numpy,
)
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.iteration import IterationStep, iterate
from lsrdecomp.solvers.matrix import MatrixProblem, MatrixSolver
from lsrdecomp.solvers.solver import ErrorKind, Event, Solution, Status, Sweep
from lsrdecomp.solvers.svd.batch import BatchRequest
from lsrdecomp.solvers.svd.certificate import Certificate, least_error
from lsrdecomp.solvers.svd.crossings import krylov_side
from lsrdecomp.solvers.svd.dense import SVD
from lsrdecomp.solvers.svd.krylov_space import AdjointOperator, KrylovSpace, orthonormal
from lsrdecomp.solvers.svd.singular_terms import (
    Triples,
    as_separated,
    as_sums,
    residual_blocks,
    svd_of_tall,
)
from lsrdecomp.targets.residual import has_twelve_digits
from lsrdecomp.targets.row_stream import RearrangedRows, RowStream
from lsrdecomp.targets.separated_target import Separated
from lsrdecomp.targets.sparse import Sparse
from lsrdecomp.targets.target import Dense, LowRank, Rearranged, RearrangedDense

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lsrdecomp.kronecker.separated import SeparatedMatrix
    from lsrdecomp.kronecker.shape import KroneckerShape

SINGLE_ENTRIES = 2**16
"""Entries of R(M) from which on a space grows in single precision: it saves less of a small matrix
than it costs to convert it, by timing of 144² to 400²."""

MAX_HELD_ENTRIES = 2**22
"""Entries of R(M) that are held in double precision beside those in single: 32 MiB, by hand."""

CHUNK_ENTRIES = 2**20
"""Entries of the matrices of a batch that take their steps together."""

MAX_SHARE = 2
"""A space of more than this part of the smaller side would cost more than the dense way."""

MIN_BLOCK = 8
"""Columns of a block at least: a product with eight takes hardly more time than one with four."""

GOAL_BLOCK = 16
"""Columns of a block where a tolerance is given and the number of terms is not known."""


@dataclass(frozen=True, slots=True)
class Krylov(MatrixSolver):
    """Leading singular triples of R(M) from products with R(M) and R(M)ᴴ, by block Lanczos [1]_.

    A block has a column for each term and four more, so that no copy of a repeated value is missed.
    The first comes from random columns [2]_; the second, a power step further, follows unless their
    sizes fall fast. Then the certificate of the space says how far the error may be above its
    optimum (see `Certificate`): within ``tolerance``, that is the answer, else the space grows from
    where it is. With ``atol`` it grows until besides the number of terms is known to be the least.
    Terms are orthogonal, γ = 1. Large matrices in memory are read in single precision, at half the
    price; a Rayleigh–Ritz step in double ends the solve, half a step further, so that single
    precision costs no more than the square of its rounding.

    Where values hardly fall and the dense way is faster, and where the space would grow to half
    of the smaller side of R(M), `SVD` takes over; at once where torch differentiates
    (``requires_grad``).

    Cost: 2·b products a step, O((p + q)·k²) for orthogonality in a space of k columns, memory O((p
    + q)·k).

    Parameters
    ----------
    tolerance : float
        Allowed excess of the error over the optimum, relative. An error within rounding of the
        optimum, 64 μ‖R‖, is enough too: the gap then is the open part.
    seed : int
        Of the random start, drawn by NumPy whatever the library of the target.
    max_steps : int
        Maximum blocks in a space; then the status is `Status.sweep_limit` and the gap, if three
        blocks tell one, says how far the result may be off.

    References
    ----------
    .. [1] G. H. Golub and R. Underwood, The block Lanczos method for computing eigenvalues, in
       Mathematical Software III, 1977. doi:10.1016/B978-0-12-587260-7.50018-2
    .. [2] C. Musco and C. Musco, Randomized block Krylov methods for stronger and faster
       approximate singular value decomposition, NIPS 2015. arXiv:1504.05477

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import KroneckerShape
    >>> i = np.arange(64.0)
    >>> matrices = [1.0 / (start + i[:, None] + i[None, :]) for start in (1, 2, 3)]
    >>> solutions = Krylov().solve_batch(matrices, KroneckerShape(((8, 8), (8, 8))), rank=2)
    >>> [np.round(solution.approximation.weights, 3).tolist() for solution in solutions]
    [[2.149, 0.65], [1.81, 0.377], [1.652, 0.262]]
    """

    order: ClassVar[int] = 2
    tolerance: float = 1e-3
    seed: int = 0
    max_steps: int = 128

    def _solve(self, problem: MatrixProblem) -> Solution:
        """Find the leading singular triples of R(M); the contract is `Solver.solve`.

        Unlike ``scipy.sparse.linalg.svds`` (ARPACK) it grows one space of blocks without restarts,
        reads R(M) once for a whole block, and stops by the error of the *approximation* instead of
        the residual of each triple. So it ends sooner, and single triples are less exact. Unlike
        ``sklearn.utils.extmath.randomized_svd`` it keeps every direction it has seen, and says how
        far its error may be above the optimum.

        Returns
        -------
        Solution
            In the element type of the target; in double precision where that would be seen in the
            error. ``optimality_gap`` and ``gap_kind`` as `Certificate` explains; gap None where
            nothing is known. ``sweeps`` are the checks of the certificate, then those of `SVD`
            where it took over.
        """
        target, shape = problem.target, problem.shape
        block = self._block_size(problem)
        if target.norm == 0.0 or MAX_SHARE * block > min(shape.sizes):
            return problem.delegate_to(SVD(self.tolerance))
        operator, exact = self._operators(problem)
        if is_differentiated(exact.prototype):
            return SVD(self.tolerance).of_matrix(exact.formed(), problem)
        is_held = isinstance(target, Dense)
        dtype = target.matrix.dtype if isinstance(target, Dense) else operator.prototype.dtype
        for each in (operator, exact) if operator is not exact else (exact,):
            problem.progress.mark(Event.start)
            precise = exact
            if shape.sizes[0] > shape.sizes[1]:  # Q, whose space fills first, on the smaller side
                each, precise = AdjointOperator(each), AdjointOperator(exact)
            space = KrylovSpace(each, target.norm, block, self.seed)
            growth = _Growth(space, self, problem.max_terms, problem.relative_goal, is_held)
            if growth.is_for_the_dense_way:
                break
            is_single = not is_double(each.prototype)
            if is_single and growth.needs_digits and is_double(exact.prototype):
                continue
            solution = _Single(growth, precise, problem, dtype).solution()
            if solution is not None:
                return solution
        problem.progress.mark(Event.hand_over if problem.progress.sweeps else Event.start)
        return SVD(self.tolerance).of_matrix(exact.formed(), problem)

    def _operators(self, problem: MatrixProblem) -> tuple[Rearranged, Rearranged]:
        """Return R(M) as a space is to read it, and in double precision where that can be had."""
        target, shape = problem.target, problem.shape
        goal = problem.relative_goal
        entries = math.prod(shape.sizes)
        # A finer goal would lose terms to the rounding of single precision.
        is_coarse = self.tolerance >= 1e-7 and (goal is None or goal >= 1e-4)
        exact: Rearranged
        if isinstance(target, Dense) and is_double(target.matrix) and goal is None and is_coarse:
            is_usable = 1e-15 < target.norm < 1e15 and not is_differentiated(target.matrix)
            if is_usable and entries > MAX_HELD_ENTRIES:
                rows = target.streamed(shape, single_type(target.matrix))
                return RearrangedDense(rows.formed()), target.streamed(shape)
            if is_usable and entries >= SINGLE_ENTRIES:
                exact = target.rearranged(shape)
                return in_single(exact.matrix), exact
        operator = target.rearranged(shape)
        is_precise = is_double(operator.prototype) or is_differentiated(operator.prototype)
        if is_precise or not isinstance(target, Widened):
            return operator, operator
        exact = in_double(target, shape)
        return (operator if is_coarse else exact), exact

    def _block_size(self, problem: MatrixProblem | BatchRequest) -> int:
        """Return the least multiple of four that holds the terms asked for, and four more."""
        if problem.rank is None:
            return GOAL_BLOCK
        return max(MIN_BLOCK, -(-(problem.max_terms + 4) // 4) * 4)

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

        All matrices take the same steps, as batched products, until each error is within
        ``tolerance`` of its optimum. What this leaves open, or loses in the rounding of ‖R‖² − Σσ²,
        is solved alone. Unlike a batched ``numpy.linalg.svd`` it stops when each error is near its
        optimum.

        Parameters
        ----------
        matrices : array_like, shape (L, m, n), or a sequence of matrices of one size
        shape : KroneckerShape
            Two factors.
        rank : int, optional
            Terms; a matrix that has fewer gets fewer.
        atol : float, optional
            Allowed ‖M − M̂‖_F of each matrix. They are then solved one by one.
        on_sweep : callable, optional
            Told the largest error of the matrices that take their steps together, then the steps of
            single ones.

        Returns
        -------
        tuple of Solution, one a matrix
            As `solve` returns them. ``sweeps`` are the common steps and those of this matrix alone.

        Raises
        ------
        ShapeError, PrecisionError, BudgetError
            For sizes that differ or do not tile, entries that are not finite, and a missing goal.
        """
        request = BatchRequest.of(matrices, shape, rank, atol, on_sweep)
        batch = request.batch
        count = int(batch.shape[0])
        side = min(request.shape.sizes)
        if MAX_SHARE * self._block_size(request) > side or is_differentiated(batch):
            return SVD(self.tolerance).solve_batch(
                batch, request.shape, rank=rank, atol=atol, on_sweep=on_sweep
            )
        solutions: dict[int, Solution] = {}
        sweeps: dict[int, tuple[Sweep, ...]] = {}
        if atol is None and count > 1:
            height = max(1, CHUNK_ENTRIES // math.prod(batch.shape[1:]))
            for start in range(0, count, height):
                positions = range(start, min(start + height, count))
                request.progress.mark(Event.start)
                self._solve_together(list(positions), request, solutions, sweeps)
        for i in range(count):
            if i not in solutions:
                is_for_svd = i in sweeps and side < krylov_side(request.max_terms, math.inf)
                solver = SVD(self.tolerance) if is_for_svd else self
                solutions[i] = request.solve_alone(i, solver, sweeps.get(i, ()))
        return tuple(solutions[i] for i in range(count))

    def _solve_together(
        self,
        positions: list[int],
        request: BatchRequest,
        solutions: dict[int, Solution],
        sweeps: dict[int, tuple[Sweep, ...]],
    ) -> None:
        """Solve for some matrices by common steps; add the solutions near their optima."""
        batch = request.batch
        progress = request.progress
        norms = {i: norm(batch[i, :, :]) for i in positions}
        if not all(map(math.isfinite, norms.values())):
            require_finite(batch, "batch")
        usable = [i for i in positions if 1e-15 < norms[i] < 1e15]
        if not usable:
            return
        # Together 1: spaces of R, or of its adjoint if that has fewer rows, that grow together.
        xp = namespace(batch)
        operators = rearrange(_taken(batch, usable), request.shape)
        is_adjoint = operators.shape[1] > operators.shape[2]
        if is_adjoint:
            operators = adjoint(operators)
        exact = RearrangedDense(operators)
        operator = exact
        if math.prod(operators.shape[1:]) >= SINGLE_ENTRIES and self.tolerance >= 1e-7:
            operator = in_single(operators)
        sizes = xp.asarray([norms[i] for i in usable], dtype=xp.float64, device=device(batch))
        sizes = xp.astype(sizes, real_part(operator.matrix[:1, :1, :1]).dtype)[:, None, None]
        space = KrylovSpace(operator, sizes, self._block_size(request), self.seed)
        growth = _Growth(space, self, request.max_terms)
        n_earlier = len(progress.sweeps)
        checks: list[Certificate] = []
        if not growth.is_for_the_dense_way:
            checks, _ = iterate(growth.common_steps(), checks, progress)
        records = progress.sweeps[n_earlier:]
        # Together 2: those near their optima are solved; what rounding hides begins anew, alone.
        near = [k for k, check in enumerate(checks) if growth.is_near(check)]
        for k, i in enumerate(usable):
            if not checks or not checks[k].hides_error(request.max_terms, self.tolerance):
                sweeps[i] = records
        if not near:
            return
        operators = _taken(operators, near)
        vectors = np.stack([checks[k].vectors[:, : request.max_terms] for k in near])
        span = spanned(_taken(space.images, near), vectors)
        left, sigma, right = rayleigh_ritz_step(RearrangedDense(operators), span)
        if is_adjoint:
            left, right = adjoint(right), adjoint(left)
        captured = np.sum(to_numpy(sigma).astype(np.float64) ** 2, axis=1)
        sums = as_sums(left, sigma, right, request.shape)
        for k, terms, energy in zip(near, sums, captured, strict=True):
            squared_error = 1.0 - float(energy) / norms[usable[k]] ** 2
            error = None
            # What is left of ‖R‖² is the error of the terms themselves if nothing was rounded.
            if is_double(operators) and has_twelve_digits(squared_error, 2.0):
                error = math.sqrt(squared_error)
            gap, kind = checks[k].excess(request.max_terms, self.tolerance)
            solutions[usable[k]] = Solution(terms, Status.rank_reached, records, gap, kind, error)


def spanned(images: Array, vectors: np.ndarray) -> Array:
    """Return combinations of images, whose coefficients are columns of ``vectors``."""
    return images @ like(vectors.copy(), images)


def rayleigh_ritz_step(operator: Rearranged, span: Array) -> Triples:
    """Return the singular triples of R V Vᴴ, where V is an orthonormal basis of a span.

    In the precision of the operator: the rounding of the span is squared.
    """
    basis, _ = orthonormal(namespace(span).astype(span, operator.prototype.dtype))
    left, sigma, rotation = svd_of_tall(operator.matmat(basis))
    return left, sigma, rotation @ adjoint(basis)


@dataclass(slots=True)
class _Growth:
    """One space, or those of a batch, while it grows, and the request that it is to meet."""

    space: KrylovSpace
    solver: Krylov
    max_terms: int
    goal: float | None = None  # allowed relative error
    is_held: bool = True  # whether R is an array, which the dense way can take as it is
    is_fine: bool = False  # whether singular values are needed to all digits
    earlier: Certificate | None = None

    @property
    def tolerance(self) -> float:
        """Allowed excess of the error over the optimum, relative."""
        return self.solver.tolerance

    @property
    def is_for_the_dense_way(self) -> bool:
        """Whether values fall so slowly that the dense way is faster, or two blocks too many."""
        space = self.space
        if self.goal is not None or not self.is_held:
            return False
        is_small = 2 * MAX_SHARE * space.block > min(space.operator.shape)
        if is_small and not space.falls_fast(self.max_terms):
            return True
        return bool(np.all(self.are_for_the_dense_way))

    @property
    def are_for_the_dense_way(self) -> np.ndarray:
        """Whether the values of each matrix fall so slowly that the dense way is faster."""
        side = min(self.space.operator.shape)
        if side >= krylov_side(self.max_terms, math.inf):
            return np.zeros(self.space.sizes.shape[:-1], bool)
        is_batch = self.space.sizes.ndim > 1
        sides = [
            krylov_side(self.max_terms, decay, is_batch=is_batch) for decay in self.space.decays
        ]
        return side < np.asarray(sides)

    @property
    def needs_digits(self) -> bool:
        """Whether values fall so fast that single precision has too few digits."""
        is_fast = self.goal is None and self.space.falls_fast(self.max_terms)
        return is_fast or self.space.sinks

    @property
    def is_full_of_steps(self) -> bool:
        """Whether the space has as many blocks as it may have."""
        return self.space.n_blocks >= self.solver.max_steps

    def steps(self) -> Iterator[IterationStep[Certificate | None]]:
        """Grow the space of one matrix until its certificate meets the request.

        It ends without a state where the space would fill too much of the smaller side.
        """
        for (check,) in self._checks():
            if self._is_hopeless(check):
                break
            error = check.error(self.terms(check))
            objective = float(check.squared_errors[min(self.max_terms, check.size)])
            converged = self.is_enough(check) or self.is_full_of_steps
            yield IterationStep(check, error, objective=objective, converged=converged)
            self.earlier = check
        yield IterationStep(None, None)

    def common_steps(self) -> Iterator[IterationStep[list[Certificate]]]:
        """Grow the spaces of a batch until the certificate of each meets the request."""
        for checks in self._checks():
            objective = max(float(check.squared_errors[self.max_terms]) for check in checks)
            are_enough = np.asarray([self.is_enough(check) for check in checks])
            converged = bool(np.all(are_enough | self.are_for_the_dense_way))
            error = math.sqrt(objective)
            yield IterationStep(checks, error, objective=objective, converged=converged)

    def _checks(self) -> Iterator[list[Certificate]]:
        """Grow by a block at a time; look when two blocks are there, and after each quarter."""
        space = self.space
        side = min(space.operator.shape)
        is_one_enough = self.goal is not None or space.falls_fast(self.max_terms)
        next_check = space.block if is_one_enough else 2 * space.block
        while MAX_SHARE * (space.size + space.block) <= side:
            space.grow()
            if space.size >= next_check or self.is_full_of_steps:
                next_check = space.size + space.size // 4
                yield space.certificates(fine=self.is_fine)

    def terms(self, check: Certificate) -> int:
        """Return the terms to take: all that may be used, or the fewest that meet the goal."""
        if self.goal is None:
            return min(self.max_terms, check.size)
        return check.smallest_rank(self.goal, self.max_terms)

    def is_near(self, check: Certificate) -> bool:
        """Return whether the error of all terms is near its optimum."""
        if check.hides_error(self.max_terms, self.tolerance):
            return False
        return check.excess(self.max_terms, self.tolerance)[0] <= self.tolerance

    def is_enough(self, check: Certificate) -> bool:
        """Return whether more steps would change neither the number of terms nor their error.

        The error not beyond the tolerance; also where rounding hides it, so that it has to be
        measured.
        """
        rank = self.terms(check)
        if self.goal is not None and check.error(rank) <= self.goal:
            if rank == 0:
                return True
            excess, _ = check.excess(rank - 1, self.tolerance)
            fewer_would_fail = check.error(rank - 1) > self.goal * (1.0 + excess)
            return excess <= self.tolerance or fewer_would_fail
        if rank < self.max_terms:
            return False
        if check.hides_error(rank, self.tolerance):
            return True
        return check.excess(rank, self.tolerance)[0] <= self.tolerance

    def _is_hopeless(self, check: Certificate) -> bool:
        """Return whether the space would grow too large before it met the goal."""
        if self.goal is None or not self.terms(check) == check.size < self.max_terms:
            return False
        side = min(self.space.operator.shape)
        return check.columns_needed(self.goal, self.earlier) > side / 2


@dataclass(frozen=True, slots=True)
class _Found:
    """Singular triples that a space holds, and what is known of them."""

    triples: Triples
    squared_error: float  # relative, by ‖R‖² − Σσ²
    error: float | None  # relative, to twelve digits
    excess: float  # over the optimum, relative
    kind: ErrorKind
    is_near: bool  # within the tolerance, or within rounding, of the optimum


@dataclass(frozen=True, slots=True)
class _Single:
    """One matrix: its space while it grows, and R in double precision for the terms."""

    growth: _Growth
    exact: Rearranged
    problem: MatrixProblem
    dtype: Any  # element type of the target

    def solution(self) -> Solution | None:
        """Grow the space to a solution.

        None where it would grow too large, or sees no further in its precision.
        """
        growth = self.growth
        progress = self.problem.progress
        steps = growth.steps()
        while True:
            check, ended = iterate(steps, None, progress)
            if check is None:
                return None
            is_limit = not ended or growth.is_full_of_steps
            solution = self._finished(check, is_limit=is_limit)
            if solution is not None:
                return replace(solution, sweeps=progress.sweeps)
            if not is_double(growth.space.operator.prototype):
                return None
            growth.is_fine = True

    def _finished(self, check: Certificate, *, is_limit: bool) -> Solution | None:
        """Return the terms that the space holds; None where they do not meet the request."""
        growth = self.growth
        goal = growth.goal
        rank = growth.terms(check)
        if check.hides_error(rank, growth.tolerance):
            if is_double(growth.space.operator.prototype):
                (check,) = growth.space.certificates(fine=True)
            elif rank and not is_limit and not check.stands_apart(rank):
                return None  # single precision sees no further
        found = self._found(check, rank)
        meets_goal = goal is not None and found.error is not None and found.error <= goal
        is_near = found.is_near and (goal is None or rank == growth.max_terms)
        if not (meets_goal or is_near or is_limit):
            return None
        status = Status.rank_reached if goal is None else Status.rank_exhausted
        if meets_goal:
            status = Status.converged
        elif is_limit and not is_near:
            status = Status.sweep_limit
        terms, is_rounded = self._terms(found.triples, max(found.squared_error, 0.0))
        solution = Solution(terms, status, relative_error=None if is_rounded else found.error)
        if found.excess < math.inf:
            excess = found.excess
            if is_rounded and found.squared_error > 0.0:
                # Factors and weights move by a unit roundoff each, at right angles to the residual.
                excess += 0.5 * (3.0 * unit_roundoff(self.dtype)) ** 2 / found.squared_error
            solution = replace(solution, optimality_gap=excess, gap_kind=found.kind)
        return solution

    def _found(self, check: Certificate, rank: int) -> _Found:
        """Return the first terms of a space, half a step nearer, and what is known of them."""
        space = self.growth.space
        tolerance = self.growth.tolerance
        is_hidden = check.hides_error(rank, tolerance)
        span = spanned(space.images, check.vectors[:, : max(rank, 1)])
        for _ in range(2):
            # Terms 1: their error, from ‖R‖² − Σσ² where that has its digits.
            left, sigma, right = rayleigh_ritz_step(self.exact, span)
            triples = left[:, :rank], sigma[:rank], right[:rank, :]
            theta = to_numpy(triples[1]).astype(np.float64) / self.problem.target.norm
            squared_error = 1.0 - float(theta @ theta)
            error = None
            if is_double(self.exact.prototype) and has_twelve_digits(squared_error, 2.0):
                error = math.sqrt(squared_error)
            elif is_hidden or self.growth.goal is not None or self._is_held:
                error = self._measured(triples)
            if not is_hidden or rank == 0 or error is None:
                excess, kind = check.excess(rank, tolerance)
                return _Found(triples, squared_error, error, excess, kind, excess <= tolerance)
            # Terms 2: an error that sinks in the rounding of squares is bounded by couplings, or by
            # the singular values that were seen beyond, which are below those of R (Cauchy).
            span, coupling = self._images(triples)
            bound = least_error(float(theta[-1]), error, coupling)
            if is_double(space.operator.prototype):
                seen = math.sqrt(float(np.sum(check.values[rank:])))
                bound = max(bound, seen - 16.0 * check.unit * check.size**0.5)
            excess = max(error / bound - 1.0, 0.0) if bound > 0.0 else math.inf
            rounding = 64.0 * unit_roundoff(self.exact.prototype.dtype)
            is_near = excess <= tolerance or error <= bound * (1.0 + tolerance) + rounding
            if is_near:
                break
            # Terms 3: else the images of these terms may be nearer by another step.
        return _Found(triples, squared_error, error, excess, ErrorKind.bounded, is_near)

    @property
    def _is_held(self) -> bool:
        return isinstance(_without_adjoint(self.exact), RearrangedDense)

    def _measured(self, triples: Triples) -> float:
        """Measure the relative error of terms, from entries where R(M) is held."""
        target = self.problem.target
        left, sigma, right = self._unturned(triples)
        matrix = _without_adjoint(self.exact)
        if isinstance(matrix, RearrangedDense):
            blocks = residual_blocks(matrix.matrix, left, sigma, right)
            return math.hypot(*map(norm, blocks)) / target.norm
        terms = as_separated(left, sigma, right, self.problem.shape, int(sigma.shape[0]))
        return target.residual_norm(terms) / target.norm

    def _unturned(self, triples: Triples) -> Triples:
        """Return the singular triples of R(M), of those of its adjoint."""
        left, sigma, right = triples
        if isinstance(self.exact, AdjointOperator):
            return adjoint(right), sigma, adjoint(left)
        return triples

    def _images(self, triples: Triples) -> tuple[Array, float]:
        """Return Rᴴ times left vectors, and what couples the terms to the rest of R, of norm 1."""
        left, sigma, right = triples
        if sigma.dtype != left.dtype:
            sigma = namespace(left).astype(sigma, left.dtype)
        images = self.exact.rmatmat(left)
        return images, norm(images - adjoint(right) * sigma) / self.problem.target.norm

    def _terms(self, triples: Triples, squared_error: float) -> tuple[SeparatedMatrix, bool]:
        """Return Kronecker terms, and whether they were rounded to the type of the target.

        They are not where that could be seen in the error.
        """
        left, sigma, right = self._unturned(triples)
        rounding = (64.0 * unit_roundoff(self.dtype)) ** 2
        goal = self.growth.goal
        if goal is None:
            is_invisible = rounding <= 2.0 * self.growth.tolerance * squared_error
        else:
            is_invisible = squared_error + rounding <= goal**2
        is_rounded = left.dtype != self.dtype and is_invisible
        if is_rounded:
            xp = namespace(left)
            left, right = (xp.astype(side, self.dtype) for side in (left, right))
            sigma = xp.astype(sigma, real_part(left[:1, :1]).dtype)
        rank = int(sigma.shape[0])
        return as_separated(left, sigma, right, self.problem.shape, rank), is_rounded


def _without_adjoint(operator: Rearranged) -> Rearranged:
    return operator.operator if isinstance(operator, AdjointOperator) else operator


def _taken(arrays: Array, positions: Sequence[int]) -> Array:
    """Return the arrays at some positions of the first axis, without a copy if that is all."""
    if len(positions) == arrays.shape[0]:
        return arrays
    xp = namespace(arrays)
    return xp.take(arrays, xp.asarray(positions, dtype=xp.int64, device=device(arrays)), axis=0)


Widened: TypeAlias = Dense | LowRank | RowStream | Separated | Sparse
"""Targets whose entries can be had in double precision."""


def in_double(target: Widened, shape: KroneckerShape) -> Rearranged:
    """Return R(M) in double precision, held or from factors; of a stream by blocks of rows."""
    if isinstance(target, RowStream):
        rows = target.rearranged(shape)
        parts = lambda: ((start, as_double(part)) for start, part in target.parts())  # noqa: E731
        return RearrangedRows(parts, shape, as_double(rows.prototype))
    if isinstance(target, Sparse):
        dtype = np.result_type(target.matrix.dtype, np.float64)
        return Sparse(target.matrix.astype(dtype)).rearranged(shape)
    if isinstance(target, LowRank):
        return LowRank(as_double(target.left), as_double(target.right)).rearranged(shape)
    if isinstance(target, Separated):
        return Separated(target.matrix.in_double()).rearranged(shape)
    if math.prod(target.shape) > MAX_HELD_ENTRIES:
        return target.streamed(shape)
    return RearrangedDense(as_double(target.tensor(shape)))


def in_single(matrix: Array) -> RearrangedDense:
    """Return R(M), or those of a batch, in single precision."""
    return RearrangedDense(namespace(matrix).astype(matrix, single_type(matrix)))


def single_type(array: Array) -> Any:
    """Return the element type of an array in single precision."""
    xp = namespace(array)
    return xp.complex64 if is_complex(array) else xp.float32
