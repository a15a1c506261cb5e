"""One BLAS thread for functions of a matrix whose factors are small."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")


def one_thread_for_small_factors(function: F) -> F:
    """Return a function of a matrix so that it has one BLAS thread where all factors are small.

    Its first argument is the matrix; one that is not a `SeparatedMatrix` is left to the function.
    """
    # Entries of the largest factor; from ``benchmarks/results/threads.json``.
    limit = 256 * 256

    @wraps(function)
    def run(matrix: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(matrix, SeparatedMatrix) and max(matrix.kronecker_shape.sizes) <= limit:
            with one_blas_thread:
                return function(matrix, *arguments, **options)
        return function(matrix, *arguments, **options)

    return cast("F", run)
