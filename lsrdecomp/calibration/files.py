"""What a calibration keeps: sums of an unfinished run in its journal, and the finished statistics in their directory.

The layout of the finished files is told where they are read, in `lsrdecomp.checkpoints.statistics`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lsrdecomp.calibration.accumulators import Counts, LayerSums
from lsrdecomp.checkpoints.files import sha256
from lsrdecomp.checkpoints.statistics import FORMAT, METADATA, PARTS, TENSORS, VERSION
from lsrdecomp.checkpoints.tensors import TensorWriter
from lsrdecomp.checkpoints.writing import new_file
from lsrdecomp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from lsrdecomp.checkpoints.journal import Journal

LIBRARIES = ("lsrdecomp", "torch", "transformers")


def check_unfinished(out: Path) -> None:
    """Raise `CheckpointError` if ``out`` holds finished statistics, or is something else than a directory."""
    if out.exists() and not out.is_dir():
        raise CheckpointError("the output is not a directory; choose another", path=out)
    if (out / METADATA).exists():
        raise CheckpointError(
            "holds finished statistics; choose another output, or remove it", path=out
        )


def save_sums(journal: Journal, key: str, layers: Mapping[str, LayerSums], counts: Counts) -> None:
    """Keep the sums of an unfinished run."""
    tensors = {
        f"{name}.{part}": tensor
        for name, sums in layers.items()
        for part, tensor in sums.tensors.items()
    }
    journal.put(
        key, {name: tensor.cpu().numpy() for name, tensor in tensors.items()}, facts=asdict(counts)
    )


def load_sums(journal: Journal, key: str, layers: Mapping[str, LayerSums]) -> Counts:
    """Fill the sums from those that were kept, if there are any, and say how far they came."""
    result = journal.get(key)
    if result is None:
        return Counts()
    for name, sums in layers.items():
        for part, tensor in sums.tensors.items():
            tensor.copy_(torch.from_numpy(np.asarray(result.arrays[f"{name}.{part}"].read())))
    return Counts(**result.facts)


def leading_eigenpairs(
    layers: Mapping[str, LayerSums], answers: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is kept of the sums of layers: tensors by name, and what the metadata says of each layer."""
    tensors: dict[str, Any] = {}
    about: dict[str, Any] = {}
    for name, sums in layers.items():
        into, out, fisher = sums.spectra(answers)
        for side, spectrum in (("input", into), ("output", out)):
            for part, value in zip(
                PARTS, (spectrum.basis, spectrum.values, spectrum.rest), strict=True
            ):
                # Entries of unit vectors: half precision holds them to 5e-4 of their size, whatever
                # the scale.
                tensors[f"{name}.{side}.{part}"] = np.asarray(
                    value, dtype=np.float16 if value is spectrum.basis else np.float32
                )
        shape = [out.size, into.size]
        ranks = [out.values.size, into.values.size]
        about[name] = {
            "shape": shape,
            "ranks": ranks,
            "tokens": int(sums.tokens),
            "fisher_trace": fisher,
        }
    return tensors, about


def write_statistics(
    out: Path,
    settings: Mapping[str, Any],
    tensors: Mapping[str, NDArray[Any]],
    about: Mapping[str, Any],
    counts: Counts,
) -> None:
    """Write the finished statistics; the metadata comes last and marks the end."""
    with new_file(out / TENSORS, force=True) as part, TensorWriter(out) as writer:
        for name, value in tensors.items():
            writer.add(name, value)
        writer.write(part, {"format": FORMAT, "version": str(VERSION)})
    versions = {library: version(library) for library in LIBRARIES}
    metadata = {"format": FORMAT, "version": VERSION, "settings": settings, **asdict(counts)}
    metadata["sha256"] = sha256(out / TENSORS)
    with new_file(out / METADATA, force=True) as part:
        text = json.dumps(
            metadata | {"layers": about, "made_with": versions}, indent=2, sort_keys=True
        )
        part.write_text(text + "\n", encoding="utf-8")
