"""A suite of fine-tuning runs: methods × tasks × seeds × one grid of rates, read without torch."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from benchmarks.lab.embedded import EMBEDDED
from benchmarks.lab.tasks import TASKS, published, write_files
from lsrdecomp.fields import POSITIVE, Check, Settings, list_of, settings, whole_number
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings, SettingsError

GIVEN_BY_THE_GRID = ("task", "learning_rate", "seed")


class SuiteError(SettingsError):
    """A suite file says something impossible; the message names file and key."""


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """One method of a suite: its name in the tables, and the settings it brings."""

    label: str
    settings: Mapping[str, Any]
    against: str | None = None  # the method it is to be judged by

    @property
    def slug(self) -> str:
        """The label as the name of a directory."""
        return slug(self.label)


def _different(check: Check, wanted: str) -> Check:
    """A list of at least one part that passes ``check``, all different."""
    listed = list_of(check, wanted, min_length=1)
    return Check(
        lambda values: listed.test(values) and len(set(values)) == len(values), listed.requirement
    )


@settings
class Suite(Settings):
    """What is to be run. A method's settings go over its task's, and those over the common ones.

    Examples
    --------
    >>> methods = {"LoRA": {"method": "lora"}, "LSR": {"method": "lsr"}}
    >>> common, tasks = {"base": "embedded"}, {"embedded": {}}
    >>> suite = Suite(seeds=(0, 1), common=common, tasks=tasks, methods=methods)
    >>> suite.missing()                                  # tasks whose files are not there, and why
    {}
    """

    error = SuiteError
    title: Annotated[
        str, Check(lambda value: isinstance(value, str), lambda: "a text"), "Of the tables."
    ] = ""
    seeds: Annotated[
        tuple[int, ...],
        _different(whole_number(0), "different whole numbers of 0 or more, at least one"),
        "Each method is reported over all of them.",
    ] = (0,)
    rates: Annotated[
        tuple[float, ...],
        _different(POSITIVE, "different numbers above 0, at least one"),
        "The learning rates tried, the same for every method.",
    ] = (1e-3,)
    tune_seeds: Annotated[
        int,
        (
            "So many of the seeds see every rate, by which the rate is chosen; the others see the "
            "chosen one."
        ),
    ] = 1
    common: Annotated[Mapping[str, Any], "Settings of every run."] = field(default_factory=dict)
    tasks: Annotated[Mapping[str, Any], "Settings of a task, in a table under its name."] = field(
        default_factory=dict
    )
    methods: Annotated[
        Mapping[str, Any],
        "Settings of a method, in a table under a label; against is the label it is judged by.",
    ] = field(default_factory=dict)
    recover: Annotated[
        Mapping[str, Any], "The table of `benchmarks.lab.recover.plan.RecoverPlan`."
    ] = field(default_factory=dict)

    def check_together(self) -> None:
        """Every table and every run that would come of it."""
        if not 1 <= self.tune_seeds <= len(self.seeds):
            raise SuiteError(
                f"tune_seeds must be 1 to {len(self.seeds)}, the number of seeds, got "
                f"{self.tune_seeds}"
            )
        if not self.tasks:
            raise SuiteError("a suite needs tables [tasks.…]")
        _check_table("common", self.common)
        for kind in ("tasks", "methods"):
            for name, table in getattr(self, kind).items():
                _check_table(f"{kind}.{name}", table)
        for spec in self.specs:
            if "method" not in spec.settings:
                raise SuiteError(f"methods.{spec.label} must say which method it is")
            if sum(other.slug == spec.slug for other in self.specs) > 1:
                raise SuiteError(
                    f"two methods would share the directory {spec.slug!r}; give them other names"
                )
            if spec.against is not None and spec.against not in self.methods:
                raise SuiteError(
                    f"methods.{spec.label}: against {spec.against!r}, not one of: "
                    f"{list(self.methods)}"
                )
            for task in self.tasks:
                first = self.settings(spec, task, self.rates[0], self.seeds[0])
                if len(self.rates) > 1 and first.patience is None:
                    raise SuiteError(
                        f"methods.{spec.label}, tasks.{task}: several rates are compared on a "
                        "split of the training set, never on dev: give patience, so that there "
                        "is one"
                    )

    @property
    def specs(self) -> tuple[MethodSpec, ...]:
        """The methods, in their order."""
        return tuple(
            MethodSpec(
                label,
                {name: value for name, value in table.items() if name != "against"},
                table.get("against"),
            )
            for label, table in self.methods.items()
        )

    def settings(self, spec: MethodSpec, task: str, rate: float, seed: int) -> FinetuneSettings:
        """The settings of one run.

        Raises
        ------
        SuiteError
            Naming the tables they come from, if they are impossible.
        """
        grid = {"task": task, "learning_rate": rate, "seed": seed}
        tables = (self.common, self.tasks[task], spec.settings, grid)
        return merged(tables, f"[common], [tasks.{task}] and [methods.{spec.label!r}] together")

    @property
    def public_settings(self) -> dict[str, Any]:
        """The common settings as results may tell them: without places on this machine."""
        shown = {name: value for name, value in self.common.items() if name != "data"}
        base = Path(str(shown.get("base", "")))
        return shown | {"base": "/".join(base.parts[-2:])} if base.is_absolute() else shown

    def missing(self) -> dict[str, str]:
        """Tasks whose files are not at hand, and the first that is missing."""
        found = {}
        for task in self.tasks:
            data = {**self.common, **self.tasks[task]}.get("data")
            if task == EMBEDDED or task not in TASKS or data is None:
                continue
            absent = [
                path
                for split in ("train", "dev")
                if not (path := TASKS[task].file(data, split)).exists()
            ]
            if absent:
                found[task] = f"{absent[0]} is missing"
        return found

    def write_files(self) -> None:
        """Make what the runs read: the embedded base, and the files of published tasks."""
        missing = self.missing()
        for task in self.tasks:
            if task not in missing:
                write_files({**self.common, **self.tasks[task], "task": task})


def merged(tables: Sequence[Mapping[str, Any]], where: str) -> FinetuneSettings:
    """Merge tables of settings, each over those before it, whatever spelling of a name each has.

    Raises
    ------
    SuiteError
        If they are impossible; ``where`` says which tables they are.
    """
    try:
        values = {
            name: value
            for table in tables
            for name, value in FinetuneSettings.checked_names(table).items()
        }
        return FinetuneSettings.from_mapping(published(values))
    except SettingsError as error:
        raise SuiteError(f"{where}: {error}") from error


def read_suite(
    path: str | Path, overrides: Mapping[str, Any] | None = None, tasks: Sequence[str] | None = None
) -> Suite:
    """A suite from a TOML file.

    Parameters
    ----------
    path : path
        The fields of `Suite`: settings of every run in ``[common]``, of a task in ``[tasks.NAME]``,
        of a method in ``[methods.LABEL]``.
    overrides : mapping, optional
        Settings for ``[common]`` from elsewhere, such as the command line.
    tasks : sequence of str, optional
        Only these of the suite's tasks.

    Raises
    ------
    SuiteError
        Naming the file and the key.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as place:
    ...     file = Path(place) / "suite.toml"
    ...     lines = ['common.base = "embedded"', 'methods.LoRA.method = "lora"']
    ...     lines += ["seeds = [0]", "tasks.embedded = {}"]
    ...     _ = file.write_text("\\n".join(lines), encoding="utf-8")
    ...     suite = read_suite(file)
    >>> suite.seeds, list(suite.tasks), list(suite.methods)
    ((0,), ['embedded'], ['LoRA'])
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        if overrides and isinstance(table.get("common", {}), dict):
            table["common"] = {
                **FinetuneSettings.checked_names(table.get("common", {})),
                **overrides,
            }
        suite = Suite.from_mapping(table)
    except (OSError, ValueError) as error:
        raise SuiteError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if tasks is None:
        return suite
    unknown = [task for task in tasks if task not in suite.tasks]
    if unknown:
        raise SuiteError(
            f"{path}: has no task {unknown[0]!r}; its tasks are: {', '.join(suite.tasks)}"
        )
    return suite.replace(tasks={task: suite.tasks[task] for task in tasks})


def _check_table(name: str, table: Any) -> None:
    if not isinstance(table, Mapping):
        raise SuiteError(f"{name} must be a table of settings")
    fixed = [key for key in GIVEN_BY_THE_GRID if key in table]
    if fixed:
        raise SuiteError(
            f"{name}: {fixed[0]} is the suite's: rates and seeds are one grid for every method"
        )


def slug(text: str) -> str:
    """Text as the name of a file or directory."""
    return re.sub(r"[^A-Za-z0-9.=_-]+", "-", text.replace("×", "x")).strip("-.") or "unnamed"
