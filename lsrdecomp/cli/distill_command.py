"""The verb that trains a compressed adapter, without labels, on its LoRA's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lsrdecomp.cli import tables
from lsrdecomp.cli.options import Force, JsonFile, Quiet
from lsrdecomp.cli.outputs import NEW_DIRECTORY
from lsrdecomp.cli.progress_bars import follow
from lsrdecomp.cli.setting_options import options_of
from lsrdecomp.lora.compress.distill_settings import DistillSettings


@options_of(DistillSettings)
def distill(
    adapter: Annotated[
        Path, typer.Argument(help="Directory that `compress` wrote.", show_default=False)
    ],
    *,
    teacher: Annotated[Path, typer.Option(help="PEFT directory of the LoRA it was made from.")],
    base: Annotated[str, typer.Option(help="Base model: a name or a directory.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Texts of the task, without labels; some are held out [default: the model writes "
            "its own]."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        NEW_DIRECTORY,
        typer.Option(help="Directory to write [default: ADAPTER is replaced]."),
    ] = None,
    quiet: Quiet = False,
    json: JsonFile = None,
    force: Force = False,
    **options: Any,
) -> None:
    """Train a compressed adapter on its LoRA's answers, no labels.

    The share kept of the LoRA's effect is measured on held-out texts before and after, and the
    better version is written. A killed run resumes; the adapter stays as it is until the end.
    """
    from lsrdecomp.lora.compress.distill_lora import (
        distill as run,  # here, since NumPy comes with it
    )

    with tables.quiet(), follow(quiet=quiet) as show:
        done = run(
            adapter,
            base=base,
            data=data,
            teacher=teacher,
            out=out,
            force=force,
            on_step=show,
            settings=DistillSettings(**options),
        )
    variant = done.variant
    training = variant.training
    verdict = "" if variant.steps else "; no better, so nothing was changed"
    tables.show(
        json,
        f"Trained for {training.steps} steps at a learning rate of {training.rate:g}: kept "
        f"{_percent(variant.before.kept)} before, {_percent(variant.after.kept)} after{verdict}.",
        f"Wrote {done.directory}: {done.fidelity.sentence()}.",
    )
    tables.write_json(done.to_json(), json)


def _percent(share: float | None) -> str:
    """Return a share in percent; it is none where nothing could be kept."""
    return "nothing" if share is None else f"{100 * share:.1f} %"
