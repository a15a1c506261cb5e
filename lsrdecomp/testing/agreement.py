"""IdentityError, and the comparison that raises it: what differs, by how much, how much rounding may explain."""

from __future__ import annotations

from typing import Any

import numpy as np

from lsrdecomp.arrays import dtype_name, norm, to_numpy
from lsrdecomp.errors import LsrError
from lsrdecomp.precision import tolerance

SHOWN_ENTRIES = 24
"""Arrays of at most this many entries are printed in an error."""


class IdentityError(LsrError, AssertionError):
    """An identity of Kronecker products does not hold.

    ``identity`` is its name; ``gap`` the relative difference of the two sides, where there is one; ``cause`` the
    exception that the code under test raised instead of an answer.
    """

    def __init__(
        self, identity: str, message: str, *, gap: float | None = None, cause: BaseException | None = None
    ) -> None:
        super().__init__(f"{identity}: {message}")
        self.identity = identity
        self.message = message
        self.gap = gap
        self.cause = cause


def require_agreement(
    identity: str, actual: Any, expected: Any, *, bound: float, size: int = 1, inputs: tuple[Any, ...] = ()
) -> None:
    """Raise `IdentityError` unless two arrays agree up to rounding.

    Parameters
    ----------
    identity : str
        Its name and what it says.
    actual, expected : array_like
        Of any library; equal shapes are part of the identity.
    bound : float
        Size of the numbers that were added up: rounding is relative to this, not to a result that may cancel.
    size : int
        Length of the longest sum.
    inputs : tuple of Array
        What the functions were called with, shown where small; the coarsest of their types sets the precision.
    """
    found, wanted = np.asarray(to_numpy(actual)), np.asarray(to_numpy(expected))
    if found.shape != wanted.shape:
        raise IdentityError(identity, f"shape {found.shape}, expected {wanted.shape}{shown(inputs)}")
    if found.size == 0:
        return
    __tracebackhide__ = True
    gap = norm(np.atleast_1d(found - wanted).astype(complex))
    types = [dtype_name(array) for array in inputs] or ["float64"]
    allowed = bound * max(tolerance(name, size) for name in types)
    if not gap <= allowed:
        raise IdentityError(
            identity,
            f"the two sides differ by {gap:.3g}, rounding explains {allowed:.3g}{shown(inputs)}",
            gap=gap / bound if bound > 0.0 else None,
        )


def shown(inputs: tuple[Any, ...]) -> str:
    """The arrays that a function was given, a line each; entries where they are few."""
    lines = []
    for letter, array in zip("ABCDEF", inputs, strict=False):
        values = np.asarray(to_numpy(array))
        sides = "×".join(map(str, values.shape))
        text = np.array2string(values, precision=3, separator=", ").replace("\n", "\n      ")
        lines.append(f"\n  {letter} {sides}" + (f" = {text}" if values.size <= SHOWN_ENTRIES else ""))
    return "".join(lines)
