"""Fine-tuning on the embedded digits: recorded whole, resumed after a kill, blind to dev."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
pytest.importorskip("trl")
pytest.importorskip("sklearn")

import processes  # noqa: E402
from adapters_support import tiny_bert, token_batch  # noqa: E402
from console import run_command  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402
from transformers import Trainer  # noqa: E402

from benchmarks.lab.embedded import EmbeddedRecipe, embedded  # noqa: E402
from lsrdecomp import compress  # noqa: E402
from lsrdecomp.errors import BudgetError, CheckpointError, LsrError  # noqa: E402
from lsrdecomp.lora.files import open_checkpoint  # noqa: E402
from lsrdecomp.lora.files.packed import NUMBERS  # noqa: E402
from lsrdecomp.lora.files.packed_index import split_tensor  # noqa: E402
from lsrdecomp.lora.peft import LsrConfig  # noqa: E402
from lsrdecomp.lora.search.layers import layer_product  # noqa: E402
from lsrdecomp.lora.search.plan import CompressionPlan, Search  # noqa: E402
from lsrdecomp.lora.train.finetune_record import read_record  # noqa: E402
from lsrdecomp.lora.train.finetune_run import evaluate, finetune  # noqa: E402
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings, SettingsError  # noqa: E402
from lsrdecomp.lora.train.labelled import LabelledExample, Labels  # noqa: E402
from lsrdecomp.lora.train.run_data import read_dataset, score_outputs  # noqa: E402
from lsrdecomp.lora.train.saving import save_adapter  # noqa: E402
from lsrdecomp.lora.train.trainable_model import open_model  # noqa: E402
from lsrdecomp.lora.train.trainer import (  # noqa: E402
    FullBatchSampler,
    TaskTrainer,
    evaluation_arguments,
    learning_rates,
)

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    return embedded(tmp_path_factory.mktemp("embedded") / "small", recipe=EmbeddedRecipe(steps=40))


@pytest.fixture(scope="session")
def common(place):
    """Settings of a short run."""
    return FinetuneSettings(
        str(place.model),
        str(place.data / "train.tsv"),
        "classes",
        str(place.data / "dev.tsv"),
        method="lsr",
        learning_rate=0.01,
        steps=24,
        device="cpu",
        log_every=6,
        dev_examples=120,
    )


@pytest.fixture(scope="session")
def finished(common, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, finetune(common.replace(measure_start=True), out)


@pytest.fixture(scope="session")
def lora(common, tmp_path_factory):
    """A trained LoRA, and the record of its run."""
    out = tmp_path_factory.mktemp("lora") / "run"
    record = finetune(common.replace(method="lora", options={"r": 2}), out)
    return out / "adapter", record


def test_the_record_says_how_a_run_went(finished):
    out, record = finished
    assert read_record(out) == record
    assert record.dev != record.start
    assert set(record.baseline) >= {"accuracy"}
    assert set(record.dev.metrics) == {"accuracy", "macro_f1", "matthews"}
    assert (record.steps, record.dev.examples, record.train_examples) == (24, 120, 600)
    assert [step for step, _ in record.losses] == [6, 12, 18, 24]
    tensors = load_file(out / "adapter" / WEIGHTS)
    head = [name for name in tensors if "classifier" in name]
    assert record.head_parameters == sum(tensors[name].size for name in head) == 650
    assert sorted(set(tensors) - set(head)) == [NUMBERS]  # float32, all layers packed
    numbers, _ = split_tensor(tensors[NUMBERS])
    assert record.adapter_parameters == numbers.size / 4 == 4 * 2 * 4 * (8 * 2 + 8 * 2)
    assert record.adapter_bytes == tensors[NUMBERS].size
    assert record.file_bytes == (out / "adapter" / WEIGHTS).stat().st_size
    assert record.versions["torch"] == torch.__version__
    assert sorted(path.name for path in out.iterdir()) == ["adapter", "layers.jsonl", "record.json"]
    assert [path.name for path in out.parent.iterdir()] == ["run"]


def test_what_was_written_answers_as_what_was_trained(finished, common):
    out, record = finished
    assert evaluate(common.replace(init=str(out / "adapter"))) == record.dev


def test_an_existing_output_is_not_touched(finished, common):
    with pytest.raises(CheckpointError, match="run: already exists"):
        finetune(common, finished[0])


def test_the_log_of_layers_agrees_with_the_written_adapter(finished):
    out, _ = finished
    lines = [json.loads(line) for line in (out / "layers.jsonl").read_text().splitlines()]
    assert Counter(line["step"] for line in lines) == dict.fromkeys([0, 6, 12, 18, 24], 4)
    assert all(
        line["norm"] == 0.0 and line["lsr_B"]["condition"] is None
        for line in lines
        if line["step"] == 0
    )
    products = {layer.name: layer for layer in open_checkpoint(out / "adapter").layers}
    for line in lines[-4:]:
        left, right = layer_product(products[line["layer"]]).to_lora()
        assert line["norm"] == pytest.approx(float(np.linalg.norm(left @ right)), rel=1e-4)
        assert line["lsr_A"]["weights"] == sorted(line["lsr_A"]["weights"], reverse=True)
        assert len(line["lsr_A"]["weights"]) == 4
        assert line["lsr_B"]["condition"] >= 0.5  # γ ≥ 1/√s


def test_factors_that_start_at_zero_hurry_and_the_head_has_its_own_rate(common, place):
    settings = common.replace(head_learning_rate=0.5, zero_init_lr_factor=4.0)
    found = learning_rates(open_model(settings, place.model, 10)[0], settings)
    fast = {name for name, rate in found.items() if rate == pytest.approx(0.04)}
    assert len(fast) == 4
    assert all("lsr_B" in name for name in fast)
    assert {rate for name, rate in found.items() if "classifier" in name} == {0.5}
    plain = common.replace(method="lora")
    assert set(learning_rates(open_model(plain, place.model, 10)[0], plain).values()) == {0.01}


def test_whole_batches_hold_every_example_and_like_lengths():
    lengths = np.random.default_rng(0).integers(1, 100, 250)
    sampler = FullBatchSampler(lengths, 32, seed=3)
    order = list(sampler)
    assert len(order) == len(sampler) == 256
    assert set(order) == set(range(250))
    assert max(Counter(order).values()) == 2
    batches = np.array(order).reshape(-1, 32)
    assert np.ptp(lengths[batches], axis=1).max() < 30
    assert list(FullBatchSampler(lengths, 32, seed=3)) == order
    sampler.epoch = 1
    assert list(sampler) != order
    assert list(FullBatchSampler(lengths, 32, seed=4)) != order
    assert len(list(FullBatchSampler(lengths[:5], 32, seed=0))) == 32  # fewer examples than a batch


def train_until_killed(settings, out):
    def stop(step):
        if step.done == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    finetune(settings, out, on_step=stop)


def test_a_killed_run_goes_on_and_ends_as_an_uninterrupted_one(common, tmp_path):
    # 5 steps an epoch: the kill is within the second
    settings = common.replace(steps=12, save_every=3, log_every=3, train_examples=150)
    killed = processes.start_process(train_until_killed, settings, tmp_path / "out")
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == [".out.journal"]
    (run,) = (path for path in (tmp_path / ".out.journal").iterdir() if path.is_dir())
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        "checkpoint-3",
        "checkpoint-6",
    }
    (run / "checkpoints" / "checkpoint-7").mkdir()  # what a kill while saving leaves
    with (run / "layers.jsonl").open("a") as log:
        log.write('{"step": 8, "la')

    def stop(step):
        seen.append(step.done)
        raise KeyboardInterrupt

    seen = []
    # With other settings: from its first step, and nothing of this run goes.
    with pytest.raises(KeyboardInterrupt):
        finetune(settings.replace(learning_rate=0.02), tmp_path / "out", on_step=stop)
    assert seen == [1]
    seen.clear()
    record = finetune(settings, tmp_path / "out", on_step=lambda step: seen.append(step.done))
    assert seen == list(range(7, 13))
    whole = finetune(settings.replace(save_every=0), tmp_path / "whole")
    # Equal up to rounding: a loaded tensor may lie at another address, and products are then summed
    # otherwise.
    assert [step for step, _ in record.losses] == [step for step, _ in whole.losses]
    assert [loss for _, loss in record.losses] == pytest.approx(
        [loss for _, loss in whole.losses], rel=1e-5
    )
    assert record.dev.loss == pytest.approx(whole.dev.loss, rel=1e-5)
    logs = [
        (tmp_path / name / "layers.jsonl").read_text().splitlines() for name in ("out", "whole")
    ]
    assert [json.loads(line)["step"] for line in logs[0]] == [
        json.loads(line)["step"] for line in logs[1]
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_early_stopping_keeps_the_best_and_never_looks_at_dev(common, tmp_path):
    settings = common.replace(
        patience=2, evaluate_every=2, steps=10, learning_rate=0.05, validation=0.2, log_every=0
    )
    settings = settings.replace(train_examples=200)
    first = finetune(settings, tmp_path / "first")
    other = finetune(settings.replace(dev_examples=20), tmp_path / "other")
    assert first.train_examples == 160
    assert first.validation.examples == 40
    assert first.best_step == other.best_step
    assert first.best_step <= first.steps - 2 * 2 or first.steps == 10
    assert first.validation == other.validation
    assert (first.dev.examples, other.dev.examples) == (120, 20)


def test_what_is_written_is_the_best_step_and_not_the_last(common, tmp_path, monkeypatch):
    loop = Trainer.evaluation_loop

    def worse_each_time(trainer, *given, **named):
        output = loop(trainer, *given, **named)
        output.metrics["eval_loss"] = float(trainer.state.global_step)
        return output

    monkeypatch.setattr(Trainer, "evaluation_loop", worse_each_time)
    settings = common.replace(patience=2, evaluate_every=3, validation=0.2, log_every=3)
    record = finetune(settings, tmp_path / "out")
    assert (record.best_step, record.steps) == (3, 9)
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "layers.jsonl").read_text().splitlines()
    ]
    written = open_checkpoint(tmp_path / "out" / "adapter")
    for line in (line for line in lines if line["step"] == 3):
        norm = np.linalg.norm(layer_product(written.layer(line["layer"])).to_matrix())
        assert line["norm"] == pytest.approx(float(norm), rel=1e-4)


def test_training_goes_on_from_an_adapter_as_it_is(finished, common, tmp_path):
    out, record = finished
    settings = common.replace(init=str(out / "adapter"), steps=2, measure_start=True)
    more = finetune(settings, tmp_path / "more")
    assert more.start == record.dev
    with pytest.raises(SettingsError, match="is LSR, not of method lora"):
        finetune(settings.replace(method="lora"), tmp_path / "no")
    with pytest.raises(SettingsError, match="is LSR, not of method lsr-dora"):
        finetune(settings.replace(method="lsr-dora"), tmp_path / "no")
    assert [path.name for path in tmp_path.iterdir()] == ["more"]


def test_a_compressed_lora_starts_where_its_compression_left_it(common, lora, tmp_path):
    adapter, record = lora
    compressed = compress(open_checkpoint(adapter), CompressionPlan(separation_rank=16))
    compressed.save(tmp_path / "lsr")
    start = evaluate(common.replace(init=str(tmp_path / "lsr")))
    more = finetune(
        common.replace(init=str(tmp_path / "lsr"), measure_start=True, steps=4), tmp_path / "more"
    )
    assert more.start == start
    assert start.loss == pytest.approx(record.dev.loss, rel=1e-3)  # so many terms are the LoRA


def test_a_lora_is_compressed_by_its_task_and_trained_on_in_one_run(common, lora, tmp_path):
    adapter, lora = lora
    of_task = {"train_examples": 60, "dev_examples": 20}
    settings = common.replace(init=str(adapter), ratio=8.0, steps=4, measure_start=True, **of_task)
    record = finetune(settings, tmp_path / "lsr")
    assert sorted(path.name for path in (tmp_path / "lsr").iterdir()) == [
        "adapter",
        "layers.jsonl",
        "record.json",
    ]
    assert record.settings == settings.replace(gradient_checkpointing=False, precision="float32")
    assert 0 < 8 * record.adapter_parameters <= lora.adapter_parameters
    assert record.start == evaluate(settings)
    assert record.start != record.dev
    assert open_checkpoint(tmp_path / "lsr" / "adapter").layers[0].parameters
    assert NUMBERS in load_file(tmp_path / "lsr" / "adapter" / "adapter_model.safetensors")
    with pytest.raises(SettingsError, match="give init, and no method but lsr"):
        common.replace(ratio=8.0)
    with pytest.raises(SettingsError, match="give init, and no method but lsr"):
        settings.replace(method="lora")
    with pytest.raises(BudgetError, match="nothing of the adapter fits"):
        finetune(settings.replace(ratio=1e6), tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("plan", "apart"),
    [
        (CompressionPlan(bytes=3500, storage="auto"), 0.5),
        (CompressionPlan(separation_rank=4, storage="int4"), 0.3),
    ],
    ids=["components", "products"],
)
def test_what_is_trained_on_stays_in_the_bits_it_came_in(common, lora, tmp_path, plan, apart):
    start = compress(open_checkpoint(lora[0]), plan).save(tmp_path / "small")
    storages = {layer.name: layer.dtype for layer in open_checkpoint(start).layers}
    assert all(storage.startswith("int") for storage in storages.values())
    settings = common.replace(init=str(start), steps=4)
    record = finetune(settings, tmp_path / "more")
    trained = open_checkpoint(tmp_path / "more" / "adapter")
    assert {layer.name: layer.dtype for layer in trained.layers} == storages
    sizes = []
    for directory in (start, tmp_path / "more" / "adapter"):
        numbers, _ = split_tensor(load_file(directory / WEIGHTS)[NUMBERS])
        sizes.append(numbers.size)
    assert sizes[0] == sizes[1]
    # What was written is judged.
    assert record.dev == evaluate(settings.replace(init=str(tmp_path / "more" / "adapter")))
    wide = finetune(settings.replace(storage="float32"), tmp_path / "wide")
    assert {layer.dtype for layer in open_checkpoint(tmp_path / "wide" / "adapter").layers} == {
        "float32"
    }
    assert wide.dev != record.dev
    for layer in open_checkpoint(tmp_path / "wide" / "adapter").layers:
        exact, rounded = (
            layer_product(each).to_matrix() for each in (layer, trained.layer(layer.name))
        )
        assert np.linalg.norm(rounded - exact) < apart * np.linalg.norm(exact)


@pytest.mark.parametrize("storage", ["int4", "bfloat16"])
def test_lsr_is_written_in_the_storage_asked_for(common, lora, tmp_path, storage):
    settings = common.replace(storage=storage, steps=2)
    record = finetune(settings, tmp_path / "run")
    assert {layer.dtype for layer in open_checkpoint(tmp_path / "run" / "adapter").layers} == {
        storage
    }
    assert record.dev == evaluate(settings.replace(init=str(tmp_path / "run" / "adapter")))
    low_rank = compress(
        open_checkpoint(lora[0]), CompressionPlan(ratio=2.0), search=Search(orders=())
    )
    settings = settings.replace(init=str(low_rank.save(tmp_path / "low-rank")))
    finetune(settings, tmp_path / "again")
    assert {layer.dtype for layer in open_checkpoint(tmp_path / "again" / "adapter").layers} == {
        storage
    }
    with pytest.raises(
        SettingsError, match=f"storage {storage} is of LSR's factors: method is lora"
    ):
        common.replace(method="lora", storage=storage)


def test_the_head_alone(common, tmp_path, place):
    record = finetune(common.replace(method="head", steps=4), tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "adapter" / WEIGHTS)
    assert record.adapter_parameters == record.adapter_bytes == 0
    assert record.head_parameters == sum(tensor.size for tensor in tensors.values()) == 650
    base = load_file(place.model / "model.safetensors")
    head = tensors["base_model.model.classifier.weight"]
    assert not np.array_equal(head, base["classifier.weight"])
    frozen = common.replace(
        head=str(tmp_path / "head" / "adapter"), train_head=False, steps=4, measure_start=True
    )
    adapted = finetune(frozen, tmp_path / "frozen")
    assert adapted.head_parameters == 0
    assert adapted.start == record.dev
    kept = load_file(tmp_path / "frozen" / "adapter" / WEIGHTS)
    assert np.array_equal(kept["base_model.model.classifier.weight"], head)
    with pytest.raises(CheckpointError, match="no such file"):
        finetune(frozen.replace(head=str(tmp_path)), tmp_path / "no")


def test_a_lost_run_is_said_to_be_lost(common, tmp_path):
    record = finetune(
        common.replace(method="lora", learning_rate=1e30, log_every=2), tmp_path / "out"
    )
    assert record.dev.loss is None
    assert record.steps < 24
    assert read_record(tmp_path / "out") == record


def test_gradient_checkpointing_changes_nothing_and_bfloat16_little(common, tmp_path):
    settings = common.replace(steps=2, log_every=1, dev_examples=20)
    record = finetune(settings, tmp_path / "plain")
    recomputed = finetune(settings.replace(gradient_checkpointing=True), tmp_path / "recomputed")
    assert [loss for _, loss in recomputed.losses] == pytest.approx(
        [loss for _, loss in record.losses], rel=1e-4
    )
    for precision in ("bfloat16", "bfloat16-autocast"):
        coarse = finetune(settings.replace(precision=precision), tmp_path / precision)
        assert coarse.losses[0][1] == pytest.approx(record.losses[0][1], rel=0.1)
        assert coarse.losses != record.losses


@pytest.mark.parametrize(
    ("logits", "labels", "loss"),
    [
        ([[1.0], [3.0]], [0.0, 0.0], (1.0 + 9.0) / 2),
        ([[0.0], [math.log(3.0)], [0.0], [0.0]], [1, 0], (math.log(4 / 3) + math.log(2.0)) / 2),
        ([[0.0, math.log(3.0)], [0.0, 0.0]], [1, 0], (math.log(4 / 3) + math.log(2.0)) / 2),
    ],
    ids=["scores", "choices", "classes"],
)
def test_the_loss_is_the_mean_over_the_examples(logits, labels, loss):
    trainer = TaskTrainer.__new__(TaskTrainer)
    answers = SimpleNamespace(logits=torch.tensor(logits))
    assert float(
        trainer.compute_loss(lambda: answers, {"labels": torch.tensor(labels)})
    ) == pytest.approx(loss)


def test_the_optimizer_has_a_group_for_each_rate_and_decays_no_vector(common, tmp_path):
    trainer = TaskTrainer.__new__(TaskTrainer)
    trainer.args = evaluation_arguments(common, tmp_path, weight_decay=0.3)
    trainer.model, trainer.optimizer = torch.nn.Linear(3, 2), None
    trainer.learning_rates = {"weight": 0.1, "bias": 0.2}
    optimizer = trainer.create_optimizer()
    groups = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert groups == [(0.1, 0.3), (0.2, 0.0)]
    assert optimizer is trainer.optimizer is trainer.create_optimizer()


def data(file, rows):
    """Settings of a run whose training and dev examples are these rows."""
    file.write_text("\n".join(map(json.dumps, rows)))
    return {"data": str(file), "dev_data": str(file)}


def test_scores_and_choices_are_learnt_too(common, tmp_path):
    """Small steps down the gradient of all examples lower the loss, whatever the base."""
    pairs = [
        {"text": f"{a} {a} {a}", "second": f"{b} {b} {b}", "label": 5 - abs(a - b) / 99}
        for a in range(0, 16, 2)
        for b in range(0, 16, 3)
    ]
    files = data(tmp_path / "pairs.jsonl", pairs)
    settings = common.replace(**files, task="scores", steps=4, max_length=16, measure_start=True)
    settings = settings.replace(batch=len(pairs), learning_rate=1e-3)
    record = finetune(settings, tmp_path / "scores")
    assert record.dev.loss < record.start.loss
    assert record.dev.accuracy is None
    assert set(record.dev.metrics) == {"pearson", "spearman"}
    assert record.head_parameters == 65
    choice = {"text": "3", "choices": ["3 3", "16 0 16"], "label": 0}
    flipped = {**choice, "choices": choice["choices"][::-1], "label": 1}
    files = data(tmp_path / "choices.jsonl", [choice, flipped] * 10)
    record = finetune(settings.replace(**files, task="classes", batch=20), tmp_path / "choices")
    assert record.dev.loss < record.start.loss
    assert set(record.dev.metrics) == {"accuracy"}
    assert record.head_parameters == 65


FAKE_BOARD = """
import itertools
from pathlib import Path
numbers = itertools.count()
class SummaryWriter:
    def __init__(self, log_dir=None):
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        self.path = Path(log_dir, f"events.out.tfevents.{next(numbers)}")
        self.file = self.path.open("w")
    def add_scalar(self, key, value, step):
        self.file.write(f"{key} {step}\\n")
    def add_text(self, *arguments): pass
    def flush(self): self.file.flush()
    def close(self): self.file.close()
"""


def test_events_of_a_run_are_one_file(common, tmp_path, monkeypatch):
    """They were written below the journal and deleted; evaluations began files elsewhere."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "tensorboardX.py").write_text(FAKE_BOARD)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.chdir(tmp_path)
    logs = tmp_path / "logs"
    settings = common.replace(logs=str(logs), steps=4, log_every=2, measure_start=True)
    settings = settings.replace(patience=9, evaluate_every=2)
    finetune(settings, tmp_path / "out")
    (file,) = tmp_path.rglob("events*")
    assert file.parent == logs
    logged = [line.split() for line in file.read_text().splitlines()]
    entries = {(f"{part}/loss", step) for part in ("train", "eval") for step in ("2", "4")}
    assert entries <= {*map(tuple, logged)}
    evaluate(settings.replace(init=str(tmp_path / "out" / "adapter")))
    assert len([*tmp_path.rglob("events*")]) == 1


def test_what_cannot_be_trained_is_refused_by_name(common, tmp_path, monkeypatch):
    with pytest.raises(
        SettingsError, match=r"lsr on nothing_like_it does not fit .*No modules were targeted"
    ):
        finetune(common.replace(target_modules=("nothing_like_it",)), tmp_path / "no")
    with pytest.raises(SettingsError, match="c3a"):
        finetune(common.replace(method="c3a", options={"block_size": 7}), tmp_path / "no")
    module = sys.modules["lsrdecomp.lora.train.finetune_run"]
    monkeypatch.setattr(module, "is_tensorboard_available", lambda: False)
    with pytest.raises(SettingsError, match="TensorBoard is not installed: pip install tensorbo"):
        finetune(common.replace(logs="logs", data="no/such/place"), tmp_path / "no")
    if not torch.cuda.is_available():
        with pytest.raises(SettingsError, match="device is cuda, but torch sees none"):
            finetune(common.replace(device="cuda"), tmp_path / "no")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        LsrError, match=r"a base in 4 bits needs bitsandbytes: .* pip install -e '\.\[quantized\]'"
    ):
        finetune(common.replace(method="qlsr"), tmp_path / "no")
    assert list(tmp_path.iterdir()) == []


def test_a_base_in_four_bits_keeps_its_head_whole(common, place):
    pytest.importorskip("bitsandbytes", reason="bases in 4 bits are its")
    model, _ = open_model(common.replace(method="qlsr"), place.model, 10)
    types = {name: type(module).__name__ for name, module in model.named_modules()}
    assert model.config.quantization_config.bnb_4bit_quant_type == "nf4"
    assert "Linear4bit" in types.values()
    assert {types[name] for name in types if name.endswith(".original_module")} == {"Linear"}


def test_texts_are_cut_to_what_the_base_can_read(common, place):
    _, tokenizer = open_model(common, place.model, 10)
    long = LabelledExample(((" ".join(["3"] * 90), None),), 3.0)
    for length, width in ((128, 17), (9, 9)):
        collator = read_dataset(common.replace(max_length=length)).collator(tokenizer)
        assert collator([long])["input_ids"].shape == (1, width)


def test_judging_by_definition():
    outputs, labels = np.log([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]]), np.array([0, 0, 0])
    scores = score_outputs(Labels(("0", "1")), outputs, labels)
    assert scores.loss == pytest.approx(-(math.log(0.5) + math.log(0.9) + math.log(0.2)) / 3)
    assert scores.accuracy == pytest.approx(2 / 3)
    assert score_outputs(
        Labels(), np.array([[1.0], [3.0]]), np.array([0.0, 5.0])
    ).loss == pytest.approx(2.5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_answers_that_are_not_finite_count_as_class_0_or_score_0_and_have_no_loss(bad):
    outputs, labels = np.array([[-3.0, bad], [bad, -3.0], [0.0, 1.0]]), np.array([0, 0, 1])
    scores = score_outputs(Labels(("0", "1")), outputs, labels)
    assert (scores.accuracy, scores.loss) == (1.0, None)
    numbers = np.array([0.0, 1.0, 2.0])
    scores = score_outputs(Labels(), np.array([[bad], [1.0], [2.0]]), numbers)
    assert scores.metrics == score_outputs(Labels(), numbers[:, None], numbers).metrics
    assert scores.loss is None


def test_the_verb_in_a_process_of_its_own(place, tmp_path, capfd):
    config = tmp_path / "run.toml"
    config.write_text(
        f'base = "{place.model}"\ntask = "classes"\ndata = "{place.data}/train.tsv"\nsteps = 9\n'
        'device = "cpu"\n'
    )
    order = ("finetune", "--config", config, "--method", "lora", "--option", "r=2", "--steps", 2)
    verb = processes.start_process(processes.run_command_here, *order, "--out", tmp_path / "out")
    verb.join()
    printed, errors = capfd.readouterr()
    assert verb.exitcode == 0, errors
    assert "Traceback" not in errors  # a line a minute may stand there, on a busy machine
    assert "lora: 1,024 parameters in 4,096 bytes, and 650 in the head" in printed
    assert "2 steps at a learning rate of 0.014 in" in printed  # LoRA's, of rank 2 and 64 inputs
    assert "majority" in printed
    record = read_record(tmp_path / "out")
    assert (record.steps, dict(record.settings.options)) == (2, {"r": 2})
    assert f"{record.dev.metrics['accuracy']:.4f}" in printed


def test_the_verb_refuses_in_one_line(tmp_path):
    given = ("--base", "base", "--data", __file__, "--out", tmp_path / "out")
    for wrong, message in (
        (("--learning-rate", "-1"), "must be a number above 0, or auto, got -1"),
        (("--method", "nora"), "method must be one of lora, rslora"),
        (("--config", tmp_path / "none.toml"), "none.toml"),
        (("--out", tmp_path), "already exists"),
    ):
        done = run_command("finetune", *given, *wrong)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert message in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_processes_train_as_one_at_the_same_global_batch(common, tmp_path):
    config = tmp_path / "run.toml"
    values = {
        name: value for name, value in common.to_json().items() if value not in (None, {}, [])
    }
    config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--main_process_port",
        "0",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "-m",
        "lsrdecomp.cli.main",
    ]
    command = [*launch, "finetune", "--config", str(config), "--out", str(tmp_path / "two")]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Wrote") == 1
    two, one = read_record(tmp_path / "two"), finetune(common, tmp_path / "one")
    assert (two.processes, one.processes) == (2, 1)
    assert [loss for _, loss in two.losses] == pytest.approx(
        [loss for _, loss in one.losses], rel=1e-5
    )
    assert two.dev.loss == pytest.approx(one.dev.loss, rel=1e-5)
    assert two.dev.metrics == one.dev.metrics


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-autocast"])
def test_auto_takes_the_cpu_where_there_is_nothing_else(precision, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    settings = FinetuneSettings.from_mapping(
        {"base": "base", "data": "train.tsv", "task": "classes", "precision": precision}
    )
    assert settings.device == "auto"
    arguments = []
    monkeypatch.setattr(
        "lsrdecomp.lora.train.trainer.TrainingArguments", lambda **given: arguments.append(given)
    )
    evaluation_arguments(settings, tmp_path)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    evaluation_arguments(settings, tmp_path)
    assert [each["use_cpu"] for each in arguments] == [True, False]


def test_a_metric_that_cannot_be_computed_is_refused_before_training(common, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    steps = []
    with pytest.raises(
        LsrError, match=r"scoring labels needs sklearn: .* pip install -e '\.\[finetune\]'"
    ):
        finetune(common, tmp_path / "run", on_step=steps.append)
    assert not steps
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_that_cannot_be_packed_is_saved_as_peft_does(tmp_path, dora):
    settings = {"target_modules": ["query"], "init_weights": False, "use_dora": dora}
    model = peft.get_peft_model(tiny_bert(), LsrConfig(r=4, separation_rank=2, **settings))
    save_adapter(model, tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    stored = list(load_file(tmp_path / "adapter" / WEIGHTS))
    assert (
        any(key.endswith("lsr_magnitude_vector") for key in stored) if dora else stored == [NUMBERS]
    )
    again = peft.PeftModel.from_pretrained(tiny_bert(), tmp_path / "adapter")
    with torch.no_grad():
        answers = [each.eval()(**token_batch()).logits for each in (model, again)]
    assert torch.allclose(*answers, atol=1e-6)


@pytest.mark.parametrize("storage", [None, "int4"])
def test_a_lost_run_of_lsr_in_bits_is_said_to_be_lost_too(common, lora, tmp_path, storage):
    plan = CompressionPlan(separation_rank=4, storage="int4" if storage is None else "float32")
    start = compress(open_checkpoint(lora[0]), plan).save(tmp_path / "small")
    settings = common.replace(init=str(start), storage=storage, learning_rate=1e30, log_every=2)
    record = finetune(settings, tmp_path / "out")
    assert record.dev.loss is None
    assert read_record(tmp_path / "out") == record
