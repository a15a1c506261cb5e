"""Completions of prompts by a language model, decoded greedily or sampled."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module, *, autocast: bool) -> Iterator[torch.device]:
    """Put a model into evaluation mode inside a ``with`` block, and yield its device.

    With ``autocast`` matrix products are in bfloat16. For gradients on frozen parameters there is
    `lsrdecomp.lora.base.measured_model.measurement_mode`.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    precision = torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext()
    try:
        with precision:
            yield device
    finally:
        model.train(was_training)


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    new_tokens: int,
    autocast: bool = False,
    batch_size: int = 16,
    seed: int | None = None,
    top_p: float = 1.0,
    end_tokens: Sequence[int] = (),
) -> list[str]:
    """Return the model's completion of each prompt, without special tokens.

    Parameters
    ----------
    model, tokenizer
        Those of transformers.
    prompts : sequence of str
    new_tokens : int
        Maximum tokens of a completion.
    autocast : bool
        Compute matrix products in bfloat16.
    batch_size : int
        Prompts that are completed together; they are sorted by length.
    seed : int, optional
        Seed of sampled completions, which keep white space around them; absent, each token is the
        likeliest, and completions are stripped.
    top_p : float
        Share of the probability from which tokens are sampled.
    end_tokens : sequence of int
        Tokens that end a completion, beside the tokenizer's own; none begins with one.
    """
    choice: dict[str, Any] = {"do_sample": False}
    if seed is not None:
        choice = {"do_sample": True, "temperature": 1.0, "top_p": top_p, "top_k": 0}
    if end_tokens:
        choice["begin_suppress_tokens"] = list(end_tokens)
    ends = [token for token in (tokenizer.eos_token_id, *end_tokens) if token is not None]
    shortest_first = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    completions = [""] * len(prompts)
    # Encoder-decoder models return the completion alone.
    returns_prompt = not getattr(model.config, "is_encoder_decoder", False)
    with evaluation_mode(model, autocast=autocast) as device, _own_seed(seed):
        for start in range(0, len(prompts), batch_size):
            chosen = shortest_first[start : start + batch_size]
            encoded = tokenizer(
                [prompts[i] for i in chosen], padding=True, padding_side="left", return_tensors="pt"
            )
            input_ids = encoded["input_ids"].to(device)
            output_ids = model.generate(
                input_ids=input_ids,
                attention_mask=encoded["attention_mask"].to(device),
                max_new_tokens=new_tokens,
                use_cache=True,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=ends or None,
                **choice,
            )
            new_ids = output_ids[:, input_ids.shape[1] :] if returns_prompt else output_ids
            texts = tokenizer.batch_decode(new_ids, skip_special_tokens=True)
            for i, text in zip(chosen, texts, strict=True):
                completions[i] = text.strip() if seed is None else text
    return completions


@torch.no_grad()
def greedy_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    batch_size: int,
) -> list[list[int]]:
    """Return the greedy answer to each prompt as tokens, up to and with the one that ends a text.

    Parameters
    ----------
    model, tokenizer
        Those of a causal language model.
    prompts : sequence of sequences of int
        Tokens, at least one each.
    new_tokens : int
        Maximum tokens of an answer.
    batch_size : int
        Prompts that are answered together; they are sorted by length.
    """
    end = tokenizer.eos_token_id
    shortest_first = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    with evaluation_mode(model, autocast=False) as device:
        for start in range(0, len(prompts), batch_size):
            chosen = shortest_first[start : start + batch_size]
            width = len(prompts[chosen[-1]])
            input_ids = torch.full((len(chosen), width), tokenizer.pad_token_id)
            mask = torch.zeros_like(input_ids)
            for row, i in enumerate(chosen):
                input_ids[row, width - len(prompts[i]) :] = torch.tensor(prompts[i])
                mask[row, width - len(prompts[i]) :] = 1
            output = model.generate(
                input_ids=input_ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=new_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=end,
            )
            for i, ids in zip(chosen, output[:, width:].tolist(), strict=True):
                answers[i] = ids[: ids.index(end) + 1] if end in ids else ids
    return answers


@contextmanager
def _own_seed(seed: int | None) -> Iterator[None]:
    """Seed torch's random numbers inside a ``with`` block; outside they go on as before."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
