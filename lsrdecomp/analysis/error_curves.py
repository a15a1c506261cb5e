"""Error curves: how the error falls with separation rank, parameters and bytes.

They also say where rounding stops it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lsrdecomp import markup
from lsrdecomp.analysis.record_values import lists_for_tuples
from lsrdecomp.arrays import as_double, namespace, tail_norms, to_numpy
from lsrdecomp.decompose import decompose
from lsrdecomp.errors import BudgetError
from lsrdecomp.fields import refuses_unknown
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import precision, unit_roundoff
from lsrdecomp.solvers.svd.singular_terms import as_matrix
from lsrdecomp.targets.convert import as_target
from lsrdecomp.targets.target import LowRank
from lsrdecomp.targets.target_threads import threads_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lsrdecomp.solvers.solver import Solver, Sweep


@dataclass(frozen=True, slots=True, repr=False)
class ErrorCurve:
    """Relative Frobenius error for 0, 1, 2, … terms of one shape.

    Made by `error_curve` every point is the optimum (Eckart and Young); by `solver_curve` it is
    what a solver reached. ``parameters[i]`` are the numbers stored for ``ranks[i]`` terms, weights
    folded in.

    Examples
    --------
    >>> import numpy as np
    >>> i = np.arange(16.0)
    >>> hilbert = 1.0 / (1.0 + i[:, None] + i[None, :])
    >>> curve = error_curve(hilbert, "4x4, 4x4")
    >>> curve.rank_for(1e-3), curve.parameters_for(1e-3), curve.bytes("float16")[3]
    (3, 96, 192)
    >>> [f"{error:.3f}" for error in curve.relative_errors[:4]]
    ['1.000', '0.212', '0.013', '0.000']
    >>> curve.floor("float16")  # rounding: no stored sum comes nearer
    0.00048828125
    """

    label: str
    ranks: tuple[int, ...]
    parameters: tuple[int, ...]
    relative_errors: tuple[float, ...]
    norm: float
    condition: float = 1.0  # the largest γ on the curve
    conditions: tuple[float, ...] = ()  # γ of each point, where a solver measured it; empty: one

    def rank_for(self, rtol: float) -> int:
        """Return the fewest terms with relative error ≤ ``rtol``.

        Raises `BudgetError`, which names the smallest error on the curve, if no point reaches it.
        """
        for rank, error in zip(self.ranks, self.relative_errors, strict=True):
            if error <= rtol:
                return rank
        raise BudgetError(
            f"{self.label}: the smallest error on the curve is {min(self.relative_errors):.3g}, "
            f"not {rtol:g}"
        )

    def parameters_for(self, rtol: float) -> int:
        """Return the fewest parameters with relative error ≤ ``rtol``."""
        return self.parameters[self.ranks.index(self.rank_for(rtol))]

    def floor(self, storage: str) -> float:
        """Return γ·μ, the relative error below which rounding to ``storage`` stops the curve."""
        return self.condition * unit_roundoff(storage)

    def bytes(self, storage: str) -> tuple[int, ...]:
        """Return the bytes of the factors at each point, without headers."""
        return tuple(round(count * precision(storage).bytes) for count in self.parameters)

    def plot(self, **options: Any) -> Any:
        """Draw the curve by `lsrdecomp.plots.plot_error_curves`, and return matplotlib's Axes.

        The options are those of that function, which takes several curves too. Needs matplotlib.
        """
        import lsrdecomp  # pictures stand a floor above this file: by the front door

        return lsrdecomp.plots.plot_error_curves([self], **options)

    def __repr__(self) -> str:
        """Return label, sizes, and the fewest terms for each power of ten, in a line or two."""
        least = min(self.relative_errors, default=0.0)
        reached = [10.0**-k for k in range(1, 16) if 10.0**-k >= least]
        terms = [f"{error:.0e} with {self.rank_for(error)}" for error in reached[:6]]
        more = ", …" if len(reached) > 6 else ""
        listing = f": {', '.join(terms)} terms{more}" if terms else ""
        return (
            f"ErrorCurve({self.label}, up to {max(self.ranks, default=0)} terms and "
            f"{max(self.parameters, default=0):,} parameters, "
            f"least relative error {least:.3g}{listing})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain lists and numbers."""
        return lists_for_tuples(asdict(self))

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one plain record a point, for a table."""
        conditions = self.conditions or (self.condition,) * len(self.ranks)
        points = zip(self.ranks, self.parameters, self.relative_errors, conditions, strict=True)
        return [
            {
                "curve": self.label,
                "rank": rank,
                "parameters": count,
                "relative_error": error,
                "condition": condition,
            }
            for rank, count, error, condition in points
        ]

    def _repr_html_(self) -> str:
        points = zip(self.ranks, self.parameters, self.relative_errors, strict=True)
        rows = [(f"{rank}", f"{count:,}", f"{error:.3g}") for rank, count, error in points]
        columns = ("terms", "parameters", "relative error")
        return markup.table(self.label, columns, markup.shortened(rows))


@refuses_unknown
def error_curve(
    matrix: Any,
    shape: KroneckerShape | None = None,
    *,
    rank: int | None = None,
    on_sweep: Callable[[Sweep], Any] | None = None,
) -> ErrorCurve:
    """Return the error of the best approximation of every separation rank.

    It follows from the spectrum of the rearrangement.

    Parameters
    ----------
    matrix : array_like (m, n) or Target
    shape : KroneckerShape, optional
        Two factors; absent, the balanced split.
    rank : int, optional
        The most terms the curve goes to. A large matrix then costs one `decompose` of that
        many terms, a small part of its whole spectrum; points may lie above the optimum by a
        thousandth.
    on_sweep : callable, optional
        Told each `Sweep` of that decomposition.

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
    shape = (
        KroneckerShape.balanced(target.shape)
        if shape is None
        else KroneckerShape.parse(shape, whole=target.shape)
    )
    with threads_for(target):
        target.norm  # noqa: B018 - refuses what is not finite first
        if rank is not None:
            result = decompose(target, shape, rank=rank, on_sweep=on_sweep)
            # Terms are orthogonal: leaving out some of them adds their weights to the error in
            # quadrature.
            tails = tail_norms([*to_numpy(result.approximation.weights), result.error])[:-1]
        else:
            operator = as_double(target.rearranged(shape).formed())
            tails = tail_norms(namespace(operator).linalg.svdvals(operator))
    return _from_tails(str(shape), tails, target.norm, shape.parameters(1))


@refuses_unknown
def error_curves(matrix: Any, shapes: Iterable[KroneckerShape]) -> tuple[ErrorCurve, ...]:
    """Return the `error_curve` of one matrix for each of many shapes; it is checked once.

    Parameters
    ----------
    matrix : array_like (m, n) or Target
    shapes : iterable of KroneckerShape or sizes
        Of two factors.

    Returns
    -------
    tuple of ErrorCurve
        One a shape, at the cost of one SVD of a rearrangement.

    Examples
    --------
    >>> import numpy as np
    >>> i = np.arange(16.0)
    >>> hilbert = 1.0 / (1.0 + i[:, None] + i[None, :])
    >>> for curve in error_curves(hilbert, ["2x2, 8x8", "4x4, 4x4", "16x1, 1x16"]):
    ...     print(curve.label, curve.parameters_for(1e-3))
    2×2 ⊗ 8×8 204
    4×4 ⊗ 4×4 96
    16×1 ⊗ 1×16 128
    """
    target = as_target(matrix)
    return tuple(error_curve(target, shape) for shape in shapes)


@refuses_unknown
def solver_curve(
    matrix: Any,
    shape: KroneckerShape,
    ranks: Sequence[int],
    *,
    solver: Solver | None = None,
    storage: str | None = None,
    label: str | None = None,
) -> ErrorCurve:
    """Return the error of the stored factors that a solver reaches for each number of terms.

    Parameters
    ----------
    matrix : array_like (m, n) or Target
    shape : KroneckerShape
        Of any number of factors.
    ranks : sequence of int
        Ascending.
    solver : Solver, optional
        As for `decompose`.
    storage : str, optional
        Element type to which the factors are rounded before the error is measured.
    label : str, optional

    Returns
    -------
    ErrorCurve
        With γ of each point. Cost: one `decompose` a rank.

    Examples
    --------
    >>> import numpy as np
    >>> i = np.arange(16.0)
    >>> hilbert = 1.0 / (1.0 + i[:, None] + i[None, :])
    >>> curve = solver_curve(hilbert, "4x4, 4x4", [1, 2, 3, 4], storage="bfloat16")
    >>> [f"{error:.0e}" for error in curve.relative_errors]  # from 3 terms on it is rounding
    ['2e-01', '1e-02', '2e-03', '2e-03']
    """
    target = as_target(matrix)
    shape = KroneckerShape.parse(shape)
    with threads_for(target):
        results = [
            decompose(target, shape, rank=rank, solver=solver, storage=storage) for rank in ranks
        ]
    conditions = tuple(result.condition for result in results)
    return ErrorCurve(
        label=label if label is not None else str(shape),
        ranks=tuple(ranks),
        parameters=tuple(result.parameters for result in results),
        relative_errors=tuple(result.relative_error for result in results),
        norm=target.norm,
        condition=max(conditions, default=1.0),
        conditions=conditions,
    )


@refuses_unknown
def low_rank_curve(matrix: Any) -> ErrorCurve:
    """Return the curve of truncated SVD of the matrix itself, m + n parameters a rank.

    Parameters
    ----------
    matrix : array_like (m, n) or Target

    Returns
    -------
    ErrorCurve
        Cost: one SVD of the matrix, of a `LowRank` pair one of its core.

    Examples
    --------
    >>> import numpy as np
    >>> i = np.arange(16.0)
    >>> hilbert = 1.0 / (1.0 + i[:, None] + i[None, :])
    >>> low_rank_curve(hilbert).parameters_for(1e-3)
    128
    >>> error_curve(hilbert, "4x4, 4x4").parameters_for(1e-3)
    96
    """
    target = as_target(matrix)
    m, n = target.shape
    with threads_for(target):
        if isinstance(target, LowRank):
            sigma = target.svd[1]
        else:
            matrix = as_matrix(target)
            sigma = namespace(matrix).linalg.svdvals(matrix)
        return _from_tails("truncated SVD", tail_norms(sigma), target.norm, m + n)


def _from_tails(
    label: str, tails: list[float], norm: float, parameters_per_term: int
) -> ErrorCurve:
    scale = norm if norm > 0.0 else 1.0
    ranks = tuple(range(len(tails)))
    parameters = tuple(rank * parameters_per_term for rank in ranks)
    relative_errors = tuple(tail / scale for tail in tails)
    return ErrorCurve(label, ranks, parameters, relative_errors, norm)
