"""The two goals of a measured compression: a plan, and the smallest variant that keeps a share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lsrdecomp.calibration.heads import Head
from lsrdecomp.checkpoints.files import bytes_to_open
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression.compress import HEADER_BYTES, SearchedAdapter
from lsrdecomp.compression.settings import CompressionPlan
from lsrdecomp.errors import BudgetError
from lsrdecomp.fidelity.fidelity import share_kept
from lsrdecomp.fidelity.size_search import (
    MIN_LOSS,
    MeasuredSizes,
    SizeSearch,
    TrainedSizeSearch,
    loss_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lsrdecomp.fidelity.variants import CompressedVariant, VariantCache

    ShapeSearch = Callable[..., SearchedAdapter]
    """`search_adapter` for the LoRA, which is given plans and the norm that errors count in."""


class VariantOfPlan:
    """The variant of a given plan."""

    def __init__(
        self, variants: VariantCache, search_shapes: ShapeSearch, plan: CompressionPlan
    ) -> None:
        self.variants = variants
        self.plan = plan
        self.searched = search_shapes([plan], statistics=variants.statistics)

    def first(self) -> CompressedVariant:
        """Return the variant around which the next norm is measured."""
        return self.untrained()

    def untrained(self) -> CompressedVariant:
        """Return the variant as the search draws it."""
        return self.variants.untrained(self.searched.compress(self.plan))

    def trained(self) -> CompressedVariant:
        """Return the variant after training, or as it was where that is no better."""
        return self.variants.distilled(self.untrained())

    def is_better(self, new: CompressedVariant, old: CompressedVariant) -> bool:
        """Return whether one variant answers nearer to the LoRA than another."""
        return new.behaviour.kl < old.behaviour.kl


class SmallestVariant:
    """The smallest variant that keeps a target share, of those that one search of shapes offers.

    Parameters
    ----------
    variants : VariantCache
    search_shapes : callable
        `search_adapter` for the LoRA.
    target_share : float
        Share of the LoRA's effect that must be kept.
    plan_options : Mapping
        Storage and largest rank of the plans of all sizes. Sizes are bytes where the storage is
        ``auto``, parameters otherwise.
    search : SizeSearch, optional
    training : TrainedSizeSearch, optional
    """

    def __init__(
        self,
        variants: VariantCache,
        search_shapes: ShapeSearch,
        target_share: float,
        plan_options: Mapping[str, Any],
        search: SizeSearch | None = None,
        training: TrainedSizeSearch | None = None,
    ) -> None:
        self.variants = variants
        self.target_share = target_share
        self.plan_options = dict(plan_options)
        self.search = search or SizeSearch()
        self.training = training or TrainedSizeSearch()
        source = variants.source
        self.counts_bytes = plan_options["storage"] == "auto"
        self.head_bytes = source.extra_bytes if self.counts_bytes else 0
        if self.counts_bytes:
            self.full_size = float(bytes_to_open(source.weights) - source.extra_bytes)
        else:
            self.full_size = float(source.adapter_parameters)
        # Larger shapes than those of a variant this size are solved only if one is asked for: they
        # take the longest.
        prepared_size = self.full_size / self.search.prepared_reduction
        if self.counts_bytes:
            prepared_size = max(prepared_size, HEADER_BYTES + 1.0)
        plans = [self._plan(prepared_size)]
        self.searched = search_shapes(plans, statistics=variants.statistics)
        self.sizes = MeasuredSizes(
            self.full_size,
            self._expected_error,
            self._measure,
            search=self.search,
            training=self.training,
        )

    @property
    def allowed_loss(self) -> float:
        """The share of the LoRA's effect that may be lost."""
        return 1.0 - self.target_share

    def first(self) -> CompressedVariant:
        """Return a variant near the smallest, around which the next norm is measured."""
        return self.sizes.variant_losing(self.search.safety * self.allowed_loss, max_measured=1)

    def is_better(self, new: CompressedVariant, old: CompressedVariant) -> bool:
        """Return whether one variant is smaller, or keeps enough where the other does not."""
        if not self._keeps_enough(old):
            return True
        return self._keeps_enough(new) and self._size(new) < self._size(old)

    def untrained(self) -> CompressedVariant:
        """Return the smallest variant without training; `BudgetError` if none keeps as much.

        A measurement is a forward pass over the selection texts.
        """

        def measure(size: float) -> CompressedVariant:
            variant = self._measure(size)
            number = len(self.sizes.measured) + 1
            share = 1.0 - loss_of(variant)
            self.variants.evaluator.announce(
                f"version {number} of at most {self.search.max_measured} keeps {share:.3f}, "
                f"{self.target_share:g} asked"
            )
            return variant

        try:
            return replace(self.sizes, measure=measure).smallest(self.target_share)
        except BudgetError:
            full_size = self._measure(self.full_size)  # the LoRA's own size is the last chance
            if not self._keeps_enough(full_size):
                raise
            return full_size

    def trained(self) -> CompressedVariant:
        """Return the smallest variant that keeps enough trained; an untrained one if none does."""
        training = self.training
        residual = self._residual_guess()
        trained: list[CompressedVariant] = []
        for number in range(1, training.max_trained + 1):
            # 1. Where training would leave about the loss that is allowed, by what it left of a
            #    loss so far; not if that is hardly smaller than what keeps enough.
            loss = self.search.safety * self.allowed_loss / residual
            size = self.sizes.size_losing(loss) + self.head_bytes
            passing = self._passing(trained)
            if passing and size * training.min_saving > self._size(trained[0]):
                break
            variant = self.sizes.variant_losing(loss)
            # 2. Trained until it keeps a little more than asked: what is reported is measured on
            #    other texts.
            ratio = variant.compression.totals.ratio
            stage_prefix = (
                f"training {number} of at most {training.max_trained}, "
                f"{ratio:.3g} times fewer numbers: "
            )
            stop_at = self.target_share + training.early_stop_margin * self.allowed_loss
            trained.append(self.variants.distilled(variant, stage_prefix, stop_at))
            # 3. To the last step where it ended before, and the selection texts say that it keeps
            #    too little.
            if not self._keeps_enough(trained[-1]) and trained[-1].stopped_early(stop_at):
                trained[-1] = self.variants.distilled(variant, stage_prefix)
            residual = max(loss_of(trained[-1]), MIN_LOSS) / max(loss_of(variant), MIN_LOSS)
        # 4. The smaller of those that keep enough.
        passing = self._passing(trained)
        return min(passing, key=self._size) if passing else self.untrained()

    def _residual_guess(self) -> float:
        """Return what share of a loss training is guessed to leave."""
        if self.variants.evaluator.source.head in (Head.classification, Head.regression):
            return self.training.residual_guess_classifier
        return self.training.residual_guess

    def _keeps_enough(self, variant: CompressedVariant) -> bool:
        return share_kept(variant.behaviour) >= self.target_share

    def _passing(self, variants: Sequence[CompressedVariant]) -> list[CompressedVariant]:
        """Return the variants that keep enough."""
        return [variant for variant in variants if self._keeps_enough(variant)]

    def _size(self, variant: CompressedVariant) -> int:
        """Return the bytes or parameters of a variant."""
        if self.counts_bytes:
            return bytes_to_open(variant.path / WEIGHTS)
        return variant.compression.totals.parameters

    def _expected_error(self, size: float) -> float:
        return self.searched.expected_error(self._plan(size))

    def _plan(self, size: float) -> CompressionPlan:
        """Return the plan of a size."""
        if self.counts_bytes:
            return CompressionPlan(bytes=self.head_bytes + math.ceil(size), **self.plan_options)
        return CompressionPlan(parameters=size, **self.plan_options)

    def _measure(self, size: float) -> CompressedVariant:
        """Measure a size; where its file has no room for a layer, the next larger that has it."""
        while True:
            try:
                # Any size near it will do, so the file need not be filled.
                compressed = self.searched.compress(self._plan(size), fill=False)
            except BudgetError:
                size *= self.search.growth
                if not self.counts_bytes or size > self.full_size:
                    raise
            else:
                return self.variants.untrained(compressed)
