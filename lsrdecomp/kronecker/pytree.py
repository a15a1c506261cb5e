"""Separated matrices as pytrees of JAX: their weights and factors are what ``jax.jit`` traces."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def register_pytree(cls: type, matrix_class: type) -> None:
    """Tell JAX how to take a class of ``weights`` and ``factors`` apart, and what to build of them.

    A record is built again as the matrix alone: its figures are not those of other numbers. Called
    when the first one of JAX arrays is made, so that JAX is not imported for others.
    """
    import jax

    def flatten(matrix: Any) -> tuple[tuple[Any, ...], None]:
        return (matrix.weights, *matrix.factors), None

    def unflatten(_: None, leaves: Any) -> Any:
        # Without the checks of the constructor: JAX also builds trees of its own placeholders.
        matrix: Any = object.__new__(matrix_class)
        weights, *factors = leaves
        object.__setattr__(matrix, "weights", weights)
        object.__setattr__(matrix, "factors", tuple(factors))
        return matrix

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
