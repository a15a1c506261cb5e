"""The index as version 0.4 wrote it into adapter_config.json, before it lay in the weight file."""

import base64
import json
import re
import zlib

from lsrdecomp.checkpoints.encodings import structure_of

BLOCK_NUMBER = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,3})(?=\.)")


def index_text(entries, layer_types=None, exact=False):
    """The field ``layers`` of adapter_config.json."""
    # 1. Modules and structures once each; of every layer which of them it has, and by how much its
    #    block is further on than the layer's before.
    modules = {}
    structures = {}
    module_numbers = []
    block_steps = []
    structure_numbers = []
    exponents = []
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
    return "3:" + base64.b85encode(compressed).decode()


def _split_name(name, previous_block):
    match = BLOCK_NUMBER.search(name)
    if match is None:
        return name, previous_block
    return f"{name[: match.start()]}\0{name[match.end() :]}", int(match[0])


def _encode_integers(integers):
    """Encode integers from 0 on, each in bytes of seven bits, as `Reader.integer` reads them."""
    content = bytearray()
    for value in integers:
        while value > 127:
            content.append(value & 127 | 128)
            value >>= 7
        content.append(value)
    return bytes(content)


def _zigzag(value):
    """Map integers of either sign to those from 0 on: 0, −1, 1, −2, … to 0, 1, 2, 3, …."""
    return 2 * value if value >= 0 else -2 * value - 1
