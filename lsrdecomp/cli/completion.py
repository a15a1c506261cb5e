"""Values that a shell offers for options which take one of a few."""

from __future__ import annotations

from collections.abc import Callable, Collection


def complete(values: Callable[[], Collection[str]]) -> Callable[[str], list[str]]:
    """Return a completion by the values that begin as what was typed.

    Parameters
    ----------
    values : callable
        Returns the values; it is called when a shell asks, so that it may import what is costly.
    """

    def completed(incomplete: str) -> list[str]:
        return [value for value in values() if value.startswith(incomplete)]

    return completed
