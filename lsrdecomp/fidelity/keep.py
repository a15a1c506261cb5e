"""The smallest form that keeps a share of what the adapter does, by measuring few of the many that one search offers.

`SizeSearch` is the search over sizes; `SmallestForm` gives it forms, untrained and then trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.calibration.heads import Head
from lsrdecomp.checkpoints.files import bytes_to_open
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression.compress import HEADER_BYTES, SearchedAdapter
from lsrdecomp.compression.settings import CompressionPlan
from lsrdecomp.errors import BudgetError
from lsrdecomp.fidelity.evaluate import share_kept

if TYPE_CHECKING:
    from lsrdecomp.fidelity.forms import CompressedForm, CompressedFormCache

MOST_MEASURED = 7
MOST_DISTILLED = 2
CLOSE = 1.08
"""Sizes within this factor of each other, one that keeps enough and one that does not, end the
search."""
MOST_PLACED, LITTLE_LESS, LITTLE_MORE = 2, 1.3, 1.05
"""Forms measured at most to find where training begins, and by which factors one may lose less or
more than is wanted: one that loses much more would be trained for nothing."""
WORTH_TRAINING = 1.5
"""Times smaller that a second form must promise to be before it is trained: that takes as long as
all before."""
SMALLEST = 4096.0
"""Times smaller than the LoRA: no smaller form is looked for."""
LARGEST = 6.0
"""Times smaller than the LoRA is the largest form that the search prepares for; larger ones are
searched when asked."""
ENOUGH = 1.0
"""Standard errors above the share that was asked within which a form is taken."""
SURE = 0.1
"""Of the loss that is allowed, what training goes beyond it before it ends early: it is looked at
on other texts."""
SAFETY = 0.95
"""Of the loss that is allowed, what is aimed at while no form has kept enough."""
REACH = 4.0
"""Farthest that one step goes beyond the sizes that were measured."""
OFF_ENDS = 0.15
"""Of the logarithm between a size that keeps too little and one that keeps enough, how far off both
the next one is."""
LEFT, LEFT_OF_CLASSIFIER = 0.18, 0.5
"""What distillation is guessed to leave of a loss till one is measured: .08 to .23 on SmolLM2, .27
to .62 on MiniLM."""
NEXT = 1.06
"""Ratio of the file sizes that are tried in turn where one is too small for any layer."""
PRECISE = 2e-3
"""Of the logarithm of a size that is looked for."""
TINY = 1e-12

Searches = Callable[..., SearchedAdapter]
"""`search_adapter` for the LoRA, which is given plans and the norm around what is known of it."""


class FormOfPlan:
    """The form of a given plan."""

    def __init__(
        self, forms: CompressedFormCache, searches: Searches, plan: CompressionPlan
    ) -> None:
        self.forms, self.plan, self.searched = (
            forms,
            plan,
            searches([plan], statistics=forms.statistics),
        )

    def untrained(self) -> CompressedForm:
        """As the search draws it."""
        return self.forms.untrained(self.searched.compress(self.plan))

    first = untrained

    def trained(self) -> CompressedForm:
        """The same after training, or as it was where that is no better."""
        return self.forms.distilled(self.untrained())

    def is_better(self, new: CompressedForm, old: CompressedForm) -> bool:
        """Whether one answers nearer to the LoRA than another."""
        return new.behaviour.kl < old.behaviour.kl


class SmallestForm:
    """The smallest form that keeps enough, of those that one search offers; numbers count, or bytes with ``auto``."""

    def __init__(
        self,
        forms: CompressedFormCache,
        searches: Searches,
        keep: float,
        plan_fields: Mapping[str, Any],
    ) -> None:
        self.forms, self.keep, checkpoint = forms, keep, forms.source
        self.plan_fields = dict(plan_fields)  # of the plan of every size: storage and largest rank
        self.counts_bytes = plan_fields["storage"] == "auto"
        self.head_bytes = checkpoint.extra_bytes if self.counts_bytes else 0
        file_bytes = float(bytes_to_open(checkpoint.weights) - checkpoint.extra_bytes)
        self.whole = file_bytes if self.counts_bytes else float(checkpoint.adapter_parameters)
        # Larger shapes than those of a form this size are solved only if one is asked for: they
        # take the longest.
        largest = (
            max(self.whole / LARGEST, HEADER_BYTES + 1.0)
            if self.counts_bytes
            else self.whole / LARGEST
        )
        self.searched = searches([self._plan(largest)], statistics=forms.statistics)
        self.sizes = SizeSearch(self.whole, self._expected, self._measure)

    def first(self) -> CompressedForm:
        """A form near it, around which the next norm is measured."""
        return self.sizes.losing(SAFETY * (1.0 - self.keep), measurements=1)

    def is_better(self, new: CompressedForm, old: CompressedForm) -> bool:
        """Whether one form is smaller than another, or keeps enough where that does not."""
        return not self._keeping([old]) or (
            bool(self._keeping([new])) and self._size(new) < self._size(old)
        )

    def untrained(self) -> CompressedForm:
        """A measurement is a forward pass over the texts that choose. Raises `BudgetError` if nothing keeps as much."""

        def measure(size: float) -> CompressedForm:
            form, number = self._measure(size), len(self.sizes.measured) + 1
            words = f"form {number} of at most {MOST_MEASURED} keeps {1.0 - lost(form):.3f}, {self.keep:g} asked"
            self.forms.evaluator.say(words)
            return form

        try:
            return replace(self.sizes, measure=measure).smallest(self.keep)
        except BudgetError:
            whole = self._measure(self.whole)  # the LoRA's own size is the last chance
            if not self._keeping([whole]):
                raise
            return whole

    def trained(self) -> CompressedForm:
        """Training begins where it is guessed to bring enough, and again where by what that brought it would."""
        classifier = self.forms.evaluator.source.head in (Head.classification, Head.regression)
        left = LEFT_OF_CLASSIFIER if classifier else LEFT
        trained: list[CompressedForm] = []
        for number in range(1, MOST_DISTILLED + 1):
            # 1. Where training would leave about the loss that is allowed, by what it left of a
            #    loss so far; not if that is hardly smaller than what keeps enough.
            loss = SAFETY * (1.0 - self.keep) / left
            size = self.sizes.guessed(loss)
            if self._keeping(trained) and (size + self.head_bytes) * WORTH_TRAINING > self._size(
                trained[0]
            ):
                break
            form = self.sizes.losing(loss)
            # 2. Trained until it keeps a little more than asked: what is promised is measured on
            # other texts.
            words = f"training {number} of at most {MOST_DISTILLED}, "
            words += f"{form.compression.totals.ratio:.3g} times fewer numbers: "
            enough = self.keep + SURE * (1.0 - self.keep)
            trained.append(self.forms.distilled(form, words, enough))
            # 3. To the last step where it ended before, and the texts that choose say that it keeps
            # too little.
            if not self._keeping(trained[-1:]) and trained[-1].training_ended(enough):
                trained[-1] = self.forms.distilled(form, words)
            left = max(lost(trained[-1]), TINY) / max(lost(form), TINY)
        # 4. The smaller of those that keep enough; if none does, an untrained form.
        return min(self._keeping(trained), key=self._size, default=None) or self.untrained()

    def _keeping(self, forms: Sequence[CompressedForm]) -> list[CompressedForm]:
        return [form for form in forms if share_kept(form.behaviour) >= self.keep]

    def _size(self, form: CompressedForm) -> int:
        return (
            bytes_to_open(form.path / WEIGHTS)
            if self.counts_bytes
            else form.compression.totals.parameters
        )

    def _expected(self, size: float) -> float:
        return self.searched.expected_error(self._plan(size))

    def _plan(self, size: float) -> CompressionPlan:
        if self.counts_bytes:
            return CompressionPlan(bytes=self.head_bytes + math.ceil(size), **self.plan_fields)
        return CompressionPlan(parameters=size, **self.plan_fields)

    def _measure(self, size: float) -> CompressedForm:
        """Of a size; where the file's header leaves no room for a layer, of the next larger that has it."""
        while True:
            try:
                compressed = self.searched.compress(
                    self._plan(size), fill=False
                )  # any size near it will do
            except BudgetError:
                size *= NEXT
                if not self.counts_bytes or size > self.whole:
                    raise
            else:
                return self.forms.untrained(compressed)


def lost(form: CompressedForm) -> float:
    """The share that is not kept."""
    return 1.0 - share_kept(form.behaviour)


@dataclass(frozen=True, slots=True)
class SizeSearch:
    """Sizes of forms, in parameters or bytes: what each is expected to lose, and what some were measured to lose.

    Attributes
    ----------
    whole : float
        Of the LoRA itself.
    expected : callable
        Squared relative error of the form of a size; cheap, falling. Raises `BudgetError` where
        there is none.
    measure : callable
        Makes the form of a size and measures it; dear.
    measured : dict of size to CompressedForm
        What was measured so far, untrained.
    """

    whole: float
    expected: Callable[[float], float]
    measure: Callable[[float], CompressedForm]
    measured: dict[float, CompressedForm] = field(default_factory=dict)

    def smallest(self, keep: float) -> CompressedForm:
        """The smallest form, of those measured, whose share is at least ``keep``, which lies between 0 and 1.

        Each size is where as much is lost as may be; the sizes that kept enough and those that did
        not close in on the answer from both sides.

        Raises
        ------
        BudgetError
            If no form that was measured keeps as much; says what the best of them keeps.
        """
        for _ in range(MOST_MEASURED - len(self.measured)):
            # 1. The interval, from sizes that keep too little to the smallest that keeps enough.
            keeping = self._keeping(keep)
            failing = [size for size in self.measured if size not in keeping]
            low, high = max([self.whole / SMALLEST, *failing]), min([self.whole, *keeping])
            # 2. The size at which as much is lost as may be; the end, if what it saves is not worth
            # its measurement.
            size = size_for((1.0 - keep) * (1.0 if keeping else SAFETY), low, high, self.loss_at)
            if high <= CLOSE * low or (keeping and size > high / CLOSE):
                break
            # 3. Off the ends of the interval, where nothing is learnt, and not far beyond what was
            # measured.
            if keeping and failing:
                size = min(
                    max(size, low * (high / low) ** OFF_ENDS), high * (low / high) ** OFF_ENDS
                )
            elif self.measured:
                size = max(size, high / REACH) if keeping else min(size, low * REACH)
            self.measured[size] = form = self.measure(size)
            # 4. The end, if no smaller form could be told from one that keeps too little.
            margin = share_kept(form.behaviour) - keep
            if 0.0 <= margin <= ENOUGH * (form.behaviour.standard_error or 0.0):
                break
        keeping = self._keeping(keep)
        if not keeping:
            best = 1.0 - min(map(lost, self.measured.values()))
            raise BudgetError(
                f"no form that was measured keeps {keep:g} of what the adapter does: the best of {len(self.measured)} "
                f"keeps {best:.3f}; ask for less, allow distillation, or store in a finer type"
            )
        return self.measured[min(keeping)]

    def losing(self, loss: float, measurements: int = MOST_PLACED) -> CompressedForm:
        """The form, of those measured, that loses most, but hardly more than ``loss``: to train it costs far more.

        A form that loses about so much ends it. Where all lose more it is the one that loses least.
        """
        for _ in range(measurements):
            size = self.guessed(loss)
            self.measured[size] = form = self.measure(size)
            if loss / LITTLE_LESS <= lost(form) <= loss * LITTLE_MORE:
                break
        within = [form for form in self.measured.values() if lost(form) <= loss * LITTLE_MORE]
        return max(within, key=lost) if within else min(self.measured.values(), key=lost)

    def guessed(self, loss: float) -> float:
        """The size at which so much would be lost."""
        return size_for(loss, self.whole / SMALLEST, self.whole, self.loss_at)

    def loss_at(self, size: float) -> float:
        """What a form of a size loses: between those measured by the line through the logarithms of both.

        Beyond them in proportion to the squared error, which it is where nothing was measured.
        Raises `BudgetError` as ``expected`` does.
        """
        losses_at = ((measured_size, lost(form)) for measured_size, form in self.measured.items())
        points = sorted(
            (measured_size, max(loss, TINY))
            for measured_size, loss in losses_at
            if math.isfinite(loss)
        )
        if not points:
            return self.expected(size)
        sizes, losses = zip(*points, strict=True)
        falling = np.minimum.accumulate(losses)  # a larger form that lost more was luck
        inside = min(max(size, sizes[0]), sizes[-1])
        loss = math.exp(float(np.interp(math.log(inside), np.log(sizes), np.log(falling))))
        return (
            loss
            if inside == size
            else loss * self.expected(size) / max(self.expected(inside), TINY)
        )

    def _keeping(self, keep: float) -> list[float]:
        return [size for size, form in self.measured.items() if share_kept(form.behaviour) >= keep]


def size_for(loss: float, low: float, high: float, lost: Callable[[float], float]) -> float:
    """The size, between two, at which so much is lost: bisection on its logarithm.

    From below by powers of two first: the larger a form may be, the more shapes there are whose
    prices are asked for.
    """

    def enough(logarithm: float) -> bool:
        try:
            return lost(math.exp(logarithm)) <= loss
        except BudgetError:
            return False

    a, b = math.log(low), math.log(high)
    power = a + math.log(2.0)
    while power < b and not enough(power):
        a, power = power, power + math.log(2.0)
    b = min(b, power)
    while b - a > PRECISE:
        middle = 0.5 * (a + b)
        a, b = (a, middle) if enough(middle) else (middle, b)
    return math.exp(b)
