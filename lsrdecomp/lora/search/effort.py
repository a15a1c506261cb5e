"""What of a search is set beside `Search`: the layers that it leaves out, and its memory.

All other numbers that steer it are constants beside the steps that use them, each with its unit;
they were set by hand unless a line says what was measured. The file needs no NumPy, so that
settings are read without it.
"""

from __future__ import annotations

from dataclasses import dataclass

Ranks = tuple[int, int]
"""Numbers of terms of the output side and of the input side of an LSR product."""


@dataclass(frozen=True, slots=True)
class Screening:
    """The layers that are not solved in the Frobenius norm; see `lora.search.screening`.

    Nothing is left out in other norms, in integers, of ``structure="lsr"`` and with the shapes of
    `Search.like`.

    Attributes
    ----------
    min_advantage : float
        Least estimate of what an LSR product keeps, in units of a truncated SVD of as many
        parameters, for a layer to be solved; 0 leaves out none but by rank. Of 1,128 layers of 15
        adapters 84 have a product above one unit, and their least estimate is 0.92; that product
        was chosen for none of the ratios 4, 8, 16 and 48.
    min_filling_gain : float
        Relative decrease of the error over all layers from which products are also solved to fill
        what truncated SVDs leave of a budget, in ``filling_layers`` layers.
    filling_layers : int
        Layers that are solved for it: those whose products are nearest to the price that a
        parameter has in the budget.

    Examples
    --------
    >>> Screening(min_advantage=0.0).min_advantage                     # for `Search(screening=…)`
    0.0
    """

    min_advantage: float = 0.95
    min_filling_gain: float = 5e-4
    filling_layers: int = 24


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Limits of memory. Entries are numbers of eight bytes.

    Attributes
    ----------
    pair_entries : int
        Maximum entries of LoRA pairs that are solved together, and of those that are kept in
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
