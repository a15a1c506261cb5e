"""The grid of shapes for each size of layer, and the neighbours of a shape. Integers only.

Which shapes are worth solving for hardly depends on the adapter: the most even splits into two and
three factors where there are few parameters, tall ones (low rank of a reshaped side) where there
are more. So no shape is probed; the table is `lsrdecomp.compression.effort.ShapeGrid`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from lsrdecomp.compression.effort import DEFAULT_EFFORT, Ranks, ShapeGrid
from lsrdecomp.kronecker.shape import ProductShape, divisors, splits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Configuration = tuple[ProductShape, Ranks]
"""A shape of an LSR product, and the terms of its out side and its in side."""

DEFAULT_GRID = DEFAULT_EFFORT.grid


@dataclass(frozen=True, slots=True)
class ShapeRequest:
    """One shape at growing numbers of terms, to be solved for layers of one group."""

    shape: ProductShape
    terms: tuple[Ranks, ...]


def shape_grid(
    matrix_shape: tuple[int, int],
    rank: int,
    orders: Sequence[int],
    inner_rank: int,
    max_parameters: float,
    grid: ShapeGrid = DEFAULT_GRID,
) -> list[ShapeRequest]:
    """Return the whole grid for layers of a size, in a fixed order.

    Parameters
    ----------
    matrix_shape : (int, int)
    rank : int
        Rank of the layers.
    orders : sequence of int
        Numbers of factors.
    inner_rank : int
        Largest inner rank.
    max_parameters : float
        Of a shape at its number of terms.
    grid : ShapeGrid
    """
    coarse = coarse_grid(matrix_shape, orders, max_parameters, grid)
    fine = fine_grid(matrix_shape, rank, orders, inner_rank, max_parameters, grid)
    return [*coarse, *fine]


def coarse_grid(
    matrix_shape: tuple[int, int],
    orders: Sequence[int],
    max_parameters: float,
    grid: ShapeGrid = DEFAULT_GRID,
) -> list[ShapeRequest]:
    """Return the even splits without an inner rank.

    They are cheap to solve, and near enough to see what a budget gives a layer.
    """
    rows, columns = matrix_shape
    requests = []
    for order in sorted(orders, reverse=True):
        shape = ProductShape(_even_split(rows, order), (1,) * order, _even_split(columns, order))
        requests.append((shape, grid.terms_of_two if order == 2 else grid.terms_of_three))
    return _fitting_requests(requests, max_parameters)


def fine_grid(
    matrix_shape: tuple[int, int],
    rank: int,
    orders: Sequence[int],
    inner_rank: int,
    max_parameters: float,
    grid: ShapeGrid = DEFAULT_GRID,
) -> list[ShapeRequest]:
    """Return even and tall shapes of two factors with an inner rank."""
    if 2 not in orders:
        return []
    rows, columns = matrix_shape
    max_rank = min(rank, inner_rank, rows, columns)
    out, into = _even_split(rows, 2), _even_split(columns, 2)
    even = [
        ProductShape(out, inner, into) for inner in grid.even_inner if math.prod(inner) <= max_rank
    ]
    tall = [
        _tall_shape(matrix_shape, near, inner)
        for near, inner in grid.tall
        if max(inner) <= max_rank
    ]
    shapes = [*even, *tall]
    # Large inner ranks cost about as much as a rank of truncated SVD, m + n: below that they are
    # not worth a solve.
    if max_parameters < grid.min_large_ranks * (rows + columns):
        shapes = [shape for shape in shapes if shape.inner not in grid.large_inner]
    return _fitting_requests([(shape, grid.terms_with_inner) for shape in shapes], max_parameters)


def _fitting_requests(
    requests: Iterable[tuple[ProductShape, Sequence[Ranks]]], max_parameters: float
) -> list[ShapeRequest]:
    """Return each shape once, at the numbers of terms that it can have in so many parameters."""
    by_shape: dict[ProductShape, ShapeRequest] = {}
    for shape, terms in requests:
        fitting = []
        for ranks in terms:
            can_have = clipped(shape, ranks) == ranks
            if can_have and shape.parameters(*ranks) <= max_parameters:
                fitting.append(ranks)
        if fitting:
            by_shape[shape] = ShapeRequest(shape, tuple(fitting))
    return list(by_shape.values())


def shapes_like(
    chosen: Mapping[str, Configuration],
    sizes: Mapping[str, tuple[int, int]],
    common_shapes: int = DEFAULT_EFFORT.common_shapes,
) -> dict[str, tuple[ShapeRequest, ...]]:
    """Return for each layer the shape chosen for it, and those chosen most often for its size.

    Every shape at the numbers of terms that any layer of that size took, and at one more.

    Parameters
    ----------
    chosen : Mapping of layer name to configuration
    sizes : Mapping of layer name to (m, n)
        The layers that are asked for.
    common_shapes : int
        How many of those chosen most often.
    """
    by_layer: dict[str, tuple[ShapeRequest, ...]] = {}
    for size in dict.fromkeys(sizes.values()):
        of_size = {name: pair for name, pair in chosen.items() if pair[0].matrix_shape == size}
        requests = _requests_for(of_size.values())
        counts = Counter(shape for shape, _ in of_size.values())
        common = [shape for shape, _ in counts.most_common(common_shapes)]
        for name, other_size in sizes.items():
            if other_size == size:
                shapes = [*common, of_size[name][0]] if name in of_size else common
                by_layer[name] = tuple(requests[shape] for shape in dict.fromkeys(shapes))
    return by_layer


def _requests_for(chosen: Iterable[Configuration]) -> dict[ProductShape, ShapeRequest]:
    """Return every chosen shape at the numbers of terms it was chosen at, and at one more."""
    terms: dict[ProductShape, set[Ranks]] = {}
    for shape, ranks in chosen:
        one_more = clipped(shape, more_terms(ranks)[-1])
        terms.setdefault(shape, set()).update((ranks, one_more))
    requests = {}
    for shape, all_ranks in terms.items():
        ascending = sorted(all_ranks, key=lambda ranks: (sum(ranks), ranks))
        requests[shape] = ShapeRequest(shape, tuple(ascending))
    return requests


def neighbours(configuration: Configuration, max_rank: int) -> Iterator[Configuration]:
    """Yield shapes one step away.

    An inner factor one more or less, a factor of a side moved, a split exchanged.
    """
    shape, ranks = configuration
    near = [(shape.out, inner, shape.into) for inner in _steps(shape.inner, max_rank)]
    near += [(out, shape.inner, shape.into) for out in _moves(shape.out)]
    near += [(shape.out, shape.inner, into) for into in _moves(shape.into)]
    itself = (shape.out, shape.inner, shape.into)
    for sizes in dict.fromkeys(near):
        if sizes != itself:
            neighbour = ProductShape(*sizes)
            yield neighbour, clipped(neighbour, ranks)


def more_terms(ranks: Ranks) -> list[Ranks]:
    """Return a term more on one side, on the other, on both."""
    s, t = ranks
    return [(s + 1, t), (s, t + 1), (s + 1, t + 1)]


def terms_around(ranks: Ranks) -> tuple[Ranks, ...]:
    """Return a term fewer on both sides, these, a term more on both."""
    s, t = ranks
    fewer = max(1, s - 1), max(1, t - 1)
    return tuple(dict.fromkeys([fewer, ranks, (s + 1, t + 1)]))


def clipped(shape: ProductShape, ranks: Ranks) -> Ranks:
    """Return these numbers of terms, or as many as the sides can need."""
    left, right = ranks
    max_left, max_right = shape.left.max_separation_rank, shape.right.max_separation_rank
    return min(left, max_left), min(right, max_right)


@cache
def _even_split(size: int, order: int) -> tuple[int, ...]:
    """Return the split into so many factors that are most alike, ascending."""
    most_even = min(splits(size, order), key=lambda split: max(split) / min(split))
    return tuple(sorted(most_even))


def _tall_shape(matrix_shape: tuple[int, int], near: int, inner: Ranks) -> ProductShape:
    """Return a shape whose small factor is outermost or innermost, where the inner rank is."""
    out, into = (_tall_split(size, near) for size in matrix_shape)
    if inner[0] > 1:
        return ProductShape(out, inner, into)
    return ProductShape(out[::-1], inner, into[::-1])


@cache
def _tall_split(size: int, near: int) -> tuple[int, int]:
    """Return (q, size / q) with the divisor q nearest to a small number, not one."""
    candidates = [q for q in divisors(size) if q > 1]
    small = min(candidates, key=lambda q: abs(math.log(q / near)), default=1)
    return small, size // small


def _steps(inner: tuple[int, ...], max_rank: int) -> Iterator[tuple[int, ...]]:
    """Yield inner shapes with one factor one more or one less."""
    for i in range(len(inner)):
        for change in (1, -1):
            stepped = (*inner[:i], inner[i] + change, *inner[i + 1 :])
            if stepped[i] >= 1 and math.prod(stepped) <= max_rank:
                yield stepped


def _moves(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield other splits: two factors exchanged, or a prime of one given to another."""
    for i in range(len(sizes)):
        for j in range(len(sizes)):
            if i < j:
                exchanged = list(sizes)
                exchanged[i], exchanged[j] = sizes[j], sizes[i]
                yield tuple(exchanged)
            if i != j:
                for prime in _primes(sizes[i])[:2]:
                    moved = list(sizes)
                    moved[i] //= prime
                    moved[j] *= prime
                    yield tuple(moved)


@cache
def _primes(size: int) -> list[int]:
    """Return the distinct primes of a size, ascending."""
    return [divisor for divisor in divisors(size) if len(divisors(divisor)) == 2]
