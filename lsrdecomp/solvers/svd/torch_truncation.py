"""The truncated SVD of a torch tensor, with first and second derivatives where these exist."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lsrdecomp.errors import LsrError
from lsrdecomp.solvers.svd.derivatives import rounding_gap, tied_gap, truncation_change

CONSISTENT = 1e-4
"""Largest relative difference of gradients that agree but for rounding in single precision."""


def differentiable_triples(
    matrix: Tensor, u: Tensor, sigma: Tensor, vh: Tensor, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first ``rank`` singular triples of a matrix as functions of it.

    Parameters
    ----------
    matrix : Tensor, shape (p, q)
        In double precision.
    u, sigma, vh : Tensor
        All its singular triples, thin.
    rank : int
        Terms to keep.

    Raises
    ------
    LsrError
        If terms are asked for that are rounding, or if the last value that is kept equals the first
        that is not. On the way back, if single terms of equal weight are asked for derivatives,
        which they do not have.

    Notes
    -----
    Where values that are kept are equal, terms are chosen whose sum has the derivatives of the
    truncation, to all orders: (R̂ V) (Uᴴ R̂ V)⁻¹ (Uᴴ R̂) with constant U and V.
    """
    u, sigma, vh = u.detach(), sigma.detach(), vh.detach()
    _refuse_cut(sigma, rank)
    kept_u, kept_sigma, kept_vh = u[:, :rank], sigma[:rank], vh[:rank, :]
    truncated: Tensor = _Truncated.apply(matrix, u, sigma, vh, rank)  # type: ignore[no-untyped-call]
    images = truncated @ kept_vh.mH
    gaps = kept_sigma[:-1] - kept_sigma[1:]
    if bool((gaps > tied_gap(sigma)).all()):
        # Vectors turn by the differences of the values that are kept, as torch knows.
        basis, _ = torch.linalg.qr(images)
        core_u, core_sigma, core_vh = torch.linalg.svd(basis.mH @ truncated, full_matrices=False)
        return basis @ core_u, core_sigma, core_vh
    rows = torch.linalg.solve(kept_u.mH @ images, kept_u.mH @ truncated)
    image_norms = torch.linalg.vector_norm(images, dim=0)
    row_norms = torch.linalg.vector_norm(rows, dim=1)
    terms = images / image_norms, image_norms * row_norms, rows / row_norms[:, None]
    checked: tuple[Tensor, Tensor, Tensor] = _OfTheSum.apply(*terms)  # type: ignore[no-untyped-call]
    return checked


def _refuse_cut(sigma: Tensor, rank: int) -> None:
    """Raise `LsrError` if the first ``rank`` terms have no derivative."""
    gap = float(rounding_gap(sigma))
    terms = int((sigma > gap).sum())
    if terms < rank:
        fewer = f", or ask for rank={terms} or less" if terms else ""
        raise LsrError(
            f"a matrix of {terms} terms in this shape cannot be differentiated at rank={rank}; "
            f"pass matrix.detach(){fewer}"
        )
    if rank < len(sigma) and float(sigma[rank - 1] - sigma[rank]) <= gap:
        tied = [k for k in range(len(sigma)) if abs(float(sigma[k] - sigma[rank])) <= gap]
        fewer = f"rank={tied[0]} or " if tied[0] else ""
        raise LsrError(
            f"rank={rank} cuts between terms of equal weight ({float(sigma[rank]):.6g}), so that "
            "the best approximation is not unique and has no derivative; ask for "
            f"{fewer}rank={tied[-1] + 1}, or pass matrix.detach()"
        )


class _Truncated(Function):
    """R ↦ R̂, the first terms of the SVD."""

    @staticmethod
    def forward(
        ctx: Any, matrix: Tensor, u: Tensor, sigma: Tensor, vh: Tensor, rank: int
    ) -> Tensor:
        ctx.save_for_backward(matrix, u, sigma, vh)
        ctx.rank = rank
        return (u[:, :rank] * sigma[:rank]) @ vh[:rank, :]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        moved = _Change.apply(gradient, *ctx.saved_tensors, ctx.rank)  # type: ignore[no-untyped-call]
        return moved, None, None, None, None


class _Change(Function):
    """(dR, R) ↦ dR̂, which is linear in dR and its own adjoint."""

    @staticmethod
    def forward(
        ctx: Any, change: Tensor, _: Tensor, u: Tensor, sigma: Tensor, vh: Tensor, rank: int
    ) -> Tensor:
        ctx.save_for_backward(change, u, sigma, vh)
        ctx.rank = rank
        moved: Tensor = truncation_change((u, sigma, vh), rank, change)
        return moved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        change, *triples = ctx.saved_tensors
        u, sigma, vh = triples
        by_change = truncation_change((u, sigma, vh), ctx.rank, gradient)
        by_matrix = _second_change((u, sigma, vh), ctx.rank, change, gradient)
        return by_change, by_matrix, None, None, None, None


def _second_change(
    triples: tuple[Tensor, Tensor, Tensor], rank: int, first: Tensor, second: Tensor
) -> Tensor:
    """Return the second derivative of R̂ along two changes of R, which is symmetric in both.

    It is that of a function of a Hermitian matrix, by divided differences [1]_: those of three
    values of which a and b are kept and c is not are −c/((a − c)(b − c)), those of a kept and b and
    c not kept a/((a − b)(a − c)), and those of three of a kind zero.

    References
    ----------
    .. [1] R. Bhatia, Matrix Analysis, 1997, section V.3. doi:10.1007/978-1-4612-0653-8
    """
    u, sigma, vh = triples
    p, q = first.shape
    if p > q:
        adjoint_triples = vh.mH, sigma, u.mH
        return _second_change(adjoint_triples, rank, first.mH, second.mH).mH
    # 1. Coordinates in which R is diagonal: U, and V with what the changes reach beside it.
    outside = torch.cat([first.mH, second.mH], dim=1)
    outside = outside - vh.mH @ (vh @ outside)
    extra, _ = torch.linalg.qr(outside)
    extra = extra - vh.mH @ (vh @ extra)
    basis = torch.cat([vh.mH, extra], dim=1)
    # 2. Eigenvectors (u, v), (u, −v) and (0, w) of [[0, R], [Rᴴ, 0]], and the changes in them.
    n = len(sigma)
    eye = torch.eye(n, dtype=u.dtype, device=u.device) / 2.0**0.5
    vectors = torch.eye(n + basis.shape[1], dtype=u.dtype, device=u.device)
    vectors[:n, :n] = vectors[n : 2 * n, :n] = vectors[:n, n : 2 * n] = eye
    vectors[n : 2 * n, n : 2 * n] = -eye
    values = torch.cat([sigma, -sigma, sigma.new_zeros(extra.shape[1])])
    e, f = (vectors.mT @ _dilated(u.mH @ each @ basis) @ vectors for each in (first, second))
    # 3. Kept eigenvalues first, and the differences between kept and others.
    is_kept = torch.zeros(len(values), dtype=torch.bool, device=u.device)
    is_kept[:rank] = True
    is_kept[n : n + rank] = True
    kept, other = torch.nonzero(is_kept)[:, 0], torch.nonzero(~is_kept)[:, 0]
    a, c = values[kept][:, None], values[other][None, :]
    weight = 1.0 / (a - c)
    e_kept, e_cross, e_other = _blocks(e, kept, other)
    f_kept, f_cross, f_other = _blocks(f, kept, other)
    e_cross, f_cross = weight * e_cross, weight * f_cross
    # 4. The sums over the middle value.
    moved = torch.zeros_like(e)
    within = (e_cross * c) @ f_cross.mH
    moved[kept[:, None], kept] = -within - within.mH
    through_kept = c * (e_kept @ f_cross + f_kept @ e_cross)
    through_other = a * (e_cross @ f_other + f_cross @ e_other)
    moved[kept[:, None], other] = weight * (through_other - through_kept)
    moved[other[:, None], kept] = moved[kept[:, None], other].mH
    outer = e_cross.mH @ (a * f_cross)
    moved[other[:, None], other] = outer + outer.mH
    # 5. Back to the coordinates of R.
    upper = (vectors @ moved @ vectors.mT)[:n, n:]
    moved_matrix: Tensor = u @ upper @ basis.mH
    return moved_matrix


def _dilated(matrix: Tensor) -> Tensor:
    """Return [[0, A], [Aᴴ, 0]]."""
    rows, columns = matrix.shape
    dilated = matrix.new_zeros((rows + columns, rows + columns))
    dilated[:rows, rows:] = matrix
    dilated[rows:, :rows] = matrix.mH
    return dilated


def _blocks(matrix: Tensor, kept: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    by_row, by_other_row = matrix[kept], matrix[other]
    return by_row[:, kept], by_row[:, other], by_other_row[:, other]


class _OfTheSum(Function):
    """The identity of terms (u_k), (σ_k), (v_kᴴ), for functions of Σ σ_k u_k v_kᴴ and Σ h(σ_k).

    Others have no derivative where weights are equal, and are refused on the way back.
    """

    @staticmethod
    def forward(ctx: Any, u: Tensor, sigma: Tensor, vh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(u, sigma, vh)
        ctx.has_second = False
        return u.clone(), sigma.clone(), vh.clone()

    @staticmethod
    def backward(
        ctx: Any, by_u: Tensor, by_sigma: Tensor, by_vh: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Second derivatives come through here once more, by parts that are no function of the sum.
        if not ctx.has_second:
            with torch.no_grad():
                _refuse_single_terms(ctx.saved_tensors, (by_u, by_sigma, by_vh))
        ctx.has_second = ctx.has_second or torch.is_grad_enabled()
        return by_u, by_sigma, by_vh


def _refuse_single_terms(
    terms: tuple[Tensor, Tensor, Tensor], gradients: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Raise `LsrError` unless gradients are those of a function of the sum and of all weights.

    With the gradient H by the sum those by u_j and v_i are σ_j H v_j and σ_i Hᴴ u_i: both tell
    u_iᴴ H v_j. By σ_i it is u_iᴴ H v_i, and beside it the same h'(σ) for equal weights.
    """
    u, sigma, vh = terms
    by_u, by_sigma, by_vh = gradients
    from_left = (u.mH @ by_u) / sigma[None, :]
    from_right = (vh @ by_vh.mH).mH / sigma[:, None]
    off_diagonal = from_left - from_right
    off_diagonal.fill_diagonal_(0.0)
    own = by_sigma - from_left.diagonal().real
    is_tied = (sigma[:, None] - sigma[None, :]).abs() <= tied_gap(sigma)
    between = torch.where(is_tied, own[:, None] - own[None, :], 0.0)
    scale = max(float(each.abs().max()) for each in (from_left, from_right, by_sigma))
    worst = max(float(off_diagonal.abs().max()), float(between.abs().max()))
    if worst > CONSISTENT * scale:
        raise LsrError(
            "terms of equal weight are not unique, so that a function of single terms has no "
            "derivative here; functions of their sum (to_matrix(), products) and symmetric ones of "
            "the weights have: differentiate one of these, or pass matrix.detach()"
        )
