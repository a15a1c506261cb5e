"""Write the small files that later versions must open: ``python tests/written/write.py``.

A person runs it once after a release, in a checkout of it, for a folder of its version.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import reduce
from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import lsrdecomp as lsr

STORAGES = ("float32", "float16", "int8", "int4")
SIDES = {"layers.0.q": (16, 12), "layers.1.v": (8, 12)}
RANK = 4


def write_lora(folder: Path, rng: np.random.Generator) -> Path:
    """Write a LoRA of two layers, as PEFT does."""
    tensors = {}
    for name, (m, n) in SIDES.items():
        up = rng.standard_normal((m, RANK)) * 0.5 ** np.arange(RANK)
        key = f"base_model.model.{name}"
        tensors[f"{key}.lora_A.weight"] = rng.standard_normal((RANK, n)).astype("float32")
        tensors[f"{key}.lora_B.weight"] = up.astype("float32")
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 8,
        "target_modules": ["q", "v"],
        "base_model_name_or_path": "tiny",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder


def delta_weights(path: Path) -> dict[str, np.ndarray]:
    """Return ΔW of each layer of an adapter, formed by NumPy alone of what is read."""
    found = {}
    for layer in lsr.open_checkpoint(path).layers:
        left, right = layer.load()
        if isinstance(left, tuple):
            left, right = formed(left), formed(right)
        found[layer.name] = layer.scale * np.asarray(left, "float64") @ np.asarray(right, "float64")
    return found


def formed(stacks: tuple[np.ndarray, ...]) -> np.ndarray:
    """Return Σ_k M_k⁽¹⁾ ⊗ M_k⁽²⁾ ⊗ … of stacks of factors."""
    terms = zip(*(np.asarray(stack, "float64") for stack in stacks), strict=True)
    return sum(reduce(np.kron, factors) for factors in terms)


def write_all(folder: Path) -> None:
    """Write what each public road writes, and the numbers that are in it."""
    rng = np.random.default_rng(5)
    numbers: dict[str, np.ndarray] = {}
    lora = write_lora(folder / "lora", rng)
    for storage in STORAGES:
        place = folder / f"lsr-{storage}"
        made = lsr.compress(lora, structure="lsr", ratio=1.5, storage=storage)
        made.save(place, bare=storage != "int8")
    lsr.compress(lora, ratio=2).save(folder / "by-ratio")
    small = lsr.open_checkpoint(folder / "lsr-float32")
    lsr.lora.compress.export_lora(small, folder / "exported", profile="peft")
    for place in sorted(folder.iterdir()):
        for name, matrix in delta_weights(place).items():
            numbers[f"{place.name}/{name}"] = matrix.astype("float32")
    matrix = rng.standard_normal((12, 20))
    for name, kind in (("matrix", matrix), ("complex", matrix + 1j * matrix[::-1])):
        result = lsr.decompose(kind, "3x4, 4x5", rank=3)
        result.save(folder / f"{name}.safetensors")
        held = np.asarray(result.approximation.to_matrix())
        numbers[f"{name}.safetensors"] = held.view("float64")
    three = lsr.decompose(matrix, "3x5, 2x2, 2x2", rank=4).approximation
    three.save(folder / "three.safetensors")
    numbers["three.safetensors"] = np.asarray(three.to_matrix())
    save_file(numbers, folder / "numbers.safetensors")


if __name__ == "__main__":
    final = Path(__file__).parent / version("lsrdecomp")
    with tempfile.TemporaryDirectory() as temporary:
        write_all(Path(temporary) / "files")
        shutil.copytree(Path(temporary) / "files", final)
    print(f"wrote {final}; name the version and the commit in README.md beside it")
