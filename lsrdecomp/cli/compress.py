"""The verb that compresses one adapter, to one size or to several from one search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp import checkpoints, compression
from lsrdecomp.cli import resize, tables
from lsrdecomp.cli.layer_tables import layers_table
from lsrdecomp.cli.options import (
    Adapter,
    Alpha,
    Each,
    Force,
    JsonFile,
    MaxMemory,
    Name,
    Quiet,
    Storage,
    Wide,
)
from lsrdecomp.cli.outputs import NEW_FILE, UNKNOWN, Input
from lsrdecomp.cli.progress import follow
from lsrdecomp.cli.recommendations import next_command, warn_of_growth, warn_of_wreck
from lsrdecomp.cli.settings import options_of
from lsrdecomp.compression.settings import GOALS, CompressionPlan
from lsrdecomp.errors import BudgetError, LsrError
from lsrdecomp.fidelity.settings import MeasuredSettings

if TYPE_CHECKING:
    from lsrdecomp.compression import Compression, SearchedAdapter
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
def compress(
    adapter: Adapter,
    *,
    out: Annotated[
        Path | None,
        UNKNOWN,
        typer.Option(
            "--out", help="Directory to write, or for a LoRA as it came NAME.safetensors."
        ),
    ] = None,
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
    workers: Annotated[int, typer.Option(min=1, help="Processes that solve.")] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the table; write nothing.")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Every layer in compression.json, not only sums.")
    ] = False,
    report: Annotated[
        Path | None, NEW_FILE, typer.Option(help="Also write the report as one HTML file.")
    ] = None,
    name: Name = None,
    alpha: Alpha = None,
    wide: Wide = False,
    each: Each = False,
    quiet: Quiet = False,
    json: JsonFile = None,
    force: Force = False,
    max_memory: MaxMemory = None,
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
    from lsrdecomp.fidelity.compress import (
        compress as compress_measured,
    )  # here, since NumPy comes with it
    from lsrdecomp.fidelity.compress import usual_storage

    # 1. The goals, before anything is opened: a plan for each ratio, none where a share to keep is
    # the only goal.
    of_base = {name: options.pop(name) for name in MeasuredSettings.fields if name in options}
    plans = _plans(options, of_base, base, data)
    if report is not None:
        of_base.setdefault("examples", SHOWN)
    if out is None and not dry_run:
        raise typer.BadParameter(
            "name the directory to write, or ask for a --dry-run", param_hint="--out"
        )
    if len(plans) > 1 and (report is not None or str(json) == "-"):
        raise typer.BadParameter(
            "several ratios have no common report; ask for one at a time", param_hint="--ratio"
        )
    # 2. LoRA files that are to come back as they came: truncated SVD without a model, and that is
    # all.
    open_adapter = partial(checkpoints.open_checkpoint, alpha=alpha, max_memory=max_memory)
    cut = partial(
        resize.resize, plans=plans, storage=storage, force=force, dry_run=dry_run, quiet=quiet
    )
    files = resize.several(adapter) if name is None and calibrated is None and base is None else []
    if files:
        resize.resize_all(files, out, open_adapter, cut)
        return
    checkpoint = open_adapter(adapter, name=name)
    if out is not None and resize.single_file(out, checkpoint):
        resize.refuse_model({"--base": base, "--calibrated": calibrated, "--report": report})
        cut(checkpoint, out=out, json=json)
        return
    # 3. How the layers are stored, where each plan is written, and the norm that errors count in.
    storage = storage or usual_storage(checkpoint, base, of_base.get("keep"), options.get("bytes"))
    plans = [plan.replace(storage=storage) for plan in plans]
    outputs = _outputs(None if dry_run else out, plans)
    inputs = [adapter] if calibrated is None else [adapter, calibrated]
    for path in filter(None, outputs):
        checkpoints.check_output_directory(path, inputs, force)
    statistics = None if calibrated is None else checkpoints.read_statistics(calibrated)
    # 4. The results: one that is measured on a base, or one for each plan, drawn from a common
    # search.
    journal = None if out is None or dry_run else checkpoints.Journal.beside(out)
    with journal or nullcontext():
        if journal is not None and journal.resumes:
            tables.say(
                f"Going on from {journal.path}, which a run before left; remove it to start again."
            )
        refusal = None
        with follow(quiet=quiet) as step:
            if base is None:
                resources = compression.Resources(workers, of_base.get("device"), journal, step)
                searched = compression.search_adapter(
                    checkpoint, plans, statistics=statistics, resources=resources
                )
                results, refusal = _drawn(searched, plans)
            else:
                goal = (
                    {"plan": plans[0]}
                    if plans
                    else {"storage": storage, "max_rank": options.get("max_rank")}
                )
                run: dict[str, Any] = {
                    "data": data,
                    "workers": workers,
                    "journal": journal,
                    "on_step": step,
                    **of_base,
                }
                with tables.quiet():
                    results = [
                        compress_measured(
                            checkpoint, base=base, statistics=statistics, **goal, **run
                        )
                    ]
        # 5. What is said and written when the bar is gone: it would break lines that are printed.
        unit = (
            "token" if statistics is not None and _counts_tokens(statistics.metadata) else "example"
        )
        for result, output in zip(results, outputs, strict=False):
            _show(result, json, wide=wide, each=each, unit=unit)
            if result.met:
                figures = json if len(outputs) == 1 else None
                _write(
                    result,
                    output,
                    report=report,
                    json=figures,
                    force=force,
                    record=record,
                    unit=unit,
                    alpha=alpha,
                )
        if refusal is not None:
            raise refusal
    _write_figures(results, json)
    if _kept_too_little(results, "distil" in of_base) or not all(result.met for result in results):
        raise typer.Exit(1)


def _plans(
    chosen: dict[str, Any], of_base: dict[str, Any], base: str | None, data: Path | None
) -> list[CompressionPlan]:
    """A plan for each ratio; none where a share to keep is the only goal. Takes the ratios out of ``chosen``."""
    settings = MeasuredSettings(**of_base)
    ratios = chosen.pop("ratio", [None])
    if base is None and (settings.keep is not None or data is not None or settings.distil):
        text = "--keep, --data and --distil measure a text model's answers: name it by --base, and texts by --data"
        raise LsrError(
            f"{text}; without one, as for image models, ask for a size, such as --ratio 4"
        )
    if base is not None and data is None:
        raise LsrError(
            "what is kept is measured on texts of the task: give --data FILE with --base"
        )
    if base is not None and len(ratios) > 1:
        raise LsrError(
            "with --base one ratio at a time, or --keep for the smallest form that keeps a share"
        )
    if settings.keep is not None and ratios == [None] and not set(chosen) & set(GOALS):
        return []
    return [CompressionPlan(**chosen, ratio=ratio) for ratio in ratios]


def _drawn(
    searched: SearchedAdapter, plans: Sequence[CompressionPlan]
) -> tuple[list[Compression], BudgetError | None]:
    """The results up to a budget that cannot be met, and its refusal: what was drawn before is written all the same."""
    results: list[Compression] = []
    for plan in plans:
        try:
            results.append(searched.compress(plan))
        except BudgetError as refusal:
            return results, refusal
    return results, None


def _outputs(out: Path | None, plans: Sequence[CompressionPlan]) -> list[Path | None]:
    """Where each plan is written: the directory asked for, or one beside it for each of several ratios."""
    if out is None or len(plans) < 2:
        return [out] * max(1, len(plans))
    return [out.with_name(f"{out.name}-{plan.ratio:g}") for plan in plans]


def _show(result: Compression, json: Path | None, *, wide: bool, each: bool, unit: str) -> None:
    tables.show(json, layers_table(result.layers, result.totals, each=each), wide=wide)
    if result.met:
        tables.show(json, "", *result.sentences(unit))
        return
    total, plan = result.totals, result.plan
    tables.say(
        f"{total.missed} of {total.layers} layers stay above {plan.rtol:g} in {plan.storage}: {total.worst_layer} "
        f"reaches {total.worst_error:.3g}. Nothing was written; allow a larger --rtol or a finer --storage."
    )


def _write(
    result: Compression,
    output: Path | None,
    *,
    report: Path | None,
    json: Path | None,
    force: bool,
    record: bool,
    unit: str,
    alpha: float | None,
) -> None:
    """The directory, its report and its figures: all appear, or none. Says what they are, and what comes next."""
    curves = () if report is None else compression.adapter_curves(result.source)
    pages = {} if report is None else {report: compression.html_report(result, curves, unit=unit)}
    with tables.files(pages | tables.json_text(result.to_json(), json)) as waiting:
        if output is not None:
            result.save(output, force=force, record=record)
        if report is not None:  # again, now with the sizes of the files
            page = compression.html_report(result, curves, out=output, unit=unit)
            waiting[report].write_text(page, encoding="utf-8")
    if output is not None:
        tables.show(json, tables.file_sizes(result.source, output))
        warn_of_growth(result.source, output / checkpoints.WEIGHTS)
        tables.show(json, f"Wrote {output}. {next_command(result.source, output, alpha)}")
    if report is not None:
        tables.show(json, f"Wrote {report}.")
    tables.show(json, *_promise(result))
    warn_of_wreck(result, output)


def _promise(result: Compression) -> Iterator[str]:
    """The promise, if there is one."""
    if result.promise is not None:
        forms = f"{_tried(result.tried)} " if len(result.tried) > 1 else ""
        yield f"{forms}It {result.promise.sentence()}."
        if result.truncated_svd is not None:
            yield f"Truncated SVD in bits, on the same texts: {result.truncated_svd}."
        for each in result.differing:
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
    little = [result for result in results if result.promise is not None and result.promise.little]
    for result in little:
        more = "more room" if distilled else "--distil 200"
        tables.say(
            f"WARNING: this form keeps only {100 * result.promise.kept:.0f} % of what the adapter does; "
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


def _counts_tokens(metadata: Any) -> bool:
    """Whether there were more answers than examples: a language model answers at every token."""
    return int(metadata.get("answers") or 0) > int(metadata.get("examples") or 0)
