"""Number formats of stored factors, from float64 to int4: rounding one unit factor, with its error measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from lsrdecomp.errors import PrecisionError, unknown
from lsrdecomp.formats.bit_packing import pack, packed_size, unpack
from lsrdecomp.precision import INTEGERS, PRECISIONS, type_name


@dataclass(frozen=True, slots=True)
class Format:
    """How the entries of one factor are written; any scale of theirs is free, for the term's weight absorbs it."""

    name: str
    bits: int
    kind: str  # "float" or "integer"
    top: float  # largest code; 1 where the range is so wide that unit factors need no scale
    scales: tuple[float, ...]  # tried scales, relative to the one that brings the largest entry to the top

    def bytes(self, entries: int) -> int:
        return packed_size(entries, self.bits)

    @property
    def unit(self) -> float:
        """What the code 1 stands for: a power of two that puts the largest code between 1 and 2."""
        return float(2.0 ** -np.floor(np.log2(self.top)))


_OCTAVE = tuple(2.0 ** (-k / 8) for k in range(8))
"""Eight scales an octave: with three bits of significand their rounding errors differ noticeably."""


def _floating(name: str, scales: tuple[float, ...] = (1.0,)) -> Format:
    row = PRECISIONS[name]
    return Format(name, row.bits, "float", 1.0 if row.largest > 1e30 else row.largest, scales)


FORMATS = {
    row.name: row
    for row in (
        _floating("float64"),
        _floating("float32"),
        _floating("float16"),
        _floating("bfloat16"),
        _floating("float8_e4m3fn", _OCTAVE),
        _floating("float8_e5m2", _OCTAVE),
        Format("int8", 8, "integer", float(INTEGERS["int8"]), (1.0,)),
        Format("int4", 4, "integer", float(INTEGERS["int4"]), (1.0, 1.0 / 0.9, 1.0 / 0.8, 1.0 / 0.7, 1.0 / 0.6)),
    )
}
"""By name. The scales of int4 above one clip the largest entries, which pays where a factor has tails."""


def storage_format(storage: Any) -> Format:
    """The row of the table for a name or a dtype: ``"float16"``, ``"fp16"``, ``numpy.float16``, ``torch.float16``.

    Raises `PrecisionError`, which names the formats, for any other.
    """
    name = type_name(storage)
    if name not in FORMATS:
        raise PrecisionError(f"storage: no format {unknown(name, FORMATS)}")
    return FORMATS[name]


@dataclass(frozen=True, eq=False)
class StoredFactor:
    """One factor as codes: the factor is ``scale`` times what they say, and the scale lives in the term's weight."""

    format: str
    shape: tuple[int, int]
    complex: bool
    codes: np.ndarray  # entries in the format; int4 as a run of bits

    @property
    def bytes(self) -> int:
        return int(self.codes.nbytes)

    @cached_property
    def values(self) -> np.ndarray:
        """The codes as float64 or complex128, shape ``shape``."""
        entries = self.shape[0] * self.shape[1] * (2 if self.complex else 1)
        if self.format == "int4":
            flat = unpack(self.codes, 4, (entries,)).astype(np.float64)
        else:
            flat = self.codes.astype(np.float64)
        flat = flat * storage_format(self.format).unit
        if self.complex:
            flat = flat[0::2] + 1j * flat[1::2]
        return flat.reshape(self.shape)


def round_factor(factor: np.ndarray, name: str) -> tuple[StoredFactor, float]:
    """The best codes for a unit factor, and the relative error they leave once their scale is free.

    Parameters
    ----------
    factor : ndarray, shape (m, n), float64 or complex128, Frobenius norm one
    name : str
        A key of `FORMATS`.

    Returns
    -------
    (StoredFactor, float)
        The error is min_a ‖F − a·codes‖_F, formed from the residual.
    """
    chosen, is_complex = storage_format(name), np.iscomplexobj(factor)
    flat = np.ascontiguousarray(factor).reshape(-1)
    if is_complex:
        flat = np.ascontiguousarray(np.stack((flat.real, flat.imag), axis=1)).reshape(-1)
    peak = float(np.max(np.abs(flat)))
    best: tuple[float, np.ndarray] | None = None
    for relative in chosen.scales:
        codes = _encode(flat, chosen, peak, relative)
        error = _misfit(flat, codes.astype(np.float64))
        if best is None or error < best[0]:
            best = error, codes
    assert best is not None
    error, codes = best
    shape = int(factor.shape[0]), int(factor.shape[1])
    return StoredFactor(name, shape, is_complex, pack(codes, 4) if name == "int4" else codes), error


def _encode(flat: np.ndarray, chosen: Format, peak: float, relative: float) -> np.ndarray:
    if chosen.kind == "integer":
        scaled = np.clip(np.rint(flat * (chosen.top * relative / peak)), -chosen.top, chosen.top)
        return scaled.astype(np.int8)
    # A power of two loses nothing; it brings the largest entry to the top of the format's range.
    scale = 2.0 ** np.floor(np.log2(chosen.top / peak)) * relative if chosen.top > 1.0 else 1.0
    return (flat * scale).astype(np.dtype(getattr(ml_dtypes, chosen.name, chosen.name)))


def _misfit(flat: np.ndarray, values: np.ndarray) -> float:
    square = float(values @ values)
    if square == 0.0:
        return float(np.linalg.norm(flat))
    return float(np.linalg.norm(flat - values * (float(values @ flat) / square)))
