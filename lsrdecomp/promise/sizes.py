"""The form of a size that was given, and the smallest form that keeps a share: untrained, then trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

from lsrdecomp.calibration.divergence import Behaviour
from lsrdecomp.calibration.fisher import Head
from lsrdecomp.checkpoints import Checkpoint
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression.compress import SearchedAdapter
from lsrdecomp.compression.plan import CompressionPlan
from lsrdecomp.compression.result import Compression
from lsrdecomp.errors import BudgetError
from lsrdecomp.promise.forms import Form, FormMaker
from lsrdecomp.promise.keep import MOST_MEASURED, SMALLEST, Measured, loss_at, smallest

FIRST = 6.0
"""Times smaller than the LoRA is the largest form that the search prepares for; larger ones are searched when asked."""
LEFT, LEFT_OF_CLASSIFIER = 0.15, 0.5
"""What distillation is guessed to leave of a loss till one is measured: .08 to .23 on SmolLM2, .27 to .62 on MiniLM."""
MOST_DISTILLED = 3
NEXT = 1.06
"""Ratio of the file sizes that are tried in turn where one is too small for any layer."""
WORTH_TRAINING = 1.2
"""Times smaller that a form must promise to be before it is trained."""

Searches = Callable[[Sequence[CompressionPlan]], SearchedAdapter]


class Goal(Protocol):
    """What is asked for, under one norm: one search."""

    def untrained(self) -> Form | None:
        """The form that meets it without training; None if only training can."""

    def trained(self) -> Form:
        """The form that meets it with training, or without where that is as good."""

    def is_better(self, new: Form, old: Form) -> bool:
        """Whether one untrained form meets it better than another."""


class GivenSize:
    """A form of one plan."""

    def __init__(self, maker: FormMaker, searches: Searches, plan: CompressionPlan) -> None:
        self.maker, self.searches, self.plan = maker, searches, plan
        self._found: Form | None = None

    def untrained(self) -> Form:
        if self._found is None:
            self._found = self.maker.plain(self.searches([self.plan]).compress(self.plan))
        return self._found

    def trained(self) -> Form:
        return self.maker.distilled(self.untrained())

    def is_better(self, new: Form, old: Form) -> bool:
        return new.behaviour.kl < old.behaviour.kl


class SmallestSize:
    """The smallest form that keeps enough, of those that one search offers; numbers count, or bytes with ``auto``."""

    def __init__(
        self,
        maker: FormMaker,
        searches: Searches,
        checkpoint: Checkpoint,
        keep: float,
        storage: str,
        max_rank: int | None,
    ) -> None:
        self.maker, self.keep = maker, keep
        self.counts_bytes = storage == "auto"
        self.shared: dict[str, Any] = {"storage": storage, "max_rank": max_rank}
        self.heads = sum(tensor.nbytes for tensor in checkpoint.extras.values())
        heads_off = float(checkpoint.weights.stat().st_size - self.heads)
        self.whole = heads_off if self.counts_bytes else float(checkpoint.adapter_parameters)
        self.searched = searches([self._plan(self.whole / FIRST), self._plan(self.whole / SMALLEST)])
        self.expected = cache(self._expected)
        self.plain: dict[float, Form] = {}
        self.enough: Measured | None = None

    def untrained(self) -> Form | None:
        """A measurement is a forward pass over the held-out texts. Raises `BudgetError` if nothing keeps as much."""

        def told(seen: Sequence[Measured]) -> None:
            words = f"form {len(seen)} of at most {MOST_MEASURED} keeps {seen[-1].kept:.3f}, {self.keep:g} asked"
            self.maker.bench.say(words)

        try:
            self.enough = smallest(self.keep, self.whole, self.expected, self._measured, on_measured=told)[0]
        except BudgetError:
            if not self.maker.steps:
                raise
            return None
        return self.plain[self.enough.size]

    def trained(self) -> Form:
        """Smaller ones: the first where training is guessed to bring enough, the others by what it brought."""
        trained: dict[float, Form] = {}

        def untrained_loss(size: float) -> float:
            return loss_at(size, [Measured(at, form.behaviour) for at, form in self.plain.items()], self.expected)

        def measured(size: float) -> Behaviour:
            self._measured(size)
            words = f"training {len(trained) + 1} of at most {MOST_DISTILLED}, "
            words += f"{self.plain[size].compression.totals.ratio:.3g} times fewer numbers: "
            trained[size] = self.maker.distilled(self.plain[size], words)
            return trained[size].behaviour

        classifier = self.maker.bench.source.head in (Head.classification, Head.regression)
        prior = LEFT_OF_CLASSIFIER if classifier else LEFT
        settings: dict[str, Any] = {"most": MOST_DISTILLED, "prior": prior, "close": WORTH_TRAINING}
        found = smallest(self.keep, self.whole, untrained_loss, measured, enough=self.enough, **settings)[0]
        return trained.get(found.size) or self.plain[found.size]

    def is_better(self, new: Form, old: Form) -> bool:
        return self._size(new) < self._size(old)

    def _size(self, form: Form) -> int:
        return (form.path / WEIGHTS).stat().st_size if self.counts_bytes else form.compression.totals.parameters

    def _plan(self, size: float) -> CompressionPlan:
        if self.counts_bytes:
            return CompressionPlan(bytes=self.heads + math.ceil(size), **self.shared)
        return CompressionPlan(parameters=size, **self.shared)

    def _expected(self, size: float) -> float:
        return self.searched.expected_error(self._plan(size))

    def _measured(self, size: float) -> Behaviour:
        self.plain[size] = self.maker.plain(self._smallest_from(size))
        return self.plain[size].behaviour

    def _smallest_from(self, size: float) -> Compression:
        """The form of a size; where the file's header leaves no room for a layer, of the next larger that has it."""
        while True:
            try:
                return self.searched.compress(self._plan(size))
            except BudgetError:
                size *= NEXT
                if not self.counts_bytes or size > self.whole:
                    raise
