"""Cases that identities are tried on: drawn matrices, and corners that draws seldom meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import numpy as np
from array_api_compat import is_numpy_namespace
from hypothesis import strategies as st

from lsrdecomp.arrays import Array, Namespace, namespace, to_numpy
from lsrdecomp.errors import ArgumentError, LsrError, PrecisionError, unknown
from lsrdecomp.testing.agreement import Identities, IdentityCheck, IdentityError
from lsrdecomp.testing.strategies import (
    SIZES,
    graded_matrices,
    invertible_matrices,
    kronecker_shapes,
    matrices,
    small_matrices,
)

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape

COMPLEX_OF = {"float32": "complex64", "float64": "complex128"}
"""The complex type of the same precision; half precision and integers have none."""

FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
CORNER_GROUPS = ("empty", "mixed types", "not finite")
DERIVED_SHARE = 3
"""An identity that follows from the first is tried on one case for so many of the first: where the
first holds it holds too, but for what the code remembers and how its arguments lie."""

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


TILES = ((15, 16), (16, 17), (17, 15), (31, 32), (32, 33), (33, 31), (63, 64), (64, 65), (65, 63))
"""Sides about the sizes of blocks that code works in: one less, as many, one more."""

SIDES = (
    *((6, 14, 8, 13), (14, 8, 13, 6), (8, 13, 6, 14), (13, 6, 14, 8)),
    *((9, 12, 10, 11), (12, 10, 11, 9), (10, 11, 9, 12), (11, 9, 12, 10)),
    *((129, 1, 257, 1), (257, 1, 129, 1), (1, 129, 1, 257), (1, 257, 1, 129)),
    *((257, 1, 1, 129), (1, 257, 129, 1)),
)
"""Sides that are not drawn, each of them in each place: up to 14, and a little above 128 and 256,
with answers of more than 2¹⁵ rows or columns."""


class Options(TypedDict, total=False):
    """What every check takes beside your function.

    Attributes
    ----------
    xp : namespace
        Array library in which the cases are handed over: ``numpy``, ``torch``, any of the array API
        standard.
    complex_values : bool
        Also draw complex matrices, of the precision of ``dtype``; true if absent.
    dtype : str or dtype
        Element type of the cases: ``"float64"`` if absent; other floating types, complex types and
        integers, which are compared exactly. Half precision and integers leave out what needs
        inverses or singular values.
    tolerance : float, optional
        Relative difference to let pass where rounding explains less: for code that computes in a
        coarser type.
    max_examples : int
        Cases drawn for the definition, 25 if absent, and a third as many for each identity that
        follows from it; they are the same in each run.
    leave_out : collection of str
        Corner cases that your code does not promise: ``"empty"`` arrays, ``"mixed types"`` and
        other types than ``dtype``, entries that are ``"not finite"``.

    Examples
    --------
    >>> from lsrdecomp.testing import check_kron
    >>> check_kron(np.kron, dtype="float32", complex_values=False, max_examples=5)
    """

    xp: Namespace
    complex_values: bool
    dtype: Any
    tolerance: float | None
    max_examples: int
    leave_out: Collection[str]


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """The options of a check, validated before anything runs; fields as in `Options`.

    Attributes
    ----------
    order : int or None
        Number of factors of the shapes that are drawn; None for one to five.
    """

    xp: Namespace
    complex_values: bool
    dtype: str
    tolerance: float | None
    max_examples: int
    leave_out: frozenset[str]
    order: int | None

    @classmethod
    def of(cls, options: Options, order: int | None = None) -> CheckSettings:
        """Validate the options that a caller gave.

        Raises
        ------
        ArgumentError
            For an option that there is not.
        LsrError
            For a value that an option cannot have.
        """
        for name in options:
            if name not in Options.__annotations__:
                raise ArgumentError(f"no option {unknown(name, Options.__annotations__)}")
        tolerance = options.get("tolerance")
        if tolerance is not None and not tolerance >= 0.0:
            raise LsrError(f"tolerance: expected a number that is not negative, got {tolerance!r}")
        max_examples = options.get("max_examples", 25)
        if max_examples != int(max_examples) or max_examples < 1:
            raise LsrError(f"max_examples: expected a positive integer, got {max_examples!r}")
        leave_out = options.get("leave_out", ())
        leave_out = frozenset([leave_out] if isinstance(leave_out, str) else leave_out)
        for name in leave_out - {*CORNER_GROUPS}:
            raise LsrError(f"leave_out: no corner cases {unknown(name, CORNER_GROUPS)}")
        return cls(
            xp=options.get("xp", np),
            complex_values=bool(options.get("complex_values", True)),
            dtype=_dtype_name(options.get("dtype", "float64")),
            tolerance=tolerance,
            max_examples=max_examples,
            leave_out=leave_out,
            order=order,
        )

    @property
    def is_integer(self) -> bool:
        """Whether the cases are integers."""
        return self.dtype in INTEGERS

    @property
    def draws_complex(self) -> bool:
        """Whether some of the cases are complex."""
        return self.dtype.startswith("complex") or (
            self.complex_values and self.dtype in COMPLEX_OF
        )

    def allows(self, check: IdentityCheck) -> bool:
        """Return whether an identity can be tried in the element type of the cases."""
        if check.linalg:
            return self.dtype in FLOATS and self.dtype != "float16"
        if check.sums:
            return self.dtype not in ("int8", "int16", "uint8", "uint16")
        return True


def _dtype_name(dtype: Any) -> str:
    """Return the name of an element type that cases can have, given as text, NumPy's or torch's."""
    name = dtype if isinstance(dtype, str) else str(dtype).rsplit(".", 1)[-1]
    if isinstance(dtype, type) or hasattr(dtype, "type"):
        name = np.dtype(dtype).name
    if name not in (*FLOATS, *INTEGERS):
        raise PrecisionError(f"dtype: no cases of type {unknown(name, (*FLOATS, *INTEGERS))}")
    return name


class Cases:
    """What an identity needs, drawn in the array library and the element type of the settings."""

    def __init__(self, draw: Callable[[Any], Any], settings: CheckSettings) -> None:
        self.draw = draw
        self.settings = settings
        is_complex = settings.dtype.startswith("complex")
        if not is_complex and settings.draws_complex:
            is_complex = draw(st.booleans())
        self.is_complex = is_complex
        real_types = {"complex64": "float32", "complex128": "float64"}
        self._real = real_types.get(settings.dtype, settings.dtype)
        self._dtype = COMPLEX_OF[self._real] if is_complex else self._real

    def array(self, values: Any, dtype: str | None = None) -> Array:
        """Return NumPy values in the library and element type of the cases, or in ``dtype``."""
        dtype = dtype or self._dtype
        if dtype.startswith("uint"):
            values = np.abs(values)
        return self.settings.xp.asarray(np.array(values, dtype=dtype))

    def shape(self, square: bool = False) -> KroneckerShape:
        """Draw a Kronecker shape of as many factors as the settings ask for."""
        shape: KroneckerShape = self.draw(
            kronecker_shapes(order=self.settings.order, max_entries=400, square=square)
        )
        return shape

    def sides(self, count: int, among: Sequence[int] = SIZES) -> list[int]:
        """Draw sides of matrices."""
        return [self.draw(st.sampled_from(among)) for _ in range(count)]

    def matrix(self, shape: tuple[int, int]) -> Array:
        """Draw a matrix of small integers or Gaussian numbers."""
        if self.settings.is_integer:
            return self.array(self.draw(small_matrices(shape)))
        return self.array(self.draw(_entries(shape, self.is_complex)))

    def matrices(self, *layouts: str, among: Sequence[int] = SIZES) -> tuple[Array, ...]:
        """Draw matrices with a letter for each side, as in `numpy.einsum`.

        ``"mn", "np"`` for a product; ``1`` is a side of one.
        """
        letters = sorted({*"".join(layouts)} - {"1"})
        sides = {"1": 1, **dict(zip(letters, self.sides(len(letters), among), strict=True))}
        return tuple(self.matrix((sides[layout[0]], sides[layout[1]])) for layout in layouts)

    def factors(self, shape: KroneckerShape) -> tuple[Array, ...]:
        """Draw a matrix for each factor of a shape."""
        return tuple(self.matrix(pair) for pair in shape.factors)

    def invertible(self) -> tuple[Array, ...]:
        """Draw square factors that are well conditioned."""
        sizes = self.shape(square=True).rows
        factors = [self.draw(invertible_matrices(m, self.is_complex)) for m in sizes]
        return tuple(self.array(factor) for factor in factors)

    def partial_isometries(self) -> tuple[Array, ...]:
        """Draw matrices whose singular values are one or zero."""
        isometries = []
        for m, n in self.shape().factors:
            rank = self.draw(st.integers(0, min(m, n)))
            u, _ = np.linalg.qr(to_numpy(self.draw(matrices((m, m), scale=1.0))))
            v, _ = np.linalg.qr(to_numpy(self.draw(matrices((n, n), scale=1.0))))
            isometries.append(self.array(u[:, :rank] @ v[:, :rank].T))
        return tuple(isometries)

    def numbered(self) -> tuple[Array, KroneckerShape]:
        """Draw a shape, and a matrix of it whose entries are counted from one.

        A permutation has nowhere to hide.
        """
        shape = self.shape()
        return self.array(_counted(shape.matrix_shape)), shape

    def graded(self, shape: KroneckerShape) -> Array:
        """Draw a matrix whose rearrangement has singular values from one down to rounding.

        Evenly on a logarithmic scale.
        """
        return self.array(self.draw(graded_matrices(shape, complex_values=self.is_complex)))

    def terms(self, square: bool = False) -> tuple[Array, tuple[Array, ...]]:
        """Draw weights s, s − 1, …, 1 and a stack of s factors for each position."""
        shape = self.shape(square)
        terms = self.draw(st.integers(1, 4))
        stacks = []
        for pair in shape.factors:
            stack = np.stack([to_numpy(self.matrix(pair)) for _ in range(terms)])
            stacks.append(self.array(stack))
        return self.array(np.arange(terms, 0.0, -1.0), self._real), tuple(stacks)

    def invertible_term(self) -> tuple[Array, tuple[Array, ...]]:
        """Draw one term of well conditioned square factors."""
        factors = []
        for m in self.shape(square=True).rows:
            factor = self.draw(invertible_matrices(m, self.is_complex, 5.0))
            factors.append(self.array(factor[None]))
        return self.array(np.ones(1), self._real), tuple(factors)

    def small_term(self) -> tuple[Array, tuple[Array, ...]]:
        """Return two terms, the second with 1e-4 of the weight of the first and a minus sign."""
        weights = [1.0, -1e-4]
        if self.settings.is_integer:
            weights = [3.0, 1.0]
        matrix = _counted((2, 3))
        stack = np.stack([matrix, matrix[::-1]])
        order = self.settings.order or 2
        return self.array(weights, self._real), tuple(self.array(stack) for _ in range(order))


@cache
def _entries(shape: tuple[int, int], complex_values: bool) -> st.SearchStrategy[Any]:
    """Return small integers or Gaussian numbers; cached, for hypothesis checks new strategies."""
    integers = small_matrices(shape, complex_values=complex_values)
    return integers | matrices(shape, scale=1.0, complex_values=complex_values)


@dataclass(frozen=True)
class CornerArray:
    """An array of a corner case.

    Attributes
    ----------
    values : array
        Times 1 + 2i where the cases are complex and ``dtype`` is None.
    dtype : str or None
        Element type; None for that of the cases.
    layout : callable (values, make) -> Array, optional
        How the array lies in memory, where the library knows of that; ``make`` turns NumPy values
        into an array.
    """

    values: np.ndarray
    dtype: str | None = None
    layout: Layout | None = None

    def of(self, cases: Cases) -> Array:
        """Return the array in the library and element type of the cases."""
        values = self.values
        if cases.is_complex and self.dtype is None and values.dtype.kind != "c":
            values = values * (1 + 2j)
        if self.layout is None:
            return cases.array(values, self.dtype)
        return self.layout(values, partial(cases.array, dtype=self.dtype))


Layout = Callable[[np.ndarray, Callable[[np.ndarray], Array]], Array]


def _flipped(values: np.ndarray, make: Callable[[np.ndarray], Array]) -> Array:
    flipped = make(np.flip(values))
    return namespace(flipped).flip(flipped)


def _read_only(values: np.ndarray, make: Callable[[np.ndarray], Array]) -> Array:
    array = make(values)
    if isinstance(array, np.ndarray):
        array.flags.writeable = False
    return array


def _every_second(values: np.ndarray, make: Callable[[np.ndarray], Array]) -> Array:
    larger = np.full([2 * side for side in values.shape], 7.0, values.dtype)
    every_second = (slice(None, None, 2),) * values.ndim
    larger[every_second] = values
    return make(larger)[every_second]


def _block_of_larger(values: np.ndarray, make: Callable[[np.ndarray], Array]) -> Array:
    larger = np.full([side + 3 for side in values.shape], 7.0, values.dtype)
    block = (slice(1, -2),) * values.ndim
    larger[block] = values
    return make(larger)[block]


def _broadcast(values: np.ndarray, make: Callable[[np.ndarray], Array]) -> Array:
    first = make(values[:1])
    return namespace(first).broadcast_to(first, values.shape)


def _other_byte_order(values: np.ndarray, make: Callable[[np.ndarray], Array]) -> Array:
    array = make(values)
    if isinstance(array, np.ndarray):
        array = array.astype(array.dtype.newbyteorder())
    return array


OTHER_BYTE_ORDER = "other byte order"
LAYOUTS: dict[str, Layout] = {
    "read-only input": _read_only,
    "Fortran-ordered input": lambda values, make: make(np.asfortranarray(values)),
    "negative strides": _flipped,
    "every second row and column": _every_second,
    "a block of a larger array": _block_of_larger,
    "a row that is broadcast": _broadcast,
}
"""Ways in which the same entries lie in memory."""


@dataclass(frozen=True)
class Corner:
    """A check of given arrays, of which nothing is drawn but whether they are complex.

    Attributes
    ----------
    name : str
    check : callable (function, *arrays) -> None
    function : callable
        The code under test.
    arrays : sequence of CornerArray
    is_exceptional : bool
        Whether the arrays hold zeros, NaN and infinities whose products have one right answer in
        real arithmetic and in dense arrays alone: ∞·(1 + 0j) has parts that are NaN, and a sparse
        array has no zeros to multiply.
    share : callable (array) -> arguments, optional
        Makes all arguments of the first array, which share its memory.
    fill : callable (shapes) -> sequence of CornerArray, optional
        Makes the arrays of other shapes, where any shapes go together, so that a failing case can
        be made small.
    """

    name: str
    check: Callable[..., None]
    function: Callable[..., Any]
    arrays: Sequence[CornerArray]
    is_exceptional: bool = False
    share: Callable[[Array], Sequence[Array]] | None = None
    fill: Callable[[Shapes], Sequence[CornerArray]] | None = None

    @property
    def may_be_refused(self) -> bool:
        """Whether sound code may raise: many libraries take no bytes of another order."""
        return self.name == OTHER_BYTE_ORDER

    def __call__(self, cases: Cases) -> None:
        """Check the arrays in the library and type of the cases."""
        if self.is_exceptional:
            answers_sparse = getattr(self.function, "answers_sparse", False)
            if answers_sparse or cases.is_complex:
                return
        arrays: Sequence[Array] = [array.of(cases) for array in self.arrays]
        if self.share is not None:
            arrays = self.share(arrays[0])
        try:
            with np.errstate(all="ignore"):
                self.check(self.function, *arrays)
        except IdentityError as error:
            formula = error.identity.partition(", ")[2]
            if formula:
                error.identity = f"{self.name}, {formula}"
            raise

    @property
    def sides(self) -> list[int]:
        """Sides of the arrays that can be made shorter, the shortest first.

        A long one that is made shorter before stays as long as another that matters.
        """
        if self.fill is None:
            return []
        return sorted({side for array in self.arrays for side in array.values.shape})

    def with_sides(self, before: int, after: int) -> Corner:
        """Return the same corner with all sides of one length made another."""
        assert self.fill is not None

        def changed(shape: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(after if side == before else side for side in shape)

        shapes = tuple(changed(array.values.shape) for array in self.arrays)
        return replace(self, arrays=self.fill(shapes))


class Trial(NamedTuple):
    """A name, what draws a case and checks it, and how many cases are drawn.

    Attributes
    ----------
    name : str
    check : callable (Cases) -> None
    max_examples : int or None
        None for as many as the settings say.
    """

    name: str
    check: Callable[[Cases], None]
    max_examples: int | None = None


Shapes = tuple[tuple[int, ...], ...]
"""Shapes of all arrays that a function takes."""


SHARED: dict[str, Callable[[Array], Sequence[Array]]] = {
    "one array twice": lambda array: (array, array),
    "a matrix and its transpose": lambda array: (array, namespace(array).matrix_transpose(array)),
    "overlapping slices": lambda array: (array[:, :-1], array[:, 1:]),
}
"""Two arguments that share the memory of one array."""


@dataclass(frozen=True)
class Corners:
    """Corner cases of a function: shapes of its arrays, and numbers that careless code loses.

    Attributes
    ----------
    shapes : mapping from names to Shapes
        Sides that are equal, or above five. Arrays of the first of them also carry NaN, entries
        that a coarser type loses, negative strides and, where there are several arrays, two element
        types.
    tiles : mapping from names to Shapes
        Sides about 16, 32 and 64, at which code works in blocks.
    empty : mapping from names to Shapes
        Empty arrays. They are told last: many libraries that are sound otherwise refuse them.
    answer : str
        What an entry of the answer is: an entry of an array, a product of one of each, or a sum.
        Zero times NaN, infinities, overflow and underflow have one right answer for a product, and
        large integers no right answer for a sum.
    spreads_nan : bool
        Whether the place of NaN in the arrays says where it is in the answer: an identity may be
        multiplied or not.
    has_free_sides : bool
        Whether any two matrices go together.
    """

    shapes: Mapping[str, Shapes]
    tiles: Mapping[str, Shapes]
    empty: Mapping[str, Shapes]
    answer: Literal["entry", "product", "sum"]
    spreads_nan: bool = True
    has_free_sides: bool = False

    def ordinary(
        self, check: Callable[..., None], function: Callable[..., Any], settings: CheckSettings
    ) -> list[Trial]:
        """Return the corners that every implementation can compute with and the type can hold."""
        corners = []
        fill = _repeating if settings.dtype in ("int8", "uint8") else _counting
        for name, shapes in self.shapes.items():
            corners.append(self._of_shapes(name, check, function, shapes, fill))
        for name, shapes in self.tiles.items():
            corners.append(self._of_shapes(name, check, function, shapes, _repeating))
        for name, arrays in self._arrays(settings).items():
            corners.append(Corner(name, check, function, arrays))
        if self._equal is not None:
            arrays = _plain(_counting(self._equal))
            for name, share in SHARED.items():
                if self.has_free_sides or name == "one array twice":
                    corners.append(Corner(name, check, function, arrays, share=share))
        return [Trial(corner.name, corner) for corner in corners]

    def exceptional(
        self, check: Callable[..., None], function: Callable[..., Any], settings: CheckSettings
    ) -> list[Trial]:
        """Return the corners of numbers that are not finite, and of empty arrays, told last."""
        corners = []
        for name, arrays in self._exceptional(settings).items():
            corners.append(Corner(name, check, function, arrays, is_exceptional=True))
        if "empty" not in settings.leave_out:
            for name, shapes in self.empty.items():
                corners.append(Corner(name, check, function, _plain(_counting(shapes))))
        return [Trial(corner.name, corner) for corner in corners]

    def _of_shapes(
        self,
        name: str,
        check: Callable[..., None],
        function: Callable[..., Any],
        shapes: Shapes,
        fill: Callable[[Shapes], list[np.ndarray]],
    ) -> Corner:
        """Return a corner of these shapes, which is made small where any shapes go together."""

        def arrays(shapes: Shapes) -> list[CornerArray]:
            return _plain(fill(shapes))

        refill = arrays if self.has_free_sides else None
        return Corner(name, check, function, arrays(shapes), fill=refill)

    @property
    def _equal(self) -> Shapes | None:
        """Equal shapes of two arrays or more, where there are some."""
        candidates = (shapes for shapes in self.shapes.values() if len(shapes) > 1)
        return next((shapes for shapes in candidates if len({*shapes}) == 1), None)

    @property
    def _squares(self) -> Shapes | None:
        """Shapes of square arrays, where there are some."""
        shapes = self.shapes.values()
        return next((s for s in shapes if all(len(a) == 2 and a[0] == a[1] for a in s)), None)

    def _arrays(self, settings: CheckSettings) -> dict[str, list[CornerArray]]:
        """Return arrays of numbers, types and layouts that careless code loses."""
        fill = _repeating if settings.dtype in ("int8", "uint8") else _counting
        first = fill(next(iter(self.shapes.values())))
        is_exact = settings.tolerance is None and self.answer != "sum"
        corners: dict[str, list[CornerArray]] = {}
        if settings.dtype == "float64" and "mixed types" not in settings.leave_out:
            if settings.draws_complex and len(first) > 1:
                corners |= _two_types(first)
            if is_exact:
                corners |= _other_types(first, settings)
        corners |= {name: _plain(arrays) for name, arrays in _repetitive(first).items()}
        if self._squares is not None:
            squares = fill(self._squares)
            corners |= {name: _plain(arrays) for name, arrays in _structured(squares).items()}
            if settings.draws_complex and not settings.is_integer:
                dtype = COMPLEX_OF.get(settings.dtype, settings.dtype)
                hermitian = [_hermitian(array) for array in squares]
                corners["Hermitian input"] = [CornerArray(array, dtype) for array in hermitian]
                skew = [CornerArray(1j * array, dtype) for array in hermitian]
                corners["skew-Hermitian input"] = skew
        for name, layout in LAYOUTS.items():
            corners[name] = [CornerArray(array, layout=layout) for array in first]
            if self._squares is not None:
                arrays = fill(self._squares)
                corners[f"{name}, square"] = [CornerArray(a, layout=layout) for a in arrays]
        if settings.is_integer and self.answer != "sum":
            corners["large integers"] = _plain(_large_integers(first, settings.dtype))
        if settings.dtype in ("float32", "float64") and settings.tolerance is None:
            corners["tiny entries"] = _plain([1e-12 * array for array in first])
            # Their products are beyond 64 bits.
            corners["large whole numbers"] = _plain([1e10 * array for array in first])
            graded = [array * 1e-4 ** np.arange(array.shape[-1]) for array in first]
            corners["columns of different size"] = _plain(graded)
            longest = max(self.tiles.values(), key=lambda shapes: sum(map(math.prod, shapes)))
            corners["many fractions"] = _plain([array / 3 for array in _repeating(longest)])
        if not settings.is_integer:
            corners["negative zeros"] = _plain(
                [np.where(array == 2.0, -0.0, array) for array in first]
            )
            can_be_nan = self.spreads_nan and "not finite" not in settings.leave_out
            if can_be_nan:
                with_nan = [np.where(array == 1.0, np.nan, array) for array in first]
                corners["NaN input"] = _plain(with_nan)
        return corners

    def _exceptional(self, settings: CheckSettings) -> dict[str, list[CornerArray]]:
        """Return arrays of zeros, NaN, infinities and numbers whose product leaves the range."""
        if self.answer != "product" or settings.is_integer or settings.tolerance is not None:
            return {}
        a, b = _counting(next(iter(self.shapes.values())))
        limits = np.finfo(settings.dtype)
        root_of_largest = float(limits.max) ** 0.5
        root_of_smallest = float(limits.smallest_subnormal) ** 0.5
        zeros_and_nan = [a - 1.0, np.where(b == 2.0, np.nan, b)]
        infinite = [np.where(a == 2.0, -np.inf, a), np.where(b == 3.0, np.inf, b - 1.0)]
        overflowing = [(-1.0) ** array * 4.0 * root_of_largest for array in (a, b)]
        underflowing = [array * root_of_smallest / 64.0 for array in (a, b)]
        underflow = {"underflow": _plain(underflowing)}
        if "not finite" in settings.leave_out:
            return underflow
        return {
            "zero times NaN": _plain(zeros_and_nan),
            "infinite entries": _plain(infinite),
            "overflow": _plain(overflowing),
            **underflow,
        }


def trials(
    identities: Identities,
    function: Callable[..., Any],
    settings: CheckSettings,
    corners: Corners | None = None,
    on_corners: Callable[..., None] | None = None,
) -> list[Trial]:
    """Return each identity on drawn cases, and ``on_corners`` (absent, the first) on corner cases.

    The first identity and the corners of arrays come before what follows from it: they tell in
    which entry of which arrays a fault shows. Raises `LsrError` where no identity can be tried in
    the element type of the settings.
    """
    checks = [check for check in identities.checks if settings.allows(check)]
    if not checks:
        raise LsrError(f"dtype: no identity of this check can be tried in {settings.dtype}")
    definition = checks[0].function
    few = -(-settings.max_examples // DERIVED_SHARE)
    first: list[Trial] = []
    derived: list[Trial] = []
    for check in checks:
        draw_and_check = partial(_check_drawn, check, function)
        if check.function is definition:
            first.append(Trial(check.name, draw_and_check))
        else:
            derived.append(Trial(check.name, draw_and_check, few))
    if corners is None:
        return [*first, *derived]
    on_corners = on_corners or identities.checks[0].function
    ordinary = corners.ordinary(on_corners, function, settings)
    exceptional = corners.exceptional(on_corners, function, settings)
    return [*first, *ordinary, *derived, *exceptional]


def _check_drawn(check: IdentityCheck, function: Callable[..., Any], cases: Cases) -> None:
    """Draw what an identity is tried on, and check it."""
    if isinstance(check.cases, str):
        arguments = cases.matrices(*check.cases.split())
    else:
        arguments = check.cases(cases)
    check.function(function, *arguments)


def _repetitive(arrays: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Return arrays of which two rows or columns are equal, or zero, or all of the first is."""
    equal_rows, equal, rows, columns, zero = ([a.copy() for a in arrays] for _ in range(5))
    for array in equal_rows:
        array[1:2] = array[:1]
    for array in equal:
        array[..., 1:2] = array[..., :1]
    for array in rows:
        array[0] = 0.0
    for array in columns:
        array[..., -1] = 0.0
    zero[0][...] = 0.0
    return {
        "equal rows": equal_rows,
        "equal columns": equal,
        "a row of zeros": rows,
        "a column of zeros": columns,
        "zeros alone in the first": zero,
        "equal entries": [np.full(array.shape, 3.0) for array in arrays],
        "rank one": [_rank_one(array) for array in arrays],
    }


def _rank_one(array: np.ndarray) -> np.ndarray:
    """Return an array whose rows are 1, 2, … times the first."""
    factors = np.arange(1.0, len(array) + 1).reshape(-1, *[1] * (array.ndim - 1))
    rows: np.ndarray = factors * (array[:1] % 3 + 1)
    return rows


def _structured(squares: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Return square matrices with a structure of which code makes use."""
    return {
        "symmetric input": [np.tril(a) + np.tril(a, -1).T for a in squares],
        "skew-symmetric input": [np.tril(a, -1) - np.tril(a, -1).T for a in squares],
        "upper triangular input": [np.triu(a) for a in squares],
        "lower triangular input": [np.tril(a) for a in squares],
        "diagonal input": [np.diag(np.diag(a)) for a in squares],
        "a permutation": [np.roll(np.eye(len(a)), 1, axis=0) for a in squares],
        "the identity": [np.eye(len(a)) for a in squares],
    }


def _hermitian(array: np.ndarray) -> np.ndarray:
    """Return a Hermitian matrix with the lower triangle of a square one."""
    lower = np.tril(array) + 1j * np.tril(array + 1.0, -1)
    hermitian: np.ndarray = lower + np.tril(lower, -1).conj().T
    return hermitian


def _plain(arrays: Sequence[np.ndarray]) -> list[CornerArray]:
    return [CornerArray(values) for values in arrays]


def _two_types(arrays: Sequence[np.ndarray]) -> dict[str, list[CornerArray]]:
    """Return arrays of which the last has another element type than the others, each way round."""
    names = ("real ⊗ complex", "complex ⊗ real", "float32 ⊗ float64", "float64 ⊗ float32")
    if len(arrays) > 2:
        names = (
            "real factors, complex x",
            "complex factors, real x",
            "float32 factors, float64 x",
            "float64 factors, float32 x",
        )
    *factors, last = arrays
    fractions = [array / 3 for array in factors]
    real = [CornerArray(array, "float64") for array in factors]
    complex_ = [CornerArray(array + 1j, "complex128") for array in fractions]
    single = [CornerArray(array, "float32") for array in factors]
    double = [CornerArray(array, "float64") for array in fractions]
    pairs = (
        [*real, CornerArray(last / 3 + 1j, "complex128")],
        [*complex_, CornerArray(last, "float64")],
        [*single, CornerArray(last / 3, "float64")],
        [*double, CornerArray(last, "float32")],
    )
    return dict(zip(names, pairs, strict=True))


def _other_types(
    arrays: Sequence[np.ndarray], settings: CheckSettings
) -> dict[str, list[CornerArray]]:
    """Return arrays of other types than the drawn ones, which their library has."""
    signs = [(-1.0) ** array for array in arrays]
    integers = _large_integers(arrays, "int64")
    signed = [sign.astype(int) * array for sign, array in zip(signs, integers, strict=True)]
    thirds = [array / 3 for array in arrays]
    corners = {
        "int64 input": [CornerArray(array, "int64") for array in signed],
        "float32 input": [CornerArray(array, "float32") for array in thirds],
        OTHER_BYTE_ORDER: [CornerArray(a, layout=_other_byte_order) for a in thirds],
    }
    if settings.draws_complex:
        corners["complex64 input"] = [CornerArray(a * (1 + 2j), "complex64") for a in thirds]
    if not is_numpy_namespace(settings.xp):
        return corners  # the standard leaves open what the others do
    corners["truth values"] = [CornerArray(array % 2 == 1, "bool") for array in arrays]
    if len(arrays) > 1:
        *factors, last = arrays
        whole = [CornerArray(array, "int64") for array in factors]
        corners["integers and float64"] = [*whole, CornerArray(last / 3, "float64")]
        fractions = [CornerArray(array / 3, "float64") for array in factors]
        corners["float64 and integers"] = [*fractions, CornerArray(last, "int64")]
    return corners


def _large_integers(arrays: Sequence[np.ndarray], dtype: str) -> list[np.ndarray]:
    """Return integers whose products are near the end of the range of their type."""
    largest = int(np.iinfo(dtype).max)
    root = math.isqrt(largest) if len(arrays) == 2 else largest
    integers = [array.astype(np.int64).astype(object) for array in arrays]
    return [root - array % 3 for array in integers]


def _counting(shapes: Shapes) -> list[np.ndarray]:
    """Return arrays of 1, 2, 3, …, each turned on by its number so that equal shapes differ.

    Small integers are exact in half precision.
    """
    return [np.roll(_counted(shape), -i) for i, shape in enumerate(shapes)]


def _repeating(shapes: Shapes) -> list[np.ndarray]:
    """Return arrays of 1 to 7 again and again, whose products fit into eight bits."""
    return [np.roll(_counted(shape) % 7 + 1, -i) for i, shape in enumerate(shapes)]


def _counted(shape: tuple[int, ...]) -> np.ndarray:
    """Return 1, 2, 3, … in a shape."""
    return np.arange(1.0, math.prod(shape) + 1).reshape(shape)
