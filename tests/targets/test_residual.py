"""Distances of low-rank pairs: from inner products where exact, else from formed entries."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.targets import target as base
from lsrdecomp.targets.residual import (
    cached_row_blocks,
    gram_of,
    inner_distances,
    pair_distance,
    pair_distances,
    residual_norm,
    thin_row_blocks,
)
from lsrdecomp.targets.target import Dense


@given(
    seed=st.integers(0, 10**6),
    near=st.integers(0, 15),
    scale=st.sampled_from([1e-180, 1e-8, 1.0, 1e9, 1e170]),
)
def test_distances_of_pairs_are_those_of_the_formed_matrices(
    seed: int, near: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    left, right = rng.standard_normal((2, 30, 4)), rng.standard_normal((2, 20, 4))
    close = 10.0**-near * rng.standard_normal((2, 30, 2)), rng.standard_normal((2, 20, 2))
    other = np.concatenate((left, close[0]), axis=2), np.concatenate((right, close[1]), axis=2)
    exact = np.linalg.norm(close[0] @ np.swapaxes(close[1], 1, 2), axis=(1, 2))
    found = pair_distances(left, right, *other)
    size = np.linalg.norm(left @ np.swapaxes(right, 1, 2), axis=(1, 2))
    assert np.all(np.abs(found - exact) <= 1e-11 * exact + 1e-14 * size)
    scaled = pair_distance(scale * left[0], right[0], scale * other[0][0], other[1][0])
    assert scaled == pytest.approx(scale * exact[0], rel=1e-10, abs=scale * 1e-14 * size[0])


def test_inner_products_are_used_where_they_are_exact_and_nowhere_else(
    rng: np.random.Generator,
) -> None:
    left, right = rng.standard_normal((30, 4)), rng.standard_normal((20, 4))
    assert inner_distances(left, right, 0.5 * left, right) is not None
    assert inner_distances(left, right, (1.0 - 1e-4) * left, right) is None
    assert inner_distances(1e200 * left, right, 0.5e200 * left, right) is None
    assert inner_distances(left, right, np.nan * left, right) is None


def test_distances_of_complex_pairs(rng: np.random.Generator) -> None:
    parts = [rng.standard_normal((n, 3)) + 1j * rng.standard_normal((n, 3)) for n in (9, 7, 9, 7)]
    exact = np.linalg.norm(parts[0] @ parts[1].conj().T - parts[2] @ parts[3].conj().T)
    assert pair_distance(*parts) == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("kind", [float, complex])
@pytest.mark.parametrize("near", [0, 2, 6, 12])
def test_large_dense_matrices_are_measured_by_inner_products_where_these_are_exact(
    near, kind, rng, monkeypatch
) -> None:
    formed = []
    monkeypatch.setattr(
        base, "residual_norm", lambda *given: formed.append(1) or residual_norm(*given)
    )
    factors = [rng.standard_normal((3, *size)).astype(kind) for size in ((40, 30), (40, 45))]
    if kind is complex:
        factors = [factor + 1j * rng.standard_normal(factor.shape) for factor in factors]
    approximation = SeparatedMatrix.from_factors(factors)
    noise = rng.standard_normal((1600, 1350))
    matrix = approximation.to_matrix() + 10.0**-near * noise * (
        approximation.norm / np.linalg.norm(noise)
    )
    exact = np.linalg.norm(matrix - approximation.to_matrix())
    found = Dense(matrix).residual_norm(approximation)
    assert found == pytest.approx(exact, rel=1e-11)
    assert bool(formed) is (near > 0)


def test_the_entries_of_a_little_longer_matrix_are_formed(rng, monkeypatch) -> None:
    """The norms alone tell of it, and yet its inner products keep too few digits."""
    formed = []
    monkeypatch.setattr(
        base, "residual_norm", lambda *given: formed.append(1) or residual_norm(*given)
    )
    factors = [rng.standard_normal((3, *size)) for size in ((40, 30), (40, 45))]
    approximation = SeparatedMatrix.from_factors(factors)
    target = Dense(1.01 * approximation.to_matrix())
    found = target.residual_norm(approximation)
    assert found == pytest.approx(0.01 * approximation.norm, rel=1e-12)
    assert formed


@pytest.mark.parametrize("blocks", [cached_row_blocks, thin_row_blocks])
@pytest.mark.parametrize(("rows", "columns"), [(1000, 512), (1000, 700), (3, 10**6), (5000, 64)])
def test_blocks_of_rows_fill_a_cache_and_no_more(blocks, rows, columns) -> None:
    found = blocks(rows, columns)
    assert [i for part in found for i in range(rows)[part]] == list(range(rows))
    heights = [part.stop - part.start for part in found]
    assert heights[0] * columns <= max(2**15, columns)
    assert all(2 * height * columns > 2**15 for height in heights[:-1])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_gram_matrix_has_the_digits_of_double_precision(dtype, rng) -> None:
    array = rng.standard_normal((5000, 7)).astype(dtype)
    exact = array.astype(np.longdouble).T @ array.astype(np.longdouble)
    found = gram_of(array)
    assert found.dtype == np.float64
    assert np.abs(found - exact).max() <= 1e-13 * np.abs(exact).max()
