"""The verb that measures a written adapter anew: its numbers and, on a base, its answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp import lora
from lsrdecomp.cli import tables
from lsrdecomp.cli.layer_tables import verification_table
from lsrdecomp.cli.options import ForceFile, JsonFile
from lsrdecomp.cli.outputs import Input
from lsrdecomp.cli.progress_bars import follow
from lsrdecomp.cli.questions import SETTINGS, Questions
from lsrdecomp.cli.recommendations import quoted
from lsrdecomp.cli.requests import Display, Opening
from lsrdecomp.cli.setting_options import option_groups, options_of
from lsrdecomp.errors import CheckpointError, LsrError, needs
from lsrdecomp.lora.files.file_checks import read_text_lines
from lsrdecomp.lora.files.progress import Counter, OnStep
from lsrdecomp.lora.search.measured_settings import EvaluatorSettings

if TYPE_CHECKING:
    from torch import Tensor

    from lsrdecomp.lora.base.base_model import Base
    from lsrdecomp.lora.base.behaviour import Behaviour
    from lsrdecomp.lora.files import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Options of a running server that is asked instead of measuring files."""

    server: Annotated[
        str | None,
        typer.Option(
            "--server", help="URL of a running server to ask: llama.cpp or OpenAI's protocol."
        ),
    ] = None
    served_as: Annotated[
        str | None,
        typer.Option("--served-as", help="With --server: the adapter's name or number there."),
    ] = None


@options_of(EvaluatorSettings, only=SETTINGS)
@option_groups
def verify(
    source: Annotated[
        Path, typer.Argument(help="The adapter that was compressed.", show_default=False)
    ],
    written: Annotated[
        Path | None,
        typer.Argument(help="What was written from it; not with --server.", show_default=False),
    ] = None,
    *,
    base: Annotated[
        str | None,
        Input,
        typer.Option(
            help="Also compare outputs on this base model; alone, for a source of a method of "
            "PEFT whose ΔW is not in its file."
        ),
    ] = None,
    questions: Questions,
    batch: Annotated[int, typer.Option(help="Examples per batch.", min=1)] = 16,
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    accept: Annotated[
        bool,
        typer.Option(
            "--accept",
            help="Record the files beside the weights as they are now, after an edit "
            "that was meant.",
        ),
    ] = False,
    asked: Asked,
    opening: Opening,
    display: Display,
    json: JsonFile = None,
    force: ForceFile = False,
    **options: Any,
) -> None:
    """Measure a written adapter against its source.

    Its errors are compared with those that were recorded. Exit code 1 if they differ, 3 if none
    were recorded or a record is missing. With --base the outputs of the two adapters are compared
    too, on unlabelled texts; without --data and --text the model writes its own.

    verify ADAPTER --server URL asks a running server whether the adapter is active, and with --base
    at which scale. Exit code 1 if it is not.
    """
    del force  # `outputs.checked` reads it
    settings = EvaluatorSettings(**options)
    if asked.server is not None:
        if written is not None:
            raise LsrError("--server asks about one adapter: name the one that is served alone")
        if accept:
            raise LsrError("--accept records what was measured: leave out --server")
        _ask(source, asked.server, asked.served_as, base, questions.text, settings.dtype, json)
        return
    if written is None:
        raise LsrError("name what was written from it too, or a server that has it by --server URL")
    is_for_source = False
    if base is not None and not questions.sources:
        is_for_source = lora.base.takes_base(source, name=opening.name)
    _check_base(base, questions, settings, is_for_source=is_for_source)
    original = opening.open(
        source, carry=True, base=base, trust_remote_code=settings.trust_remote_code
    )
    compressed = _opened(written, opening)
    behaviour = None
    kind = None
    with follow(quiet=display.quiet) as step:
        result = lora.measure.verify(original, compressed, on_step=step)
        # A base that is needed to read the source is asked for its outputs only if texts are given.
        if base is not None and (questions.sources or not is_for_source):
            pair = _model_pair(base, source, written, device, settings)
            kind = questions.kind(pair[0])
            behaviour = _behaviour(pair, questions, settings, batch, step)
    _show(result, behaviour, display, json)
    if kind is not None:
        tables.show(json, f"Outputs were compared on {kind}; {lora.measure.bias_text(kind)}.")
    tables.write_json(_figures(result, behaviour, base, kind), json)
    for complaint in _complaints(result, source, written):
        tables.say(complaint)
    if accept:
        lora.measure.accept(compressed, result)
        tables.show(json, f"Recorded {written} as it is now.")
    else:
        _say_way_out(result, source, written)
        _exit(result)


def _ask(
    adapter: Path,
    url: str,
    name: str | None,
    base: str | None,
    prompts: Path | None,
    dtype: str,
    json: Path | None,
) -> None:
    """Show `lora.measure.ask_server` in words; exit code 1 if the adapter does not act as asked."""
    lines = {} if prompts is None else {"prompts": read_text_lines(prompts)}
    with nullcontext() if base is None else tables.quiet():  # what it quiets takes seconds to load
        reply = lora.measure.ask_server(url, adapter, name=name, base=base, dtype=dtype, **lines)
    tables.show(json, *_reply_sentences(reply, url))
    tables.write_json(reply.to_json(), json)
    if not reply.acts or reply.scaled_right is False:
        raise typer.Exit(1)


def _reply_sentences(reply: lora.measure.ServerMeasurement, url: str) -> Iterator[str]:
    """Yield whether the adapter acts, and at which scale."""
    verdict = "acts" if reply.acts else "does NOT act"
    yield (
        f"{reply.server} at {url}: {reply.adapter} {verdict}. It changes log-probabilities by "
        f"{reply.effect:.3g} nats on {reply.prompts} prompts; two equal requests differ by "
        f"{reply.noise:.3g}."
    )
    if reply.set_scale is not None:
        off = "; it was asked for at 1" if reply.set_scale == 0.0 else ""
        yield f"The server's own setting is scale {reply.set_scale:g}{off}."
    if reply.fitted_scale is not None:
        wrong = ""
        if not reply.scaled_right:
            wrong = f", NOT the {reply.requested_scale:g} that was asked for"
        yield (
            f"PEFT is nearest at scale {reply.fitted_scale:.3g}{wrong}: {reply.fit:.3g} nats from "
            f"the server there, {reply.misfit:.3g} without the adapter."
        )


def _check_base(
    base: str | None, questions: Questions, settings: EvaluatorSettings, *, is_for_source: bool
) -> None:
    """Raise `LsrError` for questions without a base, or several sources; find the base.

    ``is_for_source`` says that a base alone has a use: ΔW of the source is known only beside it.
    """
    if base is None and questions.sources:
        raise LsrError(
            "answers are compared on a base: give --base with --data FILE.jsonl or --text FILE"
        )
    if base is not None:
        if not is_for_source:
            questions.check(settings)
        from lsrdecomp.lora.base.base_files import check_reachable  # with NumPy

        check_reachable(base)


def _opened(written: Path, opening: Opening) -> Checkpoint:
    """Open what was written; in the source's own format it may need the source's alpha too."""
    try:
        return replace(opening, name=None, alpha=None).open(written, carry=True)
    except CheckpointError:
        if opening.alpha is None:
            raise
        return replace(opening, name=None).open(written, carry=True)


def _model_pair(
    base: str, source: Path, written: Path, device: str, settings: EvaluatorSettings
) -> tuple[Base, Base]:
    """Open the base with each of the two adapters."""
    with tables.quiet(), needs("a base", "peft"):
        from lsrdecomp.lora.base import open_bases
    with tables.quiet():
        return open_bases.load_pair(
            base,
            source,
            written,
            device=device,
            dtype=settings.dtype,
            trust_remote_code=settings.trust_remote_code,
        )


def _behaviour(
    pair: tuple[Base, Base],
    questions: Questions,
    settings: EvaluatorSettings,
    size: int,
    step: OnStep,
) -> Behaviour:
    """Compare the answers of the second model with those of the first."""
    from lsrdecomp.lora.base.divergence import Reference

    source, written = pair
    examples = questions.read(source, seed=0, step=step)
    batches = questions.batches(source, examples, settings, size=size, seed=0)
    answered = Counter(step, "comparing answers", len(examples), "examples")

    def counted() -> Iterator[Mapping[str, Tensor]]:
        for batch in batches:
            yield batch
            answered.add(len(batch["input_ids"]))

    return Reference(source, counted()).compare(written)


def _show(
    result: lora.measure.Verification,
    behaviour: Behaviour | None,
    display: Display,
    json: Path | None,
) -> None:
    """Print the errors of the layers, and how the answers differ if they were compared."""
    tables.show(json, verification_table(result, each=display.each), wide=display.wide)
    tables.show(json, f"Weight error over all layers: {result.relative_error:.4g}.")
    if behaviour is not None:
        tables.show(json, *_sentences(behaviour))


def _figures(
    result: lora.measure.Verification,
    behaviour: Behaviour | None,
    base: str | None,
    kind: str | None,
) -> dict[str, Any]:
    """Return what was found for a JSON file."""
    layers = [
        {
            "name": layer.name,
            "relative_error": layer.relative_error,
            "recorded": layer.recorded_error,
        }
        for layer in result.layers
    ]
    figures: dict[str, Any] = {
        "passed": result.passed,
        "relative_error": result.relative_error,
        "source_matches": result.source_matches,
        "changed_files": result.changed_files,
        "changed_fields": result.changed_fields,
        "foreign_files": result.foreign_files,
        "missing_records": result.missing_records,
        "layers": layers,
    }
    if behaviour is not None:
        figures["answers"] = {**asdict(behaviour), "kept": behaviour.kept, "base": base}
        if kind is not None:
            figures["answers"]["written"] = kind
    return figures


def _sentences(behaviour: Behaviour) -> Iterator[str]:
    """Yield how the answers differ, in words."""
    yield (
        f"KL to the source {behaviour.kl:.4g} nats per {behaviour.unit}, on "
        f"{behaviour.answers:,} {behaviour.unit}s; {behaviour.effect:.4g} without an adapter."
    )
    if behaviour.kept is not None:
        error = ""
        if behaviour.standard_error is not None:
            error = f" ± {100 * behaviour.standard_error:.1f}"
        yield f"Keeps {100 * behaviour.kept:.1f}{error} % of the source's effect."
    if behaviour.agreement is not None:
        exact = behaviour.exact_match_text()
        yield f"The top prediction agrees on {100 * behaviour.agreement:.1f} %{exact}."


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
