"""The verb that trains an adapter."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from lsrdecomp import training
from lsrdecomp.cli import tables
from lsrdecomp.cli.options import ForceFile, JsonFile
from lsrdecomp.cli.outputs import PLACE, Input
from lsrdecomp.errors import CheckpointError, LsrError

if TYPE_CHECKING:
    from lsrdecomp.training.record import Record


def finetune(
    out: Annotated[Path, PLACE, typer.Option(help="Directory to write; must not exist.")],
    model: Annotated[
        str | None, Input, typer.Option(help="The base: a name, a directory, a GGUF file, smollm2, or embedded.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="A GLUE or SuperGLUE task by name, or embedded.")] = None,
    data: Annotated[
        str | None, Input, typer.Option(help="JSON lines for a language model, or directory of the tasks' files.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings; options given here win.")] = None,
    method: Annotated[str | None, typer.Option(help="lora, lsr, dora, krona, …; a wrong one shows all.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of the method, such as r=4; repeat it.")] = None,
    init: Annotated[str | None, Input, typer.Option(help="Adapter directory to train on from.")] = None,
    head: Annotated[
        str | None, Input, typer.Option(help="Adapter directory whose head is the start of this one.")
    ] = None,
    target_modules: Annotated[str | None, typer.Option(help="Endings of module names, with commas.")] = None,
    layers: Annotated[str | None, typer.Option(help="Layer indices to adapt, with commas.")] = None,
    rate: Annotated[float | None, typer.Option(help="Largest learning rate; 1e-3 if absent.")] = None,
    zero_rate: Annotated[float | None, typer.Option(help="Factor on it for factors that start at zero.")] = None,
    head_rate: Annotated[float | None, typer.Option(help="Learning rate of the head, if another.")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples per step, over all processes; 32 if absent.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the training set; 3 if absent.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.")] = None,
    warmup: Annotated[float | None, typer.Option(help="Share of the steps over which the rate rises.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of an example; 128 if absent.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the start and the order of examples.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32, bfloat16 or bfloat16-autocast.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    gradient_checkpointing: Annotated[bool | None, typer.Option("--gradient-checkpointing")] = None,
    patience: Annotated[int | None, typer.Option(help="Stop early, judged on a split of the training set.")] = None,
    validation: Annotated[float | None, typer.Option(help="Share of the training set split off for it.")] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between those judgements.")] = None,
    freeze_head: Annotated[bool, typer.Option("--freeze-head", help="Train the adapter alone.")] = False,
    measure_start: Annotated[bool | None, typer.Option("--measure-start", help="Also judge the start.")] = None,
    log_every: Annotated[int | None, typer.Option(help="Steps between entries of the logs; 0 for none.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints to resume from.")] = None,
    report_to: Annotated[str | None, typer.Option(help="Also report to tensorboard, wandb, …, with commas.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw away an interrupted run to the same place.")] = False,
    json: JsonFile = None,
    force: ForceFile = False,
) -> None:
    """Fine-tune a base on a task by LoRA, LSR or another adapter, and judge it on the task's dev set.

    Writes OUT/adapter, a PEFT directory, OUT/record.json with settings, versions and scores, and OUT/layers.jsonl with
    the spectra of the layers. Killed and started again, a run with --save-every or --patience goes on where it was.
    For several devices: accelerate launch -m lsrdecomp.cli.main finetune ... Exit code 1 if the loss was lost.
    """
    given: dict[str, Any] = {
        "model": model,
        "task": task,
        "data": data,
        "method": method,
        "options": dict(_option(text) for text in option) if option else None,
        "init": init,
        "head": head,
        "target_modules": _list(target_modules),
        "layers": None if layers is None else [_index(part) for part in layers.split(",")],
        "rate": rate,
        "zero_rate": zero_rate,
        "head_rate": head_rate,
        "batch": batch,
        "epochs": epochs,
        "steps": steps,
        "warmup": warmup,
        "max_length": max_length,
        "seed": seed,
        "precision": precision,
        "device": device,
        "gradient_checkpointing": gradient_checkpointing,
        "patience": patience,
        "validation": validation,
        "evaluate_every": evaluate_every,
        "train_head": False if freeze_head else None,
        "measure_start": measure_start,
        "log_every": log_every,
        "save_every": save_every,
        "report_to": _list(report_to),
    }
    settings = training.FinetuneSettings.from_mapping(
        _table(config) | {name: value for name, value in given.items() if value is not None}
    )
    if out.exists():
        raise CheckpointError("already exists; choose another output, or remove it", path=out)
    with tables.quiet(), _progress() as show:
        try:
            from lsrdecomp.training.finetune import finetune as run
        except ImportError as error:
            raise LsrError(
                f"training runs the model; without {error.name}: pip install 'lsrdecomp[finetune]'"
            ) from error
        record = run(settings, out, resume=not fresh, on_step=lambda step: show(step.step, step.steps))
    if int(os.environ.get("RANK", "0")) != 0:
        return  # one of several processes, and not the one that speaks
    if json is not None:
        tables.write_json(record.to_json(), json)
    if json is None or str(json) != "-":
        _show(record, out)
    if record.dev.loss is None:
        raise typer.Exit(1)


def _show(record: Record, out: Path) -> None:
    output = tables.console()
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(record.settings.task)
    scored = [("start", record.start), ("dev", record.dev), ("validation", record.validation)]
    columns = [(name, scores) for name, scores in scored if scores is not None]
    against = ["majority"] if record.baseline else []
    for name in (*against, *(name for name, _ in columns)):
        table.add_column(name, justify="right")
    rows = [(name, [scores.metrics.get(name) for _, scores in columns]) for name in record.dev.metrics]
    if not {"accuracy", "token_accuracy"} & set(record.dev.metrics) and record.dev.accuracy is not None:
        rows.append(("accuracy", [scores.accuracy for _, scores in columns]))
    for name, values in rows:
        constant = [f"{record.baseline[name]:.4f}" if name in record.baseline else ""] if against else []
        table.add_row(name, *constant, *("" if value is None else f"{value:.4f}" for value in values))
    blank = [""] * len(against)
    table.add_row("loss", *blank, *("lost" if scores.loss is None else f"{scores.loss:.4f}" for _, scores in columns))
    table.add_row("examples", *blank, *(f"{scores.examples:,}" for _, scores in columns))
    output.print(table)
    for sample in record.samples:
        output.print(f"\n{sample.prompt.strip()}", markup=False)
        for who, text in (("base", sample.base), ("adapted", sample.adapted), ("file", sample.completion)):
            output.print(f"  {who + ':':9} {text}", markup=False)
    output.print(
        f"\n{record.settings.method}: {record.adapter_parameters:,} parameters and {record.head_parameters:,} in the "
        f"head; {record.adapter_bytes:,} bytes of {record.file_bytes:,}. {record.steps:,} steps in "
        f"{record.wall_seconds:.1f} s."
    )
    if record.dev.loss is None:
        output.print("The outputs are no longer finite: try a smaller --rate.")
    output.print(f"Wrote {out}.")


def _table(config: Path | None) -> dict[str, Any]:
    if config is None:
        return {}
    try:
        return tomllib.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:  # bad TOML or bad UTF-8
        raise training.SettingsError(f"{config}: {error}") from error


def _option(text: str) -> tuple[str, Any]:
    """``r=4`` as a name and a value in TOML's words; what is no TOML is a text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"expected NAME=VALUE such as r=4, got {text!r}", param_hint="--option")
    try:
        parsed: Mapping[str, Any] = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return name, value
    return name, parsed["value"]


def _list(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",")]


def _index(text: str) -> int:
    if not text.strip().isdecimal():
        raise typer.BadParameter(f"expected layer indices such as 3,4,5, got {text!r}", param_hint="--layers")
    return int(text)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar that begins with the first step, when the number of steps is known."""
    with ExitStack() as stack:
        bars: list[Callable[[int], None]] = []

        def show(step: int, steps: int) -> None:
            if not bars:
                bars.append(stack.enter_context(tables.meter(steps, "steps")))
            bars[0](step)

        yield show
