"""Arithmetic on separated matrices without forming them: products multiply ranks, `recompress` brings them down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lsrdecomp.arrays import Array, adjoint, as_double, conjugate, namespace, to_numpy
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix


def product(left: SeparatedMatrix, right: SeparatedMatrix) -> SeparatedMatrix:
    """The matrix product, by (A ⊗ B)(C ⊗ D) = AC ⊗ BD term by term.

    Parameters
    ----------
    left : SeparatedMatrix of s terms with factors (m_i, q_i)
    right : SeparatedMatrix of t terms with factors (q_i, n_i)

    Returns
    -------
    SeparatedMatrix
        At most s·t terms with factors (m_i, n_i); cost s·t·Σ m_i q_i n_i. `recompress` finds how few are needed [1]_.

    References
    ----------
    .. [1] G. Beylkin and M. J. Mohlenkamp, SIAM J. Sci. Comput. 26 (2005), sec. 2. doi:10.1137/040604959
    """
    inner = left.kronecker_shape.columns, right.kronecker_shape.rows
    if inner[0] != inner[1]:
        raise ShapeError(f"inner sizes differ: columns split {inner[0]}, rows split {inner[1]}")
    return _every_pair(left, right, lambda a, b: a @ b)


def hadamard(left: SeparatedMatrix, right: SeparatedMatrix) -> SeparatedMatrix:
    """The entrywise product, by (A ⊗ B) ∘ (C ⊗ D) = (A ∘ C) ⊗ (B ∘ D); at most s·t terms."""
    _same_shape(left, right)
    return _every_pair(left, right, lambda a, b: a * b)


def inverse(matrix: SeparatedMatrix) -> SeparatedMatrix:
    """The inverse of one term, (A ⊗ B)⁻¹ = A⁻¹ ⊗ B⁻¹.

    Raises
    ------
    ShapeError
        For more than one term, whose inverse is in general not a short sum, and for factors that are not square.
    """
    if matrix.separation_rank != 1:
        raise ShapeError(
            f"the inverse is a Kronecker product for one term; this matrix has {matrix.separation_rank}. "
            "Decompose the inverse itself, or use `to_linear_operator` with an iterative solver"
        )
    _square_factors(matrix)
    xp = namespace(*matrix.factors)
    return SeparatedMatrix.from_factors([xp.linalg.inv(f) for f in matrix.factors], 1.0 / matrix.weights)


def trace(matrix: SeparatedMatrix) -> complex:
    """tr M̂ = Σ_k λ_k Π_i tr M_k⁽ⁱ⁾, for square factors; in double precision."""
    _square_factors(matrix)
    total = to_numpy(as_double(matrix.weights)).astype(complex)
    for factor in matrix.factors:
        total = total * np.trace(to_numpy(as_double(factor)), axis1=1, axis2=2)
    value = complex(total.sum())
    return value if any("complex" in str(f.dtype) for f in matrix.factors) else value.real


def inner(left: SeparatedMatrix, right: SeparatedMatrix) -> complex:
    """⟨A, B⟩ = tr(Aᴴ B) = Σ_k Σ_l λ_k κ_l Π_i ⟨A_k⁽ⁱ⁾, B_l⁽ⁱ⁾⟩ in double precision; cost s·t·Σ m_i n_i.

    Rounding errors are of the size γ_A γ_B 2⁻⁵³‖A‖‖B‖; for a norm use ``SeparatedMatrix.norm``, which loses only γ.
    """
    _same_shape(left, right)
    gram: Array = 1.0
    for f, g in zip(left.factors, right.factors, strict=True):
        a, b = (as_double(q) for q in (f, g))
        xp = namespace(a, b)
        rows, columns = (xp.reshape(q, (q.shape[0], q.shape[1] * q.shape[2])) for q in (a, b))
        gram = gram * to_numpy(conjugate(rows) @ xp.matrix_transpose(columns))
    value = to_numpy(as_double(left.weights)) @ gram @ to_numpy(as_double(right.weights))
    return complex(value) if np.iscomplexobj(gram) else float(value)


def to_linear_operator(matrix: SeparatedMatrix) -> Any:
    """The matrix as a ``scipy.sparse.linalg.LinearOperator`` on NumPy arrays, never formed."""
    from scipy.sparse.linalg import LinearOperator

    held = SeparatedMatrix(to_numpy(matrix.weights), tuple(to_numpy(f) for f in matrix.factors))
    flipped = SeparatedMatrix(held.weights, tuple(adjoint(f) for f in held.factors))
    return LinearOperator(
        shape=held.shape,
        dtype=held.factors[0].dtype,
        matvec=lambda x: held @ x.reshape(-1),
        rmatvec=lambda y: flipped @ y.reshape(-1),
        matmat=lambda x: held @ x,
        rmatmat=lambda y: flipped @ y,
    )


def _every_pair(
    left: SeparatedMatrix, right: SeparatedMatrix, operation: Callable[[Array, Array], Array]
) -> SeparatedMatrix:
    xp = namespace(*left.factors, *right.factors)
    s, t = left.separation_rank, right.separation_rank
    factors = []
    for f, g in zip(left.factors, right.factors, strict=True):
        paired = operation(f[:, None, :, :], g[None, :, :, :])
        factors.append(xp.reshape(paired, (s * t, *paired.shape[2:])))
    return SeparatedMatrix.from_factors(factors, xp.reshape(left.weights[:, None] * right.weights[None, :], (s * t,)))


def _same_shape(left: SeparatedMatrix, right: SeparatedMatrix) -> None:
    if left.kronecker_shape != right.kronecker_shape:
        raise ShapeError(f"Kronecker shapes differ: {left.kronecker_shape} against {right.kronecker_shape}")


def _square_factors(matrix: SeparatedMatrix) -> None:
    for i, (m, n) in enumerate(matrix.kronecker_shape.factors, 1):
        if m != n:
            raise ShapeError(f"factor {i} is {m}×{n}; this needs square factors")
