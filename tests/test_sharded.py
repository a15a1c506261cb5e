"""Adapters whose parameters are sharded over processes (FSDP2): the losses, gradients and files of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

import sharded_worker  # noqa: E402
from peft import PeftModel, get_peft_model_state_dict  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402

from lsrdecomp.checkpoints import open_checkpoint  # noqa: E402

BOUNDS = {torch.float32: (1e-5, 1e-4), torch.float64: (1e-12, 1e-11)}  # of losses and gradients, relative

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this build of torch has no gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes left that trained every case together."""
    place = tmp_path_factory.mktemp("sharded")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, sharded_worker.__file__]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "env": environment}
    processes = [subprocess.Popen([*command, str(rank), "2", str(place)], **streams) for rank in range(2)]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    return place


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor], names: list[str]) -> float:
    """‖ours − theirs‖ / ‖theirs‖ of all these tensors together."""
    apart, size = (torch.stack([each.norm() for each in found]).norm() for found in (
        [ours[name] - theirs[name] for name in names], [theirs[name] for name in names]
    ))  # fmt: skip
    return float(apart / size)


@pytest.mark.parametrize("case", sharded_worker.CASES, ids=lambda case: case.name)
def test_two_processes_are_one_at_the_same_global_batch(folder: Path, case):
    of_loss, of_gradients = BOUNDS[case.dtype]
    alone = sharded_worker.adapted(case)
    expected = dict(sharded_worker.train(alone))
    names = {step: [n for n in expected if n.startswith(f"{step} ")] for step in range(sharded_worker.STEPS)}
    for rank in range(2):
        found = load_file(folder / f"{case.name}.{rank}.safetensors")
        assert found.keys() == expected.keys()
        for step, (loss, *gradients) in names.items():
            assert loss == f"{step} loss"
            assert float(found[loss]) == pytest.approx(float(expected[loss]), rel=of_loss)
            assert distance(found, expected, gradients) < of_gradients
    assert len({float(expected[f"{step} loss"]) for step in names}) == len(names)

    saved = folder / case.name
    opened = PeftModel.from_pretrained(sharded_worker.tiny_bert(), str(saved))
    ours, theirs = get_peft_model_state_dict(opened), get_peft_model_state_dict(alone)
    assert ours.keys() == theirs.keys()
    assert distance(ours, theirs, list(theirs)) < 1e-6
    if "use_dora" not in case.settings:
        assert open_checkpoint(saved).adapter_parameters == sum(t.numel() for n, t in theirs.items() if ".lsr_" in n)
