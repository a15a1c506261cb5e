"""What compress-and-recover does: structures, budgets and steps, read from the table [recover] of a suite; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from lsrdecomp.compression.search import Search
from lsrdecomp.experiments.suite import Suite, SuiteError
from lsrdecomp.training.settings import FinetuneSettings, SettingsError
from lsrdecomp.training.tasks import TASKS


@dataclass(frozen=True, slots=True)
class Structure:
    """One way to compress the LoRA."""

    label: str
    functional: bool = False  # errors count in the K-FAC norm
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
        "lsr": Structure("LSR, K-FAC norm", functional=True),
        "lsr-int8": Structure("LSR in int8, K-FAC norm", functional=True, storage="int8", trained=False),
        "lsr-int4": Structure("LSR in int4, K-FAC norm", functional=True, storage="int4", trained=False),
        "lsr-paper": Structure("LSR, 16 terms, r = 2·2, K-FAC norm", functional=True, goal=PAPER),
        "svd": Structure("truncated SVD, Frobenius norm", search=ONLY_LOW_RANK),
        "svd-kfac": Structure("truncated SVD, K-FAC norm", functional=True, search=ONLY_LOW_RANK),
        "direct": Structure("direct Kronecker sum", functional=True, direct=True),
        "lora-int8": Structure("LoRA in int8", search=ONLY_LOW_RANK, storage="int8", goal=ALL_RANKS, trained=False),
    }
)
"""`lsr` is what `lsrdecomp compress` makes: truncated SVD is among its candidates, layer by layer."""


@dataclass(frozen=True, slots=True)
class RecoverPlan:
    """The table [recover].

    Parameters
    ----------
    budgets : tuple of int
        Parameters per adapted matrix, on average over them.
    steps : int
        Of recovery, and of training from scratch.
    lora : mapping
        Settings of the LoRA that is compressed, over those of the suite; its rate too.
    lora_of : mapping
        Some of them for single tasks, by the task.
    head : mapping
        Settings of the head alone, trained first and then kept.
    structures, scratch : tuple of str
        Keys of `STRUCTURES`; those that are also trained from scratch.
    tune_budget : int, optional
        The budget at which the rates of recovery and of training from scratch are chosen; the middle one if absent.
    judged : tuple of int
        Further budgets, at which each structure is judged as compressed and not trained on.
    samples : int
        Training examples for calibration.
    least_gain : float
        A LoRA that gains fewer nats on dev over its head alone is not compressed: shares of that would mean nothing.
    """

    budgets: tuple[int, ...]
    steps: int
    lora: Mapping[str, Any] = field(default_factory=dict)
    head: Mapping[str, Any] = field(default_factory=dict)
    lora_of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    structures: tuple[str, ...] = ("lsr", "svd-kfac", "svd", "lora-int8")
    scratch: tuple[str, ...] = ("lsr", "svd-kfac")
    tune_budget: int | None = None
    judged: tuple[int, ...] = ()
    samples: int = 512
    least_gain: float = 0.01

    def __post_init__(self) -> None:
        for name in ("budgets", "judged", "structures", "scratch"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, list | tuple):
                raise SuiteError(f"recover.{name} must be a list, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        counts = {"steps": [self.steps], "budgets": list(self.budgets), "samples": [self.samples]}
        for name, values in counts.items():
            if not values or not _counts(values):
                raise SuiteError(f"recover.{name}: whole numbers of 1 or more, got {values}")
        if not _counts(self.judged) or set(self.judged) & set(self.budgets):
            raise SuiteError(f"recover.judged: whole numbers of 1 or more beside the budgets, got {list(self.judged)}")
        if isinstance(self.least_gain, bool) or not isinstance(self.least_gain, int | float) or self.least_gain <= 0:
            raise SuiteError(f"recover.least_gain must be a number above 0, got {self.least_gain!r}")
        unknown = [name for name in (*self.structures, *self.scratch) if name not in STRUCTURES]
        if unknown:
            raise SuiteError(f"recover: no structure is called {unknown[0]!r}; there are: {', '.join(STRUCTURES)}")
        odd = [name for name in self.scratch if name not in self.structures or not STRUCTURES[name].trained]
        if odd:
            raise SuiteError(f"recover.scratch: {odd[0]} is not among the structures that are trained here")
        if self.tune_budget is not None and self.tune_budget not in self.budgets:
            raise SuiteError(f"recover.tune_budget {self.tune_budget} is not one of the budgets {list(self.budgets)}")

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
        If there is no table [recover], a key of it is unknown or missing, or a setting is impossible.
    """
    known = [entry.name for entry in fields(RecoverPlan)]
    unknown = [name for name in suite.recover if name not in known]
    missing = [name for name in ("budgets", "steps") if name not in suite.recover]
    if unknown or missing:
        what = f"no key is called {unknown[0]}" if unknown else f"{' and '.join(missing)} must be given"
        raise SuiteError(f"[recover]: {what}; known: {', '.join(known)}")
    plan = RecoverPlan(**suite.recover)
    strange = [task for task in plan.lora_of if task not in TASKS]  # the suite may have been cut to some of its own
    if strange:
        raise SuiteError(f"recover.lora_of: no task is called {strange[0]!r}; there are: {', '.join(TASKS)}")
    for task in suite.tasks:
        for seed in suite.seeds:
            head_settings(suite, plan, task, seed)
            lora_settings(suite, plan, task, seed, "head")
    return plan


def head_settings(suite: Suite, plan: RecoverPlan, task: str, seed: int) -> FinetuneSettings:
    """Of the head alone, which all arms of a seed then share."""
    return _held_out(_settings(suite, task, {"method": "head", **plan.head, "seed": seed}))


def lora_settings(suite: Suite, plan: RecoverPlan, task: str, seed: int, head: str) -> FinetuneSettings:
    """Of the LoRA that is compressed."""
    own = {"method": "lora", **plan.lora, **plan.lora_of.get(task, {}), "seed": seed, "head": head, "train_head": False}
    return _held_out(_settings(suite, task, own))


def further_settings(suite: Suite, plan: RecoverPlan, task: str, **changes: Any) -> FinetuneSettings:
    """Of ``plan.steps`` more steps from an adapter, or from scratch; judged on the validation split at their end."""
    own = {"steps": plan.steps, "evaluate_every": plan.steps, "patience": 1, "train_head": False}
    return _settings(suite, task, {**own, **changes}, plain="init" in changes)


def _counts(values: Iterable[Any]) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) and v >= 1 for v in values)


def _held_out(settings: FinetuneSettings) -> FinetuneSettings:
    """Without the validation split: rates are chosen on it later, so nothing may have been trained on it."""
    if settings.patience is not None:
        return settings
    return settings.replace(patience=NEVER, evaluate_every=settings.steps)


def _settings(suite: Suite, task: str, own: Mapping[str, Any], *, plain: bool = False) -> FinetuneSettings:
    merged = {**suite.common, **suite.tasks[task], "task": task, **own}
    if plain:  # an adapter brings its own layers
        merged = {name: value for name, value in merged.items() if name not in ("target_modules", "layers", "options")}
    if "steps" in own:
        merged.pop("epochs", None)
    try:
        return FinetuneSettings.from_mapping(merged)
    except SettingsError as error:
        raise SuiteError(f"[common], [tasks.{task}] and [recover] together: {error}") from error
