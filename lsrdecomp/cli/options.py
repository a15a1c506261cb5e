"""Arguments and options that several verbs share."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from lsrdecomp.cli.outputs import NEW_FILE
from lsrdecomp.fields import SettingsError
from lsrdecomp.gateway import TOML_BYTES, printable
from lsrdecomp.lora.search.plan import STORAGE_NAMES

POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
"""Powers of 1000, or of 1024, that letters of sizes stand for."""


def assignment(text: str, hint: str) -> tuple[str, Any]:
    """Return ``r=4`` as a name and a value of TOML, ``names=a,b`` as a list, others as text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"expected NAME=VALUE such as r=4, got {text!r}", param_hint=hint)
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except RecursionError:
        raise typer.BadParameter("the value is nested too deeply", param_hint=hint) from None
    except tomllib.TOMLDecodeError:
        if "," not in value:
            return name.strip(), value
        parts = [part.strip() for part in value.split(",")]
        return name.strip(), [int(part) if part.isdecimal() else part for part in parts]


def read_toml(path: Path) -> dict[str, Any]:
    """Return a TOML file as a table.

    Raises
    ------
    SettingsError
        If it is not TOML, or not UTF-8, or nested too deeply.
    """
    try:
        with path.open("rb") as file:
            content = file.read(TOML_BYTES + 1)
        if len(content) > TOML_BYTES:
            raise SettingsError(f"{path}: more than {TOML_BYTES:,} bytes of TOML are not read")
        return tomllib.loads(content.decode("utf-8").replace("\r\n", "\n"))
    except RecursionError:
        raise SettingsError(f"{path}: the TOML is nested too deeply") from None
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(f"{path}: {printable(str(error)[:200])}") from error


def memory_size(text: str) -> int:
    """Return the bytes of a size such as 512MB or 8GiB; a bare K, M, G or T counts by 1024."""
    match = re.fullmatch(r"([0-9]{1,15})\s*([KMGT]?)(i?B|)", text.strip())
    if match is None:
        raise typer.BadParameter(f"expected a size such as 4000000, 512MB or 8GiB, got {text!r}")
    base = 1000 if match[3] == "B" else 1024
    return int(match[1]) * int(base ** POWERS[match[2]])


Adapter = Annotated[
    Path, typer.Argument(help="Adapter directory or weight file.", show_default=False)
]
JsonFile = Annotated[
    Path | None,
    NEW_FILE,
    typer.Option("--json", help="Also write the results as JSON; - for standard output."),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace existing outputs; a directory as a whole.")
]
ForceFile = Annotated[bool, typer.Option("--force", help="Replace the file that --json names.")]
Storage = Annotated[
    str | None,
    typer.Option(
        "--storage",
        help="float32, float16, bfloat16, int8, int4 or auto [default: as in the LoRA; auto with "
        "--base and --keep or --bytes].",
        autocompletion=lambda: STORAGE_NAMES,
    ),
]
Name = Annotated[
    str | None, typer.Option("--name", help="Weight file to open, where the directory has several.")
]
Alpha = Annotated[
    float | None,
    typer.Option("--alpha", help="LoRA alpha, for files that do not store it (loralib)."),
]
SolveDevice = Annotated[
    str | None,
    typer.Option(
        "--device", help="Solve with torch on cuda, cuda:1, cpu, … [default: with NumPy]."
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run program code that --base brings (remote code); without, it is refused.",
    ),
]
MaxMemory = Annotated[
    int | None,
    typer.Option(
        "--max-memory",
        parser=memory_size,
        metavar="SIZE",
        help="Refuse a layer or tensor larger than this before it is read: 4000000, 512MB, 8GiB.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress on standard error.")]
Wide = Annotated[
    bool, typer.Option("--wide", help="Print all columns, however wide the table gets.")
]
Each = Annotated[
    bool,
    typer.Option("--all", help="Print a row for each layer; otherwise equal layers share a row."),
]
