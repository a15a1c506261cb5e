"""What `decompose` returns: a separated matrix with the figures it can be trusted for, and how it prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lsrdecomp import markup
from lsrdecomp.arrays import Array, is_complex
from lsrdecomp.formats.number_formats import storage_format
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.solvers.base import ErrorKind, Status, Sweep


@dataclass(frozen=True, slots=True)
class Decomposition:
    """A separated matrix with the figures it can be trusted for.

    >>> import numpy as np
    >>> import lsrdecomp as lsr
    >>> result = lsr.decompose(np.kron(np.eye(4), np.ones((3, 3))), "4x4, 3x3", rank=1)
    >>> result.separation_rank, result.parameters, bool(result.relative_error < 1e-12)
    (1, 25, True)
    """

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

    @property
    def bytes(self) -> int:
        """Bytes of the factors as stored; of a budget's mixed formats with their scales."""
        if self.stored is not None:
            return int(self.stored.bytes)
        parts = 2 if is_complex(self.approximation.factors[0]) else 1
        return -(-parts * self.parameters * storage_format(self.storage).bits // 8)

    def __matmul__(self, x: Any) -> Any:
        """The approximation's action on an array, or its product with a separated matrix; never formed."""
        return self.approximation @ x

    def to_matrix(self) -> Array:
        """The approximation, formed; shape (rows, columns)."""
        return self.approximation.to_matrix()

    @property
    def summary(self) -> str:
        """Everything in one line."""
        return (
            f"{self.separation_rank} terms of {self.shape}, {self.parameters:,} parameters in {self.storage}: "
            f"relative error {self.relative_error:.3g} ({self.error_kind.name}), γ = {self.condition:.3g}. "
            f"{self.status.value}{self.remark}"
        )

    @property
    def remark(self) -> str:
        """A sentence where the answer has no fewer numbers than the matrix itself; else nothing."""
        rows, columns = self.shape.matrix_shape
        if self.parameters < rows * columns:
            return ""
        return (
            f" The matrix itself has {rows * columns:,} numbers: nothing is gained in this shape; see "
            'shape="search", or best_shape(pad=True) where sizes are prime.'
        )

    def __str__(self) -> str:
        """A table of the terms, with error, γ and bytes."""
        rows, columns = self.shape.matrix_shape
        weights = [float(value) for value in self.approximation.weights]
        lines = [(f"{k}", f"{value:.4g}", f"{value / (self.norm or 1.0):.2e}") for k, value in enumerate(weights, 1)]
        table = "\n".join(f"{k:>6}  {value:>11}  {share:>9}" for k, value, share in markup.shortened(lines))
        return (
            f"{rows} × {columns} as {self.separation_rank} × [{self.shape}]\n"
            f"  term            λ    λ / ‖M‖\n{table}\n"
            f"relative error   {self.relative_error:.3g}, {self.error_kind.value}\n"
            f"condition γ      {self.condition:.3g}\n"
            f"bytes            {self.bytes:,} in {self.storage}, {self.parameters:,} of {rows * columns:,} numbers\n"
            f"{self.status.value}{self.remark}"
        )

    def _repr_html_(self) -> str:
        pairs = (
            ("terms", f"{self.separation_rank} of {self.shape}"),
            ("parameters", f"{self.parameters:,} in {self.storage}"),
            ("relative error", f"{self.relative_error:.3g}, {self.error_kind.value}"),
            ("condition γ", f"{self.condition:.3g}"),
        )
        return markup.facts("Decomposition", pairs, self.status.value + self.remark)
