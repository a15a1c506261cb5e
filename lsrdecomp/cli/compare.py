"""The verb that compares methods of fine-tuning."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp.cli import tables
from lsrdecomp.cli.options import ForceFile, JsonFile, Quiet
from lsrdecomp.cli.progress import follow
from lsrdecomp.cli.suites import Out, Retry, Table, Tasks, in_place_of_the_suites, open_suite, training_imports
from lsrdecomp.compression.progress import Counter

if TYPE_CHECKING:
    from lsrdecomp.experiments.compare import Results


@in_place_of_the_suites
def compare(
    suite: Annotated[Path, typer.Argument(help="TOML file: methods, tasks, seeds and rates.", show_default=False)],
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
    """Fine-tune by every method of a suite on every task, at the rate that suits it, over several seeds.

    Rates are chosen on a split of the training set. Finished runs are never redone. Writes table.md, and pictures where
    matplotlib is installed. Exit code 1 if a run failed. --data, --model, --device and --precision stand in place of
    the suite's own.
    """
    with training_imports():
        from lsrdecomp.experiments.compare import compare as run
        from lsrdecomp.experiments.compare import read_results
    chosen = open_suite(suite, tasks, given)
    if table:
        results = read_results(chosen, out)
    else:
        with tables.quiet(), follow(quiet=quiet) as step:
            advance = Counter(step, "training", read_results(chosen, out).planned, "runs").add
            results = run(chosen, out, workers=workers, retry=retry, on_run=lambda *_: advance())
    show(results, out, json)
    if any(cell.failures for cell in results.cells):
        raise typer.Exit(1)


def show(results: Results, out: Path, json: Path | None) -> None:
    """The tables on the screen and in `table.md`, the pictures, the JSON."""
    from lsrdecomp.experiments import compare_table

    rows = compare_table.lines(results)
    if rows:
        out.mkdir(parents=True, exist_ok=True)
        tables.write_text(compare_table.markdown(results), out / "table.md")
        tables.show(json, tables.text_table(*compare_table.overview(rows)))
        tables.show(json, "", tables.text_table(*compare_table.details(rows)), "")
        _draw(rows, out)
    tables.show(json, *compare_table.notes(results, rows))
    if json is not None:
        tables.write_json(compare_table.to_json(results), json)


def _draw(rows: Any, out: Path) -> None:
    from lsrdecomp import plots
    from lsrdecomp.experiments import compare_table

    try:
        plots.available()
    except ImportError:
        return
    baselines = {row.task: row.baseline for row in rows}
    what = f"mean of {len(baselines)} tasks" if len(baselines) > 1 else f"{rows[0].task}, {rows[0].metric}"
    quality = f"score on dev, {what}, % (majority {100 * fmean(baselines.values()):.1f})"
    for size, name in (("adapter_parameters", "parameters"), ("adapter_bytes", "bytes")):
        found = [plots.Point(*point) for point in compare_table.points(rows, size)]
        if found:
            axes = plots.plot_quality(found, size=f"{name} of the adapter", quality=quality)
            plots.save_figure(axes, out / f"{name}.png")
