"""Number formats of stored factors, from float64 to int4, with the error of rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.errors import PrecisionError, unknown
from lsrdecomp.precision import INTEGERS, PRECISIONS, numpy_dtype, type_name

Codes: TypeAlias = NDArray[np.int8]
"""Integers of at most eight bits."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format for the entries of one factor; the term's weight absorbs any scale of theirs.

    Attributes
    ----------
    name : str
    bits : int
    kind : str
        ``"float"`` or ``"integer"``.
    top : float
        Largest code; 1 where the range is so wide that unit factors need no scale.
    scales : tuple of float
        Scales that are tried, relative to the one that brings the largest entry to the top.

    Examples
    --------
    >>> int4 = storage_format("int4")
    >>> int4.bits, int4.top, int4.bytes(100)
    (4, 7.0, 50)
    """

    name: str
    bits: int
    kind: str
    top: float
    scales: tuple[float, ...]

    def bytes(self, entries: int) -> int:
        """Return the bytes of a count of numbers, packed."""
        return packed_size(entries, self.bits)

    @property
    def is_integer(self) -> bool:
        """True for integer codes."""
        return self.kind == "integer"

    @property
    def unit(self) -> float:
        """The number that the code 1 stands for, a power of two.

        It puts the largest code between 1 and 2.
        """
        return float(2.0 ** -np.floor(np.log2(self.top)))


_OCTAVE = tuple(2.0 ** (-k / 8) for k in range(8))
"""Eight scales an octave: with three bits of significand their rounding errors differ
noticeably."""


def _floating(name: str, scales: tuple[float, ...] = (1.0,)) -> Format:
    """Return the format of a floating type."""
    precision = PRECISIONS[name]
    top = 1.0 if precision.largest > 1e30 else precision.largest
    return Format(name, precision.bits, "float", top, scales)


def _integer(name: str, top: int) -> Format:
    """Return the format of integers from −top to top."""
    return Format(name, (2 * top + 1).bit_length(), "integer", float(top), ())


_ROWS = (
    _floating("float64"),
    _floating("float32"),
    _floating("float16"),
    _floating("bfloat16"),
    _floating("float8_e4m3fn", _OCTAVE),
    _floating("float8_e5m2", _OCTAVE),
    *(_integer(name, top) for name, top in INTEGERS.items()),
)

FORMATS = {row.name: row for row in _ROWS}
"""By name. Integers try scales that clip the largest entries, which pays where a factor has tails:
`nearest_codes`."""


def storage_format(storage: Any) -> Format:
    """Return the format of a name or a dtype, such as ``"fp16"`` or ``torch.float16``.

    Parameters
    ----------
    storage : str or dtype

    Returns
    -------
    Format

    Raises
    ------
    PrecisionError
        For any other; the message names the formats.

    Examples
    --------
    >>> storage_format("fp16").name, storage_format(np.float16).bits
    ('float16', 16)
    """
    name = type_name(storage)
    if name not in FORMATS:
        raise PrecisionError(f"storage: no format {unknown(name, FORMATS)}")
    return FORMATS[name]


@dataclass(frozen=True, eq=False)
class StoredFactor:
    """One factor as codes; its scale lives in the term's weight.

    Examples
    --------
    >>> stored, _ = round_factor(np.array([[3.0, 4.0]]) / 5.0, "int4")
    >>> stored.bytes, (7 * stored.values / stored.values[0, 1]).round(6).tolist()  # 3 / 4 as 5 / 7
    (1, [[5.0, 7.0]])
    """

    format: str
    shape: tuple[int, int]
    complex: bool
    codes: np.ndarray  # entries in the format; int4 as a run of bits

    @property
    def bytes(self) -> int:
        """Bytes of the codes."""
        return int(self.codes.nbytes)

    @cached_property
    def values(self) -> np.ndarray:
        """The codes as float64 or complex128, shape ``shape``."""
        codes = self.codes
        if self.format == "int4":
            entries = self.shape[0] * self.shape[1] * (2 if self.complex else 1)
            codes = unpack(codes, 4, (entries,))
        flat = codes.astype(np.float64) * storage_format(self.format).unit
        if self.complex:
            flat = flat[0::2] + 1j * flat[1::2]
        return flat.reshape(self.shape)


def round_factor(factor: np.ndarray, name: str) -> tuple[StoredFactor, float]:
    """Return the best codes for a unit factor, and the relative error with a free scale.

    Parameters
    ----------
    factor : ndarray, shape (m, n), float64 or complex128, Frobenius norm one
    name : str
        A key of `FORMATS`.

    Returns
    -------
    (StoredFactor, float)
        The error is min_a ‖F − a·codes‖_F, formed from the residual.

    Examples
    --------
    >>> factor = np.linspace(-1.0, 1.0, 64).reshape(8, 8)
    >>> for name in ("float16", "int8", "int4"):
    ...     print(name, f"{round_factor(factor / np.linalg.norm(factor), name)[1]:.0e}")
    float16 2e-04
    int8 4e-03
    int4 7e-02
    """
    chosen = storage_format(name)
    is_complex = np.iscomplexobj(factor)
    flat = np.ascontiguousarray(factor).reshape(-1)
    if is_complex:
        flat = np.ascontiguousarray(np.stack((flat.real, flat.imag), axis=1)).reshape(-1)
    codes, error = _best_integers(flat, chosen) if chosen.is_integer else _best_floats(flat, chosen)
    shape = int(factor.shape[0]), int(factor.shape[1])
    return StoredFactor(chosen.name, shape, is_complex, codes), error


def _best_integers(flat: np.ndarray, chosen: Format) -> tuple[np.ndarray, float]:
    """Return integer codes, packed where they have fewer than eight bits, and their error."""
    codes, _ = nearest_codes(flat[None, :], chosen.bits)
    error = _misfit(flat, codes[0].astype(np.float64))
    return pack(codes[0], chosen.bits) if chosen.bits < 8 else codes[0], error


def _best_floats(flat: np.ndarray, chosen: Format) -> tuple[np.ndarray, float]:
    """Return the numbers rounded at the best of the format's scales, and their error."""
    peak = float(np.max(np.abs(flat)))
    best_codes = _rounded(flat, chosen, peak, chosen.scales[0])
    best_error = _misfit(flat, best_codes.astype(np.float64))
    for relative_scale in chosen.scales[1:]:
        codes = _rounded(flat, chosen, peak, relative_scale)
        error = _misfit(flat, codes.astype(np.float64))
        if error < best_error:
            best_codes = codes
            best_error = error
    return best_codes, best_error


def nearest_codes(rows: NDArray[np.float64], bits: int) -> tuple[Codes, NDArray[np.float64]]:
    """Return integer codes and a step for each row x, with ‖x − step·code‖ least.

    Over 24 clipping levels, between the largest entry and a quarter of it; by hand.

    Parameters
    ----------
    rows : (s, p)
    bits : int

    Returns
    -------
    codes (s, p), steps (s,)
        The step is the least-squares one for its codes; a zero row has codes and step zero.
    """
    rows = np.ascontiguousarray(rows)
    top = 2 ** (bits - 1) - 1
    row_numbers = np.arange(len(rows))
    largest = np.max(np.abs(rows), axis=1, initial=0.0)
    best_codes = np.zeros_like(rows)
    best_steps = np.zeros(len(rows))
    best_error = np.sum(rows * rows, axis=1)
    levels = np.linspace(1.0, 0.25, 24)[:, None]
    # Several levels of short rows cost less together than one after the other: up to so many
    # numbers, by hand. The codes do not depend on it.
    at_once = max(1, 2**17 // max(1, rows.size))
    for start in range(0, len(levels), at_once):
        # Codes 1: codes of all rows at some levels, (levels, s, p), and their least-squares steps.
        step = np.where(largest > 0, levels[start : start + at_once] * largest / top, 1.0)
        codes = np.clip(np.rint(rows / step[:, :, None]), -top, top)
        energy = np.einsum("lsp,lsp->ls", codes, codes)
        fitted = np.einsum("sp,lsp->ls", rows, codes) / np.where(energy > 0, energy, 1.0)
        # Codes 2: for each row the level of least error, the first of equals, if it is better than
        # before.
        residual = rows - fitted[:, :, None] * codes
        error = np.einsum("lsp,lsp->ls", residual, residual)
        best_level = np.argmin(error, axis=0), row_numbers
        is_better = error[best_level] < best_error
        best_error = np.where(is_better, error[best_level], best_error)
        best_steps = np.where(is_better, fitted[best_level], best_steps)
        best_codes = np.where(is_better[:, None], codes[best_level], best_codes)
    return best_codes.astype(np.int8), best_steps


# -- codes in groups of numbers that share a step --------------------------------------------------

STEPS_PER_OCTAVE = 16
"""Sizes of a step between one and its double: a step is stored as a sign and a power of
2^(−1/16)."""
MAX_STEP_EXPONENT = 127
"""Largest power of 2^(−1/16) of a step; it takes seven bits, and the sign the eighth."""

CLIP_SHIFTS = {
    2: (0, 4, 8, 12, 16),
    3: (0, 3, 6, 9, 12),
    4: (-1, 0, 2, 4, 6),
    5: (-1, 0, 2, 4),
    6: (-1, 0, 2),
    7: (-1, 0),
    8: (-1, 0),
}
"""Steps that are tried for a group by the bits of its codes, in sixteenths of an octave below the
one that brings the largest number to the end of the range. By hand: few bits pay for clipping, and
many are lost by it, so that the next larger step is tried too, which clips nothing."""


def nearest_grouped_codes(
    rows: NDArray[np.floating], bits: int, group: int
) -> tuple[Codes, NDArray[np.uint8], NDArray[np.float64]]:
    """Return integer codes of rows x, a step for each group of numbers, and a unit for each row.

    The numbers of a group are unit · step · code, where `step_values` says what a step stands for.
    The largest number of a group is on the side of the range that has one code more, so the sign
    of its step is that of the number, changed.

    Parameters
    ----------
    rows : (s, p)
    bits : int
        Codes go from −2^(bits−1) to 2^(bits−1) − 1.
    group : int
        Consecutive numbers that share a step; the last group of a row may have fewer.

    Returns
    -------
    codes (s, p), steps (s, ⌈p/group⌉), units (s,)
        A row of zeros has codes and unit zero. Where a row is one group, its step is in its unit,
        which may be negative, and ``steps`` has shape (s, 0).

    Examples
    --------
    >>> codes, steps, units = nearest_grouped_codes(np.array([[8.0, 4.0, -0.25, 0.125]]), 4, 2)
    >>> codes.tolist(), steps.tolist(), units.tolist()
    ([[-8, -4, -8, 4]], [[128, 80]], [1.0])
    """
    n_rows, size = rows.shape
    n_groups = group_count(size, group)
    width = group if n_groups > 1 else size
    codes = np.zeros((n_rows, n_groups * width), dtype=np.int8)
    steps = np.zeros((n_rows, n_groups), dtype=np.uint8)
    units = np.zeros(n_rows)
    # Some rows at a time, which a processor's cache holds.
    at_once = max(1, BLOCK_NUMBERS // max(1, size))
    for start in range(0, n_rows, at_once):
        part = slice(start, start + at_once)
        padded = rows[part]
        if n_groups * width > size:
            padded = np.zeros((len(padded), n_groups * width), rows.dtype)
            padded[:, :size] = rows[part]
        grouped = padded.reshape(len(padded), n_groups, width)
        steps[part], units[part] = _grouped_codes(grouped, bits, codes[part].reshape(grouped.shape))
    if n_groups == 1:
        units = units * step_values(steps[:, 0])
        steps = steps[:, :0]
    return codes[:, :size], steps, units


BLOCK_NUMBERS = 2**15
"""Numbers that are rounded at a time: their copies fit into a cache of half a megabyte."""


_STEP_SIZES = np.exp2(-np.arange(MAX_STEP_EXPONENT + 1) / STEPS_PER_OCTAVE)
_INVERSE_SIZES = (1.0 / _STEP_SIZES).astype(np.float32)
_SQUARED_SIZES = (_STEP_SIZES**2).astype(np.float32)


def _grouped_codes(
    grouped: NDArray[np.floating], bits: int, codes: Codes
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Write the codes of some rows, (s, groups, p), and return their steps and units.

    Numbers are compared in single precision: a code is a number of eight bits.
    """
    n_rows, n_groups, width = grouped.shape
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    # 1. All numbers in units of the largest of their row. Those of a group lie along the axis that
    #    is shorter, since sums over it then run along the longer one.
    rows = grouped.reshape(n_rows, -1)
    peaks = np.maximum(rows.max(axis=1, initial=0.0), -rows.min(axis=1, initial=0.0))
    inverse_peaks = np.divide(1.0, peaks, out=np.zeros_like(peaks), where=peaks > 0.0)
    peaks = peaks.astype(np.float64)
    flat = grouped.reshape(-1, width)
    axis = 0 if width < len(flat) else 1
    numbers = np.empty(flat.T.shape if axis == 0 else flat.shape, dtype=np.float32)
    of_groups = np.repeat(inverse_peaks, n_groups)[:, None] * flat
    np.copyto(numbers, of_groups.T if axis == 0 else of_groups, casting="same_kind")
    # 2. The step of each group that brings its largest number to the lowest code, and its exponent
    #    below the largest of these in its row.
    largest = numbers.max(axis=axis)
    smallest = numbers.min(axis=axis)
    is_negative_step = largest >= -smallest
    ends = np.maximum(largest, -smallest)
    with np.errstate(divide="ignore"):
        below = np.rint(-STEPS_PER_OCTAVE * np.log2(ends))
    below = np.minimum(below, MAX_STEP_EXPONENT).astype(np.intp)
    in_lowest = np.where(is_negative_step, lowest, -lowest).astype(np.float32)
    # 3. Of some steps the one of least error.
    in_steps = np.empty_like(numbers)
    rounded = np.empty_like(numbers)
    ends_of_codes = np.float32(lowest), np.float32(highest)

    def round_at(exponents: NDArray[np.intp]) -> None:
        per_step = in_lowest * _INVERSE_SIZES[exponents]
        np.multiply(numbers, per_step if axis == 0 else per_step[:, None], out=in_steps)
        np.rint(in_steps, out=rounded)
        np.maximum(rounded, ends_of_codes[0], out=rounded)
        np.minimum(rounded, ends_of_codes[1], out=rounded)

    best_error = np.full(len(ends), np.inf, dtype=np.float32)
    best_exponents = np.full(len(ends), MAX_STEP_EXPONENT)
    for shift in CLIP_SHIFTS[bits]:
        exponents = np.minimum(np.maximum(below + shift, 0), MAX_STEP_EXPONENT)
        round_at(exponents)
        np.subtract(in_steps, rounded, out=rounded)
        np.multiply(rounded, rounded, out=rounded)
        error = _SQUARED_SIZES[exponents] * rounded.sum(axis=axis)
        is_better = error < best_error
        best_error = np.where(is_better, error, best_error)
        best_exponents = np.where(is_better, exponents, best_exponents)
    round_at(best_exponents)
    np.copyto(codes.reshape(flat.shape), rounded.T if axis == 0 else rounded, casting="unsafe")
    steps = (best_exponents + np.where(is_negative_step, 128, 0)).astype(np.uint8)
    return steps.reshape(n_rows, n_groups), peaks / -lowest


def with_steps(codes: Codes, steps: NDArray[np.uint8], group: int) -> NDArray[np.float64]:
    """Return codes (s, p) times the steps of their groups.

    >>> with_steps(np.array([[1, 1, 1]], dtype=np.int8), np.array([[0, 16]], dtype=np.uint8), 2)
    array([[1. , 1. , 0.5]])
    """
    values = codes.astype(np.float64)
    if steps.shape[-1]:
        whole = values.shape[1] // group
        step = step_values(steps)
        in_groups = values[:, : whole * group].reshape(len(values), whole, group)
        in_groups *= step[:, :whole, None]
        values[:, whole * group :] *= step[:, whole:]
    return values


def step_values(steps: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return what steps of groups stand for, relative to their row's unit.

    >>> step_values(np.array([0, 16, 144], dtype=np.uint8)).tolist()
    [1.0, 0.5, -0.5]
    """
    sizes = np.exp2(-(steps & 127).astype(np.float64) / STEPS_PER_OCTAVE)
    return np.where(steps & 128, -sizes, sizes)


def nearest_steps(values: NDArray[np.float64]) -> NDArray[np.uint8] | None:
    """Return the bytes that `step_values` reads nearest to numbers of at most one.

    None if one of them is too small for a byte, or zero.

    >>> nearest_steps(np.array([1.0, -0.51])).tolist()
    [0, 144]
    """
    sizes = np.abs(values)
    if np.any(sizes < 2.0 ** (-MAX_STEP_EXPONENT / STEPS_PER_OCTAVE)) or np.any(sizes > 1.0):
        return None
    exponents = np.rint(-STEPS_PER_OCTAVE * np.log2(sizes))
    steps: NDArray[np.uint8] = (exponents + np.where(values < 0.0, 128, 0)).astype(np.uint8)
    return steps


def expand_steps(steps: NDArray[np.uint8], group: int, size: int) -> NDArray[np.float64]:
    """Return the step of each of ``size`` numbers; steps may have leading axes.

    Without steps all are one.

    >>> expand_steps(np.array([0, 16], dtype=np.uint8), 2, 3).tolist()
    [1.0, 1.0, 0.5]
    """
    if steps.shape[-1] == 0:
        return np.ones((*steps.shape[:-1], size))
    return np.repeat(step_values(steps), group, axis=-1)[..., :size]


def group_count(size: int, group: int) -> int:
    """Return the groups of a count of numbers."""
    return -(-size // group)


def step_count(size: int, group: int) -> int:
    """Return how many steps are stored for a count of numbers: none where all share one.

    Their scale absorbs it.
    """
    n_groups = group_count(size, group)
    return n_groups if n_groups > 1 else 0


def _rounded(flat: np.ndarray, chosen: Format, peak: float, relative_scale: float) -> np.ndarray:
    """Return numbers in a floating format, scaled to its range where that is narrow."""
    scale = 1.0
    if chosen.top > 1.0:
        # A power of two loses nothing; it brings the largest entry to the top of the range.
        scale = float(2.0 ** np.floor(np.log2(chosen.top / peak)) * relative_scale)
    return np.asarray((flat * scale).astype(numpy_dtype(chosen.name)))


def _misfit(flat: np.ndarray, values: np.ndarray) -> float:
    """Return min_a ‖x − a·values‖."""
    square = float(values @ values)
    if square == 0.0:
        return float(np.linalg.norm(flat))
    return float(np.linalg.norm(flat - values * (float(values @ flat) / square)))


# -- small integers as a dense run of bits ---------------------------------------------------------


def pack(codes: Codes, bits: int) -> NDArray[np.uint8]:
    """Return codes as a dense run of ``bits``-bit numbers.

    They are offset to be unsigned, most significant bit first.
    """
    flat = codes.reshape(-1)
    # Eight codes make a number of so many bytes; those of the last are filled up by zero bits.
    digits = np.zeros(8 * -(-flat.size // 8), dtype=np.uint8)
    np.add(flat.view(np.uint8), np.uint8(2 ** (bits - 1)), out=digits[: flat.size])
    digits[: flat.size] &= np.uint8(2**bits - 1)
    # Two neighbours become one number of twice the bits, three times.
    numbers: Any = digits
    for width, dtype in ((bits, np.uint16), (2 * bits, np.uint32), (4 * bits, np.uint64)):
        pairs = numbers.reshape(-1, 2).astype(dtype)
        numbers = (pairs[:, 0] << dtype(width)) | pairs[:, 1]
    packed = numbers.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 8 - bits :]
    return np.ascontiguousarray(packed).reshape(-1)[: packed_size(flat.size, bits)]


def packed_size(count: int, bits: int) -> int:
    """Return the bytes of ``count`` packed codes."""
    return -(-count * bits // 8)


def unpack(packed: NDArray[np.uint8], bits: int, shape: tuple[int, ...]) -> Codes:
    """Return the codes that `pack` was given.

    Raises `PrecisionError` if the bytes are not as many as the shape needs.
    """
    count = math.prod(shape)
    needed = packed_size(count, bits)
    if packed.size != needed:
        raise PrecisionError(
            f"{packed.size} bytes of {bits}-bit codes, but shape {shape} needs {needed}"
        )
    digits = np.unpackbits(packed)[: count * bits].reshape(count, bits)
    padded = np.concatenate([np.zeros((count, 8 - bits), dtype=np.uint8), digits], axis=1)
    unsigned = np.packbits(padded, axis=1)[:, 0].astype(np.int16)
    codes: Codes = (unsigned - 2 ** (bits - 1)).astype(np.int8).reshape(shape)
    return codes


# -- and as digits of a number ---------------------------------------------------------------------

DIGITS_PER_NUMBER = 1024
"""Codes that make one number: the last byte of each is on average half used."""


def pack_digits(codes: Codes, bits: int) -> NDArray[np.uint8]:
    """Return codes from −top to top, top = 2^(bits−1) − 1, as digits of base 2 top + 1.

    That takes 1.6 bits a code for ``bits`` = 2, 2.81 for 3, 3.91 for 4 and 4.95 for 5. Each
    `DIGITS_PER_NUMBER` codes make one number, of which the first code is the highest digit.

    >>> packed = pack_digits(np.array([1, 0, -1, 1, 1], dtype=np.int8), 2)
    >>> packed.tolist(), unpack_digits(packed, 2, (5,)).tolist()
    ([197], [1, 0, -1, 1, 1])
    """
    top = 2 ** (bits - 1) - 1
    base = 2 * top + 1
    digits = (codes.reshape(-1).astype(np.int16) + top).tolist()
    packed = []
    for start in range(0, len(digits), DIGITS_PER_NUMBER):
        part = digits[start : start + DIGITS_PER_NUMBER]
        number = 0
        for digit in part:
            number = number * base + digit
        packed.append(number.to_bytes(_bytes_of_digits(len(part), base), "big"))
    return np.frombuffer(b"".join(packed), np.uint8)


def packed_digits_size(count: int, bits: int) -> int:
    """Return the bytes of ``count`` codes that `pack_digits` packs."""
    base = 2**bits - 1
    whole, remaining = divmod(count, DIGITS_PER_NUMBER)
    full_size = _bytes_of_digits(DIGITS_PER_NUMBER, base)
    return whole * full_size + _bytes_of_digits(remaining, base)


def unpack_digits(packed: NDArray[np.uint8], bits: int, shape: tuple[int, ...]) -> Codes:
    """Return the codes that `pack_digits` was given.

    Raises `PrecisionError` if the bytes are not as many as the shape needs, or too large a number.
    """
    count = math.prod(shape)
    needed = packed_digits_size(count, bits)
    if packed.size != needed:
        raise PrecisionError(
            f"{packed.size} bytes of {bits}-bit codes, but shape {shape} needs {needed}"
        )
    top = 2 ** (bits - 1) - 1
    base = 2 * top + 1
    content = packed.tobytes()
    codes = np.empty(count, dtype=np.int8)
    begin = 0
    for start in range(0, count, DIGITS_PER_NUMBER):
        stop = min(count, start + DIGITS_PER_NUMBER)
        end = begin + _bytes_of_digits(stop - start, base)
        number = int.from_bytes(content[begin:end], "big")
        begin = end
        for position in range(stop - 1, start - 1, -1):
            number, digit = divmod(number, base)
            codes[position] = digit - top
        if number:
            raise PrecisionError(f"{stop - start} digits of base {base} do not hold a number")
    return codes.reshape(shape)


@lru_cache(maxsize=4096)
def _bytes_of_digits(count: int, base: int) -> int:
    """Return the bytes of the largest number of so many digits."""
    largest: int = base**count - 1
    return (largest.bit_length() + 7) // 8
