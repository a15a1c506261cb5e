"""Writing whole or not at all.

An output is checked before any work begins. It then grows in a hidden path beside its place, which
it takes by one atomic rename.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.files.file_checks import write_sums
from lsrdecomp.lora.files.format import CONFIG

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

fcntl: Any
try:
    fcntl = import_module("fcntl")
except ImportError:
    # No such locks outside POSIX: leftovers of killed runs then stay until removed by hand.
    fcntl = None

WEIGHTS = "adapter_model.safetensors"


def weight_file(adapter: Path) -> Path:
    """Return the weight file of an adapter that was written: itself, or the one in a directory."""
    return adapter if adapter.is_file() else adapter / WEIGHTS


def check_output_path(out: Path, inputs: Iterable[Path] = ()) -> None:
    """Refuse an output that is a symbolic link, touches an input, or cannot be written.

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
    lsrdecomp.errors.CheckpointError: ...: the output must not lie inside the input ...; choose ...
    """
    if out.is_symlink():
        raise CheckpointError("the output is a symbolic link; name what it leads to", path=out)
    target = out.resolve()
    for path in inputs:
        source = path.resolve()
        relation = None
        if target == source:
            relation = "be"
        elif target in source.parents:
            relation = "hold"
        elif source in target.parents and source.is_dir():
            relation = "lie inside"
        if relation is not None:
            raise CheckpointError(
                f"the output must not {relation} the input {path}; choose another", path=out
            )
    above = next(parent for parent in out.absolute().parents if parent.exists())
    if not above.is_dir():
        raise CheckpointError(
            f"cannot be written: {above} is a file, not a directory; choose another output",
            path=out,
        )
    try:
        # A temporary file has no name here, so that a kill leaves nothing.
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CheckpointError(
            f"cannot be written: {above} takes no files ({reason})", path=out
        ) from None


def check_output_file(out: Path, inputs: Iterable[Path] = (), *, force: bool = False) -> None:
    """Refuse now what `new_file` would later: `check_output_path`, and existing files.

    Parameters
    ----------
    out, inputs
        As for `check_output_path`.
    force : bool
        Whether a regular file may be replaced; nothing else ever is.

    Raises
    ------
    CheckpointError
        Naming the existing path.

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
        found = "a directory" if out.is_dir() else "no regular file"
        raise CheckpointError(
            f"is {found}: not replaced even by force; choose another output", path=out
        )
    if out.exists() and not force:
        raise CheckpointError(
            "already exists; choose another output, or replace the file by force=True", path=out
        )


def check_output_directory(out: Path, inputs: Iterable[Path] = (), force: bool = False) -> None:
    """Refuse now what `new_directory` would later: `check_output_path`, and existing files.

    Parameters
    ----------
    out, inputs
        As for `check_output_path`.
    force : bool
        Whether a directory that holds an adapter may be replaced; no other ever is.

    Raises
    ------
    CheckpointError
        Naming the existing path.

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
    if not _is_adapter_directory(out):
        raise CheckpointError(
            f"not replaced even by force: it is not a directory of files with {CONFIG}; remove it "
            "yourself",
            path=out,
        )


def _is_adapter_directory(out: Path) -> bool:
    """Return whether ``out`` holds files alone, the config of an adapter among them, or nothing."""
    if not out.is_dir():
        return False
    entries = list(out.iterdir())
    if any(entry.is_dir() for entry in entries):
        return False
    return not entries or (out / CONFIG).is_file()


@contextmanager
def new_directory(
    out: str | Path, *, inputs: Iterable[Path] = (), force: bool = False, sums: bool = True
) -> Iterator[Path]:
    """Give a directory to fill, which becomes ``out`` as a whole when the block ends.

    It gets SHA256SUMS of its files, if ``sums``. It vanishes if the block fails. A kill at any
    moment leaves the old state or the new one, and at most a hidden ``.<out>.*.partial`` beside it,
    which the next run to the same place removes.

    Raises
    ------
    CheckpointError
        If ``out`` exists and ``force`` is not given, if with ``force`` it is something else than an
        adapter directory, if it is, contains or is contained in an input, or if the disk is full.
    """
    out = Path(out)
    check_output_directory(out, inputs, force)
    # The lock goes last: as long as it is held, what lies there is nobody's leftover.
    with ExitStack() as locks, _hidden_path(out) as part:
        remove_leftovers(out.absolute())
        part.mkdir()
        lock = lock_path(part)
        if lock is not None:
            locks.callback(os.close, lock)
        yield part
        if sums:
            write_sums(part)
        for file in part.iterdir():
            _fsync(file)
        _fsync(part)
        _take_place(part, out.absolute(), force)


@contextmanager
def new_file(
    out: str | Path,
    *,
    inputs: Iterable[Path] = (),
    force: bool = False,
    clears_leftovers: bool = True,
) -> Iterator[Path]:
    """Give a file to fill, which becomes ``out`` when the block ends, whole or not at all.

    Parameters
    ----------
    out : str or Path
        Directories above it are made.
    inputs : iterable of Path
        Paths that are read to write it.
    force : bool
        Replace a regular file.
    clears_leftovers : bool
        Look through the directory for what killed runs left of the same file.

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
    with ExitStack() as locks, _hidden_path(out) as part:
        if clears_leftovers:
            remove_leftovers(out.absolute())
        part.touch(exist_ok=False)
        lock = lock_path(part)
        if lock is not None:
            locks.callback(os.close, lock)
        yield part
        _fsync(part)
        part.replace(out)


@contextmanager
def _hidden_path(out: Path) -> Iterator[Path]:
    """Give a hidden path beside ``out``, and clear what is there when the block ends.

    That is a failed output, or a directory that was replaced. After a failure the parents go too
    that were made for it.
    """
    directory = out.absolute().parent
    new_parents = _make_parents(directory)
    part = directory / f".{_short_name(out)}.{secrets.token_hex(6)}.partial"
    try:
        yield part
        _fsync(directory)
        new_parents = []
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
        for parent in reversed(new_parents):
            with contextlib.suppress(OSError):
                parent.rmdir()


def _short_name(out: Path) -> str:
    """Return the name of an output, cut so that a hidden path beside it fits a file system."""
    return out.absolute().name[:180]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object, sorted and indented as PEFT writes its configs."""
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False)
    path.write_text(f"{text}\n", encoding="utf-8")


def _make_parents(directory: Path) -> list[Path]:
    """Make a directory and those above it; return the new ones, outermost first."""
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


def _take_place(part: Path, out: Path, force: bool) -> None:
    """Rename a finished directory to ``out``; what was there is at ``part`` afterwards."""
    if not force or not out.exists():
        try:
            part.rename(out)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise CheckpointError(
                "already exists, written by another run meanwhile; choose another output, or "
                "replace it by force=True",
                path=out,
            ) from None
    elif not _exchange(part, out):
        # Two renames, where the system has no exchange: between them a kill leaves both hidden.
        old = part.with_suffix(".old")
        out.rename(old)
        try:
            part.rename(out)
        except BaseException:
            old.rename(out)
            raise
        old.rename(part)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories in one step; return whether the system can (Linux, macOS)."""
    exchange_flag = 2
    current_directory = -100
    if sys.platform == "darwin":
        name = "renamex_np"
        arguments: tuple[Any, ...] = (os.fsencode(first), os.fsencode(second), exchange_flag)
    else:
        name = "renameat2"
        arguments = (
            current_directory,
            os.fsencode(first),
            current_directory,
            os.fsencode(second),
            exchange_flag,
        )
    try:
        return bool(getattr(ctypes.CDLL(None), name)(*arguments) == 0)
    except (AttributeError, OSError, TypeError):
        return False


def lock_path(path: Path) -> int | None:
    """Lock a file or a directory itself: the lock goes where it goes and ends with the process.

    Returns
    -------
    int, or None
        A handle to close; None if another process holds the lock, or where there are none.

    Notes
    -----
    Not with filelock, which locks no directories: a lock file of its own would be one more thing a
    kill leaves.
    """
    if fcntl is None:
        return None
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def remove_leftovers(out: Path, age: float = 60.0) -> list[Path]:
    """Clear what killed runs left: hidden outputs of ours that nobody holds a lock on any more.

    Parameters
    ----------
    out : Path
        The output beside which they lie.
    age : float
        Seconds; what was made or dated within that time of now stays, since a run may be about to
        take its lock. By hand.

    Returns
    -------
    list of Path
        What nobody holds and stays all the same.
    """
    unfinished = re.compile(rf"\.{re.escape(_short_name(out))}\.[0-9a-f]{{12}}\.partial")
    staying = []
    for leftover in sorted(out.parent.iterdir()) if out.parent.is_dir() else ():
        if not unfinished.fullmatch(leftover.name):
            continue
        with contextlib.suppress(OSError):
            handle = lock_path(leftover)
            if handle is None:
                continue
            if abs(time.time() - leftover.stat().st_mtime) < age:
                staying.append(leftover)
            elif leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink()
            os.close(handle)
    return staying


def _fsync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk."""
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
