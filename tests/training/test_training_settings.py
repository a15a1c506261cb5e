"""Settings of a run: what is impossible is refused by name, without torch; a method's name becomes a PEFT config."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lsrdecomp.training.settings import METHOD_NAMES, FinetuneSettings, SettingsError

EMBEDDED = {"model": "embedded", "task": "embedded"}


def test_settings_survive_json():
    settings = FinetuneSettings.from_mapping(
        {**EMBEDDED, "method": "lsr", "options": {"inner_shape": [2, 2]}, "layers": [0, 1], "rate": 0.01}
    )
    again = FinetuneSettings.from_mapping(settings.to_json())
    assert again == settings
    assert again.layers == (0, 1)
    assert settings.replace(rate=0.1).rate == 0.1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rates": 1}, "no setting is called rates; there are: model, task"),
        ({"task": "SST"}, "task must be one of CoLA, SST-2.*embedded, jsonl, got 'SST'"),
        ({"task": "RTE"}, "task RTE reads files: give data"),
        ({"method": "lora2"}, "method must be one of lora, .*, got 'lora2'"),
        ({"rate": 0.0}, "rate must be a number above 0, got 0.0"),
        ({"rate": float("nan")}, "rate must be a number above 0, got nan"),
        ({"batch": 0}, "batch must be a whole number, 1 or more, got 0"),
        ({"batch": True}, "batch must be a whole number"),
        ({"steps": 2.5}, "steps must be a whole number, 1 or more, got 2.5"),
        ({"epochs": 1, "steps": 1}, "give epochs or steps, not both"),
        ({"warmup": 1.0}, "warmup must be at least 0 and below 1, got 1.0"),
        ({"validation": 1.0}, "validation must be above 0 and below 1, got 1.0"),
        ({"precision": "float16"}, "precision must be one of float32, bfloat16, bfloat16-autocast"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"target_modules": "query"}, "target_modules must be a list, got 'query'"),
        ({"layers": [-1]}, "layers must be a list of layer indices"),
        ({"evaluate_every": 5}, "give patience too"),
        ({"init": "a", "options": {"r": 2}}, "init brings its own options"),
        ({"method": "head", "train_head": False}, "leaves nothing to train"),
        ({"options": [1]}, "options must be a table"),
        ({"model": ""}, "model must be a text that is not empty"),
        ({"model": None}, "model must be a text that is not empty, got None"),
        ({"init": "a", "head": "b"}, "init brings its own head"),
        ({"rate": True}, "rate must be a number above 0, got True"),
        ({"warmup": -0.1}, "warmup must be at least 0 and below 1, got -0.1"),
        ({"max_length": 1}, "max_length must be a whole number, 2 or more, got 1"),
        ({"seed": -1}, "seed must be a whole number, 0 or more, got -1"),
        ({"gradient_checkpointing": 1}, "gradient_checkpointing must be true or false, got 1"),
        ({"target_modules": ["query", 1]}, "target_modules must be a list of names"),
    ],
)
def test_an_impossible_setting_is_named(values, message):
    with pytest.raises(SettingsError, match=message):
        FinetuneSettings.from_mapping({**EMBEDDED, **values})


def test_model_and_task_must_be_given():
    for name in EMBEDDED:
        with pytest.raises(SettingsError, match=f"^{name} must be given"):
            FinetuneSettings.from_mapping({key: value for key, value in EMBEDDED.items() if key != name})


def test_settings_stay_as_they_were_checked():
    options = {"r": 2}
    settings = FinetuneSettings.from_mapping({**EMBEDDED, "options": options})
    options["r"] = 3
    assert settings.options["r"] == 2
    with pytest.raises(TypeError):
        settings.options["r"] = 3


def test_what_json_cannot_hold_is_not_written():
    with pytest.raises(ValueError, match="JSON"):
        FinetuneSettings.from_mapping({**EMBEDDED, "options": {"lsr_alpha": float("nan")}}).to_json()


def test_nothing_logged_and_nothing_saved_are_counts_of_zero():
    settings = FinetuneSettings.from_mapping({**EMBEDDED, "log_every": 0, "save_every": 0, "seed": 0})
    assert (settings.log_every, settings.save_every) == (0, 0)


def test_settings_and_records_are_read_without_torch():
    code = "import lsrdecomp.training.record, sys; print('torch' in sys.modules, 'peft' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.fixture
def methods():
    pytest.importorskip("peft")
    from lsrdecomp.training import methods

    return methods


def test_every_method_has_its_config(methods):
    assert tuple(methods.METHODS) == METHOD_NAMES
    for name, method in methods.METHODS.items():
        config = methods.adapter_config(name, target_modules=["query"], layers=[1], modules_to_save=["classifier"])
        assert method.is_kind_of(config)
        assert config.modules_to_save == ["classifier"]
        if name != "head":
            assert set(config.target_modules) == {"query"}
            assert config.layers_to_transform == [1]
    assert not methods.METHODS["lora"].is_kind_of(methods.adapter_config("dora"))
    assert not methods.METHODS["lora"].is_kind_of(methods.adapter_config("lsr"))


def test_options_of_a_method(methods):
    assert methods.adapter_config("lora", {"r": 3}).r == 3
    assert methods.adapter_config("lsr").inner_shape == [2, 2]
    assert methods.adapter_config("lsr", {"r": 6}).inner_split(6) == (3, 2)
    with pytest.raises(SettingsError, match=r"lora has no option rank; its options are: .*lora_alpha"):
        methods.adapter_config("lora", {"rank": 3})
    with pytest.raises(SettingsError, match="dora has no option use_dora"):
        methods.adapter_config("dora", {"use_dora": False})
    with pytest.raises(SettingsError, match="lsr: inner_shape 2 x 2 = 4, but r is 3"):
        methods.adapter_config("lsr", {"r": 3, "inner_shape": [2, 2]})
    with pytest.raises(SettingsError, match="no method is called 'adalora'; there are: lora, "):
        methods.adapter_config("adalora")
