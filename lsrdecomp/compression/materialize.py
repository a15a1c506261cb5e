"""From a candidate to what is written: factors rounded to their storage, or integer codes, and their measured price."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lsrdecomp.compression.candidates import Candidate, Drop, Keep, LowRank, Lsr, Price
from lsrdecomp.compression.layers import Form, Layer
from lsrdecomp.compression.quantize import INTEGER_BITS, refitted_product, stored_product
from lsrdecomp.compression.spill_cache import SpillCache
from lsrdecomp.compression.water_filling import pair_code, svd_code
from lsrdecomp.formats.quantized import CodedProduct
from lsrdecomp.kronecker.product import low_rank_product
from lsrdecomp.precision import precision


@dataclass(frozen=True, eq=False)
class Materialized:
    """A candidate whose factors were made once and wait in a cache as they will be written."""

    candidate: Candidate  # its price is that of the stored factors
    coded: bool
    stored: Callable[[], Any] | None = field(repr=False)  # None for a layer left out

    @property
    def form(self) -> Form | None:
        """The factors as a reader gets them; None for a layer left out."""
        if self.stored is None:
            return None
        stored = self.stored()
        form: Form = stored.dequantized() if self.coded else stored
        return form

    @property
    def codes(self) -> CodedProduct | None:
        """What is on disk, for integer storage."""
        if self.stored is None or not self.coded:
            return None
        codes: CodedProduct = self.stored()
        return codes


def materialize(layer: Layer, candidate: Candidate, cache: SpillCache, *, refit: bool = True) -> Materialized:
    """Make the factors of a candidate in its storage, and measure them in the layer's norm.

    An LSR product in integers is solved for in the layer's norm (`refitted_product`), or rounded as it is if that is
    nearer; without ``refit`` it is only rounded.
    """
    form, codes, size = _stored(layer, candidate)
    if form is None:
        return Materialized(candidate, False, None)
    error = layer.squared_error(as_read(form, candidate.storage, coded=codes is not None))
    if refit and codes is not None and isinstance(candidate, Lsr):
        solved = refitted_product(layer.pair, candidate.product(), INTEGER_BITS[candidate.storage], layer.norms)
        lost = layer.squared_error(solved.dequantized())
        if lost < error:
            codes, size, error = solved, solved.bytes, lost
    price = replace(candidate.price, bytes=size, squared_error=error)
    return Materialized(replace(candidate, price=price), codes is not None, cache.put(form if codes is None else codes))


def as_read(form: Any, storage: str, *, coded: bool) -> Any:
    """What a reader gets: weights are spread over the factors and those rounded when they are written."""
    return form if coded else form.round_to(storage)


def priced_as(layer: Layer, candidate: Candidate, storage: str, *, measured: bool = True) -> Candidate:
    """The candidate in a storage type: its bytes counted, its error measured on rounded factors.

    Without ``measured`` a floating type leaves the error as it is. Integers for a low-rank pair are
    `water_filling.water_filled_candidates`.
    """
    asked = replace(candidate, price=replace(candidate.price, storage=storage))
    if isinstance(candidate, Drop):
        return asked
    if storage not in INTEGER_BITS and not measured:
        return replace(asked, price=replace(asked.price, bytes=_float_bytes(candidate, storage)))
    form, _, size = _stored(layer, asked)
    assert form is not None
    return replace(asked, price=Price(candidate.parameters, layer.squared_error(form), storage, size))


def _stored(layer: Layer, candidate: Candidate) -> tuple[Form | None, CodedProduct | None, int]:
    """The factors as a reader gets them, integer codes if there are any, bytes."""
    storage = candidate.storage
    match candidate:
        case Drop():
            return None, None, 0
        case LowRank(bits=bits) if bits:
            code = pair_code(layer) if candidate.unrotated else svd_code(layer, bits)
            return code.dequantized(), code, code.bytes
        case Lsr():
            stored = stored_product(candidate.product(), storage)
            return stored.product, stored.codes, stored.bytes
        case LowRank(rank=rank):
            rounded = stored_product(low_rank_product(*layer.truncated(rank)), storage).product
        case Keep():
            rounded = stored_product(low_rank_product(layer.pair.left, layer.pair.right), storage).product
    return rounded, None, _float_bytes(candidate, storage)


def _float_bytes(candidate: Candidate, storage: str) -> int:
    return math.ceil(candidate.parameters * precision(storage).bytes)
