"""Direct Kronecker sums of a layer, ΔŴ = Σ W1 ⊗ W2, without a low-rank pair."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lsrdecomp.decompose import choose_solver
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.lora.search.layers import Layer


@dataclass(frozen=True, slots=True)
class DirectSum:
    """A sum of Kronecker products in place of a layer, and what it loses."""

    form: SeparatedMatrix
    squared_error: float  # absolute, in the layer's norm

    @property
    def parameters(self) -> int:
        """Numbers in its factors."""
        return self.form.parameters


def direct_sums_of(layer: Layer, ranks: Iterable[int]) -> list[DirectSum]:
    """Return sums of so many terms in the most even shape.

    They are best in the Frobenius norm; errors are in the layer's norm.
    """
    shape = KroneckerShape.balanced(layer.pair.shape)
    ranks = sorted({min(rank, shape.max_separation_rank) for rank in ranks})
    if not ranks:
        return []
    longest = (
        choose_solver(layer.pair, shape).solve(layer.pair, shape, rank=ranks[-1]).approximation
    )
    forms = [longest.truncate(rank) for rank in ranks]
    return [DirectSum(form, layer.squared_error(form)) for form in forms]
