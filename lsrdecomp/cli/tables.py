"""Tables for people, JSON for machines, progress on stderr when someone watches."""

from __future__ import annotations

import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lsrdecomp import checkpoints

if TYPE_CHECKING:
    from lsrdecomp.analysis import ErrorCurve
    from lsrdecomp.checkpoints import Checkpoint
    from lsrdecomp.compression import Compression, LayerReport, Totals, Verification
    from lsrdecomp.fleet import Outcome

PLAIN_WIDTH = 220
"""Columns of a table that goes to a file or a pipe, where nothing should be folded."""


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)


def show(json: Path | None, *parts: Any) -> None:
    """Print for people, unless standard output is for the machine."""
    if json is None or str(json) != "-":
        output = console()
        for part in parts:
            output.print(part)


def say(message: str) -> None:
    """A line on stderr, in the words of the program."""
    print(f"lsrdecomp: {message}", file=sys.stderr)


@contextmanager
def meter(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, only on a terminal; yields the callback that says how much is done."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    quiet = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[Any], None]]:
    """As `meter`, advanced by one with every call, whatever it is called with."""
    with meter(total, what) as show:
        count = itertools.count(1)
        yield lambda _: show(next(count))


@contextmanager
def steps() -> Iterator[Callable[[str], None]]:
    """A spinner on stderr with the present step, only on a terminal; yields the callback that names it."""
    output = Console(stderr=True)
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with output.status("reading") as status:
        yield status.update


@contextmanager
def quiet() -> Iterator[None]:
    """What other libraries would say on standard error is not for the reader of a table."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from transformers.utils.logging import disable_progress_bar
        except ImportError:
            pass
        else:
            disable_progress_bar()  # type: ignore[no-untyped-call]
        yield


def write_json(value: Any, path: Path) -> None:
    """Write to a file as a whole, or to standard output for ``-``."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        write_text(text, path)


def write_text(text: str, path: Path) -> None:
    """A file that appears as a whole."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def layers_table(layers: Sequence[LayerReport], total: Totals) -> Table:
    """What each layer became; with statistics, the error in function stands beside that in numbers."""
    functional = total.functional_error is not None
    columns = ("layer", "matrix", "rank", "structure", "shape", "terms", "parameters", "storage", "‖·‖_F error")
    table = _table(*columns, *(("in function",) if functional else ()), "γ")
    for layer in layers:
        left, right = layer.separation_ranks
        table.add_row(
            layer.name,
            f"{layer.rows}×{layer.columns}",
            str(layer.source_rank),
            layer.structure,
            layer.shape,
            f"{left}" if left == right else f"{left}+{right}",
            f"{layer.parameters:,} of {layer.parameters_before:,}",
            layer.storage if layer.parameters else "",
            f"{layer.relative_error:.3g}{'' if layer.met else ' !'}",
            *((f"{layer.functional_error:.3g}",) if functional else ()),
            f"{layer.condition:.2f}",
        )
    table.add_section()
    table.add_row(
        f"{total.layers} layers",
        *[""] * 5,
        f"{total.parameters:,} of {total.parameters_before:,}",
        "",
        f"{total.relative_error:.3g}",
        *((f"{total.functional_error:.3g}",) if functional else ()),
        "",
        style="bold",
    )
    return table


def summary(result: Compression) -> Iterator[str]:
    """The compression in sentences one can act on."""
    total = result.totals
    extra = (
        f"; {total.extra_parameters:,} numbers of other modules are kept as they are" if total.extra_parameters else ""
    )
    dropped = f" {total.dropped} of {total.layers} layers left out." if total.dropped else ""
    yield (
        f"{total.parameters:,} parameters instead of {total.parameters_before:,}, {total.ratio:.3g} times fewer{extra}."
        f"{dropped}"
    )
    yield (
        f"Relative Frobenius error {total.relative_error:.3g} over all layers, measured on what is written: "
        "how close the numbers are."
    )
    if total.functional_error is not None:
        yield (
            f"Relative error in the K-FAC norm {total.functional_error:.3g}: how close the answers are. "
            f"Estimated divergence from the LoRA's answers: {total.kl:.3g} nats per example."
        )
    if total.low_rank_error is not None:
        yield f"Truncated SVD at the same budget and in the same norm: {total.low_rank_error:.3g}."


def checkpoint_table(checkpoint: Checkpoint, ranks: Sequence[tuple[float, int]]) -> Table:
    """What an adapter holds; ``ranks`` are (‖ΔW‖_F, rank that keeps 99 % of it) by layer."""
    table = _table("layer", "kind", "matrix", "rank", "structure", "parameters", "dtype", "‖ΔW‖", "rank for 1 %")
    for layer, (norm, enough) in zip(checkpoint.layers, ranks, strict=True):
        table.add_row(
            layer.name,
            layer.kind,
            f"{layer.out_features}×{layer.in_features}",
            str(layer.rank),
            "LoRA"
            if isinstance(layer, checkpoints.LoraLayer)
            else f"{layer.left_rank}+{layer.right_rank} × {layer.shape}",
            f"{layer.parameters:,}",
            layer.dtype,
            f"{norm:.4g}",
            str(enough),
        )
    return table


def _structure(layer: Any) -> str:
    if isinstance(layer, checkpoints.LoraLayer):
        return "LoRA"
    return f"{layer.left_rank}+{layer.right_rank} × {layer.shape}"


def curve_table(curves: Sequence[ErrorCurve], reference: int) -> Table:
    """Errors against parameters, with a bar; ``reference`` is the parameter count of the LoRA itself."""
    table = _table("structure", "terms", "parameters", "of LoRA", "error", "")
    for curve in curves:
        for rank, count, error in zip(curve.ranks, curve.parameters, curve.relative_errors, strict=True):
            share = f"{100 * count / reference:.1f} %"
            table.add_row(
                curve.label, str(rank), f"{count:,}", share, f"{error:.3g}", "█" * round(24 * min(error, 1.0))
            )
        table.add_section()
    return table


def verification_table(result: Verification) -> Table:
    """Errors measured anew beside those the writer recorded."""
    table = _table("layer", "parameters", "‖ΔW‖", "error now", "recorded", "")
    for layer in result.layers:
        recorded = "–" if layer.recorded_error is None else f"{layer.recorded_error:.3g}"
        mark = "" if layer.agrees else "differs"
        table.add_row(
            layer.name, f"{layer.parameters:,}", f"{layer.norm:.4g}", f"{layer.relative_error:.3g}", recorded, mark
        )
    return table


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """Adapters of a fleet that did not end well, and why."""
    table = _table("adapter", "state", "reason")
    for outcome in outcomes:
        table.add_row(outcome.name, outcome.state, outcome.message)
    return table


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of text that was made elsewhere."""
    table = _table(*head)
    for row in rows:
        table.add_row(*row)
    return table


LEFT = (
    "layer",
    "adapter",
    "kind",
    "structure",
    "shape",
    "dtype",
    "storage",
    "state",
    "reason",
    "method",
    "task",
    "against",
    "",
)
FOLDED = ("layer", "adapter", "reason", "against")


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(
            column, justify="left" if column in LEFT else "right", overflow="fold", no_wrap=column not in FOLDED
        )
    return table
