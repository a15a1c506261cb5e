"""Where each factor and each formed matrix of an arena lies in its flat arrays. Integers and views, no arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.shape import KroneckerShape, ProductShape


@dataclass(frozen=True, slots=True)
class ArenaLayer:
    """Sizes of one layer's adapter ``scaling · B̂Â``: shape, separation ranks of B̂ and Â, and the scale."""

    shape: ProductShape
    separation_ranks: tuple[int, int]
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """One sum of Kronecker products: its stored factors, and its formed matrix, rank-major (padded rank, width)."""

    layer: int
    transposed: bool  # an out side: stored (width, rank), formed (rank, width)
    shape: KroneckerShape  # as stored
    terms: int
    offsets: tuple[int, ...]  # of each factor
    matrix_offset: int
    padded_rank: int
    scaling: float

    @property
    def rank(self) -> int:
        return self.shape.matrix_shape[1 if self.transposed else 0]

    @property
    def width(self) -> int:
        return self.shape.matrix_shape[0 if self.transposed else 1]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The factors, shapes (s, m_i, n_i), as stored."""
        return [
            flat[offset : offset + self.terms * rows * columns].view(self.terms, rows, columns)
            for offset, (rows, columns) in zip(self.offsets, self.shape.factors, strict=True)
        ]

    def oriented(self, flat: Tensor) -> list[Tensor]:
        """The factors with their rank axis first."""
        return [view.mT if self.transposed else view for view in self.views(flat)]

    def matrix(self, matrices: Tensor) -> Tensor:
        size = self.padded_rank * self.width
        return matrices[self.matrix_offset : self.matrix_offset + size].view(self.padded_rank, self.width)


@dataclass(frozen=True, slots=True)
class ShapeClass:
    """Jobs of one shape, whose factors and matrices lie one after the other."""

    jobs: tuple[Job, ...]

    @property
    def rank(self) -> int:
        return self.jobs[0].rank

    def views(self, flat: Tensor) -> list[Tensor]:
        """The factors of all jobs, shapes (jobs, s, m_i, n_i), as stored."""
        first, count = self.jobs[0], len(self.jobs)
        return [
            flat[offset : offset + count * first.terms * rows * columns].view(count, first.terms, rows, columns)
            for offset, (rows, columns) in zip(first.offsets, first.shape.factors, strict=True)
        ]

    def oriented(self, flat: Tensor) -> list[Tensor]:
        return [view.mT if self.jobs[0].transposed else view for view in self.views(flat)]

    def write(self, flat: Tensor, oriented: Sequence[Tensor]) -> None:
        for view, factor in zip(self.views(flat), oriented, strict=True):
            view.copy_(factor.mT if self.jobs[0].transposed else factor)

    def stack(self, matrices: Tensor) -> Tensor:
        first, count = self.jobs[0], len(self.jobs)
        size = count * first.padded_rank * first.width
        return matrices[first.matrix_offset : first.matrix_offset + size].view(count, first.padded_rank, first.width)

    def scales(self, like: Tensor) -> Tensor | float:
        """Scale of each job, shape (jobs, 1, 1), or the one they share."""
        scales = [job.scaling for job in self.jobs]
        return scales[0] if len(set(scales)) == 1 else like.new_tensor(scales).view(-1, 1, 1)


class Layout:
    """Places of every factor and matrix of a list of layers; equal shapes lie together."""

    def __init__(self, layers: Sequence[ArenaLayer], padding: int = 1) -> None:
        if not layers:
            raise ShapeError("an arena holds at least one layer")
        self.layers = tuple(layers)
        sides: dict[Any, list[tuple[int, float]]] = {}
        for index, layer in enumerate(layers):
            out_terms, in_terms = layer.separation_ranks
            sides.setdefault((False, layer.shape.right, in_terms), []).append((index, 1.0))
            sides.setdefault((True, layer.shape.left, out_terms), []).append((index, layer.scaling))
        self.parameters = self.entries = 0
        classes = []
        for (transposed, shape, terms), members in sides.items():
            rows, columns = shape.matrix_shape
            rank, width = (columns, rows) if transposed else (rows, columns)
            padded = -(-rank // padding) * padding
            starts = []
            for size in shape.sizes:
                starts.append(self.parameters)
                self.parameters += len(members) * terms * size
            jobs = []
            for place, (index, scaling) in enumerate(members):
                offsets = tuple(start + place * terms * size for start, size in zip(starts, shape.sizes, strict=True))
                jobs.append(Job(index, transposed, shape, terms, offsets, self.entries, padded, scaling))
                self.entries += padded * width
            classes.append(ShapeClass(tuple(jobs)))
        self.classes = tuple(classes)
        self.right = {job.layer: job for job in self._jobs() if not job.transposed}
        self.left = {job.layer: job for job in self._jobs() if job.transposed}
        if max(self.parameters, self.entries) >= 2**31:
            raise ShapeError(f"an arena of {self.entries} entries is above 2^31; split the model into two")

    def jobs_without(self, layers: set[int]) -> Iterator[Job]:
        """The jobs of all other layers."""
        return (job for job in self._jobs() if job.layer not in layers)

    def triton_jobs(self) -> list[Any]:
        """The same places in the terms of the Triton launcher."""
        from benchmarks.adapters.candidate_kernels.triton_expansion import Job as TritonJob

        return [
            TritonJob(
                first=job.offsets[0],
                second=job.offsets[1],
                matrix=job.matrix_offset,
                terms=job.terms,
                ranks=job.shape.columns if job.transposed else job.shape.rows,  # type: ignore[arg-type]
                widths=job.shape.rows if job.transposed else job.shape.columns,  # type: ignore[arg-type]
                padded_rank=job.padded_rank,
                scale=job.scaling,
                transposed=job.transposed,
            )
            for job in self._jobs()
        ]

    def _jobs(self) -> Iterator[Job]:
        return (job for group in self.classes for job in group.jobs)


__all__ = ["ArenaLayer", "Layout"]
