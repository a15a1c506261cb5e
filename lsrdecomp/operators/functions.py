"""Functions of a separated matrix applied to vectors: the exponential."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import Array, as_double, as_floating, is_complex, like, to_numpy
from lsrdecomp.operators.diagonal import along, diagonalize
from lsrdecomp.operators.factor_threads import one_thread_for_small_factors
from lsrdecomp.operators.host import as_solution, check_sides, to_host, without_gradient

if TYPE_CHECKING:
    from lsrdecomp.kronecker.separated import SeparatedMatrix


@one_thread_for_small_factors
def expm_multiply(matrix: SeparatedMatrix, x: Any, t: complex = 1.0) -> Array:
    """Return exp(t A) x, never forming A.

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
    >>> heat = expm_multiply(laplacian, np.ones(9), t=-0.1)  # diffusion for a time of 0.1
    >>> bool(heat[4] > heat[1] > heat[0] > 0.0)  # warm inside, cold at the corners
    True
    """
    x = as_floating(x, "x")
    check_sides(matrix, x)
    import scipy.linalg
    import scipy.sparse.linalg

    terms = to_host(matrix)
    values = to_numpy(as_double(without_gradient(x)))
    prototype = as_solution(x, 1j * matrix if np.iscomplexobj(t) else matrix)

    summands = _kronecker_summands(terms)
    if summands is not None:
        exponentials = tuple(scipy.linalg.expm(t * summand) for summand in summands)
        return like(along(exponentials, values), prototype)
    common = diagonalize(terms, unitary=True)
    if common is not None:
        return like(common.apply(np.exp(t * common.values), values), prototype)
    trace = complex(terms.trace()) if is_complex(terms.factors[0]) else float(terms.trace())
    operator = terms.to_linear_operator() * t
    image = scipy.sparse.linalg.expm_multiply(operator, values, traceA=trace * t)
    return like(image, prototype)


def _kronecker_summands(matrix: SeparatedMatrix) -> list[np.ndarray] | None:
    """Return A_i with A = Σ_i I ⊗ … ⊗ A_i ⊗ … ⊗ I.

    None where a term has several factors that are no multiples of I.
    """
    if any(m != n for m, n in matrix.kronecker_shape.factors):
        return None
    sizes = matrix.kronecker_shape.rows
    dtype = np.result_type(*matrix.factors)
    summands = [np.zeros((m, m), dtype=dtype) for m in sizes]
    for k, weight in enumerate(matrix.weights):
        scale = complex(weight)
        place = None
        for i, stack in enumerate(matrix.factors):
            value = stack[k, 0, 0]
            if np.linalg.norm(stack[k] - value * np.eye(sizes[i])) <= 2.0**-50:
                scale *= value
            elif place is None:
                place = i
            else:
                return None
        coefficient = scale if np.iscomplexobj(summands[0]) else scale.real
        if place is None:  # a multiple of I, which goes to the first
            summands[0] = summands[0] + coefficient * np.eye(sizes[0])
        else:
            summands[place] = summands[place] + coefficient * matrix.factors[place][k]
    return summands
