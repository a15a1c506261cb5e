"""Right Kronecker products, as people write them in twenty ways."""

import itertools

import numpy as np
import scipy.linalg
import scipy.sparse as sparse

from lsrdecomp.kronecker.rearrange import inverse_rearrange
from lsrdecomp.kronecker.rearrange import kron as our_kron


def size_of(a, b):
    return a.shape[0] * b.shape[0], a.shape[1] * b.shape[1]


def by_four_loops(a, b):
    result = np.zeros(size_of(a, b), np.result_type(a, b))
    (m, n), (p, q) = a.shape, b.shape
    for i, j in itertools.product(range(m), range(n)):
        for k in range(p):
            result[i * p + k, j * q : (j + 1) * q] = a[i, j] * b[k]
    return result


def by_blocks(a, b):
    """A block for each entry of A, also where it has none."""
    rows = [np.concatenate([entry * b for entry in row], axis=1) for row in a] if a.size else []
    return np.concatenate(rows) if rows else np.zeros(size_of(a, b))


def by_rows(a, b):
    result = np.empty(size_of(a, b), np.result_type(a, b))
    for i, k in itertools.product(range(len(a)), range(len(b))):
        result[i * len(b) + k] = np.outer(a[i], b[k]).reshape(-1)
    return result


def by_columns(a, b):
    result = np.empty(size_of(a, b), np.result_type(a, b), order="F")
    for j, t in itertools.product(range(a.shape[1]), range(b.shape[1])):
        result[:, j * b.shape[1] + t] = np.outer(a[:, j], b[:, t]).reshape(-1)
    return result


def into_strided_view(a, b):
    """Written through a view (m, n, p, q) of the answer."""
    (m, n), (p, q) = a.shape, b.shape
    result = np.empty((m * p, n * q), np.result_type(a, b))
    view = result.reshape(m, p, n, q).transpose(0, 2, 1, 3)
    np.multiply(a[:, :, None, None], b, out=view)
    return result


def by_indices(a, b):
    rows, columns = np.indices(size_of(a, b))
    if not rows.size:
        return np.zeros(rows.shape, np.result_type(a, b))
    (p, q) = b.shape
    return a[rows // p, columns // q] * b[rows % p, columns % q]


def by_repeat_and_tile(a, b):
    spread = np.repeat(np.repeat(a, b.shape[0], axis=0), b.shape[1], axis=1)
    return spread * np.tile(b, a.shape)


def by_vec_of_outer(a, b):
    if not a.size or not b.size:  # no Kronecker shape of ours is empty
        return np.zeros(size_of(a, b))
    return inverse_rearrange(np.outer(a, b), (a.shape, b.shape))


def by_coordinates(a, b):
    """A sparse matrix by its coordinates, of entries that are not zero."""
    i, j = np.nonzero(a)
    k, t = np.nonzero(b)
    rows = np.add.outer(i * b.shape[0], k).ravel()
    columns = np.add.outer(j * b.shape[1], t).ravel()
    values = np.multiply.outer(a[i, j], b[k, t]).ravel()
    return sparse.coo_array((values, (rows, columns)), shape=size_of(a, b))


def in_object_arithmetic(a, b):
    product = np.multiply.outer(a.astype(object), b.astype(object))
    with np.errstate(all="ignore"):
        dtype = np.result_type(a, b)
        return product.transpose(0, 2, 1, 3).reshape(size_of(a, b)).astype(dtype)


def in_wide_numbers(a, b):
    """In a wider type, rounded once."""
    dtype = np.result_type(a, b)
    wide = np.result_type(dtype, np.float64) if dtype.kind in "fc" else dtype
    return np.kron(a.astype(wide), b.astype(wide)).astype(dtype)


SPARSE = ("coordinates", "scipy.sparse.csr", "scipy.sparse.coo")
"""Those that SciPy has no half precision for."""

RIGHT = {
    "numpy": np.kron,
    "this library": our_kron,
    "einsum": lambda a, b: np.einsum("ij,kl->ikjl", a, b).reshape(size_of(a, b)),
    "einsum on a path": lambda a, b: np.einsum("ij,kl->ikjl", a, b, optimize=True).reshape(
        size_of(a, b)
    ),
    "broadcasting": lambda a, b: (a[:, None, :, None] * b[None, :, None, :]).reshape(size_of(a, b)),
    "outer product": lambda a, b: (
        np.multiply.outer(a, b).transpose(0, 2, 1, 3).reshape(size_of(a, b))
    ),
    "tensordot": lambda a, b: np.tensordot(a, b, axes=0).swapaxes(1, 2).reshape(size_of(a, b)),
    "four loops": by_four_loops,
    "blocks": by_blocks,
    "rows": by_rows,
    "columns": by_columns,
    "a strided view": into_strided_view,
    "indices": by_indices,
    "repeat and tile": by_repeat_and_tile,
    "rearranged outer product": by_vec_of_outer,
    "coordinates": by_coordinates,
    "Python's numbers": in_object_arithmetic,
    "a wider type": in_wide_numbers,
    "the transpose of transposes": lambda a, b: np.kron(a.T, b.T).T,
    "scipy.sparse.csr": lambda a, b: sparse.kron(sparse.csr_array(a), sparse.csr_array(b)),
    "scipy.sparse.coo": lambda a, b: sparse.kron(
        sparse.coo_array(a), sparse.coo_array(b), format="csc"
    ),
    "scipy.linalg.khatri_rao of vectors": lambda a, b: (
        scipy.linalg.khatri_rao(a.reshape(-1, 1), b.reshape(-1, 1))
        .reshape(*a.shape, *b.shape)
        .transpose(0, 2, 1, 3)
        .reshape(size_of(a, b))
    ),
}
