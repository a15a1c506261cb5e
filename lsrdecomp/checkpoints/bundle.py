"""What lies at a path: its config, its weight file and the tensors' headers, before anyone says which format it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from lsrdecomp.checkpoints.files import read_json, regular_file_size
from lsrdecomp.checkpoints.pickles import read_pickle
from lsrdecomp.checkpoints.safetensors import read_header
from lsrdecomp.checkpoints.tensors import StoredTensor
from lsrdecomp.errors import CheckpointError

CONFIG = "adapter_config.json"
PEFT_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # in PEFT's own order
MLX_WEIGHTS = "adapters.safetensors"
BESIDE_CONFIG = (*PEFT_WEIGHTS, MLX_WEIGHTS)
SHARD = re.compile(r"-\d+-of-\d+\.")
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class Bundle:
    """An adapter as found. ``config`` is None where there is no adapter_config.json."""

    path: Path
    weights: Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    config: Mapping[str, Any] | None = None

    @property
    def config_path(self) -> Path:
        return self.weights.parent / CONFIG

    def config_error(self, message: str) -> CheckpointError:
        return CheckpointError(message, path=self.config_path)


def open_bundle(path: str | PathLike[str], name: str | None = None, max_memory: int | None = None) -> Bundle:
    """Find config and weights at a path and read the headers; `CheckpointError` if there is not exactly one adapter.

    Parameters
    ----------
    path : str or Path
        A directory with adapter_config.json, a directory with one weight file, or a weight file.
    name : str, optional
        Weight file or sub-directory to take where a directory has several.
    max_memory : int, optional
        Bytes that a file may have which can only be read whole.
    """
    path = Path(path)
    target = path / name if name is not None else path
    if not target.exists() and not target.is_symlink():
        raise CheckpointError("no such file or directory", path=target)
    if not target.is_dir():
        if target.suffix in (".json", ".md", ".txt", ".toml", ".yaml"):
            there = any(file.suffix in SUFFIXES for file in target.absolute().parent.iterdir())
            way_out = f"give its directory, {target.parent}" if there else f"expected one of {', '.join(SUFFIXES)}"
            raise CheckpointError(f"holds no weights; {way_out}", path=target)
        with_config = target.name in BESIDE_CONFIG and (target.parent / CONFIG).exists()
        return _read(target, target, read_json(target.parent / CONFIG) if with_config else None, max_memory)
    if (target / CONFIG).exists() or (target / CONFIG).is_symlink():
        config = read_json(target / CONFIG)
        weights = [target / file for file in BESIDE_CONFIG if (target / file).exists() or (target / file).is_symlink()]
        if not weights:
            _refuse_shards(target, [entry for entry in target.iterdir() if entry.suffix in SUFFIXES])
            raise CheckpointError(f"has {CONFIG} but no weights: {' or '.join(PEFT_WEIGHTS)} is missing", path=target)
        return _read(target, weights[0], config, max_memory)
    files = sorted(file for file in target.iterdir() if file.suffix in SUFFIXES)
    inner = sorted(entry.name for entry in target.iterdir() if (entry / CONFIG).exists())
    if inner and not files:
        names = ", ".join(map(repr, inner[:8]))
        raise CheckpointError(f"holds {len(inner)} adapters ({names}): say which by name=", path=target)
    if len(files) != 1:
        _refuse_shards(target, files)
        names = ", ".join(repr(file.name) for file in files[:8])
        text = (
            f"{len(files)} weight files ({names}): say which by name=" if files else f"no {CONFIG} and no weight file"
        )
        raise CheckpointError(f"{text}; expected an adapter directory or one of {', '.join(SUFFIXES)}", path=target)
    return _read(target, files[0], None, max_memory)


def _refuse_shards(directory: Path, files: Sequence[Path]) -> None:
    """Say of a file in parts that it is one, and which parts there are."""
    parts = sorted(file.name for file in files if SHARD.search(file.name))
    if parts:
        text = f"one file in {len(parts)} shards ({parts[0]}, …), which are not read"
        way_out = f"load all with safetensors and save them as one {PEFT_WEIGHTS[0]}; a whole model is no adapter"
        raise CheckpointError(f"{text}: {way_out}", path=directory)


def _read(path: Path, weights: Path, config: Mapping[str, Any] | None, max_memory: int | None) -> Bundle:
    if weights.suffix == ".safetensors":
        header = read_header(weights)
        return Bundle(path, weights, header.tensors, header.metadata, config)
    if regular_file_size(weights) == 0:
        raise CheckpointError("the file is empty", path=weights)
    return Bundle(path, weights, read_pickle(weights, max_memory), {}, config)
