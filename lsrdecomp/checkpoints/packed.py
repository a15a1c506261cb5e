"""Layers in few bytes: the numbers of all in one tensor, their sizes in one index; the entries of each factor's own
tensor and pattern would outweigh the factors.

The tensor ``base_model.model.lsr_numbers`` holds bytes: each layer's in the order of the index. The index is the field
``layers`` of adapter_config.json, so that PEFT knows all sizes before it opens the weights: ``"3:"`` and base85 of raw
deflate of integers, each in bytes of seven bits, low ones first, a high bit for "more" (zigzag where negative ones
occur), then two texts in UTF-8:

    whether target_modules names more than these layers · number of layers · of structures · bytes of the first text
    of each layer its module, of each the step of its block from the layer before, of each its structure
    each structure, as `_structure` lays it out; the exponents of each layer
    modules: a line each, a zero character where the number of the block stands; JSON of kinds that are not linear

A structure is an entry without its exponents; an entry is

    ["floats", out, inner, into, type, terms of the left side, terms of the right side]
    ["terms", out, inner, into, [bits, exponent, terms] of the left side, the same of the right side]
    ["components", [m, n], [bits of each component], exponent]

Version 0.2 wrote base64 of zlib-compressed JSON, ``{"version": 2, "layers": [[name, *entry], …], "kinds": {name:
[kind, kernel]}, "dropped": [name, …], "exact": true}``, the last three where they say something.

The bytes of floats are its factors one after the other, little-endian, scale folded in. A side of terms is its float16
scales, then each factor's codes, packed; a component its scale, then u and v; `lsrdecomp.formats.quantized` says what
they stand for. Files of version 0.1 have codes only, in ``lsr_packed``: the length of their index as four little-endian
bytes, the index as a zlib-compressed list of entries, then the codes.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import zero_padded
from lsrdecomp.checkpoints.config import exact_pattern
from lsrdecomp.checkpoints.format import PREFIX
from lsrdecomp.checkpoints.records import Checkpoint
from lsrdecomp.checkpoints.safetensors import read_header
from lsrdecomp.checkpoints.tensors import DTYPES, FLOATS, check_name
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.formats.bit_packing import Codes, pack, packed_size, unpack
from lsrdecomp.formats.quantized import CodedProduct, QuantizedMatrix, QuantizedProduct, SpectralCode
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.shape import ProductShape

NUMBERS = f"{PREFIX}lsr_numbers"
FIELD = "layers"
PACKED = f"{PREFIX}lsr_packed"
"""The tensor of version 0.1."""
VERSION, MARK = 2, "3:"
"""Of the index: the last that was JSON, and how one begins that is not."""
KINDS = ("floats", "terms", "components")
BLOCK = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,3})(?=\.)")
"""The number of a block in the name of a layer."""
LONGEST_INDEX = 16 * 2**20
MOST_NUMBERS = 2**31
"""Of one layer: a few bytes must not ask for more memory than a machine has."""
MOST_ZEROS = 2**26
"""Of a layer without any term or component, whose numbers no byte stands behind."""
DAMAGE = (LsrError, ValueError, TypeError, LookupError, zlib.error, RecursionError, OverflowError)
Bytes = NDArray[np.uint8]
Factors = tuple[NDArray[Any], ...]


# The index in a config -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Index:
    """What adapter_config.json says of packed layers."""

    entries: Mapping[str, Entry]
    kinds: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # of layers that are not linear
    dropped: tuple[str, ...] = ()  # layers of the source that were left out on purpose, where version 0.2 wrote it
    exact: bool = False  # target_modules of the config names more than these layers, or nothing

    def config_fields(self) -> dict[str, Any]:
        """The fields of an `lsrdecomp.adapters.LsrConfig` that say the same, a pattern for every layer."""
        patterns = {exact_pattern(name): entry for name, entry in self.entries.items()}
        ranks = {key: entry.shape.inner_rank for key, entry in patterns.items()}
        fields: dict[str, Any] = {
            "rank_pattern": ranks,
            "alpha_pattern": dict(ranks),
            "separation_rank_pattern": {key: list(entry.terms) for key, entry in patterns.items()},
            "shape_pattern": {key: splits(entry.shape) for key, entry in patterns.items()},
        }
        return fields | ({"target_modules": sorted(self.entries)} if self.exact else {})

    def layers(self, numbers: Bytes) -> dict[str, PackedLayer]:
        """The layers with their bytes, not yet unpacked. Raises `CheckpointError` for another number of bytes."""
        return _sliced(self.entries, numbers, 0, NUMBERS)


def splits(shape: ProductShape) -> dict[str, list[int]]:
    """A shape as ``shape_pattern`` has it."""
    return {"out": list(shape.out), "inner": list(shape.inner), "into": list(shape.into)}


def index_text(
    entries: Mapping[str, Sequence[Any]],
    kinds: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
    exact: bool = False,
) -> str:
    """The field ``layers`` of adapter_config.json."""
    modules: dict[str, int] = {}
    structures: dict[tuple[int, ...], int] = {}
    columns: tuple[list[int], ...] = ([], [], [], [])
    before = 0
    for name, entry in entries.items():
        number = BLOCK.search(name)
        block = before if number is None else int(number[0])
        module = name if number is None else f"{name[: number.start()]}\0{name[number.end() :]}"
        structure, exponents = _structure(entry)
        columns[0].append(modules.setdefault(module, len(modules)))
        columns[1].append(_zigzag(block - before))
        columns[2].append(structures.setdefault(structure, len(structures)))
        columns[3].extend(map(_zigzag, exponents))
        before = block
    text = "\n".join(modules).encode()
    counts = (int(exact), len(entries), len(structures), len(text))
    laid_out = [value for structure in structures for value in structure]
    integers = [*counts, *columns[0], *columns[1], *columns[2], *laid_out, *columns[3]]
    content = _in_sevens(integers) + text + (json.dumps(dict(kinds), separators=(",", ":")).encode() if kinds else b"")
    deflate = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    return MARK + base64.b85encode(deflate.compress(content) + deflate.flush()).decode()


def read_index(text: Any) -> Index:
    """The index in a config; `CheckpointError` for a text that no release wrote."""
    try:
        if isinstance(text, str) and text.startswith(MARK):
            squeezed = base64.b85decode(text.removeprefix(MARK))
            return _laid_out(zlib.decompressobj(-zlib.MAX_WBITS).decompress(squeezed, LONGEST_INDEX))
        raw = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), LONGEST_INDEX)
        index = json.loads(raw)
        if index["version"] != VERSION:
            raise CheckpointError(f"version {str(index['version'])[:40]}, this release reads {VERSION} and {MARK[0]}")
        dropped = tuple(str(name) for name in index.get("dropped", ()))
        return Index(_entries(index["layers"]), _kinds(index.get("kinds", {})), dropped, index.get("exact") is True)
    except (*DAMAGE, AttributeError, binascii.Error) as error:
        raise _damaged(error, f"the index of packed layers ({FIELD}) is damaged", None) from None


def _laid_out(content: bytes) -> Index:
    """The index in the bytes that `index_text` wrote."""
    reader = Reader(np.frombuffer(content, np.uint8))
    exact, layers, structures, length = (reader.integer() for _ in range(4))
    if max(layers, structures, length) > len(content):
        raise ValueError(f"{layers} layers of {structures} structures in {len(content)} bytes")
    module_of, steps, structure_of = ([reader.integer() for _ in range(layers)] for _ in range(3))
    entry_of = [_read_structure(reader) for _ in range(structures)]
    entries, block = [], 0
    spans = [
        (structure, [_unzigzag(reader.integer()) for _ in range(entry_of[structure][1])]) for structure in structure_of
    ]
    modules = reader.take(length).decode().split("\n")
    for module, step, (structure, exponents) in zip(module_of, steps, spans, strict=True):
        block += _unzigzag(step)
        entries.append([modules[module].replace("\0", str(block)), *entry_of[structure][0](*exponents)])
    kinds = content[reader.position :]
    return Index(_entries(entries), _kinds(json.loads(kinds) if kinds else {}), (), bool(exact))


def _structure(entry: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """An entry as integers of its own: structure and exponents."""
    kind, *rest = entry
    if kind == "components":
        (m, n), bits, exponent = rest
        return (KINDS.index(kind), m, n, len(bits), *bits), (exponent,)
    out, inner, into, *rest = rest
    sizes = (KINDS.index(kind), len(out), *out, *inner, *into)
    if kind == "floats":
        storage, s, t = rest
        return (*sizes, FLOATS.index(storage), s, t), ()
    left, right = rest
    return (*sizes, left[0], left[2], right[0], right[2]), (left[1], right[1])


def _read_structure(reader: Reader) -> tuple[Callable[..., list[Any]], int]:
    """What makes an entry of its exponents, and how many these are."""

    def integers(count: int) -> list[int]:
        if count > reader.packed.size:
            raise ValueError(f"{count} integers in {reader.packed.size} bytes")
        return [reader.integer() for _ in range(count)]

    kind = KINDS[reader.integer()]
    if kind == "components":
        sizes, bits = integers(2), integers(reader.integer())
        return (lambda exponent: [kind, sizes, bits, exponent]), 1
    order = reader.integer()
    out, inner, into = integers(order), integers(order), integers(order)
    if kind == "floats":
        storage, s, t = FLOATS[reader.integer()], *integers(2)
        return (lambda: [kind, out, inner, into, storage, s, t]), 0
    bits_left, s, bits_right, t = integers(4)
    return (lambda left, right: [kind, out, inner, into, [bits_left, left, s], [bits_right, right, t]]), 2


def _in_sevens(integers: Iterable[int]) -> bytes:
    """Integers from 0 on, each in bytes of seven bits."""
    content = bytearray()
    for value in integers:
        while value > 127:
            content.append(value & 127 | 128)
            value >>= 7
        content.append(value)
    return bytes(content)


def _zigzag(value: int) -> int:
    return 2 * value if value >= 0 else -2 * value - 1


def _unzigzag(value: int) -> int:
    return value // 2 if value % 2 == 0 else -(value + 1) // 2


def _kinds(listed: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {str(name): (str(kind), tuple(int(side) for side in kernel)) for name, (kind, kernel) in listed.items()}


def read_packed(packed: Bytes) -> dict[str, PackedLayer]:
    """The layers of the tensor that version 0.1 wrote, their codes not yet unpacked."""
    try:
        length = int.from_bytes(packed[:4].tobytes(), "little")
        index = json.loads(zlib.decompressobj().decompress(packed[4 : 4 + length].tobytes(), LONGEST_INDEX))
        entries = _entries(index)
    except DAMAGE as error:
        raise _damaged(error) from None
    return _sliced(entries, packed, 4 + length, PACKED)


def _entries(listed: Sequence[Any]) -> dict[str, Entry]:
    entries = {str(name): parse(*entry) for name, *entry in listed}
    if len(entries) != len(listed):
        raise CheckpointError("a layer is listed twice")
    for name in entries:
        check_name(name, Path(FIELD))
    return entries


def _sliced(entries: Mapping[str, Entry], numbers: Bytes, begin: int, tensor: str) -> dict[str, PackedLayer]:
    end = begin + sum(entry.size for entry in entries.values())
    if end != numbers.size:
        text = f"{end} of {numbers.size} bytes belong to {len(entries)} layers"
        raise CheckpointError(f"packed layers are damaged: {text}", tensor=tensor)
    layers = {}
    for name, entry in entries.items():
        layers[name] = PackedLayer(entry, numbers[begin : begin + entry.size])
        begin += entry.size
    return layers


def _damaged(
    error: BaseException, what: str = "packed layers are damaged", tensor: str | None = PACKED
) -> CheckpointError:
    text = "".join(letter if letter.isprintable() else "?" for letter in str(error)[:300])
    return CheckpointError(f"{what}: {text}", tensor=tensor)


# One layer -----------------------------------------------------------------------------------------------------------


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
        left, right = ([(terms, *size) for size in side] for terms, side in zip(self.entry.terms, sides, strict=True))
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
            raise CheckpointError("is stored in floating-point numbers, not in codes", tensor=NUMBERS)
        return numbers

    def _unpacked(self) -> tuple[Factors, Factors] | CodedProduct:
        try:
            return self.entry.unpack(Reader(self.codes))
        except DAMAGE as error:
            raise _damaged(error) from None


def codes_in(checkpoint: Checkpoint) -> dict[str, CodedProduct]:
    """The layers of an LSR directory that are stored in integer codes, unpacked."""
    tensors, text = read_header(checkpoint.weights).tensors, checkpoint.config.get(FIELD)
    layers = read_packed(tensors[PACKED].read()) if PACKED in tensors else {}
    if text is not None:
        layers |= read_index(text).layers(tensors[NUMBERS].read())
    return {name: layer.decode() for name, layer in layers.items() if layer.storage not in FLOATS}


def named_factors(layers: Mapping[str, PackedLayer]) -> dict[str, NDArray[Any]]:
    """The factors by the keys they would have in a file of their own, in float32 or, where stored so, float64."""
    return {
        f"{PREFIX}{name}.lsr_{side}.factor_{i}": factor.astype("float64" if layer.storage == "float64" else "float32")
        for name, layer in layers.items()
        for side, factors in zip("BA", layer.factors(), strict=True)
        for i, factor in enumerate(factors, 1)
    }


def factors_of(layer: CodedProduct) -> tuple[Factors, Factors]:
    """Factors (s, m_i, r_i) of the out side and (t, r_i, n_i) of the in side, in float64, weights folded in.

    As many terms as the index says, at least one: a term that rounded to zero stays, as zeros.
    """
    product: SeparatedProduct = layer.dequantized()
    terms = [side.scales.size for side in (layer.left, layer.right)] if isinstance(layer, QuantizedProduct) else [1, 1]
    left, right = (
        tuple(np.asarray(zero_padded(factor, 0, max(1, count))) for factor in side.folded())
        for side, count in zip((product.left, product.right), terms, strict=True)
    )
    return left, right


# Entries and bytes, written ------------------------------------------------------------------------------------------


def float_entry(shape: ProductShape, ranks: tuple[int, int], storage: str) -> list[Any]:
    """What the index says of a layer stored in floats."""
    return ["floats", shape.out, shape.inner, shape.into, storage, *ranks]


def code_entry(layer: CodedProduct) -> list[Any]:
    """What the index says of a layer stored in codes."""
    if isinstance(layer, QuantizedProduct):
        sides = [[side.bits, side.exponent, int(side.scales.size)] for side in (layer.left, layer.right)]
        return ["terms", layer.shape.out, layer.shape.inner, layer.shape.into, *sides]
    return ["components", layer.matrix_shape, layer.bits, layer.exponent]


def code_bytes(layer: CodedProduct) -> Iterator[Bytes]:
    """The bytes of a layer stored in codes."""
    if isinstance(layer, QuantizedProduct):
        for side in (layer.left, layer.right):
            yield side.scales.astype("<f2").view(np.uint8)
            yield from (pack(code, side.bits) for code in side.codes)
    else:
        for u, v, scale, bits in zip(layer.left, layer.right, layer.scales, layer.bits, strict=True):
            yield np.array([scale], "<f2").view(np.uint8)
            yield pack(np.concatenate([u, v]), bits)


# and read ------------------------------------------------------------------------------------------------------------


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
    if storage not in FLOATS or len(terms) != 2 or not all(type(count) is int and count > 0 for count in terms):
        raise ValueError(f"floats of type {str(storage)[:40]!r} and terms {str(list(terms))[:40]}")
    shape = ProductShape(tuple(out), tuple(inner), tuple(into))
    size = shape.parameters(*terms) * DTYPES[storage].itemsize
    return Entry(shape, (terms[0], terms[1]), storage, size, partial(_read_floats, shape, terms, storage)), True


def _read_floats(shape: ProductShape, terms: tuple[int, int], storage: str, reader: Reader) -> tuple[Factors, Factors]:
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
    empty = SpectralCode((), (), np.zeros(0, np.float16), _exponent(exponent), tuple(map(_bits, bits)), (m, n))
    shape = ProductShape.low_rank((m, n), max(1, len(empty.bits)))
    size = sum(2 + packed_size(m + n, width) for width in empty.bits)
    return Entry(shape, (1, 1), empty.storage, size, partial(_read_components, empty)), bool(empty.bits)


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
            raise ValueError(f"{count} bytes are needed at byte {self.position} of {self.packed.size}")
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
        stored = np.frombuffer(self.take(math.prod(shape) * dtype.itemsize), dtype.newbyteorder("<"))
        return stored.astype(dtype, copy=False).reshape(shape)

    def scales(self, count: int) -> NDArray[np.float16]:
        values = np.frombuffer(self.take(2 * count), "<f2").astype(np.float16)
        if not np.isfinite(values).all():
            raise ValueError("a scale is NaN or infinite")
        return values

    def codes(self, bits: int, shape: tuple[int, ...]) -> Codes:
        return unpack(np.frombuffer(self.take(packed_size(math.prod(shape), bits)), np.uint8), bits, shape)
