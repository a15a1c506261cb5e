"""Layers in few bytes: the numbers of all in one tensor, their sizes in one index; the entries of each factor's own
tensor and pattern would outweigh the factors.

The tensor ``base_model.model.lsr_numbers`` holds bytes: each layer's in the order of the index, which is a text of the
config (`lsrdecomp.checkpoints.packed_index`). An entry of the index is the kind of the layer's structure and what that
structure says of itself; `lsrdecomp.checkpoints.encodings` lists them, with the layout of their bytes, and
`lsrdecomp.formats` says what these stand for. Files of version 0.1 have codes only, in ``lsr_packed``, after their
index.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.checkpoints.format import PREFIX
from lsrdecomp.checkpoints.tensors import DTYPES
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.formats.number_formats import Codes, packed_size, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lsrdecomp.formats.stored import Factors, Stored
    from lsrdecomp.kronecker.shape import ProductShape

NUMBERS = f"{PREFIX}lsr_numbers"
PACKED = f"{PREFIX}lsr_packed"
"""The tensor of version 0.1."""
DAMAGE = (LsrError, ValueError, TypeError, LookupError, zlib.error, RecursionError, OverflowError)
Bytes = NDArray[np.uint8]


def damaged(
    error: BaseException, what: str = "packed layers are damaged", tensor: str | None = PACKED
) -> CheckpointError:
    """What is said of bytes or of an index that cannot be read."""
    text = "".join(letter if letter.isprintable() else "?" for letter in str(error)[:300])
    return CheckpointError(f"{what}: {text}", tensor=tensor)


# One layer
# -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """What the index says of one layer, its numbers checked.

    Attributes
    ----------
    terms : (int, int)
        Of the out side and of the in side, as its factors have them: at least one.
    storage : str
        A floating type, or ``"int4"`` and the like.
    size : int
        Bytes.
    parameters : int
        Numbers that are stored, as `lsrdecomp.formats.stored.Stored.parameters` counts them.
    label : str
        Structure and sizes, as tables show them.
    read : callable
        From a `Reader` of so many bytes to the layer as it is stored.
    has_unstored : bool
        Whether the factors hold numbers that no byte was stored for; a smaller limit then guards memory.
    """

    shape: ProductShape
    terms: tuple[int, int]
    storage: str
    size: int
    parameters: int
    label: str
    read: Callable[[Reader], Stored]
    has_unstored: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """One layer in its bytes."""

    entry: IndexEntry
    content: Bytes

    @property
    def factor_shapes(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """Shapes (s, m_i, r_i) of the out side and (t, r_i, n_i) of the in side, as `factors` gives them."""
        sides = self.entry.shape.left.factors, self.entry.shape.right.factors
        left, right = (
            [(terms, *size) for size in side]
            for terms, side in zip(self.entry.terms, sides, strict=True)
        )
        return left, right

    @property
    def storage(self) -> str:
        return self.entry.storage

    def factors(self) -> tuple[Factors, Factors]:
        """Return factors of the out side and of the in side: floats as stored, anything else in float64."""
        return self.stored().factors()

    def stored(self) -> Stored:
        """Read the layer as it is stored; `CheckpointError` if its bytes cannot be read."""
        try:
            return self.entry.read(Reader(self.content))
        except DAMAGE as error:
            raise damaged(error) from None


def named_factors(layers: Mapping[str, PackedLayer]) -> dict[str, NDArray[Any]]:
    """The factors by the keys they would have in a file of their own, in float32 or, where stored so, float64."""
    return {
        f"{PREFIX}{name}.lsr_{side}.factor_{i}": factor.astype(
            "float64" if layer.storage == "float64" else "float32"
        )
        for name, layer in layers.items()
        for side, factors in zip("BA", layer.factors(), strict=True)
        for i, factor in enumerate(factors, 1)
    }


class Reader:
    """Walks through the bytes; a read beyond the end is an error, not an empty array."""

    def __init__(self, packed: Bytes) -> None:
        self.packed, self.position = packed, 0

    def take(self, count: int) -> bytes:
        if self.position + count > self.packed.size:
            raise ValueError(
                f"{count} bytes are needed at byte {self.position} of {self.packed.size}"
            )
        piece = self.packed[self.position : self.position + count]
        self.position += count
        return piece.tobytes()

    def integer(self) -> int:
        """In bytes of seven bits."""
        value = shift = 0
        while (byte := self.take(1)[0]) > 127:
            value, shift = value | (byte & 127) << shift, shift + 7
            if shift > 56:
                raise ValueError("an integer of more than eight bytes")
        return value | byte << shift

    def integers(self, count: int) -> list[int]:
        """Read so many integers; a count that the bytes could not hold is damage, not a reason to allocate."""
        if count > self.packed.size:
            raise ValueError(f"{count} integers in {self.packed.size} bytes")
        return [self.integer() for _ in range(count)]

    def floats(self, storage: str, shape: tuple[int, ...]) -> NDArray[Any]:
        dtype = DTYPES[storage]
        stored = np.frombuffer(
            self.take(math.prod(shape) * dtype.itemsize), dtype.newbyteorder("<")
        )
        return stored.astype(dtype, copy=False).reshape(shape)

    def scales(self, count: int) -> NDArray[np.float16]:
        values = np.frombuffer(self.take(2 * count), "<f2").astype(np.float16)
        if not np.isfinite(values).all():
            raise ValueError("a scale is NaN or infinite")
        return values

    def codes(self, bits: int, shape: tuple[int, ...]) -> Codes:
        return unpack(
            np.frombuffer(self.take(packed_size(math.prod(shape), bits)), np.uint8), bits, shape
        )
