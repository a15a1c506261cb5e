"""What one layer can become: low rank, an LSR product, a direct Kronecker sum, itself, nothing; each with its price."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from lsrdecomp.compression.layers import Form, Layer, batches
from lsrdecomp.compression.quantize import INTEGER_BITS, refitted_product, stored_product
from lsrdecomp.compression.spill_cache import Shelf
from lsrdecomp.decompose import choose_solver
from lsrdecomp.formats.quantized import CodedProduct
from lsrdecomp.kronecker.product import SeparatedProduct, low_rank_product
from lsrdecomp.kronecker.shape import KroneckerShape, ProductShape
from lsrdecomp.precision import precision
from lsrdecomp.solvers.base import PairSolution
from lsrdecomp.solvers.pair.joint_als import JointALS
from lsrdecomp.solvers.svd.dense import tail_norms

F = TypeVar("F", bound=Form)
Configuration = tuple[ProductShape, tuple[int, int]]
"""A shape of an LSR product, and the terms of its out side and its in side."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to store a layer."""

    structure: str  # "drop", "low rank", "LSR", "direct", "keep"
    shape: ProductShape | KroneckerShape | None
    ranks: tuple[int, int]
    parameters: int
    squared_error: float  # absolute, in the layer's norm
    storage: str = "float64"  # element type the error was measured in
    bytes: int = 0  # of the factors as stored, without the file's header
    # Recipes, not factors: many candidates of many layers are held at once.
    build: Callable[[], Form] | None = field(default=None, repr=False)  # makes the factors; None for "drop"
    codes: Callable[[], CodedProduct] | None = field(default=None, repr=False)  # what is on disk, for integer storage
    exact: Callable[[], SeparatedProduct] | None = field(default=None, repr=False)  # an LSR product before rounding
    polished: bool = False
    settled: bool = False  # its factors are on a shelf as they will be written

    @property
    def configuration(self) -> Configuration:
        """Shape and ranks of an LSR product."""
        if not isinstance(self.shape, ProductShape):
            raise TypeError(f"a candidate of structure {self.structure!r} is not an LSR product")
        return self.shape, self.ranks


def drop(layer: Layer) -> Candidate:
    """The layer left out: ΔW = 0."""
    return Candidate("drop", None, (0, 0), 0, layer.squared_norm)


def keep(layer: Layer) -> Candidate:
    """The LoRA pair as it is."""
    shape = ProductShape.low_rank(layer.shape, layer.rank)
    return Candidate("keep", shape, (1, 1), layer.parameters, 0.0, build=partial(_whole, layer))


def low_rank_candidates(layer: Layer, most: float = float("inf")) -> list[Candidate]:
    """The best approximation of every rank in the layer's norm, of at most ``most`` parameters; built on demand."""
    tails, step = tail_norms(layer.gauge[1]), sum(layer.shape)
    found = []
    for rank in range(1, len(tails)):
        if rank * step > most:
            break
        shape = ProductShape.low_rank(layer.shape, rank)
        build = partial(_truncated, layer, rank)
        found.append(Candidate("low rank", shape, (1, 1), rank * step, tails[rank] ** 2, build=build))
    return found


def lsr_candidates(
    layers: Sequence[Layer],
    configurations: Iterable[Configuration],
    solver: JointALS,
    *,
    shelf: Shelf | None = None,
    on_configuration: Callable[[Configuration], object] | None = None,
) -> list[list[Candidate]]:
    """LSR products of the given shapes for layers of one kind, solved together; one list per layer."""
    found: list[list[Candidate]] = [[] for _ in layers]
    for shape, ranks in configurations:
        for place, solution in enumerate(solve_together(layers, shape, ranks, solver)):
            found[place].append(lsr_candidate(solution, shelf))
        if on_configuration is not None:
            on_configuration((shape, ranks))
    return found


def lsr_candidate(solution: PairSolution, shelf: Shelf | None = None) -> Candidate:
    """The price of a solution; its factors are held, or put on a shelf."""
    product = solution.product
    exact = partial(_itself, product) if shelf is None else shelf.put(product)
    return Candidate(
        "LSR",
        product.product_shape,
        product.separation_ranks,
        product.parameters,
        solution.error**2,
        build=exact,
        exact=exact,
    )


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


def direct_candidates(layer: Layer, shape: KroneckerShape, ranks: Iterable[int]) -> list[Candidate]:
    """Sums of Kronecker products ΔŴ = Σ W1 ⊗ W2 of the layer itself, best in the Frobenius norm.

    The error is measured in the layer's norm.
    """
    ranks = sorted({min(rank, shape.max_separation_rank) for rank in ranks})
    if not ranks:
        return []
    whole = choose_solver(layer.pair, shape).solve(layer.pair, shape, rank=ranks[-1]).approximation
    found = []
    for rank in ranks:
        form = whole.truncate(rank)
        error = layer.squared_error(form)
        found.append(Candidate("direct", shape, (rank, rank), form.parameters, error, build=partial(_itself, form)))
    return found


def stored_as(layer: Layer, candidate: Candidate, storage: str, shelf: Shelf | None = None) -> Candidate:
    """The candidate in a storage type: its bytes counted, its factors rounded, its error measured anew.

    A direct sum stays in floating types; integers for a low-rank pair are `spectral.water_filled_candidates`. The
    rounded factors are made again when they are wanted, or `settled` at once on a shelf.
    """
    if candidate.build is None:
        return replace(candidate, storage=storage)
    stored, size, codes = _rounded(candidate.build, storage)
    if candidate.structure != "LSR":
        size = math.ceil(candidate.parameters * precision(storage).bytes)
    priced = replace(candidate, storage=storage, bytes=size, squared_error=layer.squared_error(stored))
    if shelf is not None:
        return _shelved(priced, stored if codes is None else codes, shelf)
    return replace(
        priced,
        build=partial(_rounded_form, candidate.build, storage),
        codes=None if codes is None else partial(_codes, candidate.build, storage),
    )


def refitted(layer: Layer, candidate: Candidate, storage: str, shelf: Shelf) -> Candidate:
    """An LSR product in integer codes solved for in the layer's norm, or rounded as it is if that is nearer."""
    rounded = stored_as(layer, candidate, storage)
    assert candidate.exact is not None
    codes = refitted_product(layer.pair, candidate.exact(), INTEGER_BITS[storage], layer.norms)
    error = layer.squared_error(codes.dequantized())
    if not error < rounded.squared_error:
        return settled(rounded, shelf)
    return _shelved(replace(rounded, bytes=codes.bytes, squared_error=error), codes, shelf)


def settled(candidate: Candidate, shelf: Shelf) -> Candidate:
    """The candidate with its factors made once and put on the shelf: nothing is left to polish or to make again."""
    if candidate.build is None or candidate.settled:
        return candidate
    return _shelved(candidate, candidate.build() if candidate.codes is None else candidate.codes(), shelf)


def _shelved(candidate: Candidate, stored: Form | CodedProduct, shelf: Shelf) -> Candidate:
    """The candidate with what is on disk, factors or codes, put on the shelf."""
    kept: Any = shelf.put(stored)
    coded = not isinstance(stored, Form)
    return replace(
        candidate,
        build=partial(_dequantized, kept) if coded else kept,
        codes=kept if coded else None,
        exact=None,
        polished=True,
        settled=True,
    )


def _dequantized(codes: Callable[[], CodedProduct]) -> Form:
    return codes().dequantized()


def _rounded(build: Callable[[], Form], storage: str) -> tuple[Form, int, CodedProduct | None]:
    form = build()
    if isinstance(form, SeparatedProduct):
        stored = stored_product(form, storage)
        return stored.product, stored.bytes, stored.codes
    return form.round_to(storage), math.ceil(form.parameters * precision(storage).bytes), None


def _rounded_form(build: Callable[[], Form], storage: str) -> Form:
    return _rounded(build, storage)[0]


def _codes(build: Callable[[], Form], storage: str) -> CodedProduct:
    codes = _rounded(build, storage)[2]
    assert codes is not None
    return codes


def _whole(layer: Layer) -> SeparatedProduct:
    return low_rank_product(layer.pair.left, layer.pair.right)


def _truncated(layer: Layer, rank: int) -> SeparatedProduct:
    return low_rank_product(*layer.truncated(rank))


def _itself(form: F) -> F:
    return form
