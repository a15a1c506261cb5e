"""From examples to batches: splits, an order that keeps like lengths together, tokens padded to the longest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from lsrdecomp.calibration.examples import Example
from lsrdecomp.training.settings import SettingsError

SPLIT_SEED = 20260101  # one split for all runs, so that seeds vary the training alone
POOL = 50  # batches that are sorted by length together


def subsample(examples: Sequence[Example], count: int | None) -> list[Example]:
    """At most ``count`` examples, always the same ones."""
    if count is None or count >= len(examples):
        return list(examples)
    chosen = np.random.default_rng(SPLIT_SEED).permutation(len(examples))[:count]
    return [examples[i] for i in np.sort(chosen)]


def split(examples: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Examples to train on and a ``share`` of them kept apart, always the same ones.

    Raises
    ------
    SettingsError
        If one of the two would be empty.
    """
    kept = round(share * len(examples))
    if not 0 < kept < len(examples):
        raise SettingsError(f"validation = {share} of {len(examples)} training examples leaves {kept} of them apart")
    order = np.random.default_rng(SPLIT_SEED + 1).permutation(len(examples))
    return [examples[i] for i in order[kept:]], [examples[i] for i in order[:kept]]


def length(example: Example) -> int:
    """Characters of the longest choice: near enough to its tokens to sort by, and free."""
    return max(len(first) + len(second or "") for first, second in example.choices)


class WholeBatches(Sampler[int]):
    """A random order of examples in batches of like length, all of them full.

    The last batch of an epoch is filled up with examples from its beginning, so that any number of processes that
    divides ``batch`` sees the same batches. The order depends on ``seed`` and ``epoch`` alone.
    """

    def __init__(self, lengths: Sequence[int], batch: int, seed: int) -> None:
        self.lengths = np.asarray(lengths)
        self.batch = batch
        self.seed = seed
        self.epoch = 0

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return -(-len(self.lengths) // self.batch)

    def __len__(self) -> int:
        return self.batches * self.batch

    def __iter__(self) -> Iterator[int]:
        generator = np.random.default_rng((self.seed, self.epoch))
        order = np.resize(generator.permutation(len(self.lengths)), len(self))
        pool = POOL * self.batch
        pools = [order[start : start + pool] for start in range(0, len(order), pool)]
        grouped = [part[np.argsort(-self.lengths[part], kind="stable")] for part in pools]
        rows = np.concatenate(grouped).reshape(self.batches, self.batch)
        yield from rows[generator.permutation(self.batches)].ravel().tolist()


class Collator:
    """Examples as a classifier reads them: one row per choice, ``labels`` one per example.

    Parameters
    ----------
    tokenizer
        Of the base.
    max_length : int
        Tokens of a row; longer ones are cut, and what the base cannot read in any case.
    regression : bool
        Whether labels are scores, float32, and not classes, int64.
    """

    def __init__(self, tokenizer: Any, max_length: int, *, regression: bool) -> None:
        self.tokenizer = tokenizer
        self.max_length = min(max_length, tokenizer.model_max_length)
        self.regression = regression

    def __call__(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        rows = [choice for example in examples for choice in example.choices]
        first, second = [row[0] for row in rows], [row[1] for row in rows]
        pairs = None if any(text is None for text in second) else second
        read = self.tokenizer(
            first, pairs, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
        )
        labels = torch.tensor(
            [example.label for example in examples], dtype=torch.float32 if self.regression else torch.int64
        )
        return {**read, "labels": labels}


def choices(examples: Sequence[Example]) -> int:
    """How many rows each example has: 1 for a classification.

    Raises
    ------
    SettingsError
        If examples differ in it.
    """
    counts = {len(example.choices) for example in examples}
    if len(counts) != 1:
        raise SettingsError(f"examples of one task must have equally many choices, got {sorted(counts)}")
    return counts.pop()
