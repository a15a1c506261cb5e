"""`as_target`: from what a caller has to what a solver works on."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.errors import ArgumentError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.targets.operator import Operator
from lsrdecomp.targets.row_stream import RowStream
from lsrdecomp.targets.separated_target import Separated
from lsrdecomp.targets.sparse import Sparse
from lsrdecomp.targets.target import Dense, Target

if TYPE_CHECKING:
    from collections.abc import Iterator


def as_target(matrix: Any) -> Target:
    """Return the target that a solver works on, from what a caller has.

    A target stays as it is. A `SeparatedMatrix` becomes `Separated`; a sparse matrix or array of
    SciPy, of the package sparse or of torch `Sparse`; a ``numpy.memmap`` and an array of dask a
    `RowStream`; anything that offers ``matmat`` or ``matvec`` (a scipy ``LinearOperator``) an
    `Operator`; and anything else `Dense`.

    Parameters
    ----------
    matrix : anything `decompose` takes

    Returns
    -------
    Target

    Raises
    ------
    ArgumentError
        For a tensor of torch without numbers (``device="meta"``).

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
    if hasattr(matrix, "to_scipy_sparse"):  # of the package sparse
        return Sparse(matrix.to_scipy_sparse())
    if str(getattr(matrix, "layout", "")).startswith("torch.sparse"):
        return Sparse(_from_torch_sparse(matrix))
    if getattr(matrix, "is_meta", False):
        raise ArgumentError(
            f"matrix: a tensor of shape {tuple(matrix.shape)} on the meta device has no numbers; "
            "load it on a device first"
        )
    if isinstance(matrix, np.memmap):
        return RowStream.of(matrix)
    if hasattr(matrix, "dask") and hasattr(matrix, "chunks"):
        return _dask_stream(matrix)
    if hasattr(matrix, "matvec") and not hasattr(matrix, "__array__"):
        return Operator(matrix)
    return Dense(matrix)


def _from_torch_sparse(tensor: Any) -> Any:
    """Return a sparse tensor of torch, of any layout, as a sparse array of SciPy."""
    from scipy.sparse import coo_array

    entries = tensor.detach().to_sparse_coo().coalesce()
    rows, columns = entries.indices().cpu().numpy()
    return coo_array((entries.values().cpu().numpy(), (rows, columns)), shape=tuple(entries.shape))


def _dask_stream(array: Any) -> RowStream:
    """Return an array of dask as a stream of its chunks of rows, one in memory at a time."""
    ends = np.cumsum(array.chunks[0]).tolist()

    def blocks() -> Iterator[Any]:
        for start, end in itertools.pairwise([0, *ends]):
            yield array[start:end].compute()

    rows, columns = array.shape
    return RowStream(blocks, (int(rows), int(columns)))
