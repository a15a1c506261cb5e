"""`compress` to LoRA files in their original format, one or a directory of them: truncated SVD."""

from __future__ import annotations

from collections.abc import Sequence
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lsrdecomp import checkpoints, compression
from lsrdecomp.cli import tables
from lsrdecomp.cli.progress import follow
from lsrdecomp.cli.recommendations import warn_of_growth
from lsrdecomp.cli.sheet import Sheet, SheetColumn
from lsrdecomp.errors import LsrError, UnsupportedError

if TYPE_CHECKING:
    from lsrdecomp.checkpoints import Checkpoint
    from lsrdecomp.cli.requests import Opening, Outputs
    from lsrdecomp.compression import Truncation
    from lsrdecomp.compression.request import Request

METHOD = (
    "Used truncated SVD with one global threshold. Without a base model only the weights can be "
    "matched, and low rank is close to optimal for that. Bases are run for PEFT adapters of text "
    "models only."
)


def lora_files(folder: Path) -> list[Path]:
    """Return the LoRA files of a directory without a config, if there are more than one."""
    if not folder.is_dir() or (folder / checkpoints.CONFIG).exists():
        return []
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("."))
    return files if len(files) > 1 else []


def names_file(out: Path | None) -> bool:
    """Return whether an output asks by its ending for one LoRA file."""
    return out is not None and out.suffix.lower() in (".safetensors", ".gguf")


def resize(
    files: Sequence[Path],
    requests: Sequence[Request],
    opening: Opening,
    outputs: Outputs,
    *,
    quiet: bool,
) -> None:
    """Cut one LoRA file, or several, each under its own name in a directory.

    One that fails does not stop the others; `LsrError` at the end says which did.
    """
    out = outputs.out
    if out is None:
        raise typer.BadParameter(f"name a directory for {len(files)} files", param_hint="--out")
    figures: list[dict[str, object]] = []
    if len(files) == 1:
        figures += _resize_file(opening.open(files[0]), requests, out, outputs, quiet=quiet)
    else:
        failed = []
        for file in files:
            try:
                checkpoint = opening.open(file)
                figures += _resize_file(checkpoint, requests, out / file.name, outputs, quiet=quiet)
            except LsrError as error:
                failed.append(file.name)
                tables.say(str(error))
        if failed:
            raise LsrError(
                f"{len(failed)} of {len(files)} files were not written: {', '.join(failed)}"
            )
    tables.write_json(figures if len(figures) > 1 else figures[0], outputs.json)


def _resize_file(
    checkpoint: Checkpoint,
    requests: Sequence[Request],
    out: Path,
    outputs: Outputs,
    *,
    quiet: bool,
) -> list[dict[str, object]]:
    """Write one file for each request and return the figures of each.

    Files of several ratios share the name, with the ratio before its ending.
    """
    if names_file(out) and checkpoints.file_or_directory(checkpoint) == "directory":
        raise UnsupportedError(
            f"{checkpoint.format} is a directory with a config, no single file: name a directory "
            "by --out",
            path=checkpoint.path,
        )
    plans = [request.plan for request in requests if request.plan is not None]
    paths = [out]
    if len(plans) > 1:
        paths = [out.with_stem(f"{out.stem}-{plan.ratio:g}") for plan in plans]
    if not outputs.dry_run:
        for path in paths:
            inputs = (checkpoint.path, checkpoint.weights)
            checkpoints.check_output_file(path, inputs, force=outputs.force)
    figures = []
    for plan, path in zip(plans, paths, strict=True):
        with follow(quiet=quiet) as step:
            cut = compression.truncate(checkpoint, plan, on_step=step)
            if not outputs.dry_run:
                cut.save(path, force=outputs.force, on_step=step)
        figures.append(_shown(cut, None if outputs.dry_run else path, outputs.json))
        if not outputs.dry_run:
            warn_of_growth(checkpoint, path)
    tables.show(outputs.json, METHOD)
    return figures


def _shown(cut: Truncation, path: Path | None, json: Path | None) -> dict[str, object]:
    """Show what was written, or the curve of a dry run, and return the same for machines."""
    ranks = zip(cut.source.layers, cut.ranks, strict=True)
    figures: dict[str, object] = {
        "source": cut.source.path.name,
        "parameters_before": cut.source.adapter_parameters,
        "parameters": cut.parameters,
        "relative_error": cut.relative_error,
        "ranks": {layer.name: rank for layer, rank in ranks},
    }
    if path is None:
        return figures | {"curve": _show_curve(cut, json)}
    return figures | {"file": str(path), "rounding": _show_written(cut, path, json)}


def _show_curve(cut: Truncation, json: Path | None) -> list[dict[str, float]]:
    """Show the errors of other sizes, and return them."""
    curve = list(cut.curve())
    rows = [(f"{ratio:g}", f"{size:,}", f"{error:.4f}") for ratio, size, error in curve]
    heads = ("times fewer", "parameters", "relative error")
    sheet = Sheet([SheetColumn(head) for head in heads], rows)
    name = cut.source.path.name
    tables.show(json, f"{name}: {cut.source.adapter_parameters:,} parameters", sheet)
    return [
        {"ratio": ratio, "parameters": size, "relative_error": error}
        for ratio, size, error in curve
    ]


def _show_written(cut: Truncation, path: Path, json: Path | None) -> float:
    """Say what was written, and return what rounding adds to its relative error at most."""
    from lsrdecomp.checkpoints.tensors import read_header

    if path.suffix == ".gguf":  # whose header has no record: it is measured
        written = compression.verify(cut.source, checkpoints.open_checkpoint(path))
        rounding = abs(written.relative_error - cut.relative_error)
    else:
        record = loads(read_header(path).metadata["lsrdecomp"])
        kept = (1.0 - cut.relative_error**2) ** 0.5
        rounding = float(record["rounding"]) / float(record["norm"]) * kept
    rounding_text = f", which rounding moves by {rounding:.1g} at most" if rounding else ""
    dropped = sum(rank == 0 for rank in cut.ranks)
    tables.show(
        json,
        f"Wrote {path}: {cut.parameters:,} of {cut.source.adapter_parameters:,} parameters, "
        f"{path.stat().st_size:,} of {cut.source.weights.stat().st_size:,} bytes, ranks up to "
        f"{max(cut.ranks)}, {dropped} of {len(cut.ranks)} layers left out; relative error "
        f"{cut.relative_error:.4f}{rounding_text}.",
    )
    return rounding
