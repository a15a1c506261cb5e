"""TensorLy's CP decomposition as a solver: for comparison, and for its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lsrdecomp.arrays import as_double, device, namespace, to_numpy
from lsrdecomp.errors import BudgetError, ConvergenceError
from lsrdecomp.kronecker.cp import from_cp
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.solvers.base import Solution, Status, Sweep
from lsrdecomp.solvers.cp.als import rearranged_tensor
from lsrdecomp.targets.base import Target


@dataclass(frozen=True, slots=True)
class TensorLyCP:
    """``tensorly.decomposition.parafac`` on the rearranged matrix, in NumPy and double precision [1]_.

    Parameters
    ----------
    max_sweeps : int
    tol : float
        Stops when the relative error changes by less; TensorLy's error comes from the expanded form.
    init : str
        ``"svd"`` or ``"random"``.
    l2_reg : float
        Ridge on the factors (not on λ).
    seed : int

    References
    ----------
    .. [1] J. Kossaifi, Y. Panagakis, A. Anandkumar and M. Pantic, TensorLy: tensor learning in Python, JMLR 20 (2019).
    """

    max_sweeps: int = 500
    tol: float = 1e-8
    init: str = "svd"
    l2_reg: float = 0.0
    seed: int = 0

    def solve(
        self,
        target: Target,
        shape: KroneckerShape,
        *,
        rank: int | None = None,
        atol: float | None = None,
        on_sweep: Callable[[Sweep], Any] | None = None,
    ) -> Solution:
        if rank is None and atol is None:
            raise BudgetError("say what is wanted: rank= or atol=")
        packed = rearranged_tensor(target, shape)
        tensor, size = to_numpy(as_double(packed.core)), target.norm
        most = shape.max_separation_rank if rank is None else min(rank, shape.max_separation_rank)
        sweeps: list[Sweep] = []
        terms = most if atol is None else 1
        while True:
            columns, weights = self._terms(tensor / (size or 1.0), terms, sweeps, on_sweep)
            held = [
                namespace(packed.core).asarray(c, dtype=packed.core.dtype, device=device(packed.core)) for c in columns
            ]
            expanded = [to_numpy(as_double(c)) for c in packed.expand(held)]
            found = from_cp((weights * size, expanded), shape)
            approximation = _moved(found, packed.core)
            if atol is None:
                return Solution(approximation, Status.rank_reached, tuple(sweeps))
            if target.residual_norm(approximation) <= atol:
                return Solution(approximation, Status.converged, tuple(sweeps))
            if terms == most:
                return Solution(approximation, Status.rank_exhausted, tuple(sweeps))
            terms += 1

    def _terms(
        self, tensor: np.ndarray, rank: int, sweeps: list[Sweep], on_sweep: Callable[[Sweep], Any] | None
    ) -> tuple[list[np.ndarray], np.ndarray]:
        from tensorly.decomposition import parafac

        options = {"n_iter_max": self.max_sweeps, "tol": self.tol, "init": self.init, "l2_reg": self.l2_reg}
        try:
            (weights, factors), errors = parafac(
                tensor, rank, random_state=self.seed, normalize_factors=True, return_errors=True, **options
            )
        except np.linalg.LinAlgError as singular:
            raise ConvergenceError(f"TensorLy met a singular system with {rank} terms; use ALS") from singular
        for error in errors:
            sweeps.append(Sweep(len(sweeps) + 1, float(error)))
            if on_sweep is not None:
                on_sweep(sweeps[-1])
        return [np.asarray(f) for f in factors], np.asarray(weights)


def _moved(matrix: SeparatedMatrix, prototype: Any) -> SeparatedMatrix:
    xp = namespace(prototype)
    factors = tuple(xp.asarray(f, dtype=prototype.dtype, device=device(prototype)) for f in matrix.factors)
    weights = xp.asarray(
        matrix.weights, dtype=xp.real(factors[0]).dtype if np.iscomplexobj(matrix.factors[0]) else prototype.dtype
    )
    return SeparatedMatrix(weights, factors)
