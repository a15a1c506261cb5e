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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import to_numpy
from lsrdecomp.formats.allocation import PartOptions
from lsrdecomp.formats.number_formats import (
    Codes,
    nearest_grouped_codes,
    packed_size,
    step_count,
    with_steps,
)
from lsrdecomp.formats.quantized import COMPONENT_BYTES, WHOLE, SpectralCode
from lsrdecomp.lora.search.layers import fits_single
from lsrdecomp.targets.residual import thin_row_blocks

if TYPE_CHECKING:
    from lsrdecomp.lora.search.layers import Layer

MAX_BITS = 8
"""Largest width of an integer code, which is held in one byte."""

GROUPS = (WHOLE, 64, 32, 16)
"""Numbers of a component that share a step: all of them, or so many."""

GAUSSIAN_ERROR = {
    2: (0.1482, 0.1276, 0.1134, 0.0946),
    3: (0.0399, 0.0320, 0.0275, 0.0223),
    4: (0.01156, 0.00833, 0.00692, 0.00543),
    5: (0.00331, 0.00219, 0.00177, 0.00135),
    6: (0.000925, 0.000552, 0.000446, 0.000343),
    7: (0.000243, 0.000140, 0.000114, 0.0000886),
    8: (0.0000607, 0.0000355, 0.0000290, 0.0000226),
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


@dataclass(frozen=True, slots=True)
class WaterFilling(Sequence[tuple[Level, ...]]):
    """The steps of greedy reverse water-filling over the components of a layer, best first.

    As a sequence it has the levels of all components after each step.

    Attributes
    ----------
    components, heights : ndarray
        The component that each step raises, and how high: to which of its levels.
    ladders : sequence of list of Level
        The levels that a component goes through, from `LEFT_OUT` on.
    bytes, losses : ndarray
        Bytes of the codes and expected squared error after each step.
    """

    components: NDArray[np.int64]
    heights: NDArray[np.int64]
    ladders: Sequence[list[Level]]
    bytes: Doubles
    losses: Doubles

    def __len__(self) -> int:
        return len(self.components)

    def __getitem__(self, step: Any) -> Any:
        if isinstance(step, slice):
            return [self[k] for k in range(*step.indices(len(self)))]
        taken = range(len(self))[step] + 1
        heights = np.zeros(len(self.ladders), dtype=np.int64)
        np.maximum.at(heights, self.components[:taken], self.heights[:taken])
        return tuple(
            ladder[height] for ladder, height in zip(self.ladders, heights.tolist(), strict=True)
        )


def water_fill(
    layer: Layer, max_bits: int = MAX_BITS, *, svd: Sequence[Doubles] | None = None
) -> WaterFilling:
    """Return bits and groups of every component after each step of greedy reverse water-filling.

    Parameters
    ----------
    layer : Layer
    max_bits : int
        Largest width of a component.
    svd : (u, sigma, vh), optional
        Its SVD in its norm, where it is known; see `component_noise`.

    Notes
    -----
    A component goes up the lower convex hull of its levels, so a step may add several bits: a first
    bit alone codes nothing. The steps of all components are sorted once.
    """
    energies = layer.sigma**2
    noise = component_noise(layer, svd)
    of_components = [_ladder(layer.shape, max_bits, value) for value in noise.tolist()]
    counts = [len(steps) for _, steps, _ in of_components]
    components = np.repeat(np.arange(len(energies)), counts)
    heights = np.concatenate([np.arange(1, count + 1) for count in (*counts, 0)])
    step_bytes = np.concatenate([np.zeros(0), *(steps for _, steps, _ in of_components)])
    gains = np.concatenate([np.zeros(0), *(shares for _, _, shares in of_components)])
    gains = gains * energies[components]
    order = np.argsort(-gains / step_bytes, kind="stable")
    order = order[gains[order] > 0.0]
    losses = math.fsum(energies) - np.cumsum(gains[order])
    return WaterFilling(
        components[order],
        heights[order],
        [corners for corners, _, _ in of_components],
        np.cumsum(step_bytes[order]),
        np.maximum(losses, 0.0),
    )


@lru_cache(maxsize=2**10)
def _ladder(
    shape: tuple[int, int], max_bits: int, noise: float
) -> tuple[list[Level], Doubles, Doubles]:
    """Return the levels of a component on their lower convex hull, from `LEFT_OUT` on.

    With the bytes that each step adds, and the share of the energy that it saves: components of
    equal noise have one hull, up to their energy.
    """
    costs = _level_bytes(shape, max_bits)
    levels = [LEFT_OUT, *costs]
    sizes = np.array([0.0, *costs.values()])
    errors = np.array([GAUSSIAN_ERROR[bits][GROUPS.index(group)] for bits, group in costs])
    options = PartOptions(sizes, np.minimum(1.0, np.concatenate([[1.0], noise * errors])))
    hull = options.hull()
    corners = [levels[place] for place in hull]
    return corners, np.diff(sizes[hull]), -np.diff(options.losses[hull])


def equal_width_levels(
    layer: Layer, bits: int, rank: int, *, svd: Sequence[Doubles] | None = None
) -> tuple[Level, ...]:
    """Return levels of one width for the largest components, and the groups that pay for each.

    For budgets that count numbers, of which steps are none. A finer group pays where a byte of its
    steps lowers the expected error by more than a byte of the next component would.

    Parameters
    ----------
    layer : Layer
    bits : int
    rank : int
        Number of components.
    svd : (u, sigma, vh), optional
        As for `water_fill`.
    """
    sigma = layer.sigma
    noise = component_noise(layer, svd)
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


def component_noise(layer: Layer, svd: Sequence[Doubles] | None = None) -> Doubles:
    """Return the squared norm of unit noise in each component, relative to the component: (r,).

    The noise of codes at a level in u_k has the squared norm ‖u_k‖² · tr G / m · D, with D of
    `GAUSSIAN_ERROR`, relative to u_kᵀ G u_k = 1, and likewise in v_k. In the Frobenius norm both
    factors before D are one, and no vectors are needed.

    Parameters
    ----------
    layer : Layer
    svd : (u, sigma, vh), optional
        Its SVD in its norm; absent, it is computed if it is needed.
    """
    if layer.is_frobenius:
        return np.full(len(layer.sigma), 2.0)
    u, _, vh = layer_svd(layer) if svd is None else svd
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


# -- codes -----------------------------------------------------------------------------------------


def svd_code(
    layer: Layer, bits: Sequence[int], groups: Sequence[int] | None = None
) -> SpectralCode:
    """Return the codes of a layer's SVD with these bits for each component; see `spectral_code`."""
    return spectral_code(layer, layer_svd(layer), bits, groups)


def pair_code(layer: Layer) -> SpectralCode:
    """Return codes of eight bits of the pair's own columns and rows."""
    vectors = own_vectors(layer)
    count = len(vectors[1])
    return spectral_code(layer, vectors, (MAX_BITS,) * count, (WHOLE,) * count)


def own_vectors(layer: Layer) -> tuple[Doubles, Doubles, Doubles]:
    """Return columns (m, k), sizes and rows (k, n) of the pair itself, without zeros."""
    pair = layer.pair
    left, right = to_numpy(pair.left), to_numpy(pair.right)
    column_norms = np.linalg.norm(left, axis=0)
    row_norms = np.linalg.norm(right, axis=1)
    sizes = column_norms * row_norms
    nonzero = np.flatnonzero(sizes)
    columns = left[:, nonzero] / column_norms[nonzero]
    rows = right[nonzero, :] / row_norms[nonzero, None]
    return columns, sizes[nonzero], rows


def own_pair_losses(layer: Layer) -> tuple[int, list[float]]:
    """Return how many columns and rows of a pair are not zero, and what their codes may lose.

    That is the expected squared error of codes of eight bits in the Frobenius norm, for each of
    `GROUPS`. Rounding errors are taken to be uniform over a step and independent.
    """
    pair = layer.pair
    sizes = []
    noises = []
    for side in (to_numpy(pair.left), to_numpy(pair.right).T):
        sizes.append(np.einsum("ij,ij->j", side, side))
        noises.append(_uniform_noise(side))
    losses = [float(noises[0][k] @ sizes[1] + noises[1][k] @ sizes[0]) for k in range(len(GROUPS))]
    return int(np.count_nonzero(sizes[0] * sizes[1])), losses


def _uniform_noise(side: Doubles) -> list[Doubles]:
    """Return the expected squared rounding error of each column, for each of `GROUPS`."""
    length = len(side)
    noises = []
    largest = np.abs(side)
    numbers = 1
    for group in sorted(GROUPS):
        # The largest number of a group is that of the smaller groups that it holds.
        together = len(largest) if group == WHOLE else group // numbers
        starts = np.arange(0, len(largest), together)
        largest = np.maximum.reduceat(largest, starts, axis=0)
        numbers = group
        count = np.minimum(group, length - np.minimum(length, np.arange(len(largest)) * group))
        noises.append(count @ (largest / 2 ** (MAX_BITS - 1)) ** 2 / 12.0)
    return noises[::-1]


def layer_svd(
    layer: Layer, rank: int | None = None, *, single: bool = False
) -> tuple[Doubles, Doubles, Doubles]:
    """Return U (m, r), σ, Vᵀ (r, n) of a layer in its norm, or the leading ones of a rank.

    Columns of U lie together in memory. With ``single`` vectors are in single precision, if squares
    of the pair fit into it.
    """
    pair = layer.pair_as_read
    columns, sigma, rows = layer.gauge
    dtype = np.float32 if single and fits_single(pair) else np.float64
    factors = [columns[:, :rank].T * pair.scale, pair.left.T, rows[:rank, :], pair.right]
    factors = [to_numpy(factor).astype(dtype, copy=False) for factor in factors]
    columns, left, rows, right = factors
    return (columns @ left).T, to_numpy(sigma[:rank]), rows @ right


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
    left = _nearest_vectors(root[:, None] * u.T[coded], levels)
    right = _nearest_vectors(root[:, None] * vh[coded], levels) if rounds == 0 else None
    # 2. With ΔW = b aᵀ and the left side L fixed, the right side of least error in the norm is
    #    ΔWᵀ G L (Lᵀ G L)⁺. Round it, fix it, and solve for the left side in the same way with C.
    norms = layer.norms
    b, a = _pair(layer)
    for _ in range(rounds):
        weighted_left = norms.output.apply(left.values.T)
        inverse_gram = np.linalg.pinv(left.values @ weighted_left, hermitian=True)
        right = _nearest_vectors((inverse_gram @ (weighted_left.T @ b)) @ a.T, levels)
        weighted_right = norms.input.apply(right.values.T)
        inverse_gram = np.linalg.pinv(right.values @ weighted_right, hermitian=True)
        left = _nearest_vectors((inverse_gram @ (weighted_right.T @ a)) @ b.T, levels)
    assert right is not None
    # 3. Scales.
    return _scaled(layer, left, right, levels)[0]


def rounded_vectors(vectors: Doubles, levels: Sequence[Level]) -> Doubles:
    """Return vectors (r, p) as their nearest codes at these levels say them."""
    return _nearest_vectors(vectors, levels).values


class ComponentCodes:
    """Codes of the components of a layer's SVD at many levels, without fits to one another.

    The columns and rows of a component are rounded once for each of its levels, so that many
    combinations of levels are priced in little time.

    Parameters
    ----------
    layer : Layer
    svd : (u, sigma, vh), shapes (m, r), (r,), (r, n)
        Columns, sizes and rows: the layer's SVD, or its own pair.
    """

    def __init__(self, layer: Layer, svd: Sequence[Doubles]) -> None:
        self.layer = layer
        u, _, vh = svd  # whose sizes are in the scales
        self._sides = u.T, vh
        self._coded: tuple[dict[tuple[int, Level], _CodedVectors], ...] = ({}, {})

    def priced(self, levels: Sequence[Level]) -> tuple[SpectralCode, float]:
        """Return the codes at the levels of all components, and their squared error."""
        kept = [(k, level) for k, level in enumerate(levels) if level != LEFT_OUT]
        left, right = (self._vectors(side, kept) for side in (0, 1))
        return _scaled(self.layer, left, right, [level for _, level in kept])

    def code(self, levels: Sequence[Level]) -> tuple[SpectralCode, float]:
        """Return the same for the leading components; nothing is kept for other levels."""
        count = len(levels)
        left, right = (_nearest_vectors(side[:count], levels) for side in self._sides)
        return _scaled(self.layer, left, right, levels)

    def _vectors(self, side: int, kept: Sequence[tuple[int, Level]]) -> _CodedVectors:
        """Return the coded vectors of a side; those that are not coded yet are coded now."""
        coded = self._coded[side]
        for level in {level for key, level in kept if (key, level) not in coded}:
            new = [k for k, other in kept if other == level and (k, level) not in coded]
            vectors = _nearest_vectors(self._sides[side][new], [level] * len(new))
            for place, k in enumerate(new):
                coded[k, level] = vectors.select(place)
        return _CodedVectors.joined([coded[key] for key in kept], self._sides[side].shape[1])


def _pair(layer: Layer) -> tuple[Doubles, Doubles]:
    """Return b (m, r) and a (n, r) of ΔW = b aᵀ."""
    pair = layer.pair
    return to_numpy(pair.left), to_numpy(pair.right).T


def _products(layer: Layer, left: _CodedVectors, right: _CodedVectors) -> tuple[Doubles, Doubles]:
    """Return the Gram matrix of rank-one codes, and their inner products with ΔW, in its norm."""
    if layer.is_frobenius:
        pair = layer.pair_as_read
        left_gram, left_cross = _side_products(to_numpy(pair.left), left.relative)
        left_products = left_gram, pair.scale * left_cross
        right_products = _side_products(to_numpy(pair.right).T, right.relative)
    else:
        b, a = _pair(layer)
        weighted_left = layer.norms.output.apply(left.relative.T)
        weighted_right = layer.norms.input.apply(right.relative.T)
        left_products = left.relative @ weighted_left, b.T @ weighted_left
        right_products = right.relative @ weighted_right, a.T @ weighted_right
    cross_products: Doubles = np.sum(left_products[1] * right_products[1], axis=0)
    return left_products[0] * right_products[0], cross_products


def _side_products(side: NDArray[np.floating], vectors: Doubles) -> tuple[Doubles, Doubles]:
    """Return V Vᵀ and Bᵀ Vᵀ of vectors (k, m) and a side (m, r), block by block in a cache."""
    gram = np.zeros((len(vectors), len(vectors)))
    cross = np.zeros((side.shape[1], len(vectors)))
    for part in thin_row_blocks(*side.shape):
        block = vectors[:, part]
        gram += block @ block.T
        cross += side[part].T.astype(np.float64) @ block.T
    return gram, cross


def _scaled(
    layer: Layer,
    left: _CodedVectors,
    right: _CodedVectors,
    levels: Sequence[Level],
) -> tuple[SpectralCode, float]:
    """Return coded sides with the scales of least error, and their squared error."""
    # 1. Least squares: the Gram matrix of the rank-one codes, and their inner products with ΔW.
    gram, cross = _products(layer, left, right)
    fitted = np.asarray(np.linalg.lstsq(gram, cross, rcond=None)[0], dtype=np.float64)
    scales, exponent = float16_scales(fitted)
    steps = [np.concatenate(steps) for steps in zip(left.steps, right.steps, strict=True)]
    code = SpectralCode(
        tuple(left.codes),
        tuple(right.codes),
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
class _CodedVectors:
    """Columns or rows in integer codes, each at its level; shapes (r, p)."""

    codes: Codes
    steps: list[NDArray[np.uint8]]  # of the groups of each vector
    relative: Doubles  # codes times steps
    units: Doubles  # size of each vector, (r,)

    @property
    def values(self) -> Doubles:
        """The vectors as a reader gets them, in their size."""
        return self.relative * self.units[:, None]

    def select(self, k: int) -> _CodedVectors:
        """Return one vector."""
        one = slice(k, k + 1)
        return _CodedVectors(self.codes[one], self.steps[one], self.relative[one], self.units[one])

    @classmethod
    def joined(cls, parts: Sequence[_CodedVectors], length: int) -> _CodedVectors:
        """Return vectors of this length one after the other."""
        empty = np.zeros((0, length))
        return cls(
            np.concatenate([empty.astype(np.int8), *(part.codes for part in parts)]),
            [step for part in parts for step in part.steps],
            np.concatenate([empty, *(part.relative for part in parts)]),
            np.concatenate([np.zeros(0), *(part.units for part in parts)]),
        )


def _nearest_vectors(vectors: Doubles, levels: Sequence[Level]) -> _CodedVectors:
    """Return the nearest codes of each vector at its level."""
    codes = np.zeros(vectors.shape, dtype=np.int8)
    relative = np.zeros(vectors.shape)
    units = np.zeros(len(levels))
    steps = [np.zeros(0, dtype=np.uint8)] * len(levels)
    for level in sorted(set(levels)):
        same = [k for k, other in enumerate(levels) if other == level]
        bits, group = level
        nearest, step_codes, units[same] = nearest_grouped_codes(vectors[same], bits, group)
        codes[same] = nearest
        relative[same] = with_steps(nearest, step_codes, group)
        for k, step in zip(same, step_codes, strict=True):
            steps[k] = step
    return _CodedVectors(codes, steps, relative, units)
