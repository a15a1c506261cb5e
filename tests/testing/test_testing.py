"""lsrdecomp.testing finds planted bugs in a user's code, names them, and lets sound code pass."""

import math
from dataclasses import replace
from functools import partial, reduce

import numpy as np
import planted
import pytest
import scipy.sparse as sparse
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from lsrdecomp import KroneckerShape, decompose
from lsrdecomp.errors import LsrError, PrecisionError, ShapeError
from lsrdecomp.kronecker.rearrange import (
    apply_sum_of_kroneckers,
    commutation_matrix,
    inverse_rearrange,
    khatri_rao,
    kron,
    rearrange,
    sum_of_kroneckers,
)
from lsrdecomp.operators import kronecker_sum
from lsrdecomp.solvers.svd.dense import SVD
from lsrdecomp.targets.target import Dense
from lsrdecomp.testing import (
    IdentityError,
    check_apply,
    check_decomposition,
    check_khatri_rao,
    check_kron,
    check_kron_sum,
    check_operator,
    check_partial_trace,
    check_rearrange,
    check_sum,
    check_vec,
    identities,
    invertible_matrices,
    lora_layers,
    separated_matrices,
    small_matrices,
    special_matrices,
)
from lsrdecomp.testing import khatri_rao as of_columns
from lsrdecomp.testing import partial_trace as of_traces
from lsrdecomp.testing import vectorization as of_vec
from lsrdecomp.testing.cases import Corner, CornerArray, _two_types


def our_terms(matrix, shape, rank):
    found = SVD().solve(Dense(matrix), shape, rank=rank).approximation
    return found.weights, found.factors


def textbook_terms(matrix, shape, rank):
    """A user's own decomposition, written without this library."""
    (m, n), (p, q) = shape.factors
    u, sigma, vh = np.linalg.svd(rearrange_by_reshape(matrix, shape), full_matrices=False)
    return sigma[:rank], (u.T[:rank].reshape(-1, m, n), vh[:rank].reshape(-1, p, q))


def rearrange_by_reshape(matrix, shape):
    (m, n), (p, q) = shape.factors
    return matrix.reshape(m, p, n, q).transpose(0, 2, 1, 3).reshape(m * n, p * q)


def sum_by_kron(weights, factors):
    return sum(lam * reduce(np.kron, (f[k] for f in factors)) for k, lam in enumerate(weights))


def apply_by_vec(factors, x):
    state, done = x, x.shape[1]
    for i in range(len(factors) - 1, -1, -1):
        rows, columns = factors[i].shape
        before = math.prod(factor.shape[1] for factor in factors[:i])
        state = np.einsum("mn,anb->amb", factors[i], state.reshape(before, columns, done))
        done *= rows
    return state.reshape(math.prod(len(factor) for factor in factors), x.shape[1])


def test_this_library_passes_its_own_checks(xp):
    few = {"xp": xp, "max_examples": 4}
    check_kron(kron, **few)
    check_apply(
        lambda factors, x: apply_sum_of_kroneckers([f[None, ...] for f in factors], None, x),
        leave_out="empty",  # no Kronecker shape of ours is
        **few,
    )
    check_rearrange(rearrange, inverse_rearrange, order=None, **few)
    check_rearrange(rearrange, **few)
    check_sum(
        lambda w, fs: sum_of_kroneckers(fs, xp.astype(w, fs[0].dtype)), complex_values=False, **few
    )
    check_decomposition(our_terms, complex_values=False, **few)


def test_sound_code_of_a_user_passes():
    check_kron(np.kron, max_examples=8)
    check_apply(apply_by_vec, max_examples=8)
    check_rearrange(rearrange_by_reshape, max_examples=8)
    check_sum(sum_by_kron, max_examples=8)
    check_decomposition(textbook_terms)


# Six planted bugs
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "planted",
    [
        lambda factors, x: apply_by_vec(
            [f.T if f.shape[0] == f.shape[1] else f for f in factors], x
        ),
        lambda factors, x: apply_by_vec(
            [*factors[:-1], factors[-1].reshape(factors[-1].shape[::-1]).T], x
        ),
    ],
    ids=["square factors transposed", "last factor read by columns"],
)
def test_a_missing_transpose_is_found(planted):
    with pytest.raises(IdentityError, match="product"):
        check_apply(planted)


def test_a_wrong_conjugate_is_found():
    def planted(matrix, shape, rank):
        weights, (left, right) = textbook_terms(matrix, shape, rank)
        return weights, (left, right.conj())

    check_decomposition(planted, complex_values=False)
    with pytest.raises(IdentityError, match="tail of the spectrum"):
        check_decomposition(planted)


def test_a_conjugate_in_the_product_is_found():
    with pytest.raises(IdentityError, match="definition"):
        check_kron(lambda a, b: np.kron(a, b.conj()), max_examples=8)


@pytest.mark.parametrize(
    ("planted", "identity"),
    [
        (lambda matrix, shape: rearrange_by_reshape(np.roll(matrix, 1, axis=1), shape), "entries"),
        (lambda matrix, shape: np.roll(rearrange_by_reshape(matrix, shape), 1, axis=0), "entries"),
        (
            lambda matrix, shape: rearrange_by_reshape(matrix, shape)[
                [*range(1, shape.sizes[0]), -1]
            ],
            "entries",
        ),
    ],
    ids=["columns shifted", "rows shifted", "first block skipped"],
)
def test_an_index_off_by_one_in_the_rearrangement_is_found(planted, identity):
    with pytest.raises(IdentityError, match=identity):
        check_rearrange(planted)


def test_blocks_read_by_columns_are_another_convention_not_a_bug():
    def by_columns(matrix, shape):
        (m, n), (p, q) = shape.factors
        return matrix.reshape(m, p, n, q).transpose(2, 0, 3, 1).reshape(m * n, p * q)

    check_rearrange(by_columns, columns=True)
    with pytest.raises(IdentityError):
        check_rearrange(by_columns)


def test_unnormalised_weights_are_found():
    def planted(matrix, shape, rank):
        weights, (left, right) = textbook_terms(matrix, shape, rank)
        root = np.sqrt(weights)[:, None, None]
        return np.ones_like(weights), (left * root, right * root)

    with pytest.raises(IdentityError, match="unit factors"):
        check_decomposition(planted)


@pytest.mark.parametrize(
    "planted",
    [
        lambda w, fs: sum_by_kron(w[1:], [f[1:] for f in fs]) + 0 * sum_by_kron(w, fs),
        lambda w, fs: sum_by_kron(w[: max(1, len(w) - 1)], [f[: max(1, len(w) - 1)] for f in fs]),
    ],
    ids=["first", "last"],
)
def test_a_dropped_term_is_found(planted):
    with pytest.raises(IdentityError, match="sum of terms"):
        check_sum(planted)


def test_a_term_dropped_by_the_decomposition_is_found():
    def planted(matrix, shape, rank):
        weights, (left, right) = textbook_terms(matrix, shape, rank)
        return weights[:-1], (left[:-1], right[:-1])

    with pytest.raises(IdentityError, match="tail of the spectrum"):
        check_decomposition(planted)


def halved(a, b):
    return 0.5 * np.kron(a, b)


def mirrored(a, b):
    return np.kron(a, b)[:, ::-1]


def numbered_rows(a, b):
    return np.kron(a, b) * np.arange(1.0, a.shape[0] * b.shape[0] + 1)[:, None]


@pytest.mark.parametrize("wrong", [halved, mirrored, numbered_rows])
@pytest.mark.parametrize(
    ("name", "count", "blind"),
    [
        ("definition", 2, ()),
        ("mixed_product", 4, ()),
        ("vec", 3, ()),
        ("trace", 2, ()),
        ("inverse", 2, ()),
        ("determinant", 2, (mirrored,)),
        ("eigenvectors", 2, ()),
        ("transpose", 2, (halved,)),
        ("conjugate_transpose", 2, (halved,)),
        ("commutation", 2, (halved, mirrored)),
        ("singular_values", 2, (mirrored,)),
        ("norms", 2, (mirrored,)),
    ],
)
def test_each_identity_can_fail_by_itself(name, count, blind, wrong):
    """``blind``: wrong products that satisfy this identity all the same."""
    rng = np.random.default_rng(1)
    arguments = [rng.standard_normal((3, 3)) for _ in range(count)]
    identity = getattr(identities, name)
    identity(np.kron, *arguments)
    if wrong in blind:
        identity(wrong, *arguments)
    else:
        with pytest.raises(IdentityError):
            identity(wrong, *arguments)


def test_a_wrong_rank_is_found():
    unit = [np.linalg.qr(np.random.default_rng(k).standard_normal((3, 3)))[0] for k in range(2)]
    identities.rank(np.kron, *unit)
    with pytest.raises(IdentityError, match="rank"):
        identities.rank(halved, *unit)


def test_products_that_are_not_linear_or_not_associative_are_found():
    a, b, c = np.ones((1, 2)), np.ones((2, 1)), np.full((1, 2), 2.0)
    with pytest.raises(IdentityError, match="bilinearity"):
        identities.bilinearity(lambda x, y: np.kron(x, y) + 1.0, a, b, c)
    with pytest.raises(IdentityError, match="associativity"):
        identities.associativity(lambda x, y: np.kron(x, y) + y.shape[0], a, b, c)


def test_numbers_that_are_not_finite_are_a_difference():
    with pytest.raises(IdentityError):
        identities.definition(lambda a, b: np.kron(a, b) * np.nan, np.ones((2, 2)), np.ones((1, 1)))


@pytest.mark.parametrize(
    ("planted", "identity"),
    [
        (lambda a, b: np.kron(a, b if np.iscomplexobj(a) else b.real), "real ⊗ complex"),
        (
            lambda a, b: np.kron(a, b).astype(
                a.dtype if np.iscomplexobj(a) or not np.iscomplexobj(b) else b.dtype
            ),
            "",
        ),
        (
            lambda a, b: np.kron(b, a) if a.shape == b.shape and a.shape[1] == 3 else np.kron(a, b),
            "factors of equal",
        ),
        (
            lambda a, b: np.kron(a, b) * (1 + 1e-6 * (min(a.shape + b.shape) > 5)),
            "large sides",
        ),
        (lambda a, b: np.where(abs(np.kron(a, b)) < 1e-8, 0, np.kron(a, b)), "tiny entries"),
        (lambda a, b: np.kron(a, b) if a.size and b.size else [][0], "empty first factor"),  # noqa: PLE0643
        (lambda a, b: np.nan_to_num(np.kron(a, b)), "NaN input"),
        (
            lambda a, b: np.kron(a, b) * (1 + (len(a) > 8 and b.shape[1] % 32 == 1)),
            "both factors long",
        ),
        (lambda a, b: np.kron(a, b) * (1 + np.shares_memory(a, b)), "one array twice"),
    ],
    ids=[
        "imaginary part",
        "float32 of the first",
        "equal shapes",
        "long sides",
        "tiny entries",
        "empty",
        "NaN",
        "one column beyond a tile",
        "shared memory",
    ],
)
def test_faults_in_corner_cases_are_found(planted, identity):
    with pytest.raises(IdentityError) as caught:
        check_kron(planted, max_examples=3)
    assert identity in str(caught.value)


def test_corner_cases_are_tried_in_real_and_in_complex_numbers_whatever_is_drawn():
    types = set()

    def noting(a, b):
        if not a.size:  # of no drawn case
            types.add(a.dtype.name)
        return np.kron(a, b)

    check_kron(noting, max_examples=1)
    assert types == {"float64", "complex128"}


def test_a_fault_in_sparse_results_is_found():
    with pytest.raises(IdentityError, match="definition"):
        check_kron(
            lambda a, b: sparse.kron(sparse.csr_array(b), sparse.csr_array(a)), max_examples=3
        )


def test_right_relatives_of_the_product_pass(xp):
    check_khatri_rao(khatri_rao, xp=xp, max_examples=3)
    check_khatri_rao(lambda a, b: planted.face_splitting(a.T, b.T).T, max_examples=3)
    check_vec(planted.vec, planted.unvec, commutation_matrix, max_examples=3)
    check_vec(lambda x: x.T.reshape(-1, 1), max_examples=3)
    check_partial_trace(planted.partial_trace, max_examples=3)
    check_kron_sum(planted.kron_sum, max_examples=3)
    check_kron_sum(lambda a, b: kronecker_sum(a, b).to_matrix(), leave_out="empty", max_examples=3)


FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint64")


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, np.float32, np.dtype("int32"), complex])
def test_products_of_numpy_are_right_in_every_type(dtype):
    check_kron(np.kron, dtype=dtype, max_examples=2)
    check_kron_sum(planted.kron_sum, dtype=dtype, max_examples=2)
    check_khatri_rao(planted.khatri_rao, dtype=dtype, max_examples=2)
    check_vec(planted.vec, planted.unvec, dtype=dtype, max_examples=2)


def test_integers_are_compared_exactly():
    def through_eight_bits(a, b):
        return np.kron(a.astype("int8"), b.astype("int8")).astype(np.result_type(a, b))

    def through_floats(a, b):
        return np.kron(a.astype(float), b).astype(np.result_type(a, b))

    for wrong in (through_eight_bits, through_floats):
        with pytest.raises(IdentityError, match="large integers"):
            check_kron(wrong, dtype="int64", max_examples=3)


def test_products_of_large_integers_are_near_the_end_of_their_range_and_within_it():
    products = []

    def noting(a, b):
        if a.size and b.size:
            products.append(int(np.abs(a).max()) * int(np.abs(b).max()))
        return np.kron(a, b)

    check_kron(noting, dtype="int64", max_examples=3)
    largest = np.iinfo("int64").max
    assert 0.9 * largest < max(products) <= largest


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_example": 3}, "no option 'max_example'; did you mean 'max_examples'"),
        ({"dtype": "flaot32"}, "no cases of type 'flaot32'; did you mean 'float32'"),
        ({"dtype": object}, "no cases of type 'object'"),
        ({"tolerance": -1.0}, "tolerance: expected a number that is not negative"),
        ({"max_examples": 0}, "max_examples: expected a positive integer"),
        ({"leave_out": ["emtpy"]}, "no corner cases 'emtpy'; did you mean 'empty'"),
    ],
)
def test_options_are_checked_before_anything_runs(option, message):
    def never_called(a, b):
        raise AssertionError

    with pytest.raises(LsrError, match=message):
        check_kron(never_called, **option)


def test_a_type_without_any_identity_to_try_is_refused():
    with pytest.raises(LsrError, match="no identity of this check can be tried in int64"):
        check_decomposition(textbook_terms, dtype="int64")
    with pytest.raises(LsrError, match="single and double precision, not float16"):
        check_operator(TheirOperator, dtype="float16")


def test_corner_cases_that_code_does_not_promise_are_left_out():
    def refuses_empty_and_mixed(a, b):
        if not a.size or not b.size or a.dtype != b.dtype or not np.isfinite(a).all():
            raise ValueError("no")
        return np.kron(a, b)

    promises = {"leave_out": ["empty", "mixed types", "not finite"], "max_examples": 3}
    check_kron(refuses_empty_and_mixed, **promises)
    with pytest.raises(IdentityError, match=r"(?s)real ⊗ complex.*empty first factor"):
        check_kron(refuses_empty_and_mixed, max_examples=3)


def test_a_stale_cache_is_found():
    answers = {}

    def cached(a, b):
        return answers.setdefault((a.shape, b.shape), np.kron(a, b))

    with pytest.raises(IdentityError, match="definition"):
        check_kron(cached)


def test_code_that_changes_its_answer_is_a_finding_and_no_error_of_hypothesis():
    calls = []

    def wrong_at_times(a, b):
        calls.append(1)
        return np.kron(a, b) * (1 + (len(calls) == 9))

    with pytest.raises(
        IdentityError, match="definition.*answers the same arguments differently.*; once difference"
    ):
        check_kron(wrong_at_times)


def numbered(right):
    """``right`` with row i of its answer times i + 1."""

    def wrong(*arguments):
        answer = right(*arguments)
        return answer * np.arange(1.0, len(answer) + 1).reshape(-1, *[1] * (answer.ndim - 1))

    return wrong


@pytest.mark.parametrize(
    ("identity", "right", "shapes", "more"),
    [
        *[
            (getattr(of_columns, name), khatri_rao, ((2, 3), (4, 3)), ())
            for name in ("definition", "gram")
        ],
        (of_columns.commutation, khatri_rao, ((2, 3), (4, 3)), ()),
        (of_columns.bilinearity, khatri_rao, ((2, 3), (4, 3), (2, 3)), ()),
        (of_columns.associativity, khatri_rao, ((2, 3), (4, 3), (2, 3)), ()),
        (of_columns.mixed_product, khatri_rao, ((3, 2), (2, 4), (2, 3), (4, 3)), ()),
        (of_columns.vec, khatri_rao, ((2, 3), (4, 3), (3, 1)), ()),
        (of_vec.definition, planted.vec, ((2, 3),), ()),
        (of_vec.linearity, planted.vec, ((2, 3), (2, 3)), ()),
        (of_vec.product, planted.vec, ((4, 2), (2, 3), (3, 2)), ()),
        (of_vec.inner_product, planted.vec, ((2, 3), (2, 3)), ()),
        (of_vec.exchange, commutation_matrix, ((2, 3), (4, 3)), ()),
        (of_traces.conjugate_transpose, planted.partial_trace, ((6, 6),), ((2, 3), 1)),
        (of_traces.trace, planted.partial_trace, ((6, 6),), ((2, 3), 0)),
        (of_traces.definition, planted.partial_trace, ((6, 6),), ((2, 3), 0)),
    ],
)
def test_each_identity_of_the_relatives_can_fail_by_itself(identity, right, shapes, more):
    rng = np.random.default_rng(1)
    arguments = [*(rng.standard_normal(shape) for shape in shapes), *more]
    identity(right, *arguments)
    wrongs = (numbered(right), lambda *inputs: right(*inputs) + 1.0)
    assert any(fails(identity, wrong, arguments) for wrong in wrongs)


def test_what_was_got_is_the_answer_of_the_code_and_the_rest_is_expected():
    def doubled(x, dims, axis):
        return 2.0 * planted.partial_trace(x, dims, axis)

    with pytest.raises(IdentityError, match="got 12, expected 6"):
        of_traces.trace(doubled, np.eye(6), (2, 3), 0)
    with pytest.raises(IdentityError, match=r"at \[0, 0\]: got 4, expected 2"):
        of_traces.definition(doubled, np.eye(6), (2, 3), 0)


def fails(identity, wrong, arguments):
    try:
        identity(wrong, *arguments)
    except IdentityError:
        return True
    return False


@pytest.mark.parametrize("axis", [0, 1])
def test_partial_traces_that_are_not_linear_or_not_cyclic_are_found(axis):
    def first_block(x, dims, axis):
        return x.reshape(*dims, *dims).take(0, axis).take(0, axis + 1)

    rng = np.random.default_rng(1)
    dims, x = (2, 3), rng.standard_normal((6, 6))
    traced, rest = (rng.standard_normal((size, size)) for size in (dims[axis], dims[1 - axis]))
    for identity, other, wrong in (
        (of_traces.linearity, x.T, lambda *inputs: planted.partial_trace(*inputs) + 1.0),
        (of_traces.cyclic, traced, first_block),
        (of_traces.module, rest, numbered(planted.partial_trace)),
    ):
        identity(planted.partial_trace, x, dims, axis, other)
        assert fails(identity, wrong, [x, dims, axis, other])
    of_traces.product(planted.partial_trace, traced, rest, axis)
    assert fails(of_traces.product, first_block, [traced, rest, axis])


# Strategies
# ------------------------------------------------------------------------------------------------


@given(st.floats(0.8, 1e6), st.booleans(), st.data())
def test_a_condition_that_is_asked_for_is_met(condition, complex_values, data):
    case = data.draw(separated_matrices(condition=condition, complex_values=complex_values))
    assert case.separation_rank == 2
    assert_allclose(case.condition, condition, rtol=1e-15 * condition + 1e-12)
    assert_allclose(case.weights[0], case.weights[1], rtol=1e-12)


@given(separated_matrices(shape=KroneckerShape(((1, 1), (2, 1))), condition=10.0))
def test_two_entries_are_enough_for_terms_that_cancel(case):
    assert_allclose(case.condition, 10.0, rtol=1e-12)


@pytest.mark.parametrize(("condition", "shape"), [(0.5, ((2, 2),)), (10.0, ((1, 1), (1, 1)))])
def test_a_condition_that_cannot_be_is_refused(condition, shape):
    @given(separated_matrices(shape=KroneckerShape(shape), condition=condition))
    def draw(case):
        pass

    with pytest.raises(ShapeError):
        draw()


@given(special_matrices((4, 6)))
def test_special_matrices_decompose_are_zero_or_lose_their_digits(matrix):
    if 0.0 < np.abs(matrix).max() < 1e-307:
        with pytest.raises(PrecisionError, match="multiply it by a power of two"):
            decompose(matrix, KroneckerShape(((2, 3), (2, 2))), rank=4)
        return
    result = decompose(matrix, KroneckerShape(((2, 3), (2, 2))), rank=4)
    assert result.relative_error < 1e-12 or math.isclose(result.norm, 0.0, abs_tol=1e-300)


@given(lora_layers())
def test_lora_layers_are_pairs_with_their_scale(case):
    scaled = (case.alpha / case.down.shape[0]) * case.up @ case.down
    assert_allclose(
        case.pair.to_matrix(), scaled, rtol=1e-12, atol=1e-15 * np.abs(scaled).max(initial=0.0)
    )
    assert np.array_equal(case.up.astype(case.storage).astype(float), case.up)
    # PEFT draws A between ∓1/√n, and a half-precision file rounds it
    assert np.abs(case.down).max() <= 1.001 / math.sqrt(case.down.shape[1])


@given(invertible_matrices(4, max_condition=10.0), small_matrices((2, 3)))
def test_matrices_keep_their_promise(invertible, small):
    assert np.linalg.cond(invertible) <= 10.0 * (1 + 1e-12)
    assert np.array_equal(small, np.round(small))
    assert np.abs(small).max() <= 3


# Code that raises, coarser types, and classes
# ------------------------------------------------------------------------


def test_exceptions_of_the_code_under_test_name_identity_and_case():
    def brittle(a, b):
        if a.shape[1] > 1:
            raise RuntimeError("only columns, please")
        return np.kron(a, b)

    with pytest.raises(
        IdentityError, match="your code raised RuntimeError: only columns, please"
    ) as caught:
        check_kron(brittle)
    assert caught.value.identity == "definition"
    assert isinstance(caught.value.cause, RuntimeError)
    assert "A 1×2 = " in str(caught.value), "the smallest case is shown"
    for check, function in (
        (check_apply, lambda factors, x: factors[7]),
        (check_rearrange, lambda matrix, shape: matrix.reshape(-1, 11)),
        (check_sum, lambda weights, factors: weights.nothing),
        (check_decomposition, lambda matrix, shape, rank: 1 / 0),
    ):
        with pytest.raises(IdentityError, match="your code raised"):
            check(function, max_examples=5)


def test_torch_kron_is_checked_and_what_it_raises_is_shown():
    torch = pytest.importorskip("torch")
    with pytest.raises(IdentityError) as caught:
        check_kron(lambda a, b: torch.kron(a, b) @ torch.ones(11, 7), xp=torch, max_examples=5)
    assert "your code raised RuntimeError" in str(caught.value)
    # torch.kron up to 2.13 at least raises for some transposed views, so copies are handed over
    fresh = partial(torch.clone, memory_format=torch.contiguous_format)
    check_kron(lambda a, b: torch.kron(fresh(a), fresh(b)), xp=torch, max_examples=8)


def test_an_argument_that_is_overwritten_is_shown_as_it_was():
    def doubling(a, b):
        product = np.kron(a, b)
        a *= 2.0
        return product

    with pytest.raises(
        IdentityError, match="arguments stay as they are: your code changed them\n  A 1×1 = "
    ) as caught:
        check_kron(doubling, complex_values=False, max_examples=3)
    assert "[[2.]]" in str(caught.value), "the smallest case, as it was handed over"
    assert "also broken: int64 input" in str(caught.value), "its other identities are no news"


@pytest.mark.parametrize("answer", [None, "list"])
def test_an_answer_that_is_no_array_is_named(answer):
    def listed(a, b):
        return np.kron(a, b).tolist() if answer else None

    kind = answer or "NoneType"
    with pytest.raises(
        IdentityError, match=f"your code raised TypeError: the result is a {kind}, not an array"
    ):
        check_kron(listed, max_examples=2)


def test_what_is_to_be_passed_is_said_where_it_is_not_the_code_that_errs():
    def of_another_library(a, b):
        raise TypeError("kron(): argument 'input' (position 1) must be Tensor, not numpy.ndarray")

    with pytest.raises(
        IdentityError, match="not numpy.ndarray; xp= names another library than NumPy"
    ):
        check_kron(of_another_library, max_examples=1)
    with pytest.raises(
        IdentityError, match=r"the answer is float32: dtype= and tolerance= allow for it"
    ):
        check_kron(
            lambda a, b: np.kron(a, b).astype(np.float32), complex_values=False, max_examples=8
        )


def test_the_message_carries_what_else_is_broken_and_no_frames_of_ours():
    with pytest.raises(IdentityError, match="also broken: .*trace") as caught:
        check_kron(lambda a, b: 2.0 * np.kron(a, b), max_examples=5)
    assert caught.value.identity.startswith("definition")
    assert caught.value.__cause__ is None
    shown = [frame.name for frame in __import__("traceback").extract_tb(caught.value.__traceback__)]
    assert not any("hypothesis" in name or name in ("every_case", "called") for name in shown)
    assert not getattr(caught.value, "__notes__", None)


def test_a_coarser_type_needs_its_tolerance():
    def in_half(a, b):
        return np.kron(a.astype(np.float16), b.astype(np.float16)).astype(a.dtype)

    with pytest.raises(IdentityError, match="definition"):
        check_kron(in_half, complex_values=False, max_examples=8)
    check_kron(in_half, complex_values=False, tolerance=2e-2, max_examples=8)
    seen = set()

    def noting(a, b):
        seen.update((a.dtype.name, b.dtype.name))
        return np.kron(a, b)

    check_kron(noting, dtype="float32", complex_values=False, max_examples=5)
    assert seen == {"float32"}


def test_an_svd_through_the_gram_matrix_is_found():
    def by_gram(matrix, shape, rank):
        (m, n), (p, q) = shape.factors
        rearranged = rearrange_by_reshape(matrix, shape)
        _, vectors = np.linalg.eigh(rearranged @ rearranged.conj().T)
        left = vectors[:, ::-1][:, :rank]
        right = left.conj().T @ rearranged
        weights = np.linalg.norm(right, axis=1)
        order = np.argsort(-weights, kind="stable")
        weights, left, right = weights[order], left[:, order], right[order]
        kept = weights > 0
        weights, left, right = weights[kept], left[:, kept], right[kept] / weights[kept][:, None]
        return weights, (left.T.reshape(-1, m, n), right.reshape(-1, p, q))

    with pytest.raises(IdentityError, match="best terms"):
        check_decomposition(by_gram, complex_values=False)
    check_decomposition(textbook_terms, complex_values=False)


class TheirOperator:
    """A user's class: one object for Σ λ ⊗ M, each method on its own."""

    def __init__(self, weights, factors):
        self.weights, self.factors = weights, factors

    def matvec(self, x):
        return sum_by_kron(self.weights, self.factors) @ x

    @property
    def T(self):  # noqa: N802
        return type(self)(self.weights, [f.transpose(0, 2, 1) for f in self.factors])

    def __matmul__(self, x):
        return self.matvec(x)

    def rmatvec(self, y):
        return sum_by_kron(self.weights, self.factors).conj().T @ y

    def trace(self):
        return np.trace(sum_by_kron(self.weights, self.factors))

    def inner(self, other):
        return np.vdot(
            sum_by_kron(self.weights, self.factors), sum_by_kron(other.weights, other.factors)
        )

    def norm(self):
        return np.linalg.norm(sum_by_kron(self.weights, self.factors))

    def solve(self, b):
        return np.linalg.solve(sum_by_kron(self.weights, self.factors), b)

    def logdet(self):
        return np.linalg.slogdet(sum_by_kron(self.weights, self.factors))[1]


def test_sound_classes_pass():
    check_operator(TheirOperator, max_examples=5)
    check_operator(TheirOperator, dtype="float32", complex_values=False, max_examples=5)


def test_our_class_passes(xp):
    from lsrdecomp import SeparatedMatrix, operators

    more = {"solve": lambda a, b: operators.solve(a, b).x, "logdet": operators.slogdet}
    check_operator(lambda w, fs: SeparatedMatrix.from_factors(fs, w), xp=xp, max_examples=4)
    check_operator(
        lambda w, fs: SeparatedMatrix.from_factors(fs, w), methods=more, xp=xp, max_examples=8
    )


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (
            "matvec",
            lambda self, x: sum_by_kron(self.weights[:1], [f[:1] for f in self.factors]) @ x,
        ),
        ("rmatvec", lambda self, y: sum_by_kron(self.weights, self.factors).T @ y),
        ("trace", lambda self: self.weights[0] * np.prod([np.trace(f[0]) for f in self.factors])),
        (
            "inner",
            lambda self, other: np.sum(
                sum_by_kron(self.weights, self.factors) * sum_by_kron(other.weights, other.factors)
            ),
        ),
        ("norm", lambda self: np.linalg.norm(self.weights)),
        ("solve", lambda self, b: sum_by_kron(self.weights, self.factors).conj().T @ b),
        ("logdet", lambda self: np.log(np.abs(np.linalg.det(self.factors[0][0])))),
    ],
)
def test_each_method_can_fail_by_itself(name, wrong):
    planted = type("Planted", (TheirOperator,), {name: wrong})
    with pytest.raises(IdentityError) as caught:
        check_operator(planted, max_examples=5)
    assert caught.value.identity.split(",")[0] == {"rmatvec": "adjoint"}.get(name, name)


def test_a_block_of_columns_of_which_one_is_wrong_is_found():
    def first_column_alone(self, x):
        return sum_by_kron(self.weights, self.factors) @ np.repeat(x[:, :1], x.shape[1], axis=1)

    planted = type("Planted", (TheirOperator,), {"matmat": first_column_alone})
    with pytest.raises(IdentityError, match="matmat, A X for a block of columns"):
        check_operator(planted, max_examples=5)


def test_a_wrong_transpose_is_found():
    planted = type(
        "Planted",
        (TheirOperator,),
        {
            "T": property(
                lambda self: TheirOperator(
                    self.weights, [f.conj().transpose(0, 2, 1) for f in self.factors]
                )
            )
        },
    )
    with pytest.raises(IdentityError, match="transpose"):
        check_operator(planted, methods=["transpose"])


def test_methods_that_are_not_there_are_named():
    from lsrdecomp import LsrError

    with pytest.raises(LsrError, match="object has none of logdet, slogdet"):
        check_operator(lambda w, fs: object(), methods=["logdet"])
    with pytest.raises(LsrError, match="no method is called 'matvek'"):
        check_operator(TheirOperator, methods=["matvek"])
    with pytest.raises(LsrError, match="no method under a usual name"):
        check_operator(lambda w, fs: object())


def test_a_corner_that_cannot_be_filled_anew_is_not_made_shorter():
    values = CornerArray(np.zeros((3, 5)), "float64")
    corner = Corner("zeros", lambda *_: None, np.linalg.svd, [values])
    assert corner.sides == []
    assert replace(corner, fill=lambda shapes: [values]).sides == [3, 5]


def test_the_wider_of_two_types_has_digits_that_single_precision_loses():
    for name, arrays in _two_types([np.arange(1.0, 5.0), np.arange(2.0, 6.0)]).items():
        wide = [a for a in arrays if a.dtype == ("complex128" if "complex" in name else "float64")]
        assert len(wide) == 1
        assert not np.array_equal(wide[0].values, wide[0].values.astype("complex64"))
