"""A suite of fine-tuning runs: methods × tasks × seeds × one grid of rates for all, read from TOML without torch."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lsrdecomp.training.settings import EMBEDDED, FinetuneSettings, SettingsError
from lsrdecomp.training.tasks import TASKS

TABLES = ("common", "tasks", "methods", "recover")
VALUES = ("title", "seeds", "rates", "tune_seeds")
GIVEN_BY_THE_GRID = ("task", "rate", "seed")


class SuiteError(SettingsError):
    """A suite file says something impossible; the message names file and key."""


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """One method of a suite: its name in the tables, and the settings it brings."""

    label: str
    settings: Mapping[str, Any]
    against: str | None = None  # the arm it is to be judged by

    @property
    def slug(self) -> str:
        """The label as the name of a directory."""
        return slug(self.label)


@dataclass(frozen=True, slots=True)
class Suite:
    """What is to be run.

    Parameters
    ----------
    tasks : mapping
        Name of the task to settings of its own, over ``common`` and under those of a method.
    seeds : tuple of int
        Each method is reported over all of them.
    rates : tuple of float
        The learning rates tried, the same for every method.
    tune_seeds : int
        So many of the seeds see every rate, by which the rate is chosen; the others see the chosen one.
    common : mapping
        Settings of every run.
    recover : mapping
        The table of `lsrdecomp.experiments.recover`.
    """

    arms: tuple[MethodSpec, ...]
    tasks: Mapping[str, Mapping[str, Any]]
    seeds: tuple[int, ...] = (0,)
    rates: tuple[float, ...] = (1e-3,)
    tune_seeds: int = 1
    common: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    recover: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, numbers in (("seeds", self.seeds), ("rates", self.rates)):
            if not numbers or len(set(numbers)) < len(numbers):
                raise SuiteError(f"{name} must be different numbers, at least one, got {list(numbers)}")
        if not 1 <= self.tune_seeds <= len(self.seeds):
            raise SuiteError(f"tune_seeds must be 1 to {len(self.seeds)}, the number of seeds, got {self.tune_seeds}")
        if not self.tasks:
            raise SuiteError("a suite needs tables [tasks.…]")
        labels = [arm.label for arm in self.arms]
        for arm in self.arms:
            if sum(other.slug == arm.slug for other in self.arms) > 1:
                raise SuiteError(f"two methods would share the directory {arm.slug!r}; give them other names")
            if arm.against is not None and arm.against not in labels:
                raise SuiteError(f"methods.{arm.label}: against {arm.against!r}, which is not one of: {labels}")
        for arm in self.arms:
            for task in self.tasks:
                settings = self.settings(arm, task, self.rates[0], self.seeds[0])
                if len(self.rates) > 1 and settings.patience is None:
                    raise SuiteError(
                        f"methods.{arm.label}, tasks.{task}: several rates are compared on a split of the training "
                        "set, never on dev: give patience, so that there is one"
                    )

    def settings(self, arm: MethodSpec, task: str, rate: float, seed: int) -> FinetuneSettings:
        """The settings of one run.

        Raises
        ------
        SuiteError
            Naming the tables they come from, if they are impossible.
        """
        merged = {**self.common, **self.tasks[task], **arm.settings, "task": task, "rate": rate, "seed": seed}
        try:
            return FinetuneSettings.from_mapping(merged)
        except SettingsError as error:
            raise SuiteError(f"[common], [tasks.{task}] and [methods.{arm.label!r}] together: {error}") from error

    @property
    def public_settings(self) -> dict[str, Any]:
        """The common settings as results may tell them: without places on this machine."""
        shown = {name: value for name, value in self.common.items() if name != "data"}
        model = Path(str(shown.get("model", "")))
        return shown | {"model": "/".join(model.parts[-2:])} if model.is_absolute() else shown

    def missing(self) -> dict[str, str]:
        """Tasks whose files are not at hand, and the first that is missing."""
        found = {}
        for task in self.tasks:
            data = {**self.common, **self.tasks[task]}.get("data")
            if task == EMBEDDED or task not in TASKS or data is None:
                continue
            absent = [path for split in ("train", "dev") if not (path := TASKS[task].file(data, split)).exists()]
            if absent:
                found[task] = f"{absent[0]} is missing"
        return found


def read_suite(
    path: str | Path, overrides: Mapping[str, Any] | None = None, tasks: Sequence[str] | None = None
) -> Suite:
    """A suite from a TOML file.

    Parameters
    ----------
    path : path
        With ``title``, ``seeds``, ``rates``, ``tune_seeds`` at the top; settings of every run in ``[common]``, of a
        task in ``[tasks.NAME]``, of a method in ``[methods.LABEL]``.
    overrides : mapping, optional
        Settings for ``[common]`` from elsewhere, such as the command line.
    tasks : sequence of str, optional
        Only these of the suite's tasks.

    Raises
    ------
    SuiteError
        Naming the file and the key.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SuiteError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        suite = _suite(table, dict(overrides or {}))
    except (SettingsError, TypeError, ValueError) as error:
        raise SuiteError(f"{path}: {error}") from error
    if tasks is None:
        return suite
    unknown = [task for task in tasks if task not in suite.tasks]
    if unknown:
        raise SuiteError(f"{path}: has no task {unknown[0]!r}; its tasks are: {', '.join(suite.tasks)}")
    return replace(suite, tasks={task: suite.tasks[task] for task in tasks})


def _suite(table: Mapping[str, Any], overrides: Mapping[str, Any]) -> Suite:
    unknown = [key for key in table if key not in (*TABLES, *VALUES)]
    if unknown:
        raise SuiteError(f"unknown key {unknown[0]!r}; known: {', '.join((*VALUES, *TABLES))}")
    for name in TABLES:
        if not isinstance(table.get(name, {}), dict):
            raise SuiteError(f"{name} must be a table")
    tasks, methods = table.get("tasks", {}), table.get("methods", {})
    _check_table("common", table.get("common", {}))
    for kind, group in (("tasks", tasks), ("methods", methods)):
        for name, settings in group.items():
            _check_table(f"{kind}.{name}", settings)
    arms = []
    for label, settings in methods.items():
        own = dict(settings)
        against = own.pop("against", None)
        if "method" not in own:
            raise SuiteError(f"methods.{label} must say which method it is")
        arms.append(MethodSpec(label, own, against))
    return Suite(
        arms=tuple(arms),
        tasks=tasks,
        seeds=tuple(_numbers(table.get("seeds", [0]), "seeds", whole=True)),
        rates=tuple(_numbers(table.get("rates", [1e-3]), "rates")),
        tune_seeds=next(_numbers([table.get("tune_seeds", 1)], "tune_seeds", whole=True)),
        common={**table.get("common", {}), **overrides},
        title=str(table.get("title", "")),
        recover=table.get("recover", {}),
    )


def _check_table(name: str, settings: Any) -> None:
    if not isinstance(settings, dict):
        raise SuiteError(f"{name} must be a table of settings")
    fixed = [key for key in GIVEN_BY_THE_GRID if key in settings]
    if fixed:
        raise SuiteError(f"{name}: {fixed[0]} is the suite's: rates and seeds are one grid for every method")


def _numbers(values: Any, name: str, *, whole: bool = False) -> Iterator[Any]:
    if not isinstance(values, list):
        raise SuiteError(f"{name} must be a list, got {values!r}")
    for value in values:
        sound = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not (sound and math.isfinite(value) and value >= 0):
            raise SuiteError(f"{name}: {value!r} is not a {'whole ' if whole else ''}number of 0 or more")
        yield value


def slug(text: str) -> str:
    """Text as the name of a file or directory."""
    return re.sub(r"[^A-Za-z0-9.=_-]+", "-", text.replace("×", "x")).strip("-.") or "unnamed"
