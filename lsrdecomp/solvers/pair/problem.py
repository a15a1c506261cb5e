"""A batch of joint least squares problems: its energy, its start, one sweep over both sides."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from lsrdecomp.arrays import Array, as_double, namespace
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.solvers.batched_terms import (
    Stacks,
    chosen,
    identity_like,
    safe_ratio,
    scaled,
    summed,
    term_norms,
)
from lsrdecomp.solvers.pair.block_update import Side
from lsrdecomp.solvers.pair.initialization import first_factor_fastest, gauge_transforms, orthogonal_terms, side_terms
from lsrdecomp.solvers.pair.partial_traces import PartialTraces, along_rows, kron_apply
from lsrdecomp.targets.weighted import pair_norms, pair_residual_norms, weighted_triangles
from lsrdecomp.targets.weights import Identity, NormWeights, Weight

Pair = tuple[Stacks, Stacks]

RESOLUTION = 1e-7
"""Relative error below which inner products in double precision tell nothing."""

EXACT = 0.03
"""Relative error above which inner products in double precision give it to twelve digits, unless large terms cancel."""


@dataclass(frozen=True, slots=True)
class View:
    """A side X formed, as the other side sees it."""

    gram: Array  # XᵀWX, (L, r, r)
    cross: Array  # cross term: Xᵀ against the target's own side in the norm, (L, R, r)
    norm: Array  # ‖X‖_F, (L,)

    def scaled(self, factor: Array) -> View:
        """Of the side multiplied by (L,) positive numbers."""
        each = factor[:, None, None]
        return View(each**2 * self.gram, each * self.cross, factor * self.norm)

    @staticmethod
    def chosen(condition: Array, first: View, second: View) -> View:
        """``first`` for the problems where ``condition`` (L,) holds, ``second`` elsewhere."""
        sides = ([view.gram, view.cross, view.norm] for view in (first, second))
        return View(*chosen(condition, *sides))


@dataclass(frozen=True, slots=True)
class State:
    """A pair with both sides of equal norm, where its in side stands and how far the product is from the target."""

    pair: Pair
    into: View
    error: Array  # ‖G^½(PQ − B̂Â)C^½‖ from inner products, exact to `RESOLUTION`; (L,)

    @staticmethod
    def chosen(condition: Array, first: State, second: State) -> State:
        """``first`` for the problems where ``condition`` (L,) holds, ``second`` elsewhere."""
        sides = [chosen(condition, *each) for each in zip(first.pair, second.pair, strict=True)]
        error = chosen(condition, [first.error], [second.error])[0]
        return State((sides[0], sides[1]), View.chosen(condition, first.into, second.into), error)


@dataclass(frozen=True, slots=True)
class Sight:
    """Targets as the norm sees them, whatever the shape."""

    weighted_left: Array  # G P
    weighted_right: Array  # C Qᵀ, (L, n, R)
    energy: Array  # ‖G^½ P Q C^½‖², (L,)
    known: dict[tuple[int, tuple[int, ...]], PartialTraces] = field(default_factory=dict)  # by side and its split

    @classmethod
    def of(cls, pair: tuple[Array, Array], triangles: tuple[Array, Array], norms: NormWeights) -> Sight:
        """Of targets P Q and the R of thin QR factorizations of P and Qᵀ."""
        (left, right), xp = pair, namespace(*pair)
        size = _norm(triangles) if norms.is_frobenius else pair_norms(left, right, norms)
        return cls(norms.output.apply(left), norms.input.apply(xp.matrix_transpose(right)), size**2)

    def traces(self, which: int, weight: Weight, sizes: tuple[int, ...]) -> PartialTraces:
        """Partial traces of the weight of a side at a split of it, which shapes share."""
        key = which, sizes
        if key not in self.known:
            self.known[key] = PartialTraces.of(weight, sizes, self.weighted_left)
        return self.known[key]


@dataclass(frozen=True, slots=True)
class PairProblem:
    """A batch of targets with what does not change from sweep to sweep."""

    left: Array  # P, (L, m, R)
    right: Array  # Q, (L, R, n)
    triangles: tuple[Array, Array]  # R of thin QR factorizations of P and Qᵀ
    weighted_left: Array  # G P
    weighted_right: Array  # C Qᵀ, (L, n, R)
    energy: Array  # ‖G^½ P Q C^½‖², (L,)
    shape: ProductShape
    norms: NormWeights
    out_side: Side
    in_side: Side
    ridge: float

    @classmethod
    def of(
        cls,
        pair: tuple[Array, Array],
        triangles: tuple[Array, Array],
        shape: ProductShape,
        norms: NormWeights,
        cg_steps: int,
        ridge: float,
        sight: Sight | None = None,
    ) -> PairProblem:
        """Of targets P Q and the R of thin QR factorizations of P and Qᵀ; their sight in the norm, if it is known."""
        left, right = pair
        sight = sight or Sight.of(pair, triangles, norms)
        out_side, in_side = (
            Side.of(side, weight, cg_steps, ridge, sight.traces(which, weight, side.rows))
            for which, side, weight in ((0, shape.left, norms.output), (1, shape.right.transposed, norms.input))
        )
        seen = sight.weighted_left, sight.weighted_right, sight.energy
        return cls(left, right, triangles, *seen, shape, norms, out_side, in_side, ridge)

    @property
    def fits_single(self) -> bool:
        """Whether single precision holds the targets' numbers, and the ratios of their sizes."""
        xp = namespace(self.left)
        sizes = xp.concat([xp.linalg.matrix_norm(triangle) for triangle in self.triangles] + [self.energy**0.5])
        return bool(xp.all((sizes == 0) | ((sizes > 1e-12) & (sizes < 1e12))))

    def single(self) -> PairProblem:
        """The same in single precision, targets of norm one; in the Frobenius norm, where it `fits_single`."""
        xp = namespace(self.left)
        length = xp.linalg.matrix_norm(self.triangles[0])
        scales = safe_ratio(xp.ones_like(length), length), safe_ratio(length, xp.sqrt(self.energy))
        left, right, *triangles = (xp.astype(x, xp.float32) for x in (self.left, self.right, *self.triangles))
        for array, scale in zip((left, right, *triangles), 2 * scales, strict=True):
            array *= xp.astype(scale, xp.float32)[:, None, None]  # in place: the copies are our own
        cg_steps = self.out_side.cg_steps
        return PairProblem.of((left, right), (triangles[0], triangles[1]), self.shape, self.norms, cg_steps, self.ridge)

    @property
    def _sides(self) -> tuple[Side, Side]:
        return self.out_side, self.in_side

    def to_single(self, pair: Pair) -> Pair:
        """A pair of this problem as one of `single`."""
        xp, size = namespace(self.left), self.energy**0.25
        size = xp.where(size > 0, size, xp.ones_like(size))
        sides = [[xp.astype(stack, xp.float32) for stack in scaled(side, 1.0 / size)] for side in pair]
        return sides[0], sides[1]

    def from_single(self, pair: Pair) -> Pair:
        """A pair of `single` as one of this problem."""
        sides = [scaled([as_double(stack) for stack in side], self.energy**0.25) for side in pair]
        return sides[0], sides[1]

    def starts(self, ranks: tuple[int, int], most: int) -> list[Pair]:
        """Orthogonal terms of each side in a gauge of the pair: two ways in the Frobenius norm, four in a weighted one.

        The components of the Frobenius gauge run `first_factor_fastest` or last factor fastest. With weights the
        gauge is that of the norm or the Frobenius gauge, the sides whitened by the weights' partial traces or not.
        """
        rank, inner = self.shape.inner_rank, self.shape.inner
        if self.norms.is_frobenius:
            transforms = gauge_transforms(self.triangles, rank)
            ways = [
                ((first_factor_fastest(transforms[0], inner), first_factor_fastest(transforms[1], inner)), False),
                (transforms, False),
            ]
            most = min(most, 1) if max(inner) == rank else most  # the two are the same
        else:
            gauges = weighted_triangles(self.left, self.right, self.norms), self.triangles
            ways = [(gauge_transforms(triangles, rank), white) for triangles in gauges for white in (True, False)]
        return [self._start(transforms, white, ranks) for transforms, white in ways[:most]]

    def _start(self, transforms: tuple[Array, Array], white: bool, ranks: tuple[int, int]) -> Pair:
        given = self.left, namespace(self.right).matrix_transpose(self.right)
        sides = zip(given, transforms, self._sides, ranks, strict=True)
        out, into = (
            side_terms(x, transform, side.shape, k, side.traces if white else None) for x, transform, side, k in sides
        )
        return out, into

    def best_start(self, starts: list[Pair], trials: int) -> tuple[State, Array, Array]:
        """Of several starts, the one that is nearest after ``trials`` sweeps, problem by problem.

        Returns
        -------
        State, Array, Array
            Where it has come to (a single start is returned as it is), its error and that of the nearest start.
        """
        xp = namespace(self.left)
        states = [self.state(start) for start in starts]
        if len(states) == 1:
            error = self.errors(states[0])
            return states[0], error, error
        errors = [self.errors(state) for state in states]
        best, reached, nearest = states[0], errors[0], errors[0]
        for state, begun in zip(states, errors, strict=True):
            nearest = xp.minimum(nearest, begun)
            contenders = [(state, begun)]
            if trials > 0:
                for _ in range(trials):
                    state = self.sweep(state)
                contenders.append((state, xp.maximum(state.error, RESOLUTION * xp.sqrt(self.energy))))
            for contender, error in contenders:
                nearer = error < reached
                best = State.chosen(nearer, contender, best)
                reached = xp.where(nearer, error, reached)
        return best, self.errors(best), nearest

    def state(self, pair: Pair) -> State:
        """Where a pair stands, both sides brought to equal norms; the product stays."""
        return self._state(pair, *(self._view(pair, side) for side in (0, 1)))

    def sweep(self, state: State, fixed: tuple[Container[int], Container[int]] = ((), ())) -> State:
        """Every block of both sides once but those ``fixed``."""
        (out_stacks, in_stacks), into = state.pair, state.into
        gram = self._regularized(into.gram, in_stacks, self.in_side)
        cross = _by_columns(self.weighted_left, into.cross)
        out_stacks, inside = self.out_side.update(out_stacks, gram, cross, fixed[0])
        outer = self._view((out_stacks, in_stacks), 0, inside)
        gram = self._regularized(outer.gram, out_stacks, self.out_side)
        cross = _by_columns(self.weighted_right, outer.cross)
        in_stacks, inside = self.in_side.update(in_stacks, gram, cross, fixed[1])
        pair = out_stacks, in_stacks
        return self._state(pair, outer, self._view(pair, 1, inside))

    def extended(self, state: State, which: int, more: int) -> State:
        """With ``more`` terms on one side: the largest of its gradient, measured in the norm; then all terms rescaled.

        The step of each term is the best for all terms of the side together, so the error does not rise.
        """
        pair: Pair = (list(state.pair[0]), list(state.pair[1]))
        other = state.into if which == 0 else self._view(pair, 0)
        side, given = self._sides[which], (self.weighted_left, self.weighted_right)[which]
        formed = summed(pair[which], side.shape)
        gradient = given @ other.cross - side.weight.apply(formed) @ other.gram
        _, inverses = side.traces.roots
        white = rearrange(kron_apply(inverses, gradient, side.shape.rows), side.shape)
        fresh, xp = along_rows(orthogonal_terms(white, more), inverses), namespace(self.left)
        length = safe_ratio(xp.mean(term_norms(pair[which]), axis=1, keepdims=True), term_norms(fresh))
        fresh[0] = fresh[0] * length[:, None, :]  # of the size of the others, so that one damping suits all
        wider = [xp.concat([old, new], axis=2) for old, new in zip(pair[which], fresh, strict=True)]
        pair = (wider, pair[1]) if which == 0 else (pair[0], wider)
        best = side.scaled(wider, other.gram, given @ other.cross)
        return self.state((best, pair[1]) if which == 0 else (pair[0], best))

    def scaled(self, pair: Pair) -> Pair:
        """Each term of the out side, then of the in side, times the number that serves best."""
        into = self._view(pair, 1)
        out_stacks = self.out_side.scaled(pair[0], into.gram, self.weighted_left @ into.cross)
        outer = self._view((out_stacks, pair[1]), 0)
        return out_stacks, self.in_side.scaled(pair[1], outer.gram, self.weighted_right @ outer.cross)

    def errors(self, state: State) -> Array:
        """‖G^½(PQ − B̂Â)C^½‖ of each problem: as the state has it if all are above `EXACT`, or measured anew."""
        xp = namespace(self.left)
        if bool(xp.all(state.error > EXACT * xp.sqrt(self.energy))):
            return state.error
        outer, inner = (summed(x, side.shape) for x, side in zip(state.pair, self._sides, strict=True))
        return pair_residual_norms(self.left, self.right, outer, xp.matrix_transpose(inner), self.norms)

    def _view(self, pair: Pair, which: int, inside: Array | None = None) -> View:
        side, given = self._sides[which], (self.weighted_left, self.weighted_right)[which]
        xp, formed = namespace(given), summed(pair[which], side.shape)
        gram = side.gram(pair[which], formed, inside)
        own = isinstance(side.weight, Identity)
        norm = xp.sqrt(xp.linalg.trace(gram)) if own else xp.linalg.matrix_norm(formed)
        return View(gram, xp.matrix_transpose(given) @ formed, norm)

    def _state(self, pair: Pair, outer: View, into: View) -> State:
        xp = namespace(self.left)
        overlap, both = xp.sum(outer.cross * into.cross, axis=(1, 2)), xp.sum(outer.gram * into.gram, axis=(1, 2))
        energy = self.energy - 2.0 * overlap + both
        error = xp.sqrt(xp.where(energy > 0, energy, xp.zeros_like(energy)))
        positive = xp.logical_and(outer.norm > 0, into.norm > 0)
        ratio = xp.where(positive, xp.sqrt(safe_ratio(into.norm, outer.norm)), xp.ones_like(error))
        ratio = xp.where(ratio > 0, ratio, xp.ones_like(ratio))
        return State((scaled(pair[0], ratio), scaled(pair[1], 1.0 / ratio)), into.scaled(1.0 / ratio), error)

    def _regularized(self, gram: Array, stacks: Stacks, side: Side) -> Array:
        """The other side's rounding, ridge · Σλ² · mean(W) / r in every inner direction, added to its Gram matrix."""
        if self.ridge == 0.0:
            return gram
        xp, r = namespace(gram), gram.shape[1]
        amount = self.ridge * xp.sum(term_norms(stacks) ** 2, axis=1) * side.traces.mean / r
        return gram + amount[:, None, None] * identity_like(gram)


def _by_columns(x: Array, y: Array) -> Array:
    """x y as the transpose of an array that lies column by column, as `contraction` reads it."""
    xp = namespace(x, y)
    return xp.matrix_transpose(xp.matrix_transpose(y) @ xp.matrix_transpose(x))


def _norm(triangles: tuple[Array, Array]) -> Array:
    xp = namespace(*triangles)
    return xp.linalg.matrix_norm(triangles[0] @ xp.matrix_transpose(triangles[1]))
