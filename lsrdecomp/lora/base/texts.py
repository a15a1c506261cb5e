"""Texts of a measurement: reading them from files or sequences, and holding some of them out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from lsrdecomp.errors import LsrError
from lsrdecomp.lora.base.dataset import (
    DataError,
    PromptExample,
    TextPair,
    read_examples,
    read_text_pairs,
)
from lsrdecomp.lora.files.file_checks import EXAMPLE_SUFFIXES

Item = TextPair | PromptExample
"""A text to measure on: one with or without a second one, or a prompt with its completion."""
Texts = Sequence[str | Item]
"""Texts as a caller may give them; a plain string is a text of its own."""


# Numbers of texts that are held out; all by hand.

HELD_OUT = 128
"""Maximum texts held out, unless the settings say otherwise; never more than a quarter."""
HELD_OUT_PROMPTS = 64
"""The same for prompts with completions, each of which gives many predictions."""
MIN_TEXTS = 32
"""Different texts that are needed: eight to measure on, the others to learn from."""
MIN_HELD_OUT = 8
"""Minimum texts held out."""

WRITTEN = "texts that the model wrote itself"
"""What texts are called that a model wrote from nothing."""
CONTINUED = "texts that the model wrote itself, from the few that were given"
"""What texts are called that a model wrote from a few prompts."""
SENTENCES = "sentences of the package, not of the LoRA's task"
"""What a model reads that does not write, where too few texts are given."""


def n_selection_texts(held_out: int, *, trains: bool) -> int:
    """Return the number of texts to select variants by, beside so many that are held out.

    Fewer than 30 would select by luck, so that none are. Where variants are trained there are more:
    the same texts then say when a training ends, and no others are set aside for that.
    """
    if held_out < 60:
        return 0
    return round(held_out * (0.75 if trains else 0.5))


def few_texts(texts: Sequence[Item]) -> bool:
    """Return whether texts are too few to measure on, so that a model writes its own."""
    return len({_beginning(text) for text in texts}) < MIN_TEXTS


def read_data(data: str | Path | Texts | None) -> list[Item]:
    """Read the texts of a file, or take them as given.

    A file whose name ends in .jsonl, .json or .csv holds prompts and completions, conversations or
    texts, see `lsrdecomp.lora.base.dataset`; only completions are predicted. Any other file has a
    text a line, or two with a tab between.

    Parameters
    ----------
    data : str, path, sequence or None
        A file, or texts: strings, pairs ``(first, second or None)`` or
        `PromptExample`. None stands for no texts.

    Raises
    ------
    CheckpointError, DataError
        If a file cannot be read.
    DataError
        If an element of a sequence is none of these; the message has its index.
    """
    if data is None:
        return []
    if not isinstance(data, str | Path):
        return [_as_item(text, index) for index, text in enumerate(data)]
    path = Path(data)
    if path.suffix in EXAMPLE_SUFFIXES:
        return list(read_examples(path))
    return list(read_text_pairs(path))


def _as_item(text: object, index: int) -> Item:
    """Return one element of a sequence of texts as an item; raise `DataError` if it is none."""
    if isinstance(text, str):
        return text, None
    if isinstance(text, PromptExample):
        return text
    if isinstance(text, tuple | list) and len(text) == 2:
        first, second = text
        if isinstance(first, str) and isinstance(second, str | None):
            return first, second
    raise DataError(
        f"data[{index}] is {text!r:.60}; give strings, pairs (first, second) or PromptExample "
        "values"
    )


def data_name(data: str | Path | Texts | None) -> str:
    """Return the name of the texts in a sentence: of their file, or their number."""
    if isinstance(data, str | Path):
        return Path(data).name
    return "no texts" if data is None else f"{len(data):,} texts"


def split_texts(
    texts: Sequence[Item], max_held_out: int, seed: int, *, max_share: float = 0.25
) -> tuple[list[Item], list[Item]]:
    """Hold out texts, at most a quarter of all or another share.

    Texts that begin alike, such as several completions of one prompt, stay together.

    Returns
    -------
    held_out, remaining : list
        Both in an order drawn from ``seed``.

    Raises
    ------
    LsrError
        If the texts are too few.
    """
    # 1. Group texts that begin alike. A group is held out as a whole: a variant trained on the
    #    prompt of a held-out text would look better than it is.
    groups: dict[str, list[Item]] = {}
    for text in texts:
        groups.setdefault(_beginning(text), []).append(text)
    if len(groups) < MIN_TEXTS:
        raise LsrError(
            f"{len(groups)} different texts are too few: {MIN_TEXTS} are needed, a few "
            "hundred are better"
        )
    # 2. Go through the groups in random order, and hold out each that still fits.
    limit = max(MIN_HELD_OUT, min(max_held_out, int(max_share * len(texts))))
    beginnings = list(groups)
    random.Random(seed).shuffle(beginnings)
    held_out: list[Item] = []
    remaining: list[Item] = []
    for beginning in beginnings:
        group = groups[beginning]
        if len(held_out) + len(group) <= limit:
            held_out += group
        else:
            remaining += group
    return held_out, remaining


def _beginning(item: Item) -> str:
    """Return what texts that belong together share: the prompt, or the first text of a pair."""
    if not isinstance(item, PromptExample):
        return item[0]
    if item.messages:
        return item.messages[0]["content"]
    return item.prompt or item.completion


def n_characters(item: Item) -> int:
    """Return the characters of a text, to sort by."""
    if isinstance(item, PromptExample):
        messages = sum(len(message["content"]) for message in item.messages)
        return len(item.prompt) + len(item.completion) + messages
    first, second = item
    return len(first) + len(second or "")
