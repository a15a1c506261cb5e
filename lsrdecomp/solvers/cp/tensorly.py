"""TensorLy's CP decomposition as a solver: for comparison, and for its options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import as_double, like, to_numpy
from lsrdecomp.errors import ConvergenceError
from lsrdecomp.solvers.base import Event, Solution, Status
from lsrdecomp.solvers.cp.tensor import no_terms, rearranged_tensor, refuse_gradients
from lsrdecomp.solvers.cp.terms import CPTerms
from lsrdecomp.solvers.matrix import MatrixProblem, MatrixSolver
from lsrdecomp.solvers.svd.dense import SVD

if TYPE_CHECKING:
    from lsrdecomp.solvers.progress import SolveProgress


@dataclass(frozen=True, slots=True)
class TensorLyCP(MatrixSolver):
    """``tensorly.decomposition.parafac`` on the rearranged matrix, in NumPy and double precision [1]_.

    Parameters
    ----------
    max_sweeps : int
    tol : float
        Stops when the relative error changes by less; TensorLy's error comes from the expanded
        form.
    init : str
        ``"svd"`` or ``"random"``.
    l2_reg : float
        Ridge on the factors (not on λ).
    seed : int

    References
    ----------
    .. [1] J. Kossaifi, Y. Panagakis, A. Anandkumar and M. Pantic, TensorLy: tensor learning in
           Python, JMLR 20 (2019).

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

    def _solve(self, problem: MatrixProblem) -> Solution:
        """Find terms by ``parafac``; the contract is `Solver.solve`.

        With ``atol`` it is called anew with one term more until the measured error is small enough:
        TensorLy's own stopping rule looks at the change of the error alone. Of two factors, those
        of 1×1 not counted, `SVD` is taken: there `parafac` meets singular systems.

        Returns
        -------
        Solution
            ``sweeps`` are TensorLy's, whose errors come from the expanded form and see nothing
            below 1e-8; their γ is not computed (NaN). ``optimality_gap`` is None.
            ``relative_error`` is measured where ``atol`` is given.

        Raises
        ------
        ConvergenceError
            Where TensorLy meets a singular system.
        """
        target, shape, progress = problem.target, problem.shape, problem.progress
        atol = problem.atol
        if shape.order == 2:
            return problem.delegate_to(SVD())
        rearranged = rearranged_tensor(target, shape)
        refuse_gradients(rearranged.core, shape)
        size = target.norm
        if size == 0.0:
            status = Status.rank_reached if atol is None else Status.converged
            return Solution(no_terms(rearranged.core, shape), status, relative_error=0.0)
        tensor = to_numpy(as_double(rearranged.core)) / size
        terms = problem.max_terms if atol is None else 1
        while True:
            columns = [like(c, rearranged.core) for c in self._columns(tensor, terms, progress)]
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

    def _columns(self, tensor: np.ndarray, rank: int, progress: SolveProgress) -> list[np.ndarray]:
        """Return factors of the tensor, the first multiplied by the weights."""
        from tensorly.decomposition import parafac

        is_monotone = self.l2_reg == 0.0

        def record(_: Any, error: Any) -> None:
            objective = float(error) ** 2 if is_monotone else None
            progress.record(float(error), math.nan, objective)  # γ: not known

        try:
            weights, factors = parafac(
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
        except np.linalg.LinAlgError as singular:
            raise ConvergenceError(
                f"TensorLy met a singular system with {rank} terms; use ALS"
            ) from singular
        return [factors[0] * weights, *factors[1:]]
