"""Least squares over single entries: known and weighted ones, factors that are not negative."""

import numpy as np
import pytest

from lsrdecomp import ErrorBudget, decompose
from lsrdecomp.errors import ArgumentError, BudgetError, ConvergenceWarning, LsrError, ShapeError
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.solvers import ALS, SVD, Status, WeightedALS
from lsrdecomp.solvers.cp.entrywise import EntryFit
from lsrdecomp.solvers.cp.mttkrp import assemble
from lsrdecomp.targets import KnownEntries

SHAPES = ["6x5, 4x7", "3x5, 2x1, 4x7"]


@pytest.fixture
def positive():
    """Two non-negative terms and a little noise."""
    rng = np.random.default_rng(0)
    terms = [np.kron(rng.random((6, 5)), rng.random((4, 7))) for _ in range(2)]
    return sum(terms) + 0.01 * rng.random((24, 35))


def exact_sum(shape, terms, seed, draw="standard_normal"):
    """Return a sum of so many terms, with factors drawn by a method of the generator."""
    rng = np.random.default_rng(seed)
    sizes = KroneckerShape.parse(shape).factors
    total = 0.0
    for _ in range(terms):
        product = np.ones((1, 1))
        for size in sizes:
            product = np.kron(product, getattr(rng, draw)(size))
        total = total + product
    return total


# -- non-negative ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_non_negative_factors_have_no_negative_entry_and_a_measured_error(positive, shape):
    result = decompose(positive, shape, rank=3, non_negative=True)
    residual = np.linalg.norm(positive - result.to_matrix()) / np.linalg.norm(positive)
    assert min(factor.min() for factor in result.factors) >= 0.0
    assert result.relative_error == pytest.approx(residual, rel=1e-12)


@pytest.mark.parametrize("shape", [*SHAPES, "8x8, 5x5", "4x3, 3x2, 3x2"])
@pytest.mark.parametrize("seed", range(3))
def test_an_exact_non_negative_sum_is_found_to_rounding(shape, seed):
    matrix = exact_sum(shape, 3, seed, "random")
    result = decompose(matrix, shape, rank=3, non_negative=True)
    assert result.relative_error < 1e-9
    assert min(factor.min() for factor in result.factors) >= 0.0


def test_a_non_negative_sum_of_noise_is_as_near_as_that_of_tensorly():
    tensorly = pytest.importorskip("tensorly")
    from tensorly.decomposition import non_negative_parafac_hals

    from lsrdecomp.kronecker.rearrange import rearrange

    rng = np.random.default_rng(3)
    matrix = exact_sum("6x5, 4x7", 3, 3, "random") + 0.3 * rng.standard_normal((24, 35))
    tensor = rearrange(matrix, KroneckerShape.parse("6x5, 4x7"))
    theirs = []
    for start in range(4):
        fit = non_negative_parafac_hals(
            tensor, 3, n_iter_max=300, init="random", random_state=start
        )
        theirs.append(np.linalg.norm(tensor - tensorly.cp_to_tensor(fit)))
    result = decompose(matrix, "6x5, 4x7", rank=3, non_negative=True)
    assert result.error <= 1.001 * min(theirs)


def test_of_a_matrix_without_a_positive_entry_nothing_remains():
    result = decompose(-np.ones((6, 6)), "2x2, 3x3", rank=1, non_negative=True)
    assert result.separation_rank == 0
    assert result.relative_error == 1.0


def test_a_matrix_that_no_single_product_of_non_negative_factors_fits_has_none_negative():
    signs = np.kron(np.array([[1.0, -1.0], [-1.0, 1.0]]), np.ones((3, 3))) - 0.5
    result = decompose(signs, "2x2, 3x3", rank=1, non_negative=True)
    # The nearest is the positive part alone: 18 of 36 entries, 0.5² each, are met.
    assert min(factor.min() for factor in result.factors) >= 0.0
    assert result.error == pytest.approx(np.linalg.norm(np.minimum(signs, 0.0)), rel=1e-9)


def test_a_constraint_of_one_factor_leaves_the_other_free(positive):
    result = decompose(positive - 0.5, SHAPES[0], rank=2, non_negative=(0,))
    layouts, tiles = result.factors
    assert layouts.min() >= 0.0
    assert tiles.min() < 0.0
    nearest = decompose(positive - 0.5, SHAPES[0], rank=2)
    assert nearest.error <= result.error <= 1.2 * nearest.error


def test_terms_are_added_till_the_error_of_a_constrained_sum_meets_the_tolerance(positive):
    result = decompose(positive, SHAPES[0], rtol=0.05, non_negative=True)
    assert result.status is Status.converged
    assert result.relative_error <= 0.05
    assert result.separation_rank == 2


# -- missing and weighted entries ------------------------------------------------------------------


@pytest.mark.parametrize("non_negative", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_missing_entries_are_predicted_and_the_error_is_that_of_known_ones(shape, non_negative):
    rng = np.random.default_rng(1)
    whole = exact_sum(shape, 1, 1, "random")
    known = rng.random(whole.shape) > 0.3
    result = decompose(whole, shape, rank=1, known=known, non_negative=non_negative)
    difference = (whole - result.to_matrix())[known]
    assert result.relative_error == pytest.approx(
        np.linalg.norm(difference) / np.linalg.norm(whole[known]), rel=1e-9, abs=1e-15
    )
    np.testing.assert_allclose(result.to_matrix(), whole, atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "terms", "share"),
    [
        ("8x8, 8x8", 1, 0.1),
        ("8x8, 8x8", 2, 0.2),
        ("6x6, 6x6", 3, 0.5),
        ("4x4, 3x3, 3x2", 2, 0.3),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_an_exact_sum_is_found_again_from_few_entries(shape, terms, share, seed):
    whole = exact_sum(shape, terms, seed)
    known = np.random.default_rng(seed + 100).random(whole.shape) < share
    result = decompose(whole, shape, rank=terms, known=known)
    assert result.status is Status.rank_reached
    error = np.linalg.norm(result.to_matrix() - whole) / np.linalg.norm(whole)
    assert error < 1e-9


def test_a_complex_matrix_is_found_again():
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((2, 5, 5)) + 1j * rng.standard_normal((2, 5, 5))
    whole = np.kron(left, right)
    result = decompose(whole, "5x5, 5x5", rank=1, known=rng.random(whole.shape) < 0.4)
    np.testing.assert_allclose(result.to_matrix(), whole, atol=1e-10)


def test_a_mask_says_what_is_known_and_the_rest_is_not_read(positive):
    known = np.random.default_rng(2).random(positive.shape) < 0.7
    results = []
    for filling in (0.0, 1e6):
        filled = np.where(known, positive, filling)
        results.append(decompose(filled, SHAPES[0], rank=2, known=known))
    np.testing.assert_array_equal(results[0].to_matrix(), results[1].to_matrix())


def test_entries_of_more_weight_are_met_more_nearly(positive):
    rng = np.random.default_rng(0)
    noisy = positive + 0.2 * rng.standard_normal(positive.shape)
    favoured = np.zeros(noisy.shape, dtype=bool)
    favoured[:12] = True
    errors = []
    for weights in (np.ones(noisy.shape), np.where(favoured, 1e3, 1.0)):
        result = decompose(KnownEntries(noisy, weights=weights), SHAPES[0], rank=2)
        difference = noisy - result.to_matrix()
        measured = np.sqrt(np.sum(weights * difference**2) / np.sum(weights * noisy**2))
        assert result.relative_error == pytest.approx(measured, rel=1e-9)
        errors.append(np.linalg.norm(difference[favoured]))
    assert errors[1] < errors[0]


def test_equal_weights_of_any_size_give_the_nearest_sum(positive):
    nearest = decompose(positive, SHAPES[0], rank=2, solver=SVD())
    for weight in (1e-6, 1.0, 1e6):
        target = KnownEntries(positive, weights=np.full(positive.shape, weight))
        result = decompose(target, SHAPES[0], rank=2)
        assert result.relative_error == pytest.approx(nearest.relative_error, rel=1e-6)


def test_a_block_of_which_nothing_is_known_is_named():
    whole = exact_sum("4x4, 5x5", 1, 0)
    damaged = whole.copy()
    damaged[:5, :5] = np.nan
    with pytest.warns(ConvergenceWarning, match=r"1 of 16 entries of factor 0: \(0, 0\)"):
        result = decompose(KnownEntries(damaged), "4x4, 5x5", rank=1)
    assert result.status is Status.undetermined
    assert "1 of 16 entries of factor 0: (0, 0)" in result.summary
    np.testing.assert_array_equal(result.to_matrix()[:5, :5], 0.0)
    np.testing.assert_allclose(result.to_matrix()[5:, 5:], whole[5:, 5:], atol=1e-10)


def test_known_entries_in_two_groups_are_told():
    whole = exact_sum("2x2, 3x3", 1, 0)
    blocks = np.array([[True, True], [False, False]])
    pixels = np.array([[True] * 3, [True, False, False], [False] * 3])
    known = np.kron(blocks, pixels) | np.kron(~blocks, ~pixels)
    with pytest.warns(ConvergenceWarning, match="fall into 2 groups"):
        result = decompose(whole, "2x2, 3x3", rank=1, known=known)
    assert result.status is Status.undetermined


def test_a_note_is_kept_in_the_file(tmp_path):
    damaged = np.ones((6, 6))
    damaged[:3, :3] = np.nan
    with pytest.warns(ConvergenceWarning):
        result = decompose(KnownEntries(damaged), "2x2, 3x3", rank=1)
    again = type(result).load(result.save(tmp_path / "result.safetensors"))
    assert again.note == result.note != ""
    assert again.status is Status.undetermined


def test_equal_seeds_give_equal_bits_and_another_seed_is_used():
    matrix = np.random.default_rng(0).standard_normal((20, 20))
    known = np.random.default_rng(1).random(matrix.shape) < 0.5
    one, again, other = (
        decompose(matrix, "4x4, 5x5", rank=3, known=known, seed=seed) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one.to_matrix(), again.to_matrix())
    assert not np.array_equal(one.to_matrix(), other.to_matrix())


def test_a_whole_matrix_goes_to_the_solver_that_is_best_for_it(positive):
    for shape, solver in zip(SHAPES, (SVD(), ALS()), strict=True):
        result = decompose(positive, shape, rank=2, solver=WeightedALS())
        expected = decompose(positive, shape, rank=2, solver=solver)
        np.testing.assert_array_equal(result.to_matrix(), expected.to_matrix())


# -- the sweeps and the steps themselves -----------------------------------------------------------


@pytest.mark.parametrize("sizes", [(5, 4), (4, 3, 3), (3, 2, 2, 3)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_the_normal_matrix_and_the_gradient_are_those_of_differences(sizes, weighted, dtype):
    rng = np.random.default_rng(0)

    def drawn(shape):
        real = rng.standard_normal(shape)
        return real + 1j * rng.standard_normal(shape) if dtype is np.complex128 else real

    weights = rng.random(sizes) if weighted else None
    fit = EntryFit(drawn(sizes), weights, (False,) * len(sizes))
    columns = [drawn((size, 2)) for size in sizes]
    square_roots = np.ones(sizes) if weights is None else np.sqrt(weights)
    jacobian = []
    for mode, column in enumerate(columns):
        for place in np.ndindex(column.shape):
            unit = np.zeros_like(column)
            unit[place] = 1.0
            # The sum is linear in one factor, so that this difference is the derivative.
            terms = [*columns[:mode], unit, *columns[mode + 1 :]]
            jacobian.append((square_roots * assemble(terms, np.ones(2))).ravel())
    jacobian = np.array(jacobian).T
    residual = (square_roots * fit.residual(columns)).ravel()
    np.testing.assert_allclose(fit.normal_matrix(columns), jacobian.conj().T @ jacobian, atol=1e-12)
    np.testing.assert_allclose(fit.gradient(columns), jacobian.conj().T @ residual, atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
def test_no_sweep_and_no_step_raises_the_objective(weighted, bounded):
    rng = np.random.default_rng(0)
    tensor = rng.standard_normal((6, 5, 4))
    weights = (rng.random(tensor.shape) < 0.6).astype(float) if weighted else None
    fit = EntryFit(tensor, weights, (bounded,) * 3)
    columns = [np.abs(rng.standard_normal((size, 3))) for size in tensor.shape]
    objective = fit.objective(columns)
    for _ in range(10):
        columns = fit.swept(columns)
        lower = fit.objective(columns)
        assert lower <= objective * (1.0 + 1e-12)
        objective = lower
    for _, (moved, lower) in zip(range(10), fit.newton_steps(columns), strict=False):
        assert lower < objective
        assert lower == pytest.approx(fit.objective(moved), rel=1e-9)
        assert not bounded or min(column.min() for column in moved) >= 0.0
        objective = lower


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["svd", "krylov", "als"])
def test_solvers_that_would_take_missing_entries_for_zeros_are_refused(positive, solver):
    shape = SHAPES[1] if solver == "als" else SHAPES[0]
    with pytest.raises(LsrError, match=r"missing entries is fitted by solver=WeightedALS\(\)"):
        decompose(KnownEntries(positive), shape, rank=2, solver=solver)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"known": np.ones((3, 2))}, ShapeError, r"known has the shape \(3, 2\), the matrix"),
        ({"known": np.zeros((24, 35))}, ShapeError, "none of the 840 entries is known"),
        ({"non_negative": (2,)}, BudgetError, "no factor 2; there are 0 to 1"),
        ({"non_negative": True, "solver": "svd"}, BudgetError, "SVD has factors of any sign"),
        ({"non_negative": True, "solver": WeightedALS(), "rtol": -1.0}, BudgetError, "rtol"),
    ],
)
def test_what_cannot_be_kept_is_refused(positive, arguments, error, message):
    with pytest.raises(error, match=message):
        decompose(positive, SHAPES[0], **{"rank": 2} | arguments)


def test_a_search_and_complex_numbers_are_refused_beside_non_negative(positive):
    with pytest.raises(BudgetError, match="name a shape beside non_negative"):
        decompose(positive, "search", rtol=0.1, non_negative=True)
    with pytest.raises(BudgetError, match="non_negative is for real matrices"):
        decompose(1j * positive, SHAPES[0], rank=2, non_negative=True)


def test_three_non_negative_factors_are_stored_within_a_budget(positive):
    budget = ErrorBudget(rtol=0.2, storage="float16")
    result = decompose(positive, SHAPES[1], budget=budget, non_negative=True)
    assert result.relative_error <= 0.2
    assert min(factor.min() for factor in result.factors) >= 0.0


def test_a_start_that_would_not_be_used_is_refused(positive):
    start = decompose(positive, SHAPES[0], rank=2)
    with pytest.raises(BudgetError, match="WeightedALS draws all its starts"):
        decompose(positive, SHAPES[0], rank=2, non_negative=True, init=start)


def test_a_mask_beside_a_target_that_has_one_is_refused(positive):
    with pytest.raises(ArgumentError, match="KnownEntries already"):
        decompose(KnownEntries(positive), SHAPES[0], rank=1, known=np.ones(positive.shape))


@pytest.mark.parametrize("weight", [-1.0, np.inf, np.nan])
def test_weights_that_are_none_are_refused(weight):
    with pytest.raises(BudgetError, match="weights of entries must be finite and not negative"):
        KnownEntries(np.ones((2, 2)), weights=np.full((2, 2), weight))


def test_entries_of_what_is_no_matrix_are_refused():
    with pytest.raises(ShapeError, match="expected two dimensions"):
        KnownEntries(np.ones(3))
