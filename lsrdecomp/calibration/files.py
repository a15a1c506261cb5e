"""Files of a calibration: sums of an unfinished run, and the finished statistics; each appears whole or not at all.

The layout of the finished files is told where they are read, in `lsrdecomp.checkpoints.statistics`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.calibration.accumulators import Counts, LayerSums
from lsrdecomp.checkpoints.files import sha256
from lsrdecomp.checkpoints.safetensors import read_header
from lsrdecomp.checkpoints.statistics import FORMAT, METADATA, PARTS, TENSORS, VERSION
from lsrdecomp.checkpoints.writing import TensorWriter
from lsrdecomp.errors import CheckpointError

PARTIAL = "partial.safetensors"
LIBRARIES = ("lsrdecomp", "torch", "transformers")


def check_unfinished(out: Path) -> None:
    """Raise `CheckpointError` if ``out`` holds finished statistics, or is something else than a directory."""
    if out.exists() and not out.is_dir():
        raise CheckpointError("the output is not a directory; choose another", path=out)
    if (out / METADATA).exists():
        raise CheckpointError("holds finished statistics; choose another output, or remove it", path=out)


def write_partial(out: Path, settings: Mapping[str, Any], layers: Mapping[str, LayerSums], counts: Counts) -> None:
    """Save the sums of an unfinished run."""
    tensors = {f"{name}.{part}": value for name, sums in layers.items() for part, value in sums.state().items()}
    about = {"settings": json.dumps(settings, sort_keys=True), "counts": json.dumps(asdict(counts))}
    _save(tensors, out / PARTIAL, about)


def read_partial(out: Path, settings: Mapping[str, Any], layers: Mapping[str, LayerSums]) -> Counts:
    """Fill the sums from an unfinished run in ``out``, if there is one, and say how far it came.

    Raises
    ------
    CheckpointError
        If that run had other settings: the message names them.
    """
    path = out / PARTIAL
    if not path.exists():
        return Counts()
    header = read_header(path)
    _same_settings(path, header.metadata, settings)
    for name, sums in layers.items():
        sums.load({part: header.tensors[f"{name}.{part}"].read() for part in sums.state()})
    return Counts(**json.loads(header.metadata["counts"]))


def _same_settings(path: Path, metadata: Mapping[str, str], settings: Mapping[str, Any]) -> None:
    saved = json.loads(metadata.get("settings", "{}"))
    differing = [key for key in sorted({*settings, *saved}) if settings.get(key) != saved.get(key)]
    if differing:
        now = ", ".join(f"{key} {str(saved.get(key))[:60]} → {str(settings.get(key))[:60]}" for key in differing)
        raise CheckpointError(f"an unfinished run with other settings ({now}); remove it to start again", path=path)


@dataclass(frozen=True, slots=True)
class Finished:
    """What is to be written of some layers: tensors by name, what the metadata says of each, and what was seen."""

    tensors: Mapping[str, NDArray[Any]]
    about: Mapping[str, Any]
    counts: Counts
    texts: str  # a hash of what was read

    def joined(self, other: Finished) -> Finished:
        """With the layers of another pass over the same batches; of both the first one's counts, if it has any."""
        counts = self.counts if self.counts.batches else other.counts
        return Finished({**self.tensors, **other.tensors}, {**self.about, **other.about}, counts, other.texts)


def finished(layers: Mapping[str, LayerSums], counts: Counts, rank: int, texts: str) -> Finished:
    """The sums of layers as what is kept of them: ``rank`` leading eigenpairs of each side."""
    tensors: dict[str, Any] = {}
    about: dict[str, Any] = {}
    for name, sums in layers.items():
        into, out, fisher = sums.spectra(counts.answers, rank)
        for side, spectrum in (("input", into), ("output", out)):
            for part, value in zip(PARTS, (spectrum.vectors, spectrum.values, spectrum.rest), strict=True):
                # Entries of unit vectors: half precision holds them to 5e-4 of their size, whatever the scale.
                tensors[f"{name}.{side}.{part}"] = np.asarray(
                    value, dtype=np.float16 if value is spectrum.vectors else np.float32
                )
        shape = [len(out.vectors), len(into.vectors)]
        ranks = [out.values.size, into.values.size]
        about[name] = {"shape": shape, "ranks": ranks, "tokens": sums.tokens, "fisher_trace": fisher}
    return Finished(tensors, about, counts, texts)


def write_group(out: Path, number: int, settings: Mapping[str, Any], done: Finished) -> None:
    """Save the finished layers of one group of several; the sums of its unfinished run go."""
    about = {"settings": json.dumps(settings, sort_keys=True), "counts": json.dumps(asdict(done.counts))}
    _save(done.tensors, _group(out, number), about | {"about": json.dumps(done.about), "texts": done.texts})
    (out / PARTIAL).unlink(missing_ok=True)


def read_group(out: Path, number: int, settings: Mapping[str, Any]) -> Finished | None:
    """What `write_group` saved in ``out``; None if there is no such file. Errors as `read_partial`."""
    path = _group(out, number)
    if not path.exists():
        return None
    header = read_header(path)
    _same_settings(path, header.metadata, settings)
    counts = Counts(**json.loads(header.metadata["counts"]))
    tensors = {name: tensor.read() for name, tensor in header.tensors.items()}
    return Finished(tensors, json.loads(header.metadata["about"]), counts, header.metadata["texts"])


def _group(out: Path, number: int) -> Path:
    return out / f"group-{number}.safetensors"


def write_statistics(out: Path, settings: Mapping[str, Any], done: Finished) -> None:
    """Write the finished statistics and remove what was unfinished; the metadata comes last and marks the end."""
    _save(done.tensors, out / TENSORS, {"format": FORMAT, "version": str(VERSION)})
    versions = {library: version(library) for library in LIBRARIES}
    metadata = {"format": FORMAT, "version": VERSION, "settings": settings, **asdict(done.counts)}
    metadata["sha256"] = sha256(out / TENSORS)
    text = json.dumps(metadata | {"layers": done.about, "made_with": versions}, indent=2, sort_keys=True) + "\n"
    _replace(out / METADATA, lambda part: part.write_text(text, encoding="utf-8"))
    for left in (out / PARTIAL, *out.glob("group-*.safetensors")):
        left.unlink(missing_ok=True)


def _save(tensors: Mapping[str, NDArray[Any]], path: Path, metadata: Mapping[str, str]) -> None:
    def write(part: Path) -> None:
        with TensorWriter(part.parent) as writer:
            for name, value in tensors.items():
                writer.add(name, value)
            writer.write(part, metadata)

    _replace(path, write)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise CheckpointError(f"could not be written: {error.strerror or error}", path=path) from error
    finally:
        part.unlink(missing_ok=True)
