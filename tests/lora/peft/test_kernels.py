"""Stacked Kronecker factors: formed and applied, against `numpy.kron` term by term."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adapters_support import kron_sum
from hypothesis import given
from hypothesis import strategies as st
from peft import get_peft_model

from lsrdecomp.errors import ShapeError
from lsrdecomp.lora.peft import LsrConfig
from lsrdecomp.lora.peft.kernels import expand
from lsrdecomp.precision import unit_roundoff

SIZES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4)


def stacked(sizes: list[tuple[int, int]], terms: int, seed: int = 0) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.standard_normal((terms, m, n))) for m, n in sizes]


def rounding(expected: np.ndarray, terms: int, order: int) -> float:
    return (
        8 * terms * order * unit_roundoff("float64") * max(1.0, float(np.abs(expected).max())) * 16
    )


@given(SIZES, st.integers(1, 5))
def test_expand_is_the_sum_of_kronecker_products(sizes, terms):
    factors = stacked(sizes, terms)
    expected = kron_sum([factor.numpy() for factor in factors])
    assert expand(factors).shape == expected.shape
    assert np.abs(expand(factors).numpy() - expected).max() <= rounding(expected, terms, len(sizes))


@pytest.mark.parametrize(
    "sizes", [[(3, 2), (2, 4)], [(4, 2), (3, 1)], [(2, 2), (1, 3), (3, 1)], [(4, 3)]]
)
def test_the_sum_is_differentiable_in_every_factor(sizes):
    factors = [factor.requires_grad_() for factor in stacked(sizes, 2)]
    assert torch.autograd.gradcheck(lambda *given: expand(given), factors)


def test_shapes_that_disagree_are_named():
    with pytest.raises(ShapeError, match=r"\(2, 3, 3\), \(4, 3, 3\)"):
        expand([torch.zeros(2, 3, 3), torch.zeros(4, 3, 3)])


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_traced_layer_has_no_operation_that_onnx_s_older_exporter_lacks():
    """It fails on ``aten::mT``."""
    layer = torch.nn.Sequential(torch.nn.Linear(24, 16))
    model = get_peft_model(layer, LsrConfig(r=2, target_modules=["0"], init_weights=False)).eval()
    graph = str(torch.jit.trace(model, torch.randn(3, 24)).inlined_graph)
    assert "aten::mT" not in graph
