"""The verb that measures a written adapter anew, from its files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp import lora
from lsrdecomp.cli import tables
from lsrdecomp.cli.layer_tables import verification_table
from lsrdecomp.cli.options import ForceFile, JsonFile, TrustRemoteCode
from lsrdecomp.cli.outputs import Input
from lsrdecomp.cli.progress_bars import follow
from lsrdecomp.cli.recommendations import quoted
from lsrdecomp.cli.requests import Display, Opening
from lsrdecomp.cli.setting_options import option_groups
from lsrdecomp.errors import CheckpointError, LsrError

if TYPE_CHECKING:
    from lsrdecomp.lora.files import Checkpoint


@option_groups
def verify(
    source: Annotated[
        Path, typer.Argument(help="The adapter that was compressed.", show_default=False)
    ],
    written: Annotated[Path, typer.Argument(help="What was written from it.", show_default=False)],
    *,
    base: Annotated[
        str | None,
        Input,
        typer.Option(help="Base model, for a method of PEFT whose ΔW is not in its file."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    accept: Annotated[
        bool,
        typer.Option(
            "--accept",
            help="Record the files beside the weights as they are now, after an edit "
            "that was meant.",
        ),
    ] = False,
    opening: Opening,
    display: Display,
    json: JsonFile = None,
    force: ForceFile = False,
) -> None:
    """Check a written adapter against its source and its records.

    Its errors are measured again from the files, and compared with the recorded ones.
    Changed files are named. Exit code 1 if something differs, 3 if nothing was recorded or a record
    is missing. What it does on a base says `lsrdecomp measure`.
    """
    del force  # `outputs.checked` reads it
    if base is not None and not lora.base.takes_base(source, name=opening.name):
        raise LsrError(
            f"{source} holds its own ΔW, and verify runs no base: outputs are compared by "
            f"lsrdecomp measure {quoted(source)} {quoted(written)} --base {quoted(base)}"
        )
    original = opening.open(source, carry=True, base=base, trust_remote_code=trust_remote_code)
    compressed = _opened(written, opening)
    with follow(quiet=display.quiet) as step:
        result = lora.measure.verify(original, compressed, on_step=step)
    tables.show(json, verification_table(result, each=display.each), wide=display.wide)
    tables.show(json, f"Weight error over all layers: {result.relative_error:.4g}.")
    tables.write_json(_figures(result), json)
    for complaint in _complaints(result, source, written):
        tables.say(complaint)
    if accept:
        lora.measure.accept(compressed, result)
        tables.show(json, f"Recorded {written} as it is now.")
    else:
        _say_way_out(result, source, written)
        _exit(result)


def _opened(written: Path, opening: Opening) -> Checkpoint:
    """Open what was written; in the source's own format it may need the source's alpha too."""
    try:
        return replace(opening, name=None, alpha=None).open(written, carry=True)
    except CheckpointError:
        if opening.alpha is None:
            raise
        return replace(opening, name=None).open(written, carry=True)


def _figures(result: lora.measure.Verification) -> dict[str, Any]:
    """Return what was found for a JSON file."""
    layers = [
        {
            "name": layer.name,
            "relative_error": layer.relative_error,
            "recorded": layer.recorded_error,
        }
        for layer in result.layers
    ]
    return {
        "passed": result.passed,
        "relative_error": result.relative_error,
        "source_matches": result.source_matches,
        "changed_files": result.changed_files,
        "changed_fields": result.changed_fields,
        "foreign_files": result.foreign_files,
        "missing_records": result.missing_records,
        "layers": layers,
    }


def _say_way_out(result: lora.measure.Verification, source: Path, written: Path) -> None:
    """Say which command takes an adapter as it is, where something but its numbers changed."""
    is_sound = result.passed and result.recorded and not result.missing_records
    if result.can_be_accepted and not is_sound:
        tables.say(
            "If that is meant, record it as it is: lsrdecomp verify "
            f"{quoted(source)} {quoted(written)} --accept"
        )


def _exit(result: lora.measure.Verification) -> None:
    """Raise `typer.Exit` with code 1 where something differs, 3 where it cannot be told."""
    if not result.passed:
        raise typer.Exit(1)
    if not result.recorded or result.missing_records:
        raise typer.Exit(3)


def _complaints(result: lora.measure.Verification, source: Path, written: Path) -> Iterator[str]:
    """Yield what is not as it was recorded, or not recorded."""
    if result.changed_files:
        files = ", ".join(result.changed_files)
        yield f"{files} changed since it was written: its digest is not the recorded one"
    if result.changed_fields:
        yield f"changed in {lora.files.CONFIG}: {tables.few(result.changed_fields)}"
    for name in result.foreign_files:
        yield (
            f"{name} was not written with this adapter, and programs load or run such a file "
            f"from its directory; remove it: rm {quoted(written / name)}"
        )
    if not result.recorded:
        yield (
            f"{written} has no record of what was written (in its header, SHA256SUMS or "
            "compression.json): the errors above were measured, but nothing says that they are "
            "what they should be"
        )
    for name in result.missing_records:
        yield f"{written} has lost its {name}, which vouches for all of its files"
    mismatches = [layer.name for layer in result.layers if not layer.agrees]
    if mismatches:
        count = len(mismatches)
        yield f"{count} layers are not what the writer measured, the first {mismatches[0]}"
    elif not result.agrees:
        recorded = "unknown"
        if result.recorded_error is not None:
            recorded = f"{result.recorded_error:.12g}"
        yield (
            f"the error over all layers is {result.relative_error:.12g}, but {recorded} when it "
            "was written"
        )
    if result.changed_tensors:
        yield (
            f"{len(result.changed_tensors)} other tensors differ from the source's, the first "
            f"{result.changed_tensors[0]}"
        )
    if result.source_matches is False:
        yield f"{source} is not the file this was made from: its SHA-256 is not the recorded one"
