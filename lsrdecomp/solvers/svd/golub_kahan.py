"""Two factors, matrix-free: block Golub–Kahan on the rearranged target, with a certificate of its optimality."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from lsrdecomp.arrays import adjoint, is_differentiated
from lsrdecomp.errors import BudgetError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.solvers.base import ErrorKind, Solution, Status
from lsrdecomp.solvers.matrix import MatrixProblem, MatrixSolver
from lsrdecomp.solvers.progress import Step, iterate
from lsrdecomp.solvers.svd.bidiagonal import Adjoint, Bidiagonal
from lsrdecomp.solvers.svd.certificate import Certificate
from lsrdecomp.solvers.svd.dense import as_separated
from lsrdecomp.solvers.svd.gram import Gram
from lsrdecomp.targets.base import RearrangedDense, Target


@dataclass(frozen=True, slots=True)
class BlockGolubKahan(MatrixSolver):
    """Leading singular triples of R(M) from products with R(M) and R(M)ᴴ only.

    Stops when the error is within ``tolerance`` of the optimum by its certificate (see `Certificate`); with ``atol``,
    when besides the number of terms found is known to be the least. An error within rounding of the optimum, 64 μ‖R‖,
    is enough too: where the optimum itself is that small, the gap says what is left open. Where the Krylov space would
    grow to a third of the smaller side of R(M), `Gram` takes over, which is cheaper there. Terms are orthogonal, γ = 1.

    Where torch differentiates what is computed (``requires_grad``) `Gram` takes over at once, through which gradients
    are right.

    Cost: 2·b products a step, O((p + q)·k²) for orthogonality in a space of k columns, memory O((p + q)·k).

    Parameters
    ----------
    block : int, optional
        Columns b of a block; absent, 8 to 16 by the number of terms asked for, and 8 where R(M) is not stored: one
        reading of a stored matrix serves a whole block, an unformed product is paid for by the column.
    seed : int
        Of the random start, drawn by NumPy whatever the library of the target.
    tolerance : float
        Allowed excess of the error over the optimum, relative.
    max_steps : int
        Most steps taken; then the status is `Status.sweep_limit` and the gap says how far the result may be off.

    References
    ----------
    .. [1] G. H. Golub, F. T. Luk and M. L. Overton (1981), doi:10.1145/355945.355946
    .. [2] C. Musco and C. Musco, Randomized block Krylov methods for stronger and faster approximate singular value
       decomposition, NIPS 2015. arXiv:1504.05477

    Examples
    --------
    >>> import numpy as np
    >>> import lsrdecomp as lsr
    >>> result = lsr.decompose(np.kron(np.eye(4), np.ones((3, 3))), "4x4, 3x3", rank=1, solver=lsr.BlockGolubKahan())
    >>> bool(result.relative_error < 1e-6)
    True
    """

    order: ClassVar[int] = 2
    block: int | None = None
    seed: int = 0
    tolerance: float = 1e-3
    max_steps: int = 128

    def found(self, problem: MatrixProblem) -> Solution:
        """Leading singular triples of R(M); the contract is `Solver.solve`.

        Unlike ``scipy.sparse.linalg.svds`` (ARPACK) it grows one space of blocks without restarts, reads R(M) once for
        a whole block, and stops by the error of the *approximation* instead of the residual of each triple. So it ends
        sooner, and single triples are less exact. Unlike ``sklearn.utils.extmath.randomized_svd`` it keeps every
        direction it has seen, and says how far its error may be above the optimum.

        Returns
        -------
        Solution
            In the element type of the target; in double precision where it handed over. ``optimality_gap`` and
            ``gap_kind`` as `Certificate` explains; gap None where nothing is known. ``sweeps`` are the checks of the
            certificate, then those of `Gram` where it took over; ``objective`` is the squared error for the most
            terms, ``relative_error`` that for the terms that would be taken. `Solution.relative_error` is
            measured where the error lies at the rounding of ‖R‖² − Σσ².
        """
        target, shape, rank, most = problem.target, problem.shape, problem.rank, problem.most
        if self.max_steps < 1:
            raise BudgetError(f"block Golub–Kahan needs at least one step, got max_steps={self.max_steps}")
        progress, norm, operator = problem.progress, target.norm, target.rearranged(shape)
        widest = 16 if isinstance(operator, RearrangedDense) else 8
        block = self.block or (widest if rank is None else min(widest, max(8, rank)))
        side = min(operator.shape)
        dense = norm == 0.0 or (rank is not None and 4 * most >= side)
        if dense or is_differentiated(operator.prototype):  # a space that grows on the host passes no gradients
            return problem.handed_to(Gram())
        # V, whose space fills first, lies on the smaller side: then nothing of R is left when it is full.
        swapped = operator.shape[0] < operator.shape[1]
        space = Bidiagonal(Adjoint(operator) if swapped else operator, norm, min(block, side), self.seed)
        growth = _Growth(self, target, shape, space, swapped, rank, most, problem.goal)
        found, ended = iterate(growth.steps(), None, progress, most=self.max_steps)
        if found is None and ended:
            return problem.handed_to(Gram())
        if found is None:
            found = growth.look()
            progress.note(found.error, objective=found.objective)
        return replace(found.solution(ended), sweeps=progress.sweeps)


@dataclass(frozen=True, slots=True)
class _Found:
    """What one look at a space has found."""

    approximation: SeparatedMatrix
    error: float  # relative
    objective: float
    measured: bool
    excess: float
    kind: ErrorKind
    goal: float | None

    def solution(self, settled: bool) -> Solution:
        status = Status.sweep_limit
        if settled and self.goal is None:
            status = Status.rank_reached
        elif settled or (self.goal is not None and self.error <= self.goal):
            status = Status.converged if self.goal is not None and self.error <= self.goal else Status.rank_exhausted
        known = self.excess < math.inf
        gap, kind = (self.excess, self.kind) if known else (None, ErrorKind.estimated)
        relative_error = self.error if self.measured else None
        return Solution(self.approximation, status, (), gap, kind, relative_error)


@dataclass(slots=True)
class _Growth:
    """One space while it grows: when to look at it, and what a look tells."""

    solver: BlockGolubKahan
    target: Target
    shape: KroneckerShape
    space: Bidiagonal
    swapped: bool
    rank: int | None
    most: int
    goal: float | None
    captured: list[np.ndarray] = field(default_factory=list)
    last: Certificate | None = None

    def steps(self) -> Iterator[Step[_Found | None]]:
        """Steps of the space; ends without a state where it would grow to a third of the smaller side."""
        side = min(self.space.operator.shape)
        due = 1 if self.rank is None else self.most
        while 3 * (self.space.size + self.space.block) <= side:
            # BGK 1: one block more, U and V orthogonal to all before.
            self.space.step()
            if self.space.size < due:
                yield Step(None, None)
                continue
            # BGK 2: the certificate says what the space holds, and what it may lack of the optimum.
            due = self.space.size + self.space.size // 8
            certificate = self._certificate()
            s, objective = self._terms(certificate), self._objective(certificate)
            hopeless = self.goal is not None and certificate.columns_needed(self.goal) > side / 2
            if hopeless and s == self.space.size < self.most:
                return
            # BGK 3: where the certificate sees no further, the residual is formed and measured.
            found = None
            if self._settled(certificate, s):
                found = self._found(certificate, s)
                if not (certificate.resolves(s, self.goal) or self._measured_enough(certificate, s, found)):
                    found, due = None, self.space.size + self.space.size // 4
            error = certificate.error(s) if found is None else found.error
            yield Step(found, error, objective=objective, settled=found is not None)

    def look(self) -> _Found:
        """What the space has come to, settled or not."""
        seen = self.last is not None and self.last.ritz.size == self.space.size
        certificate = self.last if seen and self.last is not None else self._certificate()
        return self._found(certificate, self._terms(certificate))

    def _certificate(self) -> Certificate:
        self.last = certificate = Certificate.of(self.space, self.captured)
        self.captured.append(certificate.captured)
        return certificate

    def _terms(self, certificate: Certificate) -> int:
        s = min(self.most, self.space.size)
        return s if self.goal is None else certificate.smallest_rank(self.goal, s)

    def _objective(self, certificate: Certificate) -> float:
        return float(certificate.squared_errors[min(self.most, self.space.size)])

    def _settled(self, certificate: Certificate, rank: int) -> bool:
        """Whether more steps would change neither the number of terms nor, beyond the tolerance, the error."""
        goal, tolerance = self.goal, self.solver.tolerance
        if goal is not None and certificate.error(rank) <= goal:
            excess, _ = certificate.excess(max(rank - 1, 0), tolerance)
            return rank == 0 or excess <= tolerance or certificate.error(rank - 1) > goal * (1.0 + excess)
        excess, _ = certificate.excess(rank, tolerance)
        exhausted = rank < certificate.ritz.size and certificate.exact(certificate.error(rank))
        return (goal is None or rank == self.most) and (excess <= tolerance or exhausted)

    def _found(self, certificate: Certificate, rank: int) -> _Found:
        u, sigma, vh = self.space.triples(rank)
        triples = (adjoint(vh), sigma, adjoint(u)) if self.swapped else (u, sigma, vh)
        approximation = as_separated(*triples, self.shape, rank)
        error, (excess, kind) = certificate.error(rank), certificate.excess(rank, self.solver.tolerance)
        measured = not certificate.resolves(rank, self.goal)
        if measured:
            error = self.target.residual_norm(approximation) / self.target.norm
            excess, kind = certificate.measured_excess(rank, error), ErrorKind.bounded
        objective = self._objective(certificate)
        return _Found(approximation, error, objective, measured, excess, kind, self.goal)

    def _measured_enough(self, certificate: Certificate, rank: int, found: _Found) -> bool:
        if self.goal is not None and (found.error <= self.goal or rank < self.most):
            return found.error <= self.goal
        return found.excess <= self.solver.tolerance or certificate.within_rounding(rank, found.error)
