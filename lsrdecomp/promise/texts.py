"""Texts for a promise: read from whatever people have, and split so that nothing held out was seen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from lsrdecomp.calibration.base_model import Text, read_lines, task_texts
from lsrdecomp.errors import LsrError
from lsrdecomp.training.tasks import find_task

Texts = Sequence[Text]

LEAST = 32
"""Texts a promise needs: eight to measure on, the others to learn from."""
LEAST_HELD = 8


def read_data(data: str | Path | Sequence[Text]) -> list[Text]:
    """The texts of a file with a text a line (a tab between pairs), of a GLUE directory (its train split), or as given.

    Raises `CheckpointError` or `TaskError` for what cannot be read.
    """
    if not isinstance(data, str | Path):
        return list(data)
    path = Path(data)
    if path.is_dir():
        return task_texts(find_task(path).read(path, "train"))
    return read_lines(path)


def data_name(data: str | Path | Sequence[Text]) -> str:
    """What the texts are called in a sentence."""
    return Path(data).name if isinstance(data, str | Path) else f"{len(data):,} texts"


def split(texts: Sequence[Text], held_out: int, seed: int) -> tuple[list[Text], list[Text]]:
    """Held-out texts, at most ``held_out`` and a quarter of all, and the others, both in an order drawn from ``seed``.

    Texts that begin alike (the references of one prompt) stay on one side.

    Raises
    ------
    LsrError
        If the texts are too few.
    """
    groups: dict[str, list[Text]] = {}
    for text in texts:
        groups.setdefault(text[0], []).append(text)
    if len(groups) < LEAST:
        raise LsrError(f"{len(groups)} different texts are too few: a promise needs {LEAST}, a few hundred are better")
    most = max(LEAST_HELD, min(held_out, len(texts) // 4))
    keys = list(groups)
    random.Random(seed).shuffle(keys)
    held: list[Text] = []
    rest: list[Text] = []
    for key in keys:
        (held if len(held) < most and len(held) + len(groups[key]) <= most else rest).extend(groups[key])
    return held, rest
