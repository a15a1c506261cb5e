"""Compression of a tensor to a small core by a sketched, sequentially truncated higher-order SVD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import (
    Array,
    adjoint,
    as_double,
    device,
    namespace,
    norm,
    to_numpy,
    triangular_factor,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

OVERSAMPLING = 8
"""Columns of the random sketch beyond the wanted rank: the usual 5 to 10 of randomised range
finders."""


@dataclass(frozen=True, eq=False)
class Compressed:
    """T ≈ core ×_1 U_1 … ×_d U_d with orthonormal columns in every basis."""

    core: Array  # (r_1, …, r_d)
    bases: tuple[Array | None, ...]  # (p_i, r_i); None for a mode that was left whole
    lost: float = 0.0  # ‖T − core ×_1 U_1 … ×_d U_d‖, of differences

    def expand(self, columns: Sequence[Array]) -> tuple[Array, ...]:
        """Factors of the core, (r_i, s), as factors of the tensor, (p_i, s)."""
        return tuple(c if b is None else b @ c for b, c in zip(self.bases, columns, strict=True))

    def restrict(self, columns: Sequence[Array]) -> tuple[Array, ...]:
        """Factors of the tensor projected on the bases."""
        return tuple(
            c if b is None else adjoint(b) @ c for b, c in zip(self.bases, columns, strict=True)
        )


def compress(
    tensor: Array, ranks: Sequence[int], seed: int = 0, *, atol: float = 0.0
) -> Compressed:
    """Truncate every mode in turn to at most ``ranks[i]`` directions [1]_, found by a random sketch [2]_.

    One power step with orthogonalisation in between keeps directions down to the unit roundoff,
    where a Gram matrix would lose those below its root.

    Parameters
    ----------
    tensor : Array, shape (p_1, …, p_d)
    ranks : sequence of int
    seed : int
    atol : float
        Directions that hold no more than this altogether are left out too.

    Returns
    -------
    Compressed
        Core in the element type of the tensor. Cost about 10·r_1·Π p_i operations: later modes see
        a smaller tensor.

    References
    ----------
    .. [1] N. Vannieuwenhoven, R. Vandebril and K. Meerbergen, A new truncation strategy for the
       higher-order singular value decomposition, SIAM J. Sci. Comput. 34 (2012).
       doi:10.1137/110836067
    .. [2] N. Halko, P. G. Martinsson and J. A. Tropp, Finding structure with randomness, SIAM Rev.
       53 (2011). doi:10.1137/090771806
    """
    xp, rng = namespace(tensor), np.random.default_rng(seed)
    core = tensor
    bases: list[Array | None] = []
    losses: list[float] = []
    for mode in range(tensor.ndim):
        size, rank = int(core.shape[mode]), int(ranks[mode])
        if rank >= size and atol == 0.0:
            bases.append(None)
            continue
        # HOSVD 1: the unfolding along this mode, of a core that earlier modes have made smaller.
        order = (mode, *(m for m in range(core.ndim) if m != mode))
        front = xp.permute_dims(core, order)
        matrix = xp.reshape(front, (size, math.prod(front.shape[1:])))
        # HOSVD 2: its leading left directions and the coordinates in them, which take its place.
        basis, coordinates = _leading(matrix, min(rank, size), atol / math.sqrt(core.ndim), rng)
        if basis.shape[1] == size:
            bases.append(None)
            continue
        # Each projection is orthogonal to those before, so the squares of what they lose add up.
        # One minus the square of what is left would be no better than the root of the unit
        # roundoff.
        losses.append(norm(matrix - basis @ coordinates))
        reduced = xp.reshape(coordinates, (basis.shape[1], *front.shape[1:]))
        core = xp.permute_dims(reduced, tuple(int(q) for q in np.argsort(order)))
        bases.append(basis)
    return Compressed(core, tuple(bases), math.hypot(*losses))


def _leading(
    matrix: Array, rank: int, atol: float, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Orthonormal U (p, r) of the leading left directions of a matrix, those above ``atol`` together, and Uᴴ·matrix."""
    xp = namespace(matrix)
    size, width = int(matrix.shape[0]), int(matrix.shape[1])
    # Leading 1: a range that holds them, by random columns and one power step, where that is
    # smaller than the matrix.
    sketched, basis = rank + OVERSAMPLING, None
    if sketched < min(size, width):
        test = xp.asarray(
            rng.standard_normal((width, sketched)), dtype=matrix.dtype, device=device(matrix)
        )
        basis = xp.linalg.qr(matrix @ test).Q
        basis = xp.linalg.qr(matrix @ xp.linalg.qr(adjoint(matrix) @ basis).Q).Q
        matrix = adjoint(basis) @ matrix
    # Leading 2: an SVD inside that range; of a wide matrix through R of its adjoint, never through
    # a Gram matrix.
    if matrix.shape[0] < matrix.shape[1]:
        triangle = as_double(triangular_factor(adjoint(matrix)))
        _, sigma, vh = xp.linalg.svd(triangle, full_matrices=False)
        directions = adjoint(vh)
    else:
        directions, sigma, _ = xp.linalg.svd(as_double(matrix), full_matrices=False)
    # Leading 3: no more than the error allows to leave out.
    tails = np.sqrt(np.cumsum(to_numpy(sigma)[:rank][::-1] ** 2))
    leading = xp.astype(directions[:, : max(1, int(np.sum(tails > atol)))], matrix.dtype)
    coordinates = adjoint(leading) @ matrix
    return (leading if basis is None else basis @ leading), coordinates
