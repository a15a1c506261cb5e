"""The record that `decompose` returns: a separated matrix, and figures measured on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp import markup
from lsrdecomp.arrays import Array, is_complex, is_jax, to_numpy
from lsrdecomp.errors import CheckpointError
from lsrdecomp.formats.number_formats import storage_format
from lsrdecomp.kronecker.files import has_figures, read_figures, read_terms, write_terms
from lsrdecomp.kronecker.pytree import register_pytree
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.precision import LARGE_CONDITION, PRECISIONS, unit_roundoff
from lsrdecomp.solvers.solver import ErrorKind, Event, Status, Sweep

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, eq=False, repr=False)
class Decomposition(SeparatedMatrix):
    """M̂ as it is stored, used as any `SeparatedMatrix` is, with its measured figures.

    Anything computed from it (``result.T``, ``result - H``, ``result.truncate(2)``) is a plain
    `SeparatedMatrix`.

    Parameters
    ----------
    approximation : SeparatedMatrix
        M̂, rounded to ``storage``.
    relative_error : float
        ‖M − M̂‖_F / ‖M‖_F, measured on the stored numbers.
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
    note : str
        A sentence of the solver on this answer, at the end of ``remark``.
    stored : StoredMatrix, optional
        The number formats and codes that are written, where a budget was given; None in what `load`
        returns.
    stored_bytes : int, optional
        Bytes of ``stored``, kept by `save`.

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
    note: str = ""
    stored: Any = None  # a `StoredMatrix`
    stored_bytes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", self.approximation.weights)
        object.__setattr__(self, "factors", self.approximation.factors)
        object.__setattr__(self, "kronecker_shape", self.approximation.kronecker_shape)
        if is_jax(self.weights):
            register_pytree(Decomposition, SeparatedMatrix)

    @property
    def error(self) -> float:
        """‖M − M̂‖_F, absolute."""
        return self.relative_error * self.target_norm

    @property
    def bytes(self) -> int:
        """Bytes of the factors as stored; of a budget's mixed formats with their scales."""
        if self.stored is not None:
            return int(self.stored.bytes)
        if self.stored_bytes is not None:
            return self.stored_bytes
        parts = 2 if is_complex(self.factors[0]) else 1
        bits = parts * self.parameters * storage_format(self.storage).bits
        return -(-bits // 8)

    @property
    def summary(self) -> str:
        """Everything in one line."""
        return (
            f"{self.separation_rank} terms of {self.kronecker_shape}, "
            f"{self.parameters:,} parameters in {self.storage}: "
            f"relative error {self.relative_error:.3g} ({self.error_kind.name}), "
            f"γ = {self.condition:.3g}. {self.status.value}{self.remark}"
        )

    @property
    def remark(self) -> str:
        """Sentences where the matrix itself has no more numbers, or γ buys little; else empty."""
        rows, columns = self.shape
        remark = ""
        if self.parameters >= rows * columns:
            remark = (
                f" The matrix itself has {rows * columns:,} numbers: nothing is gained in this "
                'shape; see shape="search", or best_shape(pad=True) where sizes are prime.'
            )
        if self.note:
            remark = f"{remark} {self.note}"
        return remark + self._remark_on_condition()

    def _remark_on_condition(self) -> str:
        """Return a sentence where a far smaller γ came with about the same error, else nothing."""
        if self.condition <= LARGE_CONDITION:
            return ""
        # At a tenth of γ a tenth more error is about the same: by hand.
        max_error = 1.1 * self.relative_error
        max_condition = self.condition / 10.0
        near = [sweep for sweep in self.sweeps if sweep.relative_error <= max_error]
        cheaper = [sweep for sweep in near if sweep.condition <= max_condition]
        if not cheaper:
            return ""
        best = min(cheaper, key=lambda sweep: sweep.condition)
        advice = ""
        coarser = self._coarser_storage(best)
        if coarser is not None:
            advice = f'; solver=ALS(storage="{coarser}") keeps γ low'
        return (
            f" γ is large for what it is worth: the fit passed an error of about "
            f"{best.relative_error:.2g} at γ = {best.condition:.2g}{advice}."
        )

    def _coarser_storage(self, sweep: Sweep) -> str | None:
        """Return the coarsest type that a sweep's error can bear by the rule γ·μ·‖M‖ ≤ ε.

        The penalty of a coarser type keeps γ small.
        """
        if self.storage not in PRECISIONS:
            return None
        for name in ("bfloat16", "float16"):
            is_coarser = unit_roundoff(name) > unit_roundoff(self.storage)
            if is_coarser and sweep.condition * unit_roundoff(name) <= sweep.relative_error:
                return name
        return None

    def save(
        self,
        path: str | Path,
        *,
        provenance: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write weights, factors and figures to one safetensors file, whole or not at all.

        `SeparatedMatrix.load` reads it as well, without the figures. Parameters and errors are
        those of `SeparatedMatrix.save`.
        """
        path = Path(path)
        figures = {
            "relative_error": self.relative_error,
            "status": self.status.name,
            "storage": self.storage,
            "target_norm": self.target_norm,
            "error_kind": self.error_kind.name,
            "optimality_gap": self.optimality_gap,
            "gap_kind": self.gap_kind.name,
            "note": self.note,
            "sweeps": [{**asdict(sweep), "event": sweep.event.name} for sweep in self.sweeps],
            "stored_bytes": self.bytes if self.stored is not None else self.stored_bytes,
        }
        write_terms(
            path,
            self.weights,
            self.factors,
            provenance=provenance,
            overwrite=overwrite,
            figures=figures,
        )
        return path

    @staticmethod
    def load(path: str | Path) -> Decomposition:
        """Read a file of `save`: the same terms, bit for bit, as NumPy arrays, and the figures.

        Raises
        ------
        CheckpointError
            If the file is missing, damaged, or holds a matrix without figures.

        Examples
        --------
        >>> import tempfile
        >>> import numpy as np
        >>> import lsrdecomp as lsr
        >>> result = lsr.decompose(np.kron(np.eye(4), np.ones((3, 3))), "4x4, 3x3", rank=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = lsr.solvers.Decomposition.load(result.save(f"{folder}/result.safetensors"))
        >>> again.status is result.status, again.relative_error == result.relative_error
        (True, True)
        """
        path = Path(path)
        figures = read_figures(path)
        terms = read_terms(path)
        try:
            return Decomposition(
                approximation=SeparatedMatrix(*terms),
                relative_error=float(figures["relative_error"]),
                status=Status[figures["status"]],
                storage=str(figures["storage"]),
                target_norm=float(figures["target_norm"]),
                error_kind=ErrorKind[figures["error_kind"]],
                sweeps=tuple(
                    Sweep(**{**sweep, "event": Event[sweep["event"]]})
                    for sweep in figures["sweeps"]
                ),
                optimality_gap=figures["optimality_gap"],
                gap_kind=ErrorKind[figures["gap_kind"]],
                note=str(figures["note"]),
                stored_bytes=figures["stored_bytes"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"its figures cannot be read: {error!r}", path=path) from error

    def __repr__(self) -> str:
        return f"Decomposition({self.summary})"

    def __str__(self) -> str:
        """Return a table of the terms, with error, γ and bytes."""
        rows, columns = self.shape
        weights = to_numpy(self.weights).tolist()
        size = self.target_norm or 1.0
        terms = []
        for k, weight in enumerate(weights, 1):
            terms.append((f"{k}", f"{weight:.4g}", f"{weight / size:.2e}"))
        table = []
        for number, weight, share in markup.shortened(terms):
            table.append(f"{number:>6}  {weight:>11}  {share:>9}")
        stored = f"{self.bytes:,} in {self.storage}"
        lines = [
            f"{rows} × {columns} as {self.separation_rank} × [{self.kronecker_shape}]",
            "  term            λ    λ / ‖M‖",
            "\n".join(table),
            f"relative error   {self.relative_error:.3g}, {self.error_kind.value}",
            f"condition γ      {self.condition:.3g}",
            f"bytes            {stored}; {self.parameters:,} numbers instead of {rows * columns:,}",
            f"{self.status.value}{self.remark}",
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        figures = (
            ("terms", f"{self.separation_rank} of {self.kronecker_shape}"),
            ("parameters", f"{self.parameters:,} in {self.storage}"),
            ("relative error", f"{self.relative_error:.3g}, {self.error_kind.value}"),
            ("condition γ", f"{self.condition:.3g}"),
        )
        return markup.facts("Decomposition", figures, self.status.value + self.remark)


def load(path: str | Path) -> SeparatedMatrix:
    """Read a file that ``save`` of a decomposition or of a separated matrix wrote, bit for bit.

    Parameters
    ----------
    path : path

    Returns
    -------
    Decomposition or SeparatedMatrix
        The one that was saved.

    Raises
    ------
    CheckpointError
        If the file is missing, damaged, or of another kind.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import lsrdecomp as lsr
    >>> result = lsr.decompose(np.kron(np.eye(4), np.ones((3, 3))), "4x4, 3x3", rank=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = lsr.load(result.save(f"{folder}/result.safetensors"))
    >>> again == result, again.relative_error == result.relative_error
    (True, True)
    """
    if has_figures(Path(path)):
        return Decomposition.load(path)
    return SeparatedMatrix.load(path)
