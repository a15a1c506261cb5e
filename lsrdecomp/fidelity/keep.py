"""The smallest form that keeps a share of what the adapter does, by measuring few of the many that one search offers.

`smallest` is the search over sizes; `SmallestForm` gives it forms, untrained and then trained; `FormOfSize` is what
stands in their place where a size was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np

from lsrdecomp.calibration.divergence import Behaviour
from lsrdecomp.calibration.fisher import Head
from lsrdecomp.checkpoints import Checkpoint
from lsrdecomp.checkpoints.files import bytes_to_open
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression.compress import EMPTY, SearchedAdapter
from lsrdecomp.compression.plan import CompressionPlan
from lsrdecomp.compression.result import Compression
from lsrdecomp.errors import BudgetError
from lsrdecomp.fidelity.evaluate import share_kept
from lsrdecomp.fidelity.forms import CompressedForm, CompressedFormCache

MOST_MEASURED = 7
MOST_DISTILLED = 2
MOST_PLACED, NEAR = 2, 1.15
"""Forms measured at most to find where training begins, and the factor of the loss wanted there that will do."""
CLOSE, ROUGH = 1.08, 2.0
"""Sizes within this factor of each other, one that keeps enough and one that does not, end the search: of the form that
is wanted, and of one that only shows where the next norm is measured, or where training begins."""
WORTH_TRAINING = 1.2
"""Times smaller that a form must promise to be before it is trained."""
SMALLEST = 4096.0
"""Times smaller than the LoRA: no smaller form is looked for."""
LARGEST = 6.0
"""Times smaller than the LoRA is the largest form that the search prepares for; larger ones are searched when asked."""
ENOUGH = 0.5
"""Standard errors above the share that was asked within which a form is taken."""
SURE = 0.1
"""Of the loss that is allowed, what training goes beyond it before it ends early: it is looked at on other texts."""
SAFETY = 0.95
"""Of the loss that is allowed, what is aimed at while every form has lost too much."""
REACH = 4.0
"""Farthest that one step goes beyond the sizes that were measured."""
LEFT, LEFT_OF_CLASSIFIER = 0.15, 0.5
"""What distillation is guessed to leave of a loss till one is measured: .08 to .23 on SmolLM2, .27 to .62 on MiniLM."""
NEXT = 1.06
"""Ratio of the file sizes that are tried in turn where one is too small for any layer."""
TINY = 1e-12

Searches = Callable[[Sequence[CompressionPlan]], SearchedAdapter]


class Goal(Protocol):
    """What is asked for, under one norm: one search."""

    prior: float
    """What is lost by a squared error, as measured so far."""

    def untrained(self, close: float = CLOSE) -> CompressedForm | None:
        """The form that meets it without training, its size known within a factor; None if only training can."""

    def trained(self) -> CompressedForm:
        """The form that meets it with training, or without where that is as good."""

    def is_better(self, new: CompressedForm, old: CompressedForm) -> bool:
        """Whether one untrained form meets it better than another."""


class FormOfSize:
    """The form of one plan."""

    def __init__(self, forms: CompressedFormCache, searches: Searches, plan: CompressionPlan) -> None:
        self.forms, self.prior = forms, 1.0
        self.compress = cache(lambda: forms.untrained(searches([plan]).compress(plan)))

    def untrained(self, close: float = CLOSE) -> CompressedForm:
        return self.compress()

    def trained(self) -> CompressedForm:
        return self.forms.distilled(self.compress())

    def is_better(self, new: CompressedForm, old: CompressedForm) -> bool:
        return new.behaviour.kl < old.behaviour.kl


class SmallestForm:
    """The smallest form that keeps enough, of those that one search offers; numbers count, or bytes with ``auto``."""

    def __init__(
        self,
        forms: CompressedFormCache,
        searches: Searches,
        checkpoint: Checkpoint,
        keep: float,
        form: Mapping[str, Any],
        prior: float = 1.0,
    ) -> None:
        self.forms, self.keep, self.prior = forms, keep, prior
        self.form = dict(form)  # storage and largest rank
        self.counts_bytes = form["storage"] == "auto"
        self.head_bytes = sum(tensor.nbytes for tensor in checkpoint.extras.values())
        file_bytes = float(bytes_to_open(checkpoint.weights) - self.head_bytes)
        self.whole = file_bytes if self.counts_bytes else float(checkpoint.adapter_parameters)
        least = max(self.whole / SMALLEST, EMPTY + 1.0) if self.counts_bytes else self.whole / SMALLEST
        self.searched = searches([self._plan(max(self.whole / LARGEST, least)), self._plan(least)])
        self.expected = cache(lambda size: self.searched.expected_error(self._plan(size)))
        self.by_size: dict[float, CompressedForm] = {}  # untrained
        self.enough: MeasuredSize | None = None

    def untrained(self, close: float = CLOSE) -> CompressedForm | None:
        """A measurement is a forward pass over the held-out texts. Raises `BudgetError` if nothing keeps as much."""

        def say(measured: Sequence[MeasuredSize]) -> None:
            kept = f"keeps {measured[-1].kept:.3f}, {self.keep:g} asked"
            self.forms.evaluator.say(f"form {len(measured)} of at most {MOST_MEASURED} {kept}")

        try:
            self.enough, _ = smallest(
                self.keep,
                self.whole,
                self.expected,
                self._measure,
                prior=self.prior,
                close=close,
                on_measured=say,
            )
        except BudgetError:
            if not self.forms.steps:
                raise
            return None
        self.prior = max(1.0 - self.enough.kept, TINY) / max(self.expected(self.enough.size), TINY)
        return self.by_size[self.enough.size]

    def trained(self) -> CompressedForm:
        """Smaller ones: the first where training is guessed to bring enough, the others by what it brought."""
        trained: dict[float, CompressedForm] = {}

        def untrained_loss(size: float) -> float:
            measured = [MeasuredSize(known, form.behaviour) for known, form in self.by_size.items()]
            return loss_at(size, measured, self.expected)

        def train(size: float) -> Behaviour:
            self._measure(size)
            words = f"training {len(trained) + 1} of at most {MOST_DISTILLED}, "
            words += f"{self.by_size[size].compression.totals.ratio:.3g} times fewer numbers: "
            trained[size] = self.forms.distilled(self.by_size[size], words, self.keep + SURE * (1.0 - self.keep))
            return trained[size].behaviour

        classifier = self.forms.evaluator.source.head in (Head.classification, Head.regression)
        prior = LEFT_OF_CLASSIFIER if classifier else LEFT
        # Where training is to begin is measured: a form costs a forward pass over few texts, a training many of both.
        wanted, high = (1.0 - self.keep) / prior, self.whole if self.enough is None else self.enough.size
        for _ in range(MOST_PLACED):
            size = _size_for(wanted, self.whole / SMALLEST, high, untrained_loss)
            lost = 1.0 - share_kept(self._measure(size))
            if wanted / NEAR <= lost <= wanted * NEAR:
                break
        best, _ = smallest(
            self.keep,
            self.whole,
            untrained_loss,
            train,
            most=MOST_DISTILLED,
            prior=prior,
            close=WORTH_TRAINING,
            enough=self.enough,
        )
        return trained.get(best.size) or self.by_size[best.size]

    def is_better(self, new: CompressedForm, old: CompressedForm) -> bool:
        return self._size(new) < self._size(old)

    def _size(self, form: CompressedForm) -> int:
        return bytes_to_open(form.path / WEIGHTS) if self.counts_bytes else form.compression.totals.parameters

    def _plan(self, size: float) -> CompressionPlan:
        if self.counts_bytes:
            return CompressionPlan(bytes=self.head_bytes + math.ceil(size), **self.form)
        return CompressionPlan(parameters=size, **self.form)

    def _measure(self, size: float) -> Behaviour:
        self.by_size[size] = self.forms.untrained(self._compress(size))
        return self.by_size[size].behaviour

    def _compress(self, size: float) -> Compression:
        """To a size; where the file's header leaves no room for a layer, to the next larger that has it."""
        while True:
            try:
                return self.searched.compress(self._plan(size))
            except BudgetError:
                size *= NEXT
                if not self.counts_bytes or size > self.whole:
                    raise


@dataclass(frozen=True, slots=True)
class MeasuredSize:
    """How the form of one size behaves."""

    size: float  # parameters or bytes, as the budget counts
    behaviour: Behaviour

    @property
    def kept(self) -> float:
        return share_kept(self.behaviour)


def smallest(
    keep: float,
    whole: float,
    expected: Callable[[float], float],
    measure: Callable[[float], Behaviour],
    *,
    most: int = MOST_MEASURED,
    prior: float = 1.0,
    close: float = CLOSE,
    enough: MeasuredSize | None = None,
    on_measured: Callable[[list[MeasuredSize]], object] | None = None,
) -> tuple[MeasuredSize, list[MeasuredSize]]:
    """Find the smallest size whose measured share is at least ``keep``.

    What a form loses is taken to be a power of its squared error in the norm of the layers, which is known for any size
    without asking the model. Each measurement corrects the factor, two the power; the sizes that kept enough and those
    that did not close in on the answer from both sides.

    Parameters
    ----------
    keep : float
        Between 0 and 1.
    whole : float
        Size of the LoRA itself.
    expected : callable
        Squared relative error of the form of a size; cheap, falling. Raises `BudgetError` where there is none.
    measure : callable
        Makes the form of a size and measures it; dear.
    most : int
        Measurements at most.
    prior : float
        The factor before the first measurement.
    close : float
        As `CLOSE`.
    enough : MeasuredSize, optional
        One known to keep as much, though it costs no measurement here: only smaller ones are looked for, and it is
        the answer if none of them will do.
    on_measured : callable, optional
        Called with all measurements so far after each.

    Returns
    -------
    the smallest that keeps enough, and all in the order in which they were measured

    Raises
    ------
    BudgetError
        If no form that was measured keeps as much; says what the best of them keeps.
    """
    if not 0.0 < keep < 1.0:
        raise BudgetError(f"the share to keep lies between 0 and 1, got {keep:g}")
    measured: list[MeasuredSize] = []
    free = [] if enough is None else [enough]

    def measure_at(size: float) -> MeasuredSize:
        measured.append(MeasuredSize(size, measure(size)))
        if on_measured is not None:
            on_measured(measured)
        return measured[-1]

    low, high = whole / SMALLEST, whole if enough is None else enough.size
    while len(measured) < most and high > close * low:
        # 1. The size at which as much is lost as may be, by the measurements so far.
        passed = any(form.kept >= keep for form in [*free, *measured])
        failed = any(form.kept < keep for form in measured)
        all_failed = failed and not any(form.kept >= keep for form in measured)
        loss = (1.0 - keep) * (SAFETY if all_failed else 1.0)
        size = _size_for(_error_at(loss, measured, expected, prior), low, high, expected)
        # 2. The end, if the next smaller one is not worth its measurement.
        if measured and passed and size > high / close:
            break
        # 3. Off the ends of the interval, where nothing is learnt, and not far beyond what was measured.
        if passed and failed:
            size = min(max(size, low * (high / low) ** 0.15), low * (high / low) ** 0.85)
        elif measured:
            sizes = [form.size for form in measured]
            size = min(max(size, min(sizes) / REACH), max(sizes) * REACH)
        elif free:
            size = min(size, high / close)
        # 4. The last chance goes half of the way; better the LoRA's own size than no answer.
        if all_failed and len(measured) == most - 1:
            size = math.sqrt(low * high) if passed else whole
        # 5. Measure, and narrow the interval from the side on which the form lies.
        form = measure_at(size)
        low, high = (low, size) if form.kept >= keep else (size, high)
        # 6. The end, if no smaller form could be told from one that keeps too little.
        if 0.0 <= form.kept - keep <= ENOUGH * (form.behaviour.standard_error or 0.0):
            break
    # 7. Sizes may have closed in on the LoRA's own, which itself was not measured.
    if not any(form.kept >= keep for form in [*free, *measured]) and len(measured) < most:
        measure_at(whole)
    keeping = [form for form in [*free, *measured] if form.kept >= keep]
    if not keeping:
        best = max(measured, key=lambda form: form.kept)
        raise BudgetError(
            f"no form that was measured keeps {keep:g} of what the adapter does: the best of {len(measured)} keeps "
            f"{best.kept:.3f}; ask for less, allow distillation, or store in a finer type"
        )
    return min(keeping, key=lambda form: form.size), measured


def loss_at(size: float, measured: Sequence[MeasuredSize], expected: Callable[[float], float]) -> float:
    """What a form of a size loses, by forms that were measured.

    Between them on the line through the logarithms of squared error and loss, beyond in proportion to the squared
    error. Raises `BudgetError` as ``expected`` does.
    """
    error = math.log(max(expected(size), TINY))
    points = sorted((math.log(max(expected(form.size), TINY)), max(1.0 - form.kept, TINY)) for form in measured)
    points = [(log_error, math.log(loss)) for log_error, loss in points if math.isfinite(loss)]
    if not points:
        return math.exp(error)
    errors, losses = zip(*points, strict=True)
    rising = np.maximum.accumulate(losses)  # a larger error that lost less was luck
    beyond = error - min(max(error, errors[0]), errors[-1])
    return math.exp(float(np.interp(error, errors, rising)) + beyond)


def _error_at(loss: float, measured: Sequence[MeasuredSize], expected: Callable[[float], float], prior: float) -> float:
    """The squared error at which so much is lost, by the last two measurements."""
    last = measured[-2:]
    points = [(max(expected(form.size), TINY), max(1.0 - form.kept, TINY)) for form in last]
    if not points:
        return loss / prior
    (error, lost), power = points[-1], 1.0
    if len(points) == 2 and abs(math.log(points[0][0] / error)) > 0.02:
        error_before, lost_before = points[0]
        slope = math.log(lost_before / lost) / math.log(error_before / error)
        luck = max(form.behaviour.standard_error or 0.0 for form in last)
        if slope > 0.0 and abs(lost_before - lost) > luck:
            power = min(max(slope, 0.4), 2.5)
        else:  # no more than luck, which they share
            error, lost = math.sqrt(error_before * error), math.sqrt(lost_before * lost)
    return float(error * (loss / lost) ** (1.0 / power))


def _size_for(error: float, low: float, high: float, expected: Callable[[float], float]) -> float:
    """The size, between two, at which the squared error is as given: bisection on its logarithm."""
    a, b = math.log(low), math.log(high)
    for _ in range(12):
        middle = 0.5 * (a + b)
        try:
            enough = expected(math.exp(middle)) <= error
        except BudgetError:
            enough = False
        a, b = (a, middle) if enough else (middle, b)
    return math.exp(b)
