"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Adapter = Annotated[Path, typer.Argument(help="Adapter directory or weight file.", show_default=False)]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the figures as JSON; - for standard output.")]
Out = Annotated[Path, typer.Option("--out", help="Directory to write; must not exist.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output directory as a whole.")]
Storage = Annotated[str, typer.Option("--storage", help="float32, float16 or bfloat16 for the written factors.")]
