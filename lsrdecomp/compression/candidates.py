"""What one layer can become, each with its price: nothing, itself, low rank, an LSR product.

A `Candidate` is a value without factors: thousands are weighed against each other. `priced_as` says
what one costs and loses in a storage type; `materialize` makes the factors of one that was chosen,
once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from lsrdecomp.arrays import tail_norms
from lsrdecomp.compression.quantize import (
    INTEGER_BITS,
    layer_svd,
    pair_code,
    quantized_product,
    refitted_product,
    spectral_code,
    svd_code,
    water_fill,
)
from lsrdecomp.errors import PrecisionError
from lsrdecomp.kronecker.separated import SeparatedProduct, low_rank_product
from lsrdecomp.precision import PRECISIONS, precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.compression.layers import Layer, SpillCache
    from lsrdecomp.compression.shapes import Configuration
    from lsrdecomp.formats.quantized import CodedProduct, QuantizedProduct, SpectralCode
    from lsrdecomp.kronecker.shape import ProductShape
    from lsrdecomp.solvers.base import PairSolution

POINTS = 24
"""Most sizes of low rank in integers that a layer offers."""

ALL_RANKS = 16
"""Up to this rank each is one of them."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What a layer can become, at a price."""

    structure: ClassVar[str]  # the word on disk and in JSON
    parameters: int
    squared_error: float  # absolute, in the layer's norm
    storage: str = "float64"  # element type of the factors
    bytes: int = 0  # of the factors as stored, without the file's header
    rank: int = 0  # that a server pays for


@dataclass(frozen=True, kw_only=True)
class Drop(Candidate):
    """The layer left out: ΔW = 0."""

    structure = "drop"


@dataclass(frozen=True, kw_only=True)
class Keep(Candidate):
    """The LoRA pair as it is."""

    structure = "keep"


@dataclass(frozen=True, kw_only=True)
class LowRank(Candidate):
    """The truncated SVD in the layer's norm."""

    structure = "low rank"
    bits: tuple[int, ...] = ()  # of each component as an integer code; empty: floating point
    unrotated: bool = False  # coded as the columns and rows that the pair has


@dataclass(frozen=True, kw_only=True)
class Lsr(Candidate):
    """A product of separated matrices."""

    structure = "LSR"
    shape: ProductShape
    ranks: tuple[int, int]
    product: Callable[[], SeparatedProduct] = field(
        repr=False
    )  # reads it from where it waits, not rounded
    refined: bool = False

    @property
    def configuration(self) -> Configuration:
        return self.shape, self.ranks


# -- candidates of a layer -------------------------------------------------------------------------


def drop(layer: Layer) -> Drop:
    """The layer left out."""
    return Drop(parameters=0, squared_error=layer.squared_norm)


def keep(layer: Layer) -> Keep:
    """The LoRA pair as it is."""
    return Keep(parameters=layer.parameters, squared_error=0.0, rank=layer.rank)


def low_rank_candidates(layer: Layer, most: float = math.inf) -> list[LowRank]:
    """The best approximation of every rank in the layer's norm, of at most ``most`` parameters."""
    tails, step = tail_norms(layer.gauge[1]), sum(layer.shape)
    ranks = (rank for rank in range(1, len(tails)) if rank * step <= most)
    return [
        LowRank(parameters=rank * step, squared_error=tails[rank] ** 2, rank=rank) for rank in ranks
    ]


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
    coded: bool
    stored: Callable[[], SeparatedProduct | CodedProduct] | None = field(
        repr=False
    )  # None for a layer left out

    @property
    def form(self) -> SeparatedProduct | None:
        """What a reader gets; None for a layer left out."""
        return None if self.stored is None else as_read(self.stored(), self.candidate.storage)


def materialize(layer: Layer, candidate: Candidate, cache: SpillCache) -> Materialized:
    """Make the factors of a candidate in its storage, and measure them in the layer's norm.

    An LSR product in integers is solved for in the layer's norm (`refitted_product`), or rounded as
    it is if that is nearer.
    """
    stored = _stored(layer, candidate)
    if stored is None:
        return Materialized(candidate, False, None)
    coded, priced = not isinstance(stored, SeparatedProduct), _priced(layer, candidate, stored)
    if coded and isinstance(candidate, Lsr):
        solved = refitted_product(layer, candidate.product(), INTEGER_BITS[candidate.storage])
        other = _priced(layer, candidate, solved)
        if other.squared_error < priced.squared_error:
            stored, priced = solved, other
    return Materialized(priced, coded, cache.put(stored))


def priced_as(
    layer: Layer, candidate: Candidate, storage: str, *, measured: bool = True
) -> Candidate:
    """The candidate in a storage type: its bytes counted, its error measured on rounded factors.

    Without ``measured`` a floating type leaves the error as it is. Integers for a low-rank pair are
    `water_filled_candidates`.
    """
    candidate = replace(candidate, storage=storage)
    # Codes are always measured: what few bits lose cannot be told from the exact error.
    if storage not in INTEGER_BITS and not measured:
        return replace(candidate, bytes=_float_bytes(candidate))
    stored = _stored(layer, candidate)
    return candidate if stored is None else _priced(layer, candidate, stored)


C = TypeVar("C", bound=Candidate)


def _priced(layer: Layer, candidate: C, stored: SeparatedProduct | CodedProduct) -> C:
    """The candidate at the price of what is stored of it: its bytes, and the error of what a reader gets."""
    error = layer.squared_error(as_read(stored, candidate.storage))
    if isinstance(stored, SeparatedProduct):
        return replace(candidate, bytes=_float_bytes(candidate), squared_error=error)
    return replace(candidate, bytes=stored.bytes, storage=stored.storage, squared_error=error)


def _stored(layer: Layer, candidate: Candidate) -> SeparatedProduct | CodedProduct | None:
    """Factors in the candidate's storage, as numbers or as codes; None for a layer left out."""
    match candidate:
        case LowRank(bits=bits) if bits:
            return pair_code(layer) if candidate.unrotated else svd_code(layer, bits)
        case Lsr():
            product = candidate.product()
        case LowRank(rank=rank):
            product = low_rank_product(*layer.truncated(rank))
        case Keep():
            product = low_rank_product(layer.pair.left, layer.pair.right)
        case _:
            return None
    return stored_product(product, candidate.storage)


def stored_product(product: SeparatedProduct, storage: str) -> SeparatedProduct | QuantizedProduct:
    """The product in factors stored as float32, float16 or bfloat16, or in codes as int8 or int4.

    The form is canonical first where there is one (two factors), so that γ = 1 and rounding adds no
    more than its own size. Raises `PrecisionError` for an unknown storage.
    """
    if storage in INTEGER_BITS:
        return quantized_product(product, INTEGER_BITS[storage])
    if storage not in PRECISIONS:
        raise PrecisionError(
            f"{storage}: unknown storage; known: {', '.join([*PRECISIONS, *INTEGER_BITS])}"
        )
    if product.left.order == 2:
        product = product.canonical()
    return product.round_to(storage)


def as_read(stored: SeparatedProduct | CodedProduct, storage: str) -> SeparatedProduct:
    """What a reader gets: the numbers that codes stand for, or factors over which weights were spread, rounded."""
    return (
        stored.round_to(storage) if isinstance(stored, SeparatedProduct) else stored.dequantized()
    )


def _float_bytes(candidate: Candidate) -> int:
    return math.ceil(candidate.parameters * precision(candidate.storage).bytes)
