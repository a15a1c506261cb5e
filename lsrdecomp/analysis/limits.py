"""Limits: what no coding of the singular vectors can beat, if they look like Gaussian noise."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lsrdecomp.analysis.record_values import lists_for_tuples
from lsrdecomp.arrays import to_numpy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.targets.target import LowRank


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
        largest = max(self.bytes, default=0.0)
        return f"Limit({self.label}, {len(self.bytes)} points to {largest:,.0f} bytes)"

    def to_json(self) -> dict[str, Any]:
        """Return plain lists and numbers."""
        return lists_for_tuples(asdict(self))

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one plain record a point."""
        points = zip(self.bytes, self.relative_errors, strict=True)
        return [
            {"curve": self.label, "bytes": size, "relative_error": error} for size, error in points
        ]


def gaussian_limit(
    pairs: Sequence[LowRank], *, decades: int = 18, points_per_decade: int = 12
) -> Limit:
    """Return the Gaussian rate–distortion limit of an adapter.

    It is reverse water-filling over all singular components [1]_. A component σ u vᵀ whose m + n
    entries of u and v are independent Gaussians, each coded with b bits, keeps the share
    (1 − 4⁻ᵇ)² of its energy; for every price of a bit each component takes the best b ≥ 0, zero if
    none pays. Trained LoRA factors look Gaussian, so bytes below this line
    need structure that they do not have.

    Parameters
    ----------
    pairs : sequence of LowRank
        The layers.
    decades : int
        Range of prices of a bit, from nothing kept down to double precision; by hand.
    points_per_decade : int
        How finely prices are tried; by hand.

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
    components: list[tuple[float, int]] = []  # energy, and numbers in u and v
    for pair in pairs:
        count = sum(pair.shape)
        energies = [float(sigma) ** 2 for sigma in to_numpy(pair.svd[1]) if sigma > 0.0]
        components += [(energy, count) for energy in energies]
    total = math.fsum(energy for energy, _ in components)
    if total == 0.0:
        return Limit("Gaussian limit", (0.0,), (0.0,))
    # Above four times the largest energy a number no component pays for a bit
    highest_price = 4.0 * max(energy / count for energy, count in components)
    sizes = [0.0]
    errors = [1.0]
    for step in range(decades * points_per_decade):
        price = highest_price * 10.0 ** (-step / points_per_decade)
        coded = [_best_code(energy, count, price) for energy, count in components]
        size = math.fsum(bits for bits, _ in coded) / 8.0
        if size > sizes[-1]:
            sizes.append(size)
            errors.append(math.sqrt(math.fsum(lost for _, lost in coded) / total))
    return Limit("Gaussian limit", tuple(sizes), tuple(errors))


def _best_code(energy: float, count: int, price: float) -> tuple[float, float]:
    """Return bits and lost energy of a component at this price of a bit.

    They are those at the least of energy·(1 − (1 − 4⁻ᵇ)²) + price·count·b over b ≥ 0.
    """
    # The derivative vanishes where D(1 − D) is this, with D = 4⁻ᵇ
    slope = price * count / (4.0 * math.log(2.0) * energy)
    if slope >= 0.25:
        return 0.0, energy
    distortion = 2.0 * slope / (1.0 + math.sqrt(1.0 - 4.0 * slope))
    bits = -0.5 * math.log2(distortion)
    lost = energy * distortion * (2.0 - distortion)
    if lost + price * count * bits < energy:
        return count * bits, lost
    return 0.0, energy
