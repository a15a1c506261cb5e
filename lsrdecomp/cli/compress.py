"""The verb that compresses one adapter, to one size or to several from one search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp import checkpoints, compression
from lsrdecomp.cli import resize, tables
from lsrdecomp.cli.layer_tables import layers_table
from lsrdecomp.cli.options import Adapter, Storage
from lsrdecomp.cli.outputs import Input
from lsrdecomp.cli.progress import follow
from lsrdecomp.cli.recommendations import next_command, warn_if_unusable, warn_of_growth
from lsrdecomp.cli.requests import (
    COMMAND_LINE,
    DIRECTORY_OF_FILES,
    Display,
    Opening,
    Outputs,
    parse_requests,
)
from lsrdecomp.cli.settings import option_groups, options_of
from lsrdecomp.compression.measured_settings import MeasuredSettings
from lsrdecomp.compression.settings import CompressionPlan
from lsrdecomp.errors import BudgetError

if TYPE_CHECKING:
    from lsrdecomp.checkpoints import Checkpoint
    from lsrdecomp.checkpoints.progress import OnStep
    from lsrdecomp.checkpoints.statistics import Statistics
    from lsrdecomp.compression import Compression
    from lsrdecomp.compression.request import Request
    from lsrdecomp.fidelity import Measurement

SHOWN = 2
"""Examples in a report that a measured form answers differently, where no other number is asked
for."""


def split_sizes(text: str) -> tuple[int, ...]:
    """Sizes such as 4x2."""
    parts = text.lower().replace("×", "x").split("x")
    if not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(
            f"expected two sizes such as 4x2, got {text!r}", param_hint="--inner-shape"
        )
    return tuple(int(part) for part in parts)


def split_ratios(text: str) -> list[float]:
    """Of ``96,48,19``."""
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(
            f"numbers such as 48 or 96,48,19, got {text!r}", param_hint="--ratio"
        ) from error
    if len(set(ratios)) < len(ratios):
        raise typer.BadParameter(f"each ratio once, got {text!r}", param_hint="--ratio")
    return ratios


@options_of(
    CompressionPlan,
    parsers={"ratio": (split_ratios, "N[,N…]"), "inner_shape": (split_sizes, "NxN")},
)
@options_of(MeasuredSettings)
@option_groups(outputs=Outputs, opening=Opening, display=Display)
def compress(
    adapter: Adapter,
    *,
    outputs: Outputs,
    calibrated: Annotated[
        Path | None,
        typer.Option(
            "--calibrated",
            "--statistics",
            help="Statistics from `calibrate`: errors then count what the network does.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        Input,
        typer.Option(help="Measure what is kept on this base: a name or a directory."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="With --base: texts of the task, no labels; some held out.")
    ] = None,
    storage: Storage = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that solve.", show_default="1")
    ] = None,
    opening: Opening,
    display: Display,
    **options: Any,
) -> None:
    """Make a LoRA adapter smaller; PEFT opens the result.

    With --base and --data a share is the goal: --keep 0.95 finds the smallest form that keeps 95 %
    of what the adapter does on held-out texts, in as few bits as serve best. --distil 200 also
    trains smaller ones on the LoRA's own answers, without labels.

    Without a base the goal is a size (--ratio, --params, --bytes) or an error (--rtol). With
    --calibrated errors are in the Fisher norm, closeness of answers; without it in the Frobenius
    norm, closeness of numbers, where truncated SVD is hard to beat, and is taken where it is
    better.

    With --out small.safetensors a LoRA file comes back in its own format, in seconds.
    \f

    Such a file is cut by truncated SVD, with one threshold over all layers. So is every file of a
    directory of such; --dry-run shows the curve.

    --distil trains at most two sizes, and the smallest that keeps the share is written; if none
    does, the untrained one. Exit code 1, and nothing written, if --rtol cannot be met in this
    storage.

    Several ratios share one search: --ratio 96,48 --out small writes small-96 and small-48. A
    killed run goes on where it was: what was solved waits in .NAME.journal beside --out, also for
    another ratio, until the result is written.
    """
    # 1. What is asked, before anything is opened: a request for each ratio.
    files = [] if opening.name or calibrated or base else resize.lora_files(adapter)
    to_file = bool(files) or resize.names_file(outputs.out)
    given = {
        "base": base,
        "data": data,
        "statistics": calibrated,
        "storage": storage,
        "workers": workers,
        **options,
    }
    if outputs.report is not None and base is not None:
        given.setdefault("examples", SHOWN)
    door = DIRECTORY_OF_FILES if files else COMMAND_LINE
    requests = parse_requests(given, outputs, opening, display, to_file=to_file, door=door)
    outputs.check(requests)
    # 2. LoRA files that are to come back in their own format: truncated SVD, and that is all.
    if to_file:
        resize.resize(files or [adapter], requests, opening, outputs, quiet=display.quiet)
        return
    # 3. Otherwise a directory of LSR for each request.
    results = _to_directories(adapter, requests, opening, outputs, display)
    # 4. Figures for machines, and the exit code.
    _write_figures(results, outputs.json)
    distilled = any(request.measured and request.measured.distil for request in requests)
    if _kept_too_little(results, distilled) or not all(result.met for result in results):
        raise typer.Exit(1)


def _to_directories(
    adapter: Path,
    requests: Sequence[Request],
    opening: Opening,
    outputs: Outputs,
    display: Display,
) -> list[Compression]:
    """Compress to a directory for each request, and show and write what came of it."""
    # 1. Open the adapter, and see that the directories can be written.
    checkpoint = opening.open(adapter)
    requests = [request.for_adapter(checkpoint.storage) for request in requests]
    calibrated = requests[0].statistics
    plans = [request.plan for request in requests if request.plan is not None]
    directories = outputs.directories(plans)
    inputs = [adapter] if calibrated is None else [adapter, calibrated]
    for path in filter(None, directories):
        checkpoints.check_output_directory(path, inputs, outputs.force)
    statistics = None if calibrated is None else checkpoints.read_statistics(calibrated)
    # 2. Compress; what was solved waits in the journal until the result is written.
    out = outputs.directory
    journal = None if out is None else checkpoints.Journal.beside(out)
    requests = [replace(each, statistics=statistics, journal=journal) for each in requests]
    with journal or nullcontext():
        if journal is not None and journal.resumes:
            tables.say(
                f"Going on from {journal.path}, which a run before left; remove it to start again."
            )
        with follow(quiet=display.quiet) as step:
            results, refusal = _compressed(checkpoint, requests, step)
        # 3. Show and write when the bar is gone: it would break lines that are printed.
        unit = "token" if _counts_tokens(statistics) else "example"
        for result, directory in zip(results, directories, strict=False):
            _show(result, outputs.json, display, unit)
            if result.met:
                figures = outputs.json if len(directories) == 1 else None
                written = replace(outputs, out=directory, json=figures)
                _write(result, written, unit=unit, alpha=opening.alpha)
        if refusal is not None:
            raise refusal
    return results


def _compressed(
    checkpoint: Checkpoint, requests: Sequence[Request], on_step: OnStep
) -> tuple[list[Compression], BudgetError | None]:
    """Return the results up to a budget that cannot be met, and its refusal: what was drawn before is written all the same."""
    if requests[0].measured is not None:
        # Here, since NumPy comes with it.
        from lsrdecomp.fidelity.compress import fulfil

        with tables.quiet():
            return [fulfil(checkpoint, requests[0], on_step)], None
    plans = [request.plan for request in requests if request.plan is not None]
    searched = compression.search_adapter(
        checkpoint,
        plans,
        statistics=requests[0].statistics,
        resources=requests[0].resources(on_step),
    )
    results: list[Compression] = []
    for plan in plans:
        try:
            results.append(searched.compress(plan))
        except BudgetError as refusal:
            return results, refusal
    return results, None


def _show(result: Compression, json: Path | None, display: Display, unit: str) -> None:
    table = layers_table(result.layers, result.totals, each=display.each)
    tables.show(json, table, wide=display.wide)
    if result.met:
        tables.show(json, "", *result.sentences(unit))
        return
    total, plan = result.totals, result.plan
    tables.say(
        f"{total.missed} of {total.layers} layers stay above {plan.rtol:g} in {plan.storage}: {total.worst_layer} "
        f"reaches {total.worst_error:.3g}. Nothing was written; allow a larger --rtol or a finer --storage."
    )


def _write(result: Compression, outputs: Outputs, *, unit: str, alpha: float | None) -> None:
    """Write the directory, its report and its figures: all appear, or none. Say what they are, and what comes next."""
    directory, report, json = outputs.directory, outputs.report, outputs.json
    curves = () if report is None else compression.adapter_curves(result.source)
    pages = {} if report is None else {report: compression.html_report(result, curves, unit=unit)}
    with tables.files(pages | tables.json_text(result.to_json(), json)) as waiting:
        if directory is not None:
            result.save(directory, force=outputs.force, record=outputs.record)
        if report is not None:  # again, now with the sizes of the files
            page = compression.html_report(result, curves, out=directory, unit=unit)
            waiting[report].write_text(page, encoding="utf-8")
    if directory is not None:
        tables.show(json, tables.file_sizes(result.source, directory))
        warn_of_growth(result.source, directory / checkpoints.WEIGHTS)
        tables.show(json, f"Wrote {directory}. {next_command(result.source, directory, alpha)}")
    if report is not None:
        tables.show(json, f"Wrote {report}.")
    tables.show(json, *_promise(result))
    warn_if_unusable(result, directory)


def _promise(result: Compression) -> Iterator[str]:
    """The promise, if there is one."""
    if result.fidelity is not None:
        forms = f"{_tried(result.tried)} " if len(result.tried) > 1 else ""
        yield f"{forms}It {result.fidelity.sentence()}."
        if result.truncated_svd is not None:
            yield f"Truncated SVD in bits, on the same texts: {result.truncated_svd}."
        for each in result.mismatches:
            yield f"\n  {each.question}\n  LoRA: {each.lora}\n  form: {each.form}"


def _tried(tried: Sequence[Measurement]) -> str:
    """How many forms were measured, and which of them were trained, with what each kept.

    >>> from lsrdecomp.fidelity import Measurement
    >>> print(_tried([Measurement(30_000, 7_400, 0.951), Measurement(12_100, 2_900, 0.87, 0.943, 60)]))
    2 forms were measured, 1 of them also trained for 60 steps: 12 kB 87.0 → 94.3 %.
    """
    trained = [measurement for measurement in tried if measurement.steps]
    if not trained:
        return f"{len(tried)} forms were measured."
    steps = max(measurement.steps for measurement in trained)
    words = (
        f"{len(tried)} forms were measured, {len(trained)} of them also trained for {steps} steps"
    )
    return f"{words}: {', '.join(map(str, trained))}."


def _kept_too_little(results: Sequence[Compression], distilled: bool) -> bool:
    """Say so where less than half is kept; whether that is a failure: not where the size was asked for by ratio."""
    little = [
        result for result in results if result.fidelity is not None and result.fidelity.is_poor
    ]
    for result in little:
        more = "more room" if distilled else "--distil 200"
        tables.say(
            f"WARNING: this form keeps only {100 * result.fidelity.kept:.0f} % of what the adapter does; "
            f"try --keep 0.9, {more}, or texts nearer to its task"
        )
    return any(result.plan.ratio is None for result in little)


def _write_figures(results: Sequence[Compression], json: Path | None) -> None:
    """What no directory stands for: standard output, a missed tolerance, several ratios."""
    if json is None:
        return
    if len(results) > 1:
        tables.write_json([result.to_json() for result in results], json)
    elif str(json) == "-" or not results[0].met:
        tables.write_json(results[0].to_json(), json)


def _counts_tokens(statistics: Statistics | None) -> bool:
    """Return whether there were more answers than examples: a language model answers at every token."""
    if statistics is None:
        return False
    metadata = statistics.metadata
    return int(metadata.get("answers") or 0) > int(metadata.get("examples") or 0)
