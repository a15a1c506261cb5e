"""Checks before a verb works: what it reads is there, and what it writes overwrites none of it."""

from __future__ import annotations

import functools
import inspect
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from lsrdecomp import lora
from lsrdecomp.cli import tables
from lsrdecomp.errors import CheckpointError
from lsrdecomp.fields import INPUT_PATH


@dataclass(frozen=True, slots=True)
class Output:
    """Marks a parameter of a verb as a path it writes.

    ``check(path, inputs, force)`` raises `CheckpointError` where the verb could not write it.
    """

    check: Callable[[Path, tuple[Path, ...], bool], None]


Input = INPUT_PATH
"""Marks a text that may name a file or directory which is read; paths are such anyway."""
NEW_FILE = Output(
    lambda path, inputs, force: lora.files.check_output_file(path, inputs, force=force)
)
"""A file; an existing one is replaced only with --force."""
NEW_DIRECTORY = Output(
    lambda path, inputs, force: lora.files.check_output_directory(path, inputs, force)
)
"""An adapter directory; an existing one is replaced as a whole, and only with --force."""
PLACE = Output(lambda path, inputs, _: _check_directory(path, inputs))
"""A directory that the verb looks at itself: it may hold what an interrupted run left."""
UNKNOWN = Output(lambda path, inputs, _: lora.files.check_output_path(path, inputs))
"""A file or a directory; the verb knows which, and asks for the rest."""


def checked(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Return the verb, with all its outputs checked before it is called.

    Outputs are the parameters marked with an `Output`, inputs all other paths; ``--force`` is the
    parameter ``force``. ``-``, standard output, is no file, and only ``--json`` writes to it.
    """
    signature = inspect.signature(verb, eval_str=True)
    outputs: dict[str, Output] = {}
    texts: set[str] = set()
    for name, parameter in signature.parameters.items():
        for mark in get_args(parameter.annotation)[1:]:
            if isinstance(mark, Output):
                outputs[name] = mark
            elif mark is Input:
                texts.add(name)

    @functools.wraps(verb)
    def run(*args: Any, **kwargs: Any) -> Any:
        # The path in --out=~/small is expanded by no shell.
        kwargs = {name: _expanded(value) for name, value in kwargs.items()}
        values = signature.bind(*args, **kwargs).arguments
        _check_inputs(values, outputs)
        _check_standard_output(values, outputs)
        read: list[Path] = []
        for name, value in values.items():
            may_be_read = isinstance(value, Path) or name in texts
            if name not in outputs and value is not None and may_be_read:
                read += _files_read(Path(value))
        written = {
            name: Path(values[name])
            for name in outputs
            if values.get(name) is not None and str(values[name]) != "-"
        }
        _check_outputs(written, outputs, tuple(read), force=bool(values.get("force")))
        for path in written.values():
            _say_leftovers(path)
        return verb(*args, **kwargs)

    return run


def _say_leftovers(path: Path) -> None:
    """Remove what killed runs left of an output, and name what is too young to be removed."""
    for leftover in lora.files.remove_leftovers(path.absolute()):
        shown = shlex.quote(str(leftover))
        tables.say(f"{leftover} was left by a run that was killed; remove it: rm -r {shown}")


def _expanded(value: Any) -> Any:
    """Return a path with the home directory in place of ~, and any other value as it is."""
    return value.expanduser() if isinstance(value, Path) else value


def _check_inputs(values: Mapping[str, Any], outputs: Mapping[str, Output]) -> None:
    """Raise `CheckpointError` for a path that is to be read and is not there.

    This is said before torch is loaded; what is no adapter its reader says better.
    """
    for name, value in values.items():
        is_input = name not in outputs and name != "adapter" and isinstance(value, Path)
        if is_input and not value.exists():
            raise CheckpointError("no such file or directory", path=value)


def _check_standard_output(values: Mapping[str, Any], outputs: Mapping[str, Output]) -> None:
    """Raise `CheckpointError` where ``-`` cannot be written."""
    for name in outputs:
        if str(values.get(name)) != "-":
            continue
        if name != "json":
            raise CheckpointError(
                f"--{name} writes a file; only --json - writes to standard output", path="-"
            )
        if sys.stdout is None:
            raise CheckpointError(
                "standard output is closed; --json FILE writes to a file", path="-"
            )


def _check_outputs(
    paths: Mapping[str, Path],
    outputs: Mapping[str, Output],
    inputs: tuple[Path, ...],
    *,
    force: bool,
) -> None:
    """Raise `CheckpointError` where an output cannot be written, or two are in each other's way."""
    for name, path in paths.items():
        outputs[name].check(path, inputs, force)
    for name, path in paths.items():
        for other, second in paths.items():
            if name < other and path.resolve() == second.resolve():
                raise CheckpointError(
                    f"two outputs (--{name} and --{other}) are the same file", path=path
                )
            # A directory appears as a whole, so that nothing can be written into it before or
            # after.
            is_directory = outputs[other] in (NEW_DIRECTORY, UNKNOWN)
            if name != other and is_directory and second.resolve() in path.resolve().parents:
                raise CheckpointError(
                    f"the output lies inside another, --{other} {second}; choose another", path=path
                )


def _check_directory(path: Path, inputs: tuple[Path, ...]) -> None:
    """Raise `CheckpointError` for a directory that cannot be written into."""
    lora.files.check_output_path(path, inputs)
    if path.exists() and not path.is_dir():
        raise CheckpointError("is a file; name a directory to write", path=path)


def _files_read(path: Path) -> list[Path]:
    """Return what is read where a path is named: a weight file's config lies beside it."""
    files = [path]
    config = path.parent / lora.files.CONFIG
    if path.is_file() and config.is_file():
        files.append(config)
    return [file for file in files if file.exists()]
