"""Closed forms of one term and of sums with common bases, against dense NumPy."""

import warnings

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
from drawing import drawing
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

import lsrdecomp as lsr
from lsrdecomp import operators as ops
from lsrdecomp.arrays import to_numpy
from lsrdecomp.errors import BudgetError, ConvergenceError, MatrixError, PrecisionError, ShapeError
from lsrdecomp.operators.diagonal import nonzero_sums
from lsrdecomp.testing import invertible_matrices, kronecker_shapes

KINDS = ("float64", "complex128", "float32")
ROUNDING = {"float64": 1e-12, "complex128": 1e-12, "float32": 1e-5}


def kron(matrices):
    formed = np.ones((1, 1))
    for matrix in matrices:
        formed = np.kron(formed, matrix)
    return formed


def one(matrices):
    return lsr.SeparatedMatrix.from_factors([m[None] for m in matrices])


@st.composite
def terms(draw, kind=None, hermitian=False, definite=False, condition=5.0):
    """(one term, formed, its type) with well conditioned factors."""
    kind = draw(st.sampled_from(KINDS)) if kind is None else kind
    rows = draw(kronecker_shapes(max_entries=1024, square=True)).rows
    made = []
    for m in rows:
        factor = draw(
            invertible_matrices(m, complex_values=kind == "complex128", max_condition=condition)
        )
        if hermitian or definite:
            q = np.linalg.qr(factor)[0]
            rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
            values = rng.uniform(1.0 / condition, 1.0, m) * (
                1.0 if definite else rng.choice((-1.0, 1.0), m)
            )
            factor = (q * values) @ q.conj().T
            factor = 0.5 * (factor + factor.conj().T)
        made.append(factor.astype(kind))
    exact = [f.astype(np.result_type(kind, np.float64)) for f in made]
    return one(made), kron(exact), kind


def near(actual, expected, kind, factor=1.0):
    actual = to_numpy(actual)
    assert actual.shape == np.shape(expected)
    size = max(np.linalg.norm(np.atleast_1d(expected)), 1e-300)
    assert np.linalg.norm(np.atleast_1d(actual - expected)) <= factor * ROUNDING[kind] * size


# One term
# ------------------------------------------------------------------------------------------------


@given(terms())
def test_inverses(case):
    a, dense, kind = case
    near(ops.inv(a).to_matrix(), np.linalg.inv(dense), kind, 10)


@given(kronecker_shapes(max_entries=1024), st.sampled_from(KINDS), st.integers(0, 2**32 - 1))
def test_pseudo_inverses_and_singular_values(shape, kind, seed):
    rng = np.random.default_rng(seed)
    made = []
    for m, n in shape.factors:
        u, v = (np.linalg.qr(rng.standard_normal((q, min(m, n))))[0] for q in (m, n))
        values = rng.uniform(0.3, 1.0, min(m, n))
        values[rng.random(min(m, n)) < 0.2] = 0.0
        values[0] = 1.0
        made.append(((u * values) @ v.T).astype(kind))
    a, dense = one(made), kron([f.astype(np.result_type(kind, float)) for f in made])
    near(ops.pinv(a).to_matrix(), np.linalg.pinv(dense, rcond=1e-4), kind, 30)
    u, sigma, vh = ops.svd(a)
    expected = np.linalg.svd(dense, compute_uv=False)
    found = np.zeros_like(expected)
    found[: sigma.size] = np.sort(sigma)[::-1]
    near(found, expected, kind)
    near((u.to_matrix() * sigma) @ vh.to_matrix(), dense, kind, 2)


@given(terms())
def test_determinants(case):
    a, dense, kind = case
    sign, log = ops.slogdet(a)
    wanted_sign, wanted = np.linalg.slogdet(dense)
    allowed = ROUNDING[kind] * max(len(dense), abs(wanted))
    assert abs(log - wanted) <= allowed
    assert abs(sign - wanted_sign) <= 10 * allowed
    assert abs(ops.det(a) - np.linalg.det(dense)) <= 10 * allowed * abs(np.linalg.det(dense))


@given(terms(hermitian=True))
def test_hermitian_eigenvalues(case):
    a, dense, kind = case
    values, vectors = ops.eigh(a)
    near(np.sort(values), np.linalg.eigvalsh(dense), kind)
    near(ops.eigenvalues(a), np.linalg.eigvalsh(dense), kind)
    near((vectors.to_matrix() * values) @ vectors.mH.to_matrix(), dense, kind, 2)


@given(terms(definite=True))
def test_cholesky_and_square_roots(case):
    a, dense, kind = case
    lower = ops.cholesky(a).to_matrix()
    near(lower, np.linalg.cholesky(dense), kind, 5)
    root = ops.sqrtm(a)
    near((root @ root).to_matrix(), dense, kind, 2)
    near(root.to_matrix(), root.mH.to_matrix(), kind)
    flipped = lsr.SeparatedMatrix.from_factors([-a.factors[0], *a.factors[1:]], -a.weights)
    near(ops.cholesky(flipped).to_matrix(), lower, kind)


@given(terms(), st.integers(0, 3))
def test_solutions_of_one_term(case, columns):
    a, dense, kind = case
    rng = np.random.default_rng(columns)
    b = rng.standard_normal((len(dense), columns) if columns else len(dense)).astype(
        a.weights.dtype
    )
    found = ops.solve(a, b)
    near(found.x, np.linalg.solve(dense, b), kind, 10)
    assert (found.method, found.iterations) == ("factors", 0)
    assert found.converged


def test_every_library_agrees_on_one_term(xp, rng):
    made = [
        q @ q.T + np.eye(len(q)) for q in (rng.standard_normal((3, 3)), rng.standard_normal((2, 2)))
    ]
    a = lsr.SeparatedMatrix.from_factors([xp.asarray(f[None]) for f in made])
    dense, b = kron(made), rng.standard_normal(6)
    for ours, theirs in (
        (ops.inv(a).to_matrix(), np.linalg.inv(dense)),
        (ops.pinv(a).to_matrix(), np.linalg.inv(dense)),
        (ops.slogdet(a)[1], np.linalg.slogdet(dense)[1]),
        (ops.solve(a, xp.asarray(b)).x, np.linalg.solve(dense, b)),
        (ops.cholesky(a).to_matrix(), np.linalg.cholesky(dense)),
        (ops.sqrtm(a).to_matrix(), scipy.linalg.sqrtm(dense)),
        (xp.sort(ops.eigh(a).eigenvalues), np.linalg.eigvalsh(dense)),
        (xp.max(ops.svd(a).S), np.linalg.norm(dense, 2)),
        (ops.eigenvalues(a + a), 2 * np.linalg.eigvalsh(dense)),
        (ops.solve(a + a * 2.0, xp.asarray(b)).x, np.linalg.solve(3 * dense, b)),
    ):
        assert_allclose(to_numpy(ours), theirs, rtol=1e-11, atol=1e-12)


def test_torch_gradients_go_through_one_term(rng):
    torch = pytest.importorskip("torch")
    made = [
        torch.tensor((q @ q.T + np.eye(len(q)))[None], requires_grad=True)
        for q in map(rng.standard_normal, ((3, 3), (2, 2)))
    ]
    b = torch.tensor(rng.standard_normal(6))

    def figures(first, second):
        first, second = 0.5 * (first + first.mT), 0.5 * (second + second.mT)
        a = lsr.SeparatedMatrix.from_factors([first, second])
        return ops.solve(a, b).x, ops.slogdet(a)[1], ops.inv(a)[0, 1], ops.cholesky(a)[1, 0]

    assert torch.autograd.gradcheck(figures, made)


# Sums
# ------------------------------------------------------------------------------------------------


@st.composite
def kronecker_sums(draw, hermitian):
    """(sum, dense, parts): positive real parts, so that no two eigenvalues cancel."""
    rows = draw(kronecker_shapes(max_entries=1024, square=True)).rows
    complex_values = draw(st.booleans())
    parts = []
    for m in rows:
        part = draw(invertible_matrices(m, complex_values=complex_values, max_condition=4.0))
        part = part @ part.conj().T if hermitian else part + 1.5 * np.eye(m)
        parts.append(part)
    dense = sum(
        kron([p if k == i else np.eye(len(q)) for k, q in enumerate(parts)])
        for i, p in enumerate(parts)
    )
    return ops.kronecker_sum(*parts), dense, parts


@given(kronecker_sums(hermitian=True), st.data())
def test_hermitian_kronecker_sums(case, data):
    a, dense, _ = case
    b = np.random.default_rng(0).standard_normal((len(dense), 2))
    near(a.to_matrix(), dense, "float64")
    found = ops.solve(a, b, method="exact")
    near(found.x, np.linalg.solve(dense, b), "float64", 10)
    assert found.method in ("diagonal", "factors")
    near(ops.eigenvalues(a), np.linalg.eigvalsh(dense), "float64")
    assert abs(ops.logdet(a) - np.linalg.slogdet(dense)[1]) <= 1e-12 * len(dense)
    near(ops.expm_multiply(a, b, -0.5), scipy.linalg.expm(-0.5 * dense) @ b, "float64", 10)


@given(kronecker_sums(hermitian=False))
def test_kronecker_sums_that_are_not_hermitian(case):
    a, dense, _ = case
    b = np.random.default_rng(0).standard_normal(len(dense))
    found = ops.solve(a, b, method="exact")
    near(found.x, np.linalg.solve(dense, b), "float64", 100 * np.linalg.cond(dense))
    sign, log = ops.slogdet(a)
    wanted_sign, wanted = np.linalg.slogdet(dense)
    assert abs(log - wanted) <= 1e-11 * len(dense)
    assert abs(sign - wanted_sign) <= 1e-9
    near(ops.expm_multiply(a, b, 0.5), scipy.linalg.expm(0.5 * dense) @ b, "float64", 100)


def test_eigenvalues_of_a_sum_that_is_not_normal(rng):
    parts = [np.triu(rng.standard_normal((m, m))) + np.diag(np.arange(m) * 5.0) for m in (3, 4)]
    found = np.sort_complex(ops.eigenvalues(ops.kronecker_sum(*parts)))
    expected = np.sort_complex(np.add.outer(np.diag(parts[0]), np.diag(parts[1])).reshape(-1))
    assert_allclose(found, expected, atol=1e-10)


@given(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.integers(0, 2**32 - 1))
def test_two_general_terms(m, p, complex_values, seed):
    rng = np.random.default_rng(seed)
    stacks = [
        rng.standard_normal((2, q, q)) + 1j * complex_values * rng.standard_normal((2, q, q))
        for q in (m, p)
    ]
    stacks = stacks if complex_values else [s.real for s in stacks]
    stacks[0][0] += 3 * np.eye(m)
    stacks[1][0] += 3 * np.eye(p)
    a = lsr.SeparatedMatrix.from_factors(stacks)
    dense = kron([s[0] for s in stacks]) + kron([s[1] for s in stacks])
    b = rng.standard_normal((m * p, 2))
    condition = np.linalg.cond(dense)
    if condition > 1e6:
        return
    found = ops.solve(a, b, method="exact")
    near(found.x, np.linalg.solve(dense, b), "float64", condition)
    assert np.iscomplexobj(found.x) == complex_values
    sign, log = ops.slogdet(a)
    wanted_sign, wanted = np.linalg.slogdet(dense)
    assert abs(log - wanted) <= 1e-13 * condition * len(dense) + 1e-12
    assert abs(sign - wanted_sign) <= 1e-13 * condition * len(dense) + 1e-12


@given(terms(kind="float64", definite=True), st.integers(0, 2**32 - 1))
def test_finite_elements_with_their_mass(case, seed):
    """K ⊗ M ⊗ … + M ⊗ K ⊗ … by the generalised eigenproblem of each direction."""
    mass, _, _ = case
    rng = np.random.default_rng(seed)
    masses = [f[0] for f in mass.factors]
    stiff = []
    for m in masses:
        half = rng.standard_normal(m.shape)
        stiff.append(half @ half.T + np.eye(len(m)))
    stacks = [
        np.stack([stiff[i] if k == i else masses[i] for k in range(len(masses))])
        for i in range(len(masses))
    ]
    a = lsr.SeparatedMatrix.from_factors(stacks)
    dense = sum(kron([s[k] for s in stacks]) for k in range(len(masses)))
    unit = lsr.SeparatedMatrix.from_factors([m[None] for m in masses])
    expected = scipy.linalg.eigh(dense, kron(masses), eigvals_only=True)
    near(ops.eigenvalues(a, mass=unit), expected, "float64", 10)
    b = rng.standard_normal(len(dense))
    near(
        ops.solve(a, b, method="exact").x,
        np.linalg.solve(dense, b),
        "float64",
        np.linalg.cond(dense),
    )
    assert abs(ops.logdet(a) - np.linalg.slogdet(dense)[1]) <= 1e-12 * len(dense)


@given(terms(kind="float64", definite=True), st.floats(1e-2, 10.0))
def test_a_covariance_plus_noise(case, noise):
    k, dense, _ = case
    a = k + lsr.SeparatedMatrix.from_factors(
        [
            noise * np.eye(m)[None] if i == 0 else np.eye(m)[None]
            for i, m in enumerate(k.kronecker_shape.rows)
        ]
    )
    full = dense + noise * np.eye(len(dense))
    b = np.ones(len(dense))
    near(ops.solve(a, b).x, np.linalg.solve(full, b), "float64", 10)
    near(ops.eigenvalues(a), np.linalg.eigvalsh(full), "float64")


def random_sum(rng, rows, s, kind):
    stacks = []
    for m in rows:
        stack = rng.standard_normal((s, m, m))
        if kind != "general":
            stack = (
                stack @ stack.transpose(0, 2, 1)
                if kind == "positive"
                else stack + stack.transpose(0, 2, 1)
            )
        stacks.append(stack)
    stacks[0][0] += 6 * np.eye(rows[0]) * (1 if kind != "symmetric" else 0)
    return lsr.SeparatedMatrix.from_factors(stacks)


@drawing(1.5)
@given(
    st.sampled_from(("positive", "symmetric", "general")),
    st.integers(0, 2**32 - 1),
    st.sampled_from(((3, 4), (2, 3, 2))),
    st.sampled_from((1.0, 1e-15, 1e15)),
)
def test_other_sums_are_iterated_and_say_how_far_they_came(kind, seed, rows, scale):
    rng = np.random.default_rng(seed)
    a = random_sum(rng, rows, 3, kind) * scale
    dense, b = a.to_matrix(), rng.standard_normal(a.shape[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = ops.solve(a, b, rtol=1e-9)
    assert found.converged is not any(
        "allow more iterations" in str(each.message) for each in caught
    )
    assert found.method == {"positive": "cg", "symmetric": "minres", "general": "gmres"}[kind]
    true = np.linalg.norm(b - dense @ found.x) / np.linalg.norm(b)
    assert abs(true - found.relative_residual) <= 1e-12 * (
        1 + np.linalg.norm(dense) * np.linalg.norm(found.x)
    )
    assert found.converged == (found.relative_residual <= 1e-9)
    assert found.iterations > 0
    if np.linalg.cond(dense) < 1e4:
        assert found.converged
    with pytest.raises(MatrixError, match='method="auto" iterates'):
        ops.solve(a, b, method="exact")
    with pytest.raises(MatrixError, match="no closed form"):
        ops.logdet(a)


def symmetric_stack(rng, s, m, complex_values, shift):
    stack = rng.standard_normal((s, m, m)) + 1j * complex_values * rng.standard_normal((s, m, m))
    stack = stack + stack.conj().transpose(0, 2, 1) + shift * np.eye(m)
    return stack if complex_values else stack.real


def solvable_by(road, rng, complex_values):
    """A matrix, 3 × 4 blocks, that `solve` takes to this road of its own accord."""
    general = (
        rng.standard_normal((3, 3)) + 4 * np.eye(3),
        rng.standard_normal((4, 4)) + 5 * np.eye(4),
    )
    if complex_values:
        general = tuple(f + 1j * rng.standard_normal(f.shape) for f in general)
    if road == "factors":
        return one(general)
    if road == "triangular":
        return ops.kronecker_sum(*general)
    if road == "diagonal":
        stacks = [symmetric_stack(rng, 1, m, complex_values, 12) for m in (3, 4)]
        return ops.kronecker_sum(*(stack[0] for stack in stacks))
    shift = {"cg": 12, "minres": 0, "gmres": 12}[road]
    stacks = [symmetric_stack(rng, 3, m, complex_values, shift) for m in (3, 4)]
    if road == "gmres":
        stacks = [stack + np.triu(rng.standard_normal(stack.shape)) for stack in stacks]
    return lsr.SeparatedMatrix.from_factors(stacks)


@pytest.mark.parametrize("right_hand", ["one", "one column", "two", "as many as rows", "one is 0"])
@pytest.mark.parametrize("values", ["real", "complex b", "complex A", "both complex"])
@pytest.mark.parametrize("road", ["factors", "diagonal", "triangular", "cg", "minres", "gmres"])
def test_every_road_solves_each_right_hand_side_and_keeps_their_places(road, values, right_hand):
    """That a single vector is solved says nothing of several: they come back column for column."""
    rng = np.random.default_rng(61)
    complex_matrix = values in ("complex A", "both complex")
    if road == "minres" and complex_matrix:
        pytest.skip("SciPy's MINRES is for real symmetric matrices; GMRES takes these")
    a = solvable_by(road, rng, complex_matrix)
    shape = {"one": (12,), "one column": (12, 1), "as many as rows": (12, 12)}.get(right_hand)
    b = rng.standard_normal(shape or (12, 2))
    if values in ("complex b", "both complex"):
        b = b + 1j * rng.standard_normal(b.shape)
    if right_hand == "one is 0":
        b[:, 0] = 0.0
    found = ops.solve(a, b, rtol=1e-10)
    assert found.method == road
    assert found.converged
    expected = np.linalg.solve(a.to_matrix(), b)
    assert found.x.shape == b.shape
    assert np.iscomplexobj(found.x) == np.iscomplexobj(expected)
    assert_allclose(found.x, expected, rtol=0, atol=1e-7 * np.abs(expected).max())
    # The worst column stands for all, so that none hides behind another
    columns = [c for c in range(b.reshape(12, -1).shape[1]) if b.reshape(12, -1)[:, c].any()]
    residual = (b - a.to_matrix() @ found.x).reshape(12, -1)[:, columns]
    norms = np.linalg.norm(residual, axis=0) / np.linalg.norm(b.reshape(12, -1)[:, columns], axis=0)
    assert_allclose(found.relative_residual, norms.max(), atol=1e-12)


def test_the_iterations_of_several_right_hand_sides_are_those_of_the_slowest(rng):
    a = solvable_by("cg", rng, complex_values=False)
    vectors = np.linalg.eigh(a.to_matrix())[1]
    b = np.stack([vectors[:, 0], rng.standard_normal(12), vectors[:, 1]], axis=1)
    alone = [ops.solve(a, column, rtol=1e-10, preconditioner=None) for column in b.T]
    together = ops.solve(a, b, rtol=1e-10, preconditioner=None)
    counts = [found.iterations for found in alone]
    assert min(counts) < max(counts)
    assert together.iterations == max(counts)


def test_factors_that_lapack_gives_up_on_are_iterated(rng, monkeypatch):
    second = 2.0 * np.eye(5) - np.eye(5, k=1) - np.eye(5, k=-1)
    matrix = ops.kronecker_sum(second, second)
    # Without the mark of a Kronecker sum, whose matrices have a road of their own
    matrix = lsr.SeparatedMatrix(matrix.weights, matrix.factors)

    def gives_up(*arguments, **options):
        raise np.linalg.LinAlgError("the iteration did not converge")

    b = rng.standard_normal(25)
    assert ops.solve(matrix, b).method == "diagonal"
    monkeypatch.setattr("scipy.linalg.eigh", gives_up)
    solution = ops.solve(matrix, b, rtol=1e-10)
    assert solution.method != "diagonal"
    assert_allclose(matrix.to_matrix() @ solution.x, b, atol=1e-8)


def test_a_method_that_there_is_not_is_named_beside_those_that_there_are():
    a = lsr.SeparatedMatrix.from_factors([np.eye(3)[None], np.eye(4)[None]])
    with pytest.raises(BudgetError, match="method 'lu' is none of auto, exact, cg, minres, gmres"):
        ops.solve(a, np.ones(12), method="lu")


def test_minres_refuses_a_complex_matrix_and_names_a_method_that_takes_it(rng):
    a = solvable_by("cg", rng, complex_values=True)
    with pytest.raises(MatrixError, match='the factors are complex; method="gmres" takes any'):
        ops.solve(a, np.ones(12), method="minres")
    assert ops.solve(a, np.ones(12), method="gmres").converged


def test_an_iteration_that_falls_short_warns_or_raises_with_its_record(rng):
    a = random_sum(rng, (6, 6), 3, "general")
    with pytest.warns(RuntimeWarning, match=r"gmres: .* iterations"):
        assert not ops.solve(a, np.ones(36), preconditioner=None, max_iterations=2).converged
    with pytest.raises(ConvergenceError, match=r"gmres: .* iterations") as caught:
        ops.solve(a, np.ones(36), preconditioner=None, max_iterations=2, throw=True)
    assert caught.value.record.relative_residual > 1e-10


def test_what_cannot_be_solved_is_one_clear_error(rng):
    good, flat = np.eye(3) + 0.1, np.ones((3, 3))
    with pytest.raises(MatrixError, match=r"factor 2 \(3×3\) is singular"):
        ops.solve(one([good, flat]), np.ones(9))
    with pytest.raises(MatrixError, match=r"factor 2 \(3×3\) is singular"):
        ops.inv(one([good, flat]))
    with pytest.raises(MatrixError, match="the matrix is singular: the smallest of its 9 values"):
        ops.solve(
            ops.kronecker_sum(np.diag([1.0, 2.0, 3.0]), np.diag([-3.0, 5.0, 7.0])), np.ones(9)
        )
    with pytest.raises(MatrixError, match="diagonal values in Schur form"):
        ops.solve(
            ops.kronecker_sum(np.triu(np.ones((2, 2))), -np.triu(np.ones((2, 2)))), np.ones(4)
        )
    with pytest.raises(MatrixError, match="zero"):
        ops.solve(one([good]) * 0.0, np.ones(3))
    with pytest.raises(
        MatrixError, match="factor 1 is not positive definite: its smallest eigenvalue is -"
    ):
        ops.cholesky(one([np.diag([1.0, -0.5]), good]))
    with pytest.raises(MatrixError, match="negative definite"):
        ops.cholesky(one([-good]))
    with pytest.raises(MatrixError, match="factor 1 is not Hermitian"):
        ops.eigh(one([np.triu(good)]))
    with pytest.raises(ShapeError, match="this matrix has 2"):
        ops.inv(ops.kronecker_sum(good, good))
    with pytest.raises(ShapeError, match="needs square factors"):
        ops.inv(one([np.ones((2, 3)), np.ones((3, 2))]))
    with pytest.raises(ShapeError, match="b has shape"):
        ops.solve(one([good]), np.ones(4))
    with pytest.raises(ShapeError, match="needs a square one"):
        ops.solve(one([np.ones((2, 3))]), np.ones(2))
    with pytest.raises(ShapeError, match="part 2 of a Kronecker sum"):
        ops.kronecker_sum(good, np.ones((2, 3)))


@given(st.integers(0, 2**32 - 1))
def test_exponentials_of_any_sum(seed):
    rng = np.random.default_rng(seed)
    for kind in ("symmetric", "general"):
        a = random_sum(rng, (3, 2), 2, kind)
        a = a * (1.0 / a.norm)
        x = rng.standard_normal((6, 2))
        near(
            ops.expm_multiply(a, x, 2.0), scipy.linalg.expm(2.0 * a.to_matrix()) @ x, "float64", 10
        )


@pytest.mark.parametrize("kind", ["a Kronecker sum", "commuting factors", "others"])
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_a_hamiltonian_is_followed_in_time(kind, precision):
    """exp(−itH) of a real H and a real state is complex: nothing is lost, its norm stays."""
    x, z = np.array([[0.0, 1.0], [1.0, 0.0]]), np.diag([1.0, -1.0])
    first, second = {
        "a Kronecker sum": ([x, np.eye(2)], [np.eye(2), z]),
        "commuting factors": ([z, z], [np.eye(2), z]),
        "others": ([z, x, x], [z, z, np.eye(2)]),
    }[kind]
    h = lsr.SeparatedMatrix.from_factors(
        [np.stack(first).astype(precision), np.stack(second).astype(precision)]
    )
    state = np.array([0.5, 0.5, -0.5, 0.5], precision)
    moved = ops.expm_multiply(h, state, t=-0.7j)
    near(moved, scipy.linalg.expm(-0.7j * np.asarray(h)) @ state, precision)
    assert moved.dtype == np.result_type(precision, np.complex64)


@pytest.mark.parametrize(
    "name",
    [
        "solve",
        "expm_multiply",
        "slogdet",
        "logdet",
        "det",
        "eigenvalues",
        "inv",
        "pinv",
        "eigh",
        "svd",
    ],
)
def test_a_matrix_that_is_no_sum_yet_is_told_how_to_become_one(name):
    arguments = (np.ones(4),) if name in ("solve", "expm_multiply") else ()
    for matrix in (np.eye(4), scipy.sparse.csr_array(np.eye(4))):
        with pytest.raises(
            MatrixError, match=r"got a (ndarray|csr_array): make one of it by lsrdecomp.decompose\("
        ):
            getattr(ops, name)(matrix, *arguments)


@pytest.mark.parametrize("apply", [ops.solve, ops.expm_multiply])
def test_a_right_hand_side_that_is_not_finite_is_refused(apply, rng):
    with pytest.raises(PrecisionError, match=r"b: 1 of 6 entries are not finite \(the first at"):
        apply(random_sum(rng, (3, 2), 3, "general"), np.array([1.0, 2.0, np.nan, 3.0, 4.0, 5.0]))


def test_the_logarithm_of_a_negative_determinant_is_refused():
    negative = lsr.SeparatedMatrix.from_factors([np.diag([1.0, -1.0, 1.0])[None], np.eye(3)[None]])
    assert ops.slogdet(negative) == pytest.approx((-1.0, 0.0))
    with pytest.raises(MatrixError, match="see slogdet"):
        ops.logdet(negative)
    assert ops.logdet(negative @ negative) == pytest.approx(0.0)


def test_a_kronecker_sum_takes_its_matrices_one_by_one():
    for matrices in (
        [np.eye(3), np.eye(3)],
        [np.eye(3), np.eye(4)],
        [scipy.sparse.eye_array(3), np.eye(4)],
    ):
        with pytest.raises(
            ShapeError, match=r"part 1 .* is a list of matrices; write kronecker_sum\(A, B\)"
        ):
            ops.kronecker_sum(matrices)
    with pytest.raises(ShapeError, match=r"part 2 .* has shape \(2, 3\)$"):
        ops.kronecker_sum(np.eye(3), np.ones((2, 3)))


def test_a_small_sum_among_many_is_no_rounding():
    """Only what is added to one value is rounded in it."""
    values = np.ones((1, 1000))
    values[0, 0] = 1e-14
    assert_allclose(nonzero_sums(values, "values"), values[0])
    with pytest.raises(MatrixError, match="the smallest of its 2 values is 0"):
        nonzero_sums(np.array([[1.0, 1.0], [-1.0, 1.0]]), "values")
