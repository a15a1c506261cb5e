"""Data of a measurement: reading texts, files or batches, and holding some of them out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.lora.base.dataset import (
    DataError,
    PromptExample,
    TextPair,
    read_examples,
    read_text_pairs,
)
from lsrdecomp.lora.files.file_checks import EXAMPLE_SUFFIXES, is_diffusers


@dataclass(frozen=True, slots=True)
class Example:
    """What a model is run on, where that is neither a text nor a file.

    Attributes
    ----------
    number : int
        Its place among the examples; the seed of its draws.
    inputs : object
        A batch of one row, or the prompt of an image; None if all is drawn.
    """

    number: int
    inputs: Any = None


Item = TextPair | PromptExample | Path | Example
"""An example to measure on: a text with or without a second one, a prompt with its completion, the
file of an image or sound, or what a model is called with."""
Texts = Iterable[Any]
"""Data as a caller may give them: plain strings, which are texts of their own, items, or batches of
tensors for a model of one's own."""

FILE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".wav")
"""Endings of the files of images and sounds that are taken from a folder."""


# Numbers of texts that are held out; all by hand.

HELD_OUT = 128
"""Maximum texts held out, unless the settings say otherwise; never more than a quarter."""
HELD_OUT_PROMPTS = 64
"""The same for prompts with completions, each of which gives many predictions."""
MIN_TEXTS = 32
"""Different texts that are needed: eight to measure on, the others to learn from."""
MIN_HELD_OUT = 8
"""Minimum texts held out."""
N_DRAWN = 240
"""Minimum images that are drawn for a diffusion model, each at several noise levels."""

WRITTEN = "texts that the model wrote itself"
"""What texts are called that a model wrote from nothing."""
CONTINUED = "texts that the model wrote itself, from the few that were given"
"""What texts are called that a model wrote from a few prompts."""
SENTENCES = "sentences of the package, not of the LoRA's task"
"""What a model reads that does not write, where too few texts are given."""


def n_selection_texts(held_out: int, *, trains: bool) -> int:
    """Return the number of texts to select variants by, beside a number of held-out ones.

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
    text a line, or two with a tab between. Of a folder all images and sounds are taken.

    Parameters
    ----------
    data : str, path or iterable
        A file or folder, or texts: strings, pairs ``(first, second or None)`` or
        `PromptExample`; or batches: tensors, tuples or dictionaries of them, with a row for each
        example. None stands for no texts.

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
        items: list[Item] = []
        for index, element in enumerate(data):
            if _holds_tensors(element):
                items += _examples(element, len(items))
            else:
                items.append(_as_item(element, index))
        return items
    path = Path(data)
    if path.is_dir():
        return list(_files_in(path))
    if path.suffix in EXAMPLE_SUFFIXES:
        return list(read_examples(path))
    return list(read_text_pairs(path))


def data_for(base: object, data: Any) -> list[Item]:
    """Return what a base is run on: the data, or for a diffusion model images to draw."""
    return prompts_to_draw(data) if is_diffusers(base) else read_data(data)


def prompts_to_draw(data: str | Path | Texts | None) -> list[Item]:
    """Return images to draw: each prompt with a seed, prompts repeated until there are enough.

    Parameters
    ----------
    data : str, path or iterable
        A file with a prompt a line, or prompts; None for images without one.
    """
    prompts: list[str | None] = [None]
    if data is not None:
        prompts = []
        for item in read_data(data):
            if not isinstance(item, tuple):
                raise DataError(f"a diffusion model takes prompts, one a line; got {item!r:.60}")
            prompts.append(item[0])
    if not prompts:
        raise DataError("there is no prompt in the data")
    count = max(len(prompts), N_DRAWN)
    return [Example(number, prompts[number % len(prompts)]) for number in range(count)]


def _files_in(folder: Path) -> list[Path]:
    """Return the images and sounds of a folder, and of folders in it."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in FILE_SUFFIXES)
    if not files:
        endings = ", ".join(FILE_SUFFIXES)
        raise CheckpointError(f"holds no image and no sound ({endings})", path=folder)
    return files


def _holds_tensors(element: object) -> bool:
    """Return whether an element of the data is a batch, without loading torch."""
    if isinstance(element, dict):
        return any(map(_holds_tensors, element.values()))
    if isinstance(element, tuple | list):
        return any(map(_holds_tensors, element))
    return hasattr(element, "new_zeros")


def _examples(inputs: Any, first: int) -> list[Example]:
    """Return the rows of a batch as examples, numbered from ``first``."""
    from lsrdecomp.lora.base.batch_rows import as_batch, split_rows

    return [Example(first + i, row) for i, row in enumerate(split_rows(as_batch(inputs)))]


def _as_item(text: object, index: int) -> Item:
    """Return one element of a sequence of texts as an item; raise `DataError` if it is none."""
    if isinstance(text, str):
        return text, None
    if isinstance(text, PromptExample | Path | Example):
        return text
    if isinstance(text, tuple | list) and len(text) == 2:
        first, second = text
        if isinstance(first, str) and isinstance(second, str | None):
            return first, second
    raise DataError(
        f"data[{index}] is {text!r:.60}; give strings, pairs (first, second), PromptExample "
        "values, paths of images or sounds, or batches of tensors"
    )


def kind_of(items: Sequence[Item]) -> str:
    """Return what items are called together: texts, images, sounds, or examples."""
    files = [item for item in items if isinstance(item, Path)]
    if files:
        return "sounds" if all(file.suffix.lower() == ".wav" for file in files) else "images"
    return "examples" if any(isinstance(item, Example) for item in items) else "texts"


def data_name(data: str | Path | Texts | None) -> str:
    """Return the name of the texts in a sentence: of their file or folder, or their number."""
    if data is None:
        return "images drawn without a prompt"
    if isinstance(data, str | Path):
        path = Path(data)
        return f"{path.name}/" if path.is_dir() else path.name
    if not isinstance(data, Sequence):
        return "the given data"
    return f"{len(data):,} {'batches' if any(map(_holds_tensors, data)) else 'texts'}"


def split_texts(
    texts: Sequence[Item],
    max_held_out: int,
    seed: int,
    *,
    max_share: float = 0.25,
    by_prompt: bool = False,
) -> tuple[list[Item], list[Item]]:
    """Hold out texts, at most a quarter of all or another share.

    Texts that begin alike, such as several completions of one prompt, stay together. With
    ``by_prompt`` those count as one; of all texts no more than the share is held out then, too.

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
            f"{len(groups)} different {kind_of(texts)} are too few: {MIN_TEXTS} are needed, a few "
            "hundred are better"
        )
    # 2. Go through the groups in random order, and hold out each that still fits.
    sizes = {beginning: 1 if by_prompt else len(group) for beginning, group in groups.items()}
    limit = max(MIN_HELD_OUT, min(max_held_out, int(max_share * sum(sizes.values()))))
    text_limit = max(MIN_HELD_OUT, int(max_share * len(texts)))
    beginnings = list(groups)
    random.Random(seed).shuffle(beginnings)
    held_out: list[Item] = []
    remaining: list[Item] = []
    n_held_out = 0
    for beginning in beginnings:
        group, size = groups[beginning], sizes[beginning]
        if n_held_out + size <= limit and len(held_out) + len(group) <= text_limit:
            held_out += group
            n_held_out += size
        else:
            remaining += group
    return held_out, remaining


def _beginning(item: Item) -> str:
    """Return what texts that belong together share: the prompt, or the first text of a pair.

    Of a conversation it is what stands before the first answer: a system prompt is shared by all.
    """
    if isinstance(item, Path | Example):  # each is alone
        return str(item if isinstance(item, Path) else item.number)
    if not isinstance(item, PromptExample):
        return item[0]
    if item.messages:
        before = itertools.takewhile(lambda each: each["role"] != "assistant", item.messages[1:])
        return "\n".join(message["content"] for message in (item.messages[0], *before))
    return item.prompt or item.completion


def n_characters(item: Item) -> int:
    """Return the characters of a text, to sort by; 0 for other values."""
    if isinstance(item, Path | Example):
        return 0
    if isinstance(item, PromptExample):
        messages = sum(len(message["content"]) for message in item.messages)
        return len(item.prompt) + len(item.completion) + messages
    first, second = item
    return len(first) + len(second or "")
