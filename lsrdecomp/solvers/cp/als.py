"""Any number of factors: alternating least squares, its penalty tied to the storage type."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import Array, as_double, dtype_name, like, namespace, real_part, to_numpy
from lsrdecomp.errors import BudgetError, ShapeError
from lsrdecomp.precision import LARGE_CONDITION, unit_roundoff
from lsrdecomp.solvers.cp.hosvd import CompressedTensor, compress
from lsrdecomp.solvers.cp.incremental import ROUNDING, CoreFit, empty_terms
from lsrdecomp.solvers.cp.regularized import alternate, storage_ridge
from lsrdecomp.solvers.cp.symmetry import asks_for_symmetry, is_symmetric, symmetrised
from lsrdecomp.solvers.cp.tensor import no_terms, rearranged_tensor, refuse_gradients
from lsrdecomp.solvers.cp.terms import CPTerms, min_number_of_terms
from lsrdecomp.solvers.matrix import MatrixProblem, MatrixSolver, without_unit_factors
from lsrdecomp.solvers.solver import Event, Solution, Status

if TYPE_CHECKING:
    from lsrdecomp.kronecker.separated import SeparatedMatrix
    from lsrdecomp.solvers.iteration import SolveProgress

NEGLIGIBLE_LOSS = 1e-3
"""Share of the error below which what a core loses is not seen in it. By hand."""


@dataclass(frozen=True, slots=True)
class ALS(MatrixSolver):
    """Regularized alternating least squares for two and more factors [1]_.

    Minimises ‖M − M̂‖² + α‖M‖² Σ(λ_k/‖M‖)². With α = (0.42·√d·μ)² of the storage type that is the
    expected square error *after* rounding; without it γ may grow without bound, since a best
    approximation need not exist [2]_. The steps: compress to a core of 2s directions a mode; add
    terms one by one from the residual; Levenberg–Marquardt along falling α; a few sweeps over the
    whole tensor. Where the core loses half the norm the matrix is noise to so few terms, and sweeps
    over the whole from several starts do better. Of a real symmetric matrix in square factors the
    answer is symmetric too, to rounding, unless that would cost more than a thousandth of the
    error: one term of A ⊗ B ⊗ C + Aᵀ ⊗ Bᵀ ⊗ Cᵀ is the nearer one. See docs/reference/als.md.

    Parameters
    ----------
    storage : str, optional
        Element type the factors will be stored in; sets α. Absent, nothing is rounded: α is that of
        float32, or the square of a tolerance finer than that.
    ridge : float, optional
        α itself, for a matrix of norm one, instead.
    initializations : int
        Fits to choose the last one from: one grown from the residual, the others with a term split
        in two; of noise each is grown anew from other random terms.
    core_sweeps : int
        Alternating sweeps over the core after each new term.
    max_sweeps : int
        Maximum sweeps and Newton steps altogether.
    seed : int
    init : SeparatedMatrix, optional
        Terms to start from, of the shape that is solved for, for instance of an earlier result:
        they are fitted as they are, and terms are added to them. Absent, and where they are more
        than ``rank``, the fit starts from nothing.

    References
    ----------
    .. [1] G. Beylkin and M. J. Mohlenkamp, Algorithms for numerical analysis in high dimensions,
       SIAM J. Sci. Comput. 26 (2005). doi:10.1137/040604959
    .. [2] V. de Silva and L.-H. Lim, Tensor rank and the ill-posedness of the best low-rank
       approximation problem, SIAM J. Matrix Anal. Appl. 30 (2008). doi:10.1137/06066518X

    Examples
    --------
    >>> from lsrdecomp.kronecker.shape import KroneckerShape
    >>> import numpy as np
    >>> from lsrdecomp.targets.target import Dense
    >>> i = np.arange(64.0)
    >>> hilbert = Dense(1.0 / (1.0 + i[:, None] + i[None, :]))
    >>> solution = ALS().solve(hilbert, KroneckerShape(((4, 4), (4, 4), (4, 4))), rank=6)
    >>> hilbert.residual_norm(solution.approximation) < 2e-3 * hilbert.norm
    True
    """

    storage: str | None = None
    ridge: float | None = None
    initializations: int = 3
    core_sweeps: int = 20
    max_sweeps: int = 5000
    seed: int = 0
    init: SeparatedMatrix | None = None

    def __post_init__(self) -> None:
        unit_roundoff(self.storage or "float64")
        if self.ridge is not None and not (math.isfinite(self.ridge) and self.ridge >= 0.0):
            raise BudgetError(
                f"ridge: the penalty on λ must be finite and not negative, got {self.ridge}"
            )
        for name in ("initializations", "core_sweeps", "max_sweeps"):
            if getattr(self, name) < 1:
                raise BudgetError(f"{name} must be at least 1, got {getattr(self, name)}")

    def alpha(self, order: int, goal: float) -> float:
        """Return α for a matrix of norm one, ``order`` factors and an allowed error of ``goal``."""
        if self.ridge is not None:
            return self.ridge
        rounding = storage_ridge(self.storage or "float32", order)
        if self.storage is None and goal > 0.0:
            return min(rounding, goal**2)
        return rounding

    def _solve(self, problem: MatrixProblem) -> Solution:
        """Find terms by regularized alternating least squares; the contract is `Solver.solve`.

        Unlike ``tensorly.decomposition.parafac`` it penalises λ and not the factors, so that γ
        stays what the storage can bear; it adds terms one by one from the residual, where `parafac`
        starts all at once; and its error is measured from residual entries. The penalty costs
        accuracy: the last digits of an exact fit need ``storage="float64"``.

        Returns
        -------
        Solution
            In the type of the target, or in double precision where ``atol`` is finer than it.
            ``relative_error`` is measured where ``atol`` is given. ``sweeps`` are the alternating
            sweeps and accepted Newton steps; ``objective`` is ‖M − M̂‖² + αΣλ² for ‖M‖ = 1, of the
            core until it is swept as a whole. ``optimality_gap`` is None: the problem is not
            convex, and nothing is known of the optimum. ``status`` may be `ill_conditioned` where
            γ·μ of the storage exceeds the tolerance that was met, `stalled` or `sweep_limit` where
            it was not.

        Notes
        -----
        Cost: about 8·(2s)·Πp_i operations to make the core, then sweeps and Newton steps on (2s)^d
        entries.
        """
        solution = self._fitted(problem)
        if not asks_for_symmetry(problem.target, problem.shape):
            return solution
        return self._symmetric(problem, solution)

    def _symmetric(self, problem: MatrixProblem, solution: Solution) -> Solution:
        """Return a symmetric solution of as many terms, unless its error is larger.

        It may be larger by a thousandth, as two factors may be over their optimum, or up to the
        tolerance that was asked.

        The terms are made symmetric and fitted again, which keeps them so. An answer that is
        symmetric already, and one of which no symmetric sum comes near, are returned as they are.
        """
        found = solution.approximation
        target, progress = problem.target, problem.progress
        terms = found.separation_rank
        if terms == 0 or progress.exhausted or is_symmetric(found):
            return solution
        error = target.residual_norm(found)
        solver = replace(self, init=symmetrised(found))
        refit = solver._fitted(replace(problem, rank=terms, max_terms=terms))
        symmetric = symmetrised(refit.approximation)
        symmetric_error = target.residual_norm(symmetric)
        limit = error * (1.0 + 1e-3)
        if problem.atol is not None and error <= problem.atol:
            limit = problem.atol
        if symmetric_error > limit:
            return replace(solution, sweeps=progress.sweeps)
        relative_error = symmetric_error / target.norm
        return replace(
            solution,
            approximation=symmetric,
            relative_error=relative_error,
            sweeps=progress.sweeps,
        )

    def _fitted(self, problem: MatrixProblem) -> Solution:
        """Fit terms to a matrix, symmetric or not."""
        target, shape, progress = problem.target, problem.shape, problem.progress
        atol = problem.atol
        rearranged = rearranged_tensor(target, shape)
        if atol is not None and self._is_below_rounding(rearranged.core, problem):
            rearranged = rearranged.in_double()
        size = target.norm
        refuse_gradients(rearranged.core, shape)
        progress.max_sweeps = self.max_sweeps
        success = Status.rank_reached if atol is None else Status.converged
        if size == 0.0:
            return Solution(no_terms(rearranged.core, shape), success, relative_error=0.0)
        tensor = rearranged.core / size
        goal = problem.relative_goal or 0.0

        def matrix_of(terms: CPTerms) -> SeparatedMatrix:
            terms = terms.merged()
            expanded = CPTerms(terms.weights, rearranged.expand(terms.columns))
            return expanded.to_separated(shape, size)

        # Solve 1: one term a fibre is exact; it is the answer where fewer terms cannot be.
        n_fibres = CPTerms.number_of_fibres(tensor)
        if self._needs_all_fibres(tensor, n_fibres, problem):
            progress.record(0.0)
            return Solution(matrix_of(CPTerms.fibres(tensor)), success, progress.sweeps)
        # Solve 2: terms fitted to a core; with a tolerance again and again, to half the misfit each
        # time, while the core meets its goal and the whole matrix does not.
        terms = self._initial_terms(rearranged, problem, size)
        max_terms = min(problem.max_terms, n_fibres - 1)
        max_short_rank = math.prod(shape.sizes) // sum(shape.sizes)
        core_goal = goal
        while True:
            terms = self._fit(tensor, terms, max_terms, max_short_rank, core_goal, progress)
            approximation = matrix_of(terms)
            if atol is None:
                return Solution(approximation, success, progress.sweeps)
            error = target.residual_norm(approximation)
            is_spent = terms.rank >= max_terms or progress.exhausted
            if error <= atol or is_spent or core_goal < unit_roundoff("float64"):
                break
            core_goal *= 0.5
        # Solve 3: where no fit met the tolerance, the fibres do, if so many terms are allowed.
        if error > atol and n_fibres <= problem.max_terms and not progress.exhausted:
            expansion = matrix_of(CPTerms.fibres(tensor))
            expansion_error = target.residual_norm(expansion)
            if expansion_error <= atol:
                approximation = expansion
                error = expansion_error
        status = self._status(error <= atol, approximation, goal, max_terms, progress)
        return Solution(approximation, status, progress.sweeps, relative_error=error / size)

    def _is_below_rounding(self, tensor: Array, problem: MatrixProblem) -> bool:
        """Return whether terms in the type of a tensor would be rounded by more than the goal."""
        rounding = 64.0 * unit_roundoff(dtype_name(tensor))
        return (problem.relative_goal or 0.0) < rounding

    def _needs_all_fibres(self, tensor: Array, n_fibres: int, problem: MatrixProblem) -> bool:
        """Return whether the request takes one term for each fibre of a tensor of norm one."""
        if n_fibres == 1:
            return True
        if problem.relative_goal is None:
            return problem.max_terms >= n_fibres
        if n_fibres > min(problem.max_terms, max(tensor.shape)):
            return False
        return min_number_of_terms(tensor, problem.relative_goal) == n_fibres

    def _initial_terms(
        self, rearranged: CompressedTensor, problem: MatrixProblem, size: float
    ) -> CPTerms | None:
        """Return the terms of ``init`` for a tensor of norm one, None where they are not used."""
        if self.init is None:
            return None
        if self.init.kronecker_shape.essential != problem.shape:
            raise ShapeError(
                f"init has the shape {self.init.kronecker_shape}, but the factors are "
                f"{problem.shape}"
            )
        if not 0 < self.init.separation_rank <= problem.max_terms:
            return None
        init = without_unit_factors(self.init)
        xp = namespace(rearranged.core)
        flat = []
        for factor in init.factors:
            s, m, n = factor.shape
            rows = xp.reshape(like(to_numpy(factor), rearranged.core), (s, m * n))
            flat.append(xp.matrix_transpose(rows))
        columns = rearranged.restrict(flat)
        weights = like(to_numpy(init.weights) / size, rearranged.core)
        return CPTerms.of((columns[0] * weights, *columns[1:]))

    def _fit(
        self,
        tensor: Array,
        start: CPTerms | None,
        max_terms: int,
        max_short_rank: int,
        goal: float,
        progress: SolveProgress,
    ) -> CPTerms:
        """Compress a tensor of norm one, fit its core, and sweep over the whole."""
        # A core's loss below this cannot be told from rounding.
        rounding = 16.0 * unit_roundoff(dtype_name(tensor))
        ridge = self.alpha(tensor.ndim, goal)
        # ALS 1: a core of at most 2s directions a mode, made larger while it loses too much of the
        # allowed error.
        packed = self._compressed(tensor, start, max_terms, goal, rounding)
        # A core of 2s directions that loses half the norm holds little of what s terms could: the
        # tensor is noise, swept as a whole from several starts. On noise in three factors that
        # reached 0.9468 where the core led to 0.948 and six starts of peers to 0.947.
        is_small = math.prod(tensor.shape) <= 2**20
        is_flat = goal == 0.0 and packed.loss > 0.5 and is_small
        if is_flat:
            packed = CompressedTensor(tensor, (None,) * tensor.ndim)
        # ALS 2: terms one by one on the core, from the terms of an earlier core; noise by sweeps
        # alone.
        core = to_numpy(as_double(packed.core))
        progress.mark(Event.start)
        initial = empty_terms(core) if start is None else _restricted(packed, start)
        core_goal = goal
        if packed.loss > rounding:
            core_goal = math.sqrt(max(goal**2 - packed.loss**2, 0.0))
        fit = CoreFit(
            core=core,
            ridge=ridge,
            rng=np.random.default_rng(self.seed),
            sweeps=self.core_sweeps,
            initializations=self.initializations,
            goal=max(core_goal, ROUNDING),
            max_short_rank=max_short_rank,
            progress=progress,
        )
        terms = fit.by_sweeps(initial, max_terms) if is_flat else fit.grown(initial, max_terms)
        # ALS 3: back to the whole tensor; where the goal is not met, a few sweeps over it take back
        # what the core lost.
        columns = packed.expand([like(column, tensor) for column in terms.columns])
        expanded = CPTerms(real_part(like(terms.weights, tensor)), columns)
        misfit = fit.misfit(terms)
        is_missed = math.hypot(packed.loss, misfit) > goal
        is_loss_visible = packed.loss > NEGLIGIBLE_LOSS * misfit
        if is_missed and is_loss_visible:
            progress.mark(Event.start)
            expanded = alternate(tensor, expanded, ridge, sweeps=4, rtol=1e-4, progress=progress)
        return expanded

    def _compressed(
        self, tensor: Array, start: CPTerms | None, max_terms: int, goal: float, rounding: float
    ) -> CompressedTensor:
        """Compress to a core for as many terms as the goal seems to need; for all without one."""
        rank = max_terms
        atol = 0.0
        if goal > 0.0:
            # A core for eight terms first; for twice as many each time that it loses too much.
            initial_rank = max(8, start.rank if start else 0)
            rank = min(max_terms, initial_rank)
            atol = max(NEGLIGIBLE_LOSS * goal, unit_roundoff(dtype_name(tensor)))
        # A core that loses more than half the error means that more terms will be needed.
        max_loss = max(0.5 * goal, rounding)
        while True:
            packed = compress(tensor, [2 * rank] * tensor.ndim, self.seed, atol=atol)
            if packed.loss <= max_loss or rank >= max_terms:
                return packed
            rank = min(max_terms, 2 * rank)

    def _status(
        self,
        met: bool,
        approximation: SeparatedMatrix,
        goal: float,
        max_terms: int,
        progress: SolveProgress,
    ) -> Status:
        if met:
            condition = approximation.condition
            rounding = condition * unit_roundoff(self.storage or "float64")
            is_lost_to_rounding = condition > LARGE_CONDITION and rounding > goal
            return Status.ill_conditioned if is_lost_to_rounding else Status.converged
        if approximation.separation_rank >= max_terms:
            return Status.rank_exhausted
        return Status.sweep_limit if progress.exhausted else Status.stalled


def _restricted(packed: CompressedTensor, terms: CPTerms) -> CPTerms:
    """Project terms of the whole tensor on a core's bases."""
    first, *others = (to_numpy(as_double(c)) for c in packed.restrict(terms.columns))
    return CPTerms.of([first * to_numpy(as_double(terms.weights)), *others])
