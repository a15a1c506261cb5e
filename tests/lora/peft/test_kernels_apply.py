"""Kronecker sums applied without being formed, and when that pays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adapters_support import kron_sum
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from lsrdecomp.errors import ShapeError
from lsrdecomp.lora.peft.kernels import apply, kronecker_pays

SIDE = st.integers(1, 5)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def applied(x: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
    return apply(factors, x)


@given(SIDE, SIDE, SIDE, SIDE, st.integers(1, 4))
def test_the_unformed_product_is_the_formed_one(a, b, c, d, terms):
    first, second, x = draw(terms, a, b), draw(terms, c, d, seed=1), draw(2, 3, b * d, seed=2)
    expected = x.numpy() @ kron_sum([first.numpy(), second.numpy()]).T
    assert np.abs(apply([first, second], x).numpy() - expected).max() <= 1e-12 * max(
        1, np.abs(expected).max()
    )


@pytest.mark.parametrize("sides", [(4, 2, 2, 3), (2, 3, 4, 2)], ids=["second first", "first first"])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (1, 2)])
def test_its_gradients_in_either_order(sides, frozen):
    a, b, c, d = sides
    leaves = [draw(5, b * d), draw(3, a, b, seed=1), draw(3, c, d, seed=2)]
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index not in frozen)
    assert gradcheck(applied, leaves)


def test_autocast_and_float32_factors():
    first, second = (
        torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(seed)) / 8 for seed in (0, 1)
    )
    x = draw(10, 64).float()
    for leaf in (first, second):
        leaf.requires_grad_()
    exact = (
        x.double().numpy()
        @ kron_sum([first.detach().double().numpy(), second.detach().double().numpy()]).T
    )
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


def test_a_direct_sum_pays_until_its_terms_fill_the_matrix():
    assert kronecker_pays(1, (32, 24), (32, 24))
    assert kronecker_pays(383, (768, 1), (1, 768)), "plain low rank below half the side"
    assert not kronecker_pays(384, (768, 1), (1, 768))
    assert not kronecker_pays(24, (32, 24), (32, 24))
    assert kronecker_pays(3, (4, 2), (2, 64)), (
        "272 operations a term in the cheaper order, 1024 formed"
    )
    assert not kronecker_pays(4, (4, 2), (2, 64))
    assert not kronecker_pays(1, (8, 8, 8), (8, 8, 8)), "more than two factors are formed"


@pytest.mark.parametrize("sides", [(4, 2, 2, 3), (2, 3, 4, 2)], ids=["second first", "first first"])
def test_its_second_derivatives_in_either_order(sides):
    a, b, c, d = sides
    leaves = [draw(2, b * d), draw(3, a, b, seed=1), draw(3, c, d, seed=2)]
    assert gradgradcheck(applied, [leaf.requires_grad_() for leaf in leaves])


def test_transforms_of_torch_func_see_plain_operations():
    first, second, x = draw(3, 4, 2), draw(3, 2, 3, seed=1), draw(5, 6, seed=2)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda row: apply([first, second], row)))(x)
    assert np.abs(jacobian.numpy() - kron_sum([first.numpy(), second.numpy()])).max() < 1e-12
