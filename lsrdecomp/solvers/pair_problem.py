"""A batch of joint least squares problems: its energy, its start, one sweep over both sides."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from lsrdecomp.arrays import Array, namespace
from lsrdecomp.shape import ProductShape
from lsrdecomp.solvers.batched import Stacks, chosen, identity_like, safe_ratio, scaled, summed, term_norms
from lsrdecomp.solvers.pair_blocks import Side
from lsrdecomp.solvers.pair_start import along_the_first, gauge_turns, side_terms
from lsrdecomp.weighted import pair_norms, pair_residual_norms
from lsrdecomp.weights import Identity, NormWeights, Weight

Pair = tuple[Stacks, Stacks]

RESOLUTION = 1e-7
"""Relative error below which inner products in double precision tell nothing."""


@dataclass(frozen=True, slots=True)
class PairProblem:
    """A batch of targets with what does not change from sweep to sweep."""

    left: Array  # P, (L, m, R)
    right: Array  # Q, (L, R, n)
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
        cls, left: Array, right: Array, shape: ProductShape, norms: NormWeights, cg_steps: int, ridge: float
    ) -> PairProblem:
        xp = namespace(left, right)
        sides = [
            Side.of(side, weight, cg_steps, ridge, left)
            for side, weight in ((shape.left, norms.output), (shape.right.transposed, norms.input))
        ]
        return cls(
            left,
            right,
            norms.output.apply(left),
            norms.input.apply(xp.matrix_transpose(right)),
            pair_norms(left, right, norms) ** 2,
            shape,
            norms,
            sides[0],
            sides[1],
            ridge,
        )

    def starts(self, ranks: tuple[int, int]) -> list[Pair]:
        """Orthogonal terms of each side in a gauge of the pair: one, or four in a weighted norm.

        The gauge of the norm and the Frobenius gauge, the sides whitened by the weights' partial traces or not. In the
        Frobenius norm the components run `along_the_first` inner factor.
        """
        r = self.shape.inner_rank
        plain = NormWeights.frobenius(self.shape.matrix_shape)
        found: list[Pair] = []
        given = self.left, namespace(self.right).matrix_transpose(self.right)
        for gauge in [plain] if self.norms.is_frobenius else [self.norms, plain]:
            turns = gauge_turns(self.left, self.right, r, gauge)
            if self.norms.is_frobenius:
                turns = along_the_first(turns[0], self.shape.inner), along_the_first(turns[1], self.shape.inner)
            for white in (False,) if self.norms.is_frobenius else (True, False):
                sides = zip(given, turns, (self.out_side, self.in_side), ranks, strict=True)
                out, into = (
                    side_terms(x, turn, side.shape, k, side.traces if white else None) for x, turn, side, k in sides
                )
                found.append((out, into))
        return found

    def best_start(self, starts: list[Pair], trials: int) -> tuple[Pair, Array, Array]:
        """Of several starts, the one that is nearest after ``trials`` sweeps, problem by problem.

        Returns
        -------
        Pair, Array, Array
            The pair reached (a single start is returned as it is), its error and that of the nearest start.
        """
        xp = namespace(self.left)
        if len(starts) == 1:
            error = self.errors(starts[0])
            return starts[0], error, error
        errors = [self.errors(start) for start in starts]
        best, reached, nearest = starts[0], errors[0], errors[0]
        for start, begun in zip(starts, errors, strict=True):
            nearest = xp.minimum(nearest, begun)
            contenders = [(start, begun)]
            if trials > 0:
                pair, steering = self.even(start), begun
                for _ in range(trials):
                    pair, steering = self.sweep(pair)
                contenders.append((pair, xp.maximum(steering, RESOLUTION * xp.sqrt(self.energy))))
            for contender, error in contenders:
                nearer = error < reached
                best = chosen(nearer, contender[0], best[0]), chosen(nearer, contender[1], best[1])
                reached = xp.where(nearer, error, reached)
        return best, self.errors(best), nearest

    def sweep(self, pair: Pair, fixed: tuple[Container[int], Container[int]] = ((), ())) -> tuple[Pair, Array]:
        """Every block of both sides once but those ``fixed``; the new pair, the square root of its steering energy."""
        xp = namespace(self.left)
        out_stacks, in_stacks = pair
        inner = summed(in_stacks, self.in_side.shape)  # Âᵀ
        gram = self._penalised(_gram(inner, self.norms.input), in_stacks, self.in_side)
        seen = xp.matrix_transpose(self.weighted_right) @ inner
        del inner
        out_stacks = self.out_side.update(out_stacks, gram, _by_columns(self.weighted_left, seen), fixed[0])

        outer = summed(out_stacks, self.out_side.shape)  # B̂
        gram = _gram(outer, self.norms.output)
        out_norm = _norms(outer, gram, self.norms.output)
        seen = xp.matrix_transpose(self.weighted_left) @ outer
        del outer
        penalised = self._penalised(gram, out_stacks, self.out_side)
        in_stacks = self.in_side.update(in_stacks, penalised, _by_columns(self.weighted_right, seen), fixed[1])

        inner = summed(in_stacks, self.in_side.shape)
        overlap = xp.sum(seen * (xp.matrix_transpose(self.weighted_right) @ inner), axis=(1, 2))
        in_gram = _gram(inner, self.norms.input)
        in_norm = _norms(inner, in_gram, self.norms.input)
        return _even((out_stacks, in_stacks), out_norm, in_norm), self._energy(overlap, gram, in_gram)

    def scaled(self, pair: Pair) -> Pair:
        """Each term of the out side, then of the in side, times the number that serves best."""
        xp, (out_stacks, in_stacks) = namespace(self.left), pair
        inner = summed(in_stacks, self.in_side.shape)
        seen = xp.matrix_transpose(self.weighted_right) @ inner
        out_stacks = self.out_side.scaled(out_stacks, _gram(inner, self.norms.input), self.weighted_left @ seen)
        outer = summed(out_stacks, self.out_side.shape)
        seen = xp.matrix_transpose(self.weighted_left) @ outer
        in_stacks = self.in_side.scaled(in_stacks, _gram(outer, self.norms.output), self.weighted_right @ seen)
        return out_stacks, in_stacks

    def steering(self, pair: Pair) -> Array:
        """‖G^½(PQ − B̂Â)C^½‖ of each problem from inner products: cheap, and exact to `RESOLUTION`."""
        xp = namespace(self.left)
        seen, grams = [], []
        for stacks, side, given in zip(
            pair, (self.out_side, self.in_side), (self.weighted_left, self.weighted_right), strict=True
        ):
            formed = summed(stacks, side.shape)
            seen.append(xp.matrix_transpose(given) @ formed)
            grams.append(_gram(formed, side.weight))
        return self._energy(xp.sum(seen[0] * seen[1], axis=(1, 2)), grams[0], grams[1])

    def _energy(self, overlap: Array, out_gram: Array, in_gram: Array) -> Array:
        xp = namespace(overlap)
        energy = self.energy - 2.0 * overlap + xp.sum(out_gram * in_gram, axis=(1, 2))
        return xp.sqrt(xp.where(energy > 0, energy, xp.zeros_like(energy)))

    def even(self, pair: Pair) -> Pair:
        """Both sides with equal Frobenius norms; the product stays."""
        sides = zip(pair, (self.out_side, self.in_side), strict=True)
        return _even(pair, *(namespace(self.left).linalg.matrix_norm(summed(x, side.shape)) for x, side in sides))

    def errors(self, pair: Pair) -> Array:
        """‖G^½(PQ − B̂Â)C^½‖ of each problem, from formed residuals."""
        xp = namespace(self.left)
        outer, inner = summed(pair[0], self.out_side.shape), summed(pair[1], self.in_side.shape)
        return pair_residual_norms(self.left, self.right, outer, xp.matrix_transpose(inner), self.norms)

    def _penalised(self, gram: Array, stacks: Stacks, side: Side) -> Array:
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


def _gram(formed: Array, weight: Weight) -> Array:
    return namespace(formed).matrix_transpose(formed) @ weight.apply(formed)


def _norms(formed: Array, gram: Array, weight: Weight) -> Array:
    """‖X‖_F of each side, from its Gram matrix where that is XᵀX."""
    xp = namespace(gram)
    return xp.sqrt(xp.linalg.trace(gram)) if isinstance(weight, Identity) else xp.linalg.matrix_norm(formed)


def _even(pair: Pair, out_norm: Array, in_norm: Array) -> Pair:
    xp = namespace(out_norm)
    positive = xp.logical_and(out_norm > 0, in_norm > 0)
    ratio = xp.where(positive, xp.sqrt(safe_ratio(in_norm, out_norm)), xp.ones_like(out_norm))
    ratio = xp.where(ratio > 0, ratio, xp.ones_like(ratio))
    return scaled(pair[0], ratio), scaled(pair[1], 1.0 / ratio)
