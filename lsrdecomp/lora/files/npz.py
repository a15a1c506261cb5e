"""NumPy archives (.npz), as mlx-lm saved adapters before it took safetensors.

An archive is a zip file of arrays. Headers are read first; numbers are read when they are asked
for, and never more than the archive says that it holds.
"""

from __future__ import annotations

import io
import math
import zipfile
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib import format as npy

from lsrdecomp.errors import CheckpointError, UnsupportedError
from lsrdecomp.gateway import MAX_AXES, MAX_NUMBERS
from lsrdecomp.lora.files.file_checks import regular_file_size
from lsrdecomp.lora.files.tensors import DTYPES, Array, StoredTensor, check_name, first_line

if TYPE_CHECKING:
    from pathlib import Path

ENDING = ".npy"
BFLOAT16 = "V2"
"""What MLX calls bfloat16, of which NumPy has no word."""
HEADER_BYTES = 10_000  # more than any header of an array that has at most 16 axes


def read_npz(path: Path) -> dict[str, StoredTensor]:
    """Read names, shapes and types of the arrays of an archive.

    Parameters
    ----------
    path : Path

    Raises
    ------
    CheckpointError
        For a Git-LFS pointer, a truncated or damaged archive, an array of objects, a name that is
        not fit for a module, or a shape that disagrees with the bytes that are declared for it.
    """
    size = regular_file_size(path)
    tensors = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist():
                name = record.filename.removesuffix(ENDING)
                check_name(name, path)
                if name in tensors:
                    raise CheckpointError("is held twice", path=path, tensor=name)
                tensors[name] = _describe(archive, record, name, path)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive can raise anything
        raise CheckpointError(
            f"truncated or damaged, {size} bytes ({first_line(error)}); download it again",
            path=path,
        ) from error
    return tensors


def _describe(
    archive: zipfile.ZipFile, record: zipfile.ZipInfo, name: str, path: Path
) -> StoredTensor:
    """Read the header of one array, and hold it to the bytes that the archive declares."""

    def error(message: str) -> CheckpointError:
        return CheckpointError(message, path=path, tensor=name)

    with archive.open(record) as file:
        start = io.BytesIO(file.read(min(record.file_size, HEADER_BYTES)))
    version = npy.read_magic(start)
    if version == (1, 0):
        shape, by_columns, dtype = npy.read_array_header_1_0(start)
    elif version == (2, 0):
        shape, by_columns, dtype = npy.read_array_header_2_0(start)
    else:
        raise error(f"an array of version {version}, of which 1.0 and 2.0 are read")
    stored = "bfloat16" if dtype.str[1:] == BFLOAT16 else dtype.name
    if stored not in DTYPES or dtype.byteorder == ">":
        raise UnsupportedError(
            f"dtype {dtype.str!r} is not one of {', '.join(DTYPES)}", path=path, tensor=name
        )
    if len(shape) > MAX_AXES:
        raise error(f"{len(shape)} axes; at most {MAX_AXES} are read")
    if min(shape, default=0) < 0:
        raise error(f"shape {shape} has a negative size")
    if record.compress_type != zipfile.ZIP_STORED and math.prod(shape) > MAX_NUMBERS:
        raise error(f"shape {shape}, compressed; at most {MAX_NUMBERS} numbers are read")
    expected = start.tell() + math.prod(shape) * DTYPES[stored].itemsize
    if record.file_size != expected:
        raise error(
            f"shape {shape} of {stored} needs {expected} bytes, but {record.file_size} are declared"
        )
    fetch = partial(_read_array, path, name, shape, stored, start.tell(), by_columns)
    return StoredTensor(name, tuple(shape), stored, path, fetch)


def _read_array(
    path: Path, name: str, shape: tuple[int, ...], dtype: str, offset: int, by_columns: bool
) -> Array:
    size = math.prod(shape) * DTYPES[dtype].itemsize
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}{ENDING}") as file:
            content = file.read(offset + size)[offset:]
    except MemoryError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"damaged, or changed while it was read ({first_line(error)}); download it again",
            path=path,
            tensor=name,
        ) from error
    if len(content) != size:
        raise CheckpointError(
            f"holds {len(content)} bytes of numbers, and shape {shape} needs {size}",
            path=path,
            tensor=name,
        )
    array = np.frombuffer(content, DTYPES[dtype]).copy()
    return array.reshape(shape, order="F" if by_columns else "C")
