"""What one layer can become: low rank, an LSR product, a direct Kronecker sum, itself, nothing; each with its price."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from lsrdecomp.arrays import namespace
from lsrdecomp.codes import CodedProduct
from lsrdecomp.compression.quantize import stored_product
from lsrdecomp.decompose import choose_solver
from lsrdecomp.precision import precision
from lsrdecomp.product import SeparatedProduct, low_rank_product
from lsrdecomp.separated import SeparatedMatrix
from lsrdecomp.shape import KroneckerShape, ProductShape
from lsrdecomp.solvers.pair import JointALS, PairSolution
from lsrdecomp.solvers.svd import tail_norms
from lsrdecomp.targets import LowRank
from lsrdecomp.weighted import weighted_norm, weighted_residual_norm, weighted_svd
from lsrdecomp.weights import NormWeights

Form = SeparatedProduct | SeparatedMatrix
Configuration = tuple[ProductShape, tuple[int, int]]
"""A shape of an LSR product, and the terms of its out side and its in side."""

BATCH_ENTRIES = 2**24
"""Entries of the pairs and dense weights solved together: bounds the memory of a batch."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A LoRA layer to compress, and the norm its error counts in.

    Parameters
    ----------
    name : str
    pair : LowRank, shape (m, n)
        ΔW with its scale folded in.
    weights : NormWeights, optional
        Absent: the Frobenius norm.
    """

    name: str
    pair: LowRank
    weights: NormWeights | None = None

    @cached_property
    def norms(self) -> NormWeights:
        return self.weights if self.weights is not None else NormWeights.frobenius(self.pair.shape)

    @cached_property
    def squared_norm(self) -> float:
        """‖G^½ ΔW C^½‖_F²: the loss of dropping the layer."""
        return self.pair.norm**2 if self.norms.is_frobenius else weighted_norm(self.pair, self.norms) ** 2

    def squared_error(self, form: Form) -> float:
        """‖G^½ (ΔW − M̂) C^½‖_F², from a formed residual."""
        if self.norms.is_frobenius:
            return self.pair.residual_norm(form) ** 2
        return weighted_residual_norm(self.pair, form, self.norms) ** 2

    @property
    def parameters(self) -> int:
        """Numbers in the LoRA pair."""
        return self.pair.rank * sum(self.pair.shape)

    @property
    def kind(self) -> tuple[object, ...]:
        """Layers of one kind can be solved together."""
        return (*self.pair.shape, type(self.norms.output), type(self.norms.input))


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
    build: Callable[[], Form] | None = field(default=None, repr=False)  # makes the factors; None for "drop"
    codes: CodedProduct | None = field(default=None, repr=False)  # what is on disk, for integer storage
    exact: SeparatedProduct | None = field(default=None, repr=False)  # an LSR product before rounding
    polished: bool = False

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
    build = partial(low_rank_product, layer.pair.left, layer.pair.right)
    shape = ProductShape.low_rank(layer.pair.shape, layer.pair.rank)
    return Candidate("keep", shape, (1, 1), layer.parameters, 0.0, build=build)


def low_rank_candidates(layer: Layer, most: float = float("inf")) -> list[Candidate]:
    """The best approximation of every rank in the layer's norm, of at most ``most`` parameters; built on demand."""
    svd = weighted_svd(layer.pair, layer.norms)
    tails, step = tail_norms(svd[1]), sum(layer.pair.shape)
    found = []
    for rank in range(1, len(tails)):
        if rank * step > most:
            break
        shape = ProductShape.low_rank(layer.pair.shape, rank)
        build = partial(_truncated, svd, rank)
        found.append(Candidate("low rank", shape, (1, 1), rank * step, tails[rank] ** 2, build=build))
    return found


def lsr_candidates(
    layers: Sequence[Layer],
    configurations: Iterable[Configuration],
    solver: JointALS,
    *,
    on_configuration: Callable[[Configuration], object] | None = None,
) -> list[list[Candidate]]:
    """LSR products of the given shapes for layers of one kind, solved together; one list per layer."""
    found: list[list[Candidate]] = [[] for _ in layers]
    for shape, ranks in configurations:
        for place, solution in enumerate(solve_together(layers, shape, ranks, solver)):
            found[place].append(lsr_candidate(solution))
        if on_configuration is not None:
            on_configuration((shape, ranks))
    return found


def lsr_candidate(solution: PairSolution) -> Candidate:
    """The price of a solution; its factors are held."""
    product = solution.product
    return Candidate(
        "LSR",
        product.product_shape,
        product.separation_ranks,
        product.parameters,
        solution.error**2,
        build=partial(_itself, product),
        exact=product,
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
    for part in _batches(layers):
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


def stored_as(layer: Layer, candidate: Candidate, storage: str) -> Candidate:
    """The candidate in a storage type: its bytes counted, its factors rounded, its error measured anew.

    A direct sum stays in floating types; integers for a low-rank pair are `spectral.water_filled_candidates`.
    """
    if candidate.build is None:
        return replace(candidate, storage=storage)
    form = candidate.build()
    stored: Form
    if isinstance(form, SeparatedProduct):
        coded = stored_product(form, storage)
        stored, size, codes = coded.product, coded.bytes, coded.codes
        if candidate.structure != "LSR":
            size = math.ceil(candidate.parameters * precision(storage).bytes)
    else:
        stored, size, codes = form.round_to(storage), math.ceil(form.parameters * precision(storage).bytes), None
    error, build = layer.squared_error(stored), partial(_itself, stored)
    return replace(candidate, storage=storage, bytes=size, squared_error=error, build=build, codes=codes)


def _truncated(svd: tuple[object, object, object], rank: int) -> SeparatedProduct:
    u, sigma, vh = svd
    root = namespace(sigma).sqrt(sigma[:rank])  # type: ignore[index]
    return low_rank_product(u[:, :rank] * root, root[:, None] * vh[:rank, :])  # type: ignore[index]


def _itself(form: Form) -> Form:
    return form


def _batches(layers: Sequence[Layer]) -> list[slice]:
    """Runs of layers of at most `BATCH_ENTRIES` entries, at least one layer each."""
    runs, start, size = [], 0, 0
    for i, layer in enumerate(layers):
        dense = [w for w in (layer.norms.output, layer.norms.input) if hasattr(w, "matrix")]
        entries = layer.parameters + sum(w.size**2 for w in dense)
        if i > start and size + entries > BATCH_ENTRIES:
            runs.append(slice(start, i))
            start, size = i, 0
        size += entries
    return [*runs, slice(start, len(layers))]
