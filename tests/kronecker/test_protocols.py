"""A separated matrix where a matrix is expected: NumPy, SciPy, torch, arithmetic, files."""

import inspect
import json
import re

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

import lsrdecomp as lsr
from lsrdecomp import ErrorBudget, SeparatedMatrix
from lsrdecomp.arrays import to_numpy
from lsrdecomp.errors import CheckpointError, PrecisionError, ShapeError
from lsrdecomp.kronecker.files import read_provenance, write_terms
from lsrdecomp.testing import kronecker_shapes

KINDS = ("float64", "complex128", "float32")


@st.composite
def cases(draw, square=False, most=3):
    """Yield (matrix, formed in double precision, tolerance, generator).

    Real, complex and float32, one to four factors.
    """
    shape = draw(kronecker_shapes(max_entries=1024, square=square))
    return case_of(draw, shape, most)


def case_of(draw, shape, most=3):
    kind, s = draw(st.sampled_from(KINDS)), draw(st.integers(1, most))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    factors = [rng.standard_normal((s, m, n)).astype(kind) for m, n in shape.factors]
    if kind == "complex128":
        factors = [f + 1j * rng.standard_normal(f.shape) for f in factors]
    matrix = lsr.SeparatedMatrix.from_factors(factors)
    formed = sum_of_terms(matrix)
    return matrix, formed, 1e-5 if kind == "float32" else 1e-12, rng


def sum_of_terms(matrix):
    total = np.zeros(matrix.shape, np.result_type(*(f.dtype for f in matrix.factors), np.float64))
    for k, weight in enumerate(matrix.weights):
        term = np.ones((1, 1))
        for factor in matrix.factors:
            term = np.kron(term, factor[k].astype(total.dtype))
        total += weight * term
    return total


def near(actual, expected, matrix, tolerance, factor=1.0):
    """Equal relative to the terms: what cancels between terms cannot be computed from them."""
    allowed = tolerance * factor * float(np.sum(matrix.weights))
    actual = to_numpy(actual)
    assert actual.shape == np.shape(expected)
    assert np.linalg.norm(np.atleast_1d(actual - expected)) <= allowed


@given(cases())
def test_products_with_arrays_and_their_adjoints(case):
    a, dense, tolerance, rng = case
    m, n = a.shape
    x, y = rng.standard_normal((n, 2)), rng.standard_normal((m, 2))
    size = np.linalg.norm(x)
    for ours, theirs in (
        (a @ x, dense @ x),
        (a.matmat(x), dense @ x),
        (a.matvec(x[:, 0]), dense @ x[:, 0]),
    ):
        near(ours, theirs, a, tolerance, size)
    near(a.dot(x[:, 1]), dense @ x[:, 1], a, tolerance, size)
    near(a.rmatvec(y[:, 0]), dense.conj().T @ y[:, 0], a, tolerance, np.linalg.norm(y))
    near(a.rmatmat(y), dense.conj().T @ y, a, tolerance, np.linalg.norm(y))
    near(y.T @ a, y.T @ dense, a, tolerance, np.linalg.norm(y))
    near(np.matmul(a, x), dense @ x, a, tolerance, size)
    near(np.matmul(y.T, a), y.T @ dense, a, tolerance, np.linalg.norm(y))
    near(y[:, 0] @ a, y[:, 0] @ dense, a, tolerance, np.linalg.norm(y))
    forth, back = np.vdot(y[:, 0], a @ x[:, 0]), np.vdot(a.rmatvec(y[:, 0]), x[:, 0])
    assert abs(forth - back) <= tolerance * np.sum(a.weights) * size * np.linalg.norm(y)


@given(cases())
def test_forms_and_transposes(case):
    a, dense, tolerance, _ = case
    for ours, theirs in (
        (a, dense),
        (a.T, dense.T),
        (a.mT, dense.T),
        (a.H, dense.conj().T),
        (a.mH, dense.conj().T),
        (a.conj(), dense.conj()),
        (a.transpose(), dense.T),
        (a.adjoint(), dense.conj().T),
        (+a, dense),
        (-a, -dense),
    ):
        near(np.asarray(ours), theirs, a, tolerance)
    assert (a.ndim, a.size, len(a), a.shape) == (2, dense.size, *dense.shape[:1], dense.shape)


@given(cases(), st.data())
def test_arithmetic_with_numbers_arrays_and_each_other(case, data):
    a, dense, tolerance, rng = case
    b, other, coarser, _ = case_of(data.draw, a.kronecker_shape)
    tolerance = max(tolerance, coarser)
    array = rng.standard_normal(a.shape)
    both = a + b
    near(np.asarray(both), dense + other, a + b, 10 * tolerance, 10 + np.sum(b.weights))
    near(np.asarray(a - b), dense - other, a, tolerance, 10 + np.sum(b.weights))
    near(np.asarray(a * b), dense * other, a, tolerance, 10 + np.sum(b.weights))
    for ours, theirs in (
        (a * 2.5, dense * 2.5),
        (2.5 * a, dense * 2.5),
        (np.float64(2.5) * a, dense * 2.5),
        (a / 4, dense / 4),
        (a * 2j, dense * 2j),
        (a + 1.5, dense + 1.5),
        (1.5 - a, 1.5 - dense),
        (a + array, dense + array),
        (array + a, dense + array),
        (a - array, dense - array),
        (array - a, array - dense),
        (a * array, dense * array),
        (array * a, dense * array),
        (a + scipy.sparse.csr_array(array), dense + array),
        (np.add(a, array), dense + array),
        (np.maximum(abs(array), np.abs(a)), np.maximum(abs(array), abs(dense))),
    ):
        near(
            np.asarray(ours),
            theirs,
            a,
            tolerance,
            10 + np.linalg.norm(array) + np.sqrt(a.size) / np.sum(a.weights),
        )
    single = a.truncate(1)
    if min(np.abs(f).min() for f in single.factors) > 1e-3:
        near(
            np.asarray(b / single),
            other / sum_of_terms(single),
            b,
            tolerance,
            10 * np.abs(1 / sum_of_terms(single)).max(),
        )


@given(cases(), st.data())
def test_matrix_products_and_kronecker_products(case, data):
    a, dense, tolerance, _ = case
    columns = data.draw(kronecker_shapes(order=a.order, max_entries=300)).columns
    b, other, coarser, _ = case_of(
        data.draw, lsr.KroneckerShape.of(a.kronecker_shape.columns, columns), 2
    )
    near((a @ b).to_matrix(), dense @ other, a, max(tolerance, coarser), 10 * np.sum(b.weights))
    if a.size * b.size < 2**18:
        near(
            a.kron(b).to_matrix(),
            np.kron(dense, other),
            a,
            max(tolerance, coarser),
            10 * np.sum(b.weights),
        )
        assert a.kron(b).order == a.order + b.order


@given(cases(), st.data())
def test_inner_products_and_norms(case, data):
    a, dense, tolerance, _ = case
    b, other, coarser, _ = case_of(data.draw, a.kronecker_shape)
    near(a.inner(b), np.vdot(dense, other), a, max(tolerance, coarser), np.sum(b.weights))
    near(a.norm, np.linalg.norm(dense), a, tolerance)


@given(cases())
def test_diagonals(case):
    a, dense, tolerance, _ = case
    near(a.diagonal(), np.diagonal(dense), a, tolerance)


@given(cases(square=True))
def test_traces(case):
    a, dense, tolerance, _ = case
    near(a.trace(), np.trace(dense), a, tolerance, a.shape[0])


@given(cases(), st.data())
def test_entries_rows_and_columns(case, data):
    a, dense, tolerance, rng = case
    m, n = a.shape
    i, j = data.draw(st.integers(-m, m - 1)), data.draw(st.integers(-n, n - 1))
    cut = data.draw(st.slices(m)), data.draw(st.slices(n))
    rows, columns = rng.integers(-m, m, 3), rng.integers(0, n, 3)
    for key in (
        i,
        (i, j),
        (slice(None), j),
        (i, slice(None)),
        cut,
        (cut[0], j),
        rows,
        (rows, columns),
        (cut[0], columns),
        (slice(None), slice(None, None, -1)),
        rng.random(m) < 0.5,
        (slice(None), [0]),
        [],
    ):
        near(
            a[key],
            dense[np.array([], int) if isinstance(key, list) and not key else key],
            a,
            tolerance,
        )


def test_indices_outside_are_refused_as_numpy_does():
    a = lsr.SeparatedMatrix.from_factors([np.ones((1, 2, 3)), np.ones((1, 2, 2))])
    for key in (4, -5, (0, 6), (slice(None), -7), [0, 4], 1.5, (0, 0, 0), [[0, 1]], "a"):
        with pytest.raises(IndexError):
            a[key]


def test_arrays_larger_than_expected_are_refused_with_the_way_around():
    eye = np.eye(1000)[None]
    big = lsr.SeparatedMatrix.from_factors([eye, eye])
    for form in (
        np.asarray,
        lambda a: a + np.ones((10**6, 1)),
        lambda a: np.ones(10**6) * a,
        lambda a: a / np.ones(2),
    ):
        with pytest.raises(ShapeError, match=r"1,000,000 × 1,000,000.*7.45e\+03 GiB.*to_matrix"):
            form(big)


def test_the_limit_of_what_is_formed_unasked_is_an_attribute_that_a_subclass_may_set():
    class Careful(lsr.SeparatedMatrix):
        max_formed_entries = 8

    small = Careful(np.ones(1), (np.eye(3)[None] / 3**0.5,))
    with pytest.raises(ShapeError, match="3 × 3.*at most 8 entries"):
        np.asarray(small)
    assert_allclose(small.to_matrix(), np.eye(3) / 3**0.5)


def test_scipy_takes_it_as_it_is(rng):
    first, second = (q + q.T for q in rng.standard_normal((2, 12, 12)))
    eye = np.eye(12)
    a = lsr.SeparatedMatrix.from_factors([np.stack([first, eye]), np.stack([eye, second])])
    dense = np.kron(first, eye) + np.kron(eye, second)
    found = scipy.sparse.linalg.eigsh(a, k=3, return_eigenvectors=False, v0=np.ones(144))
    assert_allclose(np.sort(abs(found)), np.sort(abs(np.linalg.eigvalsh(dense)))[-3:], rtol=1e-10)
    shifted = a + lsr.SeparatedMatrix.from_factors([100.0 * eye[None], eye[None]])
    b = rng.standard_normal(144)
    expected = np.linalg.solve(dense + 100.0 * np.eye(144), b)
    for solver in (scipy.sparse.linalg.gmres, scipy.sparse.linalg.cg, scipy.sparse.linalg.minres):
        x, info = solver(shifted, b, rtol=1e-12)
        assert info == 0
        assert_allclose(x, expected, rtol=1e-8)
    operator = scipy.sparse.linalg.aslinearoperator(a)
    assert_allclose(operator.T @ b, dense.T @ b, rtol=1e-10)
    assert_allclose((2 * operator).H @ b, 2 * dense.T @ b, rtol=1e-10)
    assert_allclose(
        scipy.sparse.linalg.svds(a.to_linear_operator(), k=1, v0=np.ones(144))[1],
        np.linalg.norm(dense, 2),
    )


def test_every_library_agrees_on_the_protocols(xp, rng):
    factors = [rng.standard_normal((2, 2, 3)), rng.standard_normal((2, 3, 2))]
    a = lsr.SeparatedMatrix.from_factors([xp.asarray(f) for f in factors])
    dense = sum_of_terms(a.to_numpy())
    x, y = rng.standard_normal((6, 2)), rng.standard_normal((3, 6))
    reflected = [(a + xp.asarray(dense), 2 * dense)]
    # These arrays raise where others leave the right operand its turn.
    if xp.__name__ != "array_api_strict":
        reflected += [(xp.asarray(y) @ a, y @ dense), (xp.asarray(dense) * a, dense**2)]
    for ours, theirs in (
        *reflected,
        (a @ xp.asarray(x), dense @ x),
        (a[1], dense[1]),
        (a[:, 2], dense[:, 2]),
        (a[2, 3], dense[2, 3]),
        (a.diagonal(), np.diagonal(dense)),
        (a.inner(a), np.vdot(dense, dense)),
        (a.trace(), np.trace(dense)),
        ((a @ a.T).to_matrix(), dense @ dense.T),
        ((a + a / 2.0).to_matrix(), 1.5 * dense),
        (a.rmatvec(xp.asarray(y[0])), y[0] @ dense),
    ):
        assert_allclose(to_numpy(ours), theirs, rtol=1e-12, atol=1e-12)


def test_torch_is_differentiable_in_the_factors_and_keeps_libraries_apart(rng):
    torch = pytest.importorskip("torch")
    factors = [
        torch.tensor(rng.standard_normal(s), requires_grad=True) for s in ((2, 3, 3), (2, 2, 2))
    ]
    x = torch.tensor(rng.standard_normal(6))

    def figures(first, second):
        a = lsr.SeparatedMatrix.from_factors([first, second])
        return (
            (a @ x).sum(),
            x @ a @ x,
            a.trace(),
            a.inner(a),
            a[1].sum(),
            a.diagonal().prod(),
            (a @ a / 3.0)[0, 5],
        )

    assert torch.autograd.gradcheck(figures, factors)
    a = lsr.SeparatedMatrix.from_factors([f.detach() for f in factors])
    with pytest.raises(TypeError, match=r"torch.*numpy.*to_numpy"):
        a @ np.ones(6)
    assert_allclose(
        a.to_numpy() @ np.ones(6), (a @ torch.ones(6, dtype=torch.float64)).numpy(), rtol=1e-12
    )
    assert (a @ torch.ones(6, dtype=torch.int64)).dtype == torch.float64
    complex_x = torch.ones(6, dtype=torch.complex64)
    assert_allclose((a @ complex_x).numpy(), sum_of_terms(a.to_numpy()) @ np.ones(6), rtol=1e-6)


def test_a_zero_matrix_keeps_the_common_type():
    zero = lsr.SeparatedMatrix.from_factors([np.zeros((1, 2, 2), complex), np.ones((1, 2, 2))])
    assert (zero @ np.ones(4)).dtype == np.complex128
    assert np.array_equal(zero[1:3], np.zeros((2, 4)))
    assert zero.trace() == 0.0
    assert zero[0, 0] == 0.0
    assert zero.kron(zero).shape == (16, 16)


def test_what_cannot_be_is_one_clear_error():
    a = lsr.SeparatedMatrix.from_factors([np.ones((2, 2, 3)), np.ones((2, 2, 2)) + np.eye(2)])
    with pytest.raises(ShapeError, match="expected 6 rows"):
        a @ np.ones(4)
    with pytest.raises(ShapeError, match="cannot add"):
        a + a.T
    with pytest.raises(ShapeError, match="one term"):
        a / (
            a
            + a * np.full((4, 6), 1.0).view()[0, 0]
            + lsr.SeparatedMatrix.from_factors([np.eye(2, 3)[None], np.eye(2)[None]])
        )
    with pytest.raises(PrecisionError, match="factor 1 of the divisor has zero entries"):
        a / lsr.SeparatedMatrix.from_factors([np.eye(2, 3)[None], np.ones((1, 2, 2))])
    with pytest.raises(ZeroDivisionError):
        a / 0
    with pytest.raises(ShapeError, match="no trace"):
        a.trace()
    with pytest.raises(ValueError, match="copy=False"):
        a.__array__(copy=False)


@given(case=cases())
def test_files_give_back_equal_bits(case, tmp_path_factory):
    a = case[0]
    path = a.save(
        tmp_path_factory.mktemp("saved") / "a.safetensors",
        provenance={"from": "a test", "rtol": 1e-3},
    )
    back = lsr.SeparatedMatrix.load(path)
    assert np.array_equal(back.weights, a.weights)
    assert all(
        np.array_equal(f, g) and f.dtype == g.dtype
        for f, g in zip(back.factors, a.factors, strict=True)
    )
    assert read_provenance(path) == {"from": "a test", "rtol": 1e-3}
    assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]


def test_files_that_are_not_ours_are_neither_read_nor_replaced(tmp_path):
    from safetensors.numpy import save_file

    a = lsr.SeparatedMatrix.from_factors([np.eye(2)[None], np.eye(3)[None]])
    path = a.save(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="overwrite=True"):
        a.save(path)
    assert a.save(path, overwrite=True) == path
    other = tmp_path / "lora.safetensors"
    save_file({"w": np.eye(2)}, other)
    before = other.read_bytes()
    for use in (lsr.SeparatedMatrix.load, lambda p: a.save(p, overwrite=True)):
        with pytest.raises(
            CheckpointError, match=r"lora.safetensors: holds no lsrdecomp.SeparatedMatrix"
        ):
            use(other)
    assert other.read_bytes() == before
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"cut.safetensors: not a safetensors file"):
        lsr.SeparatedMatrix.load(cut)
    with pytest.raises(CheckpointError, match="no such file"):
        lsr.SeparatedMatrix.load(tmp_path / "none")
    with pytest.raises(CheckpointError, match="no directory"):
        a.save(tmp_path / "none" / "a")
    with pytest.raises(CheckpointError, match="no regular file"):
        a.save(tmp_path, overwrite=True)
    text = {
        "kind": "lsrdecomp.SeparatedMatrix",
        "dtype": "float64",
        "kronecker_shape": json.dumps([[2, 2]]),
    }
    save_file({"weights": np.ones(1), "factors.0": np.ones((1, 3, 3))}, other, text)
    with pytest.raises(CheckpointError, match="its header says"):
        lsr.SeparatedMatrix.load(other)


def test_a_decomposition_acts_as_its_approximation_and_prints_its_terms():
    i = np.arange(16.0)
    hilbert = 1.0 / (1.0 + i[:, None] + i[None, :])
    found = lsr.decompose(hilbert, lsr.KroneckerShape(((4, 4), (4, 4))), rank=3)
    assert np.array_equal(found @ i, found.approximation @ i)
    assert np.array_equal(found.to_matrix(), found.approximation.to_matrix())
    text = str(found)
    assert "16 × 16 as 3 × [4×4 ⊗ 4×4]" in text
    assert [line.split()[0] for line in text.splitlines()[2:5]] == ["1", "2", "3"]
    assert f"{found.relative_error:.3g}" in text
    assert f"bytes            {96 * 8:,} in float64; 96 numbers instead of 256" in text
    assert "\n" not in found.summary


def test_the_docstring_is_a_table_of_contents():
    """Every public name is in it, and its chapters are those of the class body, in their order."""
    text = lsr.SeparatedMatrix.__doc__
    contents = text[text.index("**Contents.**") : text.index("Every operation returns")]
    words = set(contents.replace("`", " ").replace(",", " ").replace(":", " ").split())
    public = {name for name in dir(lsr.SeparatedMatrix) if not name.startswith("_")}
    assert public <= words
    chapters = re.findall(r"- \*(\w+)\*:", contents)
    assert chapters == re.findall(r"# --- (\w+) ---", inspect.getsource(lsr.SeparatedMatrix))


@pytest.mark.parametrize(
    "settings",
    [
        {"shape": "8x8, 4x4", "rank": 3},
        {"shape": "4x4, 4x4, 2x2", "rtol": 1e-2},
        {"shape": "8x8, 4x4", "budget": ErrorBudget(rtol=1e-2)},
        {"shape": "8x8, 4x4", "rank": 2, "storage": "float16"},
    ],
)
def test_a_saved_decomposition_comes_back_with_its_figures(tmp_path, settings):
    i = np.arange(32.0)
    result = lsr.decompose(1.0 / (1.0 + i[:, None] + i[None, :]), **settings)
    again = lsr.solvers.Decomposition.load(
        result.save(tmp_path / "r.safetensors", provenance={"n": 1})
    )
    names = "relative_error status storage target_norm error_kind optimality_gap gap_kind sweeps"
    for name in [*names.split(), "bytes", "separation_rank", "summary"]:
        assert getattr(again, name) == getattr(result, name), name
    assert np.array_equal(again.toarray(), np.asarray(result))
    assert read_provenance(tmp_path / "r.safetensors") == {"n": 1}
    plain = SeparatedMatrix.load(tmp_path / "r.safetensors")
    assert type(plain) is SeparatedMatrix
    twice = lsr.solvers.Decomposition.load(again.save(tmp_path / "twice.safetensors"))
    assert twice.summary == result.summary


def test_a_matrix_without_figures_is_no_decomposition(tmp_path, rng):
    matrix = SeparatedMatrix.from_factors([rng.standard_normal((1, 2, 2))])
    path = matrix.save(tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="SeparatedMatrix.load reads it"):
        lsr.solvers.Decomposition.load(path)
    result = lsr.decompose(rng.standard_normal((4, 4)), "2x2, 2x2", rank=1)
    write_terms(
        path, result.weights, result.factors, provenance=None, overwrite=True, figures={"status": 1}
    )
    with pytest.raises(CheckpointError, match="its figures cannot be read"):
        lsr.solvers.Decomposition.load(path)


def test_torch_forms_the_matrix_once(monkeypatch, rng):
    torch = pytest.importorskip("torch")
    matrix = SeparatedMatrix.from_factors([rng.standard_normal((2, 3, 4)) for _ in range(2)])
    monkeypatch.delattr(SeparatedMatrix, "__getitem__")
    assert np.array_equal(torch.as_tensor(matrix).numpy(), matrix.toarray())
    assert np.array_equal(np.from_dlpack(matrix), matrix.toarray())
    other = SeparatedMatrix.from_factors([torch.ones(1, 2, 2), torch.ones(1, 2, 2)])
    assert torch.equal(torch.as_tensor(other), other.to_matrix())


def test_an_operand_of_another_library_is_named_by_that_library(rng):
    strict = pytest.importorskip("array_api_strict", reason="a library of arrays beside NumPy")
    matrix = lsr.decompose(rng.standard_normal((4, 4)), "2x2, 2x2", rank=1).approximation
    words = "the factors are arrays of numpy, the operand is one of array_api_strict; "
    with pytest.raises(TypeError, match=words):
        matrix @ strict.zeros(4)
