"""The console command: its list of verbs."""

from __future__ import annotations

from typing import Annotated

import typer

from lsrdecomp.cli import commands
from lsrdecomp.cli.help import Command, epilog
from lsrdecomp.cli.outputs import checked
from lsrdecomp.cli.program import Verbs

app = typer.Typer(
    cls=Verbs,
    name="lsrdecomp",
    help="Compress LoRA adapters to short sums of Kronecker products, and see what that costs.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in commands.ALL:
    app.command(cls=Command, epilog=epilog(command.__name__))(checked(command))


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)
    ] = False,
) -> None:
    """Compress LoRA adapters to short sums of Kronecker products, and see what that costs."""
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"lsrdecomp {installed('lsrdecomp')}")
        raise typer.Exit
