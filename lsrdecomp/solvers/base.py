"""Records: what a solver returns, what `decompose` returns, and the sentences that say how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from lsrdecomp import markup
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.targets.base import Target


class Status(Enum):
    """How a solve ended, in a sentence that helps."""

    converged = "The error met the budget."
    rank_reached = "The asked number of terms was computed; no error was asked for."
    rank_exhausted = (
        "Every allowed term was used and the error is still above the budget. "
        "Allow more terms, loosen the tolerance, or try another Kronecker shape."
    )
    precision_exhausted = (
        "Rounding to the storage type alone exceeds the budget. Store in a finer type, or loosen the tolerance."
    )
    ill_conditioned = (
        "Terms cancel: γ·μ·‖M‖ is above the budget, so the stored error would be rounding. "
        "Raise the penalty on λ, store in a finer type, or use fewer terms."
    )
    stalled = "The error stopped falling above the budget. Allow more terms, or another seed or start."
    sweep_limit = "The sweep limit was reached while the error was still falling. Allow more sweeps."

    @property
    def met(self) -> bool:
        """Whether what was asked for was reached."""
        return self in (Status.converged, Status.rank_reached)


class ErrorKind(Enum):
    """What a reported error can be trusted for."""

    measured = "from residual entries in double precision"
    bounded = "a rigorous upper bound"
    estimated = "an estimate"


@dataclass(frozen=True, slots=True)
class Sweep:
    """One step of an iteration, as handed to callbacks."""

    index: int
    relative_error: float  # the solver's running figure
    condition: float = 1.0


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solver found."""

    approximation: SeparatedMatrix
    status: Status
    sweeps: tuple[Sweep, ...] = ()
    optimality_gap: float | None = None  # excess of the error over the optimum, relative; None: not known
    gap_kind: ErrorKind = ErrorKind.estimated


class Solver(Protocol):
    """A solver is a frozen value that holds choices; a solve changes nothing.

    Give ``rank`` (that many terms), ``atol`` (as few terms as reach that Frobenius error), or both (``rank`` is then
    the most that may be used).
    """

    def solve(
        self,
        target: Target,
        shape: KroneckerShape,
        *,
        rank: int | None = None,
        atol: float | None = None,
        on_sweep: Callable[[Sweep], Any] | None = None,
    ) -> Solution: ...


@dataclass(frozen=True, slots=True)
class Decomposition:
    """A separated matrix with the figures it can be trusted for."""

    approximation: SeparatedMatrix  # as stored: rounded to `storage`
    relative_error: float  # ‖M − M̂‖_F / ‖M‖_F, measured on what is stored
    condition: float  # γ = ‖λ‖₂ / ‖M̂‖_F
    status: Status
    storage: str
    norm: float  # ‖M‖_F
    error_kind: ErrorKind = ErrorKind.measured
    sweeps: tuple[Sweep, ...] = field(default=(), repr=False)
    optimality_gap: float | None = None
    gap_kind: ErrorKind = ErrorKind.estimated
    stored: Any = field(default=None, repr=False)  # `StoredMatrix`: what is written, where a budget was given

    @property
    def shape(self) -> KroneckerShape:
        return self.approximation.kronecker_shape

    @property
    def separation_rank(self) -> int:
        return self.approximation.separation_rank

    @property
    def parameters(self) -> int:
        return self.approximation.parameters

    @property
    def error(self) -> float:
        """‖M − M̂‖_F, absolute."""
        return self.relative_error * self.norm

    def __str__(self) -> str:
        return (
            f"{self.separation_rank} terms of {self.shape}, {self.parameters:,} parameters in {self.storage}: "
            f"relative error {self.relative_error:.3g} ({self.error_kind.name}), γ = {self.condition:.3g}. "
            f"{self.status.value}"
        )

    def _repr_html_(self) -> str:
        pairs = (
            ("terms", f"{self.separation_rank} of {self.shape}"),
            ("parameters", f"{self.parameters:,} in {self.storage}"),
            ("relative error", f"{self.relative_error:.3g}, {self.error_kind.value}"),
            ("condition γ", f"{self.condition:.3g}"),
        )
        return markup.facts("Decomposition", pairs, self.status.value)
