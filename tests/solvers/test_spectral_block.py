"""What a block sees of a weight of few eigenpairs is what the whole weight, formed, makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from lsrdecomp.kronecker.shape import KroneckerShape, ProductShape
from lsrdecomp.solvers.batched_terms import to_matrices
from lsrdecomp.solvers.pair.block_update import Side
from lsrdecomp.solvers.pair.partial_traces import PartialTraces
from lsrdecomp.solvers.pair.problem import PairProblem
from lsrdecomp.solvers.pair.spectral_block import SpectralBlock, basis_for, is_spectral_cheaper
from lsrdecomp.solvers.pair.stacking import WeightedTargets
from lsrdecomp.targets.weights import LowRankPlusIdentity, NormWeights

LAYERS, PAIRS = 3, 5


@pytest.fixture
def weight(rng: np.random.Generator):
    def made(size: int) -> LowRankPlusIdentity:
        basis = np.linalg.qr(rng.standard_normal((LAYERS, size, PAIRS)))[0]
        return LowRankPlusIdentity(
            basis, 1.0 + rng.random((LAYERS, PAIRS)), np.array([0.1, 0.2, 0.3])
        )

    return made


def _formed(weight: LowRankPlusIdentity) -> np.ndarray:
    return weight.apply(np.broadcast_to(np.eye(weight.size), (LAYERS, weight.size, weight.size)))


def _normal_matrix(
    weight: LowRankPlusIdentity,
    shape: KroneckerShape,
    stacks: list[np.ndarray],
    i: int,
    gram: np.ndarray,
) -> np.ndarray:
    """⟨X_e, W X_f H⟩ of the sides X that single entries of block i make."""
    sides = []
    for entry in np.ndindex(stacks[i].shape[1:]):
        single = np.zeros(stacks[i].shape)
        single[:, *entry] = 1.0
        sides.append(
            to_matrices([single if j == i else stack for j, stack in enumerate(stacks)], shape)
        )
    images = [_formed(weight) @ side @ gram for side in sides]
    return np.einsum("elab,flab->lef", np.stack(sides), np.stack(images))


@pytest.mark.parametrize(
    ("rows", "columns", "terms"),
    [
        ((3, 4), (1, 1), 2),
        ((3, 4), (2, 3), 2),
        ((6, 4), (2, 1), 1),
        ((6, 4), (1, 2), 3),
        ((3, 4, 5), (2, 1, 3), 3),
    ],
)
def test_formed_and_applied_it_is_the_normal_matrix_of_the_whole_weight(
    rows: tuple[int, ...], columns: tuple[int, ...], terms: int, weight, rng: np.random.Generator
) -> None:
    shape = KroneckerShape.of(rows, columns)
    size, rank = shape.matrix_shape
    w, root = weight(size), rng.standard_normal((LAYERS, rank, rank))
    gram = root @ root.swapaxes(1, 2)
    stacks = [rng.standard_normal((LAYERS, m * r, terms)) for m, r in shape.factors]
    for i in range(shape.order):
        block = SpectralBlock.of(w, basis_for(w, rows, i), shape, stacks, i, gram)
        wanted = _normal_matrix(w, shape, stacks, i, gram)
        assert np.allclose(block.matrix(), wanted, rtol=1e-11, atol=1e-11 * np.abs(wanted).max())
        x = rng.standard_normal(stacks[i].shape)
        image = (wanted @ x.reshape(LAYERS, -1, 1)).reshape(x.shape)
        assert np.allclose(block.apply(x), image, rtol=1e-11, atol=1e-11 * np.abs(image).max())
        traces = PartialTraces.of(w, rows, gram)
        by_the_whole = Side.of(shape, w, 4, traces)._operator(stacks, i, gram)(x)
        assert np.allclose(by_the_whole, image, rtol=1e-11, atol=1e-11 * np.abs(image).max())


@pytest.mark.parametrize("rows", [(3, 4), (3, 4, 5)])
@pytest.mark.parametrize("place", [0, 1])
def test_what_it_says_of_the_side_in_the_eigenpairs_is_so(
    rows: tuple[int, ...], place: int, weight, rng: np.random.Generator
) -> None:
    shape = KroneckerShape.of(rows, (2, 3, 2)[: len(rows)])
    w, rank = weight(shape.matrix_shape[0]), shape.matrix_shape[1]
    stacks = [rng.standard_normal((LAYERS, m * r, 3)) for m, r in shape.factors]
    gram = np.broadcast_to(np.eye(rank), (LAYERS, rank, rank))
    block = SpectralBlock.of(w, basis_for(w, rows, place), shape, stacks, place, gram)
    wanted = w.basis.swapaxes(-1, -2) @ to_matrices(stacks, shape)
    assert np.allclose(
        block.projection(stacks[place]), wanted, rtol=1e-11, atol=1e-11 * np.abs(wanted).max()
    )


@pytest.mark.parametrize("rows", [(3, 4), (12, 1), (3, 2, 2)])
def test_partial_traces_are_those_of_the_whole_weight(
    rows: tuple[int, ...], weight, rng: np.random.Generator
) -> None:
    w, like = weight(12), rng.standard_normal((LAYERS, 12, 1))
    found, tensor, d = (
        PartialTraces.of(w, rows, like),
        _formed(w).reshape(LAYERS, *rows, *rows),
        len(rows),
    )
    assert np.allclose(12 * found.mean, np.trace(_formed(w), axis1=1, axis2=2), rtol=1e-12)
    for i, (size, part) in enumerate(zip(rows, found.parts, strict=True)):
        others = [axis + 1 for axis in range(d) if axis != i]
        order = (0, i + 1, d + i + 1, *others, *(d + axis for axis in others))
        square = tensor.transpose(order).reshape(LAYERS, size, size, 12 // size, 12 // size)
        wanted = np.trace(square, axis1=3, axis2=4) * (size / (12 * found.mean))[:, None, None]
        if size == 1:
            assert part is None
        else:
            assert np.allclose(part, wanted, rtol=2e-6, atol=2e-6)  # damped a little


def test_shapes_with_one_split_share_its_traces(weight, rng: np.random.Generator) -> None:
    pair = rng.standard_normal((LAYERS, 12, 3)), rng.standard_normal((LAYERS, 3, 12))
    triangles = np.linalg.qr(pair[0])[1], np.linalg.qr(pair[1].swapaxes(1, 2))[1]
    norms = NormWeights(weight(12), weight(12))
    targets = WeightedTargets.of_arrays(pair, triangles, norms)
    shapes = [ProductShape((3, 4), inner, (3, 4)) for inner in ((1, 1), (2, 1), (1, 3))]
    problems = [PairProblem.of(targets, shape, 4) for shape in shapes]
    assert len({id(problem.sides[0].traces) for problem in problems}) == 1
    assert problems[0].sides[0].traces is not problems[0].sides[1].traces
    other = PairProblem.of(targets, ProductShape((4, 3), (1, 1), (3, 4)), 4)
    assert other.sides[0].traces is not problems[0].sides[0].traces
    assert other.sides[1].traces is problems[0].sides[1].traces


def test_a_sweep_tells_its_error_exactly(weight, rng: np.random.Generator) -> None:
    pair = rng.standard_normal((LAYERS, 12, 3)), rng.standard_normal((LAYERS, 3, 20))
    triangles = np.linalg.qr(pair[0])[1], np.linalg.qr(pair[1].swapaxes(1, 2))[1]
    targets = WeightedTargets.of_arrays(pair, triangles, NormWeights(weight(12), weight(20)))
    for shape in (
        ProductShape((3, 4), (2, 1), (4, 5)),
        ProductShape((3, 2, 2), (1, 2, 1), (5, 2, 2)),
    ):
        problem = PairProblem.of(targets, shape, 4)
        swept = problem.sweep(problem.state(problem.starts((2, 2), 1)[0]))
        assert np.allclose(swept.error, problem.state(swept.pair).error, rtol=1e-10)


def test_gram_is_that_of_the_whole_weight(weight, rng: np.random.Generator) -> None:
    w, x = weight(12), rng.standard_normal((LAYERS, 12, 4))
    assert np.allclose(w.gram(x), x.swapaxes(1, 2) @ _formed(w) @ x, rtol=1e-12, atol=1e-12)


def test_it_pays_where_the_other_factors_are_long_and_terms_few() -> None:
    even, tall = KroneckerShape.of((64, 64), (1, 1)), KroneckerShape.of((1024, 4), (1, 1))
    assert is_spectral_cheaper(even, 0, 8, 8)
    assert not is_spectral_cheaper(tall, 0, 8, 8)  # S would be twice as large as V
    assert is_spectral_cheaper(tall, 1, 8, 8)
