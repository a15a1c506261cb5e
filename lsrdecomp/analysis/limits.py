"""Limits: what no coding of the singular vectors can beat, if they look like Gaussian noise."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lsrdecomp.arrays import to_numpy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.targets.base import LowRank

DECADES = 18
"""Range of multipliers, from nothing kept to double precision."""
STEPS_A_DECADE = 12


@dataclass(frozen=True, slots=True, repr=False)
class Limit:
    """A reference line: relative error against bytes.

    Examples
    --------
    >>> Limit("my code", bytes=(0.0, 100.0, 200.0), relative_errors=(1.0, 0.4, 0.1)).to_rows()[1]
    {'curve': 'my code', 'bytes': 100.0, 'relative_error': 0.4}
    """

    label: str
    bytes: tuple[float, ...]
    relative_errors: tuple[float, ...]

    def __repr__(self) -> str:
        return f"Limit({self.label}, {len(self.bytes)} points to {max(self.bytes, default=0.0):,.0f} bytes)"

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """One plain record a point."""
        points = zip(self.bytes, self.relative_errors, strict=True)
        return [
            {"curve": self.label, "bytes": size, "relative_error": error} for size, error in points
        ]


def gaussian_limit(pairs: Sequence[LowRank]) -> Limit:
    """Gaussian rate–distortion limit of an adapter: reverse water-filling over all singular components [1]_.

    A component σ u vᵀ whose m + n entries of u and v are independent Gaussians, each coded with b
    bits, keeps the share (1 − 4⁻ᵇ)² of its energy; for every price of a bit each component takes
    the best b ≥ 0, zero if none pays. Trained LoRA factors look Gaussian, so bytes below this line
    need structure that they do not have.

    Parameters
    ----------
    pairs : sequence of LowRank
        The layers.

    Returns
    -------
    Limit
        The lower convex hull of (bytes, squared error). Cost: one thin QR a layer.

    References
    ----------
    .. [1] T. M. Cover and J. A. Thomas, Elements of Information Theory, theorem 10.3.3.

    Examples
    --------
    How many bytes a layer of rank 2 costs, at best, for an error of a tenth: 64 numbers of nearly
    four bits.

    >>> import numpy as np
    >>> from lsrdecomp import LowRank
    >>> limit = gaussian_limit([LowRank(np.eye(16)[:, :2], np.eye(2, 16))])
    >>> next(round(size) for size, error in zip(limit.bytes, limit.relative_errors) if error < 0.1)
    31
    """
    components = [
        (float(sigma) ** 2, sum(pair.shape))
        for pair in pairs
        for sigma in to_numpy(pair.svd[1])
        if float(sigma) > 0.0
    ]
    total = math.fsum(energy for energy, _ in components)
    if total == 0.0:
        return Limit("Gaussian limit", (0.0,), (0.0,))
    top = max(energy / count for energy, count in components)
    points = [(0.0, 1.0)]
    for step in range(DECADES * STEPS_A_DECADE):
        price = 4.0 * top * 10.0 ** (-step / STEPS_A_DECADE)
        chosen = [_best(energy, count, price) for energy, count in components]
        size = math.fsum(bits for bits, _ in chosen) / 8.0
        if size > points[-1][0]:
            points.append((size, math.sqrt(math.fsum(lost for _, lost in chosen) / total)))
    return Limit("Gaussian limit", *(tuple(values) for values in zip(*points, strict=True)))


def _best(energy: float, count: int, price: float) -> tuple[float, float]:
    """Bits and lost energy of a component at this price: the minimum of energy·(1 − (1 − 4⁻ᵇ)²) + price·count·b."""
    slope = price * count / (4.0 * math.log(2.0) * energy)  # of the optimum: D(1 − D) with D = 4⁻ᵇ
    if slope < 0.25:
        distortion = 2.0 * slope / (1.0 + math.sqrt(1.0 - 4.0 * slope))
        bits, lost = -0.5 * math.log2(distortion), energy * distortion * (2.0 - distortion)
        if lost + price * count * bits < energy:
            return count * bits, lost
    return 0.0, energy
