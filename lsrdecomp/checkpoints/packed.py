"""Layers in few bytes: the numbers of all in one tensor, their sizes in one index; the entries of each factor's own
tensor and pattern would outweigh the factors.

The tensor ``base_model.model.lsr_numbers`` holds bytes: each layer's in the order of the index,
which is a text of the config (`lsrdecomp.checkpoints.packed_index`). An entry of the index is

    ["floats", out, inner, into, type, terms of the left side, terms of the right side]
    ["terms", out, inner, into, [bits, exponent, terms] of the left side, the same of the right
    side] ["components", [m, n], [bits of each component], exponent]

The bytes of floats are its factors one after the other, little-endian, scale folded in. A side of
terms is its float16 scales, then each factor's codes, packed; a component its scale, then u and v;
`lsrdecomp.formats.quantized` says what they stand for. Files of version 0.1 have codes only, in
``lsr_packed``, after their index.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import zero_padded
from lsrdecomp.checkpoints.format import PREFIX
from lsrdecomp.checkpoints.tensors import DTYPES, FLOATS
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.formats.number_formats import Codes, pack, packed_size, unpack
from lsrdecomp.formats.quantized import (
    CodedProduct,
    QuantizedMatrix,
    QuantizedProduct,
    SpectralCode,
)
from lsrdecomp.kronecker.shape import ProductShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lsrdecomp.kronecker.separated import SeparatedProduct

NUMBERS = f"{PREFIX}lsr_numbers"
PACKED = f"{PREFIX}lsr_packed"
"""The tensor of version 0.1."""
MOST_NUMBERS = 2**31
"""Of one layer: a few bytes must not ask for more memory than a machine has."""
MOST_ZEROS = 2**26
"""Of a layer without any term or component, whose numbers no byte stands behind."""
DAMAGE = (LsrError, ValueError, TypeError, LookupError, zlib.error, RecursionError, OverflowError)
Bytes = NDArray[np.uint8]
Factors = tuple[NDArray[Any], ...]


def damaged(
    error: BaseException, what: str = "packed layers are damaged", tensor: str | None = PACKED
) -> CheckpointError:
    """What is said of bytes or of an index that cannot be read."""
    text = "".join(letter if letter.isprintable() else "?" for letter in str(error)[:300])
    return CheckpointError(f"{what}: {text}", tensor=tensor)


# One layer
# -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """What the index says of one layer, its numbers checked.

    Attributes
    ----------
    terms : (int, int)
        Of the out side and of the in side, as its factors have them: at least one.
    storage : str
        A floating type, or ``"int4"`` and the like.
    size : int
        Bytes.
    unpack : callable
        From a `Reader` of so many bytes to the factors of floats, or to codes.
    """

    shape: ProductShape
    terms: tuple[int, int]
    storage: str
    size: int
    unpack: Callable[[Reader], tuple[Factors, Factors] | CodedProduct]


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """One layer in its bytes."""

    entry: Entry
    codes: Bytes

    @property
    def factor_shapes(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """Shapes (s, m_i, r_i) of the out side and (t, r_i, n_i) of the in side, as `factors` gives them."""
        sides = self.entry.shape.left.factors, self.entry.shape.right.factors
        left, right = (
            [(terms, *size) for size in side]
            for terms, side in zip(self.entry.terms, sides, strict=True)
        )
        return left, right

    @property
    def storage(self) -> str:
        return self.entry.storage

    def factors(self) -> tuple[Factors, Factors]:
        """Factors of the out side and of the in side: floats as stored, codes in float64."""
        numbers = self._unpacked()
        return numbers if isinstance(numbers, tuple) else factors_of(numbers)

    def decode(self) -> CodedProduct:
        """The codes, unpacked. Raises `CheckpointError` if they cannot be read, or are floats."""
        numbers = self._unpacked()
        if isinstance(numbers, tuple):
            raise CheckpointError(
                "is stored in floating-point numbers, not in codes", tensor=NUMBERS
            )
        return numbers

    def _unpacked(self) -> tuple[Factors, Factors] | CodedProduct:
        try:
            return self.entry.unpack(Reader(self.codes))
        except DAMAGE as error:
            raise damaged(error) from None


def named_factors(layers: Mapping[str, PackedLayer]) -> dict[str, NDArray[Any]]:
    """The factors by the keys they would have in a file of their own, in float32 or, where stored so, float64."""
    return {
        f"{PREFIX}{name}.lsr_{side}.factor_{i}": factor.astype(
            "float64" if layer.storage == "float64" else "float32"
        )
        for name, layer in layers.items()
        for side, factors in zip("BA", layer.factors(), strict=True)
        for i, factor in enumerate(factors, 1)
    }


def factors_of(layer: CodedProduct) -> tuple[Factors, Factors]:
    """Factors (s, m_i, r_i) of the out side and (t, r_i, n_i) of the in side, in float64, weights folded in.

    As many terms as the index says, at least one: a term that rounded to zero stays, as zeros.
    """
    product: SeparatedProduct = layer.dequantized()
    terms = (
        [side.scales.size for side in (layer.left, layer.right)]
        if isinstance(layer, QuantizedProduct)
        else [1, 1]
    )
    left, right = (
        tuple(np.asarray(zero_padded(factor, 0, max(1, count))) for factor in side.folded())
        for side, count in zip((product.left, product.right), terms, strict=True)
    )
    return left, right


# Entries and bytes, written
# ------------------------------------------------------------------------------------------


def float_entry(shape: ProductShape, ranks: tuple[int, int], storage: str) -> list[Any]:
    """What the index says of a layer stored in floats."""
    return ["floats", shape.out, shape.inner, shape.into, storage, *ranks]


def code_entry(layer: CodedProduct) -> list[Any]:
    """What the index says of a layer stored in codes."""
    if isinstance(layer, QuantizedProduct):
        sides = [
            [side.bits, side.exponent, int(side.scales.size)] for side in (layer.left, layer.right)
        ]
        return ["terms", layer.shape.out, layer.shape.inner, layer.shape.into, *sides]
    return ["components", layer.matrix_shape, layer.bits, layer.exponent]


def code_bytes(layer: CodedProduct) -> Iterator[Bytes]:
    """The bytes of a layer stored in codes."""
    if isinstance(layer, QuantizedProduct):
        for side in (layer.left, layer.right):
            yield side.scales.astype("<f2").view(np.uint8)
            yield from (pack(code, side.bits) for code in side.codes)
    else:
        for u, v, scale, bits in zip(
            layer.left, layer.right, layer.scales, layer.bits, strict=True
        ):
            yield np.array([scale], "<f2").view(np.uint8)
            yield pack(np.concatenate([u, v]), bits)


# and read
# ------------------------------------------------------------------------------------------------------------


def parse(kind: str, *entry: Any) -> Entry:
    """An entry of the index, its numbers checked; `ValueError` and its kin otherwise."""
    parsers: dict[str, Callable[..., tuple[Entry, bool]]] = {
        "floats": _float_entry,
        "terms": _terms_entry,
        "components": _components_entry,
    }
    if kind not in parsers:
        raise ValueError(f"unknown kind {str(kind)[:40]!r}")
    parsed, backed = parsers[kind](*entry)
    numbers = parsed.shape.parameters(*parsed.terms)
    if numbers > (MOST_NUMBERS if backed else MOST_ZEROS):
        raise ValueError(f"a layer of {str(numbers)[:40]} numbers")
    return parsed


def _float_entry(out: Any, inner: Any, into: Any, storage: Any, *terms: Any) -> tuple[Entry, bool]:
    if (
        storage not in FLOATS
        or len(terms) != 2
        or not all(type(count) is int and count > 0 for count in terms)
    ):
        raise ValueError(f"floats of type {str(storage)[:40]!r} and terms {str(list(terms))[:40]}")
    shape = ProductShape(tuple(out), tuple(inner), tuple(into))
    size = shape.parameters(*terms) * DTYPES[storage].itemsize
    return Entry(
        shape, (terms[0], terms[1]), storage, size, partial(_read_floats, shape, terms, storage)
    ), True


def _read_floats(
    shape: ProductShape, terms: tuple[int, int], storage: str, reader: Reader
) -> tuple[Factors, Factors]:
    left, right = (
        tuple(reader.floats(storage, (count, *size)) for size in side.factors)
        for count, side in zip(terms, (shape.left, shape.right), strict=True)
    )
    return left, right


def _terms_entry(out: Any, inner: Any, into: Any, left: Any, right: Any) -> tuple[Entry, bool]:
    shape = ProductShape(tuple(out), tuple(inner), tuple(into))
    sides, size = [], 0
    for (bits, exponent, terms), matrix in ((left, shape.left), (right, shape.right)):
        if type(terms) is not int or terms < 0:
            raise ValueError(f"a side of {str(terms)[:40]} terms")
        sides.append((_bits(bits), _exponent(exponent), terms, matrix.factors))
        size += 2 * terms + sum(packed_size(terms * m * n, bits) for m, n in matrix.factors)
    counts, storage = [terms for _, _, terms, _ in sides], f"int{max(bits for bits, *_ in sides)}"
    at_least_one = max(1, counts[0]), max(1, counts[1])
    return Entry(shape, at_least_one, storage, size, partial(_read_terms, sides)), min(counts) > 0


def _read_terms(sides: Sequence[tuple[int, int, int, Any]], reader: Reader) -> QuantizedProduct:
    matrices = []
    for bits, exponent, terms, sizes in sides:
        scales = reader.scales(terms)
        codes = tuple(reader.codes(bits, (terms, m, n)) for m, n in sizes)
        matrices.append(QuantizedMatrix(codes, scales, exponent, bits))
    return QuantizedProduct(*matrices)


def _components_entry(sizes: Any, bits: Any, exponent: Any) -> tuple[Entry, bool]:
    m, n = sizes
    empty = SpectralCode(
        (), (), np.zeros(0, np.float16), _exponent(exponent), tuple(map(_bits, bits)), (m, n)
    )
    shape = ProductShape.low_rank((m, n), max(1, len(empty.bits)))
    size = sum(2 + packed_size(m + n, width) for width in empty.bits)
    return Entry(shape, (1, 1), empty.storage, size, partial(_read_components, empty)), bool(
        empty.bits
    )


def _read_components(empty: SpectralCode, reader: Reader) -> SpectralCode:
    m, n = empty.matrix_shape
    scales, left, right = [np.zeros(0, np.float16)], [], []
    for bits in empty.bits:
        scales.append(reader.scales(1))
        pair = reader.codes(bits, (m + n,))
        left.append(pair[:m])
        right.append(pair[m:])
    return replace(empty, left=tuple(left), right=tuple(right), scales=np.concatenate(scales))


def _bits(value: Any) -> int:
    if type(value) is not int or not 2 <= value <= 8:
        raise ValueError(f"codes of {str(value)[:40]} bits")
    return value


def _exponent(value: Any) -> int:
    if type(value) is not int or abs(value) > 1100:
        raise ValueError(f"an exponent of {str(value)[:40]}")
    return value


class Reader:
    """Walks through the bytes; a read beyond the end is an error, not an empty array."""

    def __init__(self, packed: Bytes) -> None:
        self.packed, self.position = packed, 0

    def take(self, count: int) -> bytes:
        if self.position + count > self.packed.size:
            raise ValueError(
                f"{count} bytes are needed at byte {self.position} of {self.packed.size}"
            )
        piece = self.packed[self.position : self.position + count]
        self.position += count
        return piece.tobytes()

    def integer(self) -> int:
        """In bytes of seven bits."""
        value = shift = 0
        while (byte := self.take(1)[0]) > 127:
            value, shift = value | (byte & 127) << shift, shift + 7
            if shift > 56:
                raise ValueError("an integer of more than eight bytes")
        return value | byte << shift

    def floats(self, storage: str, shape: tuple[int, ...]) -> NDArray[Any]:
        dtype = DTYPES[storage]
        stored = np.frombuffer(
            self.take(math.prod(shape) * dtype.itemsize), dtype.newbyteorder("<")
        )
        return stored.astype(dtype, copy=False).reshape(shape)

    def scales(self, count: int) -> NDArray[np.float16]:
        values = np.frombuffer(self.take(2 * count), "<f2").astype(np.float16)
        if not np.isfinite(values).all():
            raise ValueError("a scale is NaN or infinite")
        return values

    def codes(self, bits: int, shape: tuple[int, ...]) -> Codes:
        return unpack(
            np.frombuffer(self.take(packed_size(math.prod(shape), bits)), np.uint8), bits, shape
        )
