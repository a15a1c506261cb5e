"""Gradients through torch: right to finite differences, or refused; never silently wrong."""

import numpy as np
import pytest

from lsrdecomp import ErrorBudget, KroneckerShape, LowRank, LsrError, decompose
from lsrdecomp.kronecker.rearrange import inverse_rearrange, rearrange
from lsrdecomp.solvers import ALS, SVD, Krylov, TensorLyCP, WeightedALS

torch = pytest.importorskip("torch")

# R(M) is 80 × 96: beyond the sides of which the full SVD is taken.
SHAPE = KroneckerShape(((10, 8), (8, 12)))
RANK = 3


@pytest.fixture
def problem(rng):
    """Return a matrix of falling spectrum, a direction, and weights that make a number of it."""
    u, v = (np.linalg.qr(rng.standard_normal((n, 80)))[0] for n in (80, 96))
    matrix = inverse_rearrange((u * np.exp(-np.arange(80) / 4.0)) @ v.T, SHAPE)
    return matrix, rng.standard_normal((80, 96)), rng.standard_normal((80, 96))


def along(matrix, direction, weights):
    """The derivative by central differences of the full SVD, exact to about ten digits."""
    step = 1e-5
    ahead, behind = (
        decompose(
            matrix + sign * step * direction, SHAPE, rank=RANK, solver=SVD()
        ).approximation.to_matrix()
        for sign in (1.0, -1.0)
    )
    return float(np.sum(weights * (ahead - behind))) / (2.0 * step)


@pytest.mark.parametrize(
    "solver", [None, SVD(), SVD(tolerance=1e-6), Krylov()], ids=lambda s: str(s)[:8]
)
def test_gradients_agree_with_finite_differences(solver, problem):
    matrix, direction, weights = problem
    given = torch.tensor(matrix, requires_grad=True)
    formed = decompose(given, SHAPE, rank=RANK, solver=solver).approximation.to_matrix()
    torch.sum(torch.tensor(weights) * formed).backward()
    slope = float(torch.sum(given.grad * torch.tensor(direction)))
    assert slope == pytest.approx(along(matrix, direction, weights), rel=1e-5)


def test_gradients_of_a_pair_agree_with_finite_differences(problem, rng):
    _, _, weights = problem
    left, right = rng.standard_normal((80, 4)), rng.standard_normal((4, 96))
    given = torch.tensor(left, requires_grad=True)
    formed = decompose(
        LowRank(given, torch.tensor(right)), SHAPE, rank=RANK
    ).approximation.to_matrix()
    torch.sum(torch.tensor(weights) * formed).backward()
    direction = rng.standard_normal((80, 4))
    slope = float(torch.sum(given.grad * torch.tensor(direction)))
    assert slope == pytest.approx(along(left @ right, direction @ right, weights), rel=1e-5)


@pytest.mark.parametrize(
    "solver", [ALS(), TensorLyCP(), WeightedALS(non_negative=True)], ids=lambda s: type(s).__name__
)
def test_what_passes_no_gradients_refuses_them(solver):
    cube = KroneckerShape(((2, 2), (2, 2), (2, 2)))
    given = torch.eye(8, dtype=torch.float64, requires_grad=True)
    with pytest.raises(LsrError, match="cannot be differentiated; pass matrix.detach()"):
        decompose(given, cube, rank=1, solver=solver)
    with torch.no_grad():
        assert decompose(given, cube, rank=1, solver=solver).relative_error < 1e-6


@pytest.mark.parametrize(
    "goal", [{"budget": ErrorBudget(rtol=0.5)}, {"rank": 2, "storage": "int8"}], ids=str
)
def test_codes_pass_no_gradients_and_say_so(problem, goal):
    given = torch.tensor(problem[0], requires_grad=True)
    with pytest.raises(LsrError, match="stored codes pass no gradients; pass matrix.detach()"):
        decompose(given, SHAPE, **goal)
    assert decompose(given.detach(), SHAPE, **goal).status.met


def test_without_gradients_the_space_is_grown_as_ever():
    shape = KroneckerShape(((12, 12), (12, 12)))
    matrix = inverse_rearrange(np.diag(1.0 / np.arange(1.0, 145.0)), shape)
    given = torch.tensor(matrix, requires_grad=True)
    with torch.no_grad():
        quiet = decompose(given, shape, rank=RANK, solver=Krylov())
    assert quiet.sweeps[-1].objective is not None  # the dense way tells none


@pytest.mark.parametrize("rank", [4, 20, 81])
def test_terms_that_are_rounding_are_refused_not_differentiated(rank):
    torch.manual_seed(1)
    wide = [torch.kron(torch.randn(9, 9).double(), torch.randn(10, 10).double()) for _ in range(3)]
    matrix = sum(wide).requires_grad_(True)
    with pytest.raises(LsrError, match=f"a matrix of 3 terms .* at rank={rank}; .* rank=3 or less"):
        decompose(matrix, "9x9, 10x10", rank=rank)


@pytest.mark.parametrize(
    "solver", [None, SVD(), SVD(tolerance=1e-6), Krylov()], ids=lambda s: str(s)[:8]
)
def test_below_the_terms_of_an_exact_sum_gradients_agree_with_finite_differences(
    solver, problem, rng
):
    _, direction, weights = problem
    left, right = rng.standard_normal((5, 10, 8)), rng.standard_normal((5, 8, 12))
    matrix = sum(0.5**k * np.kron(left[k], right[k]) for k in range(5))
    given = torch.tensor(matrix, requires_grad=True)
    formed = decompose(given, SHAPE, rank=RANK, solver=solver).to_matrix()
    torch.sum(torch.tensor(weights) * formed).backward()
    slope = float(torch.sum(given.grad * torch.tensor(direction)))
    assert slope == pytest.approx(along(matrix, direction, weights), rel=1e-5)


@pytest.mark.parametrize(
    "solver", [None, SVD(), SVD(tolerance=1e-6), Krylov()], ids=lambda s: str(s)[:8]
)
@pytest.mark.parametrize("terms", [1, RANK])
def test_at_the_terms_of_an_exact_sum_what_keeps_them_passes(solver, terms, problem, rng):
    """The best sum of as many terms near M moves by the tangential part of a change of M."""
    _, direction, weights = problem
    left, right = rng.standard_normal((terms, 80)), rng.standard_normal((terms, 96))
    rearranged = (0.5 ** np.arange(terms) * left.T) @ right
    given = torch.tensor(inverse_rearrange(rearranged, SHAPE), requires_grad=True)
    found = decompose(given, SHAPE, rank=terms, solver=solver)
    torch.sum(torch.tensor(weights) * found.to_matrix()).backward(retain_graph=True)
    slope = float(torch.sum(given.grad * torch.tensor(direction)))
    u, _, vh = np.linalg.svd(rearranged, full_matrices=False)
    u, vh = u[:, :terms], vh[:terms]
    change = rearrange(direction, SHAPE)
    tangential = u @ u.T @ change + (change - u @ u.T @ change) @ vh.T @ vh
    expected = np.sum(rearrange(weights, SHAPE) * tangential)
    assert slope == pytest.approx(expected, rel=1e-8)
    # The weights and factors have derivatives too: σ moves by uᵀ dR v.
    given.grad = None
    found.weights[0].backward()
    by_weight = float(torch.sum(given.grad * torch.tensor(direction)))
    assert by_weight == pytest.approx(u[:, 0] @ change @ vh[0], rel=1e-8)


@pytest.mark.filterwarnings("error")
def test_an_answer_with_a_graph_is_printed_without_a_warning(problem):
    answer = decompose(torch.tensor(problem[0], requires_grad=True), SHAPE, rank=RANK)
    assert answer.approximation.weights.requires_grad
    assert str(answer).startswith("80 × 96 as 3 × [10×8 ⊗ 8×12]")
    assert "3 terms" in repr(answer)


def drawn_tie(rng, is_complex):
    """Draw R(M) of few different singular values, a shape, and a number of terms to keep."""
    m, n, p, q = (int(side) for side in rng.integers(1, 4, 4))
    shape = KroneckerShape(((m, n), (p, q)))
    count = min(m * n, p * q)
    sigma = np.sort(rng.choice([1.0, 1.0, 0.5, 0.5, 0.25, 0.1, 0.0], count))[::-1]
    sigma = sigma * (1.0 + 1e-16 * rng.integers(-3, 4, count))  # as rounding splits a tie
    u, v = (np.linalg.qr(entries(rng, (side, count), is_complex))[0] for side in (m * n, p * q))
    return (u * sigma) @ v.conj().T, sigma, shape, int(rng.integers(1, count + 1))


def entries(rng, sizes, is_complex):
    drawn = rng.standard_normal(sizes)
    return drawn + 1j * rng.standard_normal(sizes) if is_complex else drawn


def curved(formed, weights):
    """A number of a matrix and some weights, with a curvature."""
    first, second = (torch.sum(torch.tensor(w).conj() * formed).real for w in weights)
    return first + 0.3 * second**2 + 0.2 * torch.sum(formed.abs() ** 2)


def truncated(rearranged, rank):
    u, sigma, vh = np.linalg.svd(rearranged, full_matrices=False)
    return torch.tensor((u[:, :rank] * sigma[:rank]) @ vh[:rank])


def slope(gradient, direction):
    return torch.sum(gradient.conj() * torch.tensor(direction)).real


@pytest.mark.parametrize("is_complex", [False, True])
def test_first_and_second_derivatives_at_ties_are_those_of_differences(rng, is_complex):
    """Of 200 spectra with ties: right where the answer is unique, refused where a tie is cut."""
    refused = 0
    for draw in range(100):
        rearranged, sigma, shape, rank = drawn_tie(rng, is_complex)
        is_cut = rank < len(sigma) and sigma[rank - 1] - sigma[rank] < 1e-12
        matrix = torch.tensor(inverse_rearrange(rearranged, shape), requires_grad=True)
        solver = [None, SVD(tolerance=1e-6), Krylov()][draw % 3]
        if sigma[0] > 0.0 and (is_cut or sigma[rank - 1] < 1e-12):
            with pytest.raises(LsrError, match=r"ask for (rank=\d+ or )?rank=\d+"):
                decompose(matrix, shape, rank=rank, solver=solver)
            refused += 1
            continue
        if sigma[0] == 0.0:
            continue
        weights, along = (entries(rng, (2, *rearranged.shape), is_complex) for _ in range(2))
        in_place = [inverse_rearrange(each, shape) for each in (*weights, *along)]

        def gradient(m, rank=rank, shape=shape, solver=solver, in_place=in_place, **graph):
            formed = decompose(m, shape, rank=rank, solver=solver).to_matrix()
            return torch.autograd.grad(curved(formed, in_place[:2]), m, **graph)[0]

        found = slope(gradient(matrix, create_graph=True), in_place[2])
        (second,) = torch.autograd.grad(found, matrix)
        h = 1e-5
        ahead, behind = (
            float(curved(truncated(rearranged + step * along[0], rank), weights))
            for step in (h, -h)
        )
        expected = (ahead - behind) / (2.0 * h)
        assert float(found.detach()) == pytest.approx(expected, rel=1e-6, abs=1e-6)
        moved = inverse_rearrange(h * along[1], shape)
        ahead, behind = (
            float(
                slope(
                    gradient(torch.tensor(matrix.detach().numpy() + step, requires_grad=True)),
                    in_place[2],
                )
            )
            for step in (moved, -moved)
        )
        expected = (ahead - behind) / (2.0 * h)
        assert float(slope(second, in_place[3])) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert 5 < refused < 80


def tied(rank=2):
    """Two terms of equal weight, and a graph."""
    e, f = np.diag([1.0, 0.0]), np.diag([0.0, 1.0])
    matrix = torch.tensor(np.kron(e, e) + np.kron(f, f), requires_grad=True)
    return matrix, decompose(matrix, "2x2, 2x2", rank=rank)


@pytest.mark.parametrize(
    "of_terms",
    [lambda r: r.weights[0], lambda r: r.factors[0][0].flatten() @ torch.arange(4.0).double()],
)
def test_single_terms_of_equal_weight_have_no_derivative_and_say_so(of_terms):
    matrix, answer = tied()
    with pytest.raises(LsrError, match="functions of their sum .* have: differentiate one of"):
        of_terms(answer).backward()
    assert matrix.grad is None


def test_symmetric_functions_of_equal_weights_have_a_derivative():
    matrix, answer = tied()
    (answer.weights.sum() + (answer.to_matrix() ** 2).sum()).backward()
    np.testing.assert_allclose(matrix.grad, np.diag([3.0, 0.0, 0.0, 3.0]), atol=1e-12)


def test_a_rank_between_equal_weights_is_refused_with_those_beside_it():
    with pytest.raises(LsrError, match=r"rank=1 cuts between terms of equal weight \(1\).*rank=2"):
        tied(rank=1)


def test_single_terms_of_different_weight_have_their_own_derivatives(rng):
    """Also where others are cut off: the first factor's entries, by differences."""
    matrix, change = rng.standard_normal((2, 6, 6))
    weights = torch.tensor(rng.standard_normal((2, 3)))

    def value(given):
        answer = decompose(given, "2x3, 3x2", rank=2)
        return torch.sum(weights * answer.factors[0][1]) + answer.weights[1] ** 2

    given = torch.tensor(matrix, requires_grad=True)
    value(given).backward()
    h = 1e-6
    ahead, behind = (float(value(torch.tensor(matrix + sign * h * change))) for sign in (1, -1))
    assert float(slope(given.grad, change)) == pytest.approx((ahead - behind) / (2 * h), rel=1e-6)
