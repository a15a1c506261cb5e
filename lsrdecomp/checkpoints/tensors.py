"""A tensor in a file: its name, shape and dtype are known before a byte of it is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.errors import CheckpointError
from lsrdecomp.precision import PRECISIONS, numpy_dtype

Array = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    name: numpy_dtype(name)
    for name in (
        *(name for name in PRECISIONS if name != "tf32"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    )
}
FLOATS = tuple(name for name in DTYPES if "float" in name)
LONGEST_NAME = 512
MOST_DERIVED = 2**29


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a weight file, read when asked for.

    Attributes
    ----------
    name : str
        Its key in the file.
    shape : tuple of int
    dtype : str
        As stored: ``"bfloat16"``, ``"float32"``, …
    path : Path
        The file it lies in.

    Examples
    --------
    >>> tensor = StoredTensor("norm", (2, 3), "float16", Path("model"), lambda: np.ones((2, 3), np.float16))
    >>> tensor.nbytes, tensor.load().dtype                                   # read when asked for, in float32
    (12, dtype('float32'))
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    fetch: Callable[[], Array] = field(repr=False, compare=False)

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.parameters * DTYPES[self.dtype].itemsize

    def read(self) -> Array:
        """The stored bits, in the stored dtype (bfloat16 and float8 as ``ml_dtypes``)."""
        return self.fetch()

    def load(self) -> Array:
        """The numbers in float32, or float64 where stored so; `CheckpointError` if one is not finite."""
        try:
            array = widen(self.read())
        except MemoryError:
            raise self.error(f"shape {self.shape} of {self.dtype} does not fit in memory") from None
        finite = np.isfinite(array)
        if not finite.all():
            bad = int(array.size - np.count_nonzero(finite))
            raise self.error(f"{bad} of {array.size} numbers are NaN or infinite; train or export this adapter again")
        return array

    def error(self, message: str) -> CheckpointError:
        """A `CheckpointError` that names this file and tensor."""
        return CheckpointError(message, path=self.path, tensor=self.name)


def widen(array: Array) -> Array:
    """Exactly the same numbers in at least float32."""
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def check_name(name: str, path: Path) -> None:
    """Raise `CheckpointError` for a tensor name that could not be a module path, or would not print on one line."""
    if not name or len(name) > LONGEST_NAME:
        raise CheckpointError(f"a tensor name has {len(name)} characters; 1 to {LONGEST_NAME} are read", path=path)
    if not name.isprintable():
        raise CheckpointError(f"the tensor name {name!a} has characters that cannot be printed", path=path)
    if ".." in name or name[0] in "./\\" or name[1:3] in (":\\", ":/"):
        raise CheckpointError(f"the tensor name {name!r} reads like a path out of here, not like a module", path=path)


def derived(like: StoredTensor, shape: tuple[int, ...], compute: Callable[[], Array]) -> StoredTensor:
    """A tensor that is not stored but follows from stored ones: computed in float64 when asked for.

    Raises `CheckpointError` if it would have more than 2^29 numbers: a small file can imply a huge product.
    """
    if math.prod(shape) > MOST_DERIVED:
        raise like.error(f"the product it is part of has shape {shape}, above {MOST_DERIVED} numbers")
    return replace(like, shape=shape, dtype="float64", fetch=lambda: compute().astype(np.float64, copy=False))
