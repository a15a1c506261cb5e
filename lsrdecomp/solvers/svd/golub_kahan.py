"""Two factors, matrix-free: block Golub–Kahan on the rearranged target, with a certificate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from lsrdecomp.arrays import Array, is_differentiated
from lsrdecomp.errors import BudgetError
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.iteration import iterate
from lsrdecomp.solvers.matrix import MatrixProblem, MatrixSolver
from lsrdecomp.solvers.solver import Event, Solution
from lsrdecomp.solvers.svd.bidiagonal import AdjointOperator, Bidiagonal
from lsrdecomp.solvers.svd.gram import Gram, Rearrangement
from lsrdecomp.solvers.svd.growth import Growth, is_swapped
from lsrdecomp.solvers.svd.one_matrix import (
    SingleGrowth,
    Widened,
    fits_single,
    in_double,
    in_single,
)
from lsrdecomp.targets.target import Dense, Rearranged, RearrangedDense


@dataclass(frozen=True, slots=True)
class BlockGolubKahan(MatrixSolver):
    """Leading singular triples of R(M) from products with R(M) and R(M)ᴴ only.

    Stops when the error is within ``tolerance`` of the optimum by its certificate (see
    `Certificate`); with ``atol``, when besides the number of terms found is known to be the least.
    An error within rounding of the optimum, 64 μ‖R‖, is enough too: where the optimum itself is
    that small, the gap says what is left open. Where the Krylov space would grow to a third of the
    smaller side of R(M), `Gram` takes over, which is cheaper there. Terms are orthogonal, γ = 1.

    A large float64 matrix in memory whose number of terms is given is first multiplied by random
    columns, as in `Gram`, which are enough where the spectrum falls fast; up to 2²² entries, of
    which R(M) is held. Then it is read in single precision, at half the price: its Krylov space
    only has to hold the terms, which a product or two in double precision then take from it. So
    what single precision costs is the square of its rounding; two machines agree within
    ``tolerance``, not to the last digits. Where it sees no further, double precision takes over; a
    ``tolerance`` below 1e-7 keeps to that throughout. It ends a float32 matrix or stream too whose
    error is no more than the rounding of its terms, and begins it where an error below 1e-4 of the
    norm is asked for; the terms are in double precision then.

    Where torch differentiates what is computed (``requires_grad``) `Gram` takes over at once,
    through which gradients are right.

    Cost: 2·b products a step, O((p + q)·k²) for orthogonality in a space of k columns, memory O((p
    + q)·k).

    Parameters
    ----------
    block : int, optional
        Columns b of a block; absent, 8 to 16 by the number of terms asked for, and 8 where R(M) is
        not stored: one reading of a stored matrix serves a whole block, an unformed product is paid
        for by the column. Where a value is repeated as often as a block has columns, a space of
        wider blocks is grown, since there may be more copies of it.
    seed : int
        Of the random start, drawn by NumPy whatever the library of the target.
    tolerance : float
        Allowed excess of the error over the optimum, relative.
    max_steps : int
        Maximum steps; then the status is `Status.sweep_limit` and the gap says how far the result
        may be off.
    single : bool, optional
        Begin a float64 matrix in memory in single precision: True, at once and whatever its size,
        False, never. Absent: from 2²⁰ entries on, below which two machines agree to the last
        digits, and after random columns.

    References
    ----------
    .. [1] G. H. Golub, F. T. Luk and M. L. Overton (1981), doi:10.1145/355945.355946
    .. [2] C. Musco and C. Musco, Randomized block Krylov methods for stronger and faster
       approximate singular value decomposition, NIPS 2015. arXiv:1504.05477

    Examples
    --------
    >>> import numpy as np
    >>> import lsrdecomp as lsr
    >>> solver = lsr.solvers.BlockGolubKahan()
    >>> matrix = np.kron(np.eye(4), np.ones((3, 3)))
    >>> result = lsr.decompose(matrix, "4x4, 3x3", rank=1, solver=solver)
    >>> bool(result.relative_error < 1e-6)
    True
    """

    order: ClassVar[int] = 2
    block: int | None = None
    seed: int = 0
    tolerance: float = 1e-3
    max_steps: int = 128
    single: bool | None = None

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
            In the element type of the target; in double precision where it handed over.
            ``optimality_gap`` and ``gap_kind`` as `Certificate` explains; gap None where nothing is
            known. ``sweeps`` are the checks of the certificate, then those of `Gram` where it took
            over; ``objective`` is the squared error for the most terms, ``relative_error`` that for
            the terms that would be taken. `Solution.relative_error` is measured where the error
            lies at the rounding of ‖R‖² − Σσ².
        """
        if self.max_steps < 1:
            raise BudgetError(
                f"block Golub–Kahan needs at least one step, got max_steps={self.max_steps}"
            )
        target = problem.target
        side = min(problem.shape.sizes)
        has_many_terms = 4 * problem.max_terms >= side
        if target.norm == 0.0 or (problem.rank is not None and has_many_terms):
            return problem.delegate_to(Gram())
        goal = problem.relative_goal
        if fits_single(target, problem.rank, goal, self.tolerance, self.single):
            return self._from_single(problem, target)
        return self._in_type_of_target(problem)

    def _from_single(self, problem: MatrixProblem, target: Dense) -> Solution:
        """Solve for a large float64 matrix: random columns, else a space in single precision."""
        progress = problem.progress
        rows = in_double(target, problem.shape)
        if isinstance(rows, RearrangedDense) and not self.single:
            matrix = Rearrangement.of(rows.matrix, target.norm, problem.shape)
            solution = matrix.from_random_columns(problem.max_terms, self.tolerance, self.seed)
            if solution is not None:
                progress.record(solution.relative_error or 0.0)
                return replace(solution, sweeps=progress.sweeps)
        operator = in_single(target, problem.shape, rows)
        space = self._space(problem, operator, self._block_size(problem))
        growth = SingleGrowth(space, problem, self.tolerance, rows=rows)
        grown = self._grown(growth)
        if grown is None and (growth.is_blind or growth.terms_in_doubt):
            return self._again_in_double(problem, rows, space)
        return problem.delegate_to(Gram()) if grown is None else grown

    def _in_type_of_target(self, problem: MatrixProblem) -> Solution:
        """Grow a space in the precision of the target, or in double where the goal is fine."""
        target = problem.target
        goal = problem.relative_goal
        operator = target.rearranged(problem.shape)
        if is_differentiated(operator.prototype):
            # A space that grows on the host passes no gradients.
            return problem.delegate_to(Gram())
        is_narrow = unit_roundoff(operator.prototype.dtype) > 1e-12
        widened = target if is_narrow and isinstance(target, Widened) else None
        # Of a finer goal the rounding of single precision would cost terms.
        if widened is not None and goal is not None and goal < 1e-4:
            operator = in_double(widened, problem.shape)
        space = self._space(problem, operator, self._block_size(problem))
        growth = Growth(space, problem, self.tolerance)
        solution = self._grown(growth)
        if solution is None and growth.terms_in_doubt:
            return self._again_in_wider_blocks(problem, operator, growth.terms_in_doubt)
        if solution is None:
            return problem.delegate_to(Gram())
        if widened is None or goal is not None:
            return solution
        # What single precision rounds of the terms themselves may be seen in their error.
        error = solution.relative_error
        rounding = 64.0 * space.roundoff
        if error is None or rounding**2 <= 2.0 * self.tolerance * error**2:
            return solution
        rows = in_double(widened, problem.shape)
        return self._again_in_double(problem, rows, space)

    def _again_in_double(
        self, problem: MatrixProblem, rows: Rearranged, single: Bidiagonal
    ) -> Solution:
        """Grow a space in double precision from the vectors that the one in single has reached."""
        side = min(problem.shape.sizes)
        block = self.block
        if not block:
            block = max(self._block_size(problem), min(2 * problem.max_terms, side // 6))
        problem.progress.mark(Event.start)
        space = self._space(problem, rows, block, single.leading(block))
        growth = Growth(space, problem, self.tolerance)
        solution = self._grown(growth)
        if solution is None and growth.terms_in_doubt:
            return self._again_in_wider_blocks(problem, rows, growth.terms_in_doubt)
        return problem.delegate_to(Gram()) if solution is None else solution

    def _again_in_wider_blocks(
        self, problem: MatrixProblem, operator: Rearranged, terms: int
    ) -> Solution:
        """Grow a space anew whose blocks have a column for each term and four more.

        So no copy is missed.
        """
        problem.progress.mark(Event.start)
        space = self._space(problem, operator, terms + 4)
        solution = self._grown(Growth(space, problem, self.tolerance))
        return problem.delegate_to(Gram()) if solution is None else solution

    def _block_size(self, problem: MatrixProblem) -> int:
        """Return the columns of a block: as many as terms are requested, within the limits."""
        if self.block:
            return self.block
        # One reading of a stored matrix serves a whole block; other products are paid for by the
        # column.
        narrowest = 8
        widest = 16 if isinstance(problem.target, Dense) else narrowest
        if problem.rank is None:
            return widest
        return min(widest, max(narrowest, problem.rank))

    def _space(
        self,
        problem: MatrixProblem,
        operator: Rearranged,
        block: int,
        start: Array | None = None,
    ) -> Bidiagonal:
        columns = min(block, min(operator.shape))
        if is_swapped(problem.shape):
            operator = AdjointOperator(operator)
        return Bidiagonal(operator, problem.target.norm, columns, self.seed, start)

    def _grown(self, growth: Growth) -> Solution | None:
        """Grow a space to a solution; None where it would grow too large, or sees no further."""
        progress = growth.problem.progress
        projection, ended = iterate(growth.steps(), None, progress, max_steps=self.max_steps)
        if projection is None and ended:
            return None
        if projection is None:
            projection = growth.current_projection()
            progress.record(projection.error, objective=growth.objective)
        return replace(growth.solution(projection, ended), sweeps=progress.sweeps)
