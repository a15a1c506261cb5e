"""What an identity is: two sides that agree up to rounding, and the error that says where not."""

from __future__ import annotations

import math
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from array_api_compat import is_array_api_obj

from lsrdecomp.arrays import device, dtype_name, namespace, norm, to_numpy
from lsrdecomp.errors import LsrError
from lsrdecomp.precision import tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Matrix = np.ndarray
Sides = tuple[Any, Any]
"""The two sides of an identity, which must agree."""

SINGLE_PRECISION = {"float32", "complex64"}
"""Types of answers that are no finding by themselves, but that differ by more than float64
explains."""


class IdentityError(LsrError, AssertionError):
    """An identity of Kronecker products does not hold.

    Attributes
    ----------
    identity : str
        Its name, and what it says.
    message : str
        How the two sides differ, and for which arrays.
    gap : float or None
        Their difference relative to the size of what was added up, where there is one.
    cause : BaseException or None
        What the code under test raised instead of an answer.
    """

    def __init__(
        self,
        identity: str,
        message: str,
        *,
        gap: float | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(f"{identity}: {message}")
        self.identity = identity
        self.message = message
        self.gap = gap
        self.cause = cause


class IdentityCheck(NamedTuple):
    """A check of one identity, what it is tried on, and what it asks of the element type."""

    function: Callable[..., None]
    cases: Any
    sums: bool
    linalg: bool

    @property
    def name(self) -> str:
        """Name of the identity, in words."""
        return self.function.__name__.replace("_", " ")


class Identities:
    """Identities of one function with the cases they are tried on, the most telling first."""

    def __init__(self) -> None:
        self.checks: list[IdentityCheck] = []

    def on(
        self,
        *cases: Any,
        bound: Callable[..., float] | None = None,
        sums: bool = False,
        linalg: bool = False,
    ) -> Callable[[Callable[..., Sides]], Callable[..., None]]:
        """Make a check of an identity, written as a function that returns its two sides.

        The function takes yours, as a function of NumPy arrays, and the arrays. Its name is that of
        the identity; the first line of its docstring says "Check that" and the formula. The check
        takes a function and arrays of any library, and raises `IdentityError` unless both sides
        agree up to rounding.

        Parameters
        ----------
        *cases : callables (Cases) -> arguments, or str
            What it is tried on; a text holds the sides of matrices, named as in `numpy.einsum`:
            ``"mn np"`` for a product.
        bound : callable (*arrays) -> float, optional
            Size of the numbers that are added up, to which rounding is relative; absent, the
            product of the norms.
        sums : bool
            Sums as long as the sides of the matrices are formed: rounding grows with these, and
            integers of 8 and 16 bits would overflow.
        linalg : bool
            Inverses, eigenvalues or singular values are formed, which half precision and integers
            do not have.
        """

        def decorate(sides: Callable[..., Sides]) -> Callable[..., None]:
            name = sides.__name__.replace("_", " ")
            summary = (sides.__doc__ or name).splitlines()[0]
            formula = summary.removeprefix("Check that ").rstrip(".")

            def check(function: Callable[..., Any], *arguments: Any) -> None:
                __tracebackhide__ = True
                arrays = arrays_in(arguments)
                values = _as_numpy(arguments)
                matrices = arrays_in(values)
                left, right = sides(_on_numpy(function, arrays), *values)
                if bound is None:
                    size_of_terms = math.prod(_finite_norm(matrix) for matrix in matrices)
                else:
                    size_of_terms = bound(*matrices)
                longest = math.prod(max(matrix.shape, default=1) for matrix in matrices)
                require_agreement(
                    f"{name}, {formula}",
                    left,
                    right,
                    bound=size_of_terms,
                    size=longest if sums else 1,
                    inputs=arguments,
                )

            update_wrapper(check, sides)
            # Its signature is that of the check, not that of the sides.
            del check.__wrapped__  # type: ignore[attr-defined]
            for case in cases:
                self.checks.append(IdentityCheck(check, case, sums, linalg))
            return check

        return decorate


def exact(*_arrays: Any) -> float:
    """Return a bound that allows no difference: nothing is computed, entries only move."""
    return 0.0


def require_agreement(
    identity: str,
    actual: Any,
    expected: Any,
    *,
    bound: float,
    size: int,
    inputs: Sequence[Any] = (),
) -> None:
    """Raise `IdentityError` unless two arrays agree up to rounding.

    Parameters
    ----------
    identity : str
        Its name and what it says.
    actual, expected : array_like
        Of any library; equal shapes are part of the identity, and so are NaN and infinities in the
        same entries.
    bound : float
        Size of the numbers that were added up: rounding is relative to this, not to a result that
        may cancel.
    size : int
        Length of the longest sum.
    inputs : sequence
        What the functions were called with, shown where small; the finest of the types of its
        arrays sets the precision, since libraries compute in it. Where all are integers, nothing is
        rounded.

    Raises
    ------
    IdentityError
        If shapes, the entries that are NaN or infinite, or finite entries beyond rounding differ.
    """
    __tracebackhide__ = True
    got = np.asarray(to_numpy(actual))
    reference = np.asarray(to_numpy(expected))
    if got.shape != reference.shape:
        raise IdentityError(
            identity, f"shape {got.shape}, expected {reference.shape}{describe_arguments(inputs)}"
        )

    # Entries that are not finite: the same ones, and infinities of the same sign.
    finite = np.isfinite(reference)
    is_other = np.isnan(got) != np.isnan(reference)
    with np.errstate(invalid="ignore"):
        is_other |= ~finite & ~np.isnan(reference) & (got != reference)
    if np.any(is_other):
        place = _first_place(is_other)
        raise IdentityError(
            identity,
            f"{_entry(place, got, reference)}{_extent(is_other)}{describe_arguments(inputs)}",
        )

    types = [dtype_name(array) for array in arrays_in(inputs)]
    rounded = [name for name in types if not _is_integer(name)]
    if types and not rounded:
        allowed = 0.0
    else:
        allowed = bound * min(tolerance(name, size) for name in rounded or ["float64"])

    difference = np.zeros(got.shape, np.result_type(got, reference, np.float64))
    difference[finite] = np.subtract(got[finite], reference[finite], dtype=difference.dtype)
    is_other = finite & (got != reference)
    gap = norm(difference.reshape(-1))
    if gap <= allowed and (allowed > 0.0 or not np.any(is_other)):
        return
    scale = bound or norm(reference[finite])
    # The first entry that alone takes more than its share of what rounding explains.
    share = allowed / math.sqrt(difference.size)
    is_wrong = is_other & (abs(difference) >= share)
    place = _first_place(is_wrong)
    answer_type = dtype_name(got)
    advice = ""
    if answer_type in SINGLE_PRECISION - {*types}:
        advice = f"; the answer is {answer_type}: dtype= and tolerance= allow for it"
    raise IdentityError(
        identity,
        f"difference {gap:.3g} (rounding tolerance {allowed:.3g}); "
        f"{_entry(place, got, reference)}{_extent(is_wrong)}{advice}{describe_arguments(inputs)}",
        gap=gap / scale if scale > 0.0 else None,
    )


def describe_arguments(arguments: Sequence[Any]) -> str:
    """Return what a function was called with: a line for each array, and one for all else.

    Arrays of at most 24 entries are printed.
    """
    lines = []
    for letter, array in zip("ABCDEFGH", arrays_in(arguments), strict=False):
        values = np.asarray(to_numpy(array))
        sides = "×".join(map(str, values.shape))
        entries = ""
        if values.size <= 24:
            text = np.array2string(values, precision=3, separator=", ")
            entries = " = " + text.replace("\n", "\n      ")
        lines.append(f"\n  {letter} {sides}{entries}")
    others = [str(argument) for argument in arguments if not arrays_in(argument)]
    if others:
        lines.append(f"\n  with {', '.join(others)}")
    return "".join(lines)


def arrays_in(value: Any) -> tuple[Any, ...]:
    """Return the arrays in nested lists and tuples."""
    if isinstance(value, list | tuple):
        return tuple(array for item in value for array in arrays_in(item))
    return (value,) if is_array_api_obj(value) else ()


def _on_numpy(function: Callable[..., Any], arrays: Sequence[Any]) -> Callable[..., Any]:
    """Return a function of NumPy arrays that calls ``function`` with arrays like ``arrays``.

    Of their library, and on their device.
    """
    convert = np.asarray
    if arrays:
        convert = partial(namespace(*arrays).asarray, device=device(arrays[0]))
    return lambda *arguments: _as_numpy(function(*_convert_arrays(arguments, convert)))


def _as_numpy(value: Any) -> Any:
    return _convert_arrays(value, lambda array: np.asarray(to_numpy(array)))


def _convert_arrays(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return the same with every array converted, in nested lists and tuples as well."""
    if isinstance(value, list | tuple):
        return tuple(_convert_arrays(item, convert) for item in value)
    return convert(value) if is_array_api_obj(value) else value


def _finite_norm(array: Matrix) -> float:
    return norm(array[np.isfinite(array)])


def _is_integer(name: str) -> bool:
    return name.startswith(("int", "uint", "bool"))


def _first_place(is_wrong: np.ndarray) -> tuple[int, ...]:
    """Return the index of the first entry that is true."""
    return tuple(int(i) for i in np.argwhere(is_wrong)[0])


def _extent(is_wrong: np.ndarray) -> str:
    """Return in which rows and columns of a matrix all wrong entries lie, if not everywhere."""
    if is_wrong.ndim != 2 or np.count_nonzero(is_wrong) < 2:
        return ""
    parts = []
    for name, axis in (("row", 1), ("column", 0)):
        places = np.flatnonzero(np.any(is_wrong, axis=axis))
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 == is_wrong.shape[1 - axis]:
            continue
        span = f"{name} {first}" if first == last else f"{name}s {first} to {last}"
        parts.append(span)
    return f"; wrong in {' and '.join(parts)} alone" if parts else ""


def _entry(place: tuple[int, ...], got: np.ndarray, reference: np.ndarray) -> str:
    """Return a sentence about one entry: what it is and what it should be."""
    where = f"at {list(place)}: " if place else ""
    actual, expected = got[place].item(), reference[place].item()
    digits = 6 if f"{actual:.6g}" != f"{expected:.6g}" else 17
    return f"{where}got {actual:.{digits}g}, expected {expected:.{digits}g}"
