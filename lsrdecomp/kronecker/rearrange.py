"""Kronecker products: rearrangement for any number of factors, sums of products, products applied unformed."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import Array, Namespace, device, namespace
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.shape import KroneckerShape

if TYPE_CHECKING:
    from collections.abc import Sequence


def kron(*factors: Array) -> Array:
    """Kronecker product of matrices; the first is outermost, as in ``numpy.kron``.

    Parameters
    ----------
    *factors : Array, shapes (…, m_i, n_i)
        The axes in front, such as those of terms, are the same in all.

    Returns
    -------
    Array, shape (…, Π m_i, Π n_i)

    Raises
    ------
    ShapeError
        Without factors.

    Examples
    --------
    >>> import numpy as np
    >>> kron(np.eye(2), np.ones((1, 2)))
    array([[1., 1., 0., 0.],
           [0., 0., 1., 1.]])
    """
    if not factors:
        raise ShapeError("kron needs at least one matrix")
    xp = namespace(*factors)
    product = factors[0]
    for factor in factors[1:]:
        (*front, m, n), (p, q) = product.shape, factor.shape[-2:]
        pairs = product[..., :, None, :, None] * factor[..., None, :, None, :]
        product = xp.reshape(pairs, (*front, m * p, n * q))
    return product


def rearrange(matrix: Array, shape: KroneckerShape | Sequence[Sequence[int]] | str) -> Array:
    """Van Loan–Pitsianis rearrangement: one axis per Kronecker factor, holding that factor's entries row by row.

    A Kronecker product becomes a product of vectors of rank one, so separation rank becomes
    (tensor) rank [1]_.

    Parameters
    ----------
    matrix : Array, shape (…, Π m_i, Π n_i)
        One matrix, or many along the axes in front.
    shape : KroneckerShape

    Returns
    -------
    Array, shape (…, m_1·n_1, …, m_d·n_d)
        The same entries in a new order, so the Frobenius norm is the same; a matrix for two
        factors.

    Raises
    ------
    ShapeError
        If ``shape`` does not tile the matrix.

    Examples
    --------
    >>> import numpy as np
    >>> A, B = np.array([[1., 2.]]), np.array([[3.], [4.]])
    >>> rearrange(np.kron(A, B), KroneckerShape(((1, 2), (2, 1))))
    array([[3., 4.],
           [6., 8.]])

    References
    ----------
    .. [1] C. F. Van Loan and N. Pitsianis, Approximation with Kronecker products, in Linear Algebra
       for Large Scale and Real-Time Applications, 1993. doi:10.1007/978-94-015-8196-7_17
    """
    shape = KroneckerShape.parse(shape)
    shape.check(tuple(matrix.shape[-2:]))
    xp, d, front = namespace(matrix), shape.order, tuple(matrix.shape[:-2])
    entries = xp.reshape(matrix, (*front, *shape.rows, *shape.columns))
    pairs = tuple(len(front) + axis for i in range(d) for axis in (i, d + i))
    return xp.reshape(
        xp.permute_dims(entries, (*range(len(front)), *pairs)), (*front, *shape.sizes)
    )


def inverse_rearrange(
    tensor: Array, shape: KroneckerShape | Sequence[Sequence[int]] | str
) -> Array:
    """The matrix whose rearrangement is ``tensor``.

    Parameters
    ----------
    tensor : Array, shape (…, m_1·n_1, …, m_d·n_d)
    shape : KroneckerShape

    Returns
    -------
    Array, shape (…, Π m_i, Π n_i)

    Raises
    ------
    ShapeError
        If the tensor does not have the sizes of the shape.

    Examples
    --------
    >>> import numpy as np
    >>> shape = KroneckerShape(((1, 2), (2, 1)))
    >>> inverse_rearrange(np.outer([1.0, 2.0], [3.0, 4.0]), shape)                  # of rank one: a Kronecker product
    array([[3., 6.],
           [4., 8.]])
    """
    shape = KroneckerShape.parse(shape)
    xp, d = namespace(tensor), shape.order
    front = tuple(tensor.shape[: tensor.ndim - d])
    if tuple(tensor.shape) != (*front, *shape.sizes):
        raise ShapeError(
            f"expected a tensor of shape {shape.sizes} for {shape}, got {tuple(tensor.shape)}"
        )
    entries = xp.reshape(tensor, (*front, *(size for pair in shape.factors for size in pair)))
    order = (
        *range(len(front)),
        *(len(front) + axis for start in (0, 1) for axis in range(start, 2 * d, 2)),
    )
    return xp.reshape(xp.permute_dims(entries, order), (*front, *shape.matrix_shape))


def khatri_rao(left: Array, right: Array) -> Array:
    """Column-wise Kronecker product: (…, p, s) and (…, q, s) to (…, p·q, s), the left index slow.

    Parameters
    ----------
    left, right : Array, shapes (…, p, s) and (…, q, s)

    Returns
    -------
    Array, shape (…, p·q, s)

    Examples
    --------
    >>> import numpy as np
    >>> khatri_rao(np.array([[1, 2]]), np.array([[3, 4], [5, 6]]))
    array([[ 3,  8],
           [ 5, 12]])
    """
    xp, (*front, p, s) = namespace(left, right), left.shape
    return xp.reshape(
        left[..., :, None, :] * right[..., None, :, :], (*front, p * right.shape[-2], s)
    )


def sum_of_kroneckers(factors: Sequence[Array], weights: Array | None = None) -> Array:
    """Σ_k λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾, formed.

    Parameters
    ----------
    factors : sequence of Array, shapes (s, m_i, n_i)
    weights : Array, shape (s,), optional
        λ; all ones if absent.

    Returns
    -------
    Array, shape (Π m_i, Π n_i)
        Of two factors by `pairs_of_rows`, else one product of the rearranged factors; 2·s·Πm_i·Πn_i
        operations.

    Examples
    --------
    >>> import numpy as np
    >>> first, second = np.array([[[1.0, 2.0]], [[0.0, 1.0]]]), np.array([[[1.0], [1.0]], [[0.0], [1.0]]])
    >>> sum_of_kroneckers([first, second], np.array([1.0, 10.0]))                   # two terms of 1×2 ⊗ 2×1
    array([[ 1.,  2.],
           [ 1., 12.]])
    """
    shape = factor_shape(factors)
    xp = namespace(*factors)
    if weights is not None:
        factors = (factors[0] * weights[:, None, None], *factors[1:])
    if len(factors) == 1:
        return xp.sum(factors[0], axis=0)
    if len(factors) == 2:
        rows, columns = shape.matrix_shape
        turned = [xp.matrix_transpose(factor) for factor in factors] if columns < rows else factors
        n, q = turned[0].shape[2], turned[1].shape[2]
        if (
            factors[0].shape[0] * (n + q) <= 4 * n * q
        ):  # else slices are thin, and copies of factors outgrow the sum
            formed = pairs_of_rows(*(xp.permute_dims(factor, (1, 2, 0)) for factor in turned))
            return xp.matrix_transpose(formed) if columns < rows else formed
    flat = [
        xp.matrix_transpose(xp.reshape(f, (f.shape[0], f.shape[1] * f.shape[2]))) for f in factors
    ]
    entries = flat[0] @ xp.matrix_transpose(reduce(khatri_rao, flat[1:]))
    return inverse_rearrange(xp.reshape(entries, shape.sizes), shape)


def pairs_of_rows(first: Array, second: Array) -> Array:
    """Σ_k first_k ⊗ second_k of (…, m, n, s) and (…, p, q, s): a product for each pair of rows, no entry moved."""
    xp, (*batch, m, n, _), (p, q) = namespace(first, second), first.shape, second.shape[-3:-1]
    slices = (
        first[..., :, None, :, :] @ xp.matrix_transpose(second)[..., None, :, :, :]
    )  # (…, m, p, n, q)
    return xp.reshape(slices, (*batch, m * p, n * q))


def apply_sum_of_kroneckers(factors: Sequence[Array], weights: Array | None, x: Array) -> Array:
    """(Σ_k λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾) x without forming the matrix.

    Parameters
    ----------
    factors : sequence of Array, shapes (s, m_i, n_i)
    weights : Array, shape (s,), or None
    x : Array, shape (Π n_i,) or (Π n_i, b)

    Returns
    -------
    Array, shape (Π m_i,) or (Π m_i, b)
        One batched matrix product per factor, the last factor first; the sum over terms is part of
        the last one.

    Raises
    ------
    ShapeError
        If x does not have as many rows as the matrix has columns.

    Examples
    --------
    >>> import numpy as np
    >>> factors = [np.ones((1, 1, 1000)), np.eye(1000)[None]]                       # a matrix of 1000 × 1000000
    >>> apply_sum_of_kroneckers(factors, None, np.ones(1000000))[:3]
    array([1000., 1000., 1000.])
    """
    shape = factor_shape(factors)
    rows, columns = shape.matrix_shape
    if x.ndim not in (1, 2) or x.shape[0] != columns:
        raise ShapeError(f"x: expected {columns} rows to match {shape}, got shape {tuple(x.shape)}")
    xp = namespace(x, *factors)
    s, b = factors[0].shape[0], (x.shape[1] if x.ndim == 2 else 1)
    image = (rows,) if x.ndim == 1 else (rows, b)
    if 0 in (s, b):
        return xp.zeros(image, dtype=xp.result_type(x.dtype, factors[0].dtype), device=device(x))
    outer = factors[0] if weights is None else factors[0] * weights[:, None, None]
    state, done = xp.reshape(x, (1, 1, columns * b)), b
    before = columns
    for factor in reversed(factors[1:]):
        m, n = factor.shape[1:]
        before //= n
        state = factor[:, None, :, :] @ xp.reshape(state, (state.shape[0], before, n, done))
        done *= m
    m, n = outer.shape[1:]
    state = xp.reshape(state, (state.shape[0], n, done))
    if state.shape[0] == 1 and s > 1:
        return xp.reshape(xp.sum(outer, axis=0) @ state[0, :, :], image)
    across = xp.reshape(xp.permute_dims(outer, (1, 0, 2)), (m, s * n))
    return xp.reshape(across @ xp.reshape(state, (s * n, done)), image)


def factor_shape(factors: Sequence[Array]) -> KroneckerShape:
    """The Kronecker shape of stacks of factors (s, m_i, n_i), which must agree in s."""
    if not factors:
        raise ShapeError("a Kronecker product needs at least one factor")
    for i, factor in enumerate(factors, 1):
        if factor.ndim != 3:
            raise ShapeError(f"factor {i}: expected shape (s, m, n), got {tuple(factor.shape)}")
        if factor.shape[0] != factors[0].shape[0]:
            raise ShapeError(
                f"factor 1 has {factors[0].shape[0]} terms, but factor {i} has {factor.shape[0]}"
            )
    return KroneckerShape(tuple((f.shape[1], f.shape[2]) for f in factors))


def commutation_matrix(m: int, n: int, xp: Namespace = np) -> Array:
    """The permutation K with K vec(X) = vec(Xᵀ) for X of shape (m, n); vec stacks columns.

    K_{p,m} (A ⊗ B) K_{n,q} = B ⊗ A for A (m, n) and B (p, q) [1]_.

    Parameters
    ----------
    m, n : int
    xp : namespace
        The array library of the result.

    Returns
    -------
    Array, shape (m·n, m·n)

    Examples
    --------
    >>> import numpy as np
    >>> X = np.arange(6).reshape(2, 3)
    >>> (commutation_matrix(2, 3) @ X.T.reshape(-1)).tolist()                       # vec(X) to vec(Xᵀ)
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]

    References
    ----------
    .. [1] J. R. Magnus and H. Neudecker, The commutation matrix, Ann. Statist. 7 (1979).
           doi:10.1214/aos/1176344621
    """
    identity = xp.eye(m * n)
    order = np.arange(m * n).reshape(n, m).T.reshape(-1)
    names = namespace(identity)
    return names.take(identity, names.asarray(order), axis=0)
