"""Kronecker shapes: integers that tile."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lsrdecomp import KroneckerShape, ProductShape
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.shape import balanced_split, divisors, kronecker_shapes, splits


@given(st.integers(1, 5000))
def test_divisors_are_all_of_them(n):
    assert divisors(n) == tuple(q for q in range(1, n + 1) if n % q == 0)


@given(st.integers(1, 20_000), st.integers(1, 4))
def test_balanced_split_multiplies_back_and_descends(n, order):
    split = balanced_split(n, order)
    assert len(split) == order
    assert math.prod(split) == n
    assert list(split) == sorted(split, reverse=True)


@given(st.integers(1, 2000))
def test_two_way_balanced_split_is_the_closest_pair(n):
    first, second = balanced_split(n)
    assert first - second == min(n // q - q for q in divisors(n) if q * q <= n)


def test_parameter_counts_of_the_papers_three_cases():
    def side(r1, r2, s):
        return ProductShape((32, 24), (r1, r2), (32, 24)).parameters(s)

    assert side(2, 2, 16) == 3584  # section Experiments
    assert side(4, 4, 16) == 7168  # the text says 5,632, which is the count of the next line
    assert side(4, 2, 16) == 5632


def test_plain_low_rank_is_a_product_shape():
    shape = ProductShape.low_rank((768, 512), 8)
    assert shape.matrix_shape == (768, 512)
    assert shape.inner_rank == 8
    assert shape.parameters(1) == 8 * (768 + 512)


def test_every_two_factor_shape_tiles_and_low_rank_is_among_them():
    shapes = list(kronecker_shapes((12, 6)))
    assert len(shapes) == 6 * 4 == len(set(shapes))
    assert all(shape.matrix_shape == (12, 6) for shape in shapes)
    assert KroneckerShape(((12, 1), (1, 6))) in shapes


@given(st.integers(1, 200), st.integers(1, 3))
def test_splits_are_complete(n, order):
    found = list(splits(n, order))
    assert len(set(found)) == len(found)
    assert all(math.prod(split) == n for split in found)
    if order == 2:
        assert len(found) == len(divisors(n))


@pytest.mark.parametrize("factors", [(), ((0, 2),), ((-1, 2),), ((1.5, 2),), ((2,),), ((True, 2),)])
def test_factors_that_are_not_pairs_of_positive_integers_are_refused(factors):
    with pytest.raises(ShapeError):
        KroneckerShape(factors)


def test_a_shape_that_does_not_tile_says_what_would():
    with pytest.raises(
        ShapeError, match=r"w: 7 x 110 = 770 rows, but the matrix has 768\.\n.*1, 2, 3, 4, 6, 8, 12"
    ):
        KroneckerShape(((7, 2), (110, 2))).check((768, 4), "w")
    with pytest.raises(
        ShapeError, match=r"w: 2 x 3 = 6 columns, but the matrix has 4\.\n.*1, 2, 4"
    ):
        KroneckerShape(((7, 2), (110, 3))).check((770, 4), "w")


def test_sides_of_a_product_shape_must_agree_in_order():
    with pytest.raises(ShapeError, match="equally many"):
        ProductShape((32, 24), (4,), (32, 24))


def test_a_word_where_only_sizes_serve_is_told_how_they_are_written():
    with pytest.raises(
        ShapeError, match=r"shape: sizes are written '16x16, 8x8', one pair a factor, got 'search'"
    ):
        KroneckerShape.parse("search")
    with pytest.raises(ShapeError, match=r"no word 'serach'; did you mean 'search'\?"):
        KroneckerShape.parse("serach", ("search",))
