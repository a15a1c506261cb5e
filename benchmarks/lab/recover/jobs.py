"""What compress-and-recover has to do for each task and seed, and where each part of it lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.lab.recover.compress_lora import shape_settings
from benchmarks.lab.recover.plan import (
    STRUCTURES,
    RecoverPlan,
    further_settings,
    head_settings,
    lora_settings,
)
from benchmarks.lab.runs import Run
from benchmarks.lab.suite import Suite, slug
from lsrdecomp.lora.train.finetune_record import ADAPTER
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings

WHOLE = 0
"""The budget of what is no smaller than the LoRA."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the parts of one task and seed lie."""

    directory: Path

    @property
    def head(self) -> Path:
        return self.directory / "head"

    @property
    def lora(self) -> Path:
        return self.directory / "lora"

    @property
    def statistics(self) -> Path:
        return self.directory / "statistics"

    def point(self, structure: str, budget: int) -> Path:
        """A compressed form with what was made of it."""
        return self.directory / (f"{structure}-{budget}" if budget else structure)


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One task with one seed."""

    suite: Suite
    plan: RecoverPlan
    task: str
    seed: int
    out: Path

    @property
    def place(self) -> Place:
        return Place(self.out / slug(self.task) / f"seed-{self.seed}")

    @property
    def tunes(self) -> bool:
        """Whether this seed is the one by which rates are chosen."""
        return self.seed == self.suite.seeds[0]

    def head(self) -> Run:
        return Run(head_settings(self.suite, self.plan, self.task, self.seed), self.place.head)

    def lora(self) -> Run:
        head = str(self.place.head / ADAPTER)
        settings = lora_settings(self.suite, self.plan, self.task, self.seed, head)
        return Run(settings.replace(measure_start=True), self.place.lora)

    def points(self) -> list[tuple[str, int]]:
        """Structures with their budgets, the one at which rates are chosen first."""
        trained = sorted(self.plan.budgets, key=lambda budget: budget != self.plan.tuned_at)
        budgets = [*trained, *self.plan.judged]
        return [
            (name, budget)
            for name in self.plan.structures
            for budget in (budgets if STRUCTURES[name].budgeted else [WHOLE])
        ]

    def recovery(self, structure: str, budget: int, rate: float) -> Run:
        """The run that trains on from a compressed form, or, for "lora", from the LoRA itself."""
        source = self.place.lora if structure == "lora" else self.place.point(structure, budget)
        method = {"lora": "lora", "direct": "direct"}.get(structure, "lsr")
        settings = self._further(rate, method=method, init=str(source / ADAPTER))
        return Run(settings, self.place.point(structure, budget) / "recovered" / f"rate-{rate:g}")

    def scratch(self, structure: str, budget: int, rate: float) -> Run:
        """The run that trains the same shapes from scratch."""
        point = self.place.point(structure, budget)
        shapes = shape_settings(point / ADAPTER, "direct" if structure == "direct" else "lsr")
        settings = self._further(rate, head=str(self.place.head / ADAPTER), **shapes)
        return Run(settings, point / "scratch" / f"rate-{rate:g}")

    def _further(self, rate: float, **changes: object) -> FinetuneSettings:
        return further_settings(
            self.suite, self.plan, self.task, learning_rate=rate, seed=self.seed, **changes
        )


def jobs(suite: Suite, plan: RecoverPlan, out: str | Path) -> list[Job]:
    """Every task whose files are at hand, with every seed; the first seed of all tasks first."""
    missing = suite.missing()
    tasks = [task for task in suite.tasks if task not in missing]
    return [Job(suite, plan, task, seed, Path(out)) for seed in suite.seeds for task in tasks]
