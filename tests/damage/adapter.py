"""Adapters as the bytes of their files: sound ones, and what is done to them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_files import CONFIG, PREFIX, lora_pair
from safetensors.numpy import save

WEIGHTS = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"
PICKLE = "adapter_model.bin"
SINGLE = "x.safetensors"
DOWN, UP = f"{PREFIX}q.lora_A.weight", f"{PREFIX}q.lora_B.weight"
HEAD = f"{PREFIX}head.weight"

Fault = Callable[[Path], Path]
"""Makes a directory and returns what to open there."""
FAULTS: dict[str, Fault] = {}
"""By "group: name"."""
SOUND: dict[str, Fault] = {}
"""What the faults start from, by name."""


Content = bytes | Callable[[], bytes]
"""The bytes of a file, or what makes them when they are asked for."""


@dataclass(frozen=True, slots=True)
class Files:
    """An adapter as the contents of its files by name."""

    contents: Mapping[str, Content]

    def __call__(self, path: Path) -> Path:
        path.mkdir(parents=True)
        for name in self.contents:
            (path / name).write_bytes(self.read(name))
        return path

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        content = self.contents[name]
        return content() if callable(content) else content


def collect(group: str) -> Callable[[Callable[[], Iterator[tuple[str, Fault]]]], None]:
    """Add the faults that a generator yields to the table, under a group's name."""

    def add(generate: Callable[[], Iterator[tuple[str, Fault]]]) -> None:
        for name, fault in generate():
            key = f"{group}: {name}"
            assert key not in FAULTS, key
            FAULTS[key] = fault

    return add


# -- contents of files -----------------------------------------------------------------------------


def weights_file(
    tensors: Mapping[str, np.ndarray] | None = None, metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return a safetensors file; without tensors, one of two LoRA layers."""
    if tensors is None:
        tensors = {**lora_pair("layers.0.q"), **lora_pair("layers.1.v", seed=1)}
    return save(dict(tensors), {"format": "pt"} if metadata is None else dict(metadata))


def config_file(**fields: Any) -> bytes:
    """Return an adapter_config.json of LoRA, some fields of it changed."""
    return json.dumps(CONFIG | fields).encode()


def torch_file(make: Callable[[Any], Any], **options: Any) -> bytes:
    """Return a torch file of whatever ``make(torch)`` gives."""
    import torch

    file = io.BytesIO()
    torch.save(make(torch), file, **options)
    return file.getvalue()


def lora_tensors(torch: Any) -> dict[str, Any]:
    """Return the halves of one LoRA layer as torch's tensors."""
    return {name: torch.tensor(array) for name, array in lora_pair("q").items()}


# -- adapters --------------------------------------------------------------------------------------


def weights(content: Content) -> Files:
    """Return a sound config beside this content for weights."""
    return Files({WEIGHTS: content, SETTINGS: config_file()})


def settings(content: Content) -> Files:
    """Return sound weights beside this content for a config."""
    return Files({WEIGHTS: weights_file, SETTINGS: content})


def tensors(given: Mapping[str, np.ndarray] | None = None, **config: Any) -> Files:
    """Return these tensors, or sound ones, under a sound config with some fields changed."""
    return Files({WEIGHTS: partial(weights_file, given), SETTINGS: partial(config_file, **config)})


def single(given: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> Files:
    """Return a weight file without a config."""
    return Files({SINGLE: partial(weights_file, given, metadata or {})})


def binary(content: Content) -> Files:
    """Return a sound config beside this content for a torch file."""
    return Files({PICKLE: content, SETTINGS: config_file()})


# -- an LSR directory of one layer -----------------------------------------------------------------

LSR_CONFIG = {
    "peft_type": "LSR",
    "r": 2,
    "inner_shape": [2, 1],
    "order": 2,
    "separation_rank": [3, 2],
    "lsr_alpha": 2,
}
LSR_SIZES = {
    "A.factor_1": (2, 2, 3),
    "A.factor_2": (2, 1, 2),
    "B.factor_1": (3, 2, 2),
    "B.factor_2": (3, 2, 1),
}
LSR_KEY = f"{PREFIX}q.lsr_"


def lsr_tensors(make: Callable[[tuple[int, ...]], np.ndarray]) -> dict[str, np.ndarray]:
    """Return the factors of one layer, each made of its shape."""
    return {f"{LSR_KEY}{key}": make(size).astype(np.float32) for key, size in LSR_SIZES.items()}


def lsr(change: Callable[[dict[str, np.ndarray], dict[str, Any]], Any]) -> Files:
    """Return an LSR directory, its tensors and its config changed before they are written."""

    factors = lsr_tensors(np.random.default_rng(0).standard_normal)
    config: dict[str, Any] = dict(LSR_CONFIG)
    change(factors, config)
    return tensors(factors, **config)


def _ones(*shapes: tuple[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {name: np.ones(shape) for name, shape in shapes}


SOUND["peft"] = tensors()
SOUND["layers"] = tensors({DOWN: np.ones((2, 6), np.float32), UP: np.ones((4, 2), np.float32)})
SOUND["pickle"] = binary(lambda: torch_file(lora_tensors))
SOUND["lsr"] = lsr(lambda factors, config: None)
SOUND["kohya"] = single(
    _ones(("lora_unet_q.lora_down.weight", (2, 6)), ("lora_unet_q.lora_up.weight", (4, 2)))
)
SOUND["diffusers"] = single(
    _ones(("unet.q.lora_A.weight", (2, 6)), ("unet.q.lora_B.weight", (4, 2)))
)
SOUND["loha"] = single(_ones(*((f"m.hada_w{i}_{half}", (2, 2)) for i in "12" for half in "ab")))
SOUND["lokr"] = single(
    _ones(("m.lokr_w1", (2, 2)), ("m.lokr_w2_a", (4, 2)), ("m.lokr_w2_b", (2, 6)))
)
