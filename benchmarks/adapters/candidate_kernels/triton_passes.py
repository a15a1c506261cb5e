"""Triton: a low-rank pair added to a layer's output in one pass, and its whole backward in one pass and one sum."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.adapters.candidate_kernels.triton_language import cdiv, jit, tl
from benchmarks.adapters.candidate_kernels.triton_support import dot_precision, tile

ROWS, COLUMNS = 64, 128
MOST_PROGRAMS = 264
"""Most programs of the backward pass, each with its own partial sums: two per processor of an H200."""


@jit
def _forward(
    x, right, left, y, inner_out, n, into, out, rank, x_row, y_row, right_rank, right_wide, left_wide, left_rank,
    scaling, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Shrink, then expand: x is read once, y read and written once."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_real = rows < n
    wide_rows = rows.to(tl.int64)
    ranks = tl.arange(0, RANK)
    rank_real = ranks < rank
    inner = tl.full((ROWS, RANK), 0.0, tl.float32)
    for start in range(0, into, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        real = columns < into
        block = tl.load(
            x + wide_rows[:, None] * x_row + columns[None, :], mask=row_real[:, None] & real[None, :], other=0.0
        )
        pair = tl.load(
            right + ranks[None, :] * right_rank + columns[:, None] * right_wide,
            mask=rank_real[None, :] & real[:, None],
            other=0.0,
        )
        inner = tl.dot(block, pair, inner, input_precision=PRECISION)
    narrow = x.dtype.element_ty
    tl.store(
        inner_out + wide_rows[:, None] * rank + ranks[None, :],
        inner.to(narrow),
        mask=row_real[:, None] & rank_real[None, :],
    )
    scaled = (inner * scaling).to(narrow)
    for start in range(0, out, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        real = columns < out
        pair = tl.load(
            left + ranks[:, None] * left_rank + columns[None, :] * left_wide,
            mask=rank_real[:, None] & real[None, :],
            other=0.0,
        )
        place = y + wide_rows[:, None] * y_row + columns[None, :]
        mask = row_real[:, None] & real[None, :]
        total = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        total = tl.dot(scaled, pair, total, input_precision=PRECISION)
        tl.store(place, total.to(y.dtype.element_ty), mask=mask)


@jit
def _backward(
    x, dy, inner_in, right, left, dx, partial, n, into, out, rank, x_row, dy_row, dx_row,
    right_rank, right_wide, left_wide, left_rank, scaling,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """t = α dy B̂; dx += t Â; sums of tᵀ x and α innerᵀ dy over this program's blocks of rows, into its own slab."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    ranks = tl.arange(0, RANK)
    rank_real = ranks < rank
    narrow = x.dtype.element_ty
    slab = partial + program.to(tl.int64) * rank * (into + out)
    for first_row in range(program * ROWS, n, programs * ROWS):
        rows = first_row + tl.arange(0, ROWS)
        row_real = rows < n
        wide_rows = rows.to(tl.int64)
        inner = tl.load(
            inner_in + wide_rows[:, None] * rank + ranks[None, :],
            mask=row_real[:, None] & rank_real[None, :],
            other=0.0,
        )
        inner = (inner.to(tl.float32) * scaling).to(narrow)
        t = tl.full((ROWS, RANK), 0.0, tl.float32)
        for start in range(0, out, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            real = columns < out
            block = tl.load(
                dy + wide_rows[:, None] * dy_row + columns[None, :], mask=row_real[:, None] & real[None, :], other=0.0
            )
            pair = tl.load(
                left + ranks[None, :] * left_rank + columns[:, None] * left_wide,
                mask=rank_real[None, :] & real[:, None],
                other=0.0,
            )
            t = tl.dot(block, pair, t, input_precision=PRECISION)
            place = slab + rank * into + ranks[:, None] * out + columns[None, :]
            mask = rank_real[:, None] & real[None, :]
            total = tl.load(place, mask=mask, other=0.0)
            total = tl.dot(tl.trans(inner), block, total, input_precision=PRECISION)
            tl.store(place, total, mask=mask)
        t_narrow = (t * scaling).to(narrow)
        for start in range(0, into, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            real = columns < into
            both = row_real[:, None] & real[None, :]
            block = tl.load(x + wide_rows[:, None] * x_row + columns[None, :], mask=both, other=0.0)
            place = slab + ranks[:, None] * into + columns[None, :]
            mask = rank_real[:, None] & real[None, :]
            total = tl.load(place, mask=mask, other=0.0)
            total = tl.dot(tl.trans(t_narrow), block, total, input_precision=PRECISION)
            tl.store(place, total, mask=mask)
            pair = tl.load(right + ranks[:, None] * right_rank + columns[None, :] * right_wide, mask=mask, other=0.0)
            place = dx + wide_rows[:, None] * dx_row + columns[None, :]
            total = tl.load(place, mask=both, other=0.0).to(tl.float32)
            total = tl.dot(t_narrow, pair, total, input_precision=PRECISION)
            tl.store(place, total.to(dx.dtype.element_ty), mask=both)
        tl.debug_barrier()


def add_low_rank(y: Tensor, x: Tensor, right: Tensor, left: Tensor, scaling: float = 1.0) -> Tensor:
    """``y += scaling (x Âᵀ) B̂ᵀ`` in place, in one launch.

    Parameters
    ----------
    y, x : Tensor
        Shapes (n, w1) and (n, w2), rows contiguous.
    right, left : Tensor
        Â, shape (r, w2), and B̂, shape (w1, r), in the dtype of ``x`` and any strides; best rank-major and with r a
        multiple of 8.
    scaling : float
        Factor of what is added.

    Returns
    -------
    Tensor
        The inner activations ``x Âᵀ``, shape (n, r), which the backward pass needs.
    """
    (n, into), (rank, out) = x.shape, (right.shape[0], left.shape[0])
    x = x if x.stride(1) == 1 else x.contiguous()
    inner = torch.empty(n, rank, dtype=x.dtype, device=x.device)
    if n:
        _forward[(cdiv(n, ROWS),)](
            x, right, left, y, inner, n, into, out, rank, x.stride(0), y.stride(0), *right.stride(), *left.stride(),
            scaling, ROWS=ROWS, COLUMNS=COLUMNS, RANK=tile(rank), PRECISION=dot_precision(x.dtype),
        )  # fmt: skip
    return inner


def backward_pass(
    dx: Tensor, dy: Tensor, x: Tensor, inner: Tensor, right: Tensor, left: Tensor, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Add the pair's part to ``dx`` in place; gradients of Â and B̂ in float32.

    Every program sums into its own slab and the slabs are summed at the end, so two runs give equal bits.

    Parameters
    ----------
    dx, dy, x : Tensor
        Shapes (n, w2), (n, w1), (n, w2).
    inner : Tensor
        What `add_low_rank` returned.
    right, left, scaling
        As for `add_low_rank`.

    Returns
    -------
    tuple of Tensor
        Shapes (r, w2) and (w1, r).
    """
    (n, into), (rank, out) = x.shape, (right.shape[0], left.shape[0])
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    programs = max(1, min(cdiv(n, ROWS), MOST_PROGRAMS))
    partial = torch.zeros(programs, rank * (into + out), dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        x, dy, inner, right, left, dx, partial, n, into, out, rank, x.stride(0), dy.stride(0), dx.stride(0),
        *right.stride(), *left.stride(), scaling,
        ROWS=ROWS, COLUMNS=COLUMNS, RANK=tile(rank), PRECISION=dot_precision(x.dtype),
    )  # fmt: skip
    total = partial.sum(0)
    return total[: rank * into].view(rank, into), total[rank * into :].view(rank, out).mT


__all__ = ["add_low_rank", "backward_pass"]
