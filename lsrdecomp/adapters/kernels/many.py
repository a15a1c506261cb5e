"""Many adapters in one batch: every row names its adapter, and all of them run in the same few launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lsrdecomp.adapters.kernels.dispatch import crossovers
from lsrdecomp.errors import ShapeError


@dataclass(frozen=True, slots=True)
class StackedPairs:
    """Pairs of many adapters of one layer: ``rights`` Â (adapters, r, w2), ``lefts`` α B̂ (adapters, w1, r).

    Adapters of smaller inner rank are padded with zeros.
    """

    rights: Tensor
    lefts: Tensor

    @classmethod
    def of(
        cls,
        rights: Sequence[Tensor],
        lefts: Sequence[Tensor],
        scalings: Sequence[float],
    ) -> StackedPairs:
        """Stack formed pairs.

        Parameters
        ----------
        rights, lefts : sequence of Tensor
            For each adapter Â, shape (r, w2), and B̂, shape (w1, r).
        scalings : sequence of float
            One per adapter.
        """
        rank = max(right.shape[0] for right in rights)
        wide = torch.stack([F.pad(right, (0, 0, 0, rank - right.shape[0])) for right in rights])
        tall = torch.stack([F.pad(left.mT, (0, 0, 0, rank - left.shape[1])) for left in lefts])
        scale = torch.tensor(scalings, dtype=tall.dtype, device=tall.device)
        return cls(wide, (tall * scale.view(-1, 1, 1)).mT)


def add_adapters(base: Tensor, x: Tensor, pairs: StackedPairs, index: Tensor, mode: str = "auto") -> Tensor:
    """The output of a base layer with, for each row of the batch, the adapter it names.

    Parameters
    ----------
    base : Tensor
        Output of the base layer, shape (batch, ..., w1).
    x : Tensor
        Its input, shape (batch, ..., w2).
    pairs : StackedPairs
        The adapters of this layer.
    index : Tensor
        Shape (batch,), integers: which adapter; -1 for none.
    mode : {"auto", "gathered", "masked"}
        ``gathered`` multiplies each row by its own pair in two batched products; ``masked`` multiplies all rows by all
        pairs in two plain products and masks the inner activations, which costs less for few adapters.

    Returns
    -------
    Tensor
        Shape of ``base``. About five launches, however many adapters there are.

    Raises
    ------
    ShapeError
        If the index does not name one adapter per row.
    """
    if index.ndim != 1 or index.shape[0] != x.shape[0] or base.shape[0] != x.shape[0]:
        raise ShapeError(f"{x.shape[0]} rows need one adapter each, got an index of shape {tuple(index.shape)}")
    adapters, rank, into = pairs.rights.shape
    if index.device.type == "cpu" and index.numel() and int(index.max()) >= adapters:  # elsewhere asking would wait
        raise ShapeError(f"a row names adapter {int(index.max())}, but there are {adapters}, counted from 0")
    if mode == "auto":
        mode = "masked" if adapters * rank <= crossovers(x.device.type).masked_to_rank else "gathered"
    rows = x.reshape(x.shape[0], -1, into).to(pairs.rights.dtype)
    if mode == "masked":
        inner = rows @ pairs.rights.reshape(adapters * rank, into).mT  # (batch, length, adapters · r)
        own = index.unsqueeze(1) == torch.arange(adapters, device=index.device)
        inner = inner * own.repeat_interleave(rank, dim=1).unsqueeze(1)
        added = inner @ pairs.lefts.transpose(1, 2).reshape(adapters * rank, -1)
    elif mode == "gathered":
        named = index.clamp(min=0)
        inner = torch.bmm(rows, pairs.rights[named].mT)  # (batch, length, r)
        inner = inner * (index >= 0).view(-1, 1, 1)
        added = torch.bmm(inner, pairs.lefts[named].mT)
    else:
        raise ValueError(f"unknown mode {mode!r}: auto, gathered and masked are known")
    return (base + added.view(base.shape)).to(base.dtype)
