"""Tensors in files: name, shape and dtype are known before a byte is read; safetensors files read and written.

The header of such a file is judged against the file's size before anything is allocated.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from lsrdecomp.checkpoints.files import MAX_JSON, parse_json, regular_file_size
from lsrdecomp.errors import CheckpointError, UnsupportedError
from lsrdecomp.precision import PRECISIONS, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

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
    >>> from pathlib import Path
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
            raise self.error(
                f"{bad} of {array.size} numbers are NaN or infinite; train or export this adapter again"
            )
        return array

    def error(self, message: str) -> CheckpointError:
        """A `CheckpointError` that names this file and tensor."""
        return CheckpointError(message, path=self.path, tensor=self.name)


def widen(array: Array) -> Array:
    """Exactly the same numbers in at least float32."""
    if array.dtype == np.float16:
        with np.errstate(invalid="ignore"):
            return array.astype(np.float64).astype(np.float32)  # faster in NumPy than at once
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def cast(array: Array, storage: str, name: str) -> Array:
    """Round to the storage dtype; `CheckpointError` if a number is not finite there."""
    if storage not in FLOATS:
        raise CheckpointError(f"storage dtype {storage!r} is not one of {', '.join(FLOATS)}")
    with np.errstate(over="ignore"):
        stored = np.asarray(array).astype(DTYPES[storage], copy=False)
    if not np.isfinite(stored).all():
        largest = float(np.max(np.abs(np.asarray(array, dtype=np.float64)), initial=0.0))
        wider = [name for name in ("bfloat16", "float32") if largest <= PRECISIONS[name].largest]
        advice = (
            f"store as {' or '.join(wider)}"
            if wider
            else "no storage here holds it: the adapter must be scaled down"
        )
        text = f"its largest entry {largest:.3g} does not fit {storage}; {advice}"
        raise CheckpointError(
            text if np.isfinite(largest) else "has NaN or infinite numbers", tensor=name
        )
    return stored


def check_name(name: str, path: Path) -> None:
    """Raise `CheckpointError` for a tensor name that could not be a module path, or would not print on one line."""
    if not name or len(name) > LONGEST_NAME:
        raise CheckpointError(
            f"a tensor name has {len(name)} characters; 1 to {LONGEST_NAME} are read", path=path
        )
    if not name.isprintable():
        raise CheckpointError(
            f"the tensor name {name!a} has characters that cannot be printed", path=path
        )
    if ".." in name or name[0] in "./\\" or name[1:3] in (":\\", ":/"):
        raise CheckpointError(
            f"the tensor name {name!r} reads like a path out of here, not like a module", path=path
        )


def derived(
    like: StoredTensor, shape: tuple[int, ...], compute: Callable[[], Array]
) -> StoredTensor:
    """A tensor that is not stored but follows from stored ones: computed in float64 when asked for.

    Raises `CheckpointError` if it would have more than 2^29 numbers: a small file can imply a huge
    product.
    """
    if math.prod(shape) > MOST_DERIVED:
        raise like.error(
            f"the product it is part of has shape {shape}, above {MOST_DERIVED} numbers"
        )
    return replace(
        like, shape=shape, dtype="float64", fetch=lambda: compute().astype(np.float64, copy=False)
    )


CODES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "BOOL": "bool",
    **{
        f"{code}{bits}": f"{kind}{bits}"
        for code, kind in (("I", "int"), ("U", "uint"))
        for bits in (64, 32, 16, 8)
    },
}
NAMES = {name: code for code, name in CODES.items()}
LENGTH = 8  # bytes: the header's length, little-endian
MOST_DIMENSIONS = 16
IN_MEMORY = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file says about itself."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]


def read_header(path: Path) -> Header:
    """Names, shapes, dtypes and places of all tensors of a safetensors file.

    Raises
    ------
    CheckpointError
        For a Git-LFS pointer, a truncated or padded file, a header longer than 16 MiB or not JSON,
        an unknown dtype, a shape that disagrees with its bytes, a hole or an overlap, a name given
        twice or not fit for a module.
    """
    size = regular_file_size(path)
    if size < LENGTH:
        raise CheckpointError(
            f"truncated: {size} bytes, a safetensors file has at least {LENGTH}", path=path
        )
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH), "little")
        if length > size - LENGTH:
            raise CheckpointError(
                f"truncated or not safetensors: the header declares {length} bytes, the file has {size}; "
                "download it again",
                path=path,
            )
        if length > MAX_JSON:
            raise CheckpointError(
                f"the header declares {length} bytes; at most {MAX_JSON} are read", path=path
            )
        header = parse_json(file.read(length), path, what="header")
    start = LENGTH + length
    metadata = _metadata(header.pop("__metadata__", None), path)
    tensors = {
        name: _entry(name, entry, path, start, size - start) for name, entry in header.items()
    }
    _check_layout(header, path, size - start)
    try:
        with safe_open(path, framework="numpy"):
            pass  # the reference reader must agree, or other tools would see another file than we do
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"the safetensors library refuses it: {first_line(error)}", path=path
        ) from error
    return Header(metadata, tensors)


def data_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of what follows the header of a safetensors file."""
    with path.open("rb") as file:
        file.seek(LENGTH + int.from_bytes(file.read(LENGTH), "little"))
        return hashlib.file_digest(file, "sha256").hexdigest()


def encode_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Length and JSON of a header for tensors given as ``{name: (dtype, shape)}`` in file order."""
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH)
    if len(text) > MAX_JSON:
        raise CheckpointError(
            f"the header of {len(tensors)} tensors takes {len(text)} bytes; at most {MAX_JSON} fit"
        )
    return len(text).to_bytes(LENGTH, "little") + text


class TensorWriter:
    """Gathers tensors one by one and writes a safetensors file; beyond 8 MiB they wait on disk, not in memory.

    Parameters
    ----------
    directory : Path
        Where the waiting bytes go: the place of the file to be.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._spool = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY, dir=str(directory))  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._spool.close()

    def add(self, name: str, array: Array) -> None:
        """Append one tensor with the bits it has."""
        check_name(name, self.directory)
        dtype = array.dtype.name
        if dtype not in NAMES:
            raise CheckpointError(f"dtype {dtype} is not one of {', '.join(NAMES)}", tensor=name)
        if name in self.tensors:
            raise CheckpointError("is written twice", tensor=name)
        data = (
            np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
            .reshape(-1)
            .view(np.uint8)
        )
        self.tensors[name] = (dtype, array.shape)
        self._places[name] = (self._spool.tell(), data.nbytes)
        self._spool.write(data.data)

    def add_pieces(self, name: str, dtype: str, pieces: Iterable[Array]) -> None:
        """Append a row of numbers that comes in pieces."""
        self.add(name, np.zeros(0, DTYPES[dtype]))
        begin = self._spool.tell()
        for piece in pieces:
            self._spool.write(np.ascontiguousarray(piece).data)
        size = self._spool.tell() - begin
        self.tensors[name] = (dtype, (size // DTYPES[dtype].itemsize,))
        self._places[name] = (begin, size)

    def write(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Write the file in the order of the safetensors library: widest dtype first, then by name."""
        order = self._order()
        with path.open("wb") as file:
            file.write(encode_header({name: self.tensors[name] for name in order}, metadata))
            file.writelines(self._pieces(order))

    def sha256(self) -> str:
        """Hexadecimal SHA-256 of all tensors' bytes as the file will hold them after its header."""
        digest = hashlib.sha256()
        for piece in self._pieces(self._order()):
            digest.update(piece)
        return digest.hexdigest()

    def _order(self) -> list[str]:
        return sorted(
            self.tensors, key=lambda name: (-DTYPES[self.tensors[name][0]].itemsize, name)
        )

    def _pieces(self, order: Iterable[str]) -> Iterator[bytes]:
        for name in order:
            begin, left = self._places[name]
            self._spool.seek(begin)
            while left:
                piece = self._spool.read(min(left, IN_MEMORY // 8))
                yield piece
                left -= len(piece)


def first_line(error: BaseException) -> str:
    """The first line of a foreign error, short enough for one of ours; it may quote a stranger's bytes."""
    lines = str(error).strip().splitlines()
    text = (lines[0] if lines else type(error).__name__)[:200]
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _metadata(value: object, path: Path) -> dict[str, str]:
    if value is None:  # as the safetensors library reads it
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise CheckpointError("the header's __metadata__ is not a map from text to text", path=path)
    return value


def _entry(name: str, entry: Any, path: Path, start: int, size: int) -> StoredTensor:
    check_name(name, path)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            "its header entry is not dtype, shape and data_offsets", path=path, tensor=name
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in CODES:
        names = ", ".join(CODES)
        raise UnsupportedError(
            f"dtype {str(dtype)[:40]!r} is not one of {names}", path=path, tensor=name
        )
    if (
        not _counts(shape)
        or not _counts(offsets)
        or len(offsets) != 2
        or len(shape) > MOST_DIMENSIONS
    ):
        text = f"shape {str(shape)[:80]!r} and data_offsets {str(offsets)[:80]!r} are not lists of counts"
        raise CheckpointError(text, path=path, tensor=name)
    begin, end = offsets
    needed = math.prod(shape) * DTYPES[CODES[dtype]].itemsize
    if begin > end or end > size:
        text = f"its bytes {begin} to {end} lie outside the {size} bytes of data; the file is truncated"
        raise CheckpointError(text, path=path, tensor=name)
    if end - begin != needed:
        text = (
            f"shape {tuple(shape)} of {dtype} needs {needed} bytes, but {end - begin} are declared"
        )
        raise CheckpointError(text, path=path, tensor=name)
    fetch = partial(_fetch, path, name, start + begin, tuple(shape), CODES[dtype])
    return StoredTensor(name, tuple(shape), CODES[dtype], path, fetch)


def _counts(value: object) -> bool:
    return isinstance(value, list) and all(
        type(count) is int and 0 <= count < 2**63 for count in value
    )


def _check_layout(entries: Mapping[str, Any], path: Path, size: int) -> None:
    reached = 0
    for begin, end, name in sorted(
        (*entry["data_offsets"], name) for name, entry in entries.items()
    ):
        if begin != reached:
            fault = (
                f"overlaps the tensor before it, which ends at {reached}"
                if begin < reached
                else f"follows a hole at {reached}"
            )
            raise CheckpointError(f"its data at byte {begin} {fault}", path=path, tensor=name)
        reached = end
    if reached != size:
        raise CheckpointError(f"the tensors fill {reached} of {size} bytes of data", path=path)


def _fetch(path: Path, name: str, offset: int, shape: tuple[int, ...], dtype: str) -> Array:
    count = math.prod(shape)
    try:
        array = np.fromfile(path, DTYPES[dtype], count, offset=offset)
    except OSError as error:
        raise CheckpointError(
            f"cannot be read: {error.strerror}", path=path, tensor=name
        ) from error
    if array.size != count:
        text = f"the file changed while it was read: {array.size} of {count} numbers are left"
        raise CheckpointError(text, path=path, tensor=name)
    return array.reshape(shape)
