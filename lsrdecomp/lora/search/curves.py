"""Error curves of a whole adapter, with the same number of terms in every layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lsrdecomp.analysis import ErrorCurve
from lsrdecomp.arrays import tail_norms
from lsrdecomp.kronecker.shape import ProductShape, balanced_split
from lsrdecomp.lora.files.progress import Counter, OnStep
from lsrdecomp.lora.search.layers import layer_pair, require_lora
from lsrdecomp.solvers.pair.factorwise import FactorwiseSVD
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from lsrdecomp.lora.files import Checkpoint
    from lsrdecomp.targets.target import LowRank

Points = dict[int, tuple[int, float]]
"""For each number of terms: parameters and ‖ΔW − ΔŴ‖_F."""


@one_blas_thread
def adapter_curves(
    checkpoint: Checkpoint, *, on_step: OnStep | None = None
) -> tuple[ErrorCurve, ...]:
    """Return relative errors over all layers against the number of terms, for two structures.

    One curve is truncated SVD, at ranks 1, 2, …. The other is an LSR product of balanced shape, at
    1, 2, 3, 4, 6, 8, 12, … terms on each side, each side truncated by its own SVD in the balanced
    gauge. Nothing is rounded.

    Parameters
    ----------
    checkpoint : Checkpoint
        An adapter of LoRA layers.
    on_step : callable, optional
        Called with a `ProgressUpdate` after each layer.

    Returns
    -------
    tuple of ErrorCurve
        "truncated SVD" and "LSR, side by side", in the Frobenius norm.

    Raises
    ------
    CheckpointError
        For a layer that is not a LoRA, or whose numbers leave the range of norms.

    Notes
    -----
    One thin QR a layer and point, O((m + n) r²).

    Examples
    --------
    >>> from importlib.resources import files
    >>> from lsrdecomp import open_checkpoint
    >>> lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    >>> for curve in adapter_curves(lora):
    ...     print(curve.label, curve.parameters_for(0.3))
    truncated SVD 18432
    LSR, side by side 73728
    """
    # 1. Measure every layer at every number of terms; each is read once.
    low_rank: list[Points] = []
    factorwise: list[Points] = []
    norms = []
    measured = Counter(on_step, "measuring curves", len(checkpoint.layers), "layers")
    for layer in checkpoint.layers:
        require_lora(checkpoint, layer)
        pair = layer_pair(checkpoint, layer)
        norms.append(pair.norm)
        low_rank.append(_truncations(pair))
        factorwise.append(_factorwise(pair))
        measured.add()
    # 2. Combine the layers at the same number of terms; squared errors add up.
    norm = math.hypot(*norms)
    return _summed("truncated SVD", low_rank, norm), _summed("LSR, side by side", factorwise, norm)


def _truncations(pair: LowRank) -> Points:
    """Return the points of truncated SVD at every rank."""
    errors = tail_norms(pair.svd[1])
    return {rank: (rank * sum(pair.shape), error) for rank, error in enumerate(errors)}


def _factorwise(pair: LowRank) -> Points:
    """Return the points of LSR products of balanced shape, whose sides are truncated separately."""
    shape = ProductShape.balanced(pair.shape, balanced_split(min(pair.rank, *pair.shape)))
    # Both sides are decomposed once; a number of terms then costs a truncation and a residual.
    sides = FactorwiseSVD().truncations(pair, shape)
    points: Points = {0: (0, pair.norm)}
    for rank in _term_counts(max(sides.max_ranks)):
        product = sides.truncate(rank)
        points[rank] = (product.parameters, pair.residual_norm(product))
    return points


def _term_counts(max_terms: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, … and the largest number of terms."""
    powers = [2**k for k in range(20)]
    counts = sorted({*powers, *(3 * power for power in powers)})
    return [*(count for count in counts if count < max_terms), max_terms]


def _summed(label: str, layers: list[Points], norm: float) -> ErrorCurve:
    """Return the curve of all layers at the same number of terms.

    A layer that cannot have as many terms counts with its largest number.
    """
    ranks = sorted(set().union(*layers))
    parameters = []
    errors = []
    for rank in ranks:
        points = [points[max(k for k in points if k <= rank)] for points in layers]
        parameters.append(sum(count for count, _ in points))
        error = math.hypot(*(lost for _, lost in points))
        errors.append(error / norm if norm > 0.0 else error)
    return ErrorCurve(label, tuple(ranks), tuple(parameters), tuple(errors), norm)
