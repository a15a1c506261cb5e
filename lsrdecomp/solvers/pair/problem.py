"""A batch of joint least squares problems of one shape: its starts, sweeps over both sides, errors, and its descent.

A descent is sweeps, now and then an extrapolated step, until nothing more is gained.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from lsrdecomp.arrays import Array, as_double, dtype_name, namespace
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.batched_terms import chosen, safe_ratio, scaled, summed, term_norms
from lsrdecomp.solvers.pair.block_update import Side
from lsrdecomp.solvers.pair.initialization import (
    as_factors,
    first_factor_fastest,
    gauge_transforms,
    orthogonal_terms,
    side_terms,
)
from lsrdecomp.solvers.pair.partial_traces import along_rows, kron_apply
from lsrdecomp.solvers.pair.stacking import Pair, WeightedTargets, start_pair
from lsrdecomp.solvers.progress import Step
from lsrdecomp.targets.weighted import pair_residual_norms, weighted_triangles
from lsrdecomp.targets.weights import Identity

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from lsrdecomp.kronecker.separated import SeparatedProduct
    from lsrdecomp.kronecker.shape import ProductShape

RESOLUTION = 1e-7
"""Relative error below which inner products in double precision tell nothing."""

EXACT = 0.03
"""Relative error above which inner products in double precision give it to twelve digits, unless
large terms cancel."""

CANCELLING = 3e3
"""‖B̂‖‖Â‖/‖M‖ above which they do: inner products then lose more than seven of their sixteen
digits."""


@dataclass(frozen=True, slots=True)
class SideMoments:
    """What the other side's problem needs to know of a side X: its Gram matrix, its cross term, its size."""

    gram: Array  # XᵀWX, (L, r, r)
    cross: Array  # Xᵀ against the target's own side in the norm, (L, R, r)
    norm: Array  # ‖X‖_F, (L,)

    def scaled(self, factor: Array) -> SideMoments:
        """Of the side multiplied by (L,) positive numbers."""
        each = factor[:, None, None]
        return SideMoments(each**2 * self.gram, each * self.cross, factor * self.norm)


@dataclass(frozen=True, slots=True)
class PairState:
    """A pair with both sides of equal norm, the moments of its in side, and how far the product is from the target."""

    pair: Pair
    into: SideMoments
    error: Array  # ‖G^½(PQ − B̂Â)C^½‖ from inner products, exact to `RESOLUTION` while no terms cancel; (L,)

    @staticmethod
    def chosen(condition: Array, first: PairState, second: PairState) -> PairState:
        """``first`` for the problems where ``condition`` (L,) holds, ``second`` elsewhere."""
        out, into = (chosen(condition, *each) for each in zip(first.pair, second.pair, strict=True))
        a, b = ([x.into.gram, x.into.cross, x.into.norm, x.error] for x in (first, second))
        gram, cross, norm, error = chosen(condition, a, b)
        return PairState((out, into), SideMoments(gram, cross, norm), error)


@dataclass(frozen=True, slots=True)
class PairProblem:
    """Targets of a batch at one shape, with what does not change from sweep to sweep."""

    targets: WeightedTargets
    shape: ProductShape
    sides: tuple[Side, Side]  # the out side's part and the in side's

    @classmethod
    def of(cls, targets: WeightedTargets, shape: ProductShape, cg_steps: int) -> PairProblem:
        """The problem at a shape; the weights with their indices reordered and their partial traces are made here."""
        norms = targets.norms
        out_side, in_side = (
            Side.of(side, weight, cg_steps, targets.traces(which, weight, side.rows))
            for which, side, weight in (
                (0, shape.left, norms.output),
                (1, shape.right.transposed, norms.input),
            )
        )
        return cls(targets, shape, (out_side, in_side))

    @property
    def fits_single(self) -> bool:
        """Whether single precision holds the targets' numbers, and the ratios of their sizes."""
        xp = namespace(self.targets.left)
        energy, triangles = self.targets.energy, self.targets.triangles
        sizes = xp.concat(
            [xp.linalg.matrix_norm(triangle) for triangle in triangles] + [energy**0.5]
        )
        return bool(xp.all((sizes == 0) | ((sizes > 1e-12) & (sizes < 1e12))))

    def single(self) -> PairProblem:
        """The same in single precision, targets of norm one; in the Frobenius norm, where it `fits_single`."""
        targets, xp = self.targets, namespace(self.targets.left)
        length = xp.linalg.matrix_norm(targets.triangles[0])
        scales = (
            safe_ratio(xp.ones_like(length), length),
            safe_ratio(length, xp.sqrt(targets.energy)),
        )
        left, right, *triangles = (
            xp.astype(x, xp.float32) for x in (targets.left, targets.right, *targets.triangles)
        )
        for array, scale in zip((left, right, *triangles), 2 * scales, strict=True):
            array *= xp.astype(scale, xp.float32)[:, None, None]  # in place: the copies are our own
        targets = WeightedTargets.of_arrays(
            (left, right), (triangles[0], triangles[1]), targets.norms
        )
        return PairProblem.of(targets, self.shape, self.sides[0].cg_steps)

    @property
    def _weighted(self) -> tuple[Array, Array]:
        """Of each side what its cross term is taken with: G P and C Qᵀ."""
        return self.targets.weighted_left, self.targets.weighted_right

    def to_single(self, pair: Pair) -> Pair:
        """A pair of this problem as one of `single`."""
        xp, size = namespace(self.targets.left), self.targets.energy**0.25
        size = xp.where(size > 0, size, xp.ones_like(size))
        sides = [
            [xp.astype(stack, xp.float32) for stack in scaled(side, 1.0 / size)] for side in pair
        ]
        return sides[0], sides[1]

    def from_single(self, pair: Pair) -> Pair:
        """A pair of `single` as one of this problem."""
        sides = [
            scaled([as_double(stack) for stack in side], self.targets.energy**0.25) for side in pair
        ]
        return sides[0], sides[1]

    def starts(self, ranks: tuple[int, int], most: int) -> list[Pair]:
        """Orthogonal terms of each side in a gauge of the pair: two ways in the Frobenius norm, four in a weighted one.

        The components of the Frobenius gauge run `first_factor_fastest` or last factor fastest.
        With weights the gauge is that of the norm or the Frobenius gauge, the sides whitened by the
        weights' partial traces or not.
        """
        rank, inner = self.shape.inner_rank, self.shape.inner
        targets = self.targets
        if targets.norms.is_frobenius:
            transforms = gauge_transforms(targets.triangles, rank)
            ways = [
                (
                    (
                        first_factor_fastest(transforms[0], inner),
                        first_factor_fastest(transforms[1], inner),
                    ),
                    False,
                ),
                (transforms, False),
            ]
            most = min(most, 1) if max(inner) == rank else most  # the two are the same
        else:
            gauges = (
                weighted_triangles(targets.left, targets.right, targets.norms),
                targets.triangles,
            )
            ways = [
                (gauge_transforms(triangles, rank), white)
                for triangles in gauges
                for white in (True, False)
            ]
        return [self._start(transforms, white, ranks) for transforms, white in ways[:most]]

    def _start(self, transforms: tuple[Array, Array], white: bool, ranks: tuple[int, int]) -> Pair:
        factors = (
            self.targets.left,
            namespace(self.targets.right).matrix_transpose(self.targets.right),
        )
        sides = zip(factors, transforms, self.sides, ranks, strict=True)
        out, into = (
            side_terms(x, transform, side.shape, k, side.traces if white else None)
            for x, transform, side, k in sides
        )
        return out, into

    def best_start(self, starts: list[Pair], trials: int) -> tuple[PairState, Array, Array]:
        """Of several starts, the one that is nearest after ``trials`` sweeps, problem by problem.

        Returns
        -------
        PairState, Array, Array
            Where it has come to (a single start is returned as it is), its error and that of the
            nearest start.
        """
        xp = namespace(self.targets.left)
        # Start 1: where each start stands.
        states = [self.state(start) for start in starts]
        if len(states) == 1:
            error = self.errors(states[0])
            return states[0], error, error
        errors = [self.errors(state) for state in states]
        best, reached, nearest = states[0], errors[0], errors[0]
        # Start 2: every start and what a few sweeps make of it; of each problem the nearest so far.
        for state, begun in zip(states, errors, strict=True):
            nearest = xp.minimum(nearest, begun)
            contenders = [(state, begun)]
            if trials > 0:
                for _ in range(trials):
                    state = self.sweep(state)
                contenders.append(
                    (state, xp.maximum(state.error, RESOLUTION * xp.sqrt(self.targets.energy)))
                )
            for contender, error in contenders:
                nearer = error < reached
                best = PairState.chosen(nearer, contender, best)
                reached = xp.where(nearer, error, reached)
        return best, self.errors(best), nearest

    def state(self, pair: Pair) -> PairState:
        """Where a pair stands, both sides brought to equal norms; the product stays."""
        return self._joined(pair, *(self._moments(pair, side) for side in (0, 1)))

    def sweep(
        self, state: PairState, fixed: tuple[Container[int], Container[int]] = ((), ())
    ) -> PairState:
        """Every block of both sides once but those ``fixed``; no error rises above `RESOLUTION`."""
        pair, other, moments = list(state.pair), state.into, []
        # Sweep 1: the out side, block by block, against the Gram matrix H and the cross term K of
        # the in side; then the in side against those of the new out side.
        for which, (side, weighted) in enumerate(zip(self.sides, self._weighted, strict=True)):
            cross = _by_columns(weighted, other.cross)
            pair[which], inside = side.update(pair[which], other.gram, cross, fixed[which])
            other = self._moments((pair[0], pair[1]), which, inside)
            moments.append(other)
        # Sweep 2: both sides of equal norm, and the error from the inner products at hand.
        swept = self._joined((pair[0], pair[1]), *moments)
        # Sweep 3: where H is singular a side may grow along it without end, until H's rounding,
        # times the square of that side, outweighs what a sweep gains. Such a problem stays where it
        # was.
        xp, size = namespace(other.gram), namespace(other.gram).sqrt(self.targets.energy)
        blur = (
            RESOLUTION * (unit_roundoff(dtype_name(other.gram)) / unit_roundoff("float64")) ** 0.5
        )
        risen = swept.error > state.error + blur * size
        return PairState.chosen(risen, state, swept) if bool(xp.any(risen)) else swept

    def from_products(
        self, products: Sequence[SeparatedProduct], ranks: tuple[int, int]
    ) -> PairState:
        """Where known products with at most these terms stand; missing terms grow as in `grown`."""
        most = (
            max(p.separation_ranks[0] for p in products),
            max(p.separation_ranks[1] for p in products),
        )
        pair = self.targets.placed(start_pair(products, self.shape, most, len(products)))
        return self.grown(self.state(pair), ranks)

    def grown(self, state: PairState, ranks: tuple[int, int]) -> PairState:
        """More terms: the leading ones of each side's gradient in the norm, at the length that serves best."""
        for side, rank in enumerate(ranks):
            more = rank - int(state.pair[side][0].shape[2])
            if more > 0:
                state = self._extended(state, side, more)
        return state

    def _extended(self, state: PairState, which: int, more: int) -> PairState:
        """With ``more`` terms on one side: the largest of its gradient, measured in the norm; then all terms rescaled.

        The step of each term is the best for all terms of the side together, so the error does not
        rise.
        """
        pair: Pair = (list(state.pair[0]), list(state.pair[1]))
        other = state.into if which == 0 else self._moments(pair, 0)
        side, weighted = self.sides[which], self._weighted[which]
        # Extended 1: the gradient K − W X H, whitened by the weight's partial traces, and its
        # orthogonal terms.
        formed = summed(pair[which], side.shape)
        gradient = weighted @ other.cross - side.weight.apply(formed) @ other.gram
        _, inverses = side.traces.roots
        white = rearrange(kron_apply(inverses, gradient, side.shape.rows), side.shape)
        fresh, xp = (
            along_rows(orthogonal_terms(white, more), inverses),
            namespace(self.targets.left),
        )
        # Extended 2: beside the present terms, of their mean size, so that one damping suits all.
        length = safe_ratio(
            xp.mean(term_norms(pair[which]), axis=1, keepdims=True), term_norms(fresh)
        )
        fresh[0] = fresh[0] * length[:, None, :]
        wider = [xp.concat([old, new], axis=2) for old, new in zip(pair[which], fresh, strict=True)]
        pair = (wider, pair[1]) if which == 0 else (pair[0], wider)
        # Extended 3: the best number for each term.
        best = side.scaled(wider, other.gram, weighted @ other.cross)
        return self.state((best, pair[1]) if which == 0 else (pair[0], best))

    def scaled(self, pair: Pair) -> Pair:
        """Each term of the out side, then of the in side, times the number that serves best."""
        for which, (side, weighted) in enumerate(zip(self.sides, self._weighted, strict=True)):
            other = self._moments(pair, 1 - which)
            best = side.scaled(pair[which], other.gram, weighted @ other.cross)
            pair = (best, pair[1]) if which == 0 else (pair[0], best)
        return pair

    def errors(self, state: PairState) -> Array:
        """‖G^½(PQ − B̂Â)C^½‖ of each problem: as the state has it if that is exact for all of them, or measured anew."""
        xp = namespace(self.targets.left)
        size, means = (
            xp.sqrt(self.targets.energy),
            self.sides[0].traces.mean * self.sides[1].traces.mean,
        )
        sides = state.into.norm**2 * xp.sqrt(means)  # ‖B̂‖‖Â‖
        if bool(xp.all((state.error > EXACT * size) & (sides < CANCELLING * size))):
            return state.error
        outer, inner = (
            summed(x, side.shape) for x, side in zip(state.pair, self.sides, strict=True)
        )
        targets = self.targets
        return pair_residual_norms(
            targets.left, targets.right, outer, xp.matrix_transpose(inner), targets.norms
        )

    def factors(self, state: PairState) -> tuple[list[Array], list[Array]]:
        """Factors of both sides, each (L, s, m_i, r_i) or (L, t, r_i, n_i)."""
        into = as_factors(state.pair[1], self.sides[1].shape)
        return as_factors(state.pair[0], self.shape.left), [
            namespace(x).matrix_transpose(x) for x in into
        ]

    def _moments(self, pair: Pair, which: int, inside: Array | None = None) -> SideMoments:
        side, weighted = self.sides[which], self._weighted[which]
        xp, formed = namespace(weighted), summed(pair[which], side.shape)
        gram = side.gram(pair[which], formed, inside)
        own = isinstance(side.weight, Identity)
        norm = xp.sqrt(xp.linalg.trace(gram)) if own else xp.linalg.matrix_norm(formed)
        return SideMoments(gram, xp.matrix_transpose(weighted) @ formed, norm)

    def _joined(self, pair: Pair, outer: SideMoments, into: SideMoments) -> PairState:
        xp = namespace(self.targets.left)
        overlap, both = (
            xp.sum(outer.cross * into.cross, axis=(1, 2)),
            xp.sum(outer.gram * into.gram, axis=(1, 2)),
        )
        energy = self.targets.energy - 2.0 * overlap + both
        error = xp.sqrt(xp.where(energy > 0, energy, xp.zeros_like(energy)))
        positive = xp.logical_and(outer.norm > 0, into.norm > 0)
        ratio = xp.where(positive, xp.sqrt(safe_ratio(into.norm, outer.norm)), xp.ones_like(error))
        ratio = xp.where(ratio > 0, ratio, xp.ones_like(ratio))
        return PairState(
            (scaled(pair[0], ratio), scaled(pair[1], 1.0 / ratio)), into.scaled(1.0 / ratio), error
        )


def _by_columns(x: Array, y: Array) -> Array:
    """x y as the transpose of an array that lies column by column, as `contraction` reads it."""
    xp = namespace(x, y)
    return xp.matrix_transpose(xp.matrix_transpose(y) @ xp.matrix_transpose(x))


LENGTHEN = 2.0
"""Growth of the extrapolated step after each success."""

EVERY = 2
"""Sweeps between extrapolated steps, each a third of a sweep: more of them cost what they save."""


def steps(
    problem: PairProblem, state: PairState, tolerance: float, least: float = 0.0
) -> Iterator[Step[PairState]]:
    """Sweeps from ``state``; the last one, settled, lowers the error of no problem by more than ``tolerance`` of it.

    A problem whose squared error falls by no more than ``least`` counts as settled too.
    """
    xp, index, settled = namespace(state.error), 0, False
    length = xp.ones_like(state.error)
    while not settled:
        # Descent 1: every block of the out side, then of the in side, each at its own minimum.
        before, state = state, problem.sweep(state)
        # Descent 2: now and then one step farther the way the sweep went, kept where the error
        # falls.
        if index % EVERY == 1:
            state, length = extrapolated(problem, before, state, length)
        # Descent 3: enough when the second sweep or a later one gained little everywhere.
        little = before.error - state.error <= tolerance * before.error
        if least > 0.0:
            little = xp.logical_or(little, before.error**2 - state.error**2 <= least)
        settled = index > 0 and bool(xp.all(little))
        yield Step(state, None, settled=settled)
        index += 1


def descend(
    problem: PairProblem, state: PairState, sweeps: int, tolerance: float = 1e-4, least: float = 0.0
) -> PairState:
    """Where at most so many `steps` come to."""
    for step in islice(steps(problem, state, tolerance, least), sweeps):
        state = step.state
    return state


def extrapolated(
    problem: PairProblem, before: PairState, after: PairState, length: Array
) -> tuple[PairState, Array]:
    """One more step in the direction of the last sweep, kept where the error falls; longer next time if it did [1]_.

    .. [1] R. Bro, Multi-way analysis in the food industry, 1998, section 4.4, line search in
           alternating least squares.
    """
    xp = namespace(length)
    out, into = (
        [new + length[:, None, None] * (new - old) for old, new in zip(*side, strict=True)]
        for side in zip(before.pair, after.pair, strict=True)
    )
    trial = problem.state((out, into))
    better = trial.error < after.error
    grown = xp.where(
        better, LENGTHEN * length, xp.maximum(length / LENGTHEN**3, xp.ones_like(length))
    )
    return PairState.chosen(better, trial, after), grown
