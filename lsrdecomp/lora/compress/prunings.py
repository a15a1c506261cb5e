"""How much of a trained variant can be pruned until it loses just what it may."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.lora.compress.size_search import MIN_LOSS, loss_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lsrdecomp.lora.compress.variants import CompressedVariant


MAX_PRUNED_SAVING = 2.0
"""Largest factor by which a variant is pruned."""
MAX_PRUNINGS = 4
"""Maximum times that a variant is pruned to find how much of it can go; each is a forward pass over
the selection texts."""
PRUNED_TOLERANCE = 0.1
"""Stop at a pruned variant that loses at most this share less than it may."""
PRUNED_CURVATURE = 8.0
"""The logarithm of the loss is assumed to rise by this, times the square of the share of the bytes
that is pruned, until that was measured; 4 to 13 on three LoRAs of SmolLM2 at 0.95."""


@dataclass(frozen=True, slots=True)
class PruningSearch:
    """Prunings of one trained variant, each of them measured.

    Terms go in the order of their price, which rises with the share of the bytes that is gone. So
    the logarithm of the loss rises about as the square of that share.

    Attributes
    ----------
    variant : CompressedVariant
    prune : callable
        Returns a variant without a share of the bytes of its numbers, measured; expensive.
    tried : dict of share to CompressedVariant
        The variant itself, of which nothing is pruned, and the prunings so far.
    """

    variant: CompressedVariant
    prune: Callable[[CompressedVariant, float], CompressedVariant]
    tried: dict[float, CompressedVariant] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tried.setdefault(0.0, self.variant)

    @property
    def pruned(self) -> list[CompressedVariant]:
        """The prunings so far."""
        return [variant for share, variant in self.tried.items() if share > 0.0]

    def close_in(self, max_loss_of: Callable[[CompressedVariant], float]) -> None:
        """Prune until a variant loses just less than it may, in a few tries.

        Parameters
        ----------
        max_loss_of : callable
            Returns the loss that a variant may have. It differs between variants, whose losses are
            not equally well known.
        """
        for _ in range(MAX_PRUNINGS):
            if any(self._is_close(tried, max_loss_of(tried)) for tried in self.tried.values()):
                break
            # What the next one may lose is best known from the one that came nearest to it.
            nearest = min(
                self.tried.values(), key=lambda tried: abs(loss_of(tried) - max_loss_of(tried))
            )
            max_loss = max_loss_of(nearest)
            share = self.next_share(max_loss * (1.0 - 0.5 * PRUNED_TOLERANCE))
            # Little is learnt from a share so near to one that was tried.
            if any(abs(share - tried) < 0.01 for tried in self.tried):
                break
            self.tried[share] = self.prune(self.variant, share)

    def _is_close(self, variant: CompressedVariant, max_loss: float) -> bool:
        """Return whether a variant loses at most ``max_loss``, and hardly less."""
        min_loss = (1.0 - PRUNED_TOLERANCE) * max_loss
        return min_loss <= loss_of(variant) <= max_loss

    def next_share(self, loss: float) -> float:
        """Return the share to prune for a loss, as estimated from the tries so far."""
        losses = {share: loss_of(tried) for share, tried in self.tried.items()}
        if len(losses) > 1:
            share = share_at_loss(losses, loss)
        else:
            log_rise = math.log(max(loss, MIN_LOSS) / max(losses[0.0], MIN_LOSS))
            share = math.sqrt(max(log_rise, 0.0) / PRUNED_CURVATURE)
        return round(min(share, 1.0 - 1.0 / MAX_PRUNED_SAVING), 6)


def share_at_loss(losses: Mapping[float, float], loss: float) -> float:
    """Estimate the share of a variant that can be pruned until it has a loss.

    Log loss is interpolated linearly in the squares of the shares, and extrapolated by the last
    two, at most to twice the largest share.

    Parameters
    ----------
    losses : mapping of share to loss
        At least two.
    loss : float

    Examples
    --------
    >>> share_at_loss({0.0: 0.01, 0.2: 0.02}, 0.16), share_at_loss({0.0: 0.01, 0.2: 0.16}, 0.02)
    (0.4, 0.1)
    """
    shares = sorted(losses)
    squares = [share**2 for share in shares]
    # A variant of which more was pruned, and that lost less, did so by chance.
    rising = np.maximum.accumulate([max(losses[share], MIN_LOSS) for share in shares])
    log_losses = np.log(rising)
    log_loss = math.log(max(loss, MIN_LOSS))
    above = len(shares) - 1
    if log_loss <= log_losses[-1]:
        above = max(1, int(np.searchsorted(log_losses, log_loss)))
    slope = (log_losses[above] - log_losses[above - 1]) / (squares[above] - squares[above - 1])
    if slope <= 0.0:
        return 2.0 * shares[-1]
    square = squares[above - 1] + float((log_loss - log_losses[above - 1]) / slope)
    return round(min(math.sqrt(max(square, 0.0)), 2.0 * shares[-1]), 6)
