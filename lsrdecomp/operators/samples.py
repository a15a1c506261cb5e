"""The Kronecker product nearest to a sum over samples, never formed: K-FAC from samples."""

from __future__ import annotations

from lsrdecomp.arrays import (
    Array,
    as_double,
    as_floating,
    conjugate,
    device,
    namespace,
    norm,
    real_part,
    require_finite,
)
from lsrdecomp.errors import ConvergenceError, MatrixError, ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.operators.preconditioners import with_positive_factors


def nearest_kronecker_of_samples(
    a: Array,
    g: Array,
    *,
    weights: Array | None = None,
    rtol: float = 1e-8,
) -> SeparatedMatrix:
    """Return the nearest A ⊗ G to Σ_j w_j (a_j a_jᴴ) ⊗ (g_j g_jᴴ), which is never formed.

    K-FAC from the inputs and the gradients of a layer.

    Parameters
    ----------
    a : Array, shape (N, m)
    g : Array, shape (N, p)
        Samples, one a row, of one library and device; the result lies there too.
    weights : Array, shape (N,), optional
        Not negative; all ones if absent.
    rtol : float
        Estimated distance of the factors, of norm one, from the nearest ones.

    Returns
    -------
    SeparatedMatrix
        One term of positive definite factors (m, m) and (p, p) in double precision.

    Raises
    ------
    ConvergenceError
        If two different products are so equally near that 500 rounds do not decide between them.

    Notes
    -----
    A round costs 4 N (m² + p²) operations, and the memory of the samples once more. The distance
    falls by (σ₂/σ₁)² a round, the ratio of the two leading singular values of the rearranged sum.

    Examples
    --------
    >>> import numpy as np
    >>> inputs, gradients = np.random.default_rng(0).standard_normal((2, 500, 3))
    >>> nearest = nearest_kronecker_of_samples(inputs, gradients)  # of E[a aᵀ ⊗ g gᵀ]·500, 9 × 9
    >>> nearest.shape, bool(np.linalg.eigvalsh(nearest.to_matrix())[0] > 0.0)
    ((9, 9), True)
    """
    a = as_double(as_floating(a, "a"))
    g = as_double(as_floating(g, "g"))
    if a.ndim != 2 or g.ndim != 2 or a.shape[0] != g.shape[0] or 0 in (*a.shape, *g.shape):
        raise ShapeError(
            "samples are the rows of two matrices of equal height, "
            f"got {tuple(a.shape)} and {tuple(g.shape)}"
        )
    require_finite(a, "a")
    require_finite(g, "g")
    xp = namespace(a, g)
    if weights is None:
        weights = xp.ones(a.shape[0], dtype=xp.float64, device=device(a))
    weights = as_double(weights)
    if bool(xp.any(weights < 0)):
        raise MatrixError("weights of samples must not be negative")

    first = _covariance(a, weights * _quadratic_forms(g, None))
    size = norm(first)
    if size == 0.0:
        raise MatrixError("all samples are zero: no Kronecker product is nearest")
    first = first / size
    last_change = 1.0
    max_rounds = 500
    for _ in range(max_rounds):
        # Each factor in turn: the sum contracted with the other one, a covariance of weighted
        # samples.
        second = _covariance(g, weights * _quadratic_forms(a, first))
        second = second / norm(second)
        image = _covariance(a, weights * _quadratic_forms(g, second))
        size = norm(image)
        change = norm(image / size - first)
        first = image / size
        # The change falls geometrically: what is still to come is told from the last two.
        ratio = change / last_change
        last_change = change
        if change <= 1e-15 or (ratio < 1.0 and change * ratio / (1.0 - ratio) <= rtol):
            factors = [first[None, :, :], second[None, :, :]]
            scale = size * xp.ones_like(weights[:1])
            return with_positive_factors(SeparatedMatrix.from_factors(factors, scale))
    raise ConvergenceError(
        f"two Kronecker products are almost equally near: after {max_rounds} rounds the factors "
        f"still change by {change:.3g}",
        SeparatedMatrix.from_factors([first[None, :, :], second[None, :, :]]),
    )


def _quadratic_forms(samples: Array, matrix: Array | None) -> Array:
    """Return s_jᴴ X s_j of each row for a Hermitian X, the identity if absent."""
    image = samples if matrix is None else samples @ conjugate(matrix)
    return real_part(namespace(samples).sum(conjugate(samples) * image, axis=1))


def _covariance(samples: Array, weights: Array) -> Array:
    """Return Σ_j w_j s_j s_jᴴ, positive semidefinite whatever the rounding.

    As a product Sᵀ S̄, which libraries form at half the cost.
    """
    xp = namespace(samples)
    roots = xp.sqrt(xp.where(weights > 0, weights, xp.zeros_like(weights)))
    scaled = samples * xp.astype(roots, samples.dtype)[:, None]
    return xp.matrix_transpose(scaled) @ conjugate(scaled)
