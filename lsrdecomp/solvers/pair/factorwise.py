"""The paper's route for a LoRA pair: each side on its own by the SVD of its rearrangement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lsrdecomp.arrays import Array, as_double, namespace
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.solvers.iteration import SolveProgress
from lsrdecomp.solvers.solver import PairSolution, Status, Sweep, validate_pair_request
from lsrdecomp.solvers.svd.singular_terms import as_separated
from lsrdecomp.targets.weighted import weighted_norm, weighted_residual_norm

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.kronecker.separated import SeparatedMatrix
    from lsrdecomp.kronecker.shape import KroneckerShape, ProductShape
    from lsrdecomp.targets.target import LowRank
    from lsrdecomp.targets.weights import NormWeights

Triples = tuple[Array, Array, Array]


@dataclass(frozen=True, slots=True)
class FactorwiseSVD:
    """One SVD of the rearrangement a side: ΔW = B A to (Σ B1 ⊗ B2)(Σ A1 ⊗ A2).

    B and A are taken in the balanced gauge U√Σ, √Σ Vᵀ, through QR factorizations, so that ΔW is
    never formed; the inner rank is cut or padded to that of the shape. Each side is then as good as
    it can be for its number of terms, but not the product: see `JointALS` for the joint problem.

    Parameters
    ----------
    gauge : "balanced" or "given"
        "given" leaves B and A as they are, as the paper does; their columns must then be the inner
        rank of the shape.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import LowRank, ProductShape
    >>> left = np.kron(np.eye(4, 2), np.ones((4, 2)))
    >>> right = np.kron(np.ones((2, 4)), np.eye(2, 4))
    >>> shape = ProductShape(out=(4, 4), inner=(2, 2), into=(4, 4))
    >>> solution = FactorwiseSVD().solve(LowRank(left, right), shape, 1)
    >>> solution.product
    SeparatedProduct(16×16 as 1 × [4×2 ⊗ 4×2] times 1 × [2×4 ⊗ 2×4], 32 parameters)
    >>> round(solution.relative_error, 6)
    0.0
    """

    gauge: Literal["balanced", "given"] = "balanced"

    def solve(
        self,
        target: LowRank,
        shape: ProductShape,
        ranks: int | tuple[int, int],
        *,
        weights: NormWeights | None = None,
        on_sweep: Callable[[Sweep], Any] | None = None,
    ) -> PairSolution:
        """Truncate both sides; the contract is `PairSolver.solve`, the cost that of `truncations`.

        Unlike `JointALS` it looks at each side alone, and ``weights`` change the reported error,
        not the product.

        Returns
        -------
        PairSolution
            ``start_error`` is the error itself, since nothing is iterated; ``sweeps`` is one
            record.
        """
        out_rank, in_rank = validate_pair_request(target, shape, ranks)
        product = self.truncations(target, shape).truncate(out_rank, in_rank)
        if weights is None:
            norm = target.norm
            error = target.residual_norm(product)
        else:
            norm = weighted_norm(target, weights)
            error = weighted_residual_norm(target, product, weights)
        relative_error = error / norm if norm > 0.0 else 0.0
        progress = SolveProgress(on_sweep)
        progress.record(relative_error)
        return PairSolution(
            product=product,
            relative_error=relative_error,
            start_error=relative_error,
            norm=norm,
            status=Status.rank_reached,
            sweeps=progress.sweeps,
        )

    def truncations(self, target: LowRank, shape: ProductShape) -> Truncations:
        """Take one SVD a side, from which products of any numbers of terms are cut.

        Cost O((m + n)·r²) for the gauge and O(m·r·min(m1·r1, m2·r2)) for the left side, likewise
        for the right.
        """
        validate_pair_request(target, shape, 1)
        if shape.order != 2:
            raise ShapeError(f"each side needs two factors; {shape} has {shape.order}")
        if self.gauge == "given" and target.rank != shape.inner_rank:
            raise ShapeError(
                f"the pair has rank {target.rank}, but {shape} has inner rank {shape.inner_rank}"
            )
        sides = target.balanced(shape.inner_rank) if self.gauge == "balanced" else target
        left = _singular_triples(sides.left, shape.left)
        right = _singular_triples(sides.right, shape.right)
        return Truncations(shape, left, right)


@dataclass(frozen=True, slots=True)
class Truncations:
    """The singular triples of both sides, rearranged."""

    shape: ProductShape
    left: Triples
    right: Triples

    @property
    def max_ranks(self) -> tuple[int, int]:
        """The most terms the two sides can need."""
        return self.shape.left.max_separation_rank, self.shape.right.max_separation_rank

    def truncate(self, left_rank: int, right_rank: int | None = None) -> SeparatedProduct:
        """Return the product of the first terms of each side, at most `max_ranks`."""
        if right_rank is None:
            right_rank = left_rank
        left = _terms(self.left, self.shape.left, left_rank)
        right = _terms(self.right, self.shape.right, right_rank)
        return SeparatedProduct(left, right)


def _singular_triples(side: Array, shape: KroneckerShape) -> Triples:
    matrix = as_double(rearrange(side, shape))
    u, sigma, vh = namespace(matrix).linalg.svd(matrix, full_matrices=False)
    return u, sigma, vh


def _terms(triples: Triples, shape: KroneckerShape, rank: int) -> SeparatedMatrix:
    u, sigma, vh = triples
    return as_separated(u, sigma, vh, shape, min(rank, shape.max_separation_rank))
