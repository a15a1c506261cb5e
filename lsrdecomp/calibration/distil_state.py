"""The state of a distillation, and the file in which an interrupted one keeps it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lsrdecomp.checkpoints.writing import new_file


@dataclass(slots=True)
class State:
    """Where an interrupted run goes on."""

    u: Tensor
    moments: tuple[Tensor, Tensor]
    best: Tensor
    step: int = 0
    rate: float = 0.0
    passes: float = 0.0
    checks: list[tuple[int, float]] = field(default_factory=list)


def save_state(path: Path, now: State, settings: dict[str, Any]) -> None:
    """Write the state of an unfinished run; one process of several does."""
    if not PartialState().is_main_process:
        return
    tensors = {"u": now.u, "first": now.moments[0], "second": now.moments[1], "best": now.best}
    about = {"step": now.step, "rate": now.rate, "passes": now.passes, "checks": now.checks, "settings": settings}
    with new_file(path, force=True) as part:
        save_file({name: value.cpu() for name, value in tensors.items()}, part, {"state": json.dumps(about)})


def read_state(path: Path, zero: Tensor, settings: dict[str, Any]) -> State | None:
    """The saved state on the device of ``zero``, if it is of a run of so many numbers with these settings."""
    if not path.exists():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            about = json.loads((file.metadata() or {})["state"])
        tensors = {name: value.to(zero.device) for name, value in load_file(path).items()}
    except (SafetensorError, OSError, KeyError, ValueError):
        return None
    if about["settings"] != json.loads(json.dumps(settings)) or tensors["u"].shape != zero.shape:
        return None
    return State(
        tensors["u"],
        (tensors["first"], tensors["second"]),
        tensors["best"],
        about["step"],
        about["rate"],
        about["passes"],
        [(int(step), float(share)) for step, share in about["checks"]],
    )
