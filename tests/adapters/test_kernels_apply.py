"""Kronecker sums applied without being formed, many adapters in one batch, and the choice between modes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adapters_support import kron_sum
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from lsrdecomp.adapters.kernels import (
    StackedPairs,
    add_adapters,
    apply,
    choose,
    expand_all,
    kronecker_pays,
)
from lsrdecomp.adapters.kernels.dispatch import Crossovers, crossovers
from lsrdecomp.errors import ShapeError

SIDE = st.integers(1, 5)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def applied(x: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
    return apply(factors, x)


@given(SIDE, SIDE, SIDE, SIDE, st.integers(1, 4))
def test_the_unformed_product_is_the_formed_one(a, b, c, d, terms):
    first, second, x = draw(terms, a, b), draw(terms, c, d, seed=1), draw(2, 3, b * d, seed=2)
    expected = x.numpy() @ kron_sum([first.numpy(), second.numpy()]).T
    assert np.abs(apply([first, second], x).numpy() - expected).max() <= 1e-12 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("sides", [(4, 2, 2, 3), (2, 3, 4, 2)], ids=["second first", "first first"])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (1, 2)])
def test_its_gradients_in_either_order(sides, frozen):
    a, b, c, d = sides
    leaves = [draw(5, b * d), draw(3, a, b, seed=1), draw(3, c, d, seed=2)]
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index not in frozen)
    assert gradcheck(applied, leaves)


def test_autocast_and_float32_factors():
    first, second = (torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(seed)) / 8 for seed in (0, 1))
    x = draw(10, 64).float()
    for leaf in (first, second):
        leaf.requires_grad_()
    exact = x.double().numpy() @ kron_sum([first.detach().double().numpy(), second.detach().double().numpy()]).T
    with torch.autocast("cpu", torch.bfloat16):
        y = apply([first, second], x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert first.grad.dtype == torch.float32
    assert np.linalg.norm(y.detach().double().numpy() - exact) < 2e-2 * np.linalg.norm(exact)


def test_sizes_that_disagree_are_named():
    with pytest.raises(ShapeError, match="2 x 5 = 10 columns, but the input has 9"):
        apply([draw(1, 3, 2), draw(1, 3, 5)], draw(9))
    with pytest.raises(ShapeError, match=r"\(2, 3, 2\), \(1, 3, 5\)"):
        apply([draw(2, 3, 2), draw(1, 3, 5)], draw(10))


def some_factors() -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]], list[float]]:
    """Three adapters of a 6 x 10 layer with inner ranks 4, 2 and 4 and different numbers of terms."""
    rights = [[draw(3, 2, 5, seed=i), draw(3, 2 - i % 2, 2, seed=10 + i)] for i in range(3)]
    lefts = [[draw(2 + i, 3, 2, seed=20 + i), draw(2 + i, 2, 2 - i % 2, seed=30 + i)] for i in range(3)]
    return rights, lefts, [0.5, 2.0, 1.0]


def stacked(rights, lefts, scalings, dtype=torch.float64) -> StackedPairs:
    formed = expand_all([*rights, *lefts], dtype=dtype)
    return StackedPairs.of(formed[: len(rights)], formed[len(rights) :], scalings)


@pytest.mark.parametrize("mode", ["masked", "gathered", "auto"])
@pytest.mark.parametrize("middle", [(), (4,), (2, 3)])
def test_every_row_gets_its_own_adapter(mode, middle):
    rights, lefts, scalings = some_factors()
    index = torch.tensor([2, -1, 0, 1, 1])
    x, base = draw(5, *middle, 10, seed=40), draw(5, *middle, 6, seed=41)
    ours = add_adapters(base, x, stacked(rights, lefts, scalings), index, mode)
    for row, adapter in enumerate(index.tolist()):
        expected = base[row].numpy()
        if adapter >= 0:
            right, left = (kron_sum([f.numpy() for f in side[adapter]]) for side in (rights, lefts))
            expected = expected + scalings[adapter] * x[row].numpy() @ right.T @ left.T
        assert np.abs(ours[row].numpy() - expected).max() < 1e-12, adapter


@pytest.mark.parametrize("mode", ["masked", "gathered"])
def test_gradients_reach_the_factors_of_the_adapters_in_the_batch_alone(mode):
    rights, lefts, scalings = some_factors()
    for factors in (*rights, *lefts):
        for factor in factors:
            factor.requires_grad_()
    pairs = stacked(rights, lefts, scalings)
    add_adapters(
        torch.zeros(2, 6, dtype=torch.float64), draw(2, 10), pairs, torch.tensor([2, -1]), mode
    ).sum().backward()
    assert all(factor.grad.any() for factor in (*rights[2], *lefts[2]))
    assert not any(factor.grad.any() for factor in (*rights[0], *lefts[0], *rights[1], *lefts[1]))


def test_narrow_outputs_are_rounded_once():
    pairs = stacked(*some_factors(), dtype=torch.float32)
    index = torch.tensor([0, 1, 2, -1, 0])
    base, x = draw(5, 6, seed=41).bfloat16(), draw(5, 10, seed=40).bfloat16()
    expected = add_adapters(base.float(), x, pairs, index).bfloat16()
    assert torch.equal(add_adapters(base, x, pairs, index), expected)


def test_rows_that_name_no_adapter_are_refused():
    pairs = stacked(*some_factors())
    assert len(pairs.rights) == 3
    base, x = torch.zeros(2, 6, dtype=torch.float64), draw(2, 10)
    with pytest.raises(ShapeError, match="names adapter 3, but there are 3"):
        add_adapters(base, x, pairs, torch.tensor([0, 3]))
    with pytest.raises(ShapeError, match="2 rows need one adapter each"):
        add_adapters(base, x, pairs, torch.tensor([0]))


def test_the_choice_follows_the_crossovers():
    limits = Crossovers(16, 64, "given")
    assert [choose(tokens, limits=limits) for tokens in (15, 16, 10**6)] == ["plain", "blas", "blas"]
    assert choose(10**6, limits=Crossovers(None, 64, "given")) == "plain"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_stored_crossovers_can_be_read_and_name_their_source(device):
    assert crossovers(device).source
    assert choose(4096, device) in ("plain", "blas")


def test_a_direct_sum_pays_until_its_terms_fill_the_matrix():
    assert kronecker_pays(1, (32, 24), (32, 24))
    assert kronecker_pays(383, (768, 1), (1, 768)), "plain low rank below half the side"
    assert not kronecker_pays(384, (768, 1), (1, 768))
    assert not kronecker_pays(24, (32, 24), (32, 24))
    assert kronecker_pays(3, (4, 2), (2, 64)), "272 operations a term in the cheaper order, 1024 formed"
    assert not kronecker_pays(4, (4, 2), (2, 64))
    assert kronecker_pays(21, (8, 8, 8), (8, 8, 8)), "3 · 8⁴ operations a term against 8⁶"
    assert not kronecker_pays(22, (8, 8, 8), (8, 8, 8))


@pytest.mark.parametrize("sides", [(4, 2, 2, 3), (2, 3, 4, 2)], ids=["second first", "first first"])
def test_its_second_derivatives_in_either_order(sides):
    a, b, c, d = sides
    leaves = [draw(2, b * d), draw(3, a, b, seed=1), draw(3, c, d, seed=2)]
    assert gradgradcheck(applied, [leaf.requires_grad_() for leaf in leaves])


def test_transforms_of_torch_func_see_plain_operations():
    first, second, x = draw(3, 4, 2), draw(3, 2, 3, seed=1), draw(5, 6, seed=2)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda row: apply([first, second], row)))(x)
    assert np.abs(jacobian.numpy() - kron_sum([first.numpy(), second.numpy()])).max() < 1e-12
