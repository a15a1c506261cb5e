"""What a verb reads is there, and what it writes is checked against that: both before it works."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from lsrdecomp import checkpoints
from lsrdecomp.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Output:
    """Marks a parameter of a verb as a path it writes.

    ``check(path, inputs, force)`` raises `CheckpointError` where the verb could not write it.
    """

    check: Callable[[Path, tuple[Path, ...], bool], None]


class Input:
    """Marks a text that may name a file or directory which is read; parameters of type Path are such anyway."""


NEW_FILE = Output(
    lambda path, inputs, force: checkpoints.check_output_file(path, inputs, force=force)
)
"""A file; an existing one is replaced only with --force."""
NEW_DIRECTORY = Output(
    lambda path, inputs, force: checkpoints.check_output_directory(path, inputs, force)
)
"""An adapter directory; an existing one is replaced as a whole, and only with --force."""
PLACE = Output(lambda path, inputs, force: _check_directory(path, inputs))
"""A directory that the verb looks at itself: it may hold what an interrupted run left."""
UNKNOWN = Output(lambda path, inputs, force: checkpoints.check_output_path(path, inputs))
"""A file or a directory; the verb knows which, and asks for the rest."""


def checked(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb, with all its outputs checked before it is called.

    Outputs are the parameters marked with an `Output`, inputs all other paths; ``--force`` is the
    parameter ``force``. ``-``, standard output, is no file, and only ``--json`` writes to it.
    """
    hints = get_type_hints(verb, include_extras=True)
    marks = {
        name: get_args(hint)[1:] for name, hint in hints.items() if get_origin(hint) is Annotated
    }
    outputs = {
        name: mark
        for name, notes in marks.items()
        for mark in notes
        if isinstance(mark, Output) and name != "return"
    }
    texts = {name for name, notes in marks.items() if any(mark is Input for mark in notes)}
    signature = inspect.signature(verb)

    @functools.wraps(verb)
    def run(*args: Any, **kwargs: Any) -> Any:
        # of --out=~/small a shell expands nothing
        kwargs = {
            name: Path(expanduser(each)) if isinstance(each, Path) else each
            for name, each in kwargs.items()
        }
        values = signature.bind(*args, **kwargs).arguments
        for (
            name,
            value,
        ) in (
            values.items()
        ):  # said before torch is loaded; what is no adapter its reader says better
            if (
                name not in outputs
                and name != "adapter"
                and isinstance(value, Path)
                and not value.exists()
            ):
                raise CheckpointError("no such file or directory", path=value)
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
        inputs = tuple(
            path
            for name, value in values.items()
            if name not in outputs
            and value is not None
            and (isinstance(value, Path) or name in texts)
            for path in _read(Path(value))
            if path.exists()
        )
        _check(
            {
                name: Path(values[name])
                for name in outputs
                if values.get(name) is not None and str(values[name]) != "-"
            },
            outputs,
            inputs,
            bool(values.get("force")),
        )
        return verb(*args, **kwargs)

    return run


def _check(
    paths: dict[str, Path], outputs: dict[str, Output], inputs: tuple[Path, ...], force: bool
) -> None:
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
            if (
                name != other
                and outputs[other] in (NEW_DIRECTORY, UNKNOWN)
                and second.resolve() in path.resolve().parents
            ):
                raise CheckpointError(
                    f"the output lies inside another, --{other} {second}; choose another", path=path
                )


def _check_directory(path: Path, inputs: tuple[Path, ...]) -> None:
    checkpoints.check_output_path(path, inputs)
    if path.exists() and not path.is_dir():
        raise CheckpointError("is a file; name a directory to write", path=path)


def _read(path: Path) -> tuple[Path, ...]:
    """What is read where a path is named: a weight file's config lies beside it."""
    config = path.parent / checkpoints.CONFIG
    return (path, config) if path.is_file() and config.is_file() else (path,)
