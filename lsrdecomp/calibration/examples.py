"""Examples: what a model reads and what it is asked for, whatever file they came from."""

from __future__ import annotations

from dataclasses import dataclass

Choices = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a task.

    ``choices`` holds what the model reads: one ``(text, second text or None)`` for a classification, one per answer
    for a multiple choice. ``label`` is an index into the task's labels (or choices), a score for a regression.
    """

    choices: Choices
    label: float
