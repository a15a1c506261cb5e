"""Terms of different Kronecker shapes, the paper's general definition: greedy choice of shapes, block backfitting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lsrdecomp.arrays import Array, as_double, namespace, norm
from lsrdecomp.errors import BudgetError, ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.solvers.base import Solver, Status, Sweep
from lsrdecomp.solvers.svd.dense import SVD
from lsrdecomp.targets.base import Dense


@dataclass(frozen=True, eq=False, repr=False)
class MixedSum:
    """A sum of separated matrices of different Kronecker shapes and one matrix shape."""

    parts: tuple[SeparatedMatrix, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ShapeError("a sum needs at least one part")
        for part in self.parts[1:]:
            if part.shape != self.parts[0].shape:
                raise ShapeError(f"the parts are {self.parts[0].shape} and {part.shape}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.parts[0].shape

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def separation_rank(self) -> int:
        """Terms of all shapes together."""
        return sum(part.separation_rank for part in self.parts)

    def to_matrix(self) -> Array:
        total = self.parts[0].to_matrix()
        for part in self.parts[1:]:
            total = total + part.to_matrix()
        return total

    def __matmul__(self, x: Array) -> Array:
        total = self.parts[0] @ x
        for part in self.parts[1:]:
            total = total + part @ x
        return total

    def __repr__(self) -> str:
        terms = " + ".join(f"{part.separation_rank} × [{part.kronecker_shape}]" for part in self.parts)
        return f"MixedSum({self.shape[0]}×{self.shape[1]} as {terms}, {self.parameters:,} parameters)"


@dataclass(frozen=True, slots=True)
class MixedFit:
    """What `Greedy` found."""

    approximation: MixedSum
    relative_error: float  # ‖M − M̂‖_F / ‖M‖_F, from residual entries in double precision
    status: Status
    sweeps: tuple[Sweep, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Greedy:
    """Choose the shape of each term by what it gains per parameter, then refit whole blocks in turn [1]_.

    A block is all terms of one shape; refitting it to what the other blocks leave is a truncated SVD, so the error
    never rises. Without refitting, greedy terms are far from optimal: that is what makes this competitive. It pays for
    a sum of a separable and a low-rank matrix, and rarely elsewhere.

    Parameters
    ----------
    shapes : sequence of KroneckerShape
        Candidates, of two factors each; include ``(m×1) ⊗ (1×n)`` for plain low rank.
    cycles : int
        Most backfitting cycles after each new term.
    rtol : float
        Backfitting stops when a cycle lowers the error by less than this fraction.
    solver : Solver
        Used for each block.

    References
    ----------
    .. [1] C. Cai, R. Chen and H. Xiao, Hybrid Kronecker product decomposition and approximation, J. Comput. Graph.
       Stat. 32 (2023). doi:10.1080/10618600.2022.2134873
    """

    shapes: Sequence[KroneckerShape]
    cycles: int = 50
    rtol: float = 1e-3
    solver: Solver = field(default_factory=SVD)

    def __post_init__(self) -> None:
        if not self.shapes:
            raise BudgetError("no candidate shapes were given")
        for shape in self.shapes:
            if shape.order != 2:
                raise ShapeError(f"greedy terms have two factors; {shape} has {shape.order}")

    def fit(
        self,
        matrix: Array,
        *,
        rtol: float | None = None,
        parameters: int | None = None,
        on_sweep: Callable[[Sweep], Any] | None = None,
    ) -> MixedFit:
        """Add terms until the relative error is at most ``rtol`` or the next one would exceed ``parameters``.

        Raises
        ------
        BudgetError
            If neither goal is given.
        ShapeError
            If a candidate does not tile the matrix.
        """
        if rtol is None and parameters is None:
            raise BudgetError("say what is wanted: rtol= or parameters=")
        target = Dense(matrix)
        for shape in self.shapes:
            shape.check(target.shape)
        wide, size = as_double(target.matrix), target.norm
        blocks: dict[KroneckerShape, SeparatedMatrix] = {}
        sweeps: list[Sweep] = []
        residual, error = wide, 1.0 if size > 0.0 else 0.0
        status = Status.converged
        while error > (rtol or 0.0) + _floor(wide):
            chosen = self._choose(residual, blocks, parameters)
            if chosen is None:
                status = Status.rank_reached if rtol is None else Status.rank_exhausted
                break
            ranks = {shape: block.separation_rank for shape, block in blocks.items()}
            ranks[chosen] = ranks.get(chosen, 0) + 1
            before = math.inf
            for _ in range(self.cycles):
                residual = self._cycle(residual, blocks, ranks, chosen)
                error = norm(residual) / size
                sweeps.append(Sweep(len(sweeps) + 1, error))
                if on_sweep is not None:
                    on_sweep(sweeps[-1])
                if len(ranks) == 1 or error >= (1.0 - self.rtol) * before:
                    break
                before = error
        parts = tuple(block for block in blocks.values() if block.separation_rank)
        if not parts:
            parts = (self.solver.solve(Dense(wide), self.shapes[0], rank=1).approximation.truncate(0),)
        approximation = MixedSum(parts)
        measured = target.residual_norm(approximation)
        return MixedFit(approximation, measured / size if size > 0.0 else measured, status, tuple(sweeps))

    def _choose(
        self, residual: Array, blocks: dict[KroneckerShape, SeparatedMatrix], parameters: int | None
    ) -> KroneckerShape | None:
        """The shape whose next term lowers the square error most per parameter, among those that still fit."""
        used = sum(block.parameters for block in blocks.values())
        best: tuple[float, KroneckerShape] | None = None
        for shape in self.shapes:
            full = shape in blocks and blocks[shape].separation_rank >= shape.max_separation_rank
            if full or (parameters is not None and used + shape.parameters(1) > parameters):
                continue
            leading = self.solver.solve(Dense(residual), shape, rank=1).approximation
            gain = (float(leading.weights[0]) if leading.separation_rank else 0.0) / math.sqrt(shape.parameters(1))
            if gain > 0.0 and (best is None or gain > best[0]):
                best = gain, shape
        return None if best is None else best[1]

    def _cycle(
        self,
        residual: Array,
        blocks: dict[KroneckerShape, SeparatedMatrix],
        ranks: dict[KroneckerShape, int],
        first: KroneckerShape,
    ) -> Array:
        """Refit every block once to what the others leave, the newest first; updates ``blocks``."""
        for shape in sorted(ranks, key=lambda shape: shape != first):
            left = residual + blocks[shape].to_matrix() if shape in blocks else residual
            blocks[shape] = self.solver.solve(Dense(left), shape, rank=ranks[shape]).approximation
            residual = left - blocks[shape].to_matrix()
        return residual


def _floor(matrix: Array) -> float:
    """Relative error that rounding in double precision leaves."""
    return 8.0 * float(namespace(matrix).finfo(matrix.dtype).eps) * math.sqrt(max(matrix.shape))
