"""Readers of an adapter's files: weights, headers, configs and torch files."""

from __future__ import annotations

import io
import json
import pickle
import re
from pathlib import Path

import numpy as np
from checkpoint_files import CONFIG, PREFIX, lora_pair, raw_safetensors
from safetensors import deserialize
from safetensors.numpy import save

from damage.adapter import LSR_CONFIG, PICKLE, SETTINGS, SINGLE, WEIGHTS, lsr_tensors
from damage.reader import MAX_MEMORY, reader
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.file_checks import parse_json
from lsrdecomp.lora.files.pickles import read_pickle
from lsrdecomp.lora.files.tensors import read_header


def load_all(place: Path) -> None:
    """Open an adapter and read every number in it."""
    checkpoint = open_checkpoint(place, alpha=None, max_memory=MAX_MEMORY)
    for layer in checkpoint.layers:
        layer.load()
    for tensor in checkpoint.extras.values():
        tensor.read()


def sound_safetensors() -> list[bytes]:
    rng = np.random.default_rng(0)
    kohya = {
        "lora_unet_q.lora_down.weight": (2, 3),
        "lora_unet_q.lora_up.weight": (4, 2),
        "lora_unet_q.alpha": (),
    }
    loha = {f"m.hada_{part}": (2, 2) for part in ("w1_a", "w1_b", "w2_a", "w2_b")}
    lokr = {"m.lokr_w1": (2, 2), "m.lokr_w2_a": (2, 1), "m.lokr_w2_b": (1, 3)}
    shapes_by_file = [
        {"q.lora_A": (1, 2), "q.lora_B": (2, 1)},
        {"unet.q.lora_A.weight": (1, 2), "unet.q.lora_B.weight": (2, 1)},
        kohya,
        loha,
        lokr,
    ]
    files = []
    for shapes in shapes_by_file:
        tensors = {
            name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
        }
        files.append(save(tensors))
    others = {"b": np.ones(3, "bfloat16"), "e": np.ones((0, 2), np.int8), "t": np.array(True)}
    return [*files, save(others), save(lora_pair("q", 2, 3, 1), {"format": "pt"})]


@reader(sound_safetensors, files=(WEIGHTS, SINGLE))
def safetensors(content: bytes, folder: Path) -> None:
    """A weight file; what we accept reads as the safetensors library reads it."""
    path = folder / SINGLE
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
        LSR_CONFIG,
        LSR_CONFIG | shapes,
        LSR_CONFIG | {"separation_rank_pattern": {"q": [3, 2]}},
    ]
    configs += [
        {"peft_type": "LOKR", "r": 2, "alpha": 4},
        {"peft_type": "LOHA", "r": 2, "alpha": 4},
    ]
    return [json.dumps(config).encode() for config in configs]


def _weights_of(config: bytes) -> bytes:
    if b"LSR" in config:
        return save(lsr_tensors(np.ones))
    if b"LOKR" in config:
        return save({f"{PREFIX}q.lokr_w1": np.ones((2, 2)), f"{PREFIX}q.lokr_w2": np.ones((2, 3))})
    if b"LOHA" in config:
        return save(
            {f"{PREFIX}q.hada_{part}": np.ones((2, 2)) for part in ("w1_a", "w1_b", "w2_a", "w2_b")}
        )
    return save(lora_pair("q"))


@reader(sound_configs, files=(SETTINGS,))
def config(content: bytes, folder: Path) -> None:
    """adapter_config.json beside sound weights."""
    (folder / SETTINGS).write_bytes(content)
    (folder / WEIGHTS).write_bytes(_weights_of(content))
    load_all(folder)


@reader(
    lambda: [*sound_configs(), *sound_headers(), b'{"a":[1e5,null,true,"\\u0000"],"b":{"c":-0.5}}']
)
def json_text(content: bytes, folder: Path) -> None:
    """Any JSON file of ours."""
    parse_json(content, folder / "x.json")


def sound_archives() -> list[bytes]:
    archives = []
    for save_archive in (np.savez, np.savez_compressed):
        for dtype in ("f4", "f2", "V2"):  # the last is MLX's bfloat16
            halves = {
                key: np.ones(shape, dtype) if dtype != "V2" else np.ones(shape, "f2").view("V2")
                for key, shape in {"q.lora_a": (6, 2), "q.lora_b": (2, 4)}.items()
            }
            buffer = io.BytesIO()
            save_archive(buffer, **halves)
            archives.append(buffer.getvalue())
    return archives


@reader(sound_archives)
def archive(content: bytes, folder: Path) -> None:
    """An .npz archive of old mlx-lm."""
    path = folder / "adapters.npz"
    path.write_bytes(content)
    for layer in open_checkpoint(path, alpha=4, max_memory=MAX_MEMORY).layers:
        layer.load()


def sound_torch() -> list[bytes]:
    import torch

    tensors = {name: torch.tensor(array) for name, array in lora_pair("q", 2, 3, 1).items()}
    halves = list(tensors.values())
    view = {"h": torch.ones(3, dtype=torch.bfloat16)[1:]}
    files = []
    for content in (tensors, halves, view):
        for new in (True, False):
            file = io.BytesIO()
            torch.save(content, file, _use_new_zipfile_serialization=new)
            files.append(file.getvalue())
    return [*files, pickle.dumps({"a": 1}), b"\x80\x02}q\x00."]


@reader(sound_torch, files=(PICKLE,), torch=True)
def torch_file(content: bytes, folder: Path) -> None:
    """A .bin file: zip or old pickle."""
    path = folder / "x.bin"
    path.write_bytes(content)
    for tensor in read_pickle(path, MAX_MEMORY).values():
        if tensor.nbytes <= MAX_MEMORY:
            tensor.read()
