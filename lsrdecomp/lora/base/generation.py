"""Completions of prompts by a language model, decoded greedily."""

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
) -> list[str]:
    """Return the model's completion of each prompt, by greedy decoding, without special tokens.

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
    """
    shortest_first = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    completions = [""] * len(prompts)
    with evaluation_mode(model, autocast=autocast) as device:
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
                do_sample=False,
                use_cache=True,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
            new_ids = output_ids[:, input_ids.shape[1] :]
            texts = tokenizer.batch_decode(new_ids, skip_special_tokens=True)
            for i, text in zip(chosen, texts, strict=True):
                completions[i] = text.strip()
    return completions
