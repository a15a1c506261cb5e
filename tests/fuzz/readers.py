"""Every reader of strangers' bytes as one function of those bytes, with sound seeds made by code.

A reader may answer or raise `LsrError` with one printable line. Anything else is a find.
"""

from __future__ import annotations

import base64
import io
import json
import math
import pickle
import re
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize
from safetensors.numpy import save

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from checkpoint_files import CONFIG, PREFIX, lora_pair, raw_safetensors

from lsrdecomp.checkpoints import open_checkpoint
from lsrdecomp.checkpoints.encodings import bytes_of, entry_of
from lsrdecomp.checkpoints.files import SUMS, changed_files, parse_json, write_sums
from lsrdecomp.checkpoints.packed import PackedLayer
from lsrdecomp.checkpoints.packed_index import index_text, read_index, read_packed
from lsrdecomp.checkpoints.pickles import read_pickle
from lsrdecomp.checkpoints.statistics import read_statistics
from lsrdecomp.checkpoints.tensors import FLOATS, read_header
from lsrdecomp.cli.fleet import read_plan
from lsrdecomp.compression.settings import CompressionPlan
from lsrdecomp.compression.verify import verify
from lsrdecomp.errors import LsrError
from lsrdecomp.fleet.manifest import MANIFEST, Manifest
from lsrdecomp.formats.quantized import QuantizedMatrix, QuantizedProduct, SpectralCode
from lsrdecomp.kronecker.shape import ProductShape

Read = Callable[[bytes, Path], Any]
MOST_BYTES = 2048
CEILING = 2**24
"""What a layer may take while fuzzing: declared sizes above it are refused, as with
--max-memory."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Something that reads bytes, and bytes it can read."""

    read: Read
    seeds: Callable[[], list[bytes]]
    torch: bool = False

    def __call__(self, content: bytes, folder: Path) -> None:
        """Read; `AssertionError` unless a refusal is one short printable line."""
        try:
            self.read(content, folder)
        except LsrError as error:
            message = str(error).replace(str(folder), "")
            assert message.isprintable(), message
            assert 0 < len(message) < 1500, message


READERS: dict[str, Reader] = {}


def reader(seeds: Callable[[], list[bytes]], **options: Any) -> Callable[[Read], Read]:
    """Enter a function into `READERS` under its own name."""

    def enter(read: Read) -> Read:
        READERS[read.__name__] = Reader(read, seeds, **options)
        return read

    return enter


def load_all(place: Path) -> None:
    """Open an adapter and read every number in it."""
    checkpoint = open_checkpoint(place, alpha=None, max_memory=CEILING)
    for layer in checkpoint.layers:
        layer.load()
    for tensor in checkpoint.extras.values():
        tensor.read()


def sound_safetensors() -> list[bytes]:
    rng = np.random.default_rng(0)
    halves = {
        "lora_unet_q.lora_down.weight": (2, 3),
        "lora_unet_q.lora_up.weight": (4, 2),
        "lora_unet_q.alpha": (),
    }
    hada = {f"m.hada_{part}": (2, 2) for part in ("w1_a", "w1_b", "w2_a", "w2_b")}
    lokr = {"m.lokr_w1": (2, 2), "m.lokr_w2_a": (2, 1), "m.lokr_w2_b": (1, 3)}
    known = [{"unet:0:up": (2, 1), "unet:0:down": (1, 2)}, {"q.lora_A": (1, 2), "q.lora_B": (2, 1)}]
    known += [{"unet.q.lora_A.weight": (1, 2), "unet.q.lora_B.weight": (2, 1)}, halves, hada, lokr]
    files = [
        {name: rng.standard_normal(shape).astype(np.float32) for name, shape in one.items()}
        for one in known
    ]
    files.append({"b": np.ones(3, "bfloat16"), "e": np.ones((0, 2), np.int8), "t": np.array(True)})
    return [save(one) for one in files] + [save(lora_pair("q", 2, 3, 1), {"format": "pt"})]


@reader(sound_safetensors)
def safetensors(content: bytes, folder: Path) -> None:
    """A weight file; what we accept reads as the safetensors library reads it."""
    path = folder / "x.safetensors"
    path.write_bytes(content)
    header = read_header(path)
    theirs = {name: bytes(entry["data"]) for name, entry in deserialize(content)}
    assert theirs == {name: tensor.read().tobytes() for name, tensor in header.tensors.items()}
    load_all(path)


def sound_headers() -> list[bytes]:
    return [
        content[8 : 8 + int.from_bytes(content[:8], "little")] for content in sound_safetensors()
    ]


@reader(sound_headers)
def header(content: bytes, folder: Path) -> None:
    """The header alone, with as many bytes behind it as it asks for.

    So the formats behind the check of the layout are reached.
    """
    size = max((int(text) for text in re.findall(rb"\d{1,4}(?=\])", content)), default=0)
    path = folder / "h.safetensors"
    path.write_bytes(raw_safetensors(content, b"\0\0\x80\x3f" * (size // 4) + bytes(size % 4)))
    load_all(path)


LSR = {
    "peft_type": "LSR",
    "r": 2,
    "inner_shape": [2, 1],
    "order": 2,
    "separation_rank": [3, 2],
    "lsr_alpha": 2,
}


def sound_configs() -> list[bytes]:
    more = {
        "rank_pattern": {"q": 2},
        "alpha_pattern": {"^layers\\.q": 3.5},
        "target_modules": "all-linear",
    }
    shapes = {"shape_pattern": {"q": {"out": [2, 2], "inner": [2, 1], "into": [3, 2]}}}
    lora = {key: value for key, value in CONFIG.items() if value}
    configs = [
        lora,
        lora | more,
        LSR,
        LSR | shapes,
        LSR | {"separation_rank_pattern": {"q": [3, 2]}},
    ]
    configs += [
        {"peft_type": "LOKR", "r": 2, "alpha": 4},
        {"peft_type": "LOHA", "r": 2, "alpha": 4},
    ]
    return [json.dumps(config).encode() for config in configs]


def _weights_of(config: bytes) -> bytes:
    if b"LSR" in config:
        return save(_lsr_tensors())
    if b"LOKR" in config:
        return save({f"{PREFIX}q.lokr_w1": np.ones((2, 2)), f"{PREFIX}q.lokr_w2": np.ones((2, 3))})
    if b"LOHA" in config:
        return save(
            {f"{PREFIX}q.hada_{part}": np.ones((2, 2)) for part in ("w1_a", "w1_b", "w2_a", "w2_b")}
        )
    return save(lora_pair("q"))


@reader(sound_configs)
def config(content: bytes, folder: Path) -> None:
    """adapter_config.json beside sound weights."""
    (folder / "adapter_config.json").write_bytes(content)
    (folder / "adapter_model.safetensors").write_bytes(_weights_of(content))
    load_all(folder)


@reader(
    lambda: [*sound_configs(), *sound_headers(), b'{"a":[1e5,null,true,"\\u0000"],"b":{"c":-0.5}}']
)
def json_text(content: bytes, folder: Path) -> None:
    """Any JSON file of ours."""
    parse_json(content, folder / "x.json")


def sound_torch() -> list[bytes]:
    import torch

    files = []
    tensors = {name: torch.tensor(array) for name, array in lora_pair("q", 2, 3, 1).items()}
    for content in (
        tensors,
        list(tensors.values()),
        {"h": torch.ones(3, dtype=torch.bfloat16)[1:]},
    ):
        for new in (True, False):
            file = io.BytesIO()
            torch.save(content, file, _use_new_zipfile_serialization=new)
            files.append(file.getvalue())
    return [*files, pickle.dumps({"a": 1}), b"\x80\x02}q\x00."]


@reader(sound_torch, torch=True)
def torch_file(content: bytes, folder: Path) -> None:
    """A .bin file: zip or old pickle."""
    path = folder / "x.bin"
    path.write_bytes(content)
    for tensor in read_pickle(path, CEILING).values():
        if tensor.nbytes <= CEILING:
            tensor.read()


def _sums_folder(folder: Path) -> Path:
    place = folder / "sums"
    if not place.exists():
        place.mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (place / name).write_bytes(name.encode())
        write_sums(place)
    return place


def sound_sums() -> list[bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return [(_sums_folder(Path(folder)) / SUMS).read_bytes()]


@reader(sound_sums)
def sums(content: bytes, folder: Path) -> None:
    """SHA256SUMS: sound only if every line is true."""
    place = _sums_folder(folder)
    (place / SUMS).write_bytes(content)
    changed_files(place)


def _codes() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def side(bits: int, terms: int, *sizes: tuple[int, int]) -> QuantizedMatrix:
        top = 2 ** (bits - 1) - 1
        codes = tuple(rng.integers(-top, top + 1, (terms, *size)).astype(np.int8) for size in sizes)
        return QuantizedMatrix(codes, rng.random(terms).astype(np.float16), -3, bits)

    parts = [tuple(rng.integers(-1, 2, size).astype(np.int8) for _ in range(2)) for size in (4, 6)]
    return {
        "a.q": QuantizedProduct(side(4, 3, (2, 2), (2, 1)), side(8, 2, (2, 3), (1, 2))),
        "b": QuantizedProduct(side(4, 0, (2, 1), (2, 1)), side(4, 1, (1, 3), (1, 2))),
        "c": SpectralCode(*parts, rng.random(2).astype(np.float16), 1, (2, 3), (4, 6)),
        "d": SpectralCode((), (), np.zeros(0, np.float16), 0, (), (4, 6)),
    }


def sound_packed() -> list[bytes]:
    codes = _codes()
    return [_by_01(codes), *(_by_01({name: code}) for name, code in codes.items())]


def _by_01(codes: dict[str, Any]) -> bytes:
    """The tensor of version 0.1."""
    index = zlib.compress(
        json.dumps([[name, *entry_of(code)] for name, code in codes.items()]).encode()
    )
    return len(index).to_bytes(4, "little") + index + _numbers(codes)


def _numbers(codes: dict[str, Any]) -> bytes:
    return b"".join(piece.tobytes() for code in codes.values() for piece in bytes_of(code))


@reader(sound_packed)
def packed(content: bytes, folder: Path) -> None:
    """Packed integer layers of version 0.1."""
    _unpack(read_packed(np.frombuffer(content, np.uint8)))


def _unpack(layers: Mapping[str, PackedLayer]) -> None:
    for layer in layers.values():
        sizes = [shape for side in layer.factor_shapes for shape in side]
        if 8 * sum(math.prod(size) for size in sizes) <= CEILING:
            factors = [factor for side in layer.factors() for factor in side]
            assert [factor.shape for factor in factors] == sizes
            assert layer.storage in FLOATS or all(np.isfinite(factor).all() for factor in factors)


def sound_numbers() -> list[bytes]:
    codes, shape = _codes(), ProductShape((2, 2), (1, 2), (3, 1))
    entries = {name: entry_of(code) for name, code in codes.items()}
    floats = index_text(
        {"q": ["floats", shape.out, shape.inner, shape.into, "bfloat16", 2, 1]},
        {"q": ("conv", (1, 1))},
        exact=True,
    )
    texts = {index_text(entries): _numbers(codes), floats: bytes(2 * shape.parameters(2, 1))}
    opened = {
        zlib.decompress(base64.b85decode(text[2:]), -15): numbers for text, numbers in texts.items()
    }
    return [len(index).to_bytes(2, "little") + index + numbers for index, numbers in opened.items()]


@reader(sound_numbers)
def numbers(content: bytes, folder: Path) -> None:
    """The index of packed layers, laid open, after its length, and their numbers."""
    length = 2 + int.from_bytes(content[:2], "little")
    squeezed = zlib.compressobj(wbits=-15)
    text = base64.b85encode(squeezed.compress(content[2:length]) + squeezed.flush()).decode()
    found, body = read_index(f"3:{text}"), content[length:]
    found.config_fields()
    _unpack(found.layers(np.frombuffer(body, np.uint8)))


def sound_indices() -> list[bytes]:
    found = []
    for content in sound_packed():
        length = int.from_bytes(content[:4], "little")
        found.append(zlib.decompress(content[4 : 4 + length]) + b"\0" + content[4 + length :])
    return found


@reader(sound_indices)
def packed_index(content: bytes, folder: Path) -> None:
    """Packed layers with their index laid open: text, a zero byte, codes."""
    text, _, codes = content.partition(b"\0")
    squeezed = zlib.compress(text, 1)
    packed(len(squeezed).to_bytes(4, "little") + squeezed + codes, folder)


PLAN = CompressionPlan(rtol=0.1)


def sound_manifests() -> list[bytes]:
    lines = [
        {"plan": PLAN.to_json()},
        {"name": "a/b", "state": "done", "parameters": 3, "relative_error": 0.5},
    ]
    lines.append({"name": "c", "state": "failed", "message": "no", "attempts": 2})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return [text.encode(), text.encode()[:-9], b"", b'{"plan"']


@reader(sound_manifests)
def manifest(content: bytes, folder: Path) -> None:
    """The record of a fleet; what was read can be appended to and read again."""
    path = folder / MANIFEST
    path.write_bytes(content)
    held = Manifest(path, PLAN).outcomes
    assert Manifest(path, PLAN).outcomes == held


@reader(
    lambda: [
        b"[compress]\nrtol = 0.1\nstorage = 'float16'\n",
        b"[compress]\nseparation_rank=2\ninner_shape=[4,2]",
    ]
)
def plan(content: bytes, folder: Path) -> None:
    """The plan of a fleet."""
    path = folder / "plan.toml"
    path.write_bytes(content)
    read_plan(path)


def sound_records() -> list[bytes]:
    source = {
        "source": {"file": "x", "format": "lsr", "sha256": "0" * 64},
        "kinds": {"q": ["conv", [1, 1]]},
    }
    report = {"layers": [{"name": "q", "relative_error": 0.25}]}
    records = [
        source,
        {"dropped": ["v"], "derived_from": source},
        {"versions": {"lsrdecomp": "0.1"}},
    ]
    return [json.dumps(record).encode() + b"\0" + json.dumps(report).encode() for record in records]


@reader(sound_records)
def record(content: bytes, folder: Path) -> None:
    """Two JSON texts: where an adapter came from and what it measured, as `verify` reads it."""
    own, _, report = content.partition(b"\0")
    source, written = folder / "source", folder / "written"
    for place in (source, written):
        place.mkdir(exist_ok=True)
    if not (source / "adapter_config.json").exists():
        (source / "adapter_config.json").write_text(json.dumps(CONFIG))
        (source / "adapter_model.safetensors").write_bytes(save(lora_pair("q")))
        (written / "adapter_config.json").write_text(json.dumps(LSR))
    weights = save(_lsr_tensors(), {"lsrdecomp": own.decode("utf-8", "replace")})
    (written / "adapter_model.safetensors").write_bytes(weights)
    (written / "compression.json").write_bytes(report)
    verify(open_checkpoint(source), open_checkpoint(written))


def _lsr_tensors() -> dict[str, np.ndarray]:
    sizes = {
        "A.factor_1": (2, 2, 3),
        "A.factor_2": (2, 1, 2),
        "B.factor_1": (3, 2, 2),
        "B.factor_2": (3, 2, 1),
    }
    return {f"{PREFIX}q.lsr_{key}": np.ones(shape, np.float32) for key, shape in sizes.items()}


def sound_statistics() -> list[bytes]:
    """Return headers for numbers that are all zero.

    Without eigenpairs they are sound, with one they are not orthonormal.
    """
    headers = []
    for kept in (0, 1):
        tensors = {}
        for side, size in (("input", 3), ("output", 2)):
            tensors |= {
                f"q.{side}.eigenvectors": np.eye(size, kept),
                f"q.{side}.eigenvalues": np.ones(kept),
            }
            tensors[f"q.{side}.rest"] = np.array(0.5)
        content = save(tensors)
        headers.append(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return headers


@reader(sound_statistics)
def statistics(content: bytes, folder: Path) -> None:
    """The header of a file of statistics."""
    size = max((int(text) for text in re.findall(rb"\d{1,4}(?=\])", content)), default=0)
    (folder / "statistics.json").write_text('{"format": "lsrdecomp-statistics", "version": 1}')
    (folder / "statistics.safetensors").write_bytes(raw_safetensors(content, bytes(size)))
    for norm in read_statistics(folder).values():
        assert norm.output.size * norm.input.size > 0
