"""The grid of shapes for each size of layer, and the neighbours of a shape that was chosen. Integers only.

Which shapes are worth solving for hardly depends on the adapter: the most even splits into two and
three factors where there are few parameters, tall ones (low rank of a reshaped side) where there
are more. So no shape is probed.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from lsrdecomp.kronecker.shape import ProductShape, divisors, splits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Configuration = tuple[ProductShape, tuple[int, int]]
"""A shape of an LSR product, and the terms of its out side and its in side."""

Ranks = tuple[int, int]

FEW = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (3, 3), (4, 4))
"""Terms of three factors, in which solutions are nested."""

MORE = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (3, 3), (4, 4), (6, 6), (8, 8))
"""Terms of two factors."""

WIDE = ((1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (8, 8), (12, 12))
"""Terms of shapes with an inner rank."""

EVEN_INNER = ((2, 2), (2, 3))
"""Inner shapes of even splits besides (1, 1)."""

LARGE = ((2, 3), (4, 1))
"""Inner shapes that pay only for about as many parameters as one rank of truncated SVD takes, or
more."""

TALL = ((12, (2, 1)), (6, (4, 1)), (12, (1, 2)))
"""Tall shapes: their small factor is the divisor nearest to this, and has all of the inner rank. On
a language model these and the even ones come within a hundredth of 116 shapes from 1/96 to 1/4."""

COMMON = 2
"""Shapes that layers of one size share with another adapter, besides each its own: with none,
errors are 1.03 to 1.10 times as large on SmolLM2's adapters; with two, 1.01."""


@dataclass(frozen=True, slots=True)
class Request:
    """One shape at growing numbers of terms, to be solved for layers of one kind."""

    shape: ProductShape
    terms: tuple[Ranks, ...]


def shape_grid(
    matrix_shape: tuple[int, int], rank: int, orders: Sequence[int], inner_rank: int, most: float
) -> list[Request]:
    """The whole grid for layers of a size: shapes of at most ``most`` parameters each, in a fixed order."""
    return [
        *coarse_grid(matrix_shape, orders, most),
        *fine_grid(matrix_shape, rank, orders, inner_rank, most),
    ]


def coarse_grid(matrix_shape: tuple[int, int], orders: Sequence[int], most: float) -> list[Request]:
    """The even splits without an inner rank: cheap to solve, near enough to see what a budget gives a layer."""
    m, n = matrix_shape
    evens = (
        (order, ProductShape(_even(m, order), (1,) * order, _even(n, order)))
        for order in sorted(orders)[::-1]
    )
    return _requests([(shape, MORE if order == 2 else FEW) for order, shape in evens], most)


def fine_grid(
    matrix_shape: tuple[int, int], rank: int, orders: Sequence[int], inner_rank: int, most: float
) -> list[Request]:
    """Even and tall shapes with an inner rank, of at most ``most`` parameters."""
    m, n = matrix_shape
    rank = min(rank, inner_rank, m, n)
    if 2 not in orders:
        return []
    even = (
        ProductShape(_even(m, 2), inner, _even(n, 2))
        for inner in EVEN_INNER
        if math.prod(inner) <= rank
    )
    tall = (_tall_shape(matrix_shape, near, inner) for near, inner in TALL if max(inner) <= rank)
    # Large inner ranks cost about as much as a rank of truncated SVD, m + n: below that they are
    # not worth a solve.
    pays = 0.6 * (m + n)
    wanted = [shape for shape in (*even, *tall) if most >= pays or shape.inner not in LARGE]
    return _requests([(shape, WIDE) for shape in wanted], most)


def _requests(wanted: Sequence[tuple[ProductShape, Sequence[Ranks]]], most: float) -> list[Request]:
    """Each shape once, at the numbers of terms that it can have in at most ``most`` parameters."""
    requests: dict[ProductShape, Request] = {}
    for shape, terms in wanted:
        fitting = [
            ranks
            for ranks in terms
            if clipped(shape, ranks) == ranks and shape.parameters(*ranks) <= most
        ]
        if fitting:
            requests[shape] = Request(shape, tuple(fitting))
    return list(requests.values())


def shapes_like(
    chosen: Mapping[str, Configuration], sizes: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[Request, ...]]:
    """For each layer the shape that was chosen for it, if any, and those chosen most often for its size.

    Every shape at the numbers of terms that any layer of that size took, and at one more.
    """
    by_layer: dict[str, tuple[Request, ...]] = {}
    for size in dict.fromkeys(sizes.values()):
        same = {name: choice for name, choice in chosen.items() if choice[0].matrix_shape == size}
        terms: dict[ProductShape, set[Ranks]] = {}
        for shape, ranks in same.values():
            terms.setdefault(shape, set()).update((ranks, clipped(shape, more_terms(ranks)[-1])))
        requests = {
            shape: Request(shape, tuple(sorted(ranks, key=lambda r: (sum(r), r))))
            for shape, ranks in terms.items()
        }
        common = [
            shape for shape, _ in Counter(shape for shape, _ in same.values()).most_common(COMMON)
        ]
        for name in (name for name, other in sizes.items() if other == size):
            own = [same[name][0]] if name in same else []
            by_layer[name] = tuple(requests[shape] for shape in dict.fromkeys([*common, *own]))
    return by_layer


def neighbours(configuration: Configuration, rank: int) -> Iterator[Configuration]:
    """Shapes one step away: an inner factor one more or less, a factor of a side moved, a split exchanged."""
    shape, ranks = configuration
    near = dict.fromkeys(
        [(shape.out, inner, shape.into) for inner in _steps(shape.inner, rank)]
        + [(out, shape.inner, shape.into) for out in _moves(shape.out)]
        + [(shape.out, shape.inner, into) for into in _moves(shape.into)]
    )
    near.pop((shape.out, shape.inner, shape.into), None)
    for out, inner, into in near:
        other = ProductShape(out, inner, into)
        yield other, clipped(other, ranks)


def more_terms(ranks: Ranks) -> list[Ranks]:
    """A term more on one side, on the other, on both."""
    s, t = ranks
    return [(s + 1, t), (s, t + 1), (s + 1, t + 1)]


def terms_around(ranks: Ranks) -> tuple[Ranks, ...]:
    """A term fewer on both sides, these, a term more on both."""
    s, t = ranks
    return tuple(dict.fromkeys([(max(1, s - 1), max(1, t - 1)), (s, t), (s + 1, t + 1)]))


def clipped(shape: ProductShape, ranks: Ranks) -> Ranks:
    """At most as many terms as the sides can need."""
    return min(ranks[0], shape.left.max_separation_rank), min(
        ranks[1], shape.right.max_separation_rank
    )


@cache
def _even(size: int, order: int) -> tuple[int, ...]:
    """The split into ``order`` factors that are most alike, ascending."""
    return tuple(sorted(min(splits(size, order), key=lambda split: max(split) / min(split))))


def _tall_shape(matrix_shape: tuple[int, int], near: int, inner: tuple[int, int]) -> ProductShape:
    """The small factor of both sides is where the inner rank is: outermost or innermost."""
    out, into = (_tall(size, near) for size in matrix_shape)
    return (
        ProductShape(out, inner, into)
        if inner[0] > 1
        else ProductShape(out[::-1], inner, into[::-1])
    )


@cache
def _tall(size: int, near: int) -> tuple[int, int]:
    """(q, size / q) with q near a small number, not one."""
    small = min(
        (q for q in divisors(size) if q > 1), key=lambda q: abs(math.log(q / near)), default=1
    )
    return small, size // small


def _steps(inner: tuple[int, ...], rank: int) -> Iterator[tuple[int, ...]]:
    for i in range(len(inner)):
        for change in (1, -1):
            stepped = (*inner[:i], inner[i] + change, *inner[i + 1 :])
            if stepped[i] >= 1 and math.prod(stepped) <= rank:
                yield stepped


def _moves(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Other splits of the product: two factors exchanged, or a prime of one given to another."""
    for i in range(len(sizes)):
        for j in range(len(sizes)):
            if i < j:
                yield tuple(
                    sizes[j] if k == i else sizes[i] if k == j else size
                    for k, size in enumerate(sizes)
                )
            if i != j:
                for prime in _primes(sizes[i])[:2]:
                    moved = list(sizes)
                    moved[i], moved[j] = moved[i] // prime, moved[j] * prime
                    yield tuple(moved)


@cache
def _primes(size: int) -> list[int]:
    """The distinct primes of a size, ascending."""
    return [divisor for divisor in divisors(size) if len(divisors(divisor)) == 2]
