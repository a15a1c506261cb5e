"""One NumPy matrix of a few hundred rows: its Krylov space, and the Gram route of `SVD`."""

from __future__ import annotations

import numpy as np
import pytest

from lsrdecomp import KroneckerShape, decompose
from lsrdecomp.kronecker.rearrange import inverse_rearrange
from lsrdecomp.solvers import SVD, Krylov
from lsrdecomp.solvers.choice import choose_svd
from lsrdecomp.solvers.solver import ErrorKind
from lsrdecomp.solvers.svd import dense
from lsrdecomp.solvers.svd.crossings import krylov_side
from lsrdecomp.solvers.svd.krylov_space import KrylovSpace
from lsrdecomp.targets.target import Dense

K = np.arange(256.0)
SPECTRA = {
    "1/k": 1.0 / (1.0 + K),
    "slow": np.exp(-K / 25.0),
    "fast": 0.3**K,
    "flat": np.ones(256),
    "five exact terms": np.where(K < 5, 1.0 / (1.0 + K), 0.0),
    "three above noise": np.where(K < 3, 1.0, 1e-9),
    "clusters": 10.0 ** -(K // 12),
    "a spike over a line": np.where(K < 2, 2.0, 1.0 - K / 256.0),
}
SHAPES = {
    "wide": KroneckerShape(((12, 12), (12, 14))),
    "tall": KroneckerShape(((12, 14), (11, 12))),
    "in single precision": KroneckerShape(((19, 18), (20, 20))),
}
LIMIT = 1e-3


def matrix_of(name, shape, kind, rng):
    """Return a matrix whose rearrangement has a spectrum of `SPECTRA`, and its singular values."""
    rows, columns = shape.sizes
    sigma = SPECTRA[name][: min(rows, columns)]
    bases = []
    for size in (rows, columns):
        draws = rng.standard_normal((size, len(sigma)))
        if kind is complex:
            draws = draws + 1j * rng.standard_normal(draws.shape)
        bases.append(np.linalg.qr(draws)[0])
    left, right = bases
    return inverse_rearrange((left * sigma) @ right.conj().T, shape), sigma


def assert_is_near(solution, matrix, sigma, rank):
    target = Dense(matrix)
    error = target.residual_norm(solution.approximation)
    optimum = np.linalg.norm(sigma[rank:])
    rounding = 1e-13 * target.norm
    assert error <= optimum * (1.0 + LIMIT) + rounding
    if solution.relative_error is not None:
        assert solution.relative_error * target.norm == pytest.approx(error, 1e-9, rounding)
    if solution.gap_kind is ErrorKind.bounded and solution.optimality_gap is not None:
        assert error <= optimum * (1.0 + solution.optimality_gap) + rounding
    left, right = (factor.reshape(len(factor), -1) for factor in solution.approximation.factors)
    terms = solution.approximation.separation_rank
    assert left @ left.conj().T == pytest.approx(np.eye(terms), abs=1e-12)
    assert right @ right.conj().T == pytest.approx(np.eye(terms), abs=1e-12)


@pytest.mark.parametrize("kind", [float, complex])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", SPECTRA)
def test_a_space_of_its_own_ends_near_the_optimum(name, shape, kind, rng):
    matrix, sigma = matrix_of(name, shape, kind, rng)
    for rank in (1, 4):
        solution = Krylov(tolerance=LIMIT).solve(matrix, shape, rank=rank)
        assert_is_near(solution, matrix, sigma, rank)


@pytest.mark.parametrize("name", ["1/k", "slow", "fast", "a spike over a line"])
def test_a_space_of_its_own_takes_the_steps_of_a_batch(name, rng):
    shape = SHAPES["wide"]
    matrix, _ = matrix_of(name, shape, float, rng)
    alone = Krylov(tolerance=LIMIT).solve(matrix, shape, rank=3)
    batched, _ = Krylov(tolerance=LIMIT).solve_batch(np.stack([matrix, matrix]), shape, rank=3)
    assert alone.approximation.weights == pytest.approx(batched.approximation.weights, rel=1e-6)
    assert [sweep.relative_error for sweep in alone.sweeps] == pytest.approx(
        [sweep.relative_error for sweep in batched.sweeps], rel=1e-5
    )


SMALL = KroneckerShape(((8, 8), (9, 9)))


@pytest.mark.parametrize("kind", [float, complex])
@pytest.mark.parametrize("rank", [1, 2, 4, 9])
@pytest.mark.parametrize("name", SPECTRA)
def test_eigenvectors_in_single_precision_end_near_the_optimum(name, rank, kind, rng):
    matrix, sigma = matrix_of(name, SMALL, kind, rng)
    solution = SVD(tolerance=LIMIT).solve(matrix, SMALL, rank=rank)
    assert_is_near(solution, matrix, sigma, min(rank, np.count_nonzero(sigma)))


def test_what_single_precision_cannot_tell_is_computed_in_double(rng, monkeypatch):
    """Between 1 and 1e-5 lies what eigenvalues in single precision see of 1e-12."""
    sigma = np.full(64, 1e-6)
    sigma[0] = 1.0
    sigma[1:5] = 1e-6 * np.arange(5.0, 1.0, -1.0)
    left = np.linalg.qr(rng.standard_normal((64, 64)))[0]
    right = np.linalg.qr(rng.standard_normal((81, 64)))[0]
    matrix = inverse_rearrange((left * sigma) @ right.T, SMALL)
    asked = []
    in_double = dense.eigenpairs
    monkeypatch.setattr(dense, "eigenpairs", lambda *given: asked.append(1) or in_double(*given))
    solution = SVD(tolerance=LIMIT).solve(matrix, SMALL, rank=3)
    assert asked
    assert_is_near(solution, matrix, sigma, 3)


@pytest.mark.parametrize("kind", ["float64", "complex128", "float32"])
@pytest.mark.parametrize("size", [(5, 9), (9, 5), (1, 4), (40, 40)])
def test_lapack_is_called_for_rows_as_they_lie(size, kind, rng):
    matrix = rng.standard_normal(size).astype(kind)
    if kind == "complex128":
        matrix = matrix + 1j * rng.standard_normal(size)
    u, sigma, vh = dense.full_svd(matrix)
    rounding = 1e-5 if kind == "float32" else 1e-13
    assert (u * sigma) @ vh == pytest.approx(matrix, abs=rounding)
    assert sigma == pytest.approx(np.linalg.svd(matrix, compute_uv=False), abs=rounding)
    assert u.conj().T @ u == pytest.approx(np.eye(min(size)), abs=rounding)


def test_values_that_hardly_fall_take_the_dense_way_after_one_look(rng, monkeypatch):
    """Noise of 256 × 256 took twice the time of its Gram matrix at 16 terms."""
    shape = KroneckerShape(((16, 16), (16, 16)))
    monkeypatch.setattr(KrylovSpace, "grow", None)
    noise = rng.standard_normal((256, 256))
    solution = Krylov().solve(noise, shape, rank=16)
    assert solution.gap_kind is ErrorKind.bounded
    together = Krylov().solve_batch(np.stack([noise, noise]), shape, rank=16)
    assert [one.gap_kind for one in together] == [ErrorKind.bounded] * 2


def test_the_choice_falls_on_products_from_a_size_on(rng):
    sides = [8, 12, 16, 32, 64]
    for rank in (1, 4, 16, 64):
        chosen = [choose_svd(KroneckerShape(((n, n), (n, n))), rank) for n in sides]
        kinds = [isinstance(solver, Krylov) for solver in chosen]
        assert kinds == sorted(kinds)
        assert kinds[-1]
        small = KroneckerShape(((8, 8), (8, 8)))
        assert choose_svd(small, rank, is_held=False) == chosen[-1]
        assert krylov_side(rank) <= krylov_side(rank, 0.5) <= krylov_side(rank, 1.0)
        assert krylov_side(rank, is_batch=True) <= krylov_side(rank)
    for decay in (0.0, 0.5, 1.0):  # beyond what was measured the side grows with the terms
        assert krylov_side(256, decay) == 4.0 * krylov_side(64, decay)
    assert choose_svd(KroneckerShape(((4, 8), (8, 4))), 1) == SVD()


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_terms_that_leave_nothing_to_squares_need_no_full_svd(dtype, rng, monkeypatch):
    """All but 1e-7 of the norm is in 64 terms: a Gram matrix holds the square of that."""

    def refuse(matrix):
        raise AssertionError("a full SVD was made")

    monkeypatch.setattr("lsrdecomp.solvers.svd.dense.full_svd", refuse)
    sizes = ((16, 16), (16, 17))
    left, right = (np.linalg.qr(rng.standard_normal((side, 256)))[0] for side in (256, 272))
    spectrum = np.exp(-np.arange(256) / 4.0)
    matrix = inverse_rearrange((left * spectrum) @ right.T, KroneckerShape(sizes))
    matrix = matrix * (np.exp(1j) if dtype == "complex128" else 1.0)
    result = decompose(matrix, sizes, rank=64, solver=SVD(tolerance=1e-3))
    optimum = np.linalg.norm(spectrum[64:]) / np.linalg.norm(spectrum)
    assert optimum <= result.relative_error * (1 + 1e-9)
    assert result.relative_error <= optimum * (1 + 1e-3)
    assert result.relative_error <= optimum * (1 + result.optimality_gap) * (1 + 1e-8)
