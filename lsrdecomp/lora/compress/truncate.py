"""`truncate`: cut a LoRA in its own format, by its weights alone or by its effect on a base.

Torch is loaded only where a base is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import UnsupportedError, needs, unknown
from lsrdecomp.fields import refuses_unknown
from lsrdecomp.lora.compress.truncation import truncation
from lsrdecomp.lora.files import Checkpoint, file_or_directory
from lsrdecomp.lora.files.writers.table import CUT_FORMATS
from lsrdecomp.lora.search.request import Request
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from lsrdecomp.lora.compress.truncation import Truncation
    from lsrdecomp.lora.files.progress import OnStep
    from lsrdecomp.lora.search.measured_settings import MeasuredSettings
    from lsrdecomp.lora.search.plan import CompressionPlan


@refuses_unknown
def truncate(
    checkpoint: Checkpoint,
    plan: CompressionPlan | None = None,
    *,
    ratio: float | None = None,
    bytes: int | None = None,
    parameters: float | None = None,
    rtol: float | None = None,
    energy: float | None = None,
    storage: str | None = None,
    max_rank: int | None = None,
    min_rank: int | None = None,
    only: tuple[str, ...] | None = None,
    to: str = "same",
    base: Any = None,
    data: Any = None,
    keep: float | None = None,
    settings: MeasuredSettings | None = None,
    on_step: OnStep | None = None,
) -> Truncation:
    """Truncate every layer to the rank that one threshold over all singular values gives it.

    Parameters
    ----------
    checkpoint : Checkpoint
        A LoRA in a format that `write_pairs` can write.
    plan : CompressionPlan, optional
        A ratio, parameters or bytes of the file over all layers; or for every layer a relative
        error (``rtol``), a share of Σσ² (``energy``) or no more than a rank (``max_rank``).
    ratio, bytes, parameters, rtol, energy : number, optional
        The goal, where there is no plan: one of these, or ``max_rank`` alone.
    storage : str, optional
        A floating type, here or in the plan; absent, that of each layer.
    max_rank, min_rank : int, optional
        Maximum and minimum rank of a layer; with a minimum of 1 none is left out.
    only : tuple of str, optional
        Patterns of names, or of their ends from a dot on, in which ``*`` stands for anything:
        layers that match one are truncated, and the goal is theirs; all others are copied byte for
        byte.
    to : str
        "same", to write it in its own format, or "mlx".
    base, data, keep, settings : optional
        As `lsrdecomp.compress` has them: a base on which the kept share is measured, on data. With
        ``keep`` the fewest numbers that keep so much of the LoRA's effect are found. Layers that
        the base does not run on its data, such as those of a text encoder of images, are copied.
    on_step : callable, optional
        Called with a `ProgressUpdate` before and during each part of the work.

    Returns
    -------
    Truncation
        Call its ``save`` to write the adapter.

    Raises
    ------
    BudgetError
        If nothing fits, or unless there is one goal.
    SettingsError
        For a plan with a setting that has no use here, such as ``kl``, or a storage in integers.
    UnsupportedError
        For an adapter that is not made of plain pairs.
    ArgumentError
        For an unknown argument, with the nearest known name.

    Notes
    -----
    O((m + n) r²) a layer. Between the two readings 2 r² + r numbers of each layer are kept, in
    memory or on disk.
    """
    given = {
        "ratio": ratio,
        "bytes": bytes,
        "parameters": parameters,
        "rtol": rtol,
        "energy": energy,
        "storage": storage,
        "max_rank": max_rank,
        "only": only,
        "min_rank": min_rank,
        "base": base,
        "data": data,
        "keep": keep,
    }
    request = Request.parse(given, plan=plan, settings=settings, to_file=True)
    return truncate_request(checkpoint, request, to=to, on_step=on_step)


@one_blas_thread
def truncate_request(
    checkpoint: Checkpoint, request: Request, *, to: str = "same", on_step: OnStep | None = None
) -> Truncation:
    """Truncate an open adapter as requested; see `truncate`."""
    if to not in CUT_FORMATS:
        raise UnsupportedError(
            f"cannot cut to {unknown(to, CUT_FORMATS)}; export_lora writes others"
        )
    if to == "same":
        file_or_directory(checkpoint)
    if request.base is not None:
        if to != "same":
            raise UnsupportedError(
                f"what is kept is measured of a cut in the file's own format, not of {to}: write "
                "that without a base, or export what this makes"
            )
        with needs("a base", "peft"):
            from lsrdecomp.lora.compress.truncate_on_base import truncate_on_base
        return truncate_on_base(checkpoint, request, on_step)
    assert request.plan is not None
    return truncation(checkpoint, request.plan, to=to, on_step=on_step)
