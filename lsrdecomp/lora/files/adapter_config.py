"""adapter_config.json: its fields read with their types, and the ones that are written again."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lsrdecomp.errors import CheckpointError
from lsrdecomp.gateway import (
    MAX_INTEGER,
    PATTERN_CHARACTERS,
    PATTERN_CHOICES,
    PATTERN_REPEATS,
    WILDCARD_PATTERNS,
)
from lsrdecomp.lora.files.file_checks import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from lsrdecomp.lora.files.records import Checkpoint

FIELD_CHARACTERS = PATTERN_CHARACTERS * WILDCARD_PATTERNS
"""Characters of all patterns with wildcards in one field of a config."""
LITERAL = r"(?:\\\W|[^\\()\[\]{}*+?|^$])*"
"""Text without a choice, in which a dot may stand for any character."""
ALTERNATIVES = re.compile(
    rf"\^?{LITERAL}(?:\((?:\?:)?{LITERAL}(?:\|{LITERAL})*\){LITERAL})?\$?"
    rf"|\^?{LITERAL}\$?(?:\|\^?{LITERAL}\$?)*"
)
"""A pattern whose only choice is among texts: it takes a matcher no longer than they are."""
Value = TypeVar("Value")


class Config:
    """A raw config with its file's name, for errors; each method reads a field as one type."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self.raw = raw
        self.path = path

    def error(self, field: str, expected: str) -> CheckpointError:
        """Make an error that shows the value of a field and what was expected there."""
        return self._error(field, self.raw.get(field), expected)

    def integer(self, field: str, default: int | None = None) -> int:
        """Return a positive integer."""
        return self._integer(self.raw.get(field, default), field)

    def number(self, field: str, default: float | None = None) -> float:
        """Return a finite number."""
        return self._number(self.raw.get(field, default), field)

    def flag(self, field: str) -> bool:
        """Return a truth value; an absent field is false."""
        value = self.raw.get(field)
        if value not in (None, True, False):
            raise self.error(field, "true or false")
        return bool(value)

    def text(self, field: str) -> str:
        """Return a text."""
        value = self.raw.get(field)
        if not isinstance(value, str):
            raise self.error(field, "text")
        return value

    def integers(self, field: str) -> dict[str, int]:
        """Return a map from patterns of module names to positive integers."""
        return {
            pattern: self._integer(value, f"{field}[{pattern!r}]")
            for pattern, value in self.mapping(field).items()
        }

    def numbers(self, field: str) -> dict[str, float]:
        """Return a map from patterns of module names to finite numbers."""
        return {
            pattern: self._number(value, f"{field}[{pattern!r}]")
            for pattern, value in self.mapping(field).items()
        }

    def mapping(self, field: str) -> dict[str, Any]:
        """Return a map from patterns of module names to anything; an absent field is empty."""
        value = self.raw.get(field) or {}
        if not isinstance(value, dict):
            raise self.error(field, "a map from module pattern to value")
        return value

    def _integer(self, value: Any, field: str) -> int:
        if type(value) is not int or not 0 < value <= MAX_INTEGER:
            raise self._error(field, value, f"an integer from 1 to {MAX_INTEGER}")
        return value

    def _number(self, value: Any, field: str) -> float:
        if not _is_finite_number(value):
            raise self._error(field, value, "a finite number")
        return float(value)

    def _error(self, field: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(f"{field} is {_short(value)}, expected {expected}", path=self.path)


def _is_finite_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


class Patterns:
    r"""Values by pattern of module names, under PEFT's rule: ``(.*\.)?(key)$``, first match wins.

    With ``exact_first``, the rule of LSR adapters: a module's exact name is looked up before any
    pattern.
    """

    def __init__(
        self, values: Mapping[str, Any], field: str, path: Path, *, exact_first: bool = False
    ) -> None:
        self.exact = dict(values) if exact_first else {}
        # By order: of many thousand modules each may have a key of its own, which is looked up.
        self.by_name: dict[str, tuple[int, Any]] = {}
        self.values: list[tuple[int, re.Pattern[str], Any]] = []
        for order, (key, value) in enumerate(values.items()):
            name = re.sub(r"\\(.)", r"\1", key.removeprefix("^"))
            if key == exact_pattern(name):
                self.by_name.setdefault(name, (order, value))
            else:
                self.values.append((order, _compile(key, field, path), value))
        wildcards = [key for key in values if re.search(r"[*+{?|]", key)]
        characters = sum(map(len, wildcards))
        if len(wildcards) > WILDCARD_PATTERNS or characters > FIELD_CHARACTERS:
            raise CheckpointError(
                f"{field} has {len(wildcards)} patterns with wildcards, of {characters} "
                f"characters; at most {WILDCARD_PATTERNS} of {FIELD_CHARACTERS} are read",
                path=path,
            )

    def get(self, name: str, default: Value) -> Value:
        """Return the value for a module name, or the default."""
        if self.exact:
            for key in spellings(name):
                if key in self.exact:
                    return self.exact[key]  # type: ignore[no-any-return]
        order_of_name, found = self.by_name.get(name, (math.inf, default))
        for order, pattern, value in self.values:
            if order > order_of_name:
                break
            if pattern.match(name):
                return value  # type: ignore[no-any-return]
        return found


class Scales:
    """Ranks and scales of modules, alpha / r or alpha / √r, by the patterns of a config."""

    def __init__(
        self, config: Config, rank: int, alpha: float, *, exact_first: bool = False
    ) -> None:
        self._rank = rank
        self._alpha = alpha
        ranks = config.integers("rank_pattern")
        alphas = config.numbers("alpha_pattern")
        self._ranks = Patterns(ranks, "rank_pattern", config.path, exact_first=exact_first)
        self._alphas = Patterns(alphas, "alpha_pattern", config.path, exact_first=exact_first)
        self._root = math.sqrt if config.flag("use_rslora") else float

    def rank(self, module: str, default: int | None = None) -> int:
        """Return the rank of a module: of a pattern, else ``default``, else the common one."""
        return self._ranks.get(module, self._rank if default is None else default)

    def scale(self, module: str, rank: int) -> float:
        """Return the scale of a module of this rank."""
        return self._alphas.get(module, self._alpha) / self._root(rank)


def exact_pattern(name: str) -> str:
    r"""Return a pattern key that matches this module and no other under PEFT's rule.

    >>> exact_pattern("layers.1.q_proj")
    '^layers\\.1\\.q_proj'
    """
    return f"^{re.escape(name)}"


def spellings(name: str) -> tuple[str, ...]:
    r"""Return the keys that mean one full module name, in the order in which they are looked up.

    >>> spellings("a.b")
    ('^a\\.b', '^a.b', 'a.b', 'a\\.b', '^a\\.b$', '^a.b$', 'a.b$', 'a\\.b$')
    """
    without_end = (exact_pattern(name), f"^{name}", name, re.escape(name))
    return (*without_end, *(f"{key}$" for key in without_end))


def module_suffixes(names: Iterable[str]) -> list[str]:
    """Return the last parts of module names, for ``target_modules``."""
    return sorted({name.rpartition(".")[2] for name in names})


def check_pattern(key: str, field: str, path: Path, *, max_repeats: int = PATTERN_REPEATS) -> None:
    """Refuse a pattern that could keep a matcher busy for years, or is none."""
    if len(key) <= FIELD_CHARACTERS and ALTERNATIVES.fullmatch(key):
        _compile_or_refuse(key, key, field, path)
        return
    # A backtracking matcher is slow on repeats inside repeats, and on many in a row.
    bare = re.sub(r"\\.|\[[^\]]*\]", "x", key)
    repeats, ways = _matching_cost(bare)
    repeated_group = re.search(r"\)[*+{]", bare)
    if (
        repeated_group
        or len(key) > PATTERN_CHARACTERS
        or repeats > max_repeats
        or ways > 2**PATTERN_CHOICES
    ):
        raise CheckpointError(
            f"{field}: the pattern {_short(key)} has too many choices to be matched safely",
            path=path,
        )
    _compile_or_refuse(key, key, field, path)


def _matching_cost(pattern: str) -> tuple[int, int]:
    """Return the most repeats in a row, and in how many ways the rest may be matched.

    Alternatives are tried one after another, what stands in a row in every combination.
    """
    # Of each open group: of its alternatives so far the most repeats and the sum of ways, and
    # repeats and ways of the one that is being read.
    groups = [[0, 0, 0, 1]]
    before = ""
    for letter in f"{pattern})":
        group = groups[-1]
        if letter == "(":
            groups.append([0, 0, 0, 1])
        elif letter in "|)":
            most, total, repeats, ways = group
            group[:] = [max(most, repeats), total + ways, 0, 1]
            if letter == ")" and len(groups) > 1:
                groups.pop()
                groups[-1][2] += group[0]
                groups[-1][3] *= group[1]
        elif letter in "*+{":
            group[2] += 1
        elif letter == "?" and before not in "(*+}":
            group[3] *= 2
        before = letter
    return groups[0][0], groups[0][1]


def _compile(key: str, field: str, path: Path) -> re.Pattern[str]:
    check_pattern(key, field, path)
    return _compile_or_refuse(rf"(.*\.)?({key})$", key, field, path)


def _compile_or_refuse(pattern: str, key: str, field: str, path: Path) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"{field}: {_short(key)} is not a pattern ({error})", path=path
        ) from None


# -- fields that are written again -----------------------------------------------------------------


def check_directory_patterns(directory: str | Path) -> None:
    """Refuse an adapter's directory whose patterns PEFT could not match safely.

    Raises
    ------
    CheckpointError
    """
    path = Path(directory) / "adapter_config.json"
    if path.is_file():
        check_module_patterns(read_json(path), path)


def _is_integer(value: Any) -> bool:
    return type(value) is int


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_list_of_integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(count) is int for count in value)


def _is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str | None) for text in value.values())


def _is_token_indices(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_list_of_integers(indices) for indices in value.values())
    return _is_list_of_integers(value)


# What says which modules are meant and what else is trained; everything else in a config is about
# training LoRA.
CARRIED: dict[str, tuple[str, tuple[Callable[[Any], bool], ...]]] = {
    "base_model_name_or_path": ("text", (_is_text,)),
    "revision": ("text", (_is_text,)),
    "task_type": ("text", (_is_text,)),
    "auto_mapping": ("a map from text to text", (_is_text_map,)),
    "target_modules": ("text or a list of text", (_is_text, _is_list_of_text)),
    "target_parameters": ("a list of text", (_is_list_of_text,)),
    "exclude_modules": ("text or a list of text", (_is_text, _is_list_of_text)),
    "layers_to_transform": (
        "an integer or a list of integers",
        (_is_integer, _is_list_of_integers),
    ),
    "layers_pattern": ("text or a list of text", (_is_text, _is_list_of_text)),
    "modules_to_save": ("a list of text", (_is_list_of_text,)),
    "trainable_token_indices": ("a list of integers, or a map to such lists", (_is_token_indices,)),
    "bias": ("text", (_is_text,)),
}
"""What each carried field should be, in words and as tests of which one must pass."""
OF_SOME_MODULES = ("exclude_modules", "layers_to_transform", "layers_pattern")
"""Fields that narrow down ``target_modules``."""


def check_carried(config: Config) -> None:
    """Refuse a field that will be written again and is not what PEFT expects there."""
    for field, (expected, tests) in CARRIED.items():
        value = config.raw.get(field)
        if value is None and not (field == "bias" and "bias" in config.raw):
            continue
        if not any(test(value) for test in tests):
            raise config.error(field, expected)
    check_module_patterns(config.raw, config.path)


def check_module_patterns(config: Mapping[str, Any], path: Path) -> None:
    """Refuse patterns of a config, by which PEFT finds modules, that cannot be matched safely.

    PEFT reads a text as a pattern, and a list as names; of ``layers_pattern`` both are patterns.

    Raises
    ------
    CheckpointError
    """
    for field in ("target_modules", "exclude_modules", "layers_pattern"):
        value = config.get(field)
        is_prefixed = field == "layers_pattern"  # with a repeat of PEFT's own
        texts = value if is_prefixed and isinstance(value, list) else [value]
        max_repeats = PATTERN_REPEATS if is_prefixed else PATTERN_REPEATS + 1
        for text in texts:
            if isinstance(text, str):
                check_pattern(text, field, path, max_repeats=max_repeats)
    for field in ("rank_pattern", "alpha_pattern"):
        keys = config.get(field)
        Patterns(keys if isinstance(keys, dict) else {}, field, path)


HEADS = ("classifier", "score")
"""What PEFT adds to ``modules_to_save`` of every classifier each time that it opens one, whichever
the classifier has."""


def _modules_to_save(config: Mapping[str, Any]) -> list[str]:
    """Return the modules that are saved in full, each named once."""
    listed = config.get("modules_to_save") or ()
    return [name for name in dict.fromkeys(listed) if isinstance(name, str)]


def missing_modules(config: Mapping[str, Any], extras: Iterable[str]) -> tuple[str, ...]:
    """Return a note if ``modules_to_save`` names a module of which the file holds no tensor."""
    modules = [f".{key.rpartition('.')[0]}." for key in extras]
    saved = _modules_to_save(config)
    stored = {name for name in saved if any(f".{name}." in key for key in modules)}
    optional = set(HEADS) if stored & set(HEADS) else set()
    missing = [name for name in saved if name not in stored | optional]
    if not missing:
        return ()
    names = ", ".join(map(ascii, missing))[:200]
    note = (
        f"modules_to_save names {names}, of which the file holds no tensor: "
        "it stays as the base has it, and untrained where the base has none"
    )
    return (note,)


def most_common(values: Mapping[str, Value]) -> Value:
    """Return the value most layers share; of equally many the first met."""
    return Counter(values.values()).most_common(1)[0][0]


def patterns(values: Mapping[str, Value], default: Value) -> dict[str, Value]:
    """Return exact module patterns for the values that differ from the default."""
    return {exact_pattern(name): value for name, value in values.items() if value != default}


def carried_fields(
    config: Mapping[str, Any],
    names: set[str],
    extras: set[str],
    source: Checkpoint | None,
    adapted_biases: str,
) -> dict[str, Any]:
    """Take fields of the new config from the old one, so that PEFT finds the same modules again.

    Parameters
    ----------
    config : mapping
        The old one.
    names, extras : set of str
        Modules and other tensors that are written.
    source : Checkpoint, optional
        Whose config it is.
    adapted_biases : str
        PEFT's word for "biases of adapted modules": ``"lora_only"`` or ``"lsr_only"``.
    """
    fields = {field: config[field] for field in CARRIED if config.get(field) is not None}
    if "modules_to_save" in fields:
        fields["modules_to_save"] = _modules_to_save(config)
    # Modules keep the source's words only if they are still the same modules.
    same_modules = source is not None and names == {layer.name for layer in source.layers}
    if "target_modules" not in fields or not same_modules:
        for field in OF_SOME_MODULES:
            fields.pop(field, None)
        fields["target_modules"] = sorted(names)
    fields["bias"] = _carried_bias(config, extras, adapted_biases)
    fields["inference_mode"] = True
    for field in ("base_model_name_or_path", "task_type", "modules_to_save"):
        fields.setdefault(field, None)
    return fields


def _carried_bias(config: Mapping[str, Any], extras: set[str], adapted_biases: str) -> str:
    """Return which biases the new config says are trained; none where none is written."""
    bias = config.get("bias", "none")
    if not any(key.endswith(".bias") for key in extras):
        return "none"
    if bias == "all":
        return "all"
    return adapted_biases if bias in ("lora_only", "lsr_only") else "none"


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
