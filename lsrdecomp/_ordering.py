"""Natural order of names: layer 2 before layer 10."""

from __future__ import annotations

import re


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key by which layer.2 precedes layer.10.

    Numbers may have any length and leading zeros; names that differ only in leading zeros are
    ordered as text.

    Parameters
    ----------
    name : str

    Returns
    -------
    tuple of (int, str)
        Texts and numbers in turn; a number is ordered by its count of digits, then by the digits.

    Examples
    --------
    >>> sorted(["h.10.attn", "h.9.attn", "h.attn"], key=natural_key)
    ['h.9.attn', 'h.10.attn', 'h.attn']
    """
    parts = re.split("([0-9]+)", name)
    key = []
    for i, part in enumerate(parts):
        is_number = i % 2 == 1  # re.split returns what its group matched at odd places
        digits = part.lstrip("0")
        key.append((len(digits), digits) if is_number else (0, part))
    return (*key, (0, name))
