"""Kronecker products of any number of factors: rearranged, summed, applied without being formed."""

from __future__ import annotations

import itertools
from functools import lru_cache, reduce
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import Array, Namespace, device, namespace, with_common_dtype
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.shape import KroneckerShape, shape_of_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence


def kron(*factors: Array) -> Array:
    """Return the Kronecker product of matrices; the first is outermost, as in ``numpy.kron``.

    Parameters
    ----------
    *factors : Array, shapes (…, m_i, n_i)
        The axes in front, such as those of terms, are the same in all. Or vectors (n_i,), all.

    Returns
    -------
    Array, shape (…, Π m_i, Π n_i), or (Π n_i,)

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
    if all(factor.ndim == 1 for factor in factors):
        return kron(*(factor[None, :] for factor in factors))[0, :]
    product = factors[0]
    for factor in factors[1:]:
        *front, m, n = product.shape
        p, q = factor.shape[-2:]
        pairs = product[..., :, None, :, None] * factor[..., None, :, None, :]
        product = xp.reshape(pairs, (*front, m * p, n * q))
    return product


def rearrange(matrix: Array, shape: KroneckerShape | Sequence[Sequence[int]] | str) -> Array:
    """Rearrange a matrix as Van Loan and Pitsianis do: one axis for each Kronecker factor.

    An axis holds the entries of its factor row by row. A Kronecker product becomes a product of
    vectors, of rank one, so separation rank becomes (tensor) rank [1]_.

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
    if type(matrix) is np.ndarray and matrix.ndim == 2:
        entries = matrix.reshape(*shape.rows, *shape.columns)
        return entries.transpose(shape.interleaved_axes).reshape(shape.sizes)
    xp = namespace(matrix)
    front = tuple(matrix.shape[:-2])
    entries = xp.reshape(matrix, (*front, *shape.rows, *shape.columns))
    # From (…, m_1, …, m_d, n_1, …, n_d) to (…, m_1, n_1, …, m_d, n_d).
    axes = shape.interleaved_axes
    if front:
        axes = (*range(len(front)), *(axis + len(front) for axis in axes))
    return xp.reshape(xp.permute_dims(entries, axes), (*front, *shape.sizes))


def inverse_rearrange(
    tensor: Array, shape: KroneckerShape | Sequence[Sequence[int]] | str
) -> Array:
    """Return the matrix whose rearrangement is ``tensor``.

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
    >>> inverse_rearrange(np.outer([1.0, 2.0], [3.0, 4.0]), shape)  # rank one: a Kronecker product
    array([[3., 6.],
           [4., 8.]])
    """
    shape = KroneckerShape.parse(shape)
    xp = namespace(tensor)
    front = tuple(tensor.shape[: tensor.ndim - shape.order])
    if tuple(tensor.shape) != (*front, *shape.sizes):
        raise ShapeError(
            f"expected a tensor of shape {shape.sizes} for {shape}, got {tuple(tensor.shape)}"
        )
    pairs = itertools.chain.from_iterable(shape.factors)
    entries = xp.reshape(tensor, (*front, *pairs))
    # From (…, m_1, n_1, …, m_d, n_d) to (…, m_1, …, m_d, n_1, …, n_d).
    first = len(front)
    row_axes = range(first, entries.ndim, 2)
    column_axes = range(first + 1, entries.ndim, 2)
    entries = xp.permute_dims(entries, (*range(first), *row_axes, *column_axes))
    return xp.reshape(entries, (*front, *shape.matrix_shape))


def khatri_rao(left: Array, right: Array) -> Array:
    """Return the column-wise Kronecker product; the index of the left matrix is the slow one.

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
    xp = namespace(left, right)
    *front, p, s = left.shape
    q = right.shape[-2]
    products = left[..., :, None, :] * right[..., None, :, :]
    return xp.reshape(products, (*front, p * q, s))


def sum_of_kroneckers(factors: Sequence[Array], weights: Array | None = None) -> Array:
    """Return Σ_k λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾, formed.

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
    >>> first = np.array([[[1.0, 2.0]], [[0.0, 1.0]]])
    >>> second = np.array([[[1.0], [1.0]], [[0.0], [1.0]]])
    >>> sum_of_kroneckers([first, second], np.array([1.0, 10.0]))  # two terms of 1×2 ⊗ 2×1
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
        formed = _sum_of_two_factors(shape, factors)
        if formed is not None:
            return formed
    columns = factor_columns(factors)
    entries = columns[0] @ xp.matrix_transpose(reduce(khatri_rao, columns[1:]))
    return inverse_rearrange(xp.reshape(entries, shape.sizes), shape)


def _sum_of_two_factors(shape: KroneckerShape, factors: Sequence[Array]) -> Array | None:
    """Return Σ_k A_k ⊗ B_k by pairs of rows, or of columns where these are longer.

    None where slices are so thin that copies of the factors would outgrow the sum.
    """
    xp = namespace(*factors)
    rows, columns = shape.matrix_shape
    by_columns = columns < rows
    if by_columns:
        factors = [xp.matrix_transpose(factor) for factor in factors]
    terms, _, n = factors[0].shape
    q = factors[1].shape[2]
    if terms * (n + q) > 4 * n * q:
        return None
    formed = pairs_of_rows(*(xp.permute_dims(factor, (1, 2, 0)) for factor in factors))
    return xp.matrix_transpose(formed) if by_columns else formed


def pairs_of_rows(first: Array, second: Array) -> Array:
    """Return Σ_k first_k ⊗ second_k by a matrix product for each pair of rows; no entry is moved.

    Of shapes (…, m, n, s) and (…, p, q, s).
    """
    xp = namespace(first, second)
    *batch, m, n, _ = first.shape
    p, q = second.shape[-3:-1]
    first_rows = first[..., :, None, :, :]
    second_rows = xp.matrix_transpose(second)[..., None, :, :, :]
    products = first_rows @ second_rows  # (…, m, p, n, q)
    return xp.reshape(products, (*batch, m * p, n * q))


def apply_sum_of_kroneckers(factors: Sequence[Array], weights: Array | None, x: Array) -> Array:
    """Return (Σ_k λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾) x without forming the matrix.

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
    >>> factors = [np.ones((1, 1, 1000)), np.eye(1000)[None]]  # a matrix of 1000 × 1000000
    >>> apply_sum_of_kroneckers(factors, None, np.ones(1000000))[:3]
    array([1000., 1000., 1000.])
    """
    shape = factor_shape(factors)
    rows, columns = shape.matrix_shape
    if x.ndim not in (1, 2) or x.shape[0] != columns:
        raise ShapeError(f"x: expected {columns} rows to match {shape}, got shape {tuple(x.shape)}")
    xp = namespace(x, *factors)
    x, *factors = with_common_dtype(x, *factors)
    terms = factors[0].shape[0]
    vectors = x.shape[1] if x.ndim == 2 else 1
    image_shape = (rows, vectors) if x.ndim == 2 else (rows,)
    if 0 in (terms, vectors):
        return xp.zeros(image_shape, dtype=x.dtype, device=device(x))
    outer = factors[0] if weights is None else factors[0] * weights[:, None, None]

    # All factors but the first, from the last on. The state has shape (terms, not yet multiplied,
    # multiplied); one term serves all until the first product.
    state = xp.reshape(x, (1, 1, columns * vectors))
    remaining = columns
    done = vectors
    for factor in reversed(factors[1:]):
        m, n = factor.shape[1:]
        remaining //= n
        state = factor[:, None, :, :] @ xp.reshape(state, (state.shape[0], remaining, n, done))
        done *= m

    # The first factor, and with it the sum over terms.
    m, n = outer.shape[1:]
    state = xp.reshape(state, (state.shape[0], n, done))
    if state.shape[0] == 1 and terms > 1:  # there is but one factor
        return xp.reshape(xp.sum(outer, axis=0) @ state[0, :, :], image_shape)
    side_by_side = xp.reshape(xp.permute_dims(outer, (1, 0, 2)), (m, terms * n))
    return xp.reshape(side_by_side @ xp.reshape(state, (terms * n, done)), image_shape)


def factor_shape(factors: Sequence[Array]) -> KroneckerShape:
    """Return the Kronecker shape of stacks of factors (s, m_i, n_i), which must agree in s."""
    return _shape_of_stacks(tuple([tuple(factor.shape) for factor in factors]))


@lru_cache(maxsize=2**12)
def _shape_of_stacks(stacks: tuple[tuple[int, ...], ...]) -> KroneckerShape:
    """Return `factor_shape` of stacks of these sizes, checked once."""
    if not stacks:
        raise ShapeError("a Kronecker product needs at least one factor")
    terms = stacks[0][:1]
    for i, sizes in enumerate(stacks, 1):
        if len(sizes) != 3:
            raise ShapeError(f"factor {i}: expected shape (s, m, n), got {sizes}")
        if sizes[:1] != terms:
            raise ShapeError(f"factor 1 has {terms[0]} terms, but factor {i} has {sizes[0]}")
    return shape_of_sizes(tuple([(m, n) for _, m, n in stacks]))


def factor_columns(factors: Sequence[Array]) -> list[Array]:
    """Return each stack of factors as a matrix of shape (m_i·n_i, s)."""
    xp = namespace(*factors)
    columns = []
    for factor in factors:
        s, m, n = factor.shape
        columns.append(xp.matrix_transpose(xp.reshape(factor, (s, m * n))))
    return columns


def commutation_matrix(m: int, n: int, xp: Namespace = np) -> Array:
    """Return the permutation K with K vec(X) = vec(Xᵀ) for X of shape (m, n); vec stacks columns.

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
    >>> (commutation_matrix(2, 3) @ X.T.reshape(-1)).tolist()  # vec(X) to vec(Xᵀ)
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]

    References
    ----------
    .. [1] J. R. Magnus and H. Neudecker, The commutation matrix, Ann. Statist. 7 (1979).
           doi:10.1214/aos/1176344621
    """
    identity = xp.eye(m * n)
    xp = namespace(identity)  # with the functions of the standard, which the caller's may lack
    order = np.arange(m * n).reshape(n, m).T.ravel()
    return xp.take(identity, xp.asarray(order), axis=0)
