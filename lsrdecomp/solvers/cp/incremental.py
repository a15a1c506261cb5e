"""The fit of a small core by more and more terms, each started from the residual of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.cp.levenberg_marquardt import n_unknowns, refine
from lsrdecomp.solvers.cp.mttkrp import products, sweep
from lsrdecomp.solvers.cp.regularized import alternate
from lsrdecomp.solvers.cp.terms import CPTerms
from lsrdecomp.solvers.solver import Event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.solvers.iteration import SolveProgress

ROUNDING = 16.0 * unit_roundoff("float64")
"""A misfit that no further term can lower: the rounding of a tensor of norm one."""

MAX_CHEAP_UNKNOWNS = 800
"""Unknowns up to which a Newton step costs about as much as a sweep: sums are refined after each
term, and several fits are tried. By hand, on the problems of ``tests/problems.py``, as are all
numbers of this file."""


FLAT_GROWTH = 1.1
"""A tensor of which a term more lowers the misfit by less than this factor has no terms of its own:
of exact and of decaying sums the last term of a goal gains more."""


def empty_terms(core: np.ndarray) -> CPTerms:
    """Return no terms, in the sizes and the type of a core."""
    return CPTerms(np.zeros(0), tuple(np.zeros((p, 0), dtype=core.dtype) for p in core.shape))


def random_terms(core: np.ndarray, rank: int, rng: np.random.Generator) -> CPTerms:
    """Draw unit columns in random directions, with equal weights."""
    columns = []
    for p in core.shape:
        column = rng.standard_normal((p, rank))
        if np.iscomplexobj(core):
            column = column + 1j * rng.standard_normal((p, rank))
        columns.append(column)
    terms = CPTerms.of(columns)
    return CPTerms(np.full(rank, 1.0 / math.sqrt(rank)), terms.columns)


def split_term(terms: CPTerms, rng: np.random.Generator) -> CPTerms:
    """Replace one term, drawn by its weight, by two halves that differ a little.

    That is a start which the residual cannot show.
    """
    distance = 0.1  # of the halves, relative
    squares = terms.weights**2
    k = int(rng.choice(terms.rank, p=squares / squares.sum()))
    perturbed = []
    for column in terms.columns:
        scale = distance / math.sqrt(column.shape[0])
        noise = rng.standard_normal(column.shape[0]) * scale
        perturbed.append((column[:, k] + noise)[:, None])
    unit = CPTerms.of(perturbed)
    weights = terms.weights.copy()
    weights[k] *= 0.5
    halved = CPTerms(weights, terms.columns)
    return halved.with_term([column[:, 0] for column in unit.columns], weights[k : k + 1])


@dataclass(frozen=True, slots=True)
class CoreFit:
    """The minimisation of ‖T − Σ‖² + α Σλ² over terms of a core T of norm one."""

    core: np.ndarray  # float64 or complex128
    ridge: float  # α
    rng: np.random.Generator
    sweeps: int  # alternating sweeps after each new term
    initializations: int  # fits from which the last one is chosen
    goal: float  # misfit norm that is good enough
    max_short_rank: int  # terms that have no more numbers than the matrix
    progress: SolveProgress

    def misfit(self, terms: CPTerms) -> float:
        """Return ‖T − Σ‖, from residual entries."""
        return float(np.linalg.norm(self.core - terms.to_tensor()))

    def grown(self, terms: CPTerms, rank: int) -> CPTerms:
        """Fit ``rank`` terms, or as few as bring the misfit to the goal.

        Of the last number of terms the best of some fits is taken: one from the residual, the
        others by splitting a term of the fit before.
        """
        # Core 1: the terms to begin from, possibly none, are fitted before any is added.
        if terms.rank and self.misfit(terms) > self.goal:
            self.progress.mark(Event.start)
            terms = self._along_path(terms)
        error = self.misfit(terms)
        # The last fit that stayed above the goal without being refined, and the one before it.
        unrefined: tuple[CPTerms, CPTerms] | None = None
        while terms.rank < rank and error > self.goal and not self.progress.exhausted:
            # Core 2: one term more, all moved together under a penalty that keeps γ low.
            before = terms
            previous_error = error
            guide = self._guiding_penalty(error)
            terms = self._with_term(before, guide)
            if self._is_cheap(terms):
                terms = self._refined(terms, guide, iterations=20, rtol=1e-2)
            error = self.misfit(terms)
            if self._is_hopeless(terms):
                continue
            if terms.rank == rank:
                n_fits = self.initializations if self._is_cheap(terms) else 1
                return self._best_of(before, terms, n_fits)
            # Core 3: near the goal, the penalty falls to the requested one.
            if self._is_worth_refining(error, previous_error):
                # Where terms gain little each, the path is left as soon as it falls short.
                is_flat = previous_error < FLAT_GROWTH * error
                polished = self._along_path(terms, is_for_goal=is_flat)
                if self.misfit(polished) > self.goal:
                    # Terms that follow the path to its end may cancel, and no further term mends
                    # those: growth goes on from the ones before it.
                    unrefined = None
                    continue
                terms = polished
                error = self.goal
            # Core 4: where one term fewer was not near enough to be refined, it may do all the
            # same. A sum of more numbers than the matrix gains nothing by one term fewer.
            if error > self.goal:
                is_short = terms.rank <= self.max_short_rank
                unrefined = (before, terms) if is_short else None
            elif unrefined is not None and self._is_cheap(terms):
                fewer = self._best_of(*unrefined, self.initializations)
                if self.misfit(fewer) <= self.goal:
                    terms = fewer
        # Core 5: a goal that was met while the guiding penalty was large: the weights without it.
        return self._with_best_weights(terms) if self.goal > ROUNDING else terms

    def by_sweeps(self, terms: CPTerms, rank: int) -> CPTerms:
        """Return the best of a few fits without Newton steps, for a tensor whose spectrum is flat.

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
            # Sweeps 2: until they settle, and no Newton step follows.
            fits.append(self._swept(trial, self.ridge, sweeps=100, rtol=1e-6))
        return min(fits, key=self._objective)

    def _with_best_weights(self, terms: CPTerms) -> CPTerms:
        """Refit the weights under the requested penalty alone, where that lowers the objective."""
        if terms.rank == 0:
            return terms
        # The normal equations of real weights: (G + αI) λ = ⟨t_k, T⟩.
        grams = [column.conj().T @ column for column in terms.columns]
        gram = np.real(reduce(np.multiply, grams)) + self.ridge * np.eye(terms.rank)
        first_product = products(self.core, terms.columns)[0]
        overlaps = np.real(np.sum(terms.columns[0].conj() * first_product, axis=0))
        weights = np.linalg.lstsq(gram, overlaps, rcond=None)[0]
        refitted = CPTerms.of((terms.columns[0] * weights, *terms.columns[1:]))
        return min(terms, refitted, key=self._objective)

    def _is_cheap(self, terms: CPTerms) -> bool:
        return n_unknowns(terms) <= MAX_CHEAP_UNKNOWNS

    def _is_hopeless(self, terms: CPTerms) -> bool:
        """Return whether there are more unknowns than entries.

        What Newton steps would find then, the expansion in fibres has for nothing.
        """
        limit = max(MAX_CHEAP_UNKNOWNS, self.core.size)
        return self.goal > ROUNDING and n_unknowns(terms) > limit

    def _is_worth_refining(self, error: float, previous_error: float) -> bool:
        """Return whether a misfit is so near the goal that the penalty alone may be in the way."""
        if not error > self.goal > ROUNDING:
            return False
        # Terms of noise, each of which gains little, have no more to gain from Newton steps than
        # three further terms would bring.
        gain_of_three = (previous_error / error) ** 3
        near = min(2.5, gain_of_three) * self.goal
        # After a large gain the true rank may be reached, and the guiding penalty alone holds the
        # terms up.
        after_large_gain = 0.3 * previous_error
        return error < max(near, after_large_gain)

    def _guiding_penalty(self, misfit: float) -> float:
        """Return the penalty while terms are added: γ is held low, at a tenth of the error."""
        return max(self.ridge, (0.1 * misfit) ** 2)

    def _with_term(self, terms: CPTerms, ridge: float) -> CPTerms:
        """Add the best of a few rank-one fits to the residual, then move all terms by sweeps."""
        residual = self.core - terms.to_tensor()
        columns, weight = self._rank_one_fit(residual)
        self.progress.mark(Event.new_term)
        extended = terms.with_term(columns, np.array([weight]))
        return self._swept(extended, ridge, self.sweeps, 1e-4)

    def _rank_one_fit(self, residual: np.ndarray) -> tuple[list[np.ndarray], float]:
        """Return the unit columns (p_i,) and the weight of the best of a few rank-one fits.

        By the higher-order power method, all starts at once: one is a column. The leading singular
        vectors of the unfoldings are mostly the best start; two random ones are tried beside them.
        """
        n_random = 2
        # Weights that differ by less than this share are alike.
        rtol = 2e-3
        leading = _leading_vectors(residual)
        random = random_terms(self.core, n_random, self.rng)
        columns: Sequence[np.ndarray] = [
            np.hstack(pair) for pair in zip(leading, random.columns, strict=True)
        ]
        weights = np.zeros(1 + n_random)

        def normalized(mode: int, product: np.ndarray) -> np.ndarray:
            nonlocal weights
            weights = np.linalg.norm(product, axis=0)
            # A start that the residual does not see stays where it is.
            is_seen = weights > 0.0
            return np.where(is_seen, product / np.where(is_seen, weights, 1.0), columns[mode])

        # A few steps are enough: the term is moved with all others afterwards.
        for _ in range(12):
            previous_weights = weights
            columns = sweep(residual, columns, normalized)
            if np.all(weights <= (1.0 + rtol) * previous_weights):
                break
        # Of starts that end alike a random one: it makes the fits of a symmetric tensor, and
        # those from other seeds, different.
        is_best = weights >= (1.0 - rtol) * weights.max()
        best = int(np.flatnonzero(is_best)[-1])
        return [column[:, best] for column in columns], float(weights[best])

    def _best_of(self, before: CPTerms, terms: CPTerms, n_fits: int) -> CPTerms:
        """Return the best of ``n_fits`` fits of as many terms as ``terms`` has.

        The first is ``terms`` itself; the others start from the terms ``before`` the last one was
        added, still under the guiding penalty, with one of them split in two.
        """
        best = self._along_path(terms)
        if before.rank == 0 or n_fits == 1:
            return best
        for _ in range(n_fits - 1):
            if self.misfit(best) <= self.goal:
                break
            self.progress.mark(Event.start)
            start = split_term(before, self.rng)
            trial = self._along_path(start)
            # Two fits that end at one height have mostly found the best minimum.
            difference = abs(self._objective(trial) - self._objective(best))
            is_agreed = difference <= 1e-6 * self._objective(best)
            best = min(best, trial, key=self._objective)
            if is_agreed:
                break
        return best

    def _along_path(self, terms: CPTerms, *, is_for_goal: bool = False) -> CPTerms:
        """Follow the minimiser while the penalty falls to α, by Newton steps at each value.

        With ``is_for_goal`` the last steps end where the goal is out of their reach.
        """
        # A large penalty first: it holds γ low where the terms still have far to go, and steps are
        # long.
        guide = self._guiding_penalty(self.misfit(terms))
        while guide > self.ridge:
            terms = self._refined(terms, guide, iterations=20, rtol=1e-4)
            # Terms that cancel more and more for a smaller error pay for it by a penalty of the
            # error's size. A penalty far below that holds nothing up: the path is at its end.
            penalty = guide * float(np.sum(terms.weights**2))
            if penalty <= 1e-3 * self.misfit(terms) ** 2:
                break
            guide = max(self.ridge, 1e-2 * guide)
        # A path that ends early left most of the way to the last steps.
        return self._refined(terms, self.ridge, iterations=130, rtol=1e-9, is_for_goal=is_for_goal)

    def _swept(self, terms: CPTerms, ridge: float, sweeps: int, rtol: float) -> CPTerms:
        return alternate(self.core, terms, ridge, sweeps=sweeps, rtol=rtol, progress=self.progress)

    def _refined(
        self,
        terms: CPTerms,
        ridge: float,
        *,
        iterations: int,
        rtol: float,
        is_for_goal: bool = False,
    ) -> CPTerms:
        return refine(
            self.core,
            terms,
            ridge,
            iterations=iterations,
            rtol=rtol,
            goal=self.goal,
            is_for_goal=is_for_goal,
            progress=self.progress,
        )

    def _objective(self, terms: CPTerms) -> float:
        return self.misfit(terms) ** 2 + self.ridge * float(np.sum(terms.weights**2))


def _leading_vectors(residual: np.ndarray) -> list[np.ndarray]:
    """Return the leading left singular vector of every unfolding, each of shape (p_i, 1)."""
    columns = []
    for mode in range(residual.ndim):
        unfolded = np.moveaxis(residual, mode, 0).reshape(residual.shape[mode], -1)
        columns.append(np.linalg.eigh(unfolded @ unfolded.conj().T).eigenvectors[:, -1:])
    return columns
