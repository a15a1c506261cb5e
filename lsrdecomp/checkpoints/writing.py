"""Writing whole or not at all: asked before any work begins, then a hidden path beside it and one atomic rename.

What is written says where it came from, source hash, versions and plan: in the header of the weight
file; of an LSR directory on its card, README.md, since no byte of it is needed to open it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp.checkpoints.files import write_sums
from lsrdecomp.checkpoints.format import CONFIG
from lsrdecomp.checkpoints.packed_index import FIELD, read_index
from lsrdecomp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from lsrdecomp.checkpoints.records import Checkpoint

fcntl: Any
try:
    fcntl = import_module("fcntl")
except ImportError:
    # No such locks outside POSIX: leftovers of killed runs then stay until removed by hand.
    fcntl = None

WEIGHTS = "adapter_model.safetensors"
LEFTOVER_AGE = 60.0  # seconds
KEY = "lsrdecomp"
CARD = "README.md"
SECTION = re.compile(r"^```json lsrdecomp\n(.*?)\n```$", re.DOTALL | re.MULTILINE)


def check_output_path(out: Path, inputs: Iterable[Path] = ()) -> None:
    """Refuse an output that is a symbolic link, touches an input, or lies where nothing can be written.

    The writers ask the same again.

    Parameters
    ----------
    out : Path
        What shall be written; directories above it that do not exist yet will be made.
    inputs : iterable of Path
        Files and directories that are read: an output equals none, holds none, and lies in none.

    Raises
    ------
    CheckpointError
        Saying which.

    Examples
    --------
    >>> with tempfile.TemporaryDirectory() as lora:
    ...     check_output_path(Path(lora) / "small", inputs=[Path(lora)])
    Traceback (most recent call last):
    lsrdecomp.errors.CheckpointError: ...: the output is, holds or lies inside the input ...; ...
    """
    if out.is_symlink():
        raise CheckpointError("the output is a symbolic link; name what it leads to", path=out)
    target = out.resolve()
    for path in inputs:
        source = path.resolve()
        if (
            target == source
            or target in source.parents
            or (source in target.parents and source.is_dir())
        ):
            raise CheckpointError(
                f"the output is, holds or lies inside the input {path}; choose another", path=out
            )
    above = next(parent for parent in out.absolute().parents if parent.exists())
    if not above.is_dir():
        raise CheckpointError(
            f"cannot be written: {above} is a file, not a directory; choose another output",
            path=out,
        )
    try:
        with tempfile.TemporaryFile(dir=above):  # it has no name, so that a kill leaves nothing
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CheckpointError(
            f"cannot be written: {above} takes no files ({reason})", path=out
        ) from None


def check_output_file(out: Path, inputs: Iterable[Path] = (), *, force: bool = False) -> None:
    """Refuse now what `new_file` would later: `check_output_path`, and what is there already.

    Parameters
    ----------
    out, inputs
        As for `check_output_path`.
    force : bool
        Whether a regular file may be replaced; nothing else ever is.

    Raises
    ------
    CheckpointError
        Saying what is there.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as there:
    ...     check_output_file(Path(there.name))
    Traceback (most recent call last):
    lsrdecomp.errors.CheckpointError: ...: already exists; choose another output, or replace the ...
    """
    check_output_path(out, inputs)
    if out.exists() and not out.is_file():
        kind = "a directory" if out.is_dir() else "no regular file"
        raise CheckpointError(
            f"is {kind}: not replaced even by force; choose another output", path=out
        )
    if out.exists() and not force:
        raise CheckpointError(
            "already exists; choose another output, or replace the file by force=True", path=out
        )


def check_output_directory(out: Path, inputs: Iterable[Path] = (), force: bool = False) -> None:
    """Refuse now what `new_directory` would later: `check_output_path`, and what is there already.

    Parameters
    ----------
    out, inputs
        As for `check_output_path`.
    force : bool
        Whether a directory that holds an adapter may be replaced; no other ever is.

    Raises
    ------
    CheckpointError
        Saying what is there.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as there:
    ...     check_output_directory(Path(there))
    Traceback (most recent call last):
    lsrdecomp.errors.CheckpointError: ...: already exists; choose another output, or replace it ...
    """
    check_output_path(out, inputs)
    if not out.exists():
        return
    if not force:
        raise CheckpointError(
            "already exists; choose another output, or replace it as a whole by force=True",
            path=out,
        )
    entries = list(out.iterdir()) if out.is_dir() else None
    if (
        entries is None
        or (entries and not (out / CONFIG).is_file())
        or any(entry.is_dir() for entry in entries)
    ):
        text = f"not replaced even by force: it is not a directory of files with {CONFIG}"
        raise CheckpointError(f"{text}; remove it yourself", path=out)


@contextmanager
def new_directory(
    out: str | Path, *, inputs: Iterable[Path] = (), force: bool = False
) -> Iterator[Path]:
    """A directory to fill that becomes ``out`` as a whole when the block ends, or vanishes if it fails.

    A kill at any moment leaves the old state or the new one, and at most a hidden
    ``.<out>.*.partial`` beside it, which the next run to the same place removes.

    Raises
    ------
    CheckpointError
        If ``out`` exists and ``force`` is not given, if with ``force`` it is something else than an
        adapter directory, if it equals, holds or lies inside an input, or if the disk is full.
    """
    out = Path(out)
    check_output_directory(out, inputs, force)
    with (
        ExitStack() as locks,
        _beside(out) as part,
    ):  # the lock goes last: until then the leftovers are ours
        remove_leftovers(out.absolute())
        part.mkdir()
        lock = lock_directory(part)
        if lock is not None:
            locks.callback(os.close, lock)
        yield part
        write_sums(part)
        for file in part.iterdir():
            _fsync(file)
        _fsync(part)
        _put_in_place(part, out.absolute(), force)


@contextmanager
def new_file(
    out: str | Path, *, inputs: Iterable[Path] = (), force: bool = False
) -> Iterator[Path]:
    """As `new_directory`, for one file: ``out`` appears whole when the block ends, or not at all.

    Parameters
    ----------
    out : str or Path
        Directories above it are made.
    inputs : iterable of Path
        What is read to write it.
    force : bool
        Replace a regular file.

    Yields
    ------
    Path
        The file to fill, hidden beside ``out``.

    Raises
    ------
    CheckpointError
        If ``out`` exists and ``force`` is not given, if it is an input or lies inside one, or if
        the disk is full.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with new_file(f"{folder}/report.txt") as part:
    ...         count = part.write_text("whole or not at all")
    ...     Path(f"{folder}/report.txt").read_text()
    'whole or not at all'
    """
    out = Path(out)
    check_output_file(out, inputs, force=force)
    with _beside(out) as part:
        part.touch(exist_ok=False)
        yield part
        _fsync(part)
        os.replace(part, out)


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A hidden path beside ``out``; what is left there when the block ends goes, and parents that it was made for.

    What is left is a failed output, or a directory that was replaced.
    """
    made = _make_parents(out.absolute().parent)
    part = out.absolute().parent / f".{out.absolute().name[:180]}.{secrets.token_hex(6)}.partial"
    try:
        yield part
        _fsync(out.absolute().parent)
        made = []
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CheckpointError(
            f"could not be written: {reason}; nothing was left behind", path=out
        ) from error
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)
        for parent in reversed(made):
            with contextlib.suppress(OSError):
                parent.rmdir()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON object, sorted and indented as PEFT writes its configs."""
    path.write_text(
        json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8"
    )


def _make_parents(directory: Path) -> list[Path]:
    missing: list[Path] = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    missing.reverse()
    try:
        for parent in missing:
            parent.mkdir(exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot be made: {error.strerror}", path=missing[-1]) from error
    return missing


def _put_in_place(part: Path, out: Path, force: bool) -> None:
    if not force or not out.exists():
        try:
            os.rename(part, out)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            text = "already exists, written by another run meanwhile; choose another output, or replace it by force=True"
            raise CheckpointError(text, path=out) from None
    elif not _exchange(part, out):
        old = part.with_suffix(".old")
        os.rename(out, old)
        try:
            os.rename(part, out)
        except BaseException:
            os.rename(old, out)
            raise
        os.rename(old, part)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories in one step where the system can (Linux, macOS)."""
    name, arguments = (
        ("renamex_np", (os.fsencode(first), os.fsencode(second), 2))
        if sys.platform == "darwin"
        else ("renameat2", (-100, os.fsencode(first), -100, os.fsencode(second), 2))
    )
    try:
        return bool(getattr(ctypes.CDLL(None), name)(*arguments) == 0)
    except (AttributeError, OSError, TypeError):
        return False


def lock_directory(directory: Path) -> int | None:
    """Lock the directory itself, so that the lock goes where it goes and ends with the process.

    Not with filelock, which locks regular files only: a lock file of its own would be one more
    thing a kill leaves.
    """
    if fcntl is None:
        return None
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def remove_leftovers(out: Path, age: float = LEFTOVER_AGE) -> None:
    """Clear what killed runs left: hidden directories of ours that nobody holds a lock on any more.

    Those made or dated within ``age`` seconds of now stay: a run may be about to take its lock.
    """
    for left in map(
        Path,
        glob.glob(
            str(Path(glob.escape(str(out.parent))) / f".{glob.escape(out.name[:180])}.*.partial")
        ),
    ):
        with contextlib.suppress(OSError):
            if abs(time.time() - left.stat().st_mtime) < age:
                continue
            handle = lock_directory(left)
            if handle is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(handle)


def _fsync(path: Path) -> None:
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- where it came from ----------------------------------------------------------------------------


def metadata(
    source: Checkpoint | None, more: Mapping[str, Any] | None, **facts: Any
) -> dict[str, str]:
    """Header metadata: PEFT's format mark and one JSON text of ours."""
    return {"format": "pt", KEY: _text(source, {**facts, **(more or {})})}


def card_section(source: Checkpoint | None, more: Mapping[str, Any]) -> str:
    """The same text as a section of a card."""
    return f"\n## Where it comes from\n\n```json {KEY}\n{_text(source, more, indent=1)}\n```\n"


def _text(source: Checkpoint | None, facts: Mapping[str, Any], indent: int | None = None) -> str:
    versions = {name: installed_version(name) for name in ("lsrdecomp", "numpy", "safetensors")}
    record: dict[str, Any] = {"versions": versions, **facts}
    if source is not None:
        record["source"] = {
            "file": source.weights.name,
            "format": source.format,
            "sha256": source.source_sha256,
        }
    try:
        return json.dumps(record, sort_keys=True, allow_nan=False, indent=indent)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the provenance is not JSON: {error}") from None


def provenance(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `metadata` or `card_section` wrote, or an empty dict for a file that is not ours."""
    text = checkpoint.metadata.get(KEY)
    try:
        if text is None and checkpoint.format == "lsr":
            section = SECTION.search((checkpoint.weights.parent / CARD).read_text(encoding="utf-8"))
            text = None if section is None else section[1]
        record = json.loads(text or "{}")
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    index = checkpoint.config.get(FIELD)
    dropped = () if index is None else read_index(index).dropped
    return {**record, "dropped": list(dropped)} if dropped else record


def installed_version(name: str) -> str:
    """Of a package; "unknown" for one that is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
