"""Which layers are worth solving in a norm of the base, told by their singular values.

Among matrices of a rank nothing is nearer than truncated SVD in the layer's norm (Eckart and
Young), and an LSR product has a rank of at most the search's largest inner rank. So a layer is left
out if even the truncated SVD of that rank, were it free, loses more than the rank that the budget
buys, its price included: no product can win there. Prices fall where products win in other layers,
and then a layer that is left out here would be all the more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import tail_norms
from lsrdecomp.precision import precision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.lora.search.layers import Layer
    from lsrdecomp.lora.search.plan import Budget


def worth_solving(
    layers: Sequence[Layer], budget: Budget, inner_rank: int, storages: Sequence[str]
) -> list[int]:
    """Return the layers, by their index, in which an LSR product may win.

    Parameters
    ----------
    layers : sequence of Layer
    budget : Budget
    inner_rank : int
        Largest inner rank of a product.
    storages : sequence of str
        Floating types; of several the widest counts.
    """
    everything = list(range(len(layers)))
    # 1. Squared errors of the truncated SVD of rank 0, 1, …, of each layer.
    losses = [np.asarray(tail_norms(layer.sigma)) ** 2 for layer in layers]
    lowest = [loss[min(inner_rank, len(loss) - 1)] for loss in losses]
    if budget.layer_rtol is not None:
        return [i for i in everything if lowest[i] <= budget.layer_rtol**2 * losses[i][0]]
    if budget.cost is None or not layers:
        return everything
    # 2. Truncated SVDs within the budget take components of most gain per parameter first. The
    #    first one that does not fit has the price of a parameter.
    parameters = budget.cost
    if budget.counts_bytes:
        parameters /= max(precision(storage).bytes for storage in storages)
    sizes = [sum(layer.shape) for layer in layers]
    gains = [-np.diff(loss) / size for loss, size in zip(losses, sizes, strict=True)]
    steepness = np.concatenate(gains)
    order = np.argsort(-steepness, kind="stable")
    is_paid = np.cumsum(np.repeat(sizes, [len(gain) for gain in gains])[order]) <= parameters
    if is_paid.all():
        return everything
    price = float(steepness[order[int(np.argmin(is_paid))]])
    # 3. A product of the largest inner rank, were it free, against the rank that is paid.
    chosen = []
    for i in everything:
        rank = int(np.sum(gains[i] > price))
        if lowest[i] < losses[i][rank] + price * rank * sizes[i]:
            chosen.append(i)
    return chosen
