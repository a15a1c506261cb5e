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

from lsrdecomp import lora
from lsrdecomp.cli.sheet import Sheet, SheetColumn
from lsrdecomp.gateway import printable
from lsrdecomp.lora.files.file_checks import bytes_to_open

if TYPE_CHECKING:
    from lsrdecomp.analysis import ErrorCurve
    from lsrdecomp.lora.files import Checkpoint
    from lsrdecomp.lora.fleet import Outcome


def show(json: Path | None, *parts: Any, wide: bool = False) -> None:
    """Print for people, unless standard output is for the machine.

    Sentences are left whole for a pipe to fold, and indented lines always: a command is typed as it
    stands.

    Parameters
    ----------
    json : path, optional
        Where figures are written; for ``-`` nothing is printed.
    *parts : str or Sheet
        Texts of several lines, and tables.
    wide : bool
        Print tables as wide as all columns need.
    """
    if json is not None and str(json) == "-":
        return
    is_terminal = sys.stdout.isatty()
    width: int | None = None  # rich asks the terminal, or COLUMNS
    if wide:
        width = 1000  # more than any table needs
    elif not is_terminal and not os.environ.get("COLUMNS", "").isdecimal():
        width = 130  # of a file or a pipe; by hand, for a log on a wide screen
    output = Console(width=width, highlight=False, markup=False)
    for part in parts:
        if not isinstance(part, str):
            output.print(part)
            continue
        for line in map(printable, part.split("\n")):
            is_whole = line.startswith("  ") or not is_terminal
            output.print(line, soft_wrap=is_whole)


def say(message: str) -> None:
    """Print a line on stderr, in the words of the program."""
    print(f"lsrdecomp: {printable(message)}", file=sys.stderr)


def few(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    max_names = 8  # by hand: two lines of a terminal
    text = ", ".join(names[:max_names])
    return text if len(names) <= max_names else f"{text} and {len(names) - max_names} more"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what other libraries say on standard error: it is not for readers of a table."""
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
    """Write to a file as a whole, to standard output for ``-``, or nowhere where none was named."""
    if str(path) == "-":
        sys.stdout.write(_json(value))
    with files(json_text(value, path)):
        pass


def json_text(value: Any, path: Path | None) -> dict[Path, str]:
    """Return the file of `write_json` with its text; nothing for standard output."""
    if path is None or str(path) == "-":
        return {}
    return {path: _json(value)}


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


@contextmanager
def files(texts: Mapping[Path, str]) -> Iterator[dict[Path, Path]]:
    """Make files appear when the block ends; if it fails, or one does not fit, none appears.

    Yields where each waits until then. Whether they may was asked before, by
    `lsrdecomp.cli.outputs.checked`.
    """
    with ExitStack() as together:
        waiting = {
            path: together.enter_context(lora.files.new_file(path, force=True)) for path in texts
        }
        for path, text in texts.items():
            with waiting[path].open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())  # a full disk shows itself now
        yield waiting


def curve_table(curves: Sequence[ErrorCurve], reference: int) -> Sheet:
    """Return errors against parameters, with a bar; ``reference`` are those of the LoRA itself."""
    points: list[tuple[str, int, int, float]] = []
    for curve in curves:
        figures = zip(curve.ranks, curve.parameters, curve.relative_errors, strict=True)
        points += [(curve.label, *point) for point in figures]
    cells: dict[SheetColumn, Callable[[tuple[str, int, int, float]], str]] = {
        SheetColumn("structure", 0, "left", name=True): lambda point: point[0],
        SheetColumn("terms", 1): lambda point: str(point[1]),
        SheetColumn("parameters"): lambda point: f"{point[2]:,}",
        SheetColumn("of LoRA", 2): lambda point: f"{100 * point[2] / reference:.1f} %",
        SheetColumn("error"): lambda point: f"{point[3]:.3g}",
        SheetColumn("", 3, "left"): lambda point: "█" * round(24 * min(point[3], 1.0)),
    }
    return Sheet.of(cells, points)


def file_sizes(source: Checkpoint, out: Path) -> str:
    """Return a sentence on the bytes that open the adapters, without heads, which are carried.

    And one on those of all files of the directory, as ``du -b`` counts them.
    """
    heads = source.extra_bytes
    before = bytes_to_open(source.weights) - heads
    after = bytes_to_open(out / lora.files.WEIGHTS) - heads
    times = f", {before / after:.3g} times fewer" if before > after else ""
    text = f"Weights and config: {after:,} bytes instead of {before:,}{times}."
    if heads:
        text += (
            f" Heads and other saved modules add {heads:,} bytes to both: {after + heads:,} "
            f"instead of {before + heads:,}."
        )
    total = sum(path.stat().st_size for path in out.iterdir())
    if total > after + heads:
        text += f" With README.md and records the directory has {total:,} (--bare leaves them out)."
    return text


def outcome_table(outcomes: Sequence[Outcome]) -> Sheet:
    """Return the adapters of a fleet that did not end well, and why."""
    cells: dict[SheetColumn, Callable[[Outcome], str]] = {
        SheetColumn("adapter", 0, "left", name=True): lambda outcome: outcome.name,
        SheetColumn("state", 0, "left"): lambda outcome: outcome.state,
        SheetColumn("reason", 0, "left", prose=True): lambda outcome: outcome.message,
    }
    return Sheet.of(cells, outcomes)
