"""Questions to a model on the command line: lines of text, or JSON lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp.cli.completion import complete
from lsrdecomp.errors import LsrError

if TYPE_CHECKING:
    from torch import Tensor

    from lsrdecomp.calibration.base_model import Base
    from lsrdecomp.calibration.dataset import PromptExample, TextPair

DataFile = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines with prompt and completion, with messages, or with text; instead of "
        "--text."
    ),
]
AnswerTokens = Annotated[
    str,
    typer.Option(
        "--answers",
        help="Tokens of --data that count: completion or all.",
        autocompletion=complete(lambda: ("completion", "all")),
    ),
]
SETTINGS = ("max_length", "truncate", "dtype")
"""Fields of `EvaluatorSettings` that are options of each verb that asks questions."""


@dataclass(frozen=True, slots=True)
class Questions:
    """Source of questions: one of two."""

    text: Path | None
    data: Path | None
    answers: str = "completion"
    max_length: int | None = None
    truncate: bool = False

    @property
    def sources(self) -> int:
        """The number of sources that were named."""
        return sum(path is not None for path in (self.text, self.data))

    def check(self) -> None:
        """Refuse none and more than one, and options that would do nothing.

        Raises
        ------
        LsrError
        """
        if self.sources != 1:
            raise LsrError("give one of --data FILE.jsonl and --text FILE")
        if self.data is None and self.truncate:
            raise LsrError(
                "--truncate is about prompts and completions, texts are always cut: give --data "
                "FILE.jsonl"
            )
        if self.data is None and self.answers != "completion":
            raise LsrError("--answers is about prompts and completions: give --data FILE.jsonl")

    def read(self) -> list[PromptExample] | list[TextPair]:
        """Return the examples of the source."""
        from lsrdecomp.calibration.dataset import read_examples, read_text_pairs

        if self.data is not None:
            return read_examples(self.data)
        assert self.text is not None
        return read_text_pairs(self.text)

    def batches(
        self,
        base: Base,
        examples: Sequence[Any],
        *,
        size: int,
        seed: int,
    ) -> Iterator[dict[str, Tensor]]:
        """Return batches of what `read` returned, in an order drawn from ``seed``."""
        from lsrdecomp.calibration.batches import prompt_batches, text_batches

        if self.data is not None:
            return prompt_batches(
                base,
                examples,
                size=size,
                seed=seed,
                max_length=self.max_length,
                answers=self.answers,
                truncate=self.truncate,
            )
        return text_batches(base, examples, size=size, max_length=self.max_length, seed=seed)
