"""decompose and the rearranged SVD: optimal, measured, and clear about what cannot be had."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close
from scipy.sparse import linalg as sparse_linalg

import lsrdecomp as lsr
from lsrdecomp import operators
from lsrdecomp.arrays import tail_norms
from lsrdecomp.errors import BudgetError, ConvergenceError, ConvergenceWarning
from lsrdecomp.kronecker.rearrange import inverse_rearrange, rearrange
from lsrdecomp.solvers.solver import Status
from lsrdecomp.solvers.svd.dense import SVD
from lsrdecomp.testing import kronecker_shapes, matrices, separated_matrices

TWO = kronecker_shapes(order=2)
FOUR = lsr.KroneckerShape(((4, 4), (4, 4)))


@given(TWO, st.data())
def test_truncation_error_is_the_tail_of_the_spectrum(shape, data):
    matrix = data.draw(matrices(shape.matrix_shape))
    sigma = (
        np.linalg.svd(rearrange(matrix, shape) / np.abs(matrix).max(), compute_uv=False)
        * np.abs(matrix).max()
    )
    for rank in {1, shape.max_separation_rank // 2 + 1, shape.max_separation_rank}:
        result = lsr.decompose(matrix, shape, rank=rank, solver=SVD())
        tail = (
            np.linalg.norm(sigma[rank:] / sigma[0])
            * sigma[0]
            / (np.linalg.norm(matrix / sigma[0]) * sigma[0])
        )
        assert result.relative_error == pytest.approx(tail, rel=1e-12, abs=1e-14)
        assert result.condition == pytest.approx(1.0, abs=1e-12)


@given(separated_matrices(shape=lsr.KroneckerShape(((4, 3), (2, 5))), max_rank=3))
def test_rearrangement_turns_separation_rank_into_rank(case):
    singular = np.linalg.svd(rearrange(case.to_matrix(), case.kronecker_shape), compute_uv=False)
    assert np.all(singular[case.separation_rank :] <= 1e-13 * np.sum(case.weights))


@given(TWO, st.data(), st.floats(1e-12, 2.0))
def test_the_fewest_terms_that_meet_a_tolerance_are_taken(shape, data, rtol):
    matrix = data.draw(matrices(shape.matrix_shape))
    result = lsr.decompose(matrix, shape, rtol=rtol, solver=SVD())
    assert result.status is Status.converged
    assert result.relative_error <= rtol * (1 + 1e-12)
    if result.separation_rank > 1:
        fewer = lsr.decompose(matrix, shape, rank=result.separation_rank - 1, solver=SVD())
        assert fewer.relative_error > rtol * (1 - 1e-12)


def test_too_few_terms_for_the_tolerance_is_said(rng):
    matrix = rng.standard_normal((12, 12))
    with pytest.warns(
        ConvergenceWarning, match=r"is 0\.\d+ where 0\.001 was asked for\. Every"
    ) as told:
        result = lsr.decompose(matrix, rank=2, rtol=1e-3)
    assert (result.status, result.separation_rank) == (Status.rank_exhausted, 2)
    assert [warning.filename for warning in told] == [__file__]
    with pytest.raises(ConvergenceError) as raised:
        lsr.decompose(matrix, rank=2, rtol=1e-3, throw=True)
    assert raised.value.record.status is Status.rank_exhausted


def test_a_stack_says_once_how_many_missed_the_tolerance(rng):
    stack = [np.eye(12), rng.standard_normal((12, 12)), rng.standard_normal((12, 12))]
    with pytest.warns(ConvergenceWarning, match="2 of 3 matrices missed .* matrix 1: ") as told:
        results = lsr.decompose_each(stack, rank=2, rtol=1e-3)
    assert [warning.filename for warning in told] == [__file__]
    assert [result.status.met for result in results] == [True, False, False]


def test_noise_in_three_factors_is_not_passed_off_as_an_approximation(rng):
    noise = rng.standard_normal((8, 8))
    words = r"terms of 2×2 ⊗ 2×2 ⊗ 2×2 keep the tolerance with .* where the matrix has 64: keep"
    shape = "2x2, 2x2, 2x2"
    with pytest.warns(ConvergenceWarning, match=words) as told:
        record = lsr.decompose(noise, shape, rtol=1e-6)
    assert record.status is Status.converged
    assert record.parameters > noise.size
    assert [warning.filename for warning in told] == [__file__]
    with pytest.raises(ConvergenceError, match=words):
        lsr.decompose(noise, shape, rtol=1e-6, throw=True)
    with pytest.warns(ConvergenceWarning, match="1 of 2 matrices missed .* matrix 1: .*" + words):
        lsr.decompose_each([np.eye(8), noise], shape, rtol=1e-6)
    # What the warning advises holds the matrix in as many numbers, and a scale.
    assert lsr.decompose(noise, "search", rtol=1e-6).parameters <= noise.size + 1


@pytest.mark.filterwarnings("error")
def test_a_goal_that_is_met_is_met_without_a_word(rng):
    matrix = rng.standard_normal((12, 12))
    lsr.decompose(matrix, rank=2)
    lsr.decompose(matrix, rtol=1e-3)
    lsr.decompose(matrix, budget=lsr.ErrorBudget(rtol=1e-3))
    lsr.decompose_each([matrix, matrix], rtol=1e-3)
    lsr.decompose(np.eye(8), "2x2, 2x2, 2x2", rtol=1e-3)
    lsr.decompose(matrix[:8, :8], "2x2, 2x2, 2x2", rank=7)


def test_appendix_b_is_wrong_about_rank_one_matrices(rng):
    """A rank-one matrix can need as many terms as its rearrangement has rows (ERRATUM)."""
    u, v = rng.standard_normal(16), rng.standard_normal(16)
    shape = lsr.KroneckerShape(((4, 4), (4, 4)))
    curve = lsr.error_curve(np.outer(u, v), shape)
    assert curve.rank_for(1e-12) == 16 == shape.max_separation_rank


def test_every_library_finds_the_same(xp, rng):
    matrix = rng.standard_normal((12, 20))
    shape = lsr.KroneckerShape(((3, 4), (4, 5)))
    ours = lsr.decompose(xp.asarray(matrix), shape, rank=4)
    theirs = lsr.decompose(matrix, shape, rank=4)
    assert_close(ours.approximation.to_matrix(), theirs.approximation.to_matrix(), size=64)
    assert type(ours.approximation.weights) is type(xp.asarray([1.0]))
    assert ours.relative_error == pytest.approx(theirs.relative_error, rel=1e-12)


@pytest.mark.parametrize("shape", [(7, 11), (1, 6), (6, 1), (1, 1), (2, 13)])
def test_primes_and_single_rows_work(shape, rng):
    matrix = rng.standard_normal(shape)
    result = lsr.decompose(matrix, rtol=1e-13)
    assert_close(result.approximation.to_matrix(), matrix, size=64)


@pytest.mark.parametrize("factors", [[(8, 8)], [(2, 2), (4, 4)], [(2, 2)] * 3])
def test_an_identity_is_one_term_for_any_number_of_factors(factors):
    """A matrix of rank 8: its rank says nothing of how many factors a term has."""
    result = lsr.decompose(np.eye(8), factors, rtol=1e-12)
    assert (result.separation_rank, result.approximation.order) == (1, len(factors))
    assert_close(result.approximation.to_matrix(), np.eye(8), size=8)


def test_zero_matrix_needs_no_terms():
    result = lsr.decompose(np.zeros((6, 6)), rtol=1e-3)
    assert (result.separation_rank, result.relative_error, result.status) == (
        0,
        0.0,
        Status.converged,
    )


def test_a_complex_matrix_without_terms_maps_to_complex_vectors():
    zero = lsr.decompose(np.zeros((4, 4), complex), rank=1).approximation
    assert zero.separation_rank == 0
    assert (zero @ np.ones(4)).dtype == np.complex128
    assert (zero @ np.ones((4, 2), np.float32)).dtype == np.complex128


def test_rank_above_dimension_is_clipped(rng):
    assert lsr.decompose(rng.standard_normal((4, 4)), rank=99).separation_rank == 4


def test_low_rank_pairs_are_decomposed_without_being_formed(rng):
    left, right = rng.standard_normal((30, 3)), rng.standard_normal((3, 40))
    shape = lsr.KroneckerShape(((5, 8), (6, 5)))
    ours, theirs = (
        lsr.decompose(t, shape, rank=5) for t in (lsr.LowRank(left, right), left @ right)
    )
    assert ours.relative_error == pytest.approx(theirs.relative_error, rel=1e-9)


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=8))
def test_tail_norms_descend_without_overflow(values):
    sigma = np.sort(np.array(values))[::-1]
    tails = tail_norms(sigma)
    assert len(tails) == len(values) + 1
    assert tails[-1] == 0.0
    assert all(np.isfinite(tails))
    assert tails == sorted(tails, reverse=True)


def test_curve_is_monotone_and_reads_off_ranks(rng):
    matrix = rng.standard_normal((16, 16))
    curve = lsr.error_curve(matrix)
    assert curve.relative_errors[0] == pytest.approx(1.0)
    assert list(curve.relative_errors) == sorted(curve.relative_errors, reverse=True)
    assert curve.rank_for(0.5) == lsr.decompose(matrix, rtol=0.5).separation_rank
    assert curve.parameters_for(0.5) == curve.rank_for(0.5) * 32
    with pytest.raises(BudgetError, match="the smallest error on the curve is 0.5, not 0.1"):
        lsr.analysis.ErrorCurve("x", (0, 1), (0, 4), (1.0, 0.5), 1.0).rank_for(0.1)


def test_a_curve_to_some_terms_is_the_beginning_of_the_whole_and_tells_its_progress(rng):
    u, v = (np.linalg.qr(rng.standard_normal((96, 96)))[0] for _ in range(2))
    shape = lsr.KroneckerShape(((12, 8), (8, 12)))
    matrix = inverse_rearrange((u * np.exp(-np.arange(96) / 4.0)) @ v.T, shape)
    seen = []
    short = lsr.error_curve(matrix, shape, rank=5, on_sweep=seen.append)
    whole = lsr.error_curve(matrix, shape)
    assert short.ranks == (0, 1, 2, 3, 4, 5)
    assert short.parameters == whole.parameters[:6]
    assert short.relative_errors == pytest.approx(whole.relative_errors[:6], rel=1e-3)
    assert short.relative_errors[0] == pytest.approx(1.0)
    assert seen


def test_a_stack_of_matrices_is_decomposed_together_as_one_by_one(rng):
    stack = rng.standard_normal((3, 16, 16))
    for matrix, record in zip(stack, lsr.decompose_each(stack, rank=5), strict=True):
        alone = lsr.decompose(matrix, rank=5)
        assert record.relative_error == pytest.approx(alone.relative_error, rel=1e-3)
        actual = np.linalg.norm(matrix - record.approximation.to_matrix()) / np.linalg.norm(matrix)
        assert record.relative_error == pytest.approx(actual, rel=1e-9)


def assert_as_good_as_a_loop(stack, shape, rank, rtol):
    for matrix, together in zip(stack, lsr.decompose_each(stack, shape, rank=rank), strict=True):
        alone = lsr.decompose(matrix, shape, rank=rank)
        assert together.separation_rank == alone.separation_rank
        assert together.status is alone.status
        assert together.target_norm == alone.target_norm
        assert together.gap_kind.name == "bounded"
        gap = together.optimality_gap
        assert gap <= 1e-3
        largest = alone.relative_error * (1.0 + gap + rtol) + rtol
        smallest = alone.relative_error / (1.0 + (alone.optimality_gap or 0.0) + rtol) - rtol
        assert smallest <= together.relative_error <= largest
        if gap <= rtol:  # `alone` may be a little away from the optimum, an SVD is not
            exact = lsr.decompose(matrix, shape, rank=rank, solver=SVD())
            difference = np.max(np.abs(together.to_matrix() - exact.to_matrix()))
            assert difference <= 100 * rtol * exact.target_norm


@pytest.mark.parametrize("shape", ["4x4, 4x4", "8x6, 6x8", "4x12, 12x4", "10x6, 6x8", "6x8, 10x6"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_a_stack_is_solved_as_well_as_in_a_loop(shape, dtype, rng):
    size = lsr.KroneckerShape(shape).matrix_shape
    stack = rng.standard_normal((5, *size))
    if dtype.startswith("complex"):
        stack = stack + 1j * rng.standard_normal((5, *size))
    rounding = 1e-5 if dtype in ("float32", "complex64") else 1e-13
    assert_as_good_as_a_loop(stack.astype(dtype), shape, 4, rounding)


@pytest.mark.parametrize("shape", ["4x4, 4x4", "8x8, 8x8"])
def test_zero_and_extreme_matrices_of_a_stack_are_those_of_a_loop(shape, rng):
    plain = rng.standard_normal(lsr.KroneckerShape(shape).matrix_shape)
    stack = np.stack([0.0 * plain, plain, 1e-180 * plain, 1e180 * plain])
    assert_as_good_as_a_loop(stack, shape, 3, 1e-13)


@pytest.mark.parametrize("rank", [1, 8, 9, 63, 64, 1000])
def test_a_rank_of_a_stack_is_clipped_as_in_a_loop(rank, rng):
    assert_as_good_as_a_loop(rng.standard_normal((3, 64, 64)), "8x8, 8x8", rank, 1e-13)


def test_a_stack_may_hold_matrices_of_fewer_terms_than_requested(rng):
    product = np.kron(rng.standard_normal((8, 8)), rng.standard_normal((8, 8)))
    stack = np.stack([product, rng.standard_normal((64, 64))])
    exact, noise = lsr.decompose_each(stack, "8x8, 8x8", rank=4)
    assert (exact.separation_rank, noise.separation_rank) == (1, 4)
    assert exact.relative_error < 1e-14


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_matrix_that_is_not_finite_is_named_by_its_place_in_the_stack(bad, rng):
    stack = rng.standard_normal((3, 64, 64))
    stack[2, 5, 7] = bad
    with pytest.raises(lsr.errors.PrecisionError, match=r"matrix 2: 1 of 4096 .* \(5, 7\)"):
        lsr.decompose_each(stack, rank=4)


def test_each_of_several_matrices_keeps_the_goal_and_the_storage(rng):
    stack = rng.standard_normal((3, 16, 16))
    rounded = lsr.decompose_each(stack, "4x4, 4x4", rank=5, storage="int8")
    assert [record.storage for record in rounded] == ["int8"] * 3
    of_two_sizes = lsr.decompose_each([stack[0], stack[1][:12]], rtol=0.3)
    assert all(record.relative_error <= 0.3 for record in of_two_sizes)


def test_a_stack_is_for_decompose_each_and_may_be_empty(rng):
    assert lsr.decompose_each(np.zeros((0, 4, 4)), rank=1) == ()
    with pytest.raises(lsr.errors.ShapeError, match="decompose_each takes a stack"):
        lsr.decompose(rng.standard_normal((3, 16, 16)), rank=5)


CUBE = lsr.KroneckerShape(((4, 4), (4, 4), (4, 4)))


@pytest.fixture(scope="module")
def hilbert():
    """The Hilbert matrix, and its decomposition into four terms of three factors."""
    i = np.arange(64.0)
    matrix = 1.0 / (1.0 + i[:, None] + i[None, :])
    return matrix, lsr.decompose(matrix, CUBE, rank=4)


def test_a_start_saves_sweeps_and_reaches_the_same(hilbert, rng):
    matrix, cold = hilbert
    near = matrix * (1.0 + 1e-4 * rng.standard_normal((64, 64)))
    warm = lsr.decompose(near, CUBE, rank=4, init=cold)
    afresh = lsr.decompose(near, CUBE, rank=4)
    assert warm.relative_error == pytest.approx(afresh.relative_error, rel=1e-2)
    assert len(warm.sweeps) < len(cold.sweeps) / 2
    by_tolerance = lsr.decompose(near, CUBE, rtol=2 * warm.relative_error, init=cold)
    assert by_tolerance.separation_rank == 4


def test_a_start_may_have_fewer_terms_than_are_asked_for(hilbert):
    matrix, cold = hilbert
    more = lsr.decompose(matrix, CUBE, rank=6, init=cold.approximation)
    assert more.separation_rank == 6
    assert more.relative_error < cold.relative_error / 10


def test_two_factors_need_no_start_and_take_one(hilbert):
    matrix, _ = hilbert
    start = lsr.decompose(matrix, rank=3)
    assert lsr.decompose(matrix, rank=2, init=start).separation_rank == 2


def test_a_start_of_another_shape_or_none_at_all_is_refused(hilbert):
    matrix, cold = hilbert
    other = "init has the shape 4×4 ⊗ 4×4 ⊗ 4×4, but the factors are 8×8 ⊗ 8×8"
    with pytest.raises(lsr.errors.ShapeError, match=other):
        lsr.decompose(matrix, rank=2, init=cold)
    with pytest.raises(lsr.errors.ShapeError, match="init: expected a SeparatedMatrix"):
        lsr.decompose(matrix, CUBE, rank=2, init=matrix)


def test_a_start_is_refused_where_shapes_are_searched(hilbert):
    matrix, cold = hilbert
    with pytest.raises(lsr.errors.ShapeError, match=r"pass shape=init\.kronecker_shape"):
        lsr.decompose(matrix, "search", rtol=1e-2, init=cold)


def test_a_seed_is_the_solvers(rng):
    matrix = rng.standard_normal((64, 64))
    errors = [lsr.decompose(matrix, CUBE, rank=3, seed=seed).relative_error for seed in (0, 0, 1)]
    assert errors[0] == errors[1] != errors[2]
    assert errors[0] == lsr.decompose(matrix, CUBE, rank=3).relative_error


@pytest.mark.parametrize("rank", [3, 7, 11])
@pytest.mark.parametrize("relative", [-1e-13, -1e-15, 0.0, 1e-15, 1e-13])
def test_a_tolerance_at_the_tail_of_the_spectrum_is_kept(rng, rank, relative):
    square = rng.standard_normal((16, 16))
    sigma = np.linalg.svd(rearrange(square, FOUR), compute_uv=False)
    rtol = np.linalg.norm(sigma[rank:]) / np.linalg.norm(sigma) * (1.0 + relative)
    result = lsr.decompose(square, FOUR, rtol=rtol)
    assert result.status is Status.converged
    assert result.separation_rank in (rank, rank + 1)


def test_a_result_is_a_matrix_wherever_an_array_goes(rng):
    left, right = rng.standard_normal((2, 4, 4)) + 4 * np.eye(4)
    matrix = np.kron(left, right)
    result = lsr.decompose(matrix, "4x4, 4x4", rank=1)
    x = rng.standard_normal(16)
    # Each row: what the result gives, and what NumPy gives for the matrix.
    for actual, expected in (
        (np.asarray(result), matrix),
        (result @ x, matrix @ x),
        (x @ result, x @ matrix),
        (np.matmul(np.asarray(result), x), matrix @ x),
        (result - matrix, 0 * matrix),
        (matrix - result, 0 * matrix),
        (result.T.to_matrix(), matrix.T),
        (result[3, 5], matrix[3, 5]),
        (operators.solve(result, x).x, np.linalg.solve(matrix, x)),
        (operators.slogdet(result)[1], np.linalg.slogdet(matrix)[1]),
        (operators.inv(result).to_matrix(), np.linalg.inv(matrix)),
        (lsr.recompress(result + result, rank=1).to_matrix(), 2 * matrix),
        (lsr.decompose(result, "2x2, 8x8", rtol=1e-12).to_matrix(), matrix),
        (sparse_linalg.aslinearoperator(result) @ x, matrix @ x),
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-10)
    assert result.shape == (16, 16)
    assert np.allclose(result, matrix)


def test_the_figures_of_a_result_do_not_go_to_what_is_made_of_it(rng):
    result = lsr.decompose(rng.standard_normal((16, 16)), FOUR, rank=2)
    assert "relative error" in repr(result)
    assert type(result.T) is lsr.SeparatedMatrix
    assert type(result.truncate(1)) is lsr.SeparatedMatrix


def test_an_answer_no_smaller_than_the_matrix_says_so(rng):
    prime = rng.standard_normal((17, 13))
    result = lsr.decompose(prime, rtol=1e-9)
    assert result.parameters > prime.size
    assert "The matrix itself has 221 numbers" in str(result)
    smaller = lsr.decompose(np.eye(16), FOUR, rank=1)
    assert "The matrix itself" not in str(smaller)


def test_what_recompressing_leaves_out_adds_up(rng):
    frames = [np.linalg.qr(rng.standard_normal((4, 4)))[0].T.reshape(4, 2, 2) for _ in range(2)]
    matrix = lsr.SeparatedMatrix(np.array([1.0, 0.03, 0.02, 0.02]), frames)
    assert lsr.recompress(matrix, rtol=0.03).separation_rank == 2
    assert lsr.recompress(matrix, rtol=0.025).separation_rank == 3


def test_a_missed_goal_of_one_of_many_is_raised_where_it_is_asked_for(rng):
    matrices = [np.eye(4), rng.standard_normal((4, 4))]
    goals = {"rank": 1, "rtol": 1e-6, "solver": "als"}
    with pytest.warns(ConvergenceWarning, match="1 of 2 matrices missed their goal; matrix 1"):
        records = lsr.decompose_each(matrices, "2x2, 2x2", **goals)
    assert [record.separation_rank for record in records] == [1, 1]
    with pytest.raises(ConvergenceError):
        lsr.decompose_each(matrices, "2x2, 2x2", **goals, throw=True)
