"""The manifest of a fleet: one line a finished adapter, so that nothing is done twice or lost.

Runs that share the work, by parts of the names, each write a manifest of their own, and every run
reads them all.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from lsrdecomp.errors import CheckpointError
from lsrdecomp.gateway import read_json_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from lsrdecomp.lora.search.plan import CompressionPlan

MANIFEST = "fleet.jsonl"
MANIFESTS = "fleet*.jsonl"
"""Of the parts too: fleet-3-of-8.jsonl."""
FIRST_BYTES = b'{"plan":'
MEANING = {"plan": "plan", "calibrated": "norm: statistics", "to": "format"}
"""What the fields of the first line are called in errors."""
State = Literal["done", "missed", "failed", "orphaned", "died"]
"""Orphaned is an output whose source is gone; no line of a manifest says so. Died is for runners
alone: the worker was killed or ran out of memory, and the job is to be tried again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one adapter: written, missed or failed, or its source gone.

    Examples
    --------
    >>> Outcome("style-7", "failed", "adapter_model.safetensors: truncated").parameters
    0
    """

    name: str
    state: State
    message: str = ""  # why it missed or failed
    parameters_before: int = 0
    parameters: int = 0
    relative_error: float = 0.0  # in the Fisher norm where there are statistics
    attempts: int = 1
    made_from: str = ""  # a digest of all that was read for it


class Manifest:
    """Outcomes as JSON lines after a first line that says what was asked for.

    Only ever appended to, each line flushed to disk; a last line cut by a kill is overwritten by
    the next one.

    Attributes
    ----------
    path : Path
        Where lines are appended; the manifests of other parts beside it are read.
    recorded : mapping of str to list of Outcome
        All that was ever recorded of an adapter, those of other parts first.
    """

    def __init__(
        self,
        path: Path,
        plan: CompressionPlan,
        calibrated: str | None = None,
        to: str | None = None,
    ) -> None:
        self.path = path
        self.recorded: defaultdict[str, list[Outcome]] = defaultdict(list)
        # The plan as it is read back
        plan_values = json.loads(json.dumps(plan.to_json()))
        requested = {"plan": plan_values, "calibrated": calibrated, "to": to}
        for other in sorted(path.parent.glob(MANIFESTS)):
            if other != path:
                self._read(other, requested)
        if not self._read(path, requested):
            given = {name: value for name, value in requested.items() if value is not None}
            self._write(json.dumps(given))

    def _read(self, path: Path, requested: Mapping[str, Any]) -> bool:
        """Take over the outcomes of a manifest; return whether it has a first line."""
        lines = self._sound_lines(path)
        if not lines:
            return False
        _check_first_line(path, lines[0], requested)
        for line in lines[1:]:
            outcome = _outcome(line)
            if outcome is None:
                raise CheckpointError(
                    f"{json.dumps(line)[:200]} is not an outcome written here; "
                    "choose another output",
                    path=path,
                )
            self.recorded[outcome.name].append(outcome)
        return True

    def append(self, outcome: Outcome) -> None:
        """Add an outcome, and flush its line to disk."""
        self.recorded[outcome.name].append(outcome)
        self._write(json.dumps(asdict(outcome)))

    def _sound_lines(self, path: Path) -> list[dict[str, Any]]:
        """Return all lines but one that a kill cut short, which is taken off the file.

        In the manifest of another part it is one that is being written, and stays.
        """
        if not path.exists():
            return []
        content = path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        try:
            lines = [read_json_text(line) for line in complete.splitlines()]
        except (ValueError, RecursionError):
            lines = [None]
        # Of a first line that was cut short the first bytes tell whose it is
        cut_short = not lines and content[:8] == FIRST_BYTES[: len(content)]
        is_ours = bool(lines) or cut_short
        if not is_ours or not all(isinstance(line, dict) for line in lines):
            raise CheckpointError(
                "is not a manifest written here; choose another output", path=path
            )
        if len(complete) < len(content) and path == self.path:
            os.truncate(path, len(complete))
        return lines

    def _write(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def _check_first_line(path: Path, line: Mapping[str, Any], requested: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` unless a manifest belongs to this plan, norm and format."""
    for name, value in requested.items():
        recorded = line.get(name)
        if recorded != value:
            raise CheckpointError(
                f"belongs to another {MEANING[name]}, {json.dumps(recorded)[:400]}; "
                "choose another output",
                path=path,
            )


def _outcome(line: Mapping[str, Any]) -> Outcome | None:
    """Return the outcome of a line of a manifest, or None if it is none."""
    texts = dict.fromkeys(("name", "state", "message", "made_from"), str)
    types = {**texts, "relative_error": int | float}
    names = set(line)
    if not {"name", "state"} <= names <= set(Outcome.__slots__):
        return None
    if not all(isinstance(value, types.get(name, int)) for name, value in line.items()):
        return None
    return Outcome(**line) if line["state"] in get_args(State) else None
