"""Plain truncated SVD: the rival of every result, in the best of the usual storages.

It is what others do: the singular values above one threshold over all layers, U√σ and √σVᵀ in
float16, or rounded to the nearest of the integers with a float16 scale for each group of numbers in
a column or row, which brings the largest of the group to the end of the range. None of our own
codes, which are nearer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import to_numpy
from lsrdecomp.formats.number_formats import FORMATS, group_count, packed_size
from lsrdecomp.lora.search.spectral_codes import layer_svd
from lsrdecomp.precision import precision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.lora.search.layers import Layer

LARGEST_SQUARES = {32: 5.7, 64: 6.9, 128: 8.2}
"""Expected square of the largest of so many Gaussian numbers, which share a scale; the group sizes
that others use."""

FLOAT_NOISE = 0.084
"""Squared error of Gaussian numbers in a floating type, relative to them, in units of μ²."""

SCALE_BYTES = 2

NEARLY_BEST = 1.4
"""Forms are rounded on a sample if their expected error is at most this many times the least:
uniform numbers, as LoRA starts from, lose half of what Gaussian ones do."""

MEASURED_NUMBERS = 2**24
"""Largest adapter of which all layers are measured, a second for each form."""
SAMPLE_NUMBERS = 2**19
"""Numbers of layers from all depths of the network on which these forms are compared."""

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PlainForm:
    """A storage, and how many numbers share a scale; none do in floats."""

    storage: str
    group: int = 0

    @property
    def name(self) -> str:
        """What it is called in a sentence."""
        return f"{self.storage}, groups of {self.group}" if self.group else self.storage

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return FORMATS[self.storage].bits

    @property
    def noise(self) -> float:
        """Expected squared error of both sides of a component, relative to it."""
        if not self.group:
            return 2.0 * FLOAT_NOISE * precision(self.storage).unit_roundoff ** 2
        return 2.0 * LARGEST_SQUARES[self.group] / (12.0 * FORMATS[self.storage].top ** 2)

    def bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of a component of a matrix of this shape."""
        scales = sum(group_count(size, self.group) for size in shape) if self.group else 0
        return packed_size(sum(shape), self.bits) + SCALE_BYTES * scales


PLAIN_FORMS = (
    PlainForm("float16"),
    *(PlainForm(name, group) for name in ("int8", "int4") for group in LARGEST_SQUARES),
)


def best_plain_svd(
    layers: Sequence[Layer], max_bytes: float, *, measured: bool = True
) -> tuple[float, PlainForm] | None:
    """Return the least relative error of plain truncated SVD over all layers, and its form.

    Parameters
    ----------
    layers : sequence of Layer
        In one norm, which the error is in.
    max_bytes : float
        Maximum bytes of numbers and scales.
    measured : bool
        Whether all layers are rounded in the best form and its error is measured. Otherwise the
        error is estimated from a sample of them, in a fraction of the time.

    Returns
    -------
    (float, PlainForm) or None
        None if nothing fits, or every layer is zero.

    Notes
    -----
    Singular values tell what each form is expected to lose of Gaussian numbers; the promising ones
    are compared on a sample of layers. O((m + n) r²) a layer that is rounded.
    """
    squares = [layer.sigma**2 for layer in layers]
    squared_norm = math.fsum(float(square.sum()) for square in squares)
    if squared_norm == 0.0:
        return None
    # 1. The ranks of each form within the bytes, and what is expected to be lost.
    ranks = {}
    cut = {}
    rounding = {}
    for form in PLAIN_FORMS:
        chosen = ranks_within(squares, [form.bytes(layer.shape) for layer in layers], max_bytes)
        kept = math.fsum(
            float(square[:rank].sum()) for square, rank in zip(squares, chosen, strict=True)
        )
        if any(chosen):
            ranks[form] = chosen
            cut[form] = max(0.0, squared_norm - kept)
            rounding[form] = form.noise * kept
    if not ranks:
        return None
    # 2. What rounding loses of a sample of layers, beside what was expected.
    limit = NEARLY_BEST**2 * min(cut[form] + rounding[form] for form in ranks)
    forms = [form for form in ranks if cut[form] + rounding[form] <= limit]
    lost: dict[tuple[PlainForm, int], float] = {}
    for i in _sample(layers):
        svd = layer_svd(layers[i], max(ranks[form][i] for form in forms))
        for form in forms:
            lost[form, i] = _squared_error(layers[i], svd, ranks[form][i], form)
    estimates = {}
    for form in forms:
        sampled = [i for other, i in lost if other == form]
        kept_there = [float(squares[i][: ranks[form][i]].sum()) for i in sampled]
        cut_there = [float(squares[i][ranks[form][i] :].sum()) for i in sampled]
        added = math.fsum(lost[form, i] for i in sampled) - math.fsum(cut_there)
        expected = form.noise * math.fsum(kept_there)
        factor = max(0.0, added / expected) if expected > 0.0 else 1.0
        estimates[form] = cut[form] + factor * rounding[form]
    best = min(forms, key=estimates.__getitem__)
    if not measured:
        return math.sqrt(estimates[best] / squared_norm), best
    # 3. The error of the best, measured on all layers.
    for i, layer in enumerate(layers):
        if (best, i) not in lost:
            svd = layer_svd(layer, ranks[best][i])
            lost[best, i] = _squared_error(layer, svd, ranks[best][i], best)
    loss = math.fsum(lost[best, i] for i in range(len(layers)))
    return math.sqrt(loss / squared_norm), best


def _sample(layers: Sequence[Layer]) -> list[int]:
    """Return layers from all depths of the network, at least one, of about `SAMPLE_NUMBERS`."""
    total = sum(layer.parameters for layer in layers)
    step = max(1, math.ceil(total / SAMPLE_NUMBERS))
    return list(range(step // 2 % len(layers), len(layers), step))


def ranks_within(
    gains: Sequence[Doubles], sizes: Sequence[float], max_size: float
) -> tuple[int, ...]:
    """Return ranks within a total size: components by their gain per size, while one fits.

    Parameters
    ----------
    gains : sequence of ndarray
        Squared error that each component of a layer removes, in falling order.
    sizes : sequence of float
        Size of one component of each layer.
    max_size : float

    Examples
    --------
    >>> ranks_within([np.array([9.0, 1.0]), np.array([4.0])], [10, 20], 45)
    (2, 1)
    """
    owners = np.repeat(np.arange(len(gains)), [len(gain) for gain in gains])
    size_of_each = np.asarray(sizes, dtype=np.float64)[owners]
    steepness = np.concatenate(gains) / size_of_each
    order = np.argsort(-steepness, kind="stable")
    order = order[steepness[order] > 0.0]
    # 1. All up to the first that does not fit.
    used = np.cumsum(size_of_each[order])
    first = int(np.searchsorted(used, max_size, side="right"))
    ranks = np.bincount(owners[order[:first]], minlength=len(gains))
    # 2. Then those that fit into what is left.
    left = max_size - (float(used[first - 1]) if first else 0.0)
    smallest = min(sizes, default=math.inf)
    for component in order[first:].tolist():
        if left < smallest:
            break
        if size_of_each[component] <= left:
            ranks[owners[component]] += 1
            left -= size_of_each[component]
    return tuple(ranks.tolist())


def _squared_error(
    layer: Layer, svd: tuple[Doubles, Doubles, Doubles], rank: int, form: PlainForm
) -> float:
    """Return the squared error of a layer's truncated SVD in a form, in its norm."""
    if rank == 0:
        return layer.squared_norm
    u, sigma, vh = svd
    root = np.sqrt(sigma[:rank])
    left = _rounded((u[:, :rank] * root).T, form).T
    right = _rounded(root[:, None] * vh[:rank], form).T
    # ‖ΔW‖² − 2⟨ΔW, Ŵ⟩ + ‖Ŵ‖².
    pair = layer.pair
    weighted_left = layer.norms.output.apply(left)
    weighted_right = layer.norms.input.apply(right)
    cross = (to_numpy(pair.left).T @ weighted_left) * (to_numpy(pair.right) @ weighted_right)
    square = (left.T @ weighted_left) * (right.T @ weighted_right)
    return max(0.0, layer.squared_norm - 2.0 * float(cross.sum()) + float(square.sum()))


def _rounded(rows: Doubles, form: PlainForm) -> Doubles:
    """Return rows in a form."""
    if form.group:
        return rounded_in_groups(rows, form.bits, form.group)
    unit = 2.0 ** math.frexp(float(np.max(np.abs(rows), initial=0.0)))[1]
    return unit * (rows / unit).astype(np.float16).astype(np.float64)


def rounded_in_groups(rows: Doubles, bits: int, group: int) -> Doubles:
    """Return rows rounded to integers, at a float16 scale for each group of numbers of a row.

    >>> rounded_in_groups(np.array([[7.0, 2.4, 0.7, 0.14]]), 4, 2).round(3).tolist()
    [[7.0, 2.0, 0.7, 0.1]]
    """
    top = 2 ** (bits - 1) - 1
    count, size = rows.shape
    n_groups = group_count(size, group)
    padded = np.zeros((count, n_groups * group))
    padded[:, :size] = rows
    groups = padded.reshape(count, n_groups, group)
    largest = np.max(np.abs(groups), axis=2, keepdims=True, initial=0.0)
    # Relative to a power of two near the largest of all: float16 does not reach every size.
    unit = 2.0 ** math.frexp(float(np.max(largest, initial=0.0)))[1]
    scales = unit * (largest / unit / top).astype(np.float16).astype(np.float64)
    steps = np.where(scales > 0.0, scales, 1.0)
    rounded: Doubles = scales * np.clip(np.rint(groups / steps), -top, top)
    return rounded.reshape(count, n_groups * group)[:, :size]
