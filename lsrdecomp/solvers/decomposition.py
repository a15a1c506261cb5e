"""What `decompose` returns: a separated matrix with the figures it can be trusted for, and how it prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lsrdecomp import markup
from lsrdecomp.arrays import Array, is_complex, to_numpy
from lsrdecomp.formats.number_formats import storage_format
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.precision import PRECISIONS, unit_roundoff
from lsrdecomp.solvers.base import ErrorKind, Status, Sweep

LARGE_CONDITION = 10.0
"""A γ above this is looked at: whether a tenth of it would have done."""
WORTH = 1.1
"""A tenth of γ at less than this many times the error: the larger γ bought next to nothing."""


@dataclass(frozen=True, eq=False, repr=False)
class Decomposition(SeparatedMatrix):
    """M̂ as it is stored, used as any `SeparatedMatrix` is, with the figures it can be trusted for.

    What is computed from it (``result.T``, ``result - H``, ``result.truncate(2)``) is a plain
    `SeparatedMatrix`.

    Parameters
    ----------
    approximation : SeparatedMatrix
        M̂, rounded to ``storage``.
    relative_error : float
        ‖M − M̂‖_F / ‖M‖_F, measured on what is stored.
    status : Status
    storage : str
        Number format of the factors.
    target_norm : float
        ‖M‖_F; ``norm`` is that of M̂.
    error_kind : ErrorKind
        Whether the error was measured or bounded.
    sweeps : tuple of Sweep
    optimality_gap : float, optional
        How much smaller the relative error of any matrix of as many terms could be, where that is
        known.
    gap_kind : ErrorKind
    stored : StoredMatrix, optional
        What is written, where a budget was given.

    Examples
    --------
    >>> import numpy as np
    >>> import lsrdecomp as lsr
    >>> result = lsr.decompose(np.kron(np.eye(4), np.ones((3, 3))), "4x4, 3x3", rank=1)
    >>> result.separation_rank, result.parameters, bool(result.relative_error < 1e-12)
    (1, 25, True)
    >>> np.allclose(result, np.kron(np.eye(4), np.ones((3, 3))))
    True
    """

    weights: Array = field(init=False)
    factors: tuple[Array, ...] = field(init=False)
    approximation: SeparatedMatrix
    relative_error: float
    status: Status
    storage: str
    target_norm: float
    error_kind: ErrorKind = ErrorKind.measured
    sweeps: tuple[Sweep, ...] = ()
    optimality_gap: float | None = None
    gap_kind: ErrorKind = ErrorKind.estimated
    stored: Any = None  # a `StoredMatrix`

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", self.approximation.weights)
        object.__setattr__(self, "factors", self.approximation.factors)

    @property
    def error(self) -> float:
        """‖M − M̂‖_F, absolute."""
        return self.relative_error * self.target_norm

    @property
    def bytes(self) -> int:
        """Bytes of the factors as stored; of a budget's mixed formats with their scales."""
        if self.stored is not None:
            return int(self.stored.bytes)
        parts = 2 if is_complex(self.factors[0]) else 1
        return -(-parts * self.parameters * storage_format(self.storage).bits // 8)

    @property
    def summary(self) -> str:
        """Everything in one line."""
        return (
            f"{self.separation_rank} terms of {self.kronecker_shape}, "
            f"{self.parameters:,} parameters in {self.storage}: "
            f"relative error {self.relative_error:.3g} ({self.error_kind.name}), γ = {self.condition:.3g}. "
            f"{self.status.value}{self.remark}"
        )

    @property
    def remark(self) -> str:
        """Sentences where the answer has no fewer numbers than the matrix itself, or γ buys little; else nothing."""
        rows, columns = self.shape
        remark = ""
        if self.parameters >= rows * columns:
            remark = (
                f" The matrix itself has {rows * columns:,} numbers: nothing is gained in this shape; see "
                'shape="search", or best_shape(pad=True) where sizes are prime.'
            )
        return remark + self._worth_of_condition

    @property
    def _worth_of_condition(self) -> str:
        """A sentence where the solver passed about the same error at a tenth of γ; else nothing."""
        near = [
            sweep
            for sweep in self.sweeps
            if sweep.relative_error <= WORTH * self.relative_error
            and sweep.condition <= self.condition / 10.0
        ]
        if self.condition <= LARGE_CONDITION or not near:
            return ""
        passed = min(near, key=lambda sweep: sweep.condition)
        # The penalty of a coarser type keeps γ small; by the rule γ·μ·‖M‖ ≤ ε this error can bear
        # these.
        coarser = [
            name
            for name in ("bfloat16", "float16")
            if passed.condition * unit_roundoff(name) <= passed.relative_error
            and self.storage in PRECISIONS
            and unit_roundoff(name) > unit_roundoff(self.storage)
        ]
        advice = f'; solver=ALS(storage="{coarser[0]}") keeps γ low' if coarser else ""
        return (
            f" γ is large for what it is worth: the fit passed an error of about {passed.relative_error:.2g} at "
            f"γ = {passed.condition:.2g}{advice}."
        )

    def __repr__(self) -> str:
        return f"Decomposition({self.summary})"

    def __str__(self) -> str:
        """A table of the terms, with error, γ and bytes."""
        rows, columns = self.shape
        weights, size = to_numpy(self.weights).tolist(), self.target_norm or 1.0
        lines = [
            (f"{k}", f"{value:.4g}", f"{value / size:.2e}") for k, value in enumerate(weights, 1)
        ]
        table = "\n".join(
            f"{k:>6}  {value:>11}  {share:>9}" for k, value, share in markup.shortened(lines)
        )
        return (
            f"{rows} × {columns} as {self.separation_rank} × [{self.kronecker_shape}]\n"
            f"  term            λ    λ / ‖M‖\n{table}\n"
            f"relative error   {self.relative_error:.3g}, {self.error_kind.value}\n"
            f"condition γ      {self.condition:.3g}\n"
            f"bytes            {self.bytes:,} in {self.storage}, {self.parameters:,} of {rows * columns:,} numbers\n"
            f"{self.status.value}{self.remark}"
        )

    def _repr_html_(self) -> str:
        pairs = (
            ("terms", f"{self.separation_rank} of {self.kronecker_shape}"),
            ("parameters", f"{self.parameters:,} in {self.storage}"),
            ("relative error", f"{self.relative_error:.3g}, {self.error_kind.value}"),
            ("condition γ", f"{self.condition:.3g}"),
        )
        return markup.facts("Decomposition", pairs, self.status.value + self.remark)
