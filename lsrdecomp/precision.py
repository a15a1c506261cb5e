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
        """Bytes of one number, a fraction for types of less than eight bits."""
        return self.bits / 8


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a name, those of `ml_dtypes` (bfloat16, float8) included."""
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


_OTHER_NAMES = {
    "float64": "complex128 double float f64 fp64",
    "float32": "complex64 single f32 fp32",
    "float16": "half f16 fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3 f8_e4m3 float8_e4m3 fp8 fp8_e4m3",
    "float8_e5m2": "e5m2 f8_e5m2 fp8_e5m2",
}
ALIASES = {alias: name for name, aliases in _OTHER_NAMES.items() for alias in aliases.split()}
"""What the types are called elsewhere (PyTorch, safetensors, papers)."""

LARGE_CONDITION = 10.0
"""A γ above this is told where the rounding of stored terms exceeds a tolerance; below it the type
itself is too coarse. By hand."""

INTEGERS = {"int8": 127, "int4": 7}
"""Integer formats of stored factors, with their largest code. They have no unit roundoff: small
entries become zero."""


def type_name(dtype: Any) -> str:
    """Return our name of a type: ``"float16"`` for ``"fp16"`` and ``numpy.float16``.

    The name of a type that is not known is returned as it is.
    """
    full_name = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype)
    name = full_name.rsplit(".", 1)[-1]
    lower = name.lower()
    if lower in ALIASES:
        return ALIASES[lower]
    return lower if lower in PRECISIONS else name


def precision(dtype: Any) -> Precision:
    """Return the row of the table for a name (``"bfloat16"``) or for a NumPy or torch dtype.

    Complex types have the row of their parts.
    """
    if isinstance(dtype, str) and dtype in PRECISIONS:
        return PRECISIONS[dtype]
    name = type_name(dtype)
    try:
        return PRECISIONS[name]
    except KeyError:
        raise PrecisionError(
            f"no unit roundoff is known for the type {unknown(name, PRECISIONS)}"
        ) from None


def unit_roundoff(dtype: Any) -> float:
    """Return μ, the largest relative error of rounding a normal number to nearest.

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
    """Return the relative rounding error that an algorithm is granted, by its steps.

    It is 8 × size × condition × unit roundoff; the 8 is set by hand, as a modest constant.
    """
    return 8.0 * max(size, 1) * condition * unit_roundoff(dtype)


def round_to(array: Array, storage: str) -> Array:
    """Round to the nearest numbers of type ``storage``, held in the element type of ``array``.

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
    if 0 not in array.shape:
        _require_range(max(float(xp.max(array)), -float(xp.min(array))), target)
    if hasattr(xp, storage):
        return xp.astype(xp.astype(array, getattr(xp, storage)), array.dtype)
    rounded = np.asarray(array).astype(numpy_dtype(storage))
    return xp.asarray(rounded.astype(np.float64), dtype=array.dtype)


def _require_range(largest: float, storage: Precision) -> None:
    """Raise `PrecisionError`, naming types that would do, unless a type holds the largest entry."""
    if largest <= storage.largest:
        return
    wider = [row.name for row in PRECISIONS.values() if row.largest > largest]
    stored = " or ".join(name for name in wider if name != "tf32")
    way_out = f", or store it as {stored}" if stored else ""
    raise PrecisionError(
        f"{storage.name}: the entry {largest:.3g} lies above the largest number "
        f"{storage.largest:.5g}; scale the matrix{way_out}"
    )


def rounded_up(value: float) -> str:
    """Return a number in three digits that is not below it, to be typed as a tolerance."""
    if not 0.0 < value < math.inf:
        return f"{value:.3g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit * (1.0 + 1e-12)) * unit:.3g}"


def coarsest_storage(condition: float, rtol: float) -> str | None:
    """Return the floating type of fewest bits whose rounding a relative tolerance allows.

    The rule is γ·μ ≤ ``rtol``; of types with as many bits the finer one is returned. None where
    float64 is too coarse.

    Parameters
    ----------
    condition : float
        γ of the stored numbers.
    rtol : float

    Examples
    --------
    >>> coarsest_storage(2.0, 1e-2), coarsest_storage(2.0, 1e-4)
    ('float16', 'float32')
    """
    for name in ("float16", "float32", "float64"):
        if condition * unit_roundoff(name) <= rtol:
            return name
    return None


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
            name = type_name(self.storage)
            formats = [*PRECISIONS, *INTEGERS]
            formats.remove("tf32")
            if name not in formats:
                raise PrecisionError(f"storage: no format {unknown(name, formats)}")
            object.__setattr__(self, "storage", name)

    @property
    def unit_roundoff(self) -> float:
        """μ of the coarser of the two precisions.

        That of an integer format is half a step, relative to the largest entry.
        """
        if self.storage in INTEGERS:
            return max(unit_roundoff(self.compute), 0.5 / INTEGERS[self.storage])
        return max(unit_roundoff(self.compute), unit_roundoff(self.storage or "float64"))

    def allowed(self, norm: float) -> float:
        """Return ε in absolute terms for a matrix of Frobenius norm ``norm``."""
        return self.atol if self.atol is not None else (self.rtol or 0.0) * norm

    def rounding(self, norm: float, condition: float) -> float:
        """Return γ·μ·‖M‖_F, the rule's estimate of the error that rounding adds."""
        return condition * self.unit_roundoff * norm

    def largest_condition(self, norm: float) -> float:
        """Return the largest γ that keeps γ·μ·‖M‖_F ≤ ε."""
        if norm == 0.0:
            return math.inf
        return self.allowed(norm) / (self.unit_roundoff * norm)

    def admits(self, norm: float, condition: float) -> bool:
        """Return whether γ·μ·‖M‖_F ≤ ε."""
        return self.rounding(norm, condition) <= self.allowed(norm)
