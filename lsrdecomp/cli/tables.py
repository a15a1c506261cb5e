"""Tables for people, JSON for machines."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lsrdecomp import checkpoints
from lsrdecomp.checkpoints.files import bytes_to_open
from lsrdecomp.cli.sheet import Column, Sheet

if TYPE_CHECKING:
    from lsrdecomp.analysis import ErrorCurve
    from lsrdecomp.checkpoints import Checkpoint
    from lsrdecomp.fleet import Outcome

PLAIN_WIDTH = 130
"""Columns of a table that goes to a file or a pipe, where COLUMNS does not say otherwise."""
WIDE = 1000
"""Columns where all that is known of a layer is asked for."""


def show(json: Path | None, *parts: Any, wide: bool = False) -> None:
    """Print for people, unless standard output is for the machine; with ``wide`` as wide as all columns need.

    Sentences are left whole for a pipe to fold, and indented lines always: a command is typed as it
    stands.
    """
    if json is not None and str(json) == "-":
        return
    plain = (
        None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal() else PLAIN_WIDTH
    )
    output = Console(width=WIDE if wide else plain, highlight=False, markup=False)
    for part in parts:
        for line in part.split("\n") if isinstance(part, str) else [part]:
            whole = isinstance(line, str) and (line.startswith("  ") or not sys.stdout.isatty())
            output.print(line, soft_wrap=whole)


def say(message: str) -> None:
    """A line on stderr, in the words of the program."""
    print(f"lsrdecomp: {message}", file=sys.stderr)


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


def write_json(value: Any, path: Path | None) -> None:
    """Write to a file as a whole, or to standard output for ``-``; nothing where no file was named."""
    if str(path) == "-":
        sys.stdout.write(_json(value))
    with files(json_text(value, path)):
        pass


def json_text(value: Any, path: Path | None) -> dict[Path, str]:
    """The file that `write_json` would write, and its text; nothing for standard output or no file."""
    return {} if path is None or str(path) == "-" else {path: _json(value)}


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


@contextmanager
def files(texts: Mapping[Path, str]) -> Iterator[dict[Path, Path]]:
    """Files that appear when the block ends; if it fails, or one of them does not fit, none appears.

    Yields where each waits until then. Whether they may was asked before, by
    `lsrdecomp.cli.outputs.checked`.
    """
    with ExitStack() as together:
        waiting = {
            path: together.enter_context(checkpoints.new_file(path, force=True)) for path in texts
        }
        for path, text in texts.items():
            with waiting[path].open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())  # a full disk shows itself now
        yield waiting


def curve_table(curves: Sequence[ErrorCurve], reference: int) -> Sheet:
    """Errors against parameters, with a bar; ``reference`` is the parameter count of the LoRA itself."""
    points = [
        (curve.label, *point)
        for curve in curves
        for point in zip(curve.ranks, curve.parameters, curve.relative_errors, strict=True)
    ]
    cells: dict[Column, Callable[[tuple[str, int, int, float]], str]] = {
        Column("structure", 0, "left", name=True): lambda point: point[0],
        Column("terms", 1): lambda point: str(point[1]),
        Column("parameters"): lambda point: f"{point[2]:,}",
        Column("of LoRA", 2): lambda point: f"{100 * point[2] / reference:.1f} %",
        Column("error"): lambda point: f"{point[3]:.3g}",
        Column("", 3, "left"): lambda point: "█" * round(24 * min(point[3], 1.0)),
    }
    return Sheet.of(cells, points)


def file_sizes(source: Checkpoint, out: Path) -> str:
    """Bytes that open the adapters before and after; heads, which are carried along as they are, apart."""
    heads = source.extra_bytes
    before, after = (
        bytes_to_open(path) - heads for path in (source.weights, out / checkpoints.WEIGHTS)
    )
    carried = f"; {heads:,} bytes of other tensors in both" if heads else ""
    times = f", {before / after:.3g} times fewer" if before > after else ""
    return f"Weights and config: {after:,} bytes instead of {before:,}{times}{carried}."


def outcome_table(outcomes: Sequence[Outcome]) -> Sheet:
    """Adapters of a fleet that did not end well, and why."""
    cells: dict[Column, Callable[[Outcome], str]] = {
        Column("adapter", 0, "left", name=True): lambda outcome: outcome.name,
        Column("state", 0, "left"): lambda outcome: outcome.state,
        Column("reason", 0, "left", prose=True): lambda outcome: outcome.message,
    }
    return Sheet.of(cells, outcomes)
