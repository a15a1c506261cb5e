"""One side of the joint least squares problem: block updates of its factors, for a batch.

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
    to_matrices,
)
from lsrdecomp.solvers.pair.spectral_block import SpectralBlock, basis_for, is_spectral_cheaper
from lsrdecomp.targets.weights import Identity, Weight

if TYPE_CHECKING:
    from collections.abc import Container

    from lsrdecomp.solvers.pair.partial_traces import PartialTraces

DAMPING = 64.0
"""Proximal term, in units of size × unit roundoff × mean diagonal of the normal matrix: harmless to
convergence, and the step stays a descent step however singular that matrix is. By hand."""

CG_STEPS = 8
"""Conjugate gradient steps of a block update in a weighted norm whose normal matrix is not formed:
by hand."""


@dataclass(frozen=True, slots=True)
class Side:
    """The fixed part of one side's problem: its shape, its weight W, and how blocks are solved."""

    shape: KroneckerShape
    weight: Weight
    cg_steps: int  # conjugate gradient steps of a block whose normal matrix is not formed
    traces: PartialTraces
    bases: tuple[
        Array, ...
    ]  # eigenpairs of W for each block, see `basis_for`; none of the identity
    max_formed_unknowns: int  # of a block in a weighted norm whose normal matrix is formed

    @classmethod
    def of(
        cls,
        shape: KroneckerShape,
        weight: Weight,
        cg_steps: int,
        traces: PartialTraces,
    ) -> Side:
        """Prepare a side, given the partial traces of its weight at the rows of the shape."""
        bases: tuple[Array, ...] = ()
        if not isinstance(weight, Identity):
            bases = tuple(basis_for(weight, shape.rows, i) for i in range(shape.order))
        # With more unknowns conjugate gradient steps are cheaper than forming. By hand.
        return cls(shape, weight, cg_steps, traces, bases, max_formed_unknowns=80)

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
        contract = contraction(cross, self.shape)
        gram_tensor = rearrange(gram, self._inner)
        projection: Array | None = None
        stacks = list(stacks)
        for i in range(self.shape.order):
            if i in fixed:
                continue
            # Block 1: the right hand side of the block's normal equations.
            right_hand = contract(stacks, i)
            # Block 2: their solution, in the way that suits the weight.
            if isinstance(self.weight, Identity):
                stacks[i] = self._update_by_rows(stacks, i, gram_tensor, right_hand)
                continue
            spectral = self._spectral_block(stacks, i, gram)
            if spectral is not None and self._is_small(stacks, i):
                stacks[i] = self._solve(stacks[i], 1, spectral.matrix(), right_hand)
            else:
                apply = self._operator(stacks, i, gram) if spectral is None else spectral.apply
                normal = self._normal(stacks, gram_tensor, i)
                stacks[i] = self._conjugate_gradients(stacks[i], i, normal, right_hand, apply)
            # Block 3: VᵀX with the last block, which the other side asks for next.
            if spectral is not None and i == self.shape.order - 1:
                projection = spectral.projection(stacks[i])
        return balanced_terms(stacks), projection

    def gram(self, stacks: Stacks, formed: Array, projection: Array | None = None) -> Array:
        """Return XᵀWX of the side X, (L, r, r).

        Without a weight it is made from the factors, which are far smaller than X. ``projection``
        is VᵀX, if it is known.
        """
        if isinstance(self.weight, Identity):
            factor_grams = [self._factor_gram(stack, j) for j, stack in enumerate(stacks)]
            return to_matrices(factor_grams, self._inner)
        return self.weight.gram(formed, projection)

    def with_best_scales(self, stacks: Stacks, gram: Array, cross: Array) -> Stacks:
        """Minimise over one number for each term, by which its first stack is multiplied."""
        xp = namespace(gram)
        s = int(stacks[0].shape[2])
        batch = int(gram.shape[0])
        r = int(gram.shape[1])
        terms = [to_matrices(_term(stacks, k), self.shape) for k in range(s)]
        # Scales 1: the inner products of all terms in the norm, and with the target.
        columns = xp.concat(terms, axis=2)  # (L, m, s·r)
        products = xp.reshape(self.weight.gram(columns), (batch, s, r, s, r))
        normal = xp.sum(products * gram[:, None, :, None, :], axis=(2, 4))
        right_hand = xp.stack([xp.sum(term * cross, axis=(1, 2)) for term in terms], axis=1)
        # Scales 2: a proximal step from the present scales, which are one.
        residual = right_hand - xp.sum(normal, axis=2)
        safe = damped(normal, DAMPING * s * unit_roundoff("float64"))
        change = xp.linalg.solve(safe, residual[:, :, None])[:, :, 0]
        return [stacks[0] * (1.0 + change)[:, None, :], *stacks[1:]]

    @property
    def _inner(self) -> KroneckerShape:
        return KroneckerShape.of(self.shape.columns, self.shape.columns)

    def _is_small(self, stacks: Stacks, i: int) -> bool:
        """Return whether block i has few enough unknowns for its normal matrix to be formed."""
        m, r = self.shape.factors[i]
        terms = int(stacks[i].shape[2])
        return m * r * terms <= self.max_formed_unknowns

    def _spectral_block(self, stacks: Stacks, i: int, gram: Array) -> SpectralBlock | None:
        """Contract the weight with the other factors, where block i is then solved at less cost."""
        if isinstance(self.weight, Identity):
            return None
        terms = int(stacks[i].shape[2])
        is_cheaper = is_spectral_cheaper(self.shape, i, terms, self.cg_steps)
        if not (self._is_small(stacks, i) or is_cheaper):
            return None
        return SpectralBlock.of(self.weight, self.bases[i], self.shape, stacks, i, gram)

    def _update_by_rows(
        self, stacks: Stacks, i: int, gram_tensor: Array, right_hand: Array
    ) -> Array:
        """Solve for block i without a weight: all its rows share one small normal matrix."""
        normal = self._normal(stacks, gram_tensor, i)
        return self._solve(stacks[i], self.shape.rows[i], normal, right_hand)

    def _normal(self, stacks: Stacks, gram_tensor: Array, i: int) -> Array:
        """Form the normal matrix of a row of block i, (L, r_i·s, r_i·s).

        N[(a,k),(b,l)] = Σ H ∏_{j≠i} F_kʲᵀ W_j F_lʲ, summed over the other inner indices.
        """
        xp = namespace(gram_tensor)
        batch = gram_tensor.shape[0]
        r = self.shape.columns[i]
        s = stacks[0].shape[2]
        grams = []
        for j, stack in enumerate(stacks):
            grams.append(stack if j == i else self._factor_gram(stack, j))  # i is never read
        normal = xp.reshape(mttkrp(gram_tensor, grams, i), (batch, r, r, s, s))
        return xp.reshape(xp.permute_dims(normal, (0, 1, 3, 2, 4)), (batch, r * s, r * s))

    def _factor_gram(self, stack: Array, j: int) -> Array:
        """Return F_kʲᵀ W_j F_lʲ of all pairs of terms, as a stack (L, r_j·r_j, s·s)."""
        xp = namespace(stack)
        batch, _, s = stack.shape
        m, r = self.shape.factors[j]
        rows = xp.reshape(stack, (batch, m, r * s))
        products = xp.matrix_transpose(rows) @ self.traces.apply(j, rows)
        products = xp.reshape(products, (batch, r, s, r, s))
        return xp.reshape(xp.permute_dims(products, (0, 1, 3, 2, 4)), (batch, r * r, s * s))

    def _solve(self, stack: Array, rows: int, normal: Array, right_hand: Array) -> Array:
        """Minimise over a block exactly, as a proximal step from the present one.

        ``rows`` of the block share the normal matrix.
        """
        xp = namespace(normal)
        batch = normal.shape[0]
        n = normal.shape[1]
        block = xp.reshape(stack, (batch, rows, n))
        gradient = xp.reshape(right_hand, (batch, rows, n)) - block @ normal
        damping = DAMPING * n * unit_roundoff(dtype_name(normal))
        # In double precision, which is quicker, too.
        safe = as_double(damped(normal, damping))
        step = xp.linalg.solve(safe, as_double(xp.matrix_transpose(gradient)))
        step = xp.astype(step, normal.dtype)
        return xp.reshape(block + xp.matrix_transpose(step), stack.shape)

    def _operator(self, stacks: Stacks, i: int, gram: Array) -> Operator:
        """Return N of block i as a function, by the whole weight."""

        def apply(x: Array) -> Array:
            replaced = [x if j == i else stack for j, stack in enumerate(stacks)]
            image = self.weight.apply(to_matrices(replaced, self.shape) @ gram)
            return contraction(image, self.shape)(stacks, i)

        return apply

    def _conjugate_gradients(
        self, stack: Array, i: int, normal: Array, right_hand: Array, apply: Operator
    ) -> Array:
        """Take a few preconditioned steps from the present block.

        The weight couples the block's rows, so that no small solve is exact.
        """
        xp = namespace(normal)
        batch = normal.shape[0]
        m, r = self.shape.factors[i]
        s = stack.shape[2]
        column_inverse = self.traces.inverse_of(self.traces.mean[:, None, None] * normal)
        row_inverse = self.traces.inverse(i)

        def precondition(x: Array) -> Array:
            image = xp.reshape(x, (batch, m, r * s)) @ column_inverse
            if row_inverse is not None:
                image = row_inverse @ image
            return xp.reshape(image, x.shape)

        residual = right_hand - apply(stack)
        return stack + conjugate_gradients(apply, precondition, residual, self.cg_steps)


def _term(stacks: Stacks, k: int) -> Stacks:
    """Return the k-th term of each problem alone."""
    return [stack[:, :, k : k + 1] for stack in stacks]
