"""The verb that measures a written adapter anew: its numbers and, on a base, its answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp import checkpoints, compression
from lsrdecomp.checkpoints.progress import Counter, OnStep
from lsrdecomp.cli import served, tables
from lsrdecomp.cli.layer_tables import verification_table
from lsrdecomp.cli.options import Alpha, Each, ForceFile, JsonFile, MaxMemory, Name, Quiet, Wide
from lsrdecomp.cli.outputs import Input
from lsrdecomp.cli.progress import follow
from lsrdecomp.cli.questions import SETTINGS, AnswerTokens, DataFile, Questions
from lsrdecomp.cli.settings import options_of
from lsrdecomp.compression.measured_settings import EvaluatorSettings
from lsrdecomp.errors import CheckpointError, LsrError, needs

if TYPE_CHECKING:
    from torch import Tensor

    from lsrdecomp.calibration.behaviour import Behaviour
    from lsrdecomp.checkpoints import Checkpoint


@options_of(EvaluatorSettings, only=SETTINGS)
def verify(
    source: Annotated[
        Path, typer.Argument(help="The adapter that was compressed.", show_default=False)
    ],
    written: Annotated[
        Path | None,
        typer.Argument(
            help="What was written from it; not with --for or --server.", show_default=False
        ),
    ] = None,
    *,
    base: Annotated[
        str | None,
        Input,
        typer.Option(
            help="Also compare the answers of this base; with --for, what it is served on."
        ),
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            "--for", help="What would apply in peft, llama.cpp, vllm, sglang, diffusers or kohya."
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--server", help="URL of a running llama.cpp or OpenAI server: ask it instead."
        ),
    ] = None,
    served_as: Annotated[
        str | None,
        typer.Option("--served-as", help="With --server: the adapter's name or number there."),
    ] = None,
    data: DataFile = None,
    answers: AnswerTokens = "completion",
    text: Annotated[
        Path | None, typer.Option(help="What it answers: a line an example, a tab between pairs.")
    ] = None,
    task: Annotated[
        Path | None, typer.Option(help="Dev split of a GLUE or SuperGLUE directory, not --text.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Examples at a time.", min=1)] = 16,
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    name: Name = None,
    alpha: Alpha = None,
    wide: Wide = False,
    each: Each = False,
    quiet: Quiet = False,
    json: JsonFile = None,
    force: ForceFile = False,
    max_memory: MaxMemory = None,
    **options: Any,
) -> None:
    """Measure a written adapter against its source.

    Exit code 1 if it is not what was recorded, 3 if nothing was. With --base and texts, also how
    their answers differ; no labels are needed.

    verify ADAPTER --for vllm --base BASE says which layers that server would apply, by its rules,
    without running it; verify ADAPTER --server URL asks a running one whether the adapter acts, and
    with --base at which scale. Exit code 1 if it would not, or does not.
    """
    settings = EvaluatorSettings(**options)
    # 1. What a server makes of an adapter, by its rules or by asking it.
    if rules is not None or server is not None:
        if written is not None:
            raise LsrError(
                "--for and --server look at one adapter: name the one that is served, and no other"
            )
        if rules is not None and server is not None:
            raise LsrError(
                "--for goes by a server's rules and --server asks one that runs: one at a time"
            )
        if rules is not None:
            served.by_rules(source, rules, base, json)
        else:
            served.by_asking(source, str(server), served_as, base, text, settings.dtype, json)
        return
    if written is None:
        raise LsrError(
            "name what was written from it too; or ask what a server makes of it, by --for or --server"
        )
    questions = Questions(text, task, data, "dev", answers, settings.max_length, settings.truncate)
    if (base is None) != (questions.sources == 0):
        raise LsrError(
            "answers are compared on a base: give --base with --data FILE.jsonl, --text FILE or --task DIR"
        )
    if base is not None:
        questions.check()
    # 2. The numbers of what was written, and on a base its answers, against the source's.
    original = checkpoints.open_checkpoint(source, name=name, alpha=alpha, max_memory=max_memory)
    behaviour = None
    with follow(quiet=quiet) as step:
        result = compression.verify(original, _opened(written, alpha, max_memory), on_step=step)
        if base is not None:
            behaviour = _behaviour(
                base, source, written, questions, batch, device, settings.dtype, step
            )
    # 3. What came of it, for people, for machines, and as an exit code.
    tables.show(json, verification_table(result, each=each), wide=wide)
    tables.show(json, f"Relative error over all layers: {result.relative_error:.4g}.")
    if behaviour is not None:
        tables.show(json, *_sentences(behaviour))
    for complaint in _complaints(result, source):
        tables.say(complaint)
    tables.write_json(_figures(result, behaviour, base), json)
    if not result.passed:
        raise typer.Exit(1)
    if not result.recorded:
        tables.say(
            f"{written} has no record of what was written (in its header, SHA256SUMS or compression.json): the errors "
            "above were measured, but nothing says that they are what they should be"
        )
        raise typer.Exit(3)


def _opened(written: Path, alpha: float | None, max_memory: int | None) -> Checkpoint:
    """What was written; in the source's own format it may need the source's alpha too."""
    try:
        return checkpoints.open_checkpoint(written, max_memory=max_memory)
    except CheckpointError:
        if alpha is None:
            raise
        return checkpoints.open_checkpoint(written, alpha=alpha, max_memory=max_memory)


def _behaviour(
    base: str,
    source: Path,
    written: Path,
    questions: Questions,
    size: int,
    device: str,
    dtype: str,
    step: OnStep,
) -> Behaviour:
    with needs("a base", "peft"):
        from lsrdecomp.calibration import base_model
        from lsrdecomp.calibration.divergence import Reference
    with tables.quiet():
        first, second = base_model.load_pair(base, source, written, device=device, dtype=dtype)
    rounds, count = questions.batches(first, size=size, seed=0)
    answered = Counter(step, "comparing answers", count, "examples")

    def counted() -> Iterator[Mapping[str, Tensor]]:
        for batch in rounds:
            yield batch
            answered.add(len(batch["input_ids"]))

    return Reference(first, counted()).compare(second)


def _figures(
    result: compression.Verification, behaviour: Behaviour | None, base: str | None
) -> dict[str, Any]:
    """The same for a JSON file."""
    layers = [
        {"name": c.name, "relative_error": c.relative_error, "recorded": c.recorded_error}
        for c in result.layers
    ]
    facts: dict[str, Any] = {"passed": result.passed, "relative_error": result.relative_error}
    facts |= {"source_matches": result.source_matches, "layers": layers}
    if behaviour is not None:
        facts["answers"] = {**asdict(behaviour), "kept": behaviour.kept, "base": base}
    return facts


def _sentences(answers: Behaviour) -> Iterator[str]:
    """The answers in words."""
    what = f"{answers.answers:,} {answers.unit}s"
    yield (
        f"Divergence of the answers on {what}: {answers.kl:.4g} nats per {answers.unit}; "
        f"without ΔW it would be {answers.effect:.4g}."
    )
    if answers.kept is not None:
        error = "" if answers.standard_error is None else f" ± {100 * answers.standard_error:.1f}"
        yield f"It keeps {100 * answers.kept:.1f}{error} % of what the adapter does."
    if answers.agreement is not None:
        whole = (
            ""
            if answers.exact_match_rate is None
            else f", all along in {answers.exact_match_rate:.2%} of the examples"
        )
        yield f"The likeliest answer is the same for {answers.agreement:.2%}{whole}."


def _complaints(result: compression.Verification, source: Path) -> Iterator[str]:
    if result.changed_files:
        yield f"{', '.join(result.changed_files)} changed since it was written: its SHA-256 is not the recorded one"
    differing = [layer.name for layer in result.layers if not layer.agrees]
    if differing:
        yield f"{len(differing)} layers are not what the writer measured, the first {differing[0]}"
    elif not result.agrees:
        said = "unknown" if result.recorded_error is None else f"{result.recorded_error:.12g}"
        yield f"the error over all layers is {result.relative_error:.12g}, but {said} when it was written"
    if result.changed_tensors:
        count, first = len(result.changed_tensors), result.changed_tensors[0]
        yield f"{count} other tensors differ from the source's, the first {first}"
    if result.source_matches is False:
        yield f"{source} is not the file this was made from: its SHA-256 is not the recorded one"
