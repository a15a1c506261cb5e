"""`as_target`: from what a caller has to what a solver works on."""

from __future__ import annotations

from typing import Any

import numpy as np

from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.targets.operator import Operator
from lsrdecomp.targets.row_stream import RowStream
from lsrdecomp.targets.separated_target import Separated
from lsrdecomp.targets.sparse import Sparse
from lsrdecomp.targets.target import Dense, Target


def as_target(matrix: Any) -> Target:
    """Return the target that a solver works on, from what a caller has.

    A target stays as it is. A `SeparatedMatrix` becomes `Separated`, a scipy sparse matrix or array
    `Sparse`, a ``numpy.memmap`` a `RowStream`, anything that offers ``matmat`` or ``matvec`` (a
    scipy ``LinearOperator``) an `Operator`, and anything else `Dense`.

    Parameters
    ----------
    matrix : anything `decompose` takes

    Returns
    -------
    Target

    Examples
    --------
    >>> import numpy as np
    >>> import scipy.sparse
    >>> matrices = (np.eye(4), [[1.0, 2.0]], scipy.sparse.eye_array(4))
    >>> [type(as_target(matrix)).__name__ for matrix in matrices]
    ['Dense', 'Dense', 'Sparse']
    """
    if type(matrix) is np.ndarray:  # mostly, and then it is nothing of what follows
        return Dense(matrix)
    if hasattr(matrix, "residual_norm"):
        return matrix  # type: ignore[no-any-return]
    if isinstance(matrix, SeparatedMatrix):
        return Separated(matrix)
    if hasattr(matrix, "tocoo") and hasattr(matrix, "nnz"):
        return Sparse(matrix)
    if isinstance(matrix, np.memmap):
        return RowStream.of(matrix)
    if hasattr(matrix, "matvec") and not hasattr(matrix, "__array__"):
        return Operator(matrix)
    return Dense(matrix)
