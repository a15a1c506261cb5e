"""The console command: its list of verbs, and the one place where errors become a line and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from lsrdecomp.cli import commands
from lsrdecomp.errors import LsrError

app = typer.Typer(
    name="lsrdecomp",
    help="Compress LoRA adapters to short sums of Kronecker products, and see what that costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in commands.ALL:
    app.command()(command)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    """Compress LoRA adapters to short sums of Kronecker products, and see what that costs."""
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"lsrdecomp {installed('lsrdecomp')}")
        raise typer.Exit()


def run() -> None:
    """Exit codes: 0 done, 1 a budget was missed or a check failed, 2 unusable input."""
    try:
        app()
    except (LsrError, OSError) as error:
        text = " ".join(str(error).split())
        print(f"lsrdecomp: {text or type(error).__name__}", file=sys.stderr)
        sys.exit(2)
    except MemoryError:
        print("lsrdecomp: not enough memory for a layer of this size", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("lsrdecomp: stopped; nothing was written", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    run()
