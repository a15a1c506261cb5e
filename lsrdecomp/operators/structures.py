"""Kronecker sums, blurs with boundaries and covariances on grids as sums of Kronecker products.

A sum that comes as a sparse matrix (finite differences or elements on a tensor grid) needs none of
these: ``decompose(sparse, shape, rtol=1e-12)`` finds its terms.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from array_api_compat import is_array_api_obj

from lsrdecomp.arrays import device, namespace
from lsrdecomp.errors import BudgetError, ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.targets.residual import row_blocks
from lsrdecomp.targets.row_stream import RowStream
from lsrdecomp.targets.target import Dense

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Boundary = Literal["zero", "periodic", "reflective"]


def kronecker_sum(*parts: Any) -> SeparatedMatrix:
    """Return A₁ ⊕ A₂ ⊕ … = A₁ ⊗ I ⊗ … + I ⊗ A₂ ⊗ … + …, one term for each square matrix.

    Parameters
    ----------
    *parts : arrays or sparse matrices, shapes (m_i, m_i)
        Of one array library; differentiable in torch's tensors.

    Returns
    -------
    SeparatedMatrix, shape (Π m_i, Π m_i)

    Raises
    ------
    ShapeError
        If a part is not a square matrix.

    Examples
    --------
    >>> second = 2 * np.eye(3) - np.eye(3, k=1) - np.eye(3, k=-1)
    >>> kronecker_sum(second, second, second)  # the Laplacian of a 3 × 3 × 3 grid
    SeparatedMatrix(27×27 as 3 × [3×3 ⊗ 3×3 ⊗ 3×3], 81 parameters, γ = 0.632)
    """
    for i, part in enumerate(parts, 1):
        if isinstance(part, list | tuple) and any(np.ndim(row) == 2 for row in part):
            raise ShapeError(
                f"part {i} of a Kronecker sum is a list of matrices; write kronecker_sum(A, B)"
            )
    matrices = []
    for i, part in enumerate(parts, 1):
        matrix = part.toarray() if hasattr(part, "toarray") else part
        if not is_array_api_obj(matrix):
            matrix = np.asarray(matrix)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ShapeError(
                f"part {i} of a Kronecker sum must be square, it has shape {tuple(matrix.shape)}"
            )
        matrices.append(matrix)
    xp = namespace(*matrices)
    dtype = xp.result_type(*matrices, xp.float32)
    stacks = []
    for i, matrix in enumerate(matrices):
        identity = xp.eye(matrix.shape[0], dtype=dtype, device=device(matrix))
        stack = [identity] * len(matrices)
        stack[i] = xp.astype(matrix, dtype)
        stacks.append(xp.stack(stack))
    return SeparatedMatrix.from_factors(stacks)


def blur(kernel: Any, sizes: Sequence[int], boundary: Boundary = "zero") -> SeparatedMatrix:
    """Return the convolution of an image, read row by row, with a point spread function.

    As many terms as the kernel has rank: singular values below 1e-14 of the largest are dropped.

    Parameters
    ----------
    kernel : array, shape (a, b)
        Odd sides; its middle entry is the weight of the pixel itself.
    sizes : (rows, columns) of the image
    boundary : str
        Pixels beyond the image: ``"zero"``, the other side (``"periodic"``), its mirror image
        (``"reflective"``) [1]_.

    Returns
    -------
    SeparatedMatrix, shape (n, n) with n = rows·columns
        Acts on images flattened row by row, with factors of the sizes of the image's sides.

    Raises
    ------
    ShapeError, BudgetError
        For kernels of even sides or larger than the image, and unknown boundaries.

    Examples
    --------
    >>> image = np.zeros((5, 5))
    >>> image[2, 2] = 9.0
    >>> mean = blur(np.full((3, 3), 1 / 9), image.shape)  # a kernel of rank one: one term
    >>> blurred = (mean @ image.reshape(-1)).reshape(5, 5)
    >>> mean.separation_rank, np.round(blurred[2], 6).tolist()
    (1, [0.0, 1.0, 1.0, 1.0, 0.0])

    References
    ----------
    .. [1] P. C. Hansen, J. G. Nagy and D. P. O'Leary, Deblurring Images, SIAM (2006), ch. 4.
       doi:10.1137/1.9780898718874
    """
    kernel = Dense(np.asarray(kernel)).matrix
    if len(sizes) != 2 or not all(side % 2 for side in kernel.shape):
        raise ShapeError(
            f"a kernel of odd sides and an image of two, got {kernel.shape} and {tuple(sizes)}"
        )
    for side, size in zip(kernel.shape, sizes, strict=True):
        if side > size:
            raise ShapeError(f"the kernel {kernel.shape} is larger than the image {tuple(sizes)}")
    rows, columns = sizes
    u, sigma, vh = np.linalg.svd(kernel)
    rank = max(1, int(np.sum(sigma > 1e-14 * sigma[0])))
    first = np.stack([_convolution(u[:, k], rows, boundary) for k in range(rank)])
    second = np.stack([_convolution(vh[k], columns, boundary) for k in range(rank)])
    return SeparatedMatrix.from_factors([first, second], sigma[:rank])


def covariance_on_grid(
    kernel: Callable[[np.ndarray, np.ndarray], np.ndarray], axes: Sequence[Any]
) -> RowStream:
    """Return a covariance function on a tensor grid as a target for `decompose`.

    A block of rows at a time.

    Parameters
    ----------
    kernel : callable
        Takes points (b, 1, d) and (1, n, d), gives covariances (b, n).
    axes : sequence of arrays
        Coordinates along each of the d axes; the last axis runs fastest.

    A product of covariances along the axes needs no target: it is one term,
    ``SeparatedMatrix.from_factors([K1[None], K2[None]])``.

    Returns
    -------
    RowStream, shape (n, n)
        Rows are computed when they are read: once for each product.

    Examples
    --------
    >>> from lsrdecomp import decompose
    >>> def gaussian(x, y):
    ...     return np.exp(-np.sum((x - y) ** 2, axis=-1))
    >>> target = covariance_on_grid(gaussian, [np.arange(3), np.arange(4)])
    >>> target.shape, decompose(target, "3x3, 4x4", rank=1).relative_error < 1e-10
    ((12, 12), True)
    """
    coordinates = [np.asarray(axis, dtype=float) for axis in axes]
    grids = np.meshgrid(*coordinates, indexing="ij")
    points = np.stack([grid.reshape(-1) for grid in grids], axis=-1)
    n = math.prod(len(axis) for axis in axes)

    def blocks() -> Iterator[np.ndarray]:
        for rows in row_blocks(n, n):
            yield np.asarray(kernel(points[rows][:, None, :], points[None, :, :]))

    return RowStream(blocks, (n, n))


def _convolution(weights: np.ndarray, size: int, boundary: Boundary) -> np.ndarray:
    """Return the matrix of a convolution along one side: its images of the columns of I."""
    from scipy.ndimage import convolve1d

    modes = {"zero": "constant", "periodic": "wrap", "reflective": "reflect"}
    if boundary not in modes:
        raise BudgetError(f"boundary {boundary!r} is none of zero, periodic, reflective")
    identity = np.eye(size, dtype=weights.dtype)
    return np.asarray(convolve1d(identity, weights, axis=0, mode=modes[boundary]))
