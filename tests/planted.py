"""Right implementations of Kronecker products and their relatives, and faults people make."""

from functools import reduce

import numpy as np

from lsrdecomp.testing import (
    check_apply,
    check_decomposition,
    check_khatri_rao,
    check_kron,
    check_kron_sum,
    check_partial_trace,
    check_sum,
    check_vec,
)

# Right implementations
# ------------------------------------------------------------------------------------------------


def khatri_rao(a, b):
    return np.einsum("mj,pj->mpj", a, b).reshape(len(a) * len(b), a.shape[1])


def face_splitting(a, b):
    return np.einsum("im,ip->imp", a, b).reshape(len(a), a.shape[1] * b.shape[1])


def vec(x):
    return x.T.reshape(-1)


def unvec(v, shape):
    return v.reshape(shape[::-1]).T


def commutation(m, n):
    """K[i·n + j, j·m + i] = 1."""
    K = np.zeros((m * n, m * n))
    for i in range(m):
        for j in range(n):
            K[i * n + j, j * m + i] = 1.0
    return K


def partial_trace(x, dims, axis):
    return np.einsum(("ikil->kl", "ikjk->ij")[axis], x.reshape(*dims, *dims))


def kron_sum(a, b):
    identity_a, identity_b = (np.eye(len(q), dtype=q.dtype) for q in (a, b))
    return np.kron(a, identity_b) + np.kron(identity_a, b)


def applied(factors, x):
    tensor = x.reshape(*(factor.shape[1] for factor in factors), x.shape[1])
    for axis, factor in enumerate(factors):
        tensor = np.moveaxis(np.tensordot(factor, tensor, (1, axis)), 0, axis)
    return tensor.reshape(-1, x.shape[1])


def summed(weights, factors):
    return sum(
        weight * reduce(np.kron, term) for weight, *term in zip(weights, *factors, strict=True)
    )


def best_terms(matrix, shape, rank):
    (m, n), (p, q) = shape.factors
    u, sigma, vh = np.linalg.svd(
        matrix.reshape(m, p, n, q).swapaxes(1, 2).reshape(m * n, p * q), full_matrices=False
    )
    return sigma[:rank], (u.T[:rank].reshape(-1, m, n), vh[:rank].reshape(-1, p, q))


# Ways to go wrong
# ------------------------------------------------------------------------------------------------


def single(x):
    return x.astype(np.complex64 if np.iscomplexobj(x) else np.float32)


def zeroed_below(x, limit):
    return np.where(abs(x) < limit, 0, x)


def emptied(array, result):
    array[...] = 0
    return result


def without_empty(result, *arrays):
    if any(array.size == 0 for array in arrays):
        raise ValueError("need at least one array to concatenate")
    return result


def last_row_lost(result, condition):
    return np.concatenate([result[:-1], 0 * result[-1:]]) if condition else result


def repeats_the_one_before(x):
    repeats = np.zeros(x.shape[1], bool)
    repeats[1:] = np.all(x[:, 1:] == x[:, :-1], axis=0) & np.any(x[:, 1:], axis=0)
    return repeats if len(x) else np.zeros(x.shape[1], bool)


def is_hermitian(x):
    return x.shape[0] == x.shape[1] > 1 and np.array_equal(x, x.conj().T)


def written_and_restored(x):
    corner = x[:1].copy()
    x[:1] = 0.0
    x[:1] = corner
    return x


def strides_taken_as_positive(x):
    """The entries that a kernel reads which knows of no negative strides."""
    return np.lib.stride_tricks.as_strided(x, x.shape, tuple(map(abs, x.strides)))


def in_memory_order(x):
    """A faulty ``ravel``: the entries as they lie in memory."""
    return x.ravel(order="K")


def clipped(x):
    return np.clip(x.real, -1e3, 1e3) + 1j * x.imag if np.iscomplexobj(x) else np.clip(x, -1e3, 1e3)


def gram_terms(matrix, shape, rank):
    (m, n), (p, q) = shape.factors
    rearranged = matrix.reshape(m, p, n, q).swapaxes(1, 2).reshape(m * n, p * q)
    squares, right = np.linalg.eigh(rearranged.conj().T @ rearranged)
    weights, right = np.sqrt(np.maximum(squares[::-1], 0.0)), right[:, ::-1]
    left = rearranged @ right / np.where(weights > 0.0, weights, 1.0)
    return weights[:rank], (
        left.T[:rank].reshape(-1, m, n),
        right.conj().T[:rank].reshape(-1, p, q),
    )


def unconverged_terms(matrix, shape, rank):
    """Three power steps for each term, and deflation."""
    (m, n), (p, q) = shape.factors
    residual = matrix.reshape(m, p, n, q).swapaxes(1, 2).reshape(m * n, p * q).copy()
    weights, left, right = [], [], []
    for _ in range(min(rank, *residual.shape)):
        v = np.ones(residual.shape[1])
        for _ in range(3):
            u = residual @ v
            u = u / max(np.linalg.norm(u), 1e-300)
            v = residual.conj().T @ u
            weight = np.linalg.norm(v)
            v = v / max(weight, 1e-300)
        residual = residual - weight * np.outer(u, v.conj())
        weights.append(weight)
        left.append(u.reshape(m, n))
        right.append(v.conj().reshape(p, q))
    return np.array(weights), (np.array(left), np.array(right))


def with_terms(change):
    """The right decomposition with ``change`` made to its weights and factors."""

    def decompose(matrix, shape, rank):
        weights, (left, right) = best_terms(matrix, shape, rank)
        return change(weights, left, right)

    return decompose


def transposed_if_square(factor):
    return factor.T if factor.shape[0] == factor.shape[1] else factor


kron = np.kron

# 48 faults that were planted from outside
# ----------------------------------------------------------------------------

KRON = {
    "swapped": lambda a, b: kron(b, a),
    "second factor conjugated": lambda a, b: kron(a, b.conj()),
    "real parts": lambda a, b: kron(a.real, b.real),
    "computed in single precision": lambda a, b: kron(single(a), single(b)),
    "result through single precision": lambda a, b: single(kron(a, b)).astype(np.result_type(a, b)),
    "reshaped by columns": lambda a, b: np.einsum("ij,kl->ikjl", a, b).reshape(
        kron(a, b).shape, order="F"
    ),
    "sides m·q and n·p": lambda a, b: kron(a, b).reshape(
        a.shape[0] * b.shape[1], a.shape[1] * b.shape[0]
    ),
    "first factor in memory order": lambda a, b: kron(in_memory_order(a).reshape(a.shape), b),
    "one-row first factor reversed": lambda a, b: kron(a if len(a) > 1 else a[:, ::-1], b),
    "sides above five": lambda a, b: kron(a, b) * (1 + 1e-6 * (min(a.shape + b.shape) > 5)),
    "relative noise of 1e-10": lambda a, b: kron(a, b) * (1 + 1e-10),
    "relative noise of 1e-13": lambda a, b: kron(a, b) * (1 + 1e-13),
    "input overwritten": lambda a, b: emptied(a, kron(a, b)),
    "numpy.matrix": lambda a, b: np.asmatrix(kron(a, b)),
    "entries below 1e-8 are zero": lambda a, b: zeroed_below(kron(a, b), 1e-8),
    "clipped at 1,000": lambda a, b: clipped(kron(a, b)),
    "NaN is zero": lambda a, b: np.nan_to_num(kron(a, b)),
    "last column lost if the second is wide": lambda a, b: (
        emptied((r := kron(a, b))[:, -1], r) if b.shape[1] > 7 else kron(a, b)
    ),
    "swapped if both have three columns": lambda a, b: (
        kron(b, a) if a.shape == b.shape and a.shape[1] == 3 else kron(a, b)
    ),
    "empty matrices raise": lambda a, b: without_empty(kron(a, b), a, b),
    "complex only if the first is": lambda a, b: kron(a, b if np.iscomplexobj(a) else b.real),
    "last row lost above 16 rows": lambda a, b: last_row_lost(kron(a, b), len(a) > 16),
    "last row lost at 16 columns": lambda a, b: last_row_lost(kron(a, b), b.shape[1] == 16),
    "last row lost above 32 columns": lambda a, b: last_row_lost(kron(a, b), a.shape[1] > 32),
    "last row lost above 64 rows of the second": lambda a, b: last_row_lost(
        kron(a, b), len(b) > 62
    ),
    "last row lost from 64 rows of the answer": lambda a, b: last_row_lost(
        kron(a, b), len(a) * len(b) >= 64
    ),
    "zero times NaN is zero": lambda a, b: np.where(
        kron(a == 0, np.ones(b.shape, bool)), 0, kron(a, b)
    ),
    "infinity is the largest number": lambda a, b: np.where(
        np.isinf(r := kron(a, b)), np.finfo(float).max, r
    ),
    "the sign of infinity lost": lambda a, b: np.where(np.isinf(r := kron(a, b)), np.inf, r),
    "an underflow is the smallest number": lambda a, b: np.where(
        ((r := kron(a, b)) == 0) & (kron((a != 0) + 0.0, (b != 0) + 0.0) > 0),
        np.finfo(float).tiny,
        r,
    ),
    "negative strides": lambda a, b: kron(strides_taken_as_positive(a), b),
    "Hermitian factors mirrored without conjugation": lambda a, b: (
        kron(np.tril(a) + np.tril(a, -1).T, b) if is_hermitian(a) else kron(a, b)
    ),
    "squared where both are one object": lambda a, b: kron(a * a if a is b else a, b),
    "an equal shape taken for one object": lambda a, b: (
        kron(a, a) if a.shape == b.shape else kron(a, b)
    ),
    "writes to its argument and back": lambda a, b: kron(written_and_restored(a), b),
    "a single column of the second as a row": lambda a, b: (
        kron(a, b.T) if b.shape[1] == 1 < len(b) else kron(a, b)
    ),
    "integers through single precision": lambda a, b: (
        kron(a, b) if a.dtype.kind in "fc" else kron(a.astype(np.int8), b)
    ),
    "single precision through half": lambda a, b: (
        kron(a.astype(np.float16), b) if a.dtype == np.float32 else kron(a, b)
    ),
    "a row of zeros is one": lambda a, b: kron(
        np.where(np.any(a, axis=1, keepdims=True), a, 1.0) if np.any(a) and len(a) > 1 else a, b
    ),
}
APPLY = {
    "conjugated": lambda factors, x: applied([factor.conj() for factor in factors], x),
    "read by columns": lambda factors, x: applied(factors[::-1], x),
    "reversed": lambda factors, x: reduce(np.kron, factors[::-1]) @ x,
    "square factors transposed": lambda factors, x: applied(
        [transposed_if_square(f) for f in factors], x
    ),
    "right for two factors only": lambda factors, x: (
        applied(factors, x) * (1 + 1e-7 * (len(factors) > 2))
    ),
    "real part of x": lambda factors, x: applied(factors, x.real),
    "first column for all": lambda factors, x: np.repeat(applied(factors, x[:, :1]), x.shape[1], 1),
    "x in single precision": lambda factors, x: applied(factors, single(x)),
    "a factor alone is forgotten": lambda factors, x: (
        x if len(factors) == 1 else applied(factors, x)
    ),
    "a vector for one column": lambda factors, x: (
        applied(factors, x)[:, 0] if x.shape[1] == 1 else applied(factors, x)
    ),
    "real parts for real factors": lambda factors, x: applied(
        factors, x if any(map(np.iscomplexobj, factors)) else x.real
    ),
    "right for up to four factors": lambda factors, x: (
        applied(factors, x) * (1 + 1e-7 * (len(factors) > 4))
    ),
    "empty factors raise": lambda factors, x: without_empty(applied(factors, x), *factors, x),
    "last row lost above 64 columns": lambda factors, x: last_row_lost(
        applied(factors, x), x.shape[1] > 64
    ),
}
SUM = {
    "weights squared": lambda weights, factors: summed(weights**2, factors),
    "weights without sign": lambda weights, factors: summed(abs(weights), factors),
    "root of the weight on two factors": lambda weights, factors: summed(
        np.abs(weights) ** (0.5 * min(2, len(factors))), factors
    ),
    "small terms skipped": lambda weights, factors: summed(
        zeroed_below(weights, 1e-3 * weights[0]), factors
    ),
    "factors reversed": lambda weights, factors: summed(weights, factors[::-1]),
    "last factor conjugated": lambda weights, factors: summed(
        weights, [*factors[:-1], factors[-1].conj()]
    ),
    "last term lost": lambda weights, factors: summed(
        np.where(np.arange(len(weights)) < max(1, len(weights) - 1), weights, 0), factors
    ),
}
DECOMPOSITION = {
    "V for its conjugate": with_terms(lambda w, left, right: (w, (left, right.conj()))),
    "weights ascend": with_terms(lambda w, left, right: (w[::-1], (left[::-1], right[::-1]))),
    "left factor by columns": with_terms(
        lambda w, left, right: (w, (left.swapaxes(1, 2).reshape(left.shape), right))
    ),
    "weights on the factors": with_terms(
        lambda w, left, right: (
            np.ones_like(w),
            (left * w[:, None, None] ** 0.5, right * w[:, None, None] ** 0.5),
        )
    ),
    "a term too many": lambda matrix, shape, rank: best_terms(matrix, shape, rank + 1),
    "weights squared": with_terms(lambda w, left, right: (w**2, (left, right))),
    "weights off by 1e-6": with_terms(lambda w, left, right: (w * (1 + 1e-6), (left, right))),
    "through the Gram matrix": gram_terms,
    "in single precision": lambda matrix, shape, rank: best_terms(single(matrix), shape, rank),
    "three power steps": unconverged_terms,
}

# Faults in the relatives of the product
# -------------------------------------------------------------------------------

KHATRI_RAO = {
    "swapped": lambda a, b: khatri_rao(b, a),
    "second factor conjugated": lambda a, b: khatri_rao(a, b.conj()),
    "imaginary part dropped if the first is real": lambda a, b: khatri_rao(
        a, b if np.iscomplexobj(a) else b.real
    ),
    "computed in single precision": lambda a, b: khatri_rao(single(a), single(b)),
    "type of the first factor": lambda a, b: khatri_rao(a, b).astype(
        a.dtype if np.iscomplexobj(a) or not np.iscomplexobj(b) else np.result_type(a, b)
    ),
    "a product entry by entry for equal shapes": lambda a, b: (
        a * b if a.shape == b.shape else khatri_rao(a, b)
    ),
    "swapped if both have three columns": lambda a, b: (
        khatri_rao(b, a) if a.shape == b.shape and a.shape[1] == 3 else khatri_rao(a, b)
    ),
    "a Kronecker product for one column": lambda a, b: (
        kron(a, b.T) if a.shape[1] == 1 else khatri_rao(a, b)
    ),
    "row by row": lambda a, b: (
        face_splitting(a.T, b.T).T[::-1] if len(a) == len(b) > 1 else khatri_rao(a, b)
    ),
    "reshaped by columns": lambda a, b: np.einsum("mj,pj->mpj", a, b).reshape(
        -1, a.shape[1], order="F"
    ),
    "columns of norm one": lambda a, b: khatri_rao(
        a, b / np.maximum(np.linalg.norm(b, axis=0), 1e-300)
    ),
    "sides above five": lambda a, b: khatri_rao(a, b) * (1 + 1e-6 * (min(a.shape + b.shape) > 5)),
    "entries below 1e-8 are zero": lambda a, b: zeroed_below(khatri_rao(a, b), 1e-8),
    "NaN is zero": lambda a, b: np.nan_to_num(khatri_rao(a, b)),
    "empty matrices raise": lambda a, b: without_empty(khatri_rao(a, b), a, b),
    "first factor in memory order": lambda a, b: khatri_rao(in_memory_order(a).reshape(a.shape), b),
    "input overwritten": lambda a, b: emptied(b, khatri_rao(a, b)),
    "a column broadcast": lambda a, b: khatri_rao(np.broadcast_to(a[:, :1], a.shape), b),
    "a column that repeats the one before is skipped": lambda a, b: khatri_rao(
        np.where(repeats_the_one_before(a), 0.0, a), b
    ),
}
VEC = {
    "stacks rows": (lambda x: x.reshape(-1), unvec, commutation),
    "conjugated": (lambda x: vec(x).conj(), unvec, commutation),
    "real part": (lambda x: vec(x).real, unvec, commutation),
    "in memory order": (in_memory_order, unvec, commutation),
    "in single precision": (lambda x: single(vec(x)), unvec, commutation),
    "upper half of a square": (
        lambda x: vec(np.triu(x)) if x.shape[0] == x.shape[1] else vec(x),
        unvec,
        commutation,
    ),
    "a row": (lambda x: vec(x)[None, :], unvec, commutation),
    "stacks rows if wide": (
        lambda x: x.reshape(-1) if x.shape[1] > 5 else vec(x),
        unvec,
        commutation,
    ),
    "entries below 1e-8 are zero": (lambda x: zeroed_below(vec(x), 1e-8), unvec, commutation),
    "NaN is zero": (lambda x: np.nan_to_num(vec(x)), unvec, commutation),
    "empty matrices raise": (lambda x: without_empty(vec(x), x), unvec, commutation),
    "inverse by rows": (vec, lambda v, shape: v.reshape(shape), commutation),
    "inverse with swapped sides": (vec, lambda v, shape: v.reshape(shape).T, commutation),
    "inverse drops imaginary parts": (vec, lambda v, shape: unvec(v.real, shape), commutation),
    "inverse of empty raises": (
        vec,
        lambda v, shape: without_empty(unvec(v, shape), v),
        commutation,
    ),
    "K of the transpose": (vec, unvec, lambda m, n: commutation(n, m)),
    "K is the identity if square": (
        vec,
        unvec,
        lambda m, n: np.eye(m * n) if m == n else commutation(m, n),
    ),
    "K lost its last one": (
        vec,
        unvec,
        lambda m, n: np.where(np.arange(m * n) < m * n - 1, commutation(m, n), 0.0),
    ),
    "K off by one": (vec, unvec, lambda m, n: np.roll(commutation(m, n), 1, axis=0)),
    "K of long sides": (
        vec,
        unvec,
        lambda m, n: np.eye(m * n) if min(m, n) > 5 else commutation(m, n),
    ),
}
PARTIAL_TRACE = {
    "the other factor": lambda x, dims, axis: partial_trace(x, dims, 1 - axis),
    "the other factor if sides are equal": lambda x, dims, axis: partial_trace(
        x, dims, 1 - axis if dims[0] == dims[1] else axis
    ),
    "sides swapped": lambda x, dims, axis: partial_trace(x, dims[::-1], axis),
    "transposed": lambda x, dims, axis: partial_trace(x, dims, axis).T,
    "conjugated": lambda x, dims, axis: partial_trace(x, dims, axis).conj(),
    "conjugate transpose": lambda x, dims, axis: partial_trace(x, dims, axis).conj().T,
    "real part": lambda x, dims, axis: partial_trace(x, dims, axis).real,
    "made Hermitian": lambda x, dims, axis: (
        0.5 * (partial_trace(x, dims, axis) + partial_trace(x, dims, axis).conj().T)
    ),
    "trace one": lambda x, dims, axis: partial_trace(x, dims, axis) / max(abs(np.trace(x)), 1e-300),
    "a mean": lambda x, dims, axis: partial_trace(x, dims, axis) / max(dims[axis], 1),
    "first block": lambda x, dims, axis: (
        x[: dims[1], : dims[1]] if axis == 0 else partial_trace(x, dims, axis)
    ),
    "blocks are summed": lambda x, dims, axis: (
        x.reshape(*dims, *dims).sum((0, 2)) if axis == 0 else partial_trace(x, dims, axis)
    ),
    "in single precision": lambda x, dims, axis: partial_trace(single(x), dims, axis),
    "in memory order": lambda x, dims, axis: partial_trace(
        in_memory_order(x).reshape(x.shape), dims, axis
    ),
    "sides above five": lambda x, dims, axis: (
        partial_trace(x, dims, axis) * (1 + 1e-6 * (min(dims) > 5))
    ),
    "entries below 1e-8 are zero": lambda x, dims, axis: zeroed_below(
        partial_trace(x, dims, axis), 1e-8
    ),
    "NaN is zero": lambda x, dims, axis: np.nan_to_num(partial_trace(x, dims, axis)),
    "empty matrices raise": lambda x, dims, axis: without_empty(partial_trace(x, dims, axis), x),
    "input overwritten": lambda x, dims, axis: emptied(x, partial_trace(x, dims, axis)),
}

KRON_SUM = {
    "swapped": lambda a, b: kron_sum(b, a),
    "a product": kron,
    "second factor conjugated": lambda a, b: kron_sum(a, b.conj()),
    "a difference": lambda a, b: kron_sum(a, -b),
    "identities of the wrong size": lambda a, b: kron(a, np.eye(len(b))) + kron(b, np.eye(len(a))),
    "real parts": lambda a, b: kron_sum(a.real, b.real),
    "type of the first factor": lambda a, b: kron_sum(a, b).astype(
        a.dtype if np.iscomplexobj(a) or not np.iscomplexobj(b) else np.result_type(a, b)
    ),
    "symmetric factors only": lambda a, b: kron_sum(np.triu(a) + np.triu(a, 1).T, b),
    "diagonal twice": lambda a, b: kron_sum(a, b) + np.diag(np.diag(kron_sum(a, b))),
    "sides above five": lambda a, b: kron_sum(a, b) * (1 + 1e-6 * (min(len(a), len(b)) > 5)),
    "last row lost above 16 rows": lambda a, b: last_row_lost(kron_sum(a, b), len(a) > 16),
    "empty matrices raise": lambda a, b: without_empty(kron_sum(a, b), a, b),
    "input overwritten": lambda a, b: emptied(a, kron_sum(a, b)),
}

PLANTED = {
    check_kron: KRON,
    check_kron_sum: KRON_SUM,
    check_apply: APPLY,
    check_sum: SUM,
    check_decomposition: DECOMPOSITION,
    check_khatri_rao: KHATRI_RAO,
    check_vec: VEC,
    check_partial_trace: PARTIAL_TRACE,
}
"""Faults by the check that must find them; those of `check_vec` are vec, its inverse and the
commutation matrix."""
