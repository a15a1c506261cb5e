"""The goals of a measured compression: a plan, or the smallest variant that keeps a share.

Errors of a layer count in a norm that calibration measures with some adapter active (see
`Evaluator.statistics`), so a goal is pursued in passes: the first calibrates with the LoRA, each
other with the variant that the pass before found. A `Goal` is that of one pass.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

from lsrdecomp.errors import BudgetError
from lsrdecomp.lora.base.heads import EXAMPLE_HEADS
from lsrdecomp.lora.compress.answer_model import AnswerModel, Counted
from lsrdecomp.lora.compress.prunings import PruningSearch
from lsrdecomp.lora.compress.size_search import (
    MAX_LOSS_DEFICIT,
    MAX_MEASURED,
    MIN_LOSS,
    SAFETY,
    MeasuredSizes,
    loss_of,
)
from lsrdecomp.lora.files.file_checks import bytes_to_open
from lsrdecomp.lora.files.writing import WEIGHTS
from lsrdecomp.lora.measure.fidelity import share_kept
from lsrdecomp.lora.search.plan import CompressionPlan
from lsrdecomp.lora.search.searched import HEADER_BYTES, SearchedAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lsrdecomp.lora.compress.variants import CompressedVariant, VariantCache
    from lsrdecomp.lora.measure.fidelity import Fidelity

    ShapeSearch = Callable[..., SearchedAdapter]
    """`search_adapter` for the LoRA, called with plans and ``statistics``."""


PREPARED_REDUCTION = 6.0
"""Solve shapes beforehand for variants this many times smaller than the LoRA, and for larger ones
when they are asked for."""

# Training a variant takes as long as everything else together, so few are trained: variants whose
# loss training is expected to bring down to the allowed one. These numbers were chosen by hand
# unless a measurement is named.

MAX_TRAINED = 2
"""Maximum variants trained; one more where none of them keeps enough."""
AIM = 0.9
"""Share of the allowed loss that a training is aimed at; its square, a second one. What it leaves
is known to a quarter; what it keeps too much is pruned."""
STD_ERRORS = 1.0
"""Take a trained or pruned variant if its share is at least this many standard errors above the
target: of several that are measured on the same texts, the smallest that passes looks better than
it is. Without this, one draw of E2E (SmolLM2) kept 0.953 of the selection texts and 0.939 of the
held-out ones."""
MIN_SAVING = 1.25
"""Train another variant only if it is expected to be this many times smaller. Pruning makes most of
a smaller saving, for a third of the steps. Of a larger one it makes little: a trained variant of
123 kB of E2E (SmolLM2) lost more without a quarter of its bytes than an untrained one of 89 kB."""
EARLY_STOP_MARGIN = 0.1
"""Share of the allowed loss by which training must do better to end early, since rounding its
result costs something."""
RESIDUAL_GUESS = 0.25
"""Share of its loss that a variant has after training, assumed until one is measured; 0.07 to 0.5
on SmolLM2, of three in four less than this: what is trained too small is trained for nothing."""
RESIDUAL_GUESS_CLASSIFIER = 0.5
"""The same for models that predict once per example; 0.27 to 0.62 on MiniLM."""

MIN_PRUNED_SAVING = 1.07
"""Prune the result of a training, and train it further, only if it is expected to become this many
times smaller."""
PRUNED_STEPS = 0.3
"""Steps of the training after pruning, as a share of those of a training. On E2E (SmolLM2, one
draw) 18 of 60 steps brought 2,281 bytes from 0.936 to 0.951; the 2,838 before kept 0.958."""
PRUNED_RATE = 0.5
"""Peak learning rate of that training, as a share of the one before."""
PRUNED_RESIDUAL = 0.8
"""Share of its loss that a pruned variant has after that training, by which it is chosen how much
is pruned; 0.56 to 0.77 on three LoRAs of SmolLM2, one draw each. It is above these: what fails is
trained for nothing, and what keeps too much is pruned once more."""

MAX_TARGETS = 3
"""Times that the share is moved which should keep the answers; by hand."""


class Goal(Protocol):
    """A goal in the norm of one pass, and the variants that reach it."""

    def preliminary(self) -> CompressedVariant:
        """Return a variant near the goal, with which the next pass is calibrated; cheap."""

    def untrained(self) -> CompressedVariant:
        """Return the variant that reaches the goal without training."""

    def trained(self) -> CompressedVariant:
        """Return the variant that reaches the goal with training."""

    def is_better(self, new: CompressedVariant, old: CompressedVariant) -> bool:
        """Return whether one variant is nearer to the goal than another."""

    def replacement(
        self, variant: CompressedVariant, held_out: Fidelity
    ) -> CompressedVariant | None:
        """Return what to write in place of a variant that fails on held-out texts, if anything."""


class PlanGoal:
    """The goal of a plan: its one variant, with the outputs nearest to the LoRA's."""

    def __init__(
        self, variants: VariantCache, search_shapes: ShapeSearch, plan: CompressionPlan
    ) -> None:
        self.variants = variants
        self.plan = plan
        self.searched = search_shapes([plan], statistics=variants.statistics)

    def preliminary(self) -> CompressedVariant:
        """Return the untrained variant."""
        return self.untrained()

    def untrained(self) -> CompressedVariant:
        """Return the variant as it was compressed."""
        return self.variants.measure(self.searched.compress(self.plan))

    def trained(self) -> CompressedVariant:
        """Return the variant after training, or as it was if training did not improve it."""
        return self.variants.train(self.untrained())

    def is_better(self, new: CompressedVariant, old: CompressedVariant) -> bool:
        """Return whether the outputs of one variant are nearer to the LoRA's."""
        return share_kept(new.behaviour) > share_kept(old.behaviour)

    def replacement(
        self, variant: CompressedVariant, held_out: Fidelity
    ) -> CompressedVariant | None:
        """Return None: a plan has one variant."""


class ShareGoal:
    """The goal of a share: the smallest variant of a search that keeps it.

    Sizes are bytes where the storage is ``auto``, else parameters. The *size* of a variant is that
    of its layers; its *total size* in bytes also has the head that the LoRA brings along, which is
    the same in every variant.

    Parameters
    ----------
    variants : VariantCache
    search_shapes : callable
        `search_adapter` for the LoRA.
    target_share : float
        Share of the LoRA's effect that must be kept.
    plan_options : Mapping
        Storage and maximum rank of the plans of all sizes.

    Attributes
    ----------
    excess_loss : float
        How much more a variant is expected to lose on held-out texts than on the selection texts;
        0 until one was measured on both.
    """

    def __init__(
        self,
        variants: VariantCache,
        search_shapes: ShapeSearch,
        target_share: float,
        plan_options: Mapping[str, Any],
    ) -> None:
        self.variants = variants
        self.target_share = target_share
        self.plan_options = dict(plan_options)
        # 1. The size of the LoRA.
        source = variants.source
        self.counts_bytes = plan_options["storage"] == "auto"
        if self.counts_bytes:
            self.head_bytes = source.extra_bytes
            self.full_size = float(bytes_to_open(source.weights) - source.extra_bytes)
        else:
            self.head_bytes = 0
            self.full_size = float(source.adapter_parameters)
        # 2. Solve the shapes of small variants. Those of larger ones take longest and are solved
        #    only if such a variant is asked for.
        prepared_size = self.full_size / PREPARED_REDUCTION
        if self.counts_bytes:
            prepared_size = max(prepared_size, HEADER_BYTES + 1.0)
        plans = [self._plan(prepared_size)]
        self.searched = search_shapes(plans, statistics=variants.statistics)
        self.sizes = MeasuredSizes(self.full_size, self._expected_error, self._measure)
        self.excess_loss = 0.0
        self._trained: list[CompressedVariant] = []
        self._pruning_searches: list[PruningSearch] = []

    @property
    def allowed_loss(self) -> float:
        """The share of the LoRA's effect that may be lost on the selection texts."""
        return max(0.0, 1.0 - self.target_share - self.excess_loss)

    def preliminary(self) -> CompressedVariant:
        """Return a variant that keeps about the share, after one measurement."""
        loss = SAFETY * self.allowed_loss
        return self.sizes.variant_near_loss(loss, max_measured=1)

    def is_better(self, new: CompressedVariant, old: CompressedVariant) -> bool:
        """Return whether one variant is smaller, or keeps the share where the other does not."""
        if not self._passes(old):
            return True
        return self._passes(new) and self._total_size(new) < self._total_size(old)

    def untrained(self) -> CompressedVariant:
        """Return the smallest variant that keeps the share without training.

        Each measurement is a forward pass over the selection texts.

        Raises
        ------
        BudgetError
            If no variant keeps as much.
        """
        try:
            return self.sizes.smallest(self.target_share, on_measured=self._announce_measured)
        except BudgetError:
            full_size = self._measure(self.full_size)  # the last chance
            if not self._passes(full_size):
                raise
            return full_size

    def replacement(
        self, variant: CompressedVariant, held_out: Fidelity
    ) -> CompressedVariant | None:
        """Return a larger variant that should keep the share on the held-out texts as well.

        Some texts are harder than others, and for all variants much the same ones. So each is
        expected to lose as much more on the held-out texts as this one does.

        Parameters
        ----------
        variant : CompressedVariant
            As `trained` or `untrained` returned it.
        held_out : Fidelity
            What it keeps of the held-out texts.

        Returns
        -------
        CompressedVariant or None
            The smallest that is expected to keep the share, else the one that keeps most. None if
            no other keeps more than ``variant``.
        """
        # 1. Allow less loss on the selection texts.
        self.excess_loss = (1.0 - share_kept(held_out)) - loss_of(variant)
        if not variant.steps:
            return self._larger_untrained(variant)
        # 2. Prune what this one was pruned from, but less.
        searches = self._pruning_searches
        for search in searches:
            if any(tried is variant for tried in search.tried.values()):
                search.close_in(self._max_loss)
        # 3. Choose among all that were pruned.
        tried = [each for search in searches for each in search.tried.values()]
        better = [each for each in tried if loss_of(each) < loss_of(variant)]
        passing = [each for each in better if self._passes_surely(each)]
        if passing:
            return min(passing, key=self._total_size)
        # 4. Where no pruning makes a clear miss good, train the next size.
        if held_out.is_missed:
            larger = self._larger_trained(variant)
            if larger is not None:
                return larger
        return min(better, key=loss_of, default=None)

    def _larger_trained(self, variant: CompressedVariant) -> CompressedVariant | None:
        """Return a larger variant, trained to keep the share and the excess loss."""
        if not self._trained or self.allowed_loss <= 0.0:
            return None
        start = self.sizes.variant_near_loss(self._loss_before(AIM * self.allowed_loss))
        larger = self._train(start)
        return larger if loss_of(larger) < loss_of(variant) else None

    def _larger_untrained(self, variant: CompressedVariant) -> CompressedVariant | None:
        """Return the smallest variant that keeps the share and the excess loss, untrained.

        Else it is the one of those measured that keeps most, or None, as in `replacement`.
        """
        if self.allowed_loss > 0.0:
            try:
                larger = self.sizes.smallest(1.0 - self.allowed_loss)
            except BudgetError:
                pass
            else:
                return larger if loss_of(larger) < loss_of(variant) else None
        measured = self.sizes.measured.values()
        better = [each for each in measured if loss_of(each) < loss_of(variant)]
        return min(better, key=loss_of, default=None)

    def _announce_measured(self, number: int, variant: CompressedVariant) -> None:
        share = 1.0 - loss_of(variant)
        self.variants.evaluator.announce(
            f"version {number} of at most {MAX_MEASURED} keeps {share:.3f}, "
            f"{self.target_share:g} asked"
        )

    def trained(self) -> CompressedVariant:
        """Return the smallest trained variant that keeps the share, or else an untrained one."""
        trained: list[CompressedVariant] = []
        for _ in range(MAX_TRAINED + 1):
            # 1. Of a loss of this size, training should leave about the allowed loss.
            aim = AIM**2 if trained else AIM
            loss = self._loss_before(aim * self.allowed_loss)
            if not self._is_worth_training(loss, trained):
                break
            # 2. Train a variant with that loss.
            trained.append(self._train(self.sizes.variant_near_loss(loss)))
        passing = [variant for variant in trained if self._passes_surely(variant)]
        if not passing:
            return self._barely_passing(trained)
        smallest = min(passing, key=self._total_size)
        # 3. A training ends with more than was asked: spend that on a smaller size.
        smallest = self._pruned_and_trained(smallest)
        # 4. The training after pruning does too, if by less: spend it without further training.
        return self._pruned(smallest)

    def _barely_passing(self, trained: Sequence[CompressedVariant]) -> CompressedVariant:
        """Return the smallest of the variants that keep the share by chance, perhaps.

        An untrained one that keeps it is many times larger; it is looked for where none does.
        """
        passing = [variant for variant in trained if self._passes(variant)]
        return min(passing, key=self._total_size) if passing else self.untrained()

    def _loss_before(self, loss: float) -> float:
        """Return the loss of an untrained variant of which training should leave ``loss``.

        A training is expected to leave the share that the one left which came nearest to ``loss``.
        """
        pairs: list[tuple[float, float]] = []
        for trained in self._trained:
            if trained.distillation is not None:
                untrained_loss = 1.0 - share_kept(trained.distillation.before)
                pairs.append((max(untrained_loss, MIN_LOSS), _positive_loss(trained)))
        if not pairs:
            return loss / self._residual_guess()
        loss = max(loss, MIN_LOSS)
        before, after = min(pairs, key=lambda pair: abs(math.log(pair[1] / loss)))
        return loss * before / after

    def _residual_guess(self) -> float:
        """Return the share of its loss that a variant is assumed to have after training."""
        if self.variants.evaluator.source.head in EXAMPLE_HEADS:
            return RESIDUAL_GUESS_CLASSIFIER
        return RESIDUAL_GUESS

    def _is_worth_training(self, loss: float, trained: Sequence[CompressedVariant]) -> bool:
        """Return whether a variant of a loss would be much smaller than those that passed."""
        passing_sizes = [self._total_size(variant) for variant in trained if self._passes(variant)]
        if not passing_sizes:
            return True
        if len(trained) >= MAX_TRAINED:
            return False
        total_size = self.sizes.size_at_loss(loss) + self.head_bytes
        return total_size * MIN_SAVING <= min(passing_sizes)

    def _train(self, variant: CompressedVariant) -> CompressedVariant:
        """Train a variant until it keeps a little more than the share, or to the last step.

        Its learning rate is that of the first training that did any good, else it is searched for.
        """
        ratio = variant.compression.totals.ratio
        number = len(self._trained) + 1
        stage_prefix = f"training {number}, {ratio:.3g} times fewer numbers: "
        stop_at = self.target_share + EARLY_STOP_MARGIN * self.allowed_loss
        done = [each.distillation for each in self._trained if each.distillation]
        rate = next((each.training.rate for each in done if each.improved), None)
        result = self.variants.train(variant, stage_prefix, stop_at, rate=rate)
        # Training stops before its result is rounded. If what is written keeps too little, or may
        # do so, it goes on.
        if not self._passes_surely(result) and result.stopped_early(stop_at):
            result = self.variants.train(variant, stage_prefix, rate=rate)
        self._trained.append(result)
        return result

    def _pruned_and_trained(self, result: CompressedVariant) -> CompressedVariant:
        """Return a trained variant without its smallest terms, trained a little further.

        Where that keeps too little, the smallest of the others that keep enough. The variant itself
        where pruning is expected to save little.
        """
        distilled = result.distillation
        if distilled is None or not distilled.improved:
            return result
        # 1. Of which size would a variant be that training brings down to the allowed loss?
        max_loss = self._max_loss(result)
        size = self.sizes.size_at_loss(self._loss_before(max_loss)) + self.head_bytes
        if self._total_size(result) < MIN_PRUNED_SAVING * size:
            return result
        # 2. Leave out terms until the loss is what the training after it mends.
        search = self._pruning_search(result)
        pruned_loss = max_loss / PRUNED_RESIDUAL
        search.close_in(lambda _: pruned_loss)
        if not search.pruned:
            return result
        within = [variant for variant in search.pruned if loss_of(variant) <= pruned_loss]
        pruned = min(search.pruned, key=loss_of)
        if within:
            pruned = min(within, key=self._total_size)
        # 3. Train what is left a little further.
        retrained = self.variants.train(
            pruned,
            "training without its smallest terms: ",
            steps=max(1, math.ceil(PRUNED_STEPS * self.variants.steps)),
            rate=PRUNED_RATE * distilled.training.rate,
        )
        return self._smallest_passing([result, *search.pruned, retrained])

    def _pruned(self, variant: CompressedVariant) -> CompressedVariant:
        """Return a trained variant without as many of its terms as it can do without."""
        distilled = variant.distillation
        is_trained = distilled is not None and distilled.improved
        if not is_trained and variant.origin is None:
            return variant
        search = self._pruning_search(variant)
        search.close_in(self._max_loss)
        return self._smallest_passing([variant, *search.pruned])

    def _pruning_search(self, variant: CompressedVariant) -> PruningSearch:
        """Return the prunings of a variant, with those that were tried before."""
        for search in self._pruning_searches:
            if search.variant is variant:
                return search
        search = PruningSearch(variant, self.variants.prune)
        self._pruning_searches.append(search)
        return search

    def _smallest_passing(self, variants: Sequence[CompressedVariant]) -> CompressedVariant:
        """Return the smallest of the first variant and of those others that keep the share."""
        first, *others = variants
        passing = [variant for variant in others if self._passes_surely(variant)]
        return min([first, *passing], key=lambda each: (self._total_size(each), loss_of(each)))

    def _max_loss(self, variant: CompressedVariant) -> float:
        """Return the loss that a trained variant may have, measured as well as this one."""
        std_error = variant.behaviour.standard_error or 0.0
        return self.allowed_loss - STD_ERRORS * std_error

    def _passes_surely(self, variant: CompressedVariant) -> bool:
        """Return whether a variant keeps the share by more than the error of its measurement."""
        return loss_of(variant) <= self._max_loss(variant)

    def _passes(self, variant: CompressedVariant) -> bool:
        """Return whether a variant keeps the share on the selection texts."""
        return share_kept(variant.behaviour) >= self.target_share

    def _total_size(self, variant: CompressedVariant) -> int:
        """Return the bytes of a variant with its head, or its parameters."""
        if self.counts_bytes:
            return bytes_to_open(variant.path / WEIGHTS)
        return variant.compression.totals.parameters

    def _plan(self, size: float) -> CompressionPlan:
        """Return the plan of a variant of a size."""
        if self.counts_bytes:
            return CompressionPlan(bytes=self.head_bytes + math.ceil(size), **self.plan_options)
        return CompressionPlan(parameters=size, **self.plan_options)

    def _expected_error(self, size: float) -> float:
        """Return the squared relative error of the variant of a size."""
        return self.searched.expected_error(self._plan(size))

    def _measure(self, size: float) -> CompressedVariant:
        """Measure a size; where its file has no room for a layer, the next larger that has it."""
        while True:
            try:
                # The file need not be filled to the last byte: any size near this one will do.
                compression = self.searched.compress(self._plan(size), fill=False)
            except BudgetError:
                size *= 1.06  # a small step, since the first size with room is the smallest
                if not self.counts_bytes or size > self.full_size:
                    raise
            else:
                return self.variants.measure(compression)


class AnswerGoal(ShareGoal):
    """The goal of whole answers: that of a share of the effect, which moves until they are kept.

    `AnswerModel` says which share keeps enough, by the LoRA's own margins and the answers of all
    variants that were measured: that is surer than the count of one.

    Parameters
    ----------
    variants : VariantCache
        Whose evaluator compares on the LoRA's own answers.
    search_shapes : callable
    target_answers : float
        Share of the LoRA's whole answers that must be kept.
    plan_options : Mapping
    """

    def __init__(
        self,
        variants: VariantCache,
        search_shapes: ShapeSearch,
        target_answers: float,
        plan_options: Mapping[str, Any],
    ) -> None:
        self.target_answers = target_answers
        evaluator = variants.evaluator
        further = [evaluator.calibration_reference] if evaluator.calibration_reference else []
        self.model = AnswerModel.of(evaluator.selection_reference, *further)
        self._held_out: list[Counted] = []
        needed = 1.0 - self.model.loss_for(target_answers)
        super().__init__(variants, search_shapes, needed, plan_options)

    def _learn(self) -> None:
        """Estimate from the answers of all variants that were measured."""
        counted = list(self._held_out)
        for variant in (*self.sizes.measured.values(), *self._trained_variants()):
            examples = variant.behaviour.examples
            n_matching = (variant.behaviour.same_answers or 0.0) * examples
            counted.append(Counted(n_matching, examples, _positive_loss(variant)))
        self.target_share = 1.0 - self.model.loss_for(self.target_answers, counted)

    def _trained_variants(self) -> list[CompressedVariant]:
        """Return the variants that were trained, and their prunings, each once."""
        tried = [each for search in self._pruning_searches for each in search.tried.values()]
        return list({id(each): each for each in (*self._trained, *tried)}.values())

    def untrained(self) -> CompressedVariant:
        """Return the smallest variant that is estimated to keep the answers without training.

        Where none does, the largest of those that were measured.
        """
        for _ in range(MAX_TARGETS):
            n_measured = len(self.sizes.measured)
            try:
                variant = self.sizes.smallest(
                    self.target_share, on_measured=self._announce_measured
                )
            except BudgetError:
                variant = self.sizes.measured[max(self.sizes.measured)]
            if len(self.sizes.measured) == n_measured:
                break
            self._learn()
        return variant

    def trained(self) -> CompressedVariant:
        """Return the smallest trained variant that is estimated to keep the answers."""
        # Look where the first count points to before a training is spent.
        for _ in range(MAX_TARGETS):
            before = self.allowed_loss
            loss = AIM * before / self._residual_guess()
            self.sizes.variant_near_loss(loss, max_measured=1)
            self._learn()
            if before / MAX_LOSS_DEFICIT <= self.allowed_loss <= before * MAX_LOSS_DEFICIT:
                break
        return super().trained()

    def _train(self, variant: CompressedVariant) -> CompressedVariant:
        """Train a variant, and learn from its answers which share keeps enough."""
        result = super()._train(variant)
        self._learn()
        return result

    def replacement(
        self, variant: CompressedVariant, held_out: Fidelity
    ) -> CompressedVariant | None:
        """Return a larger variant that should keep the answers to the held-out prompts as well.

        A few that are missing may be chance: a larger version in place of it would be one by
        chance, too. So a version that was trained already is taken if it should keep them by all
        that were counted, these among the others. A larger one is made for what is expected of
        these alone, as many as this one loses.
        """
        if not held_out.is_missed:
            return None
        counted = Counted(held_out.n_matching, held_out.answered, _positive_loss(variant))
        self._held_out.append(counted)
        # 1. Choose among those that were trained and pruned.
        self._learn()
        passing = [
            each
            for each in self._trained_variants()
            if loss_of(each) < min(loss_of(variant), self.allowed_loss)
        ]
        if passing:
            return min(passing, key=self._total_size)
        # 2. Make a larger one.
        factor = counted.fall / max(self.model.fall(counted.loss), MIN_LOSS)
        loss = self.model.loss_at_fall(-math.log(self.target_answers) / factor)
        self.target_share = max(self.target_share, 1.0 - loss)
        if variant.steps:
            return self._larger_trained(variant)
        return self._larger_untrained(variant)

    def _announce_measured(self, number: int, variant: CompressedVariant) -> None:
        behaviour = variant.behaviour
        n_same = round((behaviour.same_answers or 0.0) * behaviour.examples)
        self.variants.evaluator.announce(
            f"version {number} of at most {MAX_MEASURED} gives {n_same} of {behaviour.examples} "
            f"answers, {100 * self.target_answers:g} % asked"
        )


def _positive_loss(variant: CompressedVariant) -> float:
    return max(loss_of(variant), MIN_LOSS)
