"""The state of a distillation, which a killed run goes on from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lsrdecomp.calibration.distil_schedule import DistillationSchedule
    from lsrdecomp.checkpoints import Journal

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
"""What torch's AdamW calls its running means."""


@dataclass(slots=True)
class TrainingState:
    """Where a training is, and all that it goes on from after a kill."""

    optimizer: torch.optim.AdamW  # of one vector, the relative changes u of all numbers
    best: Tensor  # relative changes at the evaluation with the largest share
    step: int = 0
    rate: float = 0.0  # peak learning rate
    passes: float = 0.0  # forward and backward passes of the base so far
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # step and share kept

    @property
    def changes(self) -> nn.Parameter:
        """Relative changes u of all numbers, as one vector."""
        parameter: nn.Parameter = self.optimizer.param_groups[0]["params"][0]
        return parameter

    @property
    def shares(self) -> list[float]:
        """Shares kept at the evaluations so far."""
        return [share for _, share in self.evaluations]

    def save(self, journal: Journal, key: str) -> None:
        """Keep the state of an unfinished run in its journal."""
        moments = self.optimizer.state[self.changes]
        tensors = {"changes": self.changes.data, "best": self.best}
        tensors |= {name: moments[name] for name in ADAM_MOMENTS}
        arrays = {name: value.cpu().numpy() for name, value in tensors.items()}
        numbers = {
            "step": self.step,
            "rate": self.rate,
            "passes": self.passes,
            "evaluations": self.evaluations,
            "adam_steps": float(moments["step"]),
        }
        journal.put(key, arrays, values=numbers)

    @classmethod
    def load(
        cls, journal: Journal, key: str, schedule: DistillationSchedule, device: torch.device
    ) -> TrainingState | None:
        """Return the state that a journal keeps under a key, if there is one."""
        result = journal.get(key)
        if result is None:
            return None
        numbers = result.values
        tensors = {
            name: torch.tensor(stored.read(), device=device)
            for name, stored in result.arrays.items()
        }
        optimizer = make_optimizer(tensors["changes"], schedule)
        state = cls(
            optimizer,
            tensors["best"],
            step=numbers["step"],
            rate=numbers["rate"],
            passes=numbers["passes"],
            evaluations=[(step, share) for step, share in numbers["evaluations"]],
        )
        moments = {name: tensors[name] for name in ADAM_MOMENTS}
        moments["step"] = torch.tensor(numbers["adam_steps"])
        optimizer.state[state.changes] = moments
        return state


def make_optimizer(changes: Tensor, schedule: DistillationSchedule) -> torch.optim.AdamW:
    """Return AdamW without weight decay on a copy of the relative changes."""
    parameter = nn.Parameter(changes.clone())
    return torch.optim.AdamW([parameter], eps=schedule.adam_eps, weight_decay=0.0)
