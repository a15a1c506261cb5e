"""How the ΔW of another adapter or model differs from a LoRA's, and what it looks like.

ΔW of the LoRA is never formed. That of the other is a low-rank pair, or a matrix where it is the
difference of a merged weight and the base's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.files.progress import Counter
from lsrdecomp.lora.search.layers import layer_pair
from lsrdecomp.targets.residual import pair_distance
from lsrdecomp.targets.target import LowRank
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lsrdecomp.lora.files import Checkpoint
    from lsrdecomp.lora.files.progress import OnStep
    from lsrdecomp.lora.files.tensors import Array

Delta = LowRank | np.ndarray[Any, np.dtype[Any]]
"""ΔW of a layer, as a pair or formed."""

SAME = 0.01
"""Relative error up to which two ΔW are the same: more than rounding both factors to bfloat16."""
PARALLEL = 0.98
"""Cosine from which one ΔW is a multiple of another; by hand."""
UNLIKE, CHANCE = 0.05, 5.0
"""Cosine below which two ΔW have nothing in common, and the same in units of 1/√(m n), which is the
standard deviation of that of unrelated ones."""
FAR = 0.9
"""Relative error from which a layer may be another one; by hand."""
SCALE_SPREAD = 0.05
"""Relative difference up to which scales are the same; by hand."""
PROBES = 8
"""Random vectors on either side, by whose products layers that were exchanged are looked for; by
hand."""


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """How one layer of the other differs from the LoRA's.

    Attributes
    ----------
    name : str
    code : str
        What it looks like: ``same``, or a code of `lora.measure.symptoms`.
    norm : float
        ‖ΔW‖_F of the LoRA.
    relative_error : float or None
        ‖ΔW − ΔŴ‖_F / ‖ΔW‖_F; None where the two cannot be compared.
    scale : float or None
        How many times as large the other's ΔW is.
    resembles : str
        Of exchanged layers, the one whose ΔW it is; of others that cannot be compared, why.
    """

    name: str
    code: str
    norm: float
    relative_error: float | None = None
    scale: float | None = None
    resembles: str = ""


@dataclass(frozen=True, slots=True)
class StoredUpdate:
    """The other's ΔW of one layer, read when asked for, and what its storage may have moved.

    ``rounding`` returns the largest ‖·‖_F that rounding of merged weights explains; of quantized
    ones, whose noise is larger than most ΔW, ``is_quantized`` is set instead.
    """

    read: Callable[[], Delta]
    rounding: Callable[[], float] = lambda: 0.0
    is_quantized: bool = False


@one_blas_thread
def compare_layers(
    source: Checkpoint, updates: Mapping[str, StoredUpdate], *, on_step: OnStep | None = None
) -> list[LayerDifference]:
    """Compare every layer of a LoRA with another's ΔW.

    Parameters
    ----------
    source : Checkpoint
        The LoRA.
    updates : Mapping of str to StoredUpdate
        The other's, by the LoRA's names of layers.
    on_step : callable, optional
        Called with a `ProgressUpdate` as each layer is compared.

    Notes
    -----
    O((m + n)(r + q)²) a layer for a pair of rank q, O(m n r) for a matrix; one layer is in memory
    at a time.
    """
    compared = Counter(on_step, "comparing weights", len(source.layers), "layers")
    differences = []
    for layer in source.layers:
        pair = layer_pair(source, layer)
        differences.append(_compare(layer.name, pair, updates.get(layer.name)))
        compared.add()
    unlike = [
        each.name
        for each in differences
        if each.code in ("unrelated", "approximated") and (each.relative_error or 0.0) >= FAR
    ]
    partners = _exchanged(source, updates, unlike)
    return [
        replace(each, code="exchanged", resembles=partners[each.name])
        if each.name in partners
        else each
        for each in differences
    ]


def _compare(name: str, pair: LowRank, update: StoredUpdate | None) -> LayerDifference:
    """Compare one layer."""
    size = pair.norm
    if update is None and size > 0.0:
        return LayerDifference(name, "missing", size, 1.0)
    if update is None:
        return LayerDifference(name, "same", size, 0.0)
    try:
        other = update.read()
    except CheckpointError as refusal:
        return LayerDifference(name, "not-finite", size, resembles=refusal.message)
    if other.shape != pair.shape:
        sizes = f"{other.shape[0]} x {other.shape[1]} for {pair.shape[0]} x {pair.shape[1]}"
        is_turned = other.shape == pair.shape[::-1]
        return LayerDifference(name, "transposed" if is_turned else "size", size, resembles=sizes)
    other_size = _norm(other)
    if size == 0.0:
        return LayerDifference(name, "same" if other_size == 0.0 else "unrelated", size, other_size)
    error = _distance(pair, other) / size
    inner = _inner_product(pair, other)
    code, scale = _code(pair, other, update, (other_size, inner, error))
    return LayerDifference(name, code, size, error, scale)


def _code(
    pair: LowRank, other: Delta, update: StoredUpdate, figures: tuple[float, float, float]
) -> tuple[str, float | None]:
    """Return what a layer looks like, and at which scale."""
    other_size, inner, error = figures
    size = pair.norm
    gain = inner / size**2
    if error <= SAME:
        return "same", gain
    # Rounding has no direction, so that the gain shows through it, up to its standard error.
    noise = math.sqrt(max(other_size**2 - (gain * size) ** 2, 0.0))
    gain_error = noise / (size * math.sqrt(math.prod(pair.shape)))
    known_gain = gain if gain_error <= SCALE_SPREAD else None
    if not update.is_quantized and error * size <= update.rounding():
        return "rounded", known_gain
    if other_size <= SAME * size:
        return "missing", None
    if update.is_quantized:
        return _quantized_code(gain, gain_error), known_gain
    cosine = inner / (size * other_size)
    if abs(cosine) >= PARALLEL:
        return "scale" if abs(gain - 1.0) > SCALE_SPREAD else "approximated", gain
    rows, columns = pair.shape
    if rows == columns and _transposed_product(pair, other) >= PARALLEL * size * other_size:
        return "transposed", None
    if _is_permuted(pair, other):
        return "permuted", None
    if abs(cosine) < max(UNLIKE, CHANCE / math.sqrt(rows * columns)):
        return "unrelated", None
    # Of a projection of ΔW, such as a truncation, this is 1; of its multiple, the factor.
    return "approximated", other_size**2 / inner


def _quantized_code(gain: float, error: float) -> str:
    """Return what a layer of a quantized model looks like, by its gain and the error of that."""
    if error > SCALE_SPREAD:
        return "rounded"
    if abs(gain) <= 3.0 * error:
        return "missing"
    # A base that has the same few bits draws what is added to it back to its own values.
    return "rounded" if 0.0 < gain <= 1.0 + 5 * SCALE_SPREAD else "scale"


# -- sums over a pair, or a matrix -----------------------------------------------------------------


def _norm(delta: Delta) -> float:
    """Return ‖ΔW‖_F."""
    return delta.norm if isinstance(delta, LowRank) else float(np.linalg.norm(delta))


def _inner_product(pair: LowRank, other: Delta) -> float:
    """Return ⟨ΔW, ΔŴ⟩ of a pair and another."""
    return float(np.vdot(pair.left, _times(other, pair.right.T)))


def _times(delta: Delta, vectors: Array) -> Array:
    if isinstance(delta, LowRank):
        product: Array = delta.left @ (delta.right @ vectors)
        return product
    return delta @ vectors


def _transposed_product(pair: LowRank, other: Delta) -> float:
    """Return ⟨ΔWᵀ, ΔŴ⟩."""
    return float(np.vdot(pair.right.T, _times(other, pair.left)))


def _distance(pair: LowRank, other: Delta) -> float:
    """Return ‖ΔW − ΔŴ‖_F."""
    if isinstance(other, LowRank):
        return pair_distance(pair.left, pair.right.T, other.left, other.right.T)
    return float(np.linalg.norm(pair.to_matrix() - other))


def _is_permuted(pair: LowRank, other: Delta) -> bool:
    """Return whether two ΔW have the same rows, or columns, in another order."""
    for by_rows in (True, False):
        first, second = (np.sort(_line_norms(delta, by_rows=by_rows)) for delta in (pair, other))
        if not np.allclose(first, second, rtol=SAME):
            continue
        lines, other_lines = (_line_norms(delta, by_rows=not by_rows) for delta in (pair, other))
        if np.allclose(lines, other_lines, rtol=SAME):
            return True
    return False


def _line_norms(delta: Delta, *, by_rows: bool) -> Array:
    """Return the norms of all rows, or of all columns."""
    if not isinstance(delta, LowRank):
        lines: Array = np.linalg.norm(delta, axis=1 if by_rows else 0)
        return lines
    left, right = (delta.left, delta.right) if by_rows else (delta.right.T, delta.left.T)
    squares = np.einsum("ir,rs,is->i", left, right @ right.T, left, optimize=True)
    sizes: Array = np.sqrt(np.maximum(squares, 0.0))
    return sizes


def _exchanged(
    source: Checkpoint, updates: Mapping[str, StoredUpdate], unlike: Sequence[str]
) -> dict[str, str]:
    """Return, of layers that are unlike the LoRA's, the layer of the LoRA that they are."""
    if not unlike:
        return {}
    names = defaultdict(list)
    signatures = defaultdict(list)
    for layer in source.layers:
        pair = layer_pair(source, layer)
        names[pair.shape].append(layer.name)
        signatures[pair.shape].append(_signature(pair))
    partners = {}
    for name in unlike:
        other = updates[name].read()
        cosines = np.asarray(signatures[other.shape]) @ _signature(other)
        nearest = int(np.argmax(cosines))
        if cosines[nearest] < PARALLEL:
            continue
        partner = names[other.shape][nearest]
        pair = layer_pair(source, source.layer(partner))
        if _inner_product(pair, other) >= PARALLEL * pair.norm * _norm(other):
            partners[name] = partner
    return partners


def _signature(delta: Delta) -> Array:
    """Return the products of ΔW with random vectors on both sides, of norm one."""
    rows, columns = delta.shape
    products = (_probes(rows).T @ _times(delta, _probes(columns))).ravel()
    return products / max(float(np.linalg.norm(products)), np.finfo(float).tiny)


@cache
def _probes(size: int) -> Array:
    return np.random.default_rng(size).standard_normal((size, PROBES))
