"""RowStream: a matrix read a block of rows at a time, larger than memory if need be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import (
    Array,
    adjoint,
    as_double,
    as_floating,
    device,
    finite_norm,
    namespace,
    norm,
)
from lsrdecomp.errors import PrecisionError, ShapeError
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.targets.contract import require_formable, require_two_factors
from lsrdecomp.targets.residual import (
    Approximation,
    block_height,
    check_sizes,
    rows_of,
    whole_blocks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclass(frozen=True, eq=False)
class RowStream:
    """A matrix read a block of rows at a time, as often as needed: one larger than memory, on disk or computed.

    Every product with R(M), the norm and the residual are one pass over the blocks. Solvers that
    work in blocks of vectors (`BlockGolubKahan`) make few passes.

    Parameters
    ----------
    blocks : callable
        Returns a fresh iterable of arrays (b_i, n), top to bottom, b_i of any size; called once a
        pass.
    shape : tuple of int
        (m, n), the sizes of the whole.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import decompose
    >>> blocks = lambda: (np.kron(row[None, :], np.ones((3, 3))) for row in np.eye(4))  # three rows at a time
    >>> result = decompose(RowStream(blocks, (12, 12)), "4x4, 3x3", rtol=1e-9)
    >>> result.separation_rank, round(result.relative_error, 9)
    (1, 0.0)
    """

    blocks: Callable[[], Iterable[Any]]
    shape: tuple[int, int]

    @classmethod
    def of(cls, matrix: Any, rows: int | None = None) -> RowStream:
        """From anything with ``shape`` and row slices: ``numpy.memmap``, a dataset of h5py or zarr, an array.

        ``rows`` is the height of a block; absent, 32 MiB of double precision.
        """
        if len(matrix.shape) != 2 or 0 in matrix.shape:
            raise ShapeError(
                f"matrix: expected two dimensions with entries, got shape {tuple(matrix.shape)}"
            )
        m, n = (int(size) for size in matrix.shape)
        height = rows or block_height(n)
        return cls(
            lambda: (matrix[start : min(start + height, m), :] for start in range(0, m, height)),
            (m, n),
        )

    def parts(self) -> Iterator[tuple[int, Array]]:
        """(first row, block), checked: the blocks must be as wide as the matrix and fill it."""
        done = 0
        for block in self.blocks():
            part = as_floating(
                np.asarray(block) if isinstance(block, np.memmap) else block, f"rows {done}…"
            )
            if part.ndim != 2 or part.shape[1] != self.shape[1]:
                raise ShapeError(
                    f"row stream: the block at row {done} has shape {tuple(part.shape)}, "
                    f"expected (rows, {self.shape[1]})"
                )
            yield done, part
            done += int(part.shape[0])
        if done != self.shape[0]:
            raise ShapeError(
                f"row stream: the blocks hold {done} rows, the matrix has {self.shape[0]}"
            )

    @cached_property
    def norm(self) -> float:
        """‖M‖_F, one pass. Raises `PrecisionError`, with the rows, where entries are not finite."""
        return finite_norm(np.asarray([block_norm(start, part) for start, part in self.parts()]))

    def rearranged(self, shape: KroneckerShape) -> RearrangedRows:
        """R(M) for two factors, as an operator: `Target.rearranged`."""
        require_two_factors(shape, self.shape)
        self.norm  # noqa: B018 - the pass that refuses entries that are not finite, kept for the solver
        _, first = next(iter(self.parts()))
        return RearrangedRows(self.parts, shape, first[:1, :1])

    def tensor(self, shape: KroneckerShape) -> Array:
        """R(M) for any number of factors, formed. Raises `ShapeError` where that is too large for memory."""
        shape.check(self.shape)
        require_formable(self.shape[0] * self.shape[1], "a stream of rows")
        parts = [part for _, part in self.parts()]
        return rearrange(namespace(*parts).concat(parts, axis=0), shape)

    def residual_norm(self, approximation: Approximation) -> float:
        """‖M − M̂‖_F, measured: `Target.residual_norm`."""
        check_sizes(self.shape, approximation.shape)
        block = rows_of(approximation)
        return math.hypot(
            *(
                norm(as_double(part) - block(slice(start, start + int(part.shape[0]))))
                for start, part in self.parts()
            )
        )


@dataclass(frozen=True, slots=True)
class RearrangedRows:
    """R(M) for a matrix read in blocks of rows.

    Rows i·m₂ + k of M, for one i and several k, are the columns (k, ·) of the rows (i, ·) of R(M);
    blocks that cover all k are whole rows of R(M).
    """

    parts: Callable[[], Iterator[tuple[int, Array]]]
    kronecker_shape: KroneckerShape
    prototype: Array

    @property
    def shape(self) -> tuple[int, int]:
        left, right = self.kronecker_shape.sizes
        return left, right

    def matmat(self, x: Array) -> Array:
        xp = namespace(x)
        y = xp.zeros((self.shape[0], x.shape[1]), dtype=x.dtype, device=device(self.prototype))
        for rows, columns, piece in self.pieces():
            y[rows, :] = y[rows, :] + piece @ x[columns, :]
        return y

    def rmatmat(self, y: Array) -> Array:
        xp = namespace(y)
        x = xp.zeros((self.shape[1], y.shape[1]), dtype=y.dtype, device=device(self.prototype))
        for rows, columns, piece in self.pieces():
            x[columns, :] = x[columns, :] + adjoint(adjoint(y[rows, :]) @ piece)
        return x

    def formed(self) -> Array:
        xp = namespace(self.prototype)
        matrix = xp.zeros(self.shape, dtype=self.prototype.dtype, device=device(self.prototype))
        for rows, columns, piece in self.pieces():
            matrix[rows, columns] = piece
        return matrix

    def pieces(self) -> Iterator[tuple[slice, slice, Array]]:
        """Rows, columns and entries of R(M), one rectangle after the other."""
        (_, n), (p, q) = self.kronecker_shape.factors
        for start, part in self.parts():
            stop = start + int(part.shape[0])
            for i, i_end, k, k_end in whole_blocks(start, stop, p):
                within = part[i * p + k - start : (i_end - 1) * p + k_end - start, :]
                piece = rearrange(within, KroneckerShape(((i_end - i, n), (k_end - k, q))))
                yield slice(i * n, i_end * n), slice(k * q, k_end * q), piece


def block_norm(start: int, part: Array, name: str = "rows") -> float:
    """‖block‖; raises `PrecisionError`, which names the lines, where it is not finite."""
    size = norm(part)
    if not math.isfinite(size):
        if bool(namespace(part).all(namespace(part).isfinite(part))):
            return finite_norm(part)  # which says that the norm overflows
        raise PrecisionError(
            f"matrix: entries in {name} {start} to {start + int(part.shape[0]) - 1} are not finite; "
            "remove or replace them before decomposing"
        )
    return size
