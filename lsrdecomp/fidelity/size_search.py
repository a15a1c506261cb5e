"""The search over sizes of compressed variants: few are measured of the many there are.

`SizeSearch` and `TrainedSizeSearch` hold the choices that steer it, `MeasuredSizes` what is known
of sizes so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.errors import BudgetError
from lsrdecomp.fidelity.fidelity import share_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lsrdecomp.fidelity.variants import CompressedVariant

MIN_LOSS = 1e-12
"""A loss below this is rounding; it stands for zero where logarithms are taken."""


@dataclass(frozen=True, slots=True)
class SizeSearch:
    """Bracketing search for the smallest variant that keeps a target share of the LoRA's effect.

    The defaults were chosen by hand on the demo and on LoRAs of SmolLM2.
    """

    max_measured: int = 7
    """Variants measured at most; each costs a forward pass over the selection texts."""
    bracket_ratio: float = 1.08
    """The search stops when the largest failing and the smallest passing size are this close."""
    accept_std_errors: float = 1.0
    """A variant is taken whose share lies within this many standard errors above the target."""
    safety: float = 0.95
    """Share of the allowed loss that is aimed at until a variant has passed."""
    max_extrapolation: float = 4.0
    """Largest factor between a new size and the sizes measured so far."""
    inset: float = 0.15
    """Distance of a new size from both ends of the bracket, as a share of its logarithmic width."""
    max_reduction: float = 4096.0
    """No variant is looked for that is more than this many times smaller than the LoRA."""
    prepared_reduction: float = 6.0
    """The search of shapes prepares for variants this many times smaller; larger ones are searched
    when asked for."""
    growth: float = 1.06
    """Factor to the next size that is tried where a file is too small for any layer."""
    log_tolerance: float = 2e-3
    """Precision of the logarithm of a size that is solved for."""


@dataclass(frozen=True, slots=True)
class TrainedSizeSearch:
    """Choice of the variants that are trained.

    Training one takes as long as all else together. The defaults were chosen by hand unless a
    measurement is named.
    """

    max_trained: int = 2
    """Variants trained at most."""
    max_placed: int = 2
    """Variants measured at most to find the one whose loss training makes good."""
    max_loss_deficit: float = 1.3
    """Factor by which a variant may lose less than is wanted to be near enough."""
    max_loss_excess: float = 1.05
    """Factor by which it may lose more: one that loses much more would be trained for nothing."""
    min_saving: float = 1.5
    """A second variant is trained only if it promises to be this many times smaller."""
    early_stop_margin: float = 0.1
    """Share of the allowed loss by which training must do better before it ends early: it is
    checked on other texts."""
    residual_guess: float = 0.18
    """Share of a loss that training is guessed to leave, till one is measured; 0.08 to 0.23 on
    SmolLM2."""
    residual_guess_classifier: float = 0.5
    """The same for classifiers and regressions; 0.27 to 0.62 on MiniLM."""


@dataclass(frozen=True, slots=True)
class MeasuredSizes:
    """Sizes of variants, in parameters or bytes, with the losses that are expected and measured.

    Attributes
    ----------
    full_size : float
        The size of the LoRA itself.
    expected_error : callable
        Squared relative error of the variant of a size; cheap, falling. Raises `BudgetError` where
        there is none.
    measure : callable
        Makes the variant of a size and measures it; expensive.
    measured : dict of size to CompressedVariant
        What was measured so far, untrained.
    search : SizeSearch
    training : TrainedSizeSearch
    """

    full_size: float
    expected_error: Callable[[float], float]
    measure: Callable[[float], CompressedVariant]
    measured: dict[float, CompressedVariant] = field(default_factory=dict)
    search: SizeSearch = field(default_factory=SizeSearch)
    training: TrainedSizeSearch = field(default_factory=TrainedSizeSearch)

    @property
    def min_size(self) -> float:
        """The smallest size that is looked for."""
        return self.full_size / self.search.max_reduction

    def smallest(self, target_share: float) -> CompressedVariant:
        """Return the smallest variant, of those measured, whose share is at least the target.

        The target lies between 0 and 1. Sizes that pass and sizes that fail close in on the answer
        from both sides.

        Raises
        ------
        BudgetError
            If no variant that was measured keeps as much; says what the best of them keeps.
        """
        for _ in range(self.search.max_measured - len(self.measured)):
            size = self._next_size(target_share)
            if size is None:
                break
            variant = self._measured(size)
            # No smaller variant could be told from one that keeps too little.
            margin = share_kept(variant.behaviour) - target_share
            accepted = self.search.accept_std_errors * (variant.behaviour.standard_error or 0.0)
            if 0.0 <= margin <= accepted:
                break
        passing = self._passing(target_share)
        if not passing:
            best = 1.0 - min(map(loss_of, self.measured.values()))
            raise BudgetError(
                f"no compressed version that was measured keeps {target_share:g} of the LoRA's "
                f"effect: the best of {len(self.measured)} keeps {best:.3f}; ask for less, allow "
                "distillation, or store in a finer type"
            )
        return self.measured[min(passing)]

    def _next_size(self, target_share: float) -> float | None:
        """Return the next size to measure; None if it would save too little to be worth it."""
        search = self.search
        # 1. The bracket, from sizes that keep too little to the smallest that keeps enough.
        passing = self._passing(target_share)
        failing = [size for size in self.measured if size not in passing]
        low = max([self.min_size, *failing])
        high = min([self.full_size, *passing])
        # 2. The size that is expected to lose as much as is allowed.
        allowed_loss = 1.0 - target_share
        if not passing:
            allowed_loss *= search.safety
        size = self._size_with_loss(allowed_loss, low, high)
        if high <= search.bracket_ratio * low:
            return None
        if passing and size > high / search.bracket_ratio:
            return None
        # 3. Off the ends of the bracket, where nothing is learnt, and not far beyond what was
        #    measured.
        if passing and failing:
            lowest: float = low * (high / low) ** search.inset
            highest: float = high * (low / high) ** search.inset
            return min(max(size, lowest), highest)
        if passing:
            return max(size, high / search.max_extrapolation)
        if failing:
            return min(size, low * search.max_extrapolation)
        return size

    def variant_losing(self, loss: float, *, max_measured: int | None = None) -> CompressedVariant:
        """Return the measured variant that loses most, but hardly more than ``loss``.

        New variants are measured for it. Measuring ends with a variant that loses about so much.
        Where all lose more it is the one that loses least.
        """
        training = self.training
        min_loss = loss / training.max_loss_deficit
        max_loss = loss * training.max_loss_excess
        for _ in range(training.max_placed if max_measured is None else max_measured):
            variant = self._measured(self.size_losing(loss))
            if min_loss <= loss_of(variant) <= max_loss:
                break
        variants = self.measured.values()
        within = [variant for variant in variants if loss_of(variant) <= max_loss]
        if within:
            return max(within, key=loss_of)
        return min(variants, key=loss_of)

    def size_losing(self, loss: float) -> float:
        """Return the size at which so much would be lost."""
        return self._size_with_loss(loss, self.min_size, self.full_size)

    def loss_at(self, size: float) -> float:
        """Return what the variant of a size loses.

        Between sizes that were measured it is read from the line through the logarithms of sizes
        and losses; beyond them it grows in proportion to the squared error, which it is where
        nothing was measured. Raises `BudgetError` as ``expected_error`` does.
        """
        points = sorted(self._measured_losses())
        if not points:
            return self.expected_error(size)
        sizes, losses = zip(*points, strict=True)
        falling = np.minimum.accumulate(losses)  # a larger variant that lost more was luck
        nearest = min(max(size, sizes[0]), sizes[-1])
        log_loss = np.interp(math.log(nearest), np.log(sizes), np.log(falling))
        loss = math.exp(float(log_loss))
        if nearest == size:
            return loss
        return loss * self.expected_error(size) / max(self.expected_error(nearest), MIN_LOSS)

    def _measured_losses(self) -> Iterable[tuple[float, float]]:
        """Yield the sizes that were measured, with what was lost at each."""
        for size, variant in self.measured.items():
            loss = loss_of(variant)
            if math.isfinite(loss):
                yield size, max(loss, MIN_LOSS)

    def _measured(self, size: float) -> CompressedVariant:
        """Measure a size and remember it."""
        variant = self.measure(size)
        self.measured[size] = variant
        return variant

    def _passing(self, target_share: float) -> list[float]:
        """Return the measured sizes that keep the target share."""
        return [
            size
            for size, variant in self.measured.items()
            if share_kept(variant.behaviour) >= target_share
        ]

    def _size_with_loss(self, loss: float, low: float, high: float) -> float:
        """Return the size between two at which so much is lost, by bisection on its logarithm."""

        def loses_no_more(log_size: float) -> bool:
            try:
                return self.loss_at(math.exp(log_size)) <= loss
            except BudgetError:
                return False

        log_low = math.log(low)
        log_high = math.log(high)
        # 1. From below by powers of two: the larger a variant may be, the more shapes there are
        #    whose prices are asked for.
        doubled = log_low + math.log(2.0)
        while doubled < log_high and not loses_no_more(doubled):
            log_low = doubled
            doubled += math.log(2.0)
        log_high = min(log_high, doubled)
        # 2. Bisection between the last two.
        while log_high - log_low > self.search.log_tolerance:
            middle = 0.5 * (log_low + log_high)
            if loses_no_more(middle):
                log_high = middle
            else:
                log_low = middle
        return math.exp(log_high)


def loss_of(variant: CompressedVariant) -> float:
    """Return the share of the LoRA's effect that a variant does not keep."""
    return 1.0 - share_kept(variant.behaviour)
