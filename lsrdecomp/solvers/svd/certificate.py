"""The certificate of a Krylov space: errors of all truncations, and bounds on the optimum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.solvers.solver import ErrorKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.solvers.svd.bidiagonal import Bidiagonal


@dataclass(frozen=True)
class Certificate:
    """Squared errors of truncations from one space, and bounds on the optimum, for ‖R‖_F = 1.

    Write R = [[Θ₁, 0, F₁], [0, Θ₂, F₂], [0, 0, R₂₂]] in the Ritz vectors of the space, Θ₁ holding
    the first s Ritz values θ. For every δ > 0 the coupling [F₁] of R Rᴴ is dominated by block
    diagonals, R Rᴴ ≤ diag(Θ₁² + F₁F₁ᴴ + K Kᴴ/δ, TTᴴ + δ) with K = [0 F₁]Tᴴ and T = [[Θ₂, F₂], [0,
    R₂₂]]; with τ = ‖T‖₂ and δ = θ_s² − τ² > 0 the first s eigenvalues are those of the first block,
    so by Ky Fan the optimum captures at most ‖F₁‖²τ²/δ more than the projection does.

    The bound is rigorous with a rigorous τ: ‖R₂₂‖_F² is known, being ‖R‖² less what was seen. That
    needs a tail below θ_s. Otherwise the gain is extrapolated from the last steps, and labelled an
    estimate: it assumes that no singular value has hidden from a random start. Once three checks
    say that it is small, the same bound with τ = ‖[Θ₂ F₂]‖₂, as far as the space has seen, is an
    estimate too, and mostly a sharper one: what is extrapolated is a step behind. The couplings are
    known to rounding, so that their squares reach far below the rounding of squared errors.

    A space holds as many copies of a repeated value as its blocks have columns, but for those that
    rounding brings in, and no gain tells of others. An estimate therefore adds what these could
    capture in place of terms below a whole block of equal values.
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
        """Compute the certificate of a space; ``earlier`` are ``captured`` of the checks before."""
        # The space has seen [B Nᴴ]: its singular values are below those of R one by one (Cauchy).
        sigma = np.linalg.svd(space.projected(), compute_uv=False)
        roundoff = 64.0 * space.roundoff
        captured = np.concatenate(([0.0], np.cumsum(sigma**2)))
        tails = np.concatenate((np.cumsum(sigma[::-1] ** 2)[::-1], [0.0]))
        unseen = 1.0 - captured[-1]
        return cls(
            captured=captured,
            tails=tails,
            squared_errors=tails + (unseen if unseen > roundoff else 0.0),
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
        """Rounding of the difference between two checks; in float32 less than that of either."""
        return self.roundoff / 16.0 if self.roundoff > 1e-10 else self.roundoff

    @cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Ritz values θ (k,) and the coupling of each Ritz vector, F₁ and F₂ (b, k)."""
        u, theta, _ = np.linalg.svd(self.small)
        return theta, self.below @ u

    @cached_property
    def _couplings(self) -> np.ndarray:
        """‖F₁‖_F² for s = 0, 1, …, shape (k + 1,)."""
        _, couplings = self._pairs
        return np.concatenate(([0.0], np.cumsum(np.sum(np.abs(couplings) ** 2, axis=0))))

    @property
    def _unseen(self) -> float:
        """‖R₂₂‖_F²."""
        theta, _ = self._pairs
        unseen = 1.0 - float(np.sum(theta**2)) - float(self._couplings[-1])
        return max(unseen, 0.0) + self.roundoff

    def _squared_tail_norm(self, rank: int) -> float:
        """Return ‖[Θ₂ F₂]‖₂²."""
        theta, couplings = self._pairs
        diagonal = np.diag(theta[rank:]).astype(couplings.dtype)
        tail = np.concatenate((diagonal, couplings[:, rank:].T), axis=1)
        return float(np.linalg.norm(tail, 2)) ** 2 if tail.size else 0.0

    def error(self, rank: int) -> float:
        """Return the error of the first ``rank`` terms of the space."""
        return math.sqrt(self.squared_errors[rank])

    def resolves(self, rank: int, goal: float | None = None) -> bool:
        """Return whether the error stands above the rounding of ‖R‖² − Σσ².

        And whether that rounding cannot hide a missed goal.
        """
        squared = float(self.squared_errors[rank])
        may_hide = goal is not None and squared <= goal**2 < squared + self.roundoff
        return squared > 16.0 * self.roundoff and not may_hide

    def is_exact(self, error: float) -> bool:
        """Return whether an error is no more than the rounding of the products."""
        return error <= self.roundoff

    def measured_excess(self, rank: int, error: float) -> float:
        """Bound error/optimum − 1 by a measured error, however small that is."""
        bound = self._optimum_bound(rank, error) - 0.25 * self.roundoff * math.sqrt(self.size)
        return max(error / bound - 1.0, 0.0) if bound > 0.0 else math.inf

    def is_within_rounding(self, rank: int, error: float) -> bool:
        """Return whether a measured error exceeds the optimum by no more than rounding."""
        return error - self._optimum_bound(rank, error) <= self.roundoff

    def _optimum_bound(self, rank: int, error: float) -> float:
        """Bound the optimum from below by a measured error, but for rounding.

        Singular values of a projection are below those of R, so the optimum is at least the tail
        that was seen. And the bound above holds with τ = error, however small: where the terms
        stand apart, a flat remainder costs no steps.
        """
        theta, _ = self._pairs
        gap = float(theta[rank - 1]) ** 2 - error**2
        missing_share = 1.0
        if gap > 0.0:
            missing_share = (float(self._couplings[rank]) + self.roundoff**2) / gap
        seen_tail = math.sqrt(float(self.tails[rank]))
        return max(seen_tail, error * math.sqrt(max(1.0 - missing_share, 0.0)))

    def smallest_rank(self, error: float, max_terms: int) -> int:
        """Return the fewest terms with that error, or ``max_terms``."""
        met = np.flatnonzero(self.squared_errors[: max_terms + 1] <= error**2)
        return int(met[0]) if met.size else max_terms

    def excess(self, rank: int, requested: float = 0.0) -> tuple[float, ErrorKind]:
        """Return error/optimum − 1 for ``rank`` terms, and whether that is a bound or an estimate.

        It is the bound if that is at most ``requested``, or nothing else is known.
        """
        if rank == 0:
            return 0.0, ErrorKind.bounded
        # Excess 1: an error that rounding of ‖R‖² − Σσ² hides can only be guessed.
        if not self.resolves(rank):
            tail = self._squared_tail_norm(rank)
            gain = self._max_gain(rank, tail) if tail > 0.0 else math.inf
            guess = self.size * float(self.tails[-2])  # as if no larger value had been missed
            return self._ratio(rank, min(gain, guess)), ErrorKind.estimated
        # Excess 2: the bound with τ = error, which needs nothing but couplings.
        bound = self.measured_excess(rank, self.error(rank))
        if bound <= requested:
            # What rounding of the squared error may hide makes it an estimate.
            is_certain = self.roundoff <= requested * float(self.squared_errors[rank])
            return bound, ErrorKind.bounded if is_certain else ErrorKind.estimated
        # Excess 3: what gains of the last steps leave, if they go on falling as they did.
        copies = self.gain_of_copies(rank)
        estimate = self._ratio(rank, self._extrapolated_gain(rank) + copies)
        # From here on the Ritz values are near enough to tell, by their couplings, what they lack.
        is_converging = len(self.earlier) == 2 and requested < estimate <= 1e-3
        last_square = self.captured[rank] - self.captured[rank - 1]
        if not is_converging and self.squared_errors[-1] > last_square:
            # The part that was not seen may hide a value above θ_s: no bound is to be had.
            return estimate, ErrorKind.estimated
        # Excess 4: the bound with τ as far as it is known; the better of both.
        theta, _ = self._pairs
        seen_tail = self._squared_tail_norm(rank)
        outside = 1.0 - float(np.sum(theta[:rank] ** 2)) - self._couplings[rank] + self.roundoff
        tau_squared = min(outside, seen_tail + self._unseen)
        bound = self._ratio(rank, self._max_gain(rank, tau_squared))
        if is_converging:
            by_couplings = self._max_gain(rank, seen_tail) + copies
            estimate = min(estimate, self._ratio(rank, by_couplings))
        if bound <= max(requested, estimate):
            return bound, ErrorKind.bounded
        return estimate, ErrorKind.estimated

    def has_trend(self, rank: int) -> bool:
        """Return whether two gains are known, so that an extrapolated excess can be trusted.

        One gain may be small because the values around the last term lie so close together that the
        space has not begun to tell them apart.
        """
        return len(self.earlier) == 2 and self.earlier[0].size > rank

    def has_visible_couplings(self, rank: int) -> bool:
        """Return whether couplings of the terms stand above their rounding, and the terms apart."""
        theta, _ = self._pairs
        is_apart = rank == self.size or theta[rank] < (1.0 - 1e-3) * theta[rank - 1]
        return bool(is_apart and self._couplings[rank] > 4.0 * self.roundoff**2)

    def gain_of_copies(self, rank: int) -> float:
        """Return what copies of repeated values that were not found could capture besides."""
        block = self.below.shape[0]
        if not 1 < block < rank:  # blocks of one column live on what rounding brings
            return 0.0
        theta, _ = self._pairs
        first = theta[: rank - block]
        # Values within this ratio are taken for copies of one. By hand.
        is_whole_block = theta[block - 1 : rank - 1] >= 0.999 * first
        gains = first**2 - theta[block:rank] ** 2
        return float(np.sum(gains[is_whole_block]))

    def are_copies_in_doubt(self, rank: int) -> bool:
        """Return whether copies could gain more than steps will, as far as these can be told."""
        return self.has_trend(rank) and self.gain_of_copies(rank) > self._extrapolated_gain(rank)

    def predicted_gain(self, rank: int) -> float:
        """Return the next gain over the squared error, if gains fall as the last two did.

        Infinite where they fall slowly, less than fourfold a step.
        """
        if not self.has_trend(rank):
            return math.inf
        first, second = (float(captured[rank]) for captured in self.earlier)
        previous_gain = second - first
        last_gain = float(self.captured[rank]) - second
        if not 0.0 < 4.0 * last_gain < previous_gain:
            return math.inf
        next_gain = last_gain**2 / previous_gain + self.gain_of_copies(rank)
        return next_gain / float(self.squared_errors[rank])

    def columns_needed(self, error: float) -> float:
        """Return the columns that a space needs for an error, at the rate of the last ones."""
        if not self.earlier:
            return 0.0
        previous = self.earlier[-1]
        n_new = self.captured.size - previous.size
        rate = float(self.captured[-1] - previous[-1]) / n_new
        missing = float(self.squared_errors[-1]) - error**2
        if missing <= 0.0:
            return self.size
        return self.size + missing / rate if rate > 0.0 else math.inf

    def _max_gain(self, rank: int, tau_squared: float) -> float:
        theta, _ = self._pairs
        delta = float(theta[rank - 1]) ** 2 - tau_squared
        coupling = float(self._couplings[rank]) + self.roundoff**2
        return coupling * tau_squared / delta if delta > 0.0 else math.inf

    def _extrapolated_gain(self, rank: int) -> float:
        """Extrapolate further gains as a geometric series through the last two, twice over."""
        seen = [float(captured[rank]) for captured in self.earlier if captured.size > rank]
        if not seen:
            return math.inf
        last_gain = max(float(self.captured[rank]) - seen[-1], self.noise)
        if len(seen) < 2:
            return last_gain
        previous_gain = max(seen[-1] - seen[-2], self.noise)
        if last_gain >= previous_gain:
            return 4.0 * last_gain
        return max(last_gain, 2.0 * last_gain**2 / (previous_gain - last_gain))

    def _ratio(self, rank: int, gain: float) -> float:
        """Return error/optimum − 1 where the optimum captures ``gain`` more."""
        squared = float(self.squared_errors[rank])
        return math.inf if gain >= squared else 1.0 / math.sqrt(1.0 - gain / squared) - 1.0
