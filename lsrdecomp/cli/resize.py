"""`compress` to LoRA in its original format, files or directories: truncated SVD."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lsrdecomp import lora
from lsrdecomp.cli import tables
from lsrdecomp.cli.progress_bars import follow
from lsrdecomp.cli.recommendations import warn_of_growth
from lsrdecomp.cli.sheet import Sheet, SheetColumn
from lsrdecomp.errors import LsrError, UnsupportedError
from lsrdecomp.lora.files.writers.table import find_writer

if TYPE_CHECKING:
    from lsrdecomp.cli.requests import Display, Opening, Outputs
    from lsrdecomp.lora.compress import Truncation
    from lsrdecomp.lora.files import Checkpoint, StoredTensor
    from lsrdecomp.lora.search.request import Request

METHOD = (
    "Used truncated SVD with one global threshold. Without a base model only the weights can be "
    "matched, and low rank is close to optimal for that. With --base it is cut where the outputs "
    "change least."
)


OTHER_FILES = (".pt", ".pth", ".bin", ".ckpt", ".npz", ".gguf")
"""Endings of weight files that a directory of LoRA files may hold beside those that are taken."""


def lora_files(folder: Path) -> list[Path]:
    """Return the LoRA files of a directory without a config, if there are more than one."""
    if not folder.is_dir() or (folder / lora.files.CONFIG).exists():
        return []
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("."))
    return files if len(files) > 1 else []


def _say_left_out(folder: Path) -> None:
    """Name the weight files of a directory that are not taken, since nothing is left out unsaid."""
    others = [
        file.name
        for file in sorted(folder.iterdir())
        if file.suffix in OTHER_FILES and not file.name.startswith(".")
    ]
    if others:
        tables.say(
            f"Of {folder} only .safetensors files are taken together; left out: "
            f"{tables.few(others)}. Compress such a file by its own name."
        )


def names_file(out: Path | None) -> bool:
    """Return whether an output asks by its ending for one LoRA file."""
    return out is not None and out.suffix.lower() in (".safetensors", ".gguf")


def resize(
    files: Sequence[Path],
    requests: Sequence[Request],
    opening: Opening,
    outputs: Outputs,
    display: Display,
    base: str | Path | None = None,
) -> None:
    """Cut one LoRA file or directory, or several files, each under its own name in a directory.

    One that fails does not stop the others; `LsrError` at the end says which did. Exit code 1 if
    one was written that keeps less than was asked.
    """
    out = outputs.out
    if out is None and not outputs.dry_run:
        raise typer.BadParameter(f"name a directory for {len(files)} files", param_hint="--out")
    figures: list[dict[str, object]] = []
    if len(files) == 1:
        figures += _resize_adapter(
            opening.open(
                files[0],
                carry=True,
                base=base,
                trust_remote_code=requests[0].trusts_code,
            ),
            requests,
            out,
            outputs,
            display,
        )
    else:
        _say_left_out(files[0].parent)
        failed = []
        for file in files:
            try:
                checkpoint = opening.open(file, carry=True)
                is_directory = find_writer(outputs.to or "same").place == "directory"
                name = file.stem if is_directory else file.name
                path = None if out is None else out / name
                figures += _resize_adapter(checkpoint, requests, path, outputs, display)
            except LsrError as error:
                failed.append(file.name)
                tables.say(str(error))
        if failed:
            raise LsrError(
                f"{len(failed)} of {len(files)} files were not written: {', '.join(failed)}"
            )
    tables.write_json(figures if len(figures) > 1 else figures[0], outputs.json)
    if any(each["missed"] for each in figures):
        tables.say("WARNING: no cut that was measured keeps what was asked for; ask for less")
        raise typer.Exit(1)


def _resize_adapter(
    checkpoint: Checkpoint,
    requests: Sequence[Request],
    out: Path | None,
    outputs: Outputs,
    display: Display,
) -> list[dict[str, object]]:
    """Write one file or directory for each request and return the figures of each."""
    from lsrdecomp.lora.compress.truncate import truncate_request  # with NumPy

    figures = []
    for request, path in zip(requests, _paths(checkpoint, requests, out, outputs), strict=True):
        with tables.quiet(), follow(quiet=display.quiet) as step:
            cut = truncate_request(checkpoint, request, to=outputs.to or "same", on_step=step)
            if path is not None:
                cut.save(path, force=outputs.force, on_step=step)
        if display.verbose:
            tables.show(outputs.json, "\n".join(_log_lines(cut)))
        is_missed = cut.fidelity is not None and cut.fidelity.is_missed
        figures.append({**_shown(cut, path, outputs.json), "missed": is_missed})
        if outputs.report is not None:
            from lsrdecomp.lora.compress.cut_report import cut_report

            with tables.files({outputs.report: cut_report(cut, path)}):
                pass
            tables.show(outputs.json, f"Wrote {outputs.report}.")
        if path is not None:
            warn_of_growth(checkpoint, _weights(path))
    if requests[0].base is None:
        tables.show(outputs.json, METHOD)
    return figures


def _paths(
    checkpoint: Checkpoint, requests: Sequence[Request], out: Path | None, outputs: Outputs
) -> Sequence[Path | None]:
    """Return where each request is written, none for a dry run, after a check that it can be.

    Those of several ratios share the name, with the ratio before its ending.
    """
    is_directory = _place(checkpoint, outputs) == "directory"
    if names_file(out) and is_directory:
        way_out = "name a directory by --out"
        if outputs.to is None:
            way_out += ", with --to same for a plain LoRA"
        raise UnsupportedError(
            f"{outputs.to or checkpoint.format} is a directory with a config, no single file: "
            f"{way_out}",
            path=checkpoint.path,
        )
    if outputs.dry_run or out is None:
        return [None] * len(requests)
    paths = [out]
    if len(requests) > 1:
        stem, suffix = (out.name, "") if is_directory else (out.stem, out.suffix)
        ratios = [request.plan.ratio for request in requests if request.plan is not None]
        paths = [out.with_name(f"{stem}-{ratio:g}{suffix}") for ratio in ratios]
    inputs = (checkpoint.path, checkpoint.weights)
    for path in paths:
        if is_directory:
            lora.files.check_output_directory(path, inputs, outputs.force)
        else:
            lora.files.check_output_file(path, inputs, force=outputs.force)
    return paths


def _place(checkpoint: Checkpoint, outputs: Outputs) -> str:
    """Return whether a file or a directory is written."""
    if outputs.to in (None, "same"):
        return lora.files.file_or_directory(checkpoint)
    return find_writer(str(outputs.to)).place


def _weights(path: Path) -> Path:
    """Return the weight file of what was written at a path."""
    return lora.files.open_checkpoint(path).weights if path.is_dir() else path


def _log_lines(cut: Truncation) -> Iterator[str]:
    """Yield a line for each layer, in the words of sd-scripts' resize_lora, and their mean."""
    width = max(len(layer.name) for layer in cut.layers)
    retained = []
    for layer, sigma, rank in zip(cut.layers, cut.sigma, cut.ranks, strict=True):
        total = float(sigma.sum())
        norm = float((sigma**2).sum()) ** 0.5
        if not norm > 0.0:
            yield f"{layer.name:<{width}} | zero, dim: {rank}"
            continue
        kept = sigma[:rank]
        kept_norm = float((kept**2).sum()) ** 0.5 / norm
        retained.append(kept_norm)
        ratio = f"{float(sigma[0] / kept[-1]):.1f}" if rank and kept[-1] > 0.0 else "-"
        yield (
            f"{layer.name:<{width}} | sum(S) retained: {float(kept.sum()) / total:.1%}, "
            f"fro retained: {kept_norm:.1%}, max(S) ratio: {ratio}, dim: {rank} of {layer.rank}"
        )
    if retained:
        mean = sum(retained) / len(retained)
        spread = (sum((value - mean) ** 2 for value in retained) / len(retained)) ** 0.5
        yield f"Average Frobenius norm retention: {mean:.2%} | std: {spread:.3f}"


def _shown(cut: Truncation, path: Path | None, json: Path | None) -> dict[str, object]:
    """Show what was written, or the curve of a dry run, and return the same for machines."""
    ranks = zip(cut.layers, cut.ranks, strict=True)
    figures: dict[str, object] = {
        "source": cut.source.path.name,
        "parameters_before": cut.parameters_before,
        "parameters": cut.parameters,
        "relative_error": cut.relative_error,
        "ranks": {layer.name: rank for layer, rank in ranks},
        "carried": list(cut.carried),
    }
    if cut.fidelity is not None:
        figures["promise"] = cut.fidelity.to_json()
        figures["tried"] = [asdict(measurement) for measurement in cut.tried]
    if cut.by_energy is not None:
        figures["by_energy"] = asdict(cut.by_energy)
    if path is None:
        tables.show(json, *_measured_sentences(cut))
        return figures | {"curve": _show_curve(cut, json)}
    return figures | {"file": str(path), "relative_error": _show_written(cut, path, json)}


def _show_curve(cut: Truncation, json: Path | None) -> list[dict[str, float]]:
    """Show the errors of other sizes, and return them."""
    curve = list(cut.curve())
    rows = [(f"{ratio:.4g}", f"{size:,}", f"{error:.4f}") for ratio, size, error in curve]
    heads = ("times fewer", "parameters", "relative error")
    sheet = Sheet([SheetColumn(head) for head in heads], rows)
    name = cut.source.path.name
    tables.show(json, f"{name}: {cut.parameters_before:,} parameters", sheet)
    return [
        {"ratio": ratio, "parameters": size, "relative_error": error}
        for ratio, size, error in curve
    ]


def _show_written(cut: Truncation, path: Path, json: Path | None) -> float:
    """Say what was written, and return its relative error, as it was rounded."""
    weights = _weights(path)
    error = cut.written_error(path)
    error_text = f"weight error {error:.4f}"
    if cut.fidelity is not None:
        error_text += f", output error (est.) {cut.relative_error:.4f}"
    elif f"{error:.4f}" != f"{cut.relative_error:.4f}":
        error_text += f", {cut.relative_error:.4f} before rounding"
    if cut.carried_norm:
        size = math.hypot(cut.norm, cut.carried_norm)
        share = error * size / cut.norm if cut.norm else 0.0
        error_text += f"; {share:.4f} over the layers that were cut"
    dropped = sum(rank == 0 for rank in cut.ranks)
    tables.show(
        json,
        f"Wrote {path}: {cut.parameters:,} of {cut.parameters_before:,} parameters, "
        f"{weights.stat().st_size:,} of {cut.source.weights.stat().st_size:,} bytes, ranks up to "
        f"{max(cut.ranks)}, {dropped} of {len(cut.ranks)} layers left out; {error_text}.",
        *_carried_sentences(cut),
        *_measured_sentences(cut),
    )
    if not any(sigma.any() for sigma in cut.sigma):
        tables.show(json, "Every layer is zero, and is written as zeros of rank 1.")
    return error


def _measured_sentences(cut: Truncation) -> Iterator[str]:
    """Yield what was measured on a base, if anything was."""
    if cut.fidelity is None:
        return
    yield f"It {cut.fidelity.sentence()}."
    if cut.by_energy is not None and cut.by_energy.kept is not None:
        yield (
            f"Cut by the weights alone to as many numbers it keeps {100 * cut.by_energy.kept:.1f} "
            f"%. Tried {len(cut.tried)} versions."
        )


def _carried_sentences(cut: Truncation) -> Iterator[str]:
    """Yield what was not cut, and how much of the file that is."""
    source = cut.source
    if source.format == "peft-adalora":
        yield "It is a plain LoRA now (peft_type LORA): AdaLoRA's singular values are in B and A."
    elif source.format.startswith("peft-") and source.format != "peft-lora":
        yield "It is a plain LoRA now (peft_type LORA)."
    pairs = cut.carried_layers
    if pairs:
        yield f"{len(pairs)} layers are copied as they are, the first {pairs[0]}."
    of_pairs = {key for name in pairs for key in source.layer(name).keys}
    others = {key: tensor for key, tensor in cut.carried.items() if key not in of_pairs}
    if others:
        size = sum(tensor.nbytes for tensor in others.values())
        share = size / source.weights.stat().st_size
        yield (
            f"{len(others)} tensors that are no pair are carried along, {size:,} bytes "
            f"({share:.0%} of the source): {tables.few(list(others))}."
        )
        yield from _equal_sentence(others, source)
    yield from (f"Note: {note}." for note in source.notes)


def _equal_sentence(tensors: Mapping[str, StoredTensor], source: Checkpoint) -> Iterator[str]:
    """Yield which large tensors are equal, as tied heads are: the source stores them twice too."""
    first_by_content: dict[object, str] = {}
    for key, tensor in tensors.items():
        if tensor.nbytes < source.weights.stat().st_size / 100:
            continue
        content = (tensor.shape, tensor.dtype, sha256(tensor.read().tobytes()).digest())
        first = first_by_content.setdefault(content, key)
        if first != key:
            yield f"{key} equals {first}; both are stored, as in the source."
