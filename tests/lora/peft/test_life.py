"""The life of an adapter inside PEFT: open, train, save, reload, merge, switch, delete."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from adapters_support import tiny_bert, token_batch, write_lsr_directory
from peft import AutoPeftModelForSequenceClassification, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file
from transformers import Trainer, TrainingArguments

from lsrdecomp.errors import AdapterNameError, CheckpointError, ShapeError
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.file_checks import bytes_to_open
from lsrdecomp.lora.files.writers.write_lsr import pack_lsr
from lsrdecomp.lora.peft import LsrConfig, LsrLayer

QUERY = "bert.encoder.layer.0.attention.self.query"
DOWN = "bert.encoder.layer.1.output.dense"
MODULES = {QUERY: ((6, 4), (2, 2), (4, 6)), DOWN: ((24, 1), (4, 1), (9, 4))}
TARGETS = {"target_modules": ["query", "value", "dense"]}
NAMES = ["default", "weight", "factor_1x", "lsr", "query", "bert", "a b", "lora_A", "1", "model"]


def logits(model) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(**token_batch()).logits


def trained(config: LsrConfig | None = None, seed: int = 0):
    """A model whose adapter is not zero."""
    torch.manual_seed(seed)
    return get_peft_model(
        tiny_bert(), config or LsrConfig(r=4, separation_rank=3, init_weights=False, **TARGETS)
    )


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((left - right).abs().max() <= 2e-5 * right.abs().max())


@pytest.mark.parametrize("rslora", [False, True])
def test_a_written_directory_opens_as_base_plus_delta(tmp_path, rslora):
    deltas = write_lsr_directory(tmp_path, MODULES, use_rslora=rslora, alpha_pattern={DOWN: 2.0})
    model = PeftModel.from_pretrained(tiny_bert(), tmp_path, is_trainable=True)
    plain = tiny_bert()
    with torch.no_grad():
        for name, delta in deltas.items():
            scaling = (2.0 if name == DOWN else 0.5) / (2 if rslora else 4)
            plain.get_submodule(name).weight += torch.from_numpy(scaling * delta).float()
    assert not same(logits(model), logits(tiny_bert()))
    assert same(logits(model), logits(plain))
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trainable) == 8  # two layers of two sides of two factors
    assert all("lsr_" in name for name in trainable)


@pytest.mark.parametrize("order", [3, 4])
def test_higher_orders_open_too(tmp_path, order):
    sizes = {3: ((2, 3, 4), (2, 1, 2), (4, 3, 2)), 4: ((2, 2, 3, 2), (2, 1, 1, 2), (3, 2, 2, 2))}[
        order
    ]
    deltas = write_lsr_directory(tmp_path, {QUERY: sizes})
    model = PeftModel.from_pretrained(tiny_bert(), tmp_path)
    mine = model.base_model.model.get_submodule(QUERY).get_delta_weight("default").numpy()
    np.testing.assert_allclose(mine, 0.5 / 4 * deltas[QUERY], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load_return_equal_bits_under_any_name(tmp_path, name):
    model = get_peft_model(
        tiny_bert(),
        LsrConfig(r=4, separation_rank=[3, 2], init_weights=False, **TARGETS),
        adapter_name=name,
    )
    expected = logits(model)
    model.save_pretrained(tmp_path)
    folder = tmp_path if name == "default" else tmp_path / name
    for other in ("default", name):
        again = PeftModel.from_pretrained(tiny_bert(), folder, adapter_name=other)
        assert same(logits(again), expected)  # elsewhere in memory BLAS rounds anew
        again.save_pretrained(tmp_path / "again")
        copy = tmp_path / "again" if other == "default" else tmp_path / "again" / other
        first, second = (load_file(path / "adapter_model.safetensors") for path in (folder, copy))
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[key], second[key]) for key in first)


def test_the_saved_file_has_the_agreed_layout(tmp_path):
    trained(
        LsrConfig(r=4, order=3, separation_rank=[3, 2], target_modules=["query"])
    ).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    prefix = f"base_model.model.{QUERY}."
    shapes = {
        key.removeprefix(prefix): value.shape
        for key, value in tensors.items()
        if key.startswith(prefix)
    }
    assert shapes == {
        "lsr_A.factor_1": (2, 2, 4),
        "lsr_A.factor_2": (2, 2, 3),
        "lsr_A.factor_3": (2, 1, 2),
        "lsr_B.factor_1": (3, 4, 2),
        "lsr_B.factor_2": (3, 3, 2),
        "lsr_B.factor_3": (3, 2, 1),
    }
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LSR"
    assert (settings["r"], settings["order"], settings["separation_rank"]) == (4, 3, [3, 2])


@pytest.mark.parametrize("name", ["factor_2", "lsr_A", "lsr_B", "base_layer"])
def test_names_that_hide_parameters_are_refused(name):
    with pytest.raises(AdapterNameError, match=name):
        get_peft_model(tiny_bert(), LsrConfig(**TARGETS), adapter_name=name)


def test_a_missing_factor_is_named(tmp_path):
    write_lsr_directory(tmp_path, MODULES)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    del tensors[f"base_model.model.{DOWN}.lsr_B.factor_2"]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"output.dense.lsr_B.default.factor_2: .* 3 of the 4 tensors"
    ):
        PeftModel.from_pretrained(tiny_bert(), tmp_path)


def test_a_base_of_another_width_is_refused_by_name(tmp_path):
    write_lsr_directory(tmp_path, {QUERY: ((6, 5), (2, 2), (4, 6))})
    with pytest.raises(
        ShapeError, match=f"{QUERY}, output side: 6 x 5 = 30 rows, but the matrix has 24"
    ):
        PeftModel.from_pretrained(tiny_bert(), tmp_path)


@pytest.mark.parametrize("safe_merge", [False, True])
def test_merge_and_unload_is_a_plain_model_with_the_same_logits(safe_merge):
    model = trained()
    expected = logits(model)
    merged = model.merge_and_unload(safe_merge=safe_merge)
    assert not any("lsr" in name for name in merged.state_dict())
    assert same(logits(merged), expected)
    assert not same(expected, logits(tiny_bert()))


def test_merge_adapter_and_back():
    model = trained()
    expected = logits(model)
    model.merge_adapter()
    assert same(logits(model), expected)
    with model.disable_adapter():
        assert same(logits(model), logits(tiny_bert()))
    model.unmerge_adapter()
    assert same(logits(model), expected)


@pytest.fixture
def two_adapters():
    """A model with the adapters "default" and "second", which is active, and the logits of each."""
    model = trained(seed=0)
    first = logits(model)
    config = LsrConfig(r=9, order=2, separation_rank=1, init_weights=False, **TARGETS)
    model.add_adapter("second", config)
    assert torch.equal(logits(model), first)
    model.set_adapter("second")
    return model, first, logits(model)


def test_rows_of_a_batch_go_through_the_adapters_they_name(two_adapters):
    model, first, second = two_adapters
    assert not same(first, second)
    names = ["default", "second", "__base__", "second", "default"]
    with torch.no_grad():
        mixed = model(**token_batch(), adapter_names=names).logits
    assert same(mixed[[0, 4]], first[[0, 4]])
    assert same(mixed[[1, 3]], second[[1, 3]])


def test_a_second_adapter_is_saved_into_a_folder_of_its_name(two_adapters, tmp_path):
    model, _, second = two_adapters
    model.save_pretrained(tmp_path)
    assert same(logits(PeftModel.from_pretrained(tiny_bert(), tmp_path / "second")), second)


def test_a_deleted_adapter_leaves_the_first_as_it_was(two_adapters):
    model, first, _ = two_adapters
    model.delete_adapter("second")
    model.set_adapter("default")
    assert torch.equal(logits(model), first)
    with pytest.raises(ValueError, match="non-existing adapter"):
        model(**token_batch(), adapter_names=["second"] * 5)


def test_modules_to_save_travel_with_the_adapter(tmp_path):
    config = LsrConfig(
        r=4, init_weights=False, modules_to_save=["pooler"], target_modules=["query"]
    )
    model = trained(config)
    with torch.no_grad():
        model.base_model.model.bert.pooler.modules_to_save["default"].dense.weight.mul_(3)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    keys = load_file(tmp_path / "adapter_model.safetensors").keys()
    assert "base_model.model.bert.pooler.dense.weight" in keys
    assert same(logits(PeftModel.from_pretrained(tiny_bert(), tmp_path)), expected)


@pytest.mark.parametrize("bias", ["all", "lsr_only"])
def test_trained_biases_are_saved(tmp_path, bias):
    model = trained(LsrConfig(r=4, init_weights=False, bias=bias, target_modules=["query"]))
    layer = model.base_model.model.get_submodule(QUERY)
    assert layer.bias.requires_grad
    with torch.no_grad():
        layer.bias.add_(1)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert same(logits(PeftModel.from_pretrained(tiny_bert(), tmp_path)), expected)


def test_layer_zero_alone_can_be_chosen():
    model = trained(LsrConfig(r=4, target_modules=["query"], layers_to_transform=0))
    assert model.base_model.targeted_module_names == [QUERY]


def test_the_trainer_trains_the_adapter_alone_and_the_result_reloads(tmp_path):
    write_lsr_directory(tmp_path / "start", MODULES, lsr_alpha=0.1)
    model = PeftModel.from_pretrained(tiny_bert(), tmp_path / "start", is_trainable=True)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    rows = token_batch(32)["input_ids"]
    labels = (rows[:, 1] > 20).long()
    data = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]
    arguments = TrainingArguments(
        tmp_path / "run",
        max_steps=2,
        per_device_train_batch_size=32,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    changed = {
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, before[name])
    }
    assert changed == {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    expected = logits(model)
    trainer.save_model(tmp_path / "end")
    assert same(logits(PeftModel.from_pretrained(tiny_bert(), tmp_path / "end")), expected)


def test_auto_model_opens_an_adapter_by_its_directory(tmp_path):
    base = tiny_bert()
    base.save_pretrained(tmp_path / "base")
    head = {
        f"base_model.model.classifier.{name}": value.numpy()
        for name, value in base.classifier.state_dict().items()
    }
    settings = {"base_model_name_or_path": str(tmp_path / "base"), "task_type": "SEQ_CLS"}
    write_lsr_directory(tmp_path / "adapter", MODULES, extra=head, **settings)
    model = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter")
    assert same(logits(model), logits(PeftModel.from_pretrained(tiny_bert(), tmp_path / "adapter")))


def test_transformers_opens_an_adapter_without_peft_model(tmp_path):
    write_lsr_directory(tmp_path, MODULES)
    expected = logits(PeftModel.from_pretrained(tiny_bert(), tmp_path))
    model = tiny_bert()
    model.load_adapter(str(tmp_path))
    assert same(logits(model), expected)


def test_low_memory_loading_is_the_same(tmp_path):
    write_lsr_directory(tmp_path, MODULES)
    expected = logits(PeftModel.from_pretrained(tiny_bert(), tmp_path))
    model = PeftModel.from_pretrained(tiny_bert(), tmp_path, low_cpu_mem_usage=True)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("rslora", [False, True])
def test_what_peft_saved_is_packed_into_a_fraction(tmp_path, rslora):
    config = LsrConfig(
        r=4, separation_rank=3, lsr_alpha=3, use_rslora=rslora, init_weights=False, **TARGETS
    )
    model = trained(config)
    model.save_pretrained(tmp_path / "saved")
    pack_lsr(open_checkpoint(tmp_path / "saved"), tmp_path / "packed")
    assert same(logits(PeftModel.from_pretrained(tiny_bert(), tmp_path / "packed")), logits(model))
    saved, packed = (
        bytes_to_open(tmp_path / name / "adapter_model.safetensors") for name in ("saved", "packed")
    )
    numbers = 4 * open_checkpoint(tmp_path / "saved").adapter_parameters
    assert packed - numbers < 0.2 * (saved - numbers)
    assert "shape_pattern" not in json.loads(
        (tmp_path / "packed" / "adapter_config.json").read_text()
    )


def test_packed_modules_named_in_full_are_in_the_index_alone(tmp_path):
    model = trained(LsrConfig(r=4, init_weights=False, target_modules=[QUERY, DOWN]))
    model.save_pretrained(tmp_path / "saved")
    pack_lsr(open_checkpoint(tmp_path / "saved"), tmp_path / "packed")
    assert "target_modules" not in json.loads(
        (tmp_path / "packed" / "adapter_config.json").read_text()
    )
    assert same(logits(PeftModel.from_pretrained(tiny_bert(), tmp_path / "packed")), logits(model))


def test_casting_of_inputs_can_be_left_to_others():
    """`disable_input_dtype_casting` ended in AttributeError; diffusers enters it."""
    from peft.helpers import disable_input_dtype_casting

    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(12, 8), torch.nn.Embedding(5, 6), torch.nn.Conv1d(2, 4, 3)
    )
    model = get_peft_model(
        layers, LsrConfig(r=2, target_modules=["0", "1", "2"], init_weights=False)
    )
    wrapped = [module for module in model.modules() if isinstance(module, LsrLayer)]
    assert len(wrapped) == 3
    x = torch.randn(3, 12)
    expected = wrapped[0](x)
    with disable_input_dtype_casting(model):
        assert not any(layer.cast_input_dtype_enabled for layer in wrapped)
        assert torch.equal(wrapped[0](x), expected)
    assert all(layer.cast_input_dtype_enabled for layer in wrapped)
