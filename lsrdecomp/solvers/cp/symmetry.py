"""Sums of Kronecker products that are symmetric as their matrix is, for three and more factors.

Transposing a sum transposes every factor of its terms. It stays as it is where each term is turned
into itself, with factors that are symmetric or antisymmetric, or into another one. Alternating
least squares keeps that: from such terms the next are of the same kind, but for rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import adjoint, as_double, is_complex, like, norm, to_numpy
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.targets.target import Dense

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.targets.target import Target

ROUNDING = 64.0
"""Unit roundoffs, relative to the norm, within which a matrix and its transpose are the same."""


def asks_for_symmetry(target: Target, shape: KroneckerShape) -> bool:
    """Return whether a target is a real symmetric array, and all factors are square."""
    if shape.rows != shape.columns or not isinstance(target, Dense) or is_complex(target.matrix):
        return False
    difference = norm(target.matrix - adjoint(target.matrix))
    return difference <= ROUNDING * unit_roundoff(target.matrix.dtype) * target.norm


def is_symmetric(matrix: SeparatedMatrix) -> bool:
    """Return whether a sum is symmetric, but for rounding."""
    return (matrix - matrix.T).norm <= ROUNDING * unit_roundoff(matrix.dtype) * matrix.norm


def symmetrised(matrix: SeparatedMatrix) -> SeparatedMatrix:
    """Return a symmetric sum of as many terms, near a real one.

    Terms go in the order of how near each is to the transpose of another, or to its own: two become
    each other's transpose, and of one each factor becomes symmetric or antisymmetric.
    """
    factors = [np.array(to_numpy(as_double(factor))) for factor in matrix.factors]
    weights = np.array(to_numpy(as_double(matrix.weights)))
    terms = len(weights)
    # ⟨A_kᵀ, A_l⟩ of each factor; their product is that of the terms.
    inner = [np.einsum("kji,lij->kl", factor, factor) for factor in factors]
    overlaps = np.prod(inner, axis=0)
    remaining = list(range(terms))
    while remaining:
        k, other = _nearest(overlaps, remaining)
        for factor, products in zip(factors, inner, strict=True):
            if k != other:
                sign = np.sign(products[k, other])
                factor[k] = 0.5 * (factor[k] + sign * factor[other].T)
                factor[other] = sign * factor[k].T
        if k == other:
            signs = _parities([products[k, k] for products in inner])
            for factor, sign in zip(factors, signs, strict=True):
                factor[k] = 0.5 * (factor[k] + sign * factor[k].T)
        else:
            weights[k] = weights[other] = 0.5 * (weights[k] + weights[other])
            remaining.remove(other)
        remaining.remove(k)
    prototype = matrix.factors[0]
    return SeparatedMatrix.from_factors(
        [like(factor, prototype) for factor in factors], like(weights, matrix.weights)
    )


def _nearest(overlaps: np.ndarray, remaining: list[int]) -> tuple[int, int]:
    """Return the two remaining terms nearest to be each other's transpose; twice the same for one.

    A pair has to overlap by half, of terms of norm one, unless no term is nearer to its own
    transpose.
    """
    part = overlaps[np.ix_(remaining, remaining)]
    alone = int(np.argmax(np.diagonal(part)))
    pairs = np.where(np.triu(np.ones_like(part), 1) > 0.0, part, -np.inf)
    i, j = np.unravel_index(int(np.argmax(pairs)), pairs.shape)
    if pairs[i, j] >= max(0.5, part[alone, alone]):
        return remaining[int(i)], remaining[int(j)]
    return remaining[alone], remaining[alone]


def _parities(products: list[float]) -> list[float]:
    """Return 1 for factors nearer to symmetric and −1 for the others, whose number is even.

    ``products`` are ⟨Aᵀ, A⟩ of unit factors; if need be the least certain one changes sides.
    """
    signs = [1.0 if product >= 0.0 else -1.0 for product in products]
    if signs.count(-1.0) % 2:
        least = min(range(len(products)), key=lambda i: abs(products[i]))
        signs[least] = -signs[least]
    return signs
