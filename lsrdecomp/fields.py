"""Settings written once: an annotation says what a field is, may be and is for.

    batch: Annotated[int, whole(1), OPTION, "Examples per step, over all processes."] = 32

From that line come the check and its error, the reading of TOML and JSON, the docstring, the
keyword argument of a function that `takes` it, and the option or the line under ``--set`` on the
command line (`lsrdecomp.cli.settings`). transformers' HfArgumentParser is built the same way, but
to import it takes seconds; pydantic would say what is wrong in words that lead nowhere near a TOML
file.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from os import PathLike
from types import MappingProxyType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    Self,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from lsrdecomp.errors import ArgumentError, LsrError, unknown


class SettingsError(LsrError, ValueError):
    """A setting is unknown or impossible; the message names it and what would do."""


class Check(NamedTuple):
    """What a value must be: a test, and its words after "must be"."""

    test: Callable[[Any], bool]
    wanted: Callable[[], str]


class Also(NamedTuple):
    """Another spelling of a field, such as an older one: it is read, and never written."""

    name: str


class Mark:
    """What else is to be known of a field, and what its help then begins with."""

    def __init__(self, said: str = "") -> None:
        self.said = said


OPTION = Mark()
"""An option of its own on the command line, where all others are given by ``--set``."""
READ = Mark()
"""May name a file or directory that is read."""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def whole(least: int) -> Check:
    """A whole number, ``least`` or more."""
    return Check(lambda value: _whole(value, least), lambda: f"a whole number, {least} or more")


def one_of(names: Collection[str] | Callable[[], Collection[str]]) -> Check:
    """One of some names; a callable gives them where they would be costly to import."""
    allowed = names if callable(names) else lambda: names
    return Check(lambda value: value in allowed(), lambda: f"one of {', '.join(allowed())}")


def each(check: Check, wanted: str, *, least: int = 0) -> Check:
    """A list whose parts pass ``check``, with at least so many of them."""
    return Check(lambda value: len(value) >= least and all(map(check.test, value)), lambda: wanted)


POSITIVE = Check(lambda value: _number(value) and value > 0, lambda: "a number above 0")
ABOVE_ONE = Check(lambda value: _number(value) and value > 1, lambda: "a number above 1")
SHARE = Check(lambda value: _number(value) and 0 < value < 1, lambda: "above 0 and below 1")
SHARE_OR_NONE = Check(
    lambda value: _number(value) and 0 <= value < 1, lambda: "at least 0 and below 1"
)
TEXT = Check(
    lambda value: isinstance(value, str) and bool(value), lambda: "a text that is not empty"
)
BY_TYPE: Mapping[Any, Check] = {
    str: TEXT,
    bool: Check(lambda value: isinstance(value, bool), lambda: "true or false"),
    int: whole(0),
    float: Check(_number, lambda: "a number"),
    Mapping: Check(lambda value: isinstance(value, Mapping), lambda: "a table of names and values"),
    tuple: each(TEXT, "a list of names"),
}
"""What is checked where an annotation says no more than the type; a tuple without more holds
names."""


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One setting, as its annotation says it."""

    name: str
    type: Any  # without None: str, bool, int, float, Mapping or tuple
    check: Check
    help: str
    default: Any  # MISSING where it must be given
    optional: bool  # None is a value
    names: tuple[str, ...]  # its own and other spellings
    marks: frozenset[Mark]

    def settled(self, value: Any, error: type[LsrError]) -> Any:
        """The value, checked; a list as a tuple, a table as one that cannot change."""
        if value is None and self.optional:
            return None
        if self.type is tuple:
            if not isinstance(value, list | tuple):
                raise error(f"{self.name} must be a list, got {value!r}")
            value = tuple(value)
        if self.type is str and isinstance(value, PathLike):
            value = str(value)
        if not self.check.test(value):
            raise error(f"{self.name} must be {self.check.wanted()}, got {_shown(value)}")
        return MappingProxyType(dict(value)) if self.type is Mapping else value

    @property
    def documented(self) -> list[str]:
        """Its lines among the parameters of a docstring."""
        kind = {Mapping: "mapping", tuple: "tuple"}.get(self.type) or self.type.__name__
        default = (
            f", default {self.shown_default}"
            if self.shown_default
            else ", optional"
            if self.optional
            else ""
        )
        return [f"{self.name} : {kind}{default}", f"    {self.help}"]

    @property
    def shown_default(self) -> str:
        """The default as TOML has it; an empty text for none."""
        empty = self.default is dataclasses.MISSING or self.default in (None, (), "")
        return "" if empty or self.type is Mapping else json.dumps(self.default)


def _field(entry: dataclasses.Field[Any], hint: Any) -> Field:
    inner, *said = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    parts = get_args(inner) if get_origin(inner) in (Union, UnionType) else (inner,)
    kind = next(part for part in parts if part is not NoneType)
    kind = get_origin(kind) or kind
    default = entry.default
    if entry.default_factory is not dataclasses.MISSING:
        default = entry.default_factory()
    return Field(
        name=entry.name,
        type=kind,
        check=next((part for part in said if isinstance(part, Check)), BY_TYPE[kind]),
        help="".join(
            part.said if isinstance(part, Mark) else part
            for part in said
            if isinstance(part, Mark | str)
        ),
        default=default,
        optional=NoneType in parts,
        names=(entry.name, *(part.name for part in said if isinstance(part, Also))),
        marks=frozenset(part for part in said if isinstance(part, Mark)),
    )


S = TypeVar("S", bound="Settings")


class Settings:
    """Base of what `settings` decorates: annotations say what its fields may be."""

    __slots__ = ()
    fields: ClassVar[Mapping[str, Field]] = MappingProxyType({})  # filled by `settings`
    error: ClassVar[type[LsrError]] = SettingsError

    def __post_init__(self) -> None:
        for name, field in self.fields.items():
            object.__setattr__(self, name, field.settled(getattr(self, name), self.error))
        self.check_together()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_mapping, (
            self.to_json(),
        )  # a table that cannot change cannot be pickled

    def check_together(self) -> None:
        """What fields must be to each other; each of them has been checked."""

    @classmethod
    def usual(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Values that a table brings with what it says; what it gives itself wins."""
        return {}

    def to_json(self) -> dict[str, Any]:
        """Every setting, as JSON has it; `from_mapping` reads it back."""
        values = {name: getattr(self, name) for name in self.fields}
        return json.loads(json.dumps(values, allow_nan=False, default=dict))  # type: ignore[no-any-return]

    @classmethod
    def named(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values under their fields' own names.

        Raises
        ------
        SettingsError
            If a name is unknown, or two are spellings of one.
        """
        spellings = {other: name for name, field in cls.fields.items() for other in field.names}
        for name in values:
            if name not in spellings:
                raise cls.error(f"no setting is called {unknown(str(name), cls.fields)}")
        named = {spellings[name]: value for name, value in values.items()}
        if len(named) < len(values):
            twice = [
                name for name in values if name != spellings[name] and spellings[name] in values
            ]
            raise cls.error(
                f"{twice[0]} is an older name of {spellings[twice[0]]}: give one of them"
            )
        return named

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Settings from a table as TOML or JSON gives it.

        Raises
        ------
        SettingsError
            If a key is unknown, one that is needed is missing, or a value is impossible.
        """
        settings = cls.named({**cls.usual(values), **values})
        for name, field in cls.fields.items():
            if field.default is dataclasses.MISSING and name not in settings:
                raise cls.error(f"{name} must be given: {field.help}")
        return cls(**settings)

    def replace(self, **changes: Any) -> Self:
        """The same with some settings changed; checked as a whole again."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def settings(cls: type[S]) -> type[S]:
    """Class decorator: make a frozen dataclass that knows its fields and lists them in its docstring."""
    made: type[S] = dataclasses.dataclass(frozen=True, slots=True)(cls)
    hints = get_type_hints(made, include_extras=True)
    entries = dataclasses.fields(made)  # type: ignore[arg-type]
    made.fields = {entry.name: _field(entry, hints[entry.name]) for entry in entries}
    lines = [inspect.cleandoc(cls.__doc__ or ""), "", "Parameters", "----------"]
    lines += [line for field in made.fields.values() for line in field.documented]
    lines += [
        "",
        "Raises",
        "------",
        made.error.__name__,
        "    Naming the setting, its value, and what it may be.",
        "",
    ]
    made.__doc__ = "\n".join(lines)
    fill: Callable[..., None] = made.__init__

    @functools.wraps(fill)
    def init(self: S, *args: Any, **kwargs: Any) -> None:
        _refuse_others(cls.__name__, kwargs, made.fields)
        fill(self, *args, **kwargs)

    made.__init__ = init  # type: ignore[method-assign, assignment]
    return made


F = TypeVar("F", bound=Callable[..., Any])


def takes(*tables: type[Settings], refused_later: Collection[str] = ()) -> Callable[[F], F]:
    """Decorate a function whose ``**settings`` are the fields of tables, to show them.

    In the docstring they stand for the entry ``**settings``. A name that is none of the arguments
    is refused with the nearest that is; without tables that is all that is done. Names in
    ``refused_later`` are passed on to the function, which has more to say of them.
    """

    def decorate(function: F) -> F:
        plain = inspect.signature(function)
        own = {
            name: each
            for name, each in plain.parameters.items()
            if each.kind is not each.VAR_KEYWORD
        }
        fields = [
            field for table in tables for field in table.fields.values() if field.name not in own
        ]
        entries = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=field.type | None if field.optional else field.type,
            )
            for field in fields
        ]
        signature = plain.replace(parameters=[*own.values(), *entries])

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            unknown_here = [name for name in kwargs if name not in refused_later]
            _refuse_others(function.__name__, unknown_here, signature.parameters)
            return function(*args, **kwargs)

        lines = "".join(f"    {line}\n" for field in fields for line in field.documented)
        run.__doc__ = re.sub(
            r" *\*\*settings\n(?: {8}.*\n)*", lambda _: lines, function.__doc__ or ""
        )
        run.__signature__ = signature  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    return decorate


def _refuse_others(function: str, names: Collection[str], allowed: Collection[str]) -> None:
    for name in names:
        if name not in allowed:
            raise ArgumentError(f"{function} takes no {unknown(name, allowed)}")


def _shown(value: Any) -> str:
    return repr(
        list(value)
        if isinstance(value, tuple)
        else dict(value)
        if isinstance(value, Mapping)
        else value
    )
