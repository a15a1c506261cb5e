"""What independent tests found broken in the numerics: storage, tolerances, extreme numbers, and words people type."""

import functools

import numpy as np
import pytest
from scipy.sparse import linalg as sparse_linalg

import lsrdecomp as lsr
from lsrdecomp import operators
from lsrdecomp.errors import LsrError
from lsrdecomp.formats import smallest
from lsrdecomp.kronecker import rearrange
from lsrdecomp.solvers import ALS, SVD, Status
from lsrdecomp.targets import Dense

FOUR = lsr.KroneckerShape(((4, 4), (4, 4)))


def laplacian(n: int) -> np.ndarray:
    return 2.0 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)


def kronecker_sum(order: int, n: int = 4) -> lsr.SeparatedMatrix:
    """L ⊗ I ⊗ I + I ⊗ L ⊗ I + …: the example of Beylkin and Mohlenkamp, d terms exactly, two to any accuracy."""
    stacks = [
        np.stack([laplacian(n) if i == j else np.eye(n) for i in range(order)])
        for j in range(order)
    ]
    return lsr.SeparatedMatrix.from_factors(stacks)


@pytest.fixture
def square(rng):
    return rng.standard_normal((16, 16))


@pytest.mark.parametrize(
    ("order", "rtol", "storage"),
    [
        (3, 1e-2, "bfloat16"),
        (3, 1e-3, "float16"),
        (3, 1e-6, "float32"),
        (3, 1e-6, None),
        (3, 1e-10, None),
        (4, 1e-2, "bfloat16"),
    ],
)
def test_a_tolerance_that_some_number_of_terms_can_keep_is_kept_with_three_and_more_factors(
    order, rtol, storage
):
    exact = kronecker_sum(order)
    matrix = exact.to_matrix()
    result = lsr.decompose(matrix, exact.kronecker_shape, rtol=rtol, storage=storage, throw=True)
    assert result.status is Status.converged
    assert np.linalg.norm(matrix - result.approximation.to_matrix()) <= rtol * np.linalg.norm(
        matrix
    )
    assert result.separation_rank <= order


def test_a_tolerance_below_what_the_storage_can_do_is_still_refused():
    exact = kronecker_sum(3, 3)
    result = lsr.decompose(exact.to_matrix(), exact.kronecker_shape, rtol=1e-6, storage="bfloat16")
    assert result.status in (Status.precision_exhausted, Status.ill_conditioned)


def test_a_budget_is_kept_and_costs_no_more_than_the_exact_terms_in_single_precision():
    """Their entries are small integers, exact in few bits, which no solver can know; how near it comes is luck."""
    order, rtol = 3, 1e-5
    exact = kronecker_sum(order)
    matrix = exact.to_matrix()
    ours = lsr.decompose(matrix, exact.kronecker_shape, budget=lsr.ErrorBudget(rtol=rtol)).stored
    assert np.linalg.norm(matrix - ours.approximation.to_matrix()) <= rtol * np.linalg.norm(matrix)
    assert ours.bytes <= 4 * exact.parameters + 4 * order
    theirs = smallest(Dense(matrix), exact, atol=rtol * np.linalg.norm(matrix))
    known = lsr.decompose(
        exact, exact.kronecker_shape, budget=lsr.ErrorBudget(rtol=rtol)
    )  # its own terms compete
    assert known.stored.bytes <= theirs.bytes


@pytest.mark.parametrize("rank", [3, 7, 11])
@pytest.mark.parametrize("relative", [-1e-13, -1e-15, 0.0, 1e-15, 1e-13])
def test_a_tolerance_at_the_tail_of_the_spectrum_is_kept(square, rank, relative):
    sigma = np.linalg.svd(rearrange(square, FOUR), compute_uv=False)
    rtol = np.linalg.norm(sigma[rank:]) / np.linalg.norm(sigma) * (1.0 + relative)
    result = lsr.decompose(square, FOUR, rtol=rtol)
    assert result.status is Status.converged
    assert result.separation_rank in (rank, rank + 1)


@pytest.mark.parametrize(
    "storage", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "int8", "int4"]
)
@pytest.mark.parametrize("scale", [1e-300, 1e-8, 1e8, 1e300])
def test_storage_loses_neither_small_nor_large_matrices(square, storage, scale):
    plain = lsr.decompose(square, FOUR, rank=8, storage=storage)
    scaled = lsr.decompose(square * scale, FOUR, rank=8, storage=storage)
    assert scaled.relative_error == pytest.approx(plain.relative_error, rel=1e-2)
    assert scaled.relative_error < 0.5
    assert scaled.storage == storage


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("fp16", "float16"), ("half", "float16"), ("bf16", "bfloat16"), (np.float16, "float16"), ("FP32", "float32"),
        (np.dtype("float32"), "float32"), ("float8_e4m3", "float8_e4m3fn"), ("float16", "float16"),
    ],
)  # fmt: skip
def test_storage_as_people_write_it(square, word, name):
    assert lsr.decompose(square, FOUR, rank=2, storage=word).storage == name


def test_storage_of_a_torch_tensor_stays_there(square):
    torch = pytest.importorskip("torch")
    for storage in (torch.float16, torch.bfloat16, "int8", "fp8"):
        found = lsr.decompose(torch.asarray(square), FOUR, rank=2, storage=storage).approximation
        assert isinstance(found.factors[0], torch.Tensor)
        assert found.factors[0].dtype == torch.float64


def test_one_number_format_for_a_whole_budget(square):
    for storage in ("float16", "int8", "fp32"):
        stored = lsr.decompose(
            square, FOUR, budget=lsr.ErrorBudget(rtol=0.1, storage=storage)
        ).stored
        assert {name for term in stored.formats for name in term} == {
            storage.replace("fp", "float")
        }
    assert lsr.ErrorBudget(rtol=0.1, storage="int8").unit_roundoff == pytest.approx(1 / 254)


def test_a_result_is_a_matrix_wherever_an_array_goes(rng):
    left, right = rng.standard_normal((2, 4, 4)) + 4 * np.eye(4)
    matrix = np.kron(left, right)
    result = lsr.decompose(matrix, "4x4, 4x4", rank=1)
    x = rng.standard_normal(16)
    for ours, numpys in (
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
        np.testing.assert_allclose(ours, numpys, rtol=1e-9, atol=1e-10)
    assert result.shape == (16, 16)
    assert np.allclose(result, matrix)
    assert (
        type(result.T) is type(result.truncate(1)) is lsr.SeparatedMatrix
    )  # the figures are of the result alone
    assert "relative error" in repr(result)


def test_a_number_as_a_budget_is_shown_what_to_write(rng):
    with pytest.raises(LsrError, match=r"write rtol=0\.001"):
        lsr.decompose(rng.standard_normal((16, 16)), budget=1e-3)


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


@pytest.mark.parametrize("solver", ["svd", "SVD", SVD, "gram", "golub-kahan", "als", ALS()])
def test_solvers_as_people_write_them(square, solver):
    assert lsr.decompose(square, FOUR, rank=2.0, solver=solver).separation_rank == 2


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
        ({"tol": 0.1}, lsr.errors.ArgumentError, "decompose takes no 'tol'; did you mean 'rtol'"),
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
@pytest.mark.parametrize("kind", [np.longdouble, np.clongdouble])
def test_extended_precision_is_refused_rather_than_rounded(square, kind):
    for what in (
        lambda m: lsr.decompose(m, rank=1),
        lsr.error_curve,
        lambda m: lsr.best_shape(m, rtol=0.1),
    ):
        with pytest.raises(lsr.errors.PrecisionError, match="more digits than the float64"):
            what(square.astype(kind))


def test_masked_arrays_need_all_their_entries(square):
    whole = lsr.decompose(np.ma.masked_array(square), FOUR, rank=2)
    assert whole.relative_error == lsr.decompose(square, FOUR, rank=2).relative_error
    with pytest.raises(lsr.errors.PrecisionError, match=r"3 of 256 entries are masked.*filled"):
        lsr.decompose(np.ma.masked_where(np.arange(256).reshape(16, 16) < 3, square), FOUR, rank=2)


@pytest.mark.parametrize(
    "what", ["decompose", "error_curve", "best_shape", "sparse", "rows", "pair"]
)
def test_a_norm_that_overflows_is_refused(what):
    from scipy.sparse import csr_array

    from lsrdecomp.targets import RowStream

    large = np.full((16, 16), 1.7e308)
    run = {
        "decompose": lambda: lsr.decompose(large, rank=1),
        "error_curve": lambda: lsr.error_curve(large),
        "best_shape": lambda: lsr.best_shape(large, rtol=0.1),
        "sparse": lambda: lsr.decompose(csr_array(large), rank=1),
        "rows": lambda: lsr.decompose(RowStream.of(large, rows=1), rank=1),
        "pair": lambda: lsr.decompose(lsr.LowRank(large[:, :1], np.ones((1, 16))), rank=1),
    }[what]
    with pytest.raises(lsr.errors.PrecisionError, match="norm is above the largest float64"):
        run()
    assert lsr.decompose(large / 1e10, rank=1).relative_error < 1e-12


def test_norms_of_factors_multiply_without_over_or_underflow():
    def single(value: float) -> np.ndarray:
        return np.full((1, 1, 1), value)

    values = (1e-200, 1e-200, 1e300)
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1)):
        found = lsr.SeparatedMatrix.from_factors([single(values[i]) for i in order])
        assert found.weights[0] == pytest.approx(1e-100, rel=1e-14)
    weighted = lsr.SeparatedMatrix.from_factors([single(1e200), single(-1e200)], np.array([1e-300]))
    assert weighted.to_matrix()[0, 0] == pytest.approx(-1e100, rel=1e-14)
    with pytest.raises(lsr.errors.PrecisionError, match="product of the norms"):
        lsr.SeparatedMatrix.from_factors([single(1e200), single(1e200)])
    narrow = [single(v).astype(np.float32) for v in (1e-30, 1e-30, 1e38)]
    assert lsr.SeparatedMatrix.from_factors(narrow).weights[0] == pytest.approx(1e-22, rel=1e-5)


def test_a_complex_matrix_without_terms_maps_to_complex_vectors():
    nothing = lsr.decompose(np.zeros((4, 4), complex), rank=1).approximation
    assert nothing.separation_rank == 0
    assert (nothing @ np.ones(4)).dtype == np.complex128
    assert (nothing @ np.ones((4, 2), np.float32)).dtype == np.complex128


def test_overflow_is_not_told_to_use_the_type_it_overflowed_in():
    from lsrdecomp.precision import round_to

    with pytest.raises(lsr.errors.PrecisionError, match="store it as float64$"):
        round_to(np.array([1e39]), "bfloat16")
    with pytest.raises(
        lsr.errors.PrecisionError, match="store it as float64 or float32 or bfloat16"
    ):
        round_to(np.array([1e30]), "float16")


def test_an_answer_no_smaller_than_the_matrix_says_so(rng):
    prime = rng.standard_normal((17, 13))
    result = lsr.decompose(prime, rtol=1e-9)
    assert result.parameters > prime.size
    assert "The matrix itself has 221 numbers" in str(result)
    assert "The matrix itself" not in str(
        lsr.decompose(functools.reduce(np.kron, [np.eye(4)] * 2), FOUR, rank=1)
    )
