"""What one layer can become, each with its price: nothing, itself, low rank, an LSR product.

Candidates are values, many are held at once; `lsrdecomp.compression.materialize` makes the factors of those chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, TypeAlias

from lsrdecomp.compression.layers import Layer, batches
from lsrdecomp.compression.shapes import Configuration
from lsrdecomp.compression.spill_cache import SpillCache
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.solvers.base import PairSolution
from lsrdecomp.solvers.pair.joint_als import JointALS
from lsrdecomp.solvers.svd.dense import tail_norms


class Structure(StrEnum):
    """What a layer becomes; the values are the words on disk and in JSON."""

    DROP = "drop"
    KEEP = "keep"
    LOW_RANK = "low rank"
    LSR = "LSR"


@dataclass(frozen=True, slots=True)
class Price:
    """What a candidate costs and loses."""

    parameters: int
    squared_error: float  # absolute, in the layer's norm
    storage: str = "float64"  # element type of the factors
    bytes: int = 0  # of the factors as stored, without the file's header


@dataclass(frozen=True)
class _Priced:
    price: Price
    structure: ClassVar[Structure]

    @property
    def parameters(self) -> int:
        return self.price.parameters

    @property
    def squared_error(self) -> float:
        return self.price.squared_error

    @property
    def storage(self) -> str:
        return self.price.storage

    @property
    def bytes(self) -> int:
        return self.price.bytes


@dataclass(frozen=True)
class Drop(_Priced):
    """The layer left out: ΔW = 0."""

    structure = Structure.DROP
    served_rank = 0


@dataclass(frozen=True)
class Keep(_Priced):
    """The LoRA pair as it is."""

    rank: int

    structure = Structure.KEEP

    @property
    def served_rank(self) -> int:
        return self.rank


@dataclass(frozen=True)
class LowRank(_Priced):
    """The truncated SVD in the layer's norm."""

    rank: int
    bits: tuple[int, ...] = ()  # of each component as an integer code; empty: floating point
    unrotated: bool = False  # coded as the columns and rows that the pair has

    structure = Structure.LOW_RANK

    @property
    def served_rank(self) -> int:
        return self.rank


@dataclass(frozen=True)
class Lsr(_Priced):
    """A product of separated matrices."""

    shape: ProductShape
    ranks: tuple[int, int]
    product: Callable[[], SeparatedProduct] = field(repr=False)  # reads it from where it waits, not rounded
    refined: bool = False

    structure = Structure.LSR

    @property
    def served_rank(self) -> int:
        return self.shape.inner_rank

    @property
    def configuration(self) -> Configuration:
        return self.shape, self.ranks


Candidate: TypeAlias = Drop | Keep | LowRank | Lsr


def drop(layer: Layer) -> Drop:
    """The layer left out."""
    return Drop(Price(0, layer.squared_norm))


def keep(layer: Layer) -> Keep:
    """The LoRA pair as it is."""
    return Keep(Price(layer.parameters, 0.0), layer.rank)


def low_rank_candidates(layer: Layer, most: float = float("inf")) -> list[LowRank]:
    """The best approximation of every rank in the layer's norm, of at most ``most`` parameters."""
    tails, step = tail_norms(layer.gauge[1]), sum(layer.shape)
    ranks = (rank for rank in range(1, len(tails)) if rank * step <= most)
    return [LowRank(Price(rank * step, tails[rank] ** 2), rank) for rank in ranks]


def lsr_candidate(solution: PairSolution, cache: SpillCache) -> Lsr:
    """The price of a solution, whose factors wait in the cache."""
    product = solution.product
    price = Price(product.parameters, solution.error**2)
    return Lsr(price, product.product_shape, product.separation_ranks, cache.put(product))


def lsr_candidates(
    layers: Sequence[Layer], configurations: Iterable[Configuration], solver: JointALS, cache: SpillCache | None = None
) -> list[list[Lsr]]:
    """LSR products of the given shapes for layers of one kind, solved together; one list per layer."""
    found: list[list[Lsr]] = [[] for _ in layers]
    cache = cache or SpillCache()
    for shape, ranks in configurations:
        for place, solution in enumerate(solve_together(layers, shape, ranks, solver)):
            found[place].append(lsr_candidate(solution, cache))
    return found


def solve_together(
    layers: Sequence[Layer],
    shape: ProductShape,
    ranks: tuple[int, int],
    solver: JointALS,
    starts: Sequence[SeparatedProduct] | None = None,
) -> list[PairSolution]:
    """Joint least squares for layers of one kind, in batches that fit in memory."""
    solutions: list[PairSolution] = []
    for part in batches(layers):
        weights = None if layers[0].norms.is_frobenius else [layer.norms for layer in layers[part]]
        begun = None if starts is None else starts[part]
        pairs = [layer.pair for layer in layers[part]]
        solutions += solver.solve_batch(pairs, shape, ranks, weights=weights, starts=begun)
    return solutions
