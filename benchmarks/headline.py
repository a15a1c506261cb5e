"""The one figure of the front doors: one LoRA, one command, what came of it.

README, its picture, the first card of the site, the last line of `lsrdecomp demo` and the cheat
sheet tell it. Another run is told by changing the names at the top of this file, and nothing else;
`tests/test_records.py` then names each door that still shows the old figure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from benchmarks.record import RESULTS

RECORD = "one_command"
ROW = "smollm2 answers .9 distill 60"
"""Name of the row, of the first draw of its texts."""
OF_WHAT = "answers, word for word"
"""What is counted, as a sentence ends."""
OPTIONS = "--keep-answers 0.9 --distill 60"
"""The options of the command, as they are typed today."""
LORA = ("rivals", "E2E")
"""The record that holds the bytes of the LoRA, and its task there."""


@dataclass(frozen=True)
class Headline:
    """What a command made of a LoRA, and to how many fresh prompts that gives its answer."""

    lora_bytes: int
    bytes: int
    n_matching: int
    answered: int
    minutes: float

    @property
    def sizes(self) -> tuple[str, str]:
        """The bytes before and after, in words."""
        return f"{self.lora_bytes / 1e6:.1f} MB", f"{self.bytes / 1e3:.0f} kB"

    @property
    def count(self) -> str:
        """The answers that are kept, as the doors write them."""
        return f"{self.n_matching} of {self.answered}"

    @property
    def sentence(self) -> str:
        """Sizes and answers: how every door ends."""
        before, after = self.sizes
        return f"{before} became {after} and keeps {self.count} {OF_WHAT}"


def headline() -> Headline:
    """Return the figure of the front doors, from its record."""
    (row,) = (row for row in _record(RECORD)["rows"] if (row["name"], row["seed"]) == (ROW, 0))
    name, task = LORA
    (lora_bytes,) = {
        each["bytes_of_lora"]
        for each in _record(name)["tasks"]
        if (each["task"], each["base"]) == (task, "smollm2")
    }
    return Headline(
        lora_bytes=lora_bytes,
        bytes=row["bytes"],
        n_matching=row["found"]["n_matching"],
        answered=row["found"]["answered"],
        minutes=row["cpu_seconds"] / 60.0,
    )


def _record(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded
