"""Which two-factor shape: among all divisors, the fewest parameters at ε or the least error at a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import Array, adjoint, as_double, namespace, norm, tail_norms, to_numpy
from lsrdecomp.errors import BudgetError
from lsrdecomp.fields import accepts_settings
from lsrdecomp.kronecker.shape import KroneckerShape, divisors, kronecker_shapes
from lsrdecomp.solvers.svd.bidiagonal import AdjointOperator, Bidiagonal
from lsrdecomp.solvers.svd.certificate import Certificate
from lsrdecomp.targets.base import Dense, Rearranged, Target
from lsrdecomp.targets.convert import as_target
from lsrdecomp.targets.threads import threads_for

if TYPE_CHECKING:
    from collections.abc import Iterator

EXACT_SIDE = 96
"""Up to this smaller side of the rearrangement the whole spectrum is the quickest answer."""

LARGEST_SPACE = 256
"""Most columns of a Krylov space; a shape that needs more is counted as unresolved and offers what
was found."""


@dataclass(frozen=True, slots=True)
class ShapeChoice:
    """One shape with the terms it needs."""

    shape: KroneckerShape
    rank: int
    relative_error: float  # of the best approximation of that rank, to a few percent of ε
    padded: bool = False  # rows or columns of zeros are added first

    @property
    def parameters(self) -> int:
        return self.shape.parameters(self.rank)

    @property
    def structure(self) -> str:
        """``"dense"``, ``"low rank"`` or ``"kronecker"``."""
        (m, n), (p, q) = self.shape.factors
        if 1 in (m * n, p * q):
            return "dense"
        return "low rank" if (n == p == 1) or (m == q == 1) else "kronecker"


@dataclass(frozen=True, slots=True)
class ShapeSearch:
    """What a search over shapes found."""

    best: ShapeChoice
    low_rank: ShapeChoice | None  # truncated SVD under the same goal; None: ruled out early
    dense: ShapeChoice  # the matrix itself, (m×n) ⊗ (1×1)
    choices: tuple[ShapeChoice, ...] = field(
        repr=False
    )  # each one that was the best when it was found
    candidates: int  # shapes there are
    examined: int  # shapes that cost alone did not rule out
    unresolved: int  # shapes of which a space of `LARGEST_SPACE` columns found something, perhaps not the best


@accepts_settings()
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
        Find the least error with at most so many parameters.
    pad : bool
        Also try sizes with more divisors just above a side that has few (a prime); they win only if
        cheaper.
    seed : int

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
    goals = [goal is not None for goal in (rtol, atol, parameters)]
    if sum(goals) != 1:
        raise BudgetError(f"give one of rtol ({rtol}), atol ({atol}) and parameters ({parameters})")
    with threads_for(target):
        return _best_shape(target, rtol, atol, parameters, pad, seed)


def _best_shape(
    target: Target,
    rtol: float | None,
    atol: float | None,
    parameters: int | None,
    pad: bool,
    seed: int,
) -> ShapeSearch:
    size, total = target.shape, target.norm
    dense = ShapeChoice(KroneckerShape((size, (1, 1))), 1, 0.0)
    error = rtol if atol is None else (atol / total if total > 0.0 else 0.0)
    search = _Search(target, error, parameters, seed)
    cheapest = min(shape.parameters(1) for shape in kronecker_shapes(size))
    if parameters is not None and parameters < cheapest:
        raise BudgetError(
            f"no shape of a {size[0]}×{size[1]} matrix has fewer than {cheapest} parameters a term"
        )
    if total == 0.0:
        shape = min(kronecker_shapes(size), key=lambda s: s.parameters(1))
        nothing = ShapeChoice(shape, 0, 0.0)
        return ShapeSearch(nothing, nothing, dense, (nothing,), 1, 0, 0)
    search.offer(dense)
    shapes = [(shape, target) for shape in kronecker_shapes(size)]
    for larger in _padded(target) if pad else ():
        shapes += [(shape, larger) for shape in kronecker_shapes(larger.shape)]
    shapes.sort(key=lambda entry: entry[0].parameters(1))
    for shape, on in shapes:
        search.try_shape(shape, on)
    reference = [choice for choice in search.choices if choice.structure == "low rank"]
    return ShapeSearch(
        search.best, min(reference, key=search.score) if reference else None, dense, tuple(search.choices),
        len(shapes), search.examined, search.unresolved,
    )  # fmt: skip


class _Search:
    """The best choice so far, and what a shape must do to beat it."""

    def __init__(
        self, target: Target, error: float | None, parameters: int | None, seed: int
    ) -> None:
        self.size, self.error, self.parameters, self.seed = target.shape, error, parameters, seed
        self.choices: list[ShapeChoice] = []
        self.examined = self.unresolved = 0

    @property
    def best(self) -> ShapeChoice:
        return min(self.choices, key=self.score)

    def score(self, choice: ShapeChoice) -> tuple[float, float]:
        values = (float(choice.parameters), choice.relative_error)
        return values if self.parameters is None else values[::-1]

    def offer(self, choice: ShapeChoice) -> None:
        if self.parameters is None or choice.parameters <= self.parameters:
            self.choices.append(choice)

    def try_shape(self, shape: KroneckerShape, target: Target) -> None:
        """Add the choice of this shape if it beats the best so far."""
        most = shape.max_separation_rank
        if self.parameters is None:
            most = min(most, (self.best.parameters - 1) // shape.parameters(1))
            goal = self.error or 0.0
        else:
            most = min(most, self.parameters // shape.parameters(1))
            goal = min((choice.relative_error for choice in self.choices), default=1.0)
        if most < 1:
            return
        self.examined += 1
        if isinstance(target, Dense) and _sample_refuses(
            target.matrix, shape, most, goal, self.seed
        ):
            return
        answer = self._terms(target, shape, most, goal)
        if answer is not None:
            self.offer(ShapeChoice(shape, *answer, padded=shape.matrix_shape != self.size))

    def _terms(
        self, target: Target, shape: KroneckerShape, most: int, goal: float
    ) -> tuple[int, float] | None:
        """(terms, error) with error ≤ goal in at most so many terms, or None."""
        operator, total = target.rearranged(shape), target.norm
        side = min(operator.shape)
        if side <= EXACT_SIDE:
            tails = np.asarray(tail_norms(_spectrum(operator))) / total
            return self._choose(tails, most, goal)
        if operator.shape[0] < operator.shape[1]:
            operator = AdjointOperator(operator)
        space = Bidiagonal(operator, total, min(16, max(4, most)), self.seed)
        past: list[np.ndarray] = []
        answer = None
        while space.size + 2 * space.block < min(side, LARGEST_SPACE):
            space.step()
            certificate = Certificate.of(space, past)
            past.append(certificate.captured)
            limit = min(most, space.size)
            answer = self._choose(np.sqrt(certificate.squared_errors), limit, goal)
            if answer is not None:
                excess, _ = certificate.excess(max(answer[0] - 1, 0))
                fewer = certificate.error(max(answer[0] - 1, 0)) / (1.0 + excess)
                if self.parameters is None and (answer[0] == 1 or fewer > goal or excess < 1e-2):
                    return answer
                settled = certificate.excess(answer[0])[0] < 1e-2 or certificate.is_exact(answer[1])
                if self.parameters is not None and answer[0] < space.size and settled:
                    return answer
            elif limit == most:
                excess, _ = certificate.excess(most)
                if excess < 1.0 and certificate.error(most) / (1.0 + excess) > goal:
                    return None
            elif certificate.columns_needed(goal) > most:
                return None
        self.unresolved += 1
        return answer  # what the space holds can be had; the shape's best may be better

    def _choose(self, errors: np.ndarray, most: int, goal: float) -> tuple[int, float] | None:
        most = min(most, errors.size - 1)
        if self.parameters is not None:
            return (most, float(errors[most])) if errors[most] < goal else None
        met = np.flatnonzero(errors[: most + 1] <= goal)
        return (max(int(met[0]), 1), float(errors[max(int(met[0]), 1)])) if met.size else None


def _spectrum(operator: Rearranged) -> Array:
    matrix = as_double(operator.formed())
    return namespace(matrix).linalg.svdvals(matrix)


def _sample_refuses(
    matrix: Array, shape: KroneckerShape, most: int, goal: float, seed: int
) -> bool:
    """Whether random rows of R(M) already need more than ``most`` terms for the error, with a margin of a half."""
    (m, n), (p, q) = shape.factors
    rows = 4 * most + 64
    if rows > m * n // 4 or p * q <= EXACT_SIDE:
        return False
    xp = namespace(matrix)
    drawn = np.random.default_rng(seed).choice(m * n, rows, replace=False)
    blocks = [
        matrix[i * p : (i + 1) * p, j * q : (j + 1) * q]
        for i, j in zip(*np.divmod(drawn, n), strict=True)
    ]
    sample = xp.reshape(xp.stack(blocks), (rows, p * q))
    total = norm(sample)
    if total == 0.0:
        return False
    values = np.maximum(
        to_numpy(xp.linalg.eigvalsh(sample @ adjoint(sample))).astype(np.float64)[::-1], 0.0
    )
    return bool(math.sqrt(float(np.sum(values[most:]))) > 1.5 * goal * total)


def _padded(target: Target) -> Iterator[Dense]:
    """The matrix with zeros added to a side of few divisors."""
    if not isinstance(target, Dense):
        return
    m, n = target.shape
    larger = _smooth(m), _smooth(n)
    if larger == (m, n):
        return
    xp = namespace(target.matrix)
    matrix = xp.zeros(larger, dtype=target.matrix.dtype)
    matrix[:m, :n] = target.matrix
    yield Dense(matrix)


def _smooth(size: int) -> int:
    """``size``, or if it has few divisors the size just above with the most."""
    if len(divisors(size)) > 4 or size < 8:
        return size
    return max(range(size, size + max(4, size // 32) + 1), key=lambda q: len(divisors(q)))
