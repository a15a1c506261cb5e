"""KronA and direct LSR: ΔW as their papers write it, and the same life inside PEFT."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from adapters_support import kron_sum, tiny_bert, token_batch
from peft import PeftModel, convert_to_lora, get_peft_model, set_peft_model_state_dict
from peft.utils.peft_types import PeftType
from test_layer import KINDS, closeness
from torch import nn

import lsrdecomp.lora.peft
from lsrdecomp.errors import ShapeError
from lsrdecomp.lora.peft import DirectConfig, KronAConfig, rescale
from lsrdecomp.lora.train import methods
from lsrdecomp.lora.train.methods import METHODS, Method, adapter_config

SETTINGS = {"direct": {"separation_rank": 3}}
"""Other than the usual ones, for the small layers here."""


def configs(table: Mapping[str, Method]) -> dict[str, tuple[type, dict[str, int]]]:
    """Our methods in a table, but for LSR itself, with the settings they are tested by."""
    ours = (
        name
        for name, row in table.items()
        if "lora.peft:" in row.config_path and not row.config_path.endswith(":LsrConfig")
    )
    return {name: (table[name].config, SETTINGS.get(name, {})) for name in ours}


CONFIGS = configs(METHODS) | {
    "direct of order 3": (DirectConfig, {"separation_rank": 2, "order": 3})
}
CASES = [(name, kind) for name in CONFIGS for kind in KINDS]


def adapted(name: str, kind: str = "linear", dtype: torch.dtype = torch.float64, **settings):
    torch.manual_seed(0)
    layer, x = KINDS[kind]()
    config_cls, defaults = CONFIGS[name]
    config = config_cls(target_modules=["layer"], **{"init_weights": False, **defaults, **settings})
    model = get_peft_model(nn.ModuleDict({"layer": layer}), config).to(dtype)
    return model, model.base_model.model["layer"], x.to(dtype) if x.is_floating_point() else x


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**token_batch()).logits


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_forward_is_base_plus_delta_and_merging_is_undone(name, kind):
    _, layer, x = adapted(name, kind)
    with torch.no_grad():
        mine, base = layer(x), layer.get_base_layer()
        weight = base.weight.clone()
        base.weight += layer.get_delta_weight("default")
        expected = base(x)
        assert (mine - expected).abs().max() <= closeness(expected)
        base.weight.copy_(weight)
        assert (mine - base(x)).abs().max() > 0.01
        layer.merge(safe_merge=True)
        assert (layer(x) - expected).abs().max() <= closeness(expected)
        layer.unmerge()
        assert (base.weight - weight).abs().max() <= closeness(weight)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_gradients_of_every_parameter(name, kind):
    model, _, x = adapted(name, kind)
    given = {key: value.detach() for key, value in model.named_parameters() if value.requires_grad}

    def output(*values: torch.Tensor) -> torch.Tensor:
        wrapper = Indexed(model)
        named = {f"model.{key}": value for key, value in zip(given, values, strict=True)}
        return torch.func.functional_call(wrapper, named, (x,))

    assert torch.autograd.gradcheck(
        output, [value.requires_grad_() for value in given.values()], fast_mode=True
    )


class Indexed(nn.Module):
    """Calls the one layer of a model that has no forward of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.base_model.model["layer"](x)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_default_start_is_the_base_model_and_trains(name):
    model, layer, x = adapted(name, init_weights=True)
    assert torch.equal(layer(x), layer.base_layer(x))
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1
    )
    for _ in range(2):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
    assert all(parameter.grad.any() for parameter in model.parameters() if parameter.requires_grad)


ROWS = ["default", "second", "__base__", "second", "default"]
"""Which adapter each row of a mixed batch is for."""


def make_two_adapters(name: str) -> tuple[PeftModel, torch.Tensor, torch.Tensor]:
    """Make a model with the adapters "default" and "second"; return it with the logits of each."""
    config_cls, settings = CONFIGS[name]
    config = config_cls(target_modules=["query", "dense"], init_weights=False, **settings)
    model = get_peft_model(tiny_bert(), config)
    model.add_adapter("second", config)
    first = logits(model)
    model.set_adapter("second")
    return model, first, logits(model)


@pytest.fixture(params=CONFIGS)
def two_adapters(request):
    return make_two_adapters(request.param)


def test_of_two_adapters_the_active_one_acts_and_trains(two_adapters):
    model, first, second = two_adapters
    assert not torch.allclose(first, second)
    trainable = [key for key, value in model.named_parameters() if value.requires_grad]
    assert trainable
    assert all("second" in key for key in trainable)


def test_rows_of_a_batch_name_their_adapters(two_adapters):
    model, first, second = two_adapters
    with torch.no_grad():
        mixed = model(**token_batch(), adapter_names=ROWS).logits
    torch.testing.assert_close(mixed[[0, 4]], first[[0, 4]])
    torch.testing.assert_close(mixed[[1, 3]], second[[1, 3]])


@pytest.mark.parametrize("low_memory", [False, True])
def test_each_of_two_adapters_is_saved_and_loaded(two_adapters, tmp_path, low_memory):
    model, first, second = two_adapters
    model.save_pretrained(tmp_path)
    for folder, expected in ((tmp_path, first), (tmp_path / "second", second)):
        again = PeftModel.from_pretrained(
            tiny_bert(), folder, adapter_name="x", low_cpu_mem_usage=low_memory
        )
        # Equal weights lie elsewhere in memory, and BLAS rounds anew.
        torch.testing.assert_close(logits(again), expected)


def test_an_adapter_is_scaled_to_nothing_and_merged(two_adapters):
    model, _, second = two_adapters
    with rescale(model, 0.0):
        torch.testing.assert_close(logits(model), logits(tiny_bert()))
    torch.testing.assert_close(logits(model.merge_and_unload()), second, rtol=1e-4, atol=1e-4)


def test_one_of_two_loaded_adapters_is_deleted(two_adapters, tmp_path):
    model, _, second = two_adapters
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny_bert(), tmp_path)
    again.load_adapter(tmp_path / "second", "second")
    again.delete_adapter("default")
    again.set_adapter("second")
    assert torch.equal(logits(again), second)


def check_two_adapters(name: str, folder: Path) -> None:
    """Put two adapters of a method that is not in the table through the tests of those that are."""
    test_of_two_adapters_the_active_one_acts_and_trains(make_two_adapters(name))
    test_rows_of_a_batch_name_their_adapters(make_two_adapters(name))
    test_each_of_two_adapters_is_saved_and_loaded(make_two_adapters(name), folder, False)
    test_an_adapter_is_scaled_to_nothing_and_merged(make_two_adapters(name))
    test_one_of_two_loaded_adapters_is_deleted(make_two_adapters(name), folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_peft_converts_them_to_lora_of_full_rank(name):
    config_cls, settings = CONFIGS[name]
    model = get_peft_model(
        tiny_bert(), config_cls(target_modules=["query"], init_weights=False, **settings)
    )
    expected = logits(model)
    config, tensors = convert_to_lora(model, rank=24)
    lora = get_peft_model(tiny_bert(), config)
    assert not set_peft_model_state_dict(lora, tensors).unexpected_keys
    torch.testing.assert_close(logits(lora), expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(expected, logits(tiny_bert()), rtol=1e-2, atol=1e-2)


def test_krona_is_one_kronecker_product():
    _, layer, _ = adapted("krona", shape_pattern={"layer": [[2, 3], [4, 4]]}, alpha=2.0)
    left, right = (factor[0].detach().numpy() for factor in layer.krona_W["default"].factors)
    np.testing.assert_allclose(
        layer.delta_matrix("default").detach().numpy(), 2 * np.kron(left, right), atol=1e-14
    )
    with pytest.raises(ShapeError, match="one term and two factors, got 3"):
        KronAConfig(separation_rank=3)


def test_direct_lsr_is_the_sum_of_products_and_low_rank_is_a_shape():
    _, layer, x = adapted("direct", alpha=0.5)
    factors = [factor.detach().numpy() for factor in layer.dlsr_W["default"].factors]
    np.testing.assert_allclose(
        layer.delta_matrix("default").detach().numpy(), 0.5 * kron_sum(factors), atol=1e-14
    )
    _, layer, x = adapted("direct", shape_pattern={"layer": [[8, 1], [1, 12]]})
    assert torch.linalg.matrix_rank(layer.delta_matrix("default")) == 3
    expected = (
        x @ (layer.base_layer.weight + layer.delta_matrix("default")).T + layer.base_layer.bias
    )
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "direct",
            {"shape_pattern": {"layer": [[3, 3], [3, 4]]}},
            "layer: 3 x 3 = 9 rows, but the matrix has 8",
        ),
        ("direct", {"shape_pattern": {"layer": [3, 4]}}, "shape_pattern"),
        ("direct", {"separation_rank": 0}, "separation_rank"),
        ("krona", {"bias": "dlsr_only"}, "krona_only"),
    ],
)
def test_sizes_that_do_not_fit_are_named(name, settings, message):
    with pytest.raises(ValueError, match=message):
        adapted(name, **settings)


def test_all_kinds_are_members():
    assert {"LSR", "DLSR", "KRONA"} <= {member.value for member in PeftType}


def test_every_method_of_ours_is_here():
    assert set(CONFIGS) == {"direct", "direct of order 3", "krona"}


def test_a_method_written_from_contributing_alone_lives_in_peft(monkeypatch, tmp_path):
    guide = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = guide.split("## Adding a PEFT method")[1]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (row,) = re.findall(r'`"outer": (Method\(.*?\))`', section)
    module = ModuleType("lsrdecomp.lora.peft.outer")  # edit 1: the file
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, "outer.py", "exec"), module.__dict__)
    # Edit 2: its name.
    monkeypatch.setattr(lsrdecomp.lora.peft, "OuterConfig", module.OuterConfig, raising=False)
    table = {**METHODS, "outer": eval(row, {"Method": Method})}  # edit 3: its row
    monkeypatch.setattr(methods, "METHODS", table)
    monkeypatch.setitem(CONFIGS, "outer", configs(table)["outer"])
    for kind in KINDS:
        test_forward_is_base_plus_delta_and_merging_is_undone("outer", kind)
        test_gradients_of_every_parameter("outer", kind)
    test_the_default_start_is_the_base_model_and_trains("outer")
    check_two_adapters("outer", tmp_path)
    test_peft_converts_them_to_lora_of_full_rank("outer")
    assert adapter_config("outer", {"alpha": 2.0}, target_modules=["query"]).alpha == 2.0
