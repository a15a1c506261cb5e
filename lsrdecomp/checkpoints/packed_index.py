"""The index of packed layers in adapter_config.json: which layers there are, and their sizes.

The index is the field ``layers``, so that PEFT knows all sizes before it opens the weights:
``"3:"`` and base85 of raw deflate of integers, each in bytes of seven bits, low ones first, a high
bit for "more" (zigzag where negative ones occur), then two texts in UTF-8:

- 1 if the index decides target_modules, else 0; how many layers; how many structures; bytes of the
  first text;
- of each layer its module, of each the step of its block from the layer before, of each its
  structure;
- each structure, as `structure_of` lays it out; the exponents of each layer;
- text: modules, a line each, with a zero character where the number of the block stands;
- text: JSON of the types of layers that are not linear, if there are any.

A structure is an entry of `lsrdecomp.checkpoints.encodings` without its exponents. Version 0.2
wrote base64 of zlib-compressed JSON, ``{"version": 2, "layers": [[name, *entry], …], "kinds":
{name: [type, kernel]}, "dropped": [name, …], "exact": true}``, the last three where they say
something.
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

from lsrdecomp.checkpoints.config import exact_pattern, most_common
from lsrdecomp.checkpoints.encodings import parse, read_structure, structure_of
from lsrdecomp.checkpoints.limits import LIMITS
from lsrdecomp.checkpoints.packed import (
    DECODING_ERRORS,
    LONG_NUMBERS,
    NUMBERS,
    PACKED,
    Bytes,
    IndexEntry,
    PackedLayer,
    Reader,
    damage_error,
    numbers_key,
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
JSON_VERSION = 2
"""The last version of the index that was JSON."""
PREFIX_OF_3 = "3:"
BLOCK_NUMBER = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,3})(?=\.)")
"""The number of a block in the name of a layer."""
LayerType = tuple[str, tuple[int, ...]]
"""Type and kernel of a layer, as in `lsrdecomp.checkpoints.LoraLayer`."""


@dataclass(frozen=True, slots=True)
class Index:
    """The packed layers of an adapter_config.json.

    Attributes
    ----------
    entries : Mapping of str to IndexEntry
        By the layer's name, in the order of their bytes.
    layer_types : Mapping of str to (type, kernel)
        Of layers that are not linear.
    dropped : tuple of str
        Layers of the source that were left out on purpose, where version 0.2 wrote it.
    exact : bool
        Whether exactly these layers are targets: target_modules of the config then names more than
        these, or nothing.
    """

    entries: Mapping[str, IndexEntry]
    layer_types: Mapping[str, LayerType] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    exact: bool = False

    def config_fields(self) -> dict[str, Any]:
        """Return the same as fields of an `lsrdecomp.adapters.LsrConfig`, one pattern a layer."""
        fields = layer_patterns(
            {name: (entry.shape, entry.terms) for name, entry in self.entries.items()}
        )
        if self.exact:
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
        return _slice_layers(self.entries, numbers, 0, NUMBERS)


def layer_patterns(sizes: Mapping[str, tuple[ProductShape, tuple[int, int]]]) -> dict[str, Any]:
    """Return the pattern fields of an `lsrdecomp.adapters.LsrConfig` for layers with a scale of 1.

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


# -- the index as it is written --------------------------------------------------------------------


def index_text(
    entries: Mapping[str, Sequence[Any]],
    layer_types: Mapping[str, LayerType] | None = None,
    exact: bool = False,
) -> str:
    """Return the field ``layers`` of adapter_config.json.

    Parameters
    ----------
    entries : mapping of str to sequence
        Of each layer by its name, as `lsrdecomp.checkpoints.encodings.entry_of` gives it.
    layer_types : mapping of str to (type, kernel), optional
        Of layers that are not linear.
    exact : bool
        As of an `Index`.
    """
    # 1. Modules and structures once each; of every layer which of them it has, and by how much its
    #    block is further on than the layer's before.
    modules: dict[str, int] = {}
    structures: dict[tuple[int, ...], int] = {}
    module_numbers: list[int] = []
    block_steps: list[int] = []
    structure_numbers: list[int] = []
    exponents: list[int] = []
    previous_block = 0
    for name, entry in entries.items():
        module, block = _split_name(name, previous_block)
        structure, exponents_of_layer = structure_of(*entry)
        module_numbers.append(modules.setdefault(module, len(modules)))
        block_steps.append(_zigzag(block - previous_block))
        structure_numbers.append(structures.setdefault(structure, len(structures)))
        exponents.extend(map(_zigzag, exponents_of_layer))
        previous_block = block
    # 2. Column by column, since like numbers side by side are what deflate makes small.
    text = "\n".join(modules).encode()
    integers = [int(exact), len(entries), len(structures), len(text)]
    integers += [*module_numbers, *block_steps, *structure_numbers]
    for structure in structures:
        integers.extend(structure)
    integers.extend(exponents)
    content = _encode_integers(integers) + text
    if layer_types:
        content += json.dumps(dict(layer_types), separators=(",", ":")).encode()
    # 3. Raw deflate, in the 85 characters that JSON need not escape.
    deflate = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    compressed = deflate.compress(content) + deflate.flush()
    return PREFIX_OF_3 + base64.b85encode(compressed).decode()


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
    """Read the index in a config; `CheckpointError` for a text that no release wrote."""
    try:
        if isinstance(text, str) and text.startswith(PREFIX_OF_3):
            compressed = base64.b85decode(text.removeprefix(PREFIX_OF_3))
            return _decode_index(_decompress(compressed, -zlib.MAX_WBITS))
        compressed = base64.b64decode(text, validate=True)
        return _index_from_json(json.loads(_decompress(compressed)))
    except (*DECODING_ERRORS, AttributeError, binascii.Error) as error:
        what = f"the index of packed layers ({FIELD}) is damaged"
        raise damage_error(error, what, None) from None


def _decompress(compressed: bytes, window_bits: int = zlib.MAX_WBITS) -> bytes:
    """Decompress as many bytes as are read of an index: more are damage, which is found later."""
    return zlib.decompressobj(window_bits).decompress(compressed, LIMITS.index_bytes)


def _decode_index(content: bytes) -> Index:
    """Read the index in the bytes that `index_text` wrote, in the same order."""
    reader = Reader(np.frombuffer(content, np.uint8))
    exact, layers, structures, text_bytes = (reader.integer() for _ in range(4))
    # A count that the bytes could not hold is damage, not a reason to allocate.
    if max(layers, structures, text_bytes) > len(content):
        raise ValueError(f"{layers} layers of {structures} structures in {len(content)} bytes")
    module_numbers = reader.integers(layers)
    block_steps = reader.integers(layers)
    structure_numbers = reader.integers(layers)
    makers = [read_structure(reader) for _ in range(structures)]
    exponents = []
    for number in structure_numbers:
        _, count = makers[number]
        exponents.append([_unzigzag(reader.integer()) for _ in range(count)])
    modules = reader.take(text_bytes).decode().split("\n")
    entries = []
    block = 0
    for i, module_number in enumerate(module_numbers):
        block += _unzigzag(block_steps[i])
        name = modules[module_number].replace("\0", str(block))
        make_entry, _ = makers[structure_numbers[i]]
        entries.append([name, *make_entry(*exponents[i])])
    remaining = content[reader.position :]
    layer_types = read_layer_types(json.loads(remaining) if remaining else {})
    return Index(_parse_entries(entries), layer_types, (), bool(exact))


def _index_from_json(index: Any) -> Index:
    """Read the index as version 0.2 wrote it."""
    version = index["version"]
    if version != JSON_VERSION:
        readable = f"{JSON_VERSION} and {PREFIX_OF_3[0]}"
        raise CheckpointError(f"version {str(version)[:40]}, this release reads {readable}")
    return Index(
        _parse_entries(index["layers"]),
        read_layer_types(index.get("kinds", {})),
        tuple(str(name) for name in index.get("dropped", ())),
        index.get("exact") is True,
    )


def read_layer_types(listed: Mapping[str, Any]) -> dict[str, LayerType]:
    """Read type and kernel of layers that are not linear.

    Raises
    ------
    TypeError, ValueError, AttributeError
        For what is no such table.
    """
    return {
        str(name): (str(layer_type), tuple(int(side) for side in kernel))
        for name, (layer_type, kernel) in listed.items()
    }


def read_packed(packed: Bytes) -> dict[str, PackedLayer]:
    """Read the layers of the tensor that version 0.1 wrote, their codes not yet unpacked."""
    try:
        length = int.from_bytes(packed[:4].tobytes(), "little")
        index = json.loads(_decompress(packed[4 : 4 + length].tobytes()))
        entries = _parse_entries(index)
    except DECODING_ERRORS as error:
        raise damage_error(error) from None
    return _slice_layers(entries, packed, 4 + length, PACKED)


def _parse_entries(listed: Sequence[Any]) -> dict[str, IndexEntry]:
    entries = {str(name): parse(*entry) for name, *entry in listed}
    if len(entries) != len(listed):
        raise CheckpointError("a layer is listed twice")
    for name in entries:
        check_name(name, Path(FIELD))
    return entries


def _slice_layers(
    entries: Mapping[str, IndexEntry], numbers: Bytes, begin: int, tensor: str
) -> dict[str, PackedLayer]:
    """Return the layers with their bytes, which must fill ``numbers`` from ``begin`` to the end."""
    end = begin + sum(entry.size for entry in entries.values())
    if end != numbers.size:
        text = f"{end} of {numbers.size} bytes belong to {len(entries)} layers"
        raise CheckpointError(f"packed layers are damaged: {text}", tensor=tensor)
    layers = {}
    for name, entry in entries.items():
        layers[name] = PackedLayer(entry, numbers[begin : begin + entry.size])
        begin += entry.size
    return layers


def read_packed_layers(tensors: Mapping[str, Bytes], index: str | None) -> dict[str, PackedLayer]:
    """Read the packed layers of a directory of any version.

    Parameters
    ----------
    tensors : mapping of str to row of bytes
        `NUMBERS` or `LONG_NUMBERS`, and in directories of version 0.1 `PACKED`; none may be there.
    index : str, optional
        The field ``layers`` of the config, which says what the bytes of `NUMBERS` mean.

    Raises
    ------
    CheckpointError
        If the index is missing, or if bytes or index are damaged.
    """
    layers: dict[str, PackedLayer] = {}
    if PACKED in tensors:
        layers |= read_packed(tensors[PACKED])
    key = numbers_key(tensors)
    if key is not None:
        if index is None:
            raise CheckpointError(
                f"the settings lack `{FIELD}`, which says what these bytes are", tensor=key
            )
        layers |= read_index(index).layers(tensors[key])
    return layers


def stored_layers(checkpoint: Checkpoint) -> dict[str, Stored]:
    """Read the layers of an LSR directory as they are stored.

    Packed layers come first, in their order, then those of which each factor is a tensor.
    """
    stored_tensors = read_header(checkpoint.weights).tensors
    tensors = {
        key: stored_tensors[key].read()
        for key in (PACKED, LONG_NUMBERS, NUMBERS)
        if key in stored_tensors
    }
    packed = read_packed_layers(tensors, checkpoint.config.get(FIELD))
    layers = {name: layer.stored() for name, layer in packed.items()}
    for layer in checkpoint.layers:
        if layer.name not in packed:
            layers[layer.name] = scaled_factors(layer, layer.dtype)
    return layers


def scaled_factors(layer: KroneckerLayer, storage: str) -> FloatProduct:
    """Read the factors of a layer, its scale folded into the first, to be stored as ``storage``."""
    left, right = layer.load()
    return FloatProduct((layer.scale * left[0], *left[1:]), right, storage)
