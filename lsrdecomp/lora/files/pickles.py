"""Old torch files (.bin, .pt): torch is opened here alone, and only by its tensors-only reader."""

from __future__ import annotations

import pickle
import re
import zipfile
from functools import partial
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import CheckpointError, UnsupportedError, way_to_install
from lsrdecomp.gateway import TEXT_BYTES
from lsrdecomp.lora.files.file_checks import regular_file_size
from lsrdecomp.lora.files.tensors import DTYPES, Array, StoredTensor, check_name, first_line

if TYPE_CHECKING:
    from pathlib import Path

    import torch

BY_POSITION = (
    "calls layers by their position (unet:7), as cloneofsimo/lora wrote files in 2023, and their "
    "names are not in it: not read. Merge it into its base by that trainer's own command, "
    "lora_add BASE FILE MERGED --alpha_1 1 --mode upl, and make a LoRA of the difference by "
    "networks/extract_lora_from_models.py of sd-scripts"
)
ZIP_START = b"PK\x03\x04"
NOT_IN_NUMPY = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Types that NumPy has no word for: their bits are taken over as integers."""


def read_pickle(path: Path, max_memory: int | None = None) -> dict[str, StoredTensor]:
    """Read the tensors of a torch file by name.

    Torch maps zip files into memory, so a tensor is read when asked for; older files are read
    whole.

    Parameters
    ----------
    path : Path
    max_memory : int, optional
        Bytes that a file may have which can only be read whole.

    Raises
    ------
    CheckpointError
        If torch is missing, if the file is truncated, or if it holds anything but strided tensors.
    UnsupportedError
        For a list of tensors: which layers they are of is not in it.
    """
    size = regular_file_size(path)
    with path.open("rb") as file:
        zipped = file.read(4) == ZIP_START
    if zipped:
        _check_zip(path, size)
    elif max_memory is not None and size > max_memory:
        raise CheckpointError(
            f"{size} bytes, read whole or not at all, above the {max_memory} allowed; raise "
            "max_memory (--max-memory)",
            path=path,
        )
    content = _load(path, zipped)
    if isinstance(content, list) and all(hasattr(half, "untyped_storage") for half in content):
        raise UnsupportedError(BY_POSITION, path=path)
    if isinstance(content, dict):
        content = _unwrapped(content, path)
    if not isinstance(content, dict):
        found = type(content).__name__
        raise CheckpointError(f"holds a {found}, expected named tensors", path=path)
    return {name: _stored_tensor(name, value, path) for name, value in content.items()}


RUN_STATE = re.compile(
    r"(optimizer|scheduler|lr|loss|epoch|global_step|step|iter|args|config|callback|loop|hyper|rng|"
    r"scaler|best|version|pytorch-lightning|meta)",
    re.IGNORECASE,
)
"""How entries begin that a training run saves beside tensors, to go on from there."""


def _unwrapped(content: dict[Any, Any], path: Path) -> dict[Any, Any]:
    """Return the tensors that lie one level deeper, as in ``{"weights": {…}, "epoch": 3}``.

    Raises
    ------
    UnsupportedError
        If something else lies beside them that may act on the model, such as an alpha.
    """
    inner = [
        name
        for name, value in content.items()
        if isinstance(value, dict) and value and not RUN_STATE.match(str(name))
    ]
    if len(inner) != 1 or any(hasattr(value, "untyped_storage") for value in content.values()):
        return content
    (wrapper,) = inner
    others = [str(name) for name in content if name != wrapper and not RUN_STATE.match(str(name))]
    if others:
        raise UnsupportedError(
            f"its tensors lie in {str(wrapper)[:60]!r} beside {', '.join(others)[:120]}, which may "
            f"act on them: save {str(wrapper)[:60]!r} alone, and give what it was scaled by",
            path=path,
        )
    unwrapped: dict[Any, Any] = content[wrapper]
    return unwrapped


def _check_zip(path: Path, size: int) -> None:
    """Refuse a zip file that is cut off, or that would unpack to more than its own bytes."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
        raise CheckpointError(
            f"truncated or damaged: {size} bytes without the zip directory that torch writes last; "
            "download it again",
            path=path,
        ) from error
    for record in records:
        name = f"{record.filename[:80]!r}"
        if record.compress_type != zipfile.ZIP_STORED or record.file_size > size:
            raise CheckpointError(
                f"record {name} unpacks to {record.file_size} bytes from a file of {size}; torch "
                "never compresses",
                path=path,
            )
        if record.filename.endswith(".pkl") and record.file_size > TEXT_BYTES:
            raise CheckpointError(
                f"{name} takes {record.file_size} bytes; at most {TEXT_BYTES} are read",
                path=path,
            )


def _load(path: Path, zipped: bool) -> Any:
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            "a pickled file is read with torch, which is not installed: "
            f"{way_to_install('torch')}, or ask for the adapter as safetensors",
            path=path,
        ) from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        content = "damaged, or more than tensors"
        match = re.search(r"(?:GLOBAL|class|global) ([A-Za-z_][\w.]*)", str(error))
        if match:
            content = f"more than tensors are pickled in it ({match[1][:120]})"
        raise CheckpointError(
            f"refused: {content}; ask for the adapter as safetensors", path=path
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(
            f"not a readable torch file ({reason}); download it again or ask for safetensors",
            path=path,
        ) from error


def _stored_tensor(name: Any, value: Any, path: Path) -> StoredTensor:
    """Check one entry of a torch file; its numbers are copied when they are asked for."""
    import torch

    if not isinstance(name, str):
        raise CheckpointError(f"a key is a {type(name).__name__}, expected a name", path=path)
    check_name(name, path)
    if not isinstance(value, torch.Tensor):
        found = type(value).__name__
        raise CheckpointError(f"is a {found}, expected a tensor", path=path, tensor=name)
    tensor = value.detach()
    dtype = str(tensor.dtype).removeprefix("torch.")
    is_dense = (
        tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type == "cpu"
        and dtype in DTYPES
    )
    if not is_dense:
        found = f"{tensor.layout} {tensor.device.type} {dtype}"
        raise UnsupportedError(
            f"a {found} tensor; expected a dense one of {', '.join(DTYPES)}", path=path, tensor=name
        )
    shape = tuple(tensor.shape)
    stored_bytes = tensor.untyped_storage().nbytes()
    if tensor.numel() * tensor.element_size() > stored_bytes:
        raise CheckpointError(
            f"shape {shape} of {dtype} claims more than the {stored_bytes} bytes behind it",
            path=path,
            tensor=name,
        )
    return StoredTensor(name, shape, dtype, path, partial(_numpy_copy, tensor, dtype))


def _numpy_copy(tensor: torch.Tensor, dtype: str) -> Array:
    import torch

    tensor = tensor.contiguous()
    if dtype not in NOT_IN_NUMPY:
        return tensor.numpy().copy()
    bits = torch.int16 if dtype == "bfloat16" else torch.uint8
    return tensor.view(bits).numpy().view(DTYPES[dtype]).copy()
