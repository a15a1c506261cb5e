"""Terms from single entries: known ones alone, or with weights, and factors without negatives."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from lsrdecomp.arrays import as_double, is_complex, like, to_numpy
from lsrdecomp.errors import BudgetError
from lsrdecomp.solvers.cp.als import ALS
from lsrdecomp.solvers.cp.entrywise import FLOOR, MAX_UNKNOWNS, EntryFit, Numbers, balanced
from lsrdecomp.solvers.cp.mttkrp import assemble
from lsrdecomp.solvers.cp.tensor import no_terms, rearranged_tensor, refuse_gradients
from lsrdecomp.solvers.cp.terms import CPTerms
from lsrdecomp.solvers.matrix import MatrixProblem, MatrixSolver
from lsrdecomp.solvers.solver import Event, Solution, Status
from lsrdecomp.solvers.svd.dense import SVD
from lsrdecomp.targets.known_entries import KnownEntries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.solvers.iteration import SolveProgress

FIRST_RIDGE = 3.0
RIDGE_FALL = 0.8
LAST_RIDGE = 1e-6
"""The penalty on Σλ² of a tensor of norm one while entries are missing, sweep by sweep. Without it
a random start and few known entries lead into a poor minimum: of 44 exact sums of two factors with
6 to 50 % of their entries known two starts each found 26, of 32 of three and four factors 6; along
this path 41 and 21 (from 0.1: 32 and 16)."""

FIRST_SWEEPS = 50
"""Sweeps of each start, after which those with the smallest objectives are finished."""

FINISHED = 2

SMALL_GAIN = 1e-5
"""A sweep, or a Newton step, that lowers the objective by less than this share is the last."""


@dataclass(frozen=True, slots=True)
class WeightedALS(MatrixSolver):
    """Least squares over single entries, for two and more factors.

    Minimises Σ w·abs(M − M̂)² over the entries of a `KnownEntries` target, of which those of weight
    zero are missing, and keeps factors non-negative where that is asked: the nearest sum of
    non-negative Kronecker products, as Van Loan and Pitsianis pose it [1]_. From several random
    starts: alternating sweeps, exact in free factors and term by term (HALS) in non-negative ones,
    and then Levenberg–Marquardt steps on all factors together. While entries are missing the first
    sweeps have a penalty on λ that falls to nothing. The problem is not convex: more starts may
    find a smaller error.

    A matrix without missing entries and constraints goes to `SVD` or `ALS`.

    Parameters
    ----------
    non_negative : bool or tuple of int
        Whether entries of the factors, and with them of the sum, are not negative; or the indices
        of the factors that are not to be, those of 1×1 not counted. They are zero or more exactly,
        in the result too.
    starts : int
        Random starts, of which the best result counts; fewer where one is exact.
    max_sweeps : int
        Maximum Newton steps from the best two starts; with more than 2,000 unknowns, sweeps.
    seed : int

    References
    ----------
    .. [1] C. F. Van Loan and N. Pitsianis, Approximation with Kronecker products, in Linear
           Algebra for Large Scale and Real-Time Applications (1993), section 5.
           doi:10.1007/978-94-015-8196-7_17
    .. [2] E. Acar, D. M. Dunlavy, T. G. Kolda and M. Mørup, Scalable tensor factorizations for
           incomplete data, Chemom. Intell. Lab. Syst. 106 (2011).
           doi:10.1016/j.chemolab.2010.08.004

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import decompose
    >>> image = np.add.outer(np.arange(12.0), np.arange(12.0)) % 7
    >>> result = decompose(image, "4x4, 3x3", rank=3, solver=WeightedALS(non_negative=True))
    >>> bool(min(factor.min() for factor in result.factors) >= 0.0)
    True
    """

    non_negative: bool | tuple[int, ...] = False
    starts: int = 4
    max_sweeps: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("starts", "max_sweeps"):
            if getattr(self, name) < 1:
                raise BudgetError(f"{name} must be at least 1, got {getattr(self, name)}")

    def _solve(self, problem: MatrixProblem) -> Solution:
        """Find terms by least squares over single entries; the contract is `Solver.solve`.

        Returns
        -------
        Solution
            Terms that vanish are left out: of a matrix without a positive entry nothing remains.
            ``sweeps`` are the sweeps and accepted Newton steps of all starts; their γ is not
            computed (NaN). ``optimality_gap`` is None. ``status`` is `undetermined` where known
            entries are too few in places, and ``note`` names them.

        Raises
        ------
        BudgetError
            For a factor that is not there, and a complex matrix that is to be non-negative.

        Notes
        -----
        Cost: O(Π p_i · s²) a sweep where entries have weights, else O(Π p_i · s), and about
        (s Σ p_i)³ a Newton step.
        """
        target, shape, progress = problem.target, problem.shape, problem.progress
        bounded = self._bounded(shape)
        weights: NDArray[np.float64] | None = None
        if isinstance(target, KnownEntries):
            tensor, weights = target.tensors(shape)
        elif not any(bounded):
            return problem.delegate_to(SVD() if shape.order == 2 else ALS(seed=self.seed))
        else:
            tensor = rearranged_tensor(target, shape).to_tensor()
        refuse_gradients(tensor, shape)
        if any(bounded) and is_complex(tensor):
            raise BudgetError("non_negative is for real matrices; take M.real and M.imag")
        size = target.norm
        if weights is not None:
            # The largest weight is one, so that a ridge means the same for weights of any size.
            largest = float(weights.max())
            weights = weights / largest
            size = size / math.sqrt(largest)
        note = "" if weights is None else _undetermined(weights > 0.0, shape, 1)
        if size == 0.0:
            status = Status.rank_reached if problem.atol is None else Status.converged
            return self._solution(no_terms(tensor, shape), status, problem, note, error=0.0)
        fit = EntryFit(to_numpy(as_double(tensor)) / size, weights, bounded)
        rng = np.random.default_rng(self.seed)
        columns: list[Numbers] | None = None
        terms = problem.max_terms if problem.atol is None else 1
        while True:
            columns = self._best_of_starts(fit, terms, rng, columns, problem)
            approximation = _separated(columns, tensor, shape, size)
            if weights is not None:
                note = _undetermined(weights > 0.0, shape, terms)
            if problem.atol is None:
                return self._solution(approximation, Status.rank_reached, problem, note)
            error = target.residual_norm(approximation)
            if error <= problem.atol or terms == problem.max_terms:
                met = error <= problem.atol
                status = Status.converged if met else Status.rank_exhausted
                return self._solution(approximation, status, problem, note, error / target.norm)
            terms += 1
            progress.mark(Event.new_term)

    def _bounded(self, shape: KroneckerShape) -> tuple[bool, ...]:
        """Return which factors may have no negative entry."""
        if isinstance(self.non_negative, bool):
            return (self.non_negative,) * shape.order
        for index in self.non_negative:
            if index not in range(shape.order):
                raise BudgetError(
                    f"non_negative: no factor {index}; there are 0 to {shape.order - 1}"
                )
        return tuple(index in self.non_negative for index in range(shape.order))

    def _solution(
        self,
        approximation: Any,
        status: Status,
        problem: MatrixProblem,
        note: str,
        error: float | None = None,
    ) -> Solution:
        """Return the answer; entries that are not determined count more than an error that is."""
        if note and status.met:
            status = Status.undetermined
        sweeps = problem.progress.sweeps
        return Solution(approximation, status, sweeps, relative_error=error, note=note)

    def _best_of_starts(
        self,
        fit: EntryFit,
        terms: int,
        rng: np.random.Generator,
        fewer: list[Numbers] | None,
        problem: MatrixProblem,
    ) -> list[Numbers]:
        """Return the best columns from random starts, and from ``fewer`` terms with one more."""
        goal = max(problem.relative_goal or 0.0, FLOOR)
        progress = problem.progress
        # Starts 1: sweeps from every start; one that is exact is the answer.
        ends: list[tuple[float, list[Numbers]]] = []
        for number in range(self.starts):
            columns = _random_columns(fit, terms, rng)
            if number == 0 and fewer is not None:
                new = [column[:, :1] for column in columns]
                columns = [np.hstack(pair) for pair in zip(fewer, new, strict=True)]
            progress.mark(Event.start)
            end = self._swept(fit, _scaled(fit, columns), goal, progress)
            if end[0] <= goal**2:
                return end[1]
            ends.append(end)
        # Starts 2: Newton steps, or more sweeps, from the best of their ends.
        ends.sort(key=lambda end: end[0])
        finished: list[tuple[float, list[Numbers]]] = []
        for _, columns in ends[:FINISHED]:
            progress.mark(Event.start)
            finished.append(self._finished(fit, columns, goal, progress))
            if finished[-1][0] <= goal**2:
                break
        return min(finished, key=lambda end: end[0])[1]

    def _swept(
        self, fit: EntryFit, columns: list[Numbers], goal: float, progress: SolveProgress
    ) -> tuple[float, list[Numbers]]:
        """Return the objective and the columns that some sweeps come to.

        While entries are missing, under a falling penalty first.
        """
        objective = math.inf
        ridge = 0.0 if fit.weights is None else FIRST_RIDGE
        while ridge > LAST_RIDGE:
            columns = fit.swept(columns, ridge)
            objective = fit.objective(columns)
            progress.record(math.sqrt(objective), math.nan, None)
            if objective <= goal**2:
                return objective, columns
            ridge *= RIDGE_FALL
        sweeps = min(FIRST_SWEEPS, self.max_sweeps)
        return self._descended(fit.sweeps(columns), sweeps, objective, columns, goal, progress)

    def _finished(
        self, fit: EntryFit, columns: list[Numbers], goal: float, progress: SolveProgress
    ) -> tuple[float, list[Numbers]]:
        """Return the objective and the columns of a minimum near the end of a start."""
        is_small = sum(column.size for column in columns) <= MAX_UNKNOWNS
        steps = fit.newton_steps(columns) if is_small else fit.sweeps(columns)
        objective = fit.objective(columns)
        return self._descended(steps, self.max_sweeps, objective, columns, goal, progress)

    def _descended(
        self,
        steps: Iterator[tuple[list[Numbers], float]],
        count: int,
        objective: float,
        columns: list[Numbers],
        goal: float,
        progress: SolveProgress,
    ) -> tuple[float, list[Numbers]]:
        """Take so many steps, or fewer where the goal is met or the objective stands still."""
        for moved, lower in itertools.islice(steps, count):
            progress.record(math.sqrt(lower), math.nan, lower)
            is_still = lower > (1.0 - SMALL_GAIN) * objective
            columns, objective = moved, lower
            if is_still or objective <= goal**2:
                break
        return objective, columns


def _random_columns(fit: EntryFit, terms: int, rng: np.random.Generator) -> list[Numbers]:
    """Draw columns in random directions, without a negative entry where there may be none."""
    drawn = []
    for size, bounded in zip(fit.tensor.shape, fit.non_negative, strict=True):
        column: Numbers = rng.standard_normal((size, terms))
        if np.iscomplexobj(fit.tensor):
            column = column + 1j * rng.standard_normal((size, terms))
        drawn.append(np.abs(column) if bounded else column)
    return drawn


def _scaled(fit: EntryFit, columns: list[Numbers]) -> list[Numbers]:
    """Return columns whose sum is as large as fits the tensor best, in balance."""
    total = assemble(columns, np.ones(columns[0].shape[1]))
    weights = 1.0 if fit.weights is None else fit.weights
    square = float(np.sum(weights * np.abs(total) ** 2))
    overlap = float(np.real(np.sum(weights * fit.tensor * total.conj())))
    scale = abs(overlap) / square if square > 0.0 else 1.0
    # A sum that has nothing in common with the tensor would be a start of nothing.
    scale = max(scale, 1e-3 / math.sqrt(square)) if square > 0.0 else 1.0
    return balanced([columns[0] * scale, *columns[1:]])


def _separated(columns: list[Numbers], tensor: Any, shape: KroneckerShape, size: float) -> Any:
    """Return the matrix of columns, in the library of the tensor, without terms that vanished."""
    terms = CPTerms.of([like(column, tensor) for column in columns])
    kept = np.flatnonzero(to_numpy(terms.weights) > 0.0)
    if len(kept) < terms.rank:
        terms = CPTerms.of([like(column[:, kept], tensor) for column in columns])
    return terms.to_separated(shape, size) if terms.rank else no_terms(tensor, shape)


# -- what the known entries do not determine ------------------------------------------------------


def _undetermined(known: NDArray[np.bool_], shape: KroneckerShape, terms: int) -> str:
    """Return a sentence on entries of factors that the known entries do not determine, or ""."""
    parts = []
    for mode, (factor, count) in enumerate(zip(shape.factors, known.shape, strict=True)):
        others = tuple(axis for axis in range(known.ndim) if axis != mode)
        numbers = known.sum(axis=others)
        places = np.flatnonzero(numbers < terms)
        if len(places):
            named = ", ".join(
                f"{tuple(map(int, np.unravel_index(place, factor)))}" for place in places[:3]
            )
            more = f" and {len(places) - 3} more" if len(places) > 3 else ""
            parts.append(f"{len(places)} of {count} entries of factor {mode}: {named}{more}")
    if parts:
        return (
            f"Fewer known entries than terms ({terms}) determine {'; '.join(parts)}. What the sum "
            "says there is not known to be right, and zero where nothing is known."
        )
    groups = _groups(known)
    if groups > 1:
        return (
            f"The known entries fall into {groups} groups that have no entry of a factor in "
            "common: what the sum says outside of the groups is not determined."
        )
    return ""


def _groups(known: NDArray[np.bool_]) -> int:
    """Return into how many groups known entries fall that share no index of any mode."""
    places = np.nonzero(known)
    sizes = known.shape
    offsets = np.cumsum([0, *sizes[:-1]])
    first = np.tile(places[0], len(sizes) - 1)
    others = np.concatenate([places[m] + offsets[m] for m in range(1, len(sizes))])
    count = int(sum(sizes))
    links = coo_array((np.ones(len(first), dtype=np.int8), (first, others)), shape=(count, count))
    return int(connected_components(links, directed=False, return_labels=False))
