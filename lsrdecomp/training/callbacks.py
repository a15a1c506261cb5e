"""What runs beside the training loop: progress, the clock over interruptions, and the log of layers."""

from __future__ import annotations

import json
import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from lsrdecomp.adapters.factors import KroneckerFactors
from lsrdecomp.calibration.base_model import has_delta
from lsrdecomp.checkpoints.progress import OnStep, ProgressUpdate
from lsrdecomp.checkpoints.writing import new_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Progress(TrainerCallback):
    """Calls ``on_step`` after every step, in the main process."""

    def __init__(self, on_step: OnStep) -> None:
        self.on_step = on_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.on_step(ProgressUpdate("training", state.global_step, state.max_steps, "steps"))


class Clock(TrainerCallback, ExportableState):
    """Seconds of training with its reading of batches, but without judging, logging and saving; checkpoints hold them,
    so that a resumed run counts on.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps: list[float] = []
        self._since = 0.0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seconds": self.seconds}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._since = time.perf_counter()

    on_evaluate = on_log = on_save = on_train_begin  # what lies between two steps is not theirs

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.perf_counter()
        self.steps.append(now - self._since)
        self.seconds += self.steps[-1]
        self._since = now


class StopWhenLost(TrainerCallback):
    """Stops a run whose loss is no longer a number: it will not come back."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not math.isfinite((logs or {}).get("loss", 0.0)):
            control.should_training_stop = True


class LayerLog(TrainerCallback):
    """Appends the figures of every adapted layer to a JSON-lines file, whenever losses are logged.

    Parameters
    ----------
    file : Path
        One line per step and layer: ``step`` beside what `layer_figures` gives.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def resume(self, step: int) -> None:
        """Forget what was logged after a checkpoint, and a line that a kill cut short."""
        if not self.file.exists():
            return
        lines = []
        for line in self.file.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    lines.append(line)
            except ValueError:
                continue
        with new_file(self.file, force=True) as part:
            part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        if state.global_step == 0:
            self._append(state, model)

    def on_log(
        self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **_: Any
    ) -> None:
        if "loss" in (logs or {}):
            self._append(state, model)

    def _append(self, state: Any, model: Any) -> None:
        if model is None:
            return
        lines = [
            json.dumps({"step": state.global_step, **figures}) for figures in layer_figures(model)
        ]  # collective
        if not state.is_world_process_zero:
            return
        with self.file.open("a", encoding="utf-8") as log:
            log.write("".join(f"{line}\n" for line in lines))


@torch.no_grad()
def layer_figures(model: nn.Module, adapter: str = "default") -> Iterator[dict[str, Any]]:
    """One record per adapted layer: ``layer``, ``norm`` = ‖ΔW‖_F and, of each sum of Kronecker products in it, the
    ``weights`` λ_k in descending order and the ``condition`` γ = ‖λ‖₂ / ‖sum‖_F (None while the sum
    is zero).

    Costs one product of the formed pair per layer; ΔW itself is formed only for kinds that offer
    nothing smaller. Where parameters are sharded over processes (FSDP2), every process has to make
    this call: a layer's are gathered in turn.
    """
    for name, module in model.named_modules():
        if has_delta(module) and isinstance(module, nn.Module) and adapter in _adapters(module):
            with _gathered(module):
                sums = {
                    part.removesuffix(f".{adapter}"): _sum_figures(child)
                    for part, child in module.named_modules()
                    if isinstance(child, KroneckerFactors) and part.endswith(f".{adapter}")
                }
                norm = _norm(module, adapter)
            yield {"layer": name.removeprefix("base_model.model."), "norm": norm, **sums}


@contextmanager
def _gathered(layer: nn.Module) -> Iterator[None]:
    """While open, a layer holds its adapters' sharded parameters whole; its base layer stays as it is."""
    sharded = [
        (module._parameters, name, parameter)
        for part, module in layer.named_modules()
        if part.split(".")[0] != "base_layer"
        for name, parameter in module._parameters.items()
        if hasattr(parameter, "full_tensor")
    ]
    try:
        for parameters, name, parameter in sharded:
            parameters[name] = nn.Parameter(parameter.full_tensor(), requires_grad=False)
        yield
    finally:
        for parameters, name, parameter in sharded:
            parameters[name] = parameter


def _adapters(module: Any) -> set[str]:
    return {name for part in module.adapter_layer_names for name in getattr(module, part, {})}


def _norm(module: Any, adapter: str) -> float:
    pair = getattr(module, "pair", None)
    if pair is not None:
        left, right = pair(adapter)
        # ‖BA‖² = ⟨BᵀB, AAᵀ⟩ needs no m × n array, and neither Gram matrix is large.
        return math.sqrt(
            max(0.0, float(((left.T @ left).double() * (right @ right.T).double()).sum()))
        )
    return float(torch.linalg.vector_norm(module.get_delta_weight(adapter).double()))


def _sum_figures(sums: KroneckerFactors) -> dict[str, Any]:
    norms = [torch.linalg.vector_norm(factor.double(), dim=(1, 2)) for factor in sums.factors]
    weights = torch.stack(norms).prod(0)  # (s,)
    size = float(torch.linalg.matrix_norm(sums.matrix().double()))
    together = float(torch.linalg.vector_norm(weights))
    return {
        "weights": sorted(weights.tolist(), reverse=True),
        "condition": together / size if size > 0.0 else None,
    }
