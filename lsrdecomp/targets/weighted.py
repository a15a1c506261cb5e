"""Low-rank targets in a weighted norm ‖G^½ X C^½‖_F: norm, singular gauge, error of an approximation.

Also the norm in its leading coordinates: fewer eigenpairs where the others weigh nearly alike, for
faster solves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import (
    Array,
    as_double,
    dtype_name,
    namespace,
    norm,
    to_numpy,
    triangular_factor,
)
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.targets.residual import check_sizes, pair_core, pair_distances
from lsrdecomp.targets.weights import LowRankPlusIdentity, NormWeights, Weight

if TYPE_CHECKING:
    from lsrdecomp.targets.base import Approximation, LowRank

CONDITION = 1e4
"""Of a Gram matrix with a unit diagonal, up to which its Cholesky factor serves as R of a QR
factorization."""

SMALLEST = 1e-140
"""Lengths of columns whose squares keep their digits."""


def weighted_norm(target: LowRank, weights: NormWeights) -> float:
    """‖G^½ B A C^½‖_F from two thin QR factorizations, in double precision.

    Parameters
    ----------
    target : LowRank, shape (m, n)
    weights : NormWeights

    Returns
    -------
    float

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import LowRank
    >>> from lsrdecomp.targets import LowRankPlusIdentity, NormWeights
    >>> first = LowRankPlusIdentity(np.eye(4)[:, :1], np.array([9.0]), 1.0)        # the first output counts nine times
    >>> plain = LowRankPlusIdentity(np.eye(4)[:, :1], np.array([1.0]), 1.0)
    >>> weights = NormWeights(output=first, input=plain)
    >>> pair = LowRank(np.eye(4)[:, :2], np.diag([1.0, 2.0, 0.0, 0.0])[:2])
    >>> round(pair.norm**2, 6), round(weighted_norm(pair, weights) ** 2, 6)        # 1 + 4, 9 · 1 + 4
    (5.0, 13.0)
    """
    weights.check(target.shape)
    return float(pair_norms(as_double(target.left), as_double(target.right), weights))


def weighted_residual_norm(
    target: LowRank, approximation: Approximation, weights: NormWeights
) -> float:
    """‖G^½ (BA − M̂) C^½‖_F from residual entries in double precision.

    Parameters
    ----------
    target : LowRank, shape (m, n)
    approximation : SeparatedProduct, LowRank-like or SeparatedMatrix, shape (m, n)
    weights : NormWeights

    Returns
    -------
    float
        For an approximation that is a pair of thin factors the entries are those in orthonormal
        bases of the two row and column spaces, at cost and memory O((m + n)(r + r̂ + q)) and a
        rounding error of about 2⁻⁵³(‖G^½B‖‖AC^½‖ + ‖G^½B̂‖‖ÂC^½‖); a direct Kronecker sum is
        formed, O(m·n).

    Raises
    ------
    ShapeError
        If the three shapes disagree.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import LowRank
    >>> from lsrdecomp.targets import LowRankPlusIdentity, NormWeights
    >>> first = LowRankPlusIdentity(np.eye(4)[:, :1], np.array([9.0]), 1.0)        # the first output counts nine times
    >>> plain = LowRankPlusIdentity(np.eye(4)[:, :1], np.array([1.0]), 1.0)
    >>> weights = NormWeights(output=first, input=plain)
    >>> pair = LowRank(np.eye(4)[:, :2], np.diag([1.0, 2.0, 0.0, 0.0])[:2])
    >>> half = LowRank(pair.left[:, :1], pair.right[:1])                            # without the second component
    >>> round(weighted_residual_norm(pair, half, weights), 6)
    2.0
    """
    weights.check(target.shape)
    check_sizes(target.shape, approximation.shape)
    left, right = as_double(target.left), as_double(target.right)
    if hasattr(approximation, "to_lora"):
        other_left, other_right = (as_double(f) for f in approximation.to_lora())
        return float(pair_residual_norms(left, right, other_left, other_right, weights))
    xp = namespace(left)
    residual = weights.output.root(left @ right - as_double(approximation.to_matrix()))
    return norm(weights.input.root(xp.matrix_transpose(residual)))


def weighted_gauge(left: Array, right: Array, weights: NormWeights) -> tuple[Array, Array, Array]:
    """S, σ, T of shapes (…, r, k), (…, k), (…, k, r) with U = B S, Vᵀ = T A of the SVD U σ Vᵀ of a pair in the norm.

    Columns of G^½ U and C^½ V are orthonormal, to twelve digits. In double precision NumPy's
    triangles are Cholesky's factors of Gram matrices where these are well conditioned, in a fifth
    of the time.
    """
    return gauge_of(*map(_cholesky_or_qr, _weighted(left, right, weights)))


def _cholesky_or_qr(array: Array) -> Array:
    """R with Rᵀ R = Aᵀ A: ‖R x‖ has twelve digits of ‖A x‖ for every x [1]_.

    .. [1] Y. Yamamoto, Y. Nakatsukasa, Y. Yanagisawa and T. Fukaya, Roundoff error analysis of the
       CholeskyQR2 algorithm, Electron. Trans. Numer. Anal. 44 (2015).
    """
    if type(array) is not np.ndarray or array.ndim != 2 or array.dtype != np.float64:
        return triangular_factor(array)
    from scipy.linalg.lapack import dpocon, dpotrf

    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        gram = array.T @ array
        sizes = np.sqrt(np.diag(gram))
    if not SMALLEST < sizes.min() <= sizes.max() < 1.0 / SMALLEST:
        return triangular_factor(array)
    # Columns of any length: Cholesky's errors are those of a unit diagonal.
    scaled = gram / np.outer(sizes, sizes)
    factor, failed = dpotrf(scaled)
    if failed or dpocon(factor, np.abs(scaled).sum(axis=0).max())[0] < 1.0 / CONDITION:
        return triangular_factor(array)
    return factor * sizes


def weighted_triangles(left: Array, right: Array, weights: NormWeights) -> tuple[Array, Array]:
    """R of thin QR factorizations of G^½ B and C^½ Aᵀ for pairs (…, m, r), (…, r, n)."""
    columns, rows = _weighted(left, right, weights)
    return triangular_factor(columns), triangular_factor(rows)


def gauge_of(triangle: Array, other: Array) -> tuple[Array, Array, Array]:
    """`weighted_gauge` from its `weighted_triangles`."""
    xp = namespace(triangle, other)
    u, sigma, vh = xp.linalg.svd(triangle @ xp.matrix_transpose(other), full_matrices=False)
    floor = (
        int(triangle.shape[-1])
        * unit_roundoff(dtype_name(sigma))
        * xp.max(sigma, axis=-1, keepdims=True)
    )
    positive = sigma > floor
    inverse = xp.where(
        positive, 1.0 / xp.where(positive, sigma, xp.ones_like(sigma)), xp.zeros_like(sigma)
    )
    columns = xp.matrix_transpose(other) @ (xp.matrix_transpose(vh) * inverse[..., None, :])
    rows = (inverse[..., :, None] * xp.matrix_transpose(u)) @ triangle
    return columns, xp.where(positive, sigma, xp.zeros_like(sigma)), rows


def pair_norms(left: Array, right: Array, weights: NormWeights) -> Array:
    """‖G^½ B A C^½‖_F of pairs (…, m, r), (…, r, n) in double precision, shape (…)."""
    columns, rows = _weighted(left, right, weights)
    return namespace(left).linalg.matrix_norm(pair_core([columns], [rows]))


def pair_residual_norms(
    left: Array, right: Array, other_left: Array, other_right: Array, weights: NormWeights
) -> Array:
    """‖G^½ (B A − B̂ Â) C^½‖_F of batches of pairs in double precision, shape (…)."""
    return pair_distances(
        *_weighted(left, right, weights), *_weighted(other_left, other_right, weights)
    )


def _weighted(left: Array, right: Array, weights: NormWeights) -> tuple[Array, Array]:
    """G^½ B and C^½ Aᵀ."""
    return weights.output.root(left), weights.input.root(namespace(right).matrix_transpose(right))


SPREAD = 0.02
"""What eigenvalues that are replaced by their mean may differ from it, in all, as a share of the
trace. On a language model's layers norms and errors then agree with those of the whole weight to a
thousandth."""

STEP = 16
"""Eigenpairs come in multiples of this, so that layers of one size can share a batch without much
padding."""


def leading_norms(norms: NormWeights) -> NormWeights:
    """Both weights with as few eigenpairs as `SPREAD` allows."""
    return NormWeights(_leading_weight(norms.output), _leading_weight(norms.input))


def _leading_weight(weight: Weight) -> Weight:
    """V diag(λ) Vᵀ + ρ(I − VVᵀ) with only the largest λ, the others replaced by their mean; the trace stays.

    A weight without eigenpairs is returned as it is, one that needs most of them keeps all.
    """
    if not isinstance(weight, LowRankPlusIdentity) or weight.basis.ndim != 2:
        return weight
    values, size = to_numpy(weight.values), weight.size
    order, rest = np.argsort(-values, kind="stable"), float(weight.rest)
    spectrum = np.concatenate([values[order], np.full(size - len(values), rest)])
    spectrum = np.sort(spectrum)[::-1]
    total = spectrum.sum()
    for count in range(STEP, min(len(values), size - 1), STEP):
        mean = spectrum[count:].mean()
        if np.sum(np.abs(spectrum[count:] - mean)) <= 2.0 * SPREAD * total:
            picked = order[:count]
            return LowRankPlusIdentity(weight.basis[:, picked], weight.values[picked], mean)
    return LowRankPlusIdentity(weight.basis, weight.values, weight.rest)
