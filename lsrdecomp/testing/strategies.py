"""Hypothesis strategies: Kronecker shapes, separated matrices, low-rank pairs, LoRA layers.

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
from lsrdecomp.targets.target import LowRank

SIZES = (1, 2, 3, 4, 5, 7)
"""Factor sides that are drawn: one, primes, and a composite."""

LONG_SIZES = (16, 17, 33, 65)
"""Factor sides that are drawn at times: blocks of code that works in tiles, and one more."""

_SELDOM = st.sampled_from((False, False, False, True))
"""True one time in four, and not where a case is made small."""


@st.composite
def kronecker_shapes(
    draw: st.DrawFn, order: int | None = None, max_entries: int = 4096, square: bool = False
) -> KroneckerShape:
    """Draw shapes of ``order`` factors, one to five if absent.

    Parameters
    ----------
    order : int, optional
    max_entries : int
        Entries of the full matrix, at most.
    square : bool
        Whether every factor has as many rows as columns.

    Examples
    --------
    >>> from hypothesis import find
    >>> shapes = kronecker_shapes(order=2, square=True)
    >>> find(shapes, lambda shape: shape.matrix_shape == (6, 6)).matrix_shape
    (6, 6)
    """
    if order is None:
        order = draw(st.integers(1, 5))
    sizes: tuple[int, ...] = SIZES
    if draw(_SELDOM):
        sizes = (*SIZES, *LONG_SIZES)
    pairs: list[tuple[int, int]] = []
    remaining = max_entries
    for _ in range(order):
        rows = [q for q in sizes if (q * q if square else q) <= remaining]
        m = draw(st.sampled_from(rows))
        n = m if square else draw(st.sampled_from([q for q in sizes if m * q <= remaining]))
        remaining //= m * n
        pairs.append((m, n))
    return KroneckerShape(tuple(pairs))


@st.composite
def matrices(
    draw: st.DrawFn,
    shape: tuple[int, int],
    scale: float | None = None,
    complex_values: bool = False,
    dtype: str = "float64",
) -> Any:
    """Draw Gaussian NumPy matrices.

    Parameters
    ----------
    shape : (m, n)
    scale : float, optional
        Absent, one is drawn from 1e-150 to 1e150; in single precision from 1e-15 to 1e15.
    complex_values : bool
    dtype : str
        ``"float64"`` or ``"float32"``; complex matrices have the precision of it.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(matrices((2, 3)), lambda matrix: abs(matrix).max() > 1e100).shape
    (2, 3)
    """
    rng = _generator(draw)
    if scale is None:
        decades = 150 if dtype == "float64" else 15
        scale = 10.0 ** draw(st.integers(-decades, decades))
    values = rng.standard_normal(shape)
    if complex_values:
        values = values + 1j * rng.standard_normal(shape)
    return (scale * values).astype(_type_of(dtype, complex_values))


@st.composite
def small_matrices(draw: st.DrawFn, shape: tuple[int, int], complex_values: bool = False) -> Any:
    """Draw matrices of integers from −3 to 3, exact in every floating type and short to read.

    Examples
    --------
    >>> from hypothesis import find
    >>> float(find(small_matrices((1, 2)), lambda matrix: matrix.sum() == -6).min())
    -3.0
    """
    rng = _generator(draw)
    entries = rng.integers(-3, 4, shape).astype(np.float64)
    if not complex_values:
        return entries
    return entries + 1j * rng.integers(-3, 4, shape)


@st.composite
def special_matrices(draw: st.DrawFn, shape: tuple[int, int]) -> Any:
    """Draw matrices that break careless code.

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
    name = draw(st.sampled_from(tuple(_SPECIAL)))
    return _SPECIAL[name](m, n, rng)


def _orthonormal_corner(m: int, n: int, rng: np.random.Generator) -> Any:
    """Return a corner of an orthonormal matrix."""
    size = max(m, n)
    orthonormal, _ = np.linalg.qr(rng.standard_normal((size, size)))
    return orthonormal[:m, :n]


_SPECIAL: dict[str, Any] = {
    "zero": lambda m, n, _: np.zeros((m, n)),
    "one entry": lambda m, n, rng: np.eye(1, m * n, int(rng.integers(m * n))).reshape(m, n),
    "ones": lambda m, n, _: np.ones((m, n)),
    "identity": lambda m, n, _: np.eye(m, n),
    "rank one": lambda m, n, rng: np.outer(rng.standard_normal(m), rng.standard_normal(n)),
    "equal singular values": _orthonormal_corner,
    "signed zeros": lambda m, n, rng: np.where(rng.random((m, n)) < 0.5, -0.0, 0.0) + np.eye(m, n),
    "graded": lambda m, n, rng: rng.standard_normal((m, n)) * 10.0 ** np.linspace(0, -16, n),
    "huge": lambda m, n, rng: rng.standard_normal((m, n)) * 1e300,
    "subnormal": lambda m, n, rng: rng.standard_normal((m, n)) * 1e-310,
}


@st.composite
def invertible_matrices(
    draw: st.DrawFn, size: int, complex_values: bool = False, max_condition: float = 100.0
) -> Any:
    """Draw square matrices with singular values between 1 / ``max_condition`` and 1.

    Examples
    --------
    >>> from hypothesis import find
    >>> matrix = find(invertible_matrices(3, max_condition=10.0), lambda matrix: True)
    >>> bool(np.linalg.cond(matrix) < 10.01)
    True
    """
    rng = _generator(draw)
    first = _orthonormal(rng, size, size, complex_values)
    second = _orthonormal(rng, size, size, complex_values)
    return (first * max_condition ** -rng.random(size)) @ second


@st.composite
def graded_matrices(draw: st.DrawFn, shape: KroneckerShape, complex_values: bool = False) -> Any:
    """Draw matrices whose rearrangement, for two factors, has singular values from 1 to 1e-12.

    Evenly in the logarithm; an SVD through the Gram matrix sees none of them below 1e-8.

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
    left = _orthonormal(rng, m * n, rank, complex_values)
    right = _orthonormal(rng, p * q, rank, complex_values)
    rearranged = (left * np.logspace(0, -12, rank)) @ right.conj().T
    return rearranged.reshape(m, n, p, q).transpose(0, 2, 1, 3).reshape(shape.matrix_shape)


@st.composite
def separated_matrices(
    draw: st.DrawFn,
    shape: KroneckerShape | None = None,
    max_rank: int = 4,
    complex_values: bool = False,
    condition: float | None = None,
    dtype: str = "float64",
) -> SeparatedMatrix:
    """Draw separated matrices with Gaussian factors and weights spread over up to six decades.

    In half of those of several terms the two largest nearly cancel.

    Parameters
    ----------
    shape : KroneckerShape, optional
    max_rank : int
        Terms, at most.
    complex_values : bool
    condition : float, optional
        There are two terms of equal weight that cancel until γ is this number (at least √½, which
        two equal terms have); the shape needs a factor of two entries or more.
    dtype : str
        ``"float64"`` or ``"float32"``; complex factors have the precision of it.

    Examples
    --------
    >>> from hypothesis import find
    >>> matrices = separated_matrices(KroneckerShape(((2, 2), (3, 1))))
    >>> find(matrices, lambda matrix: matrix.separation_rank == 3).shape
    (6, 2)
    """
    factor_type = _type_of(dtype, complex_values)
    if condition is not None:
        matrix = _cancelling(draw, shape, complex_values, condition)
        return matrix if dtype == "float64" else matrix.astype(factor_type)
    if shape is None:
        shape = draw(kronecker_shapes())
    terms = draw(st.integers(1, max_rank))
    rng = _generator(draw)
    factors = [rng.standard_normal((terms, m, n)) for m, n in shape.factors]
    if complex_values:
        factors = [f + 1j * rng.standard_normal(f.shape) for f in factors]
    weights = 10.0 ** rng.uniform(-3, 3, terms)
    if terms > 1 and draw(st.booleans()):
        for f in factors:
            f[1] = f[0] + 1e-3 * rng.standard_normal(f[0].shape)
        factors[0][1] *= -1.0
        weights[:2] = weights.max()
    factors = [f.astype(factor_type) for f in factors]
    return SeparatedMatrix.from_factors(factors, weights.astype(dtype))


@st.composite
def low_rank_pairs(draw: st.DrawFn, shape: KroneckerShape | None = None) -> LowRank:
    """Draw pairs like those of a LoRA layer, of rank four at most.

    The rank may exceed the dimensions, and a side may be all zero.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(low_rank_pairs(), lambda pair: pair.rank > min(pair.shape)).rank > 1
    True
    """
    if shape is None:
        shape = draw(kronecker_shapes(order=2))
    m, n = shape.matrix_shape
    r = draw(st.integers(1, 4))
    rng = _generator(draw)
    left = rng.standard_normal((m, r))
    right = rng.standard_normal((r, n)) / math.sqrt(n)
    return LowRank(left * draw(st.sampled_from((1.0, 1e-8, 1e8, 0.0))), right)


@dataclass(frozen=True, eq=False)
class LoraCase:
    """One LoRA layer as a file holds it: ΔW = (alpha / r) · B A.

    Attributes
    ----------
    up : array, shape (m, r)
        B.
    down : array, shape (r, n)
        A.
    alpha : float
    storage : str
        Number format of the file.

    Examples
    --------
    >>> layer = LoraCase(np.ones((4, 2)), np.ones((2, 3)), alpha=4.0, storage="float32")
    >>> layer.scale, layer.pair.shape
    (2.0, (4, 3))
    """

    up: Any
    down: Any
    alpha: float
    storage: str

    @property
    def scale(self) -> float:
        """The factor alpha / r of the product."""
        return self.alpha / int(self.down.shape[0])

    @property
    def pair(self) -> LowRank:
        """ΔW as a target, the scale folded into B."""
        return LowRank(self.up * self.scale, self.down)


@st.composite
def lora_layers(draw: st.DrawFn, shape: KroneckerShape | None = None) -> LoraCase:
    """Draw LoRA layers as they occur.

    Never trained (B zero), trained in one direction, with a repeated row of A, of a rank above the
    matrix, with the numbers of a half-precision file; alpha from tiny to large.

    Examples
    --------
    >>> from hypothesis import find
    >>> find(lora_layers(), lambda layer: not layer.up.any()).pair.norm  # never trained
    0.0
    """
    if shape is None:
        shape = draw(kronecker_shapes(order=2))
    m, n = shape.matrix_shape
    r = draw(st.integers(1, 8))
    rng = _generator(draw)
    up = 0.02 * rng.standard_normal((m, r))
    down = rng.uniform(-1, 1, (r, n)) / math.sqrt(n)
    history = draw(st.sampled_from(("trained", "fresh", "one direction", "repeated row")))
    if history == "fresh":
        up = np.zeros_like(up)
    elif history == "one direction":
        up = np.outer(up[:, 0], rng.standard_normal(r)) + 1e-4 * up
    elif history == "repeated row":
        down[-1] = down[0]
    storage = draw(st.sampled_from(("float32", "float16")))
    alpha = draw(st.sampled_from((16.0, 1.0, float(r), 128.0, 1e-3)))
    up = up.astype(storage).astype(np.float64)
    down = down.astype(storage).astype(np.float64)
    return LoraCase(up, down, alpha, storage)


def _cancelling(
    draw: st.DrawFn, shape: KroneckerShape | None, complex_values: bool, condition: float
) -> SeparatedMatrix:
    """Draw two terms of equal weight that cancel until γ is ``condition``."""
    if not condition >= math.sqrt(0.5):
        raise ShapeError(f"two terms have a condition of at least 0.707, not {condition}")
    if shape is None:
        shape = draw(kronecker_shapes().filter(lambda drawn: max(drawn.sizes) > 1))
    largest = max(range(shape.order), key=lambda i: shape.sizes[i])
    if shape.sizes[largest] < 2:
        raise ShapeError(f"{shape} has one entry: no two different terms exist")
    rng = _generator(draw)
    # Two unit vectors at an angle θ differ by 2 sin(θ/2), and γ = √2 / that.
    half_angle = math.asin(min(1.0, math.sqrt(0.5) / condition))
    factors = []
    for i, (m, n) in enumerate(shape.factors):
        if i == largest:
            frame = _orthonormal(rng, m * n, 2, complex_values)
            along = math.cos(half_angle) * frame[:, 0]
            across = math.sin(half_angle) * frame[:, 1]
            pair = [along + across, across - along]
        else:
            frame = _orthonormal(rng, m * n, 1, complex_values)
            pair = [frame[:, 0], frame[:, 0]]
        factors.append(np.stack([vector.reshape(m, n) for vector in pair]))
    return SeparatedMatrix.from_factors(factors, np.full(2, 10.0 ** rng.uniform(-3, 3)))


def _generator(draw: st.DrawFn) -> np.random.Generator:
    """Draw a generator: hypothesis draws its seed alone."""
    return np.random.default_rng(draw(st.integers(0, 2**32 - 1)))


def _type_of(dtype: str, complex_values: bool) -> str:
    """Return the element type of this precision, real or complex."""
    if not complex_values:
        return dtype
    return {"float32": "complex64", "float64": "complex128"}[dtype]


def _orthonormal(rng: np.random.Generator, rows: int, columns: int, complex_values: bool) -> Any:
    """Return a matrix of orthonormal columns."""
    values = rng.standard_normal((rows, columns))
    if complex_values:
        values = values + 1j * rng.standard_normal(values.shape)
    orthonormal, _ = np.linalg.qr(values)
    return orthonormal
