"""Kronecker sums applied without being formed, many adapters in one batch, and the choice between modes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adapters_support import kron_sum
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from lsrdecomp.adapters.kernels import (
    AdapterBank,
    Problem,
    add_adapters,
    choose,
    kronecker_linear,
    kronecker_pays,
    linear,
    structured_pays,
)
from lsrdecomp.adapters.kernels.dispatch import Crossovers, crossovers
from lsrdecomp.errors import ShapeError

SIDE = st.integers(1, 5)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


@given(SIDE, SIDE, SIDE, SIDE, st.integers(1, 4))
def test_the_unformed_product_is_the_formed_one(a, b, c, d, terms):
    first, second, x = draw(terms, a, b), draw(terms, c, d, seed=1), draw(2, 3, b * d, seed=2)
    expected = x.numpy() @ kron_sum([first.numpy(), second.numpy()]).T
    assert np.abs(kronecker_linear(x, first, second).numpy() - expected).max() <= 1e-12 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("sides", [(4, 2, 2, 3), (2, 3, 4, 2)], ids=["second first", "first first"])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (1, 2)])
def test_its_gradients_in_either_order(sides, frozen):
    a, b, c, d = sides
    leaves = [draw(5, b * d), draw(3, a, b, seed=1), draw(3, c, d, seed=2)]
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index not in frozen)
    assert gradcheck(kronecker_linear, leaves)


def test_autocast_and_float32_factors():
    first, second = (torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(seed)) / 8 for seed in (0, 1))
    x = draw(10, 64).float()
    for leaf in (first, second):
        leaf.requires_grad_()
    exact = x.double().numpy() @ kron_sum([first.detach().double().numpy(), second.detach().double().numpy()]).T
    with torch.autocast("cpu", torch.bfloat16):
        y = kronecker_linear(x, first, second)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert first.grad.dtype == torch.float32
    assert np.linalg.norm(y.detach().double().numpy() - exact) < 2e-2 * np.linalg.norm(exact)


def test_sizes_that_disagree_are_named():
    with pytest.raises(ShapeError, match="2 x 5 = 10 columns, but the input has 9"):
        kronecker_linear(draw(9), draw(1, 3, 2), draw(1, 3, 5))
    with pytest.raises(ShapeError, match=r"\(2, 3, 2\) and \(1, 3, 5\)"):
        kronecker_linear(draw(10), draw(2, 3, 2), draw(1, 3, 5))


def bank_factors() -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]], list[float]]:
    """Three adapters of a 6 x 10 layer with inner ranks 4, 2 and 4 and different numbers of terms."""
    rights = [[draw(3, 2, 5, seed=i), draw(3, 2 - i % 2, 2, seed=10 + i)] for i in range(3)]
    lefts = [[draw(2 + i, 3, 2, seed=20 + i), draw(2 + i, 2, 2 - i % 2, seed=30 + i)] for i in range(3)]
    return rights, lefts, [0.5, 2.0, 1.0]


@pytest.mark.parametrize("mode", ["masked", "gathered", "auto"])
@pytest.mark.parametrize("middle", [(), (4,), (2, 3)])
def test_every_row_gets_its_own_adapter(mode, middle):
    rights, lefts, scalings = bank_factors()
    index = torch.tensor([2, -1, 0, 1, 1])
    x, base = draw(5, *middle, 10, seed=40), draw(5, *middle, 6, seed=41)
    ours = add_adapters(base, x, AdapterBank.of(rights, lefts, scalings), index, mode)
    for row, adapter in enumerate(index.tolist()):
        expected = base[row].numpy()
        if adapter >= 0:
            right, left = (kron_sum([f.numpy() for f in side[adapter]]) for side in (rights, lefts))
            expected = expected + scalings[adapter] * x[row].numpy() @ right.T @ left.T
        assert np.abs(ours[row].numpy() - expected).max() < 1e-12, adapter


@pytest.mark.parametrize("mode", ["masked", "gathered"])
def test_gradients_reach_the_factors_of_the_adapters_in_the_batch_alone(mode):
    rights, lefts, scalings = bank_factors()
    for factors in (*rights, *lefts):
        for factor in factors:
            factor.requires_grad_()
    bank = AdapterBank.of(rights, lefts, scalings)
    add_adapters(
        torch.zeros(2, 6, dtype=torch.float64), draw(2, 10), bank, torch.tensor([2, -1]), mode
    ).sum().backward()
    assert all(factor.grad.any() for factor in (*rights[2], *lefts[2]))
    assert not any(factor.grad.any() for factor in (*rights[0], *lefts[0], *rights[1], *lefts[1]))


def test_narrow_outputs_are_rounded_once():
    bank = AdapterBank.of(*bank_factors(), dtype=torch.float32)
    index = torch.tensor([0, 1, 2, -1, 0])
    base, x = draw(5, 6, seed=41).bfloat16(), draw(5, 10, seed=40).bfloat16()
    expected = add_adapters(base.float(), x, bank, index).bfloat16()
    assert torch.equal(add_adapters(base, x, bank, index), expected)


def test_rows_without_an_adapter_in_the_bank_are_refused():
    bank = AdapterBank.of(*bank_factors())
    assert len(bank) == 3
    base, x = torch.zeros(2, 6, dtype=torch.float64), draw(2, 10)
    with pytest.raises(ShapeError, match="names adapter 3, but the bank holds 3"):
        add_adapters(base, x, bank, torch.tensor([0, 3]))
    with pytest.raises(ShapeError, match="2 rows need one adapter each"):
        add_adapters(base, x, bank, torch.tensor([0]))
    with pytest.raises(ShapeError, match="no bank"):
        AdapterBank.of([], [], [])


def test_the_choice_follows_the_crossovers():
    limits = Crossovers(16, 2.0, None, None, 64, "given")
    assert choose(Problem(15, 768, 768, 4), limits) == "plain"
    assert choose(Problem(16, 768, 768, 4), limits) == "blas"
    assert choose(Problem(767, 768, 768, 4), limits) == "blas"
    assert choose(Problem(768, 768, 768, 4), limits) == "merged"
    assert choose(Problem(768, 768, 768, 4, storage=torch.bfloat16), limits) == "blas", "rounding would lose the update"
    assert choose(Problem(768, 768, 768, 4, dropout=True), limits) == "blas"
    never = Crossovers(None, None, None, None, 64, "given")
    assert choose(Problem(10**6, 768, 768, 4), never) == "plain"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_stored_crossovers_can_be_read_and_name_their_source(device):
    assert crossovers(device).source
    assert choose(Problem(4096, 768, 768, 4)) in ("plain", "blas", "merged", "fused")


def test_structured_application_pays_for_next_to_no_tokens():
    # 768 = 32 x 24 with r = 2 x 2 and 16 terms: KERNELS' example of two tokens
    assert structured_pays(2, 16, (2, 2), (32, 24))
    assert not structured_pays(3, 16, (2, 2), (32, 24))
    assert structured_pays(10**6, 1, (4, 1), (32, 24)), "one term of inner rank 4 x 1 is always cheaper unformed"


def test_a_direct_sum_pays_until_its_terms_fill_the_matrix():
    assert kronecker_pays(1, (32, 24), (32, 24))
    assert kronecker_pays(383, (768, 1), (1, 768)), "plain low rank below half the side"
    assert not kronecker_pays(384, (768, 1), (1, 768))
    assert not kronecker_pays(24, (32, 24), (32, 24))


def test_blocks_of_rows_only_where_the_weight_is_smaller_than_a_block(monkeypatch):
    monkeypatch.setattr(linear, "crossovers", lambda _: Crossovers(None, None, None, 100, 64, "given"))
    assert linear._at_once(torch.empty(150, 300)) == 100
    assert linear._at_once(torch.empty(151, 300)) is None
    monkeypatch.setattr(linear, "crossovers", lambda _: Crossovers(None, None, None, None, 64, "given"))
    assert linear._at_once(torch.empty(1, 1)) is None
