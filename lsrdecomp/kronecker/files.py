"""Files: a separated matrix in one safetensors file, with its shape and where it came from."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from lsrdecomp.arrays import dtype_name, to_numpy
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.kronecker.terms import Terms

if TYPE_CHECKING:
    from collections.abc import Mapping

KIND = "lsrdecomp.SeparatedMatrix"
"""What such a file says that it is."""


class Files(Terms):
    """Files: ``save`` and ``load``."""

    def save(
        self,
        path: str | Path,
        *,
        provenance: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write weights and factors as they are to one safetensors file, whole or not at all.

        Parameters
        ----------
        path : path
        provenance : mapping, optional
            Where the matrix came from, anything JSON can hold; `read_provenance` gives it back.
        overwrite : bool
            Replace a file of this kind that is there.

        Raises
        ------
        CheckpointError
            If there is something at ``path`` (but for a regular file with ``overwrite``), or its
            directory is missing.
        """
        from safetensors.numpy import save

        path = Path(path)
        _check_place(path, overwrite)
        arrays = {"weights": to_numpy(self.weights)}
        arrays |= {f"factors.{i}": to_numpy(f) for i, f in enumerate(self.factors)}
        metadata = {
            "kind": KIND,
            "dtype": dtype_name(self.factors[0]),
            "kronecker_shape": json.dumps(self.kronecker_shape.factors),
            "provenance": json.dumps(dict(provenance or {}), sort_keys=True),
        }
        data = save({name: _real(array) for name, array in arrays.items()}, metadata)
        handle, partial = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".partial", dir=path.parent
        )
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(partial, 0o644)
            os.replace(partial, path)
        except BaseException as error:
            Path(partial).unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise CheckpointError(f"cannot be written: {error.strerror}", path=path) from error
            raise
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file of `save`; NumPy arrays, bit for bit.

        Raises
        ------
        CheckpointError
            If the file is missing, damaged, or no separated matrix.
        """
        metadata, arrays = _read(Path(path))
        try:
            shape = json.loads(metadata["kronecker_shape"])
            names = ["weights", *(f"factors.{i}" for i in range(len(shape)))]
            if set(names) != set(arrays):
                raise ValueError(f"tensors {sorted(arrays)} where {names} belong")
            complex_values = metadata["dtype"].startswith("complex")
            stacks = tuple(
                _complex(arrays[name]) if complex_values else arrays[name] for name in names[1:]
            )
            matrix = cls(arrays["weights"], stacks)
            tiling = [list(pair) for pair in matrix.kronecker_shape.factors]
            if tiling != shape or dtype_name(stacks[0]) != metadata["dtype"]:
                raise ValueError(
                    f"its tensors are {tiling}, its header says {shape} of {metadata['dtype']}"
                )
        except (KeyError, TypeError, AttributeError, ValueError, LsrError) as error:
            raise CheckpointError(f"not a whole {KIND}: {error}", path=path) from error
        return matrix


def read_provenance(path: str | Path) -> dict[str, Any]:
    """What `SeparatedMatrix.save` was told about where the matrix came from.

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
        provenance = json.loads(metadata["provenance"])
        return dict(provenance)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"its provenance cannot be read: {error}", path=path) from error


def _read(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise CheckpointError(
            "is not a file" if path.exists() else "there is no such file", path=path
        )
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != KIND:
                raise CheckpointError(
                    f"holds no {KIND}; it says kind {metadata.get('kind')!r}", path=path
                )
            return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"not a safetensors file: {reason}", path=path) from error


def _check_place(path: Path, overwrite: bool) -> None:
    if not path.parent.is_dir():
        raise CheckpointError(f"there is no directory {path.parent}", path=path)
    if path.is_symlink() or path.exists():
        if not path.is_file() or path.is_symlink():
            raise CheckpointError("is there and is no regular file", path=path)
        if not overwrite:
            raise CheckpointError("is there already; pass overwrite=True to replace it", path=path)
        _read(path)  # refuses what is not ours


def _real(array: Any) -> Any:
    array = np.ascontiguousarray(array)
    return (
        array.view(array.real.dtype).reshape(*array.shape, 2) if np.iscomplexobj(array) else array
    )


def _complex(array: Any) -> Any:
    if array.shape[-1] != 2:
        raise ValueError("a complex tensor needs a last axis of length 2")
    return np.ascontiguousarray(array).view(np.result_type(array.dtype, np.complex64))[..., 0]
