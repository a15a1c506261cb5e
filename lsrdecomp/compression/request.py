"""A request of compression as one value: the goal, the road that reaches it, the settings it reads.

`lsrdecomp.compress`, `truncate`, `search_adapter` and ``lsrdecomp compress`` all ask
`Request.parse`, before anything is opened. A setting that the road does not read is refused by
name, with the road that reads it. `READ_ON` is the one table of settings and roads; a place of
requests, such as the command line, adds its own options and its spelling (`Interface`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lsrdecomp.compression.measured_settings import MeasuredSettings
from lsrdecomp.compression.settings import GOALS, STORAGES, CompressionPlan, Resources
from lsrdecomp.errors import BudgetError
from lsrdecomp.fields import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from lsrdecomp.checkpoints.progress import OnStep


class Road(Enum):
    """A way from a goal to an adapter."""

    SEARCHED = "searched"
    """Shapes are searched for each layer, to a size or an error."""
    GIVEN_TERMS = "given terms"
    """Every layer gets the same number of terms; nothing is searched."""
    MEASURED = "measured"
    """A base answers texts, and what the result keeps of the LoRA's effect is measured."""
    TRUNCATED = "truncated"
    """A LoRA file is cut by truncated SVD, and stays in its own format."""


ALL_ROADS = frozenset(Road)
TO_DIRECTORY = ALL_ROADS - {Road.TRUNCATED}
"""Roads that write a directory of LSR."""
_MEASURED = frozenset({Road.MEASURED})
_SEARCHING = frozenset({Road.SEARCHED, Road.MEASURED})
_SIZED = frozenset({Road.SEARCHED, Road.MEASURED, Road.TRUNCATED})

READ_ON: Mapping[str, frozenset[Road]] = MappingProxyType(
    {
        # Goals: one of them is asked for.
        "ratio": _SIZED,
        "parameters": _SIZED,
        "bytes": _SIZED,
        "rtol": _SIZED,
        "kl": _SEARCHING,
        "keep": _MEASURED,
        "separation_rank": frozenset({Road.GIVEN_TERMS, Road.MEASURED}),
        # The rest of a plan.
        "inner_shape": frozenset({Road.GIVEN_TERMS, Road.MEASURED}),
        "max_rank": _SIZED,
        "storage": ALL_ROADS,
        # How it is searched, and with what.
        "statistics": TO_DIRECTORY,
        "search": _SEARCHING,
        "workers": _SEARCHING,
        "journal": _SEARCHING,
        "device": TO_DIRECTORY,
        "on_step": ALL_ROADS,
        # How a base is asked.
        "base": _MEASURED,
        "data": _MEASURED,
        "held_out": _MEASURED,
        "batch": _MEASURED,
        "max_length": _MEASURED,
        "truncate": _MEASURED,
        "dtype": _MEASURED,
        "seed": _MEASURED,
        "distil": _MEASURED,
        "examples": _MEASURED,
        "passes": _MEASURED,
    }
)
"""The roads that read each setting of the library."""

SEARCH_ONLY = ("search", "workers")
"""Settings of a search, which ``separation_rank`` does not need on any road."""

PREFERRED = (Road.SEARCHED, Road.GIVEN_TERMS, Road.MEASURED)
"""The order in which a refusal names a road that reads a setting: what asks for least first."""


@dataclass(frozen=True, slots=True)
class Interface:
    """Python or the command line: its spelling of settings, and its own options."""

    name: Callable[[str], str]
    """A setting as the subject of a sentence, such as ``passes`` or ``--passes``."""
    argument: Callable[[str], str]
    """A setting as one would give it, such as ``base=`` or ``--base``."""
    goals: str
    """What to ask for, after "one goal is needed, got none: "."""
    leave_truncated: str
    """How to ask for a directory of LSR instead of a cut file, after "is read "."""
    own_options: Mapping[str, Collection[Road]] = field(default_factory=dict)
    """The roads that read each option that only this place has."""


PYTHON = Interface(
    name=str,
    argument="{}=".format,
    goals=(
        "a relative error (rtol), a number of terms (separation_rank), or a size (parameters, "
        "ratio, bytes) or divergence (kl) for all layers together, or with a base a share to keep "
        "(keep)"
    ),
    leave_truncated="by lsrdecomp.compress",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One goal, the road that reaches it, and what that road reads.

    Examples
    --------
    >>> Request.parse({"ratio": 48}).road
    <Road.SEARCHED: 'searched'>
    >>> Request.parse({"ratio": 48, "passes": 2})
    Traceback (most recent call last):
    lsrdecomp.fields.SettingsError: passes is read with base=
    """

    road: Road
    goal: str  # the name of the field: one of GOALS, or keep
    plan: CompressionPlan | None = None  # None: the goal is a share, which makes plans of its own
    storage: str | None = None  # None: not asked for; see `for_adapter`
    max_rank: int | None = None
    base: Any = None
    data: Any = None
    statistics: Any = None
    search: Any = None
    workers: int = 1
    device: str | None = None
    journal: Any = None
    measured: MeasuredSettings | None = None  # None: no base is asked

    @classmethod
    def parse(
        cls,
        given: Mapping[str, Any],
        *,
        plan: CompressionPlan | None = None,
        to_file: bool = False,
        interface: Interface = PYTHON,
    ) -> Request:
        """Return the request that these settings make, all of which are read.

        Parameters
        ----------
        given : Mapping of name to value
            What the caller gave: names of `READ_ON` and of ``interface.own_options``. None stands
            for nothing given.
        plan : CompressionPlan, optional
            The goal and what belongs to it, in place of its fields in ``given``.
        to_file : bool
            Whether a LoRA file is to come back in its own format.
        interface : Interface
            Where the request is made.

        Raises
        ------
        BudgetError
            Unless there is one goal, or where a plan and its fields contradict each other.
        SettingsError
            For a setting that the road does not read, by name, with a way to a road that does.
        """
        given = {name: value for name, value in given.items() if value is not None}
        # 1. The goal.
        goal = _goal(given, plan, interface)
        # 2. The road.
        if to_file:
            road = Road.TRUNCATED
        elif "base" in given:
            road = Road.MEASURED
        elif goal == "separation_rank":
            road = Road.GIVEN_TERMS
        else:
            road = Road.SEARCHED
        base = interface.argument("base")
        data = interface.argument("data")
        if goal == "keep" and road is Road.SEARCHED:
            raise BudgetError(
                f"a share to keep is measured on a base: give {base} and {data} with "
                f"{interface.argument('keep')}; without one, as for image models, ask for a size, "
                f"such as {_example(interface, 'ratio', 4)}"
            )
        # 3. What this road does not read, and what it cannot do without.
        _refuse_unread(given, plan, goal, road, interface)
        if road is Road.MEASURED and "data" not in given:
            raise BudgetError(
                f"what is kept is measured on texts of the task: give {data} with {base}"
            )
        # 4. The plan, and how the base is asked: checked as they are made.
        return cls._checked(given, plan, goal, road)

    @classmethod
    def _checked(
        cls, given: Mapping[str, Any], plan: CompressionPlan | None, goal: str, road: Road
    ) -> Request:
        """Return the request of settings that are all read."""
        if plan is not None:
            options = {"storage": given["storage"]} if "storage" in given else {}
            plan = plan.replace(**options)
            if road is not Road.TRUNCATED:
                plan = plan.with_default_storage()
        else:
            fields = {name: given[name] for name in CompressionPlan.fields if name in given}
            # A share to keep makes plans of sizes later; what belongs to all of them is checked
            # now.
            if goal == "keep":
                fields["ratio"] = 2.0
            plan = CompressionPlan(**fields)
        if plan.kl is not None and road is Road.SEARCHED:
            check_divergence(plan, "statistics" in given)
        measured = None
        if road is Road.MEASURED:
            fields = {name: given[name] for name in MeasuredSettings.fields if name in given}
            measured = MeasuredSettings(**fields)
        names = ("base", "data", "statistics", "search", "workers", "device", "journal")
        return cls(
            road=road,
            goal=goal,
            plan=None if goal == "keep" else plan,
            storage=plan.storage,
            max_rank=plan.max_rank,
            measured=measured,
            **{name: given[name] for name in names if name in given},
        )

    def for_adapter(self, storage: str) -> Request:
        """Return the request with a storage: the one asked for, or what suits goal and adapter."""
        if self.storage is not None or self.road is Road.TRUNCATED:
            return self
        if self.road is Road.MEASURED and self.goal in ("keep", "bytes"):
            storage = "auto"  # few bytes are wanted, and the base says what each layer's bits keep
        plan = None if self.plan is None else self.plan.replace(storage=storage)
        return replace(self, plan=plan, storage=storage)

    def resources(self, on_step: OnStep | None) -> Resources:
        """Return what of the settings the solvers read."""
        journal = None if self.goal == "separation_rank" else self.journal
        return Resources(self.workers, self.device, journal, on_step)


def check_divergence(plan: CompressionPlan, has_statistics: bool) -> None:
    """Raise `BudgetError` for a plan of a divergence without statistics, which measure it."""
    if plan.kl is not None and not has_statistics:
        raise BudgetError(
            "a divergence (kl) is measured in the Fisher norm: calibrate first and pass the "
            "statistics"
        )


def check_given_terms(resources: Resources, search: object) -> None:
    """Raise `SettingsError` for settings of a search where all layers get terms that are given."""
    given = {"search": search, "journal": resources.journal}
    if resources.workers != Resources().workers:
        given["workers"] = resources.workers
    found = {name: value for name, value in given.items() if value is not None}
    _refuse_unread(found, None, "separation_rank", Road.GIVEN_TERMS, PYTHON)


def _goal(given: Mapping[str, Any], plan: CompressionPlan | None, interface: Interface) -> str:
    """Return the name of the one goal."""
    if plan is not None:
        beside = [name for name in CompressionPlan.fields if name in given]
        if plan.storage is None and "storage" in beside:
            beside.remove("storage")
        if beside:
            raise BudgetError(
                f"a plan was given, and {' and '.join(beside)} beside it: one of the two"
            )
    goals = ["keep"] if "keep" in given else []
    goals += [name for name in GOALS if name in given]
    if plan is not None:
        goals += [name for name in GOALS if getattr(plan, name) is not None]
    if len(goals) != 1:
        names = " and ".join(map(interface.name, goals)) or "none"
        raise BudgetError(f"one goal is needed, got {names}: {interface.goals}")
    return goals[0]


def _refuse_unread(
    given: Mapping[str, Any],
    plan: CompressionPlan | None,
    goal: str,
    road: Road,
    interface: Interface,
) -> None:
    """Raise `SettingsError` for what the road does not read, with the way to a road that does."""
    requested = dict(given)
    if plan is not None:
        requested |= plan.to_json()
    ways: dict[str, list[str]] = {}
    for name, value in requested.items():
        way = _way_to_be_read(name, value, goal, road, interface)
        if way:
            subject = (
                _example(interface, name, value) if name == "storage" else interface.name(name)
            )
            ways.setdefault(way, []).append(subject)
    if ways:
        parts = [f"{_listed(names)} read {way}" for way, names in ways.items()]
        raise SettingsError("; ".join(parts))


def _way_to_be_read(name: str, value: object, goal: str, road: Road, interface: Interface) -> str:
    """Return how to ask so that a setting is read, such as "with base="; nothing if it is read."""
    readers = frozenset(interface.own_options.get(name) or READ_ON[name])
    # 1. A file that is cut: another road begins with a directory. No LoRA file holds integers.
    in_integers = name == "storage" and value in STORAGES
    if road is Road.TRUNCATED and (in_integers or road not in readers):
        if readers == _MEASURED and name not in ("base", "data"):
            return f"{interface.leave_truncated}, with {interface.argument('base')}"
        return interface.leave_truncated
    # 2. Terms that are given: nothing is searched, with a base or without.
    is_unread = road not in readers or (goal == "separation_rank" and name in SEARCH_ONLY)
    if goal == "separation_rank" and is_unread and Road.SEARCHED in readers:
        return f"with a goal that is searched for, such as {interface.argument('ratio')}"
    # 3. All others: the road that asks for least.
    if not is_unread:
        return ""
    other = next(each for each in PREFERRED if each in readers)
    condition = "base" if other is Road.MEASURED else "separation_rank"
    return f"with {interface.argument(condition)}"


def _listed(names: list[str]) -> str:
    """Return the names as the subject of a sentence, with its verb: "a is", "a, b and c are"."""
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{', '.join(names[:-1])} and {names[-1]} are"


def _example(interface: Interface, name: str, value: object) -> str:
    """Return a setting with a value, as it would be given."""
    argument = interface.argument(name)
    return f"{argument}{value}" if argument.endswith("=") else f"{argument} {value}"
