"""Weights of a norm: each acts, takes roots and traces as its matrix, alone and in a batch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from oracles import weight_of, weighted_svd, weighted_truncation

from lsrdecomp.arrays import to_numpy
from lsrdecomp.errors import PrecisionError, ShapeError
from lsrdecomp.precision import tolerance
from lsrdecomp.solvers.pair.stacking import stack_weights
from lsrdecomp.targets.target import LowRank
from lsrdecomp.targets.weighted import (
    weighted_gauge,
    weighted_norm,
    weighted_residual_norm,
)
from lsrdecomp.targets.weights import Identity, LowRankPlusIdentity, NormWeights, Weight

N = 12


def semidefinite(rng: np.random.Generator, n: int, rank: int | None = None) -> np.ndarray:
    half = rng.standard_normal((n, rank or n))
    return half @ half.T


def make(kind: str, n: int, rng: np.random.Generator, xp: Any) -> tuple[Weight, np.ndarray]:
    """A weight of the kind and the matrix it stands for."""
    if kind == "identity":
        return Identity(n), np.eye(n)
    if kind == "all eigenpairs":
        matrix = semidefinite(rng, n)
        return weight_of(matrix, xp), matrix
    basis, values = np.linalg.qr(rng.standard_normal((n, 3)))[0], rng.random(3) + 1.0
    matrix = basis @ np.diag(values) @ basis.T + 0.3 * (np.eye(n) - basis @ basis.T)
    return LowRankPlusIdentity(xp.asarray(basis), xp.asarray(values), 0.3), matrix


KINDS = ("identity", "all eigenpairs", "low rank")


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_acts_as_the_matrix_it_stands_for(
    kind: str, xp: ModuleType, rng: np.random.Generator
) -> None:
    weight, matrix = make(kind, N, rng, xp)
    x = rng.standard_normal((N, 5))
    grant = tolerance("float64", N) * np.linalg.norm(matrix, 2) * np.linalg.norm(x)
    assert weight.size == N
    assert float(weight.trace) == pytest.approx(np.trace(matrix), rel=tolerance("float64", N))
    assert np.linalg.norm(to_numpy(weight.apply(xp.asarray(x))) - matrix @ x) <= grant
    assert np.linalg.norm(to_numpy(weight.root(weight.root(xp.asarray(x)))) - matrix @ x) <= grant


@pytest.mark.parametrize("kind", KINDS)
def test_a_gram_matrix_is_that_of_the_norm_by_whatever_is_known(
    kind: str, xp: ModuleType, rng: np.random.Generator
) -> None:
    weight, matrix = make(kind, N, rng, xp)
    x = rng.standard_normal((2, N, 5))
    found = [weight.gram(xp.asarray(x))]
    if isinstance(weight, LowRankPlusIdentity):
        projection = xp.matrix_transpose(weight.basis) @ xp.asarray(x)
        found.append(weight.gram(xp.asarray(x), projection))
    exact = np.swapaxes(x, 1, 2) @ matrix @ x
    grant = tolerance("float64", N) * np.linalg.norm(exact)
    assert all(np.linalg.norm(to_numpy(each) - exact) <= grant for each in found)


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_weights_act_as_each_one(
    kind: str, xp: ModuleType, rng: np.random.Generator
) -> None:
    made = [make(kind, N, rng, xp) for _ in range(3)]
    stacked = stack_weights([weight for weight, _ in made])
    x = rng.standard_normal((3, N, 4))
    image, root = to_numpy(stacked.apply(xp.asarray(x))), to_numpy(stacked.root(xp.asarray(x)))
    traces = np.broadcast_to(to_numpy(xp.asarray(stacked.trace)), (3,))
    for i, (weight, matrix) in enumerate(made):
        grant = tolerance("float64", N) * np.linalg.norm(matrix, 2) * np.linalg.norm(x[i])
        assert np.linalg.norm(image[i] - matrix @ x[i]) <= grant
        assert np.linalg.norm(root[i] - to_numpy(weight.root(xp.asarray(x[i])))) <= grant
        assert traces[i] == pytest.approx(np.trace(matrix))


def test_bases_of_different_widths_stack(rng: np.random.Generator) -> None:
    weights = [
        LowRankPlusIdentity(np.linalg.qr(rng.standard_normal((N, q)))[0], np.ones(q), 0.5)
        for q in (2, 5)
    ]
    stacked, x = stack_weights(weights), rng.standard_normal((2, N, 3))
    for i, weight in enumerate(weights):
        np.testing.assert_allclose(
            stacked.apply(x)[i], weight.apply(x[i]), atol=tolerance("float64", N)
        )
        assert stacked.trace[i] == pytest.approx(float(weight.trace))


def test_weights_that_cannot_be_weights_are_refused() -> None:
    with pytest.raises(PrecisionError, match=r"-0\.5; a weight must be positive semidefinite"):
        LowRankPlusIdentity(np.eye(2), np.array([1.0, -0.5]), 0.0)
    with pytest.raises(PrecisionError, match=r"-1; a weight must be positive semidefinite"):
        LowRankPlusIdentity(np.eye(2), np.ones(2), -1.0)
    with pytest.raises(PrecisionError, match="not finite"):
        LowRankPlusIdentity(np.array([[np.nan]]), np.ones(1), 0.0)
    with pytest.raises(ShapeError, match=r"\(4, 2\).*\(3,\)"):
        LowRankPlusIdentity(np.ones((4, 2)), np.ones(3), 0.0)
    with pytest.raises(ShapeError, match=r"Identity, LowRankPlusIdentity"):
        stack_weights([Identity(2), weight_of(np.eye(2))])
    with pytest.raises(ShapeError, match=r"3 \(output\) and 4 \(input\).*4×3"):
        NormWeights(Identity(3), Identity(4)).check((4, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_weighted_error_is_the_transformed_frobenius_error(
    kind: str, xp: ModuleType, rng: np.random.Generator
) -> None:
    (output, g), (into, c) = make(kind, N, rng, xp), make(kind, 2 * N, rng, xp)
    weights = NormWeights(output, into)
    b, a, b2, a2 = (rng.standard_normal(size) for size in ((N, 3), (3, 2 * N), (N, 2), (2, 2 * N)))
    target, other = LowRank(xp.asarray(b), xp.asarray(a)), LowRank(xp.asarray(b2), xp.asarray(a2))
    expected = np.sqrt(np.trace((b @ a - b2 @ a2).T @ g @ (b @ a - b2 @ a2) @ c))
    assert weighted_residual_norm(target, other, weights) == pytest.approx(expected, rel=1e-12)
    assert weighted_norm(target, weights) == pytest.approx(
        np.sqrt(np.trace((b @ a).T @ g @ b @ a @ c)), rel=1e-12
    )


def test_weighted_error_resolves_far_below_the_root_of_the_roundoff(
    rng: np.random.Generator,
) -> None:
    b, a = rng.standard_normal((40, 4)), rng.standard_normal((4, 30))
    weights = NormWeights(make("low rank", 40, rng, np)[0], make("all eigenpairs", 30, rng, np)[0])
    target = LowRank(b, a)
    mixed = rng.standard_normal((4, 4))
    same = LowRank(b @ mixed, np.linalg.solve(mixed, a))
    assert weighted_residual_norm(target, same, weights) <= 1e-12 * weighted_norm(target, weights)


@pytest.mark.parametrize("kind", KINDS)
def test_weighted_truncation_is_the_transformed_truncated_svd(
    kind: str, xp: ModuleType, rng: np.random.Generator
) -> None:
    (output, g), (into, c) = make(kind, N, rng, xp), make(kind, 2 * N, rng, xp)
    weights = NormWeights(output, into)
    b, a = rng.standard_normal((N, 5)), rng.standard_normal((5, 2 * N))
    target = LowRank(xp.asarray(b), xp.asarray(a))
    singular = np.sqrt(np.maximum(np.linalg.eigvals(g @ b @ a @ c @ (b @ a).T).real, 0))
    singular = np.sort(singular)[::-1][:5]
    u, sigma, vh = weighted_svd(target, weights)
    np.testing.assert_allclose(to_numpy(sigma)[:5], singular, rtol=1e-7)  # the oracle squares
    np.testing.assert_allclose(to_numpy(u).T @ g @ to_numpy(u), np.eye(5), atol=1e-10)
    np.testing.assert_allclose(to_numpy(vh) @ c @ to_numpy(vh).T, np.eye(5), atol=1e-10)
    for rank in (1, 3):
        error = weighted_residual_norm(target, weighted_truncation(target, weights, rank), weights)
        assert error == pytest.approx(np.linalg.norm(singular[rank:]), rel=1e-9)


def test_singular_weights_do_no_harm(rng: np.random.Generator) -> None:
    g, c = semidefinite(rng, 10, 2), semidefinite(rng, 9, 4)
    b, a = rng.standard_normal((10, 5)), rng.standard_normal((5, 9))
    target, weights = LowRank(b, a), NormWeights(weight_of(g), weight_of(c))
    two = weighted_truncation(target, weights, 2)
    assert np.all(np.isfinite(two.left))
    assert np.all(np.isfinite(two.right))
    assert weighted_residual_norm(target, two, weights) <= 1e-7 * weighted_norm(target, weights)


@pytest.mark.parametrize("size", [1.0, 1e-200, 1e150])
@pytest.mark.parametrize("angle", [1.0, 1e-2, 1e-4, 1e-8, 0.0])
def test_a_gauge_of_nearly_parallel_columns_has_twelve_digits(angle: float, size: float) -> None:
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((40, 40)))[0]
    left, right = rotation[:, :2] @ np.array([[1.0, 1.0], [0.0, angle]]) * size, rotation[:2, :30]
    columns, sigma, rows = weighted_gauge(left, right, NormWeights.frobenius((40, 30)))
    exact = np.linalg.svd(left / size @ right, compute_uv=False)[:2]
    assert sigma / size == pytest.approx(exact, rel=1e-11, abs=1e-15)
    assert (left @ columns * sigma) @ (rows @ right) / size == pytest.approx(
        left @ right / size, abs=1e-14
    )


def test_a_component_below_rounding_is_left_out() -> None:
    b, a = np.eye(10, 3) * [2.0, 1.0, 1e-20], np.eye(3, 9)
    columns, sigma, rows = weighted_gauge(b, a, NormWeights.frobenius((10, 9)))
    np.testing.assert_allclose(sigma, [2.0, 1.0, 0.0], rtol=1e-14)
    np.testing.assert_allclose((b @ columns * sigma) @ (rows @ a), b @ a, atol=1e-14)
    assert not columns[:, 2].any()
    assert not rows[2].any()
