"""A batch of matrices solved together: each as good as alone, and the odd ones out are not lost."""

import numpy as np
import pytest
from oracles import assert_close

from lsrdecomp import KroneckerShape, SeparatedMatrix
from lsrdecomp.arrays import to_numpy
from lsrdecomp.errors import PrecisionError, ShapeError
from lsrdecomp.kronecker.rearrange import inverse_rearrange
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.solver import ErrorKind, Event, Solution
from lsrdecomp.solvers.svd.block_krylov import Krylov
from lsrdecomp.solvers.svd.dense import SVD
from lsrdecomp.targets.target import Dense

SHAPE = KroneckerShape(((12, 10), (11, 13)))  # R(M) is 120 × 143
K = np.arange(1, 121)


def with_spectrum(sigma, rng):
    u, v = (np.linalg.qr(rng.standard_normal((n, 120)))[0] for n in (120, 143))
    return inverse_rearrange((u * sigma) @ v.T, SHAPE)


def a_batch(rng):
    spectra = [1.0 / K, np.exp(-K / 4.0), np.exp(-K / 30.0), K**-0.5, np.where(K <= 20, 1.0, 0.1)]
    return np.stack(
        [with_spectrum(sigma, rng) for sigma in spectra] + [rng.standard_normal(SHAPE.matrix_shape)]
    )


def in_numpy(matrix):
    return SeparatedMatrix(to_numpy(matrix.weights), tuple(to_numpy(f) for f in matrix.factors))


def check(batch, solutions, rank, tolerance):
    assert len(solutions) == len(batch)
    for matrix, solution in zip(batch, solutions, strict=True):
        target = Dense(matrix)
        best = SVD().solve(target, SHAPE, rank=rank).approximation
        allowed = target.residual_norm(best) * (1 + tolerance) + 1e-14 * target.norm
        assert target.residual_norm(solution.approximation) <= allowed


@pytest.mark.parametrize("rank", [1, 6])
@pytest.mark.parametrize("kind", ["real", "complex"])
def test_each_is_as_good_as_alone(rank, kind, rng):
    batch = a_batch(rng)
    if kind == "complex":
        batch = batch * np.exp(1j * rng.random(batch.shape[1:]))
    solutions = Krylov(tolerance=1e-4).solve_batch(batch, SHAPE, rank=rank)
    check(batch, solutions, rank, 1e-4)
    for solution in solutions:
        assert solution.approximation.condition == pytest.approx(1.0, rel=1e-10)
        assert solution.optimality_gap <= 1e-4


def test_matrices_that_need_more_care_are_solved_alone(rng):
    easy = with_spectrum(np.exp(-K / 30.0), rng)
    exact = with_spectrum(np.where(K <= 4, 1.0, 0.0), rng)
    tiny_error = with_spectrum(10.0**-K, rng)
    batch = np.stack([easy, np.zeros_like(easy), exact, 1e-200 * easy, 1e200 * easy, tiny_error])
    solutions = Krylov().solve_batch(batch, SHAPE, rank=6)
    check(batch, solutions, 6, 1e-3)
    assert solutions[1].approximation.separation_rank == 0


def test_a_flat_remainder_needs_no_full_svd(rng):
    """No space holds much of noise: its gap is unknown, so each matrix went through an SVD."""
    few = np.where(K <= 4, 1.0 / K, 0.0)
    batch = np.stack([with_spectrum(np.maximum(few, level), rng) for level in (1e-13, 1e-8, 1e-4)])
    solutions = Krylov().solve_batch(batch, SHAPE, rank=4)
    check(batch, solutions, 4, 1e-6)
    for solution in solutions:
        assert not any(sweep.event is Event.hand_over for sweep in solution.sweeps)
        assert solution.gap_kind is ErrorKind.bounded
        assert solution.optimality_gap <= 1e-2


def test_single_precision_stays_single_in_common_steps(rng):
    batch = a_batch(rng).astype(np.float32)
    solutions = Krylov().solve_batch(batch, SHAPE, rank=3)
    check(batch, solutions, 3, 1e-3)
    dtypes = [solution.approximation.dtype for solution in solutions]
    assert dtypes.count(np.float32) >= 3  # those that are solved alone are computed in double


def test_every_library_agrees(xp, rng):
    batch = a_batch(rng)
    theirs = Krylov().solve_batch(batch, SHAPE, rank=3)
    ours = Krylov().solve_batch(xp.asarray(batch), SHAPE, rank=3)
    # The others have repeated or close singular values, and so many best answers.
    for i in (
        0,
        1,
        2,
    ):
        ours_formed = ours[i].approximation.to_matrix()
        assert_close(ours_formed, theirs[i].approximation.to_matrix(), size=1000, dtype="float32")
    check(batch, [Solution(in_numpy(o.approximation), o.status) for o in ours], 3, 1e-4)


def test_chunks_do_not_change_the_answer(rng):
    batch = a_batch(rng)
    together = Krylov().solve_batch(list(batch), SHAPE, rank=3)
    one_by_one = [Krylov().solve_batch([matrix], SHAPE, rank=3)[0] for matrix in batch]
    for a, b in zip(together, one_by_one, strict=True):
        assert a.approximation.norm == pytest.approx(b.approximation.norm, rel=1e-4)
    check(batch, one_by_one, 3, 1e-4)


def test_a_rank_near_the_size_of_the_rearrangement(rng):
    batch = rng.standard_normal((3, 6, 8))
    shape = KroneckerShape(((3, 2), (2, 4)))
    for matrix, solution in zip(batch, Krylov().solve_batch(batch, shape, rank=9), strict=True):
        assert Dense(matrix).residual_norm(solution.approximation) <= 1e-13


def test_small_matrices_go_through_one_svd(xp, rng):
    shape = KroneckerShape(((3, 2), (4, 5)))
    few = np.zeros((2, 3, 4, 2, 5))
    few[1] = np.einsum(
        "ab,cd->abcd", rng.standard_normal((3, 2)), rng.standard_normal((4, 5))
    ).transpose(0, 2, 1, 3)
    batch = np.concatenate([rng.standard_normal((2, 12, 10)), few.reshape(2, 12, 10)])
    found = Krylov().solve_batch(xp.asarray(batch), shape, rank=3)
    assert [one.approximation.separation_rank for one in found] == [3, 3, 0, 1]
    for matrix, one in zip(batch, found, strict=True):
        best = SVD().solve(Dense(matrix), shape, rank=3).approximation
        assert_close(
            to_numpy(one.approximation.to_matrix()), best.to_matrix(), size=100, dtype="float64"
        )
        assert one.gap_kind is ErrorKind.bounded
        target = Dense(matrix)
        error = target.residual_norm(in_numpy(one.approximation)) / (target.norm or 1.0)
        assert one.relative_error == pytest.approx(error, rel=1e-6, abs=1e-15)
    batch[1, 2, 3] = np.nan
    with pytest.raises(PrecisionError, match="1 of 480 entries are not finite"):
        Krylov().solve_batch(xp.asarray(batch), shape, rank=3)


def test_what_a_common_space_leaves_open_takes_its_gram_matrix(rng):
    """Two blocks do not hold the first of values that hardly fall, and no more were allowed."""
    slow = [with_spectrum(K**-0.1, rng) for _ in range(3)]
    batch = np.stack([with_spectrum(1.0 / K, rng), *slow])
    solutions = Krylov(max_steps=2).solve_batch(batch, SHAPE, rank=1)
    check(batch, solutions, 1, 1e-3)
    assert [one.gap_kind is ErrorKind.bounded for one in solutions] == [True] * 4


@pytest.mark.parametrize(("side", "rank", "height"), [(16, 16, 2.0), (18, 16, 2.0), (22, 16, 1.2)])
def test_values_that_stand_out_do_not_hide_a_slow_rest(side, rank, height, rng):
    """They fell in two steps, and the rest was taken to fall as fast: 3.8e-3 for 8.3e-4 stated."""
    shape = KroneckerShape(((side, side), (side, side)))
    n = side**2
    sigma = np.concatenate((np.full(rank // 2, height), np.linspace(1.0, 0.01, n - rank // 2)))
    u, v = (np.linalg.qr(rng.standard_normal((n, n)))[0] for _ in range(2))
    matrix = inverse_rearrange((u * sigma) @ v.T, shape)
    solution = Krylov(tolerance=1e-3).solve_batch([matrix], shape, rank=rank)[0]
    error = Dense(matrix).residual_norm(solution.approximation)
    excess = error / np.linalg.norm(sigma[rank:]) - 1.0
    assert excess <= 1.001e-3
    assert solution.optimality_gap >= excess / 3.0


@pytest.mark.parametrize("width", [17, 20, 23])
def test_a_cluster_wider_than_a_block_does_not_pass_for_what_is_largest(width):
    """Three values of 1 over a cluster of .99: two blocks of eight hold neither, and looked done.

    1.3e-3 above the optimum where 8.5e-4 was stated, while two blocks were enough for any spectrum.
    """
    rng = np.random.default_rng(2)
    shape = KroneckerShape(((14, 14), (14, 14)))
    k = np.arange(196)
    sigma = np.where(k < 3, 1.0, np.where(k < 3 + width, 0.99, 0.01))
    u, v = (np.linalg.qr(rng.standard_normal((196, 196)))[0] for _ in range(2))
    matrix = inverse_rearrange((u * sigma) @ v.T, shape)
    solution = Krylov(tolerance=1e-3).solve_batch([matrix], shape, rank=4)[0]
    excess = Dense(matrix).residual_norm(solution.approximation) / np.linalg.norm(sigma[4:]) - 1.0
    assert excess <= 1e-3
    assert solution.optimality_gap >= excess / 3.0


@pytest.mark.parametrize("kind", [np.float64, np.float32])
@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("name", ["1/k", "slow", "exponential", "noise"])
def test_few_terms_are_within_what_is_stated(name, rank, kind, rng):
    """Of a matrix with twice as many columns as rows, so that both sides take part."""
    shape = KroneckerShape(((14, 13), (20, 18)))  # R(M) is 182 × 360
    k = np.arange(1.0, 183.0)
    u = np.linalg.qr(rng.standard_normal((182, 182)))[0]
    v = np.linalg.qr(rng.standard_normal((360, 182)))[0]
    spectra = {"1/k": 1.0 / k, "slow": k**-0.3, "exponential": np.exp(-k / 20.0)}
    rearranged = (u * spectra.get(name, 1.0)) @ v.T
    if name == "noise":
        rearranged = rng.standard_normal((182, 360))
    matrix = inverse_rearrange(rearranged, shape).astype(kind)
    solution = Krylov(tolerance=1e-3).solve_batch([matrix], shape, rank=rank)[0]
    assert solution.approximation.dtype in (kind, np.float64)  # the dense way is in double
    target = Dense(matrix.astype(float))
    error = target.residual_norm(solution.approximation)
    optimum = target.residual_norm(SVD().solve(target, shape, rank=rank).approximation)
    excess = error / optimum - 1.0
    assert -1e-12 <= excess <= 1e-3
    assert solution.optimality_gap <= 1e-3
    assert solution.optimality_gap >= excess / (1.0 if _is_bounded(solution) else 3.0) - 1e-7
    if solution.relative_error is not None:
        assert solution.relative_error * target.norm == pytest.approx(error, rel=1e-11)


def _is_bounded(solution):
    return solution.gap_kind is ErrorKind.bounded


def test_the_error_of_a_falling_spectrum_is_bounded_not_estimated(rng):
    """The first of 1/k holds more than all others together, which makes τ known."""
    matrix = with_spectrum(1.0 / K, rng)
    solution = Krylov(tolerance=1e-3).solve_batch([matrix], SHAPE, rank=1)[0]
    assert solution.gap_kind is ErrorKind.bounded
    assert solution.relative_error is not None


def test_a_space_that_has_become_invariant_holds_no_energy_twice(rng):
    """Of two different values nothing new is left after two steps, and rounding was taken in."""
    sigma = np.where(K <= 12, 1.0, 0.5)
    steps = []
    solver = Krylov(tolerance=1e-3)
    solver.solve_batch([with_spectrum(sigma, rng)], SHAPE, rank=12, on_sweep=steps.append)
    optimum = np.linalg.norm(sigma[12:]) / np.linalg.norm(sigma)
    assert min(step.relative_error for step in steps) >= optimum * (1.0 - 1e-6)


def test_bad_batches_are_refused(rng):
    with pytest.raises(ShapeError, match=r"matrices of one size, got \[\(2, 2\), \(2, 3\)\]"):
        Krylov().solve_batch([np.ones((2, 2)), np.ones((2, 3))], SHAPE, rank=1)
    with pytest.raises(ShapeError, match=r"expected shape \(L, m, n\)"):
        Krylov().solve_batch(np.ones((2, 2)), SHAPE, rank=1)
    with pytest.raises(ShapeError, match="rows, but the matrix has 133"):
        Krylov().solve_batch(np.ones((2, 133, 130)), SHAPE, rank=1)
    with pytest.raises(ShapeError, match="two factors"):
        Krylov().solve_batch(np.ones((2, 8, 8)), KroneckerShape.balanced((8, 8), 3), rank=1)
    bad = a_batch(rng)
    bad[2, 3, 4] = np.nan
    with pytest.raises(PrecisionError, match="1 of 102960 entries"):
        Krylov().solve_batch(bad, SHAPE, rank=1)


@pytest.mark.parametrize("kind", [np.float64, np.float32])
@pytest.mark.parametrize("base", [0.3, 0.6])
def test_fast_spectra_are_near_the_optimum_and_bounded(base, kind, rng):
    batch = np.stack([with_spectrum(base ** (K - 1.0), rng) for _ in range(3)]).astype(kind)
    for rank in (6, 16):
        solutions = Krylov().solve_batch(batch, SHAPE, rank=rank)
        for matrix, solution in zip(batch, solutions, strict=True):
            target = Dense(matrix)
            error = target.residual_norm(solution.approximation)
            best = target.residual_norm(SVD().solve(target, SHAPE, rank=rank).approximation)
            rounding = 64 * unit_roundoff(kind) * target.norm
            assert error <= best * (1 + 1e-3) + rounding
            if solution.gap_kind is ErrorKind.bounded and solution.optimality_gap is not None:
                assert error <= best * (1 + solution.optimality_gap) + rounding


def test_a_part_of_a_batch_does_not_write_into_the_answers_of_another(rng):
    batch = rng.standard_normal((60, 36, 36))  # more than are taken together
    shape = KroneckerShape(((6, 6), (6, 6)))
    by_parts = Krylov().solve_batch(batch, shape, rank=2)
    for matrix, part in zip(batch, by_parts, strict=True):
        (alone,) = Krylov().solve_batch([matrix], shape, rank=2)
        assert_close(part.approximation.to_matrix(), alone.approximation.to_matrix(), size=36)


EXACT = KroneckerShape(((8, 8), (8, 9)))
LARGE = KroneckerShape(((10, 11), (8, 14)))  # R(M) is 110 × 112


@pytest.mark.parametrize("remainder", [0.0, 1e-13, 1e-9])
@pytest.mark.parametrize("shape", [EXACT, LARGE], ids=["by powers", "by LAPACK"])
def test_exact_sums_of_a_stack_need_no_svd(shape, remainder, rng, monkeypatch):
    """Gram matrices do not resolve such errors, and all SVDs were computed after them."""
    p, q = shape.sizes
    weights = np.asarray([1.0, 0.5, 0.3, 0.2])
    stack = []
    for _ in range(3):
        left, right = (np.linalg.qr(rng.standard_normal((n, 4)))[0] for n in (p, q))
        noise = rng.standard_normal((p, q)) / np.sqrt(p * q)
        stack.append(inverse_rearrange((left * weights) @ right.T + remainder * noise, shape))
    monkeypatch.setattr("lsrdecomp.solvers.svd.dense._by_lapack", None)
    solutions = Krylov(tolerance=1e-3).solve_batch(stack, shape, rank=4)
    for matrix, solution in zip(stack, solutions, strict=True):
        error = Dense(matrix).residual_norm(solution.approximation)
        assert error <= 1.001 * remainder + 1e-14
        assert solution.relative_error * np.linalg.norm(matrix) == pytest.approx(error, abs=1e-14)
