"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Adapter = Annotated[Path, typer.Argument(help="Adapter directory or weight file.", show_default=False)]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the figures as JSON; - for standard output.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output directory as a whole.")]
Storage = Annotated[
    str, typer.Option("--storage", help="float32, float16, bfloat16; compress also takes int8, int4 and auto.")
]
Name = Annotated[str | None, typer.Option("--name", help="Weight file to take where the directory has several.")]
Alpha = Annotated[float | None, typer.Option("--alpha", help="LoRA alpha, for files that do not hold it (loralib).")]
