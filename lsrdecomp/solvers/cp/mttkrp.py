"""Products of a tensor with all factors but one (MTTKRP), by two passes over the tensor a sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce

from lsrdecomp.arrays import Array, conjugate, namespace
from lsrdecomp.kronecker.rearrange import khatri_rao

Update = Callable[[int, Array], Array]
"""Given a mode and its product (p_i, s), the columns (p_i, s) that later modes of the sweep shall
use."""


def sweep(tensor: Array, columns: Sequence[Array], update: Update) -> tuple[Array, ...]:
    """Visit every mode once with its product T_(i) conj(⊙_{m≠i} F_m) of the newest factors.

    The modes hang on a binary tree [1]_: the tensor is contracted once with the right half of the
    factors and once with the left half, and the partial products below cost little. So a sweep
    reads the tensor twice for any d, not d times.

    Parameters
    ----------
    tensor : Array, shape (p_1, …, p_d)
    columns : sequence of Array, shapes (p_i, s)
    update : callable
        ``update(i, product)`` with ``product`` of shape (p_i, s) returns the new columns of mode i.

    Returns
    -------
    tuple of Array, shapes (p_i, s)

    References
    ----------
    .. [1] A.-H. Phan, P. Tichavský and A. Cichocki, Fast alternating LS algorithms for high order
       CANDECOMP/PARAFAC tensor factorizations, IEEE Trans. Signal Process. 61 (2013).
       doi:10.1109/TSP.2013.2269903
    """
    xp = namespace(tensor)
    d = tensor.ndim
    current = list(columns)
    if d == 1:
        current[0] = update(0, xp.broadcast_to(tensor[:, None], current[0].shape))
        return tuple(current)
    # The root of the tree: each half of the modes is visited with the other half contracted, by its
    # newest factors.
    half = (d + 1) // 2
    split = math.prod(tensor.shape[:half])
    matrix = xp.reshape(tensor, (split, math.prod(tensor.shape[half:])))
    left_products = matrix @ _joined(current, range(half, d))
    _descend(left_products, range(half), current, update)
    right_products = xp.matrix_transpose(matrix) @ _joined(current, range(half))
    _descend(right_products, range(half, d), current, update)
    return tuple(current)


def products(tensor: Array, columns: Sequence[Array]) -> tuple[Array, ...]:
    """Return all d products T_(i) conj(⊙_{m≠i} F_m), shapes (p_i, s), of fixed factors."""
    by_mode: dict[int, Array] = {}

    def keep(mode: int, product: Array) -> Array:
        by_mode[mode] = product
        return columns[mode]

    sweep(tensor, columns, keep)
    return tuple(by_mode[mode] for mode in range(tensor.ndim))


def assemble(columns: Sequence[Array], weights: Array) -> Array:
    """Form Σ_k λ_k f_k⁽¹⁾ ∘ … ∘ f_k⁽ᵈ⁾, shape (p_1, …, p_d), by one matrix product."""
    xp = namespace(*columns)
    d = len(columns)
    # Both halves of the modes joined first: one product of two tall matrices is what BLAS does
    # best.
    half = (d + 1) // 2
    left = reduce(khatri_rao, columns[1:half], columns[0] * weights)
    if half == d:
        return xp.sum(left, axis=1)
    right = reduce(khatri_rao, columns[half:])
    sizes = tuple(int(column.shape[0]) for column in columns)
    return xp.reshape(left @ xp.matrix_transpose(right), sizes)


def _descend(partial: Array, modes: range, columns: list[Array], update: Update) -> None:
    """Visit the modes below a node of the tree.

    ``partial`` (Π p_i over modes, s) is the tensor contracted with every factor outside ``modes``.
    """
    if len(modes) == 1:
        columns[modes[0]] = update(modes[0], partial)
        return
    xp = namespace(partial)
    half = (len(modes) + 1) // 2
    left = modes[:half]
    right = modes[half:]
    rows = math.prod(int(columns[mode].shape[0]) for mode in left)
    block = xp.reshape(partial, (rows, partial.shape[0] // rows, partial.shape[1]))
    left_partial = xp.sum(block * _joined(columns, right)[None, :, :], axis=1)
    _descend(left_partial, left, columns, update)
    right_partial = xp.sum(block * _joined(columns, left)[:, None, :], axis=0)
    _descend(right_partial, right, columns, update)


def _joined(columns: Sequence[Array], modes: range) -> Array:
    """Return conj of the Khatri–Rao product of the factors of ``modes``, the first mode slowest."""
    return conjugate(reduce(khatri_rao, [columns[mode] for mode in modes]))
