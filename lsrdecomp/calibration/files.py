"""Files of a calibration: sums of an unfinished run in its journal, and the finished statistics.

The layout of the finished files is described where they are read, in
`lsrdecomp.checkpoints.statistics`.
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
"""Packages whose versions the metadata holds."""


def check_unfinished(out: Path) -> None:
    """Raise if ``out`` cannot take statistics.

    Raises
    ------
    CheckpointError
        If it holds finished statistics, or is something else than a directory.
    """
    if out.exists() and not out.is_dir():
        raise CheckpointError("the output is not a directory; choose another", path=out)
    if (out / METADATA).exists():
        raise CheckpointError(
            "holds finished statistics; choose another output, or remove it", path=out
        )


def save_sums(journal: Journal, key: str, layers: Mapping[str, LayerSums], counts: Counts) -> None:
    """Keep the sums of an unfinished run."""
    arrays = {}
    for name, sums in layers.items():
        for part, tensor in sums.tensors.items():
            arrays[f"{name}.{part}"] = tensor.cpu().numpy()
    journal.put(key, arrays, values=asdict(counts))


def load_sums(journal: Journal, key: str, layers: Mapping[str, LayerSums]) -> Counts:
    """Fill the sums from those that were kept, if there are any; return what they hold."""
    result = journal.get(key)
    if result is None:
        return Counts()
    for name, sums in layers.items():
        for part, tensor in sums.tensors.items():
            saved = result.arrays[f"{name}.{part}"].read()
            tensor.copy_(torch.from_numpy(np.asarray(saved)))
    return Counts(**result.values)


def leading_eigenpairs(
    layers: Mapping[str, LayerSums], predictions: int
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return what is kept of the sums of layers.

    Returns
    -------
    arrays : dict
        Eigenvectors, eigenvalues and the remaining eigenvalue of each side of each layer, under the
        names of their tensors.
    metadata : dict
        Shape, ranks, tokens and Fisher trace of each layer.
    """
    arrays: dict[str, NDArray[Any]] = {}
    metadata: dict[str, Any] = {}
    for name, sums in layers.items():
        spectra = sums.spectra(predictions)
        for side, spectrum in (("input", spectra.input), ("output", spectra.output)):
            # Entries of unit vectors: half precision holds them to 5e-4 of their size, whatever
            # the scale.
            basis = np.asarray(spectrum.basis, dtype=np.float16)
            values = np.asarray(spectrum.values, dtype=np.float32)
            rest = np.asarray(spectrum.rest, dtype=np.float32)
            parts: tuple[NDArray[Any], ...] = (basis, values, rest)
            for part, array in zip(PARTS, parts, strict=True):
                arrays[f"{name}.{side}.{part}"] = array
        metadata[name] = {
            "shape": [spectra.output.size, spectra.input.size],
            "ranks": [spectra.output.values.size, spectra.input.values.size],
            "tokens": int(sums.tokens),
            "fisher_trace": spectra.fisher_trace,
        }
    return arrays, metadata


def write_statistics(
    out: Path,
    settings: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    layers: Mapping[str, Any],
    counts: Counts,
) -> None:
    """Write the finished statistics; the metadata comes last and marks the end.

    Parameters
    ----------
    out : path
        The directory.
    settings : Mapping of name to value
        What was measured, and how.
    arrays, layers : mappings
        As `leading_eigenpairs` returns them.
    counts : Counts
        What was read.
    """
    with new_file(out / TENSORS, force=True) as partial, TensorWriter(out) as writer:
        for name, array in arrays.items():
            writer.add(name, array)
        writer.write(partial, {"format": FORMAT, "version": str(VERSION)})
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "settings": settings,
        **asdict(counts),
        "sha256": sha256(out / TENSORS),
        "layers": layers,
        "made_with": {library: version(library) for library in LIBRARIES},
    }
    with new_file(out / METADATA, force=True) as partial:
        text = json.dumps(metadata, indent=2, sort_keys=True)
        partial.write_text(text + "\n", encoding="utf-8")
