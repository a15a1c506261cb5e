"""Running second moments in bounded memory: Σ x yᵀ whole while it is small, else its action on a random block."""

from __future__ import annotations

import numpy as np
import scipy.linalg
import torch

from lsrdecomp.targets.weights import LowRankPlusIdentity

OVERSAMPLING = 2  # columns of the random block per eigenpair that is kept


class Covariance:
    """A positive semi-definite n × n sum of products x yᵀ.

    Up to ``max_full`` the n × n sum is kept. Beyond, one pass of the randomized Nyström method
    [1]_: with a fixed random block Ω of ``2·rank`` columns it keeps (Σ x yᵀ) Ω and the trace,
    O(n·rank) numbers, which add up over batches in any order.

    References
    ----------
    .. [1] J. A. Tropp, A. Yurtsever, M. Udell and V. Cevher, Fixed-rank approximation of a
       positive-semidefinite matrix from streaming data, 2017.
    """

    def __init__(
        self, size: int, *, max_full: int, rank: int, seed: int, device: torch.device
    ) -> None:
        self.size, self.rank = size, min(rank, size)
        self.full = size <= max_full
        width = _width(size, max_full, rank)
        self.total = torch.zeros(
            size, width, dtype=torch.float32, device=device
        )  # as its products are
        self.trace = torch.zeros((), dtype=torch.float64, device=device)
        if not self.full:
            block = np.random.default_rng(seed).standard_normal((size, width))
            self._block = torch.from_numpy(np.linalg.qr(block)[0]).to(device, torch.float32)

    @staticmethod
    def memory(size: int, max_full: int, rank: int) -> int:
        """Bytes that such a sum takes, with its random block."""
        return 4 * size * _width(size, max_full, rank) * (1 if size <= max_full else 2)

    def add(self, rows: torch.Tensor, partners: torch.Tensor) -> None:
        """Add Σ_i x_i y_iᵀ for rows x and partners y, shape (N, n): a sum that is symmetric and positive as a whole."""
        rows, partners = rows.to(torch.float32), partners.to(torch.float32)
        self.total += rows.T @ (partners if self.full else partners @ self._block)
        self.trace += (rows * partners).double().sum()

    def spectrum(self, scale: float = 1.0) -> LowRankPlusIdentity:
        """The ``rank`` largest eigenpairs of the sum, descending, and an isotropic rest, times ``scale``."""
        trace = float(self.trace)
        if self.full:
            total, left_out = self.total.double().cpu().numpy(), self.size - self.rank
            values, vectors = scipy.linalg.eigh(
                (total + total.T) / 2, subset_by_index=(left_out, self.size - 1)
            )
            values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1].copy()
            rest = max(trace - float(values.sum()), 0.0) / left_out if left_out else 0.0
            return LowRankPlusIdentity(vectors, scale * values, scale * rest)
        block, image = self._block.double().cpu().numpy(), self.total.double().cpu().numpy()
        # The shift of [1] keeps the Cholesky factor real under the rounding of float32 sums.
        shift = np.finfo(np.float32).eps * float(np.linalg.norm(image)) + np.finfo(np.float64).tiny
        image = image + shift * block
        core = block.T @ image
        values, axes = np.linalg.eigh((core + core.T) / 2)
        significant = values > values[-1] * np.finfo(np.float32).eps
        vectors, singular, _ = np.linalg.svd(
            image @ (axes[:, significant] / np.sqrt(values[significant])), full_matrices=False
        )
        eigenvalues = np.maximum(singular[: self.rank] ** 2 - shift, 0.0)
        vectors = vectors[:, : self.rank]
        rest = max(trace - float(eigenvalues.sum()), 0.0) / max(self.size - eigenvalues.size, 1)
        return LowRankPlusIdentity(vectors, scale * eigenvalues, scale * rest)


def _width(size: int, max_full: int, rank: int) -> int:
    return size if size <= max_full else min(size, OVERSAMPLING * rank)
