"""Tensors in files: known by name, shape and dtype before a byte is read; safetensors both ways.

The header of a safetensors file is judged against the file's size before anything is allocated.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from lsrdecomp.arrays import all_finite
from lsrdecomp.errors import CheckpointError, StorageRangeError, UnsupportedError
from lsrdecomp.gateway import MAX_AXES, MAX_NAME, MAX_NUMBERS, STORED_TEXT_BYTES
from lsrdecomp.gateway import first_line as first_line
from lsrdecomp.lora.files.digests import HEADER_KEY, SEAL_BYTES, ContentDigests
from lsrdecomp.lora.files.file_checks import parse_json, regular_file_size
from lsrdecomp.precision import PRECISIONS, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

Array = NDArray[Any]

FLOATS = tuple(name for name in PRECISIONS if name != "tf32")  # which no file holds
INTEGERS = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool")
DTYPES: dict[str, np.dtype[Any]] = {name: numpy_dtype(name) for name in (*FLOATS, *INTEGERS)}
"""Types of stored numbers: NumPy's, and those of ``ml_dtypes`` for bfloat16 and float8."""


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
    fetch : callable
        Reads the numbers; `read` and `load` call it.

    Examples
    --------
    >>> from pathlib import Path
    >>> ones = np.ones((2, 3), np.float16)
    >>> tensor = StoredTensor("norm", (2, 3), "float16", Path("model"), lambda: ones)
    >>> tensor.nbytes, tensor.load().dtype                                   # read now, in float32
    (12, dtype('float32'))
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    fetch: Callable[[], Array] = field(repr=False, compare=False)

    @property
    def parameters(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers as stored."""
        return self.parameters * DTYPES[self.dtype].itemsize

    def read(self) -> Array:
        """Read the stored bits, in the stored dtype (bfloat16 and float8 as ``ml_dtypes``)."""
        return self.fetch()

    def finite(self) -> Array:
        """Read the stored bits of floating numbers.

        Raises `CheckpointError` as `load` does.
        """
        stored = self.read()
        return stored if self.dtype in FLOATS and all_finite(stored) else self.load()

    def load(self, *, double: bool = False) -> Array:
        """Read the numbers in float32, or in float64 where stored so or if ``double``.

        Raises
        ------
        CheckpointError
            If a number is not finite, or if memory does not hold them.
        """
        try:
            stored = self.read()
            array = np.array(stored, np.float64) if double else widen(stored)
        except MemoryError:
            raise self.error(f"shape {self.shape} of {self.dtype} does not fit in memory") from None
        if all_finite(array):
            return array
        bad = int(array.size - np.count_nonzero(np.isfinite(array)))
        raise self.error(
            f"{bad} of {array.size} numbers are NaN or infinite; train or export this adapter again"
        )

    def error(self, message: str) -> CheckpointError:
        """Make a `CheckpointError` that names this file and tensor."""
        return CheckpointError(message, path=self.path, tensor=self.name)


def widen(array: Array) -> Array:
    """Return exactly the same numbers in at least float32."""
    if array.dtype == np.float16:
        with np.errstate(invalid="ignore"):
            return array.astype(np.float64).astype(np.float32)  # faster in NumPy than at once
    if array.dtype in (np.float32, np.float64):
        return array
    return array.astype(np.float32)


def cast(array: Array, storage: str, name: str) -> Array:
    """Round to the storage dtype; `CheckpointError` if a number is not finite there."""
    if storage not in FLOATS:
        raise CheckpointError(f"storage dtype {storage!r} is not one of {', '.join(FLOATS)}")
    with np.errstate(over="ignore"):
        stored = np.asarray(array).astype(DTYPES[storage], copy=False)
    if all_finite(stored):
        return stored
    largest = float(np.max(np.abs(np.asarray(array, dtype=np.float64)), initial=0.0))
    if not np.isfinite(largest):
        raise CheckpointError("has NaN or infinite numbers", tensor=name)
    wider = [name for name in ("bfloat16", "float32") if largest <= PRECISIONS[name].largest]
    way_out = "no storage here holds it: the adapter must be scaled down"
    if wider:
        way_out = f"store as {' or '.join(wider)} (--storage {wider[0]})"
    raise StorageRangeError(
        f"its largest entry {largest:.3g} does not fit {storage}; {way_out}", tensor=name
    )


def check_name(name: str, path: Path) -> None:
    """Refuse a tensor name that could not be a module path, or would not print on one line."""
    if not name or len(name) > MAX_NAME:
        allowed = f"1 to {MAX_NAME} are read"
        raise CheckpointError(f"a tensor name has {len(name)} characters; {allowed}", path=path)
    if not name.isprintable():
        raise CheckpointError(
            f"the tensor name {name!a} has characters that cannot be printed", path=path
        )
    if ".." in name or name[0] in "./\\" or name[1:3] in (":\\", ":/"):
        raise CheckpointError(
            f"the tensor name {name!r} reads like a path out of here, not like a module", path=path
        )


def derived_tensor(
    like: StoredTensor, shape: tuple[int, ...], compute: Callable[[], Array]
) -> StoredTensor:
    """Describe a tensor that follows from stored ones: computed in float64 when asked for.

    Raises
    ------
    CheckpointError
        If it would have more than 2^29 numbers: a small file can imply a huge product.
    """
    if math.prod(shape) > MAX_NUMBERS:
        raise like.error(
            f"the product it is part of has shape {shape}, above {MAX_NUMBERS} numbers"
        )

    def fetch() -> Array:
        return compute().astype(np.float64, copy=False)

    return replace(like, shape=shape, dtype="float64", fetch=fetch)


# -- safetensors files, read -----------------------------------------------------------------------

DTYPE_OF_CODE = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "BOOL": "bool",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
}
"""Types by what a safetensors header calls them."""
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
LENGTH_BYTES = 8  # the header's length, little-endian
READ_BYTES = 2**20  # at a time, for a digest


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a safetensors file."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]


def read_header(path: Path) -> Header:
    """Read names, shapes, dtypes and places of all tensors of a safetensors file.

    Raises
    ------
    CheckpointError
        For a Git-LFS pointer, a truncated or padded file, a header longer than 100 MB or not JSON,
        an unknown dtype, a shape that disagrees with its bytes, a hole or an overlap, a name given
        twice or not fit for a module.
    """
    size = regular_file_size(path)
    text = _read_header_text(path, size)
    entries = parse_json(text, path, what="header")
    metadata = _header_metadata(entries.pop("__metadata__", None), path)
    data_start = LENGTH_BYTES + len(text)
    tensors = {
        name: _header_tensor(name, entry, path, data_start, size - data_start)
        for name, entry in entries.items()
    }
    _check_layout(entries, path, size - data_start)
    try:
        # The reference reader must agree, or other tools would see another file than we do.
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"the safetensors library refuses it: {first_line(error)}", path=path
        ) from error
    return Header(metadata, tensors)


def _read_header_text(path: Path, size: int) -> bytes:
    """Read the JSON of a header, whose length is checked against the size of the file."""
    if size < LENGTH_BYTES:
        raise CheckpointError(
            f"truncated: {size} bytes, a safetensors file has at least {LENGTH_BYTES}", path=path
        )
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > size - LENGTH_BYTES:
            raise CheckpointError(
                f"truncated or not safetensors: the header declares {length} bytes, the file has "
                f"{size}; download it again",
                path=path,
            )
        if length > STORED_TEXT_BYTES:
            raise CheckpointError(
                f"the header declares {length} bytes; at most {STORED_TEXT_BYTES} are read",
                path=path,
            )
        return file.read(length)


def _header_metadata(value: object, path: Path) -> dict[str, str]:
    if value is None:  # as the safetensors library reads it
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise CheckpointError("the header's __metadata__ is not a map from text to text", path=path)
    return value


def _header_tensor(
    name: str, entry: Any, path: Path, data_start: int, data_bytes: int
) -> StoredTensor:
    """Check one entry of a header against itself and against the bytes that follow the header."""
    check_name(name, path)

    def error(message: str) -> CheckpointError:
        return CheckpointError(message, path=path, tensor=name)

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise error("its header entry is not dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPE_OF_CODE:
        codes = ", ".join(DTYPE_OF_CODE)
        raise UnsupportedError(
            f"dtype {str(code)[:40]!r} is not one of {codes}", path=path, tensor=name
        )
    if (
        not _is_list_of_counts(shape)
        or not _is_list_of_counts(offsets)
        or len(offsets) != 2
        or len(shape) > MAX_AXES
    ):
        given = f"shape {str(shape)[:80]!r} and data_offsets {str(offsets)[:80]!r}"
        raise error(f"{given} are not lists of counts")
    begin, end = offsets
    if begin > end or end > data_bytes:
        raise error(
            f"its bytes {begin} to {end} lie outside the {data_bytes} bytes of data; the file is "
            "truncated"
        )
    dtype = DTYPE_OF_CODE[code]
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        raise error(
            f"shape {tuple(shape)} of {code} needs {needed} bytes, but {end - begin} are declared"
        )
    fetch = partial(_read_numbers, path, name, data_start + begin, tuple(shape), dtype)
    return StoredTensor(name, tuple(shape), dtype, path, fetch)


def _is_list_of_counts(value: object) -> bool:
    return isinstance(value, list) and all(
        type(count) is int and 0 <= count < 2**63 for count in value
    )


def _check_layout(entries: Mapping[str, Any], path: Path, data_bytes: int) -> None:
    """Refuse holes and overlaps: the tensors must fill the data from the first byte to the last."""
    reached = 0
    for begin, end, name in sorted(
        (*entry["data_offsets"], name) for name, entry in entries.items()
    ):
        if begin < reached:
            fault = f"overlaps the tensor before it, which ends at {reached}"
        elif begin > reached:
            fault = f"follows a hole at {reached}"
        else:
            reached = end
            continue
        raise CheckpointError(f"its data at byte {begin} {fault}", path=path, tensor=name)
    if reached != data_bytes:
        raise CheckpointError(
            f"the tensors fill {reached} of {data_bytes} bytes of data", path=path
        )


def _read_numbers(path: Path, name: str, offset: int, shape: tuple[int, ...], dtype: str) -> Array:
    count = math.prod(shape)
    try:
        array = np.fromfile(path, DTYPES[dtype], count, offset=offset)
    except OSError as error:
        raise CheckpointError(
            f"cannot be read: {error.strerror}", path=path, tensor=name
        ) from error
    if array.size != count:
        raise CheckpointError(
            f"the file changed while it was read: {array.size} of {count} numbers are left",
            path=path,
            tensor=name,
        )
    return array.reshape(shape)


def data_sha256(path: Path, seal_bytes: int = 0) -> str:
    """Return the hexadecimal SHA-256 of what follows the header of a safetensors file.

    Without the last ``seal_bytes``.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        file.seek(LENGTH_BYTES + length)
        remaining = path.stat().st_size - LENGTH_BYTES - length - seal_bytes
        while remaining > 0:
            piece = file.read(min(remaining, READ_BYTES))
            if not piece:
                break
            digest.update(piece)
            remaining -= len(piece)
    return digest.hexdigest()


def file_digests(
    path: Path, config: Mapping[str, Any] | None = None, *, sealed: bool = False
) -> ContentDigests:
    """Return the digests of a safetensors file as it is now, which is read through.

    ``sealed`` says that digests are its last bytes, which count in none.
    """
    header = read_header(path)
    tensors = {name: (tensor.dtype, tensor.shape) for name, tensor in header.tensors.items()}
    data = data_sha256(path, SEAL_BYTES if sealed else 0)
    return ContentDigests.of(tensors, header.metadata, data, config)


def read_seal(path: Path) -> ContentDigests:
    """Return the digests that are the last bytes of a file."""
    with path.open("rb") as file:
        file.seek(-SEAL_BYTES, os.SEEK_END)
        return ContentDigests.of_seal(file.read())


# -- and written -----------------------------------------------------------------------------------


def encode_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Encode length and JSON of a header for tensors ``{name: (dtype, shape)}`` in file order."""
    entries: dict[str, Any] = {}
    if metadata:
        entries["__metadata__"] = dict(sorted(metadata.items()))
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin = end
        end = begin + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {
            "dtype": CODE_OF_DTYPE[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    if any(DTYPES[dtype].itemsize > 1 for dtype, _ in tensors.values()):
        text += b" " * (-len(text) % LENGTH_BYTES)  # numbers begin at a multiple of eight bytes
    if len(text) > STORED_TEXT_BYTES:
        raise CheckpointError(
            f"the header of {len(tensors)} tensors takes {len(text)} bytes; at most "
            f"{STORED_TEXT_BYTES} fit"
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def copy_with_digests(
    path: Path,
    out: Path,
    metadata: Mapping[str, str],
    config: Mapping[str, Any] | None,
    *,
    sealed: bool = False,
) -> None:
    """Copy a safetensors file under other metadata, with the digests of what it holds.

    Parameters
    ----------
    path, out : Path
        The file, and the one to write.
    metadata : mapping of str to str
    config : mapping, optional
        That the file belongs to.
    sealed : bool
        Whether the digests are the last bytes of the file, and not in its header.
    """
    text = _read_header_text(path, regular_file_size(path))
    entries = parse_json(text, path, what="header")
    entries.pop("__metadata__", None)
    in_order = sorted(entries, key=lambda name: entries[name]["data_offsets"])
    tensors = {
        name: (DTYPE_OF_CODE[entries[name]["dtype"]], tuple(entries[name]["shape"]))
        for name in in_order
    }
    data = data_sha256(path, SEAL_BYTES if sealed else 0)
    digests = ContentDigests.of(tensors, metadata, data, config)
    digests_in_header = {} if sealed else {HEADER_KEY: digests.text}
    header = encode_header(tensors, {**metadata, **digests_in_header})
    with path.open("rb") as old, out.open("wb") as new:
        old.seek(LENGTH_BYTES + len(text))
        new.write(header)
        shutil.copyfileobj(old, new)
        if sealed:
            new.seek(-SEAL_BYTES, os.SEEK_END)
            new.write(digests.seal)


class TensorWriter:
    """Gathers tensors one by one and writes a safetensors file.

    Parameters
    ----------
    directory : Path
        Where bytes wait that memory does not hold: the place of the file to be.
    memory_bytes : int
        Bytes that may wait in memory; beyond them all wait on disk. By hand.
    """

    def __init__(self, directory: Path, *, memory_bytes: int = 8 * 2**20) -> None:
        self.directory = directory
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._places: dict[str, tuple[int, int]] = {}  # offset and bytes in the spool
        self._piece_bytes = max(memory_bytes // 8, 1)
        self._last = ""  # of the tensors of bytes the one that goes to the end
        self._hashed: tuple[list[str], str] | None = None  # the tensors, and their SHA-256
        self._spool = tempfile.SpooledTemporaryFile(  # noqa: SIM115
            max_size=memory_bytes, dir=str(directory)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._spool.close()

    def add(self, name: str, array: Array) -> None:
        """Append one tensor with the bits it has."""
        check_name(name, self.directory)
        dtype = array.dtype.name
        if dtype not in CODE_OF_DTYPE:
            codes = ", ".join(CODE_OF_DTYPE)
            raise CheckpointError(f"dtype {dtype} is not one of {codes}", tensor=name)
        if name in self.tensors:
            raise CheckpointError("is written twice", tensor=name)
        data = little_endian_bytes(array)
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
        """Write the file in the safetensors library's order: widest dtype first, then by name."""
        order = self._file_order()
        with path.open("wb") as file:
            file.write(encode_header({name: self.tensors[name] for name in order}, metadata))
            file.writelines(self._pieces(order))

    def sha256(self) -> str:
        """Return the hexadecimal SHA-256 of what the file will hold after its header."""
        order = self._file_order()
        if self._hashed is None or self._hashed[0] != order:
            digest = hashlib.sha256()
            for piece in self._pieces(order):
                digest.update(piece)
            self._hashed = order, digest.hexdigest()
        return self._hashed[1]

    def with_digests(
        self, metadata: Mapping[str, str], config: Mapping[str, Any] | None = None
    ) -> dict[str, str]:
        """Return metadata with the digests of all tensors, of itself, and of a config beside it.

        To be called when all tensors are in; see `lsrdecomp.lora.files.digests`.
        """
        digests = ContentDigests.of(self.tensors, metadata, self.sha256(), config)
        return {**metadata, HEADER_KEY: digests.text}

    def seal(self, name: str, config: Mapping[str, Any]) -> None:
        """Write the digests of all tensors and of a config over the last bytes of a tensor.

        That tensor, of bytes, will be the last of the file, which must have no metadata. To be
        called when all tensors are in.

        Parameters
        ----------
        name : str
            The tensor, which ends in `SEAL_BYTES` zeros.
        config : mapping
            JSON values.
        """
        self._last = name
        without_seal = hashlib.sha256()
        remaining = sum(size for _, size in self._places.values()) - SEAL_BYTES
        for piece in self._pieces(self._file_order()):
            without_seal.update(piece[: max(0, remaining)])
            remaining -= len(piece)
        digests = ContentDigests.of(self.tensors, {}, without_seal.hexdigest(), config)
        begin, size = self._places[name]
        self._spool.seek(begin + size - SEAL_BYTES)
        self._spool.write(digests.seal)
        self._spool.seek(0, os.SEEK_END)
        whole = without_seal.copy()
        whole.update(digests.seal)
        self._hashed = self._file_order(), whole.hexdigest()

    def _file_order(self) -> list[str]:
        def width_and_name(name: str) -> tuple[int, bool, str]:
            dtype, _ = self.tensors[name]
            return -DTYPES[dtype].itemsize, name == self._last, name

        return sorted(self.tensors, key=width_and_name)

    def _pieces(self, order: Iterable[str]) -> Iterator[bytes]:
        for name in order:
            begin, remaining = self._places[name]
            self._spool.seek(begin)
            while remaining:
                piece = self._spool.read(min(remaining, self._piece_bytes))
                yield piece
                remaining -= len(piece)


def little_endian_bytes(array: Array) -> NDArray[np.uint8]:
    """Return the numbers of an array as a row of bytes, little-endian."""
    ordered = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return ordered.reshape(-1).view(np.uint8)
