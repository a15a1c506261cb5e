"""Low-rank targets in a weighted norm ‖G^½ X C^½‖_F: norm, singular gauge, error.

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
from lsrdecomp.targets.residual import check_sizes, gram_of, pair_core, pair_distances
from lsrdecomp.targets.weights import LowRankPlusIdentity, NormWeights, Weight

if TYPE_CHECKING:
    from lsrdecomp.targets.target import Approximation, LowRank

SMALLEST_LENGTH = 1e-140
"""Shortest columns whose squares keep their digits in double precision."""


def weighted_norm(target: LowRank, weights: NormWeights) -> float:
    """Return ‖G^½ B A C^½‖_F from two thin QR factorizations, in double precision.

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
    >>> first_direction = np.eye(4)[:, :1]
    >>> nine_fold = LowRankPlusIdentity(first_direction, np.array([9.0]), 1.0)  # diag(9, 1, 1, 1)
    >>> identity = LowRankPlusIdentity(first_direction, np.array([1.0]), 1.0)
    >>> weights = NormWeights(output=nine_fold, input=identity)
    >>> pair = LowRank(np.eye(4)[:, :2], np.diag([1.0, 2.0, 0.0, 0.0])[:2])
    >>> round(pair.norm**2, 6), round(weighted_norm(pair, weights) ** 2, 6)  # 1 + 4, 9 · 1 + 4
    (5.0, 13.0)
    """
    weights.check(target.shape)
    return float(pair_norms(as_double(target.left), as_double(target.right), weights))


def weighted_residual_norm(
    target: LowRank, approximation: Approximation, weights: NormWeights
) -> float:
    """Return ‖G^½ (BA − M̂) C^½‖_F from residual entries in double precision.

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
    >>> first_direction = np.eye(4)[:, :1]
    >>> nine_fold = LowRankPlusIdentity(first_direction, np.array([9.0]), 1.0)  # diag(9, 1, 1, 1)
    >>> identity = LowRankPlusIdentity(first_direction, np.array([1.0]), 1.0)
    >>> weights = NormWeights(output=nine_fold, input=identity)
    >>> pair = LowRank(np.eye(4)[:, :2], np.diag([1.0, 2.0, 0.0, 0.0])[:2])
    >>> one_component = LowRank(pair.left[:, :1], pair.right[:1])
    >>> round(weighted_residual_norm(pair, one_component, weights), 6)
    2.0
    """
    weights.check(target.shape)
    check_sizes(target.shape, approximation.shape)
    left = as_double(target.left)
    right = as_double(target.right)
    if hasattr(approximation, "to_lora"):
        other_left, other_right = (as_double(f) for f in approximation.to_lora())
        return float(pair_residual_norms(left, right, other_left, other_right, weights))
    xp = namespace(left)
    residual = weights.output.root(left @ right - as_double(approximation.to_matrix()))
    return norm(weights.input.root(xp.matrix_transpose(residual)))


def weighted_gauge(left: Array, right: Array, weights: NormWeights) -> tuple[Array, Array, Array]:
    """Return (S, σ, T) with U = B S and Vᵀ = T A of the SVD U σ Vᵀ of a pair in the norm.

    Shapes (…, r, k), (…, k) and (…, k, r). Columns of G^½ U and C^½ V are orthonormal, to twelve
    digits. NumPy's triangles are Cholesky's factors of Gram matrices where these are well
    conditioned, in a fifth of the time. Pairs may be in single precision: sums are in double.
    """
    columns, rows = _weighted(left, right, weights)
    return gauge_of(_cholesky_or_qr(columns), _cholesky_or_qr(rows))


def _cholesky_or_qr(array: Array) -> Array:
    """Return R with Rᵀ R = Aᵀ A: ‖R x‖ has twelve digits of ‖A x‖ for every x [1]_.

    Cholesky's factor of the Gram matrix where its condition, with columns scaled to length one, is
    at most 1e4 (which costs four of sixteen digits), else by QR.

    .. [1] Y. Yamamoto, Y. Nakatsukasa, Y. Yanagisawa and T. Fukaya, Roundoff error analysis of the
       CholeskyQR2 algorithm, Electron. Trans. Numer. Anal. 44 (2015).
    """
    if type(array) is not np.ndarray or array.ndim != 2 or array.dtype.kind == "c":
        return triangular_factor(as_double(array))
    from scipy.linalg.lapack import dpocon, dpotrf

    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        gram = gram_of(array)
        lengths = np.sqrt(np.diag(gram))
    if not SMALLEST_LENGTH < lengths.min() <= lengths.max() < 1.0 / SMALLEST_LENGTH:
        return triangular_factor(as_double(array))
    # Columns of any length: Cholesky's errors are those of a unit diagonal.
    scaled = gram / np.outer(lengths, lengths)
    factor, failed = dpotrf(scaled)
    if failed:
        return triangular_factor(as_double(array))
    one_norm = np.abs(scaled).sum(axis=0).max()
    reciprocal_condition, _ = dpocon(factor, one_norm)
    if reciprocal_condition < 1.0 / 1e4:
        return triangular_factor(as_double(array))
    return factor * lengths


def weighted_triangles(left: Array, right: Array, weights: NormWeights) -> tuple[Array, Array]:
    """Return R of thin QR factorizations of G^½ B and C^½ Aᵀ for pairs (…, m, r), (…, r, n)."""
    columns, rows = _weighted(left, right, weights)
    return triangular_factor(columns), triangular_factor(rows)


def gauge_of(triangle: Array, other: Array) -> tuple[Array, Array, Array]:
    """Return `weighted_gauge` from its `weighted_triangles`."""
    xp = namespace(triangle, other)
    u, sigma, vh = xp.linalg.svd(triangle @ xp.matrix_transpose(other), full_matrices=False)
    size = int(triangle.shape[-1])
    largest = xp.max(sigma, axis=-1, keepdims=True)
    positive = sigma > size * unit_roundoff(dtype_name(sigma)) * largest
    # Directions that are rounding alone get zero columns, no infinite ones.
    divisor = xp.where(positive, sigma, xp.ones_like(sigma))
    inverse = xp.where(positive, 1.0 / divisor, xp.zeros_like(sigma))
    columns = xp.matrix_transpose(other) @ (xp.matrix_transpose(vh) * inverse[..., None, :])
    rows = (inverse[..., :, None] * xp.matrix_transpose(u)) @ triangle
    return columns, xp.where(positive, sigma, xp.zeros_like(sigma)), rows


def pair_norms(left: Array, right: Array, weights: NormWeights) -> Array:
    """Return ‖G^½ B A C^½‖_F of pairs (…, m, r), (…, r, n) in double precision, shape (…)."""
    columns, rows = _weighted(left, right, weights)
    return namespace(left).linalg.matrix_norm(pair_core([columns], [rows]))


def pair_residual_norms(
    left: Array, right: Array, other_left: Array, other_right: Array, weights: NormWeights
) -> Array:
    """Return ‖G^½ (B A − B̂ Â) C^½‖_F of batches of pairs in double precision, shape (…)."""
    return pair_distances(
        *_weighted(left, right, weights), *_weighted(other_left, other_right, weights)
    )


def _weighted(left: Array, right: Array, weights: NormWeights) -> tuple[Array, Array]:
    """Return G^½ B and C^½ Aᵀ."""
    columns = weights.output.root(left)
    rows = weights.input.root(namespace(right).matrix_transpose(right))
    return columns, rows


def leading_norms(norms: NormWeights) -> NormWeights:
    """Return both weights with only their leading eigenpairs, the others replaced by their mean.

    The eigenvalues that are replaced differ from their mean, in all, by at most a fiftieth of the
    trace. By hand: on a language model's layers norms and errors then agree with those of the full
    weight to a thousandth.
    """
    return NormWeights(_leading_weight(norms.output), _leading_weight(norms.input))


def _leading_weight(weight: Weight) -> Weight:
    """Return V diag(λ) Vᵀ + ρ(I − VVᵀ) with only the largest λ; the trace stays.

    A weight without eigenpairs is returned as it is, one that needs most of them keeps all.
    """
    if not isinstance(weight, LowRankPlusIdentity) or weight.basis.ndim != 2:
        return weight
    values = to_numpy(weight.values)
    descending = np.argsort(-values, kind="stable")
    complement = np.full(weight.size - len(values), float(weight.rest))
    spectrum = np.sort(np.concatenate([values[descending], complement]))[::-1]
    trace = spectrum.sum()
    # Eigenpairs come in such multiples, by hand: layers of one size can share a batch without much
    # padding.
    multiple = 16
    for count in range(multiple, min(len(values), weight.size - 1), multiple):
        replaced = spectrum[count:]
        mean = replaced.mean()
        # Deviations above the mean equal those below it: each half is what has moved.
        spread = np.sum(np.abs(replaced - mean)) / 2.0
        if spread <= 0.02 * trace:
            kept = descending[:count]
            return LowRankPlusIdentity(weight.basis[:, kept], weight.values[kept], mean)
    return LowRankPlusIdentity(weight.basis, weight.values, weight.rest)
