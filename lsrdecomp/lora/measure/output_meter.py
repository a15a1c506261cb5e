"""A LoRA's outputs on texts, and how others compare: the one meter of all that runs on a base."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor

from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.gateway import library_class, open_pretrained
from lsrdecomp.lora.base.base_files import open_tokenizer, reachable_base
from lsrdecomp.lora.base.batches import prompt_batches, text_batches
from lsrdecomp.lora.base.dataset import PromptExample
from lsrdecomp.lora.base.divergence import Reference, divergences, ratio_standard_error
from lsrdecomp.lora.base.forward import forward
from lsrdecomp.lora.base.generation import greedy_answers
from lsrdecomp.lora.base.heads import TOKEN_HEADS, Batch, Head
from lsrdecomp.lora.base.texts import Item, n_characters
from lsrdecomp.lora.base.tokens import (
    TokenizedExample,
    token_batches,
    tokenize,
    with_completion,
)
from lsrdecomp.lora.files.file_checks import read_json
from lsrdecomp.lora.files.tensors import first_line
from lsrdecomp.lora.measure.fidelity import AnswerMatches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from lsrdecomp.lora.base.base_model import Base
    from lsrdecomp.lora.base.behaviour import Behaviour
    from lsrdecomp.lora.files.tensors import Array
    from lsrdecomp.lora.search.measured_settings import EvaluatorSettings

MIN_EFFECT = 1e-9
"""Nats: a divergence below this is rounding."""
MAX_ANSWERED = 64
"""Maximum prompts that are answered in whole; by hand, for a fifth of the time of a measurement."""
MAX_BLIND = 16
"""Maximum answers that the LoRA predicts from other prompts; by hand, for as much time again."""
N_OTHER_PROMPTS = 8
"""Other prompts for each of them; by hand."""


def default_batch(base: Base) -> int:
    """Return how many examples a base runs at a time, unless the settings say it."""
    return 8 if base.head in TOKEN_HEADS else 32


def evaluation_batches(
    source: Base, texts: Sequence[Item], settings: EvaluatorSettings, size: int
) -> Iterator[Batch]:
    """Yield batches of texts of similar length; the same texts give the same batches."""
    if source.batches is not None:
        yield from source.batches(source, texts, size)
        return
    seed = settings.seed
    by_length = sorted(texts, key=n_characters)
    for start in range(0, len(by_length), size):
        items = by_length[start : start + size]
        prompts = [item for item in items if isinstance(item, PromptExample)]
        pairs = [item for item in items if isinstance(item, tuple)]
        if prompts:
            limits = settings.prompt_limits
            yield from prompt_batches(source, prompts, size=size, seed=seed, **limits)
        if pairs:
            max_length = settings.max_length
            yield from text_batches(source, pairs, size=size, max_length=max_length, seed=seed)


class Meter:
    """The LoRA's outputs on some texts, to compare others with.

    Parameters
    ----------
    source : Base
        The base with the LoRA.
    texts : sequence of texts
    settings : EvaluatorSettings
        How texts are read.

    Attributes
    ----------
    reference : Reference
        The LoRA's outputs on the texts.

    Raises
    ------
    LsrError
        If the LoRA has no effect on them.
    """

    def __init__(self, source: Base, texts: Sequence[Item], settings: EvaluatorSettings) -> None:
        self.source = source
        self.texts = texts
        self.settings = settings
        self.size = settings.batch or default_batch(source)
        batches = evaluation_batches(source, texts, settings, self.size)
        self.reference = Reference(source, batches)
        self._answers: tuple[list[TokenizedExample], Reference | None] | None = None
        self._blind: Tensor | None = None
        if not self.reference.effect > MIN_EFFECT:
            raise LsrError(
                "the adapter changes no output on these data (divergence "
                f"{self.reference.effect:.2g} nats): there is no effect to keep; give data of the "
                "task it was trained for"
            )

    def compare(self, other: Base) -> Behaviour:
        """Compare another's outputs with the LoRA's."""
        behaviour = self.reference.compare(other)
        return behaviour if self.prompts else replace(behaviour, right=None)

    @property
    def prompts(self) -> list[PromptExample]:
        """The texts that are answered in whole: those with a prompt before their completion."""
        return self._prompts(self.texts)

    def _prompts(self, texts: Sequence[Item]) -> list[PromptExample]:
        if self.source.head is not Head.causal_lm or self.source.batches is not None:
            return []
        return [
            text
            for text in texts
            if isinstance(text, PromptExample) and (text.prompt or text.messages)
        ]

    def whole_answers(self, other: Base) -> AnswerMatches:
        """Return to how many prompts another has the LoRA's own greedy answer.

        It has if its top prediction is the LoRA's all along the LoRA's answer, up to and with its
        end: one forward pass.
        """
        _, reference = self.own_answers()
        if reference is None:
            return AnswerMatches()
        lost, n_equal_tokens, _ = reference.compare_examples(other)
        n_matching = int((n_equal_tokens == reference.counts).sum())
        if self._blind is None:
            self._blind = self._blind_losses()
        blind = self._blind
        if not float(blind.sum()) > MIN_EFFECT:
            return AnswerMatches(reference.examples, n_matching)
        lost = lost[: len(blind)]
        return AnswerMatches(
            reference.examples,
            n_matching,
            prompt_kept=1.0 - float(lost.sum() / blind.sum()),
            prompt_error=ratio_standard_error(lost, blind),
        )

    def own_answers(self) -> tuple[list[TokenizedExample], Reference | None]:
        """Return the prompts with the LoRA's answers as tokens, and its outputs on them."""
        if self._answers is None:
            self._answers = self.answers_to(self.texts)
        return self._answers

    def answers_to(
        self, texts: Sequence[Item], limit: int = MAX_ANSWERED
    ) -> tuple[list[TokenizedExample], Reference | None]:
        """Return the first prompts of some texts, with the LoRA's answers and its outputs there."""
        source = self.source
        prompts = self._prompts(texts)
        rows = tokenize(prompts, source.tokenizer, **self.settings.prompt_limits)
        # A prompt with several completions is answered once.
        beginnings = list(filter(None, dict.fromkeys(map(_before_completion, rows))))
        beginnings = beginnings[:limit]
        if not beginnings:
            return [], None
        answers = greedy_answers(
            source.model,
            source.tokenizer,
            beginnings,
            new_tokens=int(self.reference.counts.max()),
            batch_size=2 * self.size,
        )
        answered = [
            _with_answer(beginning, answer)
            for beginning, answer in zip(beginnings, answers, strict=True)
        ]
        pad = source.tokenizer.pad_token_id
        batches = token_batches(answered, size=self.size, seed=None, pad_token_id=pad)
        return answered, Reference(source, batches)

    def with_own_answers(
        self, texts: Sequence[Item], limit: int
    ) -> tuple[list[PromptExample], Reference | None]:
        """Return the same, as texts: each prompt with the LoRA's answer for a completion."""
        tokenizer = self.source.tokenizer
        prompts = self._prompts(texts)
        rows = tokenize(prompts, tokenizer, **self.settings.prompt_limits)
        by_beginning = {_before_completion(row): prompts[i] for i, row in enumerate(rows)}
        answered, reference = self.answers_to(texts, limit)
        examples = []
        for row in answered:
            beginning = _before_completion(row)
            answer = tokenizer.decode(row.ids[len(beginning) :], skip_special_tokens=True)
            examples.append(with_completion(by_beginning[beginning], answer))
        return examples, reference

    def _blind_losses(self) -> Tensor:
        """Return Σ KL(LoRA ‖ blind) of the first of the LoRA's own answers, nats.

        A blind adapter sees the answer so far and not the prompt: its distribution is the mean of
        the LoRA's after the same beginning of the answer to `N_OTHER_PROMPTS` other prompts. Zero
        where there are too few prompts.
        """
        rows, _ = self.own_answers()
        prompts = {_before_completion(row) for row in rows}
        if len(prompts) <= N_OTHER_PROMPTS:
            return torch.zeros(1)
        generator = Random(self.settings.seed)
        losses = []
        for row in rows[:MAX_BLIND]:
            prompt = _before_completion(row)
            chosen = generator.sample(sorted(prompts - {prompt}), N_OTHER_PROMPTS)
            losses.append(self._blind_loss(row, prompt, chosen))
        return torch.stack(losses)

    @torch.no_grad()
    def _blind_loss(
        self, row: TokenizedExample, prompt: Sequence[int], others: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return Σ KL(LoRA ‖ blind) over the tokens of one answer, nats."""
        answer = row.ids[len(prompt) :]
        rows = [_with_answer(other, answer) for other in (prompt, *others)]
        pad = self.source.tokenizer.pad_token_id
        (batch,) = token_batches(rows, size=len(rows), seed=None, pad_token_id=pad)
        logits = forward(self.source, batch).logits
        logits = logits.reshape(len(rows), len(answer), -1)
        # The logarithm of a sum of probabilities; its constant drops out of the divergence.
        blind = logits[1:].log_softmax(-1).logsumexp(0)
        return divergences(logits[0], blind, self.source.head).sum().cpu()


def _with_answer(prompt: Sequence[int], answer: Sequence[int]) -> TokenizedExample:
    """Return a prompt and its answer as one example, of which the answer is predicted."""
    mask = (*([False] * len(prompt)), *([True] * len(answer)))
    return TokenizedExample((*prompt, *answer), mask)


def _before_completion(row: TokenizedExample) -> tuple[int, ...]:
    """Return the tokens before the last completion of an example."""
    start = len(row)
    while start > 0 and row.loss_mask[start - 1]:
        start -= 1
    return row.ids[:start]


def open_model(path: str | Path, like: Base, dtype: str) -> Base:
    """Open a merged model as the base of a LoRA is opened.

    Parameters
    ----------
    path : str or Path
        A directory of transformers, quantized or not, or a GGUF file.
    like : Base
        The plain base; its head and its way to run batches are taken.
    dtype : str
        Precision of weights that are not quantized.

    Raises
    ------
    CheckpointError
        If it cannot be opened.
    """
    model_class = type(like.model)
    if not hasattr(model_class, "from_pretrained"):
        raise CheckpointError(
            f"cannot be opened: the base is a {model_class.__name__}, which has no from_pretrained",
            path=path,
        )
    device = next(like.model.parameters()).device
    model = _opened(model_class, reachable_base(path), path, dtype=getattr(torch, dtype))
    if not getattr(model, "is_quantized", False):
        model = model.to(device)
    tokenizer = like.tokenizer
    if like.batches is None:
        try:
            tokenizer = open_tokenizer(path)
        except CheckpointError:
            tokenizer = like.tokenizer  # the directory brings none
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return replace(
        like, name=str(path), model=model.eval(), tokenizer=tokenizer, modules=(), adapter_sha256=""
    )


def _opened(model_class: Any, found: str, path: str | Path, **options: Any) -> Any:
    try:
        return open_pretrained(model_class, found, **options)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise CheckpointError(f"cannot be opened: {first_line(error)}", path=path) from error


def open_weights(directory: Path) -> Mapping[str, Callable[[], Array]]:
    """Return functions that read the weights of a model as it opens, dequantized."""
    import transformers

    architectures = read_json(directory / "config.json").get("architectures") or ["AutoModel"]
    try:
        model_class = library_class(transformers, architectures[0], transformers.PreTrainedModel)
    except ValueError:
        model_class = transformers.AutoModel
    model = _opened(model_class, str(directory), directory)
    return {
        f"{name}.weight": partial(_weight, module)
        for name, module in model.named_modules()
        if getattr(module, "weight", None) is not None
    }


@torch.no_grad()
def _weight(module: Any) -> Array:
    weight = dequantize_module_weight(module)
    array: Array = weight.detach().float().cpu().numpy()
    return array
