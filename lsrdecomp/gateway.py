"""What strangers send, kind by kind: its limits, and the answer to it.

Adapters, bases and the replies of servers come from strangers: a few bytes of theirs must not cost
a machine's memory, or years, or run a program. `KINDS` is the table of it, which stands in
SECURITY.md too. Limits were chosen by hand, far above what any adapter has; what a user chooses is
``max_memory`` of `lsrdecomp.lora.files.open_checkpoint`.
"""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from lsrdecomp.errors import CheckpointError
from lsrdecomp.fields import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import FrameType

# -- limits ----------------------------------------------------------------------------------------

TEXT_BYTES = 16 * 2**20
"""Bytes of a pickle inside a torch file, or that the index of packed layers may unpack to."""
STORED_TEXT_BYTES = 100_000_000
"""Bytes of a JSON file, or of a safetensors header: as many as that library reads. They are in
the file, and cost memory by their length."""
TOML_BYTES = 2**15
"""Bytes of a TOML file: dotted keys cost Python's reader the square of their length."""
MAX_AXES = 16
"""Axes of a tensor, or Kronecker factors of a layer."""
MAX_NUMBERS = 2**29
"""Numbers of a tensor that is not stored but computed from stored ones, as LoHa's are."""
MAX_NAME = 512
"""Characters of a tensor's name."""
SUMS_BYTES = 2**20
"""Bytes of SHA256SUMS that are read."""
MAX_INTEGER = 2**31 - 1
"""The largest rank, or other integer, of adapter_config.json."""
PATTERN_CHARACTERS = 1024
"""Characters of a pattern of module names. This and the next three bound matching."""
PATTERN_REPEATS = 3
"""Repeats (``*``, ``+`` or ``{``) in a row in one pattern."""
PATTERN_CHOICES = 16
"""Choices between two (``?``, or ``|`` in a group) in a row in one pattern, or as many ways."""
WILDCARD_PATTERNS = 64
"""Patterns with wildcards in one field of a config."""
REPLY_BYTES = 16 * 2**20
"""Bytes of a server's reply: of a likely next token there are some thousand."""
REPLY_SECONDS = 300.0
"""Seconds to wait for each reply; by hand, for a large model on a CPU."""
TEMPLATE_CHARACTERS = 2**18
"""Characters of a chat template; the longest that were seen have some twenty thousand."""
TEMPLATE_SECONDS = 1.0
"""Seconds of a processor for a conversation that a chat template writes: it takes milliseconds."""
WRITTEN_CHARACTERS = 2**24
"""Characters that a chat template may write of one conversation."""


class Kind(NamedTuple):
    """One kind of what strangers send: its limits and its policy, in words."""

    name: str
    limits: str
    policy: str


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


KINDS = (
    Kind(
        "JSON: configs, indices, headers, records",
        f"{_megabytes(STORED_TEXT_BYTES)}, the nesting that Python's stack holds, "
        f"integers up to {MAX_INTEGER:,}",
        "An object without repeated keys, NaN or infinities, each field of its type; else one "
        "error that names the file.",
    ),
    Kind(
        "TOML: plans, settings",
        f"{TOML_BYTES:,} bytes, the nesting that Python's stack holds",
        "Unknown names and other types are refused by name.",
    ),
    Kind(
        "Patterns of module names (`rank_pattern`, `alpha_pattern`, `target_modules`, "
        "`exclude_modules`, `layers_pattern`)",
        f"{PATTERN_CHARACTERS:,} characters, {PATTERN_REPEATS} repeats and {PATTERN_CHOICES} "
        f"choices in a row, {WILDCARD_PATTERNS} a field; no repeated group",
        "Checked before anything, PEFT included, matches by them.",
    ),
    Kind(
        "Names of tensors and files",
        f"{MAX_NAME} characters",
        "Module names, never paths; nothing outside a directory is read or written by them.",
    ),
    Kind(
        "Tensors",
        f"{MAX_AXES} axes, {MAX_NUMBERS:,} computed numbers, `--max-memory` where it is given",
        "Sizes are held to the size of the file before anything is allocated; pickles are opened "
        f"with `weights_only=True` alone, up to {_megabytes(TEXT_BYTES)} of them.",
    ),
    Kind(
        "SHA256SUMS and other files beside the weights",
        f"{_megabytes(SUMS_BYTES)} of digests",
        "Read where this library wrote them, never run; foreign ones that programs would load are "
        "named by `verify`.",
    ),
    Kind(
        "Remote code of bases (`auto_map`, `custom_pipeline`)",
        "none is run",
        "Models, tokenizers, processors and pipelines are opened with `trust_remote_code=False`, "
        "without a question; `--trust-remote-code` is the only door, and no file opens it. Classes "
        "that a config names must be models of transformers or diffusers.",
    ),
    Kind(
        "Chat templates of tokenizers (Jinja)",
        f"{TEMPLATE_CHARACTERS:,} characters, {TEMPLATE_SECONDS:g} s and {WRITTEN_CHARACTERS:,} "
        "written characters a conversation",
        "Rendered in transformers' immutable sandbox, which has no files, modules or attributes "
        "of Python; powers, large numbers and large products are refused.",
    ),
    Kind(
        "Replies of servers",
        f"{_megabytes(REPLY_BYTES)}, {REPLY_SECONDS:g} s",
        "Read up to the limit, then refused; anything but the JSON that is expected is one error.",
    ),
    Kind(
        "Anything that is printed",
        "one line where one is expected",
        "Control characters, escape sequences and marks of direction are shown as `?`.",
    ),
)
"""Every kind of what strangers send."""


def kinds_table() -> str:
    """Return `KINDS` as a table in Markdown."""
    head = ["| What strangers send | Limits | What is done with it |", "|---|---|---|"]
    rows = [f"| {kind.name} | {kind.limits} | {kind.policy} |" for kind in KINDS]
    return "\n".join([*head, *rows])


# -- texts -----------------------------------------------------------------------------------------


def printable(text: str) -> str:
    r"""Replace every character that could not be printed on one line by "?".

    Marks of direction, which let a name read backwards, are among them.

    >>> printable("a\x1b[31m\u202eb")
    'a?[31m?b'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def first_line(error: BaseException) -> str:
    """Return the first line of a foreign error, short and printable enough for one of ours.

    It may quote a stranger's bytes.
    """
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return printable(text[:200])


def read_json_text(text: str | bytes, **options: Any) -> Any:
    """Return any value of JSON.

    Parameters
    ----------
    text : str or bytes
    **options
        As for `json.loads`.

    Raises
    ------
    ValueError
        If it is no JSON, or nested too deeply.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None


# -- remote code -----------------------------------------------------------------------------------

TRUST = "trust_remote_code"
"""The setting that lets program code of a base run: it is typed, and read from no file."""
REMOTE_CODE = (
    "it brings program code of its own (remote code), which is not run; read that code, and if you "
    "trust its author, give --trust-remote-code (in Python trust_remote_code=True)"
)


def open_pretrained(
    loader: Any, source: str | Path, *, trust_remote_code: bool = False, **options: Any
) -> Any:
    """Open a part of a base by ``from_pretrained`` of a class of transformers or diffusers.

    Every such call of this library goes through here.

    Raises
    ------
    CheckpointError
        If the part needs program code that it brings itself, and that is not trusted.
    """
    try:
        return loader.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise CheckpointError(REMOTE_CODE, path=source) from None


def library_class(library: Any, name: object, kind: type) -> Any:
    """Return the class of a library that a config names.

    Raises
    ------
    ValueError
        If it is none of this kind.
    """
    found = getattr(library, name, None) if isinstance(name, str) else None
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ValueError(f"{printable(str(name)[:80])} is no {kind.__name__} of {library.__name__}")
    return found


# -- chat templates --------------------------------------------------------------------------------


def refuse_trust(settings: Iterable[str], path: Path) -> None:
    """Refuse a file of settings that lets program code run: it may be a stranger's too.

    Raises
    ------
    SettingsError
    """
    if any(name.replace("-", "_") == TRUST for name in settings):
        raise SettingsError(
            f"{path}: {TRUST} is read from no file, which may be a stranger's; give "
            "--trust-remote-code"
        )


class TemplateError(ValueError):
    """A chat template costs more than any conversation does."""


@lru_cache(maxsize=8)
def check_template(template: str) -> None:
    """Refuse a chat template that is too long, or computes what may fill the memory at once.

    Raises
    ------
    TemplateError
    """
    from jinja2 import Environment, TemplateSyntaxError, nodes

    if len(template) > TEMPLATE_CHARACTERS:
        raise TemplateError(
            f"the chat template has {len(template):,} characters; at most "
            f"{TEMPLATE_CHARACTERS:,} are read"
        )
    # transformers knows one tag more than Jinja.
    text = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)
    environment = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
    try:
        tree = environment.parse(text)
        products = list(tree.find_all(nodes.Mul))
        has_power = tree.find(nodes.Pow) is not None
        constants = [node.value for node in tree.find_all(nodes.Const)]
    except TemplateSyntaxError as error:
        raise TemplateError(f"the chat template is not Jinja: {printable(str(error))}") from None
    except (RecursionError, MemoryError):
        raise TemplateError("the chat template is nested too deeply") from None
    numbers = [value for value in constants if isinstance(value, int)]
    widths = [value for value in constants if isinstance(value, str) and WIDTH.search(value)]
    if has_power or widths or any(abs(number) > WRITTEN_CHARACTERS for number in numbers):
        raise TemplateError("the chat template computes with numbers that no conversation needs")
    for product in products:
        factors = [node.value for node in product.find_all(nodes.Const)]
        counts = [factor for factor in factors if isinstance(factor, int)]
        texts = [factor for factor in factors if isinstance(factor, str)]
        is_small = all(abs(count) <= 100 for count in counts) and len("".join(texts)) <= 100
        if product.find(nodes.Mul) is not None or not counts or not is_small:
            raise TemplateError("the chat template multiplies by more than a small number")


WIDTH = re.compile(r"[%:][^\sa-zA-Z]*[0-9]{8}")
"""A width of a format that is no width of a text."""


@contextmanager
def limited_template() -> Iterator[None]:
    """Stop a template that is rendered in this thread when it takes too long or grows too large.

    Jinja makes a Python function of a template, whose lines are traced.

    Raises
    ------
    TemplateError
    """
    end = time.thread_time() + TEMPLATE_SECONDS
    before = sys.gettrace()
    written = 0

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal written
        if event == "return" and isinstance(value, str):
            written += len(value)
        lengths = (len(each) for each in frame.f_locals.values() if isinstance(each, str | list))
        if max(written, *lengths, 0) > WRITTEN_CHARACTERS:
            raise TemplateError(f"the chat template writes more than {WRITTEN_CHARACTERS:,}")
        if time.thread_time() > end:
            raise TemplateError(f"the chat template still writes after {TEMPLATE_SECONDS:g} s")
        is_template = frame.f_code.co_filename == "<template>"
        return trace if is_template else None

    sys.settrace(trace)
    try:
        yield
    except (MemoryError, RecursionError) as error:
        raise TemplateError(f"the chat template ends in {type(error).__name__}") from None
    finally:
        sys.settrace(before)
