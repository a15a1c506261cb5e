"""The verb for compress-and-recover."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp.cli import tables
from lsrdecomp.cli.options import ForceFile, JsonFile, Quiet
from lsrdecomp.cli.progress import follow
from lsrdecomp.cli.suites import Out, Retry, Table, Tasks, in_place_of_the_suites, open_suite, training_imports

if TYPE_CHECKING:
    from lsrdecomp.experiments.recover_table import Recovery
    from lsrdecomp.experiments.runs import Outcome, Run


@in_place_of_the_suites
def recover(
    suite: Annotated[Path, typer.Argument(help="TOML file with a table [recover].", show_default=False)],
    *,
    out: Out,
    table: Table = False,
    tasks: Tasks = None,
    retry: Retry = False,
    distil: Annotated[
        int | None, typer.Option(help="Steps of distillation of each form, without labels.", min=1)
    ] = None,
    quiet: Quiet = False,
    json: JsonFile = None,
    force: ForceFile = False,
    **given: Any,
) -> None:
    """Train a LoRA, compress it by each structure to each budget, judge that, train on, and judge again.

    With --distil, or a suite that says so, forms are also trained on the LoRA's own answers and judged. Beside it the
    same shapes are trained from scratch for as many steps. Finished parts are never redone. Writes table.md, and
    pictures where matplotlib is installed. Exit code 1 if a run failed. --data, --model, --device and --precision stand
    in place of the suite's own.
    """
    with training_imports():
        from lsrdecomp.experiments import recover as parts
        from lsrdecomp.experiments.recover_table import read_recovery
        from lsrdecomp.experiments.runs import Failure
    chosen = open_suite(suite, tasks, given)
    if distil is not None:
        chosen = replace(chosen, recover={**chosen.recover, "distil": distil})
    failed: list[str] = []

    def note(run: Run, outcome: Outcome) -> None:
        if isinstance(outcome, Failure):
            failed.append(f"{run.directory}: {outcome.kind}: {outcome.message[:200]}")

    if not table:
        with tables.quiet(), follow(quiet=quiet) as step:
            parts.recover(chosen, out, retry=retry, on_run=note, on_step=step)
    found = read_recovery(chosen, out)
    show(found, out, json)
    for complaint in failed:
        tables.say(complaint)
    if failed:
        raise typer.Exit(1)


def show(found: Recovery, out: Path, json: Path | None) -> None:
    """The tables on the screen and in `table.md`, the pictures, the JSON."""
    from lsrdecomp.experiments import recover_table
    from lsrdecomp.experiments.compare_table import markdown_table

    if found.gains:
        shown = recover_table.gains_table(found), recover_table.table(found)
        for each in shown:
            tables.show(json, tables.text_table(*each), "")
        title = f"# {found.suite.title or 'Compress and recover'}"
        text = [title, *map(markdown_table, shown), *recover_table.notes(found)]
        tables.write_text("\n\n".join(text) + "\n", out / "table.md")
        _draw(found, out)
    tables.show(json, *recover_table.notes(found))
    if json is not None:
        tables.write_json(recover_table.to_json(found), json)


def _draw(found: Recovery, out: Path) -> None:
    from lsrdecomp import plots
    from lsrdecomp.experiments import recover_table

    try:
        plots.available()
    except ImportError:
        return
    for task in dict.fromkeys(gain.task for gain in found.gains):
        for size in ("parameters", "bytes"):
            drawn = recover_table.paths(found, task, size)
            if not drawn:
                continue
            panels = plots.plot_stages(
                {
                    structure: {stage: [plots.Point(structure, *point) for point in points] for stage, points in path}
                    for structure, path in drawn.items()
                },
                size=f"{size} of the adapter",
                quality="share of the LoRA's gain (loss on dev)",
                references={"the LoRA": 1.0, "no adapter": 0.0},
            )
            panels[0].figure.suptitle(task, fontsize=11)
            plots.save_figure(panels[0], out / f"{task}-{size}.png")
