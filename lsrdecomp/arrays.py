"""The one file that asks which array library it was handed.

Everything numerical is written against the array API standard [1]_, so the same lines run on NumPy,
on torch tensors where they lie, and on any other library that `array_api_compat` knows.

References
----------
.. [1] Python array API standard, https://data-apis.org/array-api/
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, TypeAlias

import array_api_compat
import array_api_compat.numpy
import numpy as np

from lsrdecomp.errors import LsrError, PrecisionError, ShapeError, needs
from lsrdecomp.threads import one_blas_thread

Array: TypeAlias = Any
"""An array of any library of the array API standard."""

Namespace: TypeAlias = Any

ROW_ENTRIES = 2**14
"""Entries of a block of rows in a QR factorization without Q, of each matrix: 128 KiB in float64,
for a fast cache."""

PANEL = 16
"""Columns that such a factorization takes together: the fastest of 4 to 32 for widths from 4 to
128."""


NUMPY: Namespace = array_api_compat.numpy
"""What `namespace` says of NumPy's arrays."""


def namespace(*arrays: Array) -> Namespace:
    """The array API namespace that all ``arrays`` share."""
    for array in arrays:
        if type(array) is not np.ndarray:
            return array_api_compat.array_namespace(*arrays)
    return NUMPY


def dtype_name(array: Array) -> str:
    """Name of the element type, the same in every library: ``"float32"``, ``"bfloat16"``, …"""
    if type(array) is np.ndarray:
        return _numpy_name(array.dtype)
    return str(getattr(array.dtype, "name", array.dtype)).rsplit(".", 1)[-1]


@cache
def _numpy_name(dtype: Any) -> str:
    return str(dtype.name)


def as_floating(value: Any, name: str = "matrix") -> Array:
    """An array with a real or complex floating type of at least single precision.

    Lists become NumPy arrays; integers and booleans become float64; half precisions become float32.
    Raises `PrecisionError` for element types without arithmetic, such as objects and strings, for
    extended precision (``numpy.longdouble``), which would be rounded, and for masked arrays with
    masked entries.
    """
    if isinstance(value, np.ma.MaskedArray):
        value = _unmasked(value, name)
    try:
        array = value if array_api_compat.is_array_api_obj(value) else np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise ShapeError(f"{name}: is no array of numbers: {error}") from error
    kind = dtype_name(array)
    if (
        isinstance(array, np.ndarray)
        and array.dtype.kind in "fc"
        and array.dtype.itemsize > 8 << (array.dtype.kind == "c")
    ):
        raise PrecisionError(
            f"{name}: elements of type {kind} have more digits than the float64 that everything here is computed and "
            "measured in; pass matrix.astype(numpy.float64), or numpy.complex128, and errors count from that matrix"
        )
    if kind in ("float32", "float64", "complex64", "complex128"):
        return array
    xp = (
        namespace(array)
        if kind != "object" and not kind.startswith(("str", "bytes", "void"))
        else None
    )
    if xp is None:
        raise PrecisionError(
            f"{name}: elements of type {kind} have no arithmetic; pass numbers, as numpy.asarray({name}, float)"
        )
    if kind.startswith(("int", "uint", "bool", "long")):
        return xp.astype(array, xp.float64)
    if kind.startswith(("float", "bfloat")):
        return xp.astype(array, xp.float32)
    raise PrecisionError(f"{name}: cannot compute with elements of type {kind}")


def _unmasked(array: np.ma.MaskedArray, name: str) -> np.ndarray:
    """The data of a masked array without masked entries."""
    count = int(np.sum(np.ma.getmaskarray(array)))
    if count:
        raise PrecisionError(
            f"{name}: {count} of {array.size} entries are masked, and a least-squares fit needs all of them; "
            "pass matrix.filled(value) with values that make sense"
        )
    return np.asarray(array.data)


def as_double(array: Array) -> Array:
    """The same numbers in float64 or complex128; `PrecisionError` where JAX has neither, which would round instead."""
    xp = namespace(array)
    wide = xp.complex128 if is_complex(array) else xp.float64
    if array.dtype == wide:
        return array
    if (
        array_api_compat.is_jax_array(array)
        and "float64" not in xp.__array_namespace_info__().dtypes()
    ):
        raise PrecisionError(
            "errors are measured in float64, which JAX has switched off; "
            'call jax.config.update("jax_enable_x64", True) first, or pass numpy.asarray(matrix)'
        )
    return xp.astype(array, wide)


def is_complex(array: Array) -> bool:
    return dtype_name(array).startswith("complex")


def device(array: Array) -> Any:
    """Where the array lies."""
    return array_api_compat.device(array)


def conjugate(array: Array) -> Array:
    """Complex conjugate; real arrays are left as they are."""
    return namespace(array).conj(array) if is_complex(array) else array


def real_part(array: Array) -> Array:
    """Real part; real arrays are left as they are."""
    return namespace(array).real(array) if is_complex(array) else array


def adjoint(array: Array) -> Array:
    """Conjugate transpose of the last two axes."""
    return conjugate(namespace(array).matrix_transpose(array))


def is_differentiated(array: Array) -> bool:
    """Whether a library records what is computed from the array, to differentiate it (torch, outside ``no_grad``)."""
    return bool(getattr(array[:1, ...] * 1, "requires_grad", False))


def require_finite(array: Array, name: str = "matrix") -> None:
    """Raise `PrecisionError`, with a count and the first place, unless every entry is finite."""
    if dtype_name(array) == "float64" and math.isfinite(norm(array)):  # in half the time
        return
    xp = namespace(array)
    bad = ~xp.isfinite(array)
    if bool(xp.any(bad)):
        count = int(xp.sum(xp.astype(bad, xp.int64)))
        first = int(xp.argmax(xp.astype(xp.reshape(bad, (-1,)), xp.int8)))
        where = tuple(int(q) for q in np.unravel_index(first, tuple(array.shape)))
        raise PrecisionError(
            f"{name}: {count} of {math.prod(array.shape)} entries are not finite (the first at {where}); "
            "remove or replace them before decomposing"
        )


def finite_norm(array: Array, name: str = "matrix", *, made: bool = False) -> float:
    """The Frobenius norm; raises `PrecisionError` for entries that are not finite, or where it overflows float64.

    What was ``made`` from finite entries can be infinite by overflow alone.
    """
    length = norm(array)
    if not math.isfinite(length):
        if not made:
            require_finite(array, name)
        raise PrecisionError(
            f"{name}: its Frobenius norm is above the largest float64, 1.8e308, though its entries are finite; "
            "divide the matrix by its largest entry"
        )
    return length


def norm(array: Array) -> float:
    """Frobenius norm in double precision, safe against overflow and underflow of the squares."""
    array = (
        array.detach() if hasattr(array, "detach") else array
    )  # the answer is a number: no gradient passes
    xp = namespace(array)
    if 0 in array.shape:
        return 0.0
    if dtype_name(array) == "float64":
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            squared = float(xp.sum(xp.vecdot(array, array)))
        if (
            1e-280 < squared < 1e280
        ):  # neither end of the range has been near: what was lost is rounding
            return math.sqrt(squared)
    magnitude = xp.abs(
        as_double(array) if is_complex(array) else array
    )  # real entries lose nothing to their abs
    largest = float(xp.max(magnitude))
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    scaled = as_double(magnitude) / largest
    return largest * math.sqrt(float(xp.sum(scaled * scaled)))


def tail_norms(sigma: Array) -> list[float]:
    """‖(σ_{s+1}, σ_{s+2}, …)‖ for s = 0, 1, …, len(σ): the error of each truncation."""
    ascending = to_numpy(sigma)[::-1].tolist()
    return list(accumulate(ascending, math.hypot, initial=0.0))[::-1]


def to_numpy(array: Array) -> np.ndarray:
    """A NumPy copy or view on the host, of any library's array."""
    if array_api_compat.is_torch_array(array):
        return np.asarray(array.detach().cpu().numpy())
    return np.asarray(array)


def placed(value: Any, device: str | None) -> Any:
    """The same with every array in it as a torch tensor on ``device``, or as a NumPy array for None.

    Goes through lists, tuples and dataclasses. See `check_device` for one that is not there.
    """
    if isinstance(value, list | tuple):
        return type(value)(placed(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value,
            **{field.name: placed(getattr(value, field.name), device) for field in fields(value)},
        )
    if not array_api_compat.is_array_api_obj(value):
        return value
    if device is None:
        return to_numpy(value)
    import torch

    return torch.as_tensor(value, device=device)


def check_device(device: str) -> None:
    """Raise `LsrError`, saying why, unless torch is there and computes in float64 on ``device``."""
    with needs(f"device {device!r}", "torch"):
        import torch
    try:
        float(torch.ones(1, dtype=torch.float64, device=device))
    except (RuntimeError, AssertionError, TypeError, NotImplementedError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise LsrError(f"torch cannot compute in float64 on device {device!r}: {reason}") from error


def like(values: np.ndarray, array: Array) -> Array:
    """NumPy ``values`` moved to the library, device and precision of ``array``.

    Random starts come from a NumPy generator and pass through here, so every library starts from
    the same numbers.
    """
    xp = namespace(array)
    return xp.asarray(values, dtype=array.dtype, device=device(array))


def triangular_factor(*arrays: Array) -> Array:
    """R of a thin QR factorization of arrays (…, m, n_i), side by side.

    Rows go through in blocks, each below the R of those before: as stable as one factorization
    [1]_, in the memory of a block. Q is not formed where the library can do without (NumPy, torch),
    half the cost; of NumPy's matrices LAPACK's ``tpqrt`` makes use of the zeros in R as well.

    .. [1] J. Demmel, L. Grigori, M. Hoemmen and J. Langou, Communication-optimal parallel and
       sequential QR and LU factorizations, SIAM J. Sci. Comput. 34 (2012). doi:10.1137/080731992
    """
    xp, first = namespace(*arrays), arrays[0]
    rows, width = int(first.shape[-2]), sum(int(array.shape[-1]) for array in arrays)
    height = max(8 * width, ROW_ENTRIES // max(1, width))
    triangle: Array = None
    for start in range(0, max(rows, 1), height):
        parts = [array[..., start : min(start + height, rows), :] for array in arrays]
        block = xp.concat(parts, axis=-1) if len(parts) > 1 else parts[0]
        if triangle is None:
            triangle = _triangle(block)
        elif xp is NUMPY and block.ndim == 2:
            triangle = _triangle_over(triangle, block)
        else:
            triangle = _triangle(xp.concat([triangle, block], axis=-2))
    return triangle


def _triangle(array: Array) -> Array:
    if array_api_compat.is_numpy_array(array):
        return np.linalg.qr(array, mode="r")
    xp = namespace(array)
    return (
        xp.linalg.qr(array, mode="r")[1]
        if array_api_compat.is_torch_array(array)
        else xp.linalg.qr(array).R
    )


def _triangle_over(triangle: np.ndarray, block: np.ndarray) -> np.ndarray:
    """R of a square triangle with a block below it."""
    from scipy.linalg import get_lapack_funcs

    (tpqrt,) = get_lapack_funcs(("tpqrt",), (triangle, block))
    with one_blas_thread:  # of SciPy's BLAS as well, which that import may have brought
        answer: np.ndarray = tpqrt(0, min(PANEL, len(triangle)), triangle, block, overwrite_a=True)[
            0
        ]
    return answer


def require_matrix(array: Array, name: str = "matrix") -> None:
    """Raise `ShapeError` unless ``array`` has two dimensions and at least one entry."""
    if array.ndim != 2:
        stack = "; decompose_each takes a stack of matrices" if array.ndim == 3 else ""
        raise ShapeError(f"{name}: expected two dimensions, got shape {tuple(array.shape)}{stack}")
    if 0 in array.shape:
        raise ShapeError(
            f"{name}: a matrix of shape {tuple(array.shape)} has no entries to approximate"
        )


def zero_padded(array: Array, axis: int, size: int) -> Array:
    """The array with zeros appended along ``axis`` up to ``size``; as it is if that long already."""
    missing = size - int(array.shape[axis])
    if missing <= 0:
        return array
    xp = namespace(array)
    zeros = xp.zeros(
        (*array.shape[:axis], missing, *array.shape[axis + 1 :]),
        dtype=array.dtype,
        device=device(array),
    )
    return xp.concat((array, zeros), axis=axis)
