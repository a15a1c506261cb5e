"""Sums whose factors are triangular in common bases: any A₁ ⊗ B₁ + A₂ ⊗ B₂ and any Kronecker sum, Hermitian or not.

The generalised Schur form Qᴴ A_k Z of each pair of factors makes the sum block triangular; the
solution follows by back substitution, as Bartels and Stewart's for the Sylvester equation.

Sources: R. H. Bartels and G. W. Stewart, Solution of the matrix equation AX + XB = C, Comm. ACM 15
(1972). doi:10.1145/361573.361582; J. D. Gardiner, A. J. Laub, J. J. Amato and C. B. Moler, Solution
of the Sylvester matrix equation AXBᵀ + CXDᵀ = E, ACM Trans. Math. Softw. 18 (1992).
doi:10.1145/146847.146929
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import as_double, to_numpy
from lsrdecomp.kronecker.rearrange import khatri_rao
from lsrdecomp.operators.diagonal import ALLOWED, along, nonzero_sums

if TYPE_CHECKING:
    from lsrdecomp.kronecker.separated import SeparatedMatrix


@dataclass(frozen=True, eq=False)
class Triangularized:
    """Qᴴ A Z = Σ_k λ_k ⊗_i T_k⁽ⁱ⁾ with upper triangular T, Q = ⊗ Q_i and Z = ⊗ Z_i unitary; complex."""

    left: tuple[np.ndarray, ...]  # Q_i
    right: tuple[np.ndarray, ...]  # Z_i
    weights: np.ndarray
    triangles: tuple[np.ndarray, ...]  # T⁽ⁱ⁾ (s, m_i, m_i)

    @property
    def terms(self) -> np.ndarray:
        """Diagonals of the terms, shape (s, n)."""
        columns = (np.diagonal(stack, axis1=1, axis2=2).T for stack in self.triangles)
        return np.asarray((reduce(khatri_rao, columns) * self.weights).T)

    def solve(self, b: np.ndarray) -> np.ndarray:
        """A⁻¹ b for b of shape (n,) or (n, k). Raises `MatrixError` for a singular sum."""
        nonzero_sums(self.terms, "diagonal values in Schur form")
        columns = np.asarray(b).reshape(len(b), -1)
        inner = along(tuple(q.conj().T for q in self.left), columns)
        solved = _back_substitution(self.weights.astype(complex), self.triangles, inner)
        return along(self.right, solved).reshape(b.shape)

    def slogdet(self) -> tuple[complex, float]:
        values = self.terms.sum(axis=0)
        if not np.all(values):
            return 0.0, -np.inf
        sign, size = complex(np.prod(values / np.abs(values))), len(values)
        for q, z in zip(self.left, self.right, strict=True):
            phase = np.linalg.det(q) * np.conj(np.linalg.det(z))
            sign *= (phase / abs(phase)) ** (size // len(q))
        return sign / abs(sign), float(np.sum(np.log(np.abs(values))))


def triangularize(matrix: SeparatedMatrix) -> Triangularized | None:
    """Generalised Schur forms of all factors, or None where none serves every term; always there for two terms.

    Parameters
    ----------
    matrix : SeparatedMatrix, shape (n, n)
        NumPy or torch; it comes to the host.

    Returns
    -------
    Triangularized or None
        Complex. Cost about 30 m_i³ a factor.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp.operators import kronecker_sum
    >>> matrix = kronecker_sum(np.array([[1.0, 5.0], [0.0, 2.0]]), np.array([[3.0, 1.0], [0.0, 4.0]]))
    >>> bool(np.allclose(matrix @ triangularize(matrix).solve(np.ones(4)), 1.0))    # no common eigenvectors needed
    True
    """
    import scipy.linalg

    if matrix.separation_rank == 0 or any(m != n for m, n in matrix.kronecker_shape.factors):
        return None
    left, right, triangles = [], [], []
    mixed = np.random.default_rng(0).uniform(0.5, 1.5, (2, matrix.separation_rank))
    for factor in matrix.factors:
        stack = to_numpy(as_double(factor))
        # Schur 1: two terms have a common form; of more, random combinations of all terms show it
        # if there is one.
        first, second = (np.tensordot(row, stack, axes=1) for row in mixed)
        if len(stack) == 2:
            first, second = stack
        _, _, q, z = scipy.linalg.qz(first, second, output="complex")
        # Schur 2: whether it serves every term is seen below the diagonals.
        turned = q.conj().T @ stack @ z
        if np.max(np.linalg.norm(np.tril(turned, -1), axis=(1, 2))) > ALLOWED * stack.shape[1]:
            return None
        left.append(q)
        right.append(z)
        triangles.append(np.triu(turned))
    return Triangularized(
        tuple(left), tuple(right), to_numpy(as_double(matrix.weights)), tuple(triangles)
    )


def _back_substitution(
    weights: np.ndarray, triangles: tuple[np.ndarray, ...], b: np.ndarray
) -> np.ndarray:
    """(Σ_k w_k ⊗_i T_k⁽ⁱ⁾)⁻¹ b, b (n, columns): the last index of the first factor first."""
    import scipy.linalg

    first, rest = triangles[0], triangles[1:]
    if not rest:
        return np.asarray(scipy.linalg.solve_triangular(np.tensordot(weights, first, axes=1), b))
    m, inner = first.shape[1], b.shape[0] // first.shape[1]
    right = b.reshape(m, inner, -1).copy()
    solved = np.empty_like(right)
    for j in range(m - 1, -1, -1):
        solved[j] = _back_substitution(weights * first[:, j, j], rest, right[j])
        if j:
            for k, weight in enumerate(weights):  # what row j adds to the equations above it
                image = along(tuple(stack[k] for stack in rest), solved[j])
                right[:j] -= (weight * first[k, :j, j])[:, None, None] * image
    return solved.reshape(b.shape)
