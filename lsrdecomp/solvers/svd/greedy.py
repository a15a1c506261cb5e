"""Terms of different Kronecker shapes: a greedy choice of shapes, then backfitting of blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

from lsrdecomp.arrays import Array, as_double, namespace, norm
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.solvers.base import Event, Solution, Solver, Status, Sweep, validate_request
from lsrdecomp.solvers.progress import IterationStep, SolveProgress, iterate
from lsrdecomp.solvers.svd.dense import SVD, as_matrix
from lsrdecomp.targets.base import Dense, Target
from lsrdecomp.targets.convert import as_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lsrdecomp.kronecker.separated import SeparatedMatrix


@dataclass(frozen=True, eq=False, repr=False)
class MixedSum:
    """A sum of separated matrices of different Kronecker shapes and one matrix shape.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import SeparatedMatrix
    >>> fine = SeparatedMatrix.from_factors([np.eye(4)[None], np.ones((1, 3, 3))])
    >>> coarse = SeparatedMatrix.from_factors([np.ones((1, 2, 2)), np.eye(6)[None]])
    >>> both = MixedSum((fine, coarse))
    >>> both
    MixedSum(12×12 as 1 × [4×4 ⊗ 3×3] + 1 × [2×2 ⊗ 6×6], 65 parameters)
    >>> bool(np.allclose(both @ np.ones(12), 5.0))
    True
    """

    parts: tuple[SeparatedMatrix, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ShapeError("a sum needs at least one part")
        for part in self.parts[1:]:
            if part.shape != self.parts[0].shape:
                raise ShapeError(f"the parts are {self.parts[0].shape} and {part.shape}")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.parts[0].shape

    @property
    def parameters(self) -> int:
        """Number of entries of all factors and weights."""
        return sum(part.parameters for part in self.parts)

    @property
    def separation_rank(self) -> int:
        """Number of terms of all shapes together."""
        return sum(part.separation_rank for part in self.parts)

    def to_matrix(self) -> Array:
        """Form the sum; shape (m, n)."""
        return reduce(add, (part.to_matrix() for part in self.parts))

    def __matmul__(self, x: Array) -> Array:
        return reduce(add, (part @ x for part in self.parts))

    def __repr__(self) -> str:
        rows, columns = self.shape
        terms = [f"{part.separation_rank} × [{part.kronecker_shape}]" for part in self.parts]
        total = " + ".join(terms)
        return f"MixedSum({rows}×{columns} as {total}, {self.parameters:,} parameters)"


@dataclass(frozen=True, slots=True)
class MixedSolution(Solution):
    """The answer of `Greedy`: a `Solution` but for the kind of its approximation.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import KroneckerShape
    >>> from lsrdecomp.targets import as_target
    >>> target = as_target(np.kron(np.eye(4), np.ones((3, 3))))
    >>> solution = Greedy().solve(target, KroneckerShape(((4, 4), (3, 3))), rank=1)
    >>> solution.status.name, round(solution.relative_error, 9), solution.approximation.parameters
    ('rank_reached', 0.0, 25)
    """

    approximation: MixedSum  # type: ignore[assignment]  # no one Kronecker shape


@dataclass(frozen=True, slots=True)
class Greedy:
    """Greedy choice of each term's shape by its gain per parameter, with backfitting [1]_.

    A block is all terms of one shape; refitting it to what the other blocks leave is a truncated
    SVD, so the error never rises. Without refitting, greedy terms are far from optimal: that is
    what makes this competitive. It pays for a sum of a separable and a low-rank matrix, and rarely
    elsewhere.

    Parameters
    ----------
    shapes : sequence of KroneckerShape
        Candidates beside the shape that `solve` is given, of two factors each; include ``(m×1) ⊗
        (1×n)`` for plain low rank.
    parameters : int, optional
        Maximum parameters; with it neither ``rank`` nor ``atol`` need be given.
    cycles : int
        Maximum backfitting cycles after each new term.
    rtol : float
        Backfitting stops when a cycle lowers the error by less than this fraction.
    solver : Solver
        Used for each block.

    References
    ----------
    .. [1] C. Cai, R. Chen and H. Xiao, Hybrid Kronecker product decomposition and approximation, J.
       Comput. Graph. Stat. 32 (2023). doi:10.1080/10618600.2022.2134873

    Examples
    --------
    A Kronecker product plus a matrix of rank one: found in both shapes it takes 73 numbers, in one
    alone 120 and more.

    >>> import numpy as np
    >>> from lsrdecomp import KroneckerShape, decompose
    >>> from lsrdecomp.targets import as_target
    >>> i = np.arange(12.0)
    >>> matrix = np.kron(np.eye(4), np.ones((3, 3))) + np.outer(i, i) ** 2 / 400.0
    >>> kronecker, low_rank = KroneckerShape(((4, 4), (3, 3))), KroneckerShape(((12, 1), (1, 12)))
    >>> solution = Greedy(shapes=[low_rank]).solve(as_target(matrix), kronecker, atol=1e-3)
    >>> solution.approximation
    MixedSum(12×12 as 2 × [12×1 ⊗ 1×12] + 1 × [4×4 ⊗ 3×3], 73 parameters)
    >>> [decompose(matrix, shape, atol=1e-3).parameters for shape in (kronecker, low_rank)]
    [200, 120]
    """

    shapes: Sequence[KroneckerShape] = ()
    parameters: int | None = None
    cycles: int = 50
    rtol: float = 1e-3
    solver: Solver = field(default_factory=SVD)

    def solve(
        self,
        target: Target,
        shape: KroneckerShape,
        *,
        rank: int | None = None,
        atol: float | None = None,
        on_sweep: Callable[[Sweep], Any] | None = None,
    ) -> MixedSolution:
        """Find terms of several shapes; arguments and errors are those of `Solver.solve`.

        ``rank`` counts the terms of all shapes together. The record differs from a `Solution` in
        its approximation alone, a `MixedSum`: it has no one Kronecker shape, so `decompose` does
        not take this solver.

        Returns
        -------
        MixedSolution
            ``sweeps`` are backfitting cycles, marked where a term was added; ``optimality_gap`` is
            None, since greedy choice has no bound. Cost: one SVD of a rearrangement for each shape
            and term, and one a block and cycle.
        """
        target = as_target(target)
        given = [KroneckerShape.parse(candidate) for candidate in (shape, *self.shapes)]
        candidates = tuple(dict.fromkeys(given))
        limit = self.parameters if rank is None else rank
        for candidate in candidates:
            validate_request(target.shape, candidate, limit, atol, order=2)
        max_terms = math.inf if rank is None else rank
        matrix = as_double(as_matrix(target))
        size = target.norm
        goal = 0.0 if atol is None or size == 0.0 else atol / size
        progress = SolveProgress(on_sweep)
        blocks: dict[KroneckerShape, SeparatedMatrix] = {}
        residual = matrix
        error = 1.0 if size > 0.0 else 0.0
        while error > goal + _floor(matrix) and _n_terms(blocks) < max_terms:
            # Greedy 1: the shape whose next term gains most per parameter.
            chosen = self._choose(residual, blocks, candidates)
            if chosen is None:
                break
            ranks = {shape: block.separation_rank for shape, block in blocks.items()}
            ranks[chosen] = ranks.get(chosen, 0) + 1
            # Greedy 2: all blocks refitted in turn, the new one first, until a cycle gains little.
            progress.mark(Event.new_term)
            steps = self._cycles(residual, blocks, ranks, chosen, size)
            residual, _ = iterate(steps, residual, progress, max_steps=self.cycles)
            error = norm(residual) / size
        parts = tuple(block for block in blocks.values() if block.separation_rank)
        if not parts:
            zero = self.solver.solve(Dense(matrix), candidates[0], rank=1).approximation.truncate(0)
            parts = (zero,)
        approximation = MixedSum(parts)
        error = target.residual_norm(approximation) / (size or 1.0)
        status = Status.rank_reached
        if atol is not None:
            is_met = error <= goal + _floor(matrix)
            status = Status.converged if is_met else Status.rank_exhausted
        return MixedSolution(approximation, status, progress.sweeps, relative_error=error)

    def _cycles(
        self,
        residual: Array,
        blocks: dict[KroneckerShape, SeparatedMatrix],
        ranks: dict[KroneckerShape, int],
        first: KroneckerShape,
        size: float,
    ) -> Iterator[IterationStep[Array]]:
        """Backfit in cycles after a new term; updates ``blocks``."""
        previous_error = math.inf
        while True:
            residual = self._cycle(residual, blocks, ranks, first)
            error = norm(residual) / size
            converged = len(ranks) == 1 or error >= (1.0 - self.rtol) * previous_error
            yield IterationStep(residual, error, objective=error**2, converged=converged)
            previous_error = error

    def _choose(
        self,
        residual: Array,
        blocks: dict[KroneckerShape, SeparatedMatrix],
        candidates: Sequence[KroneckerShape],
    ) -> KroneckerShape | None:
        """Choose the shape whose next term lowers the square error most per parameter.

        None where no shape has room for a term that gains anything.
        """
        best: KroneckerShape | None = None
        best_gain = 0.0
        for shape in candidates:
            if not self._has_room(shape, blocks):
                continue
            leading = self.solver.solve(Dense(residual), shape, rank=1).approximation
            if leading.separation_rank == 0:
                continue
            gain = float(leading.weights[0]) / math.sqrt(shape.parameters(1))
            if gain > best_gain:
                best = shape
                best_gain = gain
        return best

    def _has_room(
        self, shape: KroneckerShape, blocks: dict[KroneckerShape, SeparatedMatrix]
    ) -> bool:
        """Return whether a shape can have another term, within the parameters that are allowed."""
        if shape in blocks and blocks[shape].separation_rank >= shape.max_separation_rank:
            return False
        if self.parameters is None:
            return True
        used = sum(block.parameters for block in blocks.values())
        return used + shape.parameters(1) <= self.parameters

    def _cycle(
        self,
        residual: Array,
        blocks: dict[KroneckerShape, SeparatedMatrix],
        ranks: dict[KroneckerShape, int],
        first: KroneckerShape,
    ) -> Array:
        """Refit every block once to what the others leave, the newest first; updates ``blocks``."""
        for shape in sorted(ranks, key=lambda shape: shape != first):
            remainder = residual
            if shape in blocks:
                remainder = residual + blocks[shape].to_matrix()
            solution = self.solver.solve(Dense(remainder), shape, rank=ranks[shape])
            blocks[shape] = solution.approximation
            residual = remainder - blocks[shape].to_matrix()
        return residual


def _n_terms(blocks: dict[KroneckerShape, SeparatedMatrix]) -> int:
    return sum(block.separation_rank for block in blocks.values())


def _floor(matrix: Array) -> float:
    """Return the relative error that rounding in double precision leaves."""
    return 8.0 * float(namespace(matrix).finfo(matrix.dtype).eps) * math.sqrt(max(matrix.shape))
