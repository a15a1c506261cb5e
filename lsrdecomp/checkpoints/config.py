"""Typed reading of a config: each field is what it should be, or the error names file, field and value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lsrdecomp.errors import CheckpointError

Value = TypeVar("Value")
MAX_RANK = 2**31
LONGEST_PATTERN = 1024
MOST_REPEATS = 3
MOST_CHOICES = 16
MOST_WILD = 64


class Config:
    """A raw config with its file's name, for errors."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self.raw = raw
        self.path = path

    def error(self, field: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{field} is {_short(self.raw.get(field))}, expected {expected}", path=self.path)

    def integer(self, field: str, default: int | None = None) -> int:
        return self._integer(self.raw.get(field, default), field)

    def number(self, field: str, default: float | None = None) -> float:
        return self._number(self.raw.get(field, default), field)

    def flag(self, field: str) -> bool:
        value = self.raw.get(field)
        if value not in (None, True, False):
            raise self.error(field, "true or false")
        return bool(value)

    def text(self, field: str) -> str:
        value = self.raw.get(field)
        if not isinstance(value, str):
            raise self.error(field, "text")
        return value

    def integers(self, field: str) -> dict[str, int]:
        """A pattern map with positive integers."""
        return {key: self._integer(value, f"{field}[{key!r}]") for key, value in self.mapping(field).items()}

    def numbers(self, field: str) -> dict[str, float]:
        """A pattern map with finite numbers."""
        return {key: self._number(value, f"{field}[{key!r}]") for key, value in self.mapping(field).items()}

    def mapping(self, field: str) -> dict[str, Any]:
        value = self.raw.get(field) or {}
        if not isinstance(value, dict):
            raise self.error(field, "a map from module pattern to value")
        return value

    def _integer(self, value: Any, field: str) -> int:
        if type(value) is not int or not 0 < value < MAX_RANK:
            raise CheckpointError(
                f"{field} is {_short(value)}, expected an integer from 1 to {MAX_RANK - 1}", path=self.path
            )
        return value

    def _number(self, value: Any, field: str) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        try:
            good = good and math.isfinite(value)
        except OverflowError:
            good = False
        if not good:
            raise CheckpointError(f"{field} is {_short(value)}, expected a finite number", path=self.path)
        return float(value)


class Patterns:
    """Values by module-name pattern, under PEFT's rule: ``re.match(r"(.*\\.)?(key)$", name)``, first match wins.

    With ``exact_first``, the rule of LSR adapters: a module's exact name is looked up before any pattern.
    """

    def __init__(self, values: Mapping[str, Any], field: str, path: Path, *, exact_first: bool = False) -> None:
        self.exact = dict(values) if exact_first else {}
        self.values = [(_compile(key, field, path), value) for key, value in values.items()]
        wild = sum(1 for key in values if re.search(r"[*+{?|]", key))
        if wild > MOST_WILD:
            raise CheckpointError(
                f"{field} has {wild} patterns with wildcards; at most {MOST_WILD} are read", path=path
            )

    def get(self, name: str, default: Value) -> Value:
        """The value for a module name, or the default."""
        key = next((key for key in spellings(name) if key in self.exact), None) if self.exact else None
        if key is not None:
            return self.exact[key]  # type: ignore[no-any-return]
        return next((value for pattern, value in self.values if pattern.match(name)), default)


def exact_pattern(name: str) -> str:
    """A pattern key that matches this module and no other under PEFT's rule.

    >>> exact_pattern("layers.1.q_proj")
    '^layers\\\\.1\\\\.q_proj'
    """
    return f"^{re.escape(name)}"


def spellings(name: str) -> tuple[str, ...]:
    """The keys that are one full module name and no pattern, in the order in which they are looked up.

    >>> spellings("a.b")
    ('^a\\\\.b', '^a.b', 'a.b', 'a\\\\.b', '^a\\\\.b$', '^a.b$', 'a.b$', 'a\\\\.b$')
    """
    plain = (exact_pattern(name), f"^{name}", name, re.escape(name))
    return (*plain, *(f"{key}$" for key in plain))


def module_suffixes(names: Iterable[str]) -> list[str]:
    """The last parts of module names, for ``target_modules``."""
    return sorted({name.rpartition(".")[2] for name in names})


def check_pattern(key: str, field: str, path: Path) -> None:
    """Raise `CheckpointError` for a pattern that could keep a matcher busy for years, or is none."""
    # A backtracking matcher is slow on repeats inside repeats, and on many in a row.
    bare = re.sub(r"\\.|\[[^\]]*\]", "x", key)
    repeats, choices = len(re.findall(r"[*+{]", bare)), len(re.findall(r"[|?]", bare))
    if len(key) > LONGEST_PATTERN or re.search(r"\)[*+{]", bare) or repeats > MOST_REPEATS or choices > MOST_CHOICES:
        raise CheckpointError(
            f"{field}: the pattern {_short(key)} has too many choices to be matched safely", path=path
        )
    try:
        re.compile(key)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{field}: {_short(key)} is not a pattern ({error})", path=path) from None


def _compile(key: str, field: str, path: Path) -> re.Pattern[str]:
    check_pattern(key, field, path)
    try:
        return re.compile(rf"(.*\.)?({key})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{field}: {_short(key)} is not a pattern ({error})", path=path) from None


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
