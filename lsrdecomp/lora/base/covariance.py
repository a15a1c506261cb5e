"""Running second moments in bounded memory: Σ x yᵀ in full if small, else a sketch of it."""

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
    """Sizes of the sums that a covariance keeps, and of the spectrum that is written."""

    max_full: int  # largest n whose n × n sum is kept in full
    rank: int  # leading eigenpairs that are written
    seed: int  # of the random block of a sketch

    def is_full(self, size: int) -> bool:
        """Return whether a sum of ``size`` × ``size`` is kept in full."""
        return size <= self.max_full

    def width(self, size: int) -> int:
        """Return the columns of the array that is kept: of the sum, or of its sketch."""
        # Two columns of a sketch per eigenpair; by hand.
        return size if self.is_full(size) else min(size, 2 * self.rank)

    def memory(self, size: int) -> int:
        """Return the bytes of the kept array in float32, with the random block of a sketch."""
        n_arrays = 1 if self.is_full(size) else 2
        return n_arrays * 4 * size * self.width(size)


class Covariance:
    """A positive semidefinite n × n sum of products x yᵀ.

    A single product need not be symmetric, but those of a batch add up to a matrix that is. With
    the x and the y of a batch as rows of X and Y that is Xᵀ Y, where Y = X, or Y = K X for a
    positive semidefinite K as in `LayerSums`.

    A small sum is kept in full. A large one is kept as the sketch of the randomized Nyström method
    [1]_: (Σ x yᵀ) Ω for a fixed random block Ω of a few columns. Both, and the trace, add up over
    batches in any order.

    Parameters
    ----------
    size : int
        n.
    settings : CovarianceSettings
    device : torch.device
        Device of the sums.

    Attributes
    ----------
    total : Tensor, shape (n, n) or (n, columns of Ω)
        Σ x yᵀ, or its sketch. In float32, as the products are that are added to it.
    trace : Tensor, shape ()
        Σ yᵀ x in float64.

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
        self.total = torch.zeros(size, width, dtype=torch.float32, device=device)
        self.trace = torch.zeros((), dtype=torch.float64, device=device)
        if not self.is_full:  # Ω, with orthonormal columns
            normal = np.random.default_rng(settings.seed).standard_normal((size, width))
            orthonormal = np.linalg.qr(normal)[0]
            self._block = torch.from_numpy(orthonormal).to(device, torch.float32)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add Σ_i x_i y_iᵀ, which must be symmetric and positive semidefinite.

        Parameters
        ----------
        x, y : Tensor, shape (N, n)
            The x_i and y_i as rows.
        """
        x = x.to(torch.float32)
        y = y.to(torch.float32)
        self.total += x.T @ (y if self.is_full else y @ self._block)
        self.trace += (x * y).double().sum()

    def spectrum(self, scale: float) -> LowRankPlusIdentity:
        """Return the ``rank`` largest eigenpairs, descending, and the mean of other eigenvalues.

        All eigenvalues are multiplied by ``scale``.
        """
        if self.is_full:
            values, vectors = self._leading_eigenpairs()
        else:
            values, vectors = self._nystrom_eigenpairs()
        n_others = self.size - values.size
        trace_of_others = max(float(self.trace) - float(values.sum()), 0.0)
        mean_of_others = trace_of_others / n_others if n_others else 0.0
        return LowRankPlusIdentity(vectors, scale * values, scale * mean_of_others)

    def _leading_eigenpairs(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the largest eigenvalues, descending, and eigenvectors of the full sum."""
        # In single precision, as the sum is, which takes half the time: eigenvectors are written in
        # half precision.
        symmetric = (self.total + self.total.T) / 2
        if symmetric.device.type == "cpu":
            largest = (self.size - self.rank, self.size - 1)
            values, vectors = scipy.linalg.eigh(symmetric.numpy(), subset_by_index=largest)
        else:  # all of them on a GPU take less time than those on the CPU
            all_values, all_vectors = torch.linalg.eigh(symmetric)
            values = all_values[-self.rank :].cpu().numpy()
            vectors = all_vectors[:, -self.rank :].cpu().numpy()
        values = values[::-1].astype(np.float64)
        return np.maximum(values, 0.0), vectors[:, ::-1].astype(np.float64)

    def _nystrom_eigenpairs(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the largest eigenvalues, descending, and eigenvectors of A from its sketch A Ω."""
        block = self._block.double().cpu().numpy()
        image = self.total.double().cpu().numpy()
        # 1. Add a small multiple of the identity to A: the square root of step 2 stays real under
        #    the rounding of float32 sums.
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
