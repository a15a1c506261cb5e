"""What `compress` does with a base: its options, the call, and the promise in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp import compression
from lsrdecomp.cli import tables
from lsrdecomp.cli.outputs import Input
from lsrdecomp.errors import BudgetError, LsrError

if TYPE_CHECKING:
    from lsrdecomp.checkpoints import Checkpoint
    from lsrdecomp.compression import Compression, CompressionPlan
    from lsrdecomp.fidelity import MeasuredCompression, Measurement

Base = Annotated[
    str | None, Input(), typer.Option("--base", help="Measure what is kept on this base: a name or a directory.")
]
Data = Annotated[Path | None, typer.Option("--data", help="With --base: texts of the task, no labels; some held out.")]
Keep = Annotated[
    float | None, typer.Option("--keep", help="With --base: the smallest form that keeps this share, such as 0.95.")
]
DistilSteps = Annotated[
    int,
    typer.Option("--distil", help="With --base: train it on the LoRA's answers for so many steps.", min=0),
]
Passes = Annotated[
    int, typer.Option("--passes", help="With --base: 2 measures the norm anew around the compressed form.", min=1)
]
HeldOut = Annotated[int, typer.Option("--held-out", help="Examples that the promise is measured on.", min=8)]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        help="Examples read at a time, and in a step of --distil; absent, 8 for language models, else 32.",
        min=1,
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", help="Of the base: float32 or bfloat16.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the split of the texts.")]


@dataclass(frozen=True, slots=True)
class Measuring:
    """The options that speak of the base."""

    base: str | None
    data: Path | None
    keep: float | None
    distil: int
    passes: int
    held_out: int
    batch: int | None
    max_length: int | None
    truncate: bool
    dtype: str
    seed: int


def plans(
    measuring: Measuring, wanted: dict[str, Any], ratios: Sequence[float | None]
) -> Sequence[CompressionPlan | None]:
    """The plans of the other options; None where a share to keep is the only goal."""
    from lsrdecomp.compression.plan import GOALS

    goals = [value for name, value in wanted.items() if name in GOALS and value is not None]
    if measuring.base is None and (measuring.keep is not None or measuring.data is not None or measuring.distil):
        raise LsrError("--keep, --data and --distil measure the model's answers: give --base with them")
    if measuring.base is not None and measuring.data is None:
        raise LsrError("what is kept is measured on texts of the task: give --data FILE with --base")
    if measuring.base is not None and len(ratios) > 1:
        raise LsrError("with --base one ratio at a time, or --keep for the smallest form that keeps a share")
    if measuring.keep is not None and not goals and ratios == [None]:
        return [None]
    return [compression.CompressionPlan(**wanted, ratio=one) for one in ratios]


def drawer(
    checkpoint: Checkpoint,
    plans: Sequence[CompressionPlan | None],
    measuring: Measuring,
    *,
    statistics: Any,
    resources: Any,
    storage: str,
    max_rank: int | None,
    out: Path | None,
) -> Callable[[CompressionPlan | None], Compression | MeasuredCompression]:
    """What makes the result of each plan: a search shared by all, or, with a base, one that is measured."""
    if measuring.base is None:
        given = [plan for plan in plans if plan is not None]
        searched = compression.search_adapter(checkpoint, given, statistics=statistics, resources=resources)
        return lambda plan: searched.compress(given[0] if plan is None else plan)
    from lsrdecomp.fidelity.compress import compress

    workspace = None if out is None else out.absolute().parent / f".{out.name}.statistics"

    def draw(plan: CompressionPlan | None) -> Compression | MeasuredCompression:
        with tables.quiet(), _kept_for_another_try(workspace):
            measured: Compression | MeasuredCompression = compress(
                checkpoint,
                plan,
                **asdict(measuring),
                statistics=statistics,
                storage=storage,
                max_rank=max_rank,
                resources=resources,
                device=resources.device or "cpu",
                workspace=workspace,
                on_step=resources.on_step,
            )
        return measured

    return draw


@contextmanager
def _kept_for_another_try(workspace: Path | None) -> Iterator[None]:
    """A refusal says where what was measured waits."""
    try:
        yield
    except BudgetError as error:
        if workspace is None or not any(workspace.parent.glob(f"{workspace.stem}.*")):
            raise
        raise BudgetError(f"{error}. What was measured waits in {workspace.stem}.* for another try") from error


def words(result: Compression | MeasuredCompression) -> Iterator[str]:
    """The promise, if there is one."""
    promise, tried = getattr(result, "promise", None), getattr(result, "tried", ())
    if promise is not None:
        forms = f"{_tried(tried)} " if len(tried) > 1 else ""
        yield f"{forms}It {promise.sentence()}."


def _tried(tried: Sequence[Measurement]) -> str:
    """How many forms were measured, and which of them were trained, with what each kept.

    >>> from lsrdecomp.fidelity import Measurement
    >>> print(_tried([Measurement(30_000, 7_400, 0.951), Measurement(12_100, 2_900, 0.87, 0.943, 60)]))
    2 forms were measured, 1 of them also trained for 60 steps: 12 kB 87.0 → 94.3 %.
    """
    trained = [one for one in tried if one.steps]
    if not trained:
        return f"{len(tried)} forms were measured."
    steps = max(one.steps for one in trained)
    words = f"{len(tried)} forms were measured, {len(trained)} of them also trained for {steps} steps"
    return f"{words}: {', '.join(map(str, trained))}."


def kept_too_little(results: Sequence[Any], measuring: Measuring) -> bool:
    """Say so where less than half is kept; whether that is a failure: not where the size was asked for by ratio."""
    little = [result for result in results if getattr(result, "promise", None) is not None and result.promise.little]
    for result in little:
        more = "more room" if measuring.distil else "--distil 200"
        tables.say(
            f"WARNING: this form keeps only {100 * result.promise.kept:.0f} % of what the adapter does; "
            f"try --keep 0.9, {more}, or texts nearer to its task"
        )
    return any(result.plan.ratio is None for result in little)
