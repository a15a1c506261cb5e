"""One shape at growing numbers of terms: a batch is set up once, each solve starts where fewer terms ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lsrdecomp.arrays import Array, check_device, namespace, placed
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.solvers.pair.initialization import as_factors
from lsrdecomp.solvers.pair.joint_als import extrapolated
from lsrdecomp.solvers.pair.problem import Pair, PairProblem, Sight, State
from lsrdecomp.solvers.pair.stacking import given_pair, stacked_norms, stacked_pairs, stacked_triangles
from lsrdecomp.targets.base import LowRank
from lsrdecomp.targets.weights import NormWeights

Ranks = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Batch:
    """Targets of one size and their norms as stacked arrays, for any number of shapes."""

    pair: tuple[Array, Array]
    triangles: tuple[Array, Array]
    norms: NormWeights
    sight: Sight
    device: str | None = None

    @classmethod
    def of(cls, targets: Sequence[LowRank], weights: Sequence[NormWeights] | None, device: str | None = None) -> Batch:
        """Of targets (m, n) and a norm for each of them; absent, the Frobenius norm. With a device they are put there.

        Raises `LsrError` if torch cannot compute in float64 on the device.
        """
        arrays = stacked_pairs(targets), stacked_triangles(targets), stacked_norms(targets, weights)
        if device is not None:
            check_device(device)
            arrays = placed(arrays, device)
        return cls(*arrays, Sight.of(*arrays), device)


class NestedTerms:
    """A batch at one shape, solved for several numbers of terms in a row.

    Parameters
    ----------
    batch : Batch
    shape : ProductShape
    cg_steps : int
        As for `JointALS`.

    Notes
    -----
    What depends on the shape alone, the weights with their indices reordered and their partial traces, is made once.
    """

    def __init__(self, batch: Batch, shape: ProductShape, cg_steps: int = 8) -> None:
        self.batch, self.shape = batch, shape
        self.problem = PairProblem.of(batch.pair, batch.triangles, shape, batch.norms, cg_steps, 0.0, batch.sight)

    def clipped(self, ranks: Ranks) -> Ranks:
        """At most as many terms as each side can need."""
        return tuple(  # type: ignore[return-value]
            min(rank, side.max_separation_rank)
            for rank, side in zip(ranks, (self.shape.left, self.shape.right), strict=True)
        )

    def begin(self, ranks: Ranks, starts: int = 2) -> State:
        """The nearest start of `JointALS`."""
        return self.problem.best_start(self.problem.starts(self.clipped(ranks), starts), 0)[0]

    def given(self, products: Sequence[SeparatedProduct], ranks: Ranks) -> State:
        """From known products with at most these terms; missing terms grow as in `grown`."""
        kept = max(p.separation_ranks[0] for p in products), max(p.separation_ranks[1] for p in products)
        pair = given_pair(products, self.shape, kept, len(products))
        if self.batch.device is not None:
            pair = placed(pair, self.batch.device)
        return self.grown(self.problem.state(pair), ranks)

    def grown(self, state: State, ranks: Ranks) -> State:
        """More terms: the leading ones of each side's gradient in the norm, at the length that serves best."""
        for side, rank in enumerate(self.clipped(ranks)):
            more = rank - int(state.pair[side][0].shape[2])
            if more > 0:
                state = self.problem.extended(state, side, more)
        return state

    def descend(self, state: State, sweeps: int, tolerance: float = 1e-4, least: float = 0.0) -> State:
        """Sweeps with extrapolated steps, until one lowers the error of no problem by more than ``tolerance``.

        A problem whose squared error falls by no more than ``least`` counts as settled too.
        """
        xp = namespace(state.error)
        step = xp.ones_like(state.error)
        for place in range(sweeps):
            before, state = state, self.problem.sweep(state)
            if place % 2 == 1:
                state, step = extrapolated(self.problem, before, state, step)
            settled = before.error - state.error <= tolerance * before.error
            if least > 0.0:
                settled = xp.logical_or(settled, before.error**2 - state.error**2 <= least)
            if place > 0 and bool(xp.all(settled)):
                break
        return state

    def errors(self, state: State) -> Array:
        """‖G^½(M − M̂)C^½‖ in the batch's norm, (L,) NumPy."""
        errors = self.problem.errors(state)
        return errors if self.batch.device is None else placed(errors, None)

    def factors(self, state: State) -> tuple[list[Array], list[Array]]:
        """Factors of both sides, each (L, s, m_i, r_i) or (L, t, r_i, n_i), as NumPy arrays."""
        pair: Pair = state.pair if self.batch.device is None else placed(state.pair, None)
        right = as_factors(pair[1], self.shape.right.transposed)
        return as_factors(pair[0], self.shape.left), [namespace(factor).matrix_transpose(factor) for factor in right]
