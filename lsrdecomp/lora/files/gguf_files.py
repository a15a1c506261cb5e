"""LoRA files of llama.cpp (GGUF), read by the `gguf` package.

A pair is ``<tensor>.weight.lora_a`` (r × n) and ``<tensor>.weight.lora_b`` (m × r), under the
base's tensor names and with its rows in GGUF's order. llama.cpp multiplies by
``adapter.lora.alpha`` / r, or by 1 where alpha is 0.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.errors import CheckpointError, LsrError, UnsupportedError
from lsrdecomp.lora.files.digests import ContentDigests
from lsrdecomp.lora.files.file_checks import regular_file_size
from lsrdecomp.lora.files.tensors import (
    Array,
    StoredTensor,
    check_name,
    first_line,
    little_endian_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ARCHITECTURE = "general.architecture"
ALPHA = "adapter.lora.alpha"
ADAPTER_TYPE = "adapter.type"
ACTIVATED = "adapter.alora.invocation_tokens"
ACTING = (ARCHITECTURE, ALPHA, ADAPTER_TYPE)
"""What a digest of a file holds of its header."""
GGUF_NAME = re.compile(r"blk\.[0-9]+\.\w+|output")
"""Names of matrices as GGUF files have them, without ``.weight``."""
PLAIN_TYPES = {"F32": "float32", "F16": "float16"}
"""Types that are stored as they are; all others are read as float32."""
FIRST_BYTES = 65_536
"""Bytes in which llama.cpp's converter writes what a file is."""


def import_gguf() -> Any:
    """Import the package gguf, or say how to get it."""
    try:
        import gguf
    except ImportError as error:
        raise LsrError("GGUF files need the package gguf: pip install gguf") from error
    return gguf


def is_gguf_adapter(path: Path) -> bool:
    """Return whether a file is a LoRA of llama.cpp, and no model, by its first bytes."""
    try:
        with path.open("rb") as file:
            start = file.read(FIRST_BYTES)
    except OSError:
        return False
    return start.startswith(b"GGUF") and ADAPTER_TYPE.encode() in start


def gguf_type(path: Path) -> str:
    """Return the type of most matrices of a model, such as Q4_K; empty for floats."""
    reader = import_gguf().GGUFReader(path)
    types = Counter(
        tensor.tensor_type.name for tensor in reader.tensors if GGUF_NAME.match(str(tensor.name))
    )
    common = max(types, key=lambda name: types[name], default="")
    return "" if common in (*PLAIN_TYPES, "BF16") else common


def read_gguf(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Read the tensors of a LoRA file, and what its header says of the adapter.

    Parameters
    ----------
    path : Path

    Returns
    -------
    tensors : dict of str to StoredTensor
    metadata : dict of str to str
        Architecture, type and alpha.

    Raises
    ------
    CheckpointError
        If the file is damaged.
    UnsupportedError
        For a model, an activated LoRA, and experts that are stacked.
    LsrError
        If the package gguf is missing.
    """
    gguf = import_gguf()
    regular_file_size(path)
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        stored = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:  # a damaged file can raise anything
        raise CheckpointError(
            f"is no readable GGUF file ({first_line(error)}); download it again", path=path
        ) from error
    if fields.get(ADAPTER_TYPE) != "lora" or ARCHITECTURE not in fields:
        raise UnsupportedError(
            "a GGUF model and no adapter; of GGUF the LoRA files of llama.cpp are read", path=path
        )
    if ACTIVATED in fields:
        raise UnsupportedError("activated LoRA acts on some tokens only; not read", path=path)
    metadata = {
        name: str(value)
        for name, value in fields.items()
        if isinstance(value, str | float | int) and not name.startswith("GGUF.")
    }
    return {name: _describe(tensor, path) for name, tensor in stored.items()}, metadata


def gguf_digests(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> ContentDigests:
    """Return the digests of a LoRA file, of its numbers as readers get them.

    Parameters
    ----------
    tensors : mapping of str to array
    metadata : mapping of str to str
        Of it `ACTING` counts.
    """
    digest = hashlib.sha256()
    shapes = {}
    for name in sorted(tensors):
        array = tensors[name]
        shapes[name] = array.dtype.name, array.shape
        digest.update(little_endian_bytes(array).data)
    acting = {name: metadata[name] for name in ACTING if name in metadata}
    return ContentDigests.of(shapes, acting, digest.hexdigest())


def _describe(tensor: Any, path: Path) -> StoredTensor:
    name = str(tensor.name)
    check_name(name, path)
    shape = tuple(int(size) for size in tensor.shape[::-1])
    if len(shape) != 2:
        raise UnsupportedError(
            f"shape {shape}: experts stored stacked are not read; convert each for itself",
            path=path,
            tensor=name,
        )
    dtype = PLAIN_TYPES.get(tensor.tensor_type.name, "float32")
    return StoredTensor(name, shape, dtype, path, partial(_read, tensor, shape, dtype, path))


def _read(tensor: Any, shape: tuple[int, ...], dtype: str, path: Path) -> Array:
    gguf = import_gguf()
    try:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return np.array(numbers, dtype).reshape(shape)
    except (ValueError, NotImplementedError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"cannot be read: {first_line(error)}", path=path, tensor=str(tensor.name)
        ) from error
