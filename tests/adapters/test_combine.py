"""Weighted combinations are PEFT's: the refusal prints commands, which are typed here."""

from __future__ import annotations

import textwrap

import pytest
import torch
from adapters_support import tiny_bert, token_batch
from peft import PeftModel, get_peft_model

from lsrdecomp.adapters import DirectConfig, KronAConfig, LsrConfig, LsrLayer, rescale
from lsrdecomp.adapters.errors import UnsupportedLayerError
from lsrdecomp.precision import unit_roundoff

WEIGHTS = [0.75, -1.5]
ROUNDING = 2**8 * unit_roundoff("float32")
TARGETS = ["query", "dense", "word_embeddings"]


def model_with_two_adapters(first: str = "a", **settings_of_second) -> PeftModel:
    """A tiny BERT whose two adapters have other ranks, scales and layers, and are not zero."""
    config = LsrConfig(target_modules=TARGETS, r=4, separation_rank=2, init_weights=False)
    settings = {"r": 6, "lsr_alpha": 3, "use_rslora": True, **settings_of_second}
    other = LsrConfig(target_modules=["query", "value"], init_weights=False, **settings)
    model = get_peft_model(tiny_bert(), config, adapter_name=first)
    model.add_adapter("b", other)
    return model.eval()


def weighted_sums(model: PeftModel, names) -> dict[str, torch.Tensor]:
    """``Σ weight · ΔW`` of every layer, formed."""
    sums = {}
    for path, layer in model.named_modules():
        if isinstance(layer, LsrLayer):
            sums[path] = sum(
                weight * layer.get_delta_weight(name)
                for name, weight in zip(names, WEIGHTS, strict=True)
                if layer.has_adapter(name)
            ).detach()
    return sums


def typed(refusal: pytest.ExceptionInfo, model: PeftModel) -> PeftModel:
    """Type the commands that a refusal prints, and return the model of LoRAs that they make."""
    lines = str(refusal.value).splitlines()
    commands = [line for line in lines if line.startswith("    ")]
    names = {"model": model}
    exec(textwrap.dedent("\n".join(commands)), names)
    return names["lora"]


def refusal_of(model: PeftModel, *arguments, **options) -> pytest.ExceptionInfo:
    with pytest.raises(UnsupportedLayerError, match="by PEFT") as refusal:
        model.add_weighted_adapter(*arguments, **options)
    return refusal


@pytest.mark.parametrize("first", ["a", "default"])
def test_the_printed_commands_make_the_weighted_sum(first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = model_with_two_adapters(first)
    sums = weighted_sums(model, [first, "b"])
    refusal = refusal_of(model, [first, "b"], WEIGHTS, "sum", "cat")
    lora = typed(refusal, model)
    for path, expected in sums.items():
        distance = (lora.get_submodule(path).get_delta_weight("sum") - expected).norm()
        assert distance <= ROUNDING * expected.norm()


def test_the_printed_commands_hold_every_option_that_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = model_with_two_adapters()
    options = {"svd_rank": 2, "density": 0.5, "seed": 3}
    refusal = refusal_of(model, ["a", "b"], WEIGHTS, "sum", "dare_linear_svd", **options)
    lora = typed(refusal, model)
    assert lora.peft_config["sum"].r == 2
    assert "density=0.5" in str(refusal.value)
    assert "torch.manual_seed(3)" in str(refusal.value)


def test_the_printed_commands_copy_a_head_that_was_trained_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = model_with_two_adapters(modules_to_save=["classifier"])
    head = model.base_model.model.classifier.modules_to_save["b"]
    with torch.no_grad():
        head.weight.add_(1)
    refusal = refusal_of(model, ["a", "b"], WEIGHTS, "sum", "svd")
    heads = typed(refusal, model).base_model.model.classifier.modules_to_save
    assert torch.equal(heads["sum"].weight, head.weight)
    assert heads["sum"].weight is not heads["b"].weight


def test_adapters_active_together_are_the_weighted_sum(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = model_with_two_adapters()
    model.base_model.set_adapter(["a", "b"])
    with torch.no_grad(), rescale(model, WEIGHTS[0], ["a"]), rescale(model, WEIGHTS[1], ["b"]):
        logits = model(**token_batch()).logits
    lora = typed(refusal_of(model, ["a", "b"], WEIGHTS, "sum", "cat"), model)
    lora.set_adapter("sum")
    with torch.no_grad():
        expected = lora.eval()(**token_batch()).logits
    assert (logits - expected).norm() <= 16 * ROUNDING * expected.norm()


@pytest.mark.parametrize(
    ("adapters", "weights", "message"),
    [
        ([], [], "name at least one adapter"),
        (["a", "x"], [1, 1], "there is no adapter 'x'; the model has a, b"),
        (["a", "b"], [1], "1 weights for 2 adapters"),
    ],
)
def test_what_names_no_combination_is_refused_first(adapters, weights, message):
    model = model_with_two_adapters()
    with pytest.raises(ValueError, match=message):
        model.add_weighted_adapter(adapters, weights, "sum")
    assert list(model.peft_config) == ["a", "b"]


@pytest.mark.parametrize(
    "trained", [{"use_dora": True}, {"trainable_token_indices": {"word_embeddings": [3]}}]
)
def test_what_does_not_add_up_is_refused_without_commands(trained):
    model = get_peft_model(tiny_bert(), LsrConfig(target_modules=["query"], r=2, **trained))
    with pytest.raises(UnsupportedLayerError, match=next(iter(trained))) as refusal:
        model.add_weighted_adapter(["default"], [1], "sum", "cat")
    assert "save_pretrained" not in str(refusal.value)


@pytest.mark.parametrize("config_cls", [DirectConfig, KronAConfig])
def test_relatives_say_that_they_do_not_combine(config_cls):
    model = get_peft_model(tiny_bert(), config_cls(target_modules=["query"]))
    with pytest.raises(TypeError, match="does not support add_weighted_adapter"):
        model.add_weighted_adapter(["default"], [1.0], "sum")
    with pytest.raises(ValueError, match="Cannot combine adapters with different peft types"):
        model.add_adapter("lsr", LsrConfig(target_modules=["query"], r=2))
