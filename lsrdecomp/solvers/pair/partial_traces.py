"""Partial traces: small matrices that stand for a weight in preconditioners and starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lsrdecomp.arrays import Array, device, namespace
from lsrdecomp.solvers.batched_terms import Stacks, damped, identity_like
from lsrdecomp.targets.weights import Identity, LowRankPlusIdentity, Weight

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, eq=False)
class PartialTraces:
    """W ≈ mean · W_1 ⊗ … ⊗ W_d with W_i the trace of W over the other indices.

    The mean eigenvalue of each W_i is one. Exact where W is such a product. Used where an
    approximation costs only speed: preconditioners and starts.
    """

    mean: Array  # tr W / size, (L,)
    parts: tuple[Array | None, ...]  # (L, m_i, m_i); None: the identity

    @classmethod
    def of(cls, weight: Weight, sizes: Sequence[int], like: Array) -> PartialTraces:
        """Trace a weight of size Π sizes, for a batch as long as ``like`` and in its library."""
        xp = namespace(like)
        batch = like.shape[0]
        trace = xp.asarray(weight.trace, dtype=like.dtype, device=device(like))
        trace = xp.broadcast_to(trace, (batch,))
        parts: list[Array | None] = []
        for i, size in enumerate(sizes):
            # A larger one is taken as isotropic: its root would cost more than it saves. By hand.
            if isinstance(weight, Identity) or size == 1 or size > 1024:
                parts.append(None)
                continue
            part = _partial_trace(weight, sizes, i, like)
            divisor = xp.where(trace > 0, trace, xp.ones_like(trace))
            part = part * (size / divisor)[..., None, None]
            part = xp.broadcast_to(part, (batch, size, size))
            # In units of the mean eigenvalue, so that it has an inverse. By hand.
            parts.append(damped(part, 1e-6))
        return cls(trace / math.prod(sizes), tuple(parts))

    def apply(self, i: int, rows: Array) -> Array:
        """Return W_i times (L, m_i, b)."""
        part = self.parts[i]
        return rows if part is None else part @ rows

    def inverse(self, i: int) -> Array | None:
        """Return W_i⁻¹, computed at the first request; None for the identity."""
        part = self.parts[i]
        if part is not None and i not in self._inverses:
            self._inverses[i] = self.inverse_of(part)
        return self._inverses.get(i)

    def inverse_of(self, matrices: Array) -> Array:
        """Return the inverses of positive definite matrices (L, n, n), slightly damped."""
        xp = namespace(matrices)
        inverses = xp.linalg.inv(damped(matrices, 1e-8))
        return 0.5 * (inverses + xp.matrix_transpose(inverses))

    @cached_property
    def _inverses(self) -> dict[int, Array]:
        return {}

    @cached_property
    def roots(self) -> tuple[list[Array | None], list[Array | None]]:
        """W_i^½ and W_i^-½ of every part."""
        roots: list[Array | None] = []
        inverses: list[Array | None] = []
        for part in self.parts:
            if part is None:
                roots.append(None)
                inverses.append(None)
                continue
            xp = namespace(part)
            values, vectors = xp.linalg.eigh(part)
            smallest = xp.min(xp.abs(values)) + xp.zeros_like(values)
            lengths = xp.sqrt(xp.where(values > 0, values, smallest))
            roots.append((vectors * lengths[:, None, :]) @ xp.matrix_transpose(vectors))
            inverses.append((vectors / lengths[:, None, :]) @ xp.matrix_transpose(vectors))
        return roots, inverses


def apply_to_rows(stacks: Stacks, matrices: Sequence[Array | None]) -> Stacks:
    """Multiply each factor of each term, in stacks (L, m_i·r_i, s), by a matrix (L, m_i, m_i)."""
    products = []
    for stack, matrix in zip(stacks, matrices, strict=True):
        products.append(stack if matrix is None else _rows_product(matrix, stack))
    return products


def kron_apply(matrices: Sequence[Array | None], x: Array, sizes: Sequence[int]) -> Array:
    """Return (M_1 ⊗ … ⊗ M_d) x for x (L, Π sizes, b)."""
    xp = namespace(x)
    batch, rows, columns = x.shape
    before = 1
    for matrix, size in zip(matrices, sizes, strict=True):
        after = rows * columns // (before * size)
        if matrix is not None:
            x = xp.reshape(x, (batch, before, size, after))
            x = matrix[:, None, :, :] @ x
        before *= size
    return xp.reshape(x, (batch, rows, columns))


def _rows_product(matrix: Array, stack: Array) -> Array:
    xp = namespace(stack)
    m = matrix.shape[-1]
    rows = xp.reshape(stack, (stack.shape[0], m, stack.shape[1] // m * stack.shape[2]))
    return xp.reshape(matrix @ rows, stack.shape)


def _partial_trace(weight: LowRankPlusIdentity, sizes: Sequence[int], i: int, like: Array) -> Array:
    """Trace a weight over all indices but the i-th; shape (…, m_i, m_i) with its batch axes."""
    xp = namespace(like)
    before = math.prod(sizes[:i])
    size = sizes[i]
    after = math.prod(sizes[i + 1 :])
    q = weight.basis.shape[-1]
    excess = xp.reshape(weight.values - weight.rest[..., None], (-1, 1, 1, q))
    weighted = xp.reshape(weight.basis, (-1, before * size, after, q)) * excess
    # Both as they lie in memory, no copy.
    weighted = xp.reshape(weighted, (-1, before, size, after * q))
    basis = xp.reshape(weight.basis, (-1, before, size, after * q))
    part = xp.sum(weighted @ xp.matrix_transpose(basis), axis=1)
    isotropic = xp.reshape(weight.rest * (before * after), (-1, 1, 1))
    return part + isotropic * identity_like(part)
