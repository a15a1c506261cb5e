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
from lsrdecomp.compression.effort import DEFAULT_EFFORT
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

    from lsrdecomp.compression.caches import SpillCache
    from lsrdecomp.compression.effort import SearchEffort
    from lsrdecomp.compression.layers import Layer
    from lsrdecomp.compression.shapes import Configuration
    from lsrdecomp.formats.quantized import SpectralCode
    from lsrdecomp.formats.stored import Stored
    from lsrdecomp.kronecker.shape import ProductShape
    from lsrdecomp.solvers.base import PairSolution


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
        """Make what is stored of the layer; None leaves the layer out."""

    def alternatives(self, _layer: Layer) -> Iterable[Stored]:
        """Make alternatives of the same size, of which the nearest to the layer is taken."""
        return ()

    def exists_in(self, storage: str) -> bool:
        """Return whether the structure can be stored so; by default in every floating type."""
        return storage not in INTEGER_BITS

    def unmade_bytes(self) -> int:
        """Return the size in a floating type before anything is made: of the parameters alone.

        A structure that stores more beside its parameters says so here.
        """
        return math.ceil(self.parameters * precision(self.storage).bytes)


@dataclass(frozen=True, kw_only=True)
class DropCandidate(Candidate):
    """The layer left out: ΔW = 0."""

    structure = "drop"
    is_truncated_svd = True

    def stored(self, _layer: Layer) -> None:
        """Return nothing."""

    def exists_in(self, _storage: str) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True, kw_only=True)
class KeepCandidate(Candidate):
    """The LoRA pair as it is."""

    structure = "keep"
    is_truncated_svd = True

    def stored(self, layer: Layer) -> Stored:
        """Return the pair in the candidate's storage."""
        return stored_product(low_rank_product(layer.pair.left, layer.pair.right), self.storage)


@dataclass(frozen=True, kw_only=True)
class LowRankCandidate(Candidate):
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
class LsrCandidate(Candidate):
    """A product of separated matrices."""

    structure = "LSR"
    is_truncated_svd = False
    shape: ProductShape
    ranks: tuple[int, int]
    product: Callable[[], SeparatedProduct] = field(repr=False)  # from where it waits, not rounded
    refined: bool = False

    @property
    def configuration(self) -> Configuration:
        """Shape, and terms of both sides."""
        return self.shape, self.ranks

    def stored(self, _layer: Layer) -> Stored:
        """Return the product, rounded as it is."""
        return stored_product(self.product(), self.storage)

    def alternatives(self, layer: Layer) -> Iterable[Stored]:
        """Make codes that are solved for in the layer's norm, where integers are stored."""
        if self.storage in INTEGER_BITS:
            yield refitted_product(layer, self.product(), INTEGER_BITS[self.storage])

    def exists_in(self, _storage: str) -> bool:
        """Return True."""
        return True


# -- candidates of a layer -------------------------------------------------------------------------


def drop(layer: Layer) -> DropCandidate:
    """Return the candidate that leaves the layer out."""
    return DropCandidate(parameters=0, squared_error=layer.squared_norm)


def keep(layer: Layer) -> KeepCandidate:
    """Return the candidate that keeps the LoRA pair as it is."""
    return KeepCandidate(parameters=layer.parameters, squared_error=0.0, rank=layer.rank)


def plain_candidates(layer: Layer, max_parameters: float = math.inf) -> list[Candidate]:
    """Return the candidates of all `FAMILIES`, of at most about so many parameters."""
    return [candidate for family in FAMILIES for candidate in family(layer, max_parameters)]


def _drop_or_keep(layer: Layer, _max_parameters: float) -> list[Candidate]:
    """Return both ends of the scale, whatever the limit."""
    return [drop(layer), keep(layer)]


def low_rank_candidates(layer: Layer, max_parameters: float = math.inf) -> list[LowRankCandidate]:
    """Return the best approximation of every rank in the layer's norm."""
    errors = tail_norms(layer.gauge[1])
    parameters_per_rank = sum(layer.shape)
    candidates = []
    for rank in range(1, len(errors)):
        parameters = rank * parameters_per_rank
        if parameters <= max_parameters:
            squared_error = errors[rank] ** 2
            candidates.append(
                LowRankCandidate(parameters=parameters, squared_error=squared_error, rank=rank)
            )
    return candidates


FAMILIES: tuple[Callable[[Layer, float], Sequence[Candidate]], ...] = (
    _drop_or_keep,
    low_rank_candidates,
)
"""Candidates that need no solve, of a layer and a number of parameters above which none is
wanted."""


def water_filled_candidates(
    layer: Layer, max_bytes: float = math.inf, effort: SearchEffort = DEFAULT_EFFORT
) -> list[LowRankCandidate]:
    """Return SVD with bits spread over its components, at several sizes.

    From the smallest useful size to eight bits each.

    Parameters
    ----------
    layer : Layer
    max_bytes : float
        Of the codes.
    effort : SearchEffort
        Says how many sizes at most.
    """
    svd = layer_svd(layer)
    filled = water_fill(layer, *svd)
    if not filled:
        return []
    # Neighbouring steps differ by the bits of one component: of many some, evenly spaced in their
    # logarithm.
    steps = np.geomspace(1, len(filled), min(effort.max_code_sizes, len(filled)))
    candidates = []
    for step in sorted({round(step) for step in steps}):
        bits = filled[step - 1]
        if sum(bits) * sum(layer.shape) <= 8.0 * max_bytes:
            candidates.append(_coded_candidate(layer, spectral_code(layer, svd, bits), bits))
    return candidates


def equal_bits_candidates(
    layer: Layer, bits: int, effort: SearchEffort = DEFAULT_EFFORT
) -> list[LowRankCandidate]:
    """Return SVD with equally many bits in every component, for budgets that count parameters.

    Of all ranks up to `SearchEffort.consecutive_ranks`, then of some more.
    """
    svd = layer_svd(layer)
    rank = int(np.count_nonzero(svd[1]))
    last = effort.consecutive_ranks
    ranks = set(range(1, min(rank, last) + 1))
    if rank > last:
        more = np.geomspace(last, rank, effort.max_code_sizes - last)
        ranks |= {round(value) for value in more}
    candidates = []
    for some_rank in sorted(ranks):
        widths = (bits,) * some_rank
        candidates.append(_coded_candidate(layer, spectral_code(layer, svd, widths), widths))
    return candidates


def unrotated_candidates(layer: Layer) -> list[LowRankCandidate]:
    """Return the pair's own columns and rows as components of eight bits.

    Nothing for a layer of zeros. LoRA starts one side uniformly at random and most of that start is
    still there. In eight bits uniform numbers lose about half as much as Gaussian ones, which
    singular vectors resemble; with fewer bits, components by size are ahead.
    """
    if layer.squared_norm == 0.0:
        return []
    code = pair_code(layer)
    return [replace(_coded_candidate(layer, code, code.bits), unrotated=True)]


def _coded_candidate(layer: Layer, code: SpectralCode, bits: tuple[int, ...]) -> LowRankCandidate:
    """Return the candidate of a code that was made of the layer, at its price."""
    rank = len(code.bits)
    parameters = rank * sum(layer.shape)
    unpriced = LowRankCandidate(parameters=parameters, squared_error=0.0, rank=rank, bits=bits)
    return _priced(layer, unpriced, code)


def lsr_candidate(solution: PairSolution, cache: SpillCache) -> LsrCandidate:
    """Return the candidate of a solution, whose factors wait in the cache."""
    product = solution.product
    return LsrCandidate(
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
    def product(self) -> SeparatedProduct | None:
        """The product that a reader gets; None for a layer left out."""
        return None if self.stored is None else self.stored().dequantized()


def materialize(layer: Layer, candidate: Candidate, cache: SpillCache) -> Materialized:
    """Make the factors of a candidate in its storage, and measure them in the layer's norm.

    Of its alternatives the nearest is taken.
    """
    stored = candidate.stored(layer)
    if stored is None:
        return Materialized(candidate, None)
    priced = _priced(layer, candidate, stored)
    for other in candidate.alternatives(layer):
        other_priced = _priced(layer, candidate, other)
        if other_priced.squared_error < priced.squared_error:
            stored = other
            priced = other_priced
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
        return replace(candidate, bytes=candidate.unmade_bytes())
    stored = candidate.stored(layer)
    return candidate if stored is None else _priced(layer, candidate, stored)


C = TypeVar("C", bound=Candidate)


def _priced(layer: Layer, candidate: C, stored: Stored) -> C:
    """Return the candidate at the bytes and the error of what is stored of it."""
    error = layer.squared_error(stored.dequantized())
    return replace(candidate, bytes=stored.bytes, storage=stored.storage, squared_error=error)
