"""Adding low-rank updates to weights, with a measure of how much of each update rounding left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lsrdecomp.errors import PrecisionError, ShapeError

BLOCK = 1 << 22
"""Entries of a weight that are held in the wider precision at a time."""


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged weight, and the share of the update that is in it."""

    weight: Tensor
    share: float  # ⟨W' − W, ΔW⟩ / ‖ΔW‖²; 1 is all of it


@torch.no_grad()
def merge(
    weight: Tensor,
    right: Tensor,
    left: Tensor,
    scaling: float = 1.0,
    *,
    out: Tensor | None = None,
    minimum_share: float = 0.0,
) -> Merged:
    """``W + scaling · B̂Â``, summed in at least float32 and rounded once.

    ΔW is never held whole: blocks of rows are formed, added, rounded and measured one after the other.

    Parameters
    ----------
    weight : Tensor
        W, shape (w1, w2).
    right, left : Tensor
        Â, shape (r, w2), and B̂, shape (w1, r).
    scaling : float
        Factor of the update.
    out : Tensor, optional
        Where to write the sum, in its own dtype; may be ``weight`` itself. By default a new tensor like ``weight``.
    minimum_share : float
        Least share of the update that must survive.

    Returns
    -------
    Merged
        The sum and the surviving share. In bfloat16 an update a thousand times smaller than its weight keeps about
        half of itself, one ten thousand times smaller a fourteenth.

    Raises
    ------
    ShapeError
        If the sizes do not fit together.
    PrecisionError
        If less than ``minimum_share`` survives; ``out`` has then been written only where it is not ``weight``.
    """
    if right.shape != (left.shape[1], weight.shape[1]) or left.shape[0] != weight.shape[0]:
        raise ShapeError(
            f"a weight of {weight.shape[0]} x {weight.shape[1]} cannot take an update of {tuple(left.shape)} times "
            f"{tuple(right.shape)}"
        )
    before = weight.clone() if out is weight and minimum_share > 0 else weight
    target = torch.empty_like(weight) if out is None else out
    wide = torch.promote_types(weight.dtype, torch.float32)
    right, left = right.to(wide), left.to(wide) * scaling
    gained, size = [], []
    for rows in _row_blocks(weight):
        update, old = left[rows] @ right, weight[rows].to(wide)
        new = (old + update).to(target.dtype)
        gained.append(((new.to(wide) - old) * update).sum(dtype=torch.float64))
        size.append(update.square().sum(dtype=torch.float64))
        target[rows] = new
    total = math.fsum(map(float, size))
    share = math.fsum(map(float, gained)) / total if total > 0 else 1.0
    if share < minimum_share:
        if out is weight:
            weight.copy_(before)
        raise PrecisionError(
            f"only {share:.0%} of the update would survive in {target.dtype}, less than the {minimum_share:.0%} asked "
            "for; keep a float32 weight, add to it, and cast the sum once"
        )
    return Merged(target, share)


@torch.no_grad()
def merge_all(
    weights: Sequence[Tensor],
    pairs: Iterable[tuple[Tensor, Tensor]],
    scalings: Sequence[float],
    *,
    out: Sequence[Tensor] | None = None,
) -> list[float]:
    """Swap an adapter into a whole model: `merge` for every layer, into ``out`` (or in place); the surviving shares.

    Parameters
    ----------
    weights : sequence of Tensor
        The unmerged weights; kept as they are if ``out`` is given.
    pairs : iterable of (Â, B̂)
        One per weight; `grouped.expand_all` forms them together.
    scalings : sequence of float
        One per weight.
    out : sequence of Tensor, optional
        Weights to write to.
    """
    targets = weights if out is None else out
    return [
        merge(weight, right, left, scaling, out=target).share
        for weight, (right, left), scaling, target in zip(weights, pairs, scalings, targets, strict=True)
    ]


def surviving_share(before: Tensor, after: Tensor, update: Tensor) -> float:
    """``⟨after − before, update⟩ / ‖update‖²``: the share of an update that is found in a stored weight; 1 if none."""
    wide = torch.promote_types(update.dtype, torch.float32)
    update = update.to(wide)
    size = float(update.square().sum(dtype=torch.float64))
    change = after.to(wide) - before.to(wide)
    return float((change * update).sum(dtype=torch.float64)) / size if size else 1.0


def _row_blocks(weight: Tensor) -> Iterable[slice]:
    step = max(1, BLOCK // max(1, weight.shape[1]))
    return (slice(start, start + step) for start in range(0, weight.shape[0], step))


__all__ = ["Merged", "merge", "merge_all", "surviving_share"]
