"""A request of compression: its goal, the route to the goal, and the settings of that route.

`lsrdecomp.compress`, `truncate`, `search_adapter` and ``lsrdecomp compress`` all call
`Request.parse` before they open anything. A setting that the route does not read is refused by
name, with the route that reads it: the annotation of a setting says which do, and `READ_ON` is read
from these. The command line adds its own options and spells settings in its own way (`Interface`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from lsrdecomp.errors import BudgetError
from lsrdecomp.fields import SettingsError
from lsrdecomp.gateway import TRUST
from lsrdecomp.lora.search.measured_settings import MeasuredSettings
from lsrdecomp.lora.search.plan import (
    GOALS_IN_WORDS,
    ON_A_BASE,
    ON_DEVICE,
    SEARCHING,
    SHARES_TO_KEEP,
    SIZED,
    STORAGES,
    TO_DIRECTORY,
    TO_SOURCE_FORMAT,
    TRAINING,
    CompressionPlan,
    ReadOn,
    Resources,
    Route,
    goals_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from lsrdecomp.lora.files.progress import OnStep


SEARCH_ONLY = ("search", "workers")
"""Settings of a search, which the goal ``separation_rank`` does not read on any route."""


@dataclass(frozen=True, slots=True)
class Interface:
    """Python or the command line: how it spells settings, and its own options."""

    name: Callable[[str], str]
    """Returns a setting as the subject of a sentence, such as ``passes`` or ``--passes``."""
    argument: Callable[[str], str]
    """Returns a setting as a user types it, such as ``base=`` or ``--base``."""
    goals: str
    """The goals, to follow "one goal is needed, got none: "."""
    leave_truncated: str
    """How to request an LSR directory and not a truncated file, as an order."""
    truncate: str
    """What a LoRA in its own format is requested by."""
    own_options: Mapping[str, Collection[Route]] = field(default_factory=dict)
    """Options that only this interface has, with the routes that read them."""


PYTHON = Interface(
    name=str,
    argument="{}=".format,
    goals=f"{GOALS_IN_WORDS}, or with a base a share to keep (keep, keep_answers)",
    leave_truncated="call lsrdecomp.compress",
    truncate="lsrdecomp.lora.compress.truncate",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One goal, the route to it, and the settings that the route reads.

    Examples
    --------
    >>> Request.parse({"ratio": 48}).route
    <Route.SEARCHED: 'searched'>
    >>> Request.parse({"ratio": 48, "passes": 2})
    Traceback (most recent call last):
    lsrdecomp.fields.SettingsError: passes is read with base=
    """

    route: Route
    goal: str  # the name of the field: one of GOALS or of SHARES_TO_KEEP
    plan: CompressionPlan | None = None  # None for a share to keep, whose plans are made later
    storage: str | None = None  # None if none was given; see `for_adapter`
    max_rank: int | None = None
    min_rank: int | None = None
    structure: str | None = None
    base: Annotated[Any, ON_A_BASE] = None
    data: Annotated[Any, ON_A_BASE] = None
    statistics: Annotated[Any, TO_DIRECTORY] = None
    search: Annotated[Any, SEARCHING] = None
    workers: Annotated[int, SEARCHING] = 1
    device: Annotated[str | None, ON_DEVICE] = None
    journal: Annotated[Any, SEARCHING] = None
    measured: MeasuredSettings | None = None  # None without a base

    @classmethod
    def parse(
        cls,
        given: Mapping[str, Any],
        *,
        plan: CompressionPlan | None = None,
        settings: MeasuredSettings | None = None,
        to_file: bool = False,
        interface: Interface = PYTHON,
    ) -> Request:
        """Return the request for some settings, or refuse them.

        Parameters
        ----------
        given : Mapping of name to value
            The settings, by names in `READ_ON` and ``interface.own_options``. None counts as not
            given.
        plan : CompressionPlan, optional
            The goal and the other settings of a plan, in place of their entries in ``given``.
        settings : MeasuredSettings, optional
            Settings beside those in ``given``, which win.
        to_file : bool
            Whether a LoRA file is to be written in its own format.
        interface : Interface
            Where the request comes from.

        Raises
        ------
        BudgetError
            Unless there is one goal, or if a plan and settings of a plan are given.
        SettingsError
            For a setting that the route does not read; the message has a route that does.
        """
        given = {name: value for name, value in given.items() if value is not None}
        if settings is not None:
            given = settings.changed() | given
        # 1. Find the goal and the route.
        goal = _goal(given, plan, interface)
        if to_file:
            route = Route.TRUNCATED_ON_BASE if "base" in given else Route.TRUNCATED
        elif "base" in given:
            route = Route.MEASURED
        elif goal == "separation_rank":
            route = Route.GIVEN_TERMS
        else:
            route = Route.SEARCHED
        base = interface.argument("base")
        data = interface.argument("data")
        if goal in SHARES_TO_KEEP and route is Route.SEARCHED:
            raise BudgetError(
                f"a share to keep is measured on a base: give {base}, and {data} if you have "
                f"texts, with {interface.argument(goal)}; without a base ask for a size, such "
                f"as {_example(interface, 'ratio', 4)}"
            )
        # 2. Refuse what the route does not read.
        _refuse_unread(given, plan, goal, route, interface)
        model = given.get("base")
        is_own = model is not None and not isinstance(model, str | Path)
        # A base of texts writes them where none are given.
        if is_own and getattr(model, "batches", True) is not None and "data" not in given:
            raise BudgetError(
                f"what is kept of a model of your own is measured on batches: give {data} with "
                f"{base}"
            )
        # 3. Make plan and settings, which check their values.
        return cls._with_checked_values(given, plan, goal, route)

    @classmethod
    def _with_checked_values(
        cls, given: Mapping[str, Any], plan: CompressionPlan | None, goal: str, route: Route
    ) -> Request:
        """Return the request for settings that the route reads, after a check of their values."""
        if plan is not None:
            options = {"storage": given["storage"]} if "storage" in given else {}
            plan = plan.replace(**options)
        else:
            chosen = {name: given[name] for name in CompressionPlan.fields if name in given}
            # The plans for a share to keep are made later. Their common settings are checked now,
            # in a plan of any size.
            if goal in SHARES_TO_KEEP:
                chosen["ratio"] = 2.0
            plan = CompressionPlan(**chosen)
        if plan.kl is not None and route is Route.SEARCHED:
            check_divergence(plan, "statistics" in given)
        measured = None
        if "base" in given:
            chosen = {name: given[name] for name in MeasuredSettings.fields if name in given}
            measured = MeasuredSettings(**chosen)
        names = ("base", "data", "statistics", "search", "workers", "device", "journal")
        return cls(
            route=route,
            goal=goal,
            plan=None if goal in SHARES_TO_KEEP else plan,
            storage=plan.storage,
            max_rank=plan.max_rank,
            min_rank=plan.min_rank,
            structure=plan.structure,
            measured=measured,
            **{name: given[name] for name in names if name in given},
        )

    def for_adapter(self, storage: str) -> Request:
        """Return the request with a storage: the given one, or a default for goal and adapter.

        Parameters
        ----------
        storage : str
            The element type of the adapter.
        """
        if self.storage is not None or self.route in TO_SOURCE_FORMAT.routes:
            return self
        if self.plan is None:
            return replace(self, storage="auto")  # the fewest bytes; what they keep is measured
        plan = self.plan.with_default_storage(storage)
        return replace(self, plan=plan, storage=plan.storage)

    def to_json(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, as ``compress --config`` reads them.

        Without the number of workers, which changes nothing but the time, and without trust in
        program code, which no file may ask for. Texts and statistics that
        are no files are described in a few words.
        """
        values: dict[str, Any] = {}
        names = ("max_rank", "min_rank", "structure")
        chosen: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.plan is not None:
            chosen = self.plan.to_json()
        chosen["storage"] = self.storage
        if self.measured is not None:
            chosen |= self.measured.changed()
        else:
            chosen["device"] = self.device
        for name in ("base", "data", "statistics"):
            chosen[name] = _described(getattr(self, name))
        chosen.pop(TRUST, None)
        for name in READ_ON:
            value = chosen.get(name)
            if value is not None:
                values[name] = list(value) if isinstance(value, tuple) else value
        return values

    @property
    def trusts_code(self) -> bool:
        """Whether program code that the base brings may run."""
        return self.measured is not None and self.measured.trust_remote_code

    def resolved(self) -> dict[str, str]:
        """Return the absolute paths of texts and statistics that are files or directories.

        By them a run can be repeated from another directory.
        """
        paths = {}
        for name in ("data", "statistics"):
            value = getattr(self, name)
            is_location = isinstance(value, str | Path) or hasattr(value, "path")
            path = Path(_described(value) or "").expanduser()
            if is_location and path.exists():
                paths[name] = str(path.absolute())
        return paths

    def resources(self, on_step: OnStep | None) -> Resources:
        """Return the resources of the search."""
        journal = None if self.goal == "separation_rank" else self.journal
        return Resources(self.workers, self.device, journal, on_step)


def routes_of(table: type, usual: ReadOn | None = None) -> dict[str, frozenset[Route]]:
    """Return the routes that read each field of a dataclass: those of its note, or the usual ones.

    Without usual ones, a field that has no note is left out.
    """
    hints = get_type_hints(table, include_extras=True)
    found = {}
    for entry in fields(table):
        notes = [note for note in get_args(hints[entry.name]) if isinstance(note, ReadOn)]
        note = notes[0] if notes else usual
        if note is not None:
            found[entry.name] = note.routes
    return found


READ_ON: Mapping[str, frozenset[Route]] = MappingProxyType(
    {
        **routes_of(CompressionPlan, usual=SIZED),
        **routes_of(Request),
        **routes_of(MeasuredSettings, usual=ON_A_BASE),
    }
)
"""The routes that read each setting of the library."""


def _described(value: Any) -> str | None:
    """Return a base, texts or statistics as text: a path or name as it was given."""
    if value is None:
        return None
    if isinstance(value, str | Path):
        return str(value)
    path = getattr(value, "path", None)
    if path is not None:  # of statistics: a file in their directory
        return str(Path(path).parent)
    return (
        f"{len(value):,} texts"
        if isinstance(value, Sequence)
        else str(getattr(value, "name", type(value).__name__))
    )


def check_divergence(plan: CompressionPlan, has_statistics: bool) -> None:
    """Raise `BudgetError` for a plan of a divergence without statistics, which estimate it."""
    if plan.kl is not None and not has_statistics:
        raise BudgetError(
            "a divergence (kl) is measured in the Fisher norm: calibrate first and pass the "
            "statistics"
        )


def check_given_terms(resources: Resources, search: object) -> None:
    """Raise `SettingsError` for settings of a search if all layers get given numbers of terms."""
    given = {"search": search, "journal": resources.journal}
    if resources.workers != Resources().workers:
        given["workers"] = resources.workers
    found = {name: value for name, value in given.items() if value is not None}
    _refuse_unread(found, None, "separation_rank", Route.GIVEN_TERMS, PYTHON)


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
    goals = [name for name in SHARES_TO_KEEP if name in given]
    goals += goals_of(given if plan is None else {**given, **plan.to_json()})
    if len(goals) != 1:
        names = " and ".join(map(interface.name, goals)) or "none"
        raise BudgetError(f"one goal is needed, got {names}: {interface.goals}")
    return goals[0]


def _refuse_unread(
    given: Mapping[str, Any],
    plan: CompressionPlan | None,
    goal: str,
    route: Route,
    interface: Interface,
) -> None:
    """Raise `SettingsError` for settings that the route does not read, with how they are read."""
    requested = dict(given)
    if plan is not None:
        requested |= plan.to_json()
    # Settings that are read in the same way share a part of the message.
    subjects_by_way: dict[str, list[str]] = {}
    for name, value in requested.items():
        if _is_read(name, value, goal, route, interface):
            continue
        subject = interface.name(name)
        if name == "storage":  # another storage is read
            subject = _example(interface, name, value)
        rival = _rival(name, requested, interface)
        if rival is not None:
            way = f"never read together with {interface.name(rival)}: leave one of the two out"
        else:
            way = _way_to_be_read(name, goal, route, interface, has_base="base" in given)
        subjects_by_way.setdefault(way, []).append(subject)
    if subjects_by_way:
        parts = [f"{_listed(names)} {way}" for way, names in subjects_by_way.items()]
        raise SettingsError("; ".join(parts))


def _routes_that_read(name: str, interface: Interface) -> frozenset[Route]:
    return frozenset(interface.own_options.get(name) or READ_ON[name])


def _rival(name: str, requested: Mapping[str, Any], interface: Interface) -> str | None:
    """Return a requested setting that no route reads together with another; None if there is none.

    Sending a user to the route of one would have that route send back for the other.
    """
    readers = _routes_that_read(name, interface)
    for other in requested:
        if readers.isdisjoint(_routes_that_read(other, interface)):
            return other
    return None


def _is_read(name: str, value: object, goal: str, route: Route, interface: Interface) -> bool:
    """Return whether a route with a goal reads a setting."""
    if route not in _routes_that_read(name, interface):
        return False
    if goal == "separation_rank" and name in SEARCH_ONLY:
        return False
    # A LoRA file cannot hold integers.
    in_integers = name == "storage" and value in STORAGES
    return not (route in TO_SOURCE_FORMAT.routes and in_integers)


def _way_to_be_read(
    name: str, goal: str, route: Route, interface: Interface, *, has_base: bool
) -> str:
    """Return how to request that an unread setting is read, such as "read with base="."""
    readers = _routes_that_read(name, interface)
    reads_on_base_alone = Route.TRUNCATED_ON_BASE in readers and Route.TRUNCATED not in readers
    if route is Route.TRUNCATED and reads_on_base_alone:
        return f"read with {interface.argument('base')}"
    if route in TO_SOURCE_FORMAT.routes:
        way = f"not read where a LoRA file is written: {interface.leave_truncated}"
        if readers == TRAINING.routes and not has_base:
            way += f", with {interface.argument('base')} and {interface.argument('data')}"
        return way
    if goal == "separation_rank" and Route.SEARCHED in readers:
        return f"read with a goal that is searched for, such as {interface.argument('ratio')}"
    if readers == TO_SOURCE_FORMAT.routes:
        return f"read with {interface.truncate}, where a LoRA comes back in its own format"
    other = next(each for each in Route if each in readers)
    condition = "base" if other is Route.MEASURED else "separation_rank"
    return f"read with {interface.argument(condition)}"


def _listed(names: list[str]) -> str:
    """Return the names as the subject of a sentence, with its verb: "a is", "a, b and c are"."""
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{', '.join(names[:-1])} and {names[-1]} are"


def _example(interface: Interface, name: str, value: object) -> str:
    """Return a setting with a value, as a user types it."""
    argument = interface.argument(name)
    return f"{argument}{value}" if argument.endswith("=") else f"{argument} {value}"
