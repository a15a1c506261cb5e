"""Unit roundoff by element type, and the error budget that couples it with the condition number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from lsrdecomp.arrays import Array, dtype_name, is_complex, namespace
from lsrdecomp.errors import BudgetError, PrecisionError, unknown


@dataclass(frozen=True, slots=True)
class Precision:
    """One element type of the table: how finely and how far it resolves."""

    name: str
    bits: int
    unit_roundoff: float  # μ: largest relative error of rounding to nearest
    largest: float

    @property
    def bytes(self) -> float:
        return self.bits / 8


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name, those of `ml_dtypes` (bfloat16, float8) included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def _ieee(name: str, bits: int, significand: int) -> Precision:
    info: Any = ml_dtypes.finfo(numpy_dtype(name))  # type: ignore[no-untyped-call]
    return Precision(name, bits, 2.0**-significand, float(info.max))


PRECISIONS = {
    precision.name: precision
    for precision in (
        _ieee("float64", 64, 53),
        _ieee("float32", 32, 24),
        Precision("tf32", 19, 2.0**-11, float(np.finfo(np.float32).max)),
        _ieee("float16", 16, 11),
        _ieee("bfloat16", 16, 8),
        _ieee("float8_e4m3fn", 8, 4),
        _ieee("float8_e5m2", 8, 3),
    )
}
"""Floating types by name. TF32 is what tensor cores multiply; it is never stored."""


ALIASES = {
    "complex128": "float64", "complex64": "float32", "half": "float16", "float": "float64", "single": "float32",
    "double": "float64", "fp64": "float64", "fp32": "float32", "fp16": "float16", "f16": "float16", "f32": "float32",
    "f64": "float64", "bf16": "bfloat16", "fp8": "float8_e4m3fn", "e4m3": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn", "f8_e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "fp8_e5m2": "float8_e5m2",
    "f8_e5m2": "float8_e5m2",
}  # fmt: skip
"""What the types are called elsewhere (PyTorch, safetensors, papers)."""

INTEGERS = {"int8": 127, "int4": 7}
"""Integer formats of stored factors, with their largest code. They have no unit roundoff: small
entries become zero."""


def type_name(dtype: Any) -> str:
    """Our name of a type: ``"fp16"`` and ``numpy.float16`` are ``"float16"``; unknown ones stay as they are."""
    name = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype).rsplit(
        ".", 1
    )[-1]
    return ALIASES.get(name.lower(), name.lower() if name.lower() in PRECISIONS else name)


def precision(dtype: Any) -> Precision:
    """The row of the table for a name (``"bfloat16"``), a NumPy or torch dtype; complex types by their parts."""
    name = type_name(dtype)
    try:
        return PRECISIONS[name]
    except KeyError:
        raise PrecisionError(
            f"no unit roundoff is known for the type {unknown(name, PRECISIONS)}"
        ) from None


def unit_roundoff(dtype: Any) -> float:
    """μ, the largest relative error of rounding a normal number to nearest.

    Parameters
    ----------
    dtype : str or dtype
        ``"bfloat16"``, a NumPy or a torch type; complex types by their parts.

    Returns
    -------
    float

    Raises
    ------
    PrecisionError
        For types it does not know.

    Examples
    --------
    >>> unit_roundoff("float16") == 2**-11, unit_roundoff("bfloat16") == 2**-8
    (True, True)
    """
    return precision(dtype).unit_roundoff


def tolerance(dtype: Any, size: int, condition: float = 1.0) -> float:
    """Relative rounding error we grant an algorithm: a modest constant × size × condition × unit roundoff."""
    return 8.0 * max(size, 1) * condition * unit_roundoff(dtype)


def round_to(array: Array, storage: str) -> Array:
    """The nearest numbers of type ``storage``, held in the element type of ``array``.

    Raises `PrecisionError` if a finite entry would overflow.
    """
    xp, target = namespace(array), precision(storage)
    if target.name == "tf32":
        raise PrecisionError(
            "tf32: a type for products on tensor cores, not for storage; use float32 or bfloat16"
        )
    storage = target.name
    if is_complex(array):
        return round_to(xp.real(array), storage) + 1j * round_to(xp.imag(array), storage)
    if unit_roundoff(array.dtype) >= target.unit_roundoff and dtype_name(array) == target.name:
        return array
    largest = max(float(xp.max(array)), -float(xp.min(array))) if 0 not in array.shape else 0.0
    if largest > target.largest:
        wider = [
            row.name for row in PRECISIONS.values() if row.largest > largest and row.name != "tf32"
        ]
        raise PrecisionError(
            f"{storage}: the entry {largest:.3g} lies above the largest number {target.largest:.5g}; "
            f"scale the matrix{', or store it as ' + ' or '.join(wider) if wider else ''}"
        )
    if hasattr(xp, storage):
        return xp.astype(xp.astype(array, getattr(xp, storage)), array.dtype)
    rounded = np.asarray(array).astype(numpy_dtype(storage))
    return xp.asarray(rounded.astype(np.float64), dtype=array.dtype)


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """An allowed error ε with the precisions it has to survive.

    The rule γ·μ·‖M‖_F ≤ ε of Beylkin and Mohlenkamp [1]_ bounds the rounding part of the error of a
    separated representation of condition γ. Truncation may use what rounding leaves.

    Parameters
    ----------
    rtol, atol : float
        Allowed Frobenius error, relative to ‖M‖_F or absolute; give one of them.
    compute : str
        Element type of the arithmetic that uses the representation.
    storage : str, optional
        One format for all stored factors: a floating type, ``"int8"`` or ``"int4"``. Absent, each
        factor of each term gets its own. Of it and ``compute`` the coarser one sets μ.

    References
    ----------
    .. [1] G. Beylkin and M. J. Mohlenkamp, Algorithms for numerical analysis in high dimensions,
       SIAM J. Sci. Comput. 26 (2005), eq. (3.12). doi:10.1137/040604959

    Examples
    --------
    >>> ErrorBudget(rtol=1e-3, storage="float16").rtol
    0.001
    """

    rtol: float | None = None
    atol: float | None = None
    compute: str = "float64"
    storage: str | None = None

    def __post_init__(self) -> None:
        if (self.rtol is None) == (self.atol is None):
            raise BudgetError(
                f"give one of rtol and atol, got rtol={self.rtol} and atol={self.atol}"
            )
        epsilon = self.rtol if self.rtol is not None else self.atol
        if epsilon is None or not math.isfinite(epsilon) or epsilon < 0:
            raise BudgetError(f"an allowed error must be finite and not negative, got {epsilon}")
        object.__setattr__(self, "compute", precision(self.compute).name)
        if self.storage is not None:
            name, stored = type_name(self.storage), [*PRECISIONS, *INTEGERS]
            stored.remove("tf32")
            if name not in stored:
                raise PrecisionError(f"storage: no format {unknown(name, stored)}")
            object.__setattr__(self, "storage", name)

    @property
    def unit_roundoff(self) -> float:
        """μ of the coarser of the two precisions; of an integer format half a step, relative to the largest entry."""
        if self.storage in INTEGERS:
            return max(unit_roundoff(self.compute), 0.5 / INTEGERS[self.storage])
        return max(unit_roundoff(self.compute), unit_roundoff(self.storage or "float64"))

    def allowed(self, norm: float) -> float:
        """ε in absolute terms for a matrix of Frobenius norm ``norm``."""
        return self.atol if self.atol is not None else (self.rtol or 0.0) * norm

    def rounding(self, norm: float, condition: float = 1.0) -> float:
        """γ·μ·‖M‖_F, the rule's estimate of the error that rounding adds."""
        return condition * self.unit_roundoff * norm

    def largest_condition(self, norm: float) -> float:
        """The largest γ that keeps γ·μ·‖M‖_F ≤ ε."""
        return math.inf if norm == 0.0 else self.allowed(norm) / (self.unit_roundoff * norm)

    def admits(self, norm: float, condition: float) -> bool:
        """Whether γ·μ·‖M‖_F ≤ ε."""
        return self.rounding(norm, condition) <= self.allowed(norm)
