"""Encodings of stored layers in an LSR directory: entries of the index, and bytes.

`ENCODINGS` is the table of all structures; a new one gets a row at its end. Where index and bytes
themselves stand is said in `lsrdecomp.lora.files.packed` and `lsrdecomp.lora.files.packed_index`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from lsrdecomp.errors import UnsupportedError
from lsrdecomp.formats.number_formats import (
    MAX_STEP_EXPONENT,
    STEPS_PER_OCTAVE,
    pack,
    pack_digits,
    packed_digits_size,
    packed_size,
    step_count,
)
from lsrdecomp.formats.quantized import (
    QuantizedMatrix,
    QuantizedProduct,
    SpectralCode,
    split_level,
)
from lsrdecomp.formats.stored import FloatProduct, Stored, product_label
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.lora.files.format import PREFIX
from lsrdecomp.lora.files.packed import Bytes, IndexEntry, Reader
from lsrdecomp.lora.files.tensors import DTYPES, FLOATS, cast, little_endian_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

Structure = tuple[int, ...]
"""An entry as integers from 0 on, without its exponents: layers that differ in their numbers alone
have the same."""
PACKED_NUMBERS = 2**31
"""Numbers of the factors of one packed layer."""
UNSTORED_NUMBERS = 2**26
"""The same where factors hold numbers, such as zeros, that no byte was stored for."""
MAX_EXPONENT = 1100
"""Largest power of two of a scale, or of its inverse: beyond it no double is left."""
MAX_GROUP_POWER = 20
GROUP_SIZES = frozenset(2**power for power in range(MAX_GROUP_POWER + 1))
"""Numbers that may share a step in codes with groups."""
Exponents = tuple[int, ...]


class IntegerReader(Protocol):
    """Reads the integers of an index, one after the other."""

    def integer(self) -> int:
        """Read an integer from 0 on."""

    def integers(self, count: int) -> list[int]:
        """Read a number of them."""


MakeEntry = Callable[..., list[Any]]
"""Makes an entry of its exponents."""


class Encoding(ABC):
    """One structure in an LSR directory: what the index says of a layer, and the layer's bytes.

    An entry is a list of plain values, such as sizes and names of types, from which `parse` makes
    an `IndexEntry`. Entries come from files: whatever they hold, `parse` and `read_structure`
    return or raise `ValueError` and its kin.
    """

    kind: ClassVar[str]  # the word with which entries begin
    stored_type: ClassVar[type[Stored]]

    def writes(self, stored: Stored) -> bool:
        """Return whether layers such as this one are written in this encoding."""
        return isinstance(stored, self.stored_type)

    @abstractmethod
    def entry(self, stored: Any) -> list[Any]:
        """Return what the index says of a layer, after the kind."""

    @abstractmethod
    def pieces(self, stored: Any, name: str) -> Iterator[Bytes]:
        """Yield the bytes of a layer; ``name`` is for errors."""

    @abstractmethod
    def parse(self, *entry: Any) -> IndexEntry:
        """Check an entry and return how the layer is read."""

    @abstractmethod
    def structure(self, *entry: Any) -> tuple[Structure, Exponents]:
        """Split an entry into integers from 0 on and exponents of either sign."""

    @abstractmethod
    def read_structure(
        self, reader: IntegerReader, matrix_shape: tuple[int, int]
    ) -> tuple[MakeEntry, int]:
        """Read the integers that `structure` gave, of a layer of this size.

        Returns
        -------
        callable
            Makes the entry of the exponents.
        int
            How many exponents there are.
        """


class FloatEncoding(Encoding):
    """Factors in a floating type, one after the other, little-endian, weights folded in.

    Its entry is ``out, inner, into, type, terms of the out side, terms of the in side``.
    """

    kind = "floats"
    stored_type = FloatProduct

    def entry(self, stored: FloatProduct) -> list[Any]:
        """Return the entry of a layer."""
        shape = stored.shape
        return [shape.out, shape.inner, shape.into, stored.storage, *stored.terms]

    def pieces(self, stored: FloatProduct, name: str) -> Iterator[Bytes]:
        """Yield the bytes of a layer."""
        for side, factors in (("B", stored.left), ("A", stored.right)):
            for position, factor in enumerate(factors, 1):
                key = f"{PREFIX}{name}.lsr_{side}.factor_{position}"
                yield little_endian_bytes(cast(factor, stored.storage, key))

    def parse(self, *entry: Any) -> IndexEntry:
        """Check an entry and return how the layer is read."""
        out, inner, into, storage, *terms = entry
        are_counts = len(terms) == 2 and all(type(count) is int and count > 0 for count in terms)
        if storage not in FLOATS or not are_counts:
            raise ValueError(
                f"floats of type {str(storage)[:40]!r} and terms {str(list(terms))[:40]}"
            )
        shape = ProductShape(tuple(out), tuple(inner), tuple(into))
        size = shape.parameters(*terms) * DTYPES[storage].itemsize
        read = partial(self._read, shape, terms, storage)
        return product_entry(shape, (terms[0], terms[1]), storage, size, read)

    def _read(
        self, shape: ProductShape, terms: Sequence[int], storage: str, reader: Reader
    ) -> FloatProduct:
        left, right = (
            tuple(reader.floats(storage, (count, *size)) for size in side.factors)
            for count, side in zip(terms, (shape.left, shape.right), strict=True)
        )
        return FloatProduct(left, right, storage)

    def structure(self, *entry: Any) -> tuple[Structure, Exponents]:
        """Split an entry into integers from 0 on and exponents."""
        out, inner, into, storage, *terms = entry
        return (len(out), *out, *inner, *into, FLOATS.index(storage), *terms), ()

    def read_structure(
        self, reader: IntegerReader, _matrix_shape: tuple[int, int]
    ) -> tuple[MakeEntry, int]:
        """Read the integers that `structure` gave."""
        sizes = _read_sizes(reader)
        storage = FLOATS[reader.integer()]
        terms = reader.integers(2)
        return (lambda: [*sizes, storage, *terms]), 0


class TermsEncoding(Encoding):
    """Terms in integer codes: of each side the float16 scales, then the codes of each factor.

    Its entry is ``out, inner, into, [bits, exponent, terms] of the out side, the same of the in
    side``.
    """

    kind = "terms"
    stored_type = QuantizedProduct

    def writes(self, stored: Stored) -> bool:
        """Return whether it is a product with scales in float16."""
        if not isinstance(stored, QuantizedProduct):
            return False
        return not (stored.left.has_byte_scales or stored.right.has_byte_scales)

    def entry(self, stored: QuantizedProduct) -> list[Any]:
        """Return the entry of a layer."""
        shape = stored.shape
        sides = [
            [side.bits, side.exponent, int(side.scales.size)]
            for side in (stored.left, stored.right)
        ]
        return [shape.out, shape.inner, shape.into, *sides]

    def pieces(self, stored: QuantizedProduct, _name: str) -> Iterator[Bytes]:
        """Yield the bytes of a layer."""
        for side in (stored.left, stored.right):
            yield little_endian_bytes(side.scales)
            for codes in side.codes:
                yield pack(codes, side.bits)

    def parse(self, *entry: Any) -> IndexEntry:
        """Check an entry and return how the layer is read."""
        out, inner, into, left, right = entry
        shape = ProductShape(tuple(out), tuple(inner), tuple(into))
        sides = []
        counts = []
        widths = []
        size = 0
        for (bits, exponent, terms), matrix in ((left, shape.left), (right, shape.right)):
            if type(terms) is not int or terms < 0:
                raise ValueError(f"a side of {str(terms)[:40]} terms")
            sides.append((_bits(bits), _exponent(exponent), terms, matrix.factors))
            counts.append(terms)
            widths.append(bits)
            size += 2 * terms + sum(packed_size(terms * m * n, bits) for m, n in matrix.factors)
        terms = max(1, counts[0]), max(1, counts[1])
        read = partial(self._read, sides)
        parsed = product_entry(shape, terms, f"int{max(widths)}", size, read)
        return replace(parsed, has_unstored=min(counts) == 0)

    def _read(self, sides: Sequence[tuple[int, int, int, Any]], reader: Reader) -> QuantizedProduct:
        matrices = []
        for bits, exponent, terms, sizes in sides:
            scales = reader.scales(terms)
            codes = tuple(reader.codes(bits, (terms, m, n)) for m, n in sizes)
            matrices.append(QuantizedMatrix(codes, scales, exponent, bits))
        return QuantizedProduct(*matrices)

    def structure(self, *entry: Any) -> tuple[Structure, Exponents]:
        """Split an entry into integers from 0 on and exponents."""
        out, inner, into, left, right = entry
        left_bits, left_exponent, left_terms = left
        right_bits, right_exponent, right_terms = right
        sizes = (len(out), *out, *inner, *into)
        structure = (*sizes, left_bits, left_terms, right_bits, right_terms)
        return structure, (left_exponent, right_exponent)

    def read_structure(
        self, reader: IntegerReader, _matrix_shape: tuple[int, int]
    ) -> tuple[MakeEntry, int]:
        """Read the integers that `structure` gave."""
        sizes = _read_sizes(reader)
        left_bits, left_terms, right_bits, right_terms = reader.integers(4)

        def entry(left_exponent: int, right_exponent: int) -> list[Any]:
            left = [left_bits, left_exponent, left_terms]
            right = [right_bits, right_exponent, right_terms]
            return [*sizes, left, right]

        return entry, 2


class JoinedTermsEncoding(Encoding):
    """Joined terms in integer codes: scales of one byte but each side's first, then one run.

    The run are the codes of all factors of the out side, then those of the in side. The first
    scales are in the level, see `lsrdecomp.formats.quantized.QuantizedProduct`. Its entry is
    ``out, inner, into, bits, terms of the out side, terms of the in side, level``.
    """

    kind = "joined terms"
    stored_type = QuantizedProduct

    def writes(self, stored: Stored) -> bool:
        """Return whether it is a joined product."""
        return isinstance(stored, QuantizedProduct) and stored.is_joined

    def entry(self, stored: QuantizedProduct) -> list[Any]:
        """Return the entry of a layer."""
        shape = stored.shape
        bits = stored.left.bits
        return [shape.out, shape.inner, shape.into, bits, *stored.terms, stored.level]

    def pieces(self, stored: QuantizedProduct, _name: str) -> Iterator[Bytes]:
        """Yield the bytes of a layer."""
        for side in (stored.left, stored.right):
            scales = side.scales.astype(np.uint8)
            yield scales[1:] - scales[0]
        codes = [code.reshape(-1) for code in (*stored.left.codes, *stored.right.codes)]
        yield pack_digits(np.concatenate(codes), stored.left.bits)

    def parse(self, *entry: Any) -> IndexEntry:
        """Check an entry and return how the layer is read."""
        out, inner, into, bits, left_terms, right_terms, level = entry
        terms = left_terms, right_terms
        if not all(type(count) is int and count > 0 for count in terms):
            raise ValueError(f"terms {str(list(terms))[:40]}")
        if type(level) is not int or abs(level) > STEPS_PER_OCTAVE * MAX_EXPONENT:
            raise ValueError(f"a level of {str(level)[:40]}")
        shape = ProductShape(tuple(out), tuple(inner), tuple(into))
        n_codes = shape.parameters(*terms)
        _check_numbers(n_codes, PACKED_NUMBERS)
        size = sum(terms) - 2 + packed_digits_size(n_codes, _bits(bits))
        read = partial(self._read, shape, terms, bits, level)
        return product_entry(shape, terms, f"int{bits}", size, read)

    def _read(
        self, shape: ProductShape, terms: tuple[int, int], bits: int, level: int, reader: Reader
    ) -> QuantizedProduct:
        left_exponent, first_step, right_exponent = split_level(level)
        left_scales = self._scales(reader, terms[0], first_step)
        right_scales = self._scales(reader, terms[1], 0)
        n_codes = shape.parameters(*terms)
        run = reader.digits(bits, n_codes)
        sides = []
        begin = 0
        for count, matrix in zip(terms, (shape.left, shape.right), strict=True):
            factors = []
            for m, n in matrix.factors:
                end = begin + count * m * n
                factors.append(run[begin:end].reshape(count, m, n))
                begin = end
            sides.append(tuple(factors))
        return QuantizedProduct(
            QuantizedMatrix(sides[0], left_scales, left_exponent, bits),
            QuantizedMatrix(sides[1], right_scales, right_exponent, bits),
        )

    def _scales(self, reader: Reader, count: int, first_step: int) -> NDArray[np.uint8]:
        steps = np.frombuffer(b"\0" + reader.take(count - 1), np.uint8)
        if int(steps.max()) + first_step > MAX_STEP_EXPONENT:
            raise ValueError(f"a scale of {int(steps.max())} sixteenths of an octave")
        return steps + np.uint8(first_step)

    def structure(self, *entry: Any) -> tuple[Structure, Exponents]:
        """Split an entry into integers from 0 on and exponents.

        The last sizes of both sides are left out: they follow from the size of the layer.
        """
        out, inner, into, bits, left_terms, right_terms, level = entry
        # What differs most comes last: the index stores what structures begin with alike once.
        sizes = (*inner, *into[:-1], *out[:-1])
        return (len(out), bits, *sizes, left_terms, right_terms), (level,)

    def read_structure(
        self, reader: IntegerReader, matrix_shape: tuple[int, int]
    ) -> tuple[MakeEntry, int]:
        """Read the integers that `structure` gave."""
        order = reader.integer()
        if order < 1:
            raise ValueError("a product without factors")
        bits = reader.integer()
        inner = reader.integers(order)
        into = reader.integers(order - 1)
        out = reader.integers(order - 1)
        rows, columns = matrix_shape
        out = [*out, rows // max(1, math.prod(out))]
        into = [*into, columns // max(1, math.prod(into))]
        terms = reader.integers(2)
        return (lambda level: [out, inner, into, bits, *terms, level]), 1


class GroupsEncoding(Encoding):
    """Singular components in integer codes with a step for each group of numbers.

    Each is a float16 scale, a byte for each group of u and each of v, then the codes of u and v.
    Its entry is ``[m, n], [bits of each component], [numbers in a group of each], exponent``.
    """

    kind = "groups"
    stored_type = SpectralCode

    def entry(self, stored: SpectralCode) -> list[Any]:
        """Return the entry of a layer."""
        return [stored.matrix_shape, stored.bits, stored.groups, stored.exponent]

    def pieces(self, stored: SpectralCode, _name: str) -> Iterator[Bytes]:
        """Yield the bytes of a layer."""
        for k, bits in enumerate(stored.bits):
            yield little_endian_bytes(stored.scales[k : k + 1])
            yield stored.steps[k]
            yield pack(np.concatenate([stored.left[k], stored.right[k]]), bits)

    def parse(self, *entry: Any) -> IndexEntry:
        """Check an entry and return how the layer is read."""
        (m, n), bits, groups, exponent = entry
        widths = tuple(map(_bits, bits))
        sizes = tuple(map(_group, groups))
        if len(sizes) != len(widths):
            raise ValueError(f"{len(widths)} widths and {len(sizes)} groups")
        no_scales = np.zeros(0, np.float16)
        empty = SpectralCode((), (), no_scales, _exponent(exponent), widths, (m, n), sizes, ())
        size = 0
        for width, group in zip(widths, sizes, strict=True):
            steps = step_count(m, group) + step_count(n, group)
            size += 2 + steps + packed_size(m + n, width)
        read = partial(self._read, empty)
        parsed = product_entry(empty.shape, empty.terms, empty.storage, size, read)
        return replace(parsed, has_unstored=not widths)

    def _read(self, empty: SpectralCode, reader: Reader) -> SpectralCode:
        m, n = empty.matrix_shape
        scales = [np.zeros(0, np.float16)]
        steps = []
        left = []
        right = []
        for bits, group in zip(empty.bits, empty.groups, strict=True):
            scales.append(reader.scales(1))
            n_steps = step_count(m, group) + step_count(n, group)
            steps.append(np.frombuffer(reader.take(n_steps), np.uint8))
            pair = reader.codes(bits, (m + n,))
            left.append(pair[:m])
            right.append(pair[m:])
        return replace(
            empty,
            left=tuple(left),
            right=tuple(right),
            scales=np.concatenate(scales),
            steps=tuple(steps),
        )

    def structure(self, *entry: Any) -> tuple[Structure, Exponents]:
        """Split an entry into integers from 0 on and exponents."""
        (m, n), bits, groups, exponent = entry
        powers = [group.bit_length() - 1 for group in groups]
        return (m, n, len(bits), *bits, *powers), (exponent,)

    def read_structure(
        self, reader: IntegerReader, _matrix_shape: tuple[int, int]
    ) -> tuple[MakeEntry, int]:
        """Read the integers that `structure` gave."""
        sizes = reader.integers(2)
        count = reader.integer()
        bits = reader.integers(count)
        powers = reader.integers(count)
        if any(power > MAX_GROUP_POWER for power in powers):
            raise ValueError(f"groups of 2^{max(powers)} numbers")
        groups = [2**power for power in powers]
        return (lambda exponent: [sizes, bits, groups, exponent]), 1


ENCODINGS: dict[int, Encoding] = {
    0: FloatEncoding(),
    1: TermsEncoding(),
    3: GroupsEncoding(),
    5: JoinedTermsEncoding(),
}
"""Every structure that is written and read, by its number in the index. A new one gets the next
number; 2 and 4 were those of structures before version 0.5."""


# -- what the index and the writer ask of the table ------------------------------------------------


def encoding_of(stored: Stored) -> Encoding:
    """Return the row of `ENCODINGS` for a stored layer; `UnsupportedError` if there is none."""
    for encoding in ENCODINGS.values():
        if encoding.writes(stored):
            return encoding
    raise UnsupportedError(f"{type(stored).__name__} has no row in ENCODINGS, so it is not written")


def entry_of(stored: Stored) -> list[Any]:
    """Return what the index says of a layer, its kind first."""
    encoding = encoding_of(stored)
    return [encoding.kind, *encoding.entry(stored)]


def bytes_of(stored: Stored, name: str = "layer") -> Iterator[Bytes]:
    """Yield the bytes of a layer; `CheckpointError` with its name if a number does not fit."""
    return encoding_of(stored).pieces(stored, name)


def parse(kind: str, *entry: Any) -> IndexEntry:
    """Return an entry of the index with its numbers checked; `ValueError` and its kin otherwise."""
    for encoding in ENCODINGS.values():
        if encoding.kind == kind:
            parsed = encoding.parse(*entry)
            break
    else:
        raise ValueError(f"unknown kind {str(kind)[:40]!r}")
    allowed = UNSTORED_NUMBERS if parsed.has_unstored else PACKED_NUMBERS
    _check_numbers(parsed.shape.parameters(*parsed.terms), allowed)
    return parsed


def structure_of(kind: str, *entry: Any) -> tuple[Structure, Exponents]:
    """Return an entry as integers, its kind first, and its exponents."""
    for number, encoding in ENCODINGS.items():
        if encoding.kind == kind:
            structure, exponents = encoding.structure(*entry)
            return (number, *structure), exponents
    raise ValueError(f"unknown kind {str(kind)[:40]!r}")


def read_structure(reader: IntegerReader, matrix_shape: tuple[int, int]) -> tuple[MakeEntry, int]:
    """Read the integers that `structure_of` gave.

    Parameters
    ----------
    reader : IntegerReader
    matrix_shape : (int, int)
        Size of the layers that have the structure.

    Returns
    -------
    callable
        Makes the entry of the exponents.
    int
        How many exponents there are.
    """
    number = reader.integer()
    if number not in ENCODINGS:
        raise ValueError(f"structure {str(number)[:40]} of the index is of another version")
    encoding = ENCODINGS[number]
    make_entry, exponents = encoding.read_structure(reader, matrix_shape)
    return (lambda *values: [encoding.kind, *make_entry(*values)]), exponents


# -- what rows are made of -------------------------------------------------------------------------


def product_entry(
    shape: ProductShape,
    terms: tuple[int, int],
    storage: str,
    size: int,
    read: Callable[[Reader], Stored],
) -> IndexEntry:
    """Return the entry of a layer that is stored as the factors of its product."""
    parameters = shape.parameters(*terms)
    return IndexEntry(shape, terms, storage, size, parameters, product_label(shape, terms), read)


def _check_numbers(numbers: int, allowed: int) -> None:
    """Refuse a layer of more numbers than memory should be taken for."""
    if numbers > allowed:
        raise ValueError(f"a layer of {str(numbers)[:40]} numbers")


def _read_sizes(reader: IntegerReader) -> list[list[int]]:
    """Read the sizes of the out side, of the inner rank and of the in side."""
    order = reader.integer()
    return [reader.integers(order) for _ in range(3)]


def _bits(value: Any) -> int:
    if type(value) is not int or not 2 <= value <= 8:
        raise ValueError(f"codes of {str(value)[:40]} bits")
    return value


def _group(value: Any) -> int:
    if type(value) is not int or value not in GROUP_SIZES:
        raise ValueError(f"groups of {str(value)[:40]} numbers")
    return value


def _exponent(value: Any) -> int:
    if type(value) is not int or abs(value) > MAX_EXPONENT:
        raise ValueError(f"an exponent of {str(value)[:40]}")
    return value
