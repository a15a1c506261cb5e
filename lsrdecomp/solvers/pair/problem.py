"""A batch of joint least squares problems of one shape: its starts, sweeps, and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lsrdecomp.arrays import Array, as_double, dtype_name, namespace
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.precision import unit_roundoff
from lsrdecomp.solvers.batched_terms import safe_ratio, scaled, select, term_norms, to_matrices
from lsrdecomp.solvers.pair.block_update import CG_STEPS, Side
from lsrdecomp.solvers.pair.initialization import (
    as_factors,
    first_factor_fastest,
    gauge_transforms,
    orthogonal_terms,
    side_terms,
)
from lsrdecomp.solvers.pair.partial_traces import apply_to_rows, kron_apply
from lsrdecomp.solvers.pair.stacking import Pair, WeightedTargets, start_pair
from lsrdecomp.targets.weighted import pair_residual_norms, weighted_triangles
from lsrdecomp.targets.weights import Identity

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from lsrdecomp.kronecker.product import SeparatedProduct
    from lsrdecomp.kronecker.shape import ProductShape
    from lsrdecomp.solvers.batched_terms import Stacks

RESOLUTION = 1e-7
"""Relative error below which inner products tell nothing, about the root of the unit roundoff:
their three summands carry sixteen digits, of which cancellation takes twice as many as the relative
error has zeros."""


@dataclass(frozen=True, slots=True)
class SideMoments:
    """The figures of a side X that the other side's problem needs."""

    gram: Array  # XᵀWX, (L, r, r)
    cross: Array  # Xᵀ against the target's own side in the norm, (L, R, r)
    norm: Array  # ‖X‖_F, (L,)

    def scaled(self, factor: Array) -> SideMoments:
        """Return the moments of the side multiplied by (L,) positive numbers."""
        factors = factor[:, None, None]
        return SideMoments(factors**2 * self.gram, factors * self.cross, factor * self.norm)


@dataclass(frozen=True, slots=True)
class PairState:
    """A pair with both sides of equal norm, and its distance from the target."""

    pair: Pair
    input_moments: SideMoments
    # ‖G^½(PQ − B̂Â)C^½‖ from inner products, (L,); see `RESOLUTION` for its digits
    error: Array

    @staticmethod
    def select(condition: Array, first: PairState, second: PairState) -> PairState:
        """Take ``first`` for the problems where ``condition`` (L,) holds, ``second`` elsewhere."""
        output = select(condition, first.pair[0], second.pair[0])
        input_ = select(condition, first.pair[1], second.pair[1])
        gram, cross, norm, error = select(condition, first._figures(), second._figures())
        return PairState((output, input_), SideMoments(gram, cross, norm), error)

    def _figures(self) -> list[Array]:
        moments = self.input_moments
        return [moments.gram, moments.cross, moments.norm, self.error]


@dataclass(frozen=True, slots=True)
class PairProblem:
    """Targets of a batch at one shape, with all that does not change from sweep to sweep."""

    targets: WeightedTargets
    shape: ProductShape
    sides: tuple[Side, Side]  # the output side's part and the input side's

    @classmethod
    def of(
        cls, targets: WeightedTargets, shape: ProductShape, cg_steps: int = CG_STEPS
    ) -> PairProblem:
        """Prepare the problem at a shape: partial traces and eigenpairs of its weights."""
        norms = targets.norms
        sides = []
        for which, side, weight in (
            (0, shape.left, norms.output),
            (1, shape.right.transposed, norms.input),
        ):
            traces = targets.traces(which, weight, side.rows)
            sides.append(Side.of(side, weight, cg_steps, traces))
        return cls(targets, shape, (sides[0], sides[1]))

    @property
    def fits_single(self) -> bool:
        """Whether single precision holds the targets' numbers, and the ratios of their sizes."""
        xp = namespace(self.targets.left)
        energy = self.targets.energy
        norms = [xp.linalg.matrix_norm(triangle) for triangle in self.targets.triangles]
        norms = xp.concat([*norms, energy**0.5])
        return bool(xp.all((norms == 0) | ((norms > 1e-12) & (norms < 1e12))))

    def single(self) -> PairProblem:
        """Return the problem in single precision with targets of norm one.

        For the Frobenius norm, where the problem `fits_single`.
        """
        targets = self.targets
        xp = namespace(targets.left)
        # P is divided by its own norm, Q multiplied by it and divided by that of the product.
        left_norm = xp.linalg.matrix_norm(targets.triangles[0])
        left_scale = safe_ratio(xp.ones_like(left_norm), left_norm)
        right_scale = safe_ratio(left_norm, xp.sqrt(targets.energy))

        def in_single(array: Array, scale: Array) -> Array:
            copy = xp.astype(array, xp.float32)
            copy *= xp.astype(scale, xp.float32)[:, None, None]  # in place: the copy is our own
            return copy

        sides = in_single(targets.left, left_scale), in_single(targets.right, right_scale)
        triangles = (
            in_single(targets.triangles[0], left_scale),
            in_single(targets.triangles[1], right_scale),
        )
        targets = WeightedTargets.of_arrays(sides, triangles, targets.norms)
        return PairProblem.of(targets, self.shape, self.sides[0].cg_steps)

    @property
    def _weighted(self) -> tuple[Array, Array]:
        """G P and C Qᵀ: the arrays that the cross term of each side is taken with."""
        return self.targets.weighted_left, self.targets.weighted_right

    def to_single(self, pair: Pair) -> Pair:
        """Convert a pair of this problem to one of `single`."""
        xp = namespace(self.targets.left)
        size = self.targets.energy**0.25
        size = xp.where(size > 0, size, xp.ones_like(size))

        def in_single(side: Stacks) -> Stacks:
            return [xp.astype(stack, xp.float32) for stack in scaled(side, 1.0 / size)]

        return in_single(pair[0]), in_single(pair[1])

    def from_single(self, pair: Pair) -> Pair:
        """Convert a pair of `single` to one of this problem."""
        size = self.targets.energy**0.25
        sides = [scaled([as_double(stack) for stack in side], size) for side in pair]
        return sides[0], sides[1]

    def starts(self, ranks: tuple[int, int], max_starts: int) -> list[Pair]:
        """Make starts of orthogonal terms: up to two in the Frobenius norm, four in a weighted one.

        The components of the Frobenius gauge run `first_factor_fastest` or last factor fastest.
        With weights the gauge is that of the norm or the Frobenius gauge, the sides whitened by the
        weights' partial traces or not.
        """
        if self.targets.norms.is_frobenius:
            gauges = self._frobenius_gauges()
        else:
            gauges = self._weighted_gauges()
        return [
            self._start(transforms, whitened, ranks) for transforms, whitened in gauges[:max_starts]
        ]

    def _frobenius_gauges(self) -> list[tuple[tuple[Array, Array], bool]]:
        """Return transforms of both sides into a gauge, and whether sides are whitened: never."""
        rank = self.shape.inner_rank
        inner = self.shape.inner
        last_fastest = gauge_transforms(self.targets.triangles, rank)
        first_fastest = (
            first_factor_fastest(last_fastest[0], inner),
            first_factor_fastest(last_fastest[1], inner),
        )
        if max(inner) == rank:  # one order, and so one gauge
            return [(first_fastest, False)]
        return [(first_fastest, False), (last_fastest, False)]

    def _weighted_gauges(self) -> list[tuple[tuple[Array, Array], bool]]:
        """Return transforms of both sides into a gauge, and whether sides are whitened."""
        targets = self.targets
        gauges = []
        for triangles in (
            weighted_triangles(targets.left, targets.right, targets.norms),
            targets.triangles,
        ):
            transforms = gauge_transforms(triangles, self.shape.inner_rank)
            gauges += [(transforms, True), (transforms, False)]
        return gauges

    def _start(
        self, transforms: tuple[Array, Array], whitened: bool, ranks: tuple[int, int]
    ) -> Pair:
        right = self.targets.right
        arrays = self.targets.left, namespace(right).matrix_transpose(right)
        pair = []
        for array, transform, side, rank in zip(arrays, transforms, self.sides, ranks, strict=True):
            traces = side.traces if whitened else None
            pair.append(side_terms(array, transform, side.shape, rank, traces))
        return pair[0], pair[1]

    def best_start(self, starts: list[Pair], trials: int) -> tuple[PairState, Array, Array]:
        """Select, problem by problem, the start that is nearest after ``trials`` sweeps.

        Returns
        -------
        PairState
            Its state after the trials; a single start is returned as it is.
        Array, shape (L,)
            Its error.
        Array, shape (L,)
            The error of the nearest start, before any sweep.
        """
        xp = namespace(self.targets.left)
        # Start 1: the error of each start.
        states = [self.state(start) for start in starts]
        if len(states) == 1:
            error = self.errors(states[0])
            return states[0], error, error
        errors = [self.errors(state) for state in states]
        best = states[0]
        best_error = errors[0]
        start_error = errors[0]
        # Start 2: every start and the state after a few sweeps from it; the nearest of all so far.
        resolution = RESOLUTION * xp.sqrt(self.targets.energy)
        for state, initial_error in zip(states, errors, strict=True):
            start_error = xp.minimum(start_error, initial_error)
            contenders = [(state, initial_error)]
            if trials > 0:
                swept = state
                for _ in range(trials):
                    swept = self.sweep(swept)
                contenders.append((swept, xp.maximum(swept.error, resolution)))
            for contender, error in contenders:
                is_nearer = error < best_error
                best = PairState.select(is_nearer, contender, best)
                best_error = xp.where(is_nearer, error, best_error)
        return best, self.errors(best), start_error

    def state(self, pair: Pair) -> PairState:
        """Balance the norms of a pair's sides, which leaves the product, and compute its error."""
        return self._joined(pair, self._moments(pair, 0), self._moments(pair, 1))

    def sweep(
        self, state: PairState, fixed: tuple[Container[int], Container[int]] = ((), ())
    ) -> PairState:
        """Update every block of both sides once but those ``fixed``.

        No error rises above the resolution of inner products.
        """
        pair = list(state.pair)
        other = state.input_moments
        moments = []
        # Sweep 1: the output side, block by block, against the Gram matrix H and the cross term K
        # of the input side; then the input side against those of the new output side.
        for which, side in enumerate(self.sides):
            cross = _by_columns(self._weighted[which], other.cross)
            pair[which], projection = side.update(pair[which], other.gram, cross, fixed[which])
            other = self._moments((pair[0], pair[1]), which, projection)
            moments.append(other)
        # Sweep 2: both sides of equal norm, and the error from the inner products at hand.
        swept = self._joined((pair[0], pair[1]), *moments)
        # Sweep 3: where H is singular a side may grow along it without end, until H's rounding,
        # times the square of that side, outweighs what a sweep gains. Such a problem stays where it
        # was.
        xp = namespace(other.gram)
        size = xp.sqrt(self.targets.energy)
        roundoff = unit_roundoff(dtype_name(other.gram))
        resolution = RESOLUTION * (roundoff / unit_roundoff("float64")) ** 0.5
        has_risen = swept.error > state.error + resolution * size
        if not bool(xp.any(has_risen)):
            return swept
        return PairState.select(has_risen, state, swept)

    def from_products(
        self, products: Sequence[SeparatedProduct], ranks: tuple[int, int]
    ) -> PairState:
        """Begin at known products with at most these terms; missing terms grow as in `grown`."""
        output_ranks, input_ranks = zip(*(p.separation_ranks for p in products), strict=True)
        widest = max(output_ranks), max(input_ranks)
        pair = self.targets.placed(start_pair(products, self.shape, widest, len(products)))
        return self.grown(self.state(pair), ranks)

    def grown(self, state: PairState, ranks: tuple[int, int]) -> PairState:
        """Add terms: the leading ones of each side's gradient in the norm, at the best length."""
        for which, rank in enumerate(ranks):
            missing = rank - int(state.pair[which][0].shape[2])
            if missing > 0:
                state = self._extended(state, which, missing)
        return state

    def _extended(self, state: PairState, which: int, n_new: int) -> PairState:
        """Add ``n_new`` terms to one side: the largest of its gradient, measured in the norm.

        Then every term of the side is multiplied by the number that is best for all of them
        together, so that the error does not rise.
        """
        pair: Pair = (list(state.pair[0]), list(state.pair[1]))
        other = state.input_moments if which == 0 else self._moments(pair, 0)
        side = self.sides[which]
        cross = self._weighted[which] @ other.cross
        # Extended 1: the gradient K − W X H, whitened by the weight's partial traces, and its
        # orthogonal terms.
        formed = to_matrices(pair[which], side.shape)
        gradient = cross - side.weight.apply(formed) @ other.gram
        _, inverse_roots = side.traces.roots
        whitened = rearrange(kron_apply(inverse_roots, gradient, side.shape.rows), side.shape)
        new_terms = orthogonal_terms(whitened, n_new)
        new_terms = apply_to_rows(new_terms, inverse_roots)
        # Extended 2: beside the present terms, of their mean size, so that one damping suits all.
        xp = namespace(self.targets.left)
        mean_norm = xp.mean(term_norms(pair[which]), axis=1, keepdims=True)
        length = safe_ratio(mean_norm, term_norms(new_terms))
        new_terms[0] = new_terms[0] * length[:, None, :]
        wider = []
        for old, new in zip(pair[which], new_terms, strict=True):
            wider.append(xp.concat([old, new], axis=2))
        # Extended 3: the best number for each term.
        best = side.with_best_scales(wider, other.gram, cross)
        return self.state((best, pair[1]) if which == 0 else (pair[0], best))

    def with_best_scales(self, pair: Pair) -> Pair:
        """Multiply each term of the output side, then of the input side, by its best number."""
        for which, side in enumerate(self.sides):
            other = self._moments(pair, 1 - which)
            cross = self._weighted[which] @ other.cross
            best = side.with_best_scales(pair[which], other.gram, cross)
            pair = (best, pair[1]) if which == 0 else (pair[0], best)
        return pair

    def errors(self, state: PairState) -> Array:
        """Return ‖G^½(PQ − B̂Â)C^½‖ of each problem.

        That of the state where inner products give twelve digits for all problems: errors are large
        and no large terms cancel, which would lose more than seven of their sixteen. Else measured
        anew.
        """
        xp = namespace(self.targets.left)
        size = xp.sqrt(self.targets.energy)
        means = self.sides[0].traces.mean * self.sides[1].traces.mean
        side_norms = state.input_moments.norm**2 * xp.sqrt(means)  # ‖B̂‖‖Â‖
        is_large = state.error > 0.03 * size
        is_stable = side_norms < 3e3 * size
        if bool(xp.all(is_large & is_stable)):
            return state.error
        output = to_matrices(state.pair[0], self.sides[0].shape)
        input_ = to_matrices(state.pair[1], self.sides[1].shape)
        targets = self.targets
        return pair_residual_norms(
            targets.left, targets.right, output, xp.matrix_transpose(input_), targets.norms
        )

    def factors(self, state: PairState) -> tuple[list[Array], list[Array]]:
        """Return the factors of both sides, each (L, s, m_i, r_i) or (L, t, r_i, n_i)."""
        output = as_factors(state.pair[0], self.shape.left)
        transposed = as_factors(state.pair[1], self.sides[1].shape)
        return output, [namespace(factor).matrix_transpose(factor) for factor in transposed]

    def _moments(self, pair: Pair, which: int, projection: Array | None = None) -> SideMoments:
        side = self.sides[which]
        weighted = self._weighted[which]
        xp = namespace(weighted)
        formed = to_matrices(pair[which], side.shape)
        gram = side.gram(pair[which], formed, projection)
        if isinstance(side.weight, Identity):
            norm = xp.sqrt(xp.linalg.trace(gram))
        else:
            norm = xp.linalg.matrix_norm(formed)
        return SideMoments(gram, xp.matrix_transpose(weighted) @ formed, norm)

    def _joined(self, pair: Pair, output: SideMoments, input_: SideMoments) -> PairState:
        """Join two sides of known moments: their error, and the sides scaled to equal norms."""
        xp = namespace(self.targets.left)
        overlap = xp.sum(output.cross * input_.cross, axis=(1, 2))
        square = xp.sum(output.gram * input_.gram, axis=(1, 2))
        squared_error = self.targets.energy - 2.0 * overlap + square
        error = xp.sqrt(xp.where(squared_error > 0, squared_error, xp.zeros_like(squared_error)))
        both_positive = xp.logical_and(output.norm > 0, input_.norm > 0)
        ratio = xp.sqrt(safe_ratio(input_.norm, output.norm))
        ratio = xp.where(both_positive, ratio, xp.ones_like(error))
        ratio = xp.where(ratio > 0, ratio, xp.ones_like(ratio))
        balanced = scaled(pair[0], ratio), scaled(pair[1], 1.0 / ratio)
        return PairState(balanced, input_.scaled(1.0 / ratio), error)


def _by_columns(x: Array, y: Array) -> Array:
    """Return x y as the transpose of an array in C order, as `contraction` reads it."""
    xp = namespace(x, y)
    return xp.matrix_transpose(xp.matrix_transpose(y) @ xp.matrix_transpose(x))
