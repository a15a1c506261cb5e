"""Sums whose factors are diagonal in common bases: A = U diag(v) Uᴴ with U = ⊗ U_i.

Found from m_i × m_i problems only.
Kronecker sums A ⊗ I + I ⊗ B for any number of factors, finite elements K ⊗ M + M ⊗ K, a covariance
plus noise, and any A₁ ⊗ B₁ + A₂ ⊗ B₂ of Hermitian factors, one of each pair definite, are of this
kind.

Source: R. E. Lynch, J. R. Rice and D. H. Thomas, Direct solution of partial difference equations by
tensor product methods, Numer. Math. 6 (1964). doi:10.1007/BF01386067
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import as_double, to_numpy
from lsrdecomp.errors import MatrixError
from lsrdecomp.kronecker.rearrange import apply_sum_of_kroneckers
from lsrdecomp.operators.single_term import deviation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lsrdecomp.kronecker.separated import SeparatedMatrix

ROUNDING = 1e-13
"""What rounding may leave off the diagonal of a factor of norm one in its common basis, per row:
some 500 unit roundoffs of double precision."""


@dataclass(frozen=True, eq=False)
class Diagonalized:
    """Vᴴ A V = diag(v) for V = ⊗ V_i."""

    vectors: tuple[np.ndarray, ...]  # V_i (m_i, m_i)
    terms: np.ndarray  # (s, n): λ_k times the diagonal of term k in the common basis
    unitary: bool  # whether VᴴV = I, so that v are eigenvalues

    @property
    def values(self) -> np.ndarray:
        """v, shape (n,), in the order of the Kronecker product."""
        return np.asarray(self.terms.sum(axis=0))

    def solve(self, b: np.ndarray) -> np.ndarray:
        """Return A⁻¹ b = V diag(1/v) Vᴴ b. Raises `MatrixError` for a singular sum."""
        return self.apply(1.0 / nonzero_sums(self.terms, "values in the common basis"), b)

    def apply(self, values: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return V diag(values) Vᴴ b."""
        coordinates = along(tuple(v.conj().T for v in self.vectors), b)
        return along(self.vectors, (coordinates.T * values).T)

    def slogdet(self) -> tuple[complex, float]:
        """Return (sign, log|det A|); the sign is a complex phase for complex values."""
        values = self.values
        if not np.all(values):
            return 0.0, -np.inf
        log = float(np.sum(np.log(np.abs(values))))
        for vectors in self.vectors:
            log -= 2.0 * (values.size // len(vectors)) * float(np.linalg.slogdet(vectors)[1])
        sign = np.prod(values / np.abs(values))
        return (complex(sign) if np.iscomplexobj(values) else float(sign)), log


def diagonalize(matrix: SeparatedMatrix, *, unitary: bool = False) -> Diagonalized | None:
    """Return common bases of the factors, or None where there are none.

    Parameters
    ----------
    matrix : SeparatedMatrix, shape (n, n)
        NumPy, in double precision.
    unitary : bool
        Only orthonormal bases serve.

    Returns
    -------
    Diagonalized or None
        Cost a few m_i³ for each factor and term.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp.operators import kronecker_sum
    >>> second = 2 * np.eye(3) - np.eye(3, k=1) - np.eye(3, k=-1)
    >>> laplacian = kronecker_sum(second, second)
    >>> common = diagonalize(laplacian)
    >>> exact = np.linalg.eigvalsh(laplacian.to_matrix())
    >>> common.unitary, bool(np.allclose(np.sort(common.values), exact))
    (True, True)
    """
    if matrix.separation_rank == 0 or any(m != n for m, n in matrix.kronecker_shape.factors):
        return None
    bases = []
    diagonals = to_numpy(as_double(matrix.weights))[:, None]
    all_unitary = True
    for factor in matrix.factors:
        basis = _common_basis(to_numpy(as_double(factor)), unitary)
        if basis is None:
            return None
        vectors, entries, is_unitary = basis
        bases.append(vectors)
        all_unitary = all_unitary and is_unitary
        products = diagonals[:, :, None] * entries[:, None, :]
        diagonals = products.reshape(len(diagonals), -1)
    return Diagonalized(tuple(bases), diagonals, all_unitary)


def along(factors: tuple[np.ndarray, ...], x: np.ndarray) -> np.ndarray:
    """Return (⊗ F_i) x for x of shape (n,) or (n, b): one product of matrices a factor."""
    stacks = [factor[None] for factor in factors]
    return np.asarray(apply_sum_of_kroneckers(stacks, None, np.asarray(x)))


def _common_basis(stack: np.ndarray, unitary: bool) -> tuple[np.ndarray, np.ndarray, bool] | None:
    """Return V with every Vᴴ F_k V diagonal, the diagonals (s, m), and whether V is unitary."""
    import scipy.linalg

    m = stack.shape[1]
    if max(deviation(f) for f in stack) > ROUNDING * m:
        return None
    # Basis 1: eigenvectors of a random combination of the terms serve all of them if any basis
    # does, for what one term leaves open, equal eigenvalues, others decide.
    stack = 0.5 * (stack + stack.conj().transpose(0, 2, 1))
    combinations = np.random.default_rng(0).uniform(0.5, 1.5, (2, len(stack)))
    for mass in _masses(stack, unitary):
        for weights in combinations:
            pencil = np.tensordot(weights, stack, axes=1)
            try:
                vectors = scipy.linalg.eigh(pencil, mass)[1]
            except np.linalg.LinAlgError:
                continue
            # Basis 2: whether they do is seen in what is left beside the diagonals.
            rotated = vectors.conj().T @ stack @ vectors
            entries = np.diagonal(rotated, axis1=1, axis2=2).real
            off_diagonal = rotated - entries[:, :, None] * np.eye(m)
            size = np.linalg.norm(vectors, 2) ** 2
            if np.max(np.linalg.norm(off_diagonal, axis=(1, 2))) <= ROUNDING * m * size:
                return vectors, entries, mass is None
    return None


def _masses(stack: np.ndarray, unitary: bool) -> Iterator[np.ndarray | None]:
    """Yield what is made the identity: nothing first, then definite factors by condition.

    A condition up to 1e12 leaves four digits of the eigenvectors, which are then measured.
    """
    yield None
    if unitary:
        return
    definite = []
    for factor in stack:
        values = np.linalg.eigvalsh(factor)
        positive = factor
        if values[0] <= 0:
            positive = -factor
            values = -values[::-1]
        low, high = values[0], values[-1]
        if low > 1e-12 * high > 0:
            definite.append((low / high, positive))
    for _, factor in sorted(definite, key=lambda pair: -pair[0]):
        yield factor


def nonzero_sums(terms: np.ndarray, what: str) -> np.ndarray:
    """Return sums over the terms (s, n).

    Raises `MatrixError` for one that rounding of the terms could have made of zero.
    """
    sums = np.asarray(terms.sum(axis=0))
    sizes = np.abs(sums)
    rounding = float(np.max(np.abs(terms).sum(axis=0))) * 2.0**-53
    if sizes.min() <= rounding:
        raise MatrixError(
            f"the matrix is singular: the smallest of its {sums.size:,} {what} is "
            f"{sizes.min():.3g}, the largest {sizes.max():.3g}, rounding {rounding:.3g}"
        )
    return sums
