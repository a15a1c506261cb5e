"""Rivals at equal bytes: their numbers are counted and rounded as the page says."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("accelerate")

from torch import nn  # noqa: E402

from benchmarks.language.kept_by_bytes import RESOLUTION, smallest_found  # noqa: E402
from benchmarks.language.rivals import CONFIG, Rival, VectorBank, add_rounded, rounded  # noqa: E402
from lsrdecomp.checkpoints import open_checkpoint  # noqa: E402
from lsrdecomp.compression import CompressionPlan  # noqa: E402
from lsrdecomp.compression.compress import search_adapter  # noqa: E402
from lsrdecomp.compression.settings import Search  # noqa: E402
from lsrdecomp.errors import BudgetError  # noqa: E402


def test_numbers_are_counted_and_rounded_in_four_bits():
    values = [torch.linspace(-1.0, 2.0, 31), torch.linspace(-3.0, 3.0, 40).reshape(5, 8)]
    rival = Rival(nn.Identity(), [nn.Parameter(value.clone()) for value in values])
    assert rival.numbers == 71
    assert rival.bytes == CONFIG + (16 + 2) + (20 + 2)
    rival.round()
    for parameter, value in zip(rival.parameters, values, strict=True):
        assert parameter.shape == value.shape
        assert len(parameter.detach().unique()) <= 15
        assert (parameter - value).norm() < 0.1 * value.norm()


def test_numbers_of_one_bit_are_signs():
    values = torch.linspace(-1.0, 2.0, 31)
    rival = Rival(
        nn.Identity(), [nn.Parameter(values.clone()), nn.Parameter(values.clone())], bits=[1, 3]
    )
    assert rival.bytes == CONFIG + (4 + 2) + (12 + 2)
    rival.round()
    signs, codes = (parameter.detach() for parameter in rival.parameters)
    torch.testing.assert_close(signs, values.sign() * values.abs().mean())
    assert len(codes.unique()) <= 7
    assert (codes - values).norm() < (signs - values).norm()


def test_a_vector_bank_pays_for_two_indices_and_a_weight_and_keeps_no_more():
    bank, logits = (
        torch.linspace(-1.0, 1.0, 40).reshape(5, 8),
        torch.linspace(-1.0, 1.0, 60).sin().reshape(2, 6, 5),
    )
    rival = VectorBank(nn.Identity(), [nn.Parameter(bank.clone()), nn.Parameter(logits.clone())])
    assert rival.numbers == 40 + 12
    assert rival.bytes == CONFIG + (20 + 2) + 12 * (3 + 3 + 4) // 8
    rival.round()
    before, after = (each.detach().topk(2) for each in (logits, rival.logits[0]))
    assert torch.equal(before.indices, after.indices)
    weights, others = (
        after.values.softmax(-1)[..., 0],
        rival.logits[0].detach().softmax(-1).topk(3).values[..., 2],
    )
    torch.testing.assert_close(weights, before.values.softmax(-1)[..., 0], atol=1 / 64, rtol=0.0)
    assert len(weights.unique().mul(1000).round().unique()) <= 16
    assert others.max() == 0.0


def test_rounding_lets_the_gradient_pass():
    columns, rows = (
        [nn.Parameter(torch.linspace(-1.0, 2.0, 5))],
        [nn.Parameter(torch.linspace(-1.0, 1.0, 4))],
    )
    layer, x = nn.Linear(4, 5, bias=False), torch.linspace(0.0, 1.0, 8).reshape(2, 4)
    layer.register_forward_hook(add_rounded(columns, rows, [1]))
    answers = layer(x)
    left, right = (rounded(side[0].detach(), 1) for side in (columns, rows))
    torch.testing.assert_close(answers, x @ (layer.weight + torch.outer(left, right)).T)
    answers.sum().backward()
    torch.testing.assert_close(columns[0].grad, (x @ right).sum().expand(5))


def test_the_smallest_adapter_lies_between_two_budgets():
    folder = Path(str(files("lsrdecomp.cli"))) / "demo_adapter"
    plan = CompressionPlan(bytes=9000, storage="int4")
    searched = search_adapter(open_checkpoint(folder), [plan], search=Search(orders=()))
    smallest = smallest_found(searched, plan, 1000, 9000)
    assert 1000 < smallest < 9000
    with pytest.raises(BudgetError):
        searched.compress(replace(plan, bytes=smallest - 2 * RESOLUTION))
    assert smallest_found(searched, plan, 1000, smallest - 2 * RESOLUTION) is None
