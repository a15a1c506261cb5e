"""One side of the joint least squares problem: block updates of the factors of a batch of separated matrices.

The side X = Σ_k F_k⁽¹⁾ ⊗ … ⊗ F_k⁽ᵈ⁾, m × r, minimises tr(Xᵀ W X H) − 2⟨X, K⟩ over one stack of
factors at a time. A stack is held as an array (L, m_i·r_i, s): L problems, the entries of a factor,
the terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lsrdecomp.arrays import Array, as_double, dtype_name, namespace
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.batched_terms import (
    Operator,
    Stacks,
    balanced_terms,
    conjugate_gradients,
    contraction,
    damped,
    mttkrp,
    summed,
)
from lsrdecomp.solvers.pair.partial_traces import PartialTraces, inverse
from lsrdecomp.solvers.pair.spectral_block import SpectralBlock, basis_for, is_small, pays
from lsrdecomp.targets.weights import Identity, Weight

if TYPE_CHECKING:
    from collections.abc import Container

DAMPING = 64.0
"""Proximal term of a block solve, in units of size × unit roundoff × mean diagonal: harmless to convergence, and the
step stays a descent step however singular the normal matrix is."""


@dataclass(frozen=True, slots=True)
class Side:
    """The fixed part of one side's problem: its shape, its weight W and its partial traces, how blocks are solved."""

    shape: KroneckerShape
    weight: Weight
    cg_steps: int
    traces: PartialTraces
    bases: tuple[
        Array, ...
    ]  # eigenpairs of W for each block, see `basis_for`; none of the identity

    @classmethod
    def of(
        cls, shape: KroneckerShape, weight: Weight, cg_steps: int, traces: PartialTraces
    ) -> Side:
        """The side of a batch with the partial traces of its weight at the rows of the shape."""
        bases: tuple[Array, ...] = ()
        if not isinstance(weight, Identity):
            bases = tuple(basis_for(weight, shape.rows, i) for i in range(shape.order))
        return cls(shape, weight, cg_steps, traces, bases)

    def update(
        self, stacks: Stacks, gram: Array, cross: Array, fixed: Container[int] = ()
    ) -> tuple[Stacks, Array | None]:
        """Minimise over each stack in turn, those of ``fixed`` left out; the objective never rises.

        Parameters
        ----------
        stacks : list of Array, shapes (L, m_i·r_i, s)
        gram : Array, shape (L, r, r)
            H, positive semidefinite.
        cross : Array, shape (L, m, r)
            K.

        Returns
        -------
        list of Array
        Array or None, shape (L, q, r)
            VᵀX of the new side, where the weight has few eigenpairs V and the last block's problem
            holds it.
        """
        inside: Array | None = None
        against, gram_tensor = contraction(cross, self.shape), rearrange(gram, self._inner)
        stacks = list(stacks)
        for i in range(self.shape.order):
            if i in fixed:
                continue
            # Block 1: what the present sum lacks along this block.
            right_hand = against(stacks, i)
            # Block 2: its minimum: without a weight row by row, of a small one by its normal
            # matrix, else by a few conjugate gradient steps, with what the block sees of the
            # eigenpairs where that is cheaper.
            seen, inside, small, terms = None, None, False, int(stacks[i].shape[2])
            if not isinstance(self.weight, Identity):
                small = is_small(self.shape, i, terms)
                if small or pays(self.shape, i, terms, self.cg_steps):
                    seen = SpectralBlock.of(self.weight, self.bases[i], self.shape, stacks, i, gram)
            if seen and small:
                stacks[i] = self._direct(stacks[i], 1, seen.matrix(), right_hand)
            elif isinstance(self.weight, Identity):
                normal = self._normal(stacks, gram_tensor, i)
                stacks[i] = self._direct(stacks[i], self.shape.rows[i], normal, right_hand)
            else:
                normal = self._normal(stacks, gram_tensor, i)
                apply = seen.apply if seen else self._operator(stacks, i, gram)
                stacks[i] = self._conjugate_gradients(stacks[i], i, normal, right_hand, apply)
            # Block 3: of the last one VᵀX, which the other side asks for next.
            if seen and i == self.shape.order - 1:
                inside = seen.inside(stacks[i])
        return balanced_terms(stacks), inside

    def gram(self, stacks: Stacks, formed: Array, inside: Array | None = None) -> Array:
        """XᵀWX of the side X, (L, r, r); without a weight from the factors, which are far smaller than X.

        ``inside`` is VᵀX, if it is known.
        """
        if isinstance(self.weight, Identity):
            return summed(
                [self._factor_gram(stack, j) for j, stack in enumerate(stacks)], self._inner
            )
        return self.weight.gram(formed, inside)

    def scaled(self, stacks: Stacks, gram: Array, cross: Array) -> Stacks:
        """Minimise over one number for each term: its first stack is multiplied by it."""
        xp, s = namespace(gram), int(stacks[0].shape[2])
        batch, r = int(gram.shape[0]), int(gram.shape[1])
        terms = [summed([stack[:, :, k : k + 1] for stack in stacks], self.shape) for k in range(s)]
        columns = xp.concat(terms, axis=2)  # (L, m, s·r)
        seen = xp.reshape(self.weight.gram(columns), (batch, s, r, s, r))
        normal = xp.sum(seen * gram[:, None, :, None, :], axis=(2, 4))
        right_hand = xp.stack([xp.sum(term * cross, axis=(1, 2)) for term in terms], axis=1)
        step = right_hand - xp.sum(normal, axis=2)
        change = xp.linalg.solve(
            damped(normal, DAMPING * s * unit_roundoff("float64")), step[:, :, None]
        )[:, :, 0]
        return [stacks[0] * (1.0 + change)[:, None, :], *stacks[1:]]

    @property
    def _inner(self) -> KroneckerShape:
        return KroneckerShape.of(self.shape.columns, self.shape.columns)

    def _normal(self, stacks: Stacks, gram_tensor: Array, i: int) -> Array:
        """N[(a,k),(b,l)] = Σ H ∏_{j≠i} F_kʲᵀ W_j F_lʲ over the other inner indices; shape (L, r_i·s, r_i·s)."""
        xp = namespace(gram_tensor)
        batch, r, s = gram_tensor.shape[0], self.shape.columns[i], stacks[0].shape[2]
        grams = [
            stack if j == i else self._factor_gram(stack, j) for j, stack in enumerate(stacks)
        ]  # i is never read
        normal = xp.reshape(mttkrp(gram_tensor, grams, i), (batch, r, r, s, s))
        return xp.reshape(xp.permute_dims(normal, (0, 1, 3, 2, 4)), (batch, r * s, r * s))

    def _factor_gram(self, stack: Array, j: int) -> Array:
        """F_kʲᵀ W_j F_lʲ of all pairs of terms, as a stack (L, r_j·r_j, s·s)."""
        xp, (batch, _, s), (m, r) = namespace(stack), stack.shape, self.shape.factors[j]
        rows = xp.reshape(stack, (batch, m, r * s))
        products = xp.matrix_transpose(rows) @ self.traces.apply(j, rows)
        products = xp.reshape(products, (batch, r, s, r, s))
        return xp.reshape(xp.permute_dims(products, (0, 1, 3, 2, 4)), (batch, r * r, s * s))

    def _direct(self, stack: Array, rows: int, normal: Array, right_hand: Array) -> Array:
        """Exact block minimum, as a proximal step from the present block; ``rows`` of it share the normal matrix."""
        xp, batch, n = namespace(normal), normal.shape[0], normal.shape[1]
        block = xp.reshape(stack, (batch, rows, n))
        gradient = xp.reshape(right_hand, (batch, rows, n)) - block @ normal
        safe = damped(normal, DAMPING * n * unit_roundoff(dtype_name(normal)))
        step = xp.linalg.solve(
            as_double(safe), as_double(xp.matrix_transpose(gradient))
        )  # quicker in double, too
        step = xp.astype(step, normal.dtype)
        return xp.reshape(block + xp.matrix_transpose(step), stack.shape)

    def _operator(self, stacks: Stacks, i: int, gram: Array) -> Operator:
        """N of block i, by the whole weight."""

        def apply(x: Array) -> Array:
            formed = summed([x if j == i else stack for j, stack in enumerate(stacks)], self.shape)
            return contraction(self.weight.apply(formed @ gram), self.shape)(stacks, i)

        return apply

    def _conjugate_gradients(
        self, stack: Array, i: int, normal: Array, right_hand: Array, apply: Operator
    ) -> Array:
        """A few preconditioned steps from the present block: the weight couples its rows, no small solve is exact."""
        xp = namespace(normal)
        batch, (m, r), s = normal.shape[0], self.shape.factors[i], stack.shape[2]
        columns, rows = inverse(self.traces.mean[:, None, None] * normal), self.traces.inverse(i)

        def precondition(x: Array) -> Array:
            image = xp.reshape(x, (batch, m, r * s)) @ columns
            return xp.reshape(image if rows is None else rows @ image, x.shape)

        residual = right_hand - apply(stack)
        return stack + conjugate_gradients(apply, precondition, residual, self.cg_steps)
