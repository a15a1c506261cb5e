"""What the solvers of a matrix share: one signature, one text of checks, one record of what is asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from lsrdecomp.arrays import device, namespace
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.solvers.base import Solution, Solver, Sweep, most_terms
from lsrdecomp.solvers.progress import SolveProgress

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.targets.base import Target


@dataclass(frozen=True, slots=True)
class MatrixProblem:
    """What one solve is asked for; the checks of the contract are made."""

    target: Target
    shape: KroneckerShape
    rank: int | None  # as it was asked
    atol: float | None
    most: int  # terms that may be used
    progress: SolveProgress

    @property
    def goal(self) -> float | None:
        """``atol`` for ‖M‖ = 1; of the zero matrix as it is."""
        return None if self.atol is None else self.atol / (self.target.norm or 1.0)

    def delegate_to(self, solver: Solver) -> Solution:
        """What another solver makes of the same problem, its records behind those so far."""
        return self.progress.solve(solver, self.target, self.shape, rank=self.rank, atol=self.atol)


class MatrixSolver(ABC):
    """A `Solver` that makes its checks here and has only to find the terms; subclasses are frozen dataclasses.

    Factors of 1×1 are taken out before and put back afterwards.
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
        essential = shape.essential
        most = most_terms(target.shape, essential, rank, atol, order=self.order)
        solution = self._solve(
            MatrixProblem(target, essential, rank, atol, most, SolveProgress(on_sweep))
        )
        if essential == shape:
            return solution
        return replace(solution, approximation=with_unit_factors(solution.approximation, shape))

    solve.__doc__ = Solver.solve.__doc__

    @abstractmethod
    def _solve(self, problem: MatrixProblem) -> Solution:
        """The terms of a problem whose checks are made, its steps told to ``problem.progress``."""


def without_unit_factors(matrix: SeparatedMatrix) -> SeparatedMatrix:
    """The same matrix in the `KroneckerShape.essential` shape."""
    essential = matrix.kronecker_shape.essential_factors
    first, *rest = (matrix.factors[i] for i in essential)
    for i, factor in enumerate(matrix.factors):
        first = first if i in essential else first * factor  # a sign or a phase
    return SeparatedMatrix(matrix.weights, (first, *rest))


def with_unit_factors(matrix: SeparatedMatrix, shape: KroneckerShape) -> SeparatedMatrix:
    """The inverse of `without_unit_factors`, for a shape of which ``matrix`` has the essential one."""
    xp, essential = namespace(*matrix.factors), shape.essential_factors
    unit = xp.ones(
        (matrix.separation_rank, 1, 1), dtype=matrix.dtype, device=device(matrix.factors[0])
    )
    factors = (
        matrix.factors[essential.index(i)] if i in essential else unit for i in range(shape.order)
    )
    return SeparatedMatrix(matrix.weights, tuple(factors))
