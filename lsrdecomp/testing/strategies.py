"""Hypothesis strategies: Kronecker shapes, separated matrices, low-rank pairs, LoRA layers, special values.

One-row and one-column factors and prime sizes are drawn on purpose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.targets.base import LowRank

SIZES = (1, 2, 3, 4, 5, 7)
"""Factor sides that are drawn: one, primes, and a composite."""


@st.composite
def kronecker_shapes(
    draw: st.DrawFn, order: int | None = None, max_entries: int = 4096, square: bool = False
) -> KroneckerShape:
    """Shapes of ``order`` factors (one to four if absent) of at most ``max_entries`` entries in the full matrix.

    With ``square`` every factor has as many rows as columns.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(kronecker_shapes(order=2, square=True), lambda shape: shape.matrix_shape == (6, 6)).matrix_shape
    (6, 6)
    """
    d = order if order is not None else draw(st.integers(1, 4))
    pairs: list[tuple[int, int]] = []
    left = max_entries
    for _ in range(d):
        m = draw(st.sampled_from([q for q in SIZES if (q * q if square else q) <= left]))
        n = m if square else draw(st.sampled_from([q for q in SIZES if m * q <= left]))
        left //= m * n
        pairs.append((m, n))
    return KroneckerShape(tuple(pairs))


@st.composite
def matrices(
    draw: st.DrawFn,
    shape: tuple[int, int],
    scale: float | None = None,
    complex_values: bool = False,
) -> Any:
    """Gaussian NumPy matrices in double precision; ``scale`` absent draws one from 1e-150 to 1e150.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(matrices((2, 3)), lambda matrix: abs(matrix).max() > 1e100).shape
    (2, 3)
    """
    rng = _generator(draw)
    size = 10.0 ** draw(st.integers(-150, 150)) if scale is None else scale
    values = rng.standard_normal(shape)
    return size * (values + 1j * rng.standard_normal(shape) if complex_values else values)


@st.composite
def small_matrices(draw: st.DrawFn, shape: tuple[int, int], complex_values: bool = False) -> Any:
    """Matrices of integers from −3 to 3: exact in every floating type, and short to read when a test fails.

    Examples
    --------
    >>> from hypothesis import find
    >>> float(find(small_matrices((1, 2)), lambda matrix: matrix.sum() == -6).min())
    -3.0
    """
    rng = _generator(draw)
    entries = rng.integers(-3, 4, shape).astype(np.float64)
    return entries + 1j * rng.integers(-3, 4, shape) if complex_values else entries


@st.composite
def special_matrices(draw: st.DrawFn, shape: tuple[int, int]) -> Any:
    """Matrices that break careless code.

    Zero, one entry, ones, identity, rank one, equal singular values, signed zeros, columns of very
    different size, and numbers near the largest and the smallest of double precision.

    Examples
    --------
    >>> from hypothesis import find
    >>> bool(find(special_matrices((2, 2)), lambda matrix: not matrix.any()).any())
    False
    """
    m, n = shape
    rng = _generator(draw)
    kind = draw(st.sampled_from(tuple(_SPECIAL)))
    return _SPECIAL[kind](m, n, rng)


_SPECIAL: dict[str, Any] = {
    "zero": lambda m, n, _: np.zeros((m, n)),
    "one entry": lambda m, n, rng: np.eye(1, m * n, int(rng.integers(m * n))).reshape(m, n),
    "ones": lambda m, n, _: np.ones((m, n)),
    "identity": lambda m, n, _: np.eye(m, n),
    "rank one": lambda m, n, rng: np.outer(rng.standard_normal(m), rng.standard_normal(n)),
    "equal singular values": lambda m, n, rng: np.linalg.qr(rng.standard_normal((max(m, n),) * 2))[
        0
    ][:m, :n],
    "signed zeros": lambda m, n, rng: np.where(rng.random((m, n)) < 0.5, -0.0, 0.0) + np.eye(m, n),
    "graded": lambda m, n, rng: rng.standard_normal((m, n)) * 10.0 ** np.linspace(0, -16, n),
    "huge": lambda m, n, rng: rng.standard_normal((m, n)) * 1e300,
    "subnormal": lambda m, n, rng: rng.standard_normal((m, n)) * 1e-310,
}


@st.composite
def invertible_matrices(
    draw: st.DrawFn, size: int, complex_values: bool = False, max_condition: float = 100.0
) -> Any:
    """Square matrices with singular values between 1 / ``max_condition`` and 1.

    Examples
    --------
    >>> from hypothesis import find
    >>> bool(np.linalg.cond(find(invertible_matrices(3, max_condition=10.0), lambda matrix: True)) < 10.01)
    True
    """
    rng = _generator(draw)
    first, second = (_orthonormal(rng, size, size, complex_values) for _ in range(2))
    return (first * max_condition ** -rng.random(size)) @ second


@st.composite
def graded_matrices(draw: st.DrawFn, shape: KroneckerShape, complex_values: bool = False) -> Any:
    """Matrices whose rearrangement, for two factors, has singular values from 1 to 1e-12, evenly in the logarithm.

    An SVD through the Gram matrix sees none of them below 1e-8.

    Examples
    --------
    >>> from hypothesis import find
    >>> from lsrdecomp.kronecker import rearrange
    >>> shape = KroneckerShape(((2, 2), (2, 2)))
    >>> matrix = find(graded_matrices(shape), lambda matrix: True)
    >>> [f"{value:.0e}" for value in np.linalg.svd(rearrange(matrix, shape), compute_uv=False)]
    ['1e+00', '1e-04', '1e-08', '1e-12']
    """
    rng = _generator(draw)
    (m, n), (p, q) = shape.factors
    rank = shape.max_separation_rank
    left, right = (_orthonormal(rng, size, rank, complex_values) for size in shape.sizes)
    rearranged = (left * np.logspace(0, -12, rank)) @ right.conj().T
    return rearranged.reshape(m, n, p, q).transpose(0, 2, 1, 3).reshape(shape.matrix_shape)


@st.composite
def separated_matrices(
    draw: st.DrawFn,
    shape: KroneckerShape | None = None,
    max_rank: int = 4,
    complex_values: bool = False,
    condition: float | None = None,
) -> SeparatedMatrix:
    """Separated matrices with Gaussian factors and weights spread over up to six decades; terms may nearly cancel.

    With ``condition`` there are two terms of equal weight that cancel until γ is that number (at
    least √½, which two equal terms have); the shape needs a factor of two entries or more.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(separated_matrices(KroneckerShape(((2, 2), (3, 1)))), lambda matrix: matrix.separation_rank == 3).shape
    (6, 2)
    """
    if condition is not None:
        return _cancelling(draw, shape, complex_values, condition)
    shape = draw(kronecker_shapes()) if shape is None else shape
    s = draw(st.integers(1, max_rank))
    rng = _generator(draw)
    factors = [rng.standard_normal((s, m, n)) for m, n in shape.factors]
    if complex_values:
        factors = [f + 1j * rng.standard_normal(f.shape) for f in factors]
    if s > 1 and draw(st.booleans()):  # two terms that almost cancel: a large condition number
        for f in factors:
            f[1] = f[0] + 1e-3 * rng.standard_normal(f[0].shape)
        factors[0][1] *= -1.0
    return SeparatedMatrix.from_factors(factors, 10.0 ** rng.uniform(-3, 3, s))


@st.composite
def low_rank_pairs(
    draw: st.DrawFn, shape: KroneckerShape | None = None, max_rank: int = 4
) -> LowRank:
    """Pairs like those of a LoRA layer; the rank may exceed the dimensions, and a side may be all zero.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(low_rank_pairs(), lambda pair: pair.rank > min(pair.shape)).rank > 1
    True
    """
    shape = draw(kronecker_shapes(order=2)) if shape is None else shape
    m, n = shape.matrix_shape
    r = draw(st.integers(1, max_rank))
    rng = _generator(draw)
    left, right = rng.standard_normal((m, r)), rng.standard_normal((r, n)) / math.sqrt(n)
    return LowRank(left * draw(st.sampled_from((1.0, 1e-8, 1e8, 0.0))), right)


@dataclass(frozen=True, eq=False)
class LoraCase:
    """One LoRA layer as a file holds it: ΔW = (alpha / r) · B A.

    Examples
    --------
    >>> layer = LoraCase(np.ones((4, 2)), np.ones((2, 3)), alpha=4.0, storage="float32")
    >>> layer.scale, layer.pair.shape
    (2.0, (4, 3))
    """

    up: Any  # B, (m, r)
    down: Any  # A, (r, n)
    alpha: float
    storage: str

    @property
    def scale(self) -> float:
        return self.alpha / int(self.down.shape[0])

    @property
    def pair(self) -> LowRank:
        """ΔW as a target, the scale folded into B."""
        return LowRank(self.up * self.scale, self.down)


@st.composite
def lora_layers(
    draw: st.DrawFn, shape: KroneckerShape | None = None, max_rank: int = 8
) -> LoraCase:
    """LoRA layers as they occur: never trained (B zero), trained in one direction, with a repeated row of A, of a rank
    above the matrix, with the numbers of a half-precision file; alpha from tiny to large.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(lora_layers(), lambda layer: not layer.up.any()).pair.norm            # never trained
    0.0
    """
    shape = draw(kronecker_shapes(order=2)) if shape is None else shape
    m, n = shape.matrix_shape
    r = draw(st.integers(1, max_rank))
    rng = _generator(draw)
    up, down = 0.02 * rng.standard_normal((m, r)), rng.uniform(-1, 1, (r, n)) / math.sqrt(n)
    kind = draw(st.sampled_from(("trained", "fresh", "one direction", "repeated row")))
    if kind == "fresh":
        up = np.zeros_like(up)
    elif kind == "one direction":
        up = np.outer(up[:, 0], rng.standard_normal(r)) + 1e-4 * up
    elif kind == "repeated row":
        down[-1] = down[0]
    storage = draw(st.sampled_from(("float32", "float16")))
    alpha = draw(st.sampled_from((16.0, 1.0, float(r), 128.0, 1e-3)))
    up, down = (np.asarray(half.astype(storage), dtype=np.float64) for half in (up, down))
    return LoraCase(up, down, alpha, storage)


def _cancelling(
    draw: st.DrawFn, shape: KroneckerShape | None, complex_values: bool, condition: float
) -> SeparatedMatrix:
    if not condition >= math.sqrt(0.5):
        raise ShapeError(f"two terms have a condition of at least 0.707, not {condition}")
    if shape is None:
        shape = draw(kronecker_shapes().filter(lambda drawn: max(drawn.sizes) > 1))
    wide = max(range(shape.order), key=lambda i: shape.sizes[i])
    if shape.sizes[wide] < 2:
        raise ShapeError(f"{shape} has one entry: no two different terms exist")
    rng = _generator(draw)
    factors = []
    for i, (m, n) in enumerate(shape.factors):
        frame = _orthonormal(rng, m * n, 2 if i == wide else 1, complex_values)
        first = second = frame[:, 0]
        if i == wide:  # two unit vectors at an angle θ differ by 2 sin(θ/2), and γ = √2 / that
            half = math.asin(min(1.0, math.sqrt(0.5) / condition))
            first, second = (
                math.cos(half) * frame[:, 0] + sign * math.sin(half) * frame[:, 1]
                for sign in (1, -1)
            )
            second = -second
        factors.append(np.stack([first.reshape(m, n), second.reshape(m, n)]))
    return SeparatedMatrix.from_factors(factors, np.full(2, 10.0 ** rng.uniform(-3, 3)))


def _generator(draw: st.DrawFn) -> np.random.Generator:
    return np.random.default_rng(draw(st.integers(0, 2**32 - 1)))


def _orthonormal(rng: np.random.Generator, rows: int, columns: int, complex_values: bool) -> Any:
    values = rng.standard_normal((rows, columns))
    return np.linalg.qr(
        values + 1j * rng.standard_normal(values.shape) if complex_values else values
    )[0]
