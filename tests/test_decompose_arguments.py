"""What decompose takes, as people write it, and what it refuses in words that say what to write."""

import numpy as np
import pytest
from scipy.sparse import csr_array

import lsrdecomp as lsr
from lsrdecomp import solvers
from lsrdecomp.solvers import ALS, SVD
from lsrdecomp.targets import RowStream

FOUR = lsr.KroneckerShape(((4, 4), (4, 4)))


VERBS = {
    "decompose": lambda matrix: lsr.decompose(matrix, rank=1),
    "error_curve": lsr.error_curve,
    "best_shape": lambda matrix: lsr.best_shape(matrix, rtol=0.1),
}


@pytest.fixture
def square(rng):
    return rng.standard_normal((16, 16))


@pytest.mark.parametrize(
    ("goal", "error", "words"),
    [
        ({}, lsr.errors.BudgetError, "say what is wanted"),
        ({"rtol": 0.1, "atol": 0.1}, lsr.errors.BudgetError, "not both"),
        ({"rtol": -1.0}, lsr.errors.BudgetError, "not negative"),
        ({"rtol": float("nan")}, lsr.errors.BudgetError, "finite"),
        ({"rank": 0}, lsr.errors.ShapeError, "positive"),
        ({"rank": 1.5}, lsr.errors.ShapeError, "positive"),
        (
            {"rank": 1, "shape": lsr.KroneckerShape(((5, 1), (2, 4)))},
            lsr.errors.ShapeError,
            "5 x 2 = 10 rows",
        ),
    ],
)
def test_contradictory_goals_are_refused(goal, error, words):
    with pytest.raises(error, match=words):
        lsr.decompose(np.ones((4, 4)), **goal)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("fp16", "float16"),
        ("half", "float16"),
        ("bf16", "bfloat16"),
        (np.float16, "float16"),
        ("FP32", "float32"),
        (np.dtype("float32"), "float32"),
        ("float8_e4m3", "float8_e4m3fn"),
        ("float16", "float16"),
    ],
)
def test_storage_as_people_write_it(square, word, name):
    assert lsr.decompose(square, FOUR, rank=2, storage=word).storage == name


@pytest.mark.parametrize(
    "shape",
    [
        ((8, 8), (2, 2)),
        [[8, 8], [2, 2]],
        "8x8, 2x2",
        "8×8 ⊗ 2×2",
        "(8x8), (2x2)",
        np.array([[8, 8], [2, 2]]),
    ],
)
def test_shapes_as_people_write_them(square, shape):
    assert lsr.decompose(square, shape, rank=1).kronecker_shape == lsr.KroneckerShape(
        ((8, 8), (2, 2))
    )
    assert lsr.error_curve(square, shape).label == "8×8 ⊗ 2×2"


@pytest.mark.parametrize("solver", ["svd", "SVD", SVD, "krylov", "als", ALS()])
def test_solvers_as_people_write_them(square, solver):
    assert lsr.decompose(square, FOUR, rank=2.0, solver=solver).separation_rank == 2


def test_a_number_as_a_budget_is_shown_what_to_write(rng):
    with pytest.raises(lsr.errors.LsrError, match=r"write rtol=0\.001"):
        lsr.decompose(rng.standard_normal((16, 16)), budget=1e-3)


@pytest.mark.parametrize(
    ("goal", "error", "words"),
    [
        ({"shape": "serach", "rtol": 0.1}, lsr.errors.ShapeError, "did you mean 'search'"),
        ({"shape": "8x, 2x2", "rank": 1}, lsr.errors.ShapeError, "'16x16, 8x8', one pair a factor"),
        ({"shape": 16, "rank": 1}, lsr.errors.ShapeError, "expected a KroneckerShape, pairs"),
        (
            {"shape": ((4, 4), (4,)), "rank": 1},
            lsr.errors.ShapeError,
            "expected a KroneckerShape, pairs",
        ),
        ({"rank": "two"}, lsr.errors.ShapeError, "positive integer, got 'two'"),
        ({"rank": float("nan")}, lsr.errors.ShapeError, "positive integer, got nan"),
        ({"rank": 1, "solver": "svdd"}, lsr.errors.BudgetError, "did you mean 'svd'"),
        ({"rank": 1, "solver": 3}, lsr.errors.BudgetError, "int has no method solve"),
        ({"rank": 1, "storage": "flaot16"}, lsr.errors.PrecisionError, "did you mean 'float16'"),
        ({"rank": 1, "storage": "tf32"}, lsr.errors.PrecisionError, "no format 'tf32'"),
        ({"rtol": "0.1"}, lsr.errors.BudgetError, "rtol must be a number"),
        ({"tol": 0.1}, lsr.errors.ArgumentError, "takes no 'tol': here it is rtol=0.1"),
        ({"rank": 1, "slover": "svd"}, TypeError, "did you mean 'solver'"),
    ],
)
def test_other_words_are_refused_with_what_is_wanted(square, goal, error, words):
    with pytest.raises(error, match=words):
        lsr.decompose(square, **goal)
    if "storage" in goal:
        with pytest.raises(lsr.errors.PrecisionError, match=words):
            lsr.ErrorBudget(rtol=0.1, storage=goal["storage"])


@pytest.mark.skipif(
    np.longdouble(1).itemsize == 8, reason="extended precision is double precision here"
)
@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
@pytest.mark.parametrize("verb", VERBS)
def test_extended_precision_is_refused_rather_than_rounded(square, dtype, verb):
    with pytest.raises(lsr.errors.PrecisionError, match="more digits than the float64"):
        VERBS[verb](square.astype(dtype))


def test_masked_arrays_need_all_their_entries(square):
    whole = lsr.decompose(np.ma.masked_array(square), FOUR, rank=2)
    assert whole.relative_error == lsr.decompose(square, FOUR, rank=2).relative_error
    with pytest.raises(lsr.errors.PrecisionError, match=r"3 of 256 entries are masked.*filled"):
        lsr.decompose(np.ma.masked_where(np.arange(256).reshape(16, 16) < 3, square), FOUR, rank=2)


LARGE = np.full((16, 16), 1.7e308)
LARGE_INPUTS = {
    "array": LARGE,
    "sparse": csr_array(LARGE),
    "rows": RowStream.of(LARGE, rows=1),
    "pair": lsr.LowRank(LARGE[:, :1], np.ones((1, 16))),
}


@pytest.mark.parametrize("name", LARGE_INPUTS)
def test_a_norm_that_overflows_is_refused(name):
    with pytest.raises(lsr.errors.PrecisionError, match="norm is above the largest float64"):
        lsr.decompose(LARGE_INPUTS[name], rank=1)


@pytest.mark.parametrize("verb", VERBS)
def test_a_norm_that_overflows_is_refused_by_every_verb(verb):
    with pytest.raises(lsr.errors.PrecisionError, match="norm is above the largest float64"):
        VERBS[verb](LARGE)


def test_numbers_near_the_largest_are_decomposed():
    assert lsr.decompose(LARGE / 1e10, rank=1).relative_error < 1e-12


@pytest.mark.parametrize(
    "solver", [solvers.Greedy(), solvers.Greedy, solvers.JointALS(), solvers.FactorwiseSVD()]
)
def test_a_solver_with_another_answer_is_refused_with_the_call_that_works(square, solver):
    with pytest.raises(lsr.errors.BudgetError, match="call its solve"):
        lsr.decompose(square, FOUR, rank=2, solver=solver)


@pytest.mark.parametrize("solver", [ALS(), SVD(), solvers.Krylov(), solvers.Greedy()])
@pytest.mark.parametrize("shape", [((4, 4), (4, 4)), "4x4, 4x4"])
def test_a_solver_takes_matrices_and_sizes_as_decompose_does(square, solver, shape):
    expected = solver.solve(lsr.targets.Dense(square), FOUR, rank=2)
    for matrix in (square, square.tolist()):
        assert solver.solve(matrix, shape, rank=2).relative_error == expected.relative_error
    with pytest.raises(lsr.errors.PrecisionError, match="expected a numeric array"):
        solver.solve(None, shape, rank=2)
    with pytest.raises(lsr.errors.ShapeError, match="sizes are written"):
        solver.solve(square, "4x4, 4y4", rank=2)


def test_a_batch_and_other_shapes_take_sizes_as_text(square):
    (solution,) = solvers.Krylov().solve_batch([square], "4x4, 4x4", rank=2)
    assert solution.approximation.kronecker_shape == FOUR
    mixed = solvers.Greedy(["16x1, 1x16"]).solve(square, "4x4, 4x4", rank=3)
    assert mixed.approximation.separation_rank == 3


@pytest.mark.parametrize("solver", [solvers.JointALS(), solvers.FactorwiseSVD()])
def test_a_pair_solver_says_that_it_takes_a_pair_and_its_shape(square, solver):
    pair = lsr.LowRank(square[:, :4], square[:4])
    with pytest.raises(lsr.errors.ShapeError, match="a pair needs a ProductShape, such as"):
        solver.solve(pair, "4x4, 4x4", 2)
    shape = lsr.ProductShape(out=(4, 4), inner=(2, 2), into=(4, 4))
    with pytest.raises(lsr.errors.ArgumentError, match=r"expected a LowRank\(B, A\), got ndarray"):
        solver.solve(square, shape, 2)


@pytest.mark.parametrize("number", [5e-324, 1e-320 - 3e-321j])
@pytest.mark.parametrize(
    "goal",
    [
        {"rank": 2},
        {"rtol": 0.1},
        {"budget": lsr.ErrorBudget(rtol=0.1)},
        {"rank": 2, "solver": "krylov"},
        {"shape": "2x2, 2x2, 4x4", "rank": 2},
        {"shape": "search", "rtol": 0.1},
    ],
)
def test_a_norm_that_has_lost_its_digits_is_refused_with_a_scale_that_works(square, goal, number):
    matrix = np.sign(square) * number
    for call in (lsr.decompose, lambda m, **kw: lsr.decompose_each(m[None], **kw)):
        if call is not lsr.decompose and goal.get("shape") == "search":
            continue
        with pytest.raises(
            lsr.errors.PrecisionError, match=r"by a power of two, such as 2\.0\*\*1000"
        ) as refusal:
            call(matrix, **goal)
        assert "below the smallest normal float64" in str(refusal.value)
    assert np.isfinite(lsr.decompose(matrix * 2.0**1000, **goal).relative_error)


@pytest.mark.parametrize("storage", [None, "int8", "float16"])
def test_complex_numbers_just_above_that_keep_their_phases(square, storage):
    matrix = (square + 1j * square.T) * 1e-308
    large = lsr.decompose(matrix * 2.0**1000, FOUR, rank=3, storage=storage)
    small = lsr.decompose(matrix, FOUR, rank=3, storage=storage)
    assert small.relative_error == pytest.approx(large.relative_error, rel=1e-3)
