"""Callbacks of the training loop: progress, the clock over interruptions and the log of layers."""

from __future__ import annotations

import json
import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.trainer_callback import ExportableState
from typing_extensions import override

from lsrdecomp.lora.base.base_model import has_delta
from lsrdecomp.lora.files.progress import OnStep, ProgressUpdate
from lsrdecomp.lora.files.writing import new_file
from lsrdecomp.lora.peft.factors import KroneckerFactors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class ReportProgress(TrainerCallback):
    """Calls ``on_step`` after every step, in the main process, with the name of the stage."""

    def __init__(self, on_step: OnStep, stage: str = "training") -> None:
        self.on_step = on_step
        self.stage = stage

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell how many steps are done."""
        if state.is_world_process_zero:
            update = ProgressUpdate(self.stage, state.global_step, state.max_steps, "steps")
            self.on_step(update)


class EventLog(TensorBoardCallback):
    """Writes TensorBoard's events of a whole run, evaluations included, into one file.

    That of transformers closes its file when training ends, and begins another one for the
    evaluations after it.
    """

    def __init__(self, directory: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.logging_dir = directory

    @override
    def on_train_end(self, *arguments: Any, **more: Any) -> None:
        """Keep the file open: scores come after training."""

    def close(self) -> None:
        """End the file."""
        if self.tb_writer is not None:
            self.tb_writer.close()
            self.tb_writer = None


class Clock(TrainerCallback, ExportableState):
    """Counts seconds of training, without evaluation, logging and saving.

    Reading the batches is part of it. Checkpoints hold the seconds, so that a resumed run counts
    on.

    Attributes
    ----------
    seconds : float
        Of all steps, over all resumptions.
    steps : list of float
        Seconds of each step since the start or the resumption.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps: list[float] = []
        self._last_event = 0.0

    @override
    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"args": {}, "attributes": {"seconds": self.seconds}}

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._last_event = time.perf_counter()

    # What lies between two steps is not theirs: the clock starts again after it.
    on_evaluate = on_train_begin
    on_log = on_train_begin
    on_save = on_train_begin

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step that ended."""
        now = time.perf_counter()
        step_seconds = now - self._last_event
        self._last_event = now
        self.steps.append(step_seconds)
        self.seconds += step_seconds


class StopWhenDiverged(TrainerCallback):
    """Stops a run whose loss is no longer a number: it will not come back."""

    @override
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Look at the loss that was logged."""
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
        """Drop what was logged after a checkpoint, and a line that a kill cut short."""
        if not self.file.exists():
            return
        lines = []
        for line in self.file.read_text(encoding="utf-8").splitlines():
            try:
                logged_step = json.loads(line)["step"]
            except ValueError:
                continue
            if logged_step <= step:
                lines.append(f"{line}\n")
        with new_file(self.file, force=True) as part:
            part.write_text("".join(lines), encoding="utf-8")

    @override
    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Log the figures of the start."""
        if state.global_step == 0:
            self._append(state, model)

    @override
    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        logs: Any = None,
        **_: Any,
    ) -> None:
        """Log the figures beside a loss."""
        if "loss" in (logs or {}):
            self._append(state, model)

    def _append(self, state: Any, model: Any) -> None:
        if model is None:
            return
        # Every process forms the figures, since sharded layers are gathered; the first writes.
        lines = []
        for figures in layer_figures(model):
            entry = {"step": state.global_step, **figures}
            lines.append(f"{json.dumps(entry)}\n")
        if state.is_world_process_zero:
            with self.file.open("a", encoding="utf-8") as log:
                log.write("".join(lines))


@torch.no_grad()
def layer_figures(model: nn.Module, adapter: str = "default") -> Iterator[dict[str, Any]]:
    """Yield one record per adapted layer.

    Costs one product of the formed pair per layer; ΔW itself is formed only for layers that offer
    nothing smaller. Where parameters are sharded over processes (FSDP2), every process has to make
    this call: a layer's are gathered in turn.

    Yields
    ------
    dict
        ``layer``; ``norm`` = ‖ΔW‖_F; and of each sum of Kronecker products in the layer, under its
        name, the ``weights`` λ_k in descending order and the ``condition`` γ = ‖λ‖₂ / ‖sum‖_F,
        which is None while the sum is zero.
    """
    for name, module in model.named_modules():
        is_layer = isinstance(module, nn.Module) and has_delta(module)
        if not is_layer or adapter not in _adapters(module):
            continue
        with _gathered(module):
            sums = {
                part.removesuffix(f".{adapter}"): _sum_figures(child)
                for part, child in module.named_modules()
                if isinstance(child, KroneckerFactors) and part.endswith(f".{adapter}")
            }
            norm = _update_norm(module, adapter)
        yield {"layer": name.removeprefix("base_model.model."), "norm": norm, **sums}


@contextmanager
def _gathered(layer: nn.Module) -> Iterator[None]:
    """Let a layer hold its adapters' sharded parameters whole; its base layer stays as it is."""
    sharded = []
    for part, module in layer.named_modules():
        if part.split(".")[0] == "base_layer":
            continue
        for name, parameter in module._parameters.items():
            if hasattr(parameter, "full_tensor"):
                sharded.append((module._parameters, name, parameter))
    try:
        for parameters, name, parameter in sharded:
            parameters[name] = nn.Parameter(parameter.full_tensor(), requires_grad=False)
        yield
    finally:
        for parameters, name, parameter in sharded:
            parameters[name] = parameter


def _adapters(module: Any) -> set[str]:
    """Return the names of the adapters of a layer."""
    names: set[str] = set()
    for part in module.adapter_layer_names:
        names.update(getattr(module, part, {}))
    return names


def _update_norm(module: Any, adapter: str) -> float:
    """Return ‖ΔW‖_F of a layer."""
    pair = getattr(module, "pair", None)
    if pair is None:
        return float(torch.linalg.vector_norm(module.get_delta_weight(adapter).double()))
    left, right = pair(adapter)
    # ‖BA‖² = ⟨BᵀB, AAᵀ⟩ needs no m × n array, and neither Gram matrix is large.
    left_gram = (left.T @ left).double()
    right_gram = (right @ right.T).double()
    squared_norm = float((left_gram * right_gram).sum())
    return math.sqrt(max(0.0, squared_norm))


def _sum_figures(sums: KroneckerFactors) -> dict[str, Any]:
    """Return the weights and the condition of a sum of Kronecker products."""
    norms = [torch.linalg.vector_norm(factor.double(), dim=(1, 2)) for factor in sums.factors]
    weights = torch.stack(norms).prod(0)  # (s,)
    sum_norm = float(torch.linalg.matrix_norm(sums().double()))
    weight_norm = float(torch.linalg.vector_norm(weights))
    return {
        "weights": sorted(weights.tolist(), reverse=True),
        "condition": weight_norm / sum_norm if sum_norm > 0.0 else None,
    }
