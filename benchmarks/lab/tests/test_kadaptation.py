"""KAdaptation: ΔW as its paper writes it, slow factors that all layers share, its life in PEFT."""

import numpy as np
import pytest
import test_relatives as relatives
import torch
from adapters_support import kron_sum, tiny_bert
from peft import PeftModel, get_peft_model

from benchmarks.lab.compare.kadaptation import KAdaptationConfig
from lsrdecomp.lora.train.methods import METHODS, adapter_config

EVEN_KINDS = [
    kind
    for kind in relatives.KINDS
    if kind not in ("linear without bias", "embedding", "conv2d grouped")
]


@pytest.fixture(autouse=True)
def among_the_relatives(monkeypatch):
    monkeypatch.setitem(relatives.CONFIGS, "kadaptation", (KAdaptationConfig, {"terms": 2, "r": 2}))


@pytest.mark.parametrize("kind", EVEN_KINDS)
def test_forward_and_gradients_on_every_layer_that_its_terms_divide(kind):
    relatives.test_forward_is_base_plus_delta_and_merging_is_undone("kadaptation", kind)
    relatives.test_gradients_of_every_parameter("kadaptation", kind)


def test_it_starts_saves_loads_and_converts_as_the_others(tmp_path):
    relatives.test_the_default_start_is_the_base_model_and_trains("kadaptation")
    relatives.check_two_adapters("kadaptation", tmp_path)
    relatives.test_peft_converts_them_to_lora_of_full_rank("kadaptation")


def test_terms_that_do_not_divide_the_layer_are_named():
    relatives.test_sizes_that_do_not_fit_are_named(
        "kadaptation", {"terms": 5}, "layer: terms = 5 does not divide the layer's 8 x 12"
    )


def test_a_suite_can_name_it():
    assert METHODS["kadaptation"].fits(
        adapter_config("kadaptation", {"terms": 2}, target_modules=["query"]).to_dict()
    )


def test_kadaptation_shares_its_slow_factors():
    config = KAdaptationConfig(target_modules=["query", "value"], terms=3, r=2, init_weights=False)
    model = get_peft_model(tiny_bert(), config)
    slow = model.base_model.kadaptation_A["default"].detach().numpy()
    assert slow.shape == (3, 3, 3)
    layers = [
        module for module in model.modules() if hasattr(module, "kadaptation_u") and module.scaling
    ]
    assert len(layers) == 4
    for layer in layers:
        fast = (layer.kadaptation_u["default"] @ layer.kadaptation_v["default"]).detach().numpy()
        np.testing.assert_allclose(
            layer.delta_matrix("default").detach().numpy(), kron_sum([slow, fast]), atol=1e-5
        )
    parameters = sum(value.numel() for value in model.parameters() if value.requires_grad)
    assert parameters == 27 + 4 * 3 * 2 * (8 + 8)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_slow_factors_have_the_precision_of_the_fast_ones(autocast):
    config = KAdaptationConfig(target_modules=["query"], terms=2)
    model = get_peft_model(tiny_bert().bfloat16(), config, autocast_adapter_dtype=autocast)
    expected = torch.float32 if autocast else torch.bfloat16
    assert {value.dtype for key, value in model.named_parameters() if "kadaptation_" in key} == {
        expected
    }
    assert model.base_model.kadaptation_A["default"].requires_grad


@pytest.mark.parametrize("trainable", [False, True])
def test_loading_another_adapter_leaves_the_slow_factors_trainable_or_not(tmp_path, trainable):
    get_peft_model(
        tiny_bert(), KAdaptationConfig(target_modules=["query"], terms=2)
    ).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(tiny_bert(), tmp_path, is_trainable=trainable)
    model.load_adapter(tmp_path, "other", is_trainable=trainable)
    model.load_adapter(tmp_path, "opposite", is_trainable=not trainable)
    flags = {name: slow.requires_grad for name, slow in model.base_model.kadaptation_A.items()}
    assert flags == {"default": trainable, "other": trainable, "opposite": not trainable}
