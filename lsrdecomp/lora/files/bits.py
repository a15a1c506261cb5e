"""Integers in runs of bits, for the index of packed layers: of a fixed width, or Elias gamma codes.

Elias gamma codes of order k [1]_ take few bits for small integers and have no largest one.

References
----------
.. [1] P. Elias, Universal codeword sets and representations of the integers, IEEE Trans. Inf.
       Theory 21 (1975); J. Teuhola, A compression method for clustered bit-vectors, Inf. Process.
       Lett. 7 (1978), for orders above 0.
"""

from __future__ import annotations

import numpy as np

ORDER = 2
"""Order of the codes of integers whose sizes nobody knows: 0 to 3 take three bits."""
MAX_WIDTH = 63
"""Bits of the largest integer that is read."""


class BitWriter:
    """Gathers integers as bits, most significant first.

    Examples
    --------
    >>> bits = BitWriter()
    >>> bits.fixed(5, width=3)
    >>> bits.integer(11)
    >>> reader = BitReader(bits.content())
    >>> reader.fixed(width=3), reader.integer()
    (5, 11)
    """

    def __init__(self) -> None:
        self._runs: list[str] = []

    def fixed(self, value: int, width: int) -> None:
        """Append an integer from 0 to 2^width − 1; none of width 0."""
        if width:
            self._runs.append(f"{value:0{width}b}")

    def integer(self, value: int, order: int = ORDER) -> None:
        """Append an integer from 0 on."""
        digits = f"{value + (1 << order):b}"
        self._runs.append("0" * (len(digits) - 1 - order) + digits)

    def integers(self, values: tuple[int, ...]) -> None:
        """Append integers from 0 on."""
        for value in values:
            self.integer(value)

    def content(self) -> bytes:
        """Return the bits as bytes; the last is filled with zeros."""
        digits = "".join(self._runs).encode()
        return np.packbits(np.frombuffer(digits, np.uint8) - ord("0")).tobytes()


class BitReader:
    """Reads what a `BitWriter` wrote; a read beyond the end is a `ValueError`."""

    def __init__(self, content: bytes) -> None:
        bits = np.unpackbits(np.frombuffer(content, np.uint8))
        self._digits = (bits + ord("0")).tobytes().decode()
        self._position = 0

    def fixed(self, width: int) -> int:
        """Read an integer of a number of bits."""
        end = self._position + width
        if end > len(self._digits):
            raise ValueError(f"{width} bits are needed at bit {self._position}")
        digits = self._digits[self._position : end]
        self._position = end
        return int(digits or "0", 2)

    def integer(self, order: int = ORDER) -> int:
        """Read an integer of any size."""
        first_one = self._digits.find("1", self._position)
        if first_one < 0:
            raise ValueError(f"no integer at bit {self._position}")
        width = first_one - self._position + order + 1
        if width > MAX_WIDTH:
            raise ValueError(f"an integer of {width} bits")
        self._position = first_one
        return self.fixed(width) - (1 << order)

    def integers(self, count: int) -> list[int]:
        """Read a number of integers, of which each takes a bit at least."""
        self.check_count(count)
        return [self.integer() for _ in range(count)]

    def check_count(self, count: int) -> None:
        """Raise `ValueError` if there are fewer bits than the count of things needs."""
        if count > len(self._digits):
            raise ValueError(f"{count} integers in {len(self._digits)} bits")


def width_of(count: int) -> int:
    """Return the bits of a fixed width that tell a number of values apart.

    >>> [width_of(count) for count in (0, 1, 2, 12)]
    [0, 0, 1, 4]
    """
    return max(0, count - 1).bit_length()
