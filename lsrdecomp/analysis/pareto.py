"""The Pareto front of error curves: which shape and rank no other beats in both size and error."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lsrdecomp.analysis.error_curves import ErrorCurve


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """A choice that no other on the curves beats.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import error_curve
    >>> i = np.arange(16.0)
    >>> hilbert = 1.0 / (1.0 + i[:, None] + i[None, :])
    >>> [(point.rank, point.size) for point in pareto_front([error_curve(hilbert, "4x4, 4x4")])[:3]]
    [(0, 0), (1, 32), (2, 64)]
    """

    label: str  # of the curve
    rank: int
    size: int  # parameters or bytes
    relative_error: float

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one plain record."""
        return [asdict(self)]


def pareto_front(
    curves: Iterable[ErrorCurve], *, storage: str | None = None
) -> tuple[ParetoPoint, ...]:
    """Return the points of the curves that no other beats in both size and error.

    They ascend in size.

    Parameters
    ----------
    curves : iterable of ErrorCurve
    storage : str, optional
        Number format: size is then bytes of the factors, else parameters.

    Returns
    -------
    tuple of ParetoPoint

    Examples
    --------
    >>> from lsrdecomp.analysis.error_curves import ErrorCurve
    >>> flat = ErrorCurve("flat", (0, 1, 2), (0, 10, 20), (1.0, 0.9, 0.8), 1.0)
    >>> steep = ErrorCurve("steep", (0, 1), (0, 15), (1.0, 0.1), 1.0)
    >>> [(point.label, point.size) for point in pareto_front([flat, steep])]
    [('flat', 0), ('flat', 10), ('steep', 15)]
    """
    points = []
    for curve in curves:
        sizes = curve.parameters if storage is None else curve.bytes(storage)
        for rank, size, error in zip(curve.ranks, sizes, curve.relative_errors, strict=True):
            points.append(ParetoPoint(curve.label, rank, size, error))
    front: list[ParetoPoint] = []
    for point in sorted(points, key=lambda point: (point.size, point.relative_error)):
        if not front or point.relative_error < front[-1].relative_error:
            front.append(point)
    return tuple(front)
