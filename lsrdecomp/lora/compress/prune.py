"""Pruning of trained variants: the terms that matter least are left out.

A training ends with a share that nobody knows beforehand. Where it keeps more than was asked, terms
are left out of the trained sums and the rest is trained a little further, which costs less than a
new training of a smaller variant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lsrdecomp.arrays import as_double
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.lora.compress.rewrite import rewrite
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.packed_index import stored_layers
from lsrdecomp.lora.search.layers import Layer, StatisticsByLayer, open_layers
from lsrdecomp.targets.target import LowRank
from lsrdecomp.targets.weighted import weighted_norm

if TYPE_CHECKING:
    from pathlib import Path

    from lsrdecomp.lora.files import Checkpoint
    from lsrdecomp.targets.weights import NormWeights


@dataclass(frozen=True, slots=True)
class Removal:
    """A product without one of its terms."""

    remaining: SeparatedProduct | None
    """What is left; None: the whole layer is left out."""
    squared_norm: float
    """‖G^½ D C^½‖_F² of what was removed, D."""
    numbers: int
    """Numbers that were removed."""

    @property
    def price(self) -> float:
        """Squared norm per number."""
        return self.squared_norm / self.numbers


def prune(
    out: Path,
    written: Path,
    source: Checkpoint,
    share: float,
    *,
    statistics: StatisticsByLayer | None = None,
) -> Path:
    """Write a compressed directory again with fewer terms.

    Parameters
    ----------
    out : Path
        Directory to write; must not exist.
    written : Path
        The old directory, which `compress` wrote from ``source``.
    source : Checkpoint
        The LoRA.
    share : float
        Share of the bytes of all numbers that is removed, at least.
    statistics : Mapping, optional
        The norm of each layer, in which removed terms count.

    Returns
    -------
    Path
        ``out``.
    """
    norms = {layer.name: layer.norms for layer in open_layers(source, statistics)}
    old = stored_layers(open_checkpoint(written))
    products = {name: stored.dequantized() for name, stored in old.items()}
    bytes_per_number = {
        name: stored.bytes / max(1, stored.parameters) for name, stored in old.items()
    }
    kept = pruned(products, norms, bytes_per_number, share)
    changed = {name: product for name, product in kept.items() if product is not products[name]}
    removed = [name for name in products if name not in kept]
    return rewrite(out, written, source, changed, statistics=statistics, removed=removed)


def pruned(
    products: dict[str, SeparatedProduct],
    norms: dict[str, NormWeights],
    bytes_per_number: dict[str, float],
    share: float,
) -> dict[str, SeparatedProduct]:
    """Remove the terms with the smallest squared norm per byte, one after the other.

    Parameters
    ----------
    products : dict of layer name to SeparatedProduct
    norms : dict of layer name to NormWeights
    bytes_per_number : dict of layer name to float
        Bytes that a number of each layer takes.
    share : float
        Share of all bytes to remove, at least.

    Returns
    -------
    dict of layer name to SeparatedProduct
        Layers of which nothing is left are missing.
    """
    kept = dict(products)
    sizes = {
        name: bytes_per_number[name] * product.parameters for name, product in products.items()
    }
    to_remove = share * sum(sizes.values())
    cheapest = {name: _cheapest_removal(products[name], norms[name]) for name in products}
    while to_remove > 0.0:
        prices = {name: cheapest[name].price / bytes_per_number[name] for name in kept}
        name = min(prices, key=prices.__getitem__)
        removal = cheapest[name]
        if removal.remaining is None and len(kept) == 1:
            break  # something must be left
        to_remove -= bytes_per_number[name] * removal.numbers
        if removal.remaining is None:
            del kept[name]
        else:
            kept[name] = removal.remaining
            cheapest[name] = _cheapest_removal(removal.remaining, norms[name])
    return kept


def _cheapest_removal(product: SeparatedProduct, norms: NormWeights) -> Removal:
    """Return the removal of one term with the smallest squared norm per number."""
    if product.left.order == 1:
        return _rank_removal(product, norms)
    if product.left.order == 2:
        product = product.canonical()  # with orthogonal terms the last ones are the smallest
    left_terms, right_terms = product.separation_ranks
    removals: list[Removal] = []
    if left_terms > 1:
        for index in range(left_terms):
            removed, remaining = _without_term(product.left, index)
            removals.append(
                _removal(
                    SeparatedProduct(removed, product.right),
                    SeparatedProduct(remaining, product.right),
                    norms,
                    removed.parameters,
                )
            )
    if right_terms > 1:
        for index in range(right_terms):
            removed, remaining = _without_term(product.right, index)
            removals.append(
                _removal(
                    SeparatedProduct(product.left, removed),
                    SeparatedProduct(product.left, remaining),
                    norms,
                    removed.parameters,
                )
            )
    if not removals:
        removals = [_removal(product, None, norms, product.parameters)]
    return min(removals, key=lambda removal: removal.price)


def _removal(
    removed: SeparatedProduct,
    remaining: SeparatedProduct | None,
    norms: NormWeights,
    numbers: int,
) -> Removal:
    squared_norm = weighted_norm(LowRank(*removed.to_lora()), norms) ** 2
    return Removal(remaining, squared_norm, numbers)


def _rank_removal(product: SeparatedProduct, norms: NormWeights) -> Removal:
    """Return the removal of the last component of a product of one factor a side."""
    layer = Layer.of("", LowRank(*product.to_lora()), norms)
    sigma = layer.sigma
    rank = len(sigma)
    numbers = max(1, product.parameters // rank)
    if rank == 1:
        return Removal(None, layer.squared_norm, numbers)
    left, right = layer.truncated(rank - 1)
    remaining = SeparatedProduct(
        SeparatedMatrix.from_factors([as_double(left)[None]]),
        SeparatedMatrix.from_factors([as_double(right)[None]]),
    )
    return Removal(remaining, float(sigma[-1]) ** 2, numbers)


def _without_term(side: SeparatedMatrix, index: int) -> tuple[SeparatedMatrix, SeparatedMatrix]:
    """Return one term of a side, and the side without it."""
    others = [other for other in range(side.separation_rank) if other != index]
    return _terms(side, [index]), _terms(side, others)


def _terms(side: SeparatedMatrix, indices: list[int]) -> SeparatedMatrix:
    """Return some terms of a side."""
    factors = tuple(factor[indices] for factor in side.factors)
    return SeparatedMatrix(side.weights[indices], factors)
