"""Joint least squares on another device: the same answers, nothing left on the way."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import array_api_strict
import numpy as np
import pytest
import torch
from console import run_command
from test_pair import CUBE, SMALL, low_rank, norms

from lsrdecomp import compress
from lsrdecomp.arrays import check_device, to_device
from lsrdecomp.errors import LsrError
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.lora.files import open_checkpoint, write_lora
from lsrdecomp.lora.search.plan import CompressionPlan, Search
from lsrdecomp.solvers.pair import joint_als as pair
from lsrdecomp.solvers.pair import stacking
from lsrdecomp.solvers.pair.joint_als import JointALS
from lsrdecomp.targets.weights import Identity, NormWeights

WIDE = ProductShape((64, 48), (2, 2), (40, 50))  # its start goes through a Krylov space
KINDS = ("frobenius", "all eigenpairs", "low rank")
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")


def on_a_strict_device(value: Any, device: str | None) -> Any:
    """As `to_device`, to a device whose arrays refuse to meet those of any other."""
    if isinstance(value, list | tuple):
        return type(value)(on_a_strict_device(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value,
            **{f.name: on_a_strict_device(getattr(value, f.name), device) for f in fields(value)},
        )
    if not hasattr(value, "shape"):
        return value
    if device is None:
        return np.asarray(value.to_device(array_api_strict.Device("CPU_DEVICE")))
    return array_api_strict.asarray(np.array(value), device=array_api_strict.Device("device1"))


@pytest.mark.parametrize(
    ("device", "shape", "ranks", "kind"),
    [
        *(("strict", SMALL, (2, 2), kind) for kind in KINDS),
        *(("cpu", CUBE, (2, 2), kind) for kind in KINDS),
        *((device, WIDE, (3, 3), "frobenius") for device in ("strict", "cpu")),
    ],
)
def test_another_device_finds_the_same(device, shape, ranks, kind, rng, monkeypatch):
    if device == "strict":
        for module in (pair, stacking):
            monkeypatch.setattr(module, "to_device", on_a_strict_device)
        monkeypatch.setattr(stacking, "check_device", lambda name: None)
    targets = [low_rank(rng, shape, 4) for _ in range(2)]
    weights = None if kind == "frobenius" else [norms(rng, shape, kind) for _ in targets]
    here = JointALS(sweeps=3, tolerance=0.0)
    there = replace(here, device=device)
    solved = [
        solver.solve_batch(targets, shape, ranks, weights=weights) for solver in (here, there)
    ]
    for one, other in zip(*solved, strict=True):
        assert other.relative_error == pytest.approx(one.relative_error, rel=1e-8)
        assert all(isinstance(factor, np.ndarray) for factor in other.product.left.factors)
    again = there.solve_batch(
        targets, shape, ranks, weights=weights, starts=[one.product for one in solved[1]]
    )
    assert again[0].relative_error <= solved[1][0].relative_error * (1.0 + 1e-12)


def test_arrays_are_placed_wherever_they_are_nested(rng):
    value = (
        [np.ones(2)],
        NormWeights(norms(rng, SMALL, "all eigenpairs").output, Identity(20)),
        3,
        None,
    )
    there = to_device(value, "cpu")
    assert all(isinstance(array, torch.Tensor) for array in (there[0][0], there[1].output.basis))
    assert (there[1].input, *there[2:]) == (Identity(20), 3, None)
    assert isinstance(to_device(there, None)[1].output.basis, np.ndarray)


@NO_CUDA
@pytest.mark.parametrize("device", ["cuda", "meta", "nonsense", "cuda:x"])
def test_a_device_that_cannot_compute_is_refused_in_one_line(device):
    with pytest.raises(LsrError, match=f"float64 on device '{device}': .") as caught:
        check_device(device)
    assert "\n" not in str(caught.value)


@pytest.fixture
def adapter(tmp_path: Path, rng) -> Path:
    pairs = [
        (f"layers.{k}.q", rng.standard_normal((24, 4)), rng.standard_normal((4, 20)))
        for k in range(3)
    ]
    return write_lora(tmp_path / "lora", layers=pairs, config={"base_model_name_or_path": "base"})


@pytest.mark.parametrize(
    "plan",
    [CompressionPlan(separation_rank=2), CompressionPlan(ratio=2), CompressionPlan(rtol=0.6)],
)
def test_compress_solves_on_the_device(plan, adapter, monkeypatch):
    solved_on = []
    for module in (pair, stacking):
        monkeypatch.setattr(
            module,
            "to_device",
            lambda value, device: solved_on.append(device) or to_device(value, device),
        )
    search = None if plan.separation_rank else Search(orders=(2,), rounds=0)
    checkpoint = open_checkpoint(adapter)
    with_numpy = compress(checkpoint, plan, search=search).totals
    assert solved_on == []
    with_torch = compress(checkpoint, plan, search=search, device="cpu").totals
    assert "cpu" in solved_on
    assert with_torch.relative_error == pytest.approx(with_numpy.relative_error, rel=1e-6)
    assert with_torch.parameters == with_numpy.parameters


def test_the_verb_takes_a_device(adapter, tmp_path):
    assert (
        run_command(
            "compress",
            adapter,
            "--separation-rank",
            "2",
            "--out",
            tmp_path / "out",
            "--device",
            "cpu",
        ).returncode
        == 0
    )
    assert open_checkpoint(tmp_path / "out").format == "lsr"


@NO_CUDA
def test_a_missing_device_ends_the_verb_in_one_line(adapter, tmp_path):
    asked = "compress", adapter, "--ratio", "2", "--out", tmp_path / "out", "--device", "cuda"
    done = run_command(*asked)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "torch cannot compute in float64 on device 'cuda'" in done.stderr
    assert not (tmp_path / "out").exists()
