"""The verb for many adapters."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lsrdecomp import compression
from lsrdecomp import fleet as many
from lsrdecomp.cli import tables
from lsrdecomp.cli.compress import split_sizes
from lsrdecomp.cli.options import ForceFile, JsonFile, MaxMemory, Quiet, SolveDevice, read_toml
from lsrdecomp.cli.outputs import PLACE
from lsrdecomp.cli.progress import follow
from lsrdecomp.cli.settings import options_of
from lsrdecomp.compression.settings import GOALS
from lsrdecomp.errors import LsrError

MOST_ROWS = 20
"""Of the table of adapters that did not end well."""


@options_of(compression.CompressionPlan, parsers={"inner_shape": (split_sizes, "NxN")})
def fleet(
    indir: Annotated[
        Path, typer.Argument(help="Directory with adapter directories anywhere below it.")
    ],
    outdir: Annotated[
        Path, PLACE, typer.Argument(help="Where each is written, at the same relative place.")
    ],
    *,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Goal and storage in a TOML file: a line [compress], then as ratio = 48."
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Processes on this host; -1 for one per processor or GPU.")
    ] = -1,
    calibrated: Annotated[
        Path | None,
        typer.Option(
            "--calibrated",
            "--statistics",
            help="Statistics for all adapters, or a directory of each one's at its own place.",
        ),
    ] = None,
    share: Annotated[
        bool,
        typer.Option(
            "--share/--alone",
            help="Whether adapters of one base and the same layers share a search.",
        ),
    ] = True,
    ray: Annotated[
        str | None, typer.Option(help="Run on a Ray cluster instead: its address, or auto.")
    ] = None,
    device: SolveDevice = None,
    per_gpu: Annotated[
        int, typer.Option("--per-gpu", min=1, help="With --device cuda: jobs that share a GPU.")
    ] = 1,
    retries: Annotated[
        int, typer.Option(help="Further attempts for an adapter whose worker died.")
    ] = 1,
    quiet: Quiet = False,
    json: JsonFile = None,
    force: ForceFile = False,
    max_memory: MaxMemory = None,
    **options: Any,
) -> None:
    """Compress every adapter below a directory.

    Each to the size or error that is asked for. Started again after a kill it goes on where it was.
    Exit code 1 if any adapter failed or missed its tolerance; the others are done all the same.
    """
    if plan is not None and options:
        beside = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise LsrError(f"the goal and how it is met are in {plan}: leave out --plan, or {beside}")
    if plan is None and not set(options) & set(GOALS):
        raise LsrError(
            "one goal for all adapters: --ratio N, --params N, --bytes N or --rtol E; such as --ratio 48"
        )
    settings = compression.CompressionPlan(**options) if plan is None else read_plan(plan)
    runner = (
        many.joblib_runner(workers, device, per_gpu)
        if ray is None
        else many.ray_runner(ray, device=device, per_gpu=per_gpu)
    )
    with follow(quiet=quiet) as step:
        outcomes = many.run_fleet(
            indir,
            outdir,
            settings,
            runner=runner,
            retries=retries,
            max_memory=max_memory,
            statistics=calibrated,
            share=share,
            on_step=step,
        )
    counts = many.summary(outcomes)
    tables.write_json({**counts, "outcomes": [asdict(outcome) for outcome in outcomes]}, json)
    troubled = [outcome for outcome in outcomes if outcome.state != "done"]
    if troubled:
        tables.show(json, tables.outcome_table(troubled[:MOST_ROWS]))
    if len(troubled) > MOST_ROWS:
        tables.show(json, f"… and {len(troubled) - MOST_ROWS} more; --json lists all.")
    tables.show(
        json,
        f"{counts['done']} of {counts['adapters']} adapters done, {counts['missed']} missed their tolerance, "
        f"{counts['failed']} failed; {counts['parameters']:,} parameters instead of {counts['parameters_before']:,}.",
    )
    if counts["done"] < counts["adapters"]:
        raise typer.Exit(1)


def read_plan(path: Path) -> compression.CompressionPlan:
    """A plan from the table [compress] of a TOML file; a misspelt key is named with those that exist."""
    table = read_toml(path).get("compress")
    if not isinstance(table, dict):
        raise LsrError(
            f"{path}: has no table [compress]: a line [compress], then options of compress, as ratio = 48"
        )
    try:
        return compression.CompressionPlan.from_mapping(table)
    except (LsrError, TypeError, ValueError) as error:
        raise LsrError(f"{path}: {error}") from error
