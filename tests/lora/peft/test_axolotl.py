"""The plugin of axolotl: its settings become those of an adapter, which trains.

Where axolotl is not installed, the plugin meets a stand-in of the interface that it is written for.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from tiny_language_model import tiny_model  # noqa: E402

INTERFACE = "axolotl.integrations.base"
PLUGIN = "lsrdecomp.lora.peft.axolotl"


class Settings(dict):
    """Axolotl's settings: a mapping whose keys are attributes too, None where absent."""

    def __getattr__(self, name):
        return self.get(name)


def stand_in():
    """Return the module of axolotl's that the plugin imports, as far as it needs it."""

    @dataclass(frozen=True)
    class AdapterCapabilities:
        name: str
        lora_like: bool = False
        relora: bool = False

    class BasePlugin:
        def get_adapter_capabilities(self):
            return []

        def load_adapter(self, model, cfg, inference=False, config_only=False):
            return None

    module = ModuleType(INTERFACE)
    module.AdapterCapabilities = AdapterCapabilities
    module.BasePlugin = BasePlugin
    return module


@pytest.fixture
def plugin(monkeypatch):
    """Return the module of the plugin."""
    try:
        importlib.import_module(INTERFACE)
    except ImportError:
        for name in ("axolotl", "axolotl.integrations"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, INTERFACE, stand_in())
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    yield importlib.import_module(PLUGIN)
    sys.modules.pop(PLUGIN, None)


SETTINGS = {
    "adapter": "lsr",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_target_modules": ["q_proj", "v_proj"],
    "lsr": {"separation_rank": 2},
}


def steps(model, count=3):
    """Train a few steps, and return their losses."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    tokens = torch.arange(3, 11).repeat(2, 1)
    losses = []
    for _ in range(count):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_adapter_lsr_is_put_on_a_model_and_trains(plugin):
    model, config = plugin.LsrPlugin().load_adapter(tiny_model(), Settings(SETTINGS))
    assert (config.r, config.lsr_alpha, config.separation_rank) == (4, 8, 2)
    assert config.target_modules == {"q_proj", "v_proj"}
    assert config.task_type == "CAUSAL_LM"
    losses = steps(model)
    assert losses[-1] < losses[0]


def test_a_saved_adapter_is_trained_on(plugin, tmp_path):
    model, _ = plugin.LsrPlugin().load_adapter(tiny_model(), Settings(SETTINGS))
    steps(model)
    model.save_pretrained(tmp_path / "adapter")
    again = Settings(SETTINGS, lora_model_dir=str(tmp_path / "adapter"))
    tokens = torch.arange(3, 11)[None]
    opened, _ = plugin.LsrPlugin().load_adapter(tiny_model(), again)
    assert any(parameter.requires_grad for parameter in opened.parameters())
    with torch.no_grad():
        torch.testing.assert_close(
            opened.eval()(tokens).logits, model.eval()(tokens).logits, rtol=0, atol=1e-6
        )
    read, _ = plugin.LsrPlugin().load_adapter(tiny_model(), again, inference=True)
    assert not any(parameter.requires_grad for parameter in read.parameters())


def test_other_adapters_are_left_to_axolotl(plugin):
    lora = Settings(SETTINGS, adapter="lora")
    assert plugin.LsrPlugin().load_adapter(tiny_model(), lora) is None
    assert [each.name for each in plugin.LsrPlugin().get_adapter_capabilities()] == ["lsr"]
    assert not plugin.LsrPlugin().get_adapter_capabilities()[0].lora_like


def test_all_linear_layers_and_only_the_config(plugin):
    chosen = {name: value for name, value in SETTINGS.items() if name != "lora_target_modules"}
    asked = Settings(chosen, lora_target_linear=True, peft_use_dora=True)
    model, config = plugin.LsrPlugin().load_adapter(tiny_model(), asked, config_only=True)
    assert model is None
    assert config.target_modules == "all-linear"
    assert config.use_dora


@pytest.mark.parametrize("name", ["peft_init_lora_weights", "loraplus_lr_ratio", "relora"])
def test_settings_of_lora_alone_are_refused_by_name(plugin, name):
    with pytest.raises(ValueError, match=f"{name} is for LoRA: leave it out"):
        plugin.LsrPlugin().load_adapter(tiny_model(), Settings(SETTINGS, **{name: 1}))


def test_axolotl_itself_loads_the_plugin_and_its_settings(plugin):
    adapters = pytest.importorskip("axolotl.loaders.adapter", reason="axolotl is not installed")
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault

    manager = PluginManager.get_instance()
    manager.register(f"{PLUGIN}.LsrPlugin")
    try:
        assert manager.supports_adapter("lsr")
        whole = DictDefault(
            SETTINGS
            | {
                "plugins": [f"{PLUGIN}.LsrPlugin"],
                "base_model": "tiny",
                "datasets": [{"path": "rows.jsonl", "type": "alpaca"}],
                "micro_batch_size": 1,
                "gradient_accumulation_steps": 1,
                "learning_rate": 1e-2,
                "sequence_len": 64,
            }
        )
        checked = validate_config(whole)
        assert checked.lsr == {"separation_rank": 2}
        model, config = adapters.load_adapter(tiny_model(), checked, checked.adapter)
        assert config.separation_rank == 2
        losses = steps(model)
        assert losses[-1] < losses[0]
    finally:
        manager.plugins.clear()
