"""How the command was started, for lines that are printed to be typed again."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup

from lsrdecomp.gateway import printable

NAME = "lsrdecomp"
"""Name of the console command and of the package."""
UsageError: Any = typer.BadParameter.__base__
"""What is raised for a line that cannot be read: typer names one kind of it alone."""


def program() -> str:
    """Return the command as it was typed: ``lsrdecomp``, its path, or ``python -m lsrdecomp``.

    The bare name stands only where a shell finds this command by it. Within another program the
    command was not typed, and its name is returned.
    """
    started = Path(sys.argv[0])
    package = Path(__file__).parents[1]
    if package in started.absolute().parents:
        return f"{shlex.quote(_interpreter())} -m {NAME}"
    if started.stem != NAME:
        return NAME
    found = shutil.which(NAME)
    if found is not None and started.exists() and Path(found).samefile(started):
        return NAME
    return shlex.quote(sys.argv[0])


class Verbs(TyperGroup):
    """The verbs, which remember the line that was typed."""

    typed: ClassVar[tuple[str, ...]] = ()
    """The words of the last line, without the program's name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words of the line before they are read."""
        Verbs.typed = tuple(args)
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            _in_one_line(error)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; a line that cannot be read is an error in the words of all others."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            _in_one_line(error)
            raise


def _in_one_line(error: Any) -> None:
    """Let an error of usage be shown as a line, as every other error of the program."""
    if type(error).show is not UsageError.show:  # a help text in place of arguments
        return
    message = error.format_message().removeprefix("Invalid value for ").removesuffix(".")
    message = f"{message[:1].lower()}{message[1:]}"
    path = NAME if error.ctx is None else error.ctx.command_path
    sentence = printable(" ".join(message.split()))
    end = "" if sentence.endswith("?") else "."
    line = f"{NAME}: {sentence}{end} Try '{path} -h' for help."
    error.show = lambda *_: print(line, file=sys.stderr)


def typed_line(verb: str) -> str | None:
    """Return the line of a verb as it was typed; None where another verb, or none, was."""
    if Verbs.typed[:1] != (verb,):
        return None
    return f"{program()} {shlex.join(Verbs.typed)}"


def _interpreter() -> str:
    """Return Python as it was typed."""
    typed = sys.orig_argv[0] if sys.orig_argv else ""
    return typed or sys.executable
