"""The verb that compresses one adapter, to one size or to several from one search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp import lora
from lsrdecomp.cli import resize, tables
from lsrdecomp.cli.layer_tables import layers_table
from lsrdecomp.cli.options import Adapter, Storage
from lsrdecomp.cli.outputs import NEW_FILE, Input
from lsrdecomp.cli.program import program, typed_line
from lsrdecomp.cli.progress_bars import follow
from lsrdecomp.cli.recommendations import (
    next_command,
    quoted,
    warn_if_unusable,
    warn_of_growth,
)
from lsrdecomp.cli.requests import (
    COMMAND_LINE,
    DIRECTORY_OF_FILES,
    TO_SAME,
    Display,
    Opening,
    Outputs,
    fits_file,
    parse_requests,
)
from lsrdecomp.cli.run_config import OPENING, merged, read_run, run_text
from lsrdecomp.cli.setting_options import option_groups, options_of
from lsrdecomp.errors import BudgetError
from lsrdecomp.lora.files.progress import PlannedSteps
from lsrdecomp.lora.search.measured_settings import MeasuredSettings
from lsrdecomp.lora.search.plan import CompressionPlan
from lsrdecomp.markup import size_text

if TYPE_CHECKING:
    from lsrdecomp.analysis import ErrorCurve
    from lsrdecomp.lora.files import Checkpoint
    from lsrdecomp.lora.files.progress import OnStep
    from lsrdecomp.lora.files.statistics import Statistics
    from lsrdecomp.lora.measure import Measurement
    from lsrdecomp.lora.search import Compression
    from lsrdecomp.lora.search.request import Request


def split_sizes(text: str) -> tuple[int, ...]:
    """Return sizes such as 4x2."""
    parts = text.lower().replace("×", "x").split("x")
    if not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(
            f"expected two sizes such as 4x2, got {text!r}", param_hint="--inner-shape"
        )
    return tuple(int(part) for part in parts)


def split_ratios(text: str) -> list[float]:
    """Return the ratios of ``96,48,19``."""
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
@option_groups
def compress(
    adapter: Adapter,
    *,
    outputs: Outputs,
    opening: Opening,
    display: Display,
    statistics: Annotated[
        Path | None,
        typer.Option(
            help="Statistics from `calibrate`: minimize the output error, not the weight error.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        Input,
        typer.Option(help="Base model to measure on: a name, a directory, smollm2, …"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="With --base: texts of the task, no labels [default: the model writes its own]."
        ),
    ] = None,
    storage: Storage = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that solve [default: 1].", show_default=False),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Settings in a TOML file, or in the compression.json of a run; options win."
        ),
    ] = None,
    write_config: Annotated[
        Path | None, NEW_FILE, typer.Option(help="Also write the settings of this run as TOML.")
    ] = None,
    **options: Any,
) -> None:
    """Make a LoRA adapter smaller; PEFT opens the result.

    With --base, --keep 0.95 finds the smallest version that keeps 95 % of the LoRA's effect on
    held-out texts of --data; with few texts or none the model writes its own. Bit widths are chosen
    automatically. --distill 200 also trains smaller versions on the LoRA's own answers, without
    labels.

    Without a base the goal is a size (--ratio, --parameters, --bytes), an error (--rtol, --energy)
    or a rank (--max-rank). With --statistics an estimate of the output error is minimized (Fisher
    norm); without it the weight error (Frobenius norm), by truncated SVD, in seconds. --bytes
    chooses the number of bits as well.

    --out small.safetensors writes a LoRA file in its original format, and --to same a directory: a
    plain LoRA that every tool reads, by truncated SVD, in seconds; --to mlx one for mlx-lm.
    \f

    Truncated SVD has one threshold over all layers. ADAPTER may then be a directory of LoRA files,
    each of which is compressed; --dry-run shows the error of other sizes, --verbose every layer.

    --distill trains two sizes at most, a third if neither keeps what is asked, and writes the
    smallest that does; if none does, the smallest untrained one. Exit code 1, and nothing written,
    if --rtol cannot be met in this storage.

    Several ratios share one search: --ratio 96,48 --out small writes small-96 and small-48. A
    killed run resumes when it is started again, also with another ratio: what was solved is stored
    in .NAME.journal beside --out until the result is written.
    """  # noqa: D301 (a form feed ends the short help)
    # 1. What is asked, before anything is opened: a request for each ratio.
    typed = {
        "base": base,
        "data": data,
        "statistics": statistics,
        "storage": storage,
        "workers": workers,
        "name": opening.name,
        "alpha": opening.alpha,
        **options,
    }
    given = merged({} if config is None else read_run(config), typed)
    if isinstance(given.get("ratio"), int | float):
        given["ratio"] = [given["ratio"]]
    if "statistics" in given:
        given["statistics"] = Path(given["statistics"]).expanduser()
    of_opening = {name: given.pop(name) for name in OPENING if name in given}
    opening = replace(opening, **of_opening)
    is_lsr = opening.name or "statistics" in given or "base" in given
    files = [] if is_lsr else resize.lora_files(adapter)
    to_source_format = bool(files) or resize.names_file(outputs.out) or outputs.to is not None
    if outputs.out is None and outputs.dry_run and outputs.to is None:
        # A file comes back as a file, unless what is asked needs a directory.
        to_source_format |= not is_lsr and resize.names_file(adapter) and fits_file(given)
    if outputs.report is not None and "base" in given:
        # What a report shows, where no other number is asked for.
        given.setdefault("examples", 4 if to_source_format else 6)
    merged_base: str | None = None  # of a method of PEFT whose ΔW is known only beside it
    if to_source_format and "base" in given and lora.base.takes_base(adapter, name=opening.name):
        merged_base = given.pop("base")
    interface = DIRECTORY_OF_FILES if files else COMMAND_LINE
    if outputs.to is not None and not resize.names_file(outputs.out):
        interface = TO_SAME
    requests = parse_requests(
        given, outputs, opening, display, to_file=to_source_format, interface=interface
    )
    outputs.check(requests)
    settings = requests[0].to_json() | of_opening
    if len(requests) > 1:
        settings["ratio"] = given["ratio"]
    if merged_base is not None:
        settings["base"] = str(merged_base)
    if "workers" in given:
        settings["workers"] = given["workers"]
    # 2. A LoRA that is to come back in its own format: truncated SVD, and that is all.
    if to_source_format:
        resize.resize(files or [adapter], requests, opening, outputs, display, merged_base)
        _write_config(settings, write_config, outputs.json)
        return
    # 3. Otherwise a directory of LSR for each request.
    results = _to_directories(adapter, requests, opening, outputs, display)
    # 4. Figures for machines, and the exit code.
    _write_figures(results, outputs.json)
    _write_config(settings, write_config, outputs.json)
    distilled = any(request.measured and request.measured.distill for request in requests)
    if _warn_if_poor(results, distilled=distilled) or not all(result.met for result in results):
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
    checkpoint = opening.open(
        adapter, base=requests[0].base, trust_remote_code=requests[0].trusts_code
    )
    requests = [request.for_adapter(checkpoint.storage) for request in requests]
    plans = [request.plan for request in requests if request.plan is not None]
    directories = outputs.directories(plans)
    given = requests[0].statistics
    inputs = [adapter] if given is None else [adapter, given]
    for path in filter(None, directories):
        lora.files.check_output_directory(path, inputs, outputs.force)
    statistics = None if given is None else lora.files.read_statistics(given)
    # 2. Compress; what was solved waits in the journal until the result is written.
    out = outputs.directory
    journal = None if out is None else lora.files.Journal.beside(out)
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
        options = {name: getattr(opening, name) for name in OPENING if getattr(opening, name)}
        results = [replace(result, settings={**result.settings, **options}) for result in results]
        for result, directory in zip(results, directories, strict=False):
            _show(result, outputs.json, display, unit)
            if result.met:
                figures = outputs.json if len(directories) == 1 else None
                written = replace(outputs, out=directory, json=figures)
                _write(result, written, unit=unit, adapter=adapter, alpha=opening.alpha)
        if refusal is not None:
            raise refusal
    return results


def _compressed(
    checkpoint: Checkpoint, requests: Sequence[Request], on_step: OnStep
) -> tuple[list[Compression], BudgetError | None]:
    """Return the results up to a budget that cannot be met, and its refusal.

    What was drawn before is written all the same.
    """
    if requests[0].measured is not None:
        # Here, since NumPy comes with it.
        from lsrdecomp.lora.compress.compress_lora import compress_request

        with tables.quiet():
            return [compress_request(checkpoint, requests[0], on_step)], None
    from lsrdecomp.lora.search.searched import described

    plans = [request.plan for request in requests if request.plan is not None]
    searched = lora.search.search_adapter(
        checkpoint,
        plans,
        statistics=requests[0].statistics,
        resources=requests[0].resources(PlannedSteps(on_step, [1.0])),
    )
    results: list[Compression] = []
    for request, plan in zip(requests, plans, strict=True):
        try:
            result = searched.compress(plan)
            results.append(described(result, request, request.statistics))
        except BudgetError as refusal:
            return results, refusal
    return results, None


def _show(result: Compression, json: Path | None, display: Display, unit: str) -> None:
    """Show what each layer became, or which of them missed the tolerance."""
    table = layers_table(result.layers, result.totals, each=display.each or display.verbose)
    tables.show(json, table, wide=display.wide)
    if result.met:
        tables.show(json, "", *result.sentences(unit))
        return
    total = result.totals
    plan = result.plan
    tables.say(
        f"{total.missed} of {total.layers} layers stay above {plan.layer_rtol:.4g} in "
        f"{plan.storage}: {total.worst_layer} reaches {total.worst_error:.3g}. "
        f"Nothing was written; {_ways_to_meet_tolerance(result)}."
    )


def _ways_to_meet_tolerance(result: Compression) -> str:
    """Return the options that would meet a tolerance which layers miss."""
    # Imported here because NumPy comes with it.
    from lsrdecomp.precision import PRECISIONS, coarsest_storage, rounded_up, unit_roundoff

    plan = result.plan
    ways = f"allow --rtol {rounded_up(result.totals.worst_error)}"
    condition = max(layer.condition for layer in result.layers if not layer.met)
    finer = coarsest_storage(condition, plan.layer_rtol or 0.0)
    is_tried = plan.storage in PRECISIONS and (
        finer is None or unit_roundoff(finer) >= unit_roundoff(plan.storage)
    )
    if finer is None or is_tried:
        return ways
    rounding = condition * unit_roundoff(finer)
    return f"{ways}, or take --storage {finer}, whose rounding costs about {rounding:.1g}"


def _write(
    result: Compression, outputs: Outputs, *, unit: str, adapter: Path, alpha: float | None
) -> None:
    """Write the directory, its report and its figures: all appear, or none.

    Says what they are, and what comes next.
    """
    directory = outputs.directory
    report = outputs.report
    json = outputs.json
    # 1. All together; the report once more when the sizes of the files are known.
    line = typed_line("compress")
    texts = tables.json_text(result.to_json(), json)
    curves: Sequence[ErrorCurve] = ()
    if report is not None:
        curves = lora.search.adapter_curves(result.source)
        texts[report] = lora.compress.html_report(result, curves, unit=unit, command=line)
    with tables.files(texts) as waiting:
        if directory is not None:
            result.save(directory, force=outputs.force, record=outputs.record, bare=outputs.bare)
        if report is not None:
            page = lora.compress.html_report(result, curves, out=directory, unit=unit, command=line)
            waiting[report].write_text(page, encoding="utf-8")
    # 2. What was written.
    if directory is not None:
        tables.show(json, tables.file_sizes(result.source, directory))
        warn_of_growth(result.source, directory / lora.files.WEIGHTS)
        command = next_command(result.source, directory, alpha)
        tables.show(json, f"Wrote {directory}. {command}")
    if report is not None:
        tables.show(json, f"Wrote {report}.")
    tables.show(json, *_measured_sentences(result))
    if directory is not None:
        if line is None:  # another verb compressed
            line = f"{result.command_line(adapter, directory, program=program())} --force"
        tables.show(json, f"\nTo repeat it:\n  {line}")
    for note in result.notes:
        tables.say(f"WARNING: {note}")
    warn_if_unusable(result, directory)


def _measured_sentences(result: Compression) -> Iterator[str]:
    """Yield what was measured on a base, if anything was."""
    if result.fidelity is None:
        return
    kind = result.fidelity.kind
    subject = "It"
    if len(result.tried) > 1:
        subject = f"{_tried(result.tried)} It"
    elif not result.fidelity.distilled:
        subject = "The compressed version"
    yield f"\n{subject} {result.fidelity.sentence()}."
    if result.truncated_svd is not None:
        svd = result.truncated_svd
        yield (
            f"Quantized truncated SVD of {size_text(svd.bytes)} keeps {100 * svd.kept:.1f} % on "
            f"the same {kind}."
        )
    if result.fidelity.written is None:
        yield f"The share is an estimate for {kind} like these; of others less may be kept."
    else:
        yield (
            "The share is an estimate without texts of the LoRA's task; give some by --data for a "
            "nearer one."
        )
    if result.mismatches:
        yield "\nAnswers that differ:"
    for pair in result.mismatches:
        yield f"  {pair.question}\n    LoRA: {pair.lora}\n    compressed: {pair.variant}"


def _tried(tried: Sequence[Measurement]) -> str:
    """Return how many versions were measured, and what those that were trained kept.

    >>> from lsrdecomp.lora.measure import Measurement
    >>> untrained = Measurement(30_000, 7_400, 0.951)
    >>> print(_tried([untrained, Measurement(12_100, 2_900, 0.87, 0.943, 60)]))
    Tried 2 compressed versions, 1 of them also trained for 60 steps: 12 kB 87.0 → 94.3 %.
    """
    text = f"Tried {len(tried)} compressed versions"
    trained = [measurement for measurement in tried if measurement.steps]
    if not trained:
        return f"{text}."
    steps = max(measurement.steps for measurement in trained)
    shares = ", ".join(map(str, trained))
    return f"{text}, {len(trained)} of them also trained for {steps} steps: {shares}."


def _warn_if_poor(results: Sequence[Compression], *, distilled: bool) -> bool:
    """Warn where little is kept, or less than was asked; return whether that is a failure.

    Little is none where the size was asked for by ratio.
    """
    measured = [result for result in results if result.fidelity is not None]
    is_failure = False
    for result in measured:
        fidelity = result.fidelity
        more = "more room" if distilled else "--distill 200"
        if fidelity.is_missed:
            tables.say(
                "WARNING: no version that was measured keeps what was asked for; ask for less, or "
                f"try {more}"
            )
        elif fidelity.is_poor:
            tables.say(
                f"WARNING: this version keeps only {100 * fidelity.kept:.0f} % of the LoRA's "
                f"effect; try --keep 0.9, {more}, or {fidelity.kind} closer to its task"
            )
        elif fidelity.is_far:
            tables.say(
                f"WARNING: at {fidelity.kl:.2g} nats per token, above {fidelity.far_above:g}, most "
                "whole answers differ from the LoRA's; --keep-answers 0.9 asks for those"
            )
        is_failure |= fidelity.is_missed or (fidelity.is_poor and result.plan.ratio is None)
    return is_failure


def _write_figures(results: Sequence[Compression], json: Path | None) -> None:
    """Write figures that stand beside no directory.

    Those are for standard output, of a missed tolerance, and of several ratios.
    """
    if json is None:
        return
    if len(results) > 1:
        tables.write_json([result.to_json() for result in results], json)
    elif str(json) == "-" or not results[0].met:
        tables.write_json(results[0].to_json(), json)


def _write_config(settings: Mapping[str, Any], path: Path | None, json: Path | None) -> None:
    """Write the settings of a run to a file of their own, if one was named."""
    if path is None:
        return
    with tables.files({path: run_text(settings)}):
        pass
    tables.show(json, f"Wrote {path}: repeat it with --config {quoted(path)}.")


def _counts_tokens(statistics: Statistics | None) -> bool:
    """Return whether there were more answers than examples, as a language model gives them."""
    if statistics is None:
        return False
    metadata = statistics.metadata
    return int(metadata.get("answers") or 0) > int(metadata.get("examples") or 0)
