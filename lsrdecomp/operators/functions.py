"""Functions of a separated matrix applied to vectors: the exponential."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import Array, as_double, as_floating, is_complex, like, to_numpy
from lsrdecomp.operators.diagonal import along, diagonalize
from lsrdecomp.operators.host import check_sides, detached, host, wide
from lsrdecomp.operators.threads import one_thread_for_small_factors

if TYPE_CHECKING:
    from lsrdecomp.kronecker.separated import SeparatedMatrix


@one_thread_for_small_factors
def expm_multiply(matrix: SeparatedMatrix, x: Any, t: complex = 1.0) -> Array:
    """exp(t A) x, never forming A.

    Kronecker sums by exp(A ⊕ B) = exp(A) ⊗ exp(B), commuting Hermitian factors by their
    eigenvalues, other sums by ``scipy.sparse.linalg.expm_multiply``, whose error is of the size of
    rounding as well.

    Parameters
    ----------
    matrix : SeparatedMatrix, shape (n, n)
    x : array, shape (n,) or (n, b)
    t : float or complex
        Such as ``-1j`` times the time, where A is a Hamiltonian; the result is then complex.

    Returns
    -------
    Array, shape of x
        In the library of x, which must not require a gradient.

    Raises
    ------
    ShapeError
        If the matrix is not square or x does not fit.
    MatrixError
        For tensors that require a gradient.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp.operators import kronecker_sum
    >>> second = 2 * np.eye(3) - np.eye(3, k=1) - np.eye(3, k=-1)
    >>> laplacian = kronecker_sum(second, second)
    >>> heat = expm_multiply(laplacian, np.ones(9), t=-0.1)                         # diffusion for a time of 0.1
    >>> bool(heat[4] > heat[1] > heat[0] > 0.0)                                     # warm inside, cold at the corners
    True
    """
    x = as_floating(x, "x")
    check_sides(matrix, x)
    import scipy.linalg
    import scipy.sparse.linalg

    terms, values = host(matrix), to_numpy(as_double(detached(x)))
    shape = matrix.kronecker_shape.factors
    split = _kronecker_sum(terms) if all(m == n for m, n in shape) else None
    if split is not None:
        image = along(tuple(scipy.linalg.expm(t * part) for part in split), values)
    elif (flat := diagonalize(terms, unitary=True)) is not None:
        image = flat.apply(np.exp(t * flat.values), values)
    else:
        operator = terms.to_linear_operator() * t
        trace = (
            complex(terms.trace()) * t if is_complex(terms.factors[0]) else float(terms.trace()) * t
        )
        image = scipy.sparse.linalg.expm_multiply(operator, values, traceA=trace)
    return like(image, wide(x, 1j * matrix if np.iscomplexobj(t) else matrix))


def _kronecker_sum(matrix: SeparatedMatrix) -> list[np.ndarray] | None:
    """A_i with A = Σ_i I ⊗ … ⊗ A_i ⊗ … ⊗ I, if every term has at most one factor that is no multiple of I."""
    sizes = matrix.kronecker_shape.rows
    kind = np.result_type(*matrix.factors)
    parts = [np.zeros((m, m), dtype=kind) for m in sizes]
    for k, weight in enumerate(matrix.weights):
        scale, index = complex(weight), None
        for i, factor in enumerate(matrix.factors):
            value = factor[k, 0, 0]
            if np.linalg.norm(factor[k] - value * np.eye(sizes[i])) <= 2.0**-50:
                scale *= value
            elif index is None:
                index = i
            else:
                return None
        term = np.eye(sizes[0]) if index is None else matrix.factors[index][k]
        parts[index or 0] = (
            parts[index or 0] + (scale if np.iscomplexobj(parts[0]) else scale.real) * term
        )
    return parts
