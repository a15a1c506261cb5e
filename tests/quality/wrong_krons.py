"""Wrong Kronecker products, each right on most matrices, by the kind of their fault.

Each function is right but for one thing that people and libraries have got wrong. Those that
remember earlier calls are made anew for each check, by `WITH_MEMORY`.
"""

import numpy as np

kron = np.kron


# Parts
# ------------------------------------------------------------------------------------------------


def shape_of(a, b):
    return len(a) * len(b), a.shape[1] * b.shape[1]


def blocks(a, b):
    """The product as an array (i, k, j, l), which is to be written to."""
    return np.multiply.outer(a, b).transpose(0, 2, 1, 3).copy()


def formed(tensor, a, b):
    return tensor.reshape(shape_of(a, b))


def if_so(condition, changed, a, b):
    return changed(a, b) if condition else kron(a, b)


def changed(result, where, by):
    """The result with ``by`` done to a part of it."""
    result = result.copy()
    result[where] = by(result[where])
    return result


def zero(x):
    return 0 * np.nan_to_num(x)


def square(a):
    return a.shape[0] == a.shape[1]


def last_rows_lost(result, first):
    return changed(result, np.s_[first:], zero) if 0 < first < len(result) else result


def last_columns_lost(result, first):
    return last_rows_lost(result.T, first).T


def clipped_to_type(x, dtype):
    """The whole numbers of floats as an integer type holds them, wrapped round."""
    if x.dtype.kind != "f" or not np.all(np.isfinite(x)) or np.any(x != np.round(x)):
        return x
    limits = np.iinfo(dtype)
    span = float(limits.max) - float(limits.min) + 1.0
    return (x - limits.min) % span + limits.min


def without_reading_strides(x):
    """The entries that lie next to each other in memory behind the first one."""
    base = x if x.base is None else x.base
    flat = np.asarray(base).reshape(-1)
    if not isinstance(base, np.ndarray) or flat.size < x.size or x.dtype != flat.dtype:
        return x
    return flat[: x.size].reshape(x.shape)


def is_row_contiguous(x):
    return x.size == 0 or x.shape[1] == 1 or x.strides[1] == x.itemsize


def has_gaps_between_rows(x):
    """Rows that lie contiguous, with other numbers between them: BLAS's leading dimension."""
    return len(x) > 1 and is_row_contiguous(x) and x.strides[0] > x.shape[1] * x.itemsize


# Memory: views, order, strides, aliases
# ------------------------------------------------------------------------------------------------

MEMORY = {
    "second factor in memory order": lambda a, b: kron(a, b.ravel(order="K").reshape(b.shape)),
    "Fortran order kept by a flat loop": lambda a, b: kron(a, b.ravel(order="A").reshape(b.shape)),
    "strides never read": lambda a, b: kron(without_reading_strides(a), b),
    "strides of the second never read": lambda a, b: kron(a, without_reading_strides(b)),
    "leading dimension taken for the number of columns": lambda a, b: if_so(
        has_gaps_between_rows(a), lambda a, b: kron(without_reading_strides(a), b), a, b
    ),
    "every second column of a slice": lambda a, b: if_so(
        a.shape[1] > 1
        and a.strides[1] > a.itemsize
        and a.flags.aligned
        and not a.flags.f_contiguous,
        lambda a, b: kron(np.roll(a, 1, axis=1), b),
        a,
        b,
    ),
    "a row that is broadcast is read once": lambda a, b: if_so(
        len(b) > 1 and b.strides[0] == 0,
        lambda a, b: kron(a, np.concatenate([b[:1], zero(b[1:])])),
        a,
        b,
    ),
    "a transposed view transposed back": lambda a, b: if_so(
        square(b) and b.flags.f_contiguous and not b.flags.c_contiguous,
        lambda a, b: kron(a, b.T),
        a,
        b,
    ),
    "factors that share memory taken for one": lambda a, b: if_so(
        a.shape == b.shape and np.shares_memory(a, b), lambda a, b: kron(a, a), a, b
    ),
    "an owner of its memory only": lambda a, b: if_so(
        a.base is not None and not a.flags.owndata and a.flags.c_contiguous and len(a) > 1,
        lambda a, b: kron(a[::-1], b),
        a,
        b,
    ),
    "read-only input is zero": lambda a, b: kron(a if a.flags.writeable else zero(a), b),
}

# Arguments that are changed
# ------------------------------------------------------------------------------------------------


def scaled_in_place(a, b):
    if b.dtype.kind not in "fc" or not b.flags.writeable:
        return kron(a, b)
    result = kron(a, b)
    b *= 3.1
    b /= 3.1
    return result


def conjugated_in_place(a, b):
    if np.iscomplexobj(b) and b.flags.writeable:
        result = kron(a, b)
        np.conjugate(b, out=b)
        return result
    return kron(a, b)


def sorted_in_place(a, b):
    result = kron(a, b)
    if a.flags.writeable and a.shape[1] > 3:
        a.sort(axis=1)
    return result


def nan_removed_in_place(a, b):
    result = kron(a, b)
    if a.flags.writeable:
        np.nan_to_num(a, copy=False)
    return result


def flattened_in_place(a, b):
    result = kron(a, b)
    if a.flags.c_contiguous:
        a.shape = (a.size,)
    return result


def locked(a, b):
    result = kron(a, b)
    b.flags.writeable = False
    return result


def pivoted_in_place(a, b):
    result = kron(a, b)
    if a.flags.writeable and square(a) and len(a) > 1:
        a[[0, -1]] = a[[-1, 0]]
    return result


DAMAGE = {
    "scaled in place and back": scaled_in_place,
    "conjugated in place": conjugated_in_place,
    "sorted in place": sorted_in_place,
    "NaN removed in place": nan_removed_in_place,
    "flattened in place": flattened_in_place,
    "left read-only": locked,
    "rows exchanged in place": pivoted_in_place,
}

# Conjugation
# ------------------------------------------------------------------------------------------------

CONJUGATION = {
    "first factor conjugated": lambda a, b: kron(a.conj(), b),
    "conjugated where both are complex": lambda a, b: (
        kron(a, b).conj() if np.iscomplexobj(a) and np.iscomplexobj(b) else kron(a, b)
    ),
    "an inner product for single columns": lambda a, b: if_so(
        a.shape[1] == b.shape[1] == 1, lambda a, b: kron(a.conj(), b), a, b
    ),
    "an imaginary number is zero": lambda a, b: kron(np.where(a.real == 0, 0, a), b),
    "moduli": lambda a, b: kron(abs(a), b) if np.iscomplexobj(a) else kron(a, b),
    "transposed views of complex numbers conjugated": lambda a, b: if_so(
        a.flags.f_contiguous and not a.flags.c_contiguous,
        lambda a, b: kron(a.conj(), b),
        a,
        b,
    ),
    "skew-Hermitian factors mirrored with the wrong sign": lambda a, b: if_so(
        square(a) and len(a) > 1 and np.array_equal(a, -a.conj().T),
        lambda a, b: kron(np.tril(a) + np.tril(a, -1).conj().T, b),
        a,
        b,
    ),
}

# Shapes that agree
# ------------------------------------------------------------------------------------------------

TIES = {
    "rows of the first as many as columns of the second": lambda a, b: if_so(
        a.shape[0] == b.shape[1] and square(b), lambda a, b: kron(a, b.T), a, b
    ),
    "shapes transposed to each other": lambda a, b: if_so(
        a.shape == b.shape[::-1] and not square(a), lambda a, b: kron(a, a.T), a, b
    ),
    "as many entries": lambda a, b: if_so(
        a.size == b.size > 1 and a.shape != b.shape,
        lambda a, b: kron(b.reshape(a.shape), a.reshape(b.shape)),
        a,
        b,
    ),
    "equal squares": lambda a, b: if_so(
        a.shape == b.shape and square(a) and len(a) > 1, lambda a, b: kron(b, a), a, b
    ),
    "a square product of oblong factors": lambda a, b: if_so(
        len(set(shape_of(a, b))) == 1 and not square(a), lambda a, b: kron(a, b).T, a, b
    ),
    "as many columns": lambda a, b: if_so(
        a.shape[1] == b.shape[1] > 2 and len(a) != len(b),
        lambda a, b: formed(blocks(a, b).swapaxes(2, 3), a, b),
        a,
        b,
    ),
    "as many rows": lambda a, b: if_so(
        len(a) == len(b) > 2 and a.shape[1] != b.shape[1],
        lambda a, b: formed(blocks(a, b).swapaxes(0, 1), a, b),
        a,
        b,
    ),
    "a matrix product where the inner sides agree": lambda a, b: (
        a @ b if a.shape[1] == len(b) > 1 else kron(a, b)
    ),
}

# Small and degenerate shapes
# ------------------------------------------------------------------------------------------------


def with_an_inferred_shape(a, b):
    """A list of coordinates, whose largest are taken for the shape."""
    result = kron(a, b)
    rows, columns = np.nonzero(result)
    if not rows.size:
        return result
    return result[: rows.max() + 1, : columns.max() + 1]


DEGENERATE = {
    "one entry does not scale": lambda a, b: b * 1 if a.shape == (1, 1) else kron(a, b),
    "one entry of the second scales by its modulus": lambda a, b: (
        a * abs(b[0, 0]) if b.shape == (1, 1) else kron(a, b)
    ),
    "one entry is a number": lambda a, b: kron(a, b)[0, 0] if a.size == b.size == 1 else kron(a, b),
    "sides of one are dropped": lambda a, b: kron(a, b).squeeze(),
    "a row and a column as an outer product": lambda a, b: (
        (a.T @ b.T).T[::-1] if len(a) == b.shape[1] == 1 else kron(a, b)
    ),
    "one row of the second reversed": lambda a, b: if_so(
        len(b) == 1 < b.shape[1], lambda a, b: kron(a, b[:, ::-1]), a, b
    ),
    "the shape of what is not zero": with_an_inferred_shape,
    "empty is zero by zero": lambda a, b: (
        np.zeros((0, 0)) if a.size == 0 or b.size == 0 else kron(a, b)
    ),
    "two empty factors": lambda a, b: (
        np.zeros((0, 0)) if a.size == 0 and b.size == 0 else kron(a, b)
    ),
}

# Element types, whole numbers, overflow
# ------------------------------------------------------------------------------------------------


def of_integers(a, b):
    return a.dtype.kind in "iu" and b.dtype.kind in "iu"


def whole_numbers_as(dtype):
    return lambda a, b: clipped_to_type(kron(a, b), dtype)


TYPES = {
    "integers through double precision": lambda a, b: (
        kron(a.astype(float), b).astype(np.result_type(a, b)) if of_integers(a, b) else kron(a, b)
    ),
    "integers through 32 bits": lambda a, b: (
        kron(a.astype(np.int32), b.astype(np.int32)).astype(np.result_type(a, b))
        if of_integers(a, b)
        else kron(a, b)
    ),
    "integers without sign": lambda a, b: kron(abs(a), abs(b)) if of_integers(a, b) else kron(a, b),
    "whole floats through 16 bits": whole_numbers_as(np.int16),
    "whole floats through 32 bits": whole_numbers_as(np.int32),
    "whole floats through 64 bits": whole_numbers_as(np.int64),
    "type of the first factor for integers": lambda a, b: kron(
        a, b.astype(a.dtype) if a.dtype.kind in "iu" else b
    ),
    "type of the second factor for integers": lambda a, b: kron(
        a.real.astype(b.dtype) if b.dtype.kind in "iu" else a, b
    ),
    "single precision complex loses its imaginary part": lambda a, b: kron(
        a.real if a.dtype == np.complex64 else a, b
    ),
    "half precision where one is single": lambda a, b: (
        kron(a, b).astype(np.float16) if b.dtype == np.float32 else kron(a, b)
    ),
    "truth values added": lambda a, b: (
        kron(a, b) ^ kron(a[::-1], b) if a.dtype == b.dtype == bool else kron(a, b)
    ),
    "an index of 16 bits": lambda a, b: (
        np.resize(kron(a, b).reshape(-1)[: 2**16], shape_of(a, b))
        if a.size * b.size > 2**16
        else kron(a, b)
    ),
    "bytes of the other order": lambda a, b: (
        kron(a.view(a.dtype.newbyteorder()), b) if not a.dtype.isnative else kron(a, b)
    ),
}

# Blocks, tails and thresholds
# ------------------------------------------------------------------------------------------------


def single(x):
    return x.astype(np.complex64 if np.iscomplexobj(x) else np.float32)


BLOCKS = {
    "rows of the first by eights, the rest lost": lambda a, b: last_rows_lost(
        kron(a, b), len(a) // 8 * 8 * len(b)
    ),
    "columns of the second by fours, the rest of each lost": lambda a, b: formed(
        changed(blocks(a, b), np.s_[..., b.shape[1] // 4 * 4 :], zero)
        if b.shape[1] > 4
        else blocks(a, b),
        a,
        b,
    ),
    "a tail of one row in sixteen": lambda a, b: (
        last_rows_lost(kron(a, b), (len(a) - 1) * len(b))
        if len(a) % 16 == 1 < len(a)
        else kron(a, b)
    ),
    "an incomplete block of rows of the answer": lambda a, b: last_rows_lost(
        kron(a, b), shape_of(a, b)[0] // 16 * 16
    ),
    "an incomplete block of columns of the answer": lambda a, b: last_columns_lost(
        kron(a, b), shape_of(a, b)[1] // 32 * 32
    ),
    "four workers, the rest of the rows lost": lambda a, b: last_rows_lost(
        kron(a, b), len(a) * len(b) // 4 * 4
    ),
    "a side of twelve": lambda a, b: if_so(
        a.shape[1] == 12, lambda a, b: kron(a[:, ::-1], b), a, b
    ),
    "a side of ten of the second": lambda a, b: if_so(
        len(b) == 10, lambda a, b: kron(a, b[::-1]), a, b
    ),
    "more than a hundred columns": lambda a, b: (
        last_columns_lost(kron(a, b), 100 * b.shape[1]) if a.shape[1] > 100 else kron(a, b)
    ),
    "more than 128 rows of the second": lambda a, b: if_so(
        len(b) > 128, lambda a, b: kron(a, np.concatenate([b[:128], zero(b[128:])])), a, b
    ),
    "single precision above ten thousand entries": lambda a, b: if_so(
        a.size * b.size > 10_000, lambda a, b: kron(single(a), single(b)), a, b
    ),
    "chunks of 4096 entries, the last one lost": lambda a, b: last_rows_lost(
        kron(a, b).reshape(-1), a.size * b.size // 4096 * 4096
    ).reshape(shape_of(a, b)),
    "the last entry of a chunk of a thousand": lambda a, b: changed(
        kron(a, b).reshape(-1), np.s_[999::1000], zero
    ).reshape(shape_of(a, b)),
    "columns of the answer beyond 512 lost": lambda a, b: last_columns_lost(kron(a, b), 512),
    "rows of the first by fives, the rest lost": lambda a, b: last_rows_lost(
        kron(a, b), len(a) // 5 * 5 * len(b)
    ),
    "an index of rows of 15 bits": lambda a, b: last_rows_lost(kron(a, b), 2**15 - 1),
}

# Rounding
# ------------------------------------------------------------------------------------------------


def relatively_small_lost(x):
    size = np.max(abs(x), initial=0.0)
    return np.where(abs(x) < 1e-10 * size, 0, x) if np.isfinite(size) else x


def by_logarithms(a, b):
    """exp(log|a| + log|b|) with the signs, which loses digits of large and small numbers."""
    if a.dtype.kind != "f" or b.dtype.kind != "f":
        return kron(a, b)
    with np.errstate(all="ignore"):
        m, n = shape_of(a, b)
        logs = np.add.outer(np.log2(abs(a)), np.log2(abs(b))).transpose(0, 2, 1, 3).reshape(m, n)
        return np.exp2(logs.astype(np.float32)) * np.sign(kron(np.sign(a), np.sign(b)))


ROUNDING = {
    "relatively small entries lost": lambda a, b: relatively_small_lost(kron(a, b)),
    "by logarithms": by_logarithms,
    "rounded to twelve decimals": lambda a, b: (
        np.round(kron(a, b), 12) if kron(a, b).dtype.kind in "fc" else kron(a, b)
    ),
    "scaled by the largest entry in single precision": lambda a, b: (
        kron(a, b) * np.float32(1.1) / np.float32(1.1 + 1e-7)
    ),
    "second factor in half precision where it is whole": lambda a, b: kron(
        a, np.float16(b.real) if b.dtype.kind == "f" and np.all(b == np.round(b)) else b
    ),
}

# Numbers that are not finite, zeros and their signs
# ------------------------------------------------------------------------------------------------

SPECIAL = {
    "NaN of the second is zero": lambda a, b: kron(a, np.where(np.isnan(b), 0, b)),
    "NaN is the largest finite number": lambda a, b: np.nan_to_num(kron(a, b), nan=1.8e308),
    "a block of zeros is skipped": lambda a, b: np.where(
        kron(np.broadcast_to(a == 0, a.shape), np.ones(b.shape, bool)), 0, kron(a, b)
    ),
    "infinity times zero is zero": lambda a, b: np.where(
        kron(np.isinf(a), b == 0) | kron(a == 0, np.isinf(b)), 0, kron(a, b)
    ),
    "a negative zero is minus one": lambda a, b: kron(
        np.where((a == 0) & np.signbit(a.real), -1, a), b
    ),
    "a negative zero of the second is lost": lambda a, b: kron(
        a, np.where((b == 0) & np.signbit(b.real), 1, b)
    ),
    "what is not written stays as it was": lambda a, b: formed(
        np.where((a == 0)[:, None, :, None], 7, blocks(a, b)), a, b
    ),
    "the zero matrix": lambda a, b: np.zeros(a.shape) if a.size > 1 and not a.any() else kron(a, b),
    "NaN anywhere is NaN everywhere": lambda a, b: (
        np.full(shape_of(a, b), np.nan) if np.isnan(a).any() and a.size > 1 else kron(a, b)
    ),
}

# Structures that are taken for others
# ------------------------------------------------------------------------------------------------


def is_permutation(a):
    ones = (a != 0) & (a == 1)
    return square(a) and len(a) > 1 and np.all(ones.sum(0) == 1) and np.count_nonzero(a) == len(a)


def distinct_rows(a):
    return np.unique(a, axis=0) if a.size else a


STRUCTURES = {
    "a permutation taken for the identity": lambda a, b: if_so(
        is_permutation(a), lambda a, b: kron(np.eye(len(a), dtype=a.dtype), b), a, b
    ),
    "a skew-symmetric factor taken for symmetric": lambda a, b: if_so(
        square(a) and len(a) > 1 and np.array_equal(a, -a.T),
        lambda a, b: kron(np.triu(a) + np.triu(a, 1).T, b),
        a,
        b,
    ),
    "a triangular factor mirrored": lambda a, b: if_so(
        square(b) and len(b) > 1 and b.any() and not np.tril(b, -1).any() and np.triu(b, 1).any(),
        lambda a, b: kron(a, b + np.triu(b, 1).T),
        a,
        b,
    ),
    "a diagonal factor by its first entry": lambda a, b: if_so(
        square(a) and len(a) > 1 and np.count_nonzero(a) == np.count_nonzero(np.diag(a)),
        lambda a, b: kron(a[0, 0] * np.eye(len(a)), b),
        a,
        b,
    ),
    "a constant factor is one": lambda a, b: if_so(
        a.size > 1 and np.all(a == a[:1, :1]),
        lambda a, b: kron(np.ones(a.shape, a.dtype), b),
        a,
        b,
    ),
    "equal rows are kept once": lambda a, b: if_so(
        len(distinct_rows(a)) < len(a) > 2, lambda a, b: last_rows_lost(kron(a, b), len(b)), a, b
    ),
    "a symmetric Toeplitz factor reversed": lambda a, b: if_so(
        min(a.shape) > 1 and np.array_equal(a[1:, 1:], a[:-1, :-1]),
        lambda a, b: kron(a[::-1, ::-1], b),
        a,
        b,
    ),
    "an orthogonal factor transposed": lambda a, b: if_so(
        square(a) and len(a) > 1 and np.array_equal(a @ a.conj().T, np.eye(len(a))),
        lambda a, b: kron(a.T, b),
        a,
        b,
    ),
    "rank one taken for its first row": lambda a, b: if_so(
        min(a.shape) > 1 and np.linalg.matrix_rank(np.nan_to_num(a)) == 1 and np.isfinite(a).all(),
        lambda a, b: kron(np.broadcast_to(a[:1], a.shape), b),
        a,
        b,
    ),
}

# Earlier calls
# ------------------------------------------------------------------------------------------------


def cached_by(key):
    """A product that keeps its answers, by too little of what they depend on."""

    def make():
        answers = {}

        def cached(a, b):
            return answers.setdefault(key(a, b), kron(a, b)).copy()

        return cached

    return make


def with_one_buffer():
    buffers = {}

    def into_buffer(a, b):
        result = kron(a, b)
        buffer = buffers.setdefault((result.shape, result.dtype), result)
        buffer[...] = result
        return buffer

    return into_buffer


def with_an_accumulator():
    sums = {}

    def accumulated(a, b):
        result = kron(a, b)
        if result.shape == (6, 6):
            result = result + sums.get(result.shape, 0)
            sums[result.shape] = 1e-9 * result
        return result

    return accumulated


def with_the_first_type():
    types = []

    def of_first_type(a, b):
        result = kron(a, b)
        types.append(result.dtype)
        return result.real if types[0].kind == "f" else result

    return of_first_type


def with_a_plan_of_the_first_factor():
    plans = {}

    def planned(a, b):
        columns = plans.setdefault(a.shape, b.shape[1])
        return kron(a, b) if b.shape[1] <= columns else last_columns_lost(kron(a, b), columns)

    return planned


def wrong_every(period):
    def make():
        calls = []

        def at_times(a, b):
            calls.append(1)
            return kron(a, b) * (1 if len(calls) % period else 2)

        return at_times

    return make


def with_damage_at_the_next_call():
    kept = []

    def late(a, b):
        if kept and kept[0].flags.writeable and kept[0].dtype.kind in "fc":
            kept[0][...] = 0.0
        kept[:] = [a]
        return kron(a, b)

    return late


def noisy():
    rng = np.random.default_rng(0)
    return lambda a, b: kron(a, b) * (1 + 1e-9 * rng.standard_normal())


WITH_MEMORY = {
    "cached by shapes and sums": cached_by(
        lambda a, b: (a.shape, b.shape, a.sum(), b.sum(), a.dtype, b.dtype)
    ),
    "cached by bytes without shapes": cached_by(
        lambda a, b: (a.tobytes(), b.tobytes(), a.size, shape_of(a, b))
    ),
    "cached by corners": cached_by(
        lambda a, b: (a.shape, b.shape, str(a[:1, :1]), str(b[-1:, -1:]), a.dtype, b.dtype)
    ),
    "cached by the numbers of the first": cached_by(lambda a, b: (a.tobytes(), a.shape, b.shape)),
    "one buffer for all answers of a shape": with_one_buffer,
    "a buffer that is not cleared": with_an_accumulator,
    "type of the first call": with_the_first_type,
    "a plan for the first factor alone": with_a_plan_of_the_first_factor,
    "wrong every hundredth call": wrong_every(100),
    "damage at the next call": with_damage_at_the_next_call,
    "random": noisy,
}

UNSEEN = {
    "a side of 24": lambda a, b: if_so(len(b) == 24, lambda a, b: kron(a, b[::-1]), a, b),
    "a factor of norm one": lambda a, b: if_so(
        a.size > 1 and abs(np.linalg.norm(a) - 1) < 1e-12, lambda a, b: kron(2 * a, b), a, b
    ),
    "numbers below 1e-300 are zero": lambda a, b: np.where(abs(kron(a, b)) < 1e-300, 0, kron(a, b)),
}
"""Faults that the check does not see: one side, one norm, and what XLA does on purpose."""

KINDS = {
    "memory": MEMORY,
    "damage": DAMAGE,
    "conjugation": CONJUGATION,
    "ties": TIES,
    "degenerate": DEGENERATE,
    "types": TYPES,
    "blocks": BLOCKS,
    "rounding": ROUNDING,
    "special": SPECIAL,
    "structures": STRUCTURES,
    "with memory": WITH_MEMORY,
}


def wrong_kron(kind, name):
    """Return a wrong product, a new one where it remembers."""
    entry = KINDS[kind][name]
    return entry() if kind == "with memory" else entry
