"""Rivals at equal bytes: their numbers are counted and rounded as the page says."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("accelerate")

from torch import nn  # noqa: E402

from benchmarks.language.rival_methods import (  # noqa: E402
    ENVELOPE,
    CompressedRival,
    RoundedRival,
    VectorBank,
    index_bits,
    rounded,
    rounded_hook,
)
from benchmarks.language.rivals import first_rate, main, next_rate  # noqa: E402


def parameter(values):
    return nn.Parameter(values.clone())


def test_numbers_are_counted_and_rounded_in_four_bits():
    values = [torch.linspace(-1.0, 2.0, 31), torch.linspace(-3.0, 3.0, 40).reshape(5, 8)]
    rival = RoundedRival(nn.Identity(), [parameter(value) for value in values], index_bits=17)
    assert rival.numbers == 71
    assert rival.bytes == ENVELOPE + 3 + (16 + 2) + (20 + 2)
    rival.round()
    for rounded_value, value in zip(rival.parameters, values, strict=True):
        assert rounded_value.shape == value.shape
        assert len(rounded_value.detach().unique()) <= 15
        assert (rounded_value - value).norm() < 0.1 * value.norm()


def test_numbers_of_one_bit_are_signs():
    values = torch.linspace(-1.0, 2.0, 31)
    rival = RoundedRival(nn.Identity(), [parameter(values), parameter(values)], bits=[1, 3])
    assert rival.bytes == ENVELOPE + (4 + 2) + (12 + 2)
    rival.round()
    signs, codes = (each.detach() for each in rival.parameters)
    torch.testing.assert_close(signs, values.sign() * values.abs().mean())
    assert len(codes.unique()) <= 7
    assert (codes - values).norm() < (signs - values).norm()


def test_an_index_is_charged_where_layers_are_left_out_or_sizes_differ():
    assert index_bits(n_layers=120, n_used=120, n_choices=1) == 0
    assert index_bits(n_layers=120, n_used=30, n_choices=1) == 120
    assert index_bits(n_layers=120, n_used=30, n_choices=4) == 120 + 60
    assert index_bits(n_layers=120, n_used=120, n_choices=4) == 240


def test_a_vector_bank_pays_for_two_indices_and_a_weight_and_keeps_no_more():
    bank = torch.linspace(-1.0, 1.0, 40).reshape(5, 8)
    logits = torch.linspace(-1.0, 1.0, 60).sin().reshape(2, 6, 5)
    rival = VectorBank(nn.Identity(), [parameter(bank), parameter(logits)])
    assert rival.numbers == 40 + 12
    assert rival.bytes == ENVELOPE + (20 + 2) + 12 * (3 + 3 + 4) // 8
    rival.round()
    stored = rival.logits[0].detach()
    before = logits.topk(2)
    after = stored.topk(2)
    assert torch.equal(before.indices, after.indices)
    weights = after.values.softmax(-1)[..., 0]
    torch.testing.assert_close(weights, before.values.softmax(-1)[..., 0], atol=1 / 64, rtol=0.0)
    assert len(weights.unique().mul(1000).round().unique()) <= 16
    assert stored.softmax(-1).topk(3).values[..., 2].max() == 0.0


def test_rounding_lets_the_gradient_pass():
    columns = [parameter(torch.linspace(-1.0, 2.0, 5))]
    rows = [parameter(torch.linspace(-1.0, 1.0, 4))]
    layer = nn.Linear(4, 5, bias=False)
    x = torch.linspace(0.0, 1.0, 8).reshape(2, 4)
    layer.register_forward_hook(rounded_hook(columns, rows, [1]))
    answers = layer(x)
    left = rounded(columns[0].detach(), 1)
    right = rounded(rows[0].detach(), 1)
    torch.testing.assert_close(answers, x @ (layer.weight + torch.outer(left, right)).T)
    answers.sum().backward()
    torch.testing.assert_close(columns[0].grad, (x @ right).sum().expand(5))


def test_factors_are_rounded_for_a_step_and_step_from_their_own_numbers():
    factor = parameter(torch.linspace(-1.0, 1.0, 7))
    rival = CompressedRival.__new__(CompressedRival)
    rival.parameters = [factor]
    rival.rounding = lambda: factor.data.round_()
    before = factor.detach().clone()
    with rival.rounded():
        assert set(factor.tolist()) == {-1.0, 0.0, 1.0}
        (2.0 * factor).sum().backward()
    torch.testing.assert_close(factor.detach(), before)
    torch.testing.assert_close(factor.grad, torch.full((7,), 2.0))


@pytest.mark.parametrize("best", [0.0111, 0.0333, 0.1, 0.3, 0.9])
def test_rates_are_run_until_the_best_is_bracketed(best):
    shares = {}
    while (rate := next_rate(0.1, shares)) is not None:
        shares[rate] = -abs(torch.tensor(rate / best).log().item())
    assert max(shares, key=shares.get) == best
    assert len(shares) <= 4
    is_bracketed = min(shares) < best < max(shares)
    assert is_bracketed or len(shares) == 4


def test_the_search_for_a_rate_begins_at_the_best_of_the_next_smaller_size():
    kept = {(1000, 0.3): 0.8, (3000, 0.3): 0.9, (3000, 0.9): 0.95, (30_000, 0.1): 0.99}
    rows = [{"budget": size, "rate": rate, "kept": share} for (size, rate), share in kept.items()]
    assert first_rate("LSR", 10_000, rows) == 0.9
    assert first_rate("LSR", 3000, rows) == 0.3
    assert first_rate("LSR", 1000, rows) == first_rate("LSR", 1000, []) == 0.1
    assert first_rate("LSR", 60_000, []) == 0.0111  # of a large one little is to be learned


def test_cores_without_texts_of_other_tasks_are_refused_before_any_work(monkeypatch, capsys):
    words = ["rivals", "--lora", "none", "--data", "none", "--held", "none"]
    monkeypatch.setattr("sys.argv", [*words, "--methods", "Fisher core"])
    with pytest.raises(SystemExit):
        main()
    assert "--other" in capsys.readouterr().err.splitlines()[-1]
