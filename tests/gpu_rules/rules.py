"""Every road that takes a device, on a GPU that is pretended: where tensors lie, and the waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from peft import get_peft_model, set_peft_model_state_dict
from pretended_gpu import NAME, GpuTensor, pretended_gpu
from tiny_bases import TEXTS, write_directories
from tiny_language_model import make_base, make_lora, tiny_model, write_rows

import lsrdecomp as lsr
from lsrdecomp.lora.base.batches import prompt_batches, text_batches
from lsrdecomp.lora.base.calibrate import calibrate
from lsrdecomp.lora.base.dataset import read_examples
from lsrdecomp.lora.base.divergence import Reference
from lsrdecomp.lora.base.open_bases import load_base
from lsrdecomp.lora.compress.distill_lora import distill
from lsrdecomp.lora.compress.distill_settings import DistillSettings
from lsrdecomp.lora.peft import to_lora
from lsrdecomp.lora.search.measured_settings import MeasuredSettings
from lsrdecomp.lora.train import compressed_start
from lsrdecomp.lora.train.finetune_run import finetune
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings
from lsrdecomp.lora.train.methods import adapter_config


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A classifier with its LoRA, and an LSR adapter made of that."""
    return write_directories(tmp_path_factory.mktemp("classifier"), "SEQ_CLS", layers=1)


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """A language model with its LoRA, and prompts."""
    folder = tmp_path_factory.mktemp("language")
    make_base(folder, layers=1)
    make_lora(folder, layers=1)
    write_rows(folder / "rows.jsonl")
    plan = {"ratio": 2, "structure": "lsr", "storage": "float32"}
    lsr.compress(folder / "lora", **plan).save(folder / "lsr")
    return folder


@pytest.fixture
def gpu():
    with pretended_gpu() as device:
        yield device


def batches(base, folder, size=8):
    """Return batches of the rows of a folder, or of texts for a classifier."""
    if (folder / "rows.jsonl").exists():
        return list(prompt_batches(base, read_examples(folder / "rows.jsonl"), size=size, seed=0))
    return list(text_batches(base, TEXTS, size=size, seed=0))


def test_the_device_keeps_the_rules_of_a_gpu(gpu):
    values = torch.ones(2, 3, device=NAME)
    assert values.device == torch.device(NAME, 0)
    with pytest.raises(RuntimeError, match=r"two devices, pretended:0 and cpu, in add"):
        values + torch.ones(2, 3)
    with pytest.raises(TypeError, match="to numpy"):
        np.asarray(values)
    assert sum(gpu.waits.values()) == 0
    assert float(values.sum()) == 6.0
    assert values.tolist() == [[1.0] * 3] * 2
    assert values[values > 0].shape == (6,)
    assert values.cpu().numpy().shape == (2, 3)
    assert sum(gpu.waits.values()) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 3},
        {"rtol": 0.1},
        {"rank": 3, "shape": "2x3, 3x2, 4x5"},
        {"rank": 3, "non_negative": True},
        {"rank": 3, "storage": "int8"},
    ],
    ids=str,
)
def test_a_matrix_on_the_device_is_decomposed_there(options, gpu, rng):
    matrix = rng.random((24, 30))
    options = {"shape": "4x5, 6x6"} | options
    on_cpu = lsr.decompose(torch.from_numpy(matrix), **options)
    found = lsr.decompose(torch.from_numpy(matrix).to(NAME), **options)
    assert all(isinstance(factor, GpuTensor) for factor in found.factors)
    assert isinstance(found @ torch.ones(30, dtype=torch.float64, device=NAME), GpuTensor)
    assert found.relative_error == pytest.approx(on_cpu.relative_error, rel=1e-6)


def test_a_search_on_the_device_finds_what_one_on_the_cpu_does(gpu, language):
    plan = {"ratio": 3, "structure": "lsr", "storage": "float32"}
    on_cpu = lsr.compress(language / "lora", **plan)
    found = lsr.compress(language / "lora", device=NAME, **plan)
    assert gpu.operations["bmm"] > 0
    assert found.totals.relative_error == pytest.approx(on_cpu.totals.relative_error, rel=1e-4)


def growth(first, second, count):
    """Return by how much waits grew for each of ``count`` more batches or steps."""
    found = {place: (second[place] - first.get(place, 0)) / count for place in second}
    return {place: grown for place, grown in found.items() if grown}


PROBE = "equal at lora/base/forward.py"
"""Of a language model: whether its logits are what its output layer gives."""


@pytest.mark.parametrize("kind", ["classifier", "language"])
def test_calibration_waits_once_a_batch(kind, gpu, tmp_path, request):
    folder = request.getfixturevalue(kind)
    base = load_base(folder / "base", folder / "lora", device=NAME)
    waits, found, counts = {}, {}, {}
    for size in (8, 4):
        data = batches(base, folder, size)
        gpu.waits.clear()
        found[size] = calibrate(
            base, data, out=tmp_path / f"{size}", seed=0, samples=1000, save_every=1000
        )
        waits[size] = gpu.own_waits
        counts[size] = len(data)
    grown = growth(waits[8], waits[4], counts[4] - counts[8])
    likelihood = {"_to_copy at lora/base/calibrate.py": 1}
    assert grown == likelihood | ({PROBE: 2} if kind == "language" else {})
    # The same as on the CPU.
    base = load_base(folder / "base", folder / "lora")
    on_cpu = calibrate(base, batches(base, folder, 4), out=tmp_path / "cpu", seed=0, samples=1000)
    assert found[4].metadata["effect"] == pytest.approx(on_cpu.metadata["effect"], rel=1e-4)
    for name in on_cpu:
        values = found[4].measured(name).output.values
        assert values == pytest.approx(on_cpu.measured(name).output.values, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("kind", ["classifier", "language"])
def test_comparison_waits_at_its_end(kind, gpu, request):
    folder = request.getfixturevalue(kind)
    kept = {}
    for device in ("cpu", NAME):
        source = load_base(folder / "base", folder / "lora", device=device)
        small = load_base(folder / "base", folder / "lsr", device=device)
        data = batches(source, folder)
        reference = Reference(source, data)
        gpu.waits.clear()
        kept[device] = reference.compare(small)
    of_batches = {PROBE: len(data)} if kind == "language" else {}
    # Divergences and top predictions; of a language model also which completions are right.
    n_copies = 3 if kind == "language" else 2
    assert gpu.own_waits == of_batches | {"_to_copy at lora/base/divergence.py": n_copies}
    assert kept[NAME].kl == pytest.approx(kept["cpu"].kl, rel=1e-4)
    assert kept[NAME].effect == pytest.approx(kept["cpu"].effect, rel=1e-4)


def test_compression_on_a_base_with_its_answers(gpu, classifier):
    result = lsr.compress(
        classifier / "lora",
        base=classifier / "base",
        data=TEXTS * 4,
        ratio=3,
        device=NAME,
        settings=MeasuredSettings(held_out=8),
    )
    assert result.fidelity is not None
    assert gpu.operations["bmm"] > 0


@pytest.mark.parametrize("storage", ["float32", "int4"])
def test_distillation_waits_for_loss_and_features_of_a_step(gpu, classifier, tmp_path, storage):
    waits = {}
    plan = lsr.CompressionPlan(separation_rank=2, storage=storage)
    lsr.compress(lsr.open_checkpoint(classifier / "lora"), plan).save(tmp_path / "lsr")
    for steps in (6, 12):
        gpu.waits.clear()
        distill(
            tmp_path / "lsr",
            base=classifier / "base",
            data=TEXTS * 4,
            teacher=classifier / "lora",
            out=tmp_path / f"{steps}",
            steps=steps,
            learning_rate=0.03,
            device=NAME,
            settings=DistillSettings(batch=4, max_length=16),
        )
        waits[steps] = gpu.own_waits
    grown = growth(waits[6], waits[12], 6)
    assert grown.pop("_local_scalar_dense at lora/train/distill_trainer.py") == 1
    # Of the student, and of the LoRA where a batch is new.
    assert grown.pop("equal at lora/measure/features.py") <= 2
    if storage == "int4":  # all factors at once, to be rounded
        assert grown.pop("_to_copy at lora/train/factor_rounding.py") == 1
    assert grown == {}


@pytest.fixture
def on_device(gpu, monkeypatch):
    """The device, which accelerate takes too until the end of a test."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", f"{NAME}:0")
    AcceleratorState._reset_state(reset_partial_state=True)
    yield gpu
    AcceleratorState._reset_state(reset_partial_state=True)


def run_settings(language, **changes):
    """Return settings of a short run."""
    values = {
        "base": str(language / "base"),
        "data": str(language / "rows.jsonl"),
        "log_every": 0,
        "learning_rate": 1e-3,
        "samples": 0,
        "precision": "float32",
    }
    return FinetuneSettings.from_mapping(values | changes)


def test_fine_tuning_waits_only_where_others_do(on_device, language, tmp_path):
    waits = {}
    for steps in (2, 4):
        on_device.waits.clear()
        finetune(run_settings(language, steps=steps), tmp_path / f"{steps}")
        waits[steps] = on_device.own_waits
    assert growth(waits[2], waits[4], 2) == {}


def test_fine_tuning_from_a_lora_that_is_compressed_first(
    on_device, language, tmp_path, monkeypatch
):
    monkeypatch.setattr(compressed_start, "_gpu", lambda settings: NAME)
    start = {"init": str(language / "lora"), "ratio": 2.0, "method": "lsr", "steps": 2}
    finetune(run_settings(language, **start), tmp_path / "run")
    assert on_device.operations["_linalg_eigh"] > 0


def test_an_adapter_on_the_device_becomes_a_lora(gpu, language):
    base = load_base(language / "base", language / "lsr", device=NAME)
    tokens = torch.arange(3, 11, device=NAME)[None]
    with torch.no_grad():
        expected = base.model(tokens).logits
    config, tensors = to_lora(base.model)
    assert all(isinstance(tensor, GpuTensor) for tensor in tensors.values())
    model = get_peft_model(tiny_model(layers=1).to(NAME), config).eval()
    set_peft_model_state_dict(model, tensors)
    with torch.no_grad():
        found = model(tokens).logits
    assert float((found - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["lsr", "direct", "krona"])
def test_new_adapters_train_on_the_device(name, gpu):
    config = adapter_config(name, {}, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny_model(layers=1), config).to(NAME)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.arange(3, 11, device=NAME)[None]
    losses = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert gpu.own_waits == {}
    assert float(losses[-1]) < float(losses[0])
    merged = model.merge_and_unload()
    assert all(isinstance(parameter, GpuTensor) for parameter in merged.parameters())
