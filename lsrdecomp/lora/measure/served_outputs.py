"""How much of a LoRA's effect a running server shows, from log-probabilities of a few tokens.

A server names the top tokens of a position. These and all others together are the classes
that LoRA, base and server are compared on: the divergence of such classes is at most that of all
tokens, for each of the two, and the share that is kept is 1 − their ratio as everywhere.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from lsrdecomp.errors import CalibrationError
from lsrdecomp.lora.base.behaviour import Behaviour
from lsrdecomp.lora.base.dataset import PromptExample
from lsrdecomp.lora.base.divergence import ratio_standard_error, without_delta
from lsrdecomp.lora.base.heads import Head
from lsrdecomp.lora.base.tokens import tokenize
from lsrdecomp.lora.files.progress import Counter
from lsrdecomp.lora.measure.fidelity import AnswerMatches

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from lsrdecomp.lora.base.base_model import Base
    from lsrdecomp.lora.files.progress import OnStep
    from lsrdecomp.lora.measure.output_meter import Meter
    from lsrdecomp.lora.measure.server_client import LlamaCpp, OpenAi, Token

MAX_ASKED = 32
"""Maximum texts that a server is asked about; by hand, for a minute of a server on a CPU."""
POSITIONS = 4
"""Tokens of a text that it is asked about, evenly spaced: each is a request."""
SMALLEST = 1e-12
"""Smallest probability that the tokens which a server does not name have together."""


class ServedOutputs:
    """A server's next tokens beside those of the LoRA and of the base.

    Parameters
    ----------
    client : LlamaCpp or OpenAi
    meter : Meter
        The LoRA on the texts.
    on_step : callable, optional
        Called with a `ProgressUpdate` after each text.
    """

    def __init__(
        self, client: LlamaCpp | OpenAi, meter: Meter, on_step: OnStep | None = None
    ) -> None:
        self.client = client
        self.meter = meter
        self.on_step = on_step

    def compare(self) -> Behaviour:
        """Compare the server's next tokens with the LoRA's.

        Raises
        ------
        CalibrationError
            If the LoRA is on no causal language model, or the texts hold nothing to predict.
        LsrError
            If the server gives no log-probabilities.
        """
        source = self.meter.source
        if source.head is not Head.causal_lm or source.batches is not None:
            raise CalibrationError("a server is compared with a causal language model only")
        texts = [_as_example(text) for text in self.meter.texts[:MAX_ASKED]]
        rows = tokenize(texts, source.tokenizer, **self.meter.settings.prompt_limits)
        lost: list[float] = []
        effects: list[float] = []
        n_matching = n_positions = 0
        asked = Counter(self.on_step, "asking the server", len(rows), "texts")
        for row in rows:
            positions = _evenly([i for i, counts in enumerate(row.loss_mask) if counts and i > 0])
            by_lora, by_base = self._own(source, row.ids, positions)
            sums = [0.0, 0.0]
            for index, position in enumerate(positions):
                named = self.client.ask(row.ids[:position], adapted=True)
                server = self._classes(named)
                kept = [
                    _divergence(by_lora[index], server, None),
                    _divergence(by_lora[index], server, by_base[index]),
                ]
                sums = [total + value for total, value in zip(sums, kept, strict=True)]
                top = max(named, key=lambda token: named[token])
                n_matching += int(by_lora[index].argmax()) in self._ids(top)
            n_positions += len(positions)
            lost.append(sums[0])
            effects.append(sums[1])
            asked.add()
        if not n_positions:
            raise CalibrationError("the data give nothing to predict")
        return Behaviour(
            examples=len(rows),
            answers=n_positions,
            unit="token",
            kl=sum(lost) / n_positions,
            agreement=n_matching / n_positions,
            effect=sum(effects) / n_positions,
            standard_error=ratio_standard_error(
                torch.tensor(lost, dtype=torch.float64), torch.tensor(effects, dtype=torch.float64)
            ),
        )

    def whole_answers(self) -> AnswerMatches:
        """Return to how many prompts the server has the LoRA's greedy answer."""
        rows, _ = self.meter.own_answers()
        tokenizer = self.meter.source.tokenizer
        n_matching = 0
        for row in rows[:MAX_ASKED]:
            start = row.loss_mask.index(True)
            expected = tokenizer.decode(row.ids[start:], skip_special_tokens=True).strip()
            found = self.client.complete(row.ids[:start], len(row) - start)
            n_matching += found.strip() == expected
        return AnswerMatches(len(rows[:MAX_ASKED]), n_matching)

    @torch.no_grad()
    def _own(
        self, source: Base, ids: Sequence[int], positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities before each position, of the LoRA and of the base."""
        model: Any = source.model
        device = next(model.parameters()).device
        inputs = torch.tensor([list(ids)], device=device)
        before = torch.tensor(positions) - 1
        by_lora = model(input_ids=inputs).logits[0, before].double().log_softmax(-1)
        with without_delta(model):
            by_base = model(input_ids=inputs).logits[0, before].double().log_softmax(-1)
        return by_lora.cpu(), by_base.cpu()

    @cached_property
    def _ids_by_text(self) -> dict[str, list[int]]:
        tokenizer = self.meter.source.tokenizer
        by_text: dict[str, list[int]] = {}
        for index in range(len(tokenizer)):
            by_text.setdefault(tokenizer.decode([index]), []).append(index)
        return by_text

    def _ids(self, token: Token) -> list[int]:
        """Return the tokens that a server means by a number or a text."""
        return [token] if isinstance(token, int) else self._ids_by_text.get(token, [])

    def _classes(self, named: Mapping[Token, float]) -> list[tuple[list[int], float]]:
        """Return the tokens of each class that the server names, with its probability."""
        classes = [(self._ids(token), math.exp(value)) for token, value in named.items()]
        return [(ids, probability) for ids, probability in classes if ids]


def _divergence(
    logprobs: Tensor, server: list[tuple[list[int], float]], other: Tensor | None
) -> float:
    """Return KL over the classes that a server names: from the server, or from ``other``."""
    divergence = 0.0
    rest = [1.0, 1.0]
    for ids, served in server:
        own = float(logprobs[ids].exp().sum())
        compared = served if other is None else float(other[ids].exp().sum())
        rest = [rest[0] - own, rest[1] - compared]
        if own > 0.0:
            divergence += own * math.log(own / max(compared, SMALLEST))
    own, compared = (max(value, SMALLEST) for value in rest)
    return max(0.0, divergence + own * math.log(own / compared))


def _evenly(positions: list[int]) -> list[int]:
    """Return a few of many positions, the first and the last among them."""
    if len(positions) <= POSITIONS:
        return positions
    step = (len(positions) - 1) / (POSITIONS - 1)
    return [positions[round(step * i)] for i in range(POSITIONS)]


def _as_example(text: Any) -> PromptExample:
    """Return a text as an example; one without a prompt is all completion."""
    return text if isinstance(text, PromptExample) else PromptExample("", text[0], "a text")
