"""Two factors, matrix-free: block Golub–Kahan on the rearranged target, with a certificate of its optimality."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from lsrdecomp.arrays import Array, is_differentiated
from lsrdecomp.errors import BudgetError
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.base import Event, Solution
from lsrdecomp.solvers.matrix import MatrixProblem, MatrixSolver
from lsrdecomp.solvers.progress import SolveProgress, iterate
from lsrdecomp.solvers.svd.bidiagonal import Adjoint, Bidiagonal
from lsrdecomp.solvers.svd.gram import Gram, Rearrangement
from lsrdecomp.solvers.svd.growth import Growth
from lsrdecomp.solvers.svd.single import SingleGrowth, Widened, fits_single, in_double, in_single
from lsrdecomp.targets.base import Dense, Rearranged, RearrangedDense

FINE = 1e-4
"""Relative errors below which the rounding of single precision would cost terms: these are sought
in double."""


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
        for by the column.
    seed : int
        Of the random start, drawn by NumPy whatever the library of the target.
    tolerance : float
        Allowed excess of the error over the optimum, relative.
    max_steps : int
        Most steps taken; then the status is `Status.sweep_limit` and the gap says how far the
        result may be off.

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
    >>> result = lsr.decompose(np.kron(np.eye(4), np.ones((3, 3))), "4x4, 3x3", rank=1, solver=solver)
    >>> bool(result.relative_error < 1e-6)
    True
    """

    order: ClassVar[int] = 2
    block: int | None = None
    seed: int = 0
    tolerance: float = 1e-3
    max_steps: int = 128

    def _solve(self, problem: MatrixProblem) -> Solution:
        """Leading singular triples of R(M); the contract is `Solver.solve`.

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
        target, shape, rank, most = problem.target, problem.shape, problem.rank, problem.max_terms
        if self.max_steps < 1:
            raise BudgetError(
                f"block Golub–Kahan needs at least one step, got max_steps={self.max_steps}"
            )
        progress, norm, side = problem.progress, target.norm, min(shape.sizes)
        if norm == 0.0 or (rank is not None and 4 * most >= side):
            return problem.delegate_to(Gram())
        # V, whose space fills first, lies on the smaller side: then nothing of R is left when it is
        # full.
        swapped = shape.sizes[0] < shape.sizes[1]
        block = self._columns(rank, stored=isinstance(target, Dense))
        settings = self.tolerance, target, shape, swapped, rank, most, problem.relative_goal
        if fits_single(target, rank, problem.relative_goal, self.tolerance):
            rows = in_double(target, shape)
            if isinstance(rows, RearrangedDense):
                matrix = Rearrangement.of(rows.matrix, norm, shape)
                solution = matrix.from_random_columns(most, self.tolerance, self.seed)
                if solution is not None:
                    progress.record(solution.relative_error or 0.0)
                    return replace(solution, sweeps=progress.sweeps)
            space = self._space(in_single(target, shape, rows), swapped, norm, block)
            single = SingleGrowth(space, *settings, rows=rows)
            solution = self._grown(single, progress)
            if solution is not None or not single.blind:
                return problem.delegate_to(Gram()) if solution is None else solution
        else:
            operator = target.rearranged(shape)
            if is_differentiated(
                operator.prototype
            ):  # a space that grows on the host passes no gradients
                return problem.delegate_to(Gram())
            narrow = unit_roundoff(operator.prototype.dtype) > 1e-12
            widened = target if narrow and isinstance(target, Widened) else None
            if (
                widened is not None
                and problem.relative_goal is not None
                and problem.relative_goal < FINE
            ):
                operator = in_double(widened, shape)
            space = self._space(operator, swapped, norm, block)
            solution = self._grown(Growth(space, *settings), progress)
            if solution is None:
                return problem.delegate_to(Gram())
            # What single precision rounds of the terms themselves may be seen in their error.
            error, rounding = solution.relative_error, 64.0 * space.roundoff
            coarse = error is not None and rounding**2 > 2.0 * self.tolerance * error**2
            if not coarse or widened is None or problem.relative_goal is not None:
                return solution
            rows = in_double(widened, shape)
        # Single precision sees no further: a space in double, from the vectors that it has come to.
        block = self.block or max(block, min(2 * most, side // 6))
        progress.mark(Event.start)
        space = self._space(rows, swapped, norm, block, space.leading(block))
        solution = self._grown(Growth(space, *settings), progress)
        return problem.delegate_to(Gram()) if solution is None else solution

    def _columns(self, rank: int | None, *, stored: bool) -> int:
        widest = 16 if stored else 8
        return self.block or (widest if rank is None else min(widest, max(8, rank)))

    def _space(
        self,
        operator: Rearranged,
        swapped: bool,
        norm: float,
        block: int,
        start: Array | None = None,
    ) -> Bidiagonal:
        columns = min(block, min(operator.shape))
        return Bidiagonal(
            Adjoint(operator) if swapped else operator, norm, columns, self.seed, start
        )

    def _grown(self, growth: Growth, progress: SolveProgress) -> Solution | None:
        """What a space has come to; None where it would grow too large, or sees no further."""
        projection, ended = iterate(growth.steps(), None, progress, max_steps=self.max_steps)
        if projection is None and ended:
            return None
        if projection is None:
            projection = growth.look()
            progress.record(projection.error, objective=growth.objective)
        return replace(growth.solution(projection, ended), sweeps=progress.sweeps)
