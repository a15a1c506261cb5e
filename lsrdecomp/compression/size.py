"""Exact file sizes: how much factors may take so that the file has at most so many bytes, and nearly as many."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lsrdecomp.errors import BudgetError

T = TypeVar("T")

ROUNDS = 8
FILLED = 0.99
"""A file this full is full enough to stop."""


def fill(
    size: int, fixed: int, attempt: Callable[[float], T], measure: Callable[[T], int], quality: Callable[[T], float]
) -> T:
    """The best result whose measured size is at most ``size``.

    What a file holds beside its factors is known only once the factors are chosen. So the allowance for factors starts
    at ``size`` without what is ``fixed``, and is corrected by what the file turned out to be; when one attempt fits and
    another does not, the next lies between them.

    Parameters
    ----------
    size : int
        Bytes.
    fixed : int
        Bytes of the file whatever the factors are: heads, an empty header.
    attempt : callable
        From an allowance for factors, in bytes, to a result; may raise `BudgetError`.
    measure : callable
        Bytes of the file of a result.
    quality : callable
        The error of a result: the least wins.

    Raises
    ------
    BudgetError
        If no attempt fits; says the smallest size that was seen.
    """
    fits: T | None = None
    seen: list[int] = []
    low, high, allowed = 0.0, float(size - fixed), float(size - fixed)
    for _ in range(ROUNDS):
        try:
            result = attempt(max(allowed, 0.0))
        except BudgetError as error:
            if fits is None and seen:
                raise BudgetError(f"{size:,} bytes are too few: the smallest file found has {min(seen):,}") from error
            if fits is None:
                raise
            break
        actual = measure(result)
        seen.append(actual)
        if actual <= size:
            low = max(low, allowed)
            fits = result if fits is None or quality(result) <= quality(fits) else fits
            if actual >= FILLED * size:
                break
        else:
            high = min(high, allowed)
        guess = allowed + size - actual
        if seen.count(actual) > 1:  # the last correction was too small to change any layer's choice
            guess = low + 0.9 * (high - low)
        allowed = max(guess, 0.0) if guess < high and (guess > low or fits is None) else 0.5 * (low + high)
        if high - low < 4.0:
            break
    if fits is None:
        raise BudgetError(f"{size:,} bytes are too few: the smallest file found has {min(seen):,}")
    return fits
