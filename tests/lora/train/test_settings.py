"""Settings of a run: what is impossible is refused by name, without torch."""

import dataclasses
import inspect
import pickle
import subprocess
import sys
import tomllib
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from lsrdecomp.cli.commands import ALL
from lsrdecomp.cli.setting_options import options_of
from lsrdecomp.fields import ON_COMMAND_LINE, settings, whole_number
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings, SettingsError

LABELLED = {"base": "base", "data": "train.tsv", "task": "classes"}


def test_settings_survive_json_and_pickle():
    settings = FinetuneSettings.from_mapping(
        {
            **LABELLED,
            "method": "lsr",
            "options": {"inner_shape": [2, 2]},
            "layers": [0, 1],
            "learning_rate": 0.01,
        }
    )
    again = FinetuneSettings.from_mapping(settings.to_json())
    assert again == settings == pickle.loads(pickle.dumps(settings))
    assert again.layers == (0, 1)
    assert settings.replace(learning_rate=0.1).learning_rate == 0.1
    assert (settings.seed, settings.split_seed) == (0, 0)  # as everywhere, if none is asked for


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rates": 1}, "no setting is called 'rates'; .*known: base, data, task"),
        ({"task": "SST"}, "task must be one of text, classes, scores, got 'SST'"),
        ({"method": "lora2"}, "method must be one of lora, .*, got 'lora2'"),
        ({"learning_rate": 0.0}, "learning_rate must be a number above 0, or auto, got 0.0"),
        ({"learning_rate": float("nan")}, "must be a number above 0, or auto, got nan"),
        ({"batch": 0}, "batch must be a whole number, 1 or more, got 0"),
        ({"batch": True}, "batch must be a whole number"),
        ({"steps": 2.5}, "steps must be a whole number, 1 or more, got 2.5"),
        ({"epochs": 1, "steps": 1}, "give epochs or steps, not both"),
        (
            {"method": "lsr", "options": {"use_dora": True}, "storage": "int4"},
            "with use_dora they are written",
        ),
        ({"warmup": 1.0}, "warmup must be at least 0 and below 1, got 1.0"),
        ({"validation": 1.0}, "validation must be above 0 and below 1, got 1.0"),
        (
            {"precision": "float16"},
            "precision must be one of auto, float32, bfloat16, bfloat16-autocast",
        ),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"target_modules": "query"}, "target_modules must be a list, got 'query'"),
        ({"layers": [-1]}, r"layers must be a list of layer indices, got \[-1\]"),
        ({"metric": "bleu"}, "metric: for a language model, whose task is text"),
        ({"evaluate_every": 5}, "give patience too"),
        ({"init": "a", "options": {"r": 2}}, "init brings its own options"),
        ({"method": "head", "train_head": False}, "leaves nothing to train"),
        ({"options": [1]}, "options must be a table"),
        ({"base": ""}, "base must be a text that is not empty"),
        ({"base": None}, "base must be a text that is not empty, got None"),
        ({"init": "a", "head": "b"}, "init brings its own head"),
        ({"learning_rate": True}, "learning_rate must be a number above 0, or auto, got True"),
        ({"warmup": -0.1}, "warmup must be at least 0 and below 1, got -0.1"),
        ({"max_length": 1}, "max_length must be a whole number, 2 or more, got 1"),
        ({"seed": -1}, "seed must be a whole number, 0 or more, got -1"),
        ({"gradient_checkpointing": 1}, "gradient_checkpointing must be true or false, got 1"),
        ({"target_modules": ["query", 1]}, "target_modules must be a list of names"),
    ],
)
def test_an_impossible_setting_is_named(values, message):
    with pytest.raises(SettingsError, match=message):
        FinetuneSettings.from_mapping({**LABELLED, **values})


def test_base_and_data_must_be_given():
    for name in ("base", "data"):
        with pytest.raises(SettingsError, match=f"^{name} must be given"):
            FinetuneSettings.from_mapping(
                {key: value for key, value in LABELLED.items() if key != name}
            )


def test_settings_stay_as_they_were_checked():
    options = {"r": 2}
    settings = FinetuneSettings.from_mapping({**LABELLED, "options": options})
    options["r"] = 3
    assert settings.options["r"] == 2
    with pytest.raises(TypeError):
        settings.options["r"] = 3


def test_what_json_cannot_hold_is_not_written():
    with pytest.raises(ValueError, match="JSON"):
        FinetuneSettings.from_mapping(
            {**LABELLED, "options": {"lsr_alpha": float("nan")}}
        ).to_json()


def test_nothing_logged_and_nothing_saved_are_counts_of_zero():
    settings = FinetuneSettings.from_mapping(
        {**LABELLED, "log_every": 0, "save_every": 0, "seed": 0}
    )
    assert (settings.log_every, settings.save_every) == (0, 0)


def test_settings_and_records_are_read_without_torch():
    code = (
        "import lsrdecomp.lora.train.finetune_record, sys; print('torch' in sys.modules, 'peft' in "
        "sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@settings
class More(FinetuneSettings):
    """Settings with two more fields; each is one line, and there is no other edit."""

    colour: Annotated[int, ON_COMMAND_LINE, whole_number(3), "Of the lamp."] = 5
    hours_of_light: Annotated[float | None, "In which it shines."] = None


def test_a_field_is_written_once():
    app = typer.Typer(rich_markup_mode=None)
    taken = []

    @app.command()
    @options_of(More)
    def run(out: Annotated[str, typer.Option()], **given: Any) -> None:
        """Run."""
        taken.append({name: value for name, value in given.items() if value is not None})

    text = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout.split())
    assert "--colour" in text
    assert "Of the lamp. [default: 5]" in text
    assert "hours_of_light" not in text  # --help-all shows what `--set` takes
    CliRunner().invoke(app, ["--out", "x", "--colour", "7", "--learning-rate", "0.5"])
    assert taken == [{"colour": 7, "learning_rate": 0.5}]
    assert (
        More.from_mapping(tomllib.loads('base = "base"\ndata = "train.tsv"\ncolour = 4')).to_json()[
            "colour"
        ]
        == 4
    )
    with pytest.raises(SettingsError, match="colour must be a whole number, 3 or more, got 2"):
        More.from_mapping({**LABELLED, "colour": 2})
    with pytest.raises(SettingsError, match="hours_of_light must be a number, got 'two'"):
        More.from_mapping({**LABELLED, "hours_of_light": "two"})
    assert (
        "colour : int, default 5\n    Of the lamp.\nhours_of_light : float, optional\n"
        in More.__doc__
    )


def test_every_setting_says_what_it_is():
    fields = FinetuneSettings.fields
    assert all(len(field.help) > 8 and field.help.endswith(".") for field in fields.values())
    assert list(fields) == [entry.name for entry in dataclasses.fields(FinetuneSettings)]
    assert all(f"{name} : " in FinetuneSettings.__doc__ for name in fields)


def test_the_verb_offers_every_setting():
    (verb,) = (command for command in ALL if command.__name__ == "finetune")
    offered = set(inspect.signature(verb).parameters) | {
        line.split()[0] for line in verb.__doc__.splitlines() if line
    }
    assert set(FinetuneSettings.fields) - {"options"} <= offered


@pytest.fixture
def methods():
    pytest.importorskip("peft")
    from lsrdecomp.lora.train import methods

    return methods


def test_every_method_has_its_config(methods):
    for name, method in methods.METHODS.items():
        config = methods.adapter_config(
            name, target_modules=["query"], layers=[1], modules_to_save=["classifier"]
        )
        assert method.fits(config.to_dict())
        assert config.modules_to_save == ["classifier"]
        if name != "head":
            assert set(config.target_modules) == {"query"}
            assert config.layers_to_transform == [1]
    assert not methods.METHODS["lora"].fits(methods.adapter_config("dora").to_dict())
    assert not methods.METHODS["lora"].fits(methods.adapter_config("lsr").to_dict())


def test_options_of_a_method(methods):
    assert methods.adapter_config("lora", {"r": 3}).r == 3
    assert methods.adapter_config("lsr").inner_shape == [2, 2]
    assert methods.adapter_config("lsr", {"r": 6}).inner_split(6) == (3, 2)
    with pytest.raises(
        SettingsError, match=r"lora has no option rank; its options are: .*lora_alpha"
    ):
        methods.adapter_config("lora", {"rank": 3})
    with pytest.raises(SettingsError, match="dora has no option use_dora"):
        methods.adapter_config("dora", {"use_dora": False})
    with pytest.raises(SettingsError, match="lsr: inner_shape 2 x 2 = 4, but r is 3"):
        methods.adapter_config("lsr", {"r": 3, "inner_shape": [2, 2]})
    with pytest.raises(SettingsError, match="no method is called 'adalora'; there are: lora, "):
        methods.adapter_config("adalora")


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ('{"peft_type": "LSR"}', "lsr"),
        ('{"peft_type": "LSR", "use_dora": true}', "lsr-dora"),
        ('{"peft_type": "LORA", "use_rslora": true}', "rslora"),
        ('{"peft_type": "LORA", "use_dora": false}', "lora"),
        ('{"peft_type": "DLSR"}', "direct"),
        ('{"peft_type": "PREFIX_TUNING"}', "lora"),  # the run says what is wrong with it
        ("not JSON", "lora"),
    ],
)
def test_the_method_is_that_of_the_adapter_to_train_on_from(tmp_path, config, method):
    (tmp_path / "adapter_config.json").write_text(config)
    values = {"base": "smollm2", "data": "train.jsonl", "init": str(tmp_path)}
    assert FinetuneSettings.from_mapping(values).method == method
    assert FinetuneSettings.from_mapping({**values, "method": "krona"}).method == "krona"


def test_pieces_of_vectors_divide_the_sides_of_small_models(methods):
    length = methods.METHODS["vblora"].defaults["vector_length"]
    assert [width % length for width in (128, 384, 576)] == [0, 0, 0]
