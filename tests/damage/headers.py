"""Faults of a safetensors file: its bytes, its header and its names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from checkpoint_files import PREFIX, lora_pair, raw_safetensors
from safetensors.numpy import save

from damage.adapter import DOWN, HEAD, SOUND, Fault, collect, weights

VALID = save({**lora_pair("q"), **lora_pair("v", seed=1)}, {"format": "pt"})


def beside(header: Mapping[str, Any], data: bytes) -> bytes:
    """Return a sound safetensors file with more header entries, offset from the end of its data."""
    length = int.from_bytes(VALID[:8], "little")
    own, payload = json.loads(VALID[8 : 8 + length]), VALID[8 + length :]
    return raw_safetensors({**own, **header}, payload + data)


def shifted(offsets: Any) -> Any:
    """Offsets moved behind the data of the sound file."""
    start = len(VALID) - 8 - int.from_bytes(VALID[:8], "little")
    whole = isinstance(offsets, list) and all(type(offset) is int for offset in offsets)
    return [start + offset for offset in offsets] if whole else offsets


def entry(**change: Any) -> bytes:
    """A sound safetensors file with one more tensor of 24 bytes, whose header entry is changed."""
    fields = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | change
    fields["data_offsets"] = shifted(fields["data_offsets"])
    return beside(
        {HEAD: {key: value for key, value in fields.items() if value is not ...}}, bytes(24)
    )


@collect("bytes")
def _bytes() -> Iterator[tuple[str, Fault]]:
    for size in (0, 1, 7, 8, 9, 20, 100, len(VALID) // 2, len(VALID) - 100, len(VALID) - 1):
        yield f"cut to {size}", weights(VALID[:size])
    for more in (1, 8, 4096):
        yield f"{more} bytes too many", weights(VALID + bytes(more))
    for length in (0, 1, len(VALID), 2**24 + 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1):
        yield f"header length {length}", weights(length.to_bytes(8, "little") + VALID[8:])
    yield "header of 101 MB", weights(lambda: raw_safetensors(b"{" + b" " * 101_000_000 + b"}"))
    for text in (
        b"",
        b"[]",
        b"null",
        b"3",
        b'"x"',
        b"{",
        b"{}{}",
        b"{'a':1}",
        b'{"a":}',
        b"\xff\xfe{}",
        b'\xef\xbb\xbf{"a":1}',
    ):
        yield f"header {text!r}", weights(raw_safetensors(text))
    yield "nested header", weights(raw_safetensors(b'{"a":' * 200_000 + b"1" + b"}" * 200_000))
    yield (
        "nested lists",
        weights(raw_safetensors(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}")),
    )
    yield "huge integer", weights(raw_safetensors(b'{"a":' + b"9" * 10_000 + b"}"))
    once = f'"{DOWN}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    twice = f"{{{once},{once.replace('[0,4]', '[4,8]')}}}"
    yield "a name twice", weights(raw_safetensors(twice.encode(), bytes(8)))
    yield "random", weights(np.random.default_rng(0).bytes(5000))
    yield "text", weights(b"<!DOCTYPE html><html><body>404: not found</body></html>")
    yield "zip as safetensors", weights(b"PK\x03\x04" + bytes(200))
    yield (
        "git-lfs pointer",
        weights(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"),
    )
    yield (
        "git-lfs pointer without size",
        weights(b"version https://git-lfs.github.com/spec/v1\n\xff\n"),
    )


@collect("header")
def _header() -> Iterator[tuple[str, Fault]]:
    for dtype in (
        "F31",
        "",
        "f32",
        "float32",
        "F4",
        "C64",
        "BF16 ",
        None,
        3,
        [],
        "F32\n",
        "X" * 10_000,
    ):
        yield f"dtype {str(dtype)[:20]!r}", weights(entry(dtype=dtype))
    for shape in (
        [2, -3],
        [-2, -3],
        [2.0, 3],
        ["2", 3],
        [True, 6],
        [2, None],
        "23",
        6,
        None,
        {},
        [[2], 3],
        [2**64],
        [6, 2**62],
        [1] * 40,
    ):
        yield f"shape {str(shape)[:24]}", weights(entry(shape=shape))
    for shape in ([], [2, 2], [6, 2], [0, 3], [2**40, 2**40], [2**62, 4]):
        yield f"shape {shape} for 24 bytes", weights(entry(shape=shape))
    for offsets in (
        [0],
        [0, 12, 24],
        [24, 0],
        [-24, 0],
        [0, 25],
        [4, 28],
        [0, 2**63],
        [0.0, 24],
        ["0", 24],
        None,
        24,
        [0, 20],
        [4, 24],
    ):
        yield f"offsets {offsets}", weights(entry(data_offsets=offsets))
    for field in ("dtype", "shape", "data_offsets"):
        yield f"no {field}", weights(entry(**{field: ...}))
    yield "an unknown field", weights(entry(strides=[3, 1]))
    for value in (None, [], "x", 1, {}):
        yield f"entry {value!r}", weights(beside({HEAD: value}, b""))
    for value in ([], "x", {"a": 1}, {"a": None}, {"a": {"b": "c"}}):
        yield f"metadata {value}", weights(beside({"__metadata__": value}, b""))
    for name, offsets in (("overlap", [4, 12]), ("hole", [12, 20]), ("same place", [0, 8])):
        places = {"one": [0, 8], "two": offsets}
        two = {
            f"{PREFIX}{k}": {"dtype": "F32", "shape": [2], "data_offsets": shifted(place)}
            for k, place in places.items()
        }
        yield name, weights(beside(two, bytes(offsets[1])))
    late = {HEAD: {"dtype": "U8", "shape": [2], "data_offsets": shifted([2, 4])}}
    yield "a hole before a tensor", weights(beside(late, bytes(4)))


@collect("name")
def _name() -> Iterator[tuple[str, Fault]]:
    names = [
        "",
        "/etc/passwd",
        "../up",
        "a/../../b",
        "..",
        "./here",
        "\\\\host\\share",
        "C:\\x",
        "line\nbreak",
        "tab\tkey",
    ]
    names += [
        "nul\0key",
        "bell\7",
        "\x1b[31mred",
        "\u202eright to left",
        "\u2028line",
        "x" * 600,
        "a..b",
        "\x7f",
        "\ud7ff\u0085",
    ]
    for name in names:
        yield ascii(name)[:40], weights(save({name: np.ones(2, np.float32), **lora_pair("q")}))
    lone = raw_safetensors(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x")
    yield "lone surrogate", weights(lone)


SOUND["bytes"] = weights(VALID)
SOUND["header"] = weights(entry())
SOUND["name"] = weights(save({HEAD: np.ones(2, np.float32), **lora_pair("q")}))
