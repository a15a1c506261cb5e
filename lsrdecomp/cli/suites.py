"""What the verbs that run a suite share: their options, and the suite as the command line has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp.cli.outputs import PLACE
from lsrdecomp.cli.settings import options_of
from lsrdecomp.errors import LsrError
from lsrdecomp.training.settings import FinetuneSettings

if TYPE_CHECKING:
    from lsrdecomp.experiments.suite import Suite

Out = Annotated[Path, PLACE, typer.Option(help="Directory of the runs; the same one goes on where it was.")]
Table = Annotated[bool, typer.Option("--table", help="Run nothing; only draw from what is there.")]
Retry = Annotated[bool, typer.Option("--retry", help="Do failed runs again.")]
Tasks = Annotated[str | None, typer.Option(help="Only these tasks of the suite, with commas.")]
in_place_of_the_suites = options_of(FinetuneSettings, only=("data", "model", "device", "precision"))
"""The verb, whose ``**given`` takes settings that stand in place of the suite's own."""


@contextmanager
def training_imports() -> Iterator[None]:
    """Imports of what training needs; one that fails is an `LsrError` with the way out."""
    try:
        yield
    except ImportError as error:
        raise LsrError(f"training needs {error.name}: pip install 'lsrdecomp[finetune]'") from error


def open_suite(path: Path, tasks: str | None, given: Mapping[str, Any]) -> Suite:
    """A suite with the settings of the command line that are not None in place of its own."""
    from lsrdecomp.experiments.suite import read_suite

    chosen = None if tasks is None else [name.strip() for name in tasks.split(",")]
    return read_suite(path, {name: value for name, value in given.items() if value is not None}, chosen)
