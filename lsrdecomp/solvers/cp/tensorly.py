"""TensorLy's CP decompositions as a solver: sparse, smooth and monotone factors."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import as_double, is_complex, like, to_numpy
from lsrdecomp.errors import BudgetError, ConvergenceError, ConvergenceWarning
from lsrdecomp.solvers.cp.hosvd import CompressedTensor
from lsrdecomp.solvers.cp.tensor import no_terms, rearranged_tensor, refuse_gradients
from lsrdecomp.solvers.cp.terms import CPTerms
from lsrdecomp.solvers.matrix import MatrixProblem, MatrixSolver
from lsrdecomp.solvers.solver import Event, Solution, Status
from lsrdecomp.solvers.svd.dense import SVD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lsrdecomp.solvers.iteration import SolveProgress

CONSTRAINTS = ("l1_reg", "smoothness", "monotonicity")
"""Fields that TensorLy's ``constrained_parafac`` reads, under its own names."""

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TensorLyCP(MatrixSolver):
    """TensorLy's CP decompositions of the rearranged matrix, in NumPy and double precision [1]_.

    Without a constraint this is ``parafac``; with one it is ``constrained_parafac``, alternating
    optimization by ADMM. It may stop while its error still falls, since it looks at how well the
    constraints are kept first [2]_; a `ConvergenceWarning` then says so. Missing entries and
    non-negative factors are for `WeightedALS`.

    A constraint is a value for all factors, or a mapping of the index of a factor to its value, so
    that other factors are free; TensorLy allows one constraint a factor.

    Parameters
    ----------
    max_sweeps : int
    tol : float
        Stops when the relative error changes by less; TensorLy's error comes from the expanded
        form.
    init : str
        ``"svd"`` or ``"random"``.
    l2_reg : float
        Ridge on the factors (not on λ). Not together with a constraint.
    seed : int
    l1_reg : float or mapping of int to float, optional
        Weight of the sum of magnitudes of a factor's entries, which makes some of them zero. The
        scale moves to factors that are free of it, and TensorLy often ends in a singular system.
    smoothness : float or mapping of int to float, optional
        Weight of the squared differences of neighbouring entries of a factor, row by row. Of use
        for factors of one row or column.
    monotonicity : bool or mapping of int to bool, optional
        Entries of a factor increase, row by row.

    References
    ----------
    .. [1] J. Kossaifi, Y. Panagakis, A. Anandkumar and M. Pantic, TensorLy: tensor learning in
           Python, JMLR 20 (2019).
    .. [2] https://github.com/tensorly/tensorly/issues/623

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import decompose
    >>> matrix = np.kron(np.kron(np.eye(4), np.ones((3, 3))), np.eye(2))
    >>> result = decompose(matrix, "4x4, 3x3, 2x2", rank=1, solver=TensorLyCP())
    >>> result.parameters, round(result.relative_error, 9)
    (29, 0.0)
    """

    max_sweeps: int = 500
    tol: float = 1e-8
    init: str = "svd"
    l2_reg: float = 0.0
    seed: int = 0
    l1_reg: float | Mapping[int, float] | None = field(default=None, hash=False)
    smoothness: float | Mapping[int, float] | None = field(default=None, hash=False)
    monotonicity: bool | Mapping[int, bool] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.l2_reg and self._constraints:
            others = " and ".join(self._constraints)
            raise BudgetError(f"TensorLy takes no l2_reg together with {others}; leave one of them")

    @property
    def _constraints(self) -> dict[str, Any]:
        """The constraints that are asked for, by TensorLy's names."""
        values = {name: getattr(self, name) for name in CONSTRAINTS}
        return {name: value for name, value in values.items() if value not in (None, False)}

    def _solve(self, problem: MatrixProblem) -> Solution:
        """Find terms by TensorLy; the contract is `Solver.solve`.

        With ``atol`` it is called anew with one term more until the measured error is small enough:
        TensorLy's own stopping rule looks at the change of the error alone. Of two factors, those
        of 1×1 not counted, `SVD` is taken where nothing is constrained or missing: there `parafac`
        meets singular systems.

        Returns
        -------
        Solution
            ``sweeps`` are TensorLy's, whose errors come from the expanded form and see nothing
            below 1e-8; their γ is not computed (NaN). ``optimality_gap`` is None.
            ``relative_error`` is measured where ``atol`` is given.

        Raises
        ------
        BudgetError
            For a constraint on a factor that is not there, or twice on one factor.
        ConvergenceError
            Where TensorLy meets a singular system.
        """
        target, shape, progress = problem.target, problem.shape, problem.progress
        atol = problem.atol
        if shape.order == 2 and not self._constraints and not self.l2_reg:
            return problem.delegate_to(SVD())
        rearranged = self._whole_tensor(problem)
        refuse_gradients(rearranged.core, shape)
        self._check_constraints(shape.order, rearranged.core)
        size = target.norm
        if size == 0.0:
            status = Status.rank_reached if atol is None else Status.converged
            return Solution(no_terms(rearranged.core, shape), status, relative_error=0.0)
        tensor = to_numpy(as_double(rearranged.core)) / size
        terms = problem.max_terms if atol is None else 1
        while True:
            columns = self._columns(tensor, terms, progress)
            columns = [like(column, rearranged.core) for column in columns]
            expanded = CPTerms.of(rearranged.expand(columns))
            approximation = expanded.to_separated(shape, size)
            if atol is None:
                return Solution(approximation, Status.rank_reached, progress.sweeps)
            error = target.residual_norm(approximation)
            if error <= atol or terms == problem.max_terms:
                status = Status.converged if error <= atol else Status.rank_exhausted
                return Solution(approximation, status, progress.sweeps, relative_error=error / size)
            terms += 1
            progress.mark(Event.new_term)

    def _whole_tensor(self, problem: MatrixProblem) -> CompressedTensor:
        """Return R(M) with one axis a factor; whole where factors are constrained.

        In the bases of a small core other numbers would be sparse, or increase.
        """
        rearranged = rearranged_tensor(problem.target, problem.shape)
        if not self._constraints:
            return rearranged
        whole = rearranged.to_tensor()
        return CompressedTensor(whole, (None,) * problem.shape.order)

    def _check_constraints(self, order: int, tensor: Any) -> None:
        """Raise `BudgetError` for constraints that TensorLy cannot keep on this tensor."""
        constraints = self._constraints
        if constraints and is_complex(tensor):
            names = " and ".join(constraints)
            raise BudgetError(f"{names}: constraints are for real matrices; take M.real and M.imag")
        constrained_by: dict[int, str] = {}
        for name, value in constraints.items():
            factors = value if hasattr(value, "keys") else range(order)
            for index in factors:
                if index not in range(order):
                    raise BudgetError(f"{name}: no factor {index}; there are 0 to {order - 1}")
                if index in constrained_by:
                    other = constrained_by[index]
                    raise BudgetError(
                        f"factor {index} has {other} and {name}: TensorLy takes one constraint a "
                        f"factor, such as {name}={{{index}: …}} with {other} on others"
                    )
                constrained_by[index] = name

    def _columns(self, tensor: Doubles, rank: int, progress: SolveProgress) -> list[Doubles]:
        """Return factors of the tensor, the first multiplied by the weights."""
        way_out = "use ALS"
        if self._constraints:
            way_out = "ask for fewer terms, or give the constraint a smaller weight"
        try:
            # A factor of zeros, to which a large penalty leads, is divided by its length.
            with np.errstate(divide="ignore", invalid="ignore"):
                if self._constraints:
                    weights, factors = self._constrained(tensor, rank, progress)
                else:
                    weights, factors = self._unconstrained(tensor, rank, progress)
        except np.linalg.LinAlgError as singular:
            raise ConvergenceError(
                f"TensorLy met a singular system with {rank} terms; {way_out}"
            ) from singular
        return [factors[0] * weights, *factors[1:]]

    def _unconstrained(self, tensor: Doubles, rank: int, progress: SolveProgress) -> Any:
        from tensorly.decomposition import parafac

        is_monotone = self.l2_reg == 0.0

        def record(_: Any, error: Any) -> None:
            objective = float(error) ** 2 if is_monotone else None
            progress.record(float(error), math.nan, objective)  # γ: not known

        return parafac(
            tensor,
            rank,
            n_iter_max=self.max_sweeps,
            tol=self.tol,
            init=self.init,
            l2_reg=self.l2_reg,
            random_state=self.seed,
            normalize_factors=True,
            callback=record,
        )

    def _constrained(self, tensor: Doubles, rank: int, progress: SolveProgress) -> Any:
        from tensorly.decomposition import constrained_parafac

        decomposed, errors = constrained_parafac(
            tensor,
            rank,
            n_iter_max=self.max_sweeps,
            tol_outer=self.tol,
            init=self.init,
            random_state=self.seed,
            return_errors=True,
            **self._constraints,
        )
        _record(errors, progress)
        self._warn_if_still_falling(errors)
        return decomposed

    def _warn_if_still_falling(self, errors: Sequence[Any]) -> None:
        """Warn where TensorLy stopped although its error fell by more than ``tol``."""
        if len(errors) < 2 or len(errors) >= self.max_sweeps:
            return
        fall = float(errors[-2]) - float(errors[-1])
        # Below 1e-6 TensorLy's errors are rounding of their expanded form.
        if fall >= max(self.tol, 1e-3 * float(errors[-2])) and errors[-2] > 1e-6:
            names = " and ".join(self._constraints)
            message = (
                f"TensorLy stopped after {len(errors)} sweeps with {names} kept, while its error "
                f"still fell by {fall:.1e} a sweep: another init= or seed= may come nearer"
            )
            warnings.warn(message, ConvergenceWarning, stacklevel=2)


def _record(errors: Any, progress: SolveProgress) -> None:
    """Record the errors that TensorLy returned, one a sweep; its objective has penalties too."""
    for error in errors:
        progress.record(float(error), math.nan, None)
