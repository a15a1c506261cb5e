"""Joint least squares for separated products: brute force, monotone, no worse than its start."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from drawing import drawing
from hypothesis import given
from hypothesis import strategies as st
from oracles import weight_of, weighted_truncation
from scipy.optimize import least_squares

from lsrdecomp.arrays import to_numpy
from lsrdecomp.errors import PrecisionError, ShapeError
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.rearrange import kron
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.solvers.pair.factorwise import FactorwiseSVD
from lsrdecomp.solvers.pair.initialization import first_factor_fastest
from lsrdecomp.solvers.pair.joint_als import JointALS
from lsrdecomp.solvers.pair.problem import PairProblem
from lsrdecomp.solvers.pair.stacking import WeightedTargets
from lsrdecomp.solvers.solver import Status
from lsrdecomp.targets.target import LowRank
from lsrdecomp.targets.weighted import weighted_residual_norm
from lsrdecomp.targets.weights import Identity, LowRankPlusIdentity, NormWeights

TINY = ProductShape((3, 2), (2, 1), (2, 2))
SMALL = ProductShape((6, 4), (2, 2), (5, 4))
CUBE = ProductShape((3, 2, 2), (2, 2, 1), (2, 3, 2))


def low_rank(rng: np.random.Generator, shape: ProductShape, rank: int, xp: Any = np) -> LowRank:
    m, n = shape.matrix_shape
    decay = 0.7 ** np.arange(rank)
    return LowRank(
        xp.asarray(rng.standard_normal((m, rank)) * decay),
        xp.asarray(rng.standard_normal((rank, n))),
    )


def semidefinite(rng: np.random.Generator, n: int) -> np.ndarray:
    half = rng.standard_normal((n, n))
    return half @ np.diag(0.8 ** np.arange(n)) @ half.T / n


def norms(rng: np.random.Generator, shape: ProductShape, kind: str, xp: Any = np) -> NormWeights:
    sides = []
    for n in shape.matrix_shape:
        if kind == "low rank":
            basis = np.linalg.qr(rng.standard_normal((n, 3)))[0]
            sides.append(LowRankPlusIdentity(xp.asarray(basis), xp.asarray([5.0, 3.0, 2.0]), 0.2))
        else:
            sides.append(weight_of(semidefinite(rng, n), xp))
    return NormWeights(*sides)


def brute_force(
    target: LowRank, shape: ProductShape, ranks: tuple[int, int], g: np.ndarray, c: np.ndarray
) -> float:
    """Return the least error of local fits over all factors from a few random starts.

    Roots of the weights are formed.
    """
    matrix = target.to_matrix()
    roots = [np.linalg.cholesky(w).T for w in (g, c)]
    sides = [(shape.left, ranks[0]), (shape.right, ranks[1])]
    counts = [s * size for side, s in sides for size in side.sizes]

    def residual(x: np.ndarray) -> np.ndarray:
        parts = np.split(x, np.cumsum(counts)[:-1])
        formed = []
        for side, s in sides:
            factors = [parts.pop(0).reshape(s, *pair) for pair in side.factors]
            formed.append(sum(kron(*(f[k] for f in factors)) for k in range(s)))
        return (roots[0] @ (matrix - formed[0] @ formed[1]) @ roots[1].T).ravel()

    rng = np.random.default_rng(5)
    fits = [
        least_squares(residual, rng.standard_normal(sum(counts)), xtol=1e-10, ftol=1e-10)
        for _ in range(4)
    ]
    return min(float(np.linalg.norm(fit.fun)) for fit in fits)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_end_is_the_best_of_brute_force_fits(weighted: bool, rng: np.random.Generator) -> None:
    target = low_rank(rng, TINY, 3)
    g, c = (
        semidefinite(rng, n) + 0.1 * np.eye(n) if weighted else np.eye(n) for n in TINY.matrix_shape
    )
    weights = NormWeights(weight_of(g), weight_of(c))
    found = JointALS(sweeps=2000, tolerance=1e-12).solve(
        target, TINY, (2, 2), weights=weights if weighted else None
    )
    best = brute_force(target, TINY, (2, 2), g, c)
    assert found.error == pytest.approx(best, rel=1e-4)
    assert weighted_residual_norm(target, found.product, weights) == pytest.approx(
        found.error, rel=1e-10
    )


@pytest.mark.parametrize("kind", ["frobenius", "all eigenpairs", "low rank"])
def test_monotone_measured_and_equal_on_every_library(
    kind: str, xp: ModuleType, rng: np.random.Generator
) -> None:
    # The other libraries on the cheaper one.
    shape = CUBE if xp.__name__.endswith("numpy") else SMALL
    target = low_rank(rng, shape, 5, xp)
    weights = None if kind == "frobenius" else norms(rng, shape, kind, xp)
    solution = JointALS(sweeps=6, tolerance=0.0).solve(target, shape, (3, 4), weights=weights)
    steering = [solution.start_error, *(sweep.relative_error for sweep in solution.sweeps)]
    assert len(solution.sweeps) == 6
    assert np.all(np.diff(steering) <= 1e-12)
    assert solution.relative_error < solution.start_error
    assert solution.relative_error == pytest.approx(steering[-1], rel=1e-9)
    measure = weights or NormWeights.frobenius(shape.matrix_shape)
    assert weighted_residual_norm(target, solution.product, measure) == pytest.approx(
        solution.error, rel=1e-10
    )
    assert solution.product.separation_ranks == (3, 4)
    assert solution.product.product_shape == shape

    if shape is CUBE:
        return
    twin = _on_numpy(target, weights)
    reference = JointALS(sweeps=6, tolerance=0.0).solve(twin[0], shape, (3, 4), weights=twin[1])
    assert solution.relative_error == pytest.approx(reference.relative_error, rel=1e-9)


def test_components_run_first_factor_fastest_inner_factor(rng: np.random.Generator) -> None:
    """Turn the gauge: the product stays, component k = a1 + r1 a2 + r1 r2 a3 keeps its place."""
    left, right = rng.standard_normal((1, 7, 12)), rng.standard_normal((1, 12, 5))
    inner = (3, 2, 2)
    turned = (
        first_factor_fastest(left, inner),
        first_factor_fastest(right.transpose(0, 2, 1), inner),
    )
    np.testing.assert_allclose(turned[0] @ turned[1].transpose(0, 2, 1), left @ right, atol=1e-13)
    for place, (a1, a2, a3) in enumerate(np.ndindex(inner)):
        assert np.array_equal(turned[0][:, :, place], left[:, :, a1 + 3 * a2 + 6 * a3])


def _on_numpy(target: LowRank, weights: NormWeights | None) -> tuple[LowRank, NormWeights | None]:
    def moved(value: Any) -> Any:
        return LowRankPlusIdentity(to_numpy(value.basis), to_numpy(value.values), float(value.rest))

    pair = LowRank(to_numpy(target.left), to_numpy(target.right))
    return pair, None if weights is None else NormWeights(
        moved(weights.output), moved(weights.input)
    )


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("all eigenpairs", SMALL), ("low rank", CUBE)],
    ids=["all eigenpairs-two factors", "low rank-three factors"],
)
def test_formed_blocks_and_conjugate_gradients_end_at_the_same_minimum(
    kind: str, shape: ProductShape, rng: np.random.Generator
) -> None:
    target, weights = low_rank(rng, shape, 5), norms(rng, shape, kind)
    formed = PairProblem.of(WeightedTargets.of([target], [weights]), shape, cg_steps=400)
    never_formed = [replace(side, max_formed_unknowns=0) for side in formed.sides]
    stepped = replace(formed, sides=tuple(never_formed))
    errors = []
    for problem in (formed, stepped):
        state = problem.state(problem.starts((2, 3), 1)[0])
        for _ in range(2):
            state = problem.sweep(state)
        errors.append(problem.errors(state))
    assert errors[1] == pytest.approx(errors[0], rel=1e-6)
    few = JointALS(sweeps=6, cg_steps=3, tolerance=0.0).solve(
        target, shape, (2, 3), weights=weights
    )
    assert np.all(np.diff([sweep.relative_error for sweep in few.sweeps]) <= 1e-12)


def test_weighted_is_frobenius_of_the_transformed_problem_where_the_weights_are_kronecker(
    rng: np.random.Generator,
) -> None:
    """Weights that split like the shape map products to products, so the optima agree."""
    target = low_rank(rng, SMALL, 5)
    parts = [
        [semidefinite(rng, q) + 0.05 * np.eye(q) for q in sizes]
        for sizes in (SMALL.out, SMALL.into)
    ]
    weights = NormWeights(*(weight_of(np.kron(*side)) for side in parts))
    transformed = LowRank(weights.output.root(target.left), weights.input.root(target.right.T).T)
    many = JointALS(sweeps=40, tolerance=0.0, trials=0)  # trials may end in another local optimum
    weighted = many.solve(target, SMALL, (3, 3), weights=weights)
    # Starts as the other one does.
    identity = NormWeights(*(weight_of(np.eye(size)) for size in SMALL.matrix_shape))
    plain = many.solve(transformed, SMALL, (3, 3), weights=identity)
    assert weighted.norm == pytest.approx(plain.norm, rel=1e-12)
    assert weighted.relative_error == pytest.approx(plain.relative_error, rel=1e-3)


@drawing(0.6)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.integers(0, 1000))
def test_never_worse_than_the_start_on_any_layer_of_a_batch(
    rank: int, s: int, t: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    targets = [low_rank(rng, SMALL, rank) for _ in range(2)] + [
        LowRank(np.zeros((24, 1)), np.zeros((1, 20)))
    ]
    weights = [norms(rng, SMALL, "low rank") for _ in targets]
    for chosen in (None, weights):
        solutions = JointALS(sweeps=3).solve_batch(targets, SMALL, (s, t), weights=chosen)
        for solution in solutions:
            assert solution.relative_error <= solution.start_error * (1 + 1e-12) + 1e-14
            steering = [sweep.relative_error for sweep in solution.sweeps]
            # Inner products resolve some √μ near an exact fit.
            assert np.all(np.diff(steering) <= 1e-7)
        assert solutions[-1].error == 0.0


def test_sides_that_cancel_neither_raise_the_error_nor_hide_it() -> None:
    """A rank of one leaves three of four inner directions free.

    Along these the out side grew to 1e5 times the target: the third sweep then rose by 3e-3, all of
    it rounding of inner products.
    """
    rng = np.random.default_rng(1)
    targets = [low_rank(rng, SMALL, 1) for _ in range(2)]
    weights = [norms(rng, SMALL, "low rank") for _ in targets]
    for solution, target, weight in zip(
        JointALS(sweeps=12, tolerance=0.0).solve_batch(targets, SMALL, (3, 2), weights=weights),
        targets,
        weights,
        strict=True,
    ):
        assert np.all(np.diff([sweep.relative_error for sweep in solution.sweeps]) <= 1e-7)
        measured = weighted_residual_norm(target, solution.product, weight)
        assert solution.error == pytest.approx(measured, rel=1e-9)


def test_a_batch_finds_what_each_target_finds_alone(rng: np.random.Generator) -> None:
    targets = [low_rank(rng, SMALL, rank) for rank in (3, 5, 4)]
    weights = [norms(rng, SMALL, "low rank") for _ in targets]
    solver = JointALS(sweeps=4, tolerance=0.0)
    together = solver.solve_batch(targets, SMALL, (2, 3), weights=weights)
    for target, weight, found in zip(targets, weights, together, strict=True):
        alone = solver.solve(target, SMALL, (2, 3), weights=weight)
        assert found.relative_error == pytest.approx(alone.relative_error, rel=1e-9)


def test_enough_terms_reproduce_the_target(rng: np.random.Generator) -> None:
    target = low_rank(rng, SMALL, 4)
    assert JointALS().solve(target, SMALL, SMALL.left.max_separation_rank).relative_error <= 1e-14


@pytest.mark.parametrize("kind", ["frobenius", "low rank"])
def test_plain_low_rank_shape_reaches_the_truncated_svd(
    kind: str, rng: np.random.Generator
) -> None:
    target = low_rank(rng, SMALL, 5)
    weights = (
        NormWeights.frobenius(target.shape) if kind == "frobenius" else norms(rng, SMALL, kind)
    )
    shape = ProductShape((target.shape[0], 1), (2, 1), (target.shape[1], 1))
    found = JointALS().solve(target, shape, 1, weights=weights)
    best = weighted_residual_norm(target, weighted_truncation(target, weights, 2), weights)
    assert found.error == pytest.approx(best, rel=1e-10)


def test_the_gauge_of_the_checkpoint_does_not_matter(rng: np.random.Generator) -> None:
    target, mixed = low_rank(rng, SMALL, 4), rng.standard_normal((4, 4))
    other = LowRank(target.left @ mixed, np.linalg.solve(mixed, target.right))
    errors = [
        JointALS(sweeps=5, tolerance=0.0).solve(pair, SMALL, 3).relative_error
        for pair in (target, other)
    ]
    assert errors[0] == pytest.approx(errors[1], rel=1e-8)


def test_a_given_start_is_improved_and_kept_if_it_is_already_best(rng: np.random.Generator) -> None:
    target = low_rank(rng, SMALL, 5)
    first = JointALS(sweeps=3, tolerance=0.0).solve(target, SMALL, (3, 3))
    again = JointALS(sweeps=3, tolerance=0.0).solve(target, SMALL, (3, 3), start=first.product)
    assert again.start_error == pytest.approx(first.relative_error, rel=1e-10)
    assert again.relative_error < first.relative_error
    kept = JointALS(sweeps=0).solve(target, SMALL, (3, 3), start=first.product)
    assert kept.relative_error == pytest.approx(first.relative_error, rel=1e-10)


def test_callbacks_and_status_say_how_it_went(rng: np.random.Generator) -> None:
    target, seen = low_rank(rng, SMALL, 5), []
    short = JointALS(sweeps=2, tolerance=0.0).solve(target, SMALL, 2, on_sweep=seen.append)
    assert [sweep.index for sweep in seen] == [1, 2]
    assert short.status is Status.sweep_limit
    assert (
        JointALS(sweeps=500, tolerance=1e-4).solve(target, SMALL, 2).status is Status.rank_reached
    )


def test_canonical_form_is_exact_and_its_sides_have_condition_one(rng: np.random.Generator) -> None:
    target = low_rank(rng, SMALL, 5)
    found = JointALS(sweeps=10).solve(target, SMALL, (4, 4))
    canonical = found.product.canonical()
    assert canonical.left.condition == pytest.approx(1.0, abs=1e-6)
    assert canonical.right.condition == pytest.approx(1.0, abs=1e-6)
    assert target.residual_norm(canonical) == pytest.approx(found.error, rel=1e-10)


def test_contradictions_are_named(rng: np.random.Generator) -> None:
    target = low_rank(rng, SMALL, 3)
    with pytest.raises(ShapeError, match=r"target 0 is 24×20, but .* is 6×4"):
        JointALS().solve(target, TINY, 2)
    with pytest.raises(ShapeError, match="two or more"):
        JointALS().solve(target, ProductShape((24,), (3,), (20,)), 1)
    with pytest.raises(ShapeError, match="must be positive, got 0 and 2"):
        JointALS().solve(target, SMALL, (0, 2))
    with pytest.raises(ShapeError, match="1 norms for 2 targets"):
        JointALS().solve_batch(
            [target, target], SMALL, 2, weights=[NormWeights.frobenius(target.shape)]
        )
    with pytest.raises(ShapeError, match="24 \\(output\\) and 24 \\(input\\)"):
        JointALS().solve(target, SMALL, 2, weights=NormWeights(Identity(24), Identity(24)))
    with pytest.raises(PrecisionError, match="complex"):
        JointALS().solve(LowRank(target.left * 1j, target.right), SMALL, 2)
    wide = SeparatedProduct(
        *(
            SeparatedMatrix.from_factors([np.ones((3, *pair)) for pair in side.factors])
            for side in (SMALL.left, SMALL.right)
        )
    )
    with pytest.raises(ShapeError, match=r"\(3, 3\) terms for a solve with \(2, 2\)"):
        JointALS().solve(target, SMALL, 2, start=wide)


def test_single_precision_comes_to_the_same_place(rng: np.random.Generator, xp: ModuleType) -> None:
    shape = ProductShape((16, 8), (2, 2), (12, 10))
    targets = [low_rank(rng, shape, 4, xp) for _ in range(2)]
    exact, quick = (
        JointALS(tolerance=1e-6, single=single).solve_batch(targets, shape, (4, 4))
        for single in (False, True)
    )
    for target, one, other in zip(targets, exact, quick, strict=True):
        assert other.relative_error == pytest.approx(one.relative_error, rel=1e-3)
        assert other.relative_error < other.start_error
        assert other.error == pytest.approx(target.residual_norm(other.product), rel=1e-12)
        assert all(factor.dtype == xp.float64 for factor in other.product.left.factors)


def test_sweeps_in_single_precision_count_too(rng: np.random.Generator) -> None:
    target = low_rank(rng, SMALL, 4)
    ends = set()
    for most in range(1, 16):
        found = JointALS(single=True, tolerance=1e-2, sweeps=most).solve(target, SMALL, 1)
        assert len(found.sweeps) <= most
        ends.add(found.status)
    assert ends == {Status.sweep_limit, Status.rank_reached}


@pytest.mark.parametrize("scale", [1e-200, 1e-20, 1.0, 1e20, 1e150])
def test_single_precision_gives_way_where_it_sees_too_little(
    scale: float, rng: np.random.Generator
) -> None:
    target = low_rank(rng, SMALL, 4)
    target = LowRank(scale * target.left, target.right)
    near = JointALS(single=True).solve(target, SMALL, SMALL.left.max_separation_rank)
    assert near.relative_error <= 1e-14
    zero = JointALS(single=True).solve(LowRank(0.0 * target.left, target.right), SMALL, 2)
    assert zero.relative_error == 0.0
    far, exact = (
        JointALS(single=single, tolerance=1e-6).solve(target, SMALL, 2) for single in (True, False)
    )
    assert far.relative_error == pytest.approx(exact.relative_error, rel=1e-3)


@drawing(0.6)
@given(seed=st.integers(0, 10**6), rank=st.integers(2, 6), terms=st.integers(1, 5))
def test_never_above_either_order_of_the_singular_gauge(seed: int, rank: int, terms: int) -> None:
    target = low_rank(np.random.default_rng(seed), SMALL, rank)
    found = JointALS(sweeps=1, tolerance=0.0).solve(target, SMALL, terms)
    plain = FactorwiseSVD().truncations(target, SMALL).truncate(terms)
    assert found.error <= target.residual_norm(plain) * (1.0 + 1e-9)
