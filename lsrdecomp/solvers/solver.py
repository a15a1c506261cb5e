"""The contract of solvers, of a matrix and of a pair: arguments, records, and how a solve ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from lsrdecomp.errors import ArgumentError, BudgetError, ShapeError
from lsrdecomp.kronecker.shape import ProductShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.kronecker.product import SeparatedProduct
    from lsrdecomp.kronecker.separated import SeparatedMatrix
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.targets.target import LowRank, Target
    from lsrdecomp.targets.weights import NormWeights


class Status(Enum):
    """The end of a solve, in a sentence that helps.

    >>> Status.rank_reached.value
    'Computed the requested terms; no tolerance given.'
    """

    converged = "The error met the budget."
    rank_reached = "Computed the requested terms; no tolerance given."
    rank_exhausted = (
        "Every allowed term was used and the error is still above the budget. "
        "Allow more terms, loosen the tolerance, or try another Kronecker shape."
    )
    precision_exhausted = (
        "Rounding to the storage type alone exceeds the budget. "
        "Store in a finer type, or loosen the tolerance."
    )
    ill_conditioned = (
        "Terms cancel: γ·μ·‖M‖ is above the budget, so the stored error would be rounding. "
        "Raise the penalty on λ, store in a finer type, or use fewer terms."
    )
    undetermined = (
        "The known entries do not determine all of the sum: see the remark. "
        "Ask for fewer terms, or give more entries."
    )
    stalled = (
        "The error stopped falling above the budget. Allow more terms, or another seed or start."
    )
    sweep_limit = (
        "The sweep limit was reached while the error was still falling. Allow more sweeps."
    )

    @property
    def met(self) -> bool:
        """Whether the request was met."""
        return self in (Status.converged, Status.rank_reached)


class ErrorKind(Enum):
    """The trust that a reported error deserves.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import decompose
    >>> decompose(np.kron(np.eye(4), np.ones((3, 3))), "4x4, 3x3", rank=1).error_kind.value
    'measured in double precision'
    """

    measured = "measured in double precision"
    bounded = "a rigorous upper bound"
    estimated = "an estimate"


class Event(Enum):
    """The part of a solve that a record begins: between two such events records can be compared.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import ALS, decompose
    >>> result = decompose(np.ones((8, 8)), "2x2, 2x2, 2x2", rank=1, solver=ALS(max_sweeps=2))
    >>> [(sweep.index, sweep.event.name) for sweep in result.sweeps]
    [(1, 'start'), (2, 'step')]
    """

    step = "one more step of the same descent: its objective is not above that of the record before"
    start = "the first step of all, or from another start, or on another form of the same problem"
    new_term = "the first step after a term was added"
    hand_over = "the first step of another solver, which took over"


@dataclass(frozen=True, slots=True)
class Sweep:
    """One step of an iteration, as handed to callbacks and kept in the result.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import LowRank, ProductShape
    >>> from lsrdecomp.solvers import JointALS
    >>> i, k = np.arange(16.0), np.arange(1.0, 5.0)
    >>> pair = LowRank(np.cos(np.outer(i, k)), np.sin(np.outer(k, i)))         # 16 × 4 and 4 × 16
    >>> shape = ProductShape(out=(4, 4), inner=(2, 2), into=(4, 4))
    >>> def tell(sweep):
    ...     print(f"sweep {sweep.index}: error {sweep.relative_error:.2f}")
    >>> solution = JointALS(sweeps=3, initializations=1).solve(pair, shape, 2, on_sweep=tell)
    sweep 1: error 0.66
    sweep 2: error 0.65
    sweep 3: error 0.64
    """

    index: int  # 1, 2, 3, … through the whole solve, hand-overs included
    relative_error: float  # the solver's running figure: it steers, and is not a measurement
    condition: float = 1.0  # γ; NaN: not computed
    event: Event = Event.step
    objective: float | None = None  # what the descent lowers, for ‖M‖ = 1; None: not computed


@dataclass(frozen=True, slots=True)
class Solution:
    """The answer of a solver of a matrix.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import SVD, KroneckerShape
    >>> from lsrdecomp.targets import as_target
    >>> target = as_target(np.kron(np.eye(4), np.ones((3, 3))))
    >>> solution = SVD().solve(target, KroneckerShape(((4, 4), (3, 3))), atol=1e-9)
    >>> solution.approximation, solution.status.name, solution.optimality_gap
    (SeparatedMatrix(12×12 as 1 × [4×4 ⊗ 3×3], 25 parameters, γ = 1), 'converged', 0.0)
    """

    # Unit factors, λ descending, in the library and element type of the target
    approximation: SeparatedMatrix
    # `rank_reached` where no error was asked for; else `converged`, or why not
    status: Status
    # The records that ``on_sweep`` was told, in that order; one record of a direct solver
    sweeps: tuple[Sweep, ...] = ()
    # Relative excess of the error over the optimum; None: not known
    optimality_gap: float | None = None
    # `bounded`: rigorous; `estimated`: extrapolated
    gap_kind: ErrorKind = ErrorKind.estimated
    # ‖M − M̂‖/‖M‖ if the solver has measured it; else `Target.residual_norm` does
    relative_error: float | None = None
    # A sentence on this answer that the status does not have; the record's remark ends with it
    note: str = ""


class Solver(Protocol):
    """A method that finds terms for a matrix: a frozen value that holds choices.

    A solve changes nothing and draws its random numbers from the solver's seed.
    """

    def solve(
        self,
        target: Target,
        shape: KroneckerShape,
        *,
        rank: int | None = None,
        atol: float | None = None,
        on_sweep: Callable[[Sweep], Any] | None = None,
    ) -> Solution:
        """Find a short sum of Kronecker products near ``target``.

        Parameters
        ----------
        target : Target, shape (m, n)
            The matrix to approximate: `lsrdecomp.targets`; solvers of this package take what
            `as_target` takes, too.
        shape : KroneckerShape
            Sizes of the factors; solvers of this package read ``((16, 16), (8, 8))`` and text, too.
        rank : int, optional
            Number of terms; beside ``atol``, the most that may be used. More than the shape can
            need is clipped.
        atol : float, optional
            Allowed ‖M − M̂‖_F: as few terms as the solver finds to reach it.
        on_sweep : callable, optional
            Told each `Sweep` as it happens, those of solvers that take over included.

        Returns
        -------
        Solution

        Raises
        ------
        ShapeError
            If the shape does not tile the target, or has a number of factors that the solver is not
            for.
        BudgetError
            If neither ``rank`` nor ``atol`` is given, or ``atol`` is negative or not finite.
        """
        ...


@dataclass(frozen=True, slots=True)
class PairSolution:
    """The answer of a solver of a pair.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import LowRank, ProductShape
    >>> from lsrdecomp.solvers import JointALS
    >>> i, k = np.arange(16.0), np.arange(1.0, 5.0)
    >>> pair = LowRank(np.cos(np.outer(i, k)), np.sin(np.outer(k, i)))         # 16 × 4 and 4 × 16
    >>> solution = JointALS().solve(pair, ProductShape(out=(4, 4), inner=(2, 2), into=(4, 4)), 2)
    >>> solution.product
    SeparatedProduct(16×16 as 2 × [4×2 ⊗ 4×2] times 2 × [2×4 ⊗ 2×4], 64 parameters)
    >>> solution.relative_error < solution.start_error < 1.0
    True
    """

    # In the library of the target, in double precision
    product: SeparatedProduct
    # ‖G^½(M − M̂)C^½‖ / ‖G^½ M C^½‖, measured, not the steering figure of the last sweep
    relative_error: float
    # The same for the start; that of the product itself where nothing is iterated
    start_error: float
    # ‖G^½ M C^½‖
    norm: float
    status: Status
    # The records that ``on_sweep`` was told, of this pair alone
    sweeps: tuple[Sweep, ...] = field(default=(), repr=False)

    @property
    def error(self) -> float:
        """‖G^½(M − M̂)C^½‖, absolute: comparable between the layers of one network."""
        return self.relative_error * self.norm


class PairSolver(Protocol):
    """A method that finds terms for both sides of a low-rank pair, in a weighted norm."""

    def solve(
        self,
        target: LowRank,
        shape: ProductShape,
        ranks: int | tuple[int, int],
        *,
        weights: NormWeights | None = None,
        on_sweep: Callable[[Sweep], Any] | None = None,
    ) -> PairSolution:
        """Find a product (Σ B1 ⊗ B2)(Σ A1 ⊗ A2) near ``target``.

        Parameters
        ----------
        target : LowRank, shape (m, n)
            ΔW = B A, never formed.
        shape : ProductShape
            Splits of m, of the inner rank and of n.
        ranks : int or (int, int)
            Terms of the output side and of the input side; more than a side can need are clipped.
        weights : NormWeights, optional
            G and C of the norm ‖G^½ X C^½‖ in which the error is reported; absent, the Frobenius
            norm.
        on_sweep : callable, optional
            Told each `Sweep` as it happens.

        Returns
        -------
        PairSolution

        Raises
        ------
        ShapeError
            If shape, weights and target disagree, or a number of terms is not positive.
        """
        ...


def validate_request(
    size: tuple[int, int],
    shape: KroneckerShape,
    rank: int | None,
    atol: float | None,
    *,
    order: int | None = None,
) -> int:
    """Make the checks that every `Solver` makes, and return the number of terms that it may use.

    Parameters
    ----------
    size : (int, int)
        Rows and columns of the matrix.
    shape, rank, atol
        As for `Solver.solve`.
    order : int, optional
        The one number of factors that the solver is for; absent, any.

    Raises
    ------
    ShapeError, BudgetError
        As `Solver.solve` says.
    """
    if order is not None and shape.order != order:
        expected = "two" if order == 2 else order
        raise ShapeError(f"this solver is for {expected} factors; {shape} has {shape.order}")
    shape.check(size)
    if rank is None and atol is None:
        raise BudgetError("say what is wanted: rank= or atol=")
    if atol is not None and not (math.isfinite(atol) and atol >= 0.0):
        raise BudgetError(f"atol must be finite and not negative, got {atol}")
    if rank is None:
        return shape.max_separation_rank
    return min(validate_rank(rank), shape.max_separation_rank)


def validate_rank(rank: Any) -> int:
    """Return a number of terms as an integer; raise `ShapeError` unless it is a positive one."""
    try:
        if not isinstance(rank, bool) and rank == int(rank) and rank >= 1:
            return int(rank)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ShapeError(f"a separation rank is a positive integer, got {rank!r}")


def require_product_shape(shape: Any) -> None:
    """Raise `ShapeError` unless a shape is that of both sides of a pair."""
    if not isinstance(shape, ProductShape):
        raise ShapeError(
            "shape: a pair needs a ProductShape, such as "
            f"ProductShape(out=(4, 4), inner=(2, 2), into=(4, 4)), got {shape!r}"
        )


def validate_pair_request(
    target: LowRank, shape: ProductShape, ranks: int | tuple[int, int], name: str = "the target"
) -> tuple[int, int]:
    """Make the checks that every `PairSolver` makes; return the terms of both sides, clipped."""
    if not hasattr(target, "left") or not hasattr(target, "right"):
        raise ArgumentError(f"{name}: expected a LowRank(B, A), got {type(target).__name__}")
    require_product_shape(shape)
    if target.shape != shape.matrix_shape:
        rows, columns = shape.matrix_shape
        raise ShapeError(
            f"{name} is {target.shape[0]}×{target.shape[1]}, but {shape} is {rows}×{columns}"
        )
    out_rank, in_rank = (ranks, ranks) if isinstance(ranks, int) else ranks
    if out_rank < 1 or in_rank < 1:
        raise ShapeError(f"separation ranks must be positive, got {out_rank} and {in_rank}")
    out_rank = min(out_rank, shape.left.max_separation_rank)
    in_rank = min(in_rank, shape.right.max_separation_rank)
    return out_rank, in_rank
