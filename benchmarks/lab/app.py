"""The verbs of the laboratory: compare methods of fine-tuning, compress and recover."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from benchmarks.lab.compare import table as compare_table
from benchmarks.lab.compare.comparison import Results, read_results
from benchmarks.lab.compare.comparison import compare as run_suite
from benchmarks.lab.pictures import Point, plot_quality, plot_stages
from benchmarks.lab.recover import table as recover_table
from benchmarks.lab.recover.recovery import recover as recover_suite
from benchmarks.lab.recover.table import Recovery, read_recovery
from benchmarks.lab.runs import Failure, Outcome, Run
from benchmarks.lab.suite import Suite, read_suite
from benchmarks.record import this_run
from lsrdecomp import plots
from lsrdecomp.cli import tables
from lsrdecomp.cli.options import ForceFile, JsonFile, Quiet
from lsrdecomp.cli.outputs import PLACE, checked
from lsrdecomp.cli.progress_bars import follow
from lsrdecomp.cli.setting_options import options_of
from lsrdecomp.cli.sheet import Sheet, SheetColumn
from lsrdecomp.errors import LsrError
from lsrdecomp.lora.files.progress import Counter
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings

Out = Annotated[
    Path, PLACE, typer.Option(help="Directory of the runs; the same one goes on where it was.")
]
Table = Annotated[bool, typer.Option("--table", help="Run nothing; only draw from what is there.")]
Retry = Annotated[bool, typer.Option("--retry", help="Do failed runs again.")]
Tasks = Annotated[str | None, typer.Option(help="Only these tasks of the suite, with commas.")]
in_place_of_the_suites = options_of(FinetuneSettings, only=("data", "base", "device", "precision"))
"""The verb, whose ``**given`` takes settings that stand in place of the suite's own."""

app = typer.Typer(
    name="python -m benchmarks.lab",
    help="Suites of fine-tuning runs: methods compared, LoRAs compressed and recovered.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def run() -> None:
    """The command line; unusable input is one line and exit code 2."""
    try:
        app()
    except (LsrError, OSError) as error:
        tables.say(" ".join(str(error).split()))
        sys.exit(2)


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """A function as a verb of `app`, its outputs checked before it works."""
    command = in_place_of_the_suites(function)
    app.command()(checked(command))
    return command


@verb
def compare(
    suite: Annotated[
        Path, typer.Argument(help="TOML file: methods, tasks, seeds and rates.", show_default=False)
    ],
    *,
    out: Out,
    table: Table = False,
    tasks: Tasks = None,
    workers: Annotated[int, typer.Option(help="Processes.", min=1)] = 1,
    retry: Retry = False,
    quiet: Quiet = False,
    json: JsonFile = None,
    force: ForceFile = False,
    **given: Any,
) -> None:
    """Fine-tune by every method of a suite on every task, at the rate that suits it, over seeds.

    Rates are chosen on a split of the training set. Finished runs are never redone. Writes
    table.md, and pictures where matplotlib is installed. Exit code 1 if a run failed. --data,
    --base, --device and --precision stand in place of the suite's own.
    """
    chosen = open_suite(suite, tasks, given)
    if table:
        results = read_results(chosen, out)
    else:
        with tables.quiet(), follow(quiet=quiet) as step:
            advance = Counter(step, "training", read_results(chosen, out).planned, "runs").add
            results = run_suite(
                chosen, out, workers=workers, retry=retry, on_run=lambda *_: advance()
            )
    show_comparison(results, out, json)
    if any(cell.failures for cell in results.cells):
        raise typer.Exit(1)


def show_comparison(results: Results, out: Path, json: Path | None) -> None:
    """The tables on the screen and in `table.md`, the pictures, the JSON."""
    rows = compare_table.lines(results)
    if rows:
        out.mkdir(parents=True, exist_ok=True)
        (out / "table.md").write_text(compare_table.markdown(results), encoding="utf-8")
        tables.show(json, text_table(*compare_table.overview(rows)))
        tables.show(json, "", text_table(*compare_table.details(rows)), "")
        _draw_comparison(rows, out)
    tables.show(json, *compare_table.notes(results, rows))
    if json is not None:
        figures = compare_table.to_json(results)
        tables.write_json(figures | _provenance(figures), json)


def _draw_comparison(rows: Any, out: Path) -> None:
    if find_spec("matplotlib") is None:
        return
    baselines = {row.task: row.baseline for row in rows}
    what = (
        f"mean of {len(baselines)} tasks"
        if len(baselines) > 1
        else f"{rows[0].task}, {rows[0].metric}"
    )
    quality = f"score on dev, {what}, % (majority {100 * fmean(baselines.values()):.1f})"
    for size, name in (("adapter_parameters", "parameters"), ("adapter_bytes", "bytes")):
        found = [Point(*point) for point in compare_table.points(rows, size)]
        if found:
            axes = plot_quality(found, size=f"{name} of the adapter", quality=quality)
            plots.save_figure(axes, out / f"{name}.png")


@verb
def recover(
    suite: Annotated[
        Path, typer.Argument(help="TOML file with a table [recover].", show_default=False)
    ],
    *,
    out: Out,
    table: Table = False,
    tasks: Tasks = None,
    retry: Retry = False,
    distill: Annotated[
        int | None, typer.Option(help="Steps of distillation of each form, without labels.", min=1)
    ] = None,
    quiet: Quiet = False,
    json: JsonFile = None,
    force: ForceFile = False,
    **given: Any,
) -> None:
    """Train a LoRA, compress it by each structure to each budget, judge, train on, and judge again.

    With --distill, or a suite that says so, forms are also trained on the LoRA's own answers and
    judged. Beside it the same shapes are trained from scratch for as many steps. Finished parts are
    never redone. Writes table.md, and pictures where matplotlib is installed. Exit code 1 if a run
    failed. --data, --base, --device and --precision stand in place of the suite's own.
    """
    chosen = open_suite(suite, tasks, given)
    if distill is not None:
        chosen = replace(chosen, recover={**chosen.recover, "distill": distill})
    failed: list[str] = []

    def note(run: Run, outcome: Outcome) -> None:
        if isinstance(outcome, Failure):
            failed.append(f"{run.directory}: {outcome.kind}: {outcome.message[:200]}")

    if not table:
        with tables.quiet(), follow(quiet=quiet) as step:
            recover_suite(chosen, out, retry=retry, on_run=note, on_step=step)
    found = read_recovery(chosen, out)
    show_recovery(found, out, json)
    for complaint in failed:
        tables.say(complaint)
    if failed:
        raise typer.Exit(1)


def show_recovery(found: Recovery, out: Path, json: Path | None) -> None:
    """The tables on the screen and in `table.md`, the pictures, the JSON."""
    if found.gains:
        shown = recover_table.gains_table(found), recover_table.table(found)
        for each in shown:
            tables.show(json, text_table(*each), "")
        title = f"# {found.suite.title or 'Compress and recover'}"
        text = [title, *map(compare_table.markdown_table, shown), *recover_table.notes(found)]
        (out / "table.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
        _draw_recovery(found, out)
    tables.show(json, *recover_table.notes(found))
    if json is not None:
        figures = recover_table.to_json(found)
        tables.write_json(figures | _provenance(figures), json)


def _provenance(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of the process that made the tables; the runs name their own commits."""
    run = this_run("torch", "transformers", "peft", seed=figures["seeds"])
    return {"provenance": [asdict(run)]}


def _draw_recovery(found: Recovery, out: Path) -> None:
    if find_spec("matplotlib") is None:
        return
    for task in dict.fromkeys(gain.task for gain in found.gains):
        for size in ("parameters", "bytes"):
            drawn = recover_table.paths(found, task, size)
            if not drawn:
                continue
            panels = plot_stages(
                {
                    structure: {
                        stage: [Point(structure, *point) for point in points]
                        for stage, points in path
                    }
                    for structure, path in drawn.items()
                },
                size=f"{size} of the adapter",
                quality="share of the LoRA's gain (loss on dev)",
                references={"the LoRA": 1.0, "no adapter": 0.0},
            )
            panels[0].figure.suptitle(task, fontsize=11)
            plots.save_figure(panels[0], out / f"{task}-{size}.png")


def open_suite(path: Path, tasks: str | None, given: Mapping[str, Any]) -> Suite:
    """A suite with the settings of the command line that are not None in place of its own."""
    chosen = None if tasks is None else [name.strip() for name in tasks.split(",")]
    return read_suite(
        path, {name: value for name, value in given.items() if value is not None}, chosen
    )


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Sheet:
    """Make a table of text that was made elsewhere.

    The first column names its row; where it is narrow, the last columns leave first.
    """
    columns = [
        SheetColumn(
            name,
            place,
            "left" if place == 0 or name in ("method", "task", "against", "structure") else "right",
            name=place == 0,
        )
        for place, name in enumerate(head)
    ]
    return Sheet(columns, list(rows))
