"""Running second moments in bounded memory: Σ x yᵀ in full while small, else a sketch of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy.linalg
import torch

from lsrdecomp.targets.weights import LowRankPlusIdentity

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLOAT32_EPS = float(np.finfo(np.float32).eps)
FLOAT64_TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, slots=True)
class CovarianceSettings:
    """Size of the sums that are kept of a covariance, and of what is written of it."""

    max_full: int = 1024  # largest n whose n × n sum is kept in full; by hand
    rank: int = 128  # leading eigenpairs that are written; by hand
    oversampling: int = 2  # columns of a sketch per eigenpair; by hand
    seed: int = 0  # of the random block of a sketch

    def is_full(self, size: int) -> bool:
        """Return whether the sum of this size is kept in full."""
        return size <= self.max_full

    def width(self, size: int) -> int:
        """Return how many columns are kept of the sum."""
        return size if self.is_full(size) else min(size, self.oversampling * self.rank)

    def memory(self, size: int) -> int:
        """Return the bytes of a sum of this size, in float32, with its random block."""
        n_arrays = 1 if self.is_full(size) else 2
        return n_arrays * 4 * size * self.width(size)


class Covariance:
    """A positive semidefinite n × n sum of products x yᵀ.

    A small one is kept in full. Beyond it is one pass of the randomized Nyström method [1]_: with a
    fixed random block Ω of a few columns it keeps (Σ x yᵀ) Ω and the trace, O(n · rank) numbers,
    which add up over batches in any order.

    Parameters
    ----------
    size : int
        n.
    settings : CovarianceSettings
        What is kept.
    device : torch.device
        Where it is added up.

    References
    ----------
    .. [1] J. A. Tropp, A. Yurtsever, M. Udell and V. Cevher, Fixed-rank approximation of a
       positive-semidefinite matrix from streaming data, 2017.
    """

    def __init__(self, size: int, settings: CovarianceSettings, device: torch.device) -> None:
        self.size = size
        self.rank = min(settings.rank, size)
        self.is_full = settings.is_full(size)
        width = settings.width(size)
        # In single precision, as the products are that are added to it.
        self.total = torch.zeros(size, width, dtype=torch.float32, device=device)
        self.trace = torch.zeros((), dtype=torch.float64, device=device)
        if not self.is_full:
            normal = np.random.default_rng(settings.seed).standard_normal((size, width))
            orthonormal = np.linalg.qr(normal)[0]
            self._block = torch.from_numpy(orthonormal).to(device, torch.float32)

    def add(self, rows: torch.Tensor, partners: torch.Tensor) -> None:
        """Add Σ_i x_i y_iᵀ, which is symmetric and positive as a whole.

        Parameters
        ----------
        rows, partners : Tensor, shape (N, n)
            The x and the y.
        """
        rows = rows.to(torch.float32)
        partners = partners.to(torch.float32)
        self.total += rows.T @ (partners if self.is_full else partners @ self._block)
        self.trace += (rows * partners).double().sum()

    def spectrum(self, scale: float = 1.0) -> LowRankPlusIdentity:
        """Return the ``rank`` largest eigenpairs, descending, and one value for all others.

        All eigenvalues are multiplied by ``scale``.
        """
        if self.is_full:
            values, vectors = self._leading_eigenpairs()
        else:
            values, vectors = self._nystrom_eigenpairs()
        n_others = self.size - values.size
        trace_left = max(float(self.trace) - float(values.sum()), 0.0)
        rest = trace_left / n_others if n_others else 0.0
        return LowRankPlusIdentity(vectors, scale * values, scale * rest)

    def _leading_eigenpairs(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        total = self.total.double().cpu().numpy()
        symmetric = (total + total.T) / 2
        largest = (self.size - self.rank, self.size - 1)
        values, vectors = scipy.linalg.eigh(symmetric, subset_by_index=largest)
        return np.maximum(values[::-1], 0.0), vectors[:, ::-1].copy()

    def _nystrom_eigenpairs(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        block = self._block.double().cpu().numpy()
        image = self.total.double().cpu().numpy()
        # 1. Add a small multiple of the identity, which keeps the root of [1] real under the
        #    rounding of float32 sums.
        shift = FLOAT32_EPS * float(np.linalg.norm(image)) + FLOAT64_TINY
        image = image + shift * block
        # 2. The Nyström approximation A Ω (Ωᵀ A Ω)⁻¹ (A Ω)ᵀ = B Bᵀ with B = A Ω (Ωᵀ A Ω)^-½.
        core = block.T @ image
        core_values, core_vectors = np.linalg.eigh((core + core.T) / 2)
        significant = core_values > core_values[-1] * FLOAT32_EPS
        inverse_root = core_vectors[:, significant] / np.sqrt(core_values[significant])
        # 3. Its eigenpairs from the singular triples of B, without the shift.
        vectors, singular, _ = np.linalg.svd(image @ inverse_root, full_matrices=False)
        values = np.maximum(singular[: self.rank] ** 2 - shift, 0.0)
        return values, vectors[:, : self.rank]
