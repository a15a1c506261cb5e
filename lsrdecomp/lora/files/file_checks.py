"""Looking at files before trusting them: kind, size, Git-LFS pointers, bounded JSON, digests."""

from __future__ import annotations

import hashlib
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lsrdecomp.errors import CheckpointError
from lsrdecomp.gateway import STORED_TEXT_BYTES, SUMS_BYTES, printable, read_json_text

GIT_LFS_START = b"version https://git-lfs"
SUMS = "SHA256SUMS"
"""File of digests in every directory that is written here; ``sha256sum -c`` reads it."""
EXAMPLE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""Endings of files that `lsrdecomp.lora.base.dataset` reads as examples; others hold a text a
line."""
PIPELINE_INDEX = "model_index.json"
"""What diffusers keeps in the directory of a pipeline."""
ADAPTER_FILES = ("adapter_model.safetensors", "adapters.safetensors", "adapter_config.json")
"""Files that act on the model: digests that leave one of them out vouch for nothing."""


def bytes_to_open(weights: Path) -> int:
    """Return the bytes of a weight file and of an adapter_config.json beside it."""
    config = weights.parent / "adapter_config.json"
    config_bytes = config.stat().st_size if config.is_file() else 0
    return weights.stat().st_size + config_bytes


def regular_file_size(path: Path) -> int:
    """Return the bytes in a regular file, or refuse anything else.

    Symbolic links are followed: the Hugging Face cache is made of them.

    Raises
    ------
    CheckpointError
        If there is no such file, if it is a directory, a device or a pipe, or if it is a Git-LFS
        pointer.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError("not a regular file", path=path)
        with path.open("rb") as file:
            start = file.read(256)  # a whole Git-LFS pointer
    except FileNotFoundError:
        broken = " (a symbolic link that leads nowhere)" if path.is_symlink() else ""
        raise CheckpointError(f"no such file{broken}", path=path) from None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", path=path) from error
    if start.startswith(GIT_LFS_START):
        raise CheckpointError(
            "this is a Git-LFS pointer, not the file itself "
            f"({_size_in_pointer(start)} bytes are elsewhere): run git lfs pull",
            path=path,
        )
    return status.st_size


def _size_in_pointer(pointer: bytes) -> str:
    """Return the size that a Git-LFS pointer declares, or "?"."""
    for line in pointer.split(b"\n"):
        if line.startswith(b"size "):
            return line.removeprefix(b"size ").decode("ascii", "replace")
    return "?"


def read_text_lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 file that hold more than white space.

    Raises
    ------
    CheckpointError
        As `regular_file_size`, and if the file is not UTF-8 or has no text.
    """
    regular_file_size(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
        raise CheckpointError(reason, path=path) from None
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise CheckpointError("no line has text", path=path)
    return lines


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of at most 100 MB from a regular file."""
    size = regular_file_size(path)
    if size > STORED_TEXT_BYTES:
        raise CheckpointError(
            f"{size} bytes of JSON; at most {STORED_TEXT_BYTES} are read", path=path
        )
    return parse_json(path.read_bytes(), path)


def is_diffusers(base: object) -> bool:
    """Return whether a base is a directory of diffusers: of a pipeline, or of one model of it."""
    if not isinstance(base, str | Path):
        return False
    directory = Path(base)
    if (directory / PIPELINE_INDEX).is_file():
        return True
    config = directory / "config.json"
    return config.is_file() and "_class_name" in read_json(config)


def parse_json(text: bytes, path: Path, *, what: str = "file") -> dict[str, Any]:
    """Parse a JSON object.

    Parameters
    ----------
    text : bytes
        UTF-8; only a file may begin with a byte order mark.
    path : Path
        Where it comes from, for errors.
    what : str
        Which part of ``path`` it is, for errors.

    Raises
    ------
    CheckpointError
        For a key given twice, a wrong encoding, NaN and infinities, or endless nesting.
    """
    encoding = "utf-8-sig" if what == "file" else "utf-8"
    try:
        value = read_json_text(
            text.decode(encoding),
            object_pairs_hook=_refuse_repeated_keys,
            parse_constant=_refuse_constant,
        )
    except ValueError as error:
        reason = printable(str(error).partition(";")[0][:200])
        raise CheckpointError(f"the {what} is not JSON: {reason}", path=path) from None
    if not isinstance(value, dict):
        found = type(value).__name__
        raise CheckpointError(f"the {what}'s JSON is a {found}, expected an object", path=path)
    return value


def _refuse_constant(text: str) -> float:
    """Refuse NaN and the infinities, which Python reads and JSON does not have."""
    raise ValueError(f"{text} is not a JSON number")


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, member in pairs:
        if name in value:
            raise ValueError(f"{name[:200]!r} is given twice")
        value[name] = member
    return value


# -- digests of the files of a directory -----------------------------------------------------------


def sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class FileReading:
    """What a file held when it was read through.

    Attributes
    ----------
    path : Path
    sha256 : str
    status : tuple of int
        Inode, size and times before it was read.
    is_fresh : bool
        Whether it was so young then that its times may not tell a later change.
    """

    path: Path
    sha256: str
    status: tuple[int, ...]
    is_fresh: bool

    @classmethod
    def of(cls, path: Path, *, clock_step: float = 2.0) -> FileReading:
        """Read a file through.

        Parameters
        ----------
        path : Path
        clock_step : float
            Seconds, the coarsest step of a file system's clock: FAT's.
        """
        status = _status(path)
        modified = max(status[2:]) / 1e9
        is_fresh = abs(time.time() - modified) < clock_step
        return cls(path, sha256(path), status, is_fresh)

    def check_unchanged(self) -> None:
        """Raise `CheckpointError` if the file holds something else by now.

        It is read through again only where its times do not tell.
        """
        try:
            if not self.is_fresh and _status(self.path) == self.status:
                return
            current = sha256(self.path)
        except OSError as error:
            current = error.strerror or type(error).__name__
        if current != self.sha256:
            raise CheckpointError(
                "changed while it was read, so that what was made of it is of no one adapter; run "
                "this again when nobody writes to it",
                path=self.path,
            )


def _status(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def write_sums(directory: Path) -> None:
    """Record the digest of every file in ``directory``."""
    (directory / SUMS).write_text(sums_text(directory), encoding="utf-8")


def sums_text(directory: Path) -> str:
    """Return the digests of every file in ``directory`` but hidden ones, as SHA256SUMS has them."""
    visible = (path for path in sorted(directory.iterdir()) if not path.name.startswith("."))
    files = [path for path in visible if path.is_file() and path.name != SUMS]
    return "".join(f"{sha256(path)}  {path.name}\n" for path in files)


def listed_files(directory: Path) -> frozenset[str]:
    """Return the names that SHA256SUMS lists; none where there is no such file."""
    record = directory / SUMS
    if not record.is_file():
        return frozenset()
    return frozenset(line.partition("  ")[2] for line in _sums_lines(record))


def _sums_lines(record: Path) -> list[str]:
    size = record.stat().st_size
    if size > SUMS_BYTES:
        raise CheckpointError(f"{size} bytes of digests; not a file written here", path=record)
    return record.read_text(encoding="utf-8", errors="replace").splitlines()


def changed_files(directory: Path) -> tuple[str, ...] | None:
    """Return the names of files that are not what was written, or gone.

    Returns
    -------
    tuple of str, or None
        None where no digests were recorded.
    """
    record = directory / SUMS
    if not record.is_file():
        return None
    files = {path.name: path for path in directory.iterdir() if path.is_file()}
    present = files.keys() & set(ADAPTER_FILES)
    changed = [f"{name} (not in {SUMS})" for name in sorted(present - listed_files(directory))]
    for line in _sums_lines(record):
        digest, _, name = line.partition("  ")
        if name not in files:
            changed.append(ascii(name or line)[1:81])  # as a stranger wrote it, but printable
        elif sha256(files[name]) != digest:
            changed.append(name)
    return tuple(changed)
