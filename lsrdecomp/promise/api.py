"""`lsrdecomp.compress` and `lsrdecomp.distil`: with a base they run the model, and only then is torch loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from lsrdecomp.compression.compress import Compression
from lsrdecomp.compression.compress import compress as compress_alone
from lsrdecomp.errors import BudgetError, LsrError

if TYPE_CHECKING:
    from pathlib import Path

    from lsrdecomp.checkpoints import Checkpoint
    from lsrdecomp.compression.plan import CompressionPlan
    from lsrdecomp.promise.distil import Distilled
    from lsrdecomp.promise.front import Promised
    from lsrdecomp.promise.texts import Texts


@overload
def compress(checkpoint: Checkpoint, plan: CompressionPlan, **settings: Any) -> Compression: ...


@overload
def compress(
    checkpoint: Checkpoint,
    plan: CompressionPlan | None = None,
    *,
    base: str | Path,
    data: str | Path | Texts,
    keep: float | None = None,
    **settings: Any,
) -> Promised: ...


def compress(
    checkpoint: Checkpoint,
    plan: CompressionPlan | None = None,
    *,
    base: str | Path | None = None,
    data: str | Path | Texts | None = None,
    keep: float | None = None,
    **settings: Any,
) -> Compression | Promised:
    """Turn a LoRA into an LSR adapter: under a plan, or, with a base and texts, to what it keeps as measured.

    Parameters
    ----------
    checkpoint : Checkpoint
        As returned by `open_checkpoint`.
    plan : CompressionPlan, optional
        A size or an error.
    base : str or path, optional
        The base model, by name or directory. What is kept is then measured, and stands in ``result.promise``.
    data : path or sequence of texts, optional
        With ``base``: texts of the task, without labels.
    keep : float, optional
        With ``base`` and in place of a plan: the least share of what the adapter does, such as 0.95; the smallest form
        that was found to keep it is the result.
    **settings
        Of `lsrdecomp.compression.compress.compress`, or with a base of `lsrdecomp.promise.front.compress_measured`
        (``distil=200``, ``statistics``, ``storage``, ``dtype``, ``device``, ``seed``, …).

    Returns
    -------
    Compression, or Promised with a base
        Nothing is written before its ``save``.

    Raises
    ------
    BudgetError
        If the goal cannot be met, or no goal is given.
    CheckpointError, LsrError
        If files or base cannot be used; if torch, transformers or peft are missing and a base is given.

    Examples
    --------
    ``lsr.compress(lora, base="smollm2", data="prompts.jsonl", keep=0.95).save("adapter-lsr/")``
    """
    if base is None:
        if plan is None or keep is not None or data is not None:
            raise BudgetError("a share to keep is measured: give base= and data= with it, or a plan instead")
        return compress_alone(checkpoint, plan, **settings)
    if data is None:
        raise BudgetError("what is kept is measured on texts of the task: give data=")
    try:
        from lsrdecomp.promise.front import compress_measured
    except ImportError as error:
        raise LsrError(f"a base needs {error.name}: pip install 'lsrdecomp[peft]'") from error
    return compress_measured(checkpoint, plan, base=base, data=data, keep=keep, **settings)


def distil(directory: str | Path, **settings: Any) -> Distilled:
    """Train a compressed adapter, without labels, on the answers of the LoRA it was made from.

    Parameters are those of `lsrdecomp.promise.distil`: ``base``, ``data`` and ``teacher``, and ``steps``, ``out``, ….

    Raises
    ------
    LsrError
        If torch, transformers or peft are missing; and as `lsrdecomp.promise.distil`.
    """
    try:
        from lsrdecomp.promise.distil import distil as run
    except ImportError as error:
        raise LsrError(f"distillation needs {error.name}: pip install 'lsrdecomp[peft]'") from error
    return run(directory, **settings)
