"""The one figure of the front doors: one LoRA, one command, what came of it.

README, its picture, the first card of the site, the last line of `lsrdecomp demo` and the cheat
sheet tell it. Another run is told by changing the names at the top of this file, and nothing else;
`tests/test_records.py` then names each door that still shows the old figure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.record import RESULTS

RECORD = "one_command"
ROW = "smollm2 keep .95 distill 60"
"""Name of the rows, one a seed."""
KEPT = "kept"
"""Key of the share in a row."""
OF_WHAT = "of its effect"
"""What the share is of, as a sentence ends."""
OPTIONS = "--keep 0.95 --distill 60"
"""The options of the command, as they are typed today."""
LORA = ("rivals", "E2E")
"""The record that holds the bytes of the LoRA, and its task there."""


@dataclass(frozen=True)
class Headline:
    """What a command made of a LoRA: means over the seeds."""

    lora_bytes: int
    bytes: float
    kept: float
    minutes: float
    runs: int

    @property
    def sizes(self) -> tuple[str, str]:
        """The bytes before and after, in words."""
        return f"{self.lora_bytes / 1e6:.1f} MB", f"{self.bytes / 1e3:.1f} kB"

    @property
    def share(self) -> str:
        """The share that is kept, as the doors write it."""
        return f"{100 * self.kept:.0f} %"

    @property
    def sentence(self) -> str:
        """Sizes and share: how every door ends."""
        before, after = self.sizes
        return f"{before} became {after} and keeps {self.share} {OF_WHAT}"


def headline() -> Headline:
    """Return the figure of the front doors, from its record."""
    rows = [row for row in _record(RECORD)["rows"] if row["name"] == ROW]
    name, task = LORA
    (lora_bytes,) = {
        each["bytes_of_lora"]
        for each in _record(name)["tasks"]
        if (each["task"], each["base"]) == (task, "smollm2")
    }
    return Headline(
        lora_bytes=lora_bytes,
        bytes=fmean(row["bytes"] for row in rows),
        kept=fmean(row[KEPT] for row in rows),
        minutes=fmean(row["cpu_seconds"] for row in rows) / 60.0,
        runs=len(rows),
    )


def _record(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded
