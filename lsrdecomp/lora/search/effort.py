"""What of a search is set beside `Search`: its memory.

All other numbers that steer it are constants beside the steps that use them, each with its unit;
they were set by hand unless a line says what was measured. The file needs no NumPy, so that
settings are read without it.
"""

from __future__ import annotations

from dataclasses import dataclass

Ranks = tuple[int, int]
"""Numbers of terms of the output side and of the input side of an LSR product."""


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Limits of memory. Entries are numbers of eight bytes.

    Attributes
    ----------
    pair_entries : int
        Maximum entries of LoRA pairs that are solved together, and of pairs that are kept in
        memory: 8 MiB. One layer may be larger.
    norm_entries : int
        The same for the weights of their norms.
    spill_bytes : int
        Bytes that a `SpillCache` holds in memory before it moves to disk.

    Examples
    --------
    >>> ResourceLimits(spill_bytes=2**20).spill_bytes                  # for `Resources(limits=…)`
    1048576
    """

    pair_entries: int = 2**20
    norm_entries: int = 2**23
    spill_bytes: int = 8 * 2**20


DEFAULT_LIMITS = ResourceLimits()

LIMITS_BESIDE_A_BASE = ResourceLimits(norm_entries=2**24)
"""A base takes more memory than the norms of all layers of a small one, 128 MiB, which the search
for a size reads again and again."""
