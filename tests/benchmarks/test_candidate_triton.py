"""Triton kernels against float64, on a GPU or, elsewhere, in Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels' files are imported, which happens lazily

from benchmarks.adapters.candidate_kernels import triton_expansion, triton_passes  # noqa: E402
from benchmarks.adapters.candidate_kernels.arena import ArenaLayer, FactorArena  # noqa: E402
from benchmarks.adapters.candidate_kernels.modes import applied  # noqa: E402
from lsrdecomp.kronecker.shape import ProductShape  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter's bfloat16 products are wrong: there, float16 stands for the 16-bit types.
DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

pytestmark = pytest.mark.skipif(
    not ON_GPU and type(triton_expansion._expand).__name__ == "JITFunction",
    reason="the kernels were imported before the interpreter was asked for",
)

LAYERS = (
    ArenaLayer(ProductShape((8, 3), (2, 2), (4, 5)), (16, 3), 0.5),
    ArenaLayer(ProductShape((5, 7), (3, 1), (6, 6)), (1, 20), 2.0),
    ArenaLayer(ProductShape((8, 3), (2, 2), (4, 5)), (16, 3), 0.25),
    ArenaLayer(ProductShape((40, 1), (3, 1), (50, 1)), (1, 1), 1.0),
)


def relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    ours, exact = ours.detach().double().cpu(), exact.detach().double().cpu()
    return float((ours - exact).norm() / exact.norm())


def pair_of_arenas(compute_dtype: torch.dtype) -> tuple[FactorArena, FactorArena]:
    ours = FactorArena(LAYERS, compute_dtype=compute_dtype, device=DEVICE, backend="triton")
    exact = FactorArena(LAYERS, compute_dtype=torch.float64, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        ours.flat.copy_(torch.randn(ours.flat.shape, generator=generator))
        exact.flat.copy_(ours.flat)
    return ours, exact


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_launch_expands_every_shape(dtype):
    ours, exact = pair_of_arenas(dtype)
    ours.matrices.fill_(float("nan"))
    ours.expand()
    exact.expand()
    for index in range(len(LAYERS)):
        for mine, theirs in zip(ours.pair(index), exact.pair(index), strict=True):
            rank = min(theirs.shape)
            mine, padding = (
                (mine[:rank], mine[rank:]) if mine.shape[0] < mine.shape[1] else (mine[:, :rank], mine[:, rank:])
            )
            assert relative(mine, theirs) < BOUNDS[dtype]
            assert not padding.any()


def test_one_launch_contracts_every_shape():
    ours, exact = pair_of_arenas(torch.float32)
    gradient = torch.randn(exact.gradients.shape, generator=torch.Generator().manual_seed(1))
    results = []
    for arena in (ours, exact):
        arena.gradients.copy_(gradient)
        arena._written.update(range(len(LAYERS)))
        results.append(arena._contracted())
    assert relative(*results) < 1e-5
    for mine, theirs in zip(ours.layout.classes, exact.layout.classes, strict=True):
        for a, b in zip(mine.views(results[0]), theirs.views(results[1]), strict=True):
            assert relative(a, b) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "out", "into", "rank"), [(150, 70, 136, 4), (1, 33, 20, 20), (64, 128, 128, 8)])
def test_both_passes_agree_with_float64(dtype, tokens, out, into, rank):
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int, size: float = 1.0) -> torch.Tensor:
        return (size * torch.randn(shape, generator=generator)).to(dtype).to(DEVICE)

    x, y, dy, dx = draw(tokens, into), draw(tokens, out), draw(tokens, out), draw(tokens, into)
    right, left = draw(rank, into, size=into**-0.5), draw(rank, out, size=rank**-0.5).mT
    wide = {name: tensor.double() for name, tensor in locals().items() if isinstance(tensor, torch.Tensor)}
    inner = triton_passes.add_low_rank(y, x, right, left, 0.5)
    expected_inner = wide["x"] @ wide["right"].T
    assert relative(inner, expected_inner) < BOUNDS[dtype]
    assert relative(y, wide["y"] + 0.5 * expected_inner @ wide["left"].T) < BOUNDS[dtype]
    d_right, d_left = triton_passes.backward_pass(dx, dy, x, inner, right, left, 0.5)
    t = 0.5 * wide["dy"] @ wide["left"]
    assert relative(dx, wide["dx"] + t @ wide["right"]) < BOUNDS[dtype]
    assert relative(d_right, t.T @ wide["x"]) < BOUNDS[dtype]
    assert relative(d_left, 0.5 * wide["dy"].T @ expected_inner) < BOUNDS[dtype]


def test_the_backward_pass_gives_equal_bits_twice():
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(300, 40, generator=generator).to(DEVICE) for _ in range(2))
    inner, right = (
        torch.randn(300, 4, generator=generator).to(DEVICE),
        torch.randn(4, 40, generator=generator).to(DEVICE),
    )
    runs = [triton_passes.backward_pass(torch.zeros_like(x), dy, x, inner, right, right.mT) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_fused_layer_is_the_composed_layer():
    generator = torch.Generator().manual_seed(4)
    shapes = {"x": (3, 20, 24), "weight": (18, 24), "bias": (18,), "right": (4, 24), "left": (18, 4)}
    given = {name: torch.randn(shape, generator=generator).to(DEVICE) for name, shape in shapes.items()}
    results = {}
    for mode in ("fused", "plain"):
        leaves = {name: tensor.clone().requires_grad_(name not in ("weight", "bias")) for name, tensor in given.items()}
        y = applied(**leaves, scaling=0.7, mode=mode)
        y.square().sum().backward()
        results[mode] = [y, *(leaf.grad for leaf in leaves.values() if leaf.requires_grad)]
    assert len(results["plain"]) == 4
    for ours, theirs in zip(*results.values(), strict=True):
        assert relative(ours, theirs) < 1e-5


@pytest.mark.parametrize("fused", [False, True])
def test_an_arena_of_layers_trains_as_in_float64(fused):
    ours, exact = pair_of_arenas(torch.float32)
    generator = torch.Generator().manual_seed(5)
    for index, layer in enumerate(LAYERS):
        out, into = layer.shape.matrix_shape
        x, weight = (torch.randn(size, into, generator=generator) for size in (7, out))
        results = []
        for arena in (ours, exact):
            arena.flat.grad = None
            kind = {"dtype": arena.matrices.dtype, "device": arena.flat.device}
            leaf = x.detach().to(**kind).requires_grad_()
            y = arena.linear(arena.expand(), index, leaf, weight.to(**kind), fused=fused and arena is ours)
            y.square().sum().backward()
            results.append((y, leaf.grad, arena.flat.grad))
        for mine, theirs in zip(*results, strict=True):
            assert relative(mine, theirs) < 1e-5
    assert np.isfinite(ours.flat.grad.cpu().numpy()).all()
