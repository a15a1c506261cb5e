"""One adapted layer of each type: forward is base plus ΔW, gradients are right, merging undone."""

from __future__ import annotations

import math

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from lsrdecomp.errors import MergeError, ShapeError, UnsupportedLayerError
from lsrdecomp.lora.peft import DirectConfig, KronAConfig, LsrConfig
from lsrdecomp.lora.peft import lsr_config as config
from lsrdecomp.precision import unit_roundoff

KINDS = {
    "linear": lambda: (nn.Linear(12, 8), torch.randn(3, 5, 12)),
    "linear without bias": lambda: (nn.Linear(12, 7, bias=False), torch.randn(4, 12)),
    "transformers Conv1D": lambda: (Conv1D(8, 12), torch.randn(3, 5, 12)),
    "embedding": lambda: (nn.Embedding(15, 8, padding_idx=0), torch.randint(1, 15, (3, 5))),
    "conv1d": lambda: (nn.Conv1d(6, 8, 3, stride=2, padding=1, dilation=2), torch.randn(2, 6, 11)),
    "conv2d": lambda: (nn.Conv2d(4, 6, (3, 2), padding="same"), torch.randn(2, 4, 5, 6)),
    "conv2d grouped": lambda: (nn.Conv2d(6, 9, 3, groups=3), torch.randn(2, 6, 5, 5)),
    "conv2d reflected": lambda: (
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        torch.randn(2, 4, 5, 5),
    ),
    "conv3d": lambda: (nn.Conv3d(2, 4, 2, bias=False), torch.randn(2, 2, 3, 4, 3)),
}


def adapted(kind: str, dtype: torch.dtype = torch.float64, **settings):
    """A one-layer model with an adapter whose factors are all random, and an input for it."""
    torch.manual_seed(0)
    layer, x = KINDS[kind]()
    model = nn.ModuleDict({"layer": layer})
    settings = {"r": 4, "separation_rank": [3, 2], "init_weights": False, **settings}
    model = get_peft_model(model, LsrConfig(target_modules=["layer"], **settings)).to(dtype)
    return model.base_model.model["layer"], x.to(dtype) if x.is_floating_point() else x


def closeness(reference: torch.Tensor) -> float:
    return (
        64
        * unit_roundoff(str(reference.dtype).removeprefix("torch."))
        * float(reference.abs().max())
    )


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_is_base_plus_delta(kind, order):
    layer, x = adapted(kind, order=order)
    with torch.no_grad():
        mine = layer(x)
        base = layer.get_base_layer()
        plain = base(x)
        base.weight += layer.get_delta_weight("default")
        expected = base(x)
    assert (expected - plain).abs().max() > 0.01
    assert (mine - expected).abs().max() <= closeness(expected)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_factor(kind, order):
    layer, x = adapted(kind, order=order)
    factors = [
        factor.detach() for side in (layer.lsr_A, layer.lsr_B) for factor in side["default"].factors
    ]
    names = [
        f"{side}.default.factor_{index}"
        for side in ("lsr_A", "lsr_B")
        for index in range(1, order + 1)
    ]

    def output(*given: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(names, given, strict=True)), (x,))

    assert torch.autograd.gradcheck(
        output, [factor.requires_grad_() for factor in factors], fast_mode=True
    )


@pytest.mark.parametrize("safe_merge", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_merge_then_unmerge_restores_the_base(kind, safe_merge):
    layer, x = adapted(kind, torch.float32)
    with torch.no_grad():
        before, weight = layer(x), layer.get_base_layer().weight.clone()
        layer.merge(safe_merge=safe_merge)
        assert (layer(x) - before).abs().max() <= closeness(before)
        assert (layer.get_base_layer().weight - weight).abs().max() > 0.01
        layer.unmerge()
        assert (layer.get_base_layer().weight - weight).abs().max() <= closeness(weight)
        assert (layer(x) - before).abs().max() <= closeness(before)


def test_safe_merge_refuses_numbers_that_are_not_finite():
    layer, _ = adapted("linear")
    weight = layer.get_base_layer().weight.clone()
    layer.lsr_A["default"].factor_1.data[0, 0, 0] = float("nan")
    with pytest.raises(MergeError, match="NaNs detected in the merged weights"):
        layer.merge(safe_merge=True)
    assert torch.equal(layer.get_base_layer().weight, weight)
    assert not layer.merged


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_start_is_the_base_model_and_reaches_every_factor(kind):
    layer, x = adapted(kind, init_weights=True)
    zeros = [
        (side, index)
        for side in ("lsr_A", "lsr_B")
        for index, factor in enumerate(getattr(layer, side)["default"].factors)
        if not factor.any()
    ]
    assert len(zeros) == 1
    assert zeros[0][0] == "lsr_B"
    assert torch.equal(layer(x), layer.base_layer(x))
    factors = [factor for side in (layer.lsr_A, layer.lsr_B) for factor in side["default"].factors]
    optimizer = torch.optim.SGD(factors, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        layer(x).pow(2).sum().backward()
        optimizer.step()
    assert all(factor.grad.any() for factor in factors)


def test_the_start_has_the_spread_it_promises():
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": nn.Linear(900, 400)})
    peft = get_peft_model(model, LsrConfig(target_modules=["layer"], r=16, separation_rank=16))
    layer = peft.base_model.model["layer"]
    right = layer.lsr_A["default"]()
    assert right.std().item() == pytest.approx(1 / 30, rel=0.1)
    first = layer.lsr_B["default"].factor_1
    assert first.std().item() == pytest.approx(1 / 4, rel=0.1)
    layer.initialize("default", "paper")
    for side in (layer.lsr_A, layer.lsr_B):
        for factor in side["default"].factors:
            assert factor.std().item() == pytest.approx(0.01, rel=0.2)


def test_low_rank_as_a_shape_starts_like_lora():
    shape = {"out": [8, 1], "inner": [4, 1], "into": [12, 1]}
    layer, x = adapted(
        "linear", init_weights=True, separation_rank=1, shape_pattern={"layer": shape}
    )
    out, into = layer.lsr_B["default"], layer.lsr_A["default"]
    assert not out.factor_1.any()
    assert out.factor_2.item() == pytest.approx(1)
    assert into.factor_2.item() > 0
    layer(x).sum().backward()
    assert out.factor_1.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.base_layer.register_forward_hook(
            lambda module, args, output: output + 1
        ),
        lambda layer: layer.base_layer.register_forward_pre_hook(
            lambda module, args: (args[0] + 1,)
        ),
        lambda layer: setattr(
            layer.base_layer, "forward", lambda x: nn.functional.linear(x, layer.weight) + 1
        ),
        lambda layer: nn.utils.parametrize.register_parametrization(
            layer.base_layer, "weight", nn.Identity()
        ),
    ],
)
def test_a_base_layer_that_does_more_is_called(change):
    layer, x = adapted("linear")
    change(layer)
    expected = layer.base_layer(x) + layer.delta_output("default", x)
    torch.testing.assert_close(layer(x), expected)
    assert type(layer(x).grad_fn).__name__ != "_AdaptedLinearBackward"


def test_dropout_acts_on_the_adapter_alone_and_only_in_training():
    layer, x = adapted("linear", lsr_dropout=0.5)
    with torch.no_grad():
        layer.eval()
        still = layer(x)
        assert torch.equal(layer(x), still)
        layer.train()
        assert not torch.equal(layer(x), still)
        layer.enable_adapters(False)
        assert torch.equal(layer(x), layer.base_layer(x))


def test_factors_are_expanded_in_their_own_precision_under_autocast():
    layer, x = adapted("linear", torch.float32)
    expected = layer.lsr_A["default"]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.lsr_A["default"](), expected)
        assert layer(x).dtype == torch.bfloat16


def test_a_shape_that_does_not_tile_the_layer_names_it():
    shape = {"out": [7, 110], "inner": [2, 2], "into": [24, 32]}
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"down": nn.Linear(768, 768)})})
    with pytest.raises(
        ShapeError, match=r"mlp.down, output side: 7 x 110 = 770 rows, but the matrix has 768"
    ):
        get_peft_model(model, LsrConfig(target_modules=["down"], shape_pattern={"down": shape}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 0}, "r should be a positive integer value but the value passed is 0"),
        ({"r": -4, "inner_shape": [2, 2]}, "r should be a positive integer .* passed is -4"),
        ({"order": -1}, "order should be a positive integer value but the value passed is -1"),
        ({"order": 0, "inner_shape": [2]}, "order should be a positive integer .* passed is 0"),
        ({"order": 2.0}, "order should be a positive integer value but the value passed is 2.0"),
        ({"inner_shape": [2, 2], "r": 8}, "inner_shape 2 x 2 = 4, but r is 8"),
        ({"inner_shape": [2, 2], "order": 3}, "has 2 sizes, but order is 3"),
        ({"separation_rank": [1, 2, 3]}, r"one number or \[out side, in side\]"),
        ({"separation_rank": 0}, "value passed is 0"),
        ({"shape_pattern": {"q": {"out": [2, 2]}}}, "shape_pattern"),
        (
            {"shape_pattern": {"q": {"out": [2, 2], "inner": [2], "into": [2, 2]}}},
            "equally many sizes",
        ),
        ({"rank_pattern": {"q": -1}}, "rank_pattern"),
        ({"lsr_dropout": 1.5}, "lsr_dropout"),
        ({"lsr_alpha": math.nan}, "lsr_alpha must be a finite number, got nan"),
        ({"lsr_alpha": -math.inf}, "lsr_alpha must be a finite number, got -inf"),
        ({"lsr_alpha": "8"}, "lsr_alpha must be a finite number, got '8'"),
        ({"alpha_pattern": {"q": math.nan}}, r"alpha_pattern\['q'\] must be a finite number"),
        ({"init_weights": "pissa"}, "init_weights"),
        ({"bias": "lora_only"}, "bias"),
        ({"layers_pattern": "h"}, "layers_to_transform"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LsrConfig(target_modules=["q"], **settings)


@pytest.mark.parametrize("config_class", [DirectConfig, KronAConfig])
def test_the_scale_of_a_direct_sum_is_a_finite_number(config_class):
    with pytest.raises(ValueError, match="alpha must be a finite number, got nan"):
        config_class(target_modules=["q"], alpha=math.nan)


def test_patterns_choose_by_the_end_of_the_name():
    model = nn.ModuleDict(
        {name: nn.ModuleDict({"q": nn.Linear(12, 12), "k": nn.Linear(12, 12)}) for name in "ab"}
    )
    config = LsrConfig(
        target_modules=["q", "k"],
        r=4,
        lsr_alpha=8,
        separation_rank=2,
        rank_pattern={"a.q": 6},
        alpha_pattern={"q": 3},
        separation_rank_pattern={"b.*": [5, 1]},
        shape_pattern={"b.k": {"out": [12, 1], "inner": [3, 1], "into": [12, 1]}},
    )
    layers = get_peft_model(model, config).base_model.model
    found = {
        f"{a}.{b}": (
            layer.layout["default"].r,
            layer.scaling["default"],
            layer.layout["default"].separation_ranks,
        )
        for a, pair in layers.items()
        for b, layer in pair.items()
    }
    assert found == {
        "a.q": (6, 3 / 6, (2, 2)),
        "a.k": (4, 8 / 4, (2, 2)),
        "b.q": (4, 3 / 4, (5, 1)),
        "b.k": (3, 8 / 3, (5, 1)),
    }


@pytest.mark.parametrize(
    "key", ["a.q", "^a.q", "a.q$", "^a.q$", r"a\.q", r"^a\.q", r"a\.q$", r"^a\.q$"]
)
def test_an_exact_name_is_looked_up_and_beats_patterns(key, monkeypatch):
    patterns = {".*q": 3, key: 6, "q": 5}
    assert config.find_by_pattern(patterns, "b.q") == 3
    assert config.find_by_pattern({"^b.q$": 2}, "a.q") is None
    monkeypatch.setattr(config, "get_pattern_key", None)  # no search through patterns
    assert config.find_by_pattern(patterns, "a.q") == 6


def test_rank_and_shape_patterns_may_not_disagree():
    shape = {"out": [3, 4], "inner": [2, 2], "into": [3, 4]}
    config = LsrConfig(target_modules=["q"], rank_pattern={"q": 6}, shape_pattern={"q": shape})
    with pytest.raises(
        ShapeError, match="q: inner 2 x 2 = 4 in shape_pattern, but rank_pattern says 6"
    ):
        get_peft_model(nn.ModuleDict({"q": nn.Linear(12, 12)}), config)


def test_rslora_scales_by_the_square_root():
    layer, _ = adapted("linear", use_rslora=True, lsr_alpha=6)
    assert layer.scaling["default"] == 3.0


def test_other_modules_are_refused_by_name():
    with pytest.raises(UnsupportedLayerError, match=r"LayerNorm.* is not supported"):
        get_peft_model(nn.ModuleDict({"norm": nn.LayerNorm(4)}), LsrConfig(target_modules=["norm"]))


class ScaledEmbedding(nn.Embedding):
    """One that multiplies the rows that it looks up, as Gemma's."""

    embed_scale = torch.tensor(3.0)

    def forward(self, x):
        return super().forward(x) * self.embed_scale


def test_an_embedding_that_scales_its_rows_scales_what_is_added(monkeypatch):
    monkeypatch.setitem(KINDS, "scaled", lambda: (ScaledEmbedding(15, 8), torch.arange(15)))
    layer, x = adapted("scaled")
    with torch.no_grad():
        mine = layer(x)
        base = layer.get_base_layer()
        base.weight += layer.get_delta_weight("default")
        torch.testing.assert_close(mine, base(x))
