"""Looking at files before trusting them: kind, size, Git-LFS pointers, JSON of bounded size and depth, digests."""

from __future__ import annotations

import hashlib
import json
import stat
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

MAX_JSON = 16 * 2**20
LFS = b"version https://git-lfs"
SUMS = "SHA256SUMS"
"""A digest of every file of a directory we write, in the form that the tool ``sha256sum -c``
reads."""
EXAMPLES = (".jsonl", ".json", ".csv", ".parquet")
"""Endings of files of examples, as `lsrdecomp.calibration.dataset` reads them; others hold a text a
line."""
LARGEST_SUMS = 2**20
WRITTEN = ("adapter_model.safetensors", "adapters.safetensors", "adapter_config.json")
"""Files that act on the model: a record that does not name one vouches for nothing."""


def bytes_to_open(weights: Path) -> int:
    """Bytes of a weight file and of the adapter_config.json beside it, if there is one."""
    config = weights.parent / "adapter_config.json"
    return weights.stat().st_size + (config.stat().st_size if config.is_file() else 0)


def regular_file_size(path: Path) -> int:
    """Bytes in a regular file (symbolic links are followed: the Hugging Face cache is made of them).

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
            start = file.read(256)
    except FileNotFoundError:
        broken = " (a symbolic link that leads nowhere)" if path.is_symlink() else ""
        raise CheckpointError(f"no such file{broken}", path=path) from None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", path=path) from error
    if start.startswith(LFS):
        size = next(
            (
                line[5:].decode("ascii", "replace")
                for line in start.split(b"\n")
                if line[:5] == b"size "
            ),
            "?",
        )
        text = f"this is a Git-LFS pointer, not the file itself ({size} bytes are elsewhere): run git lfs pull"
        raise CheckpointError(text, path=path)
    return status.st_size


def read_text_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file that hold more than white space.

    Raises
    ------
    CheckpointError
        As `regular_file_size`, and if the file is not UTF-8 or has no text.
    """
    regular_file_size(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        text = f"not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
        raise CheckpointError(text, path=path) from None
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise CheckpointError("no line has text", path=path)
    return lines


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of at most 16 MiB from a regular file."""
    size = regular_file_size(path)
    if size > MAX_JSON:
        raise CheckpointError(f"{size} bytes of JSON; at most {MAX_JSON} are read", path=path)
    return parse_json(path.read_bytes(), path)


def parse_json(text: bytes, path: Path, *, what: str = "file") -> dict[str, Any]:
    """A JSON object; a key given twice, a wrong encoding or endless nesting is a `CheckpointError`."""
    try:
        value = json.loads(
            text.decode("utf-8-sig" if what == "file" else "utf-8"),
            object_pairs_hook=_once,
            parse_constant=_number,
        )
    except RecursionError:
        raise CheckpointError(f"the {what}'s JSON is nested too deeply", path=path) from None
    except ValueError as error:
        raise CheckpointError(
            f"the {what} is not JSON: {str(error).partition(';')[0][:200]}", path=path
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"the {what}'s JSON is a {type(value).__name__}, expected an object", path=path
        )
    return value


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(directory: Path) -> None:
    """Record the digest of every file in ``directory``."""
    files = sorted(path for path in directory.iterdir() if path.is_file() and path.name != SUMS)
    (directory / SUMS).write_text(
        "".join(f"{sha256(path)}  {path.name}\n" for path in files), encoding="utf-8"
    )


def changed_files(directory: Path) -> tuple[str, ...] | None:
    """Names of files that are not what was written, or gone; ``None`` where nothing was recorded."""
    record = directory / SUMS
    if not record.is_file():
        return None
    if record.stat().st_size > LARGEST_SUMS:
        raise CheckpointError(
            f"{record.stat().st_size} bytes of digests; not a file written here", path=record
        )
    files = {path.name: path for path in directory.iterdir() if path.is_file()}
    lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
    listed = {line.partition("  ")[2] for line in lines}
    changed = [
        f"{name} (not in {SUMS})"
        for name in sorted(files)
        if name in WRITTEN and name not in listed
    ]
    for line in lines:
        digest, _, name = line.partition("  ")
        if name not in files or sha256(files[name]) != digest:
            changed.append(name if name in files else ascii(name or line)[1:81])
    return tuple(changed)


def _number(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, member in pairs:
        if name in value:
            raise ValueError(f"{name[:200]!r} is given twice")
        value[name] = member
    return value
