"""Texts for a promise: read from whatever people have, and split so that nothing held out was seen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from lsrdecomp.calibration.base_model import Text, read_lines, task_texts
from lsrdecomp.calibration.dataset import PromptExample, read_jsonl
from lsrdecomp.errors import LsrError
from lsrdecomp.training.tasks import find_task

Item = Text | PromptExample
Texts = Sequence[Item]

LEAST = 32
"""Texts a promise needs: eight to measure on, the others to learn from."""
LEAST_HELD = 8


def read_data(data: str | Path | Texts) -> list[Item]:
    """The texts of a file, of a GLUE directory (its train split), or as given.

    A file whose name ends in .jsonl holds prompts and completions, conversations or texts, see
    `lsrdecomp.calibration.dataset`: only completions are answers. Any other has a text a line, a tab between pairs.
    Raises `CheckpointError`, `DataError` or `TaskError` for what cannot be read.
    """
    if not isinstance(data, str | Path):
        return list(data)
    path = Path(data)
    if path.is_dir():
        return list(task_texts(find_task(path).read(path, "train")))
    return list(read_jsonl(path) if path.suffix == ".jsonl" else read_lines(path))


def data_name(data: str | Path | Texts) -> str:
    """What the texts are called in a sentence."""
    return Path(data).name if isinstance(data, str | Path) else f"{len(data):,} texts"


def split(texts: Texts, held_out: int, seed: int) -> tuple[list[Item], list[Item]]:
    """Held-out texts, at most ``held_out`` and a quarter of all, and the others, both in an order drawn from ``seed``.

    Texts that begin alike (the references of one prompt) stay on one side.

    Raises
    ------
    LsrError
        If the texts are too few.
    """
    groups: dict[str, list[Item]] = {}
    for text in texts:
        groups.setdefault(_start(text), []).append(text)
    if len(groups) < LEAST:
        raise LsrError(f"{len(groups)} different texts are too few: a promise needs {LEAST}, a few hundred are better")
    most = max(LEAST_HELD, min(held_out, len(texts) // 4))
    keys = list(groups)
    random.Random(seed).shuffle(keys)
    held: list[Item] = []
    rest: list[Item] = []
    for key in keys:
        (held if len(held) < most and len(held) + len(groups[key]) <= most else rest).extend(groups[key])
    return held, rest


def length(item: Item) -> int:
    """Letters of a text, for sorting."""
    if isinstance(item, PromptExample):
        return len(item.prompt) + len(item.completion) + sum(len(each["content"]) for each in item.messages)
    return len(item[0]) + len(item[1] or "")


def _start(item: Item) -> str:
    """What two texts that belong together have in common: the prompt, or the first text of a pair."""
    if not isinstance(item, PromptExample):
        return item[0]
    return item.messages[0]["content"] if item.messages else item.prompt or item.completion
