"""What `compress` says of what a form keeps, as measured on a base."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lsrdecomp.cli import tables

if TYPE_CHECKING:
    from lsrdecomp.compression import Compression
    from lsrdecomp.fidelity import MeasuredCompression, Measurement


def words(result: Compression | MeasuredCompression) -> Iterator[str]:
    """The promise, if there is one."""
    promise, tried = getattr(result, "promise", None), getattr(result, "tried", ())
    if promise is not None:
        forms = f"{_tried(tried)} " if len(tried) > 1 else ""
        yield f"{forms}It {promise.sentence()}."
        for each in getattr(result, "differing", ()):
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
    words = f"{len(tried)} forms were measured, {len(trained)} of them also trained for {steps} steps"
    return f"{words}: {', '.join(map(str, trained))}."


def kept_too_little(results: Sequence[Any], distilled: bool) -> bool:
    """Say so where less than half is kept; whether that is a failure: not where the size was asked for by ratio."""
    little = [result for result in results if getattr(result, "promise", None) is not None and result.promise.little]
    for result in little:
        more = "more room" if distilled else "--distil 200"
        tables.say(
            f"WARNING: this form keeps only {100 * result.promise.kept:.0f} % of what the adapter does; "
            f"try --keep 0.9, {more}, or texts nearer to its task"
        )
    return any(result.plan.ratio is None for result in little)
