"""Settings of one fine-tuning run: what is trained on what, and how. Read and checked without torch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lsrdecomp.errors import LsrError
from lsrdecomp.training.tasks import TASKS

EMBEDDED = "embedded"
JSONL = "jsonl"
METRICS_OF_TEXT = ("loss", "exact", "bleu", "chrf")
LANGUAGE_DEFAULTS = {"batch": 8, "max_length": 1024}
"""Where settings of a language model differ from what they are otherwise, unless they are given."""
METHOD_NAMES = (
    "lora",
    "rslora",
    "dora",
    "qlora",
    "lokr",
    "vera",
    "vblora",
    "fourierft",
    "c3a",
    "krona",
    "kadaptation",
    "direct",
    "lsr",
    "qlsr",
    "lsr-dora",
    "head",
)
FOUR_BIT_METHODS = ("qlora", "qlsr")
PRECISIONS = ("float32", "bfloat16", "bfloat16-autocast")


class SettingsError(LsrError, ValueError):
    """A setting is unknown or impossible; the message names it and what would do."""


@dataclass(frozen=True, slots=True)
class FinetuneSettings:
    """One run of `finetune`.

    Parameters
    ----------
    model : str
        The base, a name or a directory as transformers takes it; ``"embedded"`` for the small one made here.
    task : str
        A key of `lsrdecomp.training.tasks.TASKS`, or ``"jsonl"``: a language model on prompts and completions.
    data : str, optional
        Directory of the tasks' files; for a language model, the file of JSON lines (`calibration.dataset` tells what
        a line holds). Not needed for the embedded task.
    dev_data : str, optional
        For a language model, a file of its own to judge by; a tenth of ``data``, at most 200 examples, if absent.
    metric : {"loss", "exact", "bleu", "chrf"}
        For a language model, what is measured beside the loss of a completion token.
    answers : {"completion", "all"}
        For a language model, the tokens that are learned.
    samples, new_tokens : int
        For a language model, held-out prompts whose answers go into the record, and most tokens of an answer.
    split_seed : int
        For a language model, of the examples that are held out.
    method : str
        One of `METHOD_NAMES`; ``"head"`` adapts nothing and trains the head alone.
    options : mapping
        Settings of the method under the names its config has, such as ``r`` or ``separation_rank``.
    init : str, optional
        Adapter directory to start from, of the method's own kind; it brings its options, layers and head.
    head : str, optional
        Adapter directory whose saved head is the start of this run's head.
    target_modules : tuple of str, optional
        Endings of module names; the architecture's usual ones if absent.
    layers : tuple of int, optional
        Only these layer indices.
    rate : float
        Largest learning rate of the linear schedule.
    zero_rate : float
        Factor on the rate for parameters that start as all zeros, as in LoRA+. For LSR from scratch four
        times the rate was behind on SST-2 and STS-B, by ``benchmarks/experiments/ablation-minilm.toml``.
    head_rate : float, optional
        Learning rate of the head; ``rate`` if absent.
    batch : int
        Examples per step, over all processes.
    epochs, steps : float, int, optional
        Length of the run: one of the two; 3 epochs if neither is given.
    warmup : float
        Share of the steps over which the rate rises.
    max_length : int
        Tokens of an example; longer ones are cut.
    seed : int
        Of the start and of the order of examples; the splits are the same for every seed.
    precision : {"float32", "bfloat16", "bfloat16-autocast"}
        "bfloat16" loads the base in it and keeps trained parameters in float32.
    device : str
        "auto", "cpu", "cuda".
    gradient_checkpointing : bool
        Recompute activations in the backward pass.
    patience : int, optional
        Stop after so many evaluations on the validation split without a smaller loss, and keep the best; the whole run
        without a validation split if absent.
    validation : float
        Share of the training set that is split off, where ``patience`` is given. The dev set only ever measures.
    evaluate_every : int, optional
        Steps between those evaluations; an epoch if absent.
    train_head : bool
        False: the head keeps the values it starts with.
    measure_start : bool
        Also judge the answers on dev before the first step.
    train_examples, dev_examples : int, optional
        At most so many examples of each split, always the same ones.
    log_every : int
        Steps between entries of losses and of the layers' spectra; 0 for none, and then a run whose loss is no longer
        a number is not stopped early.
    save_every : int
        Steps between checkpoints to resume from; 0 for none.
    report_to : tuple of str
        What else transformers reports to, such as "tensorboard".

    Raises
    ------
    SettingsError
        Naming the setting, its value, and what it may be.
    """

    model: str
    task: str
    data: str | None = None
    method: str = "lora"
    options: Mapping[str, Any] = field(default_factory=dict)
    init: str | None = None
    head: str | None = None
    target_modules: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = None
    rate: float = 1e-3
    zero_rate: float = 1.0
    head_rate: float | None = None
    batch: int = 32
    epochs: float | None = None
    steps: int | None = None
    warmup: float = 0.06
    max_length: int = 128
    seed: int = 0
    precision: str = "float32"
    device: str = "auto"
    gradient_checkpointing: bool = False
    patience: int | None = None
    validation: float = 0.1
    evaluate_every: int | None = None
    train_head: bool = True
    measure_start: bool = False
    train_examples: int | None = None
    dev_examples: int | None = None
    log_every: int = 50
    save_every: int = 0
    report_to: tuple[str, ...] = ()
    dev_data: str | None = None
    metric: str = "loss"
    answers: str = "completion"
    samples: int = 4
    new_tokens: int = 64
    split_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("target_modules", "layers", "report_to"):
            self._settle_tuple(name)
        if not isinstance(self.options, Mapping):
            raise SettingsError(f"options must be a table of names and values, got {self.options!r}")
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))
        for name, (test, wanted) in CHECKS.items():
            value = getattr(self, name)
            if not (value is None and name in OPTIONAL) and not test(value):
                raise SettingsError(f"{name} must be {wanted}, got {value!r}")
        self._check_together()

    def _settle_tuple(self, name: str) -> None:
        value = getattr(self, name)
        if value is None or isinstance(value, tuple):
            return
        if not isinstance(value, list):
            raise SettingsError(f"{name} must be a list, got {value!r}")
        object.__setattr__(self, name, tuple(value))

    def _check_together(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise SettingsError(f"give epochs or steps, not both; got {self.epochs} and {self.steps}")
        if self.evaluate_every is not None and self.patience is None:
            raise SettingsError("evaluate_every is about early stopping: give patience too")
        if self.init is not None:
            given = [name for name in ("options", "target_modules", "layers", "head") if getattr(self, name)]
            if given:
                raise SettingsError(f"init brings its own {', '.join(given)}; leave out one or the other")
        if self.method == "head" and not self.train_head:
            raise SettingsError("method head trains the head alone: train_head = false leaves nothing to train")
        if self.task == JSONL:
            self._check_language()
        else:
            changed = [name for name in LANGUAGE_ALONE if getattr(self, name) != FIELDS[name].default]
            if changed:
                raise SettingsError(f"{', '.join(changed)}: for a language model, whose task is {JSONL}")
        if self.task not in (EMBEDDED, JSONL) and self.data is None:
            raise SettingsError(f"task {self.task} reads files: give data, the directory that holds {self.task}/")

    def _check_language(self) -> None:
        if self.data is None:
            raise SettingsError("a language model reads JSON lines: give data, a file such as train.jsonl")
        if self.model == EMBEDDED or self.method == "head" or self.head is not None or not self.train_head:
            raise SettingsError("a language model has no head to train: leave out head, train_head and model embedded")

    def to_json(self) -> dict[str, Any]:
        """Every setting, as JSON has it; `from_mapping` reads it back."""
        values = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        plain = values | {"options": dict(self.options)}
        return json.loads(json.dumps(plain, allow_nan=False))  # type: ignore[no-any-return]

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> FinetuneSettings:
        """Settings from a table as TOML or JSON gives it.

        Raises
        ------
        SettingsError
            If a key is unknown, one that is needed is missing, or a value is impossible.
        """
        known = [entry.name for entry in dataclasses.fields(cls)]
        unknown = [str(name) for name in values if name not in known]
        if unknown:
            raise SettingsError(f"no setting is called {', '.join(unknown)}; there are: {', '.join(known)}")
        if "task" not in values and str(values.get("data", "")).endswith(".jsonl"):
            values = {**values, "task": JSONL}
        if values.get("task") == JSONL:
            values = {**LANGUAGE_DEFAULTS, **values}
        missing = [name for name in ("model", "task") if name not in values]
        if missing:
            raise SettingsError(f"{' and '.join(missing)} must be given")
        return cls(**values)

    def replace(self, **changes: Any) -> FinetuneSettings:
        """The same with some settings changed; checked as a whole again."""
        return dataclasses.replace(self, **changes)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _count(least: int) -> tuple[Callable[[Any], bool], str]:
    return (
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
        f"a whole number, {least} or more",
    )


def _positive() -> tuple[Callable[[Any], bool], str]:
    return lambda value: _number(value) and value > 0, "a number above 0"


def _one_of(names: tuple[str, ...]) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value in names, f"one of {', '.join(names)}"


def _text() -> tuple[Callable[[Any], bool], str]:
    return lambda value: isinstance(value, str | Path) and bool(str(value)), "a text that is not empty"


def _truth() -> tuple[Callable[[Any], bool], str]:
    return lambda value: isinstance(value, bool), "true or false"


def _strings() -> tuple[Callable[[Any], bool], str]:
    return lambda value: all(isinstance(part, str) and part for part in value), "a list of names"


CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "model": _text(),
    "task": _one_of((*TASKS, JSONL)),
    "data": _text(),
    "method": _one_of(METHOD_NAMES),
    "init": _text(),
    "head": _text(),
    "target_modules": _strings(),
    "layers": (
        lambda value: bool(value) and all(isinstance(part, int) and part >= 0 for part in value),
        "a list of layer indices",
    ),
    "rate": _positive(),
    "zero_rate": _positive(),
    "head_rate": _positive(),
    "batch": _count(1),
    "epochs": _positive(),
    "steps": _count(1),
    "warmup": (lambda value: _number(value) and 0 <= value < 1, "at least 0 and below 1"),
    "max_length": _count(2),
    "seed": _count(0),
    "precision": _one_of(PRECISIONS),
    "device": _one_of(("auto", "cpu", "cuda")),
    "gradient_checkpointing": _truth(),
    "patience": _count(1),
    "validation": (lambda value: _number(value) and 0 < value < 1, "above 0 and below 1"),
    "evaluate_every": _count(1),
    "train_head": _truth(),
    "measure_start": _truth(),
    "train_examples": _count(1),
    "dev_examples": _count(1),
    "log_every": _count(0),
    "save_every": _count(0),
    "report_to": _strings(),
    "dev_data": _text(),
    "metric": _one_of(METRICS_OF_TEXT),
    "answers": _one_of(("completion", "all")),
    "samples": _count(0),
    "new_tokens": _count(1),
    "split_seed": _count(0),
}
LANGUAGE_ALONE = ("dev_data", "metric", "answers", "samples", "new_tokens", "split_seed")
FIELDS = {entry.name: entry for entry in dataclasses.fields(FinetuneSettings)}
OPTIONAL = tuple(entry.name for entry in dataclasses.fields(FinetuneSettings) if entry.default is None)
