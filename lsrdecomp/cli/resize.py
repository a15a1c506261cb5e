"""`compress` to a LoRA file as it came, of one file or of a directory of them: truncated SVD, in seconds."""

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
from lsrdecomp.cli.sheet import Column, Sheet
from lsrdecomp.errors import LsrError, UnsupportedError

if TYPE_CHECKING:
    from lsrdecomp.checkpoints import Checkpoint
    from lsrdecomp.cli.requests import Opening, Outputs
    from lsrdecomp.compression import Truncation
    from lsrdecomp.compression.request import Request

PLAIN = (
    "Truncated SVD, one threshold over all layers: without a base it is closeness of numbers that is kept, and low "
    "rank is hard to beat there. Bases are run for PEFT adapters of text models only."
)


def several(folder: Path) -> list[Path]:
    """The LoRA files of a directory without a config, if there are more than one."""
    if not folder.is_dir() or (folder / checkpoints.CONFIG).exists():
        return []
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("."))
    return files if len(files) > 1 else []


def names_file(out: Path | None) -> bool:
    """Return whether an output asks by its ending for one LoRA file."""
    return out is not None and out.suffix.lower() == ".safetensors"


def resize(
    files: Sequence[Path],
    requests: Sequence[Request],
    opening: Opening,
    outputs: Outputs,
    *,
    quiet: bool,
) -> None:
    """Cut LoRA files, each under its own name in a directory if there are several; one that fails does not stop the others.

    Raises `LsrError` at the end if one failed.
    """
    out = outputs.out
    if out is None:
        raise typer.BadParameter(f"name a directory for {len(files)} files", param_hint="--out")
    facts: list[dict[str, object]] = []
    if len(files) == 1:
        facts += _resize_file(opening.open(files[0]), requests, out, outputs, quiet=quiet)
    else:
        failed = []
        for file in files:
            try:
                checkpoint = opening.open(file)
                facts += _resize_file(checkpoint, requests, out / file.name, outputs, quiet=quiet)
            except LsrError as error:
                failed.append(file.name)
                tables.say(str(error))
        if failed:
            raise LsrError(
                f"{len(failed)} of {len(files)} files were not written: {', '.join(failed)}"
            )
    tables.write_json(facts if len(facts) > 1 else facts[0], outputs.json)


def _resize_file(
    checkpoint: Checkpoint,
    requests: Sequence[Request],
    out: Path,
    outputs: Outputs,
    *,
    quiet: bool,
) -> list[dict[str, object]]:
    """Write one file for each request; several ratios share the name, with the ratio before its ending.

    Returns the figures of each.
    """
    if names_file(out) and checkpoints.file_or_directory(checkpoint) == "directory":
        text = f"{checkpoint.format} is a directory with a config, no single file: name a directory by --out"
        raise UnsupportedError(text, path=checkpoint.path)
    plans = [request.plan for request in requests if request.plan is not None]
    paths = [out]
    if len(plans) > 1:
        paths = [out.with_stem(f"{out.stem}-{plan.ratio:g}") for plan in plans]
    if not outputs.dry_run:
        for path in paths:
            inputs = (checkpoint.path, checkpoint.weights)
            checkpoints.check_output_file(path, inputs, force=outputs.force)
    facts = []
    for plan, path in zip(plans, paths, strict=True):
        with follow(quiet=quiet) as step:
            cut = compression.truncate(checkpoint, plan, on_step=step)
            if not outputs.dry_run:
                cut.save(path, force=outputs.force, on_step=step)
        facts.append(_shown(cut, None if outputs.dry_run else path, outputs.json))
        if not outputs.dry_run:
            warn_of_growth(checkpoint, path)
    tables.show(outputs.json, PLAIN)
    return facts


def _shown(cut: Truncation, path: Path | None, json: Path | None) -> dict[str, object]:
    """The curve of a dry run, or what was written; and the same for machines."""
    from lsrdecomp.checkpoints.tensors import read_header

    whole, name = cut.source.adapter_parameters, cut.source.path.name
    facts: dict[str, object] = {
        "source": name,
        "parameters_before": whole,
        "parameters": cut.parameters,
    }
    facts |= {"relative_error": cut.relative_error}
    facts["ranks"] = {
        layer.name: rank for layer, rank in zip(cut.source.layers, cut.ranks, strict=True)
    }
    if path is None:
        curve = list(cut.curve())
        rows = [(f"{ratio:g}", f"{size:,}", f"{error:.4f}") for ratio, size, error in curve]
        sheet = Sheet((Column("times fewer"), Column("parameters"), Column("relative error")), rows)
        tables.show(json, f"{name}: {whole:,} parameters", sheet)
        points = [
            {"ratio": ratio, "parameters": size, "relative_error": error}
            for ratio, size, error in curve
        ]
        return facts | {"curve": points}
    record = loads(read_header(path).metadata["lsrdecomp"])
    moved = float(record["rounding"]) / float(record["norm"]) * (1.0 - cut.relative_error**2) ** 0.5
    rounding = f", which rounding moves by {moved:.1g} at most" if moved else ""
    left = sum(rank == 0 for rank in cut.ranks)
    tables.show(
        json,
        f"Wrote {path}: {cut.parameters:,} of {whole:,} parameters, {path.stat().st_size:,} of "
        f"{cut.source.weights.stat().st_size:,} bytes, ranks up to {max(cut.ranks)}, {left} of {len(cut.ranks)} layers "
        f"left out; relative error {cut.relative_error:.4f}{rounding}.",
    )
    return facts | {"file": str(path), "rounding": moved}
