"""Fitting a small core with more and more terms: each new term starts from the residual of the ones before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.base import Event
from lsrdecomp.solvers.cp.levenberg_marquardt import refine, unknowns
from lsrdecomp.solvers.cp.regularized import alternate
from lsrdecomp.solvers.cp.terms import CPTerms

if TYPE_CHECKING:
    from lsrdecomp.solvers.progress import SolveProgress

POWER_STEPS = 12
"""Alternating rank-one steps that place a new term; it is moved with all others afterwards."""
PATH_FACTOR = 1e-2
"""Between the penalty that guides the search and the asked one, α falls by this factor at a
time."""
NEAR = 2.5
"""A misfit this many times the goal is worth refining before another term is added."""
FELL = 0.3
"""An error that fell by this much may be held up by the guiding penalty alone: the true rank may be
reached."""
GUIDE = 0.1
"""While terms are being added γ is held so low that the penalty stays about this fraction of the
error."""
ROUNDING = 16.0 * unit_roundoff("float64")
"""A misfit that no further term can lower: the rounding of a tensor of norm one."""
CHEAP = 800
"""Up to this many unknowns a Newton step costs about as much as a sweep: refined after each term,
many starts tried."""
SPLIT = 0.1
"""Relative distance between the halves of a split term."""
SETTLING = 100
"""Most sweeps of a fit that no Newton step will finish."""


def empty_terms(core: np.ndarray) -> CPTerms:
    return CPTerms(np.zeros(0), tuple(np.zeros((p, 0), dtype=core.dtype) for p in core.shape))


def random_terms(core: np.ndarray, rank: int, rng: np.random.Generator) -> CPTerms:
    """Unit columns in random directions with equal weights."""
    columns = []
    for p in core.shape:
        column = rng.standard_normal((p, rank))
        if np.iscomplexobj(core):
            column = column + 1j * rng.standard_normal((p, rank))
        columns.append(column)
    terms = CPTerms.of(columns)
    return CPTerms(np.full(rank, 1.0 / math.sqrt(rank)), terms.columns)


def split_term(terms: CPTerms, rng: np.random.Generator) -> CPTerms:
    """One term, drawn by its weight, replaced by two halves that differ a little: a start the residual cannot show."""
    chance = terms.weights**2
    k = int(rng.choice(terms.rank, p=chance / chance.sum()))
    moved = []
    for column in terms.columns:
        noise = rng.standard_normal(column.shape[0]) * (SPLIT / math.sqrt(column.shape[0]))
        moved.append(column[:, k] + noise)
    unit = CPTerms.of([v[:, None] for v in moved])
    weights = terms.weights.copy()
    weights[k] *= 0.5
    return CPTerms(weights, terms.columns).with_term(
        [c[:, 0] for c in unit.columns], weights[k : k + 1]
    )


@dataclass(frozen=True, slots=True)
class CoreFit:
    """Minimising ‖T − Σ‖² + α Σλ² over terms of a core T of norm one."""

    core: np.ndarray  # float64 or complex128
    ridge: float  # α
    rng: np.random.Generator
    sweeps: int  # alternating sweeps after each new term
    initializations: int  # fits to choose the last one from
    goal: float  # misfit norm that is good enough
    progress: SolveProgress

    def misfit(self, terms: CPTerms) -> float:
        """‖T − Σ‖, from residual entries."""
        return float(np.linalg.norm(self.core - terms.to_tensor()))

    def grown(self, terms: CPTerms, rank: int) -> CPTerms:
        """Fitted with ``rank`` terms, or with as few as bring the misfit to the goal; of the last number of terms, the
        best of some fits: one from the residual, the others by splitting a term of the fit before.
        """
        # Core 1: the terms to begin from, possibly none, are fitted before any is added.
        if terms.rank and self.misfit(terms) > self.goal:
            self.progress.mark(Event.start)
            terms = self._along_path(terms, self.goal)
        error, skipped = self.misfit(terms), None
        while terms.rank < rank and error > self.goal and not self.progress.exhausted:
            # Core 2: one term more, all moved together under a penalty that keeps γ low.
            guide = max(self.ridge, (GUIDE * error) ** 2)
            before, previous, terms = terms, error, self._with_term(terms, guide)
            if unknowns(terms) <= CHEAP:
                terms = self._refined(terms, guide, self.goal, iterations=20, rtol=1e-2)
            error = self.misfit(terms)
            # More unknowns than entries: what Newton steps would find, the expansion in fibres has
            # for nothing.
            if self.goal > ROUNDING and unknowns(terms) > max(CHEAP, self.core.size):
                continue
            if terms.rank == rank:
                return self._best_of(
                    before, terms, self.initializations if unknowns(terms) <= CHEAP else 1
                )
            # Core 3: near the goal, the penalty falls to the one asked for.
            if error > self.goal > ROUNDING and error < max(NEAR * self.goal, FELL * previous):
                # Terms that follow the path to its end may cancel, and no further term mends those:
                # growth goes on from the ones before it.
                polished = self._along_path(terms, self.goal)
                if self.misfit(polished) > self.goal:
                    skipped = None
                    continue
                terms, error = polished, self.goal
            # Core 4: where one term fewer was not near enough to be refined, it may do all the
            # same.
            if error > self.goal:
                skipped = before, terms
            elif skipped is not None and unknowns(terms) <= CHEAP:
                fewer = self._best_of(*skipped, self.initializations)
                terms = fewer if self.misfit(fewer) <= self.goal else terms
        return terms

    def by_sweeps(self, terms: CPTerms, rank: int) -> CPTerms:
        """The best of a few fits without Newton steps, for a tensor whose spectrum is flat.

        Noise has many minima of about one height: there a fit grown anew from other random terms
        gains more than Newton steps on the first one, and costs less.
        """
        fits = []
        for number in range(self.initializations):
            # Sweeps 1: terms one by one, all moved after each.
            trial = terms if number == 0 else empty_terms(self.core)
            self.progress.mark(Event.start)
            while trial.rank < rank and not self.progress.exhausted:
                trial = self._with_term(trial, self.ridge)
            # Sweeps 2: to where they settle.
            fits.append(self._swept(trial, self.ridge, SETTLING, 1e-6))
        return min(fits, key=self._objective)

    def _with_term(self, terms: CPTerms, ridge: float) -> CPTerms:
        """With the best of a few rank-one fits to the residual, then all terms moved by sweeps."""
        # Leading singular vectors of the unfoldings are mostly the best start; two random ones
        # guard against the rest.
        residual, best = self.core - terms.to_tensor(), None
        for start in range(3):
            trial = (
                _leading_vectors(residual) if start == 0 else random_terms(self.core, 1, self.rng)
            )
            trial = alternate(residual, trial, 0.0, sweeps=POWER_STEPS, rtol=1e-3)
            if best is None or trial.weights[0] > best.weights[0]:
                best = trial
        assert best is not None
        self.progress.mark(Event.new_term)
        return self._swept(
            terms.with_term([c[:, 0] for c in best.columns], best.weights), ridge, self.sweeps, 1e-4
        )

    def _best_of(self, before: CPTerms, terms: CPTerms, tries: int) -> CPTerms:
        """The best of ``terms`` and of the terms ``before`` the last one with one of them split in two."""
        best = self._along_path(terms, self.goal)
        if before.rank == 0 or tries == 1:
            return best
        self.progress.mark(Event.start)
        before = self._along_path(before)
        for _ in range(tries - 1):
            if self.misfit(best) <= self.goal:
                break
            self.progress.mark(Event.start)
            trial = self._along_path(split_term(before, self.rng), self.goal)
            best = min(best, trial, key=self._objective)
        return best

    def _along_path(self, terms: CPTerms, goal: float = 0.0) -> CPTerms:
        """Where the minimiser comes to while the penalty falls to α: Levenberg–Marquardt at each value of it."""
        # A large penalty first: it holds γ low where the terms still have far to go, and steps are
        # long.
        guide = max(self.ridge, (GUIDE * self.misfit(terms)) ** 2)
        while guide > self.ridge:
            terms = self._refined(terms, guide, goal, iterations=20, rtol=1e-4)
            guide = max(self.ridge, guide * PATH_FACTOR)
        return self._refined(terms, self.ridge, goal, iterations=60, rtol=1e-9)

    def _swept(self, terms: CPTerms, ridge: float, sweeps: int, rtol: float) -> CPTerms:
        return alternate(self.core, terms, ridge, sweeps=sweeps, rtol=rtol, progress=self.progress)

    def _refined(
        self, terms: CPTerms, ridge: float, goal: float, *, iterations: int, rtol: float
    ) -> CPTerms:
        return refine(
            self.core,
            terms,
            ridge,
            iterations=iterations,
            rtol=rtol,
            goal=goal,
            progress=self.progress,
        )

    def _objective(self, terms: CPTerms) -> float:
        return self.misfit(terms) ** 2 + self.ridge * float(np.sum(terms.weights**2))


def _leading_vectors(residual: np.ndarray) -> CPTerms:
    """The leading left singular vector of every unfolding, as one term."""
    columns = []
    for mode in range(residual.ndim):
        unfolded = np.moveaxis(residual, mode, 0).reshape(residual.shape[mode], -1)
        columns.append(np.linalg.eigh(unfolded @ unfolded.conj().T).eigenvectors[:, -1:])
    return CPTerms(np.ones(1), tuple(columns))
