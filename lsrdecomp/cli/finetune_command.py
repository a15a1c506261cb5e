"""The verb that trains an adapter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp.cli import tables
from lsrdecomp.cli.options import ForceFile, JsonFile, Quiet, assignment, read_toml
from lsrdecomp.cli.outputs import PLACE
from lsrdecomp.cli.progress_bars import follow
from lsrdecomp.cli.setting_options import options_of
from lsrdecomp.cli.sheet import Sheet, SheetColumn
from lsrdecomp.errors import CheckpointError, needs
from lsrdecomp.gateway import refuse_trust
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings

if TYPE_CHECKING:
    from lsrdecomp.lora.train.finetune_record import FinetuneRecord, Scores


def _rate(text: str) -> float | str:
    """Return a learning rate as it was typed: a number, or auto, which is checked with the rest."""
    try:
        return float(text)
    except ValueError:
        return text


@options_of(FinetuneSettings, parsers={"learning_rate": (_rate, "NUMBER|auto")})
def finetune(
    out: Annotated[Path, PLACE, typer.Option(help="Directory to write; it must not exist.")],
    *,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with settings; options on the command line win.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of the method, such as r=4; repeat it."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Any other setting, such as patience=3; repeat it."
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Discard an interrupted run to the same place, do not resume it."
        ),
    ] = False,
    quiet: Quiet = False,
    json: JsonFile = None,
    force: ForceFile = False,
    **options: Any,
) -> None:
    """Train an adapter on a base: LoRA, LSR and others.

    It is evaluated on --dev-data, or on a tenth of --data. Writes OUT/adapter, a PEFT directory,
    OUT/record.json with settings, versions and scores, and OUT/layers.jsonl with the spectra of
    the layers. With --set save_every=100 or --set patience=3 a killed run resumes when it is
    started again. For several devices: accelerate launch -m lsrdecomp.cli.main finetune ... Exit
    code 1 if training diverged.
    """
    del force  # `outputs.checked` reads it
    run_settings = _run_settings(config, options, option or [], settings or [])
    if out.exists():
        raise CheckpointError("already exists; choose another output, or remove it", path=out)
    from lsrdecomp.lora.base.base_files import check_reachable  # with NumPy

    check_reachable(run_settings.base)
    with tables.quiet(), follow(quiet=quiet) as show:
        with needs("training", "finetune"):
            from lsrdecomp.lora.train.finetune_run import finetune as run
        record = run(run_settings, out, resume=not fresh, on_step=show)
    if int(os.environ.get("RANK", "0")) != 0:
        return  # one of several processes, and not the one that speaks
    tables.write_json(record.to_json(), json)
    tables.show(json, *_parts(record, out))
    if record.dev.loss is None:
        raise typer.Exit(1)


def _run_settings(
    config: Path | None, options: dict[str, Any], of_method: list[str], others: list[str]
) -> FinetuneSettings:
    """Return the settings of a file, of options and of ``--set``; what comes later wins."""
    written = {} if config is None else read_toml(config)
    if config is not None:
        refuse_trust(written, config)
    in_file = FinetuneSettings.checked_names(written)
    if of_method:
        options["options"] = dict(assignment(text, "--option") for text in of_method)
    set_values = FinetuneSettings.checked_names(dict(assignment(text, "--set") for text in others))
    for name, field in FinetuneSettings.fields.items():
        if field.type is tuple and isinstance(set_values.get(name), str | int):
            set_values[name] = [set_values[name]]  # one value is a list of one
    return FinetuneSettings.from_mapping({**in_file, **options, **set_values})


def _parts(record: FinetuneRecord, out: Path) -> Iterator[Sheet | str]:
    """Yield the scores as a table, what was said to the samples, and what the run took."""
    yield _score_table(record)
    for sample in record.samples:
        yield f"\n{sample.prompt.strip()}"
        completions = {"base": sample.base, "before": sample.start, "trained": sample.adapted}
        completions["expected"] = sample.completion
        for source, text in completions.items():
            if text is not None:
                yield f"  {source + ':':9} {text}"
    head = f", and {record.head_parameters:,} in the head" if record.head_parameters else ""
    yield (
        f"\n{record.settings.method}: {record.adapter_parameters:,} parameters in "
        f"{record.adapter_bytes:,} bytes{head}; the file has "
        f"{record.file_bytes:,} bytes. {record.steps:,} steps at a learning rate of "
        f"{record.settings.learning_rate:g} in {record.wall_seconds:.1f} s."
    )
    if record.rate_trials:
        tried = [f"{_loss(loss)} at {rate:g}" for rate, loss in record.rate_trials]
        yield f"Rates tried first: loss {', '.join(tried)}."
    if record.dev.loss is None:
        yield "The outputs are no longer finite: try a smaller --learning-rate."
    yield f"Wrote {out}."


def _score_table(record: FinetuneRecord) -> Sheet:
    """Return a row for each score, a column for each set of examples."""

    def majority(name: str) -> str:
        return f"{record.baseline[name]:.4f}" if name in record.baseline else ""

    cells: dict[SheetColumn, Callable[[str], str]] = {
        SheetColumn(record.settings.task, justify="left"): str,
        SheetColumn("majority"): majority,
    }
    sets = {"before": record.start, "dev": record.dev, "validation": record.validation}
    for head, scores in sets.items():
        if scores is not None:
            cells[SheetColumn(head)] = partial(_figure, scores)
    rows = list(record.dev.metrics)
    is_accuracy_among_metrics = {"accuracy", "token_accuracy"} & set(record.dev.metrics)
    if not is_accuracy_among_metrics and record.dev.accuracy is not None:
        rows.append("accuracy")
    return Sheet.of(cells, [*rows, "loss", "examples"])


def _loss(loss: float | None) -> str:
    """Return a loss as text."""
    return "not finite" if loss is None else f"{loss:.4f}"


def _figure(scores: Scores, name: str) -> str:
    """Return one score of a set of examples as text; empty if it was not measured."""
    if name == "examples":
        return f"{scores.examples:,}"
    if name == "loss":
        return _loss(scores.loss)
    values = {"accuracy": scores.accuracy, **scores.metrics}
    value = values.get(name)
    return "" if value is None else f"{value:.4f}"
