"""What an identity is: two sides that agree up to rounding, and the error that says how far they do not."""

from __future__ import annotations

import math
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any

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

COARSE = {"float32", "complex64"}
"""Types of answers that are no finding by themselves, but that differ by more than float64
explains."""

SHOWN_ENTRIES = 24
"""Arrays of at most this many entries are printed in an error."""


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


class Identities:
    """Identities of one function with the cases they are tried on, those that tell most first."""

    def __init__(self) -> None:
        self.checks: list[tuple[Callable[..., None], Any]] = []

    def on(
        self, *cases: Any, bound: Callable[..., float] | None = None, sums: bool = False
    ) -> Callable[[Callable[..., Sides]], Callable[..., None]]:
        """Decorator that makes a check of an identity, written as a function that returns its two sides.

        The function takes yours, as a function of NumPy arrays, and the arrays. Its name is that of
        the identity, the first line of its docstring the formula. The check takes a function and
        arrays of any library, and raises `IdentityError` unless both sides agree up to rounding.
        Rounding is relative to ``bound``, a function of the arrays: the size of the numbers that
        are added up, absent the product of the norms. With ``sums`` it grows with the sides of the
        matrices.

        Each of ``cases`` is a callable (Cases) -> arguments, or the sides of matrices, named as in
        `numpy.einsum`: ``"mn np"`` for a product.
        """

        def decorate(sides: Callable[..., Sides]) -> Callable[..., None]:
            name = sides.__name__.replace("_", " ")
            formula = (sides.__doc__ or name).splitlines()[0].rstrip(".")

            def check(function: Callable[..., Any], *arguments: Any) -> None:
                __tracebackhide__ = True
                arrays = arrays_in(arguments)
                values = _as_numpy(arguments)
                formed = arrays_in(values)
                left, right = sides(_on_numpy(function, arrays), *values)
                require_agreement(
                    f"{name}, {formula}",
                    left,
                    right,
                    bound=math.prod(map(_finite_norm, formed)) if bound is None else bound(*formed),
                    size=math.prod(max(array.shape, default=1) for array in formed) if sums else 1,
                    inputs=arguments,
                )

            update_wrapper(check, sides)
            del check.__wrapped__  # type: ignore[attr-defined]  # the signature is that of the check
            self.checks += [(check, each) for each in cases]
            return check

        return decorate


def exact(*arrays: Any) -> float:
    """A bound that allows no difference: nothing is computed, entries only move."""
    return 0.0


def require_agreement(
    identity: str,
    actual: Any,
    expected: Any,
    *,
    bound: float,
    size: int = 1,
    inputs: Sequence[Any] = (),
) -> None:
    """Raise `IdentityError` unless two arrays agree up to rounding.

    Parameters
    ----------
    identity : str
        Its name and what it says.
    actual, expected : array_like
        Of any library; equal shapes are part of the identity, and NaN in the same entries.
    bound : float
        Size of the numbers that were added up: rounding is relative to this, not to a result that
        may cancel.
    size : int
        Length of the longest sum.
    inputs : sequence
        What the functions were called with, shown where small; the finest of the types of its
        arrays sets the precision, since libraries compute in it.

    Raises
    ------
    IdentityError
        If shapes, the entries that are NaN, or finite entries beyond rounding differ.
    """
    __tracebackhide__ = True
    ours, reference = np.asarray(to_numpy(actual)), np.asarray(to_numpy(expected))
    if ours.shape != reference.shape:
        raise IdentityError(
            identity, f"shape {ours.shape}, expected {reference.shape}{shown(inputs)}"
        )
    missing = np.isnan(reference)
    if not np.array_equal(np.isnan(ours), missing):
        raise IdentityError(
            identity,
            f"NaN in {_count_nan(ours)}, expected in {_count_nan(reference)}{shown(inputs)}",
        )
    gap = norm((ours - reference)[~missing].astype(complex))
    types = [dtype_name(array) for array in arrays_in(inputs)] or ["float64"]
    allowed = bound * min(tolerance(name, size) for name in types)
    if not gap <= allowed:
        scale, kind = bound or norm(reference[~missing]), dtype_name(ours)
        coarse = (
            f"; the answer is {kind}: dtype= and tolerance= allow for it"
            if kind in COARSE - {*types}
            else ""
        )
        raise IdentityError(
            identity,
            f"the two sides differ by {gap:.3g}, rounding explains {allowed:.3g}{coarse}{shown(inputs)}",
            gap=gap / scale if scale > 0.0 else None,
        )


def shown(arguments: Sequence[Any]) -> str:
    """What a function was called with: a line for each array, with entries where they are few, and one for the rest."""
    letters, lines = iter("ABCDEFGH"), []
    for array in arrays_in(arguments):
        values = np.asarray(to_numpy(array))
        sides = "×".join(map(str, values.shape))
        text = np.array2string(values, precision=3, separator=", ").replace("\n", "\n      ")
        lines.append(
            f"\n  {next(letters, '')} {sides}"
            + (f" = {text}" if values.size <= SHOWN_ENTRIES else "")
        )
    rest = [str(argument) for argument in arguments if not arrays_in(argument)]
    return "".join(lines) + (f"\n  with {', '.join(rest)}" if rest else "")


def arrays_in(value: Any) -> tuple[Any, ...]:
    """The arrays in nested lists and tuples."""
    if isinstance(value, list | tuple):
        return tuple(array for item in value for array in arrays_in(item))
    return (value,) if is_array_api_obj(value) else ()


def _on_numpy(function: Callable[..., Any], arrays: Sequence[Any]) -> Callable[..., Any]:
    """``function`` as one of NumPy arrays; it is called with arrays of the library and the device of ``arrays``."""
    convert = (
        partial(namespace(*arrays).asarray, device=device(arrays[0])) if arrays else np.asarray
    )
    return lambda *arguments: _as_numpy(function(*_converted(arguments, convert)))


def _as_numpy(value: Any) -> Any:
    return _converted(value, lambda array: np.asarray(to_numpy(array)))


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    """The same with every array converted, in nested lists and tuples as well."""
    if isinstance(value, list | tuple):
        return tuple(_converted(item, convert) for item in value)
    return convert(value) if is_array_api_obj(value) else value


def _finite_norm(array: Matrix) -> float:
    return norm(array[np.isfinite(array)])


def _count_nan(array: np.ndarray) -> str:
    return f"{int(np.isnan(array).sum())} of {array.size} entries"
