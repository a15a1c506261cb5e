"""Files: a separated matrix in one safetensors file, with its shape and where it came from."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import Array, dtype_name, to_numpy
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.gateway import first_line, read_json_text
from lsrdecomp.kronecker.normalization import check_weights
from lsrdecomp.kronecker.rearrange import factor_shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OTHER_SUFFIXES = (".npz", ".npy", ".mat", ".h5", ".hdf5", ".pt", ".pth", ".pkl", ".csv", ".json")
"""Names of files that readers of other formats open."""

FILE_KIND = "lsrdecomp.SeparatedMatrix"
"""The kind that a file of a separated matrix names in its header."""


def write_terms(
    path: Path,
    weights: Array,
    factors: Sequence[Array],
    *,
    provenance: Mapping[str, Any] | None,
    overwrite: bool,
    figures: Mapping[str, Any] | None = None,
) -> None:
    """Write weights and factors as they are to one safetensors file, whole or not at all.

    ``figures`` are those of a decomposition, which `read_figures` gives back.

    Raises
    ------
    CheckpointError
        If there is something at ``path`` (but for a regular file of this kind with ``overwrite``),
        its directory is missing, or its suffix is that of another format.
    """
    from safetensors.numpy import save

    if path.suffix in OTHER_SUFFIXES:
        raise CheckpointError(
            f"the file is safetensors, which a name on {path.suffix} would hide: name it "
            f"{path.with_suffix('.safetensors').name}",
            path=path,
        )
    _check_place(path, overwrite)
    tensors = {"weights": to_numpy(weights)}
    for i, factor in enumerate(factors):
        tensors[f"factors.{i}"] = to_numpy(factor)
    metadata = {
        "kind": FILE_KIND,
        "dtype": dtype_name(factors[0]),
        "kronecker_shape": json.dumps(factor_shape(factors).factors),
        "provenance": json.dumps(dict(provenance or {}), sort_keys=True),
    }
    if figures is not None:
        metadata["figures"] = json.dumps(dict(figures), sort_keys=True)
    data = save({name: _as_real(array) for name, array in tensors.items()}, metadata)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")
    try:
        with partial.open("xb") as file:  # with the rights that the umask leaves
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot be written: {error.strerror}", path=path) from error
        raise


def read_terms(path: Path) -> tuple[Array, tuple[Array, ...]]:
    """Return the weights and factors of a file as NumPy arrays, bit for bit.

    Raises
    ------
    CheckpointError
        If the file is missing, damaged, or holds no separated matrix.
    """
    metadata, tensors = _read(path)
    try:
        shape = read_json_text(metadata["kronecker_shape"])
        factor_names = [f"factors.{i}" for i in range(len(shape))]
        names = ["weights", *factor_names]
        if set(names) != set(tensors):
            raise ValueError(f"tensors {sorted(tensors)} where {names} belong")
        factors = [tensors[name] for name in factor_names]
        if metadata["dtype"].startswith("complex"):
            factors = [_as_complex(factor) for factor in factors]
        weights = tensors["weights"]
        stored_shape = factor_shape(factors)
        check_weights(stored_shape, factors, weights)
        pairs = [list(pair) for pair in stored_shape.factors]
        if pairs != shape or dtype_name(factors[0]) != metadata["dtype"]:
            raise ValueError(
                f"its tensors are {pairs}, its header says {shape} of {metadata['dtype']}"
            )
    except (KeyError, TypeError, AttributeError, ValueError, LsrError) as error:
        reason = first_line(error)
        raise CheckpointError(f"not a whole {FILE_KIND}: {reason}", path=path) from error
    return weights, tuple(factors)


def read_provenance(path: str | Path) -> dict[str, Any]:
    """Return what `SeparatedMatrix.save` was told about where the matrix came from.

    Parameters
    ----------
    path : str or Path
        A file of `SeparatedMatrix.save`.

    Returns
    -------
    dict

    Raises
    ------
    CheckpointError
        If the file is damaged or not of this kind.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from lsrdecomp import SeparatedMatrix
    >>> matrix = SeparatedMatrix.from_factors([np.eye(2)[None]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = matrix.save(f"{folder}/matrix.safetensors", provenance={"seed": 3})
    ...     read_provenance(path)
    {'seed': 3}
    """
    metadata, _ = _read(Path(path))
    try:
        provenance = read_json_text(metadata["provenance"])
        return dict(provenance)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"its provenance cannot be read: {first_line(error)}", path=path
        ) from error


def has_figures(path: Path) -> bool:
    """Return whether a file of a separated matrix holds the figures of a decomposition."""
    metadata, _ = _read(path)
    return "figures" in metadata


def read_figures(path: Path) -> dict[str, Any]:
    """Return the figures of a decomposition that were written beside its terms.

    Raises
    ------
    CheckpointError
        If the file is damaged, or holds a matrix without figures.
    """
    metadata, _ = _read(path)
    if "figures" not in metadata:
        raise CheckpointError(
            "holds a matrix without the figures of a decomposition; SeparatedMatrix.load reads it",
            path=path,
        )
    try:
        return dict(read_json_text(metadata["figures"]))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"its figures cannot be read: {first_line(error)}", path=path
        ) from error


def _read(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return metadata and tensors of a file of this kind."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        reason = "is not a file" if path.exists() else "there is no such file"
        raise CheckpointError(reason, path=path)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            kind = metadata.get("kind")
            if kind != FILE_KIND:
                raise CheckpointError(
                    f"holds no {FILE_KIND}; it says kind {str(kind)[:80]!a}", path=path
                )
            names = file.keys()
            return metadata, {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"not a safetensors file: {first_line(error)}", path=path) from error


def _check_place(path: Path, overwrite: bool) -> None:
    """Raise `CheckpointError` unless a file may be written to this path."""
    if not path.parent.is_dir():
        raise CheckpointError(f"there is no directory {path.parent}", path=path)
    if not path.is_symlink() and not path.exists():
        return
    if path.is_symlink() or not path.is_file():
        raise CheckpointError("is there and is no regular file", path=path)
    if not overwrite:
        raise CheckpointError("is there already; pass overwrite=True to replace it", path=path)
    _read(path)  # refuses a file of another kind


def _as_real(array: np.ndarray) -> np.ndarray:
    """Return a real array as it is, a complex one with both parts along a last axis of two."""
    array = np.ascontiguousarray(array)
    if not np.iscomplexobj(array):
        return array
    return array.view(array.real.dtype).reshape(*array.shape, 2)


def _as_complex(array: np.ndarray) -> np.ndarray:
    """Return the complex array whose real and imaginary parts lie along the last axis."""
    if array.shape[-1] != 2:
        raise ValueError("a complex tensor needs a last axis of length 2")
    complex_dtype = np.result_type(array.dtype, np.complex64)
    complex_array: np.ndarray = np.ascontiguousarray(array).view(complex_dtype)[..., 0]
    return complex_array
