"""Weighted combinations are PEFT's: adapters are combined as LoRAs, or are active at once."""

from __future__ import annotations

import pytest
import torch
from adapters_support import tiny_bert, token_batch
from peft import PeftModel, get_peft_model

from lsrdecomp.lora.peft import DirectConfig, KronAConfig, LsrConfig, rescale, save_pretrained
from lsrdecomp.precision import unit_roundoff

WEIGHTS = [0.75, -1.5]
ROUNDING = 2**12 * unit_roundoff("float32")


def test_loras_of_two_adapters_combine_to_what_both_do_when_active(tmp_path):
    """Their ranks, scales and layers differ."""
    config = LsrConfig(
        target_modules=["query", "dense"], r=4, separation_rank=2, init_weights=False
    )
    other = LsrConfig(
        target_modules=["query", "value"], r=6, lsr_alpha=3, use_rslora=True, init_weights=False
    )
    model = get_peft_model(tiny_bert(), config, adapter_name="a")
    model.add_adapter("b", other)
    model.eval().base_model.set_adapter(["a", "b"])
    with torch.no_grad(), rescale(model, WEIGHTS[0], ["a"]), rescale(model, WEIGHTS[1], ["b"]):
        expected = model(**token_batch()).logits
    for name in ("a", "b"):
        save_pretrained(model, tmp_path, name, also_lora=True)
    lora = PeftModel.from_pretrained(tiny_bert(), tmp_path / "a" / "lora", "a")
    lora.load_adapter(tmp_path / "b" / "lora", "b")
    lora.add_weighted_adapter(["a", "b"], WEIGHTS, "sum", "cat")
    lora.set_adapter("sum")
    with torch.no_grad():
        combined = lora.eval()(**token_batch()).logits
    assert (combined - expected).norm() <= ROUNDING * expected.norm()


@pytest.mark.parametrize("config_cls", [LsrConfig, DirectConfig, KronAConfig])
def test_a_model_says_how_its_adapters_are_combined(config_cls):
    model = get_peft_model(tiny_bert(), config_cls(target_modules=["query"]))
    with pytest.raises(TypeError, match=r"does not support add_weighted_adapter.*also_lora=True"):
        model.add_weighted_adapter(["default"], [1.0], "sum")


@pytest.mark.parametrize("config_cls", [DirectConfig, KronAConfig])
def test_adapters_of_two_kinds_are_not_in_one_model(config_cls):
    model = get_peft_model(tiny_bert(), config_cls(target_modules=["query"]))
    with pytest.raises(ValueError, match="Cannot combine adapters with different peft types"):
        model.add_adapter("lsr", LsrConfig(target_modules=["query"], r=2))
