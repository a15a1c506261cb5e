"""Files of a calibration: running sums in the journal, and the finished statistics.

`lsrdecomp.lora.files.statistics` reads the finished files and describes their layout.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.base.accumulators import Counts, LayerSums
from lsrdecomp.lora.files.file_checks import sha256
from lsrdecomp.lora.files.statistics import FORMAT, METADATA, PARTS, TENSORS, VERSION
from lsrdecomp.lora.files.tensors import TensorWriter
from lsrdecomp.lora.files.writing import new_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from lsrdecomp.lora.files.journal import Journal

LIBRARIES = ("lsrdecomp", "torch", "transformers")
"""Packages whose versions the metadata records."""


def check_output(out: Path) -> None:
    """Check that statistics can be written to a directory.

    Raises
    ------
    CheckpointError
        If it holds finished statistics, or is not a directory.
    """
    if out.exists() and not out.is_dir():
        raise CheckpointError("the output is not a directory; choose another", path=out)
    if (out / METADATA).exists():
        raise CheckpointError(
            "holds finished statistics; choose another output, or remove it", path=out
        )


def save_sums(journal: Journal, key: str, layers: Mapping[str, LayerSums], counts: Counts) -> None:
    """Save the running sums of layers in the journal, under a key."""
    arrays = {}
    for name, sums in layers.items():
        for part, tensor in sums.tensors.items():
            arrays[f"{name}.{part}"] = tensor.cpu().numpy()
    journal.put(key, arrays, values=asdict(counts))


def load_sums(journal: Journal, key: str, layers: Mapping[str, LayerSums]) -> Counts:
    """Restore the running sums of layers in place from the journal, if it has them.

    Returns
    -------
    Counts
        Counts of the batches that the sums hold; zeros if the journal has no such key.
    """
    entry = journal.get(key)
    if entry is None:
        return Counts()
    for name, sums in layers.items():
        for part, tensor in sums.tensors.items():
            saved = entry.arrays[f"{name}.{part}"].read()
            tensor.copy_(torch.from_numpy(np.asarray(saved)))
    return Counts(**entry.values)


def finished_layers(
    layers: Mapping[str, LayerSums], predictions: int
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the entries of the finished files for some layers.

    Parameters
    ----------
    layers : Mapping of name to LayerSums
    predictions : int
        Predictions that the sums are over.

    Returns
    -------
    arrays : dict of tensor name to array
        Leading eigenvectors and eigenvalues, and the mean of the other eigenvalues, of the input
        and the output side of each layer.
    metadata : dict of layer name to dict
        Shape, ranks, tokens and Fisher trace.
    """
    arrays: dict[str, NDArray[Any]] = {}
    metadata: dict[str, Any] = {}
    for name, sums in layers.items():
        spectra = sums.spectra(predictions)
        for side, spectrum in (("input", spectra.input), ("output", spectra.output)):
            # Half precision holds the entries of unit vectors to 5e-4 of their size; the scale is
            # in the eigenvalues.
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
    """Write the finished statistics. The metadata comes last: where it is, they are complete.

    Parameters
    ----------
    out : path
        The directory.
    settings : Mapping of name to value
        Settings of the calibration.
    arrays, layers : mappings
        Arrays and metadata of all layers, as `finished_layers` returns them.
    counts : Counts
        Numbers of what was read.
    """
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "settings": settings,
        **asdict(counts),
        "layers": layers,
        "made_with": {library: version(library) for library in LIBRARIES},
    }
    with new_file(out / TENSORS, force=True) as partial, TensorWriter(out) as writer:
        for name, array in arrays.items():
            writer.add(name, array)
        header = {"format": FORMAT, "version": str(VERSION)}
        writer.write(partial, writer.with_digests(header, metadata))
    # Each file vouches for the other.
    metadata["sha256"] = sha256(out / TENSORS)
    with new_file(out / METADATA, force=True) as partial:
        text = json.dumps(metadata, indent=2, sort_keys=True)
        partial.write_text(text + "\n", encoding="utf-8")
