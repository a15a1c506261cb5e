"""Compression of a tensor to a small core by a sketched, sequentially truncated HOSVD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import array_api_compat
import numpy as np

from lsrdecomp.arrays import (
    OVERSAMPLING,
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


@dataclass(frozen=True, eq=False)
class CompressedTensor:
    """T ≈ core ×_1 U_1 … ×_d U_d with orthonormal columns in every basis."""

    core: Array  # (r_1, …, r_d)
    bases: tuple[Array | None, ...]  # (p_i, r_i); None for a mode that was left whole
    loss: float = 0.0  # ‖T − core ×_1 U_1 … ×_d U_d‖, of differences

    def expand(self, columns: Sequence[Array]) -> tuple[Array, ...]:
        """Return factors of the core, (r_i, s), as factors of the tensor, (p_i, s)."""
        expanded = []
        for basis, column in zip(self.bases, columns, strict=True):
            expanded.append(column if basis is None else basis @ column)
        return tuple(expanded)

    def in_double(self) -> CompressedTensor:
        """Return the same tensor in float64 or complex128."""
        bases = []
        for basis in self.bases:
            # A sparse basis selects entries: its ones are exact in any type.
            is_dense = basis is not None and array_api_compat.is_array_api_obj(basis)
            bases.append(as_double(basis) if is_dense else basis)
        return CompressedTensor(as_double(self.core), tuple(bases), self.loss)

    def to_tensor(self) -> Array:
        """Form core ×_1 U_1 … ×_d U_d."""
        xp = namespace(self.core)
        tensor = self.core
        for mode, basis in enumerate(self.bases):
            if basis is not None:
                product = xp.tensordot(basis, tensor, axes=((1,), (mode,)))
                tensor = xp.moveaxis(product, 0, mode)
        return tensor

    def restrict(self, columns: Sequence[Array]) -> tuple[Array, ...]:
        """Project factors of the tensor on the bases."""
        restricted = []
        for basis, column in zip(self.bases, columns, strict=True):
            restricted.append(column if basis is None else adjoint(basis) @ column)
        return tuple(restricted)


def compress(
    tensor: Array,
    ranks: Sequence[int],
    seed: int = 0,
    *,
    atol: float = 0.0,
) -> CompressedTensor:
    """Truncate every mode in turn to at most ``ranks[i]`` directions [1]_.

    They are found by a random sketch [2]_. One power step with orthogonalisation in between keeps
    directions down to the unit roundoff, where a Gram matrix would lose those below its root.

    Parameters
    ----------
    tensor : Array, shape (p_1, …, p_d)
    ranks : sequence of int
    seed : int
    atol : float
        Directions that hold no more than this altogether are left out too.

    Returns
    -------
    CompressedTensor
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
    xp = namespace(tensor)
    rng = np.random.default_rng(seed)
    core = tensor
    bases: list[Array | None] = []
    losses: list[float] = []
    for mode in range(tensor.ndim):
        size = int(core.shape[mode])
        rank = int(ranks[mode])
        if rank >= size and atol == 0.0:
            bases.append(None)
            continue
        # HOSVD 1: the unfolding along this mode, of a core that earlier modes have made smaller.
        order = (mode, *(m for m in range(core.ndim) if m != mode))
        front = xp.permute_dims(core, order)
        matrix = xp.reshape(front, (size, math.prod(front.shape[1:])))
        # HOSVD 2: its leading left directions and the coordinates in them, which take its place.
        mode_atol = atol / math.sqrt(core.ndim)
        basis, coordinates = _leading(matrix, min(rank, size), mode_atol, rng)
        if basis.shape[1] == size:
            bases.append(None)
            continue
        # Each projection is orthogonal to those before, so the squares of their losses add up. One
        # minus the square of the norm that remains would be no better than the root of the unit
        # roundoff.
        losses.append(norm(matrix - basis @ coordinates))
        reduced = xp.reshape(coordinates, (basis.shape[1], *front.shape[1:]))
        core = xp.permute_dims(reduced, tuple(int(q) for q in np.argsort(order)))
        bases.append(basis)
    return CompressedTensor(core, tuple(bases), math.hypot(*losses))


def _leading(
    matrix: Array, rank: int, atol: float, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Return orthonormal U (p, r) of the leading left directions of a matrix, and Uᴴ·matrix.

    Directions that together hold no more than ``atol`` are left out.
    """
    xp = namespace(matrix)
    size, width = (int(n) for n in matrix.shape)
    # Leading 1: a range that holds them, by random columns and one power step, where that is
    # smaller than the matrix.
    n_random = rank + OVERSAMPLING
    range_basis = None
    if n_random < min(size, width):
        random = rng.standard_normal((width, n_random))
        random = xp.asarray(random, dtype=matrix.dtype, device=device(matrix))
        range_basis = xp.linalg.qr(matrix @ random).Q
        row_basis = xp.linalg.qr(adjoint(matrix) @ range_basis).Q
        range_basis = xp.linalg.qr(matrix @ row_basis).Q
        matrix = adjoint(range_basis) @ matrix
    # Leading 2: an SVD inside that range; of a wide matrix through R of its adjoint, never through
    # a Gram matrix.
    if matrix.shape[0] < matrix.shape[1]:
        triangle = as_double(triangular_factor(adjoint(matrix)))
        _, sigma, vh = xp.linalg.svd(triangle, full_matrices=False)
        directions = adjoint(vh)
    else:
        directions, sigma, _ = xp.linalg.svd(as_double(matrix), full_matrices=False)
    # Leading 3: as few as the allowed error permits, one at least.
    tails = np.sqrt(np.cumsum(to_numpy(sigma)[:rank][::-1] ** 2))
    n_kept = max(1, int(np.sum(tails > atol)))
    leading = xp.astype(directions[:, :n_kept], matrix.dtype)
    coordinates = adjoint(leading) @ matrix
    if range_basis is not None:
        leading = range_basis @ leading
    return leading, coordinates
