"""Kronecker shapes: which factor sizes tile a matrix. Integers only, no arrays."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import ShapeError, unknown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def divisors(n: int) -> tuple[int, ...]:
    """All positive divisors of ``n``, ascending.

    Parameters
    ----------
    n : int

    Returns
    -------
    tuple of int

    Raises
    ------
    ShapeError
        If n is not positive.

    Examples
    --------
    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    if n < 1:
        raise ShapeError(f"a size must be a positive integer, got {n}")
    low = [q for q in range(1, math.isqrt(n) + 1) if n % q == 0]
    return tuple(low + [n // q for q in reversed(low) if q * q != n])


def balanced_split(n: int, order: int = 2) -> tuple[int, ...]:
    """``order`` factors of ``n``, descending, as equal as its divisors allow.

    Each factor in turn is the divisor nearest above the geometric mean of what is left.

    Parameters
    ----------
    n : int
    order : int

    Returns
    -------
    tuple of int, of length ``order``

    Raises
    ------
    ShapeError
        If n or the order is not positive.

    Examples
    --------
    >>> balanced_split(768), balanced_split(8), balanced_split(7), balanced_split(768, 3)
    ((32, 24), (4, 2), (7, 1), (12, 8, 8))
    """
    if order < 1:
        raise ShapeError(f"a Kronecker product has at least one factor, got order {order}")
    rest, split = n, []
    for left in range(order, 1, -1):
        first = next(q for q in divisors(rest) if q**left >= rest)
        split.append(first)
        rest //= first
    return tuple(sorted([*split, rest], reverse=True))


@dataclass(frozen=True, slots=True)
class KroneckerShape:
    """Sizes ``((m_1, n_1), …, (m_d, n_d))`` of the factors of one Kronecker product.

    The first factor is the outermost, as in ``numpy.kron``.

    >>> shape = KroneckerShape(((32, 2), (24, 2)))
    >>> shape.matrix_shape, shape.max_separation_rank, shape.parameters(16)
    ((768, 4), 48, 1792)
    >>> KroneckerShape("32x2, 24x2") == shape
    True
    """

    factors: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        given: Any = self.factors  # a caller may write text, too
        if isinstance(given, str):
            given = self.parse(given).factors
        try:
            factors = tuple((_size(m), _size(n)) for m, n in given)
        except (TypeError, ValueError) as error:
            raise ShapeError(
                f"factors must be pairs of positive integers, got {given!r}"
            ) from error
        if not factors:
            raise ShapeError("a Kronecker shape needs at least one factor")
        object.__setattr__(self, "factors", factors)

    @classmethod
    def of(cls, rows: Sequence[int], columns: Sequence[int]) -> KroneckerShape:
        """From the row sizes and the column sizes of the factors."""
        if len(rows) != len(columns):
            raise ShapeError(
                f"{len(rows)} row sizes {tuple(rows)} against {len(columns)} column sizes {tuple(columns)}"
            )
        return cls(tuple(zip(rows, columns, strict=True)))

    @classmethod
    def balanced(cls, matrix_shape: tuple[int, int], order: int = 2) -> KroneckerShape:
        """The most even split of both sides into ``order`` factors."""
        return cls.of(
            balanced_split(matrix_shape[0], order), balanced_split(matrix_shape[1], order)
        )

    @classmethod
    def parse(cls, value: Any, words: Sequence[str] = ()) -> KroneckerShape:
        """From what people write: a shape, nested sizes ``((16, 16), (8, 8))``, or text.

        Parameters
        ----------
        value : KroneckerShape, sequence of pairs, or str
        words : sequence of str
            Other words that the caller understands; a text without sizes is refused with the
            nearest of them.

        >>> str(KroneckerShape.parse("16x16, 8x8")), str(KroneckerShape.parse(((4, 4), (2, 2))))
        ('16×16 ⊗ 8×8', '4×4 ⊗ 2×2')
        """
        if isinstance(value, KroneckerShape):
            return value
        if isinstance(value, str):
            if words and not any(letter.isdecimal() for letter in value):
                raise ShapeError(
                    f"shape: no word {unknown(value, words)}; or sizes such as '16x16, 8x8'"
                )
            pairs = [
                re.fullmatch(r"\(?\s*(\d+)\s*[x×X*]\s*(\d+)\s*\)?", part.strip())
                for part in re.split("[,;⊗]", value)
            ]
            if not all(pairs):
                raise ShapeError(
                    f"shape: sizes are written '16x16, 8x8', one pair a factor, got {value!r}"
                )
            return cls(tuple((int(pair[1]), int(pair[2])) for pair in pairs if pair))
        try:
            return cls(tuple((m, n) for m, n in value))
        except (TypeError, ValueError) as error:
            raise ShapeError(
                f"shape: expected a KroneckerShape, pairs ((16, 16), (8, 8)) or '16x16, 8x8', got {value!r}"
            ) from error

    @property
    def order(self) -> int:
        """Number d of Kronecker factors."""
        return len(self.factors)

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(m for m, _ in self.factors)

    @property
    def columns(self) -> tuple[int, ...]:
        return tuple(n for _, n in self.factors)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Entries of each factor: the shape of the rearranged matrix."""
        return tuple(m * n for m, n in self.factors)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return math.prod(self.rows), math.prod(self.columns)

    @property
    def max_separation_rank(self) -> int:
        """No matrix of this shape needs more terms: all sizes multiplied but the largest."""
        return math.prod(self.sizes) // max(self.sizes)

    @property
    def essential_factors(self) -> tuple[int, ...]:
        """Which factors are not 1×1, which changes nothing; two are left, of as many as there are."""
        largest_first = sorted(range(self.order), key=lambda i: self.factors[i] == (1, 1))
        large = self.order - self.factors.count((1, 1))
        return tuple(sorted(largest_first[: max(large, min(2, self.order))]))

    @property
    def essential(self) -> KroneckerShape:
        """The shape of the `essential_factors` alone."""
        kept = self.essential_factors
        return (
            self
            if len(kept) == self.order
            else KroneckerShape(tuple(self.factors[i] for i in kept))
        )

    @property
    def transposed(self) -> KroneckerShape:
        return KroneckerShape(tuple((n, m) for m, n in self.factors))

    def parameters(self, separation_rank: int) -> int:
        """Numbers in the factors of ``separation_rank`` terms (weights folded in)."""
        return separation_rank * sum(self.sizes)

    def check(self, matrix_shape: tuple[int, ...], name: str = "matrix") -> None:
        """Raise `ShapeError` unless the factors tile a matrix of this shape."""
        if tuple(matrix_shape) == self.matrix_shape:
            return
        if len(matrix_shape) != 2:
            raise ShapeError(f"{name}: expected two dimensions, got shape {tuple(matrix_shape)}")
        for side, sizes, length in (
            ("rows", self.rows, matrix_shape[0]),
            ("columns", self.columns, matrix_shape[1]),
        ):
            if math.prod(sizes) != length:
                product = " x ".join(map(str, sizes))
                hint = (
                    f"\nSizes that divide {length}: {_some(divisors(length))}" if length > 0 else ""
                )
                raise ShapeError(
                    f"{name}: {product} = {math.prod(sizes)} {side}, but the matrix has {length}.{hint}"
                )

    def __str__(self) -> str:
        return " ⊗ ".join(f"{m}×{n}" for m, n in self.factors)


@dataclass(frozen=True, slots=True)
class ProductShape:
    """Sizes of ``(Σ B1 ⊗ B2 ⊗ …)(Σ A1 ⊗ A2 ⊗ …)``: the out side, the inner rank and the in side, each split.

    >>> shape = ProductShape(out=(32, 24), inner=(2, 2), into=(32, 24))        # the paper's adapter
    >>> shape.matrix_shape, shape.inner_rank, shape.parameters(16)
    ((768, 768), 4, 3584)
    """

    out: tuple[int, ...]
    inner: tuple[int, ...]
    into: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("out", "inner", "into"):
            object.__setattr__(self, name, tuple(_size(q) for q in getattr(self, name)))
        if not len(self.out) == len(self.inner) == len(self.into) > 0:
            raise ShapeError(
                f"out {self.out}, inner {self.inner} and into {self.into} must have equally many sizes"
            )

    @classmethod
    def balanced(cls, matrix_shape: tuple[int, int], inner: Sequence[int]) -> ProductShape:
        """The most even split of both sides around a given split of the inner rank."""
        order = len(inner)
        return cls(
            balanced_split(matrix_shape[0], order),
            tuple(inner),
            balanced_split(matrix_shape[1], order),
        )

    @classmethod
    def low_rank(cls, matrix_shape: tuple[int, int], rank: int) -> ProductShape:
        """Plain low rank as a product shape: one term of one factor a side, ``(m×r)(r×n)``."""
        return cls((matrix_shape[0],), (rank,), (matrix_shape[1],))

    @property
    def left(self) -> KroneckerShape:
        """Shape of the out-side matrix B̂, m × r."""
        return KroneckerShape.of(self.out, self.inner)

    @property
    def right(self) -> KroneckerShape:
        """Shape of the in-side matrix Â, r × n."""
        return KroneckerShape.of(self.inner, self.into)

    @property
    def order(self) -> int:
        return len(self.out)

    @property
    def inner_rank(self) -> int:
        return math.prod(self.inner)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return math.prod(self.out), math.prod(self.into)

    def parameters(self, left_rank: int, right_rank: int | None = None) -> int:
        """Numbers in all factors, for separation ranks of the two sides (equal if one is given)."""
        return self.left.parameters(left_rank) + self.right.parameters(
            left_rank if right_rank is None else right_rank
        )

    def __str__(self) -> str:
        return f"({self.left})({self.right})"


def kronecker_shapes(matrix_shape: tuple[int, int]) -> Iterator[KroneckerShape]:
    """Every two-factor shape of a matrix, plain low rank ``(m×1) ⊗ (1×n)`` and its mirror among them.

    Parameters
    ----------
    matrix_shape : (m, n)

    Returns
    -------
    iterator of KroneckerShape
        As many as m has divisors times as many as n has.

    Examples
    --------
    >>> [shape.factors for shape in kronecker_shapes((2, 2))][:2]
    [((1, 1), (2, 2)), ((1, 2), (2, 1))]
    """
    for m in divisors(matrix_shape[0]):
        for n in divisors(matrix_shape[1]):
            yield KroneckerShape(((m, n), (matrix_shape[0] // m, matrix_shape[1] // n)))


def splits(n: int, order: int) -> Iterator[tuple[int, ...]]:
    """Every ordered way to write ``n`` as a product of ``order`` positive integers.

    Parameters
    ----------
    n, order : int

    Returns
    -------
    iterator of tuples of int, of length ``order``

    Examples
    --------
    >>> list(splits(6, 2))
    [(1, 6), (2, 3), (3, 2), (6, 1)]
    """
    if order == 1:
        yield (n,)
        return
    for first in divisors(n):
        for rest in splits(n // first, order - 1):
            yield (first, *rest)


def _size(value: object) -> int:
    if type(value) is int and value > 0:  # the usual case, asked for many times in small problems
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"a size must be an integer, got {value!r}")
    size = int(value.__index__())
    if size < 1:
        raise ShapeError(f"a size must be a positive integer, got {size}")
    return size


def _some(numbers: Sequence[int], most: int = 24) -> str:
    return ", ".join(map(str, numbers[:most])) + (", ..." if len(numbers) > most else "")
