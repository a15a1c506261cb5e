"""Requests on the command line: option groups, the routes that read them, and their spelling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp import lora
from lsrdecomp.cli import tables
from lsrdecomp.cli.options import Alpha, Each, Force, JsonFile, MaxMemory, Name, Quiet, Wide
from lsrdecomp.cli.outputs import NEW_FILE, UNKNOWN
from lsrdecomp.errors import LsrError
from lsrdecomp.lora.files.writers.table import CUT_FORMATS
from lsrdecomp.lora.search.plan import ALL_ROUTES, STORAGES, TO_DIRECTORY, ReadOn, Route
from lsrdecomp.lora.search.request import READ_ON, Interface, Request, routes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.lora.files import Checkpoint
    from lsrdecomp.lora.search import CompressionPlan

GOALS = (
    "--keep SHARE with --base and --data, --keep-answers SHARE, --ratio N, --parameters N, "
    "--bytes N, --max-rank N, --energy SHARE or --rtol E; such as --ratio 48"
)
"""What to ask for where no goal was given, or several."""

SPELLED = {"each": "--all"}
"""Options that are not called like the setting they stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Options of how an adapter is opened."""

    name: Name = None
    alpha: Alpha = None
    max_memory: MaxMemory = None

    def open(
        self,
        adapter: Path,
        *,
        carry: bool = False,
        base: str | Path | None = None,
        trust_remote_code: bool = False,
    ) -> Checkpoint:
        """Return the adapter, opened; with ``carry`` also one with tensors that are no pairs.

        ``base`` is for a method of PEFT whose ΔW is known only beside it.
        """
        if trust_remote_code and base is None:
            raise LsrError("--trust-remote-code is about a base: give --base BASE, or leave it out")
        runs_peft = base is not None and lora.base.takes_base(adapter, name=self.name)
        with tables.quiet() if runs_peft else nullcontext():  # which takes seconds to load
            return lora.base.open_adapter(
                adapter,
                base,
                trust_remote_code=trust_remote_code,
                name=self.name,
                alpha=self.alpha,
                max_memory=self.max_memory,
                carry=carry,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Options of the outputs."""

    out: Annotated[
        Path | None,
        UNKNOWN,
        typer.Option(
            "--out",
            help="Directory to write; NAME.safetensors for a LoRA in its original format.",
        ),
    ] = None
    to: Annotated[
        str | None,
        ReadOn(Route.SEARCHED, Route.TRUNCATED, Route.TRUNCATED_ON_BASE),
        typer.Option(
            "--to",
            help="A plain LoRA by truncated SVD: same, in its original format, or mlx, for mlx-lm "
            "[default: LSR].",
            autocompletion=lambda: ("same", "mlx"),
        ),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the table, write nothing.")] = (
        False
    )
    record: Annotated[
        bool,
        TO_DIRECTORY,
        typer.Option("--record", help="List every layer in compression.json, not only totals."),
    ] = False
    bare: Annotated[
        bool,
        TO_DIRECTORY,
        typer.Option(
            "--bare",
            help="Write no README.md, SHA256SUMS and compression.json, only weights and config.",
        ),
    ] = False
    report: Annotated[
        Path | None,
        NEW_FILE,
        ReadOn(*TO_DIRECTORY.routes, Route.TRUNCATED_ON_BASE),
        typer.Option(help="Also write a report with pictures: one HTML file."),
    ] = None
    json: JsonFile = None
    force: Force = False

    def check(self, requests: Sequence[Request]) -> None:
        """Raise `typer.BadParameter` where there is no place to write, or too few."""
        if self.to not in (None, *CUT_FORMATS):
            raise typer.BadParameter(
                f"{' or '.join(CUT_FORMATS)}, or absent for LSR; got {self.to!r}; export writes "
                "others",
                param_hint="--to",
            )
        if self.out is None and not self.dry_run:
            raise typer.BadParameter(
                "name the directory to write, or ask for a --dry-run", param_hint="--out"
            )
        if self.out is None and self.record:
            raise typer.BadParameter(
                "is read with --out, whose compression.json holds it", param_hint="--record"
            )
        if self.out is None and self.bare:
            raise typer.BadParameter(
                "is read with --out, where less is written", param_hint="--bare"
            )
        if self.bare and self.record:
            raise typer.BadParameter(
                "writes compression.json, which --bare leaves out; drop one", param_hint="--record"
            )
        if self.out is None and self.force and self.json is None and self.report is None:
            raise typer.BadParameter(
                "is read with --out, --json or --report: there is nothing to replace",
                param_hint="--force",
            )
        if len(requests) > 1 and (self.report is not None or str(self.json) == "-"):
            raise typer.BadParameter(
                "several ratios have no common report; ask for one at a time", param_hint="--ratio"
            )

    @property
    def directory(self) -> Path | None:
        """The directory that is written, if any is."""
        return None if self.dry_run else self.out

    def directories(self, plans: Sequence[CompressionPlan]) -> list[Path | None]:
        """Return where each plan is written; several ratios have directories beside each other."""
        if self.directory is None or len(plans) < 2:
            return [self.directory] * max(1, len(plans))
        out = self.directory
        return [out.with_name(f"{out.name}-{plan.ratio:g}") for plan in plans]


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """Options of the display."""

    wide: Annotated[Wide, TO_DIRECTORY] = False
    each: Annotated[Each, TO_DIRECTORY] = False
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            help="Print a line for each layer: its rank, and how much of its norm is kept.",
        ),
    ] = False
    quiet: Quiet = False


OWN_OPTIONS = {
    name: routes
    for group in (Opening, Outputs, Display)
    for name, routes in routes_of(group, usual=ALL_ROUTES).items()
}
"""The routes that read each option of the groups.

With ``--to same`` a search becomes a truncated SVD.
"""


def flag(name: str) -> str:
    """Return the option of a setting, such as ``--held-out``."""
    return SPELLED.get(name, f"--{name.replace('_', '-')}")


COMMAND_LINE = Interface(
    name=flag,
    argument=flag,
    goals=GOALS,
    leave_truncated="name a directory, such as --out small/",
    truncate="--to same",
    own_options=OWN_OPTIONS,
)
DIRECTORY_OF_FILES = dataclasses.replace(
    COMMAND_LINE, leave_truncated="compress one adapter, to a directory such as --out small/"
)
"""The same where the adapter is a directory of LoRA files, all of which are cut."""
TO_SAME = dataclasses.replace(COMMAND_LINE, leave_truncated="leave out --to")
"""The same where --to asks for the format of the source."""


def fits_file(given: Mapping[str, Any]) -> bool:
    """Return whether settings that are not None have a use where a LoRA file is written."""
    if given.get("storage") in STORAGES:
        return False
    return all(
        Route.TRUNCATED in READ_ON.get(name, ALL_ROUTES.routes)
        for name, value in given.items()
        if value is not None
    )


def parse_requests(
    given: Mapping[str, Any],
    *groups: Opening | Outputs | Display,
    to_file: bool,
    interface: Interface,
) -> list[Request]:
    """Return a request for each ratio that was typed, or the only one.

    Parameters
    ----------
    given : Mapping
        Settings under the names of the library; ``ratio`` is a list.
    groups : Opening, Outputs, Display
        The options of the command line's own.
    to_file : bool
        Whether LoRA files are to come back in their own format.
    interface : Interface
        `COMMAND_LINE` or `DIRECTORY_OF_FILES`.
    """
    own: dict[str, Any] = {}
    for group in groups:
        own |= dataclasses.asdict(group)
    typed = {name: value for name, value in own.items() if value is not False}
    settings = {name: value for name, value in given.items() if name != "ratio"}
    ratios = given.get("ratio", [None])
    requests = [
        Request.parse({**settings, **typed, "ratio": ratio}, to_file=to_file, interface=interface)
        for ratio in ratios
    ]
    if len(requests) > 1 and requests[0].measured is not None:
        raise typer.BadParameter(
            "with --base one ratio at a time, or --keep for the smallest version "
            "that keeps a share",
            param_hint="--ratio",
        )
    return requests
