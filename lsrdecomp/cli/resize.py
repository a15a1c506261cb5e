"""`compress` to a LoRA file as it came, of one file or of a directory of them: truncated SVD, in seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    from lsrdecomp.compression import CompressionPlan, Truncation

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


def single_file(out: Path, checkpoint: Checkpoint) -> bool:
    """Whether ``out`` asks by its ending for one file; `UnsupportedError` if the source is a directory."""
    if out.suffix.lower() != ".safetensors":
        return False
    if checkpoints.file_or_directory(checkpoint) == "directory":
        text = f"{checkpoint.format} is a directory with a config, no single file: name a directory by --out"
        raise UnsupportedError(text, path=checkpoint.path)
    return True


def refuse_model(options: Mapping[str, object]) -> None:
    """Raise for options about a model that were given to a cut without one."""
    used = ", ".join(flag for flag, value in options.items() if value)
    if used:
        text = f"a LoRA file is cut without a model: leave {used} out, or name a directory"
        raise typer.BadParameter(text, param_hint="--out")


def resize(
    checkpoint: Checkpoint,
    *,
    plans: Sequence[CompressionPlan],
    out: Path,
    storage: str | None,
    force: bool,
    dry_run: bool,
    quiet: bool,
    json: Path | None = None,
) -> None:
    """One file for each plan; several ratios share the name, with the ratio before its ending."""
    paths = [
        out if len(plans) == 1 else out.with_stem(f"{out.stem}-{plan.ratio:g}") for plan in plans
    ]
    if not dry_run:
        for path in paths:
            checkpoints.check_output_file(path, (checkpoint.path, checkpoint.weights), force=force)
    facts = []
    for plan, path in zip(plans, paths, strict=True):
        with follow(quiet=quiet) as step:
            cut = compression.truncate(checkpoint, plan, storage=storage, on_step=step)
            if not dry_run:
                cut.save(path, force=force, on_step=step)
        facts.append(_shown(cut, None if dry_run else path, json))
        if not dry_run:
            warn_of_growth(checkpoint, path)
    tables.show(json, PLAIN)
    tables.write_json(facts if len(facts) > 1 else facts[0], json)


def resize_all(
    files: Sequence[Path],
    out: Path | None,
    open_adapter: Callable[[Path], Checkpoint],
    cut: Callable[..., None],
) -> None:
    """`resize`, as ``cut``, for every file of a directory under its own name; one that fails does not stop the others.

    Raises `LsrError` at the end if one failed.
    """
    if out is None:
        raise typer.BadParameter(f"name a directory for {len(files)} files", param_hint="--out")
    failed = []
    for file in files:
        try:
            cut(open_adapter(file), out=out / file.name)
        except LsrError as error:
            failed.append(file.name)
            tables.say(str(error))
    if failed:
        raise LsrError(f"{len(failed)} of {len(files)} files were not written: {', '.join(failed)}")


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
