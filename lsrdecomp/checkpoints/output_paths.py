"""Whether something can be written to a path, asked before any work begins; the writers ask the same again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from lsrdecomp.checkpoints.bundle import CONFIG
from lsrdecomp.errors import CheckpointError


def check_place(out: Path, inputs: Iterable[Path] = ()) -> None:
    """Raise `CheckpointError` if ``out`` is a symbolic link, touches an input, or lies where nothing can be written.

    Parameters
    ----------
    out : Path
        What shall be written; directories above it that do not exist yet will be made.
    inputs : iterable of Path
        Files and directories that are read: an output equals none, holds none, and lies in none.

    Examples
    --------
    >>> with tempfile.TemporaryDirectory() as lora:
    ...     check_place(Path(lora) / "small", inputs=[Path(lora)])
    Traceback (most recent call last):
    lsrdecomp.errors.CheckpointError: ...: the output is, holds or lies inside the input ...; choose another
    """
    if out.is_symlink():
        raise CheckpointError("the output is a symbolic link; name what it leads to", path=out)
    target = out.resolve()
    for given in inputs:
        source = given.resolve()
        if target == source or target in source.parents or (source in target.parents and source.is_dir()):
            raise CheckpointError(f"the output is, holds or lies inside the input {given}; choose another", path=out)
    above = next(parent for parent in out.absolute().parents if parent.exists())
    if not above.is_dir():
        raise CheckpointError(f"cannot be written: {above} is a file, not a directory; choose another output", path=out)
    try:
        with tempfile.TemporaryFile(dir=above):  # it has no name, so that a kill leaves nothing
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CheckpointError(f"cannot be written: {above} takes no files ({reason})", path=out) from None


def check_file(out: Path, inputs: Iterable[Path] = (), *, force: bool = False) -> None:
    """Raise `CheckpointError` now if `lsrdecomp.checkpoints.writing.new_file` would later.

    That is `check_place`, and: only a regular file is ever replaced, and only with ``force``.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as there:
    ...     check_file(Path(there.name))
    Traceback (most recent call last):
    lsrdecomp.errors.CheckpointError: ...: already exists; choose another output, or force to replace the file
    """
    check_place(out, inputs)
    if out.exists() and not out.is_file():
        kind = "a directory" if out.is_dir() else "no regular file"
        raise CheckpointError(f"is {kind}: not replaced even by force; choose another output", path=out)
    if out.exists() and not force:
        raise CheckpointError("already exists; choose another output, or force to replace the file", path=out)


def check_output(out: Path, inputs: Iterable[Path] = (), force: bool = False) -> None:
    """Raise `CheckpointError` now if `lsrdecomp.checkpoints.writing.new_directory` would later.

    That is `check_place`, and: an existing directory is replaced only with ``force``, and only if it holds an adapter.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as there:
    ...     check_output(Path(there))
    Traceback (most recent call last):
    lsrdecomp.errors.CheckpointError: ...: already exists; choose another output, or force to replace it as a whole
    """
    check_place(out, inputs)
    if not out.exists():
        return
    if not force:
        raise CheckpointError("already exists; choose another output, or force to replace it as a whole", path=out)
    held = list(out.iterdir()) if out.is_dir() else None
    if held is None or (held and not (out / CONFIG).is_file()) or any(entry.is_dir() for entry in held):
        text = f"not replaced even by force: it is not a directory of files with {CONFIG}"
        raise CheckpointError(f"{text}; remove it yourself", path=out)
