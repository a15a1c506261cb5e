"""Error curves: how the error falls with separation rank, parameters and bytes, and where rounding stops it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lsrdecomp.arrays import namespace
from lsrdecomp.errors import BudgetError
from lsrdecomp.precision import precision, unit_roundoff
from lsrdecomp.shape import KroneckerShape
from lsrdecomp.solvers.svd import rearranged_svd, tail_norms
from lsrdecomp.targets import LowRank, as_target


@dataclass(frozen=True, slots=True)
class ErrorCurve:
    """Best relative Frobenius error for 0, 1, 2, … terms of one shape.

    For two factors every point is the optimum (Eckart and Young). ``parameters[i]`` are the numbers stored for
    ``ranks[i]`` terms, weights folded in.
    """

    label: str
    ranks: tuple[int, ...]
    parameters: tuple[int, ...]
    relative_errors: tuple[float, ...]
    norm: float
    condition: float = 1.0

    def rank_for(self, rtol: float) -> int:
        """Fewest terms with relative error ≤ ``rtol``.

        Raises `BudgetError`, which names the smallest error on the curve, if no point reaches it.
        """
        for rank, error in zip(self.ranks, self.relative_errors, strict=True):
            if error <= rtol:
                return rank
        raise BudgetError(
            f"{self.label}: the smallest error on the curve is {min(self.relative_errors):.3g}, not {rtol:g}"
        )

    def parameters_for(self, rtol: float) -> int:
        """Fewest parameters with relative error ≤ ``rtol``."""
        return self.parameters[self.ranks.index(self.rank_for(rtol))]

    def floor(self, storage: str) -> float:
        """γ·μ, the relative error below which rounding to ``storage`` stops the curve."""
        return self.condition * unit_roundoff(storage)

    def bytes(self, storage: str) -> tuple[int, ...]:
        """Bytes of the factors at each point, without headers."""
        return tuple(round(count * precision(storage).bytes) for count in self.parameters)

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def error_curve(matrix: Any, shape: KroneckerShape | None = None) -> ErrorCurve:
    """The error of the best approximation of every separation rank, from one SVD of the rearrangement.

    Parameters
    ----------
    matrix : array_like (m, n) or Target
    shape : KroneckerShape, optional
        Two factors; absent, the balanced split.

    Returns
    -------
    ErrorCurve

    Examples
    --------
    >>> import numpy as np
    >>> curve = error_curve(np.kron(np.eye(4), np.ones((3, 3))), KroneckerShape(((4, 4), (3, 3))))
    >>> curve.rank_for(1e-12)
    1
    """
    target = as_target(matrix)
    if shape is None:
        shape = KroneckerShape.balanced(target.shape)
    _, sigma, _ = rearranged_svd(target.rearranged(shape))
    return _from_spectrum(str(shape), sigma, target.norm, shape.parameters(1))


def low_rank_curve(matrix: Any) -> ErrorCurve:
    """The reference: truncated SVD of the matrix itself, m + n parameters a rank."""
    target = as_target(matrix)
    m, n = target.shape
    if isinstance(target, LowRank):
        return _from_spectrum("truncated SVD", target.svd[1], target.norm, m + n)
    matrix = target.rearranged(KroneckerShape(((m, 1), (1, n)))).formed()
    return _from_spectrum("truncated SVD", namespace(matrix).linalg.svdvals(matrix), target.norm, m + n)


def _from_spectrum(label: str, sigma: Any, norm: float, parameters: int) -> ErrorCurve:
    tails = tail_norms(sigma)
    scale = norm if norm > 0.0 else 1.0
    ranks = tuple(range(len(tails)))
    return ErrorCurve(label, ranks, tuple(s * parameters for s in ranks), tuple(t / scale for t in tails), norm)
