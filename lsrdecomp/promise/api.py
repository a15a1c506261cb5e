"""`lsrdecomp.compress` and `lsrdecomp.distil`: with a base they run the model, and only then is torch loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from lsrdecomp.checkpoints import Checkpoint, open_checkpoint
from lsrdecomp.checkpoints.statistics import read_statistics
from lsrdecomp.compression.compress import Compression
from lsrdecomp.compression.compress import compress as compress_alone
from lsrdecomp.compression.plan import GOALS, CompressionPlan
from lsrdecomp.errors import BudgetError, LsrError, unknown

if TYPE_CHECKING:
    from lsrdecomp.checkpoints.statistics import Statistics
    from lsrdecomp.compression.progress import OnStep
    from lsrdecomp.promise.distil import Distilled
    from lsrdecomp.promise.front import Promised
    from lsrdecomp.promise.texts import Texts

FORM = ("storage", "max_rank", "inner_shape")
"""What goes with a goal."""


@overload
def compress(
    checkpoint: Checkpoint | str | Path,
    plan: CompressionPlan | None = None,
    *,
    base: None = None,
    data: None = None,
    keep: None = None,
    ratio: float | None = None,
    rtol: float | None = None,
    parameters: float | None = None,
    bytes: int | None = None,
    kl: float | None = None,
    separation_rank: int | None = None,
    **settings: Any,
) -> Compression: ...


@overload
def compress(
    checkpoint: Checkpoint | str | Path,
    plan: CompressionPlan | None = None,
    *,
    base: str | Path,
    data: str | Path | Texts,
    keep: float | None = None,
    ratio: float | None = None,
    rtol: float | None = None,
    parameters: float | None = None,
    bytes: int | None = None,
    kl: float | None = None,
    separation_rank: int | None = None,
    **settings: Any,
) -> Promised: ...


def compress(
    checkpoint: Checkpoint | str | Path,
    plan: CompressionPlan | None = None,
    *,
    base: str | Path | None = None,
    data: str | Path | Texts | None = None,
    keep: float | None = None,
    ratio: float | None = None,
    rtol: float | None = None,
    parameters: float | None = None,
    bytes: int | None = None,
    kl: float | None = None,
    separation_rank: int | None = None,
    statistics: Statistics | str | Path | None = None,
    **settings: Any,
) -> Compression | Promised:
    """Turn a LoRA into an LSR adapter: to a size or an error, or, with a base and texts, to what it keeps as measured.

    Parameters
    ----------
    checkpoint : str, path or Checkpoint
        A directory or file that `open_checkpoint` reads, or what it returned.
    plan : CompressionPlan, optional
        A size or an error, to be used more than once; otherwise one of the goals below.
    base : str or path, optional
        The base model, by name or directory. What is kept is then measured, and stands in ``result.promise``.
    data : path or sequence of texts, optional
        With ``base``: texts of the task, without labels.
    keep : float, optional
        With ``base`` and in place of a size: the least share of what the adapter does, such as 0.95; the smallest form
        that was found to keep it is the result.
    ratio, rtol, parameters, bytes, kl, separation_rank : number, optional
        One goal, as `CompressionPlan` takes it; with it ``storage`` (absent, the source's type), ``max_rank`` and
        ``inner_shape``.
    statistics : Statistics, str or path, optional
        So that errors count what the network does; a directory that `lsrdecomp calibrate` wrote, or what
        `read_statistics` returned.
    **settings
        Of `lsrdecomp.compression.compress` (``search``, ``workers``, …), or with a base of
        `lsrdecomp.promise.front.compress_measured` (``distil=200``, ``dtype``, ``device``, …).

    Returns
    -------
    Compression, or Promised with a base
        Nothing is written before its ``save``.

    Raises
    ------
    BudgetError
        If the goal cannot be met, if none is given, or more than one.
    CheckpointError, LsrError
        If files or base cannot be used; for a name that is no goal or setting, with the nearest that is; if torch,
        transformers or peft are missing and a base is given.

    Examples
    --------
    >>> import lsrdecomp as lsr
    >>> from importlib.resources import files
    >>> lsr.compress(files("lsrdecomp.cli") / "demo_adapter", ratio=10)
    Compression of demo_adapter, ratio = 10
       12 layers, 3 of them left out: 7,3... of 73,728 parameters (10 times fewer), 29,... bytes as float32
       relative error 0.51... in the Frobenius norm; best truncated SVD of that size 0.52...
       not on disk before save(directory)

    With a base: ``lsr.compress("my-lora/", base="smollm2", data="prompts.jsonl", keep=0.95).save("small/")``.
    """
    checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    if base is None:
        _check_words(settings, compress_alone)
    by_name = {
        "rtol": rtol,
        "separation_rank": separation_rank,
        "parameters": parameters,
        "ratio": ratio,
        "bytes": bytes,
        "kl": kl,
    }
    goals: dict[str, Any] = {name: value for name, value in by_name.items() if value is not None}
    if goals and plan is not None:
        raise BudgetError(f"a plan was given, and {' and '.join(goals)} beside it: one of the two")
    if goals and keep is not None:
        raise BudgetError(f"one goal is needed, got keep and {' and '.join(goals)}")
    if plan is None and (goals or (base is None and keep is None)):
        form = {name: settings.pop(name) for name in FORM if name in settings}
        chosen = "auto" if base is not None and "bytes" in goals else checkpoint.storage
        plan = CompressionPlan(**goals, **{"storage": chosen, **form})
    if isinstance(statistics, str | Path):
        statistics = read_statistics(statistics)
    if statistics is not None:
        settings["statistics"] = statistics
    if base is None:
        if plan is None or keep is not None or data is not None:
            raise BudgetError("a share to keep is measured: give base= and data= with it, or a size such as ratio=48")
        return compress_alone(checkpoint, plan, **settings)
    if data is None:
        raise BudgetError("what is kept is measured on texts of the task: give data=")
    try:
        from lsrdecomp.promise.front import compress_measured
    except ImportError as error:
        raise LsrError(f"a base needs {error.name}: pip install 'lsrdecomp[peft]'") from error
    _check_words(settings, compress_measured)
    return compress_measured(checkpoint, plan, base=base, data=data, keep=keep, **settings)


def _check_words(settings: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raise `LsrError` with the right word for a goal or setting that is none."""
    known = [*GOALS, *FORM, *list(signature(function).parameters)[2:]]
    for name in settings:
        if name not in known:
            raise LsrError(f"compress takes no {unknown(name, known)}")


def distil(
    directory: str | Path,
    *,
    base: str | Path,
    data: str | Path | Texts,
    teacher: str | Path,
    steps: int = 200,
    out: str | Path | None = None,
    rate: float | None = None,
    calibrated: str | Path | None = None,
    held_out: int = 128,
    batch: int | None = None,
    micro: int | None = None,
    max_length: int | None = None,
    truncate: bool = False,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
    force: bool = False,
    on_step: OnStep | None = None,
) -> Distilled:
    """Train a compressed adapter, without labels, on the answers of the LoRA it was made from.

    Parameters
    ----------
    directory : path
        What `compress` wrote.
    base : str or path
        The base model, by name or directory.
    data : path or sequence of texts
        Texts of the task, without labels: a text a line.
    teacher : path
        The LoRA that ``directory`` was made from, a PEFT directory.
    steps : int
        Optimizer steps at most.
    out : path, optional
        Where to write; absent, ``directory`` is replaced as a whole.
    rate, calibrated, held_out, batch, micro, max_length, truncate, dtype, device, seed, force, on_step
        As `lsrdecomp.promise.distil` says, whose parameters these are.

    Returns
    -------
    Distilled
        What the better of the old and the new numbers keeps, as measured on texts that training did not see.

    Raises
    ------
    LsrError
        If torch, transformers or peft are missing; and as `lsrdecomp.promise.distil`.
    """
    settings = locals()
    try:
        from lsrdecomp.promise.distil import distil as run
    except ImportError as error:
        raise LsrError(f"distillation needs {error.name}: pip install 'lsrdecomp[peft]'") from error
    return run(**settings)
