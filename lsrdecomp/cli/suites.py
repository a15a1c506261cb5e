"""What the verbs that run a suite share: their options, and the suite as the command line has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp.cli.outputs import PLACE, Input
from lsrdecomp.errors import LsrError

if TYPE_CHECKING:
    from lsrdecomp.experiments.suite import Suite

Out = Annotated[Path, PLACE, typer.Option(help="Directory of the runs; the same one goes on where it was.")]
Table = Annotated[bool, typer.Option("--table", help="Run nothing; only draw from what is there.")]
Retry = Annotated[bool, typer.Option("--retry", help="Do failed runs again.")]
Tasks = Annotated[str | None, typer.Option(help="Only these tasks of the suite, with commas.")]
Data = Annotated[Path | None, typer.Option(help="Directory of the tasks' files, in place of the suite's.")]
Model = Annotated[str | None, Input, typer.Option(help="The base, in place of the suite's.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16, …: precision of the base, in place of the suite's.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, …, in place of the suite's.")]


@contextmanager
def training_imports() -> Iterator[None]:
    """Imports of what training needs; one that fails is an `LsrError` with the way out."""
    try:
        yield
    except ImportError as error:
        raise LsrError(f"training needs {error.name}: pip install 'lsrdecomp[finetune]'") from error


def open_suite(
    path: Path, tasks: str | None, *, data: Path | None, model: str | None, device: str | None, dtype: str | None
) -> Suite:
    """A suite with what the command line says in place of its own."""
    from lsrdecomp.experiments.suite import read_suite

    given: dict[str, Any] = {"data": None if data is None else str(data), "model": model}
    given |= {"device": device, "precision": dtype}
    chosen = None if tasks is None else [name.strip() for name in tasks.split(",")]
    return read_suite(path, {name: value for name, value in given.items() if value is not None}, chosen)
