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
    """A matrix read a block of rows at a time: one larger than memory, on disk or computed.

    It is read as often as needed: every product with R(M), the norm and the residual are one pass
    over the blocks. Solvers that work in blocks of vectors (`Krylov`) make few passes.

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
    >>> def blocks():
    ...     for row in np.eye(4):
    ...         yield np.kron(row[None, :], np.ones((3, 3)))  # three rows at a time
    >>> result = decompose(RowStream(blocks, (12, 12)), "4x4, 3x3", rtol=1e-9)
    >>> result.separation_rank, round(result.relative_error, 9)
    (1, 0.0)
    """

    blocks: Callable[[], Iterable[Any]]
    shape: tuple[int, int]

    @classmethod
    def of(cls, matrix: Any, rows: int | None = None) -> RowStream:
        """Read anything with ``shape`` and row slices.

        Such as a ``numpy.memmap``, a dataset of h5py or zarr, an array. ``rows`` is the height of a
        block; absent, 32 MiB of double precision.
        """
        if len(matrix.shape) != 2 or 0 in matrix.shape:
            raise ShapeError(
                f"matrix: expected two dimensions with entries, got shape {tuple(matrix.shape)}"
            )
        m, n = (int(size) for size in matrix.shape)
        height = rows or block_height(n)

        def blocks() -> Iterator[Any]:
            for start in range(0, m, height):
                yield matrix[start : min(start + height, m), :]

        return cls(blocks, (m, n))

    def parts(self) -> Iterator[tuple[int, Array]]:
        """Yield (first row, block), checked: blocks must be as wide as the matrix and fill it."""
        done = 0
        for block in self.blocks():
            array = np.asarray(block) if isinstance(block, np.memmap) else block
            part = as_floating(array, f"rows {done}…")
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
        """Return R(M) for two factors, as an operator: `Target.rearranged`."""
        require_two_factors(shape, self.shape)
        # The pass that refuses entries that are not finite; the solver needs the norm anyway.
        self.norm  # noqa: B018
        _, first = next(iter(self.parts()))
        return RearrangedRows(self.parts, shape, first[:1, :1])

    def tensor(self, shape: KroneckerShape) -> Array:
        """Return R(M) for any number of factors, formed.

        Raises `ShapeError` where that is too large for memory.
        """
        shape.check(self.shape)
        require_formable(self.shape[0] * self.shape[1], "a stream of rows")
        parts = [part for _, part in self.parts()]
        return rearrange(namespace(*parts).concat(parts, axis=0), shape)

    def residual_norm(self, approximation: Approximation) -> float:
        """Return ‖M − M̂‖_F, measured: `Target.residual_norm`."""
        check_sizes(self.shape, approximation.shape)
        approximate_rows = rows_of(approximation)
        norms = []
        for start, part in self.parts():
            rows = slice(start, start + int(part.shape[0]))
            norms.append(norm(as_double(part) - approximate_rows(rows)))
        return math.hypot(*norms)


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
        """(m_1·n_1, m_2·n_2)."""
        left, right = self.kronecker_shape.sizes
        return left, right

    def matmat(self, x: Array) -> Array:
        """Return R(M) x, by one pass."""
        xp = namespace(x)
        y = xp.zeros((self.shape[0], x.shape[1]), dtype=x.dtype, device=device(self.prototype))
        for rows, columns, piece in self.pieces():
            y[rows, :] = y[rows, :] + piece @ x[columns, :]
        return y

    def rmatmat(self, y: Array) -> Array:
        """Return R(M)ᴴ y, by one pass."""
        xp = namespace(y)
        x = xp.zeros((self.shape[1], y.shape[1]), dtype=y.dtype, device=device(self.prototype))
        for rows, columns, piece in self.pieces():
            x[columns, :] = x[columns, :] + adjoint(adjoint(y[rows, :]) @ piece)
        return x

    def formed(self) -> Array:
        """Return R(M), by one pass."""
        xp = namespace(self.prototype)
        matrix = xp.zeros(self.shape, dtype=self.prototype.dtype, device=device(self.prototype))
        for rows, columns, piece in self.pieces():
            matrix[rows, columns] = piece
        return matrix

    def pieces(self) -> Iterator[tuple[slice, slice, Array]]:
        """Yield rows, columns and entries of R(M), one rectangle after the other."""
        (_, n), (p, q) = self.kronecker_shape.factors
        for start, part in self.parts():
            stop = start + int(part.shape[0])
            for i, i_end, k, k_end in whole_blocks(start, stop, p):
                within = part[i * p + k - start : (i_end - 1) * p + k_end - start, :]
                shape = KroneckerShape(((i_end - i, n), (k_end - k, q)))
                rows = slice(i * n, i_end * n)
                columns = slice(k * q, k_end * q)
                yield rows, columns, rearrange(within, shape)


def block_norm(start: int, part: Array, name: str = "rows") -> float:
    """Return ‖block‖; raise `PrecisionError`, which names the lines, where it is not finite."""
    size = norm(part)
    if math.isfinite(size):
        return size
    xp = namespace(part)
    if bool(xp.all(xp.isfinite(part))):
        return finite_norm(part)  # raises, and says that the norm overflows
    last = start + int(part.shape[0]) - 1
    raise PrecisionError(
        f"matrix: entries in {name} {start} to {last} are not finite; "
        "remove or replace them before decomposing"
    )
