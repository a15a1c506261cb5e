"""Every road that takes a device, on a GPU that is pretended: where tensors lie, and the waits."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from pretended_gpu import NAME, GpuTensor, pretended_gpu
from tiny_bases import TEXTS, write_directories
from tiny_language_model import make_base, make_lora, write_rows

import lsrdecomp as lsr
from lsrdecomp.lora.base.batches import prompt_batches, text_batches
from lsrdecomp.lora.base.calibrate import calibrate
from lsrdecomp.lora.base.dataset import read_examples
from lsrdecomp.lora.base.divergence import Reference
from lsrdecomp.lora.base.open_bases import load_base
from lsrdecomp.lora.compress.distil_lora import distil
from lsrdecomp.lora.compress.distil_settings import DistilSettings
from lsrdecomp.lora.search.measured_settings import EvaluatorSettings
from lsrdecomp.lora.train import compressed_start
from lsrdecomp.lora.train.finetune_run import finetune
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A classifier with its LoRA, and an LSR adapter made of that."""
    return write_directories(tmp_path_factory.mktemp("classifier"), "SEQ_CLS")


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """A language model with its LoRA, and prompts."""
    folder = tmp_path_factory.mktemp("language")
    make_base(folder)
    make_lora(folder)
    write_rows(folder / "rows.jsonl")
    lsr.compress(folder / "lora", ratio=2).save(folder / "lsr")
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
    assert gpu.n_waits == 0
    assert float(values.sum()) == 6.0
    assert values.tolist() == [[1.0] * 3] * 2
    assert values[values > 0].shape == (6,)
    assert values.cpu().numpy().shape == (2, 3)
    assert gpu.n_waits == 4


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
    assert found.record.relative_error == pytest.approx(on_cpu.record.relative_error, rel=1e-6)


def test_a_search_on_the_device_finds_what_one_on_the_cpu_does(gpu, language):
    plan = {"ratio": 3, "structure": "lsr", "storage": "float32"}
    on_cpu = lsr.compress(language / "lora", **plan)
    found = lsr.compress(language / "lora", device=NAME, **plan)
    assert gpu.operations["bmm"] > 0
    assert found.totals.relative_error == pytest.approx(on_cpu.totals.relative_error, rel=1e-4)


@pytest.mark.parametrize(("kind", "waits"), [("classifier", 1), ("language", 2)])
def test_calibration(kind, waits, gpu, tmp_path, request):
    folder = request.getfixturevalue(kind)
    found = {}
    for device in ("cpu", NAME):
        base = load_base(folder / "base", folder / "lora", device=device)
        data = batches(base, folder)
        gpu.waits.clear()
        found[device] = calibrate(
            base, data, out=tmp_path / device, seed=0, samples=1000, save_every=1000
        )
    in_batches = {place: count for place, count in gpu.waits.items() if count == len(data)}
    print(gpu.waits, len(data))
    assert len(in_batches) == waits, gpu.waits
    assert max(gpu.waits.values()) == len(data), gpu.waits
    assert found[NAME].metadata["effect"] == pytest.approx(found["cpu"].metadata["effect"])


@pytest.mark.parametrize(("kind", "waits"), [("classifier", 0), ("language", 1)])
def test_comparison(kind, waits, gpu, request):
    folder = request.getfixturevalue(kind)
    kept = {}
    for device in ("cpu", NAME):
        source = load_base(folder / "base", folder / "lora", device=device)
        small = load_base(folder / "base", folder / "lsr", device=device)
        data = batches(source, folder)
        reference = Reference(source, data)
        gpu.waits.clear()
        kept[device] = reference.compare(small)
    print(gpu.waits, len(data))
    assert gpu.n_waits == 2 + waits * len(data), gpu.waits
    assert kept[NAME].kl == pytest.approx(kept["cpu"].kl, rel=1e-4)


@pytest.mark.parametrize("kind", ["classifier", "language"])
def test_verification_with_a_base(kind, gpu, request):
    folder = request.getfixturevalue(kind)
    data = TEXTS if kind == "classifier" else folder / "rows.jsonl"
    settings = EvaluatorSettings(device=NAME, batch=4)
    found = lsr.measure(
        folder / "lora", folder / "lsr", base=folder / "base", data=data, settings=settings
    )
    print(found, gpu.waits)


@pytest.mark.parametrize("kind", ["classifier", "language"])
def test_distillation(kind, gpu, tmp_path, request):
    folder = request.getfixturevalue(kind)
    data = TEXTS * 4 if kind == "classifier" else folder / "rows.jsonl"
    result = distil(
        folder / "lsr",
        base=folder / "base",
        data=data,
        teacher=folder / "lora",
        out=tmp_path / "out",
        steps=6,
        rate=0.03,
        device=NAME,
        settings=DistilSettings(batch=4, max_length=16),
    )
    print(result, gpu.waits)


def accelerate_on(device, monkeypatch):
    """Let accelerate, and so transformers, take a device."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", f"{device}:0")
    AcceleratorState._reset_state(reset_partial_state=True)


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
        "model": str(language / "base"),
        "data": str(language / "rows.jsonl"),
        "log_every": 0,
        "learning_rate": 1e-3,
        "samples": 0,
        "precision": "float32",
    }
    return FinetuneSettings.from_mapping(values | changes)


def test_fine_tuning(on_device, language, tmp_path):
    waits = {}
    for steps in (4, 8):
        on_device.waits.clear()
        finetune(run_settings(language, steps=steps), tmp_path / f"{steps}")
        waits[steps] = Counter(on_device.waits)
        print(waits)


def test_fine_tuning_from_a_lora_that_is_compressed_first(
    on_device, language, tmp_path, monkeypatch
):
    monkeypatch.setattr(compressed_start, "_gpu", lambda settings: NAME)
    start = {"init": str(language / "lora"), "ratio": 2.0, "method": "lsr", "steps": 2}
    finetune(run_settings(language, **start), tmp_path / "run")
    assert on_device.operations["bmm"] > 0
