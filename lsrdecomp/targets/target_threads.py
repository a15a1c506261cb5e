"""Which targets are solved with one BLAS thread."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING

from lsrdecomp.targets.separated_target import Separated
from lsrdecomp.targets.sparse import Sparse
from lsrdecomp.targets.target import Dense, LowRank
from lsrdecomp.threads import one_blas_thread, one_blas_thread_for

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from lsrdecomp.targets.contract import Target


def threads_for(target: Target) -> AbstractContextManager[object]:
    """Return the context to decompose a target in: one BLAS thread, or the caller's threads.

    Arrays go by their size (`one_blas_thread_for`). Low-rank pairs, sparse matrices and sums of
    Kronecker products take products of thin matrices only, which gain nothing from threads.
    Products of any other target are the caller's own code, and so are its threads.
    """
    if isinstance(target, Dense):
        return one_blas_thread_for(math.prod(target.shape))
    if isinstance(target, LowRank | Separated | Sparse):
        return one_blas_thread
    return nullcontext()
