"""What a block sees of a weight of few eigenpairs is what the whole weight, held densely, makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.solvers.pair.block_update import Side
from lsrdecomp.solvers.pair.normal_equations import moved_first, normal_matrix
from lsrdecomp.solvers.pair.spectral_block import SpectralBlock, basis_for, pays
from lsrdecomp.targets.weights import Dense, LowRankPlusIdentity

LAYERS, PAIRS = 3, 5


@pytest.fixture
def weight(rng: np.random.Generator):
    def made(size: int) -> LowRankPlusIdentity:
        basis = np.linalg.qr(rng.standard_normal((LAYERS, size, PAIRS)))[0]
        return LowRankPlusIdentity(basis, 1.0 + rng.random((LAYERS, PAIRS)), np.array([0.1, 0.2, 0.3]))

    return made


def _dense(weight: LowRankPlusIdentity) -> Dense:
    return Dense(weight.apply(np.broadcast_to(np.eye(weight.size), (LAYERS, weight.size, weight.size))))


@pytest.mark.parametrize(
    ("rows", "columns", "terms"),
    [((3, 4), (1, 1), 2), ((3, 4), (2, 3), 2), ((6, 4), (2, 1), 1), ((6, 4), (1, 2), 3), ((3, 4, 5), (2, 1, 3), 3)],
)
def test_formed_and_applied_it_is_the_normal_matrix_of_the_dense_weight(
    rows: tuple[int, ...], columns: tuple[int, ...], terms: int, weight, rng: np.random.Generator
) -> None:
    shape = KroneckerShape.of(rows, columns)
    size, rank = shape.matrix_shape
    w, root = weight(size), rng.standard_normal((LAYERS, rank, rank))
    gram = root @ root.swapaxes(1, 2)
    stacks = [rng.standard_normal((LAYERS, m * r, terms)) for m, r in shape.factors]
    for i in range(shape.order):
        block = SpectralBlock.of(w, basis_for(w, rows, i), shape, stacks, i, gram)
        wanted = normal_matrix(moved_first(_dense(w), rows, i), shape, stacks, i, gram)
        assert np.allclose(block.matrix(), wanted, rtol=1e-11, atol=1e-11 * np.abs(wanted).max())
        x = rng.standard_normal(stacks[i].shape)
        image = (wanted @ x.reshape(LAYERS, -1, 1)).reshape(x.shape)
        assert np.allclose(block.apply(x), image, rtol=1e-11, atol=1e-11 * np.abs(image).max())
        by_the_whole = Side.of(shape, w, 4, 0.0, gram)._operator(stacks, i, gram)(x)
        assert np.allclose(by_the_whole, image, rtol=1e-11, atol=1e-11 * np.abs(image).max())


def test_gram_is_that_of_the_dense_weight(weight, rng: np.random.Generator) -> None:
    w, x = weight(12), rng.standard_normal((LAYERS, 12, 4))
    assert np.allclose(w.gram(x), x.swapaxes(1, 2) @ _dense(w).matrix @ x, rtol=1e-12, atol=1e-12)


def test_it_pays_where_the_other_factors_are_long_and_terms_few() -> None:
    even, tall = KroneckerShape.of((64, 64), (1, 1)), KroneckerShape.of((1024, 4), (1, 1))
    assert pays(even, 0, 8, 8)
    assert not pays(tall, 0, 8, 8)  # S would be twice as large as V
    assert pays(tall, 1, 8, 8)
