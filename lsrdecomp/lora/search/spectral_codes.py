"""Truncated SVDs in integer codes: bits and groups of each component, and the codes themselves.

The components of a truncated SVD, each a column and a row, have codes of different widths, one
float16 scale each, and a step of one byte for each group of numbers. Bits are spread by reverse
water-filling [1]_: widths and groups go where they lower the expected error most, and components
below the water level get none. The columns and rows of the LoRA pair can be coded in the same way.

References
----------
.. [1] T. M. Cover and J. A. Thomas, Elements of Information Theory, 2nd ed., section 10.3.3.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import as_double, to_numpy
from lsrdecomp.formats.number_formats import (
    Codes,
    expand_steps,
    nearest_grouped_codes,
    packed_size,
    step_count,
)
from lsrdecomp.formats.quantized import COMPONENT_BYTES, WHOLE, SpectralCode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lsrdecomp.lora.search.layers import Layer

MAX_BITS = 8
"""Largest width of an integer code, which is held in one byte."""

GROUPS = (WHOLE, 64, 32, 16)
"""Numbers of a component that share a step: all of them, or so many."""

GAUSSIAN_ERROR = {
    2: (0.1488, 0.1277, 0.1138, 0.0947),
    3: (0.0400, 0.0320, 0.0275, 0.0222),
    4: (0.01156, 0.00838, 0.00702, 0.00558),
    5: (0.00331, 0.00223, 0.00185, 0.00145),
    6: (0.000926, 0.000572, 0.000477, 0.000386),
    7: (0.000243, 0.000148, 0.000128, 0.000110),
    8: (0.0000608, 0.0000427, 0.0000414, 0.0000419),
}
"""Relative squared error of `nearest_grouped_codes` by bits and by the groups of `GROUPS`, measured
on Gaussian vectors of 1024 numbers. Singular vectors of LoRAs are near it."""

DEFAULT_GROUP = 64
"""Numbers that share a step where nobody chooses: an eighth of a bit a number."""

Level = tuple[int, int]
"""Bits and group of the codes of a component; (0, 0) leaves it out."""

LEFT_OUT: Level = (0, 0)

Doubles = NDArray[np.float64]


def float16_scales(scales: Doubles) -> tuple[NDArray[np.float16], int]:
    """Return scales as float16, and the exponent of a power of two to multiply them by.

    The power is such that the largest float16 lies between a half and one.
    """
    exponent = math.frexp(float(np.max(np.abs(scales), initial=0.0)))[1]
    return np.ldexp(scales, -exponent).astype(np.float16), exponent


# -- bits and groups of components -----------------------------------------------------------------


def water_fill(
    layer: Layer, u: Doubles, sigma: Doubles, vh: Doubles, max_bits: int = MAX_BITS
) -> list[tuple[Level, ...]]:
    """Return bits and groups of every component after each step of greedy reverse water-filling.

    Parameters
    ----------
    layer : Layer
    u, sigma, vh : arrays of shapes (m, r), (r,) and (r, n)
        Its SVD in its norm.
    max_bits : int
        Largest width of a component.

    Returns
    -------
    list of tuple of Level
        The levels of all components. Each entry has more bytes than the one before.

    Notes
    -----
    O(r log r) steps of a heap. The noise of codes at a level in u_k has the squared norm
    ‖u_k‖² · tr G / m · D, with D of `GAUSSIAN_ERROR`, relative to u_kᵀ G u_k = 1, and likewise in
    v_k. In the Frobenius norm both factors before D are one.
    """
    noise = _relative_noise(layer, u, vh)
    costs = _level_bytes(layer.shape, max_bits)
    # 1. The best next level of every component, by loss removed per byte.
    levels = [LEFT_OUT] * len(sigma)
    heap = []
    for k in range(len(sigma)):
        step = _next_level(k, LEFT_OUT, sigma, noise, costs)
        if step is not None:
            heap.append(step)
    heapq.heapify(heap)
    # 2. The steepest step first, until none lowers the loss.
    filled: list[tuple[Level, ...]] = []
    while heap:
        _, k, level = heapq.heappop(heap)
        levels[k] = level
        filled.append(tuple(levels))
        step = _next_level(k, level, sigma, noise, costs)
        if step is not None:
            heapq.heappush(heap, step)
    return filled


def equal_width_levels(
    layer: Layer, u: Doubles, sigma: Doubles, vh: Doubles, bits: int, rank: int
) -> tuple[Level, ...]:
    """Return levels of one width for the largest components, and the groups that pay for each.

    For budgets that count numbers, of which steps are none. A finer group pays where a byte of its
    steps lowers the expected error by more than a byte of the next component would.

    Parameters
    ----------
    layer : Layer
    u, sigma, vh : arrays of shapes (m, r), (r,) and (r, n)
        Its SVD in its norm.
    bits : int
    rank : int
        Number of components.
    """
    noise = _relative_noise(layer, u, vh)
    costs = _level_bytes(layer.shape, bits)
    next_energy = float(sigma[rank] ** 2) if rank < len(sigma) else 0.0
    loss_per_byte = next_energy / costs[bits, WHOLE]
    levels = []
    for k in range(rank):
        energy = float(sigma[k] ** 2)
        totals = []
        for place, group in enumerate(GROUPS):
            loss = energy * float(noise[k]) * GAUSSIAN_ERROR[bits][place]
            totals.append(loss + loss_per_byte * costs[bits, group])
        levels.append((bits, GROUPS[totals.index(min(totals))]))
    return tuple(levels)


def _relative_noise(layer: Layer, u: Doubles, vh: Doubles) -> Doubles:
    """Return the squared norm of unit noise in each component, relative to the component: (r,)."""
    output = layer.norms.output
    input_ = layer.norms.input
    left: Doubles = np.sum(u * u, axis=0) * (float(output.trace) / output.size)
    right: Doubles = np.sum(vh * vh, axis=1) * (float(input_.trace) / input_.size)
    return left + right


def _level_bytes(shape: tuple[int, int], max_bits: int) -> dict[Level, int]:
    """Return the bytes of a component of a matrix of this shape at every level."""
    costs = {}
    for bits in range(2, max_bits + 1):
        for group in GROUPS:
            steps = sum(step_count(size, group) for size in shape)
            costs[bits, group] = COMPONENT_BYTES + packed_size(sum(shape), bits) + steps
    return costs


def _next_level(
    k: int, level: Level, sigma: Doubles, noise: Doubles, costs: Mapping[Level, int]
) -> tuple[float, int, Level] | None:
    """Return (−loss removed per byte, k, level) for the best next level of component k.

    A step may add several bits, since a first bit alone codes nothing. None if no level lowers the
    loss.
    """
    energy = float(sigma[k] ** 2)

    def loss_at(level: Level) -> float:
        if level == LEFT_OUT:
            return energy
        bits, group = level
        return energy * min(1.0, float(noise[k]) * GAUSSIAN_ERROR[bits][GROUPS.index(group)])

    loss = loss_at(level)
    cost = costs.get(level, 0)
    best_gain = 0.0
    best_level = LEFT_OUT
    for other, other_cost in costs.items():
        if other_cost > cost:
            gain = (loss - loss_at(other)) / (other_cost - cost)
            if (gain, other) > (best_gain, best_level):
                best_gain = gain
                best_level = other
    return (-best_gain, k, best_level) if best_gain > 0.0 else None


# -- codes -----------------------------------------------------------------------------------------


def svd_code(
    layer: Layer, bits: Sequence[int], groups: Sequence[int] | None = None
) -> SpectralCode:
    """Return the codes of a layer's SVD with these bits for each component; see `spectral_code`."""
    return spectral_code(layer, layer_svd(layer), bits, groups)


def pair_code(layer: Layer) -> SpectralCode:
    """Return codes of eight bits of the pair's own columns and rows."""
    left = to_numpy(layer.pair.left).astype(np.float64)
    right = to_numpy(layer.pair.right).astype(np.float64)
    column_norms = np.linalg.norm(left, axis=0)
    row_norms = np.linalg.norm(right, axis=1)
    sizes = column_norms * row_norms
    nonzero = np.flatnonzero(sizes)
    columns = left[:, nonzero] / column_norms[nonzero]
    rows = right[nonzero, :] / row_norms[nonzero, None]
    bits = (MAX_BITS,) * len(nonzero)
    return spectral_code(layer, (columns, sizes[nonzero], rows), bits, (WHOLE,) * len(nonzero))


def layer_svd(layer: Layer) -> tuple[Doubles, Doubles, Doubles]:
    """Return U (m, r), σ, Vᵀ (r, n) of a layer in its norm."""
    pair = layer.pair
    columns, sigma, rows = layer.gauge
    u = to_numpy(as_double(pair.left) @ columns)
    vh = to_numpy(rows @ as_double(pair.right))
    return u, to_numpy(sigma), vh


def spectral_code(
    layer: Layer,
    svd: Sequence[Doubles],
    bits: Sequence[int],
    groups: Sequence[int] | None = None,
    *,
    rounds: int = 3,
) -> SpectralCode:
    """Find codes of columns and rows whose products are near the layer in its norm.

    Parameters
    ----------
    layer : Layer
    svd : (u, sigma, vh), shapes (m, r), (r,), (r, n)
        Columns, sizes and rows to start from.
    bits : sequence of int
        Width of each component; 0 leaves it out.
    groups : sequence of int, optional
        Numbers of each component that share a step; absent, `DEFAULT_GROUP`.
    rounds : int
        Times that each side is fitted to the codes of the other. Each takes 1 to 2 % of the squared
        error in four bits.

    Notes
    -----
    O((m + n) r²) a round, and two applications of the weights of the norm.
    """
    # 1. Round both sides, with half of σ on each.
    u, sigma, vh = svd
    coded = [k for k, width in enumerate(bits) if width]
    levels = [(bits[k], groups[k] if groups is not None else DEFAULT_GROUP) for k in coded]
    root = np.sqrt(sigma[coded])
    left = _nearest_columns(u[:, coded] * root, levels)
    right = _nearest_columns(vh[coded, :].T * root, levels) if rounds == 0 else None
    # 2. With ΔW = b aᵀ and the left side L fixed, the right side of least error in the norm is
    #    ΔWᵀ G L (Lᵀ G L)⁺. Round it, fix it, and solve for the left side in the same way with C.
    norms = layer.norms
    b, a = _pair(layer)
    for _ in range(rounds):
        weighted_left = norms.output.apply(left.values)
        inverse_gram = np.linalg.pinv(left.values.T @ weighted_left, hermitian=True)
        right = _nearest_columns(a @ (b.T @ weighted_left) @ inverse_gram, levels)
        weighted_right = norms.input.apply(right.values)
        inverse_gram = np.linalg.pinv(right.values.T @ weighted_right, hermitian=True)
        left = _nearest_columns(b @ (a.T @ weighted_right) @ inverse_gram, levels)
    assert right is not None
    # 3. Scales.
    return _scaled(layer, (b, a), left, right, levels)[0]


class ComponentCodes:
    """Codes of the components of a layer's SVD at many levels, without fits to one another.

    The columns and rows of a component are rounded once for each of its levels, so that many
    combinations of levels are priced in little time.
    """

    def __init__(self, layer: Layer, svd: Sequence[Doubles]) -> None:
        self.layer = layer
        u, sigma, vh = svd
        root = np.sqrt(sigma)
        self._sides = u * root, vh.T * root
        self._pair = _pair(layer)
        self._coded: tuple[dict[tuple[int, Level], _CodedColumns], ...] = ({}, {})

    def priced(self, levels: Sequence[Level]) -> tuple[SpectralCode, float]:
        """Return the codes at the levels of all components, and their squared error."""
        kept = [(k, level) for k, level in enumerate(levels) if level != LEFT_OUT]
        left, right = (self._columns(side, kept) for side in (0, 1))
        return _scaled(self.layer, self._pair, left, right, [level for _, level in kept])

    def _columns(self, side: int, kept: Sequence[tuple[int, Level]]) -> _CodedColumns:
        """Return the coded columns of a side; those that are not coded yet are coded now."""
        coded = self._coded[side]
        for level in {level for key, level in kept if (key, level) not in coded}:
            new = [k for k, other in kept if other == level and (k, level) not in coded]
            columns = _nearest_columns(self._sides[side][:, new], [level] * len(new))
            for place, k in enumerate(new):
                coded[k, level] = columns.select(place)
        return _CodedColumns.joined([coded[key] for key in kept], len(self._sides[side]))


def _pair(layer: Layer) -> tuple[Doubles, Doubles]:
    """Return b (m, r) and a (n, r) of ΔW = b aᵀ."""
    left = to_numpy(layer.pair.left).astype(np.float64)
    right = to_numpy(layer.pair.right).astype(np.float64)
    return left, right.T


def _scaled(
    layer: Layer,
    pair: tuple[Doubles, Doubles],
    left: _CodedColumns,
    right: _CodedColumns,
    levels: Sequence[Level],
) -> tuple[SpectralCode, float]:
    """Return coded sides with the scales of least error, and their squared error."""
    # 1. Least squares: the Gram matrix of the rank-one codes, and their inner products with ΔW.
    b, a = pair
    norms = layer.norms
    weighted_left = norms.output.apply(left.relative)
    weighted_right = norms.input.apply(right.relative)
    gram = (left.relative.T @ weighted_left) * (right.relative.T @ weighted_right)
    cross = np.sum((b.T @ weighted_left) * (a.T @ weighted_right), axis=0)
    scales, exponent = float16_scales(np.linalg.lstsq(gram, cross, rcond=None)[0])
    steps = [np.concatenate(steps) for steps in zip(left.steps, right.steps, strict=True)]
    code = SpectralCode(
        tuple(left.codes.T),
        tuple(right.codes.T),
        scales,
        exponent,
        tuple(width for width, _ in levels),
        layer.shape,
        tuple(group for _, group in levels),
        tuple(steps),
    )
    # 2. ‖ΔW‖² − 2⟨ΔW, Ŵ⟩ + ‖Ŵ‖² at the rounded scales.
    rounded = np.ldexp(scales.astype(np.float64), exponent)
    squared_error = layer.squared_norm - 2.0 * (rounded @ cross) + rounded @ gram @ rounded
    return code, max(float(squared_error), 0.0)


@dataclass(frozen=True, slots=True)
class _CodedColumns:
    """Columns in integer codes, each at its level."""

    codes: Codes  # (m, r)
    steps: list[NDArray[np.uint8]]  # of the groups of each column
    relative: Doubles  # codes times steps, (m, r)
    values: Doubles  # the same in the size of the columns

    def select(self, k: int) -> _CodedColumns:
        """Return one column."""
        one = slice(k, k + 1)
        return _CodedColumns(
            self.codes[:, one], self.steps[one], self.relative[:, one], self.values[:, one]
        )

    @classmethod
    def joined(cls, parts: Sequence[_CodedColumns], length: int) -> _CodedColumns:
        """Return columns of this length side by side."""
        empty = np.zeros((length, 0))
        return cls(
            np.concatenate([empty.astype(np.int8), *(part.codes for part in parts)], axis=1),
            [step for part in parts for step in part.steps],
            np.concatenate([empty, *(part.relative for part in parts)], axis=1),
            np.concatenate([empty, *(part.values for part in parts)], axis=1),
        )


def _nearest_columns(columns: Doubles, levels: Sequence[Level]) -> _CodedColumns:
    """Return the nearest codes of each column at its level."""
    codes = np.zeros(columns.shape, dtype=np.int8)
    relative = np.zeros(columns.shape)
    units = np.zeros(len(levels))
    steps = [np.zeros(0, dtype=np.uint8)] * len(levels)
    for level in sorted(set(levels)):
        same = [k for k, other in enumerate(levels) if other == level]
        bits, group = level
        nearest, step_codes, units[same] = nearest_grouped_codes(columns[:, same].T, bits, group)
        codes[:, same] = nearest.T
        relative[:, same] = (nearest * expand_steps(step_codes, group, len(columns))).T
        for k, step in zip(same, step_codes, strict=True):
            steps[k] = step
    return _CodedColumns(codes, steps, relative, relative * units)
