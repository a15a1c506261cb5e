"""Questions to a model on the command line: lines of text, or JSON lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp.errors import LsrError

if TYPE_CHECKING:
    from lsrdecomp.lora.base.base_model import Base
    from lsrdecomp.lora.base.heads import Batch
    from lsrdecomp.lora.base.texts import Item
    from lsrdecomp.lora.files import Journal
    from lsrdecomp.lora.files.progress import OnStep
    from lsrdecomp.lora.search.measured_settings import EvaluatorSettings

SETTINGS = ("max_length", "truncate", "dtype", "trust_remote_code")
"""Fields of `EvaluatorSettings` that are options of each verb that asks questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """Options of a source of questions: one of two, or none, where the model writes its own."""

    data: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with prompt and completion, with messages, or with text, or a folder "
            "of images or sounds; instead of --text."
        ),
    ] = None
    answers: Annotated[
        str,
        typer.Option(
            help="Tokens of --data that count: completion or all.",
            autocompletion=lambda: ("completion", "all"),
        ),
    ] = "completion"
    text: Annotated[
        Path | None,
        typer.Option(help="Text file: one example a line, a tab between the texts of a pair."),
    ] = None

    @property
    def sources(self) -> int:
        """The number of sources that were named."""
        return sum(path is not None for path in (self.text, self.data))

    def check(self, settings: EvaluatorSettings) -> None:
        """Refuse more than one source, and options that would do nothing.

        Raises
        ------
        LsrError
        """
        if self.sources > 1:
            raise LsrError("give one of --data FILE.jsonl and --text FILE")
        if self.data is None and settings.truncate:
            raise LsrError(
                "--truncate is about prompts and completions, texts are always cut: give --data "
                "FILE.jsonl"
            )
        if self.data is None and self.answers != "completion":
            raise LsrError("--answers is about prompts and completions: give --data FILE.jsonl")

    def read(
        self, base: Base, *, seed: int, journal: Journal | None = None, step: OnStep | None = None
    ) -> Sequence[Item]:
        """Return the examples of the source; without one ``base`` writes them with its adapter."""
        from lsrdecomp.lora.base.dataset import read_examples, read_text_pairs
        from lsrdecomp.lora.base.written_texts import write_texts

        if self.data is not None and self.data.is_dir():
            from lsrdecomp.lora.base.texts import read_data

            return read_data(self.data)
        if self.data is not None:
            return read_examples(self.data)
        if self.text is not None:
            return read_text_pairs(self.text)
        return write_texts(base, seed=seed, journal=journal, on_step=step)

    def kind(self, base: Base) -> str | None:
        """Return what the examples are called, where there is no source; None where there is."""
        from lsrdecomp.lora.base.written_texts import kind_of_written

        return None if self.sources else kind_of_written(base, ())

    def batches(
        self,
        base: Base,
        examples: Sequence[Any],
        settings: EvaluatorSettings,
        *,
        size: int,
        seed: int,
    ) -> Iterator[Batch]:
        """Return batches of what `read` returned, in an order drawn from ``seed``."""
        from lsrdecomp.lora.base.batches import prompt_batches, text_batches
        from lsrdecomp.lora.base.dataset import PromptExample

        if base.batches is not None:
            return base.batches(base, examples, size)
        if isinstance(examples[0], PromptExample):
            return prompt_batches(
                base,
                examples,
                size=size,
                seed=seed,
                max_length=settings.max_length,
                answers=self.answers,
                truncate=settings.truncate,
            )
        return text_batches(base, examples, size=size, max_length=settings.max_length, seed=seed)
