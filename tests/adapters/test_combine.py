"""Combinations of adapters: what PEFT's LoRA makes of them, stored as LSR, with what was lost said."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from adapters_support import tiny_bert, token_batch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.tuners.lora import LoraLayer
from peft.utils import merge_utils
from test_options import tiny_llama
from torch import nn

from lsrdecomp.adapters import DirectConfig, KronAConfig, LsrConfig, LsrLayer
from lsrdecomp.adapters.combination import KINDS, SIDEWISE, SPECTRAL
from lsrdecomp.adapters.errors import UnsupportedLayerError
from lsrdecomp.precision import unit_roundoff

WEIGHTS = [0.75, -1.5]
PRUNING = {"density": 0.5, "majority_sign_method": "frequency"}


class Layers(nn.Module):
    """One layer of every kind that PEFT's LoRA combines."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.wide = nn.Linear(12, 8), nn.Linear(8, 20, bias=False)
        self.emb, self.conv = nn.Embedding(15, 6), nn.Conv2d(4, 6, 3)


def lsr(*configs: LsrConfig, base=Layers, random: bool = True) -> PeftModel:
    """A model with adapters ``a``, ``b``, … that are not zero."""
    torch.manual_seed(1)
    model = get_peft_model(base(), configs[0], adapter_name="a")
    for name, config in zip("bcd", configs[1:], strict=False):
        model.add_adapter(name, config)
    with torch.no_grad():
        for layer in lsr_layers(model).values():
            for side in (layer.lsr_A, layer.lsr_B):
                for factor in (factor for sums in side.values() for factor in sums.factors):
                    factor.normal_() if random else None
    return model


def lsr_layers(model: nn.Module) -> dict[str, LsrLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LsrLayer)}


def weighted(layer: LsrLayer, weights=WEIGHTS, names="ab") -> torch.Tensor:
    return sum(
        w * layer.delta_matrix(n)
        for w, n in zip(weights, names, strict=True)
        if layer.has_adapter(n)
    )


def apart(left: torch.Tensor, right: torch.Tensor) -> float:
    return ((left - right).norm() / right.norm()).item()


CLOSE = 2**8 * unit_roundoff("float32")
TARGETS = ["lin", "wide", "emb", "conv"]
ALIKE = LsrConfig(target_modules=TARGETS, r=4, separation_rank=[2, 3])
OTHER = {
    "alike": ALIKE,
    "other scale": LsrConfig(
        target_modules=TARGETS, r=4, separation_rank=1, lsr_alpha=3, use_rslora=True
    ),
    "other split": LsrConfig(
        target_modules=TARGETS,
        r=4,
        shape_pattern={"lin": {"out": [8, 1], "inner": [4, 1], "into": [3, 4]}},
    ),
    "other order": LsrConfig(target_modules=TARGETS, r=4, order=3),
    "other layers": LsrConfig(target_modules=["lin", "emb"], r=4),
}
OTHER_RANK = LsrConfig(target_modules=TARGETS, r=6, separation_rank=2)


def every_other(tensor: torch.Tensor, density: float, rescale: bool) -> torch.Tensor:
    """In place of PEFT's random pruning, for which the two models would draw different numbers."""
    assert rescale
    mask = torch.arange(tensor.numel()).remainder(2).to(tensor)
    return tensor * mask.reshape(tensor.shape) / density


def as_lsr(
    config: LoraConfig, state: dict[str, torch.Tensor]
) -> tuple[LsrConfig, dict[str, torch.Tensor]]:
    """The same adapter as one term of the shape ``(m×r ⊗ 1×1)(r×n ⊗ 1×1)``."""
    tensors, shapes = {}, {}
    for key, tensor in state.items():
        module, side = re.fullmatch(
            r"base_model\.model\.(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?", key
        ).groups()
        matrix = tensor.flatten(1)
        stem, sizes = (
            f"base_model.model.{module}.lsr_{side}",
            shapes.setdefault(f"^{module}", {"inner": [config.r, 1]}),
        )
        sizes |= {"into": [matrix.shape[1], 1]} if side == "A" else {"out": [matrix.shape[0], 1]}
        tensors |= {
            f"{stem}.factor_1": matrix.unsqueeze(0),
            f"{stem}.factor_2": torch.ones(1, 1, 1),
        }
    settings = {
        "r": config.r,
        "lsr_alpha": config.lora_alpha,
        "separation_rank": 1,
        "shape_pattern": shapes,
    }
    return LsrConfig(target_modules=TARGETS, **settings), tensors


@pytest.mark.parametrize(
    ("kind", "rank"),
    [(kind, r) for kind in KINDS for r in (4, 3) if r == 4 or kind not in SIDEWISE],
)
def test_every_kind_gives_what_lora_gives(kind, rank, monkeypatch):
    monkeypatch.setattr(merge_utils, "random_pruning", every_other)
    torch.manual_seed(0)
    configs = {
        "x": LoraConfig(target_modules=TARGETS, r=4, lora_alpha=6, init_lora_weights=False),
        "y": LoraConfig(target_modules=TARGETS, r=rank, lora_alpha=3, init_lora_weights=False),
    }
    lora = get_peft_model(Layers(), configs["x"], adapter_name="x")
    lora.add_adapter("y", configs["y"])
    mine = None
    for name, config in configs.items():
        state = get_peft_model_state_dict(lora, adapter_name=name)
        theirs, tensors = as_lsr(config, state)
        if mine is None:
            mine = get_peft_model(Layers(), theirs, adapter_name=name)
        else:
            mine.add_adapter(name, theirs)
        assert not set_peft_model_state_dict(mine, tensors, adapter_name=name).unexpected_keys
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model in (lora, mine):
            model.add_weighted_adapter(["x", "y"], WEIGHTS, "sum", combination_type=kind, **PRUNING)
    layers = {
        name: module for name, module in lora.named_modules() if isinstance(module, LoraLayer)
    }
    assert len(layers) == 4
    for name, layer in layers.items():
        other = mine.get_submodule(name)
        assert apart(other.get_delta_weight("sum"), layer.get_delta_weight("sum")) < 10 * CLOSE, (
            name
        )
        assert other.layout["sum"].r == layer.r["sum"]


@pytest.mark.parametrize("kind", ["cat", "linear", "svd"])
@pytest.mark.parametrize("other", OTHER)
def test_the_error_said_is_the_error_made(kind, other):
    model = lsr(ALIKE, OTHER[other])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        errors = model.add_weighted_adapter(["a", "b"], WEIGHTS, "sum", kind, svd_rank=2)
    layers = lsr_layers(model)
    assert {f"base_model.model.{name}" for name in errors} == set(layers)
    for name, error in errors.items():
        layer = layers[f"base_model.model.{name}"]
        exact = weighted(layer)
        if kind in ("cat", "linear", "svd"):
            assert error == pytest.approx(
                apart(layer.delta_matrix("sum"), exact), rel=1e-3, abs=CLOSE
            )
        if kind == "cat":
            assert error < CLOSE
        if kind == "linear":
            sides = zip(*(layer._sides(n) for n in "ab" if layer.has_adapter(n)), strict=True)
            roots = [
                abs(w * layer.scaling[n]) ** 0.5
                for w, n in zip(WEIGHTS, "ab", strict=True)
                if n in layer.scaling
            ]
            right, left = (list(side) for side in sides)
            right = sum(
                r * (-1) ** i * side for i, (r, side) in enumerate(zip(roots, right, strict=True))
            )
            left = sum(r * side for r, side in zip(roots, left, strict=True))
            assert apart(layer.delta_matrix("sum"), left @ right) < CLOSE
        if kind == "svd":
            tail = torch.linalg.svdvals(exact)[2:]
            assert error == pytest.approx(float(tail.norm() / exact.norm()), rel=1e-3)


def test_linear_keeps_the_kronecker_factors_where_the_split_is_one():
    model = lsr(ALIKE, ALIKE)
    model.add_weighted_adapter(["a", "b"], WEIGHTS, "sum", "linear")
    for layer in lsr_layers(model).values():
        assert layer.layout["sum"].shape == layer.layout["a"].shape
        assert layer.layout["sum"].separation_ranks == (4, 6)


def test_svd_of_unequal_ranks_takes_the_larger_and_loses_only_what_it_must():
    model = lsr(ALIKE, OTHER_RANK)
    with pytest.warns(
        UserWarning, match=r"adapter sum, combined by 'svd', misses up to \d+% of what was asked"
    ):
        errors = model.add_weighted_adapter(["a", "b"], WEIGHTS, "sum")
    for name, layer in lsr_layers(model).items():
        exact = weighted(layer)
        tail = torch.linalg.svdvals(exact)[6:].norm() / exact.norm()
        assert layer.layout["sum"].r == 6
        assert errors[name.removeprefix("base_model.model.")] == pytest.approx(
            float(tail), rel=1e-3, abs=CLOSE
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        errors = model.add_weighted_adapter(["a", "b"], WEIGHTS, "exact", "svd", svd_rank=10)
    assert max(errors.values()) < CLOSE


@pytest.mark.parametrize("kind", SPECTRAL[1:])
def test_the_error_of_a_pruned_matrix_is_against_the_pruned_matrix(kind):
    model = lsr(ALIKE, OTHER_RANK)
    with pytest.warns(UserWarning, match="misses"):
        few = model.add_weighted_adapter(
            ["a", "b"], WEIGHTS, "few", kind, svd_rank=2, seed=3, **PRUNING
        )
    many = model.add_weighted_adapter(
        ["a", "b"], WEIGHTS, "many", kind, svd_rank=20, seed=3, **PRUNING
    )
    for name, error in many.items():
        layer = lsr_layers(model)[f"base_model.model.{name}"]
        assert error < CLOSE
        assert apart(layer.delta_matrix("many"), weighted(layer)) > 0.1
        assert few[name] == pytest.approx(
            apart(layer.delta_matrix("few"), layer.delta_matrix("many")), rel=1e-3
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight", [0.5, -2.0, 0.0])
def test_one_adapter_is_multiplied(kind, weight):
    model = lsr(ALIKE)
    errors = model.add_weighted_adapter(["a"], [weight], "sum", kind, **PRUNING)
    for layer in lsr_layers(model).values():
        torch.testing.assert_close(layer.delta_matrix("sum"), weight * layer.delta_matrix("a"))
    assert max(errors.values()) < CLOSE


def test_opposite_weights_cancel():
    model = lsr(ALIKE)
    model.add_weighted_adapter(["a"], [1.0], "b", "cat")
    model.add_weighted_adapter(["a", "b"], [1.0, -1.0], "sum", "svd")
    for layer in lsr_layers(model).values():
        assert layer.delta_matrix("sum").norm() <= CLOSE * layer.delta_matrix("a").norm()


def test_a_seed_fixes_dare_and_leaves_the_generator_alone():
    model = lsr(ALIKE, ALIKE)
    state = torch.get_rng_state()
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        model.add_weighted_adapter(["a", "b"], WEIGHTS, name, "dare_linear", density=0.5, seed=seed)
        torch.set_rng_state(state)
    model.add_weighted_adapter(["a", "b"], WEIGHTS, "four", "dare_linear", density=0.5, seed=4)
    layer = next(iter(lsr_layers(model).values()))
    assert torch.equal(layer.delta_matrix("one"), layer.delta_matrix("two"))
    assert torch.equal(layer.delta_matrix("three"), layer.delta_matrix("four"))
    assert not torch.equal(layer.delta_matrix("one"), layer.delta_matrix("three"))


def test_a_clamp_cuts_the_largest_entries():
    model = lsr(ALIKE, OTHER_RANK)
    with pytest.warns(UserWarning, match="misses"):
        model.add_weighted_adapter(["a", "b"], WEIGHTS, "sum", "svd", svd_rank=10, svd_clamp=0.9)
    for layer in lsr_layers(model).values():
        right, left = layer._sides("sum")
        limit = max(float(right.abs().max()), float(left.abs().max()))
        assert ((left == limit).sum() + (right == limit).sum()) > 1


@pytest.mark.parametrize("kind", ["cat", "linear", "svd", "ties", "ties_svd"])
def test_a_combination_saves_and_loads_and_trains(tmp_path, kind):
    config = LsrConfig(target_modules=["query", "dense"], r=4, separation_rank=2)
    model = lsr(config, config, base=tiny_bert)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.add_weighted_adapter(["a", "b"], [0.5, 0.25], "sum", kind, density=0.5)
    assert not any(p.requires_grad for name, p in model.named_parameters() if ".sum." in name)
    model.set_adapter("sum")
    assert all(p.requires_grad for name, p in model.named_parameters() if ".sum." in name)
    with torch.no_grad():
        expected = model.eval()(**token_batch()).logits
        model.save_pretrained(tmp_path)
        again = PeftModel.from_pretrained(tiny_bert(), tmp_path / "sum").eval()
        torch.testing.assert_close(again(**token_batch()).logits, expected)
    assert again.peft_config["default"].r == (8 if kind == "cat" else 4)


def test_factors_keep_their_precision_on_a_16_bit_base():
    base = lambda: nn.ModuleDict({"lin": nn.Linear(12, 8)}).bfloat16()  # noqa: E731
    config = LsrConfig(target_modules=["lin"], r=4)
    model = lsr(config, config, base=base)
    errors = model.add_weighted_adapter(["a", "b"], WEIGHTS, "sum", "cat")
    layer = model.base_model.model["lin"]
    assert layer.lsr_A["sum"].factor_1.dtype == layer.lsr_A["a"].factor_1.dtype == torch.float32
    assert errors["lin"] < CLOSE


def test_tied_layers_stay_tied():
    config = LsrConfig(target_modules=["embed_tokens", "lm_head"], r=4, ensure_weight_tying=True)
    model = lsr(config, config, base=lambda: tiny_llama(tie_word_embeddings=True))
    model.add_weighted_adapter(["a", "b"], WEIGHTS, "sum", "cat")
    embedding, head = model.base_model.model.model.embed_tokens, model.base_model.model.lm_head
    assert apart(embedding.delta_matrix("sum"), weighted(embedding)) < CLOSE
    assert torch.equal(head.delta_matrix("sum"), embedding.delta_matrix("sum").T)
    model.add_adapter("loose", LsrConfig(target_modules=["embed_tokens"], r=4))
    with pytest.raises(UnsupportedLayerError, match="ensure_weight_tying"):
        model.add_weighted_adapter(["a", "loose"], WEIGHTS, "sum 2")


def test_replicated_layers_are_not_replicated_again(tmp_path):
    config = LsrConfig(target_modules=["q_proj"], r=2, layer_replication=[[0, 2], [0, 2]])
    model = lsr(config, base=tiny_llama)
    model.add_weighted_adapter(["a"], [2.0], "sum", "cat")
    assert len(model.base_model.model.model.layers) == 4
    rows = torch.randint(0, 30, (2, 5))
    model.set_adapter("sum")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        again = PeftModel.from_pretrained(tiny_llama(), tmp_path / "sum").eval()
        torch.testing.assert_close(again(rows).logits, model.eval()(rows).logits)


def test_a_module_trained_in_full_comes_along():
    plain = LsrConfig(target_modules=["query"], r=2)
    saving = LsrConfig(target_modules=["query"], r=2, modules_to_save=["classifier"])
    model = lsr(plain, saving, base=tiny_bert)
    copies = model.base_model.model.classifier.modules_to_save
    with torch.no_grad():
        copies["b"].weight.add_(1)
    model.add_weighted_adapter(["a", "b"], WEIGHTS, "sum", "cat")
    assert torch.equal(copies["sum"].weight, copies["b"].weight)
    assert copies["sum"].weight is not copies["b"].weight
    model.add_adapter("c", saving)
    with pytest.raises(ValueError, match=r"modules_to_save, but found 1 such instance\(s\)"):
        model.add_weighted_adapter(["b", "c"], WEIGHTS, "sum 2", "cat")


@pytest.mark.parametrize(
    ("names", "weights", "options", "message"),
    [
        (["a", "x"], [1, 1], {}, "Adapter x does not exist"),
        (["a", "b"], [1], {}, "1 weights for 2 adapters"),
        (["a"], [1, 2], {}, "2 weights for 1 adapters"),
        (["a", "b"], [1, float("nan")], {}, "weights must be finite, got [1, nan]"),
        (
            ["a", "b"],
            [1, 1],
            {"combination_type": "mean"},
            "Invalid combination_type: mean; LSR adapters combine by cat",
        ),
        (
            ["a", "b"],
            [1, 1],
            {"combination_type": "ties"},
            "pass density above 0 and up to 1, got None",
        ),
        (["a", "b"], [1, 1], {"combination_type": "dare_linear_svd", "density": 1.5}, "got 1.5"),
        (["a", "b"], [1, 1], {"combination_type": "dare_linear", "density": 0.0}, "got 0.0"),
        (
            ["a", "b"],
            [1, 1],
            {"majority_sign_method": "mean"},
            "'total' or 'frequency', got 'mean'",
        ),
        (["a", "b"], [1, 1], {"svd_rank": 0}, "svd_rank must be at least 1, got 0"),
        (["a", "b"], [1, 1], {"svd_clamp": 2.0}, "svd_clamp is a quantile from 0 to 1, got 2.0"),
        (
            ["a", "b"],
            [1, 1],
            {"combination_type": "linear"},
            "All adapters must have the same r value when using combination_type linear",
        ),
    ],
)
def test_what_is_no_combination_is_refused_and_nothing_is_left(names, weights, options, message):
    model = lsr(ALIKE, OTHER_RANK)
    keys = list(model.state_dict())
    with pytest.raises(ValueError, match=re.escape(message)):
        model.add_weighted_adapter(names, weights, "sum", **options)
    assert list(model.peft_config) == ["a", "b"]
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize(
    "trained", [{"use_dora": True}, {"trainable_token_indices": {"word_embeddings": [3]}}]
)
def test_what_does_not_add_up_is_refused(trained):
    model = get_peft_model(tiny_bert(), LsrConfig(target_modules=["query"], r=2, **trained))
    with pytest.raises(UnsupportedLayerError, match=next(iter(trained))):
        model.add_weighted_adapter(["default"], [1], "sum", "cat")


def test_a_taken_name_changes_nothing():
    model = lsr(ALIKE, ALIKE)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert model.add_weighted_adapter(["a"], [2.0], "b") == {}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("config_cls", [DirectConfig, KronAConfig])
def test_relatives_say_that_they_do_not_combine(config_cls):
    model = get_peft_model(tiny_bert(), config_cls(target_modules=["query"]))
    with pytest.raises(TypeError, match="does not support add_weighted_adapter"):
        model.add_weighted_adapter(["default"], [1.0], "sum")
    with pytest.raises(ValueError, match="Cannot combine adapters with different peft types"):
        model.add_adapter("lsr", LsrConfig(target_modules=["query"], r=2))


def test_sides_of_a_layer_add_only_where_its_ranks_are_alike():
    model = lsr(ALIKE, LsrConfig(target_modules=TARGETS, r=2, rank_pattern={"conv": 4}))
    with pytest.raises(
        ValueError, match="lin has 4 in a, 2 in b; cat and the kinds with svd take any"
    ):
        model.add_weighted_adapter(["a", "b"], WEIGHTS, "sum", "linear")
