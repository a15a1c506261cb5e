"""What PEFT and its clients ask of every tuner: all linear layers, conversion, scales."""

from __future__ import annotations

import pickle

import pytest
import torch
from adapters_support import tiny_bert, token_batch
from peft import (
    PeftMixedModel,
    PeftModel,
    convert_to_lora,
    get_peft_model,
    set_peft_model_state_dict,
)
from peft.utils.hotswap import hotswap_adapter
from torch import nn
from transformers import Mamba2Config
from transformers.pytorch_utils import Conv1D

from lsrdecomp.errors import MergeError, UnsupportedLayerError
from lsrdecomp.lora.peft import DirectConfig, KronAConfig, LsrConfig, LsrLayer, save_pretrained
from lsrdecomp.lora.peft.adapted import AdaptedLayer

KINDS = {
    "lsr": (LsrConfig, {"r": 4, "separation_rank": 2}),
    "dlsr": (DirectConfig, {"separation_rank": 2}),
    "krona": (KronAConfig, {}),
}


def config(kind: str, **settings):
    config_cls, own = KINDS[kind]
    return config_cls(**{"init_weights": False, **own, **settings})


def adapted(kind: str = "lsr", **settings) -> PeftModel:
    torch.manual_seed(0)
    return get_peft_model(
        tiny_bert(), config(kind, **{"target_modules": ["query", "dense"], **settings})
    ).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**token_batch()).logits


@pytest.mark.parametrize("kind", KINDS)
def test_all_linear_finds_every_layer_a_second_time(kind):
    model = adapted(kind, target_modules="all-linear")
    model.add_adapter("second", config(kind, target_modules="all-linear"))
    layers = [module for module in model.modules() if isinstance(module, AdaptedLayer)]
    linear = [module for module in tiny_bert().bert.modules() if isinstance(module, nn.Linear)]
    assert len(layers) >= len(linear)
    assert all(layer.has_adapter("default") and layer.has_adapter("second") for layer in layers)


@pytest.mark.parametrize("kind", KINDS)
def test_all_linear_leaves_wrapped_embeddings_and_convolutions_alone(kind):
    base = nn.ModuleDict(
        {"look": nn.Embedding(12, 8), "line": nn.Linear(8, 8), "fold": nn.Conv1d(8, 8, 2)}
    )
    model = get_peft_model(base, config(kind, target_modules=["look", "line", "fold"]))
    model.add_adapter("second", config(kind, target_modules="all-linear"))
    held = {name: model.base_model.model[name].has_adapter("second") for name in base}
    assert held == {"look": False, "line": True, "fold": False}


def test_a_wrapped_model_can_be_pickled():
    model = adapted()
    torch.testing.assert_close(logits(pickle.loads(pickle.dumps(model))), logits(model))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "module", [nn.Embedding(12, 8), nn.Conv1d(8, 8, 2)], ids=["embedding", "convolution"]
)
def test_what_is_no_linear_layer_is_not_converted(kind, module):
    model = get_peft_model(
        nn.ModuleDict({"part": module, "line": nn.Linear(8, 8)}),
        config(kind, target_modules=["part"]),
    )
    assert not model.base_model.model["part"].supports_lora_conversion()
    with pytest.raises(TypeError, match="do not support LoRA conversion"):
        convert_to_lora(model, rank=4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [nn.Linear(8, 6), Conv1D(6, 8)], ids=["linear", "Conv1D"])
def test_linear_layers_are_converted(kind, layer):
    model = get_peft_model(nn.Sequential(layer), config(kind, target_modules=["0"]))
    x = torch.randn(3, 8)
    expected = model(x)
    lora, tensors = convert_to_lora(model, rank=6)
    again = get_peft_model(model.unload(), lora)
    set_peft_model_state_dict(again, tensors)
    torch.testing.assert_close(again(x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_multiples_of_what_the_settings_say(kind):
    model = adapted(kind)
    layers = [module for module in model.modules() if isinstance(module, AdaptedLayer)]
    layer, x = layers[0], torch.randn(3, 24)
    with torch.no_grad():
        base, whole = layer.base_layer(x), layer(x)
        delta = whole - base

        def now() -> float:
            return float(((layer(x) - base) * delta).sum() / delta.square().sum())

        layer.set_scale("default", 0.5)
        assert now() == pytest.approx(0.5, rel=1e-4)
        layer.set_scale("default", 2.0)
        assert now() == pytest.approx(2.0, rel=1e-4), (
            "of the settings' scale, not of the present one"
        )
        layer.scale_layer(0.25)
        assert now() == pytest.approx(0.5, rel=1e-4)
        layer.unscale_layer(0.25)
        assert now() == pytest.approx(2.0, rel=1e-4)
        layer.unscale_layer()
        assert now() == pytest.approx(1.0, rel=1e-4)
        layer.set_scale("another", 3.0)  # not in this layer: nothing happens, as in LoRA
        assert now() == pytest.approx(1.0, rel=1e-4)
    assert "another" not in layer.scaling


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_merged_at_one_scale_is_taken_out_at_another(kind):
    model = adapted(kind)
    layer = next(module for module in model.modules() if isinstance(module, AdaptedLayer))
    weight = layer.get_base_layer().weight.detach().clone()
    layer.merge()
    layer.set_scale("default", 0.1)
    layer.unmerge()
    torch.testing.assert_close(layer.get_base_layer().weight, weight)


def test_a_deleted_adapter_leaves_no_scale():
    model = adapted()
    model.add_adapter("second", config("lsr", target_modules=["query"]))
    model.delete_adapter("second")
    for layer in model.modules():
        if isinstance(layer, LsrLayer):
            assert set(layer.initial_scaling) == set(layer.scaling) == {"default"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_hessian_product_goes_through_an_adapted_model(kind):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)).double()
    model = get_peft_model(base, config(kind, target_modules=["0", "2"])).double()
    x = torch.randn(20, 8, dtype=torch.float64)  # rows enough for the node of its own to be chosen
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    along = [torch.randn_like(parameter) for parameter in parameters]

    def gradients(create_graph: bool = False) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(model(x).square().mean(), parameters, create_graph=create_graph)

    slope = sum((g * v).sum() for g, v in zip(gradients(create_graph=True), along, strict=True))
    product = torch.autograd.grad(slope, parameters)
    step, shifted = 1e-5, []
    for sign in (1, -2):
        with torch.no_grad():
            for parameter, v in zip(parameters, along, strict=True):
                parameter += sign * step * v
        shifted.append(gradients())
    for ours, plus, minus in zip(product, *shifted, strict=True):
        torch.testing.assert_close(ours, (plus - minus) / (2 * step), rtol=1e-5, atol=1e-7)


def test_a_base_that_torchao_itself_quantized():
    torchao = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    torchao.quantize_(base, torchao.Int8WeightOnlyConfig())
    x = torch.randn(4, 64)
    expected = base(x).detach()
    model = get_peft_model(base, LsrConfig(r=4, separation_rank=2, target_modules=["0"]))
    torch.testing.assert_close(model(x), expected)
    model(x).square().sum().backward()
    assert any(
        parameter.grad is not None and parameter.grad.any() for parameter in model.parameters()
    )
    before = model.base_model.model[0].get_base_weight().clone()
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(
            MergeError, match="quantized by torchao cannot be merged here.*quantization_config"
        ):
            merge()
    assert torch.equal(model.base_model.model[0].get_base_weight(), before)


class Mamba(nn.Module):
    """A Mamba block as far as PEFT looks at one.

    That is its type, and a layer whose weight fused kernels read by themselves.
    """

    config = Mamba2Config()

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.in_proj(x), self.out_proj.weight, self.out_proj.bias)


@pytest.mark.parametrize("kind", KINDS)
def test_what_fused_kernels_of_mamba_read_past_a_layer_is_refused(kind):
    with pytest.raises(
        UnsupportedLayerError,
        match=f"(?i){kind}.*'out_proj' is incompatible with Mamba.*exclude_modules=.*conv1d",
    ):
        get_peft_model(Mamba(), config(kind, target_modules=["in_proj", "out_proj"]))
    get_peft_model(Mamba(), config(kind, target_modules=["in_proj"]))


def test_mixed_models_and_hotswap_take_what_an_adapter_expands_to(tmp_path):
    """PEFT lists the types that both take: until it asks methods, LSR goes as its LoRA."""
    with pytest.raises(ValueError, match="not compatible with the `PeftMixedModel`"):
        get_peft_model(tiny_bert(), config("lsr", target_modules=["query"]), mixed=True)
    outputs = []
    for number in (0, 1):
        torch.manual_seed(number)
        model = get_peft_model(tiny_bert(), config("lsr", target_modules=["query"])).eval()
        save_pretrained(model, tmp_path / f"{number}", also_lora=True)
        outputs.append(logits(model))
    with pytest.raises(ValueError, match="Hotswapping only supports"):
        hotswap_adapter(model, tmp_path / "0", "default", "cpu")
    model = PeftModel.from_pretrained(tiny_bert(), tmp_path / "0" / "lora").eval()
    torch.testing.assert_close(logits(model), outputs[0])
    hotswap_adapter(model, tmp_path / "1" / "lora", "default", "cpu")
    torch.testing.assert_close(logits(model), outputs[1])
    mixed = PeftMixedModel.from_pretrained(tiny_bert(), tmp_path / "1" / "lora").eval()
    torch.testing.assert_close(logits(mixed), outputs[1])
