"""The verb that trains a compressed adapter, without labels, on the answers of the LoRA it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lsrdecomp.cli import tables
from lsrdecomp.cli.options import Force, JsonFile, Quiet
from lsrdecomp.cli.outputs import NEW_DIRECTORY
from lsrdecomp.cli.progress import follow
from lsrdecomp.cli.questions import MaxLength, Truncate
from lsrdecomp.errors import LsrError


def distil(
    adapter: Annotated[Path, typer.Argument(help="Directory that `compress` wrote.", show_default=False)],
    teacher: Annotated[Path, typer.Option(help="The LoRA it was made from, a PEFT directory.")],
    base: Annotated[str, typer.Option(help="The base model, by name or directory.")],
    data: Annotated[Path, typer.Option(help="Texts of the task, without labels; some are held out.")],
    steps: Annotated[int, typer.Option(help="Training steps at most, trials of rates among them.", min=1)] = 200,
    out: Annotated[
        Path | None, NEW_DIRECTORY, typer.Option(help="Directory to write; absent, ADAPTER is replaced.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Relative change a step; absent, tried out.", min=1e-6)] = None,
    calibrated: Annotated[Path | None, typer.Option(help="Statistics, for codes solved in the K-FAC norm.")] = None,
    held_out: Annotated[int, typer.Option(help="Examples that the promise is measured on.", min=8)] = 128,
    batch: Annotated[
        int | None, typer.Option(help="Examples a step; absent, 8 for language models, else 32.", min=1)
    ] = None,
    micro: Annotated[int | None, typer.Option(help="Of these, so many at a time.", min=1)] = None,
    max_length: MaxLength = None,
    truncate: Truncate = False,
    dtype: Annotated[str, typer.Option(help="Of the base: float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the split of the texts and their order.")] = 0,
    quiet: Quiet = False,
    json: JsonFile = None,
    force: Force = False,
) -> None:
    """Train the numbers of a compressed adapter on the LoRA's own answers; no labels are needed.

    The share kept is measured on held-out texts before and after, and the better form is kept. A run that was killed
    goes on where it was; the adapter stays as it is until the end.
    """
    try:
        from lsrdecomp.fidelity.distil import distil as run
    except ImportError as error:
        raise LsrError(f"distillation runs the model; without {error.name}: pip install 'lsrdecomp[peft]'") from error
    with tables.quiet(), follow(quiet=quiet) as show:
        done = run(
            adapter,
            base=base,
            data=data,
            teacher=teacher,
            steps=steps,
            out=out,
            rate=rate,
            calibrated=calibrated,
            held_out=held_out,
            batch=batch,
            micro=micro,
            max_length=max_length,
            truncate=truncate,
            dtype=dtype,
            device=device,
            seed=seed,
            force=force,
            on_step=show,
        )
    before, after, training = done.form.before, done.form.after, done.form.training
    verdict = "" if done.form.steps else "; no better, so the old form stays"
    tables.show(
        json,
        f"{training.steps} steps at a rate of {training.rate:g}: {_percent(before.kept)} before, "
        f"{_percent(after.kept)} after{verdict}.",
        f"Wrote {done.directory}: {done.promise.sentence()}.",
    )
    if json is not None:
        tables.write_json(done.to_json(), json)


def _percent(share: float | None) -> str:
    return "nothing" if share is None else f"{100 * share:.1f} %"
