"""Rivals at equal bytes: their numbers are counted and rounded as the page says."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("accelerate")

from torch import nn  # noqa: E402

from benchmarks.language.rivals import CONFIG, Rival  # noqa: E402


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
