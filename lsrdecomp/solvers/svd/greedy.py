"""Terms of different Kronecker shapes: a greedy choice of shapes, then backfitting of blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

from lsrdecomp.arrays import Array, as_double, namespace, norm
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.solvers.cp.als import ALS
from lsrdecomp.solvers.iteration import IterationStep, SolveProgress, iterate
from lsrdecomp.solvers.solver import Event, Solution, Solver, Status, Sweep, validate_request
from lsrdecomp.solvers.svd.dense import SVD
from lsrdecomp.solvers.svd.singular_terms import as_matrix
from lsrdecomp.targets.convert import as_target
from lsrdecomp.targets.target import Dense, Target

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
    SVD for two factors, and for more alternating least squares from the terms it has, kept where
    they fit better: the error never rises. Without refitting, greedy terms are far from optimal:
    that is what makes this competitive. A shape chosen while other terms were missing may be the
    wrong one, so terms then change shapes while that lowers the error; with a number of terms all
    changes are tried, else those to a shape with no more parameters. It pays for a sum of a
    separable and a low-rank matrix, and rarely elsewhere.

    Parameters
    ----------
    shapes : sequence of KroneckerShape
        Candidates beside the shape that `solve` is given, each of two factors or more; include
        ``(m×1) ⊗ (1×n)`` for plain low rank.
    parameters : int, optional
        Maximum parameters; with it neither ``rank`` nor ``atol`` need be given.
    cycles : int
        Maximum backfitting cycles after each new term.
    final_cycles : int
        The same after the last term.
    rtol : float
        Backfitting stops when a cycle lowers the error by less than this fraction.
    min_exchange_gain : float
        A term changes its shape where that lowers the error by this fraction; 1 keeps the shapes
        that were chosen. By hand.
    solver : Solver
        Used for each block of two factors.
    cp_solver : ALS
        Used for each block of more. Its ``storage`` sets the accuracy of an exact sum.

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
    final_cycles: int = 500
    rtol: float = 1e-3
    min_exchange_gain: float = 0.01
    solver: Solver = field(default_factory=SVD)
    cp_solver: ALS = field(default_factory=lambda: ALS(storage="float64", initializations=1))

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
            None, since greedy choice has no bound. Cost: one SVD of a rearrangement, or one run of
            ``cp_solver``, for each shape and term, and one a block and cycle.
        """
        target = as_target(target)
        given = [KroneckerShape.parse(candidate) for candidate in (shape, *self.shapes)]
        candidates = tuple(dict.fromkeys(given))
        limit = self.parameters if rank is None else rank
        for candidate in candidates:
            validate_request(target.shape, candidate, limit, atol)
        max_terms = math.inf if rank is None else rank
        matrix = as_double(as_matrix(target))
        size = target.norm
        goal = 0.0 if atol is None or size == 0.0 else atol / size
        least = goal + _floor(matrix)
        progress = SolveProgress(on_sweep)
        fit = _Fit({}, matrix, 1.0 if size > 0.0 else 0.0)
        exhausted: set[KroneckerShape] = set()  # shapes that took no further term
        while fit.error > least and fit.n_terms < max_terms:
            # Greedy 1: the shape whose next term gains most per parameter.
            open_shapes = [shape for shape in candidates if shape not in exhausted]
            chosen = self._choose(fit, open_shapes)
            if chosen is None:
                break
            # Greedy 2: all blocks refitted in turn, the new one first, until a cycle gains little.
            grown = self._with_term(fit, chosen, size, progress)
            if grown.n_terms <= fit.n_terms:
                exhausted.add(chosen)  # `ALS` returns fewer terms where its sweeps are spent
            fit = grown
            # Greedy 3: terms change shapes while that lowers the error.
            while fit.error > least and not progress.exhausted:
                exchanged = self._exchanged(fit, candidates, size, is_counted=rank is not None)
                if exchanged is None:
                    break
                fit = exchanged
                progress.record(fit.error, objective=fit.error**2)
        # Greedy 4: of the last terms as many cycles as still gain.
        if fit.error > least and len(fit.ranks) > 1:
            first = next(iter(fit.ranks))
            fit, _ = self._backfitted(fit, fit.ranks, first, size, progress, self.final_cycles)
        approximation = fit.approximation
        if approximation is None:
            approximation = MixedSum((self._block(matrix, candidates[0], 1).truncate(0),))
        error = target.residual_norm(approximation) / (size or 1.0)
        status = Status.rank_reached
        if atol is not None:
            is_met = error <= least
            status = Status.converged if is_met else Status.rank_exhausted
        return MixedSolution(approximation, status, progress.sweeps, relative_error=error)

    def _with_term(
        self, fit: _Fit, shape: KroneckerShape, size: float, progress: SolveProgress
    ) -> _Fit:
        """Return a fit with one more term of a shape, all blocks refitted."""
        ranks = fit.ranks
        ranks[shape] = ranks.get(shape, 0) + 1
        progress.mark(Event.new_term)
        grown, _ = self._backfitted(fit, ranks, shape, size, progress)
        return grown

    def _backfitted(
        self,
        fit: _Fit,
        ranks: dict[KroneckerShape, int],
        first: KroneckerShape,
        size: float,
        progress: SolveProgress | None = None,
        max_cycles: int | None = None,
    ) -> tuple[_Fit, bool]:
        """Refit all blocks with these numbers of terms, the first one before the others.

        Returns
        -------
        fit : _Fit
        has_ended : bool
            Whether a cycle gained little before ``max_cycles`` of them.
        """
        steps = self._cycles(fit, ranks, first, size)
        return iterate(steps, fit, progress, max_steps=max_cycles or self.cycles)

    def _cycles(
        self, fit: _Fit, ranks: dict[KroneckerShape, int], first: KroneckerShape, size: float
    ) -> Iterator[IterationStep[_Fit]]:
        """Backfit in cycles, a step each."""
        previous_error = math.inf
        while True:
            fit = self._cycle(fit, ranks, first, size)
            is_alone = len(ranks) == 1
            converged = is_alone or fit.error >= (1.0 - self.rtol) * previous_error
            yield IterationStep(fit, fit.error, objective=fit.error**2, converged=converged)
            previous_error = fit.error

    def _cycle(
        self, fit: _Fit, ranks: dict[KroneckerShape, int], first: KroneckerShape, size: float
    ) -> _Fit:
        """Refit every block once to what the others leave, the first one before the others."""
        blocks = dict(fit.blocks)
        residual = fit.residual
        for shape in sorted(ranks, key=lambda shape: shape != first):
            previous = blocks.get(shape)
            remainder = residual
            if previous is not None:
                remainder = residual + previous.to_matrix()
            block = self._block(remainder, shape, ranks[shape], previous)
            remaining = remainder - block.to_matrix()
            if previous is not None and norm(remaining) > norm(residual):
                continue  # alternating least squares found no better terms
            blocks[shape] = block
            residual = remaining
        return _Fit(blocks, residual, norm(residual) / size)

    def _block(
        self,
        matrix: Array,
        shape: KroneckerShape,
        rank: int,
        start: SeparatedMatrix | None = None,
    ) -> SeparatedMatrix:
        """Fit terms of one shape; of three and more factors beginning at ``start``."""
        solver = self.solver
        if shape.essential.order != 2:
            solver = self.cp_solver
            if start is not None and 0 < start.separation_rank <= rank:
                solver = replace(self.cp_solver, init=start)
        return solver.solve(Dense(matrix), shape, rank=rank).approximation

    def _choose(self, fit: _Fit, candidates: Sequence[KroneckerShape]) -> KroneckerShape | None:
        """Choose the shape whose next term lowers the square error most per parameter.

        None where no shape has room for a term that gains anything.
        """
        best: KroneckerShape | None = None
        best_gain = 0.0
        for shape in candidates:
            if not self._has_room(shape, fit):
                continue
            leading = self._block(fit.residual, shape, 1)
            if leading.separation_rank == 0:
                continue
            gain = float(leading.weights[0]) / math.sqrt(shape.parameters(1))
            if gain > best_gain:
                best = shape
                best_gain = gain
        return best

    def _exchanged(
        self, fit: _Fit, candidates: Sequence[KroneckerShape], size: float, *, is_counted: bool
    ) -> _Fit | None:
        """Return the best fit in which one term has changed its shape; None where none gains.

        ``is_counted``: a term counts alike in every shape. Else it may not have more parameters
        than before.
        """
        best: _Fit | None = None
        max_error = (1.0 - self.min_exchange_gain) * fit.error
        for left in fit.ranks:
            shorter = self._shortened(fit, left, size)
            for entered in candidates:
                is_dearer = entered.parameters(1) > left.parameters(1)
                if entered == left or (is_dearer and not is_counted):
                    continue
                if not self._has_room(entered, shorter):
                    continue
                ranks = shorter.ranks
                ranks[entered] = ranks.get(entered, 0) + 1
                trial, _ = self._backfitted(shorter, ranks, entered, size)
                if trial.error <= max_error:
                    best = trial
                    max_error = trial.error
        return best

    def _shortened(self, fit: _Fit, shape: KroneckerShape, size: float) -> _Fit:
        """Return a fit with one term of a shape less, its block refitted."""
        blocks = dict(fit.blocks)
        left = blocks.pop(shape)
        residual = fit.residual + left.to_matrix()
        if left.separation_rank > 1:
            blocks[shape] = self._block(residual, shape, left.separation_rank - 1)
            residual = residual - blocks[shape].to_matrix()
        return _Fit(blocks, residual, norm(residual) / size)

    def _has_room(self, shape: KroneckerShape, fit: _Fit) -> bool:
        """Return whether a shape can have another term, within the parameters that are allowed."""
        if fit.ranks.get(shape, 0) >= shape.max_separation_rank:
            return False
        if self.parameters is None:
            return True
        used = sum(block.parameters for block in fit.blocks.values())
        return used + shape.parameters(1) <= self.parameters


@dataclass(frozen=True, slots=True)
class _Fit:
    """Blocks of terms, one a shape, what they leave of the matrix, and its relative norm."""

    blocks: dict[KroneckerShape, SeparatedMatrix]
    residual: Array
    error: float

    @property
    def ranks(self) -> dict[KroneckerShape, int]:
        """Terms of each shape that has any, a new dictionary."""
        ranks = {}
        for shape, block in self.blocks.items():
            if block.separation_rank:
                ranks[shape] = block.separation_rank
        return ranks

    @property
    def n_terms(self) -> int:
        """Terms of all shapes together."""
        return sum(self.ranks.values())

    @property
    def approximation(self) -> MixedSum | None:
        """The sum of all terms; None where there are none."""
        parts = tuple(block for block in self.blocks.values() if block.separation_rank)
        return MixedSum(parts) if parts else None


def _floor(matrix: Array) -> float:
    """Return the relative error that rounding in double precision leaves."""
    return 8.0 * float(namespace(matrix).finfo(matrix.dtype).eps) * math.sqrt(max(matrix.shape))
