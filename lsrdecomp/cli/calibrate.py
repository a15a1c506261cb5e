"""The verb that measures what a network's layers do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lsrdecomp.cli import tables
from lsrdecomp.cli.outputs import PLACE, Input
from lsrdecomp.errors import BudgetError, LsrError


def calibrate(
    base: Annotated[
        str, Input, typer.Argument(help="The base model: a name or a directory, as transformers takes it.")
    ],
    adapter: Annotated[Path, typer.Option(help="PEFT adapter whose layers are measured, active while measuring.")],
    out: Annotated[Path, PLACE, typer.Option(help="Directory for the statistics.")],
    text: Annotated[Path | None, typer.Option(help="Text file: a line an example, a tab between pairs.")] = None,
    task: Annotated[Path | None, typer.Option(help="GLUE or SuperGLUE task directory, instead of --text.")] = None,
    samples: Annotated[int, typer.Option(help="Examples to use; about 500 are enough.")] = 512,
    batch: Annotated[int, typer.Option(help="Examples at a time.")] = 16,
    max_length: Annotated[int, typer.Option(help="Tokens of an example.")] = 128,
    max_full: Annotated[int, typer.Option(help="Layers up to this size keep whole covariances.")] = 1024,
    rank: Annotated[int, typer.Option(help="Eigenpairs kept of larger ones.")] = 128,
    seed: Annotated[int, typer.Option(help="Of the order of the texts and of the drawn answers.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
) -> None:
    """Measure input and gradient covariances of the adapted layers, for `compress --calibrated`.

    No labels are needed: answers are drawn from the model itself. One pass forward and one back per batch; started
    again after a kill, it goes on where it was. The statistics serve every adapter of that base with these layers.
    """
    if (text is None) == (task is None):
        raise BudgetError("calibration needs texts: give --text FILE or --task DIR, one of them")
    try:
        from lsrdecomp.calibration import base_model as bases
        from lsrdecomp.calibration.calibrate import calibrate as run
        from lsrdecomp.training.tasks import find_task
    except ImportError as error:
        raise LsrError(f"calibration runs the model; without {error.name}: pip install 'lsrdecomp[peft]'") from error
    if text is not None:
        texts = bases.read_lines(text)
    else:
        assert task is not None
        texts = bases.task_texts(find_task(task).read(task, "train"))
    found = bases.load_base(base, adapter, device=device)
    rounds = bases.batches(found, texts, size=batch, max_length=max_length, seed=seed)
    with tables.meter(samples, "examples") as show:
        result = run(
            found.model,
            rounds,
            modules=found.modules,
            out=out,
            seed=seed,
            samples=samples,
            head=found.head,
            base=base,
            max_full=max_full,
            rank=rank,
            on_batch=lambda progress: show(progress.examples),
        )
    typer.echo(f"Wrote {out}: statistics of {len(found.modules)} layers from {result.examples:,} examples.")
