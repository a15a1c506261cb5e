"""Plain truncated SVD in integers: the rival that a result in integers is reported beside.

It is what others do: the singular values above one threshold over all layers, U√σ and √σVᵀ rounded
to the nearest of the integers, a float16 scale for each group of numbers in a column or row, which
brings the largest of the group to the end of the range. None of our own codes, which are nearer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import to_numpy
from lsrdecomp.formats.number_formats import FORMATS, group_count, packed_size
from lsrdecomp.lora.search.spectral_codes import layer_svd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.lora.search.layers import Layer

PLAIN_GROUPS = (32, 64, 128)
"""Numbers that share a scale, as others have them; the best for an adapter counts."""

SCALE_BYTES = 2

Doubles = NDArray[np.float64]


def plain_svd_error(
    layers: Sequence[Layer], storages: Sequence[str], max_bytes: float
) -> float | None:
    """Return the relative error of plain truncated SVD over all layers, in their norms.

    Parameters
    ----------
    layers : sequence of Layer
    storages : sequence of str
        Element types; the integers among them are tried one after the other, each with every group
        of `PLAIN_GROUPS`, and the best counts.
    max_bytes : float
        Maximum bytes of codes and scales.

    Returns
    -------
    float or None
        None if no storage is an integer, or nothing fits.

    Notes
    -----
    O((m + n) r²) a layer.
    """
    formats = [FORMATS[storage] for storage in storages if FORMATS[storage].is_integer]
    squared_norm = math.fsum(layer.squared_norm for layer in layers)
    if not formats or squared_norm == 0.0:
        return None
    sigmas = [to_numpy(layer.gauge[1]) for layer in layers]
    forms = [(chosen.bits, group) for chosen in formats for group in PLAIN_GROUPS]
    ranks = {form: _ranks(layers, sigmas, form, max_bytes) for form in forms}
    errors = dict.fromkeys(forms, 0.0)
    for i, layer in enumerate(layers):
        svd = layer_svd(layer)
        for form in forms:
            errors[form] += _squared_error(layer, svd, ranks[form][i], form)
    fitting = [errors[form] for form in forms if any(ranks[form])]
    return math.sqrt(min(fitting) / squared_norm) if fitting else None


def _ranks(
    layers: Sequence[Layer], sigmas: Sequence[Doubles], form: tuple[int, int], max_bytes: float
) -> list[int]:
    """Return the ranks that one threshold on σ² per byte over all layers gives within the bytes."""
    bits, group = form
    sizes = []
    for layer in layers:
        groups = sum(group_count(size, group) for size in layer.shape)
        sizes.append(packed_size(sum(layer.shape), bits) + SCALE_BYTES * groups)
    owners = np.repeat(np.arange(len(layers)), [len(sigma) for sigma in sigmas])
    gains = np.concatenate([sigma**2 / size for sigma, size in zip(sigmas, sizes, strict=True)])
    ranks = [0] * len(layers)
    used = 0
    for component in np.argsort(-gains, kind="stable"):
        i = int(owners[component])
        if gains[component] > 0.0 and used + sizes[i] <= max_bytes:
            ranks[i] += 1
            used += sizes[i]
    return ranks


def _squared_error(
    layer: Layer, svd: tuple[Doubles, Doubles, Doubles], rank: int, form: tuple[int, int]
) -> float:
    """Return the squared error of a layer's rounded truncated SVD in its norm."""
    u, sigma, vh = svd
    root = np.sqrt(sigma[:rank])
    left = rounded_in_groups((u[:, :rank] * root).T, *form).T
    right = rounded_in_groups(root[:, None] * vh[:rank], *form).T
    # ‖ΔW‖² − 2⟨ΔW, Ŵ⟩ + ‖Ŵ‖², with ΔW = U σ Vᵀ.
    weighted_left = layer.norms.output.apply(left)
    weighted_right = layer.norms.input.apply(right)
    overlap = np.sum(((u * sigma).T @ weighted_left) * (vh @ weighted_right))
    square = np.sum((left.T @ weighted_left) * (right.T @ weighted_right))
    return max(0.0, layer.squared_norm - 2.0 * float(overlap) + float(square))


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
