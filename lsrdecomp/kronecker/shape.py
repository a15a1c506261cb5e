"""Kronecker shapes: which factor sizes tile a matrix. Integers only, no arrays."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import ShapeError, unknown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@lru_cache(maxsize=2**12)
def shape_of_sizes(factors: tuple[tuple[int, int], ...]) -> KroneckerShape:
    """Return the shape of factors whose sizes are integers, with what it has derived from them.

    >>> shape_of_sizes(((4, 4), (2, 2))) is shape_of_sizes(((4, 4), (2, 2)))
    True
    """
    return KroneckerShape(factors)


def divisors(n: int) -> tuple[int, ...]:
    """Return all positive divisors of ``n``, ascending.

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
    small = [q for q in range(1, math.isqrt(n) + 1) if n % q == 0]
    large = [n // q for q in reversed(small) if q * q != n]
    return tuple(small + large)


def balanced_split(n: int, order: int = 2) -> tuple[int, ...]:
    """Split ``n`` into ``order`` factors, descending, as equal as its divisors allow.

    Each factor in turn is the divisor nearest above the geometric mean of the remainder.

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
    split = []
    remaining = n
    for n_factors in range(order, 1, -1):
        factor = next(q for q in divisors(remaining) if q**n_factors >= remaining)
        split.append(factor)
        remaining //= factor
    split.append(remaining)
    return tuple(sorted(split, reverse=True))


@dataclass(frozen=True)
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
        """Build a shape from the row sizes and the column sizes of the factors."""
        if len(rows) != len(columns):
            raise ShapeError(
                f"{len(rows)} row sizes {tuple(rows)} against "
                f"{len(columns)} column sizes {tuple(columns)}"
            )
        return cls(tuple(zip(rows, columns, strict=True)))

    @classmethod
    def balanced(cls, matrix_shape: tuple[int, int], order: int = 2) -> KroneckerShape:
        """Split both sides of a matrix into ``order`` factors, as evenly as they allow."""
        rows, columns = matrix_shape
        return _balanced_shape(rows, columns, order)

    @classmethod
    def parse(
        cls, value: Any, words: tuple[str, ...] = (), whole: tuple[int, int] | None = None
    ) -> KroneckerShape:
        """Read what people write: a shape, nested sizes ``((16, 16), (8, 8))``, or text.

        Parameters
        ----------
        value : KroneckerShape, sequence of pairs, or str
        words : tuple of str
            Other words that the caller understands; a text without sizes is refused with the
            nearest of them.
        whole : (int, int), optional
            Sizes of the matrix: of a single factor, ``"6x6"`` or ``(6, 6)``, the other one follows,
            to the right of it, as for MATLAB's functions for the nearest Kronecker product.

        >>> str(KroneckerShape.parse("16x16, 8x8")), str(KroneckerShape.parse(((4, 4), (2, 2))))
        ('16×16 ⊗ 8×8', '4×4 ⊗ 2×2')
        >>> str(KroneckerShape.parse((6, 6), whole=(12, 30)))
        '6×6 ⊗ 2×5'
        """
        if isinstance(value, KroneckerShape):
            return value
        if isinstance(value, str):
            return _with_other_factor(_shape_in_text(value, words), whole)
        if whole is not None and _is_pair_of_numbers(value):
            value = (value,)
        try:
            return _with_other_factor(
                shape_of_sizes(tuple([(_size(m), _size(n)) for m, n in value])), whole
            )
        except (TypeError, ValueError) as error:
            raise ShapeError(
                "shape: expected a KroneckerShape, pairs ((16, 16), (8, 8)) or '16x16, 8x8', "
                f"got {value!r}"
            ) from error

    @cached_property
    def order(self) -> int:
        """Number d of Kronecker factors."""
        return len(self.factors)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Rows m_i of each factor."""
        return tuple(m for m, _ in self.factors)

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """Columns n_i of each factor."""
        return tuple(n for _, n in self.factors)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Entries of each factor: the shape of the rearranged matrix."""
        return tuple(m * n for m, n in self.factors)

    @cached_property
    def matrix_shape(self) -> tuple[int, int]:
        """(rows, columns) of the product."""
        return math.prod(self.rows), math.prod(self.columns)

    @cached_property
    def max_separation_rank(self) -> int:
        """Terms that serve every matrix of this shape: all sizes multiplied but the largest."""
        return math.prod(self.sizes) // max(self.sizes)

    @cached_property
    def interleaved_axes(self) -> tuple[int, ...]:
        """Axes (m_1, …, m_d, n_1, …, n_d) in the order m_1, n_1, …, m_d, n_d."""
        pairs = [(i, i + self.order) for i in range(self.order)]
        return tuple(chain.from_iterable(pairs))

    @cached_property
    def essential_factors(self) -> tuple[int, ...]:
        """Indices of the factors that are not 1×1, which changes nothing; at least two of two."""
        essential = [i for i in range(self.order) if self.factors[i] != (1, 1)]
        trivial = [i for i in range(self.order) if self.factors[i] == (1, 1)]
        n_kept = max(len(essential), min(2, self.order))
        return tuple(sorted([*essential, *trivial][:n_kept]))

    @cached_property
    def essential(self) -> KroneckerShape:
        """The shape of the `essential_factors` alone."""
        kept = self.essential_factors
        if len(kept) == self.order:
            return self
        return KroneckerShape(tuple(self.factors[i] for i in kept))

    @property
    def transposed(self) -> KroneckerShape:
        """Shape of the transpose."""
        return KroneckerShape(tuple((n, m) for m, n in self.factors))

    def parameters(self, separation_rank: int) -> int:
        """Count the numbers in the factors of ``separation_rank`` terms (weights folded in)."""
        return separation_rank * sum(self.sizes)

    def check(self, matrix_shape: tuple[int, ...], name: str = "matrix") -> None:
        """Raise `ShapeError` unless the factors tile a matrix of this shape."""
        if tuple(matrix_shape) == self.matrix_shape:
            return
        if len(matrix_shape) != 2:
            raise ShapeError(f"{name}: expected two dimensions, got shape {tuple(matrix_shape)}")
        _check_side(name, "rows", self.rows, matrix_shape[0])
        _check_side(name, "columns", self.columns, matrix_shape[1])

    def __str__(self) -> str:
        return " ⊗ ".join(f"{m}×{n}" for m, n in self.factors)


@dataclass(frozen=True, slots=True)
class ProductShape:
    """Sizes of ``(Σ B1 ⊗ B2 ⊗ …)(Σ A1 ⊗ A2 ⊗ …)``: out side, inner rank, in side, each split.

    >>> shape = ProductShape(out=(32, 24), inner=(2, 2), into=(32, 24))  # the paper's adapter
    >>> shape.matrix_shape, shape.inner_rank, shape.parameters(16)
    ((768, 768), 4, 3584)
    """

    out: tuple[int, ...]
    inner: tuple[int, ...]
    into: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("out", "inner", "into"):
            sizes = tuple(_size(q) for q in getattr(self, name))
            object.__setattr__(self, name, sizes)
        if not len(self.out) == len(self.inner) == len(self.into) > 0:
            raise ShapeError(
                f"out {self.out}, inner {self.inner} and into {self.into} "
                "must have equally many sizes"
            )

    @classmethod
    def balanced(cls, matrix_shape: tuple[int, int], inner: Sequence[int]) -> ProductShape:
        """Split both sides as evenly as they allow, around a given split of the inner rank."""
        rows, columns = matrix_shape
        order = len(inner)
        return cls(balanced_split(rows, order), tuple(inner), balanced_split(columns, order))

    @classmethod
    def low_rank(cls, matrix_shape: tuple[int, int], rank: int) -> ProductShape:
        """Return plain low rank, ``(m×r)(r×n)``: one term of one factor a side."""
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
        """Number d of Kronecker factors of each side."""
        return len(self.out)

    @property
    def inner_rank(self) -> int:
        """Columns of the out-side matrix, rows of the in-side matrix."""
        return math.prod(self.inner)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(rows, columns) of the product."""
        return math.prod(self.out), math.prod(self.into)

    def parameters(self, left_rank: int, right_rank: int | None = None) -> int:
        """Count the numbers in all factors; both sides have ``left_rank`` terms by default."""
        if right_rank is None:
            right_rank = left_rank
        return self.left.parameters(left_rank) + self.right.parameters(right_rank)

    def __str__(self) -> str:
        return f"({self.left})({self.right})"


def kronecker_shapes(matrix_shape: tuple[int, int]) -> Iterator[KroneckerShape]:
    """Yield every two-factor shape of a matrix, among them plain low rank ``(m×1) ⊗ (1×n)``.

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
    rows, columns = matrix_shape
    for m in divisors(rows):
        for n in divisors(columns):
            yield shape_of_sizes(((m, n), (rows // m, columns // n)))


def splits(n: int, order: int) -> Iterator[tuple[int, ...]]:
    """Yield every ordered way to write ``n`` as a product of ``order`` positive integers.

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
        for others in splits(n // first, order - 1):
            yield (first, *others)


@lru_cache(maxsize=2**12)
def _balanced_shape(rows: int, columns: int, order: int) -> KroneckerShape:
    """Return `KroneckerShape.balanced`, found once for each size of a matrix."""
    return KroneckerShape.of(balanced_split(rows, order), balanced_split(columns, order))


def _is_pair_of_numbers(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and not hasattr(value[0], "__len__")


def _with_other_factor(shape: KroneckerShape, whole: tuple[int, int] | None) -> KroneckerShape:
    """Return a shape of one factor with the one that makes it the shape of a matrix."""
    if whole is None or shape.order != 1 or shape.matrix_shape == whole:
        return shape
    (m, n), (rows, columns) = shape.factors[0], whole
    if rows % m or columns % n:
        return shape  # refused where it is compared to the matrix
    return KroneckerShape((shape.factors[0], (rows // m, columns // n)))


@lru_cache(maxsize=2**12)
def _shape_in_text(text: str, words: tuple[str, ...]) -> KroneckerShape:
    """Return the shape that a text such as ``"16x16, 8x8"`` holds, read once."""
    return shape_of_sizes(_sizes_in_text(text, words))


def _sizes_in_text(text: str, words: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of sizes that a text such as ``"16x16, 8x8"`` holds."""
    has_sizes = any(letter.isdecimal() for letter in text)
    if words and not has_sizes:
        raise ShapeError(f"shape: no word {unknown(text, words)}; or sizes such as '16x16, 8x8'")
    pairs = []
    for part in re.split("[,;⊗]", text):
        pair = re.fullmatch(r"\(?\s*(\d+)\s*[x×X*]\s*(\d+)\s*\)?", part.strip())
        if pair is None:
            raise ShapeError(
                f"shape: sizes are written '16x16, 8x8', one pair a factor, got {text!r}"
            )
        pairs.append((int(pair[1]), int(pair[2])))
    return tuple(pairs)


def _check_side(name: str, side: str, sizes: tuple[int, ...], length: int) -> None:
    """Raise `ShapeError` unless sizes multiply to the length of a side; with sizes that would."""
    if math.prod(sizes) == length:
        return
    product = " x ".join(map(str, sizes))
    hint = f"\nSizes that divide {length}: {_listed(divisors(length))}" if length > 0 else ""
    raise ShapeError(
        f"{name}: {product} = {math.prod(sizes)} {side}, but the matrix has {length}.{hint}"
    )


def _size(value: object) -> int:
    """Return a size as an integer; NumPy's integers count, booleans and fractions do not."""
    if type(value) is int and value > 0:  # the usual case, asked for many times in small problems
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"a size must be an integer, got {value!r}")
    size = int(value.__index__())
    if size < 1:
        raise ShapeError(f"a size must be a positive integer, got {size}")
    return size


def _listed(numbers: Sequence[int]) -> str:
    """Return numbers as text, the first ones where there are many."""
    limit = 24
    text = ", ".join(map(str, numbers[:limit]))
    return f"{text}, ..." if len(numbers) > limit else text
