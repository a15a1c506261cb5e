"""The state of a distillation, from which a killed run can be resumed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lsrdecomp.lora.files import Journal

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's running means in the state of torch's optimizer."""


@dataclass(slots=True)
class TrainingState:
    """Everything that a training needs to continue."""

    optimizer: torch.optim.AdamW
    """Optimizer of one parameter, the relative changes u of all numbers as one vector."""
    best: Tensor
    """Relative changes at the evaluation with the largest share kept."""
    step: int = 0
    """Optimizer steps so far, including all trials."""
    rate: float = 0.0
    """Peak learning rate."""
    passes: float = 0.0
    """Cost so far, as `Distillation.passes`."""
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """Step and share kept at each evaluation."""
    rate_trials: tuple[tuple[float, float | None], ...] = ()
    """Peak learning rates that were tried, each with its loss, or None where it was not finite."""

    @property
    def changes(self) -> nn.Parameter:
        """Relative changes u of all numbers, which the optimizer holds as its only parameter."""
        parameter: nn.Parameter = self.optimizer.param_groups[0]["params"][0]
        return parameter

    @property
    def shares(self) -> list[float]:
        """Share kept at each evaluation so far."""
        return [share for _, share in self.evaluations]

    def save(self, journal: Journal, key: str) -> None:
        """Save the state in a journal under a key."""
        moments = self.optimizer.state[self.changes]
        tensors = {"changes": self.changes.data, "best": self.best}
        tensors |= {name: moments[name] for name in ADAM_MOMENTS}
        arrays = {name: value.cpu().numpy() for name, value in tensors.items()}
        numbers = {
            "step": self.step,
            "rate": self.rate,
            "passes": self.passes,
            "evaluations": self.evaluations,
            "rate_trials": self.rate_trials,
            "adam_steps": float(moments["step"]),
        }
        journal.put(key, arrays, values=numbers)

    @classmethod
    def load(cls, journal: Journal, key: str, device: torch.device) -> TrainingState | None:
        """Return the state that a journal has under a key; None if it has none."""
        entry = journal.get(key)
        if entry is None:
            return None
        numbers = entry.values
        tensors = {
            name: torch.tensor(stored.read(), device=device)
            for name, stored in entry.arrays.items()
        }
        optimizer = make_optimizer(tensors["changes"])
        state = cls(
            optimizer,
            tensors["best"],
            step=numbers["step"],
            rate=numbers["rate"],
            passes=numbers["passes"],
            evaluations=[(step, share) for step, share in numbers["evaluations"]],
            rate_trials=tuple((rate, loss) for rate, loss in numbers.get("rate_trials", ())),
        )
        moments = {name: tensors[name] for name in ADAM_MOMENTS}
        moments["step"] = torch.tensor(numbers["adam_steps"])
        optimizer.state[state.changes] = moments
        return state


def make_optimizer(changes: Tensor) -> torch.optim.AdamW:
    """Return AdamW without weight decay on a copy of the relative changes."""
    parameter = nn.Parameter(changes.clone())
    # Epsilon is small beside the gradients of relative changes.
    return torch.optim.AdamW([parameter], eps=1e-12, weight_decay=0.0)
