"""Arithmetic on separated matrices agrees with the formed matrices; so does recompression."""

from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse.linalg
from hypothesis import given

from lsrdecomp.decompose import decompose, recompress
from lsrdecomp.errors import ArgumentError, BudgetError, ConvergenceError, ShapeError
from lsrdecomp.kronecker.cp import from_cp, to_cp
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import tolerance
from lsrdecomp.solvers.cp.als import ALS
from lsrdecomp.solvers.cp.tensorly import TensorLyCP
from lsrdecomp.solvers.solver import Event, Status
from lsrdecomp.solvers.svd.greedy import Greedy
from lsrdecomp.targets.target import Dense
from lsrdecomp.testing import separated_matrices

SQUARE = KroneckerShape(((3, 3), (4, 4)))
THREE = KroneckerShape(((2, 3), (3, 2), (2, 2)))


def random_matrix(shape, rank, seed=0, kind=np.float64):
    rng = np.random.default_rng(seed)
    factors = [rng.standard_normal((rank, m, n)).astype(kind) for m, n in shape.factors]
    if kind is np.complex128:
        factors = [f + 1j * rng.standard_normal(f.shape) for f in factors]
    return SeparatedMatrix.from_factors(factors)


def agree(actual, expected, condition=1.0):
    scale = max(np.abs(expected).max(), 1e-300) * condition
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance("float64", 64) * scale)


@pytest.mark.parametrize("kind", [np.float64, np.complex128])
@pytest.mark.parametrize("shape", [SQUARE, THREE])
def test_a_product_of_representations_represents_the_product(shape, kind):
    a, b = random_matrix(shape, 3, 1, kind), random_matrix(shape.transposed, 2, 2, kind)
    c = a @ b
    assert c.separation_rank <= 6
    agree(c.to_matrix(), a.to_matrix() @ b.to_matrix(), 50.0)


def test_a_hadamard_product_is_entrywise():
    a, b = random_matrix(THREE, 3, 1), random_matrix(THREE, 2, 2)
    agree((a * b).to_matrix(), a.to_matrix() * b.to_matrix(), 10.0)


@given(separated_matrices())
def test_the_inner_product_of_a_matrix_with_itself_is_its_square_norm(case):
    matrix = case[0] if isinstance(case, tuple) else case
    if matrix.separation_rank == 0 or not 1e-100 < matrix.norm < 1e100:
        return
    bound = tolerance("float64", 64, matrix.condition**2) * matrix.norm**2
    assert abs(matrix.inner(matrix) - matrix.norm**2) <= bound


def test_the_inner_product_conjugates_its_left_argument():
    a, b = random_matrix(THREE, 2, 1, np.complex128), random_matrix(THREE, 3, 2, np.complex128)
    agree(a.inner(b), np.vdot(a.to_matrix(), b.to_matrix()), 10.0)


@pytest.mark.parametrize("kind", [np.float64, np.complex128])
def test_trace(kind):
    a = random_matrix(SQUARE, 3, 1, kind)
    agree(a.trace(), np.trace(a.to_matrix()), 10.0)


def test_sizes_that_do_not_match_are_named():
    with pytest.raises(ShapeError, match=r"\(3, 2, 2\).*\(2, 3, 2\)"):
        random_matrix(THREE, 1) @ random_matrix(THREE, 1)
    with pytest.raises(ShapeError, match="3×3 ⊗ 4×4"):
        random_matrix(SQUARE, 1).inner(random_matrix(THREE, 1))


@pytest.mark.parametrize("kind", [np.float64, np.complex128])
def test_scipy_solves_with_the_operator(kind):
    a = random_matrix(SQUARE, 2, 3, kind)
    operator, formed = a.to_linear_operator(), a.to_matrix()
    x = np.arange(1.0, 13.0)
    agree(operator @ x, formed @ x, 100.0)
    agree(operator.H @ x, formed.conj().T @ x, 100.0)
    agree(operator @ np.eye(12), formed, 10.0)
    solved = scipy.sparse.linalg.lsmr(operator, formed @ x, atol=1e-12, btol=1e-12, maxiter=500)[0]
    assert np.linalg.norm(formed @ (solved - x)) < 1e-8 * np.linalg.norm(formed @ x)


@pytest.mark.parametrize("shape", [SQUARE, THREE])
def test_recompression_finds_the_terms_that_are_needed(shape):
    a = random_matrix(shape, 2, 4)
    doubled = a + a * 3.0 + a * 1e-12
    assert doubled.separation_rank == 6
    small = recompress(doubled, rtol=1e-8)
    assert small.separation_rank == 2
    assert (small - doubled).norm <= 1e-8 * doubled.norm


def test_recompression_to_a_rank_is_the_best_of_that_rank():
    a = random_matrix(SQUARE, 6, 4)
    best = recompress(a, rank=3)
    tail = np.linalg.norm(np.asarray(a.canonical().weights)[3:])
    assert np.isclose((a - best).norm, tail, rtol=1e-10)


@pytest.mark.parametrize("shape", [SQUARE, THREE])
def test_a_record_of_no_terms_or_of_one_is_recompressed_to_a_matrix(shape):
    for terms in (0, 1):
        record = decompose(terms * random_matrix(shape, 1).to_matrix(), shape, rtol=0.1)
        for goal in ({"rank": 1}, {"rtol": 0.1}):
            small = recompress(record, **goal)
            assert type(small) is SeparatedMatrix
            assert small.separation_rank == terms


def test_a_sum_operator_of_many_factors_is_recompressed_without_being_formed():
    """The 2²⁴ entries of Σ_i I⊗…⊗A⊗…⊗I with 12 factors are never formed.

    Its square has 144 terms, of rank 12·13/2 at most.
    """
    d, eye, a = 12, np.eye(4), np.diag([1.0, -1.0, 1.0, -1.0])
    factors = [np.stack([a if k == i else eye for k in range(d)]) for i in range(d)]
    operator = SeparatedMatrix.from_factors(factors)
    small = recompress(operator, rtol=2e-2)
    assert small.separation_rank <= 3
    assert (small - operator).norm <= 2e-2 * operator.norm


def test_recompression_that_cannot_reach_its_goal_raises():
    with pytest.raises(BudgetError, match="one of rtol and rank"):
        recompress(random_matrix(SQUARE, 2))
    with pytest.raises(ArgumentError, match=r"not ndarray; an array is decomposed by decompose"):
        recompress(np.eye(4), rank=1)
    with pytest.raises(ConvergenceError):
        recompress(random_matrix(SQUARE, 3), rtol=0.0, solver=TensorLyCP(max_sweeps=1))


@pytest.mark.parametrize("shape", [SQUARE, THREE])
def test_tensorly_reads_what_we_write_and_back(shape):
    tensorly = pytest.importorskip("tensorly")
    from lsrdecomp.kronecker.rearrange import rearrange

    a = random_matrix(shape, 3)
    cp = to_cp(a)
    agree(tensorly.cp_to_tensor(cp), rearrange(a.to_matrix(), shape), 10.0)
    agree(from_cp(cp, shape).to_matrix(), a.to_matrix(), 10.0)
    agree(from_cp((None, cp.factors), shape).weights, np.ones(3), 10.0)
    with pytest.raises(ShapeError, match="modes of"):
        from_cp(cp, KroneckerShape(((2, 2), (2, 2))))


def test_tensorly_is_a_solver():
    matrix = random_matrix(THREE, 2, 7)
    target = Dense(matrix.to_matrix())
    seen = []
    solution = TensorLyCP(max_sweeps=500).solve(target, THREE, rank=2, on_sweep=seen.append)
    assert solution.status is Status.rank_reached
    assert target.residual_norm(solution.approximation) < 1e-2 * target.norm
    assert len(solution.sweeps) == len(seen) > 1
    goal = TensorLyCP(max_sweeps=500).solve(target, THREE, atol=0.5 * target.norm)
    assert goal.status is Status.converged
    assert goal.approximation.separation_rank <= 2


def separable_plus_low_rank(seed=0):
    rng = np.random.default_rng(seed)
    block, thin = KroneckerShape(((8, 8), (8, 8))), KroneckerShape(((64, 1), (1, 64)))
    first, second = random_matrix(block, 2, seed), random_matrix(thin, 2, seed + 1)
    del rng
    return (
        (first * (1.0 / first.norm)).to_matrix() + (second * (1.0 / second.norm)).to_matrix(),
        block,
        thin,
    )


def test_per_term_shapes_find_a_sum_of_a_separable_and_a_low_rank_matrix():
    matrix, block, thin = separable_plus_low_rank()
    seen = []
    target = Dense(matrix)
    fit = Greedy((thin,), cycles=400, rtol=1e-6).solve(
        target, block, atol=1e-6 * target.norm, on_sweep=seen.append
    )
    assert fit.status is Status.converged
    assert {part.kronecker_shape: part.separation_rank for part in fit.approximation.parts} == {
        block: 2,
        thin: 2,
    }
    assert np.linalg.norm(matrix - fit.approximation.to_matrix()) <= 1e-6 * np.linalg.norm(matrix)
    errors = [sweep.relative_error for sweep in seen]
    assert all(b <= a + 1e-13 for a, b in pairwise(errors))
    x = np.linspace(0.0, 1.0, 64)
    agree(fit.approximation @ x, fit.approximation.to_matrix() @ x, 100.0)


def test_per_term_shapes_stay_within_the_parameters():
    matrix, block, thin = separable_plus_low_rank()
    fit = Greedy((thin,), parameters=400).solve(Dense(matrix), block)
    assert fit.approximation.parameters <= 400
    assert fit.status is Status.rank_reached
    assert np.isclose(
        fit.relative_error,
        np.linalg.norm(matrix - fit.approximation.to_matrix()) / np.linalg.norm(matrix),
    )


def test_three_terms_of_three_shapes_are_found_whatever_shape_was_chosen_first():
    """The shapes chosen while other terms were missing stayed: one sum of twenty was found."""
    shapes = [KroneckerShape(((m, m), (16 // m, 16 // m))) for m in (2, 4, 8)]
    n_found = 0
    for seed in range(20):
        parts = [random_matrix(shape, 1, seed + k) for k, shape in enumerate(shapes)]
        matrix = sum(part.to_matrix() / part.norm for part in parts)
        fit = Greedy(shapes[1:]).solve(Dense(matrix), shapes[0], rank=3)
        n_found += fit.relative_error < 1e-6
    assert n_found >= 15


@pytest.mark.parametrize("seed", range(3))
def test_terms_of_three_factors_have_sizes_of_their_own(seed):
    """Definition 3.2 lets sizes differ from term to term, for any number of factors."""
    sizes = ["4x4, 4x4, 4x4", "2x2, 8x8, 4x4", "64x1, 1x64"]
    shapes = [KroneckerShape.parse(text) for text in sizes]
    parts = [random_matrix(shape, 1, 10 * seed + k) for k, shape in enumerate(shapes)]
    matrix = sum(part.to_matrix() / part.norm for part in parts)
    fit = Greedy(shapes[1:]).solve(Dense(matrix), shapes[0], rank=3)
    assert fit.relative_error < 1e-9
    assert {part.kronecker_shape for part in fit.approximation.parts} == set(shapes)
    agree(fit.approximation @ matrix[0], matrix @ matrix[0], 100.0)


@pytest.mark.parametrize("max_sweeps", [2, 30])
def test_blocks_of_three_factors_that_fit_worse_are_not_taken(max_sweeps):
    """So few sweeps may end above where they began, and with fewer terms than were asked for."""
    shapes = [KroneckerShape.parse(text) for text in ("4x4, 4x4, 4x4", "2x2, 8x8, 4x4")]
    parts = [random_matrix(shape, 2, k) for k, shape in enumerate(shapes)]
    noise = np.random.default_rng(9).standard_normal((64, 64)) / 128.0
    matrix = sum(part.to_matrix() / part.norm for part in parts) + noise
    brief = ALS(initializations=1, core_sweeps=1, max_sweeps=max_sweeps)
    fit = Greedy(shapes[1:], cycles=6, final_cycles=6, cp_solver=brief).solve(
        matrix, shapes[0], rank=6
    )
    pairs = [(before, after) for before, after in pairwise(fit.sweeps) if after.event is Event.step]
    assert pairs
    assert all(after.relative_error <= before.relative_error for before, after in pairs)


def test_without_a_number_of_terms_none_changes_to_a_dearer_shape():
    shapes = [KroneckerShape(((m, m), (16 // m, 16 // m))) for m in (2, 4, 8)]
    matrix = sum(random_matrix(shape, 1, k).to_matrix() for k, shape in enumerate(shapes))
    fit = Greedy(shapes[1:], parameters=120).solve(Dense(matrix), shapes[0])
    kept = Greedy(shapes[1:], parameters=120, min_exchange_gain=1.0).solve(Dense(matrix), shapes[0])
    assert fit.approximation.parameters <= kept.approximation.parameters
    assert fit.relative_error <= (1.0 + 1e-9) * kept.relative_error


def test_greedy_refuses_what_it_cannot_do():
    matrix, block, _ = separable_plus_low_rank()
    with pytest.raises(BudgetError, match="rank= or atol="):
        Greedy().solve(Dense(matrix), block)
    with pytest.raises(ShapeError, match="64 rows"):
        Greedy((block,)).solve(Dense(matrix[:32]), KroneckerShape(((32, 1), (1, 64))), atol=0.1)
    zero = Greedy().solve(Dense(np.zeros((64, 64))), block, atol=0.1)
    assert zero.approximation.separation_rank == 0
