"""adapter_config.json: each field read as what it should be, and the fields that are written for given layers."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

from lsrdecomp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from lsrdecomp.checkpoints.records import Checkpoint

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
        return CheckpointError(
            f"{field} is {_short(self.raw.get(field))}, expected {expected}", path=self.path
        )

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
        return {
            key: self._integer(value, f"{field}[{key!r}]")
            for key, value in self.mapping(field).items()
        }

    def numbers(self, field: str) -> dict[str, float]:
        """A pattern map with finite numbers."""
        return {
            key: self._number(value, f"{field}[{key!r}]")
            for key, value in self.mapping(field).items()
        }

    def mapping(self, field: str) -> dict[str, Any]:
        value = self.raw.get(field) or {}
        if not isinstance(value, dict):
            raise self.error(field, "a map from module pattern to value")
        return value

    def _integer(self, value: Any, field: str) -> int:
        if type(value) is not int or not 0 < value < MAX_RANK:
            raise CheckpointError(
                f"{field} is {_short(value)}, expected an integer from 1 to {MAX_RANK - 1}",
                path=self.path,
            )
        return value

    def _number(self, value: Any, field: str) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        try:
            good = good and math.isfinite(value)
        except OverflowError:
            good = False
        if not good:
            raise CheckpointError(
                f"{field} is {_short(value)}, expected a finite number", path=self.path
            )
        return float(value)


class Patterns:
    """Values by module-name pattern, under PEFT's rule: ``re.match(r"(.*\\.)?(key)$", name)``, first match wins.

    With ``exact_first``, the rule of LSR adapters: a module's exact name is looked up before any
    pattern.
    """

    def __init__(
        self, values: Mapping[str, Any], field: str, path: Path, *, exact_first: bool = False
    ) -> None:
        self.exact = dict(values) if exact_first else {}
        self.values = [(_compile(key, field, path), value) for key, value in values.items()]
        wild = sum(1 for key in values if re.search(r"[*+{?|]", key))
        if wild > MOST_WILD:
            raise CheckpointError(
                f"{field} has {wild} patterns with wildcards; at most {MOST_WILD} are read",
                path=path,
            )

    def get(self, name: str, default: Value) -> Value:
        """The value for a module name, or the default."""
        key = (
            next((key for key in spellings(name) if key in self.exact), None)
            if self.exact
            else None
        )
        if key is not None:
            return self.exact[key]  # type: ignore[no-any-return]
        return next((value for pattern, value in self.values if pattern.match(name)), default)


class Scales:
    """Rank and scale, alpha / r or alpha / √r, of every module: by the patterns of a config or its common values."""

    def __init__(
        self, config: Config, rank: int, alpha: float, *, exact_first: bool = False
    ) -> None:
        self._rank, self._alpha = rank, alpha
        ranks, alphas = config.integers("rank_pattern"), config.numbers("alpha_pattern")
        self._ranks = Patterns(ranks, "rank_pattern", config.path, exact_first=exact_first)
        self._alphas = Patterns(alphas, "alpha_pattern", config.path, exact_first=exact_first)
        self._root = math.sqrt if config.flag("use_rslora") else float

    def rank(self, module: str, usual: int | None = None) -> int:
        """By a pattern; else ``usual``, or the common one."""
        return self._ranks.get(module, self._rank if usual is None else usual)

    def of(self, module: str, rank: int) -> float:
        return self._alphas.get(module, self._alpha) / self._root(rank)


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
    if (
        len(key) > LONGEST_PATTERN
        or re.search(r"\)[*+{]", bare)
        or repeats > MOST_REPEATS
        or choices > MOST_CHOICES
    ):
        raise CheckpointError(
            f"{field}: the pattern {_short(key)} has too many choices to be matched safely",
            path=path,
        )
    try:
        re.compile(key)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"{field}: {_short(key)} is not a pattern ({error})", path=path
        ) from None


def _compile(key: str, field: str, path: Path) -> re.Pattern[str]:
    check_pattern(key, field, path)
    try:
        return re.compile(rf"(.*\.)?({key})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"{field}: {_short(key)} is not a pattern ({error})", path=path
        ) from None


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(count) is int for count in value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(word, str | None) for word in value.values())


def _tokens(value: Any) -> bool:
    return _counts(value) or (isinstance(value, dict) and all(map(_counts, value.values())))


# What says which modules are meant and what else is trained; everything else in a config is about
# training LoRA.
CARRIED: dict[str, tuple[str, tuple[Callable[[Any], bool], ...]]] = {
    "base_model_name_or_path": ("text", (_text,)),
    "revision": ("text", (_text,)),
    "task_type": ("text", (_text,)),
    "auto_mapping": ("a map from text to text", (_map,)),
    "target_modules": ("text or a list of text", (_text, _words)),
    "target_parameters": ("a list of text", (_words,)),
    "exclude_modules": ("text or a list of text", (_text, _words)),
    "layers_to_transform": (
        "an integer or a list of integers",
        (lambda value: type(value) is int, _counts),
    ),
    "layers_pattern": ("text or a list of text", (_text, _words)),
    "modules_to_save": ("a list of text", (_words,)),
    "trainable_token_indices": ("a list of integers, or a map to such lists", (_tokens,)),
    "bias": ("text", (_text,)),
}


def check_carried(config: Config) -> None:
    """Raise `CheckpointError` for a field that will be written again and is not what PEFT expects there."""
    for field, (expected, kinds) in CARRIED.items():
        value = config.raw.get(field)
        missing = value is None and (field != "bias" or field not in config.raw)
        if not missing and not any(kind(value) for kind in kinds):
            raise config.error(field, expected)


HEADS = ("classifier", "score")
"""What PEFT adds to modules_to_save of every classifier, whichever it has, each time that it opens
one."""


def _saved(config: Mapping[str, Any]) -> list[str]:
    """The modules that are saved whole, each named once."""
    return [
        name for name in dict.fromkeys(config.get("modules_to_save") or ()) if isinstance(name, str)
    ]


def missing_modules(config: Mapping[str, Any], extras: Iterable[str]) -> tuple[str, ...]:
    """A note if ``modules_to_save`` names a module of which the file holds no tensor."""
    modules = [f".{key.rpartition('.')[0]}." for key in extras]
    saved = _saved(config)
    stored = [name for name in saved if any(f".{name}." in key for key in modules)]
    optional = HEADS if set(HEADS) & set(stored) else ()
    missing = [name for name in saved if name not in stored and name not in optional]
    if not missing:
        return ()
    return (
        (
            f"modules_to_save names {', '.join(map(ascii, missing))[:200]}, of which the file holds no tensor: "
            "it stays as the base has it, and untrained where the base has none"
        ),
    )


def most_common(values: Mapping[str, Value]) -> Value:
    """The value most layers share; of equally many the first met."""
    return Counter(values.values()).most_common(1)[0][0]


def patterns(values: Mapping[str, Value], default: Value) -> dict[str, Value]:
    """Exact module patterns for the values that differ from the default."""
    return {exact_pattern(name): value for name, value in values.items() if value != default}


def carried_fields(
    config: Mapping[str, Any],
    names: set[str],
    extras: set[str],
    source: Checkpoint | None,
    only: str,
) -> dict[str, Any]:
    """Fields of the new config taken from the old one, so that PEFT finds the same modules again.

    Parameters
    ----------
    names, extras
        Modules and other tensors that are written.
    only : str
        PEFT's word for "biases of adapted modules": ``"lora_only"`` or ``"lsr_only"``.
    """
    fields = {field: config[field] for field in CARRIED if config.get(field) is not None}
    if "modules_to_save" in fields:
        fields["modules_to_save"] = _saved(config)
    same = source is not None and names == {layer.name for layer in source.layers}
    if "target_modules" not in fields or not same:
        for field in ("exclude_modules", "layers_to_transform", "layers_pattern"):
            fields.pop(field, None)
        fields["target_modules"] = sorted(names)
    bias = config.get("bias", "none")
    has_bias = any(key.endswith(".bias") for key in extras)
    fields["bias"] = (
        "none" if not has_bias or bias not in ("all", "lora_only", "lsr_only") else bias
    )
    if fields["bias"] not in ("none", "all"):
        fields["bias"] = only
    fields["inference_mode"] = True
    for field in ("base_model_name_or_path", "task_type", "modules_to_save"):
        fields.setdefault(field, None)
    return fields


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
