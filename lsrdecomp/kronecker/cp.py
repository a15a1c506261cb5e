"""Separated matrices as CP tensors of TensorLy, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import to_numpy
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix

if TYPE_CHECKING:
    from lsrdecomp.kronecker.shape import KroneckerShape


def to_cp(matrix: SeparatedMatrix) -> Any:
    """Return the rearranged matrix R(M̂) as a ``tensorly.cp_tensor.CPTensor`` of NumPy arrays.

    Its factor matrices are (m_i·n_i, s): column k of factor i holds the entries of M_k⁽ⁱ⁾ row by
    row.

    Parameters
    ----------
    matrix : SeparatedMatrix

    Returns
    -------
    CPTensor
        Copies, in NumPy.

    Examples
    --------
    >>> import numpy as np
    >>> matrix = SeparatedMatrix.from_factors([np.ones((2, 3, 1)), np.ones((2, 4, 5))])
    >>> weights, factors = to_cp(matrix)
    >>> weights.shape, [factor.shape for factor in factors]
    ((2,), [(3, 2), (20, 2)])
    """
    from tensorly.cp_tensor import CPTensor

    factors = [to_numpy(f).reshape(f.shape[0], -1).T.copy() for f in matrix.factors]
    return CPTensor((to_numpy(matrix.weights).copy(), factors))


def from_cp(cp: Any, shape: KroneckerShape) -> SeparatedMatrix:
    """Return the matrix of Kronecker shape ``shape`` whose rearrangement is a CP tensor.

    Parameters
    ----------
    cp : CPTensor or (weights, factors)
        Factor i of shape (m_i·n_i, s); ``weights`` may be None.
    shape : KroneckerShape

    Returns
    -------
    SeparatedMatrix

    Raises
    ------
    ShapeError
        If the number or the heights of the factors do not match ``shape``.

    Examples
    --------
    >>> from lsrdecomp.kronecker.shape import KroneckerShape
    >>> import numpy as np
    >>> A, B = np.array([[1.0, 2.0]]), np.array([[3.0], [4.0]])
    >>> columns = [A.reshape(-1, 1), B.reshape(-1, 1)]
    >>> matrix = from_cp((None, columns), KroneckerShape(((1, 2), (2, 1))))
    >>> bool(np.allclose(matrix.to_matrix(), np.kron(A, B)))
    True
    """
    weights, factors = cp
    heights = tuple(int(f.shape[0]) for f in factors)
    if heights != shape.sizes:
        raise ShapeError(
            f"{shape} has factors of {shape.sizes} entries, the CP tensor has modes of {heights}"
        )
    stacks = [
        np.asarray(f).T.reshape(f.shape[1], m, n)
        for f, (m, n) in zip(factors, shape.factors, strict=True)
    ]
    return SeparatedMatrix.from_factors(stacks, None if weights is None else np.asarray(weights))
