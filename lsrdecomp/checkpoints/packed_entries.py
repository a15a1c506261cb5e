"""An entry of the index of packed layers: the sizes of one layer, checked, and how its bytes become codes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.checkpoints.tensors import DTYPES, FLOATS
from lsrdecomp.formats.bit_packing import Codes, packed_size, unpack
from lsrdecomp.formats.quantized import CodedProduct, QuantizedMatrix, QuantizedProduct, SpectralCode
from lsrdecomp.kronecker.shape import ProductShape

Bytes = NDArray[np.uint8]
MOST_NUMBERS = 2**31
"""Of one layer: a few bytes must not ask for more memory than a machine has."""
MOST_ZEROS = 2**26
"""Of a layer without any term or component, whose numbers no byte stands behind."""


class Reader:
    """Walks through the bytes; a read beyond the end is an error, not an empty array."""

    def __init__(self, packed: Bytes) -> None:
        self.packed, self.place = packed, 0

    def take(self, count: int) -> Bytes:
        if self.place + count > self.packed.size:
            raise ValueError(f"{count} bytes are needed at byte {self.place} of {self.packed.size}")
        piece = self.packed[self.place : self.place + count]
        self.place += count
        return piece

    def scales(self, count: int) -> NDArray[np.float16]:
        values = np.frombuffer(self.take(2 * count).tobytes(), "<f2").astype(np.float16)
        if not np.isfinite(values).all():
            raise ValueError("a scale is NaN or infinite")
        return values

    def codes(self, bits: int, shape: tuple[int, ...]) -> Codes:
        return unpack(self.take(packed_size(math.prod(shape), bits)), bits, shape)


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a layer of terms, as the index gives it."""

    bits: int
    exponent: int
    terms: int
    sizes: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return 2 * self.terms + sum(packed_size(self.terms * m * n, self.bits) for m, n in self.sizes)

    def decode(self, reader: Reader) -> QuantizedMatrix:
        scales = reader.scales(self.terms)
        codes = tuple(reader.codes(self.bits, (self.terms, m, n)) for m, n in self.sizes)
        return QuantizedMatrix(codes, scales, self.exponent, self.bits)


@dataclass(frozen=True, slots=True)
class Terms:
    """A layer of terms."""

    left: Side
    right: Side
    shape: ProductShape

    @property
    def size(self) -> int:
        return self.left.size + self.right.size

    @property
    def storage(self) -> str:
        return f"int{max(self.left.bits, self.right.bits)}"

    @property
    def sides(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        return tuple((max(1, side.terms), side.sizes) for side in (self.left, self.right))

    def decode(self, reader: Reader) -> CodedProduct:
        return QuantizedProduct(self.left.decode(reader), self.right.decode(reader))


@dataclass(frozen=True, slots=True)
class Components:
    """A layer of SVD components."""

    matrix_shape: tuple[int, int]
    bits: tuple[int, ...]
    exponent: int

    @property
    def size(self) -> int:
        return sum(2 + packed_size(sum(self.matrix_shape), b) for b in self.bits)

    @property
    def storage(self) -> str:
        return SpectralCode((), (), np.zeros(0, np.float16), 0, self.bits, self.matrix_shape).storage

    @property
    def shape(self) -> ProductShape:
        return ProductShape.low_rank(self.matrix_shape, max(1, len(self.bits)))

    @property
    def sides(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        return (1, self.shape.left.factors), (1, self.shape.right.factors)

    def decode(self, reader: Reader) -> CodedProduct:
        m, n = self.matrix_shape
        scales, left, right = [np.zeros(0, np.float16)], [], []
        for b in self.bits:
            scales.append(reader.scales(1))
            pair = reader.codes(b, (m + n,))
            left.append(pair[:m])
            right.append(pair[m:])
        return SpectralCode(
            tuple(left), tuple(right), np.concatenate(scales), self.exponent, self.bits, self.matrix_shape
        )


@dataclass(frozen=True, slots=True)
class Floats:
    """A layer of factors in a floating type."""

    shape: ProductShape
    storage: str
    ranks: tuple[int, int]

    @property
    def sides(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        return (self.ranks[0], self.shape.left.factors), (self.ranks[1], self.shape.right.factors)

    @property
    def size(self) -> int:
        return self.shape.parameters(*self.ranks) * DTYPES[self.storage].itemsize

    def factors(self, numbers: Bytes) -> tuple[tuple[NDArray[Any], ...], tuple[NDArray[Any], ...]]:
        """Factors of the out side and of the in side from their bytes."""
        dtype, place, found = DTYPES[self.storage], 0, []
        for terms, sizes in self.sides:
            side = []
            for m, n in sizes:
                end = place + terms * m * n * dtype.itemsize
                stored = np.frombuffer(numbers[place:end].tobytes(), dtype.newbyteorder("<"))
                side.append(stored.astype(dtype, copy=False).reshape(terms, m, n))
                place = end
            found.append(tuple(side))
        return found[0], found[1]


Entry: TypeAlias = Terms | Components | Floats


def parse(kind: str, *entry: Any) -> Entry:
    """An entry of the index, its numbers checked; `ValueError` and its kin otherwise."""
    parsed: Entry
    if kind == "terms":
        out, inner, into, left, right = entry
        shape = ProductShape(tuple(out), tuple(inner), tuple(into))
        parsed = Terms(_side(left, shape.left.factors), _side(right, shape.right.factors), shape)
        backed = parsed.left.terms > 0 and parsed.right.terms > 0
    elif kind == "components":
        (m, n), widths, exponent = entry
        parsed = Components((m, n), tuple(_bits(b) for b in widths), _exponent(exponent))
        ProductShape.low_rank((m, n), max(1, len(parsed.bits)))
        backed = bool(parsed.bits)
    elif kind == "floats":
        out, inner, into, storage, *ranks = entry
        shape = ProductShape(tuple(out), tuple(inner), tuple(into))
        if storage not in FLOATS or len(ranks) != 2 or not all(type(rank) is int and rank > 0 for rank in ranks):
            raise ValueError(f"floats of type {str(storage)[:40]!r} and terms {str(ranks)[:40]}")
        parsed, backed = Floats(shape, storage, (ranks[0], ranks[1])), True
    else:
        raise ValueError(f"unknown kind {str(kind)[:40]!r}")
    numbers = sum(terms * m * n for terms, side in parsed.sides for m, n in side)
    if numbers > (MOST_NUMBERS if backed else MOST_ZEROS):
        raise ValueError(f"a layer of {str(numbers)[:40]} numbers")
    return parsed


def _side(entry: Any, sizes: tuple[tuple[int, int], ...]) -> Side:
    bits, exponent, terms = entry
    if type(terms) is not int or terms < 0:
        raise ValueError(f"a side of {str(terms)[:40]} terms")
    return Side(_bits(bits), _exponent(exponent), terms, sizes)


def _bits(value: Any) -> int:
    if type(value) is not int or not 2 <= value <= 8:
        raise ValueError(f"codes of {str(value)[:40]} bits")
    return value


def _exponent(value: Any) -> int:
    if type(value) is not int or abs(value) > 1100:
        raise ValueError(f"an exponent of {str(value)[:40]}")
    return value
