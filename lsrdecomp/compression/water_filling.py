"""Low rank in few bits: truncated SVD by reverse water-filling, which wins when bytes are counted; the pair unrotated.

Component k of the SVD, a column and a row, is stored in b_k-bit integers with one float16 scale. Bits go where they
lower the expected error most; components below the water level get none [1]_.

References
----------
.. [1] T. M. Cover and J. A. Thomas, Elements of Information Theory, 2nd ed., section 10.3.3.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import as_double, to_numpy
from lsrdecomp.compression.candidates import LowRank, Price
from lsrdecomp.compression.layers import Layer
from lsrdecomp.compression.quantize import nearest_codes
from lsrdecomp.formats.bit_packing import Codes
from lsrdecomp.formats.quantized import SpectralCode

MOST_BITS = 8
ALL_RANKS = 16
# Relative squared error of a few hundred Gaussian numbers in b bits (2^b − 1 levels) at the step of `nearest_codes`.
GAUSSIAN = {2: 0.191, 3: 0.0467, 4: 0.01256, 5: 0.00341, 6: 0.000884, 7: 0.000225, 8: 0.0000558}

Doubles = NDArray[np.float64]


def water_filled_candidates(layer: Layer, points: int = 24) -> list[LowRank]:
    """SVD with bits spread over its components, at ``points`` sizes from the smallest useful one to eight bits each."""
    steps = bit_ladder(layer, *_spectrum(layer))
    places = sorted({round(q) for q in np.geomspace(1, len(steps), min(points, len(steps)))}) if steps else []
    return [_candidate(layer, svd_code(layer, steps[place - 1]), steps[place - 1]) for place in places]


def finest_candidates(layer: Layer, bits: int, points: int = 24) -> list[LowRank]:
    """SVD with equally many bits in every component, for budgets that count parameters: of all ranks up to 16, then of
    so many more as make ``points``.
    """
    spectrum = _spectrum(layer)
    rank = int(np.count_nonzero(spectrum[1]))
    ranks = {*range(1, min(rank, ALL_RANKS) + 1)}
    if rank > ALL_RANKS:
        ranks |= {round(q) for q in np.geomspace(ALL_RANKS, rank, points - ALL_RANKS)}
    widths = ((bits,) * q for q in sorted(ranks))
    return [_candidate(layer, spectral_code(layer, spectrum, some), some) for some in widths]


def unrotated_candidates(layer: Layer) -> list[LowRank]:
    """The pair's own columns and rows as components of eight bits; nothing for a layer of zeros.

    LoRA starts one side uniformly at random and most of that start is still there. In eight bits uniform numbers lose
    about half as much as Gaussian ones, which singular vectors resemble; with fewer bits, components by size are ahead.
    """
    if layer.squared_norm == 0.0:
        return []
    code = pair_code(layer)
    return [_candidate(layer, code, code.bits, unrotated=True)]


def svd_code(layer: Layer, bits: Sequence[int]) -> SpectralCode:
    """The code of the layer's SVD with these bits a component; see `spectral_code`."""
    return spectral_code(layer, _spectrum(layer), bits)


def pair_code(layer: Layer) -> SpectralCode:
    """The code of the pair's own columns and rows, eight bits each."""
    left, right = (to_numpy(side).astype(np.float64) for side in (layer.pair.left, layer.pair.right))
    sizes = np.linalg.norm(left, axis=0), np.linalg.norm(right, axis=1)
    kept = np.flatnonzero(sizes[0] * sizes[1])
    u, v = left[:, kept] / sizes[0][kept], right[kept, :] / sizes[1][kept, None]
    return spectral_code(layer, (u, (sizes[0] * sizes[1])[kept], v), (MOST_BITS,) * len(kept))


def _candidate(layer: Layer, code: SpectralCode, bits: tuple[int, ...], *, unrotated: bool = False) -> LowRank:
    rank = len(code.bits)
    price = Price(rank * sum(layer.shape), layer.squared_error(code.dequantized()), "bits", code.bytes)
    return LowRank(price, rank, bits, unrotated)


def bit_ladder(layer: Layer, u: Doubles, sigma: Doubles, vh: Doubles) -> list[tuple[int, ...]]:
    """Bits of every component after each step of greedy reverse water-filling, from the first component on.

    The noise of a code of b bits in u_k counts ‖u_k‖² · tr G / m · D(b) against u_kᵀ G u_k = 1, likewise for v_k: in
    the Frobenius norm both factors are one.
    """
    mean_out, mean_in = (float(w.trace) / w.size for w in (layer.norms.output, layer.norms.input))
    noise = np.sum(u * u, axis=0) * mean_out + np.sum(vh * vh, axis=1) * mean_in
    bits = [0] * len(sigma)
    ladder: list[tuple[int, ...]] = []
    heap = [entry for k in range(len(sigma)) if (entry := _step(k, 0, sigma, noise))]
    heapq.heapify(heap)
    while heap:
        _, k, more = heapq.heappop(heap)
        bits[k] = more
        ladder.append(tuple(bits))
        entry = _step(k, more, sigma, noise)
        if entry:
            heapq.heappush(heap, entry)
    return ladder


def spectral_code(layer: Layer, svd: Sequence[Doubles], bits: Sequence[int], rounds: int = 2) -> SpectralCode:
    """Quantise u, refit v to the codes, quantise v, refit u, …, scales by least squares at the end; all in the norm."""
    u, sigma, vh = svd
    kept = [k for k, b in enumerate(bits) if b]
    widths = tuple(bits[k] for k in kept)
    left, right = u[:, kept] * np.sqrt(sigma[kept]), vh[kept, :].T * np.sqrt(sigma[kept])
    norms, pair = layer.norms, layer.pair
    given_left, given_right = to_numpy(pair.left).astype(np.float64), to_numpy(pair.right).astype(np.float64).T
    left_codes, left_values = _coded(left, widths)
    right_codes, _ = _coded(right, widths)
    for _ in range(rounds):
        weighted = norms.output.apply(left_values)
        right = given_right @ (given_left.T @ weighted) @ np.linalg.pinv(left_values.T @ weighted, hermitian=True)
        right_codes, right_values = _coded(right, widths)
        weighted = norms.input.apply(right_values)
        left = given_left @ (given_right.T @ weighted) @ np.linalg.pinv(right_values.T @ weighted, hermitian=True)
        left_codes, left_values = _coded(left, widths)
    left, right = left_codes.astype(np.float64), right_codes.astype(np.float64)
    weighted_left, weighted_right = norms.output.apply(left), norms.input.apply(right)
    gram = (left.T @ weighted_left) * (right.T @ weighted_right)
    cross = np.sum((given_left.T @ weighted_left) * (given_right.T @ weighted_right), axis=0)
    scales = np.linalg.lstsq(gram, cross, rcond=None)[0]
    exponent = math.frexp(float(np.max(np.abs(scales), initial=0.0)))[1]
    stored = np.ldexp(scales, -exponent).astype(np.float16)
    columns = range(len(kept))
    return SpectralCode(
        tuple(left_codes[:, k] for k in columns),
        tuple(right_codes[:, k] for k in columns),
        stored,
        exponent,
        widths,
        pair.shape,
    )


def _coded(columns: Doubles, bits: Sequence[int]) -> tuple[Codes, Doubles]:
    """Codes of each column at its number of bits, and the values they stand for."""
    codes = np.zeros(columns.shape, dtype=np.int8)
    values = np.zeros(columns.shape)
    for b in set(bits):
        which = [k for k, width in enumerate(bits) if width == b]
        found, steps = nearest_codes(columns[:, which].T, b)
        codes[:, which] = found.T
        values[:, which] = (found * steps[:, None]).T
    return codes, values


def _step(k: int, b: int, sigma: Doubles, noise: Doubles) -> tuple[float, int, int] | None:
    """The next useful number of bits of component k: the one with most error removed per bit."""

    def lost(bits: int) -> float:
        return float(sigma[k] ** 2) * (1.0 if bits == 0 else min(1.0, float(noise[k]) * GAUSSIAN[bits]))

    steps = [((lost(b) - lost(more)) / (more - b), more) for more in range(max(b + 1, 2), MOST_BITS + 1)]
    gain, more = max(steps, default=(0.0, 0))
    return (-gain, k, more) if gain > 0.0 else None


def _spectrum(layer: Layer) -> tuple[Doubles, Doubles, Doubles]:
    pair, (columns, sigma, rows) = layer.pair, layer.gauge
    return to_numpy(as_double(pair.left) @ columns), to_numpy(sigma), to_numpy(rows @ as_double(pair.right))
