"""Settings written once: an annotation says what a field is, may be and is for.

    batch: Annotated[int, ON_COMMAND_LINE, whole_number(1), "Examples per step."] = 32

From that line come the check and its error, the reading of TOML and JSON, the docstring, and the
option or the line under ``--set`` on the command line (`lsrdecomp.cli.setting_options`).
transformers' HfArgumentParser is built the same way, but to import it takes seconds; pydantic would
name faults in words that lead nowhere near a TOML file.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
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
    """A requirement on a value: a test, and its words after "must be"."""

    test: Callable[[Any], bool]
    requirement: Callable[[], str]
    values: Callable[[], Collection[str]] | None = None
    """Returns the values that pass, or the usual ones, where they are few enough to offer."""


class Flag:
    """A property of a field that its type does not tell, with the first words of its help."""

    def __init__(self, help_prefix: str = "") -> None:
        self.help_prefix = help_prefix


ON_COMMAND_LINE = Flag()
"""The field is an option of its own on the command line, where others are given by ``--set``."""
INPUT_PATH = Flag()
"""The field may name a file or directory that is read."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole_number(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def whole_number(minimum: int) -> Check:
    """Return the check of a whole number, ``minimum`` or more."""
    requirement = f"a whole number, {minimum} or more"
    return Check(lambda value: _is_whole_number(value, minimum), lambda: requirement)


def one_of(names: Collection[str] | Callable[[], Collection[str]]) -> Check:
    """Return the check of one of some names; a callable gives names that are costly to import."""

    def allowed() -> Collection[str]:
        return names() if callable(names) else names

    return Check(
        lambda value: value in allowed(), lambda: f"one of {', '.join(allowed())}", allowed
    )


def list_of(check: Check, requirement: str, *, min_length: int = 0) -> Check:
    """Return the check of a list whose parts pass ``check``, with a least length."""

    def test(value: Any) -> bool:
        return len(value) >= min_length and all(map(check.test, value))

    return Check(test, lambda: requirement)


POSITIVE = Check(lambda value: _is_number(value) and value > 0, lambda: "a number above 0")
ABOVE_ONE = Check(lambda value: _is_number(value) and value > 1, lambda: "a number above 1")
SHARE = Check(lambda value: _is_number(value) and 0 < value < 1, lambda: "above 0 and below 1")
SHARE_OR_ZERO = Check(
    lambda value: _is_number(value) and 0 <= value < 1, lambda: "at least 0 and below 1"
)
TEXT = Check(
    lambda value: isinstance(value, str) and bool(value), lambda: "a text that is not empty"
)
BY_TYPE: Mapping[Any, Check] = {
    str: TEXT,
    bool: Check(lambda value: isinstance(value, bool), lambda: "true or false"),
    int: whole_number(0),
    float: Check(_is_number, lambda: "a number"),
    Mapping: Check(lambda value: isinstance(value, Mapping), lambda: "a table of names and values"),
    tuple: list_of(TEXT, "a list of names"),
}
"""Checks where an annotation says no more than the type; a tuple without more holds names."""


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One setting, as its annotation says it."""

    name: str
    type: Any  # without None: str, bool, int, float, Mapping or tuple
    check: Check
    help: str
    default: Any  # MISSING where it must be given
    optional: bool  # None is a value
    flags: frozenset[Flag]

    def validate(self, value: Any, error: type[LsrError]) -> Any:
        """Return the value, checked; a list as a tuple, a table as one that cannot change."""
        if value is None and self.optional:
            return None
        if self.type is tuple:
            if not isinstance(value, list | tuple):
                raise error(f"{self.name} must be a list, got {value!r}")
            value = tuple(value)
        if self.type is str and isinstance(value, PathLike):
            value = str(value)
        if not self.check.test(value):
            requirement = self.check.requirement()
            raise error(f"{self.name} must be {requirement}, got {_value_text(value)}")
        return MappingProxyType(dict(value)) if self.type is Mapping else value

    @property
    def documentation(self) -> list[str]:
        """Its lines among the parameters of a docstring."""
        type_name = {Mapping: "mapping", tuple: "tuple"}.get(self.type) or self.type.__name__
        if self.default_text:
            type_name += f", default {self.default_text}"
        elif self.optional:
            type_name += ", optional"
        return [f"{self.name} : {type_name}", f"    {self.help}"]

    @property
    def default_text(self) -> str:
        """The default as TOML has it; an empty text for none."""
        is_empty = self.default is dataclasses.MISSING or self.default in (None, (), "")
        if is_empty or self.type is Mapping:
            return ""
        return json.dumps(self.default)


def _field(entry: dataclasses.Field[Any], hint: Any) -> Field:
    """Return what the annotation of an entry of a dataclass says."""
    inner, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    alternatives = get_args(inner) if get_origin(inner) in (Union, UnionType) else (inner,)
    type_ = next(part for part in alternatives if part is not NoneType)
    type_ = get_origin(type_) or type_
    default = entry.default
    if entry.default_factory is not dataclasses.MISSING:
        default = entry.default_factory()
    check = BY_TYPE[type_]
    help_text = ""
    flags = set()
    for note in notes:
        if isinstance(note, Check):
            check = note
        elif isinstance(note, Flag):
            flags.add(note)
            help_text += note.help_prefix
        else:
            help_text += note
    return Field(
        name=entry.name,
        type=type_,
        check=check,
        help=help_text,
        default=default,
        optional=NoneType in alternatives,
        flags=frozenset(flags),
    )


S = TypeVar("S", bound="Settings")


class Settings:
    """Base of what `settings` decorates: annotations say what its fields may be."""

    __slots__ = ()
    fields: ClassVar[Mapping[str, Field]] = MappingProxyType({})  # filled by `settings`
    error: ClassVar[type[LsrError]] = SettingsError

    def __post_init__(self) -> None:
        for name, field in self.fields.items():
            object.__setattr__(self, name, field.validate(getattr(self, name), self.error))
        self.check_together()

    def __reduce__(self) -> tuple[Any, ...]:
        # A table that cannot change cannot be pickled.
        return type(self).from_mapping, (self.to_json(),)

    def check_together(self) -> None:
        """Check what fields must be to each other; each of them has been checked."""

    @classmethod
    def implied(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return values that follow from others of a table; what the table gives itself wins."""
        del values  # a table that implies something overrides this
        return {}

    def to_json(self) -> dict[str, Any]:
        """Return every setting, as JSON has it; `from_mapping` reads it back."""
        values = {name: getattr(self, name) for name in self.fields}
        return json.loads(json.dumps(values, allow_nan=False, default=dict))  # type: ignore[no-any-return]

    @classmethod
    def checked_names(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values, or raise SettingsError if one is under a name that is no field's."""
        for name in values:
            if name not in cls.fields:
                raise cls.error(f"no setting is called {unknown(str(name), cls.fields)}")
        return dict(values)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Return settings from a table as TOML or JSON gives it.

        Raises
        ------
        SettingsError
            If a key is unknown, one that is needed is missing, or a value is impossible.
        """
        settings = cls.checked_names({**cls.implied(values), **values})
        for name, field in cls.fields.items():
            if field.default is dataclasses.MISSING and name not in settings:
                raise cls.error(f"{name} must be given: {field.help}")
        return cls(**settings)

    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        values = {name: getattr(self, name) for name in self.fields}
        return {name: value for name, value in values.items() if value != self.fields[name].default}

    def replace(self, **changes: Any) -> Self:
        """Return the same with some settings changed, checked as a whole again."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def settings(cls: type[S]) -> type[S]:
    """Class decorator: make a frozen dataclass that lists its fields in its docstring."""
    decorated: type[S] = dataclasses.dataclass(frozen=True, slots=True)(cls)
    hints = get_type_hints(decorated, include_extras=True)
    entries = dataclasses.fields(decorated)  # type: ignore[arg-type]
    decorated.fields = {entry.name: _field(entry, hints[entry.name]) for entry in entries}
    decorated.__doc__ = _class_documentation(cls, decorated)
    plain_init: Callable[..., None] = decorated.__init__

    @functools.wraps(plain_init)
    def init(self: S, *args: Any, **kwargs: Any) -> None:
        _refuse_others(cls.__name__, kwargs, decorated.fields, None)
        plain_init(self, *args, **kwargs)

    decorated.__init__ = init  # type: ignore[method-assign, assignment]
    return decorated


def _class_documentation(cls: type, decorated: type[Settings]) -> str:
    """Return the docstring of a class with its fields, and its error, in numpydoc's form."""
    lines = [inspect.cleandoc(cls.__doc__ or ""), "", "Parameters", "----------"]
    for field in decorated.fields.values():
        lines += field.documentation
    lines += ["", "Raises", "------", decorated.error.__name__]
    lines += ["    Naming the setting, its value, and what it may be.", ""]
    return "\n".join(lines)


F = TypeVar("F", bound=Callable[..., Any])


def refuses_unknown(function: F, settings: type[Settings] | None = None) -> F:
    """Decorate a function to refuse an argument that it has not, with the nearest that it has.

    Parameters
    ----------
    function : callable
    settings : type, optional
        Type of its argument ``settings``: a field of it that is given by itself is refused with
        what to type instead.
    """
    known = tuple(inspect.signature(function).parameters)
    names = frozenset(known)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not names.issuperset(kwargs):
            _refuse_others(function.__name__, kwargs, known, settings)
        return function(*args, **kwargs)

    return run  # type: ignore[return-value]


OTHER_NAMES = {
    "eps": "rtol",
    "k": "rank",
    "n_components": "rank",
    "n_terms": "rank",
    "nonnegative": "non_negative",
    "random_state": "seed",
    "tol": "rtol",
}
"""Names of other libraries for arguments of ours."""


def _refuse_others(
    function: str,
    arguments: Mapping[str, Any],
    allowed: Collection[str],
    settings: type[Settings] | None,
) -> None:
    """Raise `ArgumentError` for the first argument that is not allowed."""
    for name, value in arguments.items():
        if name in allowed:
            continue
        if settings is not None and name in settings.fields:
            room = settings.__module__.rpartition(".")[0]
            typed = f"settings={room}.{settings.__name__}({name}={value!r})"
            raise ArgumentError(f"{function} takes no {name!r} by itself: give {typed}")
        here = OTHER_NAMES.get(name)
        if here in allowed:
            raise ArgumentError(f"{function} takes no {name!r}: here it is {here}={value!r}")
        raise ArgumentError(f"{function} takes no {unknown(name, allowed)}")


def _value_text(value: Any) -> str:
    """Return a value as it was given: tuples were lists, tables dictionaries."""
    if isinstance(value, tuple):
        return repr(list(value))
    if isinstance(value, Mapping):
        return repr(dict(value))
    return repr(value)
