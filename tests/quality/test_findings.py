"""How telling and how small the findings of `lsrdecomp.testing` are: faults in, alarms out.

Faults that are planted in right code must be found, right code must raise no alarm, and what is
found must be told in the smallest case and by what tells most. As hypothesis tests its shrinking.
"""

import re
from functools import partial

import numpy as np
import pytest
from planted import PLANTED
from right_krons import RIGHT, SPARSE
from wrong_krons import KINDS, UNSEEN, wrong_kron

from lsrdecomp.testing import IdentityError, check_kron, runner

# What is found
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def first_failure_alone(monkeypatch):
    """Leave out the smallest case and what else fails, which other tests look for."""
    failures, first_failure = [], runner._first_failure

    def until_one_fails(*arguments, shrink):
        if not failures:
            failures.extend(filter(None, [first_failure(*arguments, shrink=False)]))
            return failures[0] if failures else None
        return None

    monkeypatch.setattr(runner, "_first_failure", until_one_fails)


@pytest.mark.filterwarnings("ignore")  # of overflow and of lost imaginary parts, by wrong products
@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(kind, name, id=f"{kind}-{name}") for kind in KINDS for name in KINDS[kind]],
)
def test_wrong_products_are_found_by_default(kind, name, first_failure_alone):
    with pytest.raises(IdentityError):
        check_kron(wrong_kron(kind, name))


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_not_seen_is_known(name, first_failure_alone):
    check_kron(UNSEEN[name])


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # what numpy.matrix says of itself
@pytest.mark.parametrize(
    ("check", "fault"),
    [
        pytest.param(check, name, id=f"{check.__name__}-{name}")
        for check, faults in PLANTED.items()
        for name in faults
    ],
)
def test_faults_that_people_make_are_found(check, fault, first_failure_alone):
    wrong = PLANTED[check][fault]

    def in_few_draws_or_in_all():
        """Few find nearly every fault; which they find, hypothesis decides."""
        for settings in ({"max_examples": 3}, {}):
            check(*wrong if isinstance(wrong, tuple) else (wrong,), **settings)

    with pytest.raises(IdentityError):
        in_few_draws_or_in_all()


# What raises no alarm
# ------------------------------------------------------------------------------------------------

FLOATS = ("float32", "float64", "complex64", "complex128")
INTEGERS = ("int8", "int32", "int64", "uint8", "uint64")


@pytest.mark.parametrize("name", RIGHT)
def test_right_products_pass_in_ten_types(name):
    for dtype in (*FLOATS, *INTEGERS, "uint16" if name in SPARSE else "float16"):
        check_kron(RIGHT[name], dtype=dtype, max_examples=2)


def test_a_right_product_of_torch_passes_in_nine_types():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    # torch.kron up to 2.13 at least raises for some transposed views, so copies are handed over
    fresh = partial(torch.clone, memory_format=torch.contiguous_format)
    for dtype in (*FLOATS, "float16", "int8", "int32", "int64", "uint8"):
        check_kron(
            lambda a, b: torch.kron(fresh(a), fresh(b)), xp=torch, dtype=dtype, max_examples=2
        )


def test_a_passing_check_asks_for_few_products():
    calls = []

    def counted(a, b):
        calls.append(1)
        return np.kron(a, b)

    check_kron(counted)
    assert len(calls) < 800  # 740, in .35 CPU seconds; 910 and a second before


# What is told
# ------------------------------------------------------------------------------------------------


def test_swapped_factor_order_is_found():
    with pytest.raises(IdentityError, match="definition") as caught:
        check_kron(lambda a, b: np.kron(b, a), max_examples=8)
    assert re.search(r"A [12]×[12] = .*B [12]×[12] = ", str(caught.value), re.DOTALL), (
        "shrunk and shown"
    )


def test_a_finding_says_which_entry_is_wrong_and_what_it_should_be():
    def wrong(a, b):
        product = np.kron(a, b)
        product[-1, -1] += 1.0
        return product

    with pytest.raises(
        IdentityError, match=r"difference 1 .*; at \[0, 0\]: got 5, expected 4\n  A 1×1 = \[\[2"
    ):
        check_kron(wrong, complex_values=False)


def finding(wrong, **options):
    with pytest.raises(IdentityError) as caught:
        check_kron(wrong, **options)
    return caught.value


@pytest.mark.parametrize(
    ("name", "place", "first", "second"),
    [
        ("a tail of one row in sixteen", r"\[16, 0\]", "17×1", "1×1"),
        ("more than 128 rows of the second", r"\[128, 0\]", "1×1", "129×1"),
        ("rows of the first by eights, the rest lost", r"\[8, 0\]", "9×1", "1×1"),
        ("columns of the second by fours, the rest of each lost", r"\[0, 4\]", "1×1", "1×5"),
    ],
)
def test_a_lost_tail_is_told_as_a_place_in_the_smallest_sides(name, place, first, second):
    """And not as associativity, whose products are long by themselves."""
    found = finding(wrong_kron("blocks", name), complex_values=False)
    assert "(A ⊗ B)[i·p + k, j·q + l] = A[i, j]·B[k, l]" in found.identity
    assert re.search(rf"at {place}: got .*\n  A {first}.*\n(      .*\n)*  B {second}", str(found))


def test_a_finding_says_in_which_rows_and_columns_it_lies():
    found = finding(wrong_kron("blocks", "chunks of 4096 entries, the last one lost"))
    assert re.search(r"wrong in (rows|row|columns|column) \d+", str(found))

    def wrong_block(a, b):
        product = np.kron(a, b)
        if product.shape == (42, 72):
            product[40:42, 3:9] += 1.0
        return product

    message = str(finding(wrong_block, complex_values=False))
    assert "at [40, 3]: got " in message
    assert "wrong in rows 40 to 41 and columns 3 to 8 alone" in message


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "name", "identity"),
    [
        ("memory", "leading dimension taken for the number of columns", "a block of a larger"),
        ("memory", "every second column of a slice", "every second row and column"),
        ("memory", "read-only input is zero", "read-only input"),
        ("damage", "left read-only", "arguments stay as they are"),
        ("damage", "NaN removed in place", "arguments stay as they are"),
        ("ties", "equal squares", "equal squares"),
        ("ties", "a square product of oblong factors", "a square product of oblong factors"),
        ("types", "integers without sign", "int64 input"),
        ("types", "truth values added", "truth values"),
        ("types", "whole floats through 32 bits", "large whole numbers"),
        ("special", "a negative zero is minus one", "negative zeros"),
        ("structures", "a permutation taken for the identity", "a permutation"),
        ("degenerate", "two empty factors", "two empty factors"),
    ],
)
def test_a_fault_is_told_by_the_corner_where_it_shows(kind, name, identity):
    # Few draws, for they differ with the modules that are loaded and may meet it first
    assert finding(wrong_kron(kind, name), max_examples=2).identity.startswith(identity)


def test_arguments_that_are_made_read_only_are_told():
    assert "your code made them read-only" in str(finding(wrong_kron("damage", "left read-only")))


def test_bytes_of_another_order_may_be_refused_but_not_mistaken():
    def refuses(a, b):
        if not (a.dtype.isnative and b.dtype.isnative):
            raise TypeError("other byte order")
        return np.kron(a, b)

    check_kron(refuses, max_examples=1)
    found = finding(wrong_kron("types", "bytes of the other order"), max_examples=1)
    assert found.identity.startswith("other byte order")
