"""The search for the size of a compressed variant, with few measurements.

A *size* is a number of parameters or of bytes. The *loss* of a variant is the share of the LoRA's
effect that it does not keep. `MeasuredSizes` knows the losses at some sizes and estimates those at
others. The numbers that steer the search were chosen by hand on the demo and on LoRAs of SmolLM2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from lsrdecomp.errors import BudgetError
from lsrdecomp.lora.measure.fidelity import share_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lsrdecomp.lora.base.behaviour import Behaviour

MIN_LOSS = 1e-12
"""A loss below this is rounding; it stands for zero where logarithms are taken."""


MAX_MEASURED = 7
"""Maximum variants measured; each costs a forward pass over the selection texts."""
BRACKET_RATIO = 1.08
"""Stop when the largest failing and the smallest passing size are within this factor."""
SAFETY = 0.95
"""Share of the allowed loss that is aimed at until a variant has passed."""
MAX_EXTRAPOLATION = 4.0
"""Largest factor between a new size and the sizes measured so far."""
INSET = 0.15
"""Distance of a new size from both ends of the bracket, as a share of its logarithmic width."""
MAX_REDUCTION = 4096.0
"""Search no variant that is more than this many times smaller than the LoRA."""

MAX_PLACED = 4
"""Maximum variants measured to find one near the loss that training makes good; each costs a tenth
of a training. Of a LoRA for tickets (SmolLM2) two were not enough, and the best of them was eight
times too large."""
SAME_SIZE = 0.01
"""Measure no size that differs by a smaller share from one that was: it would lose as much."""
MAX_LOSS_DEFICIT = 1.1
"""Accept a variant that loses up to this many times less than that; by hand. With 1.3 the first one
trained of E2E (SmolLM2) had 123 kB in place of 113, and the result was as large."""
MAX_LOSS_EXCESS = 1.05
"""Accept a variant that loses up to this many times more. It is close to 1: a variant that loses
much more would be trained in vain."""


class MeasuredVariant(Protocol):
    """What was made of a LoRA at some size, and measured."""

    @property
    def behaviour(self) -> Behaviour:
        """Its behaviour on the selection texts."""


V = TypeVar("V", bound=MeasuredVariant)


@dataclass(frozen=True, slots=True)
class MeasuredSizes(Generic[V]):
    """Losses of untrained variants by size: measured at some sizes, estimated at others.

    Attributes
    ----------
    full_size : float
        The size of the LoRA itself.
    expected_error : callable
        Returns the squared relative error of the variant of a size, which falls with the size;
        cheap. Raises `BudgetError` where there is no such variant.
    measure : callable
        Makes the variant of a size and measures it; expensive.
    measured : dict of size to variant
        The variants measured so far.
    """

    full_size: float
    expected_error: Callable[[float], float]
    measure: Callable[[float], V]
    measured: dict[float, V] = field(default_factory=dict)

    @property
    def min_size(self) -> float:
        """The smallest size that is considered."""
        return self.full_size / MAX_REDUCTION

    def smallest(
        self,
        target_share: float,
        on_measured: Callable[[int, V], None] | None = None,
    ) -> V:
        """Measure variants, and return the smallest of them that keeps a share.

        Sizes that pass and sizes that fail close in on the result from both sides.

        Parameters
        ----------
        target_share : float
            Share of the LoRA's effect to be kept, between 0 and 1.
        on_measured : callable, optional
            Called with the number of measurements so far and the variant after each.

        Raises
        ------
        BudgetError
            If no variant that was measured keeps as much; the message has the share of the best.
        """
        for _ in range(MAX_MEASURED - len(self.measured)):
            size = self._next_size(target_share)
            if size is None:
                break
            number = len(self.measured) + 1
            variant = self._measure_size(size)
            if on_measured is not None:
                on_measured(number, variant)
            # A variant within a standard error above the target is accepted: the measurement could
            # not tell a smaller one from one that fails.
            margin = share_kept(variant.behaviour) - target_share
            if 0.0 <= margin <= (variant.behaviour.standard_error or 0.0):
                break
        passing = self._passing_sizes(target_share)
        if not passing:
            best = 1.0 - min(map(loss_of, self.measured.values()))
            raise BudgetError(
                f"no compressed version that was measured keeps {target_share:g} of the LoRA's "
                f"effect: the best of {len(self.measured)} keeps {best:.3f}; ask for less, allow "
                "distillation, or store in a finer type"
            )
        return self.measured[min(passing)]

    def _next_size(self, target_share: float) -> float | None:
        """Return the next size to measure; None if it would be hardly smaller than the best."""
        # 1. The bracket, from the largest failing to the smallest passing size.
        passing = self._passing_sizes(target_share)
        failing = [size for size in self.measured if size not in passing]
        low = max([self.min_size, *failing])
        high = min([self.full_size, *passing])
        # 2. The size in it that is expected to lose as much as is allowed.
        loss = 1.0 - target_share
        if not passing:
            loss *= SAFETY
        size = self.size_at_loss(loss, low, high)
        # 3. Stop where that saves little.
        is_narrow = high <= BRACKET_RATIO * low
        saves_little = bool(passing) and size > high / BRACKET_RATIO
        if is_narrow or saves_little:
            return None
        # 4. Move it off the ends of the bracket, where nothing is learnt, and not far beyond the
        #    sizes that were measured.
        if passing and failing:
            lowest: float = low * (high / low) ** INSET
            highest: float = high * (low / high) ** INSET
            return min(max(size, lowest), highest)
        if passing:
            return max(size, high / MAX_EXTRAPOLATION)
        if failing:
            return min(size, low * MAX_EXTRAPOLATION)
        return size

    def variant_near_loss(self, loss: float, *, max_measured: int = MAX_PLACED) -> V:
        """Measure variants, and return the one that loses most, but hardly more than ``loss``.

        Where all lose more it is the one that loses least. Measuring ends early with a variant that
        loses about as much, and where the next would have hardly another size.
        """
        min_loss = loss / MAX_LOSS_DEFICIT
        max_loss = loss * MAX_LOSS_EXCESS
        for _ in range(max_measured):
            size = self.size_at_loss(loss)
            if any(abs(size - each) < SAME_SIZE * each for each in self.measured):
                break
            variant = self._measure_size(size)
            if min_loss <= loss_of(variant) <= max_loss:
                break
        variants = self.measured.values()
        within = [variant for variant in variants if loss_of(variant) <= max_loss]
        if within:
            return max(within, key=loss_of)
        return min(variants, key=loss_of)

    def size_at_loss(
        self, loss: float, low: float | None = None, high: float | None = None
    ) -> float:
        """Return the smallest size that is estimated to lose no more than ``loss``.

        It lies between ``low`` and ``high``, by default `min_size` and `full_size`, and is ``high``
        if all smaller sizes lose more.
        """

        def loses_no_more(log_size: float) -> bool:
            try:
                return self.loss_at(math.exp(log_size)) <= loss
            except BudgetError:
                return False

        log_low = math.log(self.min_size if low is None else low)
        log_high = math.log(self.full_size if high is None else high)
        # 1. Bracket it from below, by powers of two: estimates at large sizes cost most, since more
        #    shapes are possible there.
        doubled = log_low + math.log(2.0)
        while doubled < log_high and not loses_no_more(doubled):
            log_low = doubled
            doubled += math.log(2.0)
        log_high = min(log_high, doubled)
        # 2. Bisect the bracket, to 0.2 % of the size.
        while log_high - log_low > 2e-3:
            middle = 0.5 * (log_low + log_high)
            if loses_no_more(middle):
                log_high = middle
            else:
                log_low = middle
        return math.exp(log_high)

    def loss_at(self, size: float) -> float:
        """Estimate the loss of the variant of a size.

        Between measured sizes log loss is interpolated linearly in log size. Beyond them the loss
        is that of the nearest measured size, times the ratio of the two expected errors. Where
        nothing was measured it is the expected error itself.

        Raises
        ------
        BudgetError
            As ``expected_error``.
        """
        points = sorted(self._measured_losses())
        if not points:
            return self.expected_error(size)
        sizes, losses = zip(*points, strict=True)
        # A larger variant that lost more than a smaller one did so by chance.
        falling_losses = np.minimum.accumulate(losses)
        nearest = min(max(size, sizes[0]), sizes[-1])
        log_loss = np.interp(math.log(nearest), np.log(sizes), np.log(falling_losses))
        loss = math.exp(float(log_loss))
        if nearest == size:
            return loss
        return loss * self.expected_error(size) / max(self.expected_error(nearest), MIN_LOSS)

    def _measured_losses(self) -> Iterable[tuple[float, float]]:
        """Yield the measured sizes, each with its loss."""
        for size, variant in self.measured.items():
            loss = loss_of(variant)
            if math.isfinite(loss):
                yield size, max(loss, MIN_LOSS)

    def _measure_size(self, size: float) -> V:
        """Measure a size, and add it to those that were measured."""
        variant = self.measure(size)
        self.measured[size] = variant
        return variant

    def _passing_sizes(self, target_share: float) -> list[float]:
        """Return the measured sizes that keep the target share."""
        return [
            size
            for size, variant in self.measured.items()
            if share_kept(variant.behaviour) >= target_share
        ]


def loss_of(variant: MeasuredVariant) -> float:
    """Return the loss of a variant: the share of the LoRA's effect that it does not keep."""
    return 1.0 - share_kept(variant.behaviour)
