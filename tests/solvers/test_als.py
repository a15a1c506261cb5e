"""Alternating least squares with a penalty: libraries, factors, goals, statuses, bad input."""

import math
from functools import cache, reduce

import numpy as np
import problems
import pytest
from drawing import drawing
from hypothesis import given
from hypothesis import strategies as st

from lsrdecomp.arrays import to_numpy
from lsrdecomp.decompose import decompose
from lsrdecomp.errors import BudgetError, PrecisionError, ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import ErrorBudget, tolerance
from lsrdecomp.solvers.cp.als import ALS
from lsrdecomp.solvers.cp.hosvd import compress
from lsrdecomp.solvers.cp.levenberg_marquardt import (
    _curvature_products,
    _NormalEquations,
    n_unknowns,
    refine,
)
from lsrdecomp.solvers.cp.mttkrp import assemble, products, sweep
from lsrdecomp.solvers.cp.regularized import alternate, storage_ridge
from lsrdecomp.solvers.cp.terms import CPTerms
from lsrdecomp.solvers.iteration import SolveProgress
from lsrdecomp.solvers.solver import Status
from lsrdecomp.targets.convert import as_target
from lsrdecomp.targets.target import Dense

THREE = KroneckerShape(((2, 3), (3, 2), (4, 2)))


def exact(shape, rank, seed=0, kind=np.float64):
    rng = np.random.default_rng(seed)
    factors = [rng.standard_normal((rank, m, n)).astype(kind) for m, n in shape.factors]
    if np.issubdtype(kind, np.complexfloating):
        factors = [(f + 1j * rng.standard_normal(f.shape)).astype(kind) for f in factors]
    return SeparatedMatrix.from_factors(factors)


def unfold(tensor, mode):
    return np.moveaxis(tensor, mode, 0).reshape(tensor.shape[mode], -1)


def khatri_rao(columns):
    return np.stack(
        [reduce(np.kron, [c[:, k] for c in columns]) for k in range(columns[0].shape[1])], axis=1
    )


@pytest.mark.parametrize("sizes", [(4,), (3, 5), (2, 3, 4), (2, 1, 3, 2), (2, 2, 2, 2, 3)])
def test_the_dimension_tree_gives_the_products_of_their_definition(sizes, rng):
    tensor = rng.standard_normal(sizes) + 1j * rng.standard_normal(sizes)
    columns = [rng.standard_normal((p, 3)) + 1j * rng.standard_normal((p, 3)) for p in sizes]
    for mode, product in enumerate(products(tensor, columns)):
        others = [c for m, c in enumerate(columns) if m != mode]
        expected = (
            unfold(tensor, mode) @ khatri_rao(others).conj()
            if others
            else np.stack([tensor] * 3, axis=1)
        )
        np.testing.assert_allclose(product, expected, atol=1e-12)


def test_a_sweep_uses_the_newest_factors(rng):
    tensor, columns = (
        rng.standard_normal((2, 3, 4)),
        [rng.standard_normal((p, 2)) for p in (2, 3, 4)],
    )
    seen = []

    def update(mode, product):
        current = [2.0 * c if m in seen else c for m, c in enumerate(columns)]
        others = [c for m, c in enumerate(current) if m != mode]
        np.testing.assert_allclose(product, unfold(tensor, mode) @ khatri_rao(others), atol=1e-12)
        seen.append(mode)
        return 2.0 * columns[mode]

    sweep(tensor, columns, update)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("sizes", [(30, 20, 25), (40, 6), (5, 40), (30, 3, 2)])
def test_compression_is_exact_up_to_the_multilinear_rank(sizes, xp, rng):
    columns = [xp.asarray(rng.standard_normal((p, 3))) for p in sizes]
    tensor = assemble(columns, xp.asarray([1.0, 1e-3, 1e-10]))
    packed = compress(tensor, [3] * len(sizes))
    rebuilt = to_numpy(packed.core)
    for mode, basis in enumerate(packed.bases):
        if basis is not None:
            q = to_numpy(basis)
            np.testing.assert_allclose(q.T @ q, np.eye(q.shape[1]), atol=1e-13)
            rebuilt = np.moveaxis(np.tensordot(q, rebuilt, (1, mode)), 0, mode)
    assert np.linalg.norm(rebuilt - to_numpy(tensor)) <= 1e-13 * np.linalg.norm(to_numpy(tensor))


@pytest.mark.parametrize("kind", [np.float64, np.complex128])
def test_the_newton_step_descends_along_the_gradient_of_the_penalised_objective(kind, rng):
    """Refining from a minimiser of the objective stays there; a small move away comes back."""
    tensor = problems.border_rank_two().astype(kind)
    tensor = tensor / np.linalg.norm(tensor)
    if kind is np.complex128:
        unitary = np.linalg.qr(rng.standard_normal((2, 2)) + 1j * rng.standard_normal((2, 2)))[0]
        tensor = np.einsum("abc,xa,yb,zc->xyz", tensor, unitary, unitary, unitary)
    ridge = 1e-5
    start = CPTerms.of([rng.standard_normal((2, 2)).astype(kind) for _ in range(3)])
    start = alternate(tensor, start, ridge, sweeps=200, rtol=1e-8)

    def objective(terms):
        return np.linalg.norm(tensor - terms.to_tensor()) ** 2 + ridge * np.sum(terms.weights**2)

    best = refine(tensor, start, ridge, iterations=300, rtol=1e-9)
    assert objective(best) <= objective(start)
    gradient_free = [
        objective(CPTerms.of([c + 1e-4 * rng.standard_normal(c.shape) for c in best.balanced()]))
        for _ in range(20)
    ]
    assert min(gradient_free) > objective(best)


@pytest.mark.parametrize("d", [2, 3, 4])
@pytest.mark.parametrize("kind", [np.float64, np.complex128])
def test_exact_terms_are_found(d, kind):
    shape = KroneckerShape(((3, 2), (2, 4), (3, 3), (2, 2))[:d])
    target = Dense(exact(shape, 3, d, kind).to_matrix())
    solution = ALS(storage="float64").solve(target, shape, rank=3)
    assert target.residual_norm(solution.approximation) <= 1e-12 * target.norm
    assert solution.status is Status.rank_reached


@cache
def found_by_numpy():
    matrix = exact(THREE, 2, 5).to_matrix()
    return matrix, ALS(storage="float64").solve(Dense(matrix), THREE, rank=2).approximation.weights


def test_every_library_finds_the_same(xp):
    matrix, weights = found_by_numpy()
    target = Dense(xp.asarray(matrix))
    solution = ALS(storage="float64").solve(target, THREE, rank=2)
    assert type(solution.approximation.factors[0]) is type(target.matrix)
    assert target.residual_norm(solution.approximation) <= 1e-12 * target.norm
    np.testing.assert_allclose(to_numpy(solution.approximation.weights), weights, rtol=1e-8)


@pytest.mark.parametrize("kind", ["float32", "complex64"])
def test_single_precision_stays_single_and_reaches_it(xp, kind):
    shape = KroneckerShape(((6, 6), (6, 6), (2, 3)))
    matrix = exact(shape, 2, 3, np.dtype(kind)).to_matrix()
    target = Dense(xp.asarray(matrix.astype(kind)))
    approximation = ALS().solve(target, shape, rank=2).approximation
    assert approximation.factors[0].dtype == target.matrix.dtype
    assert target.residual_norm(approximation) <= tolerance("float32", 8) * target.norm


@pytest.mark.parametrize("kind", ["float32", "complex64"])
def test_a_tolerance_below_the_rounding_of_the_input_is_met_in_double_precision(kind, xp):
    """Terms of the input's type ended at 5.7e-8 with the advice to store in a finer type."""
    shape = KroneckerShape(((4, 2), (3, 3), (5, 5)))
    matrix = exact(shape, 4, kind=np.dtype(kind)).to_matrix()
    target = Dense(xp.asarray(matrix.astype(kind)))
    solution = ALS().solve(target, shape, atol=1e-11 * target.norm)
    assert solution.status is Status.converged
    assert target.residual_norm(solution.approximation) <= 1e-11 * target.norm


def test_with_two_factors_it_agrees_with_the_svd():
    matrix, shape = problems.hilbert(36), problems.square(6, 6)
    target = Dense(matrix)
    error = target.residual_norm(ALS(storage="float64").solve(target, shape, rank=3).approximation)
    sigma = np.linalg.svd(problems.rearranged(matrix, shape), compute_uv=False)
    assert math.isclose(error, np.linalg.norm(sigma[3:]), rel_tol=1e-6)


def test_the_scale_of_the_matrix_does_not_matter():
    """Squares leave the range of double precision at the outer two."""
    shape = KroneckerShape(((2, 2), (3, 3), (4, 4)))
    targets = [Dense(problems.hilbert(24) * scale) for scale in (1.0, 1e-300, 1e300)]
    relative = [
        t.residual_norm(ALS().solve(t, shape, rank=3).approximation) / t.norm for t in targets
    ]
    assert relative[1:] == pytest.approx(relative[:1] * 2, rel=1e-6)


def test_a_tolerance_takes_few_terms_and_keeps_it():
    target, shape = Dense(problems.hilbert(64)), problems.square(4, 4, 4)
    seen = []
    solution = ALS().solve(target, shape, atol=1e-3 * target.norm, on_sweep=seen.append)
    assert solution.status is Status.converged
    assert target.residual_norm(solution.approximation) <= 1e-3 * target.norm
    fewer = ALS().solve(target, shape, rank=solution.approximation.separation_rank - 1)
    assert target.residual_norm(fewer.approximation) > 0.7e-3 * target.norm
    assert tuple(seen) == solution.sweeps
    assert [sweep.index for sweep in seen] == list(range(1, len(seen) + 1))
    assert seen[-1].relative_error <= 1.1e-3


def test_statuses_say_how_it_ended():
    target, shape = Dense(problems.hilbert(64)), problems.square(4, 4, 4)
    assert (
        ALS().solve(target, shape, rank=2, atol=1e-6 * target.norm).status is Status.rank_exhausted
    )
    assert (
        ALS(max_sweeps=2).solve(target, shape, atol=1e-6 * target.norm).status is Status.sweep_limit
    )
    matrix, border = problems.as_matrix(problems.border_rank_two())
    cancelling = ALS(storage="bfloat16", ridge=0.0).solve(
        Dense(matrix), border, rank=2, atol=1e-3 * np.sqrt(3)
    )
    assert cancelling.status is Status.ill_conditioned


def test_noise_is_fitted_as_a_whole_from_several_starts():
    """A core of 2s directions loses most of it.

    Errors were .9483 on average with γ of 50 to 1,300, where peers reach .9474.
    """
    results = [
        decompose(
            np.random.default_rng(seed).standard_normal((64, 64)), problems.square(4, 4, 4), rank=4
        )
        for seed in range(4)
    ]
    assert np.mean([result.relative_error for result in results]) < 0.9475
    assert max(result.condition for result in results) < 10.0


def test_a_condition_that_buys_nothing_is_said_in_print():
    """γ = 181 for an error that γ = 1.3 nearly reaches; where γ buys digits, nothing is said."""
    inverse, shape = problems.variable_coefficient_inverse(512), problems.square(8, 8, 8)
    plain = decompose(inverse, shape, rank=8, solver=ALS(initializations=1))
    assert plain.condition > 50.0
    words = 'solver=ALS(storage="bfloat16") keeps γ low'
    assert all(
        words in text
        for text in (str(plain), plain.summary, plain._repr_html_().replace("&quot;", '"'))
    )
    bounded = decompose(inverse, shape, rank=8, solver=ALS(storage="bfloat16", initializations=1))
    assert bounded.condition < 4.0
    assert bounded.relative_error < 1.05 * plain.relative_error
    assert "worth" not in str(bounded)
    border = decompose(problems.sum_operator(4), problems.square(*[2] * 4), rank=2)
    assert border.condition > 50.0
    assert "worth" not in str(border)


def test_the_penalty_is_what_rounding_costs():
    """α stands for the mean square rounding error of d factors, within a quarter."""
    rng = np.random.default_rng(0)
    for storage in ("float16", "bfloat16"):
        squares = []
        for _ in range(50):
            term = SeparatedMatrix.from_factors([rng.standard_normal((1, 8, 8)) for _ in range(3)])
            squares.append((term - term.round_to(storage)).norm ** 2 / term.norm**2)
        assert math.isclose(
            np.sqrt(np.mean(squares)), math.sqrt(storage_ridge(storage, 3)), rel_tol=0.25
        )


def test_zero_and_one_entry_matrices():
    zero = ALS().solve(Dense(np.zeros((24, 12))), THREE, rank=3)
    assert zero.approximation.separation_rank == 0
    assert ALS().solve(Dense(np.zeros((24, 12))), THREE, atol=0.0).status is Status.converged
    one = ALS().solve(Dense([[3.0]]), KroneckerShape(((1, 1),) * 3), rank=4)
    np.testing.assert_allclose(one.approximation.to_matrix(), [[3.0]])


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 99),
)
@drawing(0.75)
def test_any_shape_is_fitted_without_surprise(pairs, rank, seed):
    """1×n factors, one factor, rank-deficient targets: never worse than the zero matrix."""
    shape = KroneckerShape(tuple(pairs))
    target = Dense(exact(shape, 2, seed).to_matrix())
    approximation = ALS(initializations=1).solve(target, shape, rank=rank).approximation
    assert target.residual_norm(approximation) <= (1.0 + 1e-12) * target.norm
    if rank >= shape.max_separation_rank:
        assert target.residual_norm(approximation) <= 1e-6 * target.norm


def test_bad_input_is_refused_with_a_reason():
    with pytest.raises(BudgetError, match="rank= or atol="):
        ALS().solve(Dense(np.eye(8)), problems.square(2, 2, 2))
    with pytest.raises(BudgetError, match="ridge"):
        ALS(ridge=-1.0)
    with pytest.raises(BudgetError, match="initializations must be at least 1"):
        ALS(initializations=0)
    with pytest.raises(PrecisionError, match="float12"):
        ALS(storage="float12")
    with pytest.raises(ShapeError, match="8"):
        ALS().solve(Dense(np.eye(9)), problems.square(2, 2, 2), rank=1)


def test_decompose_takes_it_for_three_factors():
    result = decompose(problems.hilbert(64), problems.square(4, 4, 4), rtol=1e-3, storage="float16")
    assert result.status is Status.converged
    assert result.relative_error <= 1e-3
    assert result.sweeps


def test_an_exact_short_sum_of_many_factors_is_met_with_no_more_terms():
    """The loss of a core was one minus a square, 2e-8 at two ulp, and ran to 64 terms below that.

    `python -m benchmarks.solvers.exact_sums` does the same with 500 sums, and times them.
    """
    for drawn in problems.drawn_sums(6):
        result = decompose(drawn.matrix, drawn.shape, rtol=drawn.rtol)
        assert result.status is Status.converged, drawn
        assert result.separation_rank <= drawn.terms, drawn
        assert problems.relative_error(drawn.matrix, result.approximation) <= 1.01 * drawn.rtol, (
            drawn
        )
    rng = np.random.default_rng(0)
    matrix = sum(reduce(np.kron, [rng.standard_normal((2, 2)) for _ in range(4)]) for _ in range(3))
    result = decompose(matrix, [(2, 2)] * 4, rtol=1e-9)
    assert (result.status, result.separation_rank) == (Status.converged, 3)


@pytest.mark.parametrize("d", [3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_a_tight_tolerance_finds_the_d_terms_of_a_laplacian(d):
    """Growth went on from two polished terms that cancelled, and took 5, 6 and 14 terms."""
    one = problems.one_dimensional_laplacian(2)
    laplacian = sum(
        reduce(np.kron, [one if i == k else np.eye(2) for i in range(d)]) for k in range(d)
    )
    for matrix in (problems.sum_operator(d), laplacian):
        result = decompose(matrix, problems.square(*[2] * d), rtol=1e-13)
        assert (result.status, result.separation_rank) == (Status.converged, d)
        assert result.condition < 10.0


def test_as_many_terms_as_fibres_are_exact_and_no_more_are_taken(xp, rng):
    """The fit ended at the largest rank above the tolerance, though there is an exact one."""
    shape = KroneckerShape(((2, 2), (2, 2), (1, 2)))
    matrix = rng.standard_normal((4, 8)) + 1j * rng.standard_normal((4, 8))
    matrix[:, 1::2] = 0.0  # of eight fibres four
    target = Dense(xp.asarray(matrix))
    for solution in (
        ALS().solve(target, shape, rank=8),
        ALS(ridge=1e-2, initializations=1).solve(target, shape, atol=1e-12 * target.norm),
    ):
        assert solution.status.met
        assert solution.approximation.separation_rank == 4
        assert target.residual_norm(solution.approximation) <= 1e-15 * target.norm
    fewer = ALS(ridge=1e-2, initializations=1).solve(
        target, shape, rank=3, atol=1e-12 * target.norm
    )
    assert fewer.status is Status.rank_exhausted


@pytest.mark.parametrize(
    "sizes", ["6x4,1x1,5x5", "1x1,6x4,5x5,1x1", "1x1,1x1,30x20", "2x2,3x2,1x1,5x5"]
)
def test_factors_of_one_entry_cost_nothing_and_change_nothing(sizes, xp, rng):
    """A 1×1 factor made three factors of two, which took ten seconds for the SVD of a moment."""
    shape = KroneckerShape.parse(sizes)
    matrix = xp.asarray(rng.standard_normal((30, 20)) + 1j * rng.standard_normal((30, 20)))
    full, short = (decompose(matrix, each, rank=2) for each in (shape, shape.essential))
    assert full.kronecker_shape == shape
    assert full.relative_error == pytest.approx(short.relative_error, rel=1e-9, abs=1e-14)
    assert (full.condition, full.status) == (pytest.approx(short.condition), short.status)
    # A start with phases in the 1×1 factors, and a sum of that shape as the matrix, are taken as
    # they are.
    turned = [f * (1j if f.shape[1:] == (1, 1) else 1.0) for f in full.factors]
    start = SeparatedMatrix.from_factors(turned, full.weights)
    target = Dense(start.to_matrix())
    for solution in (
        ALS(init=start).solve(target, shape, rank=start.separation_rank),
        ALS().solve(as_target(start), shape, rank=start.separation_rank),
    ):
        assert target.residual_norm(solution.approximation) <= 1e-6 * target.norm


def test_where_every_term_is_needed_the_fibres_are_taken_at_once(rng):
    """Terms were grown one by one to as many as are exact anyway, for seconds."""
    matrix, shape = rng.standard_normal((40, 30)), KroneckerShape(((2, 1), (4, 2), (5, 15)))
    record = decompose(matrix, shape, rtol=1e-2)
    assert (record.separation_rank, len(record.sweeps)) == (16, 1)
    short = np.kron(np.kron(np.ones((2, 1)), np.ones((4, 2))), rng.standard_normal((5, 15)))
    assert decompose(short + 1e-5 * matrix, shape, rtol=1e-2).separation_rank == 1


def test_where_no_sum_is_shorter_than_the_matrix_an_exact_one_is_found_without_newton_steps(
    monkeypatch, rng
):
    """Four seconds went into 39 terms of 1,599 numbers for the 1,200 of a matrix of noise."""
    unknowns = []

    def noting(core, terms, *arguments, **options):
        unknowns.append(n_unknowns(terms))
        return refine(core, terms, *arguments, **options)

    monkeypatch.setattr("lsrdecomp.solvers.cp.incremental.refine", noting)
    matrix, shape = rng.standard_normal((40, 30)), KroneckerShape(((4, 3), (5, 5), (2, 2)))
    record = decompose(matrix, shape, rtol=1.3e-11, solver=ALS())
    assert max(unknowns) <= 800
    assert record.relative_error <= 1.3e-11
    assert record.separation_rank <= 48
    assert "nothing is gained" in record.remark


@pytest.mark.parametrize("kind", [float, complex])
def test_a_goal_that_is_met_is_not_met_by_the_guiding_penalty(kind):
    """The identity came out as 0.99 of itself, an error of 9.9e-3 for the 1e-2 that was allowed."""
    matrix = np.eye(64, dtype=kind) * (1j if kind is complex else 1.0)
    record = decompose(matrix, ((4, 4),) * 3, rtol=1e-2)
    assert (record.separation_rank, record.relative_error < 1e-12) == (1, True)


def test_a_core_keeps_the_directions_that_hold_more_than_a_tolerance(xp, rng):
    columns = [xp.asarray(rng.standard_normal((p, 3))) for p in (6, 7, 8)]
    tensor = assemble(columns, xp.asarray([1.0, 1e-3, 1e-9]))
    packed = compress(tensor, [16] * 3, atol=1e-6)
    assert packed.core.shape == (2, 2, 2)
    assert 0.0 < packed.loss <= 1e-6


def jacobian_of(columns):
    """The derivatives of a sum of three-factor terms, by every entry of its columns."""
    derivatives = []
    for mode, column in enumerate(columns):
        for row, term in np.ndindex(*column.shape):
            factors = [other[:, term] for other in columns]
            factors[mode] = np.eye(column.shape[0])[row]
            derivatives.append(np.einsum("a,b,c->abc", *factors).ravel())
    return np.array(derivatives).T


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_the_step_by_spans_solves_the_dense_normal_equations(dtype):
    # Modes longer than, as long as, and shorter than there are terms.
    rng = np.random.default_rng(0)
    s = 4
    columns = []
    right = []
    for p in (7, 4, 3):
        column, part = rng.standard_normal((2, p, s)).astype(dtype)
        if dtype is np.complex128:
            column, part = (column, part) + 1j * rng.standard_normal((2, p, s))
        columns.append(column)
        right.append(part)
    jacobian = jacobian_of(columns)
    dense = jacobian.conj().T @ jacobian
    damped = dense + 0.1 * np.diag(np.diag(dense))
    expected = np.linalg.solve(damped, np.concatenate([part.ravel() for part in right]))

    equations = _NormalEquations.of(columns, ridge=0.0, min_split_unknowns=0).damped(0.1)
    assert equations is not None
    step = equations.solve(np.concatenate(right))
    np.testing.assert_allclose(step.ravel(), expected, 1e-9)


@pytest.mark.parametrize("sizes", [(3, 4), (3, 4, 2), (2, 3, 2, 3)])
def test_the_second_derivative_of_a_sum_along_a_step_is_that_of_differences(sizes, rng):
    def drawn():
        return [rng.standard_normal((p, 2)) + 1j * rng.standard_normal((p, 2)) for p in sizes]

    columns, moves = drawn(), drawn()

    def ahead(h):
        shifted = [c + h * move for c, move in zip(columns, moves, strict=True)]
        return assemble(shifted, np.ones(2))

    h = 1e-4
    differences = (ahead(h) + ahead(-h) - 2.0 * ahead(0.0)) / h**2
    grams = [column.conj().T @ column for column in columns]
    for found, expected in zip(
        _curvature_products(columns, grams, moves), products(differences, columns), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_fit_that_is_at_its_end_takes_one_step(rng):
    """It took three, at each value of the penalty: two thirds of the steps of an easy problem."""
    columns = [np.linalg.qr(rng.standard_normal((6, 3))).Q for _ in range(3)]
    core = assemble(columns, np.array([0.8, 0.5, 0.3])) + 0.02 * rng.standard_normal((6, 6, 6))
    core /= np.linalg.norm(core)
    start = CPTerms(np.array([0.8, 0.5, 0.3]), tuple(columns))
    near = refine(core, start, 1e-8, iterations=50, rtol=1e-3)
    steps = []
    refine(core, near, 1e-8, iterations=50, rtol=1e-3, progress=SolveProgress(steps.append))
    assert len(steps) <= 1


def test_steps_that_serve_a_goal_end_where_it_is_out_of_their_reach(rng):
    core = rng.standard_normal((6, 6, 6))
    core /= np.linalg.norm(core)
    start = alternate(
        core, CPTerms.of([rng.standard_normal((6, 4)) for _ in range(3)]), 1e-8, sweeps=5, rtol=1e-9
    )

    def number_of_steps(goal, **options):
        steps = []
        progress = SolveProgress(steps.append)
        options = {"iterations": 60, "rtol": 1e-9} | options
        fitted = refine(core, start, 1e-8, goal=goal, progress=progress, **options)
        return len(steps), np.linalg.norm(core - fitted.to_tensor())

    full, misfit = number_of_steps(0.0)
    assert number_of_steps(0.2, is_for_goal=True)[0] <= 6 < full
    # A goal within reach is reached all the same.
    _, reached = number_of_steps(misfit + 1e-3, is_for_goal=True)
    assert reached <= misfit + 1e-3


def test_a_budget_on_noise_in_three_factors_takes_few_steps():
    """It took 777, nearly all on paths of the penalty that fell short of the goal."""
    rng = np.random.default_rng(1440510676)
    matrix = rng.standard_normal((100, 12))
    budget = ErrorBudget(rtol=0.55, storage="float8_e5m2")
    result = decompose(matrix, "5x4, 4x1, 5x3", budget=budget)
    assert result.relative_error <= 0.55
    assert result.bytes <= 840
    assert len(result.sweeps) < 600


def test_an_easy_problem_ends_with_two_fits_that_agree():
    rng = np.random.default_rng(3)
    matrix = np.zeros((64, 64))
    for _ in range(6):
        matrix += reduce(np.kron, rng.standard_normal((3, 4, 4)))
    shape = [(4, 4)] * 3
    one = decompose(matrix, shape, rank=4)
    many = decompose(matrix, shape, rank=4, solver=ALS(initializations=8))
    assert len(many.sweeps) == len(one.sweeps)
    single = decompose(matrix, shape, rank=4, solver=ALS(initializations=1))
    assert len(single.sweeps) < len(one.sweeps)


def test_a_goal_of_zero_leaves_the_ridge_that_rounding_needs():
    assert ALS().alpha(3, 0.0) == storage_ridge("float32", 3) > 0.0
    assert ALS().alpha(3, 1e-6) == pytest.approx(1e-12)
