"""Triton: every expansion of a model in one launch, and every contraction of its gradients in one more."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.adapters.candidate_kernels.triton_language import cdiv, jit, tl
from benchmarks.adapters.candidate_kernels.triton_support import tile

# One row of the job table describes one sum Σ_k F1[k] ⊗ F2[k], held rank-major as a (rank x width) matrix:
# offsets of F1, F2 and of the matrix; terms; R1, R2, W1, W2; padded rank; strides of the factors' rank and width axes.
FIELDS = 13
EXPAND_TILE, FACTOR_TILE, SUM_TILE = 1024, 32, 32


@jit
def _expand(flat, matrices, jobs, scales, tile_jobs, tile_numbers, FIELDS: tl.constexpr, TILE: tl.constexpr):
    program = tl.program_id(0)
    job = tl.load(tile_jobs + program)
    row = jobs + job * FIELDS
    terms = tl.load(row + 3)
    R1 = tl.load(row + 4)
    R2 = tl.load(row + 5)
    W1 = tl.load(row + 6)
    W2 = tl.load(row + 7)
    element = tl.load(tile_numbers + program) * TILE + tl.arange(0, TILE)
    width = W1 * W2
    rank = element // width
    place = element % width
    inside = element < tl.load(row + 8) * width
    real = inside & (rank < R1 * R2)
    first = flat + tl.load(row + 0) + (rank // R2) * tl.load(row + 9) + (place // W2) * tl.load(row + 10)
    second = flat + tl.load(row + 1) + (rank % R2) * tl.load(row + 11) + (place % W2) * tl.load(row + 12)
    total = tl.full((TILE,), 0.0, tl.float32)
    for _ in range(terms):
        total += tl.load(first, mask=real, other=0.0) * tl.load(second, mask=real, other=0.0)
        first += R1 * W1
        second += R2 * W2
    total *= tl.load(scales + job)
    tl.store(matrices + tl.load(row + 2) + element, total.to(matrices.dtype.element_ty), mask=inside)


@jit
def _contract(
    flat, gradients, result, jobs, scales, tile_jobs, tile_sides, tile_numbers,
    FIELDS: tl.constexpr, OWN: tl.constexpr, SUM: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of one factor, all its terms: the matrix's gradient against the other factor."""
    program = tl.program_id(0)
    job = tl.load(tile_jobs + program)
    row = jobs + job * FIELDS
    is_first = tl.load(tile_sides + program) == 0
    terms = tl.load(row + 3)
    R1 = tl.load(row + 4)
    R2 = tl.load(row + 5)
    W1 = tl.load(row + 6)
    W2 = tl.load(row + 7)
    width = W1 * W2
    own_offset = tl.where(is_first, tl.load(row + 0), tl.load(row + 1))
    other_offset = tl.where(is_first, tl.load(row + 1), tl.load(row + 0))
    own_ranks = tl.where(is_first, R1, R2)
    own_widths = tl.where(is_first, W1, W2)
    other_ranks = tl.where(is_first, R2, R1)
    other_widths = tl.where(is_first, W2, W1)
    own_rank_stride = tl.where(is_first, tl.load(row + 9), tl.load(row + 11))
    own_width_stride = tl.where(is_first, tl.load(row + 10), tl.load(row + 12))
    other_rank_stride = tl.where(is_first, tl.load(row + 11), tl.load(row + 9))
    other_width_stride = tl.where(is_first, tl.load(row + 12), tl.load(row + 10))
    # strides of the formed matrix along each factor's rank and width
    own_rank_step = tl.where(is_first, R2 * width, width)
    own_width_step = tl.where(is_first, W2, 1)
    other_rank_step = tl.where(is_first, width, R2 * width)
    other_width_step = tl.where(is_first, 1, W2)

    own = tl.load(tile_numbers + program) * OWN + tl.arange(0, OWN)
    own_real = own < own_ranks * own_widths
    own_rank = own // own_widths
    own_width = own % own_widths
    term = tl.arange(0, TERMS)
    term_real = term < terms
    source = gradients + tl.load(row + 2) + (own_rank * own_rank_step + own_width * own_width_step)[:, None]
    total = tl.full((OWN, TERMS), 0.0, tl.float32)
    for start in range(0, other_ranks * other_widths, SUM):
        other = start + tl.arange(0, SUM)
        other_real = other < other_ranks * other_widths
        rank = other // other_widths
        place = other % other_widths
        block = tl.load(
            source + (rank * other_rank_step + place * other_width_step)[None, :],
            mask=own_real[:, None] & other_real[None, :],
            other=0.0,
        ).to(tl.float32)
        factor = tl.load(
            flat
            + other_offset
            + (term * other_ranks * other_widths)[None, :]
            + (rank * other_rank_stride + place * other_width_stride)[:, None],
            mask=other_real[:, None] & term_real[None, :],
            other=0.0,
        )
        total = tl.dot(block, factor, total, input_precision="ieee")
    tl.store(
        result
        + own_offset
        + (term * own_ranks * own_widths)[None, :]
        + (own_rank * own_rank_stride + own_width * own_width_stride)[:, None],
        total * tl.load(scales + job),
        mask=own_real[:, None] & term_real[None, :],
    )


@dataclass(frozen=True, slots=True)
class Job:
    """One sum of two-factor Kronecker products in the flat arrays; offsets and strides count entries."""

    first: int
    second: int
    matrix: int
    terms: int
    ranks: tuple[int, int]
    widths: tuple[int, int]
    padded_rank: int
    scale: float
    transposed: bool  # the factors are stored (width, rank) instead of (rank, width)

    def row(self) -> list[int]:
        strides = [
            stride
            for rank, width in zip(self.ranks, self.widths, strict=True)
            for stride in ((1, rank) if self.transposed else (width, 1))
        ]
        return [
            self.first, self.second, self.matrix, self.terms, *self.ranks, *self.widths, self.padded_rank, *strides
        ]  # fmt: skip


class Launcher:
    """The tables of a fixed list of jobs on one device, and the two launches."""

    def __init__(self, jobs: list[Job], device: torch.device) -> None:
        def table(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        expansion = [
            (index, number)
            for index, job in enumerate(jobs)
            for number in range(cdiv(job.padded_rank * job.widths[0] * job.widths[1], EXPAND_TILE))
        ]
        contraction = [
            (index, side, number)
            for index, job in enumerate(jobs)
            for side in (0, 1)
            for number in range(cdiv(job.ranks[side] * job.widths[side], FACTOR_TILE))
        ]
        self.jobs = table([job.row() for job in jobs])
        self.scales = torch.tensor([job.scale for job in jobs], dtype=torch.float32, device=device)
        self.expansion = tuple(table(column) for column in zip(*expansion, strict=True))
        self.contraction = tuple(table(column) for column in zip(*contraction, strict=True))
        self.terms = tile(max(job.terms for job in jobs))

    def expand(self, flat: Tensor, matrices: Tensor) -> None:
        """Write every formed matrix, rank-major and padded with zero rows, into ``matrices``."""
        grid = (len(self.expansion[0]),)
        _expand[grid](flat, matrices, self.jobs, self.scales, *self.expansion, FIELDS=FIELDS, TILE=EXPAND_TILE)

    def contract(self, flat: Tensor, gradients: Tensor, result: Tensor) -> None:
        """Write the gradient of every factor into ``result``, laid out like ``flat``; no atomics, so reproducible."""
        grid = (len(self.contraction[0]),)
        _contract[grid](
            flat, gradients, result, self.jobs, self.scales, *self.contraction,
            FIELDS=FIELDS, OWN=FACTOR_TILE, SUM=SUM_TILE, TERMS=self.terms,
        )  # fmt: skip
