"""One autograd node for a layer and its adapter: the numbers of composed operations, in every way a layer is used."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from lsrdecomp.adapters.kernels import adapted_linear
from lsrdecomp.errors import ShapeError

MODES = ("plain", "blas")


def tensors(dtype: torch.dtype = torch.float64, tokens: int = 5, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": (2, tokens, 6), "weight": (8, 6), "bias": (8,), "right": (3, 6), "left": (8, 3)}
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: tensor.to(dtype) for name, tensor in drawn.items()}


def reference(t: dict[str, Tensor], scaling: float, dropped: Tensor | None = None) -> Tensor:
    seen = t["x"] if dropped is None else dropped
    return t["x"] @ t["weight"].T + t["bias"] + scaling * (seen @ t["right"].T @ t["left"].T)


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_every_tensor_by_finite_differences(mode):
    leaves = [tensor.requires_grad_() for tensor in tensors().values()]
    assert gradcheck(lambda *given: adapted_linear(*given, 0.7, mode=mode), leaves)


@pytest.mark.parametrize("mode", ["plain", "blas"])
def test_gradients_with_a_dropped_out_input(mode):
    leaves = [tensor.requires_grad_() for tensor in tensors().values()]
    dropped = tensors(seed=1)["x"].requires_grad_()
    assert torch.allclose(
        adapted_linear(*leaves, 0.7, dropped=dropped, mode=mode),
        reference(dict(zip(tensors(), leaves, strict=True)), 0.7, dropped),
    )
    assert gradcheck(lambda *given: adapted_linear(*given[:-1], 0.7, dropped=given[-1], mode=mode), [*leaves, dropped])


@pytest.mark.parametrize("frozen", [(), ("weight", "bias"), ("x", "right")], ids=["none", "base", "some"])
def test_second_derivatives_by_finite_differences(frozen):
    leaves = [tensor.requires_grad_(name not in frozen) for name, tensor in tensors().items()]
    assert gradgradcheck(lambda *given: adapted_linear(*given, 0.7, mode="blas"), leaves)


def test_second_derivatives_with_a_dropped_out_input_or_one_given_twice():
    leaves = [tensor.requires_grad_(name not in ("weight", "bias")) for name, tensor in tensors().items()]
    dropped = tensors(seed=1)["x"].requires_grad_()
    assert gradgradcheck(
        lambda *given: adapted_linear(*given[:-1], 0.7, dropped=given[-1], mode="blas"), [*leaves, dropped]
    )
    assert gradgradcheck(lambda *given: adapted_linear(*given, 0.7, dropped=given[0], mode="blas"), leaves)


@pytest.mark.parametrize("bias", [False, True])
def test_both_modes_agree(bias):
    leaves = [tensor.requires_grad_() for tensor in tensors().values()]
    if not bias:
        leaves[2] = None
    assert torch.allclose(
        adapted_linear(*leaves, 0.7, mode="blas"), adapted_linear(*leaves, 0.7, mode="plain"), rtol=1e-13
    )
    assert gradcheck(lambda *given: adapted_linear(*given, 0.7, mode="blas"), leaves)


@pytest.mark.parametrize("frozen", [(), ("weight",), ("weight", "bias"), ("x", "weight"), ("right",), ("x", "left")])
@pytest.mark.parametrize("mode", MODES)
def test_only_what_is_asked_for_gets_a_gradient(mode, frozen):
    ours, theirs = tensors(), tensors()
    for name in ours:
        ours[name].requires_grad_(name not in frozen)
        theirs[name].requires_grad_(name not in frozen)
    dy = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    adapted_linear(**ours, scaling=1.3, mode=mode).backward(dy)
    reference(theirs, 1.3).backward(dy)
    for name, tensor in ours.items():
        if name in frozen:
            assert tensor.grad is None
        else:
            assert relative(tensor.grad, theirs[name].grad) < 1e-14, name


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("master", [True, False], ids=["float32 pair", "narrow pair"])
def test_narrow_precisions_stay_near_float64(dtype, bound, master):
    generator = torch.Generator().manual_seed(3)
    shapes = {"x": (40, 48), "weight": (32, 48), "bias": (32,), "right": (8, 48), "left": (32, 8)}
    exact = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    exact["right"], exact["left"] = exact["right"] / 7, exact["left"] / 3
    ours = {name: tensor.to(dtype) for name, tensor in exact.items()}
    if master:
        ours |= {name: exact[name].to(dtype).float() for name in ("right", "left")}
    exact = {name: tensor.double() for name, tensor in ours.items()}
    for name in ("x", "right", "left"):
        ours[name].requires_grad_()
        exact[name].requires_grad_()
    y, expected = adapted_linear(**ours, scaling=2.0, mode="blas"), reference(exact, 2.0)
    assert y.dtype == dtype
    assert relative(y, expected) < bound
    dy = torch.randn(40, 32, generator=generator, dtype=torch.float64).to(dtype)
    y.backward(dy)
    expected.backward(dy.double())
    for name in ("x", "right", "left"):
        assert ours[name].grad.dtype == ours[name].dtype
        assert relative(ours[name].grad, exact[name].grad) < bound, name


@pytest.mark.parametrize("mode", MODES)
def test_autocast_computes_in_its_precision_and_returns_gradients_in_the_parameters_own(mode):
    ours, exact = tensors(torch.float32), tensors()
    exact = {name: ours[name].double().requires_grad_() for name in exact}
    for tensor in ours.values():
        tensor.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = adapted_linear(**ours, scaling=0.5, mode=mode)
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()  # backward inside the context, as some trainers do
    expected = reference(exact, 0.5)
    expected.sum().backward()
    assert relative(y, expected) < 2e-2
    for name, tensor in ours.items():
        assert tensor.grad.dtype == torch.float32, name
        assert relative(tensor.grad, exact[name].grad) < 2e-2, name


class Twice(nn.Module):
    """One layer with its adapter, used twice in a row around a nonlinearity."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        t = tensors()
        self.mode = mode
        self.register_buffer("weight", t["weight"][:6].contiguous())
        self.bias = nn.Parameter(t["bias"][:6].clone())
        self.right, self.left = nn.Parameter(t["right"]), nn.Parameter(t["left"][:6].clone())

    def layer(self, x: Tensor) -> Tensor:
        if self.mode == "reference":
            return x @ self.weight.T + self.bias + 0.7 * (x @ self.right.T @ self.left.T)
        return adapted_linear(x, self.weight, self.bias, self.right, self.left, 0.7, mode=self.mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


def gradients(model: Twice, use_reentrant: bool | None) -> list[Tensor]:
    for seed in (5, 6):  # gradients accumulate over two batches
        x = tensors(seed=seed)["x"].requires_grad_()
        y = model(x) if use_reentrant is None else checkpoint(model, x, use_reentrant=use_reentrant)
        y.square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["kept", "reentrant", "recomputed"])
@pytest.mark.parametrize("mode", MODES)
def test_checkpointing_accumulation_and_repeated_use_are_exact(mode, use_reentrant):
    expected = gradients(Twice("reference"), None)
    for ours, theirs in zip(gradients(Twice(mode), use_reentrant), expected, strict=True):
        assert relative(ours, theirs) < 1e-14


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_and_a_single_vector(mode):
    t = tensors()
    empty = adapted_linear(t["x"][:0], *list(t.values())[1:], 1.0, mode=mode)
    assert empty.shape == (0, 5, 8)
    vector = adapted_linear(t["x"][0, 0], *list(t.values())[1:], 1.0, mode=mode)
    assert torch.allclose(vector, reference(t, 1.0)[0, 0])


def test_a_broadcast_gradient_is_accepted():
    t = {name: tensor.requires_grad_() for name, tensor in tensors().items()}
    adapted_linear(**t, scaling=1.0, mode="blas").sum().backward()
    expected = {name: tensor.requires_grad_() for name, tensor in tensors().items()}
    reference(expected, 1.0).sum().backward()
    assert all(relative(t[name].grad, expected[name].grad) < 1e-14 for name in t)


def test_sizes_that_disagree_are_named():
    t = tensors()
    with pytest.raises(ShapeError, match=r"rank 2 needs Â of 2 x 6, B̂ of 8 x 2"):
        adapted_linear(**t | {"right": t["right"][:2]})
    with pytest.raises(ShapeError, match=r"\(2, 4, 6\)"):
        adapted_linear(**t, dropped=t["x"][:, :4])
