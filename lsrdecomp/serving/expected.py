"""What PEFT says with an adapter at a scale: the log-probabilities that a server is held against; needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lsrdecomp.calibration.base_model import load_base
from lsrdecomp.serving.client import Token

GIVEN = 2000
"""Of the likeliest next tokens: more than any server gives."""


class Expected:
    """A base with its adapter, asked for next tokens after given prompts."""

    def __init__(self, base: str | Path, adapter: Path, prompts: Sequence[str], dtype: str) -> None:
        self.model = load_base(base, adapter, dtype=dtype)
        tokenizer = self.model.tokenizer
        self.tokens: list[list[int]] = [tokenizer(text)["input_ids"] for text in prompts]
        self._scaled: list[Any] = [module for module in self.model.model.modules() if hasattr(module, "scale_layer")]
        self._text = cache(lambda token: str(tokenizer.decode([token])))

    def at(self, scale: float) -> list[Mapping[Token, float]]:
        """Of each prompt, the likeliest next tokens by number and by text, with the adapter at a scale."""
        model: Any = self.model.model
        if scale == 0.0:
            with model.disable_adapter():
                return self._answers()
        for module in self._scaled:
            module.scale_layer(scale)
        try:
            return self._answers()
        finally:
            for module in self._scaled:
                module.unscale_layer(scale)

    def _answers(self) -> list[Mapping[Token, float]]:
        import torch

        answers: list[Mapping[Token, float]] = []
        for tokens in self.tokens:
            with torch.no_grad():
                logits = self.model.model(input_ids=torch.tensor([tokens]), logits_to_keep=1).logits[0, -1].float()
            best = logits.log_softmax(-1).topk(min(GIVEN, logits.numel()))
            pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            # Two tokens may read alike: the likelier one is what a server would name.
            named: dict[Token, float] = {self._text(token): value for token, value in reversed(pairs)}
            answers.append({**named, **dict(pairs)})
        return answers
