"""What a hand used to NumPy, SciPy, scikit-learn or MATLAB types first."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse.linalg

import lsrdecomp as lsr
from lsrdecomp.errors import ArgumentError, CheckpointError, PrecisionError, ShapeError
from lsrdecomp.kronecker.rearrange import kron
from lsrdecomp.solvers import Decomposition


@pytest.fixture
def result(rng):
    return lsr.decompose(rng.standard_normal((36, 36)), "6x6, 6x6", rank=3)


@pytest.mark.parametrize("dtype", [np.float32, "float32", np.dtype("float32"), "f4", "single"])
def test_a_type_is_given_as_numpy_takes_it(result, dtype):
    assert result.astype(dtype).dtype == np.float32


@pytest.mark.parametrize("dtype", [np.complex64, "complex64", np.dtype("complex64"), "c8"])
def test_a_complex_type_stays_complex(result, dtype):
    assert (1j * result).astype(dtype).dtype == np.complex64


def test_a_type_of_torch_is_taken(result):
    torch = pytest.importorskip("torch")
    assert result.astype(torch.float32).dtype == np.float32


def test_a_type_that_computes_nothing_is_refused(result):
    with pytest.raises(PrecisionError, match=r"float32, float64.*round_to rounds"):
        result.astype("int8")


def test_terms_are_matrices_that_add_up_to_the_whole(result):
    terms = result.terms()
    assert [[factor.shape for factor in term] for term in terms] == [[(6, 6), (6, 6)]] * 3
    np.testing.assert_allclose(sum(np.kron(A, B) for A, B in terms), result.toarray(), atol=1e-13)
    (A, B) = lsr.decompose(np.kron(np.eye(2), np.ones((2, 3))), "2x2, 2x3", rank=1).terms()[0]
    np.testing.assert_allclose(np.kron(A, B), np.kron(np.eye(2), np.ones((2, 3))), atol=1e-13)


def test_equal_terms_are_equal_after_a_copy_and_a_file(result, tmp_path):
    others = (
        copy.copy(result),
        copy.deepcopy(result),
        pickle.loads(pickle.dumps(result)),
        lsr.load(result.save(tmp_path / "result.safetensors")),
    )
    for other in others:
        assert other == result
        assert hash(other) == hash(result)
    assert result != result.truncate(2)
    assert result != 2 * result
    assert result != lsr.decompose(np.ones((4, 4)), "2x2, 2x2", rank=1)


def test_beside_an_array_equality_is_that_of_entries(result):
    assert np.all(result == result.toarray())


def test_load_gives_back_what_was_saved(result, tmp_path):
    whole = lsr.load(result.save(tmp_path / "record.safetensors"))
    assert isinstance(whole, Decomposition)
    assert whole.relative_error == result.relative_error
    terms = lsr.load(result.approximation.save(tmp_path / "terms.safetensors"))
    assert type(terms) is lsr.SeparatedMatrix
    assert terms == result.approximation


@pytest.mark.parametrize("name", ["x.npz", "x.mat", "x.pt"])
def test_a_name_that_hides_the_format_is_refused(result, name, tmp_path):
    with pytest.raises(CheckpointError, match=r"name it x\.safetensors"):
        result.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "here"), [("rank", "separation_rank"), ("singular_values", "weights")]
)
def test_a_name_of_another_library_is_told(result, name, here):
    assert not hasattr(result, name)
    with pytest.raises(AttributeError, match=f"no '{name}': see {here}"):
        getattr(result, name)
    with pytest.raises(AttributeError, match="has no attribute 'frobnicate'"):
        result.frobnicate  # noqa: B018


@pytest.mark.parametrize(("given", "here"), [({"k": 3}, "rank=3"), ({"random_state": 0}, "seed=0")])
def test_an_argument_of_another_library_is_told(rng, given, here):
    with pytest.raises(ArgumentError, match=f"here it is {here}"):
        lsr.decompose(rng.standard_normal((4, 4)), **given)


def test_lists_are_told_where_they_are_taken():
    with pytest.raises(ArgumentError, match="from_factors"):
        lsr.SeparatedMatrix([1.0], ([[[1.0]]], [[[1.0]]]))
    assert lsr.SeparatedMatrix.from_factors([[[[2.0]]], [[[3.0]]]]).toarray() == [[6.0]]


def test_sizes_in_memory_and_the_word_of_scipy(result):
    assert result.nbytes == 8 * (3 + 2 * 3 * 36)
    np.testing.assert_array_equal(result.todense(), result.toarray())


def test_the_nearest_product_needs_no_shape(rng):
    matrix = np.kron(rng.standard_normal((6, 6)), rng.standard_normal((6, 6)))
    nearest = lsr.operators.nearest_kronecker(matrix)
    np.testing.assert_allclose(nearest.toarray(), matrix, atol=1e-12)
    separated = lsr.SeparatedMatrix.from_factors([np.ones((1, 2, 2)), np.eye(3)[None]])
    assert lsr.operators.nearest_kronecker(separated).kronecker_shape == separated.kronecker_shape


@pytest.mark.parametrize("shape", [(4, 6), [4, 6], "4x6", ((4, 6),)])
def test_of_one_factor_alone_the_other_follows(shape, rng):
    matrix = rng.standard_normal((24, 30))
    result = lsr.decompose(matrix, shape, rank=2)
    assert str(result.kronecker_shape) == "4×6 ⊗ 6×5"
    assert lsr.error_curve(matrix, shape).label == str(result.kronecker_shape)
    (each,) = lsr.decompose_each([matrix], shape, rank=2)
    assert each.kronecker_shape == result.kronecker_shape


def test_one_factor_that_does_not_divide_the_matrix_is_refused(rng):
    with pytest.raises(ShapeError, match="5 rows, but the matrix has 24"):
        lsr.decompose(rng.standard_normal((24, 30)), (5, 6), rank=2)


def test_sides_that_divide_no_further_are_told(rng):
    with pytest.warns(lsr.errors.ConvergenceWarning, match=r"1,518 numbers for 1,517.*pad=True"):
        lsr.decompose(rng.standard_normal((37, 41)), rank=2)


def test_kron_of_vectors_is_that_of_numpy(rng):
    vectors = [rng.standard_normal(size) for size in (2, 3, 4)]
    expected = np.kron(np.kron(vectors[0], vectors[1]), vectors[2])
    np.testing.assert_allclose(kron(*vectors), expected)


@pytest.mark.parametrize("name", ["inv", "det", "slogdet"])
def test_linear_algebra_of_numpy_says_that_it_forms_the_matrix(name, rng):
    matrix = lsr.SeparatedMatrix.from_factors([rng.standard_normal((1, 3, 3))] * 2)
    with pytest.warns(UserWarning, match=rf"forms the matrix, 9 × 9 entries; .*operators\.{name}"):
        formed = getattr(np.linalg, name)(matrix)
    expected = getattr(np.linalg, name)(matrix.toarray())
    for one, other in zip(np.atleast_1d(formed), np.atleast_1d(expected), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("inv", "lsrdecomp.operators.inv"),
        ("eigh", "lsrdecomp.operators.eigh"),  # SciPy wraps it, to take stacks of matrices
        ("svdvals", "lsrdecomp.operators.svd"),
        ("qr", None),
    ],
)
def test_linear_algebra_of_scipy_says_once_that_it_forms_the_matrix(name, instead, rng):
    matrix = lsr.SeparatedMatrix.from_factors([rng.standard_normal((1, 3, 3))] * 2)
    with pytest.warns(UserWarning, match="forms the matrix") as caught:
        getattr(scipy.linalg, name)(matrix)
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the line of who called SciPy"
    message = str(caught[0].message)
    assert message.startswith(f"scipy.linalg.{name} forms the matrix, 9 × 9 entries")
    assert instead is None or f"{instead}(A) does not" in message


@pytest.mark.filterwarnings("ignore:spsolve")  # that it takes sparse matrices
@pytest.mark.parametrize("solve", [scipy.linalg.solve, scipy.sparse.linalg.spsolve])
def test_solving_by_scipy_says_that_it_forms_the_matrix(solve, rng):
    matrix = lsr.SeparatedMatrix.from_factors([np.eye(3)[None], 2.0 * np.eye(2)[None]])
    b = rng.standard_normal(6)
    with pytest.warns(UserWarning, match=r"forms the matrix.*operators\.solve\(A, b\) does not"):
        x = solve(matrix, b)
    np.testing.assert_allclose(x, b / 2.0)


def test_other_functions_of_numpy_and_what_forms_nothing_say_nothing(result):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scipy.sparse.linalg.svds(result, k=2)
        scipy.sparse.linalg.aslinearoperator(result)
        joined = np.concatenate([result, result], axis=1)
        total = np.sum(result)
    assert joined.shape == (36, 72)
    assert total == np.sum(result.toarray())


@pytest.mark.parametrize("terms", [1, 2])
def test_square_products_of_oblong_factors_have_a_determinant(terms, rng):
    factors = [rng.standard_normal((terms, 2, 6)), rng.standard_normal((terms, 6, 2))]
    matrix = lsr.SeparatedMatrix.from_factors(factors)
    assert abs(np.linalg.det(matrix.toarray())) < 1e-12
    assert lsr.operators.slogdet(matrix) == (0.0, -np.inf)
    if terms == 1:
        assert lsr.operators.det(matrix) == 0.0


@pytest.mark.parametrize("shape", ["2x3, 3x2", "2x6, 6x2", "5x1, 1x5", "2x3, 2x2, 3x2", "1x4, 4x1"])
@pytest.mark.parametrize("complex_values", [False, True])
def test_square_products_of_oblong_factors_have_eigenvalues(shape, complex_values, rng):
    sizes = lsr.KroneckerShape.parse(shape).factors
    factors = [rng.standard_normal((1, m, n)) for m, n in sizes]
    if complex_values:
        factors = [f + 1j * rng.standard_normal(f.shape) for f in factors]
    matrix = lsr.SeparatedMatrix.from_factors(factors)
    found = lsr.operators.eigenvalues(matrix)
    assert_same_numbers(found, np.linalg.eigvals(matrix.toarray()))
    rank = np.prod([min(pair) for pair in sizes])
    assert np.sum(found == 0.0) == len(found) - rank


def assert_same_numbers(found, expected):
    """Compare by power sums, which rounding of multiple zeros does not move."""
    assert found.shape == expected.shape
    size = np.max(abs(expected))
    for power in range(1, len(expected) + 1):
        one, other = (np.sum((values / size) ** power) for values in (found, expected))
        assert abs(one - other) < 1e-10


def test_sums_of_oblong_factors_of_a_small_rank_have_eigenvalues(rng):
    factors = [rng.standard_normal((2, 2, 6)), rng.standard_normal((2, 6, 2))]
    matrix = lsr.SeparatedMatrix.from_factors(factors)
    assert_same_numbers(lsr.operators.eigenvalues(matrix), np.linalg.eigvals(matrix.toarray()))
    assert not np.any(lsr.operators.eigenvalues(matrix.truncate(0)))


def test_sums_of_oblong_factors_that_may_be_regular_are_refused(rng):
    factors = [rng.standard_normal((5, 2, 3)), rng.standard_normal((5, 3, 2))]
    with pytest.raises((ShapeError, lsr.errors.MatrixError)):
        lsr.operators.slogdet(lsr.SeparatedMatrix.from_factors(factors))
    with pytest.raises(ShapeError, match="this 6×6 matrix, 5 × .* need square factors"):
        lsr.operators.eigenvalues(lsr.SeparatedMatrix.from_factors(factors))
    oblong = lsr.SeparatedMatrix.from_factors([np.ones((1, 2, 3)), np.eye(2)[None]])
    with pytest.raises(ShapeError, match="this 4×6 matrix"):
        lsr.operators.eigenvalues(oblong)


def test_an_exact_product_of_three_factors_has_one_term_however_many_are_asked():
    for matrix in (np.ones((24, 24)), -1j * np.ones((24, 24))):
        result = lsr.decompose(matrix, "2x2, 3x3, 4x4", rank=2)
        assert result.separation_rank == 1
        assert result.condition == pytest.approx(1.0)
        assert result.relative_error < 1e-12


def test_two_curves_of_one_shape_are_told_apart(rng):
    pytest.importorskip("matplotlib")
    from lsrdecomp.plots import plot_error_curves

    curves = [lsr.error_curve(rng.standard_normal((16, 16)), "4x4, 4x4") for _ in range(2)]

    def names(**options):
        return [line.get_label() for line in plot_error_curves(curves, **options).get_lines()]

    assert names() == ["4×4 ⊗ 4×4 (1)", "4×4 ⊗ 4×4 (2)"]
    assert names(labels=["noise", "more noise"]) == ["noise", "more noise"]
    with pytest.raises(ArgumentError, match="1 names for 2 curves"):
        names(labels=["noise"])
