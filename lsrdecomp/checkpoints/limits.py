"""Limits on what a file may ask for: a few bytes must not cost a machine's memory, or years.

Adapters come from strangers. SECURITY.md says what else is promised, and how it is tested.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Sizes above which a file is refused before anything is allocated for it.

    All were chosen by hand. What a user chooses is ``max_memory`` of
    `lsrdecomp.checkpoints.open_checkpoint`.
    """

    json_bytes: int = 16 * 2**20
    """Bytes of a JSON file, of a safetensors header, or of a pickle inside a torch file."""
    digest_bytes: int = 2**20
    """Bytes of a file of digests (SHA256SUMS)."""
    name_characters: int = 512
    """Characters of a tensor's name."""
    dimensions: int = 16
    """Axes of a tensor."""
    rank: int = 2**31 - 1
    """Ranks and other integers of adapter_config.json."""
    side: int = 2**31
    """Rows or columns of a layer of Kronecker factors, whose divisors are looked for one by one."""
    factors: int = 16
    """Kronecker factors of a layer."""
    derived_numbers: int = 2**29
    """Numbers of a tensor that is not stored but computed from stored ones, as LoHa's are."""
    index_bytes: int = 16 * 2**20
    """Bytes that the index of packed layers may unpack to."""
    packed_numbers: int = 2**31
    """Numbers of the factors of one packed layer."""
    unstored_numbers: int = 2**26
    """The same where factors hold numbers, such as zeros, that no byte was stored for."""
    pattern_characters: int = 1024
    """Characters of a pattern of module names. This and the next three bound matching."""
    pattern_repeats: int = 3
    """Repeats (``*``, ``+`` or ``{``) in one pattern."""
    pattern_choices: int = 16
    """Choices (``|`` or ``?``) in one pattern."""
    wildcard_patterns: int = 64
    """Patterns with wildcards in one field of a config."""


LIMITS = ReadLimits()
"""The limits that every reader here keeps."""
