"""Hypothesis strategies for separated matrices and Kronecker shapes, for your own property tests as for ours.

Needs the package hypothesis. One-row and one-column factors and prime sizes are drawn on purpose.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from lsrdecomp.separated import SeparatedMatrix
from lsrdecomp.shape import KroneckerShape
from lsrdecomp.targets import LowRank

SIZES = (1, 2, 3, 4, 5, 7)
"""Factor sides that are drawn: one, primes, and a composite."""


@st.composite
def kronecker_shapes(draw: st.DrawFn, order: int | None = None, max_entries: int = 4096) -> KroneckerShape:
    """Shapes of ``order`` factors (one to four if absent) of at most ``max_entries`` entries in the full matrix."""
    d = order if order is not None else draw(st.integers(1, 4))
    pairs: list[tuple[int, int]] = []
    left = max_entries
    for _ in range(d):
        m = draw(st.sampled_from([q for q in SIZES if q <= left]))
        n = draw(st.sampled_from([q for q in SIZES if m * q <= left]))
        left //= m * n
        pairs.append((m, n))
    return KroneckerShape(tuple(pairs))


@st.composite
def matrices(draw: st.DrawFn, shape: tuple[int, int], scale: float | None = None, complex_values: bool = False) -> Any:
    """Gaussian NumPy matrices in double precision; ``scale`` absent draws one from 1e-150 to 1e150."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = 10.0 ** draw(st.integers(-150, 150)) if scale is None else scale
    values = rng.standard_normal(shape)
    return size * (values + 1j * rng.standard_normal(shape) if complex_values else values)


@st.composite
def separated_matrices(
    draw: st.DrawFn, shape: KroneckerShape | None = None, max_rank: int = 4, complex_values: bool = False
) -> SeparatedMatrix:
    """Separated matrices with Gaussian factors and weights spread over up to six decades; terms may nearly cancel."""
    shape = draw(kronecker_shapes()) if shape is None else shape
    s = draw(st.integers(1, max_rank))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    factors = [rng.standard_normal((s, m, n)) for m, n in shape.factors]
    if complex_values:
        factors = [f + 1j * rng.standard_normal(f.shape) for f in factors]
    if s > 1 and draw(st.booleans()):  # two terms that almost cancel: a large condition number
        for f in factors:
            f[1] = f[0] + 1e-3 * rng.standard_normal(f[0].shape)
        factors[0][1] *= -1.0
    return SeparatedMatrix.from_factors(factors, 10.0 ** rng.uniform(-3, 3, s))


@st.composite
def low_rank_pairs(draw: st.DrawFn, shape: KroneckerShape | None = None, max_rank: int = 4) -> LowRank:
    """Pairs like those of a LoRA layer; the rank may exceed the dimensions, and a side may be all zero."""
    shape = draw(kronecker_shapes(order=2)) if shape is None else shape
    m, n = shape.matrix_shape
    r = draw(st.integers(1, max_rank))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    left, right = rng.standard_normal((m, r)), rng.standard_normal((r, n)) / math.sqrt(n)
    return LowRank(left * draw(st.sampled_from((1.0, 1e-8, 1e8, 0.0))), right)
