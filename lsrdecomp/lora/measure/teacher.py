"""The teacher of a distillation: a LoRA's logits and features on batches of unlabelled texts.

A step of training has one batch, which runs in one or more micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from lsrdecomp.lora.base.divergence import without_delta
from lsrdecomp.lora.base.forward import forward_repeatable
from lsrdecomp.lora.base.heads import EXAMPLE_HEADS
from lsrdecomp.lora.measure.features import forward_with_features

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from lsrdecomp.lora.base.base_model import Base
    from lsrdecomp.lora.base.divergence import Reference
    from lsrdecomp.lora.base.heads import Batch


@dataclass(frozen=True, slots=True)
class TeacherBatch:
    """A micro-batch with the teacher's outputs on it."""

    batch: Batch
    form_logits: Callable[[], Tensor]  # returns (predictions, classes)
    features: Tensor | None  # (predictions, width); None where `forward_with_features` finds none
    n_predictions: int


def teacher_batch(teacher: Base, batch: Batch) -> TeacherBatch:
    """Run the teacher on one micro-batch, without gradients."""
    with torch.no_grad():
        if teacher.head in EXAMPLE_HEADS:
            output, features = forward_with_features(teacher, batch)
            return TeacherBatch(batch, lambda: output.logits, features, len(output))
        output, form_logits = forward_repeatable(teacher, batch)
        return TeacherBatch(batch, form_logits, None, len(output))


@dataclass(frozen=True)
class DistillationData:
    """Batches that all compressed variants of one teacher are trained on.

    The teacher runs on a batch when it is first used; its outputs are kept for the next variant.
    """

    teacher: Base
    batches: Sequence[Sequence[Batch]]  # one for each step, in micro-batches
    validation: Reference  # the teacher on other batches: the share kept there says when to stop
    computed: dict[tuple[int, bool], list[TeacherBatch]] = field(default_factory=dict)
    """The teacher's outputs so far, by index in ``batches`` and whether in mixed precision."""

    def has_run(self, index: int) -> bool:
        """Return whether the teacher has run on a batch, in the precision of now."""
        return self._key(index) in self.computed

    def teacher_batches(self, index: int) -> list[TeacherBatch]:
        """Return the micro-batches of one step with the teacher's outputs."""
        if not self.has_run(index):
            micro_batches = self.batches[index]
            outputs = [teacher_batch(self.teacher, micro) for micro in micro_batches]
            self.computed[self._key(index)] = outputs
        return self.computed[self._key(index)]

    def _key(self, index: int) -> tuple[int, bool]:
        return index, torch.is_autocast_enabled("cpu")


def feature_distance(teacher: Base, batches: Sequence[TeacherBatch]) -> float | None:
    """Return the mean squared distance, over predictions, by which ΔW moves the features.

    None where there are no features, or they do not move. Costs one forward pass a batch.
    """
    total = 0.0
    n_predictions = 0
    with torch.no_grad(), without_delta(teacher.model):
        for micro in batches:
            if micro.features is None:
                return None
            _, features_without_delta = forward_with_features(teacher, micro.batch)
            if features_without_delta is None:
                return None
            total += float((features_without_delta - micro.features).square().sum())
            n_predictions += micro.n_predictions
    return total / n_predictions if total > 0.0 else None
