"""Mixed precision: chosen where the processor has bfloat16, and gone without a trace afterwards."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from lsrdecomp.lora.base import autocast as room  # noqa: E402
from lsrdecomp.lora.base.autocast import mixed_precision  # noqa: E402

attend = nn.functional.scaled_dot_product_attention


class Small(nn.Module):
    """Embedding, attention, and an output layer that shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.project = nn.Linear(8, 24)
        self.adapter = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.requires_grad_(False)
        self.adapter.requires_grad_(True)
        self.dtypes = []

    def forward(self, tokens):
        projected = self.project(self.embed(tokens))
        attended = attend(*projected.chunk(3, -1))
        self.dtypes += [projected.dtype, attended.dtype]
        return self.head(self.adapter(attended.to(self.adapter.weight.dtype)))


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(room, "has_bfloat16_units", lambda: True)
    torch.manual_seed(0)
    return Small()


TOKENS = torch.arange(10).reshape(2, 5)


def test_products_are_in_bfloat16_and_attention_in_float32(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = model(TOKENS)
    with mixed_precision(model, min_parameters=1) as chosen:
        assert chosen
        mixed = model(TOKENS)
        assert model.dtypes == [torch.float32] * 2 + [torch.bfloat16, torch.float32]
        assert model.project.weight.dtype == torch.bfloat16
        assert model.head.weight.dtype == torch.bfloat16
        assert model.embed.weight.dtype == torch.float32  # the residual stream stays as it is
        assert model.adapter.weight.dtype == torch.float32  # trained
    assert not torch.is_autocast_enabled("cpu")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert 0.0 < float((mixed - plain).detach().abs().max()) < 0.05
    assert torch.equal(model(TOKENS), plain)


def test_weights_come_back_also_after_an_error(model):
    with pytest.raises(ZeroDivisionError), mixed_precision(model, min_parameters=1):
        raise ZeroDivisionError
    assert model.project.weight.dtype == torch.float32


@pytest.mark.parametrize("why", ["no units", "too small", "never", "already bfloat16"])
def test_elsewhere_nothing_changes(model, monkeypatch, why):
    if why == "no units":
        monkeypatch.setattr(room, "has_bfloat16_units", lambda: False)
    if why == "already bfloat16":
        model.bfloat16()
    before = model(TOKENS)
    limit = {"too small": 10**6, "never": None}.get(why, 1)
    with mixed_precision(model, min_parameters=limit) as chosen:
        assert not chosen
        assert torch.equal(model(TOKENS), before)


@pytest.mark.parametrize(
    ("capabilities", "has_units"),
    [
        ({"amx_bf16": True}, True),
        ({"avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx512_f": True, "avx2": True}, False),  # where torch emulates it
    ],
)
def test_units_are_those_that_torch_finds(monkeypatch, capabilities, has_units):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert room.has_bfloat16_units() == has_units


def test_a_torch_that_cannot_tell_has_none(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert not room.has_bfloat16_units()
