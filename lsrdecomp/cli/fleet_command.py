"""The verb for many adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lsrdecomp import lora
from lsrdecomp.cli import tables
from lsrdecomp.cli.compress_command import split_sizes
from lsrdecomp.cli.options import ForceFile, JsonFile, MaxMemory, Quiet, SolveDevice
from lsrdecomp.cli.outputs import PLACE
from lsrdecomp.cli.progress_bars import follow
from lsrdecomp.cli.requests import TO_SAME, flag
from lsrdecomp.cli.run_config import read_table
from lsrdecomp.cli.setting_options import options_of
from lsrdecomp.errors import LsrError
from lsrdecomp.lora.search.plan import goals_of
from lsrdecomp.lora.search.request import Request


def shard_numbers(text: str) -> tuple[int, int]:
    """Return the numbers of 3/8."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise typer.BadParameter(f"expected a part such as 3/8, got {text!r}")
    return int(number), int(count)


@options_of(lora.search.CompressionPlan, parsers={"inner_shape": (split_sizes, "NxN")})
def fleet(
    indir: Annotated[
        Path, typer.Argument(help="Directory with adapter directories anywhere below it.")
    ],
    outdir: Annotated[
        Path, PLACE, typer.Argument(help="Where each is written, at the same relative path.")
    ],
    *,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with goal and storage: a line [compress], then lines as ratio = 48."
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Processes on this host; -1 for one per processor or GPU.")
    ] = -1,
    statistics: Annotated[
        Path | None,
        typer.Option(
            help="Statistics for all adapters, or a directory with those of each at its own path.",
        ),
    ] = None,
    share: Annotated[
        bool,
        typer.Option(
            "--share/--alone",
            help="Search once for adapters of one base with the same layers, or for each alone.",
        ),
    ] = True,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="same: plain LoRAs in their original formats, by truncated SVD [default: LSR].",
            autocompletion=lambda: ("same",),
        ),
    ] = None,
    shard: Annotated[
        Any,
        typer.Option(
            parser=shard_numbers,
            metavar="K/N",
            help="Only the K-th of N parts of the names: hosts that share a file system each run "
            "one.",
        ),
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Run on a Ray cluster: its address, or auto.")
    ] = None,
    device: SolveDevice = None,
    per_gpu: Annotated[
        int,
        typer.Option("--per-gpu", min=1, help="With --device cuda: processes that share a GPU."),
    ] = 1,
    quiet: Quiet = False,
    json: JsonFile = None,
    force: ForceFile = False,
    max_memory: MaxMemory = None,
    **options: Any,
) -> None:
    """Compress every adapter below a directory.

    The goal is met by each adapter on its own. A killed run resumes when it is started again, and
    what was made of a source that changed since is made anew. Exit code 1 if an adapter failed or
    missed its tolerance; all others are written nevertheless.

    With --shard 3/8 eight hosts share the work; the same command without it, afterwards, sums up.
    """
    del force  # `outputs.checked` reads it
    if to not in (None, "same"):
        raise typer.BadParameter(f"same, or absent for LSR; got {to!r}", param_hint="--to")
    goal = _goal(plan, options)
    if to == "same":
        given = {"statistics": statistics, "device": device}
        Request.parse(given, plan=goal, to_file=True, interface=TO_SAME)
    if ray is None:
        runner = lora.fleet.joblib_runner(workers, device, per_gpu)
    else:
        runner = lora.fleet.ray_runner(ray, device=device, per_gpu=per_gpu)
    with follow(quiet=quiet) as step:
        outcomes = lora.fleet.run_fleet(
            indir,
            outdir,
            goal,
            runner=runner,
            max_memory=max_memory,
            statistics=statistics,
            share=share,
            to=to,
            shard=shard,
            on_step=step,
            on_note=tables.say,
        )
    counts = lora.fleet.summary(outcomes)
    tables.write_json({**counts, "outcomes": [asdict(outcome) for outcome in outcomes]}, json)
    _show_unfinished(outcomes, json)
    part = "" if shard is None else f"Part {shard[0]} of {shard[1]}: "
    orphaned = f", {counts['orphaned']} left without a source" if counts["orphaned"] else ""
    tables.show(
        json,
        f"{part}{counts['done']} of {counts['adapters']} adapters done, {counts['missed']} missed "
        f"their tolerance, {counts['failed']} failed{orphaned}; {counts['parameters']:,} "
        f"parameters instead of {counts['parameters_before']:,}.",
    )
    if counts["done"] < counts["adapters"]:
        raise typer.Exit(1)


def _goal(plan: Path | None, options: Mapping[str, Any]) -> lora.search.CompressionPlan:
    """Return the goal for all adapters, of a file or of options."""
    if plan is None:
        if not goals_of(options):
            raise LsrError(
                "one goal for all adapters: --ratio N, --parameters N, --bytes N, --max-rank N, "
                "--energy SHARE or --rtol E; such as --ratio 48"
            )
        return lora.search.CompressionPlan(**options)
    if options:
        others = ", ".join(map(flag, options))
        raise LsrError(f"the goal and how it is met are in {plan}: leave out --plan, or {others}")
    return read_plan(plan)


def _show_unfinished(outcomes: Sequence[lora.fleet.Outcome], json: Path | None) -> None:
    """Show the first adapters that did not end well, and how many more there are."""
    max_rows = 20  # of a table that a terminal shows at once; by hand
    unfinished = [outcome for outcome in outcomes if outcome.state != "done"]
    if unfinished:
        tables.show(json, tables.outcome_table(unfinished[:max_rows]))
    if len(unfinished) > max_rows:
        tables.show(json, f"… and {len(unfinished) - max_rows} more; --json lists all.")


def read_plan(path: Path) -> lora.search.CompressionPlan:
    """Return the plan in the table [compress] of a TOML file.

    A misspelt key is refused, and the existing ones are named.
    """
    table = read_table(path)
    try:
        return lora.search.CompressionPlan.from_mapping(table)
    except (LsrError, TypeError, ValueError) as error:
        raise LsrError(f"{path}: {error}") from error
