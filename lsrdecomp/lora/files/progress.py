"""Where a long run stands, as every function with an ``on_step`` tells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class ProgressUpdate:
    """A message to ``on_step``: which stage a run is in, and how much of that is done.

    Attributes
    ----------
    stage : str
        In a few words.
    done : int
    total : int
        0 if not known.
    unit : str
        The things that are counted.
    share : float, optional
        Estimated share of the whole run that is done, where it has more than this stage. It never
        falls within a run.

    Examples
    --------
    >>> update = ProgressUpdate("measuring", done=3, total=12, unit="layers")
    >>> f"{update.stage}: {update.done} of {update.total} {update.unit}"
    'measuring: 3 of 12 layers'
    """

    stage: str
    done: int
    total: int
    unit: str = ""
    share: float | None = None


OnStep = Callable[[ProgressUpdate], Any]
STAGE_PART = 0.25
"""What a stage fills of what is left of its step. By hand: four stages or so are usual."""


class Counter:
    """Calls ``on_step`` as the parts of a stage are done; silent without it."""

    def __init__(self, on_step: OnStep | None, stage: str, total: int, unit: str) -> None:
        self.stage = stage
        self._on_step = on_step
        self._total = total
        self._unit = unit
        self._done = 0
        self.add(0)

    def add(self, count: int = 1) -> None:
        """Count a number more as done."""
        self._done += count
        if self._on_step is not None:
            self._on_step(ProgressUpdate(self.stage, self._done, self._total, self._unit))


class PlannedSteps:
    """Reports progress as a share of a whole run, whose steps and their weights are planned.

    A step may have several stages, and how many is not known: each fills a part of the rest of its
    step, so that the share rises within a step and jumps to its end with the next.

    Parameters
    ----------
    on_step : callable, optional
    weights : sequence of float
        The part of the time that each step is expected to take, in any unit.

    Examples
    --------
    >>> shares = []
    >>> steps = PlannedSteps(lambda update: shares.append(update.share), [1.0, 3.0])
    >>> steps.begin("reading")
    >>> steps(ProgressUpdate("reading", 5, 10))
    >>> steps.begin("solving")
    >>> shares
    [0.0, 0.03125, 0.25]
    """

    def __init__(self, on_step: OnStep | None, weights: Sequence[float]) -> None:
        self._on_step = on_step
        self._weights = list(weights)
        self._number = 0
        self._stage: tuple[str, int] = ("", 0)
        self._start = self._span = 0.0  # of the stage, as shares of its step
        self._position = 0.0  # in the step
        self._share = 0.0

    def begin(self, stage: str) -> None:
        """Begin the next step; a run may take more steps than were planned."""
        self._number += 1
        if self._number > len(self._weights):
            self._weights.append(0.1 * sum(self._weights))
        self._position = 0.0
        self._stage = ("", 0)
        self(ProgressUpdate(stage, 0, 0))

    def __call__(self, step: ProgressUpdate) -> None:
        """Report progress within the current step."""
        if self._on_step is None:
            return
        # 1. A new stage fills a part of what is left of its step.
        if (step.stage, step.total) != self._stage:
            self._stage = (step.stage, step.total)
            self._start = self._position
            self._span = STAGE_PART * (1.0 - self._start)
        if step.total:
            part = min(step.done / step.total, 1.0)
            self._position = max(self._position, self._start + self._span * part)
        # 2. The share of the run.
        index = max(self._number - 1, 0)
        finished = sum(self._weights[:index]) + self._weights[index] * self._position
        self._share = max(self._share, finished / sum(self._weights))
        prefix = ""
        if len(self._weights) > 1:
            prefix = f"step {max(self._number, 1)} of {len(self._weights)} · "
        self._on_step(replace(step, stage=f"{prefix}{step.stage}", share=self._share))
