"""Gaussian process on a grid: the marginal likelihood of K₁ ⊗ … ⊗ K_d + σ² I and its gradient.

Exact by eigenvalues.

Source: Y. Saatçi, Scalable inference for structured Gaussian process models, PhD thesis, Cambridge
(2011), ch. 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import like, to_numpy
from lsrdecomp.errors import MatrixError, ShapeError
from lsrdecomp.operators.diagonal import along
from lsrdecomp.operators.single_term import outer, require_hermitian
from lsrdecomp.operators.term_gradients import followed_once, requires_gradient, with_derivative

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class GridLikelihood:
    """The logarithm of p(y), its gradient, and the weights of predictions.

    Attributes
    ----------
    value : float, or a scalar tensor of torch where an argument required a gradient
        −½ yᵀ(K + σ²I)⁻¹y − ½ log det(K + σ²I) − ½ n log 2π.
    covariance_gradients : tuple of arrays, shapes (m_i, m_i)
        ∂ value / ∂ K_i, symmetric; chain with ∂K_i/∂θ by Σ G ∘ ∂K.
    noise_gradient : float
        ∂ value / ∂ σ².
    weights : array, shape (n,)
        α = (K + σ²I)⁻¹ y: predictions are K(∗, grid) α.

    Examples
    --------
    >>> likelihood = log_marginal_likelihood([np.eye(2), np.eye(3)], 1.0, np.zeros(6))
    >>> [gradient.shape for gradient in likelihood.covariance_gradients]
    [(2, 2), (3, 3)]
    >>> round(likelihood.noise_gradient, 6)
    -1.5
    """

    value: Any
    covariance_gradients: tuple[np.ndarray, ...]
    noise_gradient: float
    weights: np.ndarray


def log_marginal_likelihood(covariances: Sequence[Any], noise: float, y: Any) -> GridLikelihood:
    """Return log p(y) of observations on a full grid under ⊗ K_i and independent noise.

    Parameters
    ----------
    covariances : sequence of arrays, shapes (m_i, m_i)
        Symmetric positive semidefinite.
    noise : float
        Variance σ² > 0.
    y : array, shape (m_1, …, m_d) or (Π m_i,)

    Returns
    -------
    GridLikelihood
        No derivative of an eigenvector is taken, so equal eigenvalues do no harm. Where a tensor of
        torch requires a gradient, of a covariance, the noise or y, ``value`` has it, once.

    Raises
    ------
    MatrixError
        If a covariance is not symmetric, or K + σ²I not positive definite.

    Notes
    -----
    Cost Σ m_i³ + n·Σ m_i in time and n numbers of memory, where a dense route takes n³ and n².

    Examples
    --------
    >>> import numpy as np
    >>> likelihood = log_marginal_likelihood([np.eye(2), np.eye(3)], 1.0, np.zeros((2, 3)))
    >>> bool(np.isclose(likelihood.value, -3.0 * np.log(4.0 * np.pi)))  # six of variance 1 + 1
    True
    """
    if requires_gradient(*covariances, noise, y):
        return _differentiable(covariances, noise, y)
    matrices = [np.asarray(k, dtype=np.float64) for k in covariances]
    values = np.asarray(y, dtype=np.float64).reshape(-1)
    _check_grid(matrices, noise, values)

    # Step 1: the eigenvalues of the sum are all products of those of the factors, and the noise.
    decompositions = [np.linalg.eigh(matrix) for matrix in matrices]
    spectra = [eigenvalues for eigenvalues, _ in decompositions]
    vectors = tuple(eigenvectors for _, eigenvectors in decompositions)
    total = np.asarray(outer(spectra)) + noise
    if total.min() <= 0.0:
        raise MatrixError(
            f"the covariance with noise {noise:.3g} is not positive definite: {total.min():.3g}"
        )

    # Step 2: α = (K + σ²I)⁻¹ y and the value, in the common eigenvectors.
    coordinates = along(tuple(v.T for v in vectors), values)
    weighted = coordinates / total
    alpha = along(vectors, weighted)
    misfit = float(coordinates @ weighted)
    log_det = float(np.sum(np.log(total)))
    value = -0.5 * (misfit + log_det + values.size * math.log(2.0 * math.pi))

    # Step 3: the gradient ½ (α αᵀ − (K + σ²I)⁻¹), contracted with all factors but one.
    inverse = 1.0 / total
    gradients = []
    for i, v in enumerate(vectors):
        diagonal_basis = _gradient_in_eigenvectors(i, spectra, inverse, weighted)
        gradients.append(v @ diagonal_basis @ v.T)
    noise_gradient = 0.5 * (float(weighted @ weighted) - float(np.sum(inverse)))
    return GridLikelihood(value, tuple(gradients), noise_gradient, alpha)


def _differentiable(covariances: Sequence[Any], noise: Any, y: Any) -> GridLikelihood:
    """Return the likelihood of tensors, its value with its gradient."""
    import torch

    arguments = [torch.as_tensor(q) for q in (*covariances, noise, y)]
    *matrices, variance, observations = [to_numpy(q) for q in arguments]
    constant = log_marginal_likelihood(matrices, float(variance), observations)
    slopes = (
        *constant.covariance_gradients,
        np.asarray(constant.noise_gradient),
        -constant.weights.reshape(observations.shape),
    )
    terms = []
    for slope, argument in zip(slopes, arguments, strict=True):
        terms.append((like(slope, argument) * followed_once(argument)).sum())
    expression = sum(terms)
    value = with_derivative(like(np.asarray(constant.value), expression), expression)
    return replace(constant, value=value)


def _check_grid(covariances: Sequence[np.ndarray], noise: float, values: np.ndarray) -> None:
    """Raise unless covariances are symmetric, the noise positive, and values fill their grid."""
    for i, covariance in enumerate(covariances, 1):
        if covariance.ndim != 2 or covariance.shape[0] != covariance.shape[1]:
            raise ShapeError(f"covariance {i} must be square, it has shape {covariance.shape}")
        require_hermitian(covariance, f"covariance {i}")
    sizes = tuple(len(covariance) for covariance in covariances)
    n_points = math.prod(sizes)
    if values.size != n_points:
        raise ShapeError(
            f"{values.size:,} observations on a grid of {sizes}, which has {n_points:,} points"
        )
    if not (math.isfinite(noise) and noise > 0.0):
        raise MatrixError(f"the variance of the noise must be positive, got {noise}")


def _gradient_in_eigenvectors(
    i: int, spectra: Sequence[np.ndarray], inverse: np.ndarray, weighted: np.ndarray
) -> np.ndarray:
    """Return V_iᵀ (∂ value / ∂ K_i) V_i, symmetric.

    ``inverse`` and ``weighted`` hold (K + σ²I)⁻¹ and α in the eigenvectors of the grid.
    """
    sizes = tuple(len(spectrum) for spectrum in spectra)
    others = list(spectra)
    others[i] = np.ones(sizes[i])
    product_of_others = np.asarray(outer(others)).reshape(sizes)
    other_axes = tuple(j for j in range(len(sizes)) if j != i)
    log_det = np.sum(inverse.reshape(sizes) * product_of_others, axis=other_axes)
    alpha = weighted.reshape(sizes)
    left = np.moveaxis(alpha, i, 0).reshape(sizes[i], -1)
    right = np.moveaxis(alpha * product_of_others, i, 0).reshape(sizes[i], -1)
    gradient = 0.5 * (left @ right.T) - 0.5 * np.diag(log_det)
    symmetric: np.ndarray = 0.5 * (gradient + gradient.T)
    return symmetric
