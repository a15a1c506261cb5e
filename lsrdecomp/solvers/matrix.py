"""The base class of solvers of a matrix: its signature, its checks, the record of the problem."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from lsrdecomp.arrays import device, namespace
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.solvers.iteration import SolveProgress
from lsrdecomp.solvers.solver import Solution, Solver, Sweep, validate_request
from lsrdecomp.targets.convert import as_target

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.targets.target import Target


@dataclass(frozen=True, slots=True)
class MatrixProblem:
    """The request of one solve, after the checks of the contract."""

    target: Target
    shape: KroneckerShape
    rank: int | None  # as it was requested
    atol: float | None
    max_terms: int  # terms that may be used
    progress: SolveProgress

    @property
    def relative_goal(self) -> float | None:
        """``atol`` for a matrix of norm one; of the zero matrix ``atol`` itself."""
        return None if self.atol is None else self.atol / (self.target.norm or 1.0)

    def delegate_to(self, solver: Solver) -> Solution:
        """Solve the same problem by another solver, its records appended to those so far."""
        return self.progress.solve(solver, self.target, self.shape, rank=self.rank, atol=self.atol)


class MatrixSolver(ABC):
    """A `Solver` whose checks are made here, so that a subclass has only to find the terms.

    Matrices become targets (`as_target`), sizes a `KroneckerShape`. Factors of 1×1 are taken out
    before and put back afterwards. Subclasses are frozen dataclasses.
    """

    __slots__ = ()
    order: ClassVar[int | None] = None  # the one number of factors that it is for; None: any

    def solve(
        self,
        target: Target,
        shape: KroneckerShape,
        *,
        rank: int | None = None,
        atol: float | None = None,
        on_sweep: Callable[[Sweep], Any] | None = None,
    ) -> Solution:
        """See `Solver.solve`, whose docstring this method gets."""
        target = as_target(target)
        shape = KroneckerShape.parse(shape)
        essential = shape.essential
        max_terms = validate_request(target.shape, essential, rank, atol, order=self.order)
        progress = SolveProgress(on_sweep)
        problem = MatrixProblem(target, essential, rank, atol, max_terms, progress)
        solution = self._solve(problem)
        if essential is shape:
            return solution
        return replace(solution, approximation=with_unit_factors(solution.approximation, shape))

    solve.__doc__ = Solver.solve.__doc__

    @abstractmethod
    def _solve(self, problem: MatrixProblem) -> Solution:
        """Find the terms of a checked problem; tell ``problem.progress`` each step."""


def without_unit_factors(matrix: SeparatedMatrix) -> SeparatedMatrix:
    """Return the same matrix in its `KroneckerShape.essential` shape."""
    essential = matrix.kronecker_shape.essential_factors
    first, *others = (matrix.factors[i] for i in essential)
    for i, factor in enumerate(matrix.factors):
        if i not in essential:
            first = first * factor  # a sign or a phase
    return SeparatedMatrix(matrix.weights, (first, *others))


def with_unit_factors(matrix: SeparatedMatrix, shape: KroneckerShape) -> SeparatedMatrix:
    """Put the 1×1 factors of ``shape`` back into a matrix of its essential shape."""
    xp = namespace(*matrix.factors)
    essential = shape.essential_factors
    unit = xp.ones(
        (matrix.separation_rank, 1, 1), dtype=matrix.dtype, device=device(matrix.factors[0])
    )
    factors = []
    for i in range(shape.order):
        if i in essential:
            factors.append(matrix.factors[essential.index(i)])
        else:
            factors.append(unit)
    return SeparatedMatrix(matrix.weights, tuple(factors))
