"""The grid of shapes for each size of layer, and the neighbours of a shape. Integers only.

Which shapes are worth a solve hardly depends on the adapter. For few parameters they are the most
even splits into two and three factors, for more parameters also tall ones (low rank of a reshaped
side). So the grid is a fixed table.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from lsrdecomp.kronecker.shape import ProductShape, divisors, splits
from lsrdecomp.lora.search.effort import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Configuration = tuple[ProductShape, Ranks]
"""A shape of an LSR product, and the terms of its output side and its input side."""

TERMS_OF_TWO: tuple[Ranks, ...] = (
    (1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (3, 3), (4, 4), (6, 6), (8, 8),
)  # fmt: skip
TERMS_OF_THREE: tuple[Ranks, ...] = TERMS_OF_TWO[:-2]
"""Numbers of terms at which even splits into two and three factors are solved, without an inner
rank. In growing order: solutions with more terms start from those with fewer."""
TERMS_WITH_INNER: tuple[Ranks, ...] = (
    (1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (8, 8), (12, 12),
)  # fmt: skip
"""Numbers of terms of shapes with an inner rank."""
EVEN_INNER: tuple[Ranks, ...] = ((2, 2), (2, 3))
"""Inner shapes of even splits besides (1, 1)."""
TALL: tuple[tuple[int, Ranks], ...] = ((12, (2, 1)), (6, (4, 1)), (12, (1, 2)))
"""Tall shapes, low rank of a reshaped side: their small factor is the divisor nearest to the
number, and has all of the inner rank. On a language model these and the even shapes come within
1 % of the errors of 116 shapes, from 1/96 to 1/4 of the parameters."""
LARGE_INNER: tuple[Ranks, ...] = ((2, 3), (4, 1))
"""Inner shapes with about as many parameters as a truncated SVD of rank 1."""
MIN_LARGE_RANKS = 0.6
"""Parameters from which on these are worth a solve, in units of that truncated SVD; by hand."""
COMMON_SHAPES = 2
"""Number of the commonest shapes, among layers of its size, that a layer is solved at besides its
own. With the shapes of another adapter errors on SmolLM2's adapters are 1.03 to 1.10 times as large
with none, 1.01 with two."""


@dataclass(frozen=True, slots=True)
class ShapeRequest:
    """One shape with the numbers of terms, in growing order, at which it is to be solved."""

    shape: ProductShape
    terms: tuple[Ranks, ...]


def shape_grid(
    matrix_shape: tuple[int, int],
    rank: int,
    orders: Sequence[int],
    inner_rank: int,
    max_parameters: float,
) -> list[ShapeRequest]:
    """Return the coarse and the fine grid for layers of a size.

    Parameters
    ----------
    matrix_shape : (int, int)
    rank : int
        Rank of the layers.
    orders : sequence of int
        Numbers of Kronecker factors.
    inner_rank : int
        Maximum inner rank.
    max_parameters : float
        Maximum parameters of a shape at a number of terms.
    """
    coarse = coarse_grid(matrix_shape, orders, max_parameters)
    fine = fine_grid(matrix_shape, rank, orders, inner_rank, max_parameters)
    return [*coarse, *fine]


def coarse_grid(
    matrix_shape: tuple[int, int],
    orders: Sequence[int],
    max_parameters: float,
) -> list[ShapeRequest]:
    """Return the even splits without an inner rank.

    They are cheap to solve, and their errors show how much of a budget each layer gets.
    """
    rows, columns = matrix_shape
    requests = []
    for order in sorted(orders, reverse=True):
        shape = ProductShape(_even_split(rows, order), (1,) * order, _even_split(columns, order))
        requests.append((shape, TERMS_OF_TWO if order == 2 else TERMS_OF_THREE))
    return _fitting_requests(requests, max_parameters)


def fine_grid(
    matrix_shape: tuple[int, int],
    rank: int,
    orders: Sequence[int],
    inner_rank: int,
    max_parameters: float,
) -> list[ShapeRequest]:
    """Return even and tall shapes of two factors with an inner rank."""
    if 2 not in orders:
        return []
    rows, columns = matrix_shape
    max_rank = min(rank, inner_rank, rows, columns)
    out = _even_split(rows, 2)
    into = _even_split(columns, 2)
    even = [ProductShape(out, inner, into) for inner in EVEN_INNER if math.prod(inner) <= max_rank]
    tall = [
        _tall_shape(matrix_shape, near, inner) for near, inner in TALL if max(inner) <= max_rank
    ]
    shapes = [*even, *tall]
    # Shapes with a large inner rank have about as many parameters as a truncated SVD of rank 1.
    if max_parameters < MIN_LARGE_RANKS * (rows + columns):
        shapes = [shape for shape in shapes if shape.inner not in LARGE_INNER]
    return _fitting_requests([(shape, TERMS_WITH_INNER) for shape in shapes], max_parameters)


def _fitting_requests(
    requests: Iterable[tuple[ProductShape, Sequence[Ranks]]], max_parameters: float
) -> list[ShapeRequest]:
    """Return each shape once, at those numbers of terms that it can have within the parameters."""
    by_shape: dict[ProductShape, ShapeRequest] = {}
    for shape, terms in requests:
        fitting = []
        for ranks in terms:
            is_possible = clipped(shape, ranks) == ranks
            if is_possible and shape.parameters(*ranks) <= max_parameters:
                fitting.append(ranks)
        if fitting:
            by_shape[shape] = ShapeRequest(shape, tuple(fitting))
    return list(by_shape.values())


def shapes_like(
    chosen: Mapping[str, Configuration], sizes: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[ShapeRequest, ...]]:
    """Return for each layer the shape chosen for it, and the `COMMON_SHAPES` of layers of its size.

    Each shape comes with the numbers of terms that any layer of that size was given, and one more.

    Parameters
    ----------
    chosen : Mapping of layer name to configuration
    sizes : Mapping of layer name to (m, n)
        Names and sizes of the layers to return shapes for.
    """
    by_layer: dict[str, tuple[ShapeRequest, ...]] = {}
    for size in dict.fromkeys(sizes.values()):
        chosen_shapes = {}
        configurations = []
        for name, (shape, ranks) in chosen.items():
            if shape.matrix_shape == size:
                chosen_shapes[name] = shape
                configurations.append((shape, ranks))
        requests = _requests_for(configurations)
        counts = Counter(chosen_shapes.values())
        common = [shape for shape, _ in counts.most_common(COMMON_SHAPES)]
        for name, layer_size in sizes.items():
            if layer_size != size:
                continue
            shapes = list(common)
            if name in chosen_shapes and chosen_shapes[name] not in common:
                shapes.append(chosen_shapes[name])
            by_layer[name] = tuple(requests[shape] for shape in shapes)
    return by_layer


def _requests_for(chosen: Iterable[Configuration]) -> dict[ProductShape, ShapeRequest]:
    """Return every chosen shape with the numbers of terms it was chosen at, and one more."""
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
    """Yield shapes that are one step away, at the same numbers of terms.

    A step makes an inner factor larger or smaller by one, moves a prime factor within a side, or
    exchanges two factors of a side.
    """
    shape, ranks = configuration
    sizes = [(shape.out, inner, shape.into) for inner in _inner_steps(shape.inner, max_rank)]
    sizes += [(out, shape.inner, shape.into) for out in _moves(shape.out)]
    sizes += [(shape.out, shape.inner, into) for into in _moves(shape.into)]
    own_sizes = (shape.out, shape.inner, shape.into)
    for neighbour_sizes in dict.fromkeys(sizes):
        if neighbour_sizes != own_sizes:
            neighbour = ProductShape(*neighbour_sizes)
            yield neighbour, clipped(neighbour, ranks)


def more_terms(ranks: Ranks) -> list[Ranks]:
    """Return numbers with one more term on either side, and on both."""
    s, t = ranks
    return [(s + 1, t), (s, t + 1), (s + 1, t + 1)]


def terms_around(ranks: Ranks) -> tuple[Ranks, ...]:
    """Return numbers of terms: one fewer on both sides, the same, and one more on both."""
    s, t = ranks
    fewer = (max(1, s - 1), max(1, t - 1))
    more = (s + 1, t + 1)
    return tuple(dict.fromkeys([fewer, ranks, more]))


def clipped(shape: ProductShape, ranks: Ranks) -> Ranks:
    """Return numbers of terms, limited to the maximum separation rank of each side."""
    left, right = ranks
    return min(left, shape.left.max_separation_rank), min(right, shape.right.max_separation_rank)


@cache
def _even_split(size: int, order: int) -> tuple[int, ...]:
    """Return the most even split of a size into ``order`` factors, ascending."""
    most_even = min(splits(size, order), key=lambda split: max(split) / min(split))
    return tuple(sorted(most_even))


def _tall_shape(matrix_shape: tuple[int, int], near: int, inner: Ranks) -> ProductShape:
    """Return the shape whose small factors, near a number, are those that have the inner rank."""
    out, into = (_tall_split(size, near) for size in matrix_shape)
    if inner[0] > 1:
        return ProductShape(out, inner, into)
    return ProductShape(out[::-1], inner, into[::-1])


@cache
def _tall_split(size: int, near: int) -> tuple[int, int]:
    """Return (q, size / q) with the divisor q > 1 that is nearest to ``near`` in ratio."""
    candidates = [q for q in divisors(size) if q > 1]
    small = min(candidates, key=lambda q: abs(math.log(q / near)), default=1)
    return small, size // small


def _inner_steps(inner: tuple[int, ...], max_rank: int) -> Iterator[tuple[int, ...]]:
    """Yield inner shapes with one factor larger or smaller by one."""
    for i in range(len(inner)):
        for change in (1, -1):
            stepped = (*inner[:i], inner[i] + change, *inner[i + 1 :])
            if stepped[i] >= 1 and math.prod(stepped) <= max_rank:
                yield stepped


def _moves(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield other splits of a side: two factors exchanged, or a prime moved to another factor."""
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
    """Return the distinct prime factors of a size, ascending."""
    return [divisor for divisor in divisors(size) if len(divisors(divisor)) == 2]
