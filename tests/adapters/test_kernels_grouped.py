"""All expansions of a model at once: same matrices, same gradients, in every way a model is run."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from adapters_support import kron_sum
from torch import Tensor, nn
from torch.autograd import gradgradcheck
from torch.utils.checkpoint import checkpoint

from lsrdecomp.adapters.kernels import Expandable, Grouping, adapted_linear, expand_all, grouped, grouping
from lsrdecomp.adapters.kernels.grouped import LARGEST_GROUP, _groups
from lsrdecomp.adapters.kernels.stacked import contract_stack, expand, expand_stack
from lsrdecomp.errors import ShapeError

SHAPES = [
    [(2, 3), (4, 2)],
    [(2, 3), (4, 2)],
    [(3, 1), (1, 5)],
    [(2, 2), (1, 3), (2, 1)],
    [(3, 4)],
    [(3, 2), (2, 4)],
    [(2, 2), (1, 3), (2, 1)],
]


def random_factors(shapes: list[tuple[int, int]], terms: int, generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(terms, m, n, dtype=torch.float64, generator=generator) for m, n in shapes]


def factor_lists(seed: int = 0) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [random_factors(shapes, 3, generator) for shapes in SHAPES]


@pytest.mark.parametrize("entries", [1, 30, LARGEST_GROUP])
def test_expand_all_forms_each_sum(monkeypatch, entries):
    monkeypatch.setattr(grouped, "LARGEST_GROUP", entries)
    lists = factor_lists()
    for factors, matrix in zip(lists, expand_all(lists), strict=True):
        expected = kron_sum([factor.numpy() for factor in factors])
        assert np.abs(matrix.numpy() - expected).max() < 1e-13


@pytest.mark.parametrize("entries", [1, 30, LARGEST_GROUP])
@pytest.mark.parametrize("used", [range(7), (0, 3, 5)], ids=["all", "some"])
def test_gradients_equal_those_of_separate_expansions(monkeypatch, entries, used):
    monkeypatch.setattr(grouped, "LARGEST_GROUP", entries)
    ours, theirs = factor_lists(), factor_lists()
    for lists in (ours, theirs):
        for factor in (factor for factors in lists for factor in factors):
            factor.requires_grad_()
    matrices = expand_all(ours)
    sum(matrices[index].pow(3).sum() for index in used).backward()
    sum(expand(theirs[index]).pow(3).sum() for index in used).backward()
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert (
                (a.grad is None or not a.grad.any()) if b.grad is None else torch.allclose(a.grad, b.grad, rtol=1e-13)
            )


@pytest.mark.parametrize("shapes", [[(2, 3), (4, 2)], [(2, 2), (1, 3), (2, 1)], [(3, 4)]])
def test_contraction_is_the_adjoint_of_expansion(shapes):
    generator = torch.Generator().manual_seed(1)
    factors = [torch.randn(2, 3, m, n, dtype=torch.float64, generator=generator) for m, n in shapes]
    formed = expand_stack(factors)
    gradient = torch.randn(formed.shape, dtype=torch.float64, generator=generator)
    leaves = [factor.clone().requires_grad_() for factor in factors]
    expand_stack(leaves).backward(gradient)
    for ours, leaf in zip(contract_stack(gradient, factors), leaves, strict=True):
        assert ours.shape == leaf.shape
        assert torch.allclose(ours, leaf.grad, rtol=1e-13)


def test_second_derivatives_of_formed_sums():
    generator = torch.Generator().manual_seed(1)
    shapes = [[(2, 3), (2, 2)], [(3, 2), (2, 2)], [(2, 3), (2, 2)]]  # wide, tall and wide again: one class
    flat = [factor for each in shapes for factor in random_factors(each, 2, generator)]

    def formed(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(expand_all([given[0:2], given[2:4], given[4:6]]))

    leaves = [factor.detach().requires_grad_() for factor in flat]
    assert gradgradcheck(formed, leaves)
    used = formed(*leaves)[1]  # a gradient reaches one of the three
    (gradient,) = torch.autograd.grad(used.square().sum(), leaves[2], create_graph=True)
    gradient.square().sum().backward()
    assert leaves[3].grad is not None
    assert leaves[0].grad is None


def test_factors_changed_in_place_have_no_second_derivatives():
    generator = torch.Generator().manual_seed(1)
    leaves = [factor.detach().requires_grad_() for factor in random_factors([(2, 3), (2, 2)], 2, generator)]
    loss = expand_all([leaves])[0].square().sum()
    with torch.no_grad():
        leaves[0].mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        torch.autograd.grad(loss, leaves, create_graph=True)


class Sum(Expandable):
    def __init__(self, shapes: list[tuple[int, int]], generator: torch.Generator) -> None:
        super().__init__()
        self.held = nn.ParameterList(random_factors(shapes, 2, generator))

    @property
    def factors(self) -> list[Tensor]:
        return list(self.held)


class Block(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(6, 6, dtype=torch.float64, generator=generator) / 3)
        self.right, self.left = Sum([(2, 3), (1, 2)], generator), Sum([(2, 2), (3, 1)], generator)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(
            adapted_linear(x, self.weight, None, self.right.matrix(), self.left.matrix(), 0.2, mode="blas")
        )


class Model(nn.Module):
    """Three blocks, the first also used last; each may be checkpointed."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(Block(generator) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def batch(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, dtype=torch.float64, generator=generator).requires_grad_()


def trained(model: Model, steps: int = 2) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in (0, 1):
            model(batch(2 * step + micro)).square().sum().backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["kept", "reentrant", "recomputed"])
@pytest.mark.parametrize("entries", [1, 30, LARGEST_GROUP])
def test_training_is_that_of_separate_expansions(monkeypatch, use_reentrant, entries):
    monkeypatch.setattr(grouped, "LARGEST_GROUP", entries)
    expected = trained(Model())
    model = Model(use_reentrant)
    with Grouping(model):
        for ours, theirs in zip(trained(model), expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12)


def test_what_a_pass_formed_is_used_in_it_and_nowhere_else():
    model = Model()
    first = model.blocks[0].right
    seen = []
    model.blocks[1].register_forward_hook(lambda *_: seen.append(first.matrix()))
    with Grouping(model):
        y = model(batch(0))
        assert seen[0] is first.expansion.matrix
        assert first.matrix() is not seen[0]
        first.held[0].data.mul_(2)  # a change that PyTorch does not count
        assert torch.allclose(first.matrix(), 2 * seen[0])
        y.sum().backward()
        with torch.no_grad():
            model(batch(0))
        assert torch.allclose(seen[1], 2 * seen[0])
        assert first.expansion is None, "without a graph there is no backward to keep it for"
        model(batch(0))
    assert first.expansion is None
    model(batch(0))
    assert first.expansion is None, "the hooks are gone"


def test_what_was_formed_without_a_graph_is_not_used_where_gradients_are_wanted():
    model = Model()
    first, seen = model.blocks[0].right, []

    def with_gradients(*_):
        with torch.enable_grad():
            seen.append(first.matrix())

    model.blocks[1].register_forward_hook(with_gradients)
    with Grouping(model), torch.no_grad():
        model(batch(0))
    assert seen[0].requires_grad


def test_an_error_in_a_forward_pass_ends_it():
    model = Model()
    first = model.blocks[0].right
    with Grouping(model):
        with pytest.raises(ShapeError):
            model(batch(0)[:, :5])
        assert not first.expansion.holds()


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "recomputed"])
def test_a_pass_between_forward_and_backward_changes_no_gradient(use_reentrant):
    expected, model = Model(), Model(use_reentrant)
    expected(batch(0)).square().sum().backward()
    with Grouping(model):
        loss = model(batch(0)).square().sum()
        model.use_reentrant = None
        with torch.no_grad():
            model(batch(1))
        loss.backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12)


def test_checkpointed_parts_read_what_the_pass_formed(monkeypatch):
    model = Model(use_reentrant=False)
    with Grouping(model):
        loss = model(batch(0)).square().sum()
        monkeypatch.setattr(grouping, "expand_all", None)
        loss.backward()


@pytest.mark.parametrize(
    ("entries", "groups"),
    [(48 * 3, [([0, 2, 1], 2)]), (48, [([0, 1], 1), ([2], 1)]), (1, [([0], 1), ([1], 0), ([2], 1)])],
)
def test_two_sides_of_a_square_layer_are_one_class(monkeypatch, entries, groups):
    monkeypatch.setattr(grouped, "LARGEST_GROUP", entries)
    generator = torch.Generator().manual_seed(0)
    wide = random_factors([(2, 3), (1, 4)], 2, generator)
    tall = random_factors([(3, 2), (4, 1)], 2, generator)
    assert list(_groups([wide, tall, wide])) == groups


def test_only_selected_modules_are_expanded(monkeypatch):
    model = Model()
    monkeypatch.setattr(Grouping, "select", lambda self: [(self.model.blocks[1].left, None)])
    with Grouping(model):
        model(batch(0))
        assert model.blocks[1].left.expansion is not None
        assert model.blocks[1].right.expansion is None


def test_a_model_can_be_copied_and_pickled_while_expanded():
    model = Model()
    with Grouping(model):
        expected = model(batch(0))
        twin = copy.deepcopy(model.blocks[0])
        assert twin.right.expansion is None
        assert pickle.loads(pickle.dumps(model.blocks[0].right)).expansion is None
    assert torch.equal(expected, model(batch(0))) or torch.allclose(expected, model(batch(0)), rtol=1e-13)


@pytest.mark.parametrize("grouped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_compiler_takes_a_model_in_one_piece(grouped):
    class Automatic(Block):
        def forward(self, x: Tensor) -> Tensor:
            return adapted_linear(x, self.weight, None, self.right.matrix(), self.left.matrix(), 0.2)

    model = nn.Sequential(*(Automatic(torch.Generator().manual_seed(seed)) for seed in range(2)))
    expected = model(batch(0))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with Grouping(model) if grouped else nullcontext():
        y = compiled(batch(0))
        y.square().sum().backward()
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected.square().sum().backward()
    assert torch.allclose(y, expected, rtol=1e-12)
    assert all(torch.allclose(a, b.grad, rtol=1e-12) for a, b in zip(ours, model.parameters(), strict=True))


def test_factors_that_do_not_lie_here_whole_are_left_to_their_layers():
    whole = nn.Parameter(torch.ones(2, 3, 4))
    assert grouping._groupable([whole, whole])
    for other in (
        torch.ones(2, 3, 4),  # swapped for a call
        nn.Parameter(torch.ones(0)),  # sharded, the shard elsewhere
        nn.Parameter(torch.ones(2, 3, 4, device="meta")),  # offloaded
    ):
        assert not grouping._groupable([whole, other])


def test_narrow_matrices_from_wide_factors():
    ours, theirs = factor_lists(), factor_lists()
    for lists in (ours, theirs):
        for factor in (factor for factors in lists for factor in factors):
            factor.requires_grad_()
    matrices = expand_all(ours, dtype=torch.bfloat16)
    assert all(matrix.dtype == torch.bfloat16 for matrix in matrices)
    sum(matrix.float().sum() for matrix in matrices).backward()
    sum(expand(factors).sum() for factors in theirs).backward()
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert a.grad.dtype == torch.float64
            assert torch.allclose(a.grad, b.grad, rtol=1e-12), "a gradient of ones is exact in any precision"
