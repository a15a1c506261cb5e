"""The index of packed layers: which layers there are, and their sizes.

It ends the tensor of the numbers, in as few bytes as they take: raw deflate of a text, with
`COMMON_NAMES` as dictionary, then bits (`lsrdecomp.lora.files.bits`). If all together is smaller
deflated, it is. The text is

- its length, in bytes of seven bits, low ones first, a high bit for "more";
- modules, a line each, with a zero character where the number of the block stands;
- after a byte 255, if there are any: JSON of the types of layers that are not linear.

The bits are integers: of any size (gamma codes of order 2), but where it is said otherwise.

- How many layers, and how many structures; a bit, whether steps may be negative.
- How many sizes of layers; rows and columns of each.
- Of each layer the step of its place from that of the layer before (gamma codes of order 0). The
  place is the number of the block times the number of modules, plus the number of the module.
- Of each layer its structure, in as many bits as the largest takes.
- Each structure, the number of its size before what `structure_of` gives: how many integers it
  begins with that the structure before begins with too, and the others.
- The exponents of all layers: the least, the bits of each above that, and these.

A structure is an entry of `lsrdecomp.lora.files.encodings` without its exponents.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp._ordering import natural_key
from lsrdecomp.errors import CheckpointError
from lsrdecomp.formats.stored import FloatProduct
from lsrdecomp.gateway import TEXT_BYTES, read_json_text
from lsrdecomp.lora.files.adapter_config import exact_pattern, most_common
from lsrdecomp.lora.files.bits import BitReader, BitWriter, width_of
from lsrdecomp.lora.files.common_names import COMMON_NAMES
from lsrdecomp.lora.files.digests import SEAL_BYTES
from lsrdecomp.lora.files.encodings import Structure, parse, read_structure, structure_of
from lsrdecomp.lora.files.packed import (
    DECODING_ERRORS,
    NUMBERS,
    Bytes,
    IndexEntry,
    PackedLayer,
    Reader,
    damage_error,
)
from lsrdecomp.lora.files.tensors import check_name, read_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lsrdecomp.formats.stored import Stored
    from lsrdecomp.kronecker.shape import ProductShape
    from lsrdecomp.lora.files.records import Checkpoint, KroneckerLayer

FIELD = "layers"
"""Where a config in memory holds the index, and where older versions wrote theirs."""
INDEX_PREFIX = "4:"
"""Begins base85 of the index, as a config in memory holds it."""
OLDER_INDEX = (
    f"its field {FIELD} is an index of packed layers as versions before 0.5 wrote it, which is no "
    "longer read: compress the LoRA again"
)
MAX_LENGTH_BYTES = 9
"""Bytes of seven bits that an integer may have."""
TYPES_FOLLOW = b"\xff"
"""Before the types of layers; no byte of UTF-8."""
BLOCK_NUMBER = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,3})(?=\.)")
"""The number of a block in the name of a layer."""
LayerType = tuple[str, tuple[int, ...]]
"""Type and kernel of a layer, as in `lsrdecomp.lora.files.LoraLayer`."""


@dataclass(frozen=True, slots=True)
class Index:
    """The packed layers of an LSR directory.

    Attributes
    ----------
    entries : Mapping of str to IndexEntry
        By the layer's name, in the order of their bytes.
    layer_types : Mapping of str to (type, kernel)
        Of layers that are not linear.
    """

    entries: Mapping[str, IndexEntry]
    layer_types: Mapping[str, LayerType] = field(default_factory=dict)

    def config_fields(self) -> dict[str, Any]:
        """Return the same as fields of an `lsrdecomp.lora.peft.LsrConfig`, one pattern a layer."""
        fields = layer_patterns(
            {name: (entry.shape, entry.terms) for name, entry in self.entries.items()}
        )
        fields["target_modules"] = sorted(self.entries)
        if self.entries:
            # Of layers that the patterns do not name, which training may add.
            ranks = {name: entry.shape.inner_rank for name, entry in self.entries.items()}
            fields["r"] = fields["lsr_alpha"] = most_common(ranks)
        return fields

    def layers(self, numbers: Bytes) -> dict[str, PackedLayer]:
        """Return the layers with their bytes, not yet unpacked.

        Raises
        ------
        CheckpointError
            If there are more bytes than the layers have, or fewer.
        """
        return _slice_layers(self.entries, numbers)


def layer_patterns(sizes: Mapping[str, tuple[ProductShape, tuple[int, int]]]) -> dict[str, Any]:
    """Return the pattern fields of an `lsrdecomp.lora.peft.LsrConfig` for layers with a scale of 1.

    Parameters
    ----------
    sizes : mapping of str to (ProductShape, (int, int))
        Shape and terms by the layer's name.
    """
    ranks: dict[str, int] = {}
    terms_of: dict[str, list[int]] = {}
    shapes: dict[str, dict[str, list[int]]] = {}
    for name, (shape, terms) in sizes.items():
        key = exact_pattern(name)
        ranks[key] = shape.inner_rank
        terms_of[key] = list(terms)
        shapes[key] = {
            "out": list(shape.out),
            "inner": list(shape.inner),
            "into": list(shape.into),
        }
    return {
        "rank_pattern": ranks,
        "alpha_pattern": dict(ranks),  # alpha / r is 1
        "separation_rank_pattern": terms_of,
        "shape_pattern": shapes,
    }


# -- the index beside the numbers ------------------------------------------------------------------


def index_at_the_end(index: bytes) -> bytes:
    """Return what follows the numbers in their tensor: the index, its length, room for a seal.

    The length is in bytes of seven bits, to be read from the last one back.
    """
    length = bytes(reversed(_encode_integers([len(index)])))
    return index + length + bytes(SEAL_BYTES)


def split_tensor(content: Bytes) -> tuple[Bytes, bytes]:
    """Return the numbers of a tensor that ends in its index, and that index.

    Raises
    ------
    CheckpointError
        If there is no index at its end.
    """
    end = content.size - SEAL_BYTES
    try:
        length = Reader(content[max(0, end - MAX_LENGTH_BYTES) : max(0, end)][::-1]).integer()
        begin = end - len(_encode_integers([length])) - length
    except ValueError:
        begin = -1
    if begin < 0:
        raise CheckpointError(
            f"holds no index of its {content.size} bytes; copy the weights and their config again",
            tensor=NUMBERS,
        )
    return content[:begin], content[begin : begin + length].tobytes()


# -- the index as it is written --------------------------------------------------------------------


def encode_index(
    entries: Mapping[str, Sequence[Any]], layer_types: Mapping[str, LayerType] | None = None
) -> bytes:
    """Return the index of packed layers, which `decode_index` reads.

    Parameters
    ----------
    entries : mapping of str to sequence
        Of each layer by its name, as `lsrdecomp.lora.files.encodings.entry_of` gives it, in the
        order of their bytes.
    layer_types : mapping of str to (type, kernel), optional
        Of layers that are not linear.
    """
    table = _LayerTable.of(entries)
    text = "\n".join(table.modules).encode()
    if layer_types:
        types = json.dumps(dict(layer_types), separators=(",", ":"))
        text += TYPES_FOLLOW + types.encode()
    # What is smaller: only the text deflated, or all.
    content = _encode_integers([len(text)]) + text
    numbers_content = _bits_of(table)
    only_text = _deflate(content) + numbers_content
    return min(only_text, _deflate(content + numbers_content), key=len)


@dataclass(frozen=True, slots=True)
class _LayerTable:
    """Modules and sizes of layers once each, and of every layer which of them it has.

    Attributes
    ----------
    modules : list of str
        In natural order.
    sizes : list of (int, int)
        Rows and columns, in the order in which they came.
    places : list of int
        Of each layer the number of its block times the number of modules, plus that of its module.
    structures : list of tuple of int
        Of each layer the number of its size, then what `structure_of` gives.
    exponents : list of int
        Of all layers.
    """

    modules: list[str]
    sizes: list[tuple[int, int]]
    places: list[int]
    structures: list[Structure]
    exponents: list[int]

    @classmethod
    def of(cls, entries: Mapping[str, Sequence[Any]]) -> _LayerTable:
        names = sorted({_split_name(name, 0)[0] for name in entries}, key=natural_key)
        modules = {module: number for number, module in enumerate(names)}
        sizes: dict[tuple[int, int], int] = {}
        table = cls(names, [], [], [], [])
        block = 0
        for name, entry in entries.items():
            module, block = _split_name(name, block)
            structure, exponents = structure_of(*entry)
            size = sizes.setdefault(parse(*entry).shape.matrix_shape, len(sizes))
            table.structures.append((size, *structure))
            table.places.append(block * len(modules) + modules[module])
            table.exponents.extend(exponents)
        table.sizes.extend(sizes)
        return table


def _bits_of(table: _LayerTable) -> bytes:
    """Return the numbers of an index in bits, as the module says."""
    bits = BitWriter()
    structures = sorted(set(table.structures))
    numbers = {structure: number for number, structure in enumerate(structures)}
    # 1. Counts, sizes, and the place and structure of each layer.
    steps = [place - before for before, place in pairwise([-1, *table.places])]
    has_negative_steps = min(steps, default=1) < 1
    bits.integers((len(steps), len(structures)))
    bits.fixed(int(has_negative_steps), 1)
    bits.integer(len(table.sizes))
    for size in table.sizes:
        bits.integers(size)
    for step in steps:
        bits.integer(_zigzag(step) if has_negative_steps else step - 1, order=0)
    for structure in table.structures:
        bits.fixed(numbers[structure], width_of(len(structures)))
    # 2. The structures, and the exponents.
    for before, structure in pairwise([(), *structures]):
        shared = _shared_beginning(before, structure)
        bits.integer(shared)
        bits.integers(structure[shared:])
    if table.exponents:
        least = min(table.exponents)
        width = width_of(max(table.exponents) - least + 1)
        bits.integers((_zigzag(least), width))
        for exponent in table.exponents:
            bits.fixed(exponent - least, width)
    return bits.content()


def _shared_beginning(one: Structure, other: Structure) -> int:
    """Return how many integers at their beginning two structures have in common."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def text_of_index(index: bytes) -> str:
    """Return an index as the text by which a config in memory holds it; `read_index` reads it."""
    return INDEX_PREFIX + base64.b85encode(index).decode()


def _deflate(content: bytes) -> bytes:
    deflate = zlib.compressobj(9, wbits=-zlib.MAX_WBITS, zdict=COMMON_NAMES)
    return deflate.compress(content) + deflate.flush()


def _split_name(name: str, previous_block: int) -> tuple[str, int]:
    """Return a layer's module with a zero character for the block's number, and that number."""
    match = BLOCK_NUMBER.search(name)
    if match is None:
        return name, previous_block
    return f"{name[: match.start()]}\0{name[match.end() :]}", int(match[0])


def _encode_integers(integers: Iterable[int]) -> bytes:
    """Encode integers from 0 on, each in bytes of seven bits, as `Reader.integer` reads them."""
    content = bytearray()
    for value in integers:
        while value > 127:
            content.append(value & 127 | 128)
            value >>= 7
        content.append(value)
    return bytes(content)


def _zigzag(value: int) -> int:
    """Map integers of either sign to those from 0 on: 0, −1, 1, −2, … to 0, 1, 2, 3, …."""
    return 2 * value if value >= 0 else -2 * value - 1


def _unzigzag(value: int) -> int:
    """Undo `_zigzag`."""
    return value // 2 if value % 2 == 0 else -(value + 1) // 2


# -- and read --------------------------------------------------------------------------------------


def read_index(text: Any) -> Index:
    """Read the index that `text_of_index` made a text of; `CheckpointError` for any other."""
    if not isinstance(text, str) or not text.startswith(INDEX_PREFIX):
        raise CheckpointError(OLDER_INDEX)
    try:
        return _decode_index(base64.b85decode(text.removeprefix(INDEX_PREFIX)))
    except DECODING_ERRORS as error:
        what = f"the index of packed layers ({FIELD}) is damaged"
        raise damage_error(error, what, None) from None


def decode_index(index: bytes) -> Index:
    """Read what `encode_index` returned; `CheckpointError` for other bytes."""
    try:
        return _decode_index(index)
    except DECODING_ERRORS as error:
        raise damage_error(error, "the index of packed layers is damaged", NUMBERS) from None


def _decode_index(index: bytes) -> Index:
    """Read an index, part by part as `encode_index` writes it."""
    # 1. The text, and the bits: what follows it, deflated or not.
    inflate = zlib.decompressobj(-zlib.MAX_WBITS, zdict=COMMON_NAMES)
    content = inflate.decompress(index, TEXT_BYTES) + inflate.unused_data
    reader = Reader(np.frombuffer(content, np.uint8))
    text, has_types, types = reader.take(reader.integer()).partition(TYPES_FOLLOW)
    modules = text.decode().split("\n")
    bits = BitReader(content[reader.position :])
    # 2. Counts, sizes, and the place and structure of each layer.
    n_layers, n_structures = bits.integer(), bits.integer()
    bits.check_count(n_layers + n_structures)
    has_negative_steps = bool(bits.fixed(1))
    n_sizes = bits.integer()
    bits.check_count(n_sizes)
    sizes = [(bits.integer(), bits.integer()) for _ in range(n_sizes)]
    places = []
    place = -1
    for _ in range(n_layers):
        step = bits.integer(order=0)
        place += _unzigzag(step) if has_negative_steps else step + 1
        places.append(place)
    structure_numbers = [bits.fixed(width_of(n_structures)) for _ in places]
    # 3. The structures, and the exponents that make an entry of one.
    makers = []
    structure = _RepeatedIntegers(bits, [])
    for _ in range(n_structures):
        structure = _RepeatedIntegers(bits, structure.integers_read[: bits.integer()])
        makers.append(read_structure(structure, sizes[structure.integer()]))
    n_exponents = sum(makers[number][1] for number in structure_numbers)
    least = width = 0
    if n_exponents:
        least, width = _unzigzag(bits.integer()), bits.integer()
        bits.check_count(n_exponents * width)
    entries = []
    for place, structure_number in zip(places, structure_numbers, strict=True):
        make_entry, count = makers[structure_number]
        exponents = [least + bits.fixed(width) for _ in range(count)]
        block, module_number = divmod(place, len(modules))
        name = modules[module_number].replace("\0", str(block))
        entries.append([name, *make_entry(*exponents)])
    layer_types = _read_layer_types(read_json_text(types) if has_types else {})
    return Index(_parse_entries(entries), layer_types)


class _RepeatedIntegers:
    """Gives integers again that were read before, then those of a reader."""

    def __init__(self, bits: BitReader, repeated: Sequence[int]) -> None:
        self._bits = bits
        self._repeated = list(reversed(repeated))
        self.integers_read: list[int] = []

    def integer(self) -> int:
        """Return the next integer."""
        value = self._repeated.pop() if self._repeated else self._bits.integer()
        self.integers_read.append(value)
        return value

    def integers(self, count: int) -> list[int]:
        """Return so many integers."""
        self._bits.check_count(count)
        return [self.integer() for _ in range(count)]


def _read_layer_types(listed: Mapping[str, Any]) -> dict[str, LayerType]:
    """Read type and kernel of layers that are not linear."""
    return {
        str(name): (str(layer_type), tuple(int(side) for side in kernel))
        for name, (layer_type, kernel) in listed.items()
    }


def _parse_entries(listed: Sequence[Any]) -> dict[str, IndexEntry]:
    entries = {str(name): parse(*entry) for name, *entry in listed}
    if len(entries) != len(listed):
        raise CheckpointError("a layer is listed twice")
    for name in entries:
        check_name(name, Path(FIELD))
    return entries


def _slice_layers(entries: Mapping[str, IndexEntry], numbers: Bytes) -> dict[str, PackedLayer]:
    """Return the layers with their bytes, which must be all of ``numbers``."""
    size = sum(entry.size for entry in entries.values())
    if size != numbers.size:
        text = f"{size} of {numbers.size} bytes belong to {len(entries)} layers"
        raise CheckpointError(f"packed layers are damaged: {text}", tensor=NUMBERS)
    layers = {}
    begin = 0
    for name, entry in entries.items():
        layers[name] = PackedLayer(entry, numbers[begin : begin + entry.size])
        begin += entry.size
    return layers


def read_packed_layers(content: Bytes) -> dict[str, PackedLayer]:
    """Read the packed layers in the bytes of the tensor `NUMBERS`.

    Raises
    ------
    CheckpointError
        If the index is missing, or if bytes or index are damaged.
    """
    index, numbers = index_and_numbers(content)
    return index.layers(numbers)


def index_and_numbers(content: Bytes) -> tuple[Index, Bytes]:
    """Return the index at the end of the bytes of the tensor `NUMBERS`, and the numbers."""
    numbers, index = split_tensor(content)
    return decode_index(index), numbers


def stored_layers(checkpoint: Checkpoint) -> dict[str, Stored]:
    """Read the layers of an LSR directory as they are stored.

    Packed layers come first, in their order, then those of which each factor is a tensor.
    """
    tensor = read_header(checkpoint.weights).tensors.get(NUMBERS)
    packed = {} if tensor is None else read_packed_layers(tensor.read())
    layers = {name: layer.stored() for name, layer in packed.items()}
    for layer in checkpoint.layers:
        if layer.name not in packed:
            layers[layer.name] = scaled_factors(layer, layer.dtype)
    return layers


def scaled_factors(layer: KroneckerLayer, storage: str) -> FloatProduct:
    """Read the factors of a layer, its scale folded into the first, to be stored as ``storage``."""
    left, right = layer.load()
    return FloatProduct((layer.scale * left[0], *left[1:]), right, storage)
