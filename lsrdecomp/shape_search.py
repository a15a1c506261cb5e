"""best_shape: the two-factor shape of fewest parameters at ε, or of least error at a budget.

All divisors of both sides are among the candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from lsrdecomp.arrays import Array, adjoint, as_double, namespace, norm, tail_norms, to_numpy
from lsrdecomp.errors import BudgetError
from lsrdecomp.fields import refuses_unknown
from lsrdecomp.kronecker.shape import KroneckerShape, divisors, kronecker_shapes
from lsrdecomp.solvers.svd.krylov_space import AdjointOperator, KrylovSpace
from lsrdecomp.targets.convert import as_target
from lsrdecomp.targets.target import Dense, Rearranged, Target
from lsrdecomp.targets.target_threads import threads_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.solvers.svd.certificate import Certificate

EXACT_SIDE = 96
"""Smaller side of R(M) up to which its whole spectrum is computed; set by hand, as are all numbers
of this file."""

_SMALL_EXCESS = 1e-2
"""An error that may lie so far above the optimum is taken for it."""


@dataclass(frozen=True, slots=True)
class ShapeChoice:
    """One shape with the terms it needs."""

    shape: KroneckerShape
    rank: int
    relative_error: float  # of the best approximation of that rank, to a few percent of ε
    padded: bool = False  # rows or columns of zeros are added first

    def __str__(self) -> str:
        """Return the choice in one line."""
        padded = ", padded" if self.padded else ""
        return (
            f"{self.rank} × [{self.shape}]{padded}, {self.structure}: "
            f"{self.parameters:,} parameters, relative error {self.relative_error:.2g}"
        )

    @property
    def parameters(self) -> int:
        """Numbers stored for a number of terms, weights folded in."""
        return self.shape.parameters(self.rank)

    @property
    def structure(self) -> str:
        """``"dense"``, ``"low rank"`` or ``"kronecker"``."""
        (m, n), (p, q) = self.shape.factors
        if 1 in (m * n, p * q):
            return "dense"
        is_column_times_row = n == p == 1
        is_row_times_column = m == q == 1
        return "low rank" if is_column_times_row or is_row_times_column else "kronecker"


@dataclass(frozen=True, slots=True, repr=False)
class ShapeSearch:
    """The outcome of a search over shapes."""

    best: ShapeChoice
    low_rank: ShapeChoice | None  # truncated SVD under the same goal; None: ruled out early
    dense: ShapeChoice  # the matrix itself, (m×n) ⊗ (1×1)
    choices: tuple[ShapeChoice, ...] = field(repr=False)  # each that was the best when it was found
    candidates: int  # shapes there are
    examined: int  # shapes that cost alone did not rule out
    unresolved: int  # shapes whose Krylov space grew too large; there may be better than was found

    def __repr__(self) -> str:
        rows, columns = self.dense.shape.factors[0]
        beside = [f"dense {rows * columns:,}"]
        if self.low_rank is not None:
            beside.insert(0, f"truncated SVD {self.low_rank.parameters:,}")
        unresolved = f", {self.unresolved:,} unresolved" if self.unresolved else ""
        return (
            f"ShapeSearch({self.best}; {', '.join(beside)}; "
            f"{self.examined:,} of {self.candidates:,} shapes examined{unresolved})"
        )


@refuses_unknown
def best_shape(
    matrix: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    parameters: int | None = None,
    pad: bool = False,
    seed: int = 0,
) -> ShapeSearch:
    """Search all two-factor shapes, plain low rank and dense among them.

    Shapes are tried from the cheapest term upwards. What the best so far costs bounds the terms
    worth trying in the next; rows of R(M) drawn at random, whose best approximation is better than
    R(M)'s own on average, and then a Krylov space that grows only while the shape can still win,
    reject most of them early. Both are estimates: `decompose` measures what the chosen shape gives.

    Parameters
    ----------
    matrix : array_like (m, n) or Target
    rtol, atol : float, optional
        Find the fewest parameters with this error, relative to ‖M‖_F or absolute.
    parameters : int, optional
        Find the least error with at most this number of parameters.
    pad : bool
        Also try sizes with more divisors just above a side that has few (a prime); they win only if
        cheaper.
    seed : int
        Of the rows that are drawn and of Krylov spaces.

    Returns
    -------
    ShapeSearch

    Raises
    ------
    BudgetError
        Unless exactly one goal is given, or if no shape fits ``parameters``.

    Examples
    --------
    >>> import numpy as np
    >>> search = best_shape(np.kron(np.arange(1.0, 13).reshape(4, 3), np.eye(5)), rtol=1e-6)
    >>> str(search.best.shape), search.best.rank, search.best.parameters
    ('4×3 ⊗ 5×5', 1, 37)
    """
    target = as_target(matrix)
    given = [goal for goal in (rtol, atol, parameters) if goal is not None]
    if len(given) != 1:
        raise BudgetError(
            "give one of rtol=, atol= or parameters=, "
            f"got rtol={rtol}, atol={atol} and parameters={parameters}"
        )
    with threads_for(target):
        goal: _Goal
        if parameters is not None:
            goal = _LeastError(parameters)
        elif atol is not None:
            goal = _FewestParameters(atol / target.norm if target.norm > 0.0 else 0.0)
        else:
            goal = _FewestParameters(rtol or 0.0)
        return _search(target, goal, pad=pad, seed=seed)


def _search(target: Target, goal: _Goal, *, pad: bool, seed: int) -> ShapeSearch:
    rows, columns = target.shape
    cheapest = min(kronecker_shapes(target.shape), key=_parameters_per_term)
    if isinstance(goal, _LeastError) and goal.parameters < _parameters_per_term(cheapest):
        raise BudgetError(
            f"no shape of a {rows}×{columns} matrix has fewer than "
            f"{_parameters_per_term(cheapest)} parameters a term"
        )
    dense = ShapeChoice(KroneckerShape((target.shape, (1, 1))), 1, 0.0)
    if target.norm == 0.0:
        zero = ShapeChoice(cheapest, 0, 0.0)
        return ShapeSearch(zero, zero, dense, (zero,), 1, 0, 0)
    # 1. All shapes of the matrix, and where asked those of the padded one, the cheapest term first.
    candidates = [(shape, target) for shape in kronecker_shapes(target.shape)]
    padded = _padded(target) if pad else None
    if padded is not None:
        candidates += [(shape, padded) for shape in kronecker_shapes(padded.shape)]
    candidates.sort(key=lambda candidate: _parameters_per_term(candidate[0]))
    # 2. Each is examined as far as it can still beat the best so far.
    search = _ShapeTrials(target.shape, goal, seed)
    search.offer(dense)
    for shape, matrix in candidates:
        search.try_shape(shape, matrix)
    # 3. The best of them, and the best truncated SVD beside it.
    low_rank = [choice for choice in search.choices if choice.structure == "low rank"]
    return ShapeSearch(
        best=search.best,
        low_rank=min(low_rank, key=goal.score) if low_rank else None,
        dense=dense,
        choices=tuple(search.choices),
        candidates=len(candidates),
        examined=search.examined,
        unresolved=search.unresolved,
    )


def _parameters_per_term(shape: KroneckerShape) -> int:
    return shape.parameters(1)


@dataclass(frozen=True, slots=True)
class _FewestParameters:
    """The goal of the fewest parameters with at most a relative error."""

    error: float

    def score(self, choice: ShapeChoice) -> tuple[float, float]:
        """Return what is to be least: first parameters, then the error."""
        return float(choice.parameters), choice.relative_error

    def admits(self, choice: ShapeChoice) -> bool:
        """Return whether a choice may be taken at all."""
        return choice.relative_error <= self.error

    def bounds(self, shape: KroneckerShape, choices: Sequence[ShapeChoice]) -> tuple[int, float]:
        """Return the most terms with which a shape beats these choices, and the error allowed."""
        fewest = min(choice.parameters for choice in choices)
        return (fewest - 1) // _parameters_per_term(shape), self.error

    def choose(
        self, errors: np.ndarray, max_rank: int, max_error: float
    ) -> tuple[int, float] | None:
        """Return the fewest terms, and their error, that keep the error; None if there are none."""
        ranks = np.flatnonzero(errors[: max_rank + 1] <= max_error)
        if not ranks.size:
            return None
        rank = max(int(ranks[0]), 1)
        return rank, float(errors[rank])

    def is_final(self, certificate: Certificate, rank: int, max_error: float) -> bool:
        """Return whether no fewer terms than these keep the error, as far as a space can tell."""
        if rank == 1:
            return True
        excess, _ = certificate.excess(rank - 1)
        error_of_optimum = certificate.error(rank - 1) / (1.0 + excess)
        return error_of_optimum > max_error or excess < _SMALL_EXCESS


@dataclass(frozen=True, slots=True)
class _LeastError:
    """The goal of the least error with at most so many parameters."""

    parameters: int

    def score(self, choice: ShapeChoice) -> tuple[float, float]:
        """Return what is to be least: first the error, then parameters."""
        return choice.relative_error, float(choice.parameters)

    def admits(self, choice: ShapeChoice) -> bool:
        """Return whether a choice may be taken at all."""
        return choice.parameters <= self.parameters

    def bounds(self, shape: KroneckerShape, choices: Sequence[ShapeChoice]) -> tuple[int, float]:
        """Return the most terms that a shape may have, and the error that they must beat."""
        least_error = min((choice.relative_error for choice in choices), default=1.0)
        return self.parameters // _parameters_per_term(shape), least_error

    def choose(
        self, errors: np.ndarray, max_rank: int, max_error: float
    ) -> tuple[int, float] | None:
        """Return all terms that fit, and their error; None unless that is below the error."""
        rank = min(max_rank, errors.size - 1)
        error = float(errors[rank])
        return (rank, error) if error < max_error else None

    def is_final(self, certificate: Certificate, rank: int, _max_error: float) -> bool:
        """Return whether the error of so many terms is near the optimum."""
        if rank >= certificate.size:
            return False
        excess, _ = certificate.excess(rank)
        return excess < _SMALL_EXCESS or certificate.is_exact(certificate.error(rank))


_Goal: TypeAlias = _FewestParameters | _LeastError


class _ShapeTrials:
    """The choices so far, and what a shape must do to beat them."""

    def __init__(self, size: tuple[int, int], goal: _Goal, seed: int) -> None:
        self.size = size
        self.goal = goal
        self.seed = seed
        self.choices: list[ShapeChoice] = []
        self.examined = 0
        self.unresolved = 0

    @property
    def best(self) -> ShapeChoice:
        """The best choice so far."""
        return min(self.choices, key=self.goal.score)

    def offer(self, choice: ShapeChoice) -> None:
        """Add a choice if the goal admits it."""
        if self.goal.admits(choice):
            self.choices.append(choice)

    def try_shape(self, shape: KroneckerShape, target: Target) -> None:
        """Add the choice of this shape if it beats the best so far."""
        max_rank, max_error = self.goal.bounds(shape, self.choices)
        max_rank = min(max_rank, shape.max_separation_rank)
        if max_rank < 1:
            return
        self.examined += 1
        if isinstance(target, Dense) and _sample_refuses(
            target.matrix, shape, max_rank, max_error, self.seed
        ):
            return
        found = self._terms(target, shape, max_rank, max_error)
        if found is not None:
            rank, error = found
            padded = shape.matrix_shape != self.size
            self.offer(ShapeChoice(shape, rank, error, padded=padded))

    def _terms(
        self, target: Target, shape: KroneckerShape, max_rank: int, max_error: float
    ) -> tuple[int, float] | None:
        """Return terms of a shape, and their error, that the goal takes; None if it takes none."""
        operator = target.rearranged(shape)
        smaller_side = min(operator.shape)
        if smaller_side <= EXACT_SIDE:
            errors = np.asarray(tail_norms(_spectrum(operator))) / target.norm
            return self.goal.choose(errors, max_rank, max_error)
        return self._terms_by_krylov(operator, target.norm, max_rank, max_error)

    def _terms_by_krylov(
        self, operator: Rearranged, norm: float, max_rank: int, max_error: float
    ) -> tuple[int, float] | None:
        """Find them in a Krylov space, which grows while the shape can still win."""
        if operator.shape[0] > operator.shape[1]:
            operator = AdjointOperator(operator)
        block = min(16, max(4, max_rank))
        space = KrylovSpace(operator, norm, block, self.seed)
        # A shape that needs a larger space counts as unresolved.
        max_size = min(*operator.shape, 256)
        earlier = None
        found = None
        while space.size + 2 * block < max_size:
            space.grow()
            (certificate,) = space.certificates()
            rank_limit = min(max_rank, space.size)
            errors = np.sqrt(certificate.squared_errors)
            found = self.goal.choose(errors, rank_limit, max_error)
            if found is not None:
                if self.goal.is_final(certificate, found[0], max_error):
                    return found
            elif rank_limit == max_rank:
                # All terms that the shape may have are in the space, and fall short for certain
                excess, _ = certificate.excess(max_rank)
                if excess < 1.0 and certificate.error(max_rank) / (1.0 + excess) > max_error:
                    return None
            elif certificate.columns_needed(max_error, earlier) > max_rank:
                return None
            earlier = certificate
        self.unresolved += 1
        return found  # what the space holds can be had; the shape's best may be better


def _spectrum(operator: Rearranged) -> Array:
    matrix = as_double(operator.formed())
    return namespace(matrix).linalg.svdvals(matrix)


def _sample_refuses(
    matrix: Array, shape: KroneckerShape, max_rank: int, max_error: float, seed: int
) -> bool:
    """Return whether random rows of R(M) alone need more terms for the error, with a margin."""
    (m, n), (p, q) = shape.factors
    rows = 4 * max_rank + 64  # four for each term, and some more
    if rows > m * n // 4 or p * q <= EXACT_SIDE:
        return False
    # A row of R(M) is a block of the matrix
    xp = namespace(matrix)
    drawn = np.random.default_rng(seed).choice(m * n, rows, replace=False)
    blocks = []
    for i, j in zip(*np.divmod(drawn, n), strict=True):
        blocks.append(matrix[i * p : (i + 1) * p, j * q : (j + 1) * q])
    sample = xp.reshape(xp.stack(blocks), (rows, p * q))
    sample_norm = norm(sample)
    if sample_norm == 0.0:
        return False
    eigenvalues = to_numpy(xp.linalg.eigvalsh(sample @ adjoint(sample))).astype(np.float64)
    squares = np.maximum(eigenvalues[::-1], 0.0)
    error = math.sqrt(float(np.sum(squares[max_rank:])))
    return bool(error > 1.5 * max_error * sample_norm)


def _padded(target: Target) -> Dense | None:
    """Return the matrix with zeros added to sides of few divisors; None if there are none."""
    if not isinstance(target, Dense):
        return None
    m, n = target.shape
    size = _padded_side(m), _padded_side(n)
    if size == (m, n):
        return None
    xp = namespace(target.matrix)
    matrix = xp.zeros(size, dtype=target.matrix.dtype)
    matrix[:m, :n] = target.matrix
    return Dense(matrix)


def _padded_side(size: int) -> int:
    """Return ``size``, or if it has few divisors the size just above with the most.

    It is raised by a thirty-second of itself at most, or by four.
    """
    if len(divisors(size)) > 4 or size < 8:
        return size
    largest = size + max(4, size // 32)
    return max(range(size, largest + 1), key=lambda side: len(divisors(side)))
