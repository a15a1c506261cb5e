"""Every factor in one parameter: matrices, gradients and training as with separate layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adapters_support import kron_sum
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.adapters.candidate_kernels.arena import ArenaLayer, FactorArena
from benchmarks.adapters.candidate_kernels.modes import applied
from lsrdecomp.adapters.kernels import adapted_linear, expand
from lsrdecomp.errors import PrecisionError, ShapeError
from lsrdecomp.kronecker.shape import ProductShape

WIDE = ProductShape((2, 3), (2, 2), (3, 2))  # 6 x 6, inner rank 4
LAYERS = (
    ArenaLayer(WIDE, (3, 2), 0.5),
    ArenaLayer(ProductShape((3, 2), (1, 3), (2, 3)), (1, 4), 2.0),
    ArenaLayer(WIDE, (3, 2), 0.25),
    ArenaLayer(WIDE, (1, 1), 1.0),
)


def arena(layers=LAYERS, seed: int = 0, **options) -> FactorArena:
    options = {"dtype": torch.float64, "compute_dtype": torch.float64} | options
    made = FactorArena(layers, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        made.flat.copy_(torch.randn(made.flat.shape, generator=generator, dtype=torch.float64))
    return made


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 6, dtype=torch.float64, generator=generator) / 3 for _ in LAYERS]


def batch(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 5, 6, dtype=torch.float64, generator=generator).requires_grad_()


def test_each_pair_is_the_sum_of_its_kronecker_products():
    made = arena()
    made.expand()
    for index, layer in enumerate(LAYERS):
        right, left = made.pair(index)
        right_factors, left_factors = made.factors(index)
        assert np.abs(right.numpy() - kron_sum([factor.numpy() for factor in right_factors])).max() < 1e-13
        expected = layer.scaling * kron_sum([factor.numpy() for factor in left_factors])
        assert np.abs(left.numpy() - expected).max() < 1e-13


def test_factors_of_three_on_a_side():
    shape = ProductShape((2, 1, 3), (1, 2, 2), (3, 2, 1))
    made = arena([ArenaLayer(shape, (2, 3), 0.5)])
    made.expand()
    right_factors, _ = made.factors(0)
    assert np.abs(made.pair(0)[0].numpy() - kron_sum([factor.numpy() for factor in right_factors])).max() < 1e-13


def test_every_entry_of_the_parameter_belongs_to_one_factor():
    made = arena()
    with torch.no_grad():
        made.flat.zero_()
        for index in range(len(LAYERS)):
            for side in made.factors(index):
                for factor in side:
                    factor.add_(1)
    assert torch.equal(made.flat, torch.ones_like(made.flat))


def run(made: FactorArena, order=(0, 1, 2, 3, 1), use_reentrant: bool | None = None, seed: int = 3) -> Tensor:
    """Layers one after the other, the second used twice."""
    token, x = made.expand(), batch(seed)
    for index in order:

        def layer(x: Tensor, index: int = index) -> Tensor:
            return torch.tanh(made.linear(token, index, x, weights()[index], weights()[0][0]))

        x = layer(x) if use_reentrant is None else checkpoint(layer, x, use_reentrant=use_reentrant)
    return x.square().sum()


def reference_gradient(order=(0, 1, 2, 3, 1), seeds=(3,)) -> Tensor:
    made = arena()
    flat = made.flat
    for seed in seeds:
        x = batch(seed)
        for index in order:
            job_right, job_left = made.layout.right[index], made.layout.left[index]
            right, left = expand(job_right.views(flat)), expand(job_left.views(flat))
            x = torch.tanh(
                adapted_linear(x, weights()[index], weights()[0][0], right, left, LAYERS[index].scaling, mode="plain")
            )
        x.square().sum().backward()
    return flat.grad


@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["kept", "reentrant", "recomputed"])
@pytest.mark.parametrize("layerwise", [False, True])
def test_gradients_are_those_of_separate_layers(use_reentrant, layerwise):
    made = arena(layerwise=layerwise)
    run(made, use_reentrant=use_reentrant).backward()
    assert torch.allclose(made.flat.grad, reference_gradient(), rtol=1e-12)


@pytest.mark.parametrize("layerwise", [False, True])
def test_layers_that_were_not_used_get_zeros(layerwise):
    made = arena(layerwise=layerwise)
    run(made).backward()  # leaves numbers in the buffers
    made.flat.grad = None
    run(made, order=(2, 0)).backward()
    assert torch.allclose(made.flat.grad, reference_gradient(order=(2, 0)), rtol=1e-12)
    assert not any(factor.any() for factor in made.layout.right[1].views(made.flat.grad))


@pytest.mark.parametrize("layerwise", [False, True])
def test_two_forward_passes_before_one_backward(layerwise):
    made = arena(layerwise=layerwise)
    (run(made, seed=3) + run(made, seed=4)).backward()
    assert torch.allclose(made.flat.grad, reference_gradient(seeds=(3, 4)), rtol=1e-12)


def test_a_step_between_forward_and_backward_is_noticed():
    made = arena()
    loss = run(made)
    with torch.no_grad():
        made.flat.mul_(2)
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        loss.backward()


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_narrow_formed_matrices_and_padded_ranks(compute_dtype):
    made = arena(compute_dtype=compute_dtype, dtype=torch.float32)
    exact = arena()
    with torch.no_grad():
        exact.flat.copy_(made.flat)
    assert made.layout.right[0].padded_rank == (8 if compute_dtype == torch.bfloat16 else 4)
    x = batch(3).detach()
    losses = []
    for each in (made, exact):
        token = each.expand()
        dtype = each.matrices.dtype
        y = each.linear(token, 0, x.to(dtype), weights()[0].to(dtype))
        losses.append(y)
        y.backward(torch.ones_like(y))
    bound = 1e-5 if compute_dtype == torch.float32 else 2e-2
    assert (losses[0].double() - losses[1]).norm() < bound * losses[1].norm()
    assert made.flat.grad.dtype == torch.float32
    assert (made.flat.grad.double() - exact.flat.grad).norm() < bound * exact.flat.grad.norm()


def test_sizes_that_disagree_are_named():
    made = arena()
    token = made.expand()
    with pytest.raises(ShapeError, match="layer 0 of the arena is 6 x 6"):
        made.linear(token, 0, torch.zeros(2, 5, dtype=torch.float64), torch.zeros(6, 5, dtype=torch.float64))
    with pytest.raises(ShapeError, match="at least one layer"):
        FactorArena([])
    with pytest.raises(ShapeError, match="float32"):
        FactorArena(LAYERS, dtype=torch.float64, backend="triton")


@pytest.mark.parametrize("bias", [False, True])
def test_the_merged_mode_is_the_composed_layer(bias):
    generator = torch.Generator().manual_seed(4)
    draw = {"x": (2, 5, 6), "right": (3, 6), "left": (8, 3)}
    x, right, left = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in draw.values())
    weight, given = torch.randn(8, 6, generator=generator, dtype=torch.float64), None
    if bias:
        given = torch.randn(8, generator=generator, dtype=torch.float64)
    results = []
    for mode in ("merged", "plain"):
        leaves = [each.clone().requires_grad_() for each in (x, right, left)]
        y = applied(leaves[0], weight, given, leaves[1], leaves[2], 0.7, mode)
        y.square().sum().backward()
        results.append((y, *(leaf.grad for leaf in leaves)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)
    with pytest.raises(PrecisionError, match="bfloat16"):
        applied(x.bfloat16(), weight.bfloat16(), None, right, left, 0.7, "merged")
