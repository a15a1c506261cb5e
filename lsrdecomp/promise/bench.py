"""Where written forms of an adapter are measured: its base, held-out texts, and the texts left to learn from."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peft import PeftModel

from lsrdecomp.calibration.base_model import Base, adapted_modules, batches, load_base, prompt_batches
from lsrdecomp.calibration.dataset import PromptExample, tokenize
from lsrdecomp.calibration.divergence import Behaviour, Reference
from lsrdecomp.calibration.fisher import Head
from lsrdecomp.calibration.questions import TOKEN_HEADS, Batch
from lsrdecomp.compression.progress import OnStep, Step
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.promise.texts import Texts, length, split

NO_EFFECT = 1e-9
"""Nats: a divergence below this is rounding."""


class Bench:
    """A base with a LoRA on it, the LoRA's answers to held-out texts, and the texts that calibration may see.

    Parameters
    ----------
    base : str or path
        As `load_base` takes it.
    lora : path
        The adapter whose behaviour is to be kept: a PEFT directory.
    texts : sequence of texts
        Split by seed; texts with the same first part fall on the same side.
    held_out : int
        Examples the promise is measured on; at most a quarter of all.
    batch : int, optional
        Examples at a time; absent, 8 for language models and 32 otherwise.
    max_length : int, optional
        Tokens of an example; absent, as `prompt_batches` and `batches` take it.
    truncate : bool
        Cut longer prompts at their beginning.
    dtype, device : str
        Precision and place of the base.
    seed : int
    on_step : callable, optional
        Called with a `Step` before and during each part of the work.

    Raises
    ------
    LsrError
        If the texts are too few or too long, or the LoRA does nothing on them.
    CheckpointError
        If base and adapter do not fit.
    """

    def __init__(
        self,
        base: str | Path,
        lora: str | Path,
        texts: Texts,
        *,
        held_out: int = 128,
        batch: int | None = None,
        max_length: int | None = None,
        truncate: bool = False,
        dtype: str = "float32",
        device: str = "cpu",
        seed: int = 0,
        on_step: OnStep | None = None,
    ) -> None:
        self.on_step = on_step
        parts = split(texts, held_out, seed)
        self.say("opening the base")
        try:
            self.source = load_base(base, lora, dtype=dtype, device=device)
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, LsrError):
                raise
            words = " ".join(str(error).split())[:300]
            raise CheckpointError(f"does not open on the base {base}: {words}", path=lora) from error
        self.size = batch or (8 if self.source.head in TOKEN_HEADS else 32)
        self.max_length, self.truncate, self.device, self.seed = max_length, truncate, device, seed
        self.held, self.calibration = parts
        if self.source.head is Head.causal_lm:  # what is too long is told of all texts, before the work
            tokenize([text for text in texts if isinstance(text, PromptExample)], self.source.tokenizer, **self._cut)
        self.say(f"the LoRA's own answers to {len(self.held)} held-out examples")
        self.reference = Reference(self.source, self.batches(self.held))
        if not self.reference.effect > NO_EFFECT:
            raise LsrError(
                f"the adapter changes no answer on these texts (divergence {self.reference.effect:.2g} nats): there is "
                "no effect to keep; give texts of the task it was trained for"
            )

    def say(self, words: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        """What is done now, and how much of it."""
        if self.on_step is not None:
            self.on_step(Step(words, done, total, unit))

    def batches(self, texts: Texts, size: int | None = None) -> Iterator[Batch]:
        """Texts of like length together, as the model reads them; the same texts give the same batches."""
        size = size or self.size
        order = sorted(texts, key=length)
        for start in range(0, len(order), size):
            some = order[start : start + size]
            prompts = [item for item in some if isinstance(item, PromptExample)]
            pairs = [item for item in some if not isinstance(item, PromptExample)]
            settings: dict[str, Any] = {"size": size, "seed": self.seed}
            if prompts:
                yield from prompt_batches(self.source, prompts, **settings, **self._cut)
            if pairs:
                yield from batches(self.source, pairs, **settings, max_length=self.max_length)

    @property
    def _cut(self) -> dict[str, Any]:
        return {"max_length": self.max_length, "truncate": self.truncate}

    def open(self, written: Path) -> Base:
        """The base with another adapter of the same task; its large weights are shared with the LoRA's."""
        shared = {
            id(p): p for name, p in self.source.model.named_parameters() if p.ndim > 1 and "modules_to_save" not in name
        }
        copied = copy.deepcopy(self.source.model, shared)
        plain = copied.unload()  # type: ignore[operator]
        model = PeftModel.from_pretrained(plain, str(written)).to(self.device).eval()
        return Base(self.source.name, model, self.source.tokenizer, self.source.head, adapted_modules(model))

    def measure(self, written: Path) -> Behaviour:
        """How a written form answers the held-out texts."""
        return self.reference.compare(self.open(written))
