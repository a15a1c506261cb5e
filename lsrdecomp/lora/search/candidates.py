"""Candidates for a layer, each with its cost and error: nothing, itself, low rank, an LSR product.

A `Candidate` has no factors, since a search compares thousands. Its class is its structure: how it
is called, whether it counts as truncated SVD, which storages it exists in, and how its factors are
made. `priced_as` returns it with the bytes and the error in a storage; `materialize` makes the
factors of one that was chosen. `FAMILIES` lists the structures that need no solve.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from lsrdecomp.arrays import tail_norms
from lsrdecomp.kronecker.product import SeparatedProduct, low_rank_product
from lsrdecomp.lora.search.quantize import (
    INTEGER_BITS,
    coded_size,
    refitted_product,
    stored_pair,
    stored_product,
)
from lsrdecomp.lora.search.spectral_codes import (
    MAX_BITS,
    ComponentCodes,
    equal_width_levels,
    layer_svd,
    pair_code,
    svd_code,
    water_fill,
)
from lsrdecomp.precision import precision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lsrdecomp.formats.quantized import SpectralCode
    from lsrdecomp.formats.stored import Stored
    from lsrdecomp.kronecker.shape import ProductShape
    from lsrdecomp.lora.search.caches import SpillCache
    from lsrdecomp.lora.search.layers import Layer
    from lsrdecomp.lora.search.shapes import Configuration
    from lsrdecomp.lora.search.spectral_codes import Level
    from lsrdecomp.solvers.solver import PairSolution


@dataclass(frozen=True, kw_only=True)
class Candidate(ABC):
    """A structure that may replace a layer, with its cost and its error.

    Attributes
    ----------
    structure : str
        Name of the structure in tables, on disk and in JSON.
    is_truncated_svd : bool
        Whether it is among the candidates of plain truncated SVD, whose best error is reported for
        comparison.
    parameters : int
    squared_error : float
        Absolute, in the layer's norm.
    storage : str
        Element type of the factors.
    bytes : int
        Size of the factors as stored, without the file's header.
    rank : int
        Rank of the layer when it is served as a LoRA.
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
        """Make the factors as they are stored; None leaves the layer out."""

    def alternatives(self, _layer: Layer) -> Iterable[Stored]:
        """Make other factors of the same size; `materialize` takes the nearest to the layer."""
        return ()

    def exists_in(self, storage: str) -> bool:
        """Return whether the structure can be stored in a type; by default in floating types."""
        return storage not in INTEGER_BITS

    def unmade_bytes(self, storage: str) -> int:
        """Return the bytes in a floating type, without making the factors.

        To be overridden by a structure that stores more than its parameters.
        """
        return math.ceil(self.parameters * precision(storage).bytes)


@dataclass(frozen=True, kw_only=True)
class DropCandidate(Candidate):
    """The layer left out: ΔW = 0."""

    structure = "drop"
    is_truncated_svd = True

    def stored(self, _layer: Layer) -> None:
        """Return None: nothing is stored."""

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
    """The truncated SVD in the layer's norm, in floating point or in integer codes."""

    structure = "low rank"
    is_truncated_svd = True
    bits: tuple[int, ...] = ()  # width of each component's codes; empty: floating point
    groups: tuple[int, ...] = ()  # numbers of each component that share a step
    unrotated: bool = False  # codes of the pair's own columns and rows, not of singular vectors

    def stored(self, layer: Layer) -> Stored:
        """Return codes of each component, or both factors in a floating type."""
        if not self.bits:
            return stored_pair(*layer.truncated(self.rank), self.storage)
        return pair_code(layer) if self.unrotated else svd_code(layer, self.bits, self.groups)


@dataclass(frozen=True, kw_only=True)
class LsrCandidate(Candidate):
    """A product of separated matrices."""

    structure = "LSR"
    is_truncated_svd = False
    shape: ProductShape
    ranks: tuple[int, int]
    product: Callable[[], SeparatedProduct] = field(repr=False)  # reads it, not rounded
    refined: bool = False  # whether more sweeps were made after it was chosen

    @property
    def configuration(self) -> Configuration:
        """Shape, and terms of both sides."""
        return self.shape, self.ranks

    def stored(self, _layer: Layer) -> Stored:
        """Return the product, rounded factor by factor."""
        return stored_product(self.product(), self.storage)

    def alternatives(self, layer: Layer) -> Iterable[Stored]:
        """Make integer codes that are solved in the layer's norm, not just rounded."""
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
    """Return the candidates that need no solve, up to about a number of parameters."""
    return [candidate for family in FAMILIES for candidate in family(layer, max_parameters)]


def _drop_or_keep(layer: Layer, _max_parameters: float) -> list[Candidate]:
    """Return the smallest and the largest candidate, whatever the limit."""
    return [drop(layer), keep(layer)]


def low_rank_candidates(layer: Layer, max_parameters: float = math.inf) -> list[LowRankCandidate]:
    """Return the best approximation of every rank in the layer's norm."""
    errors = tail_norms(layer.sigma)
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
"""Functions that return the candidates of a layer that need no solve, up to about a number of
parameters."""


MAX_CODE_SIZES = 24
"""Maximum sizes at which a layer offers truncated SVD in integers."""
CONSECUTIVE_RANKS = 16
"""Where parameters are counted, such a size for each rank up to this one; larger ranks are spaced
evenly in their logarithm."""


def water_filled_candidates(
    layer: Layer,
    max_bytes: float = math.inf,
    *,
    max_bits: int = MAX_BITS,
    n_sizes: int = MAX_CODE_SIZES,
) -> list[LowRankCandidate]:
    """Return truncated SVDs in codes whose bits are spread over the components, at several sizes.

    Sizes go from the smallest useful one to ``max_bits`` for each component.

    Parameters
    ----------
    layer : Layer
    max_bytes : float
        Maximum bytes of the codes.
    max_bits : int
        Largest width of a component.
    n_sizes : int
        Maximum number of sizes.
    """
    svd = layer_svd(layer)
    codes = ComponentCodes(layer, svd)
    levels_by_step = water_fill(layer, max_bits, svd=svd)
    if not levels_by_step:
        return []
    # Consecutive steps differ in one component: take some, evenly spaced in their logarithm.
    n_steps = len(levels_by_step)
    spaced = np.geomspace(1, n_steps, min(n_sizes, n_steps))
    candidates = []
    for step in sorted({round(value) for value in spaced}):
        levels = levels_by_step[step - 1]
        if sum(bits for bits, _ in levels) * sum(layer.shape) <= 8.0 * max_bytes:
            candidates.append(_coded_candidate(layer, *codes.priced(levels), levels))
    return candidates


def equal_bits_candidates(layer: Layer, bits: int) -> list[LowRankCandidate]:
    """Return truncated SVDs in codes of one width, for budgets that count parameters.

    They have all ranks up to `CONSECUTIVE_RANKS`, and some larger ones.
    """
    svd = layer_svd(layer)
    codes = ComponentCodes(layer, svd)
    max_rank = int(np.count_nonzero(svd[1]))
    last = CONSECUTIVE_RANKS
    ranks = set(range(1, min(max_rank, last) + 1))
    if max_rank > last:
        spaced = np.geomspace(last, max_rank, MAX_CODE_SIZES - last)
        ranks |= {round(value) for value in spaced}
    candidates = []
    for rank in sorted(ranks):
        levels = equal_width_levels(layer, bits, rank, svd=svd)
        candidates.append(_coded_candidate(layer, *codes.priced(levels), levels))
    return candidates


def unrotated_candidates(layer: Layer) -> list[LowRankCandidate]:
    """Return the pair's own columns and rows in eight bits; nothing for a layer of zeros.

    LoRA starts one side uniformly at random, and most of that start is still there after training.
    In eight bits uniform numbers lose about half as much as Gaussian ones, which singular vectors
    resemble. With fewer bits singular vectors are better.
    """
    if layer.squared_norm == 0.0:
        return []
    code = pair_code(layer)
    squared_error = layer.squared_error(code.dequantized())
    levels = list(zip(code.bits, code.groups, strict=True))
    return [replace(_coded_candidate(layer, code, squared_error, levels), unrotated=True)]


def _coded_candidate(
    layer: Layer, code: SpectralCode, squared_error: float, levels: Sequence[Level]
) -> LowRankCandidate:
    """Return the candidate of a code of the layer, with its bytes and its error."""
    rank = len(code.bits)
    return LowRankCandidate(
        parameters=rank * sum(layer.shape),
        squared_error=squared_error,
        rank=rank,
        bytes=code.bytes,
        storage=code.storage,
        bits=tuple(bits for bits, _ in levels),
        groups=tuple(group for _, group in levels),
    )


def lsr_candidate(solution: PairSolution, cache: SpillCache) -> LsrCandidate:
    """Return the candidate of a solution, and keep its factors in the cache."""
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


@dataclass(frozen=True, slots=True)
class StoredSummary:
    """Sizes and terms of a layer as it is stored, without its numbers.

    Attributes
    ----------
    shape : str
        The Kronecker sizes of both sides.
    separation_ranks : (int, int)
        Terms of the output side and of the input side that are not zero.
    condition : float
        γ of the product: rounding its factors costs about γ·μ·‖ΔW‖_F.
    parameters, bytes : int
    storage : str
    """

    shape: str
    separation_ranks: tuple[int, int]
    condition: float
    parameters: int
    bytes: int
    storage: str

    @classmethod
    def of(cls, stored: Stored, product: SeparatedProduct) -> StoredSummary:
        """Return the summary of a stored layer and of the product that a reader gets."""
        return cls(
            str(stored.shape),
            product.separation_ranks,
            product.condition,
            stored.parameters,
            stored.bytes,
            stored.storage,
        )


@dataclass(frozen=True, eq=False)
class Materialized:
    """A candidate with its factors as they will be written."""

    candidate: Candidate  # with the bytes and the error of these factors
    stored: Callable[[], Stored] | None = field(repr=False)  # reads them; None for a layer left out
    summary: StoredSummary | None = None  # what a report says of them; None for a layer left out

    @property
    def product(self) -> SeparatedProduct | None:
        """The product that is read from the written factors; None for a layer left out."""
        return None if self.stored is None else self.stored().dequantized()


def materialize(layer: Layer, candidate: Candidate, cache: SpillCache) -> Materialized:
    """Make the factors of a candidate in its storage, and measure them in the layer's norm.

    If the candidate has alternatives, the nearest to the layer is taken.
    """
    best = candidate.stored(layer)
    if best is None:
        return Materialized(candidate, None)
    product = best.dequantized()
    error = layer.squared_error(product)
    for other in candidate.alternatives(layer):
        other_product = other.dequantized()
        other_error = layer.squared_error(other_product)
        if other_error < error:
            best = other
            product = other_product
            error = other_error
    return Materialized(
        replace(candidate, bytes=best.bytes, storage=best.storage, squared_error=error),
        cache.put(best),
        StoredSummary.of(best, product),
    )


def priced_as(
    layer: Layer, candidate: Candidate, storage: str, *, measured: bool = True
) -> Candidate:
    """Return a candidate with its bytes and its error in a storage.

    Without ``measured`` the error in a floating type is that before rounding. Truncated SVDs in
    integers are candidates of their own, `water_filled_candidates`.
    """
    # Codes are always measured: the loss in few bits does not follow from the error before.
    if storage not in INTEGER_BITS and not measured:
        return replace(candidate, storage=storage, bytes=candidate.unmade_bytes(storage))
    candidate = replace(candidate, storage=storage)
    stored = candidate.stored(layer)
    return candidate if stored is None else _priced(layer, candidate, stored)


GAUSSIAN_ERRORS = {2: 0.187, 3: 0.042, 4: 0.0098, 5: 0.0023, 6: 0.00062, 8: 0.000033}
"""Relative squared error of 64 Gaussian numbers in codes (`nearest_codes`), by their bits."""


def predicted_as(exact: LsrCandidate, rounded: Candidate, storage: str) -> Candidate:
    """Return a product with the bytes and the loss that it may have in another width of codes.

    What rounding adds to the loss is taken to be in proportion to the relative error of products of
    rounded Gaussian numbers.

    Parameters
    ----------
    exact, rounded : Candidate
        The product before rounding and in one width of codes.
    storage : str
        The other width.
    """
    bits = INTEGER_BITS[storage]
    n_factors = 2 * exact.shape.order
    ratio = _rounding_error(bits, n_factors)
    ratio /= _rounding_error(INTEGER_BITS[rounded.storage], n_factors)
    added = max(0.0, rounded.squared_error - exact.squared_error)
    return replace(
        rounded,
        storage=storage,
        bytes=coded_size(exact.parameters, exact.ranks, bits),
        squared_error=exact.squared_error + ratio * added,
    )


def _rounding_error(bits: int, n_factors: int) -> float:
    """Return the relative squared error of a Kronecker product of rounded Gaussian factors."""
    return 1.0 - (1.0 - GAUSSIAN_ERRORS[bits]) ** n_factors


C = TypeVar("C", bound=Candidate)


def _priced(layer: Layer, candidate: C, stored: Stored) -> C:
    """Return the candidate with the bytes and the error of stored factors."""
    error = layer.squared_error(stored.dequantized())
    return replace(candidate, bytes=stored.bytes, storage=stored.storage, squared_error=error)
