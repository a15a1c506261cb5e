"""How many whole answers stay where a share of the effect is lost, by how near the others came.

A greedy answer changes where a token's runner-up overtakes it: where the two logits, m apart, move
against each other by more than m. How far they move follows from the divergence. If the logits of a
token move independently with variance τ², then KL = ½ τ² (1 − Σp²) to second order, p being the
LoRA's probabilities. Moves have longer tails than a normal distribution, about those of Laplace's,
whose scale for the difference of two logits is τ. So a token changes with probability
½ exp(−m/τ), and an answer stays if none of its tokens does.

Nothing of this is fitted: of 192 answers of a LoRA of E2E (SmolLM2) eight versions of 30 to 240 kB
kept 99 to 178, and 89 to 175 were expected. What is counted then corrects it by one factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import brentq
from scipy.special import logsumexp

from lsrdecomp.lora.compress.size_search import MIN_LOSS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lsrdecomp.lora.base.divergence import Reference

FACTOR_SPREAD = 0.3
"""How far the logarithm of the factor may be off: −0.19 to 0.06 for those eight versions, 0.0 to
0.5 for the classes of the demo's LoRA."""


@dataclass(frozen=True)
class Counted:
    """The answers of a version that are the LoRA's, and the share of the effect that it loses."""

    n_matching: float
    answered: int
    loss: float

    @property
    def fall(self) -> float:
        """How far the logarithm of the share has fallen, by half an answer more than none."""
        return -math.log((self.n_matching + 0.5) / (self.answered + 0.5))


@dataclass(frozen=True)
class AnswerModel:
    """The share of a LoRA's answers that is expected to stay, by the share of the effect lost.

    Parameters
    ----------
    margins : sequence of arrays, each of shape (tokens,)
        By how much the LoRA's first token is ahead of the second at each token of an answer, in
        logits.
    scale : float
        The scale τ of the moves where the whole effect is lost.

    Examples
    --------
    >>> model = AnswerModel([np.array([0.1, 3.0]), np.array([1.0])], scale=2.0)
    >>> round(math.exp(-model.fall(0.01)), 3), round(model.loss_for(0.9), 4)
    (0.847, 0.003)

    Fewer answers stayed than expected, so less may be lost:

    >>> round(model.loss_for(0.9, [Counted(38, 50, 0.01)]), 4)
    0.0019
    """

    margins: Sequence[NDArray[np.float64]]
    scale: float

    @classmethod
    def of(cls, reference: Reference, *further: Reference) -> AnswerModel:
        """Return the model of a LoRA's outputs on its own answers, or on texts that it classes.

        Losses are those on the first; the others have further margins.
        """
        found = [each.margins() for each in (reference, *further)]
        scale = math.sqrt(2.0 * reference.effect / max(found[0][1], MIN_LOSS))
        return cls([each.numpy() for margins, _ in found for each in margins], scale)

    def fall(self, loss: float) -> float:
        """Return how far the logarithm of the share of answers is expected to fall."""
        scale = self.scale * math.sqrt(max(loss, MIN_LOSS))
        stays = [np.log1p(-0.5 * np.exp(-each / scale)).sum() for each in self.margins]
        return float(math.log(len(stays)) - logsumexp(stays))

    def loss_for(self, answers: float, counted: Sequence[Counted] = ()) -> float:
        """Return the lost share of the effect at which a share of the answers stays, 1 at most."""
        return self.loss_at_fall(-math.log(answers) / self._factor(counted))

    def loss_at_fall(self, fall: float) -> float:
        """Return the lost share of the effect at which the logarithm has fallen so far."""
        lowest = math.log(MIN_LOSS)
        if self.fall(MIN_LOSS) >= fall:
            return MIN_LOSS
        if self.fall(1.0) <= fall:
            return 1.0
        return math.exp(brentq(lambda log_loss: self.fall(math.exp(log_loss)) - fall, lowest, 0.0))

    def _factor(self, counted: Sequence[Counted]) -> float:
        """Return by how much more is expected to fall than by the margins.

        It is the likeliest one given a guess of 1 and the mean of what was counted, a Poisson
        variable: versions are counted on the same answers, of which a near tie changes in many
        versions, so that all together say hardly more than one.
        """
        if not counted:
            return 1.0
        found = float(np.mean([each.answered * each.fall for each in counted]))
        expected = float(np.mean([each.answered * self.fall(each.loss) for each in counted]))
        precision = FACTOR_SPREAD**-2

        def slope(log_factor: float) -> float:
            return found - expected * math.exp(log_factor) - precision * log_factor

        # So far from the guess, it outweighs all that was counted.
        bound = max(found, expected) / precision
        return math.exp(brentq(slope, -bound, bound))
