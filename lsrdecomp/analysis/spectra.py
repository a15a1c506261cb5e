"""Spectra of rearrangements: how many Kronecker terms a matrix asks for."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lsrdecomp.arrays import as_double, namespace
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.targets.convert import as_target
from lsrdecomp.targets.target_threads import threads_for


@dataclass(frozen=True, slots=True, repr=False)
class Spectrum:
    """Singular values of R(M) for one shape, descending: the weights λ of the best terms.

    Examples
    --------
    >>> import numpy as np
    >>> i = np.arange(16.0)
    >>> hilbert = 1.0 / (1.0 + i[:, None] + i[None, :])
    >>> spectrum = rearranged_spectrum(hilbert, "4x4, 4x4")
    >>> [f"{value:.1e}" for value in spectrum.relative[:4]], round(spectrum.effective_rank, 2)
    (['1.0e+00', '2.2e-01', '1.3e-02', '4.9e-04'], 1.2)
    """

    label: str
    values: tuple[float, ...]

    @property
    def relative(self) -> tuple[float, ...]:
        """The values divided by the largest."""
        scale = self.values[0] if self.values else 0.0
        if scale <= 0.0:
            scale = 1.0
        return tuple(value / scale for value in self.values)

    @property
    def effective_rank(self) -> float:
        """The exponential of the entropy of σ²/Σσ² [1]_.

        It is one for a single Kronecker product, and the full rank for a flat spectrum.

        .. [1] O. Roy and M. Vetterli, The effective rank, EUSIPCO 2007; there of σ, here of the
               energies σ².
        """
        energies = [value**2 for value in self.relative]
        total = sum(energies)
        if total == 0.0:
            return 0.0
        shares = [energy / total for energy in energies if energy > 0.0]
        return math.exp(-sum(share * math.log(share) for share in shares))

    def plot(self, **options: Any) -> Any:
        """Draw the spectrum by `lsrdecomp.plots.plot_spectra`, and return matplotlib's Axes.

        The options are those of that function.
        """
        import lsrdecomp  # pictures stand a floor above this file: by the front door

        return lsrdecomp.plots.plot_spectra([self], **options)

    def __repr__(self) -> str:
        first = ", ".join(f"{value:.3g}" for value in self.values[:6])
        more = ", …" if len(self.values) > 6 else ""
        return (
            f"Spectrum({self.label}, {len(self.values)} values: {first}{more}; "
            f"effective rank {self.effective_rank:.3g})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain lists and numbers."""
        return {**asdict(self), "values": list(self.values), "effective_rank": self.effective_rank}

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one plain record a singular value."""
        return [
            {"shape": self.label, "index": i, "value": value}
            for i, value in enumerate(self.values, 1)
        ]


def rearranged_spectrum(matrix: Any, shape: KroneckerShape | None = None) -> Spectrum:
    """Return the singular values of R(M) for a shape of two factors.

    Parameters
    ----------
    matrix : array_like (m, n) or Target
    shape : KroneckerShape or sizes, optional
        Absent, the balanced one.

    Returns
    -------
    Spectrum
        Cost: one SVD of R(M), formed, without vectors.

    Examples
    --------
    >>> import numpy as np
    >>> product = np.kron(np.eye(2), np.ones((3, 3)))
    >>> round(rearranged_spectrum(product, "2x2, 3x3").effective_rank, 6)
    1.0
    """
    target = as_target(matrix)
    shape = (
        KroneckerShape.balanced(target.shape)
        if shape is None
        else KroneckerShape.parse(shape, whole=target.shape)
    )
    with threads_for(target):
        target.norm  # noqa: B018 - refuses what is not finite first
        operator = as_double(target.rearranged(shape).formed())
        sigma = namespace(operator).linalg.svdvals(operator)
    return Spectrum(str(shape), tuple(float(value) for value in sigma))
