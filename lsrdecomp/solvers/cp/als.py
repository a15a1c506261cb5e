"""Any number of factors: alternating least squares on a compressed core, its penalty tied to the storage precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import Array, as_double, dtype_name, like, namespace, real_part, to_numpy
from lsrdecomp.errors import BudgetError, ShapeError
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.base import Event, Solution, Status
from lsrdecomp.solvers.cp.hosvd import Compressed, compress
from lsrdecomp.solvers.cp.incremental import ROUNDING, CoreFit, empty_terms
from lsrdecomp.solvers.cp.regularized import alternate, storage_ridge
from lsrdecomp.solvers.cp.tensor import no_terms, rearranged_tensor, refuse_gradients
from lsrdecomp.solvers.cp.terms import CPTerms, fewest_terms
from lsrdecomp.solvers.matrix import MatrixProblem, MatrixSolver, without_unit_factors

if TYPE_CHECKING:
    from lsrdecomp.kronecker.separated import SeparatedMatrix
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.solvers.progress import SolveProgress

FIRST_RANK = 8
"""With a tolerance the core is first made for this many terms; twice as many each time that loses
too much."""
NEGLIGIBLE = 1e-3
"""A core that lost less than this fraction of the error is not improved by sweeps over the whole
tensor."""
LOSS_SHARE = 0.5
"""A core may lose this share of the allowed error; a larger loss means that more terms will be
needed."""
ROUNDINGS = 16.0
"""Unit roundoffs of the tensor's type below which the loss of a core cannot be told from
rounding."""
FLAT = 0.5
"""A core of 2s directions that loses more of the norm than this holds little of what s terms could:
it is noise."""
LARGEST_FLAT = 2**20
"""Most entries of a tensor that is swept as a whole from several starts where its core loses that
much."""
CANCELLING = 10.0
"""A γ above this is worth a warning when the stored error may miss the tolerance."""


@dataclass(frozen=True, slots=True)
class ALS(MatrixSolver):
    """Regularized alternating least squares for two and more factors [1]_.

    Minimises ‖M − M̂‖² + α‖M‖² Σ(λ_k/‖M‖)². With α = (0.42·√d·μ)² of the storage type that is the
    expected square error *after* rounding; without it γ may grow without bound, since a best
    approximation need not exist [2]_. The steps: compress to a core of 2s directions a mode; add
    terms one by one from the residual; Levenberg–Marquardt along falling α; a few sweeps over the
    whole tensor. Where the core loses half the norm the matrix is noise to so few terms, and sweeps
    over the whole from several starts do better. See docs/als.md.

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
    full_sweeps : int
        Most sweeps over the whole tensor at the end.
    max_sweeps : int
        Most sweeps and Newton steps altogether.
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
    >>> from lsrdecomp.targets.base import Dense
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
    full_sweeps: int = 4
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

    def alpha(self, order: int, goal: float = 0.0) -> float:
        """α for a matrix of norm one with ``order`` factors and an allowed error of ``goal``."""
        if self.ridge is not None:
            return self.ridge
        rounding = storage_ridge(self.storage or "float32", order)
        return min(rounding, goal**2) if self.storage is None and goal > 0.0 else rounding

    def _solve(self, problem: MatrixProblem) -> Solution:
        """Terms by regularized alternating least squares; the contract is `Solver.solve`.

        Unlike ``tensorly.decomposition.parafac`` it penalises λ and not the factors, so that γ
        stays what the storage can bear; it adds terms one by one from the residual, where `parafac`
        starts all at once; and its error is measured from residual entries. The penalty costs
        accuracy: the last digits of an exact fit need ``storage="float64"``.

        Returns
        -------
        Solution
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
        target, shape, atol, most = problem.target, problem.shape, problem.atol, problem.max_terms
        packed_target, size = rearranged_tensor(target, shape), target.norm
        tensor = packed_target.core
        refuse_gradients(tensor, shape)
        progress = problem.progress
        progress.max_sweeps = self.max_sweeps
        exact = Status.rank_reached if atol is None else Status.converged
        if size == 0.0:
            return Solution(no_terms(packed_target.core, shape), exact, relative_error=0.0)
        tensor, goal = tensor / size, problem.relative_goal or 0.0

        def matrix_of(terms: CPTerms) -> SeparatedMatrix:
            return CPTerms(terms.weights, packed_target.expand(terms.columns)).to_separated(
                shape, size
            )

        fibres = CPTerms.number_of_fibres(tensor)  # as many terms are exact
        enough = fibres == 1 or (atol is None and most >= fibres)
        needed = (
            atol is not None
            and fibres <= min(most, max(tensor.shape))
            and fewest_terms(tensor, goal) == fibres
        )
        if enough or needed:
            progress.record(0.0)
            return Solution(matrix_of(CPTerms.fibres(tensor)), exact, progress.sweeps)
        terms, inner, limit = (
            self._start(packed_target, shape, size, most),
            goal,
            min(most, fibres - 1),
        )
        while True:
            terms = self._fit(tensor, terms, limit, inner, progress)
            approximation = matrix_of(terms)
            if atol is None:
                return Solution(approximation, exact, progress.sweeps)
            error = target.residual_norm(approximation)
            if (
                error <= atol
                or terms.rank >= limit
                or progress.exhausted
                or inner < unit_roundoff("float64")
            ):
                break
            inner *= 0.5  # the core thought the goal met; the whole matrix did not
        if error > atol and fibres <= most and not progress.exhausted:
            expansion = matrix_of(CPTerms.fibres(tensor))
            rounding = target.residual_norm(expansion)
            if rounding <= atol:
                approximation, error = expansion, rounding
        status = self._status(error <= atol, approximation, goal, limit, progress)
        return Solution(approximation, status, progress.sweeps, relative_error=error / size)

    def _start(
        self, packed_target: Compressed, shape: KroneckerShape, size: float, most: int
    ) -> CPTerms | None:
        """The terms of ``init`` for ‖T‖ = 1."""
        if self.init is None:
            return None
        if self.init.kronecker_shape.essential != shape:
            raise ShapeError(
                f"init has the shape {self.init.kronecker_shape}, but the factors are {shape}"
            )
        if not 0 < self.init.separation_rank <= most:
            return None
        init = without_unit_factors(self.init)
        xp = namespace(packed_target.core)
        flat = [
            xp.matrix_transpose(
                xp.reshape(
                    like(to_numpy(f), packed_target.core), (f.shape[0], f.shape[1] * f.shape[2])
                )
            )
            for f in init.factors
        ]
        columns = packed_target.restrict(flat)
        weights = like(to_numpy(init.weights) / size, packed_target.core)
        return CPTerms.of((columns[0] * weights, *columns[1:]))

    def _fit(
        self, tensor: Array, start: CPTerms | None, most: int, goal: float, progress: SolveProgress
    ) -> CPTerms:
        """Compress, fit the core, sweep over the whole: terms for ‖T‖ = 1."""
        rounding, ridge = (
            ROUNDINGS * unit_roundoff(dtype_name(tensor)),
            self.alpha(tensor.ndim, goal),
        )
        # ALS 1: a core of at most 2s directions a mode, made larger while it loses too much of the
        # allowed error.
        cap = min(most, max(FIRST_RANK, start.rank if start else 0)) if goal > 0.0 else most
        while True:
            negligible = (
                max(NEGLIGIBLE * goal, unit_roundoff(dtype_name(tensor))) if goal > 0.0 else 0.0
            )
            packed = compress(tensor, [2 * cap] * tensor.ndim, self.seed, atol=negligible)
            if packed.lost <= max(LOSS_SHARE * goal, rounding) or cap >= most:
                break
            cap = min(most, 2 * cap)
        flat = goal == 0.0 and packed.lost > FLAT and math.prod(tensor.shape) <= LARGEST_FLAT
        if flat:
            packed = Compressed(tensor, (None,) * tensor.ndim)
        core = to_numpy(as_double(packed.core))
        # ALS 2: terms one by one on the core, from where an earlier core has come to; noise by
        # sweeps alone.
        progress.mark(Event.start)
        start_terms = empty_terms(core) if start is None else _restricted(packed, start)
        left = math.sqrt(max(goal**2 - packed.lost**2, 0.0)) if packed.lost > rounding else goal
        fit = CoreFit(
            core=core,
            ridge=ridge,
            rng=np.random.default_rng(self.seed),
            sweeps=self.core_sweeps,
            initializations=self.initializations,
            goal=max(left, ROUNDING),
            progress=progress,
        )
        terms = fit.by_sweeps(start_terms, most) if flat else fit.grown(start_terms, most)
        # ALS 3: back to the whole tensor; where the goal is not met, a few sweeps over it take back
        # what the core lost.
        columns = packed.expand([like(c, tensor) for c in terms.columns])
        whole = CPTerms(real_part(like(terms.weights, tensor)), columns)
        error = fit.misfit(terms)
        if (
            math.hypot(packed.lost, error) > goal
            and packed.lost > NEGLIGIBLE * error
            and self.full_sweeps > 0
        ):
            progress.mark(Event.start)
            whole = alternate(
                tensor, whole, ridge, sweeps=self.full_sweeps, rtol=1e-4, progress=progress
            )
        return whole

    def _status(
        self,
        met: bool,
        approximation: SeparatedMatrix,
        goal: float,
        most: int,
        progress: SolveProgress,
    ) -> Status:
        condition = approximation.condition
        if met:
            lost_to_rounding = (
                condition > CANCELLING
                and condition * unit_roundoff(self.storage or "float64") > goal
            )
            return Status.ill_conditioned if lost_to_rounding else Status.converged
        if approximation.separation_rank >= most:
            return Status.rank_exhausted
        return Status.sweep_limit if progress.exhausted else Status.stalled


def _restricted(packed: Compressed, terms: CPTerms) -> CPTerms:
    """Terms of the whole tensor as terms of a core."""
    first, *rest = (to_numpy(as_double(c)) for c in packed.restrict(terms.columns))
    return CPTerms.of([first * to_numpy(as_double(terms.weights)), *rest])
