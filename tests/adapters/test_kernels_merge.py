"""Merging: the sum, and how much of the update rounding left in it."""

from __future__ import annotations

import pytest
import torch

from lsrdecomp.adapters.kernels import merge, merge_all, surviving_share
from lsrdecomp.errors import PrecisionError, ShapeError


def layer(ratio: float = 1.0, out: int = 64, into: int = 48) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight of unit entries' size, and a pair whose product is ``ratio`` times as large."""
    generator = torch.Generator().manual_seed(0)
    right = torch.randn(4, into, generator=generator)
    left = torch.randn(out, 4, generator=generator) * ratio / 2
    return torch.randn(out, into, generator=generator), right, left


def test_the_sum_is_taken_in_full_and_rounded_once():
    weight, right, left = layer()
    merged = merge(weight.bfloat16(), right, left, 0.5)
    expected = weight.bfloat16().double() + 0.5 * left.double() @ right.double()
    assert merged.weight.dtype == torch.bfloat16
    assert ((merged.weight.double() - expected).abs() <= expected.abs() * 2**-8).all()


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_blocks_of_rows_change_nothing(rows, monkeypatch):
    weight, right, left = layer()
    whole = merge(weight, right, left)
    monkeypatch.setitem(merge.__globals__, "BLOCK", rows * weight.shape[1])
    blocks = merge(weight, right, left)
    assert torch.allclose(whole.weight, blocks.weight, rtol=1e-6)
    assert blocks.share == pytest.approx(whole.share, rel=1e-6)


@pytest.mark.parametrize(
    ("ratio", "low", "high"),
    [(1e-1, 0.98, 1.02), (1e-3, 0.45, 0.70), (1e-4, 0.03, 0.12)],
    ids=["large", "small", "tiny"],
)
def test_the_share_that_survives_in_bfloat16(ratio, low, high):
    weight, right, left = layer(ratio, 512, 384)
    assert low < merge(weight.bfloat16(), right, left).share < high
    assert merge(weight, right, left).share == pytest.approx(1, abs=2e-3)


def test_what_would_be_lost_is_refused_and_the_weight_left_alone():
    weight, right, left = layer(1e-4)
    weight = weight.bfloat16()
    before = weight.clone()
    with pytest.raises(PrecisionError, match=r"\d+% of the update would survive in torch.bfloat16, less than the 50%"):
        merge(weight, right, left, out=weight, minimum_share=0.5)
    assert torch.equal(weight, before)


def test_a_master_weight_is_cast_once():
    weight, right, left = layer(1e-3)
    out = torch.empty_like(weight, dtype=torch.bfloat16)
    merge(weight, right, left, out=out)
    assert torch.equal(out, (weight + left @ right).bfloat16())


def test_no_update_loses_nothing():
    weight, right, left = layer()
    merged = merge(weight.bfloat16(), right, torch.zeros_like(left), minimum_share=0.9)
    assert merged.share == 1
    assert torch.equal(merged.weight, weight.bfloat16())


def test_a_whole_model_in_place_or_into_other_weights():
    layers = [layer(0.1), layer(0.2, 32, 16)]
    weights = [weight for weight, _, _ in layers]
    pairs = [(right, left) for _, right, left in layers]
    expected = [
        weight + scaling * left @ right for (weight, right, left), scaling in zip(layers, (1.0, 0.5), strict=True)
    ]
    copies = [torch.empty_like(weight) for weight in weights]
    shares = merge_all(weights, pairs, (1.0, 0.5), out=copies)
    assert all(torch.allclose(a, b) for a, b in zip(copies, expected, strict=True))
    assert shares == pytest.approx([1, 1], abs=1e-4)
    merge_all(weights, pairs, (1.0, 0.5))
    assert all(torch.equal(a, b) for a, b in zip(weights, copies, strict=True))


def test_the_share_of_a_finished_merge():
    weight, right, left = layer(1e-3)
    before = weight.bfloat16()
    merged = merge(before, right, left)
    assert surviving_share(before, merged.weight, left @ right) == pytest.approx(merged.share, rel=1e-5)
    assert surviving_share(before, before, left @ right) == 0


def test_sizes_that_disagree_are_named():
    weight, right, left = layer()
    with pytest.raises(ShapeError, match="64 x 48 cannot take an update of"):
        merge(weight, right[:, :5], left)
