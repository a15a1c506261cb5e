"""How many whole answers stay where a share of the effect is lost, by how near the others came.

A greedy answer changes where a token's runner-up overtakes it: where the two logits, m apart, move
against each other by more than m. How far they move follows from the divergence. Moves have longer
tails than a normal distribution, about those of Laplace's, whose scale for the difference of two
logits is τ. So a token changes with probability ½ exp(−m/τ), and an answer stays if none of its
tokens does. The divergence of small moves is ½ τ² (1 − Σp²), p being the LoRA's probabilities. Of
a token that the LoRA is sure of a move by several logits costs much more than that, so it is the
mean over Laplace's distribution.

Nothing of this is fitted: of 192 answers of a LoRA of E2E (SmolLM2) eight versions of 30 to 240 kB
kept 99 to 178, and 88 to 175 were expected; of 64 of one for tickets, of which it is far surer,
three of 8 to 30 kB kept 40 to 63, and 48 to 62 were. What is counted then corrects it by one
factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
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
"""How far the logarithm of the factor may be off: −0.19 to 0.06 for those eight versions, 0.5
for tickets in 8 kB, 0.0 to 0.5 for the classes of the demo's LoRA."""

SCALES = np.geomspace(1e-2, 1e2, 25)
"""Scales of the moves for which the divergence is computed, to be interpolated between."""
MOVES, MOVE_WEIGHTS = np.polynomial.laguerre.laggauss(24)
"""Gauss–Laguerre quadrature over the moves of one sign."""


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
    uncertainties : array, shape (tokens,)
        1 − Σp² of the tokens on which the loss is measured, p being the LoRA's probabilities.
    effect : float
        Mean divergence of these tokens where the whole effect is lost, nats.

    Examples
    --------
    >>> margins = [np.array([0.1, 3.0]), np.array([1.0])]
    >>> model = AnswerModel(margins, np.array([0.5, 0.1, 0.4]), effect=0.5)
    >>> round(math.exp(-model.fall(0.01)), 3), round(model.loss_for(0.9), 4)
    (0.859, 0.004)

    Fewer answers stayed than expected, so less may be lost:

    >>> round(model.loss_for(0.9, [Counted(38, 50, 0.01)]), 4)
    0.0023
    """

    margins: Sequence[NDArray[np.float64]]
    uncertainties: NDArray[np.float64]
    effect: float

    @classmethod
    def of(cls, reference: Reference, *further: Reference) -> AnswerModel:
        """Return the model of a LoRA's outputs on its own answers, or on texts that it classes.

        Losses are those on the first; the others have further margins.
        """
        margins, uncertainties = reference.margins()
        for each in further:
            margins += each.margins()[0]
        return cls([each.numpy() for each in margins], uncertainties.numpy(), reference.effect)

    def fall(self, loss: float) -> float:
        """Return how far the logarithm of the share of answers is expected to fall."""
        scale = self._scale(self.effect * max(loss, MIN_LOSS))
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

    def _scale(self, divergence: float) -> float:
        """Return the scale τ of the moves that have a mean divergence."""
        # 1. As if all moves were small. Where every token is sure, there is nothing but rounding.
        uncertainty = max(float(self.uncertainties.mean()), np.finfo(np.float64).eps)
        log_small = 0.5 * math.log(2.0 * divergence / uncertainty)
        # 2. Moves that are not cost more, so they are smaller.
        log_scales = np.log(SCALES)
        log_smalls = 0.5 * np.log(2.0 * self._divergences / uncertainty)
        return math.exp(log_small + np.interp(log_small, log_smalls, log_scales - log_smalls))

    @cached_property
    def _divergences(self) -> NDArray[np.float64]:
        """The mean divergence of moves of each of `SCALES`, nats."""
        uncertainties = np.maximum(self.uncertainties, np.finfo(np.float64).eps)
        # 1. A token is one of two classes, p and q = 1 − p, that are as uncertain, 2 p q. One that
        #    is more uncertain than two classes can be costs more in proportion.
        of_two = np.minimum(uncertainties, 0.5)
        q = of_two / (1.0 + np.sqrt(1.0 - 2.0 * of_two))
        margins = np.log((1.0 - q) / q)
        weights = np.stack([1.0 - q, q]) * uncertainties / of_two
        # 2. Moves to both sides, by quadrature.
        moves = np.concatenate([MOVES, -MOVES])[:, None]
        means: list[float] = []
        for scale in SCALES:
            moved = margins - scale * moves
            p_loss = np.logaddexp(0.0, -moved) - np.logaddexp(0.0, -margins)
            q_loss = np.logaddexp(0.0, moved) - np.logaddexp(0.0, margins)
            divergences = (weights[0] * p_loss + weights[1] * q_loss).mean(axis=1)
            means.append(float(np.tile(MOVE_WEIGHTS, 2) @ divergences) / 2.0)
        return np.array(means)

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
