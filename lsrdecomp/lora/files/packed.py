"""Layers in few bytes: the numbers of all and the index of their sizes in one tensor.

With a tensor and a pattern for each factor, their names and sizes would outweigh the factors.

The tensor ``lsr``, the last of its file, holds bytes: each layer's in the order of the index; the
index (`lsrdecomp.lora.files.packed_index`); its length; and the seal, digests of the file and of
its config (`lsrdecomp.lora.files.digests`). An entry of the index is the kind of the layer's
structure and what that structure says of itself; `lsrdecomp.lora.files.encodings` lists them, with
the layout of their bytes, and `lsrdecomp.formats` says what these stand for.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.formats.number_formats import (
    Codes,
    packed_digits_size,
    packed_size,
    unpack,
    unpack_digits,
)
from lsrdecomp.gateway import printable
from lsrdecomp.lora.files.format import PREFIX
from lsrdecomp.lora.files.tensors import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lsrdecomp.formats.stored import Factors, Stored
    from lsrdecomp.kronecker.shape import ProductShape

NUMBERS = "lsr"
DECODING_ERRORS = (
    LsrError,
    ValueError,
    TypeError,
    LookupError,
    zlib.error,
    RecursionError,
    OverflowError,
)
"""What damaged bytes may raise where they are decoded."""
Bytes = NDArray[np.uint8]


def damage_error(
    error: BaseException, what: str = "packed layers are damaged", tensor: str | None = NUMBERS
) -> CheckpointError:
    """Make the error for bytes, or for an index, that cannot be decoded."""
    return CheckpointError(f"{what}: {printable(str(error)[:300])}", tensor=tensor)


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One layer as the index describes it, its numbers checked.

    Attributes
    ----------
    shape : ProductShape
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
        From a `Reader` of its bytes to the layer as it is stored.
    has_unstored : bool
        Whether the factors hold numbers that no byte was stored for; a smaller limit then guards
        memory.
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
        """Shapes (s, m_i, r_i) of the out side and (t, r_i, n_i) of the in side."""
        shape = self.entry.shape
        left_terms, right_terms = self.entry.terms
        left = [(left_terms, *size) for size in shape.left.factors]
        right = [(right_terms, *size) for size in shape.right.factors]
        return left, right

    @property
    def storage(self) -> str:
        """A floating type, or ``"int4"`` and the like."""
        return self.entry.storage

    def factors(self) -> tuple[Factors, Factors]:
        """Read the factors of both sides: floats as stored, anything else in float64."""
        return self.stored().factors()

    def stored(self) -> Stored:
        """Read the layer as it is stored; `CheckpointError` if its bytes cannot be read."""
        try:
            return self.entry.read(Reader(self.content))
        except DECODING_ERRORS as error:
            raise damage_error(error) from None


def named_factors(layers: Mapping[str, PackedLayer]) -> dict[str, NDArray[Any]]:
    """Read all factors, by the keys they would have in a file of their own.

    They are in float32, or in float64 where stored so.
    """
    named = {}
    for name, layer in layers.items():
        dtype = "float64" if layer.storage == "float64" else "float32"
        for side, factors in zip("BA", layer.factors(), strict=True):
            for i, factor in enumerate(factors, 1):
                named[f"{PREFIX}{name}.lsr_{side}.factor_{i}"] = factor.astype(dtype)
    return named


class Reader:
    """Walks through bytes; a read beyond the end is a `ValueError`, not an empty array."""

    def __init__(self, packed: Bytes) -> None:
        self.packed = packed
        self.position = 0

    def take(self, count: int) -> bytes:
        """Return the next bytes, by their number."""
        if self.position + count > self.packed.size:
            raise ValueError(
                f"{count} bytes are needed at byte {self.position} of {self.packed.size}"
            )
        piece = self.packed[self.position : self.position + count]
        self.position += count
        return piece.tobytes()

    def integer(self) -> int:
        """Read an integer in bytes of seven bits, low ones first; the high bit means "more"."""
        value = 0
        for shift in range(0, 63, 7):
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("an integer of more than nine bytes")

    def floats(self, storage: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Read an array of a floating type."""
        dtype = DTYPES[storage]
        content = self.take(math.prod(shape) * dtype.itemsize)
        stored = np.frombuffer(content, dtype.newbyteorder("<"))
        return stored.astype(dtype, copy=False).reshape(shape)

    def scales(self, count: int) -> NDArray[np.float16]:
        """Read scales in float16; `ValueError` for one that is not finite."""
        values = np.frombuffer(self.take(2 * count), "<f2").astype(np.float16)
        if not np.isfinite(values).all():
            raise ValueError("a scale is NaN or infinite")
        return values

    def codes(self, bits: int, shape: tuple[int, ...]) -> Codes:
        """Read an array of integer codes."""
        content = self.take(packed_size(math.prod(shape), bits))
        return unpack(np.frombuffer(content, np.uint8), bits, shape)

    def digits(self, bits: int, count: int) -> Codes:
        """Read a number of integer codes that are digits of numbers."""
        content = self.take(packed_digits_size(count, bits))
        return unpack_digits(np.frombuffer(content, np.uint8), bits, (count,))
