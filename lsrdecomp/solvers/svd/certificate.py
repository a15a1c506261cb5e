"""What a Krylov space knows of the optimum: errors of all truncations, and how much better they could be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.solvers.base import ErrorKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.solvers.svd.bidiagonal import Bidiagonal

CONVERGING = 1e-3
"""Extrapolated excess from which on the Ritz values are near enough to tell, by their couplings,
what they lack."""


@dataclass(frozen=True)
class Certificate:
    """Squared errors of rank-s truncations from one space, and bounds on what the optimum may gain, all for ‖R‖_F = 1.

    Write R = [[Θ₁, 0, F₁], [0, Θ₂, F₂], [0, 0, R₂₂]] in the Ritz vectors of the space, Θ₁ holding
    the first s Ritz values θ. For every δ > 0 the coupling [F₁] of R Rᴴ is dominated by block
    diagonals, R Rᴴ ≤ diag(Θ₁² + F₁F₁ᴴ + K Kᴴ/δ, TTᴴ + δ) with K = [0 F₁]Tᴴ and T = [[Θ₂, F₂], [0,
    R₂₂]]; with τ = ‖T‖₂ and δ = θ_s² − τ² > 0 the first s eigenvalues are those of the first block,
    so by Ky Fan the optimum captures at most ‖F₁‖²τ²/δ more than the projection does.

    The bound is rigorous with a rigorous τ: ‖R₂₂‖_F² is known, being ‖R‖² less what was seen. That
    needs a tail below θ_s. Otherwise the gain is extrapolated from the last steps, and labelled an
    estimate: it assumes that no singular value has hidden from a random start. Once three looks say
    that it is small, the same bound with τ = ‖[Θ₂ F₂]‖₂, as far as the space has seen, is an
    estimate too, and mostly a sharper one: what is extrapolated is a step behind. The couplings are
    known to rounding, so that their squares reach far below the rounding of squared errors.
    """

    captured: np.ndarray  # (k + 1,): Σ_{i≤s} σ_i² of the projection U Uᴴ R
    tails: np.ndarray  # (k + 1,): Σ_{i>s} σ_i² of the projection
    squared_errors: np.ndarray  # (k + 1,): ‖R‖² less what is captured
    roundoff: float  # of the squared errors
    small: np.ndarray  # (k, k): B
    below: np.ndarray  # (b, k): N
    earlier: tuple[np.ndarray, ...]  # `captured` at the two checks before

    @classmethod
    def of(cls, space: Bidiagonal, earlier: Sequence[np.ndarray] = ()) -> Certificate:
        # The space has seen [B Nᴴ]: its singular values are below those of R one by one (Cauchy).
        sigma = np.linalg.svd(space.projected(), compute_uv=False)
        roundoff = 64.0 * space.roundoff
        captured = np.concatenate(([0.0], np.cumsum(sigma**2)))
        tails = np.concatenate((np.cumsum(sigma[::-1] ** 2)[::-1], [0.0]))
        rest = 1.0 - captured[-1]
        return cls(
            captured=captured,
            tails=tails,
            squared_errors=tails + (rest if rest > roundoff else 0.0),
            roundoff=roundoff,
            small=space.small,
            below=space.coupling,
            earlier=tuple(earlier[-2:]),
        )

    @property
    def size(self) -> int:
        """k, the dimension of the space."""
        return self.captured.size - 1

    @property
    def noise(self) -> float:
        """Rounding of what one look captured more than another; in single precision less than that of either."""
        return self.roundoff / 16.0 if self.roundoff > 1e-10 else self.roundoff

    @cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Ritz values θ (k,) and the coupling of each Ritz vector, F₁ and F₂ (b, k)."""
        u, theta, _ = np.linalg.svd(self.small)
        return theta, self.below @ u

    @cached_property
    def _couplings(self) -> np.ndarray:
        """‖F₁‖_F² for s = 0, 1, …, shape (k + 1,)."""
        return np.concatenate(([0.0], np.cumsum(np.sum(np.abs(self._pairs[1]) ** 2, axis=0))))

    @property
    def _unseen(self) -> float:
        """‖R₂₂‖_F²."""
        return (
            max(1.0 - float(np.sum(self._pairs[0] ** 2)) - float(self._couplings[-1]), 0.0)
            + self.roundoff
        )

    def _aside(self, rank: int) -> float:
        """‖[Θ₂ F₂]‖₂²."""
        theta, beside = self._pairs
        outside = np.concatenate(
            (np.diag(theta[rank:]).astype(beside.dtype), beside[:, rank:].T), axis=1
        )
        return float(np.linalg.norm(outside, 2)) ** 2 if outside.size else 0.0

    def error(self, rank: int) -> float:
        return math.sqrt(self.squared_errors[rank])

    def resolves(self, rank: int, goal: float | None = None) -> bool:
        """Whether the error stands above the rounding of ‖R‖² − Σσ², and that rounding cannot hide a missed goal."""
        squared = float(self.squared_errors[rank])
        hidden = goal is not None and squared <= goal**2 < squared + self.roundoff
        return squared > 16.0 * self.roundoff and not hidden

    def exact(self, error: float) -> bool:
        """Whether an error is no more than the rounding of the products."""
        return error <= self.roundoff

    def measured_excess(self, rank: int, error: float) -> float:
        """Bound on error/optimum − 1 from a measured error, sharp below the rounding of ‖R‖² − Σσ² too."""
        least = self._least(rank, error) - 0.25 * self.roundoff * math.sqrt(self.size)
        return max(error / least - 1.0, 0.0) if least > 0.0 else math.inf

    def within_rounding(self, rank: int, error: float) -> bool:
        """Whether a measured error is above the optimum by no more than the rounding of the products."""
        return error - self._least(rank, error) <= self.roundoff

    def _least(self, rank: int, error: float) -> float:
        """What the optimum is not below, by a measured error and but for rounding.

        Singular values of a projection are below those of R, so the optimum is at least the tail
        that was seen. And the bound above holds with τ = error, however small: where the terms
        stand apart, a flat remainder costs no steps.
        """
        apart = float(self._pairs[0][rank - 1]) ** 2 - error**2
        lacking = (float(self._couplings[rank]) + self.roundoff**2) / apart if apart > 0.0 else 1.0
        return max(math.sqrt(float(self.tails[rank])), error * math.sqrt(max(1.0 - lacking, 0.0)))

    def smallest_rank(self, error: float, most: int) -> int:
        """The fewest terms with that error, or ``most``."""
        met = np.flatnonzero(self.squared_errors[: most + 1] <= error**2)
        return int(met[0]) if met.size else most

    def excess(self, rank: int, wanted: float = 0.0) -> tuple[float, ErrorKind]:
        """error/optimum − 1 for ``rank`` terms: the bound if it is at most ``wanted`` or nothing else is known."""
        if rank == 0:
            return 0.0, ErrorKind.bounded
        # Excess 1: an error that rounding of ‖R‖² − Σσ² hides can only be guessed.
        if not self.resolves(rank):
            seen = self._aside(rank)
            gain = self._gain(rank, seen) if seen > 0.0 else math.inf
            return self._ratio(rank, min(gain, self._beyond())), ErrorKind.estimated
        # Excess 2: the bound with τ = error, which needs nothing but couplings.
        seen = self.measured_excess(rank, self.error(rank))
        if seen <= wanted:  # what rounding of the squared error may hide makes it an estimate
            sure = self.roundoff <= wanted * float(self.squared_errors[rank])
            return seen, ErrorKind.bounded if sure else ErrorKind.estimated
        # Excess 3: what gains of the last steps leave, if they go on falling as they did.
        estimate = self._ratio(rank, self._extrapolated(rank))
        converging = len(self.earlier) == 2 and wanted < estimate <= CONVERGING
        if (
            not converging
            and self.squared_errors[-1] > self.captured[rank] - self.captured[rank - 1]
        ):
            return (
                estimate,
                ErrorKind.estimated,
            )  # what was not seen may hide a value above θ_s: no bound is to be had
        # Excess 4: the bound with τ as far as it is known; the better of both.
        seen = self._aside(rank)
        everything = (
            1.0 - float(np.sum(self._pairs[0][:rank] ** 2)) - self._couplings[rank] + self.roundoff
        )
        bound = self._ratio(rank, self._gain(rank, min(everything, seen + self._unseen)))
        if converging:
            estimate = min(estimate, self._ratio(rank, self._gain(rank, seen)))
        if bound <= max(wanted, estimate):
            return bound, ErrorKind.bounded
        return estimate, ErrorKind.estimated

    def couples(self, rank: int) -> bool:
        """Whether couplings of the terms stand above their rounding, and the terms apart from the rest."""
        theta, _ = self._pairs
        apart = rank == self.size or theta[rank] < (1.0 - 1e-3) * theta[rank - 1]
        return bool(apart and self._couplings[rank] > 4.0 * self.roundoff**2)

    def falls_to(self, rank: int) -> float:
        """The next gain over the squared error, if gains fall as the last two did; infinite where that is slowly."""
        if len(self.earlier) < 2 or self.earlier[0].size <= rank:
            return math.inf
        first, second = (float(past[rank]) for past in self.earlier)
        before, last = second - first, float(self.captured[rank]) - second
        return (
            last**2 / before / float(self.squared_errors[rank])
            if 0.0 < 4.0 * last < before
            else math.inf
        )

    def columns_needed(self, error: float) -> float:
        """Columns a space needs at least to leave no more than ``error``, at the rate of the last ones."""
        if not self.earlier:
            return 0.0
        past = self.earlier[-1]
        rate = float(self.captured[-1] - past[-1]) / (self.captured.size - past.size)
        missing = float(self.squared_errors[-1]) - error**2
        return (
            self.size if missing <= 0.0 else self.size + missing / rate if rate > 0.0 else math.inf
        )

    def _gain(self, rank: int, tau_squared: float) -> float:
        delta = float(self._pairs[0][rank - 1]) ** 2 - tau_squared
        coupling = float(self._couplings[rank]) + self.roundoff**2
        return coupling * tau_squared / delta if delta > 0.0 else math.inf

    def _beyond(self) -> float:
        """What the space lacks if that is no larger than its last singular value: a guess, to be measured."""
        return self.size * float(self.tails[-2])

    def _extrapolated(self, rank: int) -> float:
        """What further steps may add, from a geometric series through the last two gains, twice over."""
        seen = [float(past[rank]) for past in self.earlier if past.size > rank]
        if not seen:
            return math.inf
        last = max(float(self.captured[rank]) - seen[-1], self.noise)
        if len(seen) < 2:
            return last
        before = max(seen[-1] - seen[-2], self.noise)
        return max(last, 2.0 * last**2 / (before - last)) if last < before else 4.0 * last

    def _ratio(self, rank: int, gain: float) -> float:
        squared = float(self.squared_errors[rank])
        return math.inf if gain >= squared else 1.0 / math.sqrt(1.0 - gain / squared) - 1.0
