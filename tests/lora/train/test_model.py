"""What a run trains and in which precision, when it recomputes activations, and its clock."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("trl")
pytest.importorskip("accelerate")

from tiny_language_model import make_base, write_rows  # noqa: E402
from torch import nn  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, TrainerState  # noqa: E402
from transformers.trainer_callback import CallbackHandler, TrainerControl  # noqa: E402

from lsrdecomp.lora.train.callbacks import Clock, layer_figures  # noqa: E402
from lsrdecomp.lora.train.finetune_run import finetune  # noqa: E402
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings  # noqa: E402
from lsrdecomp.lora.train.trainable_model import (  # noqa: E402
    needs_checkpointing,
    open_model,
    trainable_parameters,
)
from lsrdecomp.lora.train.trainer import TextTrainer  # noqa: E402


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    make_base(folder)
    write_rows(folder / "rows.jsonl", 12)
    return folder


def settings(place, **changes):
    values = {"base": str(place / "base"), "data": str(place / "rows.jsonl"), "device": "cpu"}
    values |= {"log_every": 0, "steps": 1, "learning_rate": 1e-3, "samples": 0}
    return FinetuneSettings.from_mapping(values | changes)


def model_of(layers, width, dtype):
    model = nn.Linear(2, 2, dtype=dtype)
    model.config = LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=1, intermediate_size=4
    )
    return model


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize(
    ("layers", "width", "dtype", "tokens"),
    [
        (1, 8, torch.bfloat16, 10),
        (12, 768, torch.bfloat16, 4096),
        (12, 768, torch.float32, 4096),
        (32, 4096, torch.bfloat16, 1),
    ],
)
def test_activations_are_recomputed_once_they_would_fill_half_of_the_free_memory(
    cuda, layers, width, dtype, tokens, monkeypatch
):
    """34 bytes a token, layer and unit of width in 16 bits (Korthikanti et al., 2022), 68 in 32."""
    needed = {torch.bfloat16: 34, torch.float32: 68}[dtype] * tokens * layers * width
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    for free, again in ((2 * needed, False), (2 * needed - 1, True), (0, True)):
        on_host, on_device = (10**15, free) if cuda else (free, 10**15)
        monkeypatch.setattr(
            "psutil.virtual_memory", lambda free=on_host: SimpleNamespace(available=free)
        )
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda free=on_device: (free, 2 * free))
        assert needs_checkpointing(model_of(layers, width, dtype), tokens) is again


def test_layers_of_a_model_of_pictures_and_texts_are_those_of_its_texts(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    model = nn.Linear(2, 2)
    text = SimpleNamespace(num_hidden_layers=3, hidden_size=16)
    model.config = SimpleNamespace(get_text_config=lambda: text)
    assert needs_checkpointing(model, 1)
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
    assert not needs_checkpointing(model, 1), "of a model without layers nothing is known"


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("method", ["lsr", "lora"])
def test_what_is_trained_is_in_single_precision_whatever_the_base_is_in(place, precision, method):
    run = settings(place, precision=precision, method=method)
    model, _ = open_model(run, run.base, None)
    trained = {name for name, _, _ in trainable_parameters(model)}
    assert trained
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {dtypes[name] for name in trained} == {torch.float32}
    base = {dtype for name, dtype in dtypes.items() if name not in trained}
    assert base == {getattr(torch, precision)}


def test_a_head_is_trained_in_single_precision_on_a_base_in_half_of_it(place):
    """PEFT copies a head in the precision of its base."""
    run = FinetuneSettings(
        str(place / "base"), "train.tsv", "classes", precision="bfloat16", device="cpu"
    )
    model, _ = open_model(run, run.base, 2)
    trained = {name: parameter for name, parameter, _ in trainable_parameters(model)}
    heads = [name for name in trained if "modules_to_save" in name]
    assert len(heads) == 1
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}


@pytest.mark.parametrize("quantized", ["is_loaded_in_4bit", "is_loaded_in_8bit"])
def test_on_a_quantized_base_factors_are_still_trained_in_single_precision(
    place, tmp_path, monkeypatch, quantized
):
    """TRL rounds a LoRA to bfloat16 there: an update of a thousandth would be lost."""
    monkeypatch.setattr(LlamaForCausalLM, quantized, True, raising=False)
    dtypes = []
    make = TextTrainer.__init__

    def made(self, model, *arguments, **options):
        make(self, model, *arguments, **options)
        dtypes.extend(parameter.dtype for _, parameter, _ in trainable_parameters(model))

    monkeypatch.setattr(TextTrainer, "__init__", made)
    finetune(settings(place), tmp_path / "run")
    assert dtypes
    assert set(dtypes) == {torch.float32}


def test_figures_of_sharded_layers_are_those_of_their_whole_factors(place):
    """FSDP2 leaves a process a part of each parameter, which knows the whole; it comes back."""
    model, _ = open_model(settings(place, method="lsr"), place / "base", None)
    with torch.no_grad():
        for _, parameter, _ in trainable_parameters(model):
            parameter.copy_(torch.randn_like(parameter))
    expected = list(layer_figures(model))
    wholes = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.requires_grad:
                part = nn.Parameter(torch.zeros_like(parameter))
                part.full_tensor = parameter.detach
                module._parameters[name] = part
                wholes[id(module), name] = (module, part)
    assert wholes
    assert list(layer_figures(model)) == expected
    assert all(module._parameters[name] is part for (_, name), (module, part) in wholes.items())


class HandMovedClock:
    """`time.perf_counter`, which moves only by what the test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_seconds_of_training_are_those_of_its_steps_over_all_resumptions(monkeypatch):
    """What is evaluated, logged and saved between two steps is not counted."""
    hand = HandMovedClock()
    monkeypatch.setattr(time, "perf_counter", hand)

    def run(clock, events):
        handler = CallbackHandler([clock], None, None, None, None)
        for event, seconds in events:
            hand.now += seconds
            options = {"logs": {}} if event == "on_log" else {}
            options |= {"metrics": {}} if event == "on_evaluate" else {}
            getattr(handler, event)(SimpleNamespace(), TrainerState(), TrainerControl(), **options)

    first = Clock()
    events = [("on_train_begin", 60.0), ("on_step_end", 3.0), ("on_step_end", 2.0)]
    events += [("on_log", 0.5), ("on_evaluate", 50.0), ("on_save", 8.0), ("on_step_end", 4.0)]
    run(first, events)
    assert first.steps == [3.0, 2.0, 4.0]
    assert first.seconds == 9.0
    # Killed here, and taken up from the checkpoint an hour later
    hand.now += 3600.0
    second = Clock.from_state(first.state())
    run(second, [("on_train_begin", 30.0), ("on_step_end", 1.5), ("on_train_end", 9.0)])
    assert second.steps == [1.5]
    assert second.seconds == 10.5


def test_the_record_of_a_run_has_the_seconds_of_the_clock(place, tmp_path, monkeypatch):
    hand = HandMovedClock()
    monkeypatch.setattr(time, "perf_counter", hand)
    take_step = TextTrainer.training_step

    def slow_step(self, *arguments, **options):
        hand.now += 7.0
        return take_step(self, *arguments, **options)

    monkeypatch.setattr(TextTrainer, "training_step", slow_step)
    record = finetune(settings(place, steps=3), tmp_path / "run")
    assert record.wall_seconds == 21.0
    assert record.step_seconds == 7.0
