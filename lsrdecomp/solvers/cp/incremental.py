"""Fitting a small core with more and more terms: each new term starts from the residual of the ones before."""

from __future__ import annotations

import math

import numpy as np

from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.base import Event
from lsrdecomp.solvers.cp.levenberg_marquardt import refine, unknowns
from lsrdecomp.solvers.cp.regularized import alternate
from lsrdecomp.solvers.cp.terms import CPTerms
from lsrdecomp.solvers.progress import SolveProgress

POWER_STEPS = 12
"""Alternating rank-one steps that place a new term; it is moved with all others afterwards."""
PATH_FACTOR = 1e-2
"""Between the penalty that guides the search and the asked one, α falls by this factor at a time."""
NEAR = 2.5
"""A misfit this many times the goal is worth refining before another term is added."""
FELL = 0.3
"""An error that fell by this much may be held up by the guiding penalty alone: the true rank may be reached."""
GUIDE = 0.1
"""While terms are being added γ is held so low that the penalty stays about this fraction of the error."""
ROUNDING = 16.0 * unit_roundoff("float64")
"""A misfit that no further term can lower: the rounding of a tensor of norm one."""
CHEAP = 800
"""Up to this many unknowns a Newton step costs about as much as a sweep: refined after each term, many starts tried."""
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


def misfit(core: np.ndarray, terms: CPTerms) -> float:
    """‖T − Σ‖, from residual entries."""
    return float(np.linalg.norm(core - terms.to_tensor()))


def add_term(core: np.ndarray, terms: CPTerms, rng: np.random.Generator) -> CPTerms:
    """The best of a few rank-one fits to the residual, appended."""
    residual = core - terms.to_tensor()
    best: CPTerms | None = None
    for start in range(3):
        trial = _leading_vectors(residual) if start == 0 else random_terms(core, 1, rng)
        trial, _ = alternate(residual, trial, 0.0, sweeps=POWER_STEPS, rtol=1e-3)
        if best is None or trial.weights[0] > best.weights[0]:
            best = trial
    assert best is not None
    return terms.with_term([c[:, 0] for c in best.columns], best.weights)


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
    return CPTerms(weights, terms.columns).with_term([c[:, 0] for c in unit.columns], weights[k : k + 1])


def fit(
    core: np.ndarray,
    terms: CPTerms,
    rank: int,
    ridge: float,
    *,
    rng: np.random.Generator,
    sweeps: int,
    initializations: int,
    goal: float = 0.0,
    progress: SolveProgress | None = None,
) -> CPTerms:
    """Minimise ‖T − Σ‖² + α Σλ² with ``rank`` terms, or with as few as bring the misfit to ``goal``.

    Parameters
    ----------
    core : ndarray, float64 or complex128, norm one
    terms : CPTerms
        Terms to begin from, possibly none; they are fitted before any is added.
    rank : int
        Terms to end with, at most.
    ridge : float
        α.
    rng : Generator
    sweeps : int
        Alternating sweeps after each new term.
    initializations : int
        Polished fits to choose the last from: one from the residual, the others by splitting a term of the fit before.
    goal : float
        Misfit norm that is good enough.
    """
    goal = max(goal, ROUNDING)
    if terms.rank and misfit(core, terms) > goal:
        _mark(progress, Event.start)
        terms = follow_path(core, terms, ridge, goal=goal, progress=progress)
    error, skipped = misfit(core, terms), None
    while terms.rank < rank and error > goal and not (progress is not None and progress.exhausted):
        guide = max(ridge, (GUIDE * error) ** 2)
        before, previous, terms = terms, error, add_term(core, terms, rng)
        _mark(progress, Event.new_term)
        terms, _ = alternate(core, terms, guide, sweeps=sweeps, rtol=1e-4, progress=progress)
        if unknowns(terms) <= CHEAP:
            terms = refine(core, terms, guide, iterations=20, rtol=1e-2, goal=goal, progress=progress)
        error = misfit(core, terms)
        if terms.rank == rank:
            tries = initializations if unknowns(terms) <= CHEAP else 1
            return _best_of(core, before, terms, ridge, rng=rng, tries=tries, goal=goal, progress=progress)
        if error > goal > ROUNDING and error < max(NEAR * goal, FELL * previous):
            # Terms that follow the path to its end may cancel, and no further term mends those: growth goes on from
            # the ones before it.
            polished = follow_path(core, terms, ridge, goal=goal, progress=progress)
            if misfit(core, polished) > goal:
                skipped = None
                continue
            terms, error = polished, goal
        if error > goal:
            skipped = before, terms
        elif skipped is not None and unknowns(terms) <= CHEAP:
            # One term fewer was not near enough to be refined: it may do all the same.
            fewer = _best_of(core, *skipped, ridge, rng=rng, tries=initializations, goal=goal, progress=progress)
            terms = fewer if misfit(core, fewer) <= goal else terms
    return terms


def fit_by_sweeps(
    tensor: np.ndarray,
    terms: CPTerms,
    rank: int,
    ridge: float,
    *,
    rng: np.random.Generator,
    sweeps: int,
    initializations: int,
    progress: SolveProgress | None = None,
) -> CPTerms:
    """The best of a few fits without Newton steps, for a tensor whose spectrum is flat; parameters as of `fit`.

    Noise has many minima of about one height: there a fit grown anew from other random terms gains more than Newton
    steps on the first one, and costs less.
    """
    fits = []
    for number in range(initializations):
        # Sweeps 1: terms one by one, all moved after each.
        trial = terms if number == 0 else empty_terms(tensor)
        _mark(progress, Event.start)
        while trial.rank < rank and not (progress is not None and progress.exhausted):
            trial = add_term(tensor, trial, rng)
            _mark(progress, Event.new_term)
            trial, _ = alternate(tensor, trial, ridge, sweeps=sweeps, rtol=1e-4, progress=progress)
        # Sweeps 2: to where they settle.
        fits.append(alternate(tensor, trial, ridge, sweeps=SETTLING, rtol=1e-6, progress=progress)[0])
    return min(fits, key=lambda trial: _objective(tensor, trial, ridge))


def _best_of(
    core: np.ndarray,
    before: CPTerms,
    terms: CPTerms,
    ridge: float,
    *,
    rng: np.random.Generator,
    tries: int,
    goal: float,
    progress: SolveProgress | None,
) -> CPTerms:
    best = follow_path(core, terms, ridge, goal=goal, progress=progress)
    if before.rank == 0 or tries == 1:
        return best
    _mark(progress, Event.start)
    before = follow_path(core, before, ridge, progress=progress)
    for _ in range(tries - 1):
        if misfit(core, best) <= goal:
            break
        _mark(progress, Event.start)
        trial = follow_path(core, split_term(before, rng), ridge, goal=goal, progress=progress)
        best = min(best, trial, key=lambda terms: _objective(core, terms, ridge))
    return best


def follow_path(
    core: np.ndarray,
    terms: CPTerms,
    ridge: float,
    *,
    goal: float = 0.0,
    iterations: int = 60,
    progress: SolveProgress | None = None,
) -> CPTerms:
    """Follow the minimiser while the penalty falls to the asked α: Levenberg–Marquardt at each value of it."""
    guide = max(ridge, (GUIDE * misfit(core, terms)) ** 2)
    while guide > ridge:
        terms = refine(core, terms, guide, iterations=iterations // 3, rtol=1e-4, goal=goal, progress=progress)
        guide = max(ridge, guide * PATH_FACTOR)
    return refine(core, terms, ridge, iterations=iterations, goal=goal, progress=progress)


def _objective(core: np.ndarray, terms: CPTerms, ridge: float) -> float:
    return misfit(core, terms) ** 2 + ridge * float(np.sum(terms.weights**2))


def _mark(progress: SolveProgress | None, event: Event) -> None:
    if progress is not None:
        progress.mark(event)


def _leading_vectors(residual: np.ndarray) -> CPTerms:
    """The leading left singular vector of every unfolding, as one term."""
    columns = []
    for mode in range(residual.ndim):
        unfolded = np.moveaxis(residual, mode, 0).reshape(residual.shape[mode], -1)
        columns.append(np.linalg.eigh(unfolded @ unfolded.conj().T).eigenvectors[:, -1:])
    return CPTerms(np.ones(1), tuple(columns))
