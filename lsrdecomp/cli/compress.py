"""The verb that compresses one adapter, to one size or to several from one search."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp import checkpoints, compression
from lsrdecomp.cli import promise, resize, tables
from lsrdecomp.cli.options import (
    Adapter,
    Alpha,
    Each,
    Force,
    JsonFile,
    MaxMemory,
    Name,
    Quiet,
    SolveDevice,
    Storage,
    Wide,
)
from lsrdecomp.cli.outputs import NEW_FILE, UNKNOWN
from lsrdecomp.cli.progress import follow
from lsrdecomp.cli.questions import MaxLength, Truncate
from lsrdecomp.errors import BudgetError, CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from lsrdecomp.checkpoints import Checkpoint
    from lsrdecomp.compression import CompressionPlan

IMAGES = ("kohya", "diffusers", "lycoris", "cloneofsimo")
"""Formats of image programs, whose bases `calibrate` does not run."""
FLAGS = {
    "rtol": "--rtol",
    "ratio": "--ratio",
    "parameters": "--params",
    "bytes": "--bytes",
    "separation_rank": "--separation-rank",
}
WRECK = 0.7
"""Relative Frobenius error above which an adapter without statistics is told to be little of itself any more."""


def compress(
    adapter: Adapter,
    out: Annotated[
        Path | None,
        UNKNOWN,
        typer.Option("--out", help="Directory to write, or for a LoRA as it came NAME.safetensors."),
    ] = None,
    rtol: Annotated[float | None, typer.Option(help="Largest relative error of every layer, as written.")] = None,
    ratio: Annotated[
        str | None, typer.Option(help="So many times fewer parameters, over all layers; several, as 96,48,19.")
    ] = None,
    params: Annotated[int | None, typer.Option(help="So many parameters, over all layers.")] = None,
    size: Annotated[
        int | None, typer.Option("--bytes", help="A weight file of at most so many bytes; the others are some 4 kB.")
    ] = None,
    kl: Annotated[float | None, typer.Option(help="Estimated divergence of answers, nats; with --calibrated.")] = None,
    separation_rank: Annotated[int | None, typer.Option(help="So many terms a side in every layer.")] = None,
    inner_shape: Annotated[str | None, typer.Option(help="With it: split of the inner rank, such as 4x2.")] = None,
    max_rank: Annotated[
        int | None, typer.Option("--max-rank", min=1, help="No layer of a larger rank when it is served as a LoRA.")
    ] = None,
    calibrated: Annotated[
        Path | None, typer.Option(help="Statistics from `calibrate`: errors then count what the network does.")
    ] = None,
    base: promise.Base = None,
    data: promise.Data = None,
    keep: promise.Keep = None,
    distil: promise.DistilSteps = 0,
    passes: promise.Passes = 2,
    held_out: promise.HeldOut = 128,
    batch: promise.Batch = None,
    max_length: MaxLength = None,
    truncate: Truncate = False,
    dtype: promise.Dtype = "float32",
    seed: promise.Seed = 0,
    storage: Storage = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that solve.")] = 1,
    device: SolveDevice = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the table; write nothing.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Every layer in compression.json, not only sums.")] = False,
    report: Annotated[Path | None, NEW_FILE, typer.Option(help="Also write the report as one HTML file.")] = None,
    name: Name = None,
    alpha: Alpha = None,
    wide: Wide = False,
    each: Each = False,
    quiet: Quiet = False,
    json: JsonFile = None,
    force: Force = False,
    max_memory: MaxMemory = None,
) -> None:
    """Turn a LoRA adapter into an LSR adapter that PEFT opens.

    One goal: --rtol, --ratio, --params, --bytes, --kl or --separation-rank. Without --calibrated errors are in the
    Frobenius norm, closeness of numbers: there plain truncated SVD is hard to beat, and is taken where it is better.
    With it they are in the K-FAC norm, closeness of answers: there adapters 20 to 100 times smaller keep much of what
    they do. Exit code 1, and nothing written, if --rtol cannot be met in this storage.

    With --base and --data what is kept is measured: --keep 0.95 finds the smallest form that keeps 95 % of what the
    adapter does on held-out texts. --distil 200 then trains smaller ones on the LoRA's own answers, without labels:
    at most three sizes, and the smallest that keeps as much is written; if none does, the untrained one.

    With --out small.safetensors a LoRA file comes back in its own format, in seconds: truncated SVD with one threshold
    over all layers. So does every file of a directory of such; --dry-run shows the curve.

    Several ratios share one search: --ratio 96,48 --out small writes small-96 and small-48. A killed run goes on where
    it was: what was solved waits in .NAME.journal beside --out, also for another ratio, until the result is written.
    """
    goals: dict[str, Any] = {
        "rtol": rtol,
        "parameters": params,
        "bytes": size,
        "kl": kl,
        "separation_rank": separation_rank,
    }
    shared: dict[str, Any] = {
        "inner_shape": split_sizes(inner_shape),
        "max_rank": max_rank,
        "storage": storage or "float32",
    }
    measuring = promise.Measuring(base, data, keep, distil, passes, held_out, batch, max_length, truncate, dtype, seed)
    plans = promise.plans(measuring, {**goals, **shared}, _ratios(ratio))
    if out is None and not dry_run:
        raise typer.BadParameter("name the directory to write, or ask for a --dry-run", param_hint="--out")
    if len(plans) > 1 and (report is not None or str(json) == "-"):
        raise typer.BadParameter("several ratios have no common report; ask for one at a time", param_hint="--ratio")
    _refuse_hub_name(adapter)
    asked = [name for name, value in (("--base", base), ("--calibrated", calibrated), ("--report", report)) if value]
    files = resize.several(adapter) if name is None and calibrated is None and base is None else []
    if files:
        if out is None:
            raise typer.BadParameter(f"name a directory for {len(files)} files", param_hint="--out")
        resize.resize_all(files, plans, out, storage, alpha, max_memory, force, dry_run, quiet)
        return
    checkpoint = checkpoints.open_checkpoint(adapter, name=name, alpha=alpha, max_memory=max_memory)
    if out is not None and compression.single_file(out, checkpoint):
        if asked:
            text = f"a LoRA file is cut without a model: leave {', '.join(asked)} out, or name a directory"
            raise typer.BadParameter(text, param_hint="--out")
        resize.resize(checkpoint, plans, out, storage, force, dry_run, quiet, json)
        return
    if storage is None:
        chooses_bits = base is not None and (keep is not None or size is not None)
        storage = "auto" if chooses_bits else checkpoint.storage
        plans = [None if plan is None else replace(plan, storage=storage) for plan in plans]
    places = _places(None if dry_run else out, plans)
    for place in places:
        if place is not None:
            checkpoints.check_output(place, (adapter, *([] if calibrated is None else [calibrated])), force)
    statistics = None if calibrated is None else checkpoints.read_statistics(calibrated)
    unit = "token" if statistics is not None and _counts_tokens(statistics.metadata) else "example"
    results: list[Any] = []
    journal = None if out is None or dry_run else checkpoints.Journal.beside(out)
    with journal or nullcontext():
        refusal: BudgetError | None = None
        with follow(quiet=quiet) as step:
            draw = promise.drawer(
                checkpoint,
                plans,
                measuring,
                statistics=statistics,
                resources=compression.Resources(workers, device, journal, step),
                storage=storage,
                max_rank=max_rank,
                out=None if dry_run else out,
            )
            for plan in plans:
                try:
                    results.append(draw(plan))
                except BudgetError as error:  # what was drawn before it is written
                    refusal = error
                    break
        for result, place in zip(results, places, strict=False):  # a bar would break lines that are printed
            _show(result, json, wide=wide, each=each, unit=unit)
            if result.met:
                figures = json if len(plans) == 1 else None
                _write(result, checkpoint, place, report, figures, force, record, unit, alpha)
                tables.show(json, *promise.words(result))
                if calibrated is None and base is None:
                    _warn_of_wreck(result, adapter, place)
        if refusal is not None:
            raise refusal
    _write_figures(results, json)
    if promise.kept_too_little(results, measuring) or not all(result.met for result in results):
        raise typer.Exit(1)


def split_sizes(text: str | None) -> tuple[int, ...] | None:
    """Sizes such as 4x2."""
    if text is None:
        return None
    parts = text.lower().replace("×", "x").split("x")
    if not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"expected two sizes such as 4x2, got {text!r}", param_hint="--inner-shape")
    return tuple(int(part) for part in parts)


def _ratios(text: str | float | None) -> list[float | None]:
    """Of ``96,48,19``."""
    if text is None:
        return [None]
    try:
        found: list[float | None] = [float(part) for part in str(text).split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"numbers such as 48 or 96,48,19, got {text!r}", param_hint="--ratio") from error
    if len(set(found)) < len(found):
        raise typer.BadParameter(f"each ratio once, got {text!r}", param_hint="--ratio")
    return found


def _places(out: Path | None, plans: Sequence[CompressionPlan | None]) -> list[Path | None]:
    """Where each plan is written: the directory asked for, or one beside it for each of several ratios."""
    if out is None or len(plans) == 1:
        return [out] * len(plans)
    return [out.with_name(f"{out.name}-{plan.ratio:g}") for plan in plans if plan is not None]


def _show(result: Any, json: Path | None, *, wide: bool, each: bool, unit: str) -> None:
    tables.show(json, tables.layers_table(result.layers, result.totals, each=each), wide=wide)
    if result.met:
        tables.show(json, "", *tables.summary(result, unit))
        return
    total, plan = result.totals, result.plan
    tables.say(
        f"{total.missed} of {total.layers} layers stay above {plan.rtol:g} in {plan.storage}: {total.worst_layer} "
        f"reaches {total.worst_error:.3g}. Nothing was written; allow a larger --rtol or a finer --storage."
    )


def _write(
    result: Any,
    checkpoint: Checkpoint,
    place: Path | None,
    report: Path | None,
    json: Path | None,
    force: bool,
    record: bool,
    unit: str,
    alpha: float | None,
) -> None:
    """The directory, its report and its figures: all appear, or none."""
    curves = () if report is None else compression.adapter_curves(checkpoint)
    pages = {} if report is None else {report: compression.html_report(result, curves, unit=unit)}
    with tables.files(pages | tables.json_text(result.to_json(), json)) as waiting:
        if place is not None:
            result.save(place, force=force, record=record)
        if report is not None:  # again, now with the sizes of the files
            page = compression.html_report(result, curves, out=place, unit=unit)
            waiting[report].write_text(page, encoding="utf-8")
    if place is not None:
        tables.show(json, tables.file_sizes(checkpoint, place))
        tables.show(json, f"Wrote {place}. {_next(checkpoint, place, alpha)}")
    if report is not None:
        tables.show(json, f"Wrote {report}.")


def _next(checkpoint: Checkpoint, place: Path, alpha: float | None) -> str:
    """What opens it: PEFT, or for files of other programs the file that they read."""
    if checkpoint.format.startswith("peft-"):
        return "Open it with PEFT after `import lsrdecomp.adapters`."
    try:
        checkpoints.check_same(checkpoint)
    except UnsupportedError:
        to = "kohya" if checkpoint.format == "lycoris" else "lora"
        out = quoted(f"{place}.safetensors" if to == "kohya" else f"{place}-lora")
        return f"As a plain LoRA: lsrdecomp export {quoted(place)} --to {to} --out {out}"
    out = quoted(
        f"{place}-{checkpoint.format}" if checkpoints.same_is_directory(checkpoint) else f"{place}.safetensors"
    )
    scale = "" if alpha is None else f" --alpha {alpha:g}"
    again = f"lsrdecomp export {quoted(place)} --to same --like {quoted(checkpoint.weights)}{scale} --out {out}"
    return f"As a {checkpoint.format} LoRA again: {again}"


def quoted(path: object) -> str:
    """As it is typed in a shell."""
    return shlex.quote(str(path))


def _write_figures(results: list[Any], json: Path | None) -> None:
    """What no directory stands for: standard output, a missed tolerance, several ratios."""
    if json is None:
        return
    if len(results) > 1:
        tables.write_json([result.to_json() for result in results], json)
    elif str(json) == "-" or not results[0].met:
        tables.write_json(results[0].to_json(), json)


def _warn_of_wreck(result: Any, adapter: Path, place: Path | None) -> None:
    """Without statistics a small adapter is close in nothing that matters: say so, and what would help."""
    total = result.totals
    if total.relative_error <= WRECK and 2 * total.dropped < total.layers:
        return
    tables.say(
        f"WARNING: little of this adapter is left: error {total.relative_error:.3g}, {total.dropped} of {total.layers} "
        "layers left out."
    )
    if result.source.format in IMAGES:
        tables.say("Allow a larger size: without a base and prompts it is closeness of numbers that is kept.")
        return
    base = result.source.config.get("base_model_name_or_path") or "BASE"
    goal = next((name, value) for name, value in result.plan.to_json().items() if name in FLAGS)
    again = quoted(adapter.with_name("small") if place is None else place.with_name(f"{place.name}-calibrated"))
    tables.say(
        "Measure what its layers do and compress by that:\n"
        f"  lsrdecomp calibrate {quoted(base)} --adapter {quoted(adapter)} --text TEXTS.txt --out statistics\n"
        f"  lsrdecomp compress {quoted(adapter)} --calibrated statistics {FLAGS[goal[0]]} {goal[1]} --out {again}"
    )


def _refuse_hub_name(adapter: Path) -> None:
    text = adapter.as_posix()
    if not adapter.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        raise CheckpointError(
            f"no such directory; from the Hugging Face hub it comes by: hf download {text} --local-dir {adapter.name}",
            path=adapter,
        )


def _counts_tokens(metadata: Any) -> bool:
    """Whether there were more answers than examples: a language model answers at every token."""
    return int(metadata.get("answers") or 0) > int(metadata.get("examples") or 0)
