"""What the records of this room share."""

from __future__ import annotations

from typing import Any


def lists_for_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with lists in place of tuples, as JSON has them."""
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }
