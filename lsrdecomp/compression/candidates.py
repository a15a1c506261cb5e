"""Candidates of a layer, each with its price: nothing, itself, low rank, an LSR product.

A `Candidate` is a value without factors: thousands are weighed against each other. It says of its
structure all that a search asks: what it is called, whether it counts as truncated SVD, which
storages it exists in, and how its factors are made. `priced_as` says what one costs and loses in a
storage; `materialize` makes the factors of one that was chosen, once. `FAMILIES` lists the
structures that need no solve.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from lsrdecomp.arrays import tail_norms
from lsrdecomp.compression.quantize import (
    INTEGER_BITS,
    layer_svd,
    pair_code,
    refitted_product,
    spectral_code,
    stored_product,
    svd_code,
    water_fill,
)
from lsrdecomp.kronecker.product import SeparatedProduct, low_rank_product
from lsrdecomp.precision import precision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lsrdecomp.compression.layers import Layer, SpillCache
    from lsrdecomp.compression.shapes import Configuration
    from lsrdecomp.formats.quantized import SpectralCode
    from lsrdecomp.formats.stored import Stored
    from lsrdecomp.kronecker.shape import ProductShape
    from lsrdecomp.solvers.base import PairSolution

POINTS = 24
"""Most sizes of low rank in integers that a layer offers."""

ALL_RANKS = 16
"""Up to this rank each is one of them."""


@dataclass(frozen=True, kw_only=True)
class Candidate(ABC):
    """A structure that a layer can get, at a price.

    Attributes
    ----------
    structure : str
        The word in tables, on disk and in JSON.
    is_truncated_svd : bool
        Whether truncated SVD alone could choose it: the error reported beside ours is that of the
        best choice among these.
    squared_error : float
        Absolute, in the layer's norm.
    storage : str
        Element type of the factors.
    bytes : int
        Size of the factors as stored, without the file's header.
    rank : int
        Rank that a server pays for.
    """

    structure: ClassVar[str]
    is_truncated_svd: ClassVar[bool]
    parameters: int
    squared_error: float
    storage: str = "float64"
    bytes: int = 0
    rank: int = 0

    @abstractmethod
    def stored(self, layer: Layer) -> Stored | None:
        """Make what is stored of the layer in the candidate's storage; None leaves the layer out."""

    def alternatives(self, layer: Layer) -> Iterable[Stored]:
        """Make further forms of the same price, of which the nearest to the layer is taken."""
        return ()

    def exists_in(self, storage: str) -> bool:
        """Return whether the structure can be stored so; integers are only for those that say so."""
        return storage not in INTEGER_BITS

    def unrounded_bytes(self) -> int:
        """Return the size of the factors in a floating type, known before they are made."""
        return math.ceil(self.parameters * precision(self.storage).bytes)


@dataclass(frozen=True, kw_only=True)
class Drop(Candidate):
    """The layer left out: ΔW = 0."""

    structure = "drop"
    is_truncated_svd = True

    def stored(self, layer: Layer) -> None:
        """Return nothing."""

    def exists_in(self, storage: str) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True, kw_only=True)
class Keep(Candidate):
    """The LoRA pair as it is."""

    structure = "keep"
    is_truncated_svd = True

    def stored(self, layer: Layer) -> Stored:
        """Return the pair in the candidate's storage."""
        return stored_product(low_rank_product(layer.pair.left, layer.pair.right), self.storage)


@dataclass(frozen=True, kw_only=True)
class LowRank(Candidate):
    """The truncated SVD in the layer's norm."""

    structure = "low rank"
    is_truncated_svd = True
    bits: tuple[int, ...] = ()  # of each component as an integer code; empty: floating point
    unrotated: bool = False  # coded as the columns and rows that the pair has

    def stored(self, layer: Layer) -> Stored:
        """Return codes of each component, or both factors in a floating type."""
        if not self.bits:
            return stored_product(low_rank_product(*layer.truncated(self.rank)), self.storage)
        return pair_code(layer) if self.unrotated else svd_code(layer, self.bits)


@dataclass(frozen=True, kw_only=True)
class Lsr(Candidate):
    """A product of separated matrices."""

    structure = "LSR"
    is_truncated_svd = False
    shape: ProductShape
    ranks: tuple[int, int]
    product: Callable[[], SeparatedProduct] = field(
        repr=False
    )  # reads it from where it waits, not rounded
    refined: bool = False

    @property
    def configuration(self) -> Configuration:
        return self.shape, self.ranks

    def stored(self, layer: Layer) -> Stored:
        """Return the product, rounded as it is."""
        return stored_product(self.product(), self.storage)

    def alternatives(self, layer: Layer) -> Iterable[Stored]:
        """Make codes that are solved for in the layer's norm, where integers are stored."""
        if self.storage in INTEGER_BITS:
            yield refitted_product(layer, self.product(), INTEGER_BITS[self.storage])

    def exists_in(self, storage: str) -> bool:
        """Return True."""
        return True


# -- candidates of a layer -------------------------------------------------------------------------


def drop(layer: Layer) -> Drop:
    """The layer left out."""
    return Drop(parameters=0, squared_error=layer.squared_norm)


def keep(layer: Layer) -> Keep:
    """The LoRA pair as it is."""
    return Keep(parameters=layer.parameters, squared_error=0.0, rank=layer.rank)


def plain_candidates(layer: Layer, max_parameters: float = math.inf) -> list[Candidate]:
    """Return the candidates of all `FAMILIES`, of at most about so many parameters."""
    return [candidate for family in FAMILIES for candidate in family(layer, max_parameters)]


def _drop_or_keep(layer: Layer, max_parameters: float) -> list[Candidate]:
    return [drop(layer), keep(layer)]


def low_rank_candidates(layer: Layer, most: float = math.inf) -> list[LowRank]:
    """The best approximation of every rank in the layer's norm, of at most ``most`` parameters."""
    tails, step = tail_norms(layer.gauge[1]), sum(layer.shape)
    ranks = (rank for rank in range(1, len(tails)) if rank * step <= most)
    return [
        LowRank(parameters=rank * step, squared_error=tails[rank] ** 2, rank=rank) for rank in ranks
    ]


FAMILIES: tuple[Callable[[Layer, float], Sequence[Candidate]], ...] = (
    _drop_or_keep,
    low_rank_candidates,
)
"""Candidates that need no solve, of a layer and a number of parameters above which none is wanted."""


def water_filled_candidates(layer: Layer, most: float = math.inf) -> list[LowRank]:
    """SVD with bits spread over its components, from the smallest useful size to eight bits each or ``most`` bytes."""
    svd = layer_svd(layer)
    filled = water_fill(layer, *svd)
    # Neighbouring steps differ by the bits of one component: of many some, evenly spaced in their
    # logarithm.
    counts = (
        sorted({round(q) for q in np.geomspace(1, len(filled), min(POINTS, len(filled)))})
        if filled
        else []
    )
    counts = [n for n in counts if sum(filled[n - 1]) * sum(layer.shape) <= 8.0 * most]
    return [
        _coded_candidate(layer, spectral_code(layer, svd, filled[n - 1]), filled[n - 1])
        for n in counts
    ]


def equal_bits_candidates(layer: Layer, bits: int) -> list[LowRank]:
    """SVD with equally many bits in every component, for budgets that count parameters: of all ranks up to 16, then of
    some more.
    """
    svd = layer_svd(layer)
    rank = int(np.count_nonzero(svd[1]))
    ranks = {*range(1, min(rank, ALL_RANKS) + 1)}
    if rank > ALL_RANKS:
        ranks |= {round(q) for q in np.geomspace(ALL_RANKS, rank, POINTS - ALL_RANKS)}
    widths = ((bits,) * q for q in sorted(ranks))
    return [_coded_candidate(layer, spectral_code(layer, svd, width), width) for width in widths]


def unrotated_candidates(layer: Layer) -> list[LowRank]:
    """The pair's own columns and rows as components of eight bits; nothing for a layer of zeros.

    LoRA starts one side uniformly at random and most of that start is still there. In eight bits
    uniform numbers lose about half as much as Gaussian ones, which singular vectors resemble; with
    fewer bits, components by size are ahead.
    """
    if layer.squared_norm == 0.0:
        return []
    code = pair_code(layer)
    return [replace(_coded_candidate(layer, code, code.bits), unrotated=True)]


def _coded_candidate(layer: Layer, code: SpectralCode, bits: tuple[int, ...]) -> LowRank:
    rank = len(code.bits)
    return _priced(
        layer,
        LowRank(parameters=rank * sum(layer.shape), squared_error=0.0, rank=rank, bits=bits),
        code,
    )


def lsr_candidate(solution: PairSolution, cache: SpillCache) -> Lsr:
    """The price of a solution, whose factors wait in the cache."""
    product = solution.product
    return Lsr(
        parameters=product.parameters,
        squared_error=solution.error**2,
        rank=product.product_shape.inner_rank,
        shape=product.product_shape,
        ranks=product.separation_ranks,
        product=cache.put(product),
    )


# -- in a storage type -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Materialized:
    """A candidate whose factors were made once and wait in a cache as they will be written."""

    candidate: Candidate  # its price is that of the stored factors
    stored: Callable[[], Stored] | None = field(repr=False)  # None for a layer left out

    @property
    def form(self) -> SeparatedProduct | None:
        """The product that a reader gets; None for a layer left out."""
        return None if self.stored is None else self.stored().dequantized()


def materialize(layer: Layer, candidate: Candidate, cache: SpillCache) -> Materialized:
    """Make the factors of a candidate in its storage, and measure them in the layer's norm.

    An LSR product in integers is solved for in the layer's norm (`refitted_product`), or rounded as
    it is if that is nearer.
    """
    stored = candidate.stored(layer)
    if stored is None:
        return Materialized(candidate, None)
    priced = _priced(layer, candidate, stored)
    for other in candidate.alternatives(layer):
        other_priced = _priced(layer, candidate, other)
        if other_priced.squared_error < priced.squared_error:
            stored, priced = other, other_priced
    return Materialized(priced, cache.put(stored))


def priced_as(
    layer: Layer, candidate: Candidate, storage: str, *, measured: bool = True
) -> Candidate:
    """Return the candidate in a storage: its bytes counted, its error measured on rounded factors.

    Without ``measured`` a floating type leaves the error as it is. Integers for a low-rank pair are
    `water_filled_candidates`.
    """
    candidate = replace(candidate, storage=storage)
    # Codes are always measured: what few bits lose cannot be told from the exact error.
    if storage not in INTEGER_BITS and not measured:
        return replace(candidate, bytes=candidate.unrounded_bytes())
    stored = candidate.stored(layer)
    return candidate if stored is None else _priced(layer, candidate, stored)


C = TypeVar("C", bound=Candidate)


def _priced(layer: Layer, candidate: C, stored: Stored) -> C:
    """Return the candidate at the price of what is stored of it: its bytes, and the error of what a reader gets."""
    error = layer.squared_error(stored.dequantized())
    return replace(candidate, bytes=stored.bytes, storage=stored.storage, squared_error=error)
