"""Partial traces: a small matrix a factor that stands for a weight in preconditioners and starts."""

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

LARGEST = 1024
"""Partial traces above this size are taken as isotropic: their roots would cost more than they
save."""

FLOOR = 1e-6
"""Damping of a partial trace, in units of its mean eigenvalue, so that it has an inverse."""


@dataclass(frozen=True, eq=False)
class PartialTraces:
    """W ≈ mean · W_1 ⊗ … ⊗ W_d with W_i the trace of W over the other indices, of mean eigenvalue one.

    Exact where W is such a product. Used where an approximation costs only speed: preconditioners
    and starts.
    """

    mean: Array  # tr W / size, (L,)
    parts: tuple[Array | None, ...]  # (L, m_i, m_i); None: the identity

    @classmethod
    def of(cls, weight: Weight, sizes: Sequence[int], like: Array) -> PartialTraces:
        """Of a weight of size Π sizes, for a batch as long as ``like`` and in its library."""
        xp, batch = namespace(like), like.shape[0]
        trace = xp.broadcast_to(
            xp.asarray(weight.trace, dtype=like.dtype, device=device(like)), (batch,)
        )
        parts: list[Array | None] = []
        for i, size in enumerate(sizes):
            if isinstance(weight, Identity) or size == 1 or size > LARGEST:
                parts.append(None)
                continue
            part = _partial_trace(weight, sizes, i, like)
            safe = xp.where(trace > 0, trace, xp.ones_like(trace))
            part = xp.broadcast_to(part * (size / safe)[..., None, None], (batch, size, size))
            parts.append(damped(part, FLOOR))
        return cls(trace / math.prod(sizes), tuple(parts))

    def apply(self, i: int, rows: Array) -> Array:
        """W_i times (L, m_i, b)."""
        part = self.parts[i]
        return rows if part is None else part @ rows

    def inverse(self, i: int) -> Array | None:
        """W_i⁻¹, made when it is first asked for; None for the identity."""
        part = self.parts[i]
        if part is not None and i not in self._inverses:
            self._inverses[i] = inverse(part)
        return self._inverses.get(i)

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
            half = xp.sqrt(
                xp.where(values > 0, values, xp.min(xp.abs(values)) + xp.zeros_like(values))
            )
            roots.append((vectors * half[:, None, :]) @ xp.matrix_transpose(vectors))
            inverses.append((vectors / half[:, None, :]) @ xp.matrix_transpose(vectors))
        return roots, inverses


def inverse(matrices: Array) -> Array:
    """Of positive definite matrices (L, n, n), symmetric; slightly damped."""
    xp = namespace(matrices)
    inverses = xp.linalg.inv(damped(matrices, 1e-8))
    return 0.5 * (inverses + xp.matrix_transpose(inverses))


def along_rows(stacks: Stacks, matrices: Sequence[Array | None]) -> Stacks:
    """Each factor of each term multiplied from the left: stacks (L, m_i·r_i, s) by matrices (L, m_i, m_i)."""
    return [
        stack if matrix is None else _on_rows(matrix, stack)
        for stack, matrix in zip(stacks, matrices, strict=True)
    ]


def kron_apply(matrices: Sequence[Array | None], x: Array, sizes: Sequence[int]) -> Array:
    """(M_1 ⊗ … ⊗ M_d) x for x (L, Π sizes, b)."""
    xp, (batch, rows, columns), before = namespace(x), x.shape, 1
    for matrix, size in zip(matrices, sizes, strict=True):
        after = rows * columns // (before * size)
        if matrix is not None:
            x = xp.reshape(x, (batch, before, size, after))
            x = matrix[:, None, :, :] @ x
        before *= size
    return xp.reshape(x, (batch, rows, columns))


def _on_rows(matrix: Array, stack: Array) -> Array:
    xp, m = namespace(stack), matrix.shape[-1]
    rows = xp.reshape(stack, (stack.shape[0], m, stack.shape[1] // m * stack.shape[2]))
    return xp.reshape(matrix @ rows, stack.shape)


def _partial_trace(weight: LowRankPlusIdentity, sizes: Sequence[int], i: int, like: Array) -> Array:
    """Trace over all indices but the i-th; shape (…, m_i, m_i) with the weight's batch axes."""
    before, size, after = math.prod(sizes[:i]), sizes[i], math.prod(sizes[i + 1 :])
    xp, q = namespace(like), weight.basis.shape[-1]
    excess = xp.reshape(weight.values - weight.rest[..., None], (-1, 1, 1, q))
    scaled = xp.reshape(weight.basis, (-1, before * size, after, q)) * excess
    slices = (
        xp.reshape(b, (-1, before, size, after * q)) for b in (scaled, weight.basis)
    )  # as they lie, no copy
    part = xp.sum(next(slices) @ xp.matrix_transpose(next(slices)), axis=1)
    return part + xp.reshape(weight.rest * (before * after), (-1, 1, 1)) * identity_like(part)
