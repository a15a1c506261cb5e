"""The index of packed layers, in adapter_config.json: which layers an LSR directory has, and their sizes.

The index is the field ``layers``, so that PEFT knows all sizes before it opens the weights:
``"3:"`` and base85 of raw deflate of integers, each in bytes of seven bits, low ones first, a high
bit for "more" (zigzag where negative ones occur), then two texts in UTF-8:

    whether target_modules names more than these layers · number of layers · of structures · bytes
    of the first text of each layer its module, of each the step of its block from the layer before,
    of each its structure each structure, as `structure_of` lays it out; the exponents of each layer
    modules: a line each, a zero character where the number of the block stands; JSON of kinds that
    are not linear

A structure is an entry of `lsrdecomp.checkpoints.encodings` without its exponents. Version 0.2 wrote
base64 of zlib-compressed JSON, ``{"version": 2, "layers": [[name, *entry], …], "kinds": {name:
[kind, kernel]}, "dropped": [name, …], "exact": true}``, the last three where they say something.
Files of version 0.1 have codes only, in ``lsr_packed``: the length of their index as four
little-endian bytes, the index as a zlib-compressed list of entries, then the codes.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.checkpoints.config import exact_pattern
from lsrdecomp.checkpoints.encodings import parse, read_structure, structure_of
from lsrdecomp.checkpoints.packed import (
    DAMAGE,
    NUMBERS,
    PACKED,
    Bytes,
    IndexEntry,
    PackedLayer,
    Reader,
    damaged,
)
from lsrdecomp.checkpoints.tensors import check_name, read_header
from lsrdecomp.errors import CheckpointError
from lsrdecomp.formats.stored import FloatProduct

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lsrdecomp.checkpoints.records import Checkpoint, KroneckerLayer
    from lsrdecomp.formats.stored import Stored
    from lsrdecomp.kronecker.shape import ProductShape

FIELD = "layers"
VERSION, MARK = 2, "3:"
"""Of the index: the last that was JSON, and how one begins that is not."""
BLOCK = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,3})(?=\.)")
"""The number of a block in the name of a layer."""
LONGEST_INDEX = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Index:
    """What adapter_config.json says of packed layers."""

    entries: Mapping[str, IndexEntry]
    kinds: Mapping[str, tuple[str, tuple[int, ...]]] = field(
        default_factory=dict
    )  # of layers that are not linear
    dropped: tuple[
        str, ...
    ] = ()  # layers of the source that were left out on purpose, where version 0.2 wrote it
    exact: bool = False  # target_modules of the config names more than these layers, or nothing

    def config_fields(self) -> dict[str, Any]:
        """The fields of an `lsrdecomp.adapters.LsrConfig` that say the same, a pattern for every layer."""
        fields = layer_patterns(
            {name: (entry.shape, entry.terms) for name, entry in self.entries.items()}
        )
        return fields | ({"target_modules": sorted(self.entries)} if self.exact else {})

    def layers(self, numbers: Bytes) -> dict[str, PackedLayer]:
        """The layers with their bytes, not yet unpacked. Raises `CheckpointError` for another number of bytes."""
        return _sliced(self.entries, numbers, 0, NUMBERS)


def layer_patterns(sizes: Mapping[str, tuple[ProductShape, tuple[int, int]]]) -> dict[str, Any]:
    """The pattern fields of an `lsrdecomp.adapters.LsrConfig` for layers of these shapes and terms, at a scale of 1."""
    patterns = {exact_pattern(name): both for name, both in sizes.items()}
    ranks = {key: shape.inner_rank for key, (shape, _) in patterns.items()}
    return {
        "rank_pattern": ranks,
        "alpha_pattern": dict(ranks),
        "separation_rank_pattern": {key: list(terms) for key, (_, terms) in patterns.items()},
        "shape_pattern": {
            key: {"out": list(shape.out), "inner": list(shape.inner), "into": list(shape.into)}
            for key, (shape, _) in patterns.items()
        },
    }


def index_text(
    entries: Mapping[str, Sequence[Any]],
    kinds: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
    exact: bool = False,
) -> str:
    """The field ``layers`` of adapter_config.json."""
    # Index 1: modules and structures once each; of every layer which it has, and by how much its
    # block is further on.
    modules: dict[str, int] = {}
    structures: dict[tuple[int, ...], int] = {}
    columns: tuple[list[int], ...] = ([], [], [], [])
    before = 0
    for name, entry in entries.items():
        number = BLOCK.search(name)
        block = before if number is None else int(number[0])
        module = name if number is None else f"{name[: number.start()]}\0{name[number.end() :]}"
        structure, exponents = structure_of(*entry)
        columns[0].append(modules.setdefault(module, len(modules)))
        columns[1].append(_zigzag(block - before))
        columns[2].append(structures.setdefault(structure, len(structures)))
        columns[3].extend(map(_zigzag, exponents))
        before = block
    # Index 2: column by column, since like numbers side by side are what deflate makes small.
    text = "\n".join(modules).encode()
    counts = (int(exact), len(entries), len(structures), len(text))
    laid_out = [value for structure in structures for value in structure]
    integers = [*counts, *columns[0], *columns[1], *columns[2], *laid_out, *columns[3]]
    content = (
        _in_sevens(integers)
        + text
        + (json.dumps(dict(kinds), separators=(",", ":")).encode() if kinds else b"")
    )
    deflate = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    return MARK + base64.b85encode(deflate.compress(content) + deflate.flush()).decode()


def read_index(text: Any) -> Index:
    """The index in a config; `CheckpointError` for a text that no release wrote."""
    try:
        if isinstance(text, str) and text.startswith(MARK):
            squeezed = base64.b85decode(text.removeprefix(MARK))
            return _laid_out(
                zlib.decompressobj(-zlib.MAX_WBITS).decompress(squeezed, LONGEST_INDEX)
            )
        raw = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), LONGEST_INDEX)
        index = json.loads(raw)
        if index["version"] != VERSION:
            raise CheckpointError(
                f"version {str(index['version'])[:40]}, this release reads {VERSION} and {MARK[0]}"
            )
        dropped = tuple(str(name) for name in index.get("dropped", ()))
        return Index(
            _entries(index["layers"]),
            read_kinds(index.get("kinds", {})),
            dropped,
            index.get("exact") is True,
        )
    except (*DAMAGE, AttributeError, binascii.Error) as error:
        raise damaged(error, f"the index of packed layers ({FIELD}) is damaged", None) from None


def _laid_out(content: bytes) -> Index:
    """The index in the bytes that `index_text` wrote."""
    # The same in the order it was written; a count that the bytes could not hold is damage, not a
    # reason to allocate.
    reader = Reader(np.frombuffer(content, np.uint8))
    exact, layers, structures, length = (reader.integer() for _ in range(4))
    if max(layers, structures, length) > len(content):
        raise ValueError(f"{layers} layers of {structures} structures in {len(content)} bytes")
    module_numbers, steps, structure_numbers = (reader.integers(layers) for _ in range(3))
    makers = [read_structure(reader) for _ in range(structures)]
    exponents = []
    for number in structure_numbers:
        _, count = makers[number]
        exponents.append([_unzigzag(reader.integer()) for _ in range(count)])
    modules = reader.take(length).decode().split("\n")
    entries, block = [], 0
    for i, module in enumerate(module_numbers):
        block += _unzigzag(steps[i])
        make_entry, _ = makers[structure_numbers[i]]
        name = modules[module].replace("\0", str(block))
        entries.append([name, *make_entry(*exponents[i])])
    kinds = content[reader.position :]
    return Index(_entries(entries), read_kinds(json.loads(kinds) if kinds else {}), (), bool(exact))


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


def read_kinds(listed: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Kind and kernel of layers that are not linear; `TypeError` and its kin for what is no such table."""
    return {
        str(name): (str(kind), tuple(int(side) for side in kernel))
        for name, (kind, kernel) in listed.items()
    }


def read_packed(packed: Bytes) -> dict[str, PackedLayer]:
    """The layers of the tensor that version 0.1 wrote, their codes not yet unpacked."""
    try:
        length = int.from_bytes(packed[:4].tobytes(), "little")
        index = json.loads(
            zlib.decompressobj().decompress(packed[4 : 4 + length].tobytes(), LONGEST_INDEX)
        )
        entries = _entries(index)
    except DAMAGE as error:
        raise damaged(error) from None
    return _sliced(entries, packed, 4 + length, PACKED)


def _entries(listed: Sequence[Any]) -> dict[str, IndexEntry]:
    entries = {str(name): parse(*entry) for name, *entry in listed}
    if len(entries) != len(listed):
        raise CheckpointError("a layer is listed twice")
    for name in entries:
        check_name(name, Path(FIELD))
    return entries


def _sliced(
    entries: Mapping[str, IndexEntry], numbers: Bytes, begin: int, tensor: str
) -> dict[str, PackedLayer]:
    end = begin + sum(entry.size for entry in entries.values())
    if end != numbers.size:
        text = f"{end} of {numbers.size} bytes belong to {len(entries)} layers"
        raise CheckpointError(f"packed layers are damaged: {text}", tensor=tensor)
    layers = {}
    for name, entry in entries.items():
        layers[name] = PackedLayer(entry, numbers[begin : begin + entry.size])
        begin += entry.size
    return layers


def stored_layers(checkpoint: Checkpoint) -> dict[str, Stored]:
    """Return the layers of an LSR directory as they are stored: packed ones in their order, then those in tensors."""
    tensors = read_header(checkpoint.weights).tensors
    index = checkpoint.config.get(FIELD)
    packed = read_packed(tensors[PACKED].read()) if PACKED in tensors else {}
    if index is not None:
        packed |= read_index(index).layers(tensors[NUMBERS].read())
    layers = {name: layer.stored() for name, layer in packed.items()}
    for layer in checkpoint.layers:
        if layer.name not in packed:
            layers[layer.name] = scaled_factors(layer, layer.dtype)
    return layers


def scaled_factors(layer: KroneckerLayer, storage: str) -> FloatProduct:
    """Return the factors of a layer with its scale folded into the first, to be stored as ``storage``."""
    left, right = layer.load()
    return FloatProduct((layer.scale * left[0], *left[1:]), right, storage)
