"""Every kind of target says of a matrix what the dense one says, and bad ones are refused."""

import types

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from lsrdecomp import KroneckerShape, LowRank, SeparatedMatrix, decompose
from lsrdecomp.errors import ArgumentError, PrecisionError, ShapeError
from lsrdecomp.kronecker.product import low_rank_product
from lsrdecomp.solvers.svd.block_krylov import Krylov
from lsrdecomp.solvers.svd.dense import SVD
from lsrdecomp.targets.convert import as_target
from lsrdecomp.targets.operator import Operator
from lsrdecomp.targets.residual import whole_blocks
from lsrdecomp.targets.row_stream import RowStream
from lsrdecomp.targets.separated_target import Separated
from lsrdecomp.targets.sparse import Sparse
from lsrdecomp.targets.target import Dense
from lsrdecomp.testing import kronecker_shapes, separated_matrices


class VectorsOnly:
    """The least an operator can be."""

    def __init__(self, matrix):
        self.shape, self.matvec = matrix.shape, lambda x: matrix @ x


def stream(matrix, height):
    return RowStream(
        lambda: (matrix[i : i + height] for i in range(0, len(matrix), height)), matrix.shape
    )


KINDS = {
    "sparse array": lambda matrix, height: Sparse(scipy.sparse.coo_array(matrix)),
    "sparse matrix": lambda matrix, height: as_target(scipy.sparse.csc_matrix(matrix)),
    "linear operator": lambda matrix, height: as_target(aslinearoperator(matrix)),
    "vectors only": lambda matrix, height: as_target(VectorsOnly(matrix)),
    "stream": stream,
    "slices": lambda matrix, height: RowStream.of(matrix, height),
    "one term": lambda matrix, height: as_target(
        SeparatedMatrix.from_factors([matrix[None], np.ones((1, 1, 1))])
    ),
}


def agree(target, matrix, shape, size=64, condition=1.0):
    """Terms that cancel leave γ times the rounding of a matrix."""
    dense = Dense(matrix)
    ours, theirs = target.rearranged(shape), dense.rearranged(shape)
    assert target.shape == dense.shape
    assert ours.shape == theirs.shape
    assert target.norm == pytest.approx(dense.norm, rel=1e-13 * condition)
    assert_close(ours.formed(), theirs.formed(), size)
    x = np.cos(np.arange(ours.shape[1] * 2)).reshape(-1, 2).astype(matrix.dtype)
    y = np.sin(np.arange(ours.shape[0] * 2) + 1).reshape(-1, 2).astype(matrix.dtype)
    assert_close(ours.matmat(x), theirs.matmat(x), size, condition=100)
    assert_close(ours.rmatmat(y), theirs.rmatmat(y), size, condition=100)
    best = SVD(tolerance=1e-6).solve(dense, shape, rank=1).approximation
    expected = dense.residual_norm(best)
    rounding = 1e-12 * condition * dense.norm
    assert target.residual_norm(best) == pytest.approx(expected, rel=1e-10, abs=rounding)


@pytest.mark.parametrize("kind", KINDS)
@given(
    kronecker_shapes(order=2, max_entries=600), st.integers(1, 9), st.booleans(), st.integers(0, 99)
)
def test_every_kind_of_target_agrees_with_the_dense_one(kind, shape, height, is_complex, seed):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal(shape.matrix_shape) * (rng.random(shape.matrix_shape) < 0.7)
    if is_complex:
        matrix = matrix * np.exp(6j * rng.random(shape.matrix_shape))
    if not matrix.any():
        matrix[0, 0] = 1.0
    agree(KINDS[kind](matrix, height), matrix, shape)


@given(separated_matrices(), st.data())
def test_a_sum_of_kronecker_products_in_its_own_and_in_any_other_shape(matrix, data):
    given_shape = matrix.kronecker_shape
    formed = matrix.to_matrix()
    if not np.any(formed):
        return
    cut = data.draw(st.integers(1, max(given_shape.order - 1, 1)))
    sides = given_shape.factors[:cut], given_shape.factors[cut:]
    own = KroneckerShape(
        tuple((int(np.prod([m for m, _ in s])), int(np.prod([n for _, n in s]))) for s in sides)
    )
    divisor = data.draw(
        st.sampled_from([q for q in range(1, formed.shape[0] + 1) if formed.shape[0] % q == 0])
    )
    other = KroneckerShape(((divisor, formed.shape[1]), (formed.shape[0] // divisor, 1)))
    for shape in (own, other):
        condition = max(1.0, float(matrix.condition))
        size = 64 * matrix.separation_rank
        agree(Separated(matrix), formed, shape, size, condition)


@pytest.mark.parametrize("gap", [1e-3, 1e-5])
def test_the_norm_of_terms_that_cancel_loses_gamma_times_rounding_at_most(gap, rng):
    """The random profile drew γ = 881, where the norm was 2e-13 away."""
    left, right = rng.standard_normal((1, 65, 3)), rng.standard_normal((1, 2, 2))
    near = left + gap * rng.standard_normal(left.shape)
    factors = [np.concatenate([left, -near]), np.concatenate([right, right])]
    matrix = SeparatedMatrix.from_factors(factors)
    exact = gap * np.linalg.norm((near - left) / gap) * np.linalg.norm(right)
    assert matrix.condition > 0.5 / gap
    assert Separated(matrix).norm == pytest.approx(exact, rel=4e-15 * matrix.condition)


def test_own_shape_is_never_formed(rng):
    factors = [rng.standard_normal((3, 250, 200)), rng.standard_normal((3, 200, 150))]
    # 50,000 × 30,000, 12 GB.
    matrix = SeparatedMatrix.from_factors(factors, np.array([4.0, 2.0, 1.0]))
    target, shape = Separated(matrix), matrix.kronecker_shape
    exact = matrix.canonical()
    solution = Krylov().solve(target, shape, rank=2)
    assert target.residual_norm(solution.approximation) == pytest.approx(
        float(exact.weights[2]), rel=1e-6
    )
    everything = Krylov().solve(target, shape, rank=5)
    assert target.residual_norm(everything.approximation) <= 1e-13 * matrix.norm


def test_a_memory_map_is_streamed(tmp_path, rng):
    matrix = rng.standard_normal((1300, 24)) @ np.diag(0.5 ** np.arange(24.0))
    np.save(tmp_path / "matrix.npy", matrix)
    mapped = np.load(tmp_path / "matrix.npy", mmap_mode="r")
    target = as_target(mapped)
    assert isinstance(target, RowStream)
    assert [len(part) for _, part in target.parts()] == [512, 512, 276]
    shape = KroneckerShape(((50, 4), (26, 6)))
    ours, theirs = decompose(mapped, shape, rtol=0.2), decompose(matrix, shape, rtol=0.2)
    assert ours.separation_rank == theirs.separation_rank
    assert ours.relative_error == pytest.approx(theirs.relative_error, rel=1e-2)


def test_streams_in_every_library(xp, rng):
    matrix = rng.standard_normal((40, 30))
    shape = KroneckerShape(((5, 6), (8, 5)))
    blocks = [xp.asarray(matrix[:11]), xp.asarray(matrix[11:12]), xp.asarray(matrix[12:])]
    target = RowStream(lambda: blocks, (40, 30))
    theirs = Dense(matrix)
    assert_close(target.rearranged(shape).formed(), theirs.rearranged(shape).formed())
    best = SVD(tolerance=1e-6).solve(Dense(xp.asarray(matrix)), shape, rank=3).approximation
    expected = theirs.residual_norm(SVD(tolerance=1e-6).solve(theirs, shape, rank=3).approximation)
    assert target.residual_norm(best) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_krylov_on_every_kind(kind, rng):
    shape = KroneckerShape(((12, 10), (11, 13)))
    spectrum = np.linalg.qr(rng.standard_normal((120, 120)))[0] * np.exp(-np.arange(120) / 5.0)
    rows = (spectrum @ rng.standard_normal((120, 143))).reshape(12, 10, 11, 13)
    matrix = rows.transpose(0, 2, 1, 3).reshape(132, 130)
    terms = SVD(tolerance=1e-6).solve(Dense(matrix), shape, rank=6).approximation
    best = Dense(matrix).residual_norm(terms)
    target = KINDS[kind](matrix, 17)
    solution = Krylov().solve(target, shape, rank=6)
    assert solution.sweeps
    assert best * (1 - 1e-12) <= target.residual_norm(solution.approximation) <= best * (1 + 1e-3)


def test_an_operator_of_more_columns_than_a_block_is_asked_for_each(rng):
    matrix = rng.standard_normal((6, 1026))  # of blocks of 512 columns
    formed = as_target(VectorsOnly(matrix)).tensor(KroneckerShape(((2, 27), (3, 38))))
    assert_close(formed, Dense(matrix).tensor(KroneckerShape(((2, 27), (3, 38)))))


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 12))
def test_cutting_rows_into_blocks_loses_none(start, length, height):
    covered = []
    for i, i_end, k, k_end in whole_blocks(start, start + length, height):
        assert i_end - i == 1 or (k, k_end) == (0, height)
        covered += [row * height + inner for row in range(i, i_end) for inner in range(k, k_end)]
    assert covered == list(range(start, start + length))


def test_residuals_of_products_and_of_many_factors(rng):
    matrix = rng.standard_normal((24, 24))
    product = low_rank_product(matrix[:, :3], matrix[:3, :])
    three = SeparatedMatrix.from_factors(
        [
            rng.standard_normal((4, 2, 3)),
            rng.standard_normal((4, 3, 2)),
            rng.standard_normal((4, 4, 4)),
        ]
    )
    for approximation in (product, three):
        expected = np.linalg.norm(matrix - approximation.to_matrix())
        for target in (
            Dense(matrix),
            Sparse(scipy.sparse.csr_array(matrix)),
            stream(matrix, 5),
            VectorsOnly(matrix),
        ):
            assert as_target(target).residual_norm(approximation) == pytest.approx(
                expected, rel=1e-12
            )


def test_what_becomes_which(rng):
    pair = LowRank(rng.standard_normal((4, 2)), rng.standard_normal((2, 3)))
    assert as_target(pair) is pair
    assert isinstance(as_target([[1, 2], [3, 4]]), Dense)
    assert isinstance(as_target(LinearOperator((2, 3), matvec=lambda x: x[:2])), Operator)
    assert isinstance(as_target(scipy.sparse.eye_array(3)), Sparse)
    assert as_target(scipy.sparse.eye_array(3, dtype=np.int64)).norm == pytest.approx(np.sqrt(3))


def test_duplicate_entries_of_a_sparse_matrix_add_up():
    matrix = scipy.sparse.coo_array(([1.0, 2.0], ([0, 0], [1, 1])), shape=(2, 2))
    target = Sparse(matrix)
    assert target.norm == pytest.approx(3.0)
    assert matrix.nnz == 2


SHAPE = KroneckerShape(((2, 2), (3, 2)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_entries_that_are_not_finite_are_refused_with_their_place(bad):
    matrix = np.ones((6, 4))
    matrix[4, 3] = bad
    with pytest.raises(PrecisionError, match="rows 4 to 5"):
        decompose(stream(matrix, 2), SHAPE, rank=1)
    with pytest.raises(PrecisionError, match="1 of 24 stored entries"):
        Sparse(scipy.sparse.csr_array(matrix))
    with pytest.raises(PrecisionError, match="columns 0 to 3"):
        decompose(aslinearoperator(matrix), SHAPE, rank=1)


def test_streams_that_do_not_fill_the_matrix_are_refused():
    with pytest.raises(ShapeError, match=r"blocks hold 4 rows, the matrix has 6"):
        _ = RowStream(lambda: [np.ones((4, 4))], (6, 4)).norm
    with pytest.raises(ShapeError, match=r"shape \(2, 3\), expected \(rows, 4\)"):
        _ = RowStream(lambda: [np.ones((4, 4)), np.ones((2, 3))], (6, 4)).norm
    with pytest.raises(ShapeError, match="two dimensions"):
        RowStream.of(np.ones(3))


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_shapes_and_more_factors_are_refused(kind):
    target = KINDS[kind](np.ones((6, 4)), 4)
    with pytest.raises(ShapeError, match="columns, but the matrix has 4"):
        target.rearranged(KroneckerShape(((2, 2), (3, 3))))
    with pytest.raises(ShapeError, match="two factors"):
        target.rearranged(KroneckerShape(((2, 2), (3, 2), (1, 1))))
    with pytest.raises(ShapeError, match="the target is 6×4"):
        target.residual_norm(SeparatedMatrix.from_factors([np.ones((1, 2, 2)), np.ones((1, 2, 2))]))


def grid_operator(order: int, n: int) -> scipy.sparse.csr_array:
    """The finite-difference Laplacian on a grid of n^order points."""
    line = scipy.sparse.diags_array(
        [-np.ones(n - 1), 2 * np.ones(n), -np.ones(n - 1)], offsets=[-1, 0, 1]
    )
    total = scipy.sparse.csr_array((n**order, n**order))
    for place in range(order):
        term = scipy.sparse.eye_array(1)
        for other in range(order):
            term = scipy.sparse.kron(term, line if other == place else scipy.sparse.eye_array(n))
        total = total + term
    return scipy.sparse.csr_array(total)


@pytest.mark.parametrize("kind", ["sparse", "complex", "operator", "rows"])
def test_three_factors_of_what_is_no_array(kind):
    sparse = grid_operator(3, 4) * (1 + 2j if kind == "complex" else 1)
    dense = sparse.toarray()
    target = {
        "sparse": sparse,
        "complex": sparse,
        "operator": aslinearoperator(sparse),
        "rows": RowStream.of(dense, rows=7),
    }[kind]
    shape = KroneckerShape(((4, 4),) * 3)
    result = decompose(target, shape, rank=3)
    assert np.linalg.norm(dense - result.approximation.to_matrix()) <= 1e-12 * np.linalg.norm(dense)
    assert result.relative_error <= 1e-12
    poorer = decompose(target, shape, rank=1)
    actual = np.linalg.norm(dense - poorer.approximation.to_matrix()) / np.linalg.norm(dense)
    assert poorer.relative_error == pytest.approx(actual, rel=1e-10)
    assert result.separation_rank == 3


def test_a_sparse_operator_too_large_to_fill_is_decomposed_and_measured():
    sparse = grid_operator(3, 20)  # 64 million entries if filled, 8,000 rows
    result = decompose(sparse, KroneckerShape(((20, 20),) * 3), rank=3)
    assert result.relative_error <= 1e-12
    x = np.random.default_rng(0).standard_normal(8000)
    assert np.linalg.norm(sparse @ x - result.approximation @ x) <= 1e-10 * np.linalg.norm(
        sparse @ x
    )


def test_a_sparse_matrix_whose_pattern_fills_the_core_is_refused_with_its_size():
    place = np.arange(24**2)  # of each factor; one entry at each, 576³ places between them
    i, j = np.unravel_index(place, (24, 24))
    rows, columns = (
        np.ravel_multi_index((i, i, i), (24,) * 3),
        np.ravel_multi_index((j, j, j), (24,) * 3),
    )
    sparse = scipy.sparse.csr_array((np.ones(24**2), (rows, columns)), shape=(24**3, 24**3))
    shape = KroneckerShape(((24, 24),) * 3)
    with pytest.raises(
        ShapeError,
        match=r"576 × 576 × 576 places of a sparse matrix formed, 191,102,976 entries, more",
    ):
        decompose(sparse, shape, rank=3)
    with pytest.raises(ShapeError, match="an operator formed, 191,102,976 entries"):
        decompose(aslinearoperator(sparse), shape, rank=3)


def test_a_sparse_zero_matrix_needs_no_terms_of_three_factors():
    result = decompose(scipy.sparse.csr_array((64, 64)), KroneckerShape(((4, 4),) * 3), rtol=1e-3)
    assert (result.separation_rank, result.relative_error) == (0, 0.0)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("kind", ["linear operator", "stream", "slices", "sparse array"])
def test_the_error_of_single_precision_is_measured_in_double(kind, dtype, rng):
    """A residual of 1e-7 of the matrix is all rounding where single precision subtracts."""
    shape = KroneckerShape(((8, 6), (9, 10)))
    pair = [rng.standard_normal(sizes) + 1j * rng.standard_normal(sizes) for sizes in shape.factors]
    pair = [factor if dtype == "complex64" else factor.real for factor in pair]
    matrix = (np.kron(*pair) + 1e-6 * rng.standard_normal(shape.matrix_shape)).astype(dtype)
    target = KINDS[kind](matrix, 7)
    record = decompose(target, shape, rank=1)
    exact = matrix.astype(np.clongdouble)
    rest = exact - np.asarray(record.approximation.astype("complex128").to_matrix())
    truth, size = (float(np.sqrt(np.sum(np.abs(x) ** 2))) for x in (rest, exact))
    assert target.norm == pytest.approx(size, rel=1e-12)
    assert record.relative_error == pytest.approx(truth / size, rel=1e-7)


@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize("large", [False, True])
def test_the_error_of_two_factors_of_a_sparse_matrix_is_that_of_all_entries(
    kind, large, rng, monkeypatch
):
    filled = rng.standard_normal((24, 30)) * (rng.random((24, 30)) < 0.02)
    if kind == "complex":
        filled = filled * (1.0 + 2.0j)
    # Terms that have entries where the matrix has none.
    shape = KroneckerShape(((4, 5), (6, 6)))
    factors = [rng.standard_normal((2, *size)) for size in shape.factors]
    other = SeparatedMatrix.from_factors(factors, np.array([2.0, 0.5]))
    if large:
        monkeypatch.setattr("lsrdecomp.targets.sparse.MAX_DENSE_RESIDUAL", 0)
    target = Sparse(scipy.sparse.csr_array(filled))
    for approximation in (decompose(filled, shape, rank=2).approximation, other):
        expected = np.linalg.norm(filled - approximation.to_matrix())
        assert target.residual_norm(approximation) == pytest.approx(expected, rel=1e-12)


def test_a_sparse_matrix_costs_what_it_stores_not_what_it_spans(monkeypatch):
    monkeypatch.setattr(Sparse, "_dense_rows", None)  # would be 4 billion numbers
    places = np.arange(5) * 13_000
    matrix = scipy.sparse.csr_array((np.ones(5), (places, places)), shape=(65_536, 65_536))
    exact = decompose(matrix, "256x256, 256x256", rank=5)
    assert exact.relative_error < 1e-12
    fewer = decompose(matrix, "256x256, 256x256", rank=2)
    assert fewer.relative_error == pytest.approx(np.sqrt(3 / 5), rel=1e-9)


class SparsePackageArray:
    """What matters here of an array of the package sparse."""

    def __init__(self, matrix):
        self.to_scipy_sparse = lambda: scipy.sparse.coo_array(matrix)


class DaskArray:
    """What matters here of an array of dask, in chunks of seven rows; counts what is computed."""

    dask = "a graph"

    def __init__(self, matrix):
        self.matrix = matrix
        self.shape = matrix.shape
        full, rest = divmod(len(matrix), 7)
        self.chunks = ((7,) * full + (rest,) * bool(rest), (matrix.shape[1],))
        self.heights = []

    def __getitem__(self, rows):
        def compute():
            self.heights.append(rows.stop - rows.start)
            return self.matrix[rows]

        return types.SimpleNamespace(compute=compute)


def test_sparse_and_lazy_arrays_of_other_packages_are_read(rng):
    matrix = rng.standard_normal((24, 30)) * (rng.random((24, 30)) < 0.3)
    expected = decompose(matrix, "4x5, 6x6", rank=3)
    lazy = DaskArray(matrix)
    for other in (SparsePackageArray(matrix), lazy):
        result = decompose(other, "4x5, 6x6", rank=3)
        assert result.relative_error == pytest.approx(expected.relative_error, rel=1e-9)
    assert max(lazy.heights) == 7


@pytest.mark.parametrize("layout", ["to_sparse_coo", "to_sparse_csr", "to_sparse_csc"])
def test_sparse_tensors_of_torch_are_read(layout, rng):
    torch = pytest.importorskip("torch")
    matrix = rng.standard_normal((24, 30)) * (rng.random((24, 30)) < 0.3)
    expected = decompose(matrix, "4x5, 6x6", rank=3)
    result = decompose(getattr(torch.tensor(matrix), layout)(), "4x5, 6x6", rank=3)
    assert result.relative_error == pytest.approx(expected.relative_error, rel=1e-9)


def test_a_tensor_without_numbers_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentError, match="on the meta device has no numbers"):
        decompose(torch.empty(24, 30, device="meta"), "4x5, 6x6", rank=3)
