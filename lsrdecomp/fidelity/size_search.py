"""The search for the size of a compressed variant, with few measurements.

A *size* is a number of parameters or of bytes. The *loss* of a variant is the share of the LoRA's
effect that it does not keep. `MeasuredSizes` knows the losses at some sizes and estimates those at
others; `SizeSearch` and `TrainedSizeSearch` hold the choices that steer it.
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
    """Maximum variants measured; each costs a forward pass over the selection texts."""
    bracket_ratio: float = 1.08
    """Stop when the largest failing and the smallest passing size are within this factor."""
    accept_std_errors: float = 1.0
    """Accept a variant whose share lies within this many standard errors above the target."""
    safety: float = 0.95
    """Share of the allowed loss that is aimed at until a variant has passed."""
    max_extrapolation: float = 4.0
    """Largest factor between a new size and the sizes measured so far."""
    inset: float = 0.15
    """Distance of a new size from both ends of the bracket, as a share of its logarithmic width."""
    max_reduction: float = 4096.0
    """Search no variant that is more than this many times smaller than the LoRA."""
    prepared_reduction: float = 6.0
    """Solve shapes beforehand for variants this many times smaller than the LoRA, and for larger
    ones when they are asked for."""
    growth: float = 1.06
    """Factor to the next size that is tried where a file is too small for any layer."""
    log_tolerance: float = 2e-3
    """Tolerance of the logarithm of a size that is solved for."""
    max_replacements: int = 2
    """Maximum variants that take the place of one that keeps less than the target on the held-out
    texts; each costs a forward pass over them."""


@dataclass(frozen=True, slots=True)
class TrainedSizeSearch:
    """Choice of the variants that are trained.

    Training a variant takes as long as everything else together, so few are trained: variants whose
    loss training is expected to bring down to the allowed one, here called their target loss. The
    defaults were chosen by hand unless a measurement is named.
    """

    max_trained: int = 2
    """Maximum variants trained."""
    max_placed: int = 2
    """Maximum variants measured to find one near the target loss."""
    max_loss_deficit: float = 1.3
    """Accept a variant that loses up to this many times less than the target loss."""
    max_loss_excess: float = 1.05
    """Accept a variant that loses up to this many times more. It is close to 1: a variant that
    loses much more would be trained in vain."""
    aim: float = 0.9
    """Share of the allowed loss that a training is aimed at. What it leaves is known to a quarter;
    what it keeps too much is pruned."""
    std_errors: float = 1.0
    """Take a trained or pruned variant if its share is at least this many standard errors above the
    target: of several that are measured on the same texts, the smallest that passes looks better
    than it is. Without this, one draw of E2E (SmolLM2) kept 0.953 of the selection texts and 0.939
    of the held-out ones."""
    min_saving: float = 2.0
    """Train another variant only if it is expected to be this many times smaller. Pruning makes
    most of what is left to save, for a third of the steps."""
    early_stop_margin: float = 0.1
    """Share of the allowed loss by which training must do better to end early, since rounding its
    result costs something."""
    min_pruned_saving: float = 1.07
    """Prune the result of a training, and train it further, only if it is expected to become this
    many times smaller."""
    max_pruned_saving: float = 2.0
    """Largest factor by which it is pruned."""
    pruned_steps: float = 0.3
    """Steps of the training after pruning, as a share of those of a training. On E2E (SmolLM2, one
    draw) 18 of 60 steps brought 2,281 bytes from 0.936 to 0.951; the 2,838 before kept 0.958."""
    pruned_rate: float = 0.5
    """Peak learning rate of that training, as a share of the one before."""
    pruned_residual: float = 0.8
    """Share of its loss that a pruned variant has after that training, by which it is chosen how
    much is pruned; 0.56 to 0.77 on three LoRAs of SmolLM2, one draw each. It is above these: what
    fails is trained for nothing, and what keeps too much is pruned once more."""
    max_prunings: int = 4
    """Maximum times that a variant is pruned to find how much of it can go; each is a forward pass
    over the selection texts."""
    pruned_tolerance: float = 0.1
    """Stop at a pruned variant that loses at most this share less than it may."""
    pruned_curvature: float = 8.0
    """The logarithm of the loss is assumed to rise by this, times the square of the share of the
    bytes that is pruned, until that was measured; 4 to 13 on three LoRAs of SmolLM2 at 0.95."""
    min_pruned_step: float = 0.01
    """Stop where the next share to be pruned is as near as this to one that was."""
    residual_guess: float = 0.25
    """Share of its loss that a variant has after training, assumed until one is measured; 0.07 to
    0.28 on SmolLM2. It is near the largest: what is trained too small is trained for nothing."""
    residual_guess_classifier: float = 0.5
    """The same for classifiers and regressions; 0.27 to 0.62 on MiniLM."""


@dataclass(frozen=True, slots=True)
class MeasuredSizes:
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
    measured : dict of size to CompressedVariant
        The variants measured so far.
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
        """The smallest size that is considered."""
        return self.full_size / self.search.max_reduction

    def smallest(
        self,
        target_share: float,
        on_measured: Callable[[int, CompressedVariant], None] | None = None,
    ) -> CompressedVariant:
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
        for _ in range(self.search.max_measured - len(self.measured)):
            size = self._next_size(target_share)
            if size is None:
                break
            number = len(self.measured) + 1
            variant = self._measure_size(size)
            if on_measured is not None:
                on_measured(number, variant)
            # A variant just above the target is accepted: the measurement could not tell a smaller
            # one from one that fails.
            margin = share_kept(variant.behaviour) - target_share
            max_margin = self.search.accept_std_errors * (variant.behaviour.standard_error or 0.0)
            if 0.0 <= margin <= max_margin:
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
        search = self.search
        # 1. The bracket, from the largest failing to the smallest passing size.
        passing = self._passing_sizes(target_share)
        failing = [size for size in self.measured if size not in passing]
        low = max([self.min_size, *failing])
        high = min([self.full_size, *passing])
        # 2. The size in it that is expected to lose as much as is allowed.
        loss = 1.0 - target_share
        if not passing:
            loss *= search.safety
        size = self.size_at_loss(loss, low, high)
        # 3. Stop where that saves little.
        is_narrow = high <= search.bracket_ratio * low
        saves_little = bool(passing) and size > high / search.bracket_ratio
        if is_narrow or saves_little:
            return None
        # 4. Move it off the ends of the bracket, where nothing is learnt, and not far beyond the
        #    sizes that were measured.
        if passing and failing:
            lowest: float = low * (high / low) ** search.inset
            highest: float = high * (low / high) ** search.inset
            return min(max(size, lowest), highest)
        if passing:
            return max(size, high / search.max_extrapolation)
        if failing:
            return min(size, low * search.max_extrapolation)
        return size

    def variant_near_loss(
        self, loss: float, *, max_measured: int | None = None
    ) -> CompressedVariant:
        """Measure variants, and return the one that loses most, but hardly more than ``loss``.

        Where all lose more it is the one that loses least. Measuring ends early with a variant that
        loses about as much, by the factors of `TrainedSizeSearch`.
        """
        training = self.training
        min_loss = loss / training.max_loss_deficit
        max_loss = loss * training.max_loss_excess
        for _ in range(training.max_placed if max_measured is None else max_measured):
            variant = self._measure_size(self.size_at_loss(loss))
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
        # 2. Bisect the bracket.
        while log_high - log_low > self.search.log_tolerance:
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

    def _measure_size(self, size: float) -> CompressedVariant:
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


def loss_of(variant: CompressedVariant) -> float:
    """Return the loss of a variant: the share of the LoRA's effect that it does not keep."""
    return 1.0 - share_kept(variant.behaviour)
