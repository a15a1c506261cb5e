"""Which layers are worth solving in the Frobenius norm, told by singular values and vectors.

There truncated SVD is optimal among matrices of a rank, and an LSR product can only win by having
fewer numbers for the same rank. That takes singular vectors that are nearly sums of a few Kronecker
products themselves. So, before anything is solved for a budget, a layer is left out

1. if LSR products have too low a rank for it: even the truncated SVD of the largest inner rank of
   the search, were it free, loses more than the rank that the budget buys, its price included. No
   product can win then (Eckart and Young);
2. if its leading singular vectors, cut to the terms of the coarse grid, keep less per number than
   the truncated SVDs do. This is an estimate: on 1,128 layers of 15 adapters it was 0.68 to 1.02
   (sixteen layers: 1.07 to 2.1) times what solving the coarse grid found, and no layer below 0.92
   had an LSR product that won.

Products also fill what the components of truncated SVDs leave of a budget. Where that may count,
which is so for small adapters only, the layers nearest to the edge of the budget are solved too.
The numbers that decide are fields of `lsrdecomp.lora.search.effort.Screening`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import as_double, tail_norms, to_numpy
from lsrdecomp.lora.search.shapes import coarse_grid
from lsrdecomp.precision import precision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.lora.search.effort import Screening
    from lsrdecomp.lora.search.layers import Layer
    from lsrdecomp.lora.search.plan import Budget

Doubles = NDArray[np.float64]


def estimated_advantage(layer: Layer, orders: Sequence[int]) -> float:
    """Estimate how much an LSR product keeps, in units of a truncated SVD of as many parameters.

    That is the share of the first component that its singular vectors keep when they are cut to the
    terms of the coarse grid, divided by the parameters in units of that component's; the largest
    such ratio. Zero for a layer of zeros or a single row or column.

    Parameters
    ----------
    layer : Layer
    orders : sequence of int
        Numbers of Kronecker factors.

    Notes
    -----
    O((m + n) r) beside the singular values, which are computed once, and a singular value
    decomposition of each singular vector as a matrix.
    """
    columns, sigma, rows = layer.gauge
    if min(layer.shape) < 2 or not float(sigma[0]) > 0.0:
        return 0.0
    pair = layer.pair
    left = to_numpy(as_double(pair.left) @ columns[:, 0])
    right = to_numpy(rows[0, :] @ as_double(pair.right))
    best = 0.0
    for split in _coarse_splits(layer.shape, tuple(orders)):
        kept_left = _kept_shares(left, split.out, split.left_terms)
        kept_right = _kept_shares(right, split.into, split.right_terms)
        best = max(best, float(np.max(kept_left * kept_right / split.costs)))
    return best


@dataclass(frozen=True, slots=True)
class _Split:
    """A shape of the coarse grid, with its terms and their parameters in units of m + n."""

    out: tuple[int, ...]
    into: tuple[int, ...]
    left_terms: NDArray[np.int64]
    right_terms: NDArray[np.int64]
    costs: Doubles


@cache
def _coarse_splits(matrix_shape: tuple[int, int], orders: tuple[int, ...]) -> list[_Split]:
    """Return the shapes of the coarse grid for layers of a size."""
    splits = []
    for request in coarse_grid(matrix_shape, orders, math.inf):
        left_terms, right_terms = np.array(request.terms).T
        costs = [request.shape.parameters(*ranks) / sum(matrix_shape) for ranks in request.terms]
        shape = request.shape
        splits.append(_Split(shape.out, shape.into, left_terms, right_terms, np.array(costs)))
    return splits


def _kept_shares(vector: Doubles, split: tuple[int, ...], terms: NDArray[np.int64]) -> Doubles:
    """Return the share of a unit vector's square that numbers of Kronecker products keep.

    Exact for two factors. For more it is that of the best subspaces of each factor (higher-order
    SVD), which sums of as many products hardly exceed.
    """
    tensor = vector.reshape(split)
    if len(split) == 2:
        shares = np.cumsum(np.linalg.svd(tensor, compute_uv=False) ** 2)
        return np.asarray(shares[np.minimum(terms, len(shares)) - 1])
    core = tensor
    for axis in range(len(split)):
        unfolded = np.moveaxis(tensor, axis, 0).reshape(split[axis], -1)
        _, basis = np.linalg.eigh(unfolded @ unfolded.T)
        leading_first = basis[:, ::-1]
        core = np.moveaxis(np.tensordot(leading_first.T, core, (1, axis)), 0, axis)
    squares = core**2
    corners = {count: squares[(slice(0, count),) * len(split)].sum() for count in set(terms)}
    return np.array([corners[count] for count in terms])


@dataclass(frozen=True, slots=True)
class LayerSpectrum:
    """The singular values of a layer, with what a component costs.

    Attributes
    ----------
    squares : ndarray
        σ², in falling order.
    tails : ndarray
        Squared error of the truncated SVD of rank 0, 1, ….
    cost : int
        Parameters of a component, m + n.
    advantage : float
        `estimated_advantage`.
    """

    squares: Doubles
    tails: Doubles
    cost: int
    advantage: float

    @classmethod
    def of(cls, layer: Layer, advantage: float) -> LayerSpectrum:
        """Return the spectrum of a layer."""
        sigma = layer.gauge[1]
        tails = np.asarray(tail_norms(sigma)) ** 2
        return cls(to_numpy(sigma) ** 2, tails, sum(layer.shape), advantage)

    def tail(self, rank: int) -> float:
        """Return the squared error of the truncated SVD of a rank."""
        return float(self.tails[min(rank, len(self.squares))])


def worth_solving(
    spectra: Sequence[LayerSpectrum],
    budget: Budget,
    inner_rank: int,
    storages: Sequence[str],
    screening: Screening,
) -> set[int]:
    """Return the layers whose LSR products may be of use for a budget.

    Parameters
    ----------
    spectra : sequence of LayerSpectrum
    budget : Budget
    inner_rank : int
        Largest inner rank of a product.
    storages : sequence of str
        Floating types; of several the widest counts.
    screening : Screening
    """
    everything = set(range(len(spectra)))
    if budget.layer_rtol is not None:
        # A product of a lower rank than a layer needs cannot be near enough.
        max_loss = [budget.layer_rtol**2 * spectrum.tail(0) for spectrum in spectra]
        return {i for i in everything if spectra[i].tail(inner_rank) <= max_loss[i]}
    if budget.cost is None or not spectra:
        return everything
    # 1. Truncated SVDs within the budget take components of most gain per parameter first. The
    #    first one that does not fit has the price of a parameter.
    parameters = budget.cost
    if budget.counts_bytes:
        parameters /= max(precision(storage).bytes for storage in storages)
    gains = np.concatenate([spectrum.squares / spectrum.cost for spectrum in spectra])
    costs = np.repeat([spectrum.cost for spectrum in spectra], [len(x.squares) for x in spectra])
    order = np.argsort(-gains, kind="stable")
    is_paid = np.cumsum(costs[order]) <= parameters
    if is_paid.all():
        return {i for i in everything if spectra[i].advantage >= screening.min_advantage}
    edge = order[int(np.argmin(is_paid))]
    price = float(gains[edge])
    ranks = [int(np.sum(spectrum.squares / spectrum.cost > price)) for spectrum in spectra]
    # 2. Layers where a product may win by itself.
    chosen = set()
    for i, spectrum in enumerate(spectra):
        # A product of the largest inner rank, were it free, loses more than the truncated SVD.
        svd_lagrangian = spectrum.tail(ranks[i]) + price * ranks[i] * spectrum.cost
        rank_is_too_low = spectrum.tail(inner_rank) >= svd_lagrangian
        if not rank_is_too_low and spectrum.advantage >= screening.min_advantage:
            chosen.add(i)
    # 3. Layers in which products may fill what is left: less than a component of the edge.
    loss = math.fsum(spectrum.tail(rank) for spectrum, rank in zip(spectra, ranks, strict=True))
    left_over = price * float(costs[edge])
    if left_over > 2.0 * screening.min_filling_gain * loss:
        filling = [i for i in everything if ranks[i] < 2 and spectra[i].advantage > 0.0]
        filling.sort(key=lambda i: _distance_from_edge(spectra[i], price))
        chosen.update(filling[: screening.filling_layers])
    return chosen


def _distance_from_edge(spectrum: LayerSpectrum, price: float) -> float:
    """Return how far the gain per parameter of a layer's product is from the price, in logs."""
    gain = spectrum.advantage * float(spectrum.squares[0]) / spectrum.cost
    return abs(math.log(gain / price)) if gain > 0.0 < price else math.inf
