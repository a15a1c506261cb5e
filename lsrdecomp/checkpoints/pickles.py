"""Old torch files (.bin, .pt): the only door to torch here, and only through its tensors-only reader."""

from __future__ import annotations

import pickle
import re
import zipfile
from functools import partial
from typing import TYPE_CHECKING, Any

from lsrdecomp.checkpoints.files import MAX_JSON, regular_file_size
from lsrdecomp.checkpoints.tensors import DTYPES, Array, StoredTensor, check_name, first_line
from lsrdecomp.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

LISTED = "layer"
"""What the layers of a list without names are called, with their number: it does not say of which
model they are."""


def read_pickle(path: Path, max_memory: int | None = None) -> dict[str, StoredTensor]:
    """Tensors of a torch file by name; a bare list is one of cloneofsimo's: ``layer:0:up``, ``layer:0:down``, ….

    Torch maps zip files into memory, so a tensor is read when asked for; older files are read
    whole.

    Raises
    ------
    CheckpointError
        If torch is missing, if the file is truncated, or if it holds anything but strided tensors.
    """
    size = regular_file_size(path)
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    if zipped:
        _check_zip(path, size)
    elif max_memory is not None and size > max_memory:
        text = f"{size} bytes, read whole or not at all, above the {max_memory} allowed; raise max_memory (--max-memory)"
        raise CheckpointError(text, path=path)
    content = _load(path, zipped)
    if isinstance(content, list):
        content = {
            f"{LISTED}:{i // 2}:{'down' if i % 2 else 'up'}": value
            for i, value in enumerate(content)
        }
    if not isinstance(content, dict):
        raise CheckpointError(
            f"holds a {type(content).__name__}, expected named tensors", path=path
        )
    return {name: _tensor(name, value, path) for name, value in content.items()}


def _check_zip(path: Path, size: int) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
        raise CheckpointError(
            f"truncated or damaged: {size} bytes without the zip directory that torch writes last; download it again",
            path=path,
        ) from error
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.file_size > size:
            text = f"record {record.filename[:80]!r} unpacks to {record.file_size} bytes from a file of {size}"
            raise CheckpointError(f"{text}; torch never compresses", path=path)
        if record.filename.endswith(".pkl") and record.file_size > MAX_JSON:
            text = f"{record.filename[:80]!r} takes {record.file_size} bytes; at most {MAX_JSON} are read"
            raise CheckpointError(text, path=path)


def _load(path: Path, zipped: bool) -> Any:
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            "a pickled file is read with torch, which is not installed: pip install 'lsrdecomp[torch]', "
            "or ask for the adapter as safetensors",
            path=path,
        ) from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        match = re.search(r"(?:GLOBAL|class|global) ([A-Za-z_][\w.]*)", str(error))
        what = (
            f"more than tensors are pickled in it ({match[1][:120]})"
            if match
            else "damaged, or more than tensors"
        )
        raise CheckpointError(
            f"refused: {what}; ask for the adapter as safetensors", path=path
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        text = f"not a readable torch file ({type(error).__name__}: {first_line(error)})"
        raise CheckpointError(
            f"{text}; download it again or ask for safetensors", path=path
        ) from error


def _tensor(name: Any, value: Any, path: Path) -> StoredTensor:
    import torch

    if not isinstance(name, str):
        raise CheckpointError(f"a key is a {type(name).__name__}, expected a name", path=path)
    check_name(name, path)
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(
            f"is a {type(value).__name__}, expected a tensor", path=path, tensor=name
        )
    tensor = value.detach()
    dtype = str(tensor.dtype).removeprefix("torch.")
    if (
        tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.device.type != "cpu"
        or dtype not in DTYPES
    ):
        what = f"{tensor.layout} {tensor.device.type} {dtype}"
        raise UnsupportedError(
            f"a {what} tensor; expected a dense one of {', '.join(DTYPES)}", path=path, tensor=name
        )
    stored_bytes = tensor.untyped_storage().nbytes()
    if tensor.numel() * tensor.element_size() > stored_bytes:
        text = f"shape {tuple(tensor.shape)} of {dtype} claims more than the {stored_bytes} bytes behind it"
        raise CheckpointError(text, path=path, tensor=name)
    return StoredTensor(name, tuple(tensor.shape), dtype, path, partial(_numpy, tensor, dtype))


def _numpy(tensor: torch.Tensor, dtype: str) -> Array:
    import torch

    tensor = tensor.contiguous()
    if dtype not in (
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
    ):  # NumPy has no word for these three
        return tensor.numpy().copy()
    bits = torch.int16 if dtype == "bfloat16" else torch.uint8
    return tensor.view(bits).numpy().view(DTYPES[dtype]).copy()
