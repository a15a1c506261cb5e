"""A written form with its promise put into its record and its card, moved to where it is wanted as a whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lsrdecomp.checkpoints.files import SUMS, read_json
from lsrdecomp.checkpoints.writing import new_directory
from lsrdecomp.compression.compress import REPORT
from lsrdecomp.promise.record import Promise

CARD = "README.md"


def publish(
    made: Path,
    out: str | Path,
    promise: Promise,
    *,
    facts: Mapping[str, Any] | None = None,
    inputs: Iterable[Path] = (),
    force: bool = False,
    every_layer: bool = True,
) -> Path:
    """Write the directory ``made`` to ``out``, whole or not at all, with the promise in its record and on its card.

    Parameters
    ----------
    made : Path
        A directory that `Compression.save` wrote.
    out : path
        Must not exist, unless ``force``.
    promise : Promise
    facts : Mapping, optional
        Further JSON values of the record, such as how it was distilled.
    inputs : iterable of Path
        What ``out`` must not overwrite.
    every_layer : bool
        Whether the record keeps what it says of each layer, if it does; else sums alone.
    """
    place = Path(out)
    with new_directory(place, inputs=inputs, force=force) as part:
        for file in made.iterdir():
            if file.is_file() and file.name != SUMS:
                shutil.copyfile(file, part / file.name)
        record = part / REPORT
        held = read_json(record) if record.is_file() else {}
        if not every_layer:
            held.pop("layers", None)
        told = {**held, **(facts or {}), "promise": promise.to_json()}
        record.write_text(json.dumps(told, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        card = part / CARD
        text = card.read_text(encoding="utf-8") if card.is_file() else ""
        card.write_text(f"{text.rstrip()}\n\nThis adapter {promise.sentence()}.\n", encoding="utf-8")
    return place
