"""Adapters sharded over processes (FSDP2): the losses, gradients and files of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("trl")
pytest.importorskip("sklearn")

import processes  # noqa: E402
import sharded_worker  # noqa: E402
from peft import PeftModel, get_peft_model_state_dict  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.lab.embedded import EmbeddedRecipe, embedded  # noqa: E402
from lsrdecomp.lora.files import open_checkpoint  # noqa: E402
from lsrdecomp.lora.files.packed import NUMBERS  # noqa: E402
from lsrdecomp.lora.files.packed_index import split_tensor  # noqa: E402
from lsrdecomp.lora.train.callbacks import layer_figures  # noqa: E402
from lsrdecomp.lora.train.finetune_record import read_record  # noqa: E402
from lsrdecomp.lora.train.finetune_run import finetune  # noqa: E402
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings, SettingsError  # noqa: E402
from lsrdecomp.lora.train.trainer import check_sharding  # noqa: E402

# Relative differences of losses and gradients.
BOUNDS = {
    torch.float32: (1e-5, 1e-4),
    torch.float64: (1e-12, 1e-11),
}

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this build of torch has no gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes left that trained every case together: this one, and another."""
    place = tmp_path_factory.mktemp("sharded")
    other = processes.start_process(sharded_worker.main, 1, 2, place)
    try:
        sharded_worker.main(0, 2, place)
    finally:
        other.join()
    assert other.exitcode == 0
    return place


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor], names: list[str]) -> float:
    """‖ours − theirs‖ / ‖theirs‖ of all these tensors together."""
    apart, size = (
        torch.stack([each.norm() for each in found]).norm()
        for found in (
            [ours[name] - theirs[name] for name in names],
            [theirs[name] for name in names],
        )
    )
    return float(apart / size)


@pytest.mark.parametrize("case", sharded_worker.CASES, ids=lambda case: case.name)
def test_two_processes_are_one_at_the_same_global_batch(folder: Path, case):
    of_loss, of_gradients = BOUNDS[case.dtype]
    alone = sharded_worker.adapted(case)
    expected = dict(sharded_worker.train(alone))
    names = {
        step: [n for n in expected if n.startswith(f"{step} ")]
        for step in range(sharded_worker.STEPS)
    }
    for rank in range(2):
        found = load_file(folder / f"{case.name}.{rank}.safetensors")
        assert found.keys() == expected.keys()
        for step, (loss, *gradients) in names.items():
            assert loss == f"{step} loss"
            assert float(found[loss]) == pytest.approx(float(expected[loss]), rel=of_loss)
            assert distance(found, expected, gradients) < of_gradients
    assert len({float(expected[f"{step} loss"]) for step in names}) == len(names)

    figures = list(layer_figures(alone))
    for rank in range(2):
        found = json.loads((folder / f"{case.name}.{rank}.json").read_text())
        assert [each["layer"] for each in found] == [each["layer"] for each in figures]
        for ours, theirs in zip(found, figures, strict=True):
            assert ours["norm"] == pytest.approx(theirs["norm"], rel=of_gradients)
            for side in ("lsr_A", "lsr_B"):
                assert ours[side]["weights"] == pytest.approx(
                    theirs[side]["weights"], rel=of_gradients
                )
                assert ours[side]["condition"] == pytest.approx(
                    theirs[side]["condition"], rel=of_gradients
                )

    saved = folder / case.name
    opened = PeftModel.from_pretrained(sharded_worker.tiny_bert(), str(saved))
    ours, theirs = get_peft_model_state_dict(opened), get_peft_model_state_dict(alone)
    assert ours.keys() == theirs.keys()
    assert distance(ours, theirs, list(theirs)) < 1e-6
    if "use_dora" not in case.settings:
        assert open_checkpoint(saved).adapter_parameters == sum(
            t.numel() for n, t in theirs.items() if ".lsr_" in n
        )


def test_what_sharding_cannot_do_is_refused():
    settings = FinetuneSettings("base", "train.tsv", "classes")
    check_sharding(2, settings)
    with pytest.raises(SettingsError, match="launch with --fsdp_version 2"):
        check_sharding(1, settings)
    with pytest.raises(SettingsError, match="leave measure_start out"):
        check_sharding(2, settings.replace(measure_start=True))


def launched(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`finetune` by accelerate, its model sharded over two processes."""
    options = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": "true",
        "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
        "num_processes": 2,
        "num_machines": 1,
        "main_process_port": 0,
        "mixed_precision": "no",
        "dynamo_backend": "no",
    }
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--use_fsdp"]
    launch += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    script = Path(__file__).with_name("sharded_finetune.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launch, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def stored(adapter: Path) -> dict[str, Tensor]:
    """The head of an adapter that was written, and its packed factors as float32."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    numbers, _ = split_tensor(tensors[NUMBERS].numpy())
    return tensors | {NUMBERS: torch.from_numpy(numbers.copy()).view(torch.float32)}


@pytest.mark.slow
def test_a_sharded_run_is_one_process_at_the_same_global_batch_and_goes_on_after_a_kill(
    tmp_path: Path,
):
    place = embedded(tmp_path / "embedded", recipe=EmbeddedRecipe(steps=80))
    settings = FinetuneSettings(
        str(place.model),
        str(place.data / "train.tsv"),
        "classes",
        str(place.data / "dev.tsv"),
        method="lsr",
        learning_rate=0.01,
        steps=8,
        device="cpu",
        log_every=2,
        dev_examples=120,
        save_every=4,
    )
    (tmp_path / "settings.json").write_text(json.dumps(settings.to_json()))
    one = finetune(settings, tmp_path / "one")
    assert launched(tmp_path / "settings.json", tmp_path / "two", 6).returncode != 0
    assert not (tmp_path / "two").exists()
    assert len(list((tmp_path / ".two.journal").glob("*/checkpoints/checkpoint-4"))) == 1
    done = launched(tmp_path / "settings.json", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    two = read_record(tmp_path / "two")
    assert (two.processes, two.steps, two.file_bytes) == (2, 8, one.file_bytes)
    assert [loss for _, loss in two.losses] == pytest.approx(
        [loss for _, loss in one.losses], rel=1e-5
    )
    assert two.dev.loss == pytest.approx(one.dev.loss, rel=1e-5)
    ours, theirs = (stored(tmp_path / name / "adapter") for name in ("two", "one"))
    assert ours.keys() == theirs.keys()
    assert distance(ours, theirs, list(theirs)) < 1e-5
    ours, theirs = (
        [json.loads(line) for line in (tmp_path / name / "layers.jsonl").read_text().splitlines()]
        for name in ("two", "one")
    )
    assert [(each["step"], each["layer"]) for each in ours] == [
        (each["step"], each["layer"]) for each in theirs
    ]
    assert [each["norm"] for each in ours] == pytest.approx(
        [each["norm"] for each in theirs], rel=1e-4, abs=1e-6
    )
