"""The verb that measures what a network's layers do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp.cli import tables
from lsrdecomp.cli.options import Quiet, memory_size
from lsrdecomp.cli.outputs import PLACE, Input
from lsrdecomp.cli.progress_bars import follow
from lsrdecomp.cli.questions import SETTINGS, Questions
from lsrdecomp.cli.setting_options import option_groups, options_of
from lsrdecomp.errors import needs
from lsrdecomp.lora.search.measured_settings import EvaluatorSettings

if TYPE_CHECKING:
    from lsrdecomp.lora.base.base_model import Base
    from lsrdecomp.lora.files.statistics import Statistics


@options_of(EvaluatorSettings, only=SETTINGS)
@option_groups
def calibrate(
    base: Annotated[
        str,
        Input,
        typer.Argument(help="The base model: a name, a directory, a GGUF file, or smollm2."),
    ],
    *,
    adapter: Annotated[
        Path, typer.Option(help="PEFT adapter whose layers are measured; it is active meanwhile.")
    ],
    out: Annotated[Path, PLACE, typer.Option(help="Directory for the statistics.")],
    questions: Questions,
    samples: Annotated[int, typer.Option(help="Examples to use; about 500 are enough.")] = 512,
    batch: Annotated[int, typer.Option(help="Examples per batch.")] = 16,
    max_full: Annotated[
        int,
        typer.Option(
            help="Widest layers whose covariances are added up whole, not by random columns."
        ),
    ] = 1024,
    rank: Annotated[
        int, typer.Option(help="Leading eigenpairs of each covariance that are written.")
    ] = 128,
    max_memory: Annotated[
        int | None,
        typer.Option(
            parser=memory_size,
            metavar="SIZE",
            help="Memory for covariances, such as 512MB; layers beyond it take further passes over "
            "the examples.",
        ),
    ] = None,
    checkpointing: Annotated[
        bool,
        typer.Option(
            help="Recompute activations in the backward pass: less memory, a third more time."
        ),
    ] = True,
    seed: Annotated[
        int, typer.Option(help="Seed of the order of the texts and of the sampled answers.")
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Measure the layers of a base on texts, for compress --statistics.

    Writes the covariances of their inputs and gradients. No labels are needed: answers are sampled
    from the model itself, which also writes the texts if there are none. Takes one forward and one
    backward pass per batch; started again after a kill, it resumes. The statistics serve every
    adapter of this base with the same layers.

    Memory beside the base: the covariances of all layers (--max-memory), and the activations of
    one batch (--batch).
    """
    settings = EvaluatorSettings(**options)
    questions.check(settings)
    from lsrdecomp.lora.base.base_files import check_reachable  # with NumPy

    check_reachable(base)
    # What is imported reads how much to say when it is imported.
    with tables.quiet(), needs("calibration", "peft"):
        from lsrdecomp.lora.base.calibrate import calibrate as run
        from lsrdecomp.lora.base.dataset import PromptExample
        from lsrdecomp.lora.base.open_bases import load_base
        from lsrdecomp.lora.base.text_profile import TextProfile
        from lsrdecomp.lora.base.texts import kind_of
        from lsrdecomp.lora.files import Journal
    with tables.quiet():
        base_model = load_base(
            base,
            adapter,
            device=device,
            dtype=settings.dtype,
            trust_remote_code=settings.trust_remote_code,
        )
    # Texts that the model writes wait in a journal of their own until the statistics are written.
    texts_journal = Journal.beside(out.with_name(f"{out.name}.texts"))
    with texts_journal, follow(quiet=quiet) as show:
        examples = questions.read(base_model, seed=seed, journal=texts_journal, step=show)
        rounds = questions.batches(base_model, examples, settings, size=batch, seed=seed)
        texts = [each for each in examples if isinstance(each, tuple | PromptExample)]
        statistics = run(
            base_model,
            rounds,
            out=out,
            seed=seed,
            samples=samples,
            max_full=max_full,
            rank=rank,
            checkpointing=checkpointing,
            max_memory=max_memory,
            text_profile=TextProfile.of(texts) if texts else None,
            on_step=show,
        )
    _report(statistics, base_model, out, kind_of(examples))
    kind = questions.kind(base_model)
    if kind is not None:
        typer.echo(f"The examples are {kind}.")


def _report(statistics: Statistics, base: Base, out: Path, kind: str) -> None:
    """Say what was written, what is doubtful of it, and what the adapter does to these texts.

    ``kind`` is what the examples are called.
    """
    from lsrdecomp.lora.base.heads import TOKEN_HEADS

    about = statistics.metadata
    n_layers = len(base.modules)
    typer.echo(f"Wrote {out}: statistics of {n_layers} layers from {about['examples']:,} examples.")
    for doubt in statistics.doubts:
        tables.say(f"WARNING: {doubt}")
    effect = about["settings"]["effect"]
    if effect is not None:
        unit = "token" if base.head in TOKEN_HEADS else "example"
        typer.echo(f"The adapter's own effect on these {kind}: KL {effect:.4g} nats per {unit}.")
