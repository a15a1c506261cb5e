"""Leading singular triples, and R of a QR by blocks of rows, against the whole matrix."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from lsrdecomp.arrays import to_numpy, triangular_factor
from lsrdecomp.solvers.pair.initialization import (
    by_iteration,
    by_krylov_spaces,
    by_svd,
    leading_triples,
    through_triangles,
)


def spectrum(rng: np.random.Generator, batch: int, p: int, q: int, sigma: np.ndarray) -> np.ndarray:
    k = len(sigma)
    u, v = (np.linalg.qr(rng.standard_normal((batch, size, k)))[0] for size in (p, q))
    return np.asarray((u * sigma) @ np.swapaxes(v, 1, 2))


WAYS = {
    "whole": by_svd,
    "through R": through_triangles,
    "krylov": by_krylov_spaces,
    "iteration": by_iteration,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("p", "q"), [(90, 60), (60, 90)])
@pytest.mark.parametrize("terms", [60, 3], ids=["full rank", "fewer terms than asked for"])
def test_every_way_finds_the_best_truncation(
    way: str,
    p: int,
    q: int,
    terms: int,
    xp: ModuleType,
    rng: np.random.Generator,
) -> None:
    rank = 5
    matrices = spectrum(rng, 2, p, q, 0.8 ** np.arange(terms))
    found = leading_triples(xp.asarray(matrices), rank, WAYS[way])
    u, sigma, vh = (to_numpy(part) for part in found)
    assert (u.shape, sigma.shape, vh.shape) == ((2, p, rank), (2, rank), (2, rank, q))
    exact = np.linalg.svd(matrices, compute_uv=False)
    errors = np.linalg.norm(matrices - (u * sigma[:, None, :]) @ vh, axis=(1, 2))
    best = np.linalg.norm(exact[:, rank:], axis=1)
    assert errors == pytest.approx(best, rel=1e-6, abs=1e-13)
    assert sigma == pytest.approx(exact[:, :rank], rel=1e-5, abs=1e-13)
    kept = min(rank, terms)
    for side in (np.swapaxes(u, 1, 2), vh):
        rows = side[:, :kept, :]
        assert rows @ np.swapaxes(rows, 1, 2) == pytest.approx(
            np.stack([np.eye(kept)] * 2), abs=1e-9
        )


def test_iteration_starts_near_the_best_where_the_spectrum_falls_slowly(
    rng: np.random.Generator,
) -> None:
    matrices = spectrum(rng, 3, 200, 150, 1.0 / np.arange(1.0, 151.0))
    u, sigma, vh = leading_triples(matrices, 12)
    found = np.linalg.norm(matrices - (u * sigma[:, None, :]) @ vh, axis=(1, 2))
    best = np.linalg.norm(1.0 / np.arange(13.0, 151.0))
    assert np.all(found >= best * (1.0 - 1e-12))
    assert np.all(found <= best * (1.0 + 2e-3))


@pytest.mark.parametrize("rows", [3, 5_000, 10_000])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["a matrix", "two matrices"])
def test_blocks_of_rows_give_the_triangle_of_the_whole(
    batch: tuple[int, ...],
    rows: int,
    xp: ModuleType,
    rng: np.random.Generator,
) -> None:
    parts = [
        rng.standard_normal((*batch, rows, width)) * 1e-3 ** np.arange(width) for width in (3, 1)
    ]
    whole = np.concatenate(parts, axis=-1)
    found = to_numpy(triangular_factor(*map(xp.asarray, parts)))
    exact = np.linalg.qr(whole, mode="r")
    assert found.shape == exact.shape
    assert np.abs(found) == pytest.approx(np.abs(exact), rel=1e-10, abs=1e-15)


def test_a_triangle_leaves_the_columns_as_they_are(rng: np.random.Generator) -> None:
    # Blocks of a column are contiguous in every order: LAPACK could work in place
    column = rng.standard_normal((40_000, 1))
    before = column.copy()
    triangle = triangular_factor(column)
    assert abs(triangle[0, 0]) == pytest.approx(np.linalg.norm(before))
    assert np.array_equal(column, before)
