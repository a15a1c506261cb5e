"""The one file that asks which array library it was handed.

Everything numerical is written against the array API standard [1]_, so the same lines run on NumPy,
on torch tensors where they lie, and on any other library that `array_api_compat` knows.

References
----------
.. [1] Python array API standard, https://data-apis.org/array-api/
"""

from __future__ import annotations

import math
import sys
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, TypeAlias

import array_api_compat
import array_api_compat.numpy
import ml_dtypes
import numpy as np

from lsrdecomp.errors import LsrError, PrecisionError, ShapeError, needs
from lsrdecomp.threads import one_blas_thread

Array: TypeAlias = Any
"""An array of any library of the array API standard."""

Namespace: TypeAlias = Any

NUMPY: Namespace = array_api_compat.numpy
"""What `namespace` says of NumPy's arrays."""

FLOATING = ("float32", "float64", "complex64", "complex128")
"""Element types that everything here computes in."""

NUMPY_DOUBLE = (np.dtype(np.float64), np.dtype(np.complex128))
"""NumPy's element types of double precision, in the byte order of the machine."""

OVERSAMPLING = 8
"""Random columns beyond the rank that every range finder draws: the usual 5 to 10 of Halko,
Martinsson and Tropp (2011)."""

MAX_FORMED_ENTRIES = 2**27
"""Entries of what is held as factors or products up to which it is formed without being asked: by
hand, 1 GiB in double precision."""


def namespace(*arrays: Array) -> Namespace:
    """Return the array API namespace that all ``arrays`` share."""
    for array in arrays:
        if type(array) is not np.ndarray:
            return array_api_compat.array_namespace(*arrays)
    return NUMPY


def dtype_name(array: Array) -> str:
    """Return the name of the element type, the same in every library, such as ``"bfloat16"``."""
    if type(array) is np.ndarray:
        return _numpy_name(array.dtype)
    return str(getattr(array.dtype, "name", array.dtype)).rsplit(".", 1)[-1]


@cache
def _numpy_name(dtype: Any) -> str:
    return str(dtype.name)


def as_floating(value: Any, name: str = "matrix") -> Array:
    """Return an array with a real or complex floating type of at least single precision.

    Lists become NumPy arrays; integers and booleans become float64; half precisions become float32.
    Raises `PrecisionError` for element types without arithmetic, such as objects and strings, for
    extended precision (``numpy.longdouble``), which would be rounded, and for masked arrays with
    masked entries.
    """
    if type(value) is np.ndarray and dtype_name(value) in FLOATING:
        return value
    if isinstance(value, np.ma.MaskedArray):
        value = _unmasked(value, name)
    try:
        array = value if array_api_compat.is_array_api_obj(value) else np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise ShapeError(f"{name}: is no array of numbers: {error}") from error
    dtype = dtype_name(array)
    if dtype in FLOATING:
        return array
    if dtype.startswith(("object", "str", "bytes", "void")):
        raise PrecisionError(
            f"{name}: expected a numeric array, got dtype {array.dtype}; "
            f"pass numbers, as numpy.asarray({name}, float)"
        )
    if isinstance(array, np.ndarray) and array.dtype in (np.longdouble, np.clongdouble):
        raise PrecisionError(
            f"{name}: elements of type {dtype} have more digits than the float64 that everything "
            "here is computed and measured in; pass matrix.astype(numpy.float64), or "
            "numpy.complex128, and errors count from that matrix"
        )
    xp = namespace(array)
    if dtype.startswith(("int", "uint", "bool", "long")):
        return xp.astype(array, xp.float64)
    if dtype.startswith(("float", "bfloat")):
        return xp.astype(array, xp.float32)
    raise PrecisionError(f"{name}: cannot compute with elements of type {dtype}")


def _unmasked(array: np.ma.MaskedArray, name: str) -> np.ndarray:
    """Return the data of a masked array, or raise `PrecisionError` if an entry is masked."""
    count = int(np.sum(np.ma.getmaskarray(array)))
    if count:
        raise PrecisionError(
            f"{name}: {count} of {array.size} entries are masked, and a least-squares fit needs "
            "all of them; pass matrix.filled(value) with values that make sense"
        )
    return np.asarray(array.data)


def with_common_dtype(*arrays: Array) -> list[Array]:
    """Return the arrays in the one element type that holds all of them."""
    if len({array.dtype for array in arrays}) <= 1:
        return list(arrays)
    xp = namespace(*arrays)
    common = xp.result_type(*(array.dtype for array in arrays))
    return [xp.astype(array, common) for array in arrays]


def as_double(array: Array) -> Array:
    """Return the same numbers in float64 or complex128.

    Raises `PrecisionError` where JAX has neither, for it would round instead.
    """
    if type(array) is np.ndarray and array.dtype in NUMPY_DOUBLE:
        return array
    xp = namespace(array)
    wide = xp.complex128 if is_complex(array) else xp.float64
    if array.dtype == wide:
        return array
    if is_jax(array) and "float64" not in xp.__array_namespace_info__().dtypes():
        raise PrecisionError(
            "errors are measured in float64, which JAX has switched off; "
            'call jax.config.update("jax_enable_x64", True) first, or pass numpy.asarray(matrix)'
        )
    return xp.astype(array, wide)


def is_complex(array: Array) -> bool:
    """Return whether the element type is complex."""
    return dtype_name(array).startswith("complex")


def is_double(array: Array) -> bool:
    """Return whether the element type is float64 or complex128."""
    return dtype_name(array) in ("float64", "complex128")


def device(array: Array) -> Any:
    """Return the device on which the array lies."""
    return array_api_compat.device(array)


def conjugate(array: Array) -> Array:
    """Return the complex conjugate; real arrays are left as they are."""
    return namespace(array).conj(array) if is_complex(array) else array


def real_part(array: Array) -> Array:
    """Return the real part; real arrays are left as they are."""
    return namespace(array).real(array) if is_complex(array) else array


def adjoint(array: Array) -> Array:
    """Return the conjugate transpose of the last two axes."""
    if type(array) is np.ndarray:  # several times a step: a third of the time of the general way
        transposed = array.swapaxes(-1, -2)
        return transposed.conj() if array.dtype.kind == "c" else transposed
    return conjugate(namespace(array).matrix_transpose(array))


def is_differentiated(array: Array) -> bool:
    """Return whether torch records computations with the array, to differentiate it.

    It does not within ``torch.no_grad``.
    """
    if type(array) is np.ndarray:
        return False
    return bool(getattr(array[:1, ...] * 1, "requires_grad", False))


def is_jax(array: Array) -> bool:
    """Return whether an array is JAX's."""
    return type(array) is not np.ndarray and array_api_compat.is_jax_array(array)


def is_traced_by_jax(array: Array) -> bool:
    """Return whether an array has no numbers yet, within ``jax.jit`` or ``jax.vmap``."""
    if type(array) is np.ndarray or not is_jax(array):
        return False
    import jax

    return isinstance(array, jax.core.Tracer)


def refuse_traced(array: Array, work: str) -> None:
    """Raise `LsrError` for an array under ``jax.jit``, where ``work`` depends on its values."""
    if is_traced_by_jax(array):
        raise LsrError(
            f"{work} depends on the values of the matrix, which jax.jit does not know yet: do it "
            "outside, and pass the SeparatedMatrix that comes of it to the compiled function"
        )


@cache
def _largest_bits(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the bits of the largest number of a floating type, and its sign bit, as integers."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    facts: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    largest = np.array([facts.max, -facts.max], dtype).view(unsigned)
    return largest[0], largest[0] ^ largest[1]


def all_finite(array: np.ndarray) -> bool:
    """Return whether every number of a NumPy array, of any floating type, is finite."""
    if array.dtype.itemsize <= 2:  # bits of numbers that are not finite are above those of others
        largest, sign = _largest_bits(array.dtype)
        bits = array.view(largest.dtype)
        return bool(np.max(bits & ~sign, initial=0) <= largest)
    # The sum of squares takes a fraction of the time of a look at every number
    flat = array.ravel(order="K")
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(flat @ flat)) or bool(np.isfinite(array).all())


def require_finite(array: Array, name: str = "matrix") -> None:
    """Raise `PrecisionError`, with a count and the first place, unless every entry is finite."""
    if type(array) is np.ndarray and array.dtype in (np.float32, np.float64):
        if all_finite(array):
            return
    # A norm takes half the time of a look at every entry
    elif dtype_name(array) == "float64" and math.isfinite(norm(array)):
        return
    xp = namespace(array)
    bad = ~xp.isfinite(array)
    if not bool(xp.any(bad)):
        return
    count = int(xp.sum(xp.astype(bad, xp.int64)))
    position = int(xp.argmax(xp.astype(xp.reshape(bad, (-1,)), xp.int8)))
    index = tuple(int(i) for i in np.unravel_index(position, tuple(array.shape)))
    raise PrecisionError(
        f"{name}: {count} of {math.prod(array.shape)} entries are not finite (the first at "
        f"{index}); remove or replace them before decomposing"
    )


def finite_norm(array: Array, name: str = "matrix", *, computed: bool = False) -> float:
    """Return the Frobenius norm.

    Raises `PrecisionError` for entries that are not finite, or where the norm overflows float64 or
    is below its smallest normal number, where numbers lose their digits. Entries ``computed`` from
    finite ones are infinite by overflow alone, and are not looked at.
    """
    length = norm(array)
    if 0.0 < length < sys.float_info.min:
        raise PrecisionError(
            f"{name}: its Frobenius norm, {length:.3g}, is below the smallest normal float64, "
            "2.2e-308, where numbers lose their digits; multiply it by a power of two, such as "
            "2.0**1000"
        )
    if math.isfinite(length):
        return length
    if not computed:
        require_finite(array, name)
    raise PrecisionError(
        f"{name}: its Frobenius norm is above the largest float64, 1.8e308, though its entries are "
        "finite; divide the matrix by its largest entry"
    )


MAX_DOT_ENTRIES = 2**12
"""Numbers for whose inner product no BLAS starts threads; by hand."""


def norm(array: Array) -> float:
    """Return the Frobenius norm in double precision, safe where squares overflow or underflow."""
    # One inner product sums the squares of few: BLAS starts no threads for them, whose number would
    # be seen in the last bits.
    is_double_of_numpy = type(array) is np.ndarray and array.dtype in NUMPY_DOUBLE
    if is_double_of_numpy and 0 < array.size <= MAX_DOT_ENTRIES:
        # `vdot` says nothing of overflow and of NaN, which `errstate` would cost more to silence
        squared = float(np.vdot(array, array).real)
        if 1e-280 < squared < 1e280:
            return math.sqrt(squared)
    if hasattr(array, "detach"):
        array = array.detach()  # the answer is a number: no gradient passes
    xp = namespace(array)
    if 0 in array.shape:
        return 0.0
    if dtype_name(array) == "float64":
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            squared = float(xp.sum(xp.vecdot(array, array)))
        # Far from both ends of the range nothing is lost but rounding
        if 1e-280 < squared < 1e280:
            return math.sqrt(squared)
    # Real entries lose nothing to their absolute value, complex ones do in single precision
    magnitude = xp.abs(as_double(array) if is_complex(array) else array)
    largest = float(xp.max(magnitude))
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    scaled = as_double(magnitude) / largest
    return largest * math.sqrt(float(xp.sum(scaled * scaled)))


def tail_norms(sigma: Array) -> list[float]:
    """Return ‖(σ_{s+1}, σ_{s+2}, …)‖ for s = 0, 1, …, len(σ): the error of each truncation."""
    ascending = to_numpy(sigma)[::-1].tolist()
    return list(accumulate(ascending, math.hypot, initial=0.0))[::-1]


def to_numpy(array: Array) -> np.ndarray:
    """Return a NumPy copy or view on the host, of any library's array.

    Raises `LsrError` within ``jax.jit``.
    """
    if type(array) is np.ndarray:
        return array
    if array_api_compat.is_torch_array(array):
        return np.asarray(array.detach().cpu().numpy())
    refuse_traced(array, "what NumPy computes")
    return np.asarray(array)


def to_device(value: Any, device: str | None) -> Any:
    """Return the value with every array in it on ``device``, as a torch tensor.

    For None arrays become NumPy's. Lists, tuples and dataclasses are gone through; `check_device`
    tells whether a device is there.
    """
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        values = {entry.name: getattr(value, entry.name) for entry in fields(value)}
        return replace(value, **{name: to_device(old, device) for name, old in values.items()})
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
    """Move NumPy ``values`` to the library, device and precision of ``array``.

    Random starts come from a NumPy generator and pass through here, so every library starts from
    the same numbers.
    """
    xp = namespace(array)
    return xp.asarray(values, dtype=array.dtype, device=device(array))


def triangular_factor(*arrays: Array) -> Array:
    """Return R of a thin QR factorization of arrays (…, m, n_i), side by side.

    Rows go through in blocks, each below the R of those before: as stable as one factorization
    [1]_, in the memory of a block. Q is not formed where the library can do without (NumPy, torch),
    half the cost; of NumPy's matrices LAPACK's ``tpqrt`` makes use of the zeros in R as well.

    Parameters
    ----------
    *arrays : Array
    row_block_entries : int
        Entries of a block of each matrix: 128 KiB in float64, for a fast cache; by hand.

    .. [1] J. Demmel, L. Grigori, M. Hoemmen and J. Langou, Communication-optimal parallel and
       sequential QR and LU factorizations, SIAM J. Sci. Comput. 34 (2012). doi:10.1137/080731992
    """
    xp = namespace(*arrays)
    rows = int(arrays[0].shape[-2])
    width = sum(int(array.shape[-1]) for array in arrays)
    # So many entries of each matrix are 128 KiB in float64, for a fast cache; by hand.
    height = max(8 * width, 2**14 // max(1, width))
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
    if array_api_compat.is_torch_array(array):
        return xp.linalg.qr(array, mode="r")[1]
    return xp.linalg.qr(array).R


def _triangle_over(triangle: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Return R of a square triangle with a block below it."""
    from scipy.linalg import get_lapack_funcs

    (tpqrt,) = get_lapack_funcs(("tpqrt",), (triangle, block))
    with one_blas_thread:  # of SciPy's BLAS as well, which that import may have brought
        # Columns taken together: 16 are the fastest of 4 to 32 for widths from 4 to 128.
        columns = min(16, len(triangle))
        factor: np.ndarray = tpqrt(0, columns, triangle, block, overwrite_a=True)[0]
    return factor


def require_matrix(array: Array, name: str = "matrix") -> None:
    """Raise `ShapeError` unless ``array`` has two dimensions and at least one entry."""
    if array.ndim != 2:
        way_out = "; decompose_each takes a stack of matrices" if array.ndim == 3 else ""
        raise ShapeError(
            f"{name}: expected two dimensions, got shape {tuple(array.shape)}{way_out}"
        )
    if 0 in array.shape:
        raise ShapeError(
            f"{name}: a matrix of shape {tuple(array.shape)} has no entries to approximate"
        )


def zero_padded(array: Array, axis: int, size: int) -> Array:
    """Return the array with zeros appended along ``axis``, unless it has ``size`` entries there."""
    missing = size - int(array.shape[axis])
    if missing <= 0:
        return array
    xp = namespace(array)
    shape = (*array.shape[:axis], missing, *array.shape[axis + 1 :])
    zeros = xp.zeros(shape, dtype=array.dtype, device=device(array))
    return xp.concat((array, zeros), axis=axis)
