"""The contract of targets and of their rearrangements, and the sizes that are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from lsrdecomp.arrays import MAX_FORMED_ENTRIES
from lsrdecomp.errors import ShapeError

if TYPE_CHECKING:
    from lsrdecomp.arrays import Array
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.targets.residual import Approximation


@runtime_checkable
class Rearranged(Protocol):
    """R(M) as an operator: a matrix of shape (m_1·n_1, m_2·n_2) known by its products."""

    @property
    def shape(self) -> tuple[int, int]:
        """(m_1·n_1, m_2·n_2)."""
        ...

    @property
    def prototype(self) -> Array:
        """Some array of the library, element type and device in which products are made."""
        ...

    def matmat(self, x: Array) -> Array:
        """Return R(M) x for x of shape (m_2·n_2, b)."""
        ...

    def rmatmat(self, y: Array) -> Array:
        """Return R(M)ᴴ y for y of shape (m_1·n_1, b)."""
        ...

    def formed(self) -> Array:
        """Return R(M) as an array."""
        ...


class Target(Protocol):
    """A matrix to approximate."""

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        ...

    @property
    def norm(self) -> float:
        """‖M‖_F in double precision."""
        ...

    def rearranged(self, shape: KroneckerShape) -> Rearranged:
        """Return R(M) for two factors, as an operator."""
        ...

    def residual_norm(self, approximation: Approximation) -> float:
        """Return ‖M − M̂‖_F from residual entries in at least double precision."""
        ...


def require_formable(entries: int, what: str) -> None:
    """Raise `ShapeError` where three and more factors would need too many entries in memory.

    Parameters
    ----------
    entries : int
        Entries to be formed of a matrix that is not held.
    what : str
        What they are entries of, for the message.
    """
    if entries > MAX_FORMED_ENTRIES:
        raise ShapeError(
            f"three and more factors need {what} formed, {entries:,} entries, more than "
            f"{MAX_FORMED_ENTRIES:,}; "
            "take a shape of two factors, which needs products alone"
        )


def require_two_factors(shape: KroneckerShape, matrix_shape: tuple[int, int]) -> None:
    """Raise `ShapeError` unless the shape has two factors and tiles a matrix (m, n)."""
    if shape.order != 2:
        raise ShapeError(f"a rearranged matrix has two factors; {shape} has {shape.order}")
    shape.check(matrix_shape)
