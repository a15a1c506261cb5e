"""Small adapter directories made on the spot, for tests of readers and writers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (its import teaches NumPy the name bfloat16)
import numpy as np
from safetensors.numpy import save_file

PREFIX = "base_model.model."
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q", "v"],
    "task_type": None,
    "base_model_name_or_path": "tiny",
    "bias": "none",
    "fan_in_fan_out": False,
    "modules_to_save": None,
}


def lora_pair(
    name: str, m: int = 4, n: int = 6, r: int = 2, seed: int = 0, dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """The two tensors of one PEFT LoRA layer."""
    rng = np.random.default_rng(seed)
    return {
        f"{PREFIX}{name}.lora_A.weight": rng.standard_normal((r, n)).astype(dtype),
        f"{PREFIX}{name}.lora_B.weight": rng.standard_normal((m, r)).astype(dtype),
    }


def write_lora_directory(
    path: Path, tensors: Mapping[str, np.ndarray] | None = None, **config: Any
) -> Path:
    """Write a PEFT LoRA directory.

    ``config`` overrides fields, ``tensors`` the two layers it holds otherwise.
    """
    path.mkdir(parents=True, exist_ok=True)
    if tensors is None:
        tensors = {**lora_pair("layers.0.q"), **lora_pair("layers.1.v", seed=1)}
    save_file(dict(tensors), path / "adapter_model.safetensors", metadata={"format": "pt"})
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return path


def scaled_factors(layer: Any) -> tuple[Any, Any]:
    """Factors of both sides of an LSR layer, its scale folded in, as `write_lsr` takes them."""
    left, right = layer.load()
    return (layer.scale * left[0], *left[1:]), right


def raw_safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header, true or false."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def file_contents(path: Path) -> dict[str, bytes]:
    """Every file below a directory with its content."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
