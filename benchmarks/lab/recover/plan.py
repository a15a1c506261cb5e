"""Structures, budgets and steps of compress-and-recover, from the table [recover]; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any

from benchmarks.lab.suite import Suite, SuiteError, merged
from benchmarks.lab.tasks import TASKS
from lsrdecomp.fields import POSITIVE, Check, Settings, list_of, one_of, settings, whole_number
from lsrdecomp.lora.search.plan import Search
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings


@dataclass(frozen=True, slots=True)
class Structure:
    """One way to compress the LoRA."""

    label: str
    functional: bool = False  # errors count in the Fisher norm
    search: Search = field(default_factory=Search)
    storage: str = "float32"
    goal: Mapping[str, Any] | None = None  # of the plan of compression, in place of a budget
    trained: bool = True  # its factors can be trained on: it is recovered, and trained from scratch
    direct: bool = False

    @property
    def budgeted(self) -> bool:
        """Whether its size is one of the plan's budgets."""
        return self.goal is None


NEVER = 10**6
"""Evaluations without a smaller loss before a run stops."""
ONLY_LOW_RANK = Search(orders=())
ALL_RANKS = {"parameters": float(2**53)}  # more than there are: every rank
PAPER = {"separation_rank": 16, "inner_shape": (2, 2)}  # LSR-Adapt, section 4; the most even sizes
STRUCTURES: Mapping[str, Structure] = MappingProxyType(
    {
        "lsr": Structure("LSR, Fisher norm", functional=True),
        "lsr-int8": Structure(
            "LSR in int8, Fisher norm", functional=True, storage="int8", trained=False
        ),
        "lsr-int4": Structure(
            "LSR in int4, Fisher norm", functional=True, storage="int4", trained=False
        ),
        "lsr-paper": Structure("LSR, 16 terms, r = 2·2, Fisher norm", functional=True, goal=PAPER),
        "svd": Structure("truncated SVD, Frobenius norm", search=ONLY_LOW_RANK),
        "svd-kfac": Structure("truncated SVD, Fisher norm", functional=True, search=ONLY_LOW_RANK),
        "direct": Structure("direct Kronecker sum", functional=True, direct=True),
        "lora-int8": Structure(
            "LoRA in int8", search=ONLY_LOW_RANK, storage="int8", goal=ALL_RANKS, trained=False
        ),
    }
)
"""`lsr` is what `lsrdecomp compress` makes: truncated SVD is among its candidates, layer by
layer."""


def _counts(min_length: int = 0) -> Check:
    return list_of(whole_number(1), "a list of whole numbers of 1 or more", min_length=min_length)


KEYS = list_of(
    one_of(tuple(STRUCTURES)), f"a list of structures, which are {', '.join(STRUCTURES)}"
)


@settings
class RecoverPlan(Settings):
    """The table [recover].

    Examples
    --------
    >>> plan = RecoverPlan(budgets=(256, 1024), steps=100)
    >>> plan.structures
    ('lsr', 'svd-kfac', 'svd', 'lora-int8')
    >>> plan.scratch                                     # trained from nothing beside them
    ('lsr', 'svd-kfac')
    """

    error = SuiteError
    budgets: Annotated[
        tuple[int, ...],
        _counts(min_length=1),
        "Parameters per adapted matrix, on average over them.",
    ]
    steps: Annotated[int, whole_number(1), "Of recovery, and of training from scratch."]
    lora: Annotated[
        Mapping[str, Any], "Settings of the LoRA that is compressed, over those of the suite."
    ] = field(default_factory=dict)
    head: Annotated[
        Mapping[str, Any], "Settings of the head alone, trained first and then kept."
    ] = field(default_factory=dict)
    lora_of: Annotated[
        Mapping[str, Any], "Some of the LoRA's for single tasks, in a table by the task."
    ] = field(default_factory=dict)
    structures: Annotated[
        tuple[str, ...], KEYS, "What the LoRA is compressed to: keys of `STRUCTURES`."
    ] = (
        "lsr",
        "svd-kfac",
        "svd",
        "lora-int8",
    )
    scratch: Annotated[tuple[str, ...], KEYS, "Those that are also trained from scratch."] = (
        "lsr",
        "svd-kfac",
    )
    tune_budget: Annotated[
        int | None,
        (
            "Budget at which the learning rates of both trainings are chosen; the middle one if "
            "absent."
        ),
    ] = None
    distill: Annotated[
        int,
        whole_number(0),
        "Steps of distillation of budgeted forms (not direct sums), without labels; 0: none.",
    ] = 0
    judged: Annotated[
        tuple[int, ...],
        _counts(),
        "Further budgets, at which structures are judged as compressed, not trained on.",
    ] = ()
    samples: Annotated[int, whole_number(1), "Training examples for calibration."] = 512
    least_gain: Annotated[
        float,
        POSITIVE,
        (
            "A LoRA that gains fewer nats on dev over its head alone is not compressed: shares of "
            "that would mean nothing."
        ),
    ] = 0.01

    def check_together(self) -> None:
        """Lists against each other."""
        if set(self.judged) & set(self.budgets):
            raise SuiteError(
                f"judged must be budgets beside {list(self.budgets)}, got {list(self.judged)}"
            )
        odd = [
            name
            for name in self.scratch
            if name not in self.structures or not STRUCTURES[name].trained
        ]
        if odd:
            raise SuiteError(f"scratch: {odd[0]} is not among the structures that are trained here")
        if self.tune_budget is not None and self.tune_budget not in self.budgets:
            raise SuiteError(
                f"tune_budget {self.tune_budget} is not one of the budgets {list(self.budgets)}"
            )
        # The suite may have been cut to some of its own.
        strange = [task for task in self.lora_of if task not in TASKS]
        if strange:
            raise SuiteError(
                f"lora_of: no task is called {strange[0]!r}; there are: {', '.join(TASKS)}"
            )

    @property
    def tuned_at(self) -> int:
        """The budget at which rates are chosen."""
        ordered = sorted(self.budgets)
        return ordered[len(ordered) // 2] if self.tune_budget is None else self.tune_budget


def recover_plan(suite: Suite) -> RecoverPlan:
    """The plan of a suite, with every setting checked.

    Raises
    ------
    SuiteError
        If there is no table [recover], a key of it is unknown or missing, or a setting is
        impossible.
    """
    try:
        plan = RecoverPlan.from_mapping(suite.recover)
    except SuiteError as error:
        raise SuiteError(f"[recover] {error}") from error
    for task in suite.tasks:
        for seed in suite.seeds:
            head_settings(suite, plan, task, seed)
            lora_settings(suite, plan, task, seed, "head")
    return plan


def head_settings(suite: Suite, plan: RecoverPlan, task: str, seed: int) -> FinetuneSettings:
    """Of the head alone, which all runs of a seed then share."""
    return _held_out(_settings(suite, task, {"method": "head"}, plan.head, {"seed": seed}))


def lora_settings(
    suite: Suite, plan: RecoverPlan, task: str, seed: int, head: str
) -> FinetuneSettings:
    """Of the LoRA that is compressed."""
    fixed = {"seed": seed, "head": head, "train_head": False}
    return _held_out(
        _settings(suite, task, {"method": "lora"}, plan.lora, plan.lora_of.get(task, {}), fixed)
    )


def further_settings(
    suite: Suite, plan: RecoverPlan, task: str, **changes: Any
) -> FinetuneSettings:
    """Return settings of ``plan.steps`` more steps, judged on the validation split at their end."""
    own = {"steps": plan.steps, "evaluate_every": plan.steps, "patience": 1, "train_head": False}
    return _settings(suite, task, own, changes, plain="init" in changes)


def _held_out(settings: FinetuneSettings) -> FinetuneSettings:
    """Return settings without the validation split.

    Rates are chosen on it later, so nothing may have been trained on it.
    """
    if settings.patience is not None:
        return settings
    return settings.replace(patience=NEVER, evaluate_every=settings.steps)


def _settings(
    suite: Suite, task: str, *own: Mapping[str, Any], plain: bool = False
) -> FinetuneSettings:
    tables = [suite.common, suite.tasks[task], {"task": task}, *own]
    # An adapter brings its own layers.
    left: set[str] = {"target_modules", "layers", "options"} if plain else set()
    if any("steps" in table for table in own):
        left |= {"epochs"}
    tables = [
        {name: value for name, value in table.items() if name not in left} for table in tables
    ]
    return merged(tables, f"[common], [tasks.{task}] and [recover] together")
