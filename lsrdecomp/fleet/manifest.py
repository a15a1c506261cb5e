"""The manifest of a fleet: one line a finished adapter, so that nothing is done twice or lost."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from lsrdecomp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from lsrdecomp.compression.settings import CompressionPlan

MANIFEST = "fleet.jsonl"
FIRST = b'{"plan":'
WORDS = {"plan": "plan", "calibrated": "norm: statistics"}
State = Literal["done", "missed", "failed", "died"]
"""Of these only the last is for runners: its worker was killed or ran out of memory, and it is to
be tried again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one adapter ended.

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


class Manifest:
    """Outcomes as JSON lines after a first line that says what was asked for.

    Only ever appended to, each line flushed to disk; a last line cut by a kill is overwritten by
    the next one.
    """

    def __init__(self, path: Path, plan: CompressionPlan, calibrated: str | None = None) -> None:
        self.path = path
        self.outcomes: dict[str, Outcome] = {}
        wanted = {
            "plan": json.loads(json.dumps(plan.to_json())),
            "calibrated": calibrated,
        }  # as it reads it back
        lines = self._sound_lines()
        if lines:
            for name, value in wanted.items():
                recorded = lines[0].get(name)
                if recorded != value:
                    text = f"belongs to another {WORDS[name]}, {json.dumps(recorded)[:400]}; choose another output"
                    raise CheckpointError(text, path=path)
        else:
            self._write(
                json.dumps({name: value for name, value in wanted.items() if value is not None})
            )
        for line in lines[1:]:
            outcome = _outcome(line)
            if outcome is None:
                text = f"{json.dumps(line)[:200]} is not an outcome written here; choose another output"
                raise CheckpointError(text, path=path)
            self.outcomes[outcome.name] = outcome

    def append(self, outcome: Outcome) -> None:
        self.outcomes[outcome.name] = outcome
        self._write(json.dumps(asdict(outcome)))

    def _sound_lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
        except (ValueError, RecursionError):
            lines = [None]
        if not all(isinstance(line, dict) for line in lines) or (
            not lines and content[:8] != FIRST[: len(content)]
        ):
            raise CheckpointError(
                "is not a manifest written here; choose another output", path=self.path
            )
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))
        return lines

    def _write(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def _outcome(line: Mapping[str, Any]) -> Outcome | None:
    """The outcome of a line of a manifest, if it is one."""
    kinds = {"name": str, "state": str, "message": str, "relative_error": int | float}
    fits = set(line) <= set(Outcome.__slots__) and {"name", "state"} <= set(line)
    fits = fits and all(isinstance(value, kinds.get(key, int)) for key, value in line.items())
    return Outcome(**line) if fits and line["state"] in get_args(State) else None
