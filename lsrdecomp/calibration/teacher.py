"""The teacher of a distillation: a LoRA's logits and features on batches of unlabelled texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from lsrdecomp.calibration.divergence import without_delta
from lsrdecomp.calibration.features import EXAMPLE_HEADS, forward_with_features
from lsrdecomp.calibration.forward import forward_repeatable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from lsrdecomp.calibration.base_model import Base
    from lsrdecomp.calibration.divergence import Reference
    from lsrdecomp.calibration.heads import Batch


@dataclass(frozen=True, slots=True)
class TeacherBatch:
    """A micro-batch with the teacher's outputs on it."""

    batch: Batch
    logits: Callable[[], Tensor]  # forms them: (predictions, classes)
    features: Tensor | None  # (predictions, width); None where they are not known
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
    """What adapters of one teacher are trained on; it runs on each batch once, for all of them."""

    teacher: Base
    batches: Sequence[Sequence[Batch]]  # one for each step, in micro-batches
    validation: Reference  # the teacher on other batches: the share kept there says when to stop
    computed: dict[int, list[TeacherBatch]] = field(default_factory=dict)  # by index in `batches`

    def teacher_batches(self, index: int) -> list[TeacherBatch]:
        """Return the micro-batches of one step with the teacher's outputs."""
        if index not in self.computed:
            micro_batches = self.batches[index]
            self.computed[index] = [teacher_batch(self.teacher, micro) for micro in micro_batches]
        return self.computed[index]


def feature_distance(teacher: Base, batches: Sequence[TeacherBatch]) -> float | None:
    """Return how far ΔW moves the features: the mean over predictions of the squared distance.

    None where features are not known, or do not move. Costs one forward pass a batch.
    """
    total = 0.0
    n_predictions = 0
    with torch.no_grad(), without_delta(teacher.model):
        for part in batches:
            if part.features is None:
                return None
            _, features_without_delta = forward_with_features(teacher, part.batch)
            if features_without_delta is None:
                return None
            total += float((features_without_delta - part.features).square().sum())
            n_predictions += part.n_predictions
    return total / n_predictions if total > 0.0 else None
